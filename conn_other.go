//go:build !linux || !cgo

package valkeyrdma

import (
	"context"
	"net"
	"net/netip"
)

func dialAddr(context.Context, netip.AddrPort, netip.AddrPort, uint32) (net.Conn, error) {
	return nil, ErrUnsupported
}
