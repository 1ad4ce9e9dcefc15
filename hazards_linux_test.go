//go:build linux && cgo

package valkeyrdma

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/valkeyrdma/valkeyrdma/internal/rdmatest"
)

// Each hazard of the protocol has a test of its name. "make guards" shows that each fails when its guard is taken out:
// scripts/guards has the list.

var defaults = options{
	window: 1 << 20, staging: txStaging, recvDepth: recvDepth, sendDepth: sendDepth,
	spin: new(Dialer).spin(), spinners: maxSpinners(),
}

// fake starts a server that misbehaves on order.
func fake(t testing.TB, opt rdmatest.Options) *rdmatest.Server {
	t.Helper()
	host, _, err := net.SplitHostPort(rdmaAddr(t))
	require.NoError(t, err)
	s, err := rdmatest.Listen(host, 0, opt)
	require.NoError(t, err)
	t.Cleanup(func() { _ = s.Close() })
	return s
}

// pair connects to a fake server.
func pair(t testing.TB, w *watched, s *rdmatest.Server, o options) (*conn, *rdmatest.Peer) {
	t.Helper()
	type result struct {
		c   *conn
		err error
	}
	dialled := make(chan result, 1)
	go func() {
		ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
		defer cancel()
		c, err := dialSized(ctx, netip.MustParseAddrPort(s.Addr()), netip.AddrPort{}, o)
		dialled <- result{c, err}
	}()
	p, err := s.Accept(10 * time.Second)
	require.NoError(t, err)
	t.Cleanup(func() { _ = p.Close() })
	r := <-dialled
	require.NoError(t, r.err)
	t.Cleanup(func() { _ = r.c.Close() })
	return w.add(r.c), p
}

// pattern is data in which a byte out of place shows.
func pattern(n int) []byte {
	b := make([]byte, n)
	for i := range b {
		b[i] = byte(i*7 + i>>8*13 + i>>16*29)
	}
	return b
}

// readPeer reads n bytes at the fake server.
func readPeer(t testing.TB, p *rdmatest.Peer, n int) []byte {
	t.Helper()
	b := make([]byte, n)
	for got := 0; got < n; {
		m, err := p.Read(b[got:])
		require.NoError(t, err)
		got += m
	}
	return b
}

// deviceCounters reads the device's counters of receives that were not ready.
func deviceCounters(t testing.TB) map[string]int {
	t.Helper()
	dir := filepath.Join("/sys/class/infiniband", labAddr(t, "VALKEYRDMA_DEVICE"), "ports/1/hw_counters")
	counters := map[string]int{}
	for _, name := range []string{"rcvd_rnr_err", "send_rnr_err", "retry_rnr_exceeded_err"} {
		b, err := os.ReadFile(filepath.Join(dir, name))
		require.NoError(t, err)
		counters[name], err = strconv.Atoi(strings.TrimSpace(string(b)))
		require.NoError(t, err)
	}
	return counters
}

// H1: the server has 1024 receives and asks for no retries. Small writes while it sleeps stop at the credits and are merged,
// so that its device never finds a receive missing.
func TestH01Credits(t *testing.T) {
	c := dialLab(t, watchdog(t, time.Minute))
	r := bufio.NewReader(c)
	require.Equal(t, "+PONG", command(t, c, r, "PING"))
	before := deviceCounters(t)
	_, err := io.WriteString(c, "DEBUG SLEEP 3\r\n")
	require.NoError(t, err)
	const total = 10_000
	for range total {
		_, err := io.WriteString(c, "PING\r\n")
		require.NoError(t, err)
	}
	require.Equal(t, "+OK", reply(t, r))
	for range total {
		require.Equal(t, "+PONG", reply(t, r))
	}
	require.Equal(t, before, deviceCounters(t), "the device met receives that were not ready")
	s := c.Stats()
	require.NotZero(t, s.CreditWaits)
	require.Less(t, s.MessagesSent, uint64(total/4), "writes are merged while there are no credits")
}

// H1 again, with the server's own count: never more messages than receives, whatever it does between.
func TestH01CreditsExact(t *testing.T) {
	w := watchdog(t, time.Minute)
	c, p := pair(t, w, fake(t, rdmatest.Options{}), defaults)
	total := 0
	for range 5 { // the server sleeps...
		for range 3000 {
			n, err := io.WriteString(c, "PING\r\n")
			require.NoError(t, err)
			total += n
		}
		readPeer(t, p, 6*500) // ...and wakes for a while
	}
	for p.Facts().BytesRead < total {
		_, err := p.Read(make([]byte, 1<<16))
		require.NoError(t, err)
	}
	f := p.Facts()
	t.Logf("%+v", f)
	require.False(t, f.Overrun)
	require.LessOrEqual(t, f.MostUnpolled, 1000)
	require.Greater(t, f.MostUnpolled, 900, "the credits are used")
}

// H1, the second guard: should the server's receives run out all the same, our queue pair waits instead of dying.
func TestH01RNRRetry(t *testing.T) {
	w := watchdog(t, time.Minute)
	c, p := pair(t, w, fake(t, rdmatest.Options{Receives: 64, RNRTimer: 12}), defaults)
	for range 500 {
		_, err := io.WriteString(c, "PING\r\n")
		require.NoError(t, err)
	}
	time.Sleep(200 * time.Millisecond)
	require.Equal(t, strings.Repeat("PING\r\n", 500), string(readPeer(t, p, 3000)))
	require.True(t, p.Facts().Overrun)
	_, err := io.WriteString(c, "PING\r\n")
	require.NoError(t, err)
}

