//go:build linux && cgo

package valkeyrdma

import (
	"bytes"
	"encoding/binary"
	"errors"
	"io"
	"math"
	"math/rand/v2"
	"net"
	"os"
	"runtime"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/valkeyrdma/valkeyrdma/internal/rdmatest"
)

// "make fuzz" lets these run for as long as one likes (scripts/fuzz); under "go test" they run what they start from.

// fuzzOptions are small, so that every edge is met after few bytes.
var fuzzOptions = options{window: 64 << 10, staging: 4096, recvDepth: 64, sendDepth: 64}

// kept is a testing.TB for what outlives one input of a fuzz target: servers, and connections that still work.
type kept struct {
	testing.TB // the input's
	undo       []func()
}

func (k *kept) Cleanup(f func()) { k.undo = append(k.undo, f) }

func (k *kept) close() {
	for ; len(k.undo) > 0; k.undo = k.undo[:len(k.undo)-1] {
		k.undo[len(k.undo)-1]()
	}
}

// closeTimely closes a connection and tells whether that took as long as it may.
func closeTimely(c *conn) (time.Duration, bool) {
	start := time.Now()
	_ = c.Close()
	took := time.Since(start)
	return took, took < closeTimeout+2*time.Second
}

const (
	opGetServerFeature   = 0
	opKeepalive          = 2
	opRegisterXferMemory = 3
	windowMax            = 1 << 30 // VR_WINDOW_MAX
)

// outcome is what a control message does to a connection.
type outcome int

const (
	harmless outcome = iota
	protocolError
	strangeWindow // a window is taken that the server may not have
)

// predict is the protocol once more: what a client must make of a control message. used: the current window is used up.
func predict(msg []byte, used bool) outcome {
	if len(msg) != 32 {
		return protocolError
	}
	switch op := binary.BigEndian.Uint16(msg); {
	case op <= opKeepalive:
		return harmless
	case op > opRegisterXferMemory:
		return protocolError
	}
	if length := binary.BigEndian.Uint32(msg[24:]); length == 0 || length > windowMax || !used {
		return protocolError
	}
	return strangeWindow
}

// control makes a control message of 32 bytes.
func control(op, selector uint16, addr uint64, length, key uint32) []byte {
	msg := make([]byte, 32)
	binary.BigEndian.PutUint16(msg, op)
	binary.BigEndian.PutUint16(msg[2:], selector)
	binary.BigEndian.PutUint64(msg[16:], addr)
	binary.BigEndian.PutUint32(msg[24:], length)
	binary.BigEndian.PutUint32(msg[28:], key)
	return msg
}

