//go:build linux && cgo

package rdmatest_test

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"slices"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/valkeyrdma/valkeyrdma"
	"github.com/valkeyrdma/valkeyrdma/internal/labtest"
	"github.com/valkeyrdma/valkeyrdma/internal/rdmatest"
)

// listen starts a server in the laboratory, with a watchdog on the test.
func listen(t *testing.T, opt rdmatest.Options) *rdmatest.Server {
	t.Helper()
	addr := labtest.Var(t, "VALKEYRDMA_RDMA_ADDR")
	limit := time.Minute
	if os.Getenv("RDMATEST_VANISH") != "" { // measuring, by hand
		limit = time.Hour
	}
	labtest.Watchdog(t, limit, nil)
	host, _, err := net.SplitHostPort(addr)
	require.NoError(t, err)
	s, err := rdmatest.Listen(host, 0, opt)
	require.NoError(t, err)
	t.Cleanup(func() { _ = s.Close() })
	return s
}

type dialed struct {
	c   net.Conn
	err error
}

func dial(s *rdmatest.Server, timeout time.Duration) <-chan dialed {
	ch := make(chan dialed, 1)
	go func() {
		c, err := valkeyrdma.DialCtxFn(context.Background(), s.Addr(), &net.Dialer{Timeout: timeout}, nil)
		ch <- dialed{c, err}
	}()
	return ch
}

// connect makes a pair.
func connect(t *testing.T, s *rdmatest.Server) (net.Conn, *rdmatest.Peer) {
	t.Helper()
	ch := dial(s, 10*time.Second)
	p, err := s.Accept(10 * time.Second)
	require.NoError(t, err)
	d := <-ch
	require.NoError(t, d.err)
	t.Cleanup(func() {
		_ = d.c.Close()
		_ = p.Close()
	})
	return d.c, p
}

func random(n int) []byte {
	b := make([]byte, n)
	_, _ = rand.NewChaCha8([32]byte{byte(n), byte(n >> 8), 1}).Read(b)
	return b
}

// stats reads a counter of the client's, which has no name outside of its package.
func stats(c net.Conn) valkeyrdma.Stats { return c.(interface{ Stats() valkeyrdma.Stats }).Stats() }

func TestPingPong(t *testing.T) {
	c, p := connect(t, listen(t, rdmatest.Options{}))
	buf := make([]byte, 64)
	for range 100 {
		_, err := c.Write([]byte("ping"))
		require.NoError(t, err)
		n, err := p.Read(buf)
		require.NoError(t, err)
		require.Equal(t, "ping", string(buf[:n]))
		_, err = p.Write([]byte("pong"))
		require.NoError(t, err)
		n, err = c.Read(buf)
		require.NoError(t, err)
		require.Equal(t, "pong", string(buf[:n]))
	}
	f := p.Facts()
	t.Logf("%+v", f)
	require.Equal(t, 100, f.Messages)
	require.Equal(t, 400, f.BytesRead)
	require.Equal(t, 400, f.BytesWritten)
	require.Equal(t, 1, f.Fences)
	require.Equal(t, 1, f.Controls[rdmatest.RegisterXferMemory])
	require.Equal(t, 1, f.WindowsSent)
	require.Equal(t, []rdmatest.Op{rdmatest.GetServerFeature, rdmatest.SetClientFeature, rdmatest.RegisterXferMemory,
		rdmatest.Data}, f.First[:4])
	require.Equal(t, 7, f.ClientRNRRetry)
	require.False(t, f.Overrun)
	require.Len(t, p.Windows(), 1)
	require.Equal(t, p.Windows()[0], p.ClientWindow())

	require.NoError(t, c.Close())
	_, err := p.Read(buf)
	require.Equal(t, io.EOF, err)
	_, err = p.Write(buf)
	require.ErrorIs(t, err, syscall.EPIPE)
	require.NoError(t, p.Close())
	require.ErrorIs(t, p.Close(), net.ErrClosed)
	_, err = p.Read(buf)
	require.ErrorIs(t, err, net.ErrClosed)
}

