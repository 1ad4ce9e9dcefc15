//go:build linux && cgo

package rdmatest

/*
#include <stdlib.h>
#include "rdmatest_linux.h"
*/
import "C"

import (
	"fmt"
	"net"
	"strconv"
	"syscall"
	"unsafe"
)

// Dial connects to a server as a client that takes no care of anything: the Peer's calls are all that it does, so it can
// break every rule. It keeps to what the server asks of its queue pair, so the connection is lost when the server's
// receives are all consumed. Of opt, Window, Receives, Sends and Buffers have a meaning. It is there to test servers.
func Dial(addr string, opt Options) (*Peer, error) {
	if err := load(); err != nil {
		return nil, err
	}
	host, service, err := net.SplitHostPort(addr)
	if err != nil {
		return nil, err
	}
	port, err := strconv.Atoi(service)
	if err != nil {
		return nil, err
	}
	opt.setDefaults()
	opt.Silent, opt.NoEcho = true, true // answers to answers would never end
	ip := C.CString(host)
	defer C.free(unsafe.Pointer(ip))
	var c *C.struct_rt_conn
	var step *C.char
	if ret := C.rt_resolve_addr(&c, ip, C.int(port), &step); ret != 0 {
		return nil, errnoError(ret, C.GoString(step))
	}
	p := newPeer(c, opt)
	err = p.waitFor("connecting", func() (bool, error) {
		if p.gone {
			return false, fmt.Errorf("rdmatest: no connection: %w", syscall.ECONNREFUSED)
		}
		return p.established, nil
	})
	if err != nil {
		_ = p.Close()
		return nil, err
	}
	return p, nil
}

func (p *Peer) dialStep(ev C.int) error {
	if ev == C.RT_EVENT_ADDR_RESOLVED {
		return errnoError(C.rt_resolve_route(p.c), "rdma_resolve_route")
	}
	opt := C.struct_rt_options{receives: C.uint32_t(p.opt.Receives), sends: C.uint32_t(p.opt.Sends)}
	var step *C.char
	if ret := C.rt_setup(p.c, &opt, &step); ret != 0 {
		return errnoError(ret, C.GoString(step))
	}
	C.rt_fds(p.c, &p.fds[0], &p.fds[1])
	return errnoError(C.rt_connect(p.c), "rdma_connect")
}
