//go:build linux && cgo

package valkeyrdma

import (
	"net"
	"testing"
	"time"

	"github.com/valkeyrdma/valkeyrdma/internal/rdmatest"
	"golang.org/x/net/nettest"
)

// TestConn is the conformance test of net.Conn. The other end is a TCP connection, to which the fake server is bridged, so
// that all that is tested of RDMA is this package's.
func TestConn(t *testing.T) {
	w := watchdog(t, 10*time.Minute)
	s := fake(t, rdmatest.Options{})
	nettest.TestConn(t, func() (c1, c2 net.Conn, stop func(), err error) {
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return nil, nil, nil, err
		}
		defer ln.Close()
		c2, err = net.Dial("tcp", ln.Addr().String())
		if err != nil {
			return nil, nil, nil, err
		}
		inner, err := ln.Accept()
		if err != nil {
			return nil, nil, nil, err
		}
		c, p := pair(t, w, s, defaults)
		bridged := make(chan struct{})
		go func() {
			defer close(bridged)
			_ = rdmatest.Bridge(p, inner)
			_ = p.Close()
		}()
		return c, c2, func() {
			_ = c.Close()
			_ = c2.Close()
			<-bridged
		}, nil
	})
}
