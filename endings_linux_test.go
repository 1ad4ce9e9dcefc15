//go:build linux && cgo

package valkeyrdma

import (
	"bufio"
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/valkeyrdma/valkeyrdma/internal/rdmatest"
)

// Hazards from H12 on: how connections end, and what the caller is told. See hazards_linux_test.go.

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

// Close does not wait for a server that sends on and on, and does not say whether it has read what was written.
func TestH15CloseAmidMessages(t *testing.T) {
	w := watchdog(t, time.Minute)
	c, p := pair(t, w, fake(t, rdmatest.Options{Echoes: 1}), defaults)
	_, err := io.WriteString(c, "MONITOR\r\n")
	require.NoError(t, err)
	readPeer(t, p, 9)
	var sent atomic.Int64
	over := make(chan struct{})
	go func() {
		defer close(over)
		for p.WritePieces([]byte("x")) == nil {
			sent.Add(1)
		}
	}()
	require.Eventually(t, func() bool { return sent.Load() > 1000 }, 10*time.Second, time.Millisecond)
	require.NoError(t, c.Close())
	require.Less(t, sent.Load(), int64(defaults.window)/2, "Close waited until the windows were full")
	<-over
	require.Equal(t, 2, p.Facts().Fences)
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
		{"keepalives without end", rdmatest.Options{Silent: true}, func(r *rdmatest.Request) {
			if p, err := r.Accept(); err == nil {
				for end := time.Now().Add(4 * time.Second); err == nil && time.Now().Before(end); {
					err = p.SendKeepalives(100)
				}
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
	require.Eventually(t, func() bool { return abandonedDials() == 0 }, 5*time.Second, 10*time.Millisecond)
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
	s := startServer(t)
	c := dialTo(t, w, s.Addr)
	var wg sync.WaitGroup
	readErr, writeErr := error(nil), error(nil)
	wg.Go(func() { _, readErr = io.Copy(io.Discard, c) })
	wg.Go(func() {
		for writeErr == nil {
			_, writeErr = c.Write(bytes.Repeat([]byte("PING\r\n"), 1000))
		}
	})
	time.Sleep(300 * time.Millisecond)
	s.Kill()
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
		require.ErrorContains(t, err, "(remote access error): it has closed the connection")
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
