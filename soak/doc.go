// Command soak runs all that valkey-go does over RDMA, mixed, for as long as one likes: from 64 goroutines, against one server and a
// cluster of six that it starts itself, while it kills connections and servers and stops servers and itself for seconds. It
// checks every value that is read and every counter at the end, and that nothing is left when its clients are closed. Run it with
// "make soak"; docs/soak.md tells how to read what it prints.
package main
