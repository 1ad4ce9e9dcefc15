//go:build linux && cgo

package rdmatest

/*
#cgo CFLAGS: -std=gnu11
#cgo LDFLAGS: -ldl -lpthread
#include <stdlib.h>
#include "rdmatest_linux.h"
*/
import "C"

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"time"
	"unsafe"
)

// What a real server has (VALKEY_RDMA_MAX_WQE and VALKEY_RDMA_DEFAULT_RX_SIZE in src/rdma.c).
const (
	serverQueue  = 1024
	serverWindow = 1 << 20
	// maxWindow is the most memory that a real server's users may expect it to mirror (VALKEY_RDMA_MAX_RX_SIZE).
	maxWindow = 16 << 20

	controlSize = C.RT_CONTROL_SIZE

	defaultTimeout = 10 * time.Second
)

// Op is a control message's opcode. In Facts.First it may also be Data.
type Op int

// The opcodes of the protocol, and Data for a write with immediate data.
const (
	GetServerFeature   Op = 0
	SetClientFeature   Op = 1
	Keepalive          Op = 2
	RegisterXferMemory Op = 3
	Data               Op = -1
)

func (o Op) String() string {
	switch o {
	case GetServerFeature:
		return "GetServerFeature"
	case SetClientFeature:
		return "SetClientFeature"
	case Keepalive:
		return "Keepalive"
	case RegisterXferMemory:
		return "RegisterXferMemory"
	case Data:
		return "Data"
	}
	return "opcode " + strconv.Itoa(int(o))
}

// Options make a server other than a real one with its default configuration, which the zero value is.
type Options struct {
	Window   int // bytes of each receive window; 0: 1 MiB
	Receives int // receives posted; 0: 1024
	Sends    int // send queue slots; 0: 1024

	// RNRRetry is what the accept asks the client to do when it finds no receive posted: this many retries, 7 means
	// without limit. A real server asks for 0.
	RNRRetry int
	// RNRTimer is how long the client is told to wait before such a retry, encoded as in the IB specification,
	// 9.7.5.2.8: 12 is 0.64 ms. 0 is 655 ms, which a real server gets from the connection manager.
	RNRTimer int

	NoEcho   bool // does not answer GetServerFeature
	Echoes   int  // how many of them it answers before it stops; 0: all
	Silent   bool // announces no window by itself, neither the first nor a next one
	NoRepost bool // never posts a receive again

	// Buffers is between how many buffers the receive windows alternate: with more than 1, each announcement names
	// another address and key than the last. 0 means 1, as a real server has.
	Buffers int
	// NextWindow is the size of the n-th announced window, counted from 0. If set, each window is new memory, and
	// Window and Buffers mean nothing. It must not call the Peer.
	NextWindow func(n int) int
}

func (opt *Options) setDefaults() {
	if opt.Window == 0 {
		opt.Window = serverWindow
	}
	if opt.Receives == 0 {
		opt.Receives = serverQueue
	}
	if opt.Sends == 0 {
		opt.Sends = serverQueue
	}
	if opt.Buffers == 0 {
		opt.Buffers = 1
	}
}

// A Violation is something that a client must not do.
type Violation struct{ Text string }

func (v *Violation) Error() string { return "rdmatest: the client broke the protocol: " + v.Text }

// A CompletionError is a request that the device could not complete. A real server closes the connection on it.
type CompletionError struct {
	Receive bool
	Status  int // enum ibv_wc_status
	Text    string
}

func (e *CompletionError) Error() string {
	what := "send"
	if e.Receive {
		what = "receive"
	}
	return fmt.Sprintf("rdmatest: %s failed: %s (status %d)", what, e.Text, e.Status)
}

// Window is memory that one side lets the other write to.
type Window struct {
	Addr   uint64
	Length uint32
	RKey   uint32
}

// Facts is what a client did so far, and what it met.
type Facts struct {
	Messages      int // writes with immediate data
	BytesReceived int // announced by these
	BytesRead     int // of these, read
	LargestWrite  int // bytes of one message
	SmallestWrite int
	BytesWritten  int // posted by Write, WritePieces and WriteChain

	Controls    map[Op]int // control messages
	Fences      int        // GetServerFeature among them
	SetFeatures int        // SetClientFeature among them
	First       []Op       // the first 16 messages, in order

	WindowsSent int // windows announced to the client
	// MostUnpolled is the largest number of receives that were found consumed at once; a real server has 1024.
	MostUnpolled int
	// Overrun: all posted receives were found consumed. A client that does with its queue pair what a real server asks
	// for (RNR retry count 0) loses the connection with its next message.
	Overrun bool

	ClientRetry    int // retry count that the client asked of us
	ClientRNRRetry int // RNR retry count that the client asked of us
}