// FuzzControlMessage: a control message of any bytes does to a connection what the protocol says, and never a hang. full: the
// server's window has been used up before, so that a new one is due.
func FuzzControlMessage(f *testing.F) {
	rdmaAddr(f)
	for op := range uint16(5) {
		f.Add(control(op, 0, 0, 0, 0), false)
		f.Add(control(op, 1, 0, 0, 0), true) // 1: the first fence
	}
	for _, length := range []uint32{0, 1, 4096, windowMax, windowMax + 1, math.MaxUint32} {
		f.Add(control(opRegisterXferMemory, 0, 0x7f0000001000, length, 0x1234), false)
		f.Add(control(opRegisterXferMemory, 0, 0x7f0000001000, length, 0x1234), true)
	}
	f.Add([]byte{}, false)
	f.Add([]byte{0}, true)
	f.Add(control(opKeepalive, 0, 0, 0, 0)[:31], false)
	f.Add(append(control(opKeepalive, 0, 0, 0, 0), 0), false)
	f.Add(bytes.Repeat([]byte{0xff}, 32), false)
	f.Add(bytes.Repeat([]byte{0xff}, 64), true)

	const window = 4096 // the server's
	var server, pairs kept
	var s *rdmatest.Server
	var c *conn
	var p *rdmatest.Peer
	left, used := 0, 0 // inputs for this connection; bytes used of the server's window
	f.Cleanup(func() {
		pairs.close()
		server.close()
	})
	f.Fuzz(func(t *testing.T, msg []byte, full bool) {
		msg = msg[:min(len(msg), 64)]
		server.TB, pairs.TB = t, t
		w := watchdog(t, 20*time.Second)
		defer func() {
			if t.Failed() {
				pairs.close()
				c = nil
			}
		}()
		if s == nil {
			s = fake(&server, rdmatest.Options{Window: window})
		}
		if left--; c == nil || left < 0 { // every message takes memory of the fake server's
			pairs.close()
			c, p = pair(&pairs, w, s, fuzzOptions)
			left, used = 500, 0
		}
		w.add(c)
		p.SetTimeout(5 * time.Second)
		require.NoError(t, c.SetDeadline(time.Now().Add(5*time.Second)))

		var sent []byte
		if full {
			sent = pattern(window - used)
			_, err := c.Write(sent)
			require.NoError(t, err)
			require.Eventually(t, func() bool { return c.Stats().Unsent == 0 }, 5*time.Second, time.Millisecond)
		}
		require.NoError(t, p.SendRaw(msg))
		want := predict(msg, full)
		if want == harmless {
			// Both ways, and from here into the server's next window, if this one is full.
			more := pattern(1 + len(msg)*5)
			_, err := c.Write(more)
			require.NoError(t, err)
			sent = append(sent, more...)
			require.Equal(t, sent, readPeer(t, p, len(sent)))
			used = (used + len(sent)) % window
			_, err = p.Write(more)
			require.NoError(t, err)
			got := make([]byte, len(more))
			_, err = io.ReadFull(c, got)
			require.NoError(t, err)
			require.Equal(t, more, got)
			return
		}
		is := error(ErrProtocol)
		if want == strangeWindow { // no fault in itself, but there is no such window
			is = syscall.ECONNRESET
			require.Eventually(t, func() bool { return c.Stats().WindowsReceived > uint64(p.Facts().WindowsSent) },
				5*time.Second, time.Millisecond)
			_, err := c.Write([]byte("x"))
			require.NoError(t, err)
		}
		var op *net.OpError
		_, err := c.Read(make([]byte, 1))
		require.ErrorIs(t, err, is)
		require.ErrorAs(t, err, &op)
		_, err = c.Write([]byte("x"))
		require.ErrorIs(t, err, is)
		require.ErrorAs(t, err, &op)
		took, timely := closeTimely(c)
		require.True(t, timely, "Close took %v", took)
		pairs.close()
		c = nil
	})
}

// The moves of a conversation: what the bytes of FuzzConversation's input stand for.
const (
	moveWrite = iota
	moveChain
	movePieces
	moveKeepalives
	moveControl
	moveAnnounce
	moveAnnounceOwn
	moveWriteRaw
	moveBadKey
	moveRead
	moveIdle
	moveStallReader
	moveFlush
	moveDisconnect
	moveAbort
	moveCloseOurs
	moveCount
)

// The servers that a conversation may be with: the first byte of the input says which, and who ends it. Those of which progress is not to be
// expected are last.
var fuzzServers = []rdmatest.Options{
	{Window: 64 << 10},
	{Window: 4096, Buffers: 2},
	{NextWindow: func(n int) int { return 1 + n*n*7919%3001 }},
	{Window: 64 << 10, Receives: 64, RNRTimer: 12},
	{Window: 4096, NoEcho: true},
	{Window: 64 << 10, NoRepost: true},
}

const (
	lastProgressing = 4
	fuzzBytes       = 512 << 10 // that a conversation moves, at most, in each direction
	fuzzMoves       = 48
)

var fuzzData = pattern(fuzzBytes)

// talk is one conversation.
type talk struct {
	t     *testing.T
	input []byte
	seed  uint64 // of the sizes of our Reads and Writes
	c     *conn
	p     *rdmatest.Peer

	taken    atomic.Int64 // bytes that our Write took
	got      atomic.Int64 // bytes that our Read returned
	received []byte       // these; the reader's until it has ended
	stop     atomic.Bool  // the writer is to end
	stall    atomic.Int64 // milliseconds the reader is to do nothing for
	readErr  chan error
	writeErr chan error

	hangUp    bool // the server is to end what went well
	peerGot   int  // bytes that the fake server read
	lied      int  // how often the server lied
	fatal     bool // one of these was a lie that must be noticed
	intact    int  // bytes announced before the server wrote what it did not announce
	scrambled bool // the server announced memory of its own that it had not read
	peerEnded bool // by Disconnect or Abort
	flushed   bool // by Disconnect, and it went well
	closing   chan time.Duration
}

// next takes a byte of the input; past its end there are zeros.
func (k *talk) next() int {
	if len(k.input) == 0 {
		return 0
	}
	b := k.input[0]
	k.input = k.input[1:]
	return int(b)
}

// size takes a number from the input, up to about a window: mostly small ones, since it has the square's distribution.
func (k *talk) size() int {
	n := k.next()
	return 1 + n*n + k.next()
}

