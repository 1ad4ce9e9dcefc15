// Package peer is a server that speaks Valkey's RDMA protocol and is as fast as a server can be: what a connection does with it
// is what the connection itself can do. A test server that checks its clients is in the library's internal/rdmatest.
//
// It answers requests that say what answer they want, see [Header].
package peer

/*
#cgo CFLAGS: -std=gnu11 -O2 -Wall -Wextra
#cgo LDFLAGS: -libverbs -lrdmacm
#include <stdlib.h>
#include "peer_linux.h"
*/
import "C"

import (
	"encoding/binary"
	"os"
	"time"
	"unsafe"
)

// HeaderSize is the size of what begins each request.
const HeaderSize = 24

// Header writes the beginning of a request to b: the request has request bytes in all, and is answered with reply bytes, in
// messages of at most message bytes.
func Header(b []byte, request, reply, message int) {
	binary.NativeEndian.PutUint64(b, uint64(request))
	binary.NativeEndian.PutUint64(b[8:], uint64(reply))
	binary.NativeEndian.PutUint64(b[16:], uint64(message))
}

// MaxMessage is the most that a Header may ask for as the size of messages.
const MaxMessage = 1 << 20

// Options say what a server is like.
type Options struct {
	Window  int // bytes of each receive window
	Buffers int // 1, as a real server has, or 2: the next window opens when the last one is full, not when it has been read
	// Spin is for how long it looks for work before it sleeps.
	Spin time.Duration
	// Copy makes it copy what it receives, as a real server does.
	Copy bool
}

// Serve listens, calls ready, and serves one client after the other. It returns only if that is not possible.
func Serve(ip string, port int, opt Options, ready func()) error {
	cip := C.CString(ip)
	defer C.free(unsafe.Pointer(cip))
	var step *C.char
	s, err := C.pe_listen(cip, C.int(port), &step)
	if s == nil {
		return os.NewSyscallError(C.GoString(step), err)
	}
	ready()
	o := C.struct_pe_options{window: C.uint32_t(opt.Window), buffers: C.uint32_t(opt.Buffers),
		spin_us: C.uint32_t(opt.Spin.Microseconds())}
	if opt.Copy {
		o.copy = 1
	}
	_, err = C.pe_serve(s, &o, &step)
	return os.NewSyscallError(C.GoString(step), err)
}