func TestStreams(t *testing.T) {
	sizes := []int{64 << 10, 200_000, 1 << 20, 77_777}
	for name, opt := range map[string]rdmatest.Options{
		"real":         {},
		"small window": {Window: 64 << 10},
		"two buffers":  {Window: 64 << 10, Buffers: 2},
		"new sizes":    {NextWindow: func(n int) int { return sizes[n%len(sizes)] }},
		"short queues": {Receives: 64, Sends: 8, RNRTimer: 12},
		"odd window":   {Window: 70_001, Buffers: 3},
	} {
		t.Run(name, func(t *testing.T) {
			c, p := connect(t, listen(t, opt))
			data := random(8<<20 + 12345)
			var wg sync.WaitGroup
			defer wg.Wait()
			wg.Go(func() {
				for rest := data; len(rest) > 0; {
					n, err := c.Write(rest[:min(len(rest), 100_000)])
					if err != nil {
						t.Errorf("the client's write: %v", err)
						return
					}
					rest = rest[n:]
				}
			})
			sum := sha256.New()
			buf := make([]byte, 50_000)
			for n := 0; n < len(data); {
				m, err := p.Read(buf)
				require.NoError(t, err)
				sum.Write(buf[:m])
				n += m
			}
			require.Equal(t, sha256.Sum256(data), [32]byte(sum.Sum(nil)))
			wg.Wait()

			wg.Go(func() {
				got := make([]byte, len(data))
				if _, err := io.ReadFull(c, got); err != nil {
					t.Errorf("the client's read: %v", err)
				} else if sha256.Sum256(got) != sha256.Sum256(data) {
					t.Errorf("what the client read differs")
				}
			})
			for rest := data; len(rest) > 0; {
				n, err := p.Write(rest[:min(len(rest), 300_000)])
				require.NoError(t, err)
				rest = rest[n:]
			}
			wg.Wait()
			t.Logf("%+v", p.Facts())
		})
	}
}

func TestChainsAndPieces(t *testing.T) {
	c, p := connect(t, listen(t, rdmatest.Options{}))
	data := random(5 << 20)
	for name, write := range map[string]func(...[]byte) error{"chain": p.WriteChain, "pieces": p.WritePieces} {
		got := make([]byte, len(data))
		done := make(chan error, 1)
		before := stats(c).MessagesReceived
		go func() {
			_, err := io.ReadFull(c, got)
			done <- err
		}()
		for chunk := range slices.Chunk(data, 10_000) {
			require.NoError(t, write(slices.Collect(slices.Chunk(chunk, 1000))...))
		}
		require.NoError(t, <-done)
		require.Equal(t, sha256.Sum256(data), sha256.Sum256(got))
		t.Logf("%s: %d messages", name, stats(c).MessagesReceived-before)
	}
	require.NoError(t, p.WriteChain([]byte("a"), nil, []byte("b"), nil))
	buf := make([]byte, 8)
	n, err := io.ReadAtLeast(c, buf, 2)
	require.NoError(t, err)
	require.Equal(t, "ab", string(buf[:n]))
}

func TestKeepalives(t *testing.T) {
	c, p := connect(t, listen(t, rdmatest.Options{}))
	start := time.Now()
	require.NoError(t, p.SendKeepalives(10_000))
	require.NoError(t, p.Flush())
	t.Logf("10000 keepalives in %v", time.Since(start).Round(time.Millisecond))
	_, err := p.Write([]byte("x"))
	require.NoError(t, err)
	n, err := c.Read(make([]byte, 8))
	require.NoError(t, err)
	require.Equal(t, 1, n)
}