// What a connection opens with: the exchange of features, and the first window.
func TestFeatures(t *testing.T) {
	w := watchdog(t, time.Minute)
	_, p := pair(t, w, fake(t, rdmatest.Options{}), defaults)
	require.NoError(t, p.Idle(100*time.Millisecond))
	f := p.Facts()
	require.Equal(t, []rdmatest.Op{rdmatest.GetServerFeature, rdmatest.SetClientFeature, rdmatest.RegisterXferMemory}, f.First)
	require.Equal(t, 7, f.ClientRNRRetry, "the server is asked to wait for our receives without limit")
	require.Less(t, f.ClientRetry, 7, "which rxe takes for endless")
}

// A server that does not answer fences gets no credits counted, once its first reply has shown it.
func TestH01NoEcho(t *testing.T) {
	w := watchdog(t, time.Minute)
	c, p := pair(t, w, fake(t, rdmatest.Options{NoEcho: true}), defaults)
	_, err := io.WriteString(c, "HELLO\r\n")
	require.NoError(t, err)
	readPeer(t, p, 7)
	_, err = p.Write([]byte("+OK\r\n"))
	require.NoError(t, err)
	_, err = io.ReadFull(c, make([]byte, 5))
	require.NoError(t, err)
	for range 30 {
		for range 100 {
			_, err := io.WriteString(c, "PING\r\n")
			require.NoError(t, err)
		}
		readPeer(t, p, 600)
	}
	require.Equal(t, 1, p.Facts().Fences, "no more fences are sent to it")
	require.Greater(t, p.Facts().Messages, 1100)
}

// H2: our receives are posted again although nobody reads. A subscriber's callback may take its time.
func TestH02NobodyReads(t *testing.T) {
	c := dialLab(t, watchdog(t, 2*time.Minute))
	r := bufio.NewReader(c)
	_, err := io.WriteString(c, resp("SUBSCRIBE", "h02"))
	require.NoError(t, err)
	const header = "*3\r\n$9\r\nsubscribe\r\n$3\r\nh02\r\n:1\r\n"
	_, err = io.ReadFull(r, make([]byte, len(header)))
	require.NoError(t, err)

	// The callback sleeps while everything is published. The first messages go one at a time, each of them a write of the
	// server; of the rest it puts many into one.
	const total, single = 100_000, 6000
	pub, err := net.Dial("tcp", labAddr(t, "VALKEYRDMA_TCP_ADDR"))
	require.NoError(t, err)
	defer pub.Close()
	replies := bufio.NewReader(pub)
	publish := resp("PUBLISH", "h02", "x")
	for range single {
		_, err := io.WriteString(pub, publish)
		require.NoError(t, err)
		require.Equal(t, ":1", reply(t, replies), "the server has dropped the subscriber")
	}
	written := make(chan error, 1)
	go func() {
		_, err := io.WriteString(pub, strings.Repeat(publish, total-single))
		written <- err
	}()
	for range total - single {
		require.Equal(t, ":1", reply(t, replies), "the server has dropped the subscriber")
	}
	require.NoError(t, <-written)
	require.Greater(t, c.Stats().MessagesReceived, uint64(recvDepth+1024), "too few writes to tell")
	const message = "*3\r\n$7\r\nmessage\r\n$3\r\nh02\r\n$1\r\nx\r\n"
	buf := make([]byte, len(message))
	for i := range total {
		_, err := io.ReadFull(r, buf)
		require.NoError(t, err, "message %d", i)
		require.Equal(t, message, string(buf))
	}
}

// H2: where our receives do run dry, the peer waits as long as our min_rnr_timer says, not for the CM's 655 ms. 60 000 messages
// with few receives find them missing often enough that this test would otherwise end in its watchdog.
func TestH02RNRTimer(t *testing.T) {
	w := watchdog(t, time.Minute)
	o := defaults
	o.recvDepth = 2 * 32
	c, p := pair(t, w, fake(t, rdmatest.Options{}), o)
	before := deviceCounters(t)
	read := make(chan error, 1)
	const total = 60_000
	go func() {
		_, err := io.CopyN(io.Discard, c, total)
		read <- err
	}()
	for range total {
		_, err := p.Write([]byte("x"))
		require.NoError(t, err)
	}
	require.NoError(t, p.Flush())
	require.NoError(t, <-read)
	t.Logf("before %v, after %v", before, deviceCounters(t))
	require.Greater(t, deviceCounters(t)["send_rnr_err"], before["send_rnr_err"]+100, "the receives never ran dry: no test")
}

// H3: keepalives on an idle connection take receives too.
func TestH03Keepalives(t *testing.T) {
	w := watchdog(t, time.Minute)
	c, p := pair(t, w, fake(t, rdmatest.Options{}), defaults)
	require.NoError(t, p.SendKeepalives(20_000))
	require.NoError(t, p.Flush())
	_, err := p.Write([]byte("+PONG\r\n"))
	require.NoError(t, err)
	got := make([]byte, 7)
	_, err = io.ReadFull(c, got)
	require.NoError(t, err)
	require.Equal(t, "+PONG\r\n", string(got))
}

