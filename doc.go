// Package valkeyrdma is a net.Conn over RDMA for valkey-go, the official Go client of Valkey. One changed field, and every
// command travels by RDMA:
//
//	client, err := valkey.NewClient(valkey.ClientOption{
//		InitAddress: []string{"10.0.0.7:6378"},
//		DialCtxFn:   valkeyrdma.DialCtxFn,
//	})
//
// The server is a Valkey 8.0 or later built with RDMA (BUILD_RDMA=yes) and told to listen (rdma-bind, rdma-port). The device
// may be any that speaks RoCE or InfiniBand, or rdma_rxe, which does RDMA in software on any Ethernet device.
//
// # Limits
//
// RDMA needs Linux and cgo; elsewhere the package compiles and every dial fails with ErrUnsupported. libibverbs and librdmacm
// are opened at the first dial, so a program starts without them too, and gets ErrNoLibrary there.
// A connection locks about 1.3 MiB of memory, and another 1 MiB once 1 MiB of data has come in, besides what the device's
// driver locks for its queues; RLIMIT_MEMLOCK has to allow for it. There is no TLS, and a connection does not survive a fork.
//
// # Connections
//
// What DialCtxFn returns is a complete net.Conn: all methods may be called by several goroutines at once, deadlines can be
// set and moved at any time and a timeout loses nothing, and Close wakes whoever waits. No goroutine that waits holds a
// thread. Errors are described at the exported error values.
package valkeyrdma