var load = sync.OnceValue(func() error {
	var msg [256]C.char
	if C.rt_load(&msg[0], C.size_t(len(msg))) != 0 {
		return errors.New("rdmatest: " + C.GoString(&msg[0]))
	}
	return nil
})

func errnoError(ret C.int, step string) error {
	if ret >= 0 {
		return nil
	}
	return fmt.Errorf("rdmatest: %w", os.NewSyscallError(step, syscall.Errno(-ret)))
}

func timeoutError(what string, d time.Duration) error {
	return fmt.Errorf("rdmatest: %s: nothing for %v: %w", what, d, os.ErrDeadlineExceeded)
}

// waitFDs waits until one of fds is readable or the deadline has passed, or for no reason.
func waitFDs(deadline time.Time, fds ...C.int) error {
	ms := max(time.Until(deadline).Milliseconds()+1, 0)
	return errnoError(min(C.rt_wait(&fds[0], C.int(len(fds)), C.int(min(ms, 60_000))), 0), "poll")
}

// Server listens for clients. Its methods may be called from any goroutine.
type Server struct {
	opt   Options
	ip    string
	port  int
	stop  C.int // readable from Close on
	users sync.WaitGroup

	mu     sync.Mutex
	s      *C.struct_rt_server
	closed bool
}

// Listen starts to listen on an address of an RDMA device. Port 0 means a free one.
func Listen(ip string, port int, opt Options) (*Server, error) {
	if err := load(); err != nil {
		return nil, err
	}
	opt.setDefaults()
	s := &Server{opt: opt, ip: ip}
	s.stop = C.rt_eventfd()
	if err := errnoError(s.stop, "eventfd"); err != nil {
		return nil, err
	}
	cip := C.CString(ip)
	defer C.free(unsafe.Pointer(cip))
	var step *C.char
	if ret := C.rt_listen(&s.s, cip, C.int(port), &step); ret != 0 {
		_ = syscall.Close(int(s.stop))
		return nil, errnoError(ret, C.GoString(step))
	}
	s.port = int(C.rt_server_port(s.s))
	return s, nil
}

// Addr is where the server listens, host:port.
func (s *Server) Addr() string { return net.JoinHostPort(s.ip, strconv.Itoa(s.port)) }

// Accept waits for a client, accepts it and, unless the server is Silent, announces the first window.
func (s *Server) Accept(timeout time.Duration) (*Peer, error) {
	r, err := s.Request(timeout)
	if err != nil {
		return nil, err
	}
	return r.Accept()
}

// Request waits for a client that asks to connect, and gives it no answer. The answer is for the Request's methods.
func (s *Server) Request(timeout time.Duration) (*Request, error) {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return nil, net.ErrClosed
	}
	s.users.Add(1)
	s.mu.Unlock()
	defer s.users.Done()

	deadline := time.Now().Add(timeout)
	for {
		r, err := s.next()
		if r != nil || err != nil {
			return r, err
		}
		if !time.Now().Before(deadline) {
			return nil, timeoutError("waiting for a client", timeout)
		}
		if err := waitFDs(deadline, C.rt_server_fd(s.s), s.stop); err != nil {
			return nil, err
		}
	}
}

func (s *Server) next() (*Request, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed {
		return nil, net.ErrClosed
	}
	r := &Request{opt: s.opt}
	var step *C.char
	ret := C.rt_request(s.s, &r.c, &r.param, &step)
	if ret == 1 {
		return r, nil
	}
	return nil, errnoError(ret, C.GoString(step))
}

// Close stops listening. Requests and Peers go on.
func (s *Server) Close() error {
	s.mu.Lock()
	if s.closed {
		s.mu.Unlock()
		return net.ErrClosed
	}
	s.closed = true
	s.mu.Unlock()
	C.rt_eventfd_set(s.stop)
	s.users.Wait()
	C.rt_server_free(s.s)
	s.s = nil
	return syscall.Close(int(s.stop))
}

// Request is a client that waits for an answer. Exactly one of its methods may be called, and one must be.
type Request struct {
	opt   Options
	c     *C.struct_rt_conn
	param C.struct_rt_param
}

func (r *Request) take() *C.struct_rt_conn {
	c := r.c
	r.c = nil
	return c
}

// accept makes the resources and sends the answer.
func (r *Request) accept() (*C.struct_rt_conn, error) {
	c := r.take()
	if c == nil {
		return nil, net.ErrClosed
	}
	opt := C.struct_rt_options{receives: C.uint32_t(r.opt.Receives), sends: C.uint32_t(r.opt.Sends)}
	var step *C.char
	if ret := C.rt_setup(c, &opt, &step); ret != 0 {
		C.rt_reject(c)
		C.rt_free(c)
		return nil, errnoError(ret, C.GoString(step))
	}
	if ret := C.rt_accept(c, C.int(r.opt.RNRRetry)); ret != 0 {
		C.rt_free(c)
		return nil, errnoError(ret, "rdma_accept")
	}
	return c, nil
}