// H4, H5, H6, H7: windows of every size that a server may have, changing address, key and length with each announcement. The
// fake server checks that ours keep their length, that no write leaves its window, that each is filled to its last byte,
// and that ours are announced only when the last one is full.
func TestH04ToH07Windows(t *testing.T) {
	w := watchdog(t, 2*time.Minute)
	small := rand.New(rand.NewPCG(5, 6))
	for _, tc := range []struct {
		name  string
		opt   rdmatest.Options
		o     options
		total int
	}{
		{"64 KiB, two buffers", rdmatest.Options{Window: 64 << 10, Buffers: 2}, defaults, 5 << 20},
		{"16 MiB", rdmatest.Options{Window: 16 << 20}, defaults, 33 << 20},
		{"changing", rdmatest.Options{NextWindow: func(n int) int { return 1000 + n*7919 }}, defaults, 5 << 20},
		{"tiny", rdmatest.Options{NextWindow: func(int) int { return 1 + small.IntN(300) }}, defaults, 40 << 10},
		{"small staging, small windows of ours", rdmatest.Options{}, options{window: 64 << 10, staging: 4096, recvDepth: 64, sendDepth: 64}, 3 << 20},
		{"window of one staging", rdmatest.Options{Window: txStaging}, defaults, 3 << 20},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c, p := pair(t, w, fake(t, tc.opt), tc.o)
			data := pattern(tc.total)
			var wg sync.WaitGroup
			rng := rand.New(rand.NewPCG(7, 8))
			wg.Go(func() { // out, in pieces of all sizes
				for rest := data; len(rest) > 0; {
					n := min(1+rng.IntN(1<<(2+rng.IntN(18))), len(rest))
					m, err := c.Write(rest[:n])
					if err != nil || m != n {
						t.Errorf("write: %d of %d, %v", m, n, err)
						return
					}
					rest = rest[n:]
				}
			})
			require.True(t, bytes.Equal(data, readPeer(t, p, len(data))), "what the server got differs")
			wg.Wait()
			wg.Go(func() { // in
				got := make([]byte, len(data))
				if _, err := io.ReadFull(c, got); err != nil || !bytes.Equal(data, got) {
					t.Errorf("read: %v, equal %v", err, bytes.Equal(data, got))
				}
			})
			for rest := data; len(rest) > 0; {
				n := min(1+small.IntN(1<<(6+small.IntN(15))), len(rest))
				var err error
				if n > 2 && n%3 == 0 {
					err = p.WriteChain(rest[:n/3], rest[n/3:n/2], rest[n/2:n])
				} else {
					err = p.WritePieces(rest[:n/2], rest[n/2:n])
				}
				require.NoError(t, err)
				rest = rest[n:]
			}
			wg.Wait()
			require.NoError(t, p.Err())
			for _, win := range p.Windows() {
				require.EqualValues(t, tc.o.window, win.Length, "the length of our windows never changes")
			}
		})
	}
}

// H7: the second buffer. The next window opens when the last byte of the first has come, although nobody has read; steady
// small traffic never has a second buffer.
func TestH07SecondBuffer(t *testing.T) {
	w := watchdog(t, time.Minute)
	c, p := pair(t, w, fake(t, rdmatest.Options{}), defaults)
	_, err := p.Write(make([]byte, 1<<20-1))
	require.NoError(t, err)
	require.NoError(t, p.Flush())
	require.NoError(t, p.Idle(100*time.Millisecond))
	require.Len(t, p.Windows(), 1, "announced before the first was full")
	require.Less(t, c.Stats().LockedBytes, uint64(3<<19), "a second buffer before the first was full")

	_, err = p.Write(make([]byte, 1<<20))
	require.NoError(t, err)
	require.NoError(t, p.Idle(100*time.Millisecond))
	require.Len(t, p.Windows(), 2, "both windows are in use, and nobody has read")
	require.Less(t, c.Stats().LockedBytes, uint64(5<<19))

	_, err = io.ReadFull(c, make([]byte, 1<<20))
	require.NoError(t, err)
	require.NoError(t, p.Idle(100*time.Millisecond))
	require.Len(t, p.Windows(), 2, "the second is not full")
	_, err = p.Write(make([]byte, 1))
	require.NoError(t, err)
	require.NoError(t, p.Idle(100*time.Millisecond))
	require.Len(t, p.Windows(), 3)
	require.Equal(t, p.Windows()[0], p.Windows()[2])

	// Small traffic: the same memory for ever.
	c, p = pair(t, w, fake(t, rdmatest.Options{}), defaults)
	for range 1000 {
		_, err := p.Write([]byte("+PONG\r\n"))
		require.NoError(t, err)
		_, err = io.ReadFull(c, make([]byte, 7))
		require.NoError(t, err)
	}
	require.Less(t, c.Stats().LockedBytes, uint64(3<<19))
}

// H7, without memory for a second buffer: one does.
func TestH07OneBuffer(t *testing.T) {
	watchdog(t, time.Minute)
	// 2 MiB are enough for a connection, not for its second buffer; the child reads a value larger than a window.
	out := runChild(t, rdmaAddr(t), `exec prlimit --memlock=2097152 setpriv --bounding-set=-ipc_lock env VALKEYRDMA_TEST_LARGE=1 "$self"`)
	require.Contains(t, out, "large: 5242880 bytes, locked less than 1.5 MiB: true")
}

// H8, H9: with the send queue and the staging full, writes wait for completions, and what is being sent is not written over:
// the server's receives run out, so everything is sent more than once, from staging.
func TestH08H09SendAccounting(t *testing.T) {
	w := watchdog(t, 2*time.Minute)
	for _, o := range []options{defaults, {window: 1 << 20, staging: 4096, recvDepth: 256, sendDepth: 32},
		{window: 1 << 20, staging: 64 << 10, recvDepth: 256, sendDepth: 64}} {
		c, p := pair(t, w, fake(t, rdmatest.Options{Receives: 8, RNRTimer: 12}), o)
		data := pattern(600_000)
		var wg sync.WaitGroup
		wg.Go(func() {
			for i := 0; i < len(data); i += 400 {
				if _, err := c.Write(data[i : i+400]); err != nil {
					t.Errorf("write at %d: %v", i, err)
					return
				}
			}
		})
		time.Sleep(50 * time.Millisecond)
		require.True(t, bytes.Equal(data, readPeer(t, p, len(data))), "what the server got differs")
		wg.Wait()
		require.NoError(t, p.Err())
	}
}

