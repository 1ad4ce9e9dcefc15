//go:build linux && cgo

package valkeyrdma

/*
#include <netinet/in.h>
#include "conn_linux.h"
*/
import "C"

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"strconv"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"github.com/valkeyrdma/valkeyrdma/internal/tune"
)

var loadLibraries = sync.OnceValue(func() error {
	var msg [256]C.char
	if C.vr_load(&msg[0], C.size_t(len(msg))) != 0 {
		return &causeError{fmt.Sprintf("%v: %s", ErrNoLibrary, C.GoString(&msg[0])), []error{ErrNoLibrary}}
	}
	return nil
})

// dialAddr connects to one address. local may be the zero AddrPort.
func dialAddr(ctx context.Context, remote, local netip.AddrPort, window uint32, spin, keepAlive time.Duration) (net.Conn, error) {
	c, err := dialSized(ctx, remote, local, options{
		window: window, staging: txStaging, recvDepth: recvDepth, sendDepth: sendDepth,
		probe: probeInterval(keepAlive), oneBuffer: tune.OneReceiveBuffer.Load(), spin: spin, spinners: maxSpinners(),
	})
	if err != nil {
		return nil, err // and not a nil *conn in a net.Conn
	}
	return c, nil
}

// probeInterval follows net.Dialer.KeepAlive: negative means never, 0 the default of 15 seconds. Servers send a keepalive every
// three seconds (VALKEY_RDMA_KEEPALIVE_MS), so that asking more often than every five would be for nothing.
func probeInterval(keepAlive time.Duration) time.Duration {
	switch {
	case keepAlive < 0:
		return 0
	case keepAlive == 0:
		return 15 * time.Second
	default:
		return max(keepAlive, 5*time.Second)
	}
}

func dialSized(ctx context.Context, remote, local netip.AddrPort, o options) (*conn, error) {
	if err := loadLibraries(); err != nil {
		return nil, err
	}
	w := wish{path{remote, local}, o}
	c, began, err := pending.begin(ctx, w)
	if c != nil || err != nil {
		return c, err
	}
	for tries := 0; ; tries++ {
		c, err = dialOnce(ctx, w, began)
		if stale := new(staleError); errors.As(err, &stale) && tries < 4 {
			continue
		}
		pending.end(w.path, began, err == nil)
		return c, err
	}
}

func dialOnce(ctx context.Context, w wish, began time.Time) (*conn, error) {
	o := w.options
	dst, err := sockaddr(w.remote)
	if err != nil {
		return nil, err
	}
	var src *C.struct_sockaddr_storage
	if w.local.Addr().IsValid() {
		if src, err = sockaddr(w.local); err != nil {
			return nil, err
		}
	}
	opt := C.struct_vr_options{
		rx_window:  C.uint32_t(o.window),
		tx_staging: C.uint32_t(o.staging),
		recv_depth: C.uint32_t(o.recvDepth),
		send_depth: C.uint32_t(o.sendDepth),
		resolve_ms: resolveMs,
		rx_single:  C.bool(o.oneBuffer),
		spin_ns:    C.uint32_t(o.spin),
		spinners:   C.int32_t(o.spinners),
	}
	c := &conn{remote: Addr{w.remote}}
	var epfd C.int
	var fault C.struct_vr_fault
	if C.vr_dial(&c.c, &epfd, (*C.struct_sockaddr)(unsafe.Pointer(dst)), (*C.struct_sockaddr)(unsafe.Pointer(src)),
		&opt, &fault) != 0 {
		return nil, faultError(&fault)
	}
	c.file = os.NewFile(uintptr(epfd), "rdma")
	raw, err := c.file.SyscallConn()
	if err == nil {
		err = c.awaitConnected(ctx, raw)
	}
	if err != nil {
		c.abandon(raw, w, began)
		return nil, err
	}
	c.start(raw, o.probe)
	return c, nil
}

// start is for a connection whose dial is done.
func (c *conn) start(raw syscall.RawConn, probe time.Duration) {
	var l C.struct_sockaddr_storage
	C.vr_local_address(c.c, &l)
	c.local = goAddr(&l)
	c.r.init()
	c.w.init()
	go c.pump(raw, probe)
}

// abandonTimeout is how long a dial that was given up goes on in the background, for the sake of a server that is too busy to
// accept: see vr_abandon.
var abandonTimeout = 30 * time.Second