// A server that takes no completions: the client may have at most so many messages on their way.
func TestSleeping(t *testing.T) {
	c, p := connect(t, listen(t, rdmatest.Options{}))
	for range 3000 {
		_, err := c.Write([]byte("x"))
		require.NoError(t, err)
	}
	time.Sleep(time.Second)
	buf := make([]byte, 5000)
	for n := 0; n < 3000; {
		m, err := p.Read(buf)
		require.NoError(t, err)
		n += m
	}
	f := p.Facts()
	t.Logf("%+v", f)
	require.Greater(t, f.MostUnpolled, 500)
	require.Less(t, f.MostUnpolled, 1024)
	require.False(t, f.Overrun)
	require.Greater(t, f.Fences, 1)
}

func TestNoEchoAndNoRepost(t *testing.T) {
	c, p := connect(t, listen(t, rdmatest.Options{NoEcho: true}))
	_, err := c.Write([]byte("x"))
	require.NoError(t, err)
	n, err := p.Read(make([]byte, 8))
	require.NoError(t, err)
	require.Equal(t, 1, n)

	c, p = connect(t, listen(t, rdmatest.Options{Receives: 8, NoRepost: true}))
	for range 8 {
		_, err := c.Write([]byte("x"))
		require.NoError(t, err)
	}
	require.NoError(t, p.Idle(200*time.Millisecond))
	f := p.Facts()
	require.Equal(t, 8, f.Messages+f.Controls[rdmatest.GetServerFeature]+f.Controls[rdmatest.SetClientFeature]+
		f.Controls[rdmatest.RegisterXferMemory])
	require.True(t, f.Overrun)
	_, err = p.Read(make([]byte, 64))
	require.NoError(t, err)
	p.SetTimeout(50 * time.Millisecond)
	_, err = p.Read(make([]byte, 64))
	require.ErrorIs(t, err, os.ErrDeadlineExceeded)
}

func TestSilent(t *testing.T) {
	s := listen(t, rdmatest.Options{Silent: true})
	ch := dial(s, 10*time.Second)
	p, err := s.Accept(10 * time.Second)
	require.NoError(t, err)
	defer p.Close()
	require.NoError(t, p.Idle(200*time.Millisecond))
	require.Zero(t, p.Window())
	require.Empty(t, ch)
	require.NoError(t, p.AnnounceWindow())
	d := <-ch
	require.NoError(t, d.err)
	defer d.c.Close()
	_, err = d.c.Write([]byte("x"))
	require.NoError(t, err)
	n, err := p.Read(make([]byte, 8))
	require.NoError(t, err)
	require.Equal(t, 1, n)
}

// Each answer to a request, and what the client makes of it.
func TestRequests(t *testing.T) {
	s := listen(t, rdmatest.Options{Silent: true})
	_, err := s.Request(10 * time.Millisecond)
	require.ErrorIs(t, err, os.ErrDeadlineExceeded)
	for name, answer := range map[string]func(*rdmatest.Request) error{
		"reject":     (*rdmatest.Request).Reject,
		"drop":       (*rdmatest.Request).Drop,
		"no answer":  func(r *rdmatest.Request) error { time.Sleep(1200 * time.Millisecond); return r.Close() },
		"free early": (*rdmatest.Request).Close,
		"abort": func(r *rdmatest.Request) error {
			p, err := r.Accept()
			if err != nil {
				return err
			}
			return errors.Join(p.Abort(), p.Close())
		},
	} {
		t.Run(name, func(t *testing.T) {
			ch := dial(s, time.Second)
			r, err := s.Request(10 * time.Second)
			require.NoError(t, err)
			require.NoError(t, answer(r))
			require.ErrorIs(t, r.Close(), net.ErrClosed)
			d := <-ch
			require.Error(t, d.err)
			t.Log(d.err)
		})
	}
}