// H10, H11: reader and writer share a completion queue. Request and reply with both directions busy, in every order, from many
// goroutines: a lost wake-up ends in the watchdog, since the fake server sends no keepalives that would hide it.
func TestH10H11WakeUps(t *testing.T) {
	for name, spin := range map[string]time.Duration{"asleep": 0, "spinning": defaults.spin} {
		t.Run(name, func(t *testing.T) { testWakeUps(t, spin) })
	}
}

func testWakeUps(t *testing.T, spin time.Duration) {
	w := watchdog(t, 2*time.Minute)
	s := fake(t, rdmatest.Options{Window: 64 << 10})
	o := defaults
	o.spin = spin
	o.window, o.staging, o.sendDepth = 64<<10, 8192, 32
	c, p := pair(t, w, s, o)
	const total = 8 << 20
	echoed := make(chan error, 1)
	go func() { // an echo, which is back-pressured in both directions
		buf := make([]byte, 16<<10)
		for n := 0; n < total; {
			m, err := p.Read(buf)
			if err == nil {
				_, err = p.Write(buf[:m])
			}
			if err != nil {
				echoed <- err
				return
			}
			n += m
		}
		echoed <- nil
	}()
	var wg sync.WaitGroup
	wg.Go(func() {
		rng := rand.New(rand.NewPCG(9, 10))
		buf := make([]byte, 40<<10)
		for n := 0; n < total; {
			m := min(1+rng.IntN(len(buf)), total-n)
			if _, err := c.Write(buf[:m]); err != nil {
				t.Errorf("write: %v", err)
				return
			}
			n += m
		}
	})
	_, err := io.CopyN(io.Discard, c, total)
	require.NoError(t, err)
	require.NoError(t, <-echoed)
	wg.Wait()

	// Ping-pong: here, without spinning, each side sleeps every time.
	for i := range 2000 {
		go func() {
			_, _ = c.Write([]byte("ping"))
		}()
		readPeer(t, p, 4)
		_, err := p.Write([]byte("pong"))
		require.NoError(t, err)
		_, err = io.ReadFull(c, make([]byte, 4))
		require.NoError(t, err, "round %d", i)
	}
}

// H10, where it shows: a single reply, to a reader that sleeps, while a writer drains the queue all the time for room in the
// staging. If the writer takes the reply's completion and tells nobody, nothing else will ever wake the reader.
func TestH10WriterWakesReader(t *testing.T) {
	w := watchdog(t, 2*time.Minute)
	o := defaults
	o.staging, o.sendDepth = 4096, 32 // the writer waits for room, and looks for it itself
	c, p := pair(t, w, fake(t, rdmatest.Options{Window: 64 << 10}), o)
	const window = 64 << 10
	data := make([]byte, 4*window)
	for round := range 300 {
		slept := c.Stats().Sleeps
		read := make(chan error, 1)
		go func() {
			_, err := io.ReadFull(c, make([]byte, 4))
			read <- err
		}()
		require.Eventually(t, func() bool { return c.Stats().Sleeps > slept }, 10*time.Second, time.Millisecond)
		written := make(chan error, 1)
		go func() {
			_, err := c.Write(data)
			written <- err
		}()
		readPeer(t, p, 2*window) // a new window opens, and the writer is at work while the reply comes
		_, err := p.Write([]byte("pong"))
		require.NoError(t, err)
		readPeer(t, p, 2*window)
		require.NoError(t, <-written)
		require.NoError(t, <-read, "round %d", round)
	}
}

// H12: connections leave nothing behind, 2000 of them.
func TestH12Teardown(t *testing.T) {
	watchdog(t, 5*time.Minute)
	s := fake(t, rdmatest.Options{Window: 64 << 10, Receives: 64, Sends: 64})
	addr := netip.MustParseAddrPort(s.Addr())
	o := options{window: 64 << 10, staging: 16 << 10, recvDepth: 64, sendDepth: 64}
	round := func() {
		accepted := make(chan *rdmatest.Peer, 1)
		go func() {
			p, _ := s.Accept(10 * time.Second)
			accepted <- p
		}()
		c, err := dialSized(context.Background(), addr, netip.AddrPort{}, o)
		require.NoError(t, err)
		p := <-accepted
		require.NotNil(t, p)
		_, err = c.Write([]byte("PING\r\n"))
		require.NoError(t, err)
		readPeer(t, p, 6)
		closed := make(chan error, 1)
		go func() { closed <- c.Close() }()
		_, err = p.Read(make([]byte, 1))
		require.True(t, err == io.EOF, "%v", err)
		require.NoError(t, <-closed)
		require.NoError(t, p.Close())
	}
	total := 2000
	if testing.Short() { // with a sanitizer
		total = 200
	}
	for range 20 {
		round()
	}
	fds, goroutines, resources, rss := openFDs(t), runtime.NumGoroutine(), rdmaResources(t), residentKB(t)
	for range total {
		round()
	}
	requireNoLeak(t, fds, goroutines, resources)
	t.Logf("resident: %d KiB before, %d KiB after", rss, residentKB(t))
	require.Less(t, residentKB(t)-rss, 8<<10, "resident memory grows")
}

