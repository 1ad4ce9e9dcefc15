package main

import (
	"context"
	"encoding/binary"
	"errors"
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

// reply makes an error that Valkey answers with, by way of the format in which valkey-go stores messages.
func reply(text string) error {
	var m valkey.ValkeyMessage
	stored := binary.BigEndian.AppendUint64([]byte("\x00\x00\x00\x00\x00\x00\x00-"), uint64(len(text)))
	if err := m.CacheUnmarshalView(append(stored, text...)); err != nil {
		return err
	}
	return m.Error()
}

func TestExplicable(t *testing.T) {
	op := func(err error) error { return &net.OpError{Op: "read", Net: "rdma", Err: err} }
	loading, other := reply("LOADING Valkey is loading the dataset in memory"), reply("ERR syntax error")
	for _, err := range []error{loading, errors.Join(io.EOF, loading), reply("EXECABORT for some reason"), io.EOF, io.ErrUnexpectedEOF,
		op(syscall.ECONNREFUSED), op(syscall.ECONNRESET), op(syscall.EPIPE), op(net.ErrClosed), op(os.ErrDeadlineExceeded),
		op(fmt.Errorf("a dial: %w", valkeyrdma.ErrDropped)), context.DeadlineExceeded, valkey.ErrNoSlot, valkey.ErrDoCacheAborted} {
		require.True(t, explicable(err), "%v", err)
	}
	for _, err := range []error{other, errors.Join(io.EOF, other), errors.Join(loading, op(valkeyrdma.ErrProtocol)),
		op(valkeyrdma.ErrProtocol), op(valkeyrdma.ErrLockedMemory), op(valkeyrdma.ErrNoDevice), op(syscall.ETIMEDOUT),
		op(syscall.EHOSTUNREACH), op(syscall.EIO), context.Canceled, valkey.ErrClosing, errors.New("anything else")} {
		require.False(t, explicable(err), "%v", err)
	}
}