// Each misbehaviour does what it says, and the client ends, rather than hangs.
func TestMisbehaviour(t *testing.T) {
	for _, tc := range []struct {
		name string
		do   func(*rdmatest.Peer) error
		fine bool // the client must live on
	}{
		{"short message", func(p *rdmatest.Peer) error { return p.SendRaw(make([]byte, 31)) }, false},
		{"empty message", func(p *rdmatest.Peer) error { return p.SendRaw(nil) }, false},
		{"long message", func(p *rdmatest.Peer) error { return p.SendRaw(make([]byte, 4096)) }, false},
		{"unknown opcode", func(p *rdmatest.Peer) error { return p.SendRaw(append([]byte{0, 9}, make([]byte, 30)...)) }, false},
		{"window of 0", func(p *rdmatest.Peer) error { return p.Announce(4096, 0, 1) }, false},
		{"window of 4 GiB", func(p *rdmatest.Peer) error { return p.Announce(4096, 1<<32-1, 1) }, false},
		{"early window", (*rdmatest.Peer).AnnounceWindow, false},
		{"imm of 0", func(p *rdmatest.Peer) error { return p.WriteRaw(nil, 0, rdmatest.Here) }, false},
		{"false imm", func(p *rdmatest.Peer) error { return p.WriteRaw([]byte("x"), 1<<30, rdmatest.Here) }, false},
		{"past the end", func(p *rdmatest.Peer) error {
			if err := p.WriteRaw([]byte("12345678"), 8, int(p.ClientWindow().Length)-4); err != nil {
				return err
			}
			return ending(p)
		}, false},
		{"bad key", func(p *rdmatest.Peer) error {
			if err := p.WriteBadKey([]byte("x")); err != nil {
				return err
			}
			return ending(p)
		}, false},
		{"abort", (*rdmatest.Peer).Abort, false},
		{"disconnect", (*rdmatest.Peer).Disconnect, false},
		{"keepalives", func(p *rdmatest.Peer) error { return p.SendKeepalives(5000) }, true},
		{"raw keepalive", func(p *rdmatest.Peer) error { return p.SendRaw(append([]byte{0, 2}, make([]byte, 30)...)) }, true},
		{"raw but right", func(p *rdmatest.Peer) error { return p.WriteRaw([]byte("x"), 1, rdmatest.Here) }, true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c, p := connect(t, listen(t, rdmatest.Options{}))
			require.NoError(t, p.Idle(50*time.Millisecond)) // the client's window is there
			require.NotZero(t, p.ClientWindow())
			require.NoError(t, tc.do(p))
			if tc.fine {
				_, err := p.Write([]byte("x"))
				require.NoError(t, err)
				_, err = c.Read(make([]byte, 8))
				require.NoError(t, err)
				return
			}
			start := time.Now()
			require.NoError(t, c.SetDeadline(time.Now().Add(10*time.Second)))
			var err error
			for err == nil {
				if _, err = c.Write([]byte("x")); err == nil {
					time.Sleep(10 * time.Millisecond)
				}
			}
			_, err2 := c.Read(make([]byte, 8))
			t.Logf("after %v: write: %v; read: %v", time.Since(start).Round(time.Millisecond), err, err2)
			require.NotErrorIs(t, err, os.ErrDeadlineExceeded)
			require.NotErrorIs(t, err2, os.ErrDeadlineExceeded)
		})
	}
}

// A server that has gone without a word: what the client writes gets no answer, for as long as its device tries again. Close
// does not wait for that.
func TestVanish(t *testing.T) {
	c, p := connect(t, listen(t, rdmatest.Options{}))
	require.NoError(t, p.Idle(50*time.Millisecond))
	require.NoError(t, p.Vanish())
	_, err := p.Write([]byte("x"))
	require.ErrorIs(t, err, syscall.EPIPE)
	_, err = c.Write([]byte("x"))
	require.NoError(t, err)
	limit := time.Second
	if s := os.Getenv("RDMATEST_VANISH"); s != "" {
		limit, err = time.ParseDuration(s)
		require.NoError(t, err)
	}
	start := time.Now()
	require.NoError(t, c.SetDeadline(time.Now().Add(limit)))
	_, err = c.Read(make([]byte, 8))
	t.Logf("after %v: %v", time.Since(start).Round(time.Millisecond), err)
	require.Error(t, err)
	require.NotZero(t, stats(c).SendsQueued)
	start = time.Now()
	require.NoError(t, c.Close())
	require.Less(t, time.Since(start), 3*time.Second)
}

