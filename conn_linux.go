//go:build linux && cgo

package valkeyrdma

/*
#cgo noescape vr_read
#cgo nocallback vr_read
#cgo noescape vr_write
#cgo nocallback vr_write
#cgo noescape vr_pump
#cgo nocallback vr_pump
#cgo noescape vr_tend
#cgo nocallback vr_tend
#cgo noescape vr_flushed
#cgo nocallback vr_flushed
#include <stdlib.h>
#include <netinet/in.h>
#include "conn_linux.h"
*/
import "C"

import (
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"os"
	"runtime"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"
)

// options are the sizes of a connection; tests change them.
type options struct {
	window    uint32 // bytes of a receive window
	staging   uint32 // bytes of send staging, a power of two
	recvDepth uint32 // receives kept posted
	sendDepth uint32 // send queue slots
	probe     time.Duration
	oneBuffer bool          // a second window is never made
	spin      time.Duration // 0: not at all
	spinners  int
}

const (
	txStaging = 256 << 10
	// The server posts up to 1024 sends before it looks at their completions (VALKEY_RDMA_MAX_WQE in its src/rdma.c),
	// each of which takes one of our receives. Twice that leaves it a full queue while ours is being posted again.
	recvDepth = 2048
	sendDepth = 256
	resolveMs = 2000

	maxPerCall = 1 << 20 // bytes taken by one call into C

	again = -C.int64_t(syscall.EAGAIN) // nothing to do: park

	// closeTimeout bounds how long Close waits for the server to have read all that was written. A server that is not
	// busy needs microseconds; one that reads nothing must not hold up the caller's error path.
	closeTimeout = 500 * time.Millisecond
)

// conn is a connection over RDMA.
//
// Three goroutines may be in C at the same time: a reader (under r.mu), a writer (under w.mu), and the pump, which alone
// waits on the connection's descriptors. Whoever drains the completion queue learns whom to wake, and does: see signal.
// A token in a side's channel never expires, so a wake-up between a side's last look and its sleep is not lost.
type conn struct {
	c             *C.struct_vr_conn
	file          *os.File // the epoll descriptor, in Go's poller
	local, remote Addr
	closed        atomic.Bool
	tended        bool // guarded by tended
	polled        bool // guarded by polling
	pollAgain     bool
	life          sync.RWMutex // held for writing while c goes, and for reading by calls under neither r.mu nor w.mu
	r, w          side
}

// side is what one direction needs to wait.
type side struct {
	mu       sync.Mutex // held by the one reader or writer
	wake     chan struct{}
	timer    *time.Timer
	deadline atomic.Int64 // nanoseconds since epoch; 0: none
	parked   atomic.Bool
}

var (
	_ net.Conn        = (*conn)(nil)
	_ io.StringWriter = (*conn)(nil)

	epoch = time.Now()
)

func (s *side) init() {
	s.wake = make(chan struct{}, 1)
	s.timer = time.NewTimer(time.Hour)
	s.timer.Stop()
}

func (s *side) kick() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

func (s *side) expired() bool {
	d := s.deadline.Load()
	return d != 0 && int64(time.Since(epoch)) >= d
}

// park waits until woken, or until the deadline. It may return early; the caller looks again.
func (s *side) park() {
	s.parked.Store(true)
	d := s.deadline.Load()
	if d == 0 {
		<-s.wake
	} else {
		s.timer.Reset(time.Duration(d) - time.Since(epoch))
		select {
		case <-s.wake:
		case <-s.timer.C:
		}
		s.timer.Stop()
	}
	s.parked.Store(false)
}

func (s *side) setDeadline(t time.Time) {
	d := int64(0)
	if !t.IsZero() {
		// A time without a monotonic reading means what the clock on the wall shows now, not what it showed when the program began.
		d = max(int64(time.Since(epoch)+time.Until(t)), 1)
	}
	s.deadline.Store(d)
	if s.parked.Load() {
		s.kick()
	}
}

func (c *conn) signal(wake C.uint32_t) {
	if wake&C.VR_WAKE_READER != 0 {
		c.r.kick()
	}
	if wake&C.VR_WAKE_WRITER != 0 {
		c.w.kick()
	}
	if wake&C.VR_GROW != 0 {
		go c.grow()
	}
}

// grow makes the second receive window.
func (c *conn) grow() {
	c.life.RLock()
	defer c.life.RUnlock()
	if c.c != nil {
		c.signal(C.vr_grow(c.c))
	}
}