// abandon frees a connection whose dial has failed or was given up.
func (c *conn) abandon(raw syscall.RawConn, w wish, began time.Time) {
	free := func() {
		C.vr_disconnect(c.c)
		_ = c.file.Close()
		C.vr_destroy(c.c)
	}
	end := time.Now().Add(abandonTimeout)
	keep := pending.abandon(w.path, began)
	if raw == nil || C.vr_abandon(c.c, C.bool(keep)) == 0 || c.file.SetReadDeadline(end) != nil {
		free()
		pending.abandoned(w, began, keep, nil, false)
		return
	}
	go func() {
		ret := C.int(0)
		_ = raw.Read(func(uintptr) bool {
			ret = c.dialStep(func() bool { return time.Now().After(end) })
			return ret != C.VR_DIAL_WAIT
		})
		if keep && ret == C.VR_DIAL_DONE && c.file.SetReadDeadline(time.Time{}) == nil {
			c.start(raw, w.options.probe)
			pending.abandoned(w, began, keep, c, true)
			return
		}
		free()
		pending.abandoned(w, began, keep, nil, true)
	}()
}

// dialStep does what there is to do for a dial. A server that goes on sending keeps it busy, which no deadline of the file ends.
func (c *conn) dialStep(over func() bool) C.int {
	for {
		if ret := C.vr_dial_step(c.c); ret != C.VR_DIAL_AGAIN || over() {
			return ret
		}
	}
}

// awaitConnected drives the dial through the events of the connection manager until it is done or ctx is.
func (c *conn) awaitConnected(ctx context.Context, raw syscall.RawConn) error {
	done := make(chan struct{})
	stop := context.AfterFunc(ctx, func() {
		_ = c.file.SetReadDeadline(time.Unix(1, 0))
		close(done)
	})
	defer func() {
		if !stop() { // the deadline is set, or about to be, and what comes after the dial has none
			<-done
			_ = c.file.SetReadDeadline(time.Time{})
		}
	}()
	ret := C.int(0)
	err := raw.Read(func(uintptr) bool {
		ret = c.dialStep(func() bool { return ctx.Err() != nil })
		return ret != C.VR_DIAL_WAIT
	})
	switch {
	case ret == C.VR_DIAL_DONE && ctx.Err() == nil:
		return nil
	case ret < 0:
		var f C.struct_vr_fault
		C.vr_get_fault(c.c, &f)
		if f.kind == C.VR_FAULT_REJECTED && f.a == rejectStale {
			return &staleError{faultError(&f)}
		}
		return faultError(&f)
	case ctx.Err() != nil:
		return contextError(ctx, C.GoString(C.vr_dial_stage(c.c)))
	default:
		return err
	}
}

// sockaddr makes the C form of an address. It holds no pointers, so Go memory serves for the time of a call.
func sockaddr(ap netip.AddrPort) (*C.struct_sockaddr_storage, error) {
	ss := new(C.struct_sockaddr_storage)
	port := [2]byte{byte(ap.Port() >> 8), byte(ap.Port())}
	if ap.Addr().Is4() {
		sa := (*syscall.RawSockaddrInet4)(unsafe.Pointer(ss))
		sa.Family = syscall.AF_INET
		sa.Addr = ap.Addr().As4()
		*(*[2]byte)(unsafe.Pointer(&sa.Port)) = port
		return ss, nil
	}
	sa := (*syscall.RawSockaddrInet6)(unsafe.Pointer(ss))
	sa.Family = syscall.AF_INET6
	sa.Addr = ap.Addr().As16()
	*(*[2]byte)(unsafe.Pointer(&sa.Port)) = port
	if zone := ap.Addr().Zone(); zone != "" {
		index, err := zoneIndex(zone)
		if err != nil {
			return nil, err
		}
		sa.Scope_id = index
	}
	return ss, nil
}

func zoneIndex(zone string) (uint32, error) {
	if ifi, err := net.InterfaceByName(zone); err == nil {
		return uint32(ifi.Index), nil
	}
	if n, err := strconv.ParseUint(zone, 10, 32); err == nil {
		return uint32(n), nil
	}
	return 0, &net.AddrError{Err: "no network interface of this name", Addr: zone}
}

func goAddr(ss *C.struct_sockaddr_storage) Addr {
	if ss.ss_family == syscall.AF_INET {
		sa := (*syscall.RawSockaddrInet4)(unsafe.Pointer(ss))
		port := *(*[2]byte)(unsafe.Pointer(&sa.Port))
		return Addr{netip.AddrPortFrom(netip.AddrFrom4(sa.Addr), uint16(port[0])<<8|uint16(port[1]))}
	}
	sa := (*syscall.RawSockaddrInet6)(unsafe.Pointer(ss))
	port := *(*[2]byte)(unsafe.Pointer(&sa.Port))
	ip := netip.AddrFrom16(sa.Addr)
	if ip.IsLinkLocalUnicast() && sa.Scope_id != 0 {
		zone := strconv.FormatUint(uint64(sa.Scope_id), 10)
		if ifi, err := net.InterfaceByIndex(int(sa.Scope_id)); err == nil {
			zone = ifi.Name
		}
		ip = ip.WithZone(zone)
	}
	return Addr{netip.AddrPortFrom(ip, uint16(port[0])<<8|uint16(port[1]))}
}

// staleError marks a dial that may succeed with another queue pair.
type staleError struct{ error }

func (e *staleError) Unwrap() error { return e.error }