// What a client must not do, done by one that has no library to keep it from it.
func TestViolations(t *testing.T) {
	control := func(op byte, features byte) []byte {
		msg := make([]byte, 32)
		msg[1], msg[31] = op, features
		return msg
	}
	for _, tc := range []struct {
		name string
		do   func(c, p *rdmatest.Peer) error
		text string // empty: it is allowed
	}{
		{"short message", func(c, _ *rdmatest.Peer) error { return c.SendRaw(make([]byte, 31)) }, "a control message of 31 bytes"},
		{"empty message", func(c, _ *rdmatest.Peer) error { return c.SendRaw(nil) }, "a control message of 0 bytes"},
		{"long message", func(c, _ *rdmatest.Peer) error { return c.SendRaw(make([]byte, 33)) }, "a control message of more than 32 bytes"},
		{"unknown opcode", func(c, _ *rdmatest.Peer) error { return c.SendRaw(control(4, 0)) }, "unknown opcode 4"},
		{"features", func(c, _ *rdmatest.Peer) error { return c.SendRaw(control(1, 1)) }, "SetClientFeature with features 0x1"},
		{"no features", func(c, _ *rdmatest.Peer) error { return c.SendRaw(control(1, 0)) }, ""},
		{"keepalives", func(c, _ *rdmatest.Peer) error { return c.SendKeepalives(3) }, ""},
		{"past the end", func(c, _ *rdmatest.Peer) error { return c.WriteRaw(nil, 1<<20+1, 0) }, "a write of 1048577 bytes at 0 of a window of 1048576"},
		{"to the end", func(c, _ *rdmatest.Peer) error { return c.WriteRaw(nil, 1<<20, 0) }, ""},
		{"understated", func(c, _ *rdmatest.Peer) error { return c.WriteRaw([]byte("1234"), 3, 0) }, "a write of 4 bytes was announced as 3"},
		{"early window", func(c, _ *rdmatest.Peer) error { return errors.Join(c.AnnounceWindow(), c.AnnounceWindow()) }, "after 0 of 65536 bytes"},
		{"window of 0", func(c, _ *rdmatest.Peer) error { return c.Announce(4096, 0, 1) }, "a window of 0 bytes"},
		{"huge window", func(c, _ *rdmatest.Peer) error { return c.Announce(4096, 16<<20+1, 1) }, "a window of 16777217 bytes"},
		{"another window", func(c, _ *rdmatest.Peer) error {
			return errors.Join(c.Announce(4096, 65536, 1), c.Announce(4096, 65537, 1))
		}, "a window of 65537 bytes was announced after one of 65536"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			c, p := selfConnect(t, rdmatest.Options{})
			require.NoError(t, tc.do(c, p))
			_ = c.Flush()
			err := p.Idle(50 * time.Millisecond)
			var v *rdmatest.Violation
			if tc.text == "" {
				require.NoError(t, err)
				return
			}
			require.ErrorAs(t, err, &v)
			require.ErrorContains(t, v, tc.text)
			_, err2 := p.Write([]byte("x"))
			require.Equal(t, err, err2)
			_, err2 = p.Read(make([]byte, 1))
			require.Equal(t, err, err2)
			require.Equal(t, err, p.Err())
		})
	}
	t.Run("no window", func(t *testing.T) {
		s := listen(t, rdmatest.Options{Silent: true})
		c, p := selfDial(t, s)
		require.NoError(t, p.Announce(4096, 4096, 1))
		require.NoError(t, c.WriteRaw(nil, 5, 0))
		require.ErrorContains(t, p.Idle(50*time.Millisecond), "a write of 5 bytes before a window was announced")
	})
}