// Accept accepts the client, waits until the connection is established and, unless the server is Silent, announces the
// first window.
func (r *Request) Accept() (*Peer, error) {
	c, err := r.accept()
	if err != nil {
		return nil, err
	}
	p := newPeer(c, r.opt)
	p.facts.ClientRetry, p.facts.ClientRNRRetry = int(r.param.retry_count), int(r.param.rnr_retry_count)
	err = p.waitFor("waiting for the connection to be established", func() (bool, error) {
		if p.gone {
			return false, fmt.Errorf("rdmatest: the client did not finish the handshake: %w", syscall.ECONNRESET)
		}
		return p.established, nil
	})
	if err == nil && r.opt.RNRTimer != 0 {
		err = errnoError(C.rt_set_rnr_timer(c, C.int(r.opt.RNRTimer)), "ibv_modify_qp")
	}
	if err == nil && !r.opt.Silent {
		err = p.AnnounceWindow()
	}
	if err != nil {
		_ = p.Close()
		return nil, err
	}
	return p, nil
}

// Reject refuses the client: reason 28, rejected by the consumer.
func (r *Request) Reject() error {
	c := r.take()
	if c == nil {
		return net.ErrClosed
	}
	ret := C.rt_reject(c)
	C.rt_free(c)
	return errnoError(ret, "rdma_reject")
}

// Drop accepts the client and closes the connection at once, as a real server does with maxclients reached or in
// protected mode. What the client sees depends on how far it has come: mostly a rejection with reason 28. For a
// disconnect after the connection was established, let a Silent server Accept, and Abort.
func (r *Request) Drop() error {
	c, err := r.accept()
	if err != nil {
		return err
	}
	C.rt_disconnect(c) // fails while the handshake is under way; freeing tells the client then
	C.rt_free(c)
	return nil
}

// Close frees a request that was given no answer. The connection manager then tells the client, if that still waits.
func (r *Request) Close() error {
	c := r.take()
	if c == nil {
		return net.ErrClosed
	}
	C.rt_free(c)
	return nil
}

// Peer is the server's end of a connection. It is driven by one goroutine: none of its methods may be called while another
// runs, but for Facts, Windows and ClientWindow, which may be called at any time.
//
// Methods that wait do so for as long as SetTimeout says, 10 s at first, and then fail with os.ErrDeadlineExceeded, after
// which they may be called again.
type Peer struct {
	opt     Options
	c       *C.struct_rt_conn
	fds     [2]C.int
	timeout time.Duration
	wcs     []C.struct_rt_wc

	err         error // the first violation or failed request
	established bool
	gone        bool // disconnected, by whomever
	vanished    bool

	// Receiving. As in a real server, a window is read up to what has been received, and announced again when its last
	// byte has been read.
	rx         *C.struct_rt_mem
	rxReceived int
	rxRead     int
	rxBuffers  []*C.struct_rt_mem // windows alternate between these
	rxCount    int                // windows announced
	announce   bool               // the next window is due, and waits for a slot of the send queue
	posted     int                // receives posted and not found consumed

	// Sending. tx mirrors the client's window, so what is in flight is overwritten only when the window is used again.
	tx       C.struct_rt_mem
	txWindow Window
	txOffset int
	sqUsed   int
	slot     uint32 // control messages sent
	owed     []owed // answers that wait for a slot of the send queue
	garbage  []*C.struct_rt_mem

	mu      sync.Mutex // guards facts and windows
	facts   Facts
	windows []Window
}

// owed is an answer to GetServerFeature; the receive that brought the question is posted again after it.
type owed struct {
	selector [2]byte
	index    C.uint32_t
}

func newPeer(c *C.struct_rt_conn, opt Options) *Peer {
	p := &Peer{opt: opt, c: c, timeout: defaultTimeout, posted: opt.Receives}
	p.facts.Controls = make(map[Op]int)
	C.rt_fds(c, &p.fds[0], &p.fds[1])
	return p
}

// SetTimeout says how long each later call waits at most.
func (p *Peer) SetTimeout(d time.Duration) { p.timeout = d }

// Facts returns what happened so far, as far as completions were taken.
func (p *Peer) Facts() Facts {
	p.mu.Lock()
	defer p.mu.Unlock()
	f := p.facts
	f.Controls = make(map[Op]int, len(p.facts.Controls))
	for op, n := range p.facts.Controls {
		f.Controls[op] = n
	}
	f.First = slices.Clone(f.First)
	return f
}

// Windows returns the windows that the client announced, in order.
func (p *Peer) Windows() []Window {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.windows)
}

// ClientWindow returns the newest window that the client announced, or the zero value.
func (p *Peer) ClientWindow() Window {
	p.mu.Lock()
	defer p.mu.Unlock()
	if len(p.windows) == 0 {
		return Window{}
	}
	return p.windows[len(p.windows)-1]
}

