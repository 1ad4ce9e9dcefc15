//go:build linux && cgo

package valkeyrdma

import (
	"bufio"
	"bytes"
	"context"
	"io"
	"math/rand/v2"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/valkeyrdma/valkeyrdma/internal/labtest"
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
	dir := filepath.Join("/sys/class/infiniband", labtest.Var(t, "VALKEYRDMA_DEVICE"), "ports/1/hw_counters")
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
	pub, err := net.Dial("tcp", labtest.Var(t, "VALKEYRDMA_TCP_ADDR"))
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

	// Ping-pong: here, without spinning, each side sleeps every time. The answer comes while the reader is about to.
	for i := range 2000 {
		go func() {
			_, _ = c.Write([]byte("ping"))
		}()
		readPeer(t, p, 4)
		answered := make(chan error, 1)
		go func() {
			_, err := p.Write([]byte("pong"))
			answered <- err
		}()
		_, err := io.ReadFull(c, make([]byte, 4))
		require.NoError(t, err, "round %d", i)
		require.NoError(t, <-answered)
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
