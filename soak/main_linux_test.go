package main

import (
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"syscall"
	"testing"

	"github.com/stretchr/testify/require"
	"github.com/valkey-io/valkey-go"
	"github.com/valkeyrdma/valkeyrdma"
)

func TestExplicable(t *testing.T) {
	op := func(err error) error { return &net.OpError{Op: "read", Net: "rdma", Err: err} }
	for _, err := range []error{io.EOF, io.ErrUnexpectedEOF, op(syscall.ECONNREFUSED), op(syscall.ECONNRESET), op(syscall.EPIPE),
		op(net.ErrClosed), op(os.ErrDeadlineExceeded), op(fmt.Errorf("a dial: %w", valkeyrdma.ErrDropped)), context.DeadlineExceeded,
		valkey.ErrNoSlot, valkey.ErrDoCacheAborted} {
		require.True(t, explicable(err), "%v", err)
	}
	for _, err := range []error{op(valkeyrdma.ErrProtocol), op(valkeyrdma.ErrLockedMemory), op(valkeyrdma.ErrNoDevice),
		op(syscall.ETIMEDOUT), op(syscall.EHOSTUNREACH), op(syscall.EIO), context.Canceled, valkey.ErrClosing, fmt.Errorf("anything else")} {
		require.False(t, explicable(err), "%v", err)
	}
}