// Window returns the newest window that was announced to the client by AnnounceWindow or of itself, or the zero value.
func (p *Peer) Window() Window {
	if p.rx == nil {
		return Window{}
	}
	return Window{Addr: memAddr(p.rx), Length: uint32(p.rx.size), RKey: uint32(p.rx.rkey)}
}

// Err returns the violation or failed request that every call returns from now on, or nil.
func (p *Peer) Err() error { return p.err }

// Gone tells whether the connection has ended, by either side, as far as completions and events were taken.
func (p *Peer) Gone() bool { return p.gone }

func memAddr(m *C.struct_rt_mem) uint64 { return uint64(uintptr(unsafe.Pointer(m.addr))) }

func memBytes(m *C.struct_rt_mem) []byte {
	return unsafe.Slice((*byte)(unsafe.Pointer(m.addr)), int(m.size))
}

func (p *Peer) fail(err error) error {
	if p.err == nil {
		p.err = err
	}
	return p.err
}

func (p *Peer) violation(format string, args ...any) error {
	return p.fail(&Violation{fmt.Sprintf(format, args...)})
}

func (p *Peer) usable() error {
	if p.c == nil {
		return net.ErrClosed
	}
	return p.err
}

// Waiting.

// progress takes events and completions, without waiting, and returns how many there were.
func (p *Peer) progress() (int, error) {
	if err := p.usable(); err != nil {
		return 0, err
	}
	n, gone := 0, false
	for {
		var name *C.char
		var status C.int
		ev := C.rt_event(p.c, &name, &status)
		if ev < 0 {
			return n, p.fail(errnoError(ev, "rdma_get_cm_event"))
		}
		if ev == 0 {
			break
		}
		n++
		switch ev {
		case C.RT_EVENT_ADDR_RESOLVED, C.RT_EVENT_ROUTE_RESOLVED:
			if err := p.dialStep(ev); err != nil {
				return n, p.fail(err)
			}
		case C.RT_EVENT_ESTABLISHED:
			p.established = true
		case C.RT_EVENT_DISCONNECTED:
			gone = true
		}
	}
	m, err := 0, error(nil)
	if p.fds[0] >= 0 {
		m, err = p.completions()
	}
	n += m
	if gone && !p.gone {
		// It may have overtaken data, which has been counted now. A real server closes its end, which is the answer that
		// the client's connection manager waits for.
		p.gone = true
		C.rt_disconnect(p.c)
	}
	return n, err
}