// A client that does as it is told, and counts nothing, dies with the message after the server's last receive.
func TestOverrun(t *testing.T) {
	for _, extra := range []int{0, 1} {
		c, p := selfConnect(t, rdmatest.Options{Receives: 100})
		require.NoError(t, c.SendKeepalives(100+extra))
		err := c.Flush()
		require.NoError(t, p.Idle(50*time.Millisecond))
		f := p.Facts()
		require.True(t, f.Overrun)
		require.Equal(t, 100, f.MostUnpolled)
		if extra == 0 {
			require.NoError(t, err)
			continue
		}
		var failed *rdmatest.CompletionError
		require.ErrorAs(t, err, &failed)
		require.Equal(t, 13, failed.Status) // IBV_WC_RNR_RETRY_EXC_ERR
	}
	c, p := selfConnect(t, rdmatest.Options{Receives: 100})
	require.NoError(t, c.SendKeepalives(99))
	require.NoError(t, c.Flush())
	require.NoError(t, p.Idle(50*time.Millisecond))
	require.False(t, p.Facts().Overrun)
}

func selfConnect(t *testing.T, opt rdmatest.Options) (c, p *rdmatest.Peer) {
	t.Helper()
	return selfDial(t, listen(t, opt))
}

func selfDial(t *testing.T, s *rdmatest.Server) (c, p *rdmatest.Peer) {
	t.Helper()
	type result struct {
		p   *rdmatest.Peer
		err error
	}
	ch := make(chan result, 1)
	go func() {
		c, err := rdmatest.Dial(s.Addr(), rdmatest.Options{Window: 64 << 10})
		ch <- result{c, err}
	}()
	p, err := s.Accept(10 * time.Second)
	require.NoError(t, err)
	r := <-ch
	require.NoError(t, r.err)
	t.Cleanup(func() {
		_ = r.p.Close()
		_ = p.Close()
	})
	return r.p, p
}

// The careless client and a real server understand each other: so what the client finds here is what there is.
func TestRealServer(t *testing.T) {
	listen(t, rdmatest.Options{})
	c, err := rdmatest.Dial(os.Getenv("VALKEYRDMA_RDMA_ADDR"), rdmatest.Options{})
	require.NoError(t, err)
	defer c.Close()
	require.NoError(t, c.AnnounceWindow())
	require.NoError(t, c.SendRaw(make([]byte, 32))) // GetServerFeature
	_, err = c.Write([]byte("PING\r\n"))
	require.NoError(t, err)
	buf := make([]byte, 64)
	n, err := c.Read(buf)
	require.NoError(t, err)
	require.Equal(t, "+PONG\r\n", string(buf[:n]))
	f := c.Facts()
	require.Equal(t, 1, f.Fences)
	require.Equal(t, 1, f.Controls[rdmatest.RegisterXferMemory])
	require.Equal(t, uint32(1<<20), c.ClientWindow().Length)
	require.NoError(t, c.Disconnect())
}

// ending waits for the request that the client's device refuses, and does what a real server does then.
func ending(p *rdmatest.Peer) error {
	var failed *rdmatest.CompletionError
	if err := p.Flush(); !errors.As(err, &failed) {
		return fmt.Errorf("the write did not fail: %v", err)
	}
	if _, err := p.Read(make([]byte, 1)); !errors.As(err, &failed) {
		return fmt.Errorf("the failure did not stay: %v", err)
	}
	return p.Abort()
}