// data returns the next n bytes that the server is to write. What it wrote before is known from what it announced.
func (k *talk) data(n int) []byte {
	at := k.p.Facts().BytesWritten
	return fuzzData[at:min(at+n, fuzzBytes)]
}

func (k *talk) reader() {
	buf := make([]byte, 10_000)
	rng := rand.New(rand.NewPCG(1, k.seed))
	for {
		time.Sleep(time.Duration(k.stall.Swap(0)) * time.Millisecond)
		_ = k.c.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
		n, err := k.c.Read(buf[:1+rng.IntN(len(buf))])
		k.received = append(k.received, buf[:n]...)
		k.got.Add(int64(n))
		if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			k.readErr <- err
			return
		}
	}
}

func (k *talk) writer() {
	rng := rand.New(rand.NewPCG(2, k.seed))
	for rest := fuzzData; len(rest) > 0 && !k.stop.Load(); {
		_ = k.c.SetWriteDeadline(time.Now().Add(20 * time.Millisecond))
		n, err := k.c.Write(rest[:min(1+rng.IntN(1<<(1+rng.IntN(14))), len(rest))])
		k.taken.Add(int64(n))
		rest = rest[n:]
		if err != nil && !errors.Is(err, os.ErrDeadlineExceeded) {
			k.writeErr <- err
			return
		}
	}
	k.writeErr <- nil
}

// read lets the server read up to n bytes, and checks them.
func (k *talk) read(n int) error {
	buf := make([]byte, n)
	n, err := k.p.Read(buf)
	if !k.scrambled {
		require.True(k.t, bytes.Equal(fuzzData[k.peerGot:k.peerGot+n], buf[:n]), "what the server read differs after %d bytes", k.peerGot)
	}
	k.peerGot += n
	return err
}

// lie notes that the server lies. The connection may end from here on; if fatal, it must.
func (k *talk) lie(fatal bool) {
	k.lied++
	k.fatal = k.fatal || fatal
	k.p.SetTimeout(200 * time.Millisecond)
}

// move makes the server's next move.
func (k *talk) move() error {
	p := k.p
	switch k.next() % moveCount {
	case moveWrite:
		_, err := p.Write(k.data(k.size()))
		return err
	case moveChain:
		b := k.data(k.size())
		i := len(b) * k.next() / 256
		j := i + (len(b)-i)*k.next()/256
		return p.WriteChain(b[:i], b[i:j], b[j:])
	case movePieces:
		b := k.data(k.size())
		i := len(b) * k.next() / 256
		return p.WritePieces(b[:i/2], b[i/2:i], b[i:])
	case moveKeepalives:
		return p.SendKeepalives(2 * k.next())
	case moveControl:
		msg := control(uint16(k.next()), uint16(k.next()), p.Window().Addr, p.Window().Length, p.Window().RKey)
		switch n := k.next(); {
		case n < 64:
			msg = append(msg, msg...)[:n]
		case n < 128:
			msg[0] = byte(n)
		}
		if what := predict(msg, true); what != harmless {
			k.lie(what == protocolError)
			k.scrambled = true
		}
		return p.SendRaw(msg)
	case moveAnnounce:
		length := [...]uint32{p.Window().Length, p.Window().Length, 1, 0, windowMax, windowMax + 1, math.MaxUint32}[k.next()%7]
		k.lie(length == 0 || length > windowMax)
		k.scrambled = true
		return p.Announce(p.Window().Addr, length, p.Window().RKey^uint32(k.next()&1))
	case moveAnnounceOwn:
		k.lie(false)
		k.scrambled = true
		return p.AnnounceWindow()
	case moveWriteRaw:
		data := fuzzData[:k.next()]
		imm := [...]uint32{0, uint32(len(data)), uint32(len(data) / 2), uint32(len(data)) + 1, 1 << 16, 1<<16 + 1, math.MaxUint32}[k.next()%7]
		offset := [...]int{rdmatest.Here, rdmatest.Here, 0, 1<<16 - 1, 1 << 16}[k.next()%5]
		k.intact = min(k.intact, p.Facts().BytesWritten)
		if offset != rdmatest.Here {
			k.intact = 0
		}
		k.lie(imm == 0 || imm > 1<<16)
		return p.WriteRaw(data, imm, offset)
	case moveBadKey:
		k.lie(true)
		return p.WriteBadKey(fuzzData[:1+k.next()])
	case moveRead:
		n := min(k.size(), int(k.taken.Load())-k.peerGot)
		if n == 0 {
			return p.Idle(2 * time.Millisecond)
		}
		return k.read(n)
	case moveIdle:
		return p.Idle(time.Duration(k.next()%16) * time.Millisecond)
	case moveStallReader:
		k.stall.Store(int64(k.next() % 64))
		return nil
	case moveFlush:
		return p.Flush()
	case moveDisconnect:
		k.peerEnded = true
		err := p.Disconnect()
		k.flushed = err == nil
		return err
	case moveAbort:
		k.peerEnded = true
		return p.Abort()
	default:
		k.startClose()
		return nil
	}
}