func residentKB(t testing.TB) int {
	t.Helper()
	runtime.GC()
	status, err := os.ReadFile("/proc/self/status")
	require.NoError(t, err)
	for line := range strings.Lines(string(status)) {
		if v, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			n, err := strconv.Atoi(strings.Fields(v)[0])
			require.NoError(t, err)
			return n
		}
	}
	t.Fatal("no VmRSS")
	return 0
}

// H13: a disconnect that follows data at once loses none of it.
func TestH13DisconnectAfterData(t *testing.T) {
	w := watchdog(t, time.Minute)
	s := fake(t, rdmatest.Options{})
	for _, size := range []int{1, 5000, 900_000} {
		for range 5 {
			c, p := pair(t, w, s, defaults)
			data := pattern(size)
			for rest := data; len(rest) > 0; {
				n := min(4096, len(rest))
				_, err := p.Write(rest[:n])
				require.NoError(t, err)
				rest = rest[n:]
			}
			require.NoError(t, p.Disconnect())
			got, err := io.ReadAll(c)
			require.NoError(t, err)
			require.True(t, bytes.Equal(data, got), "%d of %d bytes", len(got), len(data))
			_, err = c.Read(make([]byte, 1))
			require.True(t, err == io.EOF, "a bare EOF: %v", err)
			_, err = c.Write([]byte("x"))
			require.ErrorIs(t, err, syscall.EPIPE)
			require.NoError(t, c.Close())
			require.NoError(t, p.Close())
		}
	}
}

// H13: after an error we hang up too, or the server would keep the client.
func TestH13ErrorHangsUp(t *testing.T) {
	w := watchdog(t, time.Minute)
	c, p := pair(t, w, fake(t, rdmatest.Options{}), defaults)
	require.NoError(t, p.SendRaw([]byte{0, 77, 31: 0}))
	_, err := c.Read(make([]byte, 1))
	require.ErrorIs(t, err, ErrProtocol)
	require.Eventually(t, func() bool { _, _ = p.Poll(); return p.Gone() }, 5*time.Second, 10*time.Millisecond,
		"the server was not told")
}

// H14: the flushed requests that follow an error do not hide it.
func TestH14FirstError(t *testing.T) {
	w := watchdog(t, time.Minute)
	c, p := pair(t, w, fake(t, rdmatest.Options{}), defaults)
	require.NoError(t, p.Announce(p.Window().Addr, 1<<20, p.Window().RKey)) // early: an error with a name of its own
	for range 100 {
		if _, err := c.Write(make([]byte, 1000)); err != nil {
			break
		}
	}
	for range 3 {
		_, err := c.Read(make([]byte, 1))
		require.ErrorIs(t, err, ErrProtocol)
		require.ErrorContains(t, err, "a new window after")
		_, err = c.Write([]byte("x"))
		require.ErrorContains(t, err, "a new window after")
		time.Sleep(20 * time.Millisecond)
	}
}

// H15: Close delivers what Write took, also when the last requests asked for no completion, the window is used up, and the
// server is slow; and it gives up on one that reads nothing.
func TestH15CloseDelivers(t *testing.T) {
	w := watchdog(t, time.Minute)
	for _, size := range []int{1, 300, 5000, 200_000} {
		c, p := pair(t, w, fake(t, rdmatest.Options{Window: 64 << 10}), defaults)
		data := pattern(size)
		_, err := c.Write(data)
		require.NoError(t, err)
		closed := make(chan error, 1)
		go func() { closed <- c.Close() }()
		require.True(t, bytes.Equal(data, readPeer(t, p, size)))
		_, err = p.Read(make([]byte, 1))
		require.True(t, err == io.EOF, "%v", err)
		require.NoError(t, <-closed)
	}
	// What still waits for a window or a fence when Close comes is sent when that comes, and Close does not wait longer.
	c, p := pair(t, w, fake(t, rdmatest.Options{Window: 64 << 10}), defaults)
	_, err := c.Write(make([]byte, 64<<10+1))
	require.NoError(t, err)
	closed := make(chan error, 1)
	go func() { closed <- c.Close() }()
	time.Sleep(20 * time.Millisecond)
	readPeer(t, p, 64<<10+1)
	_, err = p.Read(make([]byte, 1))
	require.True(t, err == io.EOF, "%v", err)
	require.NoError(t, <-closed)

	c, _ = pair(t, w, fake(t, rdmatest.Options{Window: 64 << 10}), defaults)
	_, err = c.Write(make([]byte, 100_000)) // more than the window, less than the staging
	require.NoError(t, err)
	require.NoError(t, c.Close())
}

// H17: what is asked for is clamped to what the device has.
func TestH17DeviceLimits(t *testing.T) {
	w := watchdog(t, time.Minute)
	o := defaults
	o.recvDepth, o.sendDepth = 1<<20, 16<<10 // rxe: max_qp_wr 1 Mi, max_cqe 32 Ki
	addr := netip.MustParseAddrPort(rdmaAddr(t))
	c, err := dialSized(context.Background(), addr, netip.AddrPort{}, o)
	require.NoError(t, err)
	defer c.Close()
	w.add(c)
	require.Less(t, c.Stats().ReceiveDepth, 1<<20)
	require.Equal(t, "+PONG", command(t, c, bufio.NewReader(c), "PING"))
}

