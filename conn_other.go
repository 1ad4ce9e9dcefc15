//go:build !linux || !cgo

package valkeyrdma

import (
	"context"
	"net"
	"net/netip"
	"time"
)

func dialAddr(context.Context, netip.AddrPort, netip.AddrPort, uint32, time.Duration, time.Duration) (net.Conn, error) {
	return nil, ErrUnsupported
}