// pump serves completions and connection manager events for as long as the connection lives, whether or not anybody
// reads: the receives of an idle or a busy subscriber must be posted again, and a writer learns from completions too.
// Each time that nothing at all has come in for the interval of probing, it sends something, so that a server whose host
// is gone is noticed although nobody writes; a server that lives sends a keepalive every three seconds.
func (c *conn) pump(raw syscall.RawConn, probe time.Duration) {
	serve := func(uintptr) bool { // false: wait for the descriptor
		for {
			res := C.vr_pump(c.c)
			c.signal(res.wake)
			if res.wake&C.VR_UNARMED != 0 {
				tended.add(c)
			}
			if res.n == 0 {
				return false
			}
		}
	}
	for {
		if probe > 0 {
			_ = c.file.SetReadDeadline(time.Now().Add(probe))
		}
		if err := raw.Read(serve); !errors.Is(err, os.ErrDeadlineExceeded) {
			return // Close has closed the descriptor
		}
		// Close may have been here since: outside of raw.Read it does not wait for us. Should the probe fail, the reader and
		// the writer are told by the next call of serve, which raw.Read makes before it waits.
		c.life.RLock()
		if c.c != nil {
			C.vr_probe(c.c)
		}
		c.life.RUnlock()
	}
}

// Read reads what has arrived, at most len(b) bytes. After the server has closed the connection and every byte that
// came before has been read, it returns io.EOF. A Read that fails with os.ErrDeadlineExceeded has lost nothing and may
// be repeated.
func (c *conn) Read(b []byte) (int, error) {
	c.r.mu.Lock()
	defer c.r.mu.Unlock()
	naps := 0
	for goesOn := false; ; goesOn = true {
		if err := c.usable(&c.r); err != nil {
			return 0, c.opError("read", err)
		}
		if len(b) == 0 {
			return 0, nil
		}
		res := C.vr_read(c.c, unsafe.Pointer(unsafe.SliceData(b)), C.size_t(len(b)), C.bool(goesOn))
		c.signal(res.wake &^ C.VR_WAKE_READER)
		if res.wake&C.VR_YIELD != 0 {
			runtime.Gosched()
		}
		if res.wake&C.VR_NAP != 0 {
			naps++
			nap(naps)
		} else {
			naps = 0
		}
		switch {
		case res.n > 0:
			return int(res.n), nil
		case res.n == 0:
			return 0, io.EOF
		case res.n != again:
			return 0, c.opError("read", c.failure(syscall.Errno(-res.n)))
		}
		if res.wake&C.VR_POLL != 0 {
			polling.add(c)
		}
		if res.wake&C.VR_WAKE_READER == 0 {
			c.r.park()
		}
	}
}

// Write takes all of b, or fails. The bytes are copied and on their way when it returns; the count that comes with an
// error is of those taken. A Write that failed with os.ErrDeadlineExceeded may be continued after that many bytes.
func (c *conn) Write(b []byte) (int, error) {
	return c.write(unsafe.Pointer(unsafe.SliceData(b)), len(b))
}

// WriteString is Write without a copy of s.
func (c *conn) WriteString(s string) (int, error) {
	return c.write(unsafe.Pointer(unsafe.StringData(s)), len(s))
}

func (c *conn) write(p unsafe.Pointer, size int) (int, error) {
	c.w.mu.Lock()
	defer c.w.mu.Unlock()
	done := 0
	for {
		if err := c.usable(&c.w); err != nil {
			return done, c.opError("write", err)
		}
		if done == size {
			return done, nil
		}
		// In pieces, so that a large Write over a fast link sees its deadline, and Close, in time.
		piece := min(size-done, maxPerCall)
		res := C.vr_write(c.c, unsafe.Add(p, done), C.size_t(piece), C.bool(piece < size-done))
		c.signal(res.wake &^ C.VR_WAKE_WRITER)
		switch {
		case res.n > 0:
			done += int(res.n)
			if done == size {
				return done, nil
			}
			if int(res.n) == piece {
				continue // there may be room for more
			}
		case res.n != again:
			return done, c.opError("write", c.failure(syscall.Errno(-res.n)))
		}
		if res.wake&C.VR_WAKE_WRITER == 0 {
			c.w.park()
		}
	}
}

// usable is the part of Read and Write that needs no C: closed, or past its deadline.
func (c *conn) usable(s *side) error {
	if c.closed.Load() {
		return net.ErrClosed
	}
	if s.expired() {
		return os.ErrDeadlineExceeded
	}
	return nil
}