// H20: dials that get a refusal, nothing at all, or something that then goes away.
func TestH20DialAnswers(t *testing.T) {
	watchdog(t, time.Minute)
	abandonFor(t, 200*time.Millisecond)
	dial := func(s *rdmatest.Server) (net.Conn, error) {
		return DialCtxFn(context.Background(), s.Addr(), &net.Dialer{Timeout: time.Second}, nil)
	}
	answer := func(s *rdmatest.Server, do func(*rdmatest.Request)) {
		go func() {
			if r, err := s.Request(5 * time.Second); err == nil {
				do(r)
			}
		}()
	}
	for _, tc := range []struct {
		name string
		opt  rdmatest.Options
		do   func(*rdmatest.Request)
		is   error
		text string
	}{
		{"rejected", rdmatest.Options{}, func(r *rdmatest.Request) { _ = r.Reject() }, ErrDropped, "maxclients"},
		{"dropped", rdmatest.Options{}, func(r *rdmatest.Request) { _ = r.Drop() }, ErrDropped, "maxclients"},
		{"never answered", rdmatest.Options{}, func(r *rdmatest.Request) { time.Sleep(2 * time.Second); _ = r.Close() },
			os.ErrDeadlineExceeded, "waiting for the server to accept"},
		{"silent after accept", rdmatest.Options{Silent: true}, func(r *rdmatest.Request) {
			if p, err := r.Accept(); err == nil {
				time.Sleep(2 * time.Second)
				_ = p.Close()
			}
		}, os.ErrDeadlineExceeded, "announce its receive window"},
		{"closed before its window", rdmatest.Options{Silent: true}, func(r *rdmatest.Request) {
			if p, err := r.Accept(); err == nil {
				_ = p.Close()
			}
		}, ErrDropped, "maxclients"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := fake(t, tc.opt)
			answer(s, tc.do)
			conn, err := dial(s)
			requireDialError(t, conn, err)
			require.ErrorIs(t, err, tc.is)
			require.ErrorContains(t, err, tc.text)
		})
	}
	require.Eventually(t, func() bool { return abandonedDials.Load() == 0 }, 5*time.Second, 10*time.Millisecond)
}

// H21: a device that is taken away ends the connection; the process lives. It happens in a child, because librdmacm keeps each
// device open for the life of the process, for the end of which the kernel waits before it lets go of an rxe device.
func TestH21DeviceRemoved(t *testing.T) {
	watchdog(t, time.Minute)
	rdmaAddr(t)
	const dev = "vrgone0"
	run := func(args ...string) {
		t.Helper()
		out, err := exec.Command(args[0], args[1:]...).CombinedOutput()
		require.NoError(t, err, "%v: %s", args, out)
	}
	run("ip", "link", "add", dev, "type", "dummy")
	t.Cleanup(func() { run("ip", "link", "delete", dev) })
	run("ip", "link", "set", dev, "mtu", "4200", "up")
	run("ip", "addr", "add", "198.18.71.1/24", "dev", dev)
	run("rdma", "link", "add", dev, "type", "rxe", "netdev", dev)
	self, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.Command(self, "-test.v", "-test.run=^TestH21Child$")
	cmd.Env = append(os.Environ(), childOfH21+"="+dev)
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.Contains(t, string(out), "--- PASS: TestH21Child")
	require.Eventually(t, func() bool { // the child's command goes on without it
		out, err := exec.Command("rdma", "link", "show").Output()
		return err == nil && !strings.Contains(string(out), dev)
	}, 10*time.Second, 50*time.Millisecond)
}

const childOfH21 = "VALKEYRDMA_TEST_H21"

func TestH21Child(t *testing.T) {
	dev := os.Getenv(childOfH21)
	if dev == "" {
		return // TestH21DeviceRemoved runs it
	}
	w := watchdog(t, 30*time.Second)
	s, err := rdmatest.Listen("198.18.71.1", 0, rdmatest.Options{})
	require.NoError(t, err)
	c, _ := pair(t, w, s, defaults)
	require.NoError(t, exec.Command("rdma", "link", "delete", dev).Start())
	_, err = c.Read(make([]byte, 1))
	require.ErrorIs(t, err, ErrNoDevice)
	require.ErrorContains(t, err, "gone")
	_, err = c.Write([]byte("x"))
	require.ErrorIs(t, err, ErrNoDevice)
	require.NoError(t, c.Close())
}

// H23: a server that dies under load gives a clean error to every call in flight, and to each after it.
func TestH23ServerKilled(t *testing.T) {
	w := watchdog(t, time.Minute)
	addr := startServer(t, "--protected-mode", "no")
	c := dialTo(t, w, addr)
	var wg sync.WaitGroup
	readErr, writeErr := error(nil), error(nil)
	wg.Go(func() { _, readErr = io.Copy(io.Discard, c) })
	wg.Go(func() {
		for writeErr == nil {
			_, writeErr = c.Write(bytes.Repeat([]byte("PING\r\n"), 1000))
		}
	})
	time.Sleep(300 * time.Millisecond)
	require.NoError(t, exec.Command("pkill", "-KILL", "-f", ":6400").Run())
	wg.Wait()
	t.Logf("read: %v; write: %v", readErr, writeErr)
	require.Error(t, writeErr)
	var op *net.OpError
	require.ErrorAs(t, writeErr, &op)
	_, err := c.Write([]byte("x"))
	require.Error(t, err)
}

