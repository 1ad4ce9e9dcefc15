// Package outage tells errors that a server explains which is gone, or is no longer what it was, from others: for tests and the soak.
package outage

import (
	"errors"
	"io"
	"net"
	"strings"
	"syscall"

	"github.com/valkey-io/valkey-go"
	"github.com/valkeyrdma/valkeyrdma"
)

// Explains says whether err is one of those by which a caller can tell what has become of a server that is killed: the end of a
// connection (unexpected where it came amid an answer), a dial that nobody answers, and what Valkey or valkey-go says of a topology
// that changes.
func Explains(err error) bool {
	for _, is := range []error{io.EOF, io.ErrUnexpectedEOF, valkey.ErrNoSlot} {
		if errors.Is(err, is) {
			return true
		}
	}
	if _, ok := valkey.IsValkeyErr(err); ok {
		switch Word(err) {
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

// Word is the first one of an error that Valkey has answered with, which tells its kind; "" for other errors.
func Word(err error) string {
	e, ok := valkey.IsValkeyErr(err)
	if !ok {
		return ""
	}
	word, _, _ := strings.Cut(e.Error(), " ")
	return word
}