func (k *talk) startClose() {
	if k.closing == nil {
		k.closing = make(chan time.Duration, 1)
		go func() {
			took, _ := closeTimely(k.c)
			k.closing <- took
		}()
	}
}

// FuzzConversation: whatever a server does, in whatever order, our calls end and say why; and as long as it tells the truth,
// each byte arrives, in both directions.
func FuzzConversation(f *testing.F) {
	rdmaAddr(f)
	for server := range fuzzServers {
		f.Add([]byte{byte(server + server%2*len(fuzzServers)), moveWrite, 3, 0, moveRead, 100, 0, moveChain, 150, 7, 50, 100, moveRead, 60, 0, movePieces, 60, 1, 128,
			moveStallReader, 30, moveWrite, 200, 200, moveWrite, 100, 9, moveKeepalives, 50, moveFlush})
	}
	f.Add([]byte{0, moveWrite, 255, 255, moveStallReader, 60, moveWrite, 255, 255, moveWrite, 255, 255, moveWrite, 255, 255, moveDisconnect, 1})
	f.Add([]byte{1, moveRead, 50, 0, moveWrite, 40, 0, moveAbort})
	f.Add([]byte{1, moveRead, 50, 0, moveWrite, 40, 0, moveCloseOurs, 0, moveWrite, 9, 9, moveRead, 9, 9})
	f.Add([]byte{2, moveRead, 9, 9, moveControl, 0, 1, 200, moveWrite, 5, 5, moveControl, 7, 0, 200, moveIdle, 9})
	f.Add([]byte{0, moveWrite, 9, 9, moveControl, 2, 0, 31})
	f.Add([]byte{1, moveIdle, 15, moveAnnounce, 0, 0, moveRead, 20, 20, moveIdle, 10})
	f.Add([]byte{1, moveRead, 90, 0, moveAnnounce, 6, 0})
	f.Add([]byte{0, moveAnnounceOwn, moveWrite, 20, 20})
	for imm := range byte(7) {
		f.Add([]byte{0, moveWrite, 90, 90, moveWriteRaw, 100, imm, imm % 5, moveWrite, 1, 1})
	}
	f.Add([]byte{0, moveWriteRaw, 100, 5, 2}) // a byte more than the whole window
	f.Add([]byte{3, moveWrite, 90, 90, moveBadKey, 100, moveIdle, 10})

	var servers kept
	var listening [8]*rdmatest.Server
	count, resources, runs := 0, -1, 0
	f.Cleanup(servers.close)
	f.Fuzz(func(t *testing.T, input []byte) {
		w := watchdog(t, 20*time.Second)
		servers.TB = t
		k := &talk{t: t, input: input, seed: uint64(len(input)), intact: math.MaxInt, readErr: make(chan error, 1), writeErr: make(chan error, 1)}
		first := k.next()
		kind := first % len(fuzzServers)
		k.hangUp = first/len(fuzzServers)%2 == 1
		s := listening[kind]
		if s == nil {
			s = fake(&servers, fuzzServers[kind])
			listening[kind] = s
			if count++; count == 1 { // the first dial opens what stays open
				warmed := kept{TB: t}
				pair(&warmed, w, s, fuzzOptions)
				warmed.close()
			}
		}
		fds, goroutines := openFDs(t), runtime.NumGoroutine()
		conns := kept{TB: t}
		defer conns.close()
		k.c, k.p = pair(&conns, w, s, fuzzOptions)
		k.p.SetTimeout(5 * time.Second)
		if kind > lastProgressing {
			k.p.SetTimeout(200 * time.Millisecond)
		}
		go k.reader()
		go k.writer()

		for range fuzzMoves {
			if len(k.input) == 0 || k.peerEnded {
				break
			}
			lied := k.lied
			if err := k.move(); err != nil {
				if k.lied == 0 && !k.peerEnded && k.closing == nil && kind <= lastProgressing {
					t.Fatalf("the server told the truth, and met: %v", err)
				}
				if k.lied > lied {
					k.fatal = false // it may not have been said
				}
				break
			}
		}
		k.finish(kind <= lastProgressing)
		conns.close()

		// The pump ends soon after Close has.
		requireFalls(t, goroutines, runtime.NumGoroutine, "goroutines are left")
		requireFalls(t, fds, func() int { return openFDs(t) }, "file descriptors are left")
		if runs++; runs%64 == 1 { // it takes longer than a conversation
			n := rdmaResources(t) - count // a server that listens is one
			if resources >= 0 {
				require.LessOrEqual(t, n, resources, "RDMA resources are left")
			}
			resources = n
		}
	})
}