// Close ends the connection. It waits until the server has read what Write took, though no longer than half a second. Blocked
// Reads and Writes return at once with net.ErrClosed, as does a second Close.
func (c *conn) Close() error {
	if !c.closed.CompareAndSwap(false, true) {
		return c.opError("close", net.ErrClosed)
	}
	c.r.kick()
	c.w.kick()
	// A writer that is in C leaves, and those that wait their turn do not wait for drain.
	c.w.mu.Lock()
	c.w.mu.Unlock() //nolint:staticcheck // an empty critical section is what is meant
	c.drain()
	C.vr_disconnect(c.c)
	// Closing the file evicts the pump from the poller and waits for it; taking the lock waits for a reader in C.
	_ = c.file.Close()
	c.r.mu.Lock()
	defer c.r.mu.Unlock()
	c.w.mu.Lock()
	defer c.w.mu.Unlock()
	c.life.Lock()
	defer c.life.Unlock()
	tended.remove(c)
	polling.remove(c)
	C.vr_destroy(c.c)
	c.c = nil
	return nil
}

// drain waits until the server has read all that was written, or can not have it, or the time is over.
func (c *conn) drain() {
	over := time.NewTimer(closeTimeout)
	defer over.Stop()
	for {
		res := C.vr_flushed(c.c)
		if res.n != 0 {
			return
		}
		if res.wake&C.VR_WAKE_WRITER != 0 {
			c.w.kick()
		}
		select {
		case <-c.w.wake:
		case <-over.C:
			return
		}
	}
}

// ended is for a connection that nobody closes meanwhile.
func (c *conn) ended() bool { return bool(C.vr_broken(c.c)) }

// LocalAddr returns the local address, an Addr.
func (c *conn) LocalAddr() net.Addr { return c.local }

// RemoteAddr returns the server's address, an Addr.
func (c *conn) RemoteAddr() net.Addr { return c.remote }

// SetDeadline sets both deadlines.
func (c *conn) SetDeadline(t time.Time) error {
	if c.closed.Load() {
		return c.opError("set", net.ErrClosed)
	}
	c.r.setDeadline(t)
	c.w.setDeadline(t)
	return nil
}

// SetReadDeadline sets the time after which Read fails with os.ErrDeadlineExceeded; zero means never.
func (c *conn) SetReadDeadline(t time.Time) error {
	if c.closed.Load() {
		return c.opError("set", net.ErrClosed)
	}
	c.r.setDeadline(t)
	return nil
}

// SetWriteDeadline sets the time after which Write fails with os.ErrDeadlineExceeded; zero means never.
func (c *conn) SetWriteDeadline(t time.Time) error {
	if c.closed.Load() {
		return c.opError("set", net.ErrClosed)
	}
	c.w.setDeadline(t)
	return nil
}

// Stats returns the connection's counters.
func (c *conn) Stats() Stats {
	c.life.RLock()
	defer c.life.RUnlock()
	if c.c == nil {
		return Stats{}
	}
	var s C.struct_vr_stats
	c.signal(C.vr_get_stats(c.c, &s))
	return Stats{
		Device:        C.GoString(&s.device[0]),
		BytesReceived: uint64(s.rx_bytes), BytesSent: uint64(s.tx_bytes),
		MessagesReceived: uint64(s.rx_messages), MessagesSent: uint64(s.tx_messages),
		WindowsReceived: uint64(s.tx_windows), WindowsSent: uint64(s.rx_windows),
		Fences: uint64(s.fences), CreditWaits: uint64(s.credit_waits), WindowWaits: uint64(s.window_waits),
		Spins: uint64(s.spins), Sleeps: uint64(s.sleeps), Arms: uint64(s.arms),
		Unread: int(s.rx_unread), Unsent: int(s.tx_unposted), Credits: int(s.credits), SendsQueued: int(s.sq_used),
		LockedBytes: uint64(s.pinned), ServerWindow: int(s.tx_window),
		ReceiveDepth: int(s.recv_depth), SendDepth: int(s.send_depth), InlineMax: int(s.inline_max),
	}
}

func (c *conn) opError(op string, err error) error {
	return &net.OpError{Op: op, Net: network, Source: c.local, Addr: c.remote, Err: err}
}

// failure explains why a connection broke. errno is what C returned, for a connection without a fault: the server
// closed it. A Close of our own, also one that came while C was at work, explains all.
func (c *conn) failure(errno syscall.Errno) error {
	if c.closed.Load() {
		return net.ErrClosed
	}
	var f C.struct_vr_fault
	C.vr_get_fault(c.c, &f)
	if f.kind == C.VR_FAULT_NONE {
		return errno
	}
	return faultError(&f)
}