// Everything a server can do wrong, and what the caller is told. Within a second; nothing is left over.
func TestMisbehaviour(t *testing.T) {
	w := watchdog(t, 2*time.Minute)
	type step func(*rdmatest.Peer) error
	control := func(opcode uint16, size int) step {
		return func(p *rdmatest.Peer) error {
			msg := make([]byte, size)
			if size >= 2 {
				binary.BigEndian.PutUint16(msg, opcode)
			}
			return p.SendRaw(msg)
		}
	}
	announce := func(length uint32) step {
		return func(p *rdmatest.Peer) error { return p.Announce(p.Window().Addr, length, p.Window().RKey) }
	}
	for _, tc := range []struct {
		name string
		do   step
		is   error
		text string
	}{
		{"wrong opcode", control(4, 32), ErrProtocol, "unknown opcode 4"},
		{"opcode ffff", control(0xffff, 32), ErrProtocol, "unknown opcode 65535"},
		{"empty control message", control(3, 0), ErrProtocol, "a control message of 0 bytes"},
		{"short control message", control(3, 31), ErrProtocol, "a control message of 31 bytes"},
		{"long control message", control(3, 40), ErrProtocol, "more than 32 bytes"},
		{"immediate data of 0", func(p *rdmatest.Peer) error { return p.WriteRaw([]byte("x"), 0, 0) }, ErrProtocol, "a write of 0 bytes"},
		{"immediate data past the window", func(p *rdmatest.Peer) error { return p.WriteRaw([]byte("x"), 1<<20+1, 0) }, ErrProtocol,
			"a write of 1048577 bytes was announced where 1048576"},
		{"immediate data ffffffff", func(p *rdmatest.Peer) error { return p.WriteRaw([]byte("x"), 0xffffffff, 0) }, ErrProtocol, "4294967295"},
		{"write past the window", func(p *rdmatest.Peer) error { return p.WriteRaw(make([]byte, 100), 100, 1<<20-50) }, ErrProtocol, "the device refused a message"},
		{"write with a wrong key", func(p *rdmatest.Peer) error { return p.WriteBadKey([]byte("x")) }, ErrProtocol, "the device refused a message"},
		{"window before the last is used", announce(1 << 20), ErrProtocol, "a new window after 0 of 1048576 bytes"},
		{"window of 0", announce(0), ErrProtocol, "a window of 0 bytes"},
		{"window of 4 GiB", announce(0xffffffff), ErrProtocol, "a window of 4294967295 bytes"},
		{"disconnect", (*rdmatest.Peer).Disconnect, io.EOF, "EOF"},
		{"abort", (*rdmatest.Peer).Abort, io.EOF, "EOF"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			s := fake(t, rdmatest.Options{})
			fds, goroutines, resources := openFDs(t), runtime.NumGoroutine(), rdmaResources(t)
			c, p := pair(t, w, s, defaults)
			start := time.Now()
			require.NoError(t, tc.do(p))
			_, err := c.Read(make([]byte, 1))
			t.Logf("%v: %v", time.Since(start).Round(time.Millisecond), err)
			require.Less(t, time.Since(start), 5*time.Second)
			require.ErrorIs(t, err, tc.is)
			require.ErrorContains(t, err, tc.text)
			_, err = c.Write([]byte("x"))
			require.Error(t, err)
			require.NoError(t, c.Close())
			_ = p.Close()
			requireNoLeak(t, fds, goroutines, resources)
		})
	}

	t.Run("key that does not exist", func(t *testing.T) {
		s := fake(t, rdmatest.Options{Silent: true})
		accepted := make(chan *rdmatest.Peer, 1)
		go func() {
			p, err := s.Accept(5 * time.Second)
			if err == nil {
				err = p.Announce(0x1000, 1<<20, 0xdeadbeef)
			}
			if err != nil {
				t.Errorf("accept: %v", err)
			}
			accepted <- p
		}()
		c, err := dialSized(context.Background(), netip.MustParseAddrPort(s.Addr()), netip.AddrPort{}, defaults)
		require.NoError(t, err)
		defer c.Close()
		p := <-accepted
		defer p.Close()
		_, err = c.Write([]byte("x"))
		require.NoError(t, err)
		_, err = c.Read(make([]byte, 1))
		require.ErrorIs(t, err, syscall.ECONNRESET)
		require.ErrorContains(t, err, "remote access error")
	})

	// Both at once, since it takes the device's 16 s of retries: a server that is gone while we write, and one while nobody
	// writes, where it is a probe that finds out.
	t.Run("vanishes", func(t *testing.T) {
		c, p := pair(t, w, fake(t, rdmatest.Options{}), defaults)
		o := defaults
		o.probe = 200 * time.Millisecond
		idle, idlePeer := pair(t, w, fake(t, rdmatest.Options{}), o)
		require.NoError(t, idlePeer.Idle(time.Second))
		require.Positive(t, idlePeer.Facts().Controls[rdmatest.Keepalive], "nothing came, so the server is probed")

		require.NoError(t, p.Vanish())
		require.NoError(t, idlePeer.Vanish())
		_, err := c.Write([]byte("x"))
		require.NoError(t, err)
		start := time.Now()
		for _, c := range []*conn{c, idle} {
			_, err = c.Read(make([]byte, 1))
			t.Logf("%v: %v", time.Since(start).Round(time.Millisecond), err)
			require.ErrorIs(t, err, syscall.ETIMEDOUT)
			require.ErrorContains(t, err, "retry counter exceeded")
		}
	})

	t.Run("never posts receives again", func(t *testing.T) {
		c, p := pair(t, w, fake(t, rdmatest.Options{NoRepost: true}), defaults)
		require.NoError(t, c.SetWriteDeadline(time.Now().Add(500*time.Millisecond)))
		var err error
		sent := 0
		for err == nil {
			var n int
			n, err = c.Write(make([]byte, 100))
			sent += n
		}
		require.ErrorIs(t, err, os.ErrDeadlineExceeded)
		require.GreaterOrEqual(t, sent, txStaging)
		_ = p.Close()
		_, err = c.Read(make([]byte, 1))
		require.Error(t, err)
	})
}