// finish brings a conversation to its end, and judges it.
func (k *talk) finish(progresses bool) {
	t, p := k.t, k.p
	within := func(what string, done func() bool) {
		for start := time.Now(); !done(); time.Sleep(time.Millisecond) {
			require.Less(t, time.Since(start), 5*time.Second, "%s; %+v, server %+v, %d taken, %d got", what, k.c.Stats(), p.Facts(), k.taken.Load(), k.got.Load())
		}
	}
	k.stop.Store(true)
	open := !k.peerEnded && k.closing == nil // nobody has ended it but, maybe, a lie
	if open && k.lied == 0 && progresses {   // all arrives, both ways
		within("the writer does not end", func() bool { return len(k.writeErr) > 0 })
		for k.peerGot < int(k.taken.Load()) {
			require.NoError(t, k.read(10_000))
		}
		within("not all that the server wrote was read", func() bool { return int(k.got.Load()) == p.Facts().BytesWritten })
		require.NoError(t, p.Err())
		if k.hangUp {
			k.peerEnded = true
			require.NoError(t, p.Disconnect())
			k.flushed = true
		}
	}
	if open && k.lied > 0 {
		_ = p.Idle(5 * time.Millisecond) // both sides get to know
	}
	written := p.Facts().BytesWritten
	var readErr error
	if open && (k.fatal || k.peerEnded) || k.flushed && k.closing == nil {
		within("the reader does not end", func() bool { return len(k.readErr) > 0 })
		readErr = <-k.readErr
	}
	expect := error(nil)
	switch {
	case readErr == nil:
	case open && k.fatal && k.lied == 1:
		expect = ErrProtocol
	case k.lied == 0 && k.flushed:
		expect = io.EOF
		require.EqualValues(t, written, k.got.Load(), "the server's last bytes were lost")
	}
	k.startClose()
	took := <-k.closing
	require.Less(t, took, closeTimeout+2*time.Second, "Close")
	if readErr == nil {
		within("the reader does not end after Close", func() bool { return len(k.readErr) > 0 })
		readErr = <-k.readErr
	}
	within("the writer does not end after Close", func() bool { return len(k.writeErr) > 0 })
	writeErr := <-k.writeErr
	t.Logf("%d lies, ended by the server %v; read %d of %d: %v; took %d, the server read %d: %v", k.lied, k.peerEnded, len(k.received),
		written, readErr, k.taken.Load(), k.peerGot, writeErr)

	require.ErrorIs(t, readErr, cmpOr(expect, readErr))
	for op, err := range map[string]error{"read": readErr, "write": writeErr} {
		if err == nil || op == "read" && err == io.EOF && k.lied+b2i(k.peerEnded) > 0 {
			continue
		}
		var opErr *net.OpError
		require.ErrorAs(t, err, &opErr)
		require.Equal(t, op, opErr.Op)
		known := []error{net.ErrClosed}
		if k.peerEnded {
			known = append(known, syscall.EPIPE)
		}
		if k.lied > 0 {
			known = append(known, syscall.EPIPE, ErrProtocol, syscall.ECONNRESET)
		}
		ok := false
		for _, e := range known {
			ok = ok || errors.Is(err, e)
		}
		require.True(t, ok, "%s: an error for which there was no reason: %v", op, err)
	}
	if k.intact == math.MaxInt {
		require.LessOrEqual(t, len(k.received), written, "more was read than was written")
	}
	sure := min(k.intact, len(k.received))
	require.True(t, bytes.Equal(fuzzData[:sure], k.received[:sure]), "what was read differs")
	if p.Err() == nil { // the server is told
		within("the server was not told", func() bool {
			_, err := p.Poll()
			return p.Gone() || err != nil
		})
	}
}

func cmpOr(a, b error) error {
	if a != nil {
		return a
	}
	return b
}

func b2i(b bool) int {
	if b {
		return 1
	}
	return 0
}