// completions takes all completions that there are, then handles them in the order in which they came. A real server
// takes them one by one; taking them first shows how many receives were consumed while nobody looked.
func (p *Peer) completions() (int, error) {
	n := 0
	for {
		if len(p.wcs) < n+32 {
			p.wcs = append(p.wcs, make([]C.struct_rt_wc, 32)...)
		}
		got := C.rt_poll(p.c, &p.wcs[n], 32)
		if got < 0 {
			return n, p.fail(errnoError(got, "ibv_poll_cq"))
		}
		n += int(got)
		if got < 32 {
			break
		}
	}
	if n == 0 {
		return 0, nil
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.countConsumed(p.wcs[:n])
	for i := range p.wcs[:n] {
		wc := &p.wcs[i]
		if wc.kind == C.RT_SEND {
			p.sqUsed--
		}
		if p.err == nil {
			p.handle(wc)
		}
	}
	p.settle()
	return n, p.err
}

func (p *Peer) countConsumed(wcs []C.struct_rt_wc) {
	consumed := 0
	for i := range wcs {
		if wcs[i].status == 0 && wcs[i].kind != C.RT_SEND {
			consumed++
		}
	}
	p.posted -= consumed
	p.facts.MostUnpolled = max(p.facts.MostUnpolled, consumed)
	if consumed > 0 && p.posted == 0 {
		p.facts.Overrun = true
	}
}

func (p *Peer) handle(wc *C.struct_rt_wc) {
	const (
		localLength = 1 // IBV_WC_LOC_LEN_ERR
		localQP     = 2 // IBV_WC_LOC_QP_OP_ERR: what rxe says instead
		flushed     = 5 // IBV_WC_WR_FLUSH_ERR: the echo of an earlier failure, or of a disconnect
	)
	switch {
	case wc.status == flushed || wc.status != 0 && p.gone:
	case (wc.status == localLength || wc.status == localQP) && wc.kind != C.RT_SEND:
		_ = p.violation("a control message of more than %d bytes", controlSize)
	case wc.status != 0:
		_ = p.fail(&CompletionError{Receive: wc.kind != C.RT_SEND, Status: int(wc.status),
			Text: C.GoString(C.rt_status_str(C.int(wc.status)))})
	case wc.kind == C.RT_SEND:
	case wc.kind == C.RT_RECV:
		p.onControl(wc)
	case wc.kind == C.RT_RECV_WRITE:
		p.onData(wc)
	default:
		_ = p.violation("a message of an unexpected kind")
	}
}

func (p *Peer) repost(index C.uint32_t) {
	if p.opt.NoRepost || p.vanished {
		return
	}
	if ret := C.rt_post_recv(p.c, index); ret != 0 {
		_ = p.fail(errnoError(ret, "ibv_post_recv"))
		return
	}
	p.posted++
}

func (p *Peer) first(op Op) {
	if len(p.facts.First) < 16 {
		p.facts.First = append(p.facts.First, op)
	}
}

func (p *Peer) onData(wc *C.struct_rt_wc) {
	n := int(wc.imm)
	p.first(Data)
	p.facts.Messages++
	p.facts.BytesReceived += n
	p.facts.LargestWrite = max(p.facts.LargestWrite, n)
	if p.facts.SmallestWrite == 0 || n < p.facts.SmallestWrite {
		p.facts.SmallestWrite = n
	}
	switch {
	case p.rx == nil:
		_ = p.violation("a write of %d bytes before a window was announced", n)
		return
	case n > int(p.rx.size)-p.rxReceived:
		_ = p.violation("a write of %d bytes at %d of a window of %d", n, p.rxReceived, p.rx.size)
		return
	case int(wc.length) > n:
		_ = p.violation("a write of %d bytes was announced as %d", wc.length, n)
		return
	}
	p.rxReceived += n
	p.repost(wc.index)
}

func (p *Peer) onControl(wc *C.struct_rt_wc) {
	if wc.length != controlSize {
		_ = p.violation("a control message of %d bytes", wc.length)
		return
	}
	msg := unsafe.Slice((*byte)(unsafe.Pointer(C.rt_recv_slot(p.c, wc.index))), controlSize)
	op := Op(binary.BigEndian.Uint16(msg))
	p.first(op)
	p.facts.Controls[op]++
	switch op {
	case GetServerFeature:
		p.facts.Fences++
		if !p.opt.NoEcho && (p.opt.Echoes == 0 || p.facts.Fences <= p.opt.Echoes) {
			p.owed = append(p.owed, owed{[2]byte(msg[2:4]), wc.index})
			p.settle()
			return // which posts the receive again
		}
	case SetClientFeature:
		p.facts.SetFeatures++
		if f := binary.BigEndian.Uint64(msg[24:]); f != 0 {
			_ = p.violation("SetClientFeature with features %#x", f)
			return
		}
	case Keepalive:
	case RegisterXferMemory:
		p.onWindow(Window{
			Addr:   binary.BigEndian.Uint64(msg[16:]),
			Length: binary.BigEndian.Uint32(msg[24:]),
			RKey:   binary.BigEndian.Uint32(msg[28:]),
		})
	default:
		_ = p.violation("a control message with the unknown %v", op)
	}
	if p.err == nil {
		p.repost(wc.index)
	}
}

func (p *Peer) onWindow(w Window) {
	p.windows = append(p.windows, w)
	switch {
	case w.Length == 0 || w.Length > maxWindow:
		_ = p.violation("a window of %d bytes was announced", w.Length)
		return
	case p.txWindow.Length == 0:
		if ret := C.rt_mem_make(p.c, &p.tx, C.size_t(w.Length), 0); ret != 0 {
			_ = p.fail(errnoError(ret, "ibv_reg_mr"))
			return
		}
	case w.Length != p.txWindow.Length:
		_ = p.violation("a window of %d bytes was announced after one of %d", w.Length, p.txWindow.Length)
		return
	case p.txOffset < int(p.txWindow.Length):
		_ = p.violation("a window was announced after %d of %d bytes of the last one were used", p.txOffset, p.txWindow.Length)
		return
	}
	p.txWindow, p.txOffset = w, 0
}

// settle sends what could not be sent because the send queue was full.
func (p *Peer) settle() {
	for p.err == nil && len(p.owed) > 0 && p.sendable() && p.sqUsed < p.opt.Sends {
		o := p.owed[0]
		p.owed = p.owed[1:]
		msg := make([]byte, controlSize)
		binary.BigEndian.PutUint16(msg, uint16(GetServerFeature))
		copy(msg[2:], o.selector[:])
		if p.postControl(msg) == nil {
			p.repost(o.index)
		}
	}
	if p.err == nil && p.announce && p.sendable() && p.sqUsed < p.opt.Sends {
		p.announce = false
		_ = p.postWindow()
	}
}

func (p *Peer) sendable() bool { return !p.gone && !p.vanished }

func (p *Peer) arm() error {
	if p.fds[0] < 0 { // a dial that has no queues yet
		return nil
	}
	return errnoError(C.rt_arm(p.c), "ibv_req_notify_cq")
}

// waitFor takes completions until done says so. It sleeps when there are none: the queue is armed and looked at again
// before, so that none is missed.
func (p *Peer) waitFor(what string, done func() (bool, error)) error {
	deadline := time.Now().Add(p.timeout)
	for {
		if ok, err := done(); ok || err != nil {
			return err
		}
		n, err := p.progress()
		if err == nil && n == 0 {
			if err = p.arm(); err == nil {
				n, err = p.progress()
			}
		}
		if err != nil {
			return err
		}
		if n > 0 {
			continue
		}
		if !time.Now().Before(deadline) {
			return timeoutError(what, p.timeout)
		}
		if err := waitFDs(deadline, p.fds[0], p.fds[1]); err != nil {
			return err
		}
	}
}

// Poll takes what completions and events there are, without waiting, and returns their number.
func (p *Peer) Poll() (int, error) { return p.progress() }

// Idle takes completions for d: a server that does nothing but what it must.
func (p *Peer) Idle(d time.Duration) error {
	defer p.SetTimeout(p.timeout)
	p.SetTimeout(d)
	err := p.waitFor("idle", func() (bool, error) { return false, nil })
	if errors.Is(err, os.ErrDeadlineExceeded) {
		return nil
	}
	return err
}

// Receiving.

// Read reads at least one byte. When it has read the last byte of the window it announces the next. After the client
// has closed the connection and every byte that came before has been read, it returns io.EOF.
func (p *Peer) Read(b []byte) (int, error) {
	if len(b) == 0 {
		return 0, p.usable()
	}
	n := 0
	err := p.waitFor("waiting for bytes from the client", func() (bool, error) {
		var err error
		n, err = p.tryRead(b)
		return n > 0, err
	})
	return n, err
}

// tryRead reads what is there: it may return 0 without an error.
func (p *Peer) tryRead(b []byte) (int, error) {
	if err := p.usable(); err != nil {
		return 0, err
	}
	if p.rx == nil || p.rxRead == p.rxReceived {
		if p.gone {
			return 0, io.EOF
		}
		return 0, nil
	}
	n := copy(b, memBytes(p.rx)[p.rxRead:p.rxReceived])
	p.rxRead += n
	p.mu.Lock()
	defer p.mu.Unlock()
	p.facts.BytesRead += n
	if p.rxRead == int(p.rx.size) && !p.opt.Silent {
		p.announce = true
		p.settle()
	}
	return n, p.err
}

// AnnounceWindow announces the next window at once, whether or not the current one is full. What was received and not
// read is lost.
func (p *Peer) AnnounceWindow() error {
	if err := p.awaitSlot(); err != nil {
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.postWindow()
}

func (p *Peer) postWindow() error {
	m, err := p.nextBuffer()
	if err != nil {
		return p.fail(err)
	}
	p.rx, p.rxReceived, p.rxRead = m, 0, 0
	p.rxCount++
	p.facts.WindowsSent++
	return p.postControl(windowMessage(memAddr(m), uint32(m.size), uint32(m.rkey)))
}

func (p *Peer) nextBuffer() (*C.struct_rt_mem, error) {
	size, fresh := p.opt.Window, true
	if p.opt.NextWindow != nil {
		size = p.opt.NextWindow(p.rxCount)
		// The client has no more to do with a window that it has filled: one that it writes to again is an error that the
		// device reports. Before that, somebody may still write.
		if p.rx != nil && p.rxReceived == int(p.rx.size) {
			p.rxBuffers = p.rxBuffers[:len(p.rxBuffers)-1]
			freeMem(p.rx)
			p.rx = nil
		}
	} else {
		fresh = p.rxCount < p.opt.Buffers
	}
	if !fresh {
		return p.rxBuffers[p.rxCount%p.opt.Buffers], nil
	}
	m, err := p.newMem(size, 1)
	if err == nil {
		p.rxBuffers = append(p.rxBuffers, m)
	}
	return m, err
}

// newMem makes registered memory. The description is C's, since it holds pointers that C writes and reads.
func (p *Peer) newMem(size int, remote C.int) (*C.struct_rt_mem, error) {
	m := (*C.struct_rt_mem)(C.calloc(1, C.sizeof_struct_rt_mem))
	if ret := C.rt_mem_make(p.c, m, C.size_t(size), remote); ret != 0 {
		C.free(unsafe.Pointer(m))
		return nil, errnoError(ret, "ibv_reg_mr")
	}
	return m, nil
}

func freeMem(m *C.struct_rt_mem) {
	C.rt_mem_free(m)
	C.free(unsafe.Pointer(m))
}

func windowMessage(addr uint64, length, rkey uint32) []byte {
	msg := make([]byte, controlSize)
	binary.BigEndian.PutUint16(msg, uint16(RegisterXferMemory))
	binary.BigEndian.PutUint64(msg[16:], addr)
	binary.BigEndian.PutUint32(msg[24:], length)
	binary.BigEndian.PutUint32(msg[28:], rkey)
	return msg
}

// Sending.

// post posts one request. The caller knows that there is a slot.
func (p *Peer) post(s *C.struct_rt_send) error {
	if ret := C.rt_post_send(p.c, s); ret != 0 {
		return p.fail(errnoError(ret, "ibv_post_send"))
	}
	p.sqUsed++
	return nil
}

// postControl posts a message of 32 bytes. Their memory is used again only after a whole send queue of other messages.
func (p *Peer) postControl(msg []byte) error {
	var lkey C.uint32_t
	at := C.rt_send_slot(p.c, C.uint32_t(p.slot), &lkey)
	p.slot++
	copy(unsafe.Slice((*byte)(unsafe.Pointer(at)), controlSize), msg)
	return p.post(&C.struct_rt_send{opcode: C.RT_OP_SEND, addr: C.uint64_t(uintptr(unsafe.Pointer(at))),
		length: controlSize, lkey: lkey})
}

// slotFree says whether something may be posted now.
func (p *Peer) slotFree() (bool, error) {
	if err := p.usable(); err != nil {
		return false, err
	}
	if !p.sendable() {
		return false, fmt.Errorf("rdmatest: the connection has ended: %w", syscall.EPIPE)
	}
	return p.sqUsed < p.opt.Sends, nil
}

func (p *Peer) awaitSlot() error {
	return p.waitFor("waiting for room in the send queue", p.slotFree)
}

// Write writes all of b to the client: into its window as far as that reaches, then into the next one when it is
// announced. Each call is one message per window touched.
func (p *Peer) Write(b []byte) (int, error) {
	done := 0
	err := p.waitFor("waiting for the client's window", func() (bool, error) {
		for done < len(b) {
			n, err := p.tryWrite(b[done:])
			if n == 0 || err != nil {
				return false, err
			}
			done += n
		}
		return true, nil
	})
	return done, err
}

// tryWrite writes what the client's window takes: it may return 0 without an error.
func (p *Peer) tryWrite(b []byte) (int, error) {
	if ok, err := p.slotFree(); !ok {
		return 0, err
	}
	n := min(len(b), int(p.txWindow.Length)-p.txOffset)
	if n == 0 {
		return 0, nil
	}
	return n, p.postWrite(C.RT_OP_WRITE_IMM, b[:n], n)
}

func (p *Peer) postWrite(opcode C.int32_t, b []byte, imm int) error {
	copy(memBytes(&p.tx)[p.txOffset:], b)
	err := p.post(&C.struct_rt_send{opcode: opcode, addr: C.uint64_t(memAddr(&p.tx) + uint64(p.txOffset)),
		length: C.uint32_t(len(b)), lkey: p.tx.lkey, remote_addr: C.uint64_t(p.txWindow.Addr + uint64(p.txOffset)),
		rkey: C.uint32_t(p.txWindow.RKey), imm: C.uint32_t(imm)})
	if err != nil {
		return err
	}
	p.txOffset += len(b)
	p.mu.Lock()
	p.facts.BytesWritten += len(b)
	p.mu.Unlock()
	return nil
}

// WritePieces writes each piece as a message of its own, one after the other, as a real server writes an iovec.
func (p *Peer) WritePieces(pieces ...[]byte) error {
	for _, b := range pieces {
		if _, err := p.Write(b); err != nil {
			return err
		}
	}
	return nil
}

// WriteChain writes all pieces as one message: WRITE, WRITE, ..., WRITE_WITH_IMM with the sum. Where the window ends, the
// message does, and another one goes on.
func (p *Peer) WriteChain(pieces ...[]byte) error {
	total := 0
	for i, b := range pieces {
		for len(b) > 0 {
			room := 0
			err := p.waitFor("waiting for the client's window", func() (bool, error) {
				ok, err := p.slotFree()
				room = int(p.txWindow.Length) - p.txOffset
				return ok && room > 0, err
			})
			if err != nil {
				return err
			}
			n := min(room, len(b))
			opcode, rest := C.int32_t(C.RT_OP_WRITE), b[n:]
			total += n
			if n == room || len(rest) == 0 && !slices.ContainsFunc(pieces[i+1:], func(b []byte) bool { return len(b) > 0 }) {
				opcode = C.RT_OP_WRITE_IMM
			}
			if err := p.postWrite(opcode, b[:n], total); err != nil {
				return err
			}
			if opcode == C.RT_OP_WRITE_IMM {
				total = 0
			}
			b = rest
		}
	}
	return nil
}

// Flush waits until everything that was posted is in the client's memory.
func (p *Peer) Flush() error {
	return p.waitFor("waiting for sends to complete", func() (bool, error) {
		return p.sqUsed == 0 || p.gone || p.vanished, p.usable()
	})
}

// Misbehaviour.

// scratch copies b into registered memory that lives until Close.
func (p *Peer) scratch(b []byte) (*C.struct_rt_mem, error) {
	m, err := p.newMem(max(len(b), 1), 0)
	if err != nil {
		return nil, err
	}
	p.garbage = append(p.garbage, m)
	copy(memBytes(m), b)
	return m, nil
}

// SendRaw sends a control message of any content and length.
func (p *Peer) SendRaw(msg []byte) error {
	if err := p.awaitSlot(); err != nil {
		return err
	}
	m, err := p.scratch(msg)
	if err != nil {
		return err
	}
	return p.post(&C.struct_rt_send{opcode: C.RT_OP_SEND, addr: C.uint64_t(memAddr(m)), length: C.uint32_t(len(msg)),
		lkey: m.lkey})
}

// SendKeepalives sends n keepalives as fast as the send queue takes them.
func (p *Peer) SendKeepalives(n int) error {
	msg := make([]byte, controlSize)
	binary.BigEndian.PutUint16(msg, uint16(Keepalive))
	for range n {
		if err := p.awaitSlot(); err != nil {
			return err
		}
		if err := p.postControl(msg); err != nil {
			return err
		}
	}
	return nil
}

// Announce announces any window. What the Peer takes for its own window stays as it is.
func (p *Peer) Announce(addr uint64, length, rkey uint32) error {
	if err := p.awaitSlot(); err != nil {
		return err
	}
	return p.postControl(windowMessage(addr, length, rkey))
}

// Here is WriteRaw's offset for the place where Write would go on.
const Here = -1

// WriteRaw writes data at an offset from the start of the client's window, past its end if need be, and announces it as imm
// bytes. Write goes on imm bytes after where it was, but never past the end of the window.
func (p *Peer) WriteRaw(data []byte, imm uint32, offset int) error {
	return p.writeRaw(data, imm, offset, 0)
}

// WriteBadKey writes data with a key that the client has never announced.
func (p *Peer) WriteBadKey(data []byte) error {
	return p.writeRaw(data, uint32(len(data)), Here, 0x55)
}

func (p *Peer) writeRaw(data []byte, imm uint32, offset int, keyError uint32) error {
	err := p.waitFor("waiting for the client's window", func() (bool, error) {
		ok, err := p.slotFree()
		return ok && p.txWindow.Length > 0, err
	})
	if err != nil {
		return err
	}
	m, err := p.scratch(data)
	if err != nil {
		return err
	}
	if offset == Here {
		offset = p.txOffset
	}
	p.txOffset = int(min(int64(p.txOffset)+int64(imm), int64(p.txWindow.Length)))
	return p.post(&C.struct_rt_send{opcode: C.RT_OP_WRITE_IMM, addr: C.uint64_t(memAddr(m)), length: C.uint32_t(len(data)),
		lkey: m.lkey, remote_addr: C.uint64_t(p.txWindow.Addr + uint64(offset)), rkey: C.uint32_t(p.txWindow.RKey ^ keyError), imm: C.uint32_t(imm)})
}

// Ending.

// Disconnect ends the connection after everything that was posted is in the client's memory. What was received can be
// read still.
func (p *Peer) Disconnect() error {
	if p.c == nil {
		return net.ErrClosed
	}
	err := p.Flush()
	if err2 := p.Abort(); err == nil {
		err = err2
	}
	return err
}

// Abort ends the connection at once, whatever is on its way. What was received can be read still.
func (p *Peer) Abort() error {
	if p.c == nil {
		return net.ErrClosed
	}
	if p.gone {
		return nil
	}
	p.gone = true
	err := errnoError(C.rt_disconnect(p.c), "rdma_disconnect")
	if p.fds[0] >= 0 {
		_, _ = p.completions() // what has arrived counts; an error among it is kept in p.err
	}
	return err
}

// Vanish destroys the queue pair and tells nobody: the client's next message gets no answer. Close, later, tells its
// connection manager.
func (p *Peer) Vanish() error {
	if p.c == nil {
		return net.ErrClosed
	}
	if _, err := p.completions(); err != nil {
		return err
	}
	p.vanished = true
	C.rt_destroy_qp(p.c)
	return nil
}

// Close ends the connection, if it has not ended, and frees everything.
func (p *Peer) Close() error {
	if p.c == nil {
		return net.ErrClosed
	}
	_ = p.Abort()
	C.rt_destroy_queues(p.c)
	C.rt_mem_free(&p.tx)
	for _, m := range append(p.rxBuffers, p.garbage...) {
		freeMem(m)
	}
	p.rx, p.rxBuffers, p.garbage = nil, nil, nil
	C.rt_free(p.c)
	p.c = nil
	return nil
}
