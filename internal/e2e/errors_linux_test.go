//go:build linux && cgo

package e2e

import (
	"errors"
	"io"
	"net"
	"strings"
	"syscall"

	"github.com/valkey-io/valkey-go"
	"github.com/valkeyrdma/valkeyrdma"
)

// isClear says whether err is one of those by which a caller can tell what has become of a server that is killed: the end of a
// connection (unexpected where it came amid an answer), a dial that nobody answers, and what Valkey or valkey-go says of a topology
// that changes.
func isClear(err error) bool {
	for _, is := range []error{errUnreplicated, io.EOF, io.ErrUnexpectedEOF, valkey.ErrNoSlot} {
		if errors.Is(err, is) {
			return true
		}
	}
	if e, ok := valkey.IsValkeyErr(err); ok {
		word, _, _ := strings.Cut(e.Error(), " ")
		switch word {
		case "MOVED", "ASK", "CLUSTERDOWN", "READONLY", "LOADING", "MASTERDOWN", "UNBLOCKED":
			return true
		}
		return false
	}
	var op *net.OpError
	if !errors.As(err, &op) {
		return false
	}
	for _, is := range []error{syscall.ECONNREFUSED, syscall.ECONNRESET, syscall.EPIPE, net.ErrClosed, valkeyrdma.ErrDropped} {
		if errors.Is(err, is) {
			return true
		}
	}
	return false
}

// kind is the text of err without what differs from one to the next.
func kind(err error) string {
	if e, ok := valkey.IsValkeyErr(err); ok {
		word, _, _ := strings.Cut(e.Error(), " ")
		return word
	}
	var op *net.OpError
	if errors.As(err, &op) {
		return op.Op + " " + op.Net + ": " + op.Err.Error()
	}
	return err.Error()
}
