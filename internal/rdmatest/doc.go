// Package rdmatest is the passive side of Valkey's protocol over RDMA, for tests: a server that a test drives step by
// step. It holds a client to what a real server's src/rdma.c asserts or refuses, and breaks the protocol itself on order.
//
// Listen starts a Server, whose Accept returns a Peer for each client. A Peer does nothing by itself: it has no
// goroutine, and takes completions only inside its calls. A server that sleeps is therefore one that a test does not
// call. What a client may not do becomes a *Violation, which every later call on the Peer returns; what it did is in
// Facts.
//
// There is something in this package on Linux with cgo only.
package rdmatest