// The error that each situation must be: the table in the README.
func TestErrors(t *testing.T) {
	w := watchdog(t, time.Minute)
	s := fake(t, rdmatest.Options{Window: 64 << 10})
	past := time.Now().Add(-time.Second)
	for _, tc := range []struct {
		name string
		do   func(*conn, *rdmatest.Peer) (int, error)
		op   string // "": a bare error
		is   error
		temp bool
		n    int
	}{
		{"read past its deadline", func(c *conn, _ *rdmatest.Peer) (int, error) {
			_ = c.SetReadDeadline(past)
			return c.Read(make([]byte, 1))
		}, "read", os.ErrDeadlineExceeded, true, 0},
		{"write past its deadline", func(c *conn, _ *rdmatest.Peer) (int, error) {
			_ = c.SetWriteDeadline(past)
			return c.Write(make([]byte, 1))
		}, "write", os.ErrDeadlineExceeded, true, 0},
		{"write that runs into its deadline", func(c *conn, _ *rdmatest.Peer) (int, error) {
			_ = c.SetDeadline(time.Now().Add(50 * time.Millisecond))
			return c.Write(make([]byte, 1<<20))
		}, "write", os.ErrDeadlineExceeded, true, 64<<10 + txStaging},
		{"read after Close", func(c *conn, _ *rdmatest.Peer) (int, error) {
			_ = c.Close()
			return c.Read(make([]byte, 1))
		}, "read", net.ErrClosed, false, 0},
		{"write after Close", func(c *conn, _ *rdmatest.Peer) (int, error) {
			_ = c.Close()
			return c.Write(make([]byte, 1))
		}, "write", net.ErrClosed, false, 0},
		{"read of nothing after Close", func(c *conn, _ *rdmatest.Peer) (int, error) {
			_ = c.Close()
			return c.Read(nil)
		}, "read", net.ErrClosed, false, 0},
		{"Close after Close", func(c *conn, _ *rdmatest.Peer) (int, error) {
			_ = c.Close()
			return 0, c.Close()
		}, "close", net.ErrClosed, false, 0},
		{"SetDeadline after Close", func(c *conn, _ *rdmatest.Peer) (int, error) {
			_ = c.Close()
			return 0, errors.Join(c.SetDeadline(past), c.SetReadDeadline(past), c.SetWriteDeadline(past))
		}, "set", net.ErrClosed, false, 0},
		{"read after the server closed", func(c *conn, p *rdmatest.Peer) (int, error) {
			_ = p.Disconnect()
			return c.Read(make([]byte, 1))
		}, "", io.EOF, false, 0},
		{"write after the server closed", func(c *conn, p *rdmatest.Peer) (int, error) {
			_ = p.Disconnect()
			_, _ = c.Read(make([]byte, 1))
			return c.Write(make([]byte, 1))
		}, "write", syscall.EPIPE, false, 0},
		{"read after nonsense", func(c *conn, p *rdmatest.Peer) (int, error) {
			_ = p.SendRaw(nil)
			return c.Read(make([]byte, 1))
		}, "read", ErrProtocol, false, 0},
		{"write after nonsense", func(c *conn, p *rdmatest.Peer) (int, error) {
			_ = p.SendRaw(nil)
			_, _ = c.Read(make([]byte, 1))
			return c.Write(make([]byte, 1))
		}, "write", ErrProtocol, false, 0},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c, p := pair(t, w, s, defaults)
			n, err := tc.do(c, p)
			require.ErrorIs(t, err, tc.is)
			require.Equal(t, tc.n, n)
			if tc.op == "" {
				require.True(t, err == tc.is, "bare: %v", err)
				return
			}
			var op *net.OpError
			require.ErrorAs(t, err, &op)
			require.Equal(t, tc.op, op.Op)
			require.Equal(t, "rdma", op.Net)
			require.Equal(t, c.LocalAddr(), op.Source)
			require.Equal(t, c.RemoteAddr(), op.Addr)
			require.Equal(t, tc.temp, op.Timeout())
		})
	}
}

// One call into C for each Read and Write that need not wait, and no allocation.
func TestCallsIntoC(t *testing.T) {
	w := watchdog(t, time.Minute)
	c, p := pair(t, w, fake(t, rdmatest.Options{}), defaults)
	const total = 16
	buf := []byte("PING\r\n")
	settle := func() { // the pump has nothing more to do
		require.NoError(t, p.Idle(50*time.Millisecond))
		time.Sleep(50 * time.Millisecond)
	}
	for range 300 {
		_, err := p.Write(buf)
		require.NoError(t, err)
	}
	settle()
	before := runtime.NumCgoCall()
	for range total {
		_, err := c.Read(buf)
		require.NoError(t, err)
	}
	require.EqualValues(t, total, runtime.NumCgoCall()-before, "calls into C for %d Reads", total)
	require.Zero(t, testing.AllocsPerRun(100, func() { _, _ = c.Read(buf) }))

	before = runtime.NumCgoCall()
	for range total {
		_, err := c.Write(buf)
		require.NoError(t, err)
	}
	require.EqualValues(t, total, runtime.NumCgoCall()-before, "calls into C for %d Writes", total)
	require.Zero(t, testing.AllocsPerRun(100, func() { _, _ = c.Write(buf) }))
	require.Zero(t, testing.AllocsPerRun(100, func() { _ = c.SetDeadline(time.Now().Add(time.Hour)) }))
}
