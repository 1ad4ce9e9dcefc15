// Package e2e tests valkey-go over RDMA with whole set-ups: clusters, sentinels, servers that are killed under load, and each
// feature of the client that docs/features.md lists. It uses this library as a program does: through the public API only.
//
// The tests run inside the laboratory (scripts/lab); there is nothing else in this package.
package e2e