// faultError puts a fault of the C half into words, with the errors that a caller may test for.
func faultError(f *C.struct_vr_fault) error {
	errno, step := syscall.Errno(f.code), C.GoString(f.step)
	say := func(cause error, format string, args ...any) error {
		return &causeError{fmt.Sprintf(format, args...), []error{cause, errno}}
	}
	protocol := func(format string, args ...any) error {
		return say(ErrProtocol, "%v: %s", ErrProtocol, fmt.Sprintf(format, args...))
	}
	a, b := uint64(f.a), uint64(f.b)
	switch f.kind {
	case C.VR_FAULT_MEMLOCK:
		size := ""
		if a > 0 {
			size = fmt.Sprintf(" (%d bytes)", a)
		}
		return say(ErrLockedMemory, "%s%s: %v: %v", step, size, errno, ErrLockedMemory)
	case C.VR_FAULT_NO_DEVICE:
		return say(ErrNoDevice, "%s: %v on this host: rdma link lists them, modprobe rdma_ucm loads the connection manager",
			step, ErrNoDevice)
	case C.VR_FAULT_NO_ROUTE:
		return say(ErrNoDevice, "%v on the route to this address: rdma link lists the devices and their network interfaces",
			ErrNoDevice)
	case C.VR_FAULT_NOT_OPENED:
		return say(ErrNoDevice, "%v that can be opened: there is one on the route to this address, but "+
			"/dev/infiniband/uverbs* is not there, or not for this user, or its provider (ibverbs-providers) is not", ErrNoDevice)
	case C.VR_FAULT_UNREACHABLE:
		return say(errno, "%s: no answer from the peer: %v", step, errno)
	case C.VR_FAULT_REJECTED:
		return rejectError(errno, int(a))
	case C.VR_FAULT_NO_IMM:
		return say(ErrIWARP, "%v", ErrIWARP)
	case C.VR_FAULT_DROPPED:
		return say(ErrDropped, "%v", ErrDropped)
	case C.VR_FAULT_DEVICE_GONE:
		return say(ErrNoDevice, "the RDMA device is gone: %s", step)
	case C.VR_FAULT_COMPLETION:
		return say(errno, "%s failed: %s (status %d, vendor error %#x)", step,
			C.GoString(C.vr_wc_status_str(C.int(f.a))), a, b)
	case C.VR_FAULT_WINDOW_GONE:
		return say(errno, "the server's memory takes no write (%s): it has closed the connection, or announced a window it does not have",
			C.GoString(C.vr_wc_status_str(C.int(f.a))))
	case C.VR_FAULT_BAD_MESSAGE:
		return protocol("the device refused a message, most likely a write outside of our window")
	case C.VR_FAULT_CONTROL_SIZE:
		if a == math.MaxUint64 {
			return protocol("a control message of more than 32 bytes")
		}
		return protocol("a control message of %d bytes, 32 are due", a)
	case C.VR_FAULT_CONTROL_OPCODE:
		return protocol("a control message with the unknown opcode %d", a)
	case C.VR_FAULT_WINDOW_EARLY:
		return protocol("a new window after %d of %d bytes of the last one were used", b, a)
	case C.VR_FAULT_WINDOW_LENGTH:
		return protocol("a window of %d bytes", a)
	case C.VR_FAULT_IMM_ZERO:
		return protocol("a write of 0 bytes was announced")
	case C.VR_FAULT_IMM_OVERRUN:
		return protocol("a write of %d bytes was announced where %d bytes of the window were left", a, b)
	case C.VR_FAULT_COMPLETION_KIND:
		return protocol("a message of an unexpected kind (completion opcode %d)", a)
	default:
		return os.NewSyscallError(step, errno)
	}
}

// Reject reasons of IB spec 12.6.7.2 that a Valkey user may meet.
const (
	rejectNoListener = 8
	rejectStale      = 10 // the server still remembers this queue pair number from an earlier connection
	rejectConsumer   = 28 // the server's program refused, or went away from the connection before it was complete
)

func rejectError(errno syscall.Errno, reason int) error {
	text := "the peer's RDMA connection manager refused (reason " + strconv.Itoa(reason) + ")"
	switch reason {
	case rejectNoListener:
		text = "connection refused: nothing listens there for RDMA (reason 8); does the server run with rdma-port, " +
			"and is this that port?"
	case rejectStale:
		text = "connection refused: the server still holds an old connection with this queue pair number (reason 10)"
	case rejectConsumer:
		return &causeError{ErrDropped.Error(), []error{ErrDropped, errno}}
	}
	return &causeError{text, []error{errno}}
}