func TestBridge(t *testing.T) {
	s := listen(t, rdmatest.Options{Window: 128 << 10})
	pair := func() (net.Conn, net.Conn, <-chan error) {
		c, p := connect(t, s)
		a, b := tcpPair(t)
		done := make(chan error, 1)
		go func() { done <- rdmatest.Bridge(p, a) }()
		return c, b, done
	}
	data := random(6<<20 + 99)

	t.Run("both ways at once", func(t *testing.T) {
		c, b, done := pair()
		var wg sync.WaitGroup
		for _, x := range []net.Conn{c, b} {
			wg.Go(func() {
				if n, err := x.Write(data); n != len(data) || err != nil {
					t.Errorf("wrote %d: %v", n, err)
				}
			})
			wg.Go(func() {
				time.Sleep(300 * time.Millisecond) // both directions are blocked by now
				got := make([]byte, len(data))
				if _, err := io.ReadFull(x, got); err != nil {
					t.Error(err)
				} else if sha256.Sum256(got) != sha256.Sum256(data) {
					t.Error("the data changed")
				}
			})
		}
		wg.Wait()
		require.NoError(t, c.Close())
		require.NoError(t, <-done)
		_, err := b.Read(make([]byte, 1))
		require.Equal(t, io.EOF, err)
	})
	t.Run("one way blocked", func(t *testing.T) {
		c, b, done := pair()
		go func() { _, _ = b.Write(data) }() // which nobody reads
		time.Sleep(200 * time.Millisecond)
		got := make(chan error, 1)
		go func() {
			_, err := io.ReadFull(b, make([]byte, len(data)))
			got <- err
		}()
		_, err := c.Write(data)
		require.NoError(t, err)
		require.NoError(t, <-got)
		require.NoError(t, c.Close())
		<-done
	})
	t.Run("the other side ends", func(t *testing.T) {
		c, b, done := pair()
		go func() {
			_, _ = b.Write(data)
			_ = b.Close()
		}()
		got, err := io.ReadAll(c)
		require.NoError(t, err)
		require.Equal(t, sha256.Sum256(data), sha256.Sum256(got))
		require.NoError(t, <-done)
	})
	t.Run("this side ends", func(t *testing.T) {
		c, b, done := pair()
		got := make(chan []byte, 1)
		go func() {
			all, _ := io.ReadAll(b)
			got <- all
		}()
		_, err := c.Write(data[:100_000])
		require.NoError(t, err)
		require.NoError(t, c.Close())
		require.Equal(t, sha256.Sum256(data[:100_000]), sha256.Sum256(<-got))
		require.NoError(t, <-done)
	})
}

func tcpPair(t *testing.T) (net.Conn, net.Conn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	defer l.Close()
	a, err := net.Dial("tcp", l.Addr().String())
	require.NoError(t, err)
	b, err := l.Accept()
	require.NoError(t, err)
	t.Cleanup(func() {
		_ = a.Close()
		_ = b.Close()
	})
	return a, b
}

func TestNoLeak(t *testing.T) {
	s := listen(t, rdmatest.Options{Window: 64 << 10})
	fds := func() int {
		entries, err := os.ReadDir("/proc/self/fd")
		require.NoError(t, err)
		return len(entries)
	}
	resources := func() map[string]int {
		counts, err := rdmatest.Resources(os.Getpid())
		require.NoError(t, err)
		return counts
	}
	round := func() {
		ch := dial(s, 10*time.Second)
		p, err := s.Accept(10 * time.Second)
		require.NoError(t, err)
		d := <-ch
		require.NoError(t, d.err)
		_, err = d.c.Write([]byte("x"))
		require.NoError(t, err)
		_, err = p.Read(make([]byte, 8))
		require.NoError(t, err)
		require.NoError(t, p.Close())
		require.NoError(t, d.c.Close())
	}
	round()
	fdsBefore, resourcesBefore := fds(), resources()
	for range 100 {
		round()
	}
	require.Equal(t, fdsBefore, fds())
	require.Equal(t, resourcesBefore, resources())
	require.NoError(t, s.Close())
	_, err := s.Accept(time.Second)
	require.ErrorIs(t, err, net.ErrClosed)
}

// Close wakes who waits for a client.
func TestServerClose(t *testing.T) {
	s := listen(t, rdmatest.Options{})
	time.AfterFunc(50*time.Millisecond, func() { _ = s.Close() })
	_, err := s.Accept(10 * time.Second)
	require.ErrorIs(t, err, net.ErrClosed)
}
