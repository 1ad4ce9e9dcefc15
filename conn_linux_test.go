//go:build linux && cgo

package valkeyrdma

import (
	"bufio"
	"bytes"
	"cmp"
	"context"
	"crypto/sha256"
	"crypto/tls"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
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
	"github.com/valkey-io/valkey-go"
	"github.com/valkeyrdma/valkeyrdma/internal/labtest"
	"github.com/valkeyrdma/valkeyrdma/internal/rdmatest"
)

func TestPing(t *testing.T) {
	c := dialLab(t, watchdog(t, 30*time.Second))
	r := bufio.NewReader(c)
	require.Equal(t, "+PONG", command(t, c, r, "PING"))
	require.Equal(t, "hello", command(t, c, r, "ECHO", "hello"))

	require.Equal(t, rdmaAddr(t), c.RemoteAddr().String())
	require.Equal(t, "rdma", c.RemoteAddr().Network())
	require.Equal(t, "rdma", c.LocalAddr().Network())
	local := c.LocalAddr().(Addr)
	require.True(t, local.Addr().IsValid())
	require.NotZero(t, local.Port())

	s := c.Stats()
	require.Equal(t, os.Getenv("VALKEYRDMA_DEVICE"), s.Device)
	require.EqualValues(t, 2, s.MessagesReceived)
	require.EqualValues(t, 2, s.MessagesSent)
	require.EqualValues(t, 1, s.WindowsReceived)
	require.EqualValues(t, 1, s.WindowsSent)
	require.EqualValues(t, 1, s.Fences)
	require.Zero(t, s.Unread)
	require.Zero(t, s.Unsent)
	require.Less(t, s.LockedBytes, uint64(1536<<10))
}

func TestPingIPv6(t *testing.T) {
	addr := labtest.Var(t, "VALKEYRDMA_RDMA_ADDR6")
	c := dialTo(t, watchdog(t, 30*time.Second), addr)
	require.Equal(t, "+PONG", command(t, c, bufio.NewReader(c), "PING"))
	require.Equal(t, addr, c.RemoteAddr().String())
	require.True(t, c.LocalAddr().(Addr).Addr().Is6())
}

func TestDialLocalAddr(t *testing.T) {
	w := watchdog(t, 30*time.Second)
	host, _, err := net.SplitHostPort(rdmaAddr(t))
	require.NoError(t, err)
	d := &net.Dialer{Timeout: 5 * time.Second, LocalAddr: &net.TCPAddr{IP: net.ParseIP(host)}}
	c, err := DialCtxFn(context.Background(), rdmaAddr(t), d, nil)
	require.NoError(t, err)
	defer c.Close()
	w.add(c)
	require.Equal(t, host, c.LocalAddr().(Addr).Addr().String())

	d.LocalAddr = &net.TCPAddr{Port: 47001}
	c, err = DialCtxFn(context.Background(), rdmaAddr(t), d, nil)
	require.NoError(t, err)
	defer c.Close()
	w.add(c)
	require.Equal(t, netip.AddrPortFrom(netip.MustParseAddr(host), 47001), c.LocalAddr().(Addr).AddrPort)

	d.LocalAddr = &net.TCPAddr{IP: net.IPv4(203, 0, 113, 77)} // not ours
	conn, err := DialCtxFn(context.Background(), rdmaAddr(t), d, nil)
	requireDialError(t, conn, err)
}

// abandonFor shortens the time for which a dial that was given up goes on in the background.
func abandonFor(t *testing.T, d time.Duration) {
	before := abandonTimeout
	abandonTimeout = d
	t.Cleanup(func() { abandonTimeout = before })
}

func TestDialFailures(t *testing.T) {
	watchdog(t, 2*time.Minute)
	abandonFor(t, 300*time.Millisecond)
	good := rdmaAddr(t)
	host, _, err := net.SplitHostPort(good)
	require.NoError(t, err)
	warm(t)

	for _, tc := range []struct {
		name, dst string
		timeout   time.Duration
		is        []error
		text      string
	}{
		{"nobody listens", net.JoinHostPort(host, "1"), 10 * time.Second, []error{syscall.ECONNREFUSED}, "nothing listens there"},
		{"no RDMA device on the route", "127.0.0.1:6378", 10 * time.Second, []error{ErrNoDevice}, "on the route"},
		{"nobody there", nobody(t), 1500 * time.Millisecond, []error{os.ErrDeadlineExceeded, context.DeadlineExceeded}, "timed out while"},
		{"no route", "[2001:db8:ffff::1]:6378", 10 * time.Second, []error{syscall.ENETUNREACH}, ""},
	} {
		t.Run(tc.name, func(t *testing.T) {
			fds, goroutines, resources := openFDs(t), runtime.NumGoroutine(), rdmaResources(t)
			start := time.Now()
			conn, err := DialCtxFn(context.Background(), tc.dst, &net.Dialer{Timeout: tc.timeout}, nil)
			t.Logf("%v: %v", time.Since(start).Round(time.Millisecond), err)
			op := requireDialError(t, conn, err)
			require.Equal(t, tc.dst, op.Addr.String())
			for _, is := range tc.is {
				require.ErrorIs(t, err, is)
			}
			require.ErrorContains(t, err, tc.text)
			require.Less(t, time.Since(start), tc.timeout+2*time.Second)
			require.Equal(t, errors.Is(err, os.ErrDeadlineExceeded), op.Timeout())
			requireNoLeak(t, fds, goroutines, resources)
		})
	}
}

// A dial over RDMA that nobody answers leaves time for the fallback.
func TestFallbackInTime(t *testing.T) {
	watchdog(t, time.Minute)
	abandonFor(t, 300*time.Millisecond)
	warm(t)
	addr := greeter(t)
	var reason error
	dl := Dialer{
		Route: func(string) (string, string) { return "rdma", nobody(t) },
		Fallback: func(_ string, err error) bool {
			reason = err
			return true
		},
	}
	c, err := dl.DialCtxFn(context.Background(), addr, &net.Dialer{Timeout: 3 * time.Second}, nil)
	requireGreeting(t, c, err)
	require.ErrorIs(t, reason, os.ErrDeadlineExceeded)
	requireFalls(t, 0, unsettledDials, "a dial goes on that was given up")
}

// nobody is an address in the subnet of the RDMA device at which nobody is.
func nobody(t testing.TB) string {
	t.Helper()
	host, _, err := net.SplitHostPort(rdmaAddr(t))
	require.NoError(t, err)
	return net.JoinHostPort(strings.TrimSuffix(host, "1")+"199", "6378")
}

// requireNoLeak checks that nothing is left. A leak stays; what only takes a moment to go, the end of a dial that was given up or a
// Close in the background, does not. Fewer than before is no leak: an earlier test's may have gone late.
func requireNoLeak(t *testing.T, fds, goroutines, resources int) {
	t.Helper()
	requireFalls(t, 0, unsettledDials, "dials go on that were given up, or their connections, or the pauses after them")
	requireFalls(t, goroutines, runtime.NumGoroutine, "goroutines are left")
	requireFalls(t, fds, func() int { return openFDs(t) }, "file descriptors are left")
	requireFalls(t, resources, func() int { return rdmaResources(t) }, "RDMA resources are left")
}

// requireFalls waits until count is no more than limit.
func requireFalls(t *testing.T, limit int, count func() int, what string) {
	t.Helper()
	for end := time.Now().Add(5 * time.Second); ; time.Sleep(time.Millisecond) {
		n := count()
		if n <= limit {
			return
		}
		if time.Now().After(end) {
			require.LessOrEqual(t, n, limit, what)
		}
	}
}

func TestDialCancelled(t *testing.T) {
	watchdog(t, time.Minute)
	abandonFor(t, 300*time.Millisecond)
	host, _, err := net.SplitHostPort(rdmaAddr(t))
	require.NoError(t, err)
	warm(t)
	fds, goroutines, resources := openFDs(t), runtime.NumGoroutine(), rdmaResources(t)
	ctx, cancel := context.WithCancel(context.Background())
	time.AfterFunc(200*time.Millisecond, cancel)
	start := time.Now()
	conn, err := DialCtxFn(ctx, net.JoinHostPort(strings.TrimSuffix(host, "1")+"199", "6378"), nil, nil)
	requireDialError(t, conn, err)
	require.ErrorIs(t, err, context.Canceled)
	require.ErrorContains(t, err, "cancelled while waiting for the server to accept")
	require.Less(t, time.Since(start), 2*time.Second)
	requireNoLeak(t, fds, goroutines, resources)

	// At every step of a dial that would succeed: some are cut short, some are not, and none leaves anything behind. The
	// server is the test's own: Valkey up to 9.1.2 crashes three seconds after a client that had asked to connect has gone.
	addr := startServer(t).Addr
	fds, goroutines = openFDs(t), runtime.NumGoroutine()
	var cut, done int
	for i := range 60 {
		ctx, cancel := context.WithTimeout(context.Background(), time.Duration(i)*time.Millisecond)
		conn, err := DialCtxFn(ctx, addr, nil, nil)
		cancel()
		if err != nil {
			requireDialError(t, conn, err)
			require.ErrorIs(t, err, context.DeadlineExceeded)
			cut++
			continue
		}
		done++
		require.NoError(t, conn.Close())
	}
	t.Logf("%d cut short, %d done", cut, done)
	require.NotZero(t, cut)
	requireNoLeak(t, fds, goroutines, resources)
}

// A server that is busy with something else answers late. A dial waits for it as long as it may, and one that may no longer is
// given up so that the server survives it: Valkey up to 9.1.2 crashes three seconds after it could not accept a client that had
// asked to connect and was gone.
func TestH23DialBusyServer(t *testing.T) {
	w := watchdog(t, time.Minute)
	addr := startServer(t).Addr
	warm(t)
	fds, goroutines, resources := openFDs(t), runtime.NumGoroutine(), rdmaResources(t)
	sleeping := make(chan string, 1)
	go func() { sleeping <- serverDo(t, addr, "DEBUG", "SLEEP", "2") }()
	time.Sleep(300 * time.Millisecond)
	for i := range 2 * maxPending {
		conn, err := DialCtxFn(context.Background(), addr, &net.Dialer{Timeout: 200 * time.Millisecond}, nil)
		requireDialError(t, conn, err)
		require.ErrorIs(t, err, os.ErrDeadlineExceeded)
		if i < maxPending {
			require.ErrorContains(t, err, "waiting for the server to accept")
		} else {
			require.ErrorContains(t, err, "waiting for earlier dials to this address")
		}
	}
	c := dialTo(t, w, addr)
	require.Equal(t, "+PONG", command(t, c, bufio.NewReader(c), "PING"))
	require.Equal(t, "+OK", <-sleeping)

	time.Sleep(4 * time.Second)
	require.Equal(t, "+PONG", command(t, c, bufio.NewReader(c), "PING"), "the server has crashed")
	require.NoError(t, c.Close())
	requireNoLeak(t, fds, goroutines, resources)
}

// However many callers give up however often, the server survives it, and does not find more dials than it can see to.
func TestH23DialsGivenUpTogether(t *testing.T) {
	w := watchdog(t, 2*time.Minute)
	addr := startServer(t).Addr
	warm(t)
	fds, goroutines, resources := openFDs(t), runtime.NumGoroutine(), rdmaResources(t)
	asleep := make(chan struct{})
	go func() {
		defer close(asleep)
		serverDo(t, addr, "DEBUG", "SLEEP", "3")
	}()
	time.Sleep(300 * time.Millisecond)
	const callers = 16
	var wg sync.WaitGroup
	var dials, most atomic.Int32
	for range callers {
		wg.Go(func() {
			for {
				select {
				case <-asleep:
					return
				default:
				}
				conn, err := DialCtxFn(context.Background(), addr, &net.Dialer{Timeout: 50 * time.Millisecond}, nil)
				dials.Add(1)
				if err == nil { // it is awake
					_ = conn.Close()
				}
				for n, m := int32(abandonedDials()), most.Load(); n > m && !most.CompareAndSwap(m, n); m = most.Load() {
				}
			}
		})
	}
	wg.Wait()
	t.Logf("%d dials, at most %d went on at a time after they had been given up", dials.Load(), most.Load())
	c := dialTo(t, w, addr)
	time.Sleep(4 * time.Second)
	require.Equal(t, "+PONG", command(t, c, bufio.NewReader(c), "PING"), "the server has crashed")
	require.NoError(t, c.Close())
	requireNoLeak(t, fds, goroutines, resources)
	require.LessOrEqual(t, most.Load(), int32(maxActive+2), "or one more each two seconds")
}

// A connection that comes too late for the dial that asked for it is there for the next one, if that wants the same. Callers that
// never have the time that a dial takes get their connections nevertheless.
func TestDialSpare(t *testing.T) {
	watchdog(t, time.Minute)
	warm(t)
	fds, goroutines, resources := openFDs(t), runtime.NumGoroutine(), rdmaResources(t)
	s := fake(t, rdmatest.Options{})
	dial := func(d Dialer) (net.Conn, error) {
		return d.DialCtxFn(context.Background(), s.Addr(), &net.Dialer{Timeout: 100 * time.Millisecond}, nil)
	}
	var peers []*rdmatest.Peer
	late := func() *rdmatest.Peer {
		t.Helper()
		conn, err := dial(Dialer{})
		requireDialError(t, conn, err)
		require.ErrorIs(t, err, os.ErrDeadlineExceeded)
		p, err := s.Accept(5 * time.Second)
		require.NoError(t, err)
		peers = append(peers, p)
		t.Cleanup(func() { _ = p.Close() })
		requireFalls(t, 0, abandonedDials, "a dial that was given up goes on")
		return p
	}

	p := late()
	other, err := dial(Dialer{ReceiveWindow: 64 << 10})
	requireDialError(t, other, err)
	require.ErrorContains(t, err, "waiting for earlier dials to this address")
	c, err := dial(Dialer{})
	require.NoError(t, err)
	_, err = io.WriteString(c, "PING\r\n")
	require.NoError(t, err)
	require.Equal(t, "PING\r\n", string(readPeer(t, p, 6)))
	require.NoError(t, c.Close())
	requireFalls(t, 0, unsettledDials, "it is not as before")

	// One that has ended meanwhile is of no use, and one that nobody wants ends.
	p = late()
	require.NoError(t, p.Abort())
	require.Eventually(t, func() bool {
		pending.mu.Lock()
		defer pending.mu.Unlock()
		to := pending.to[path{remote: netip.MustParseAddrPort(s.Addr())}]
		return to == nil || to.pauses == 0 && (len(to.spares) == 0 || to.spares[0].conn.ended())
	}, 5*time.Second, time.Millisecond)
	p = late()
	_, err = p.Read(make([]byte, 1))
	require.True(t, err == io.EOF, "%v", err)
	for _, p := range peers {
		_ = p.Close()
	}
	require.NoError(t, s.Close())
	requireNoLeak(t, fds, goroutines, resources)
	pending.mu.Lock()
	defer pending.mu.Unlock()
	require.Empty(t, pending.to)
}

// A server that has all the clients it may have accepts and drops the connection without a word.
func TestDialDropped(t *testing.T) {
	watchdog(t, time.Minute)
	addr := startServer(t, "--maxclients", "1").Addr
	only, err := net.Dial("tcp", addr)
	require.NoError(t, err)
	defer only.Close()
	require.Equal(t, "+PONG", command(t, only, bufio.NewReader(only), "PING"))

	conn, err := DialCtxFn(context.Background(), addr, &net.Dialer{Timeout: 10 * time.Second}, nil)
	requireDialError(t, conn, err)
	require.ErrorIs(t, err, ErrDropped)
	require.ErrorContains(t, err, "maxclients")
}

// Values of every awkward size, both ways, many windows long.
func TestValueSizes(t *testing.T) {
	c := dialLab(t, watchdog(t, 2*time.Minute))
	r := bufio.NewReader(c)
	rng := rand.New(rand.NewPCG(1, 2))
	sizes := []int{0, 1, 31, 32, 255, 256, 257, 4095, 4096, 64<<10 - 1, 64 << 10, txStaging - 1, txStaging, txStaging + 1,
		1<<20 - 64, 1<<20 - 1, 1 << 20, 1<<20 + 1, 3<<20 + 7, 16 << 20}
	for range 20 {
		sizes = append(sizes, rng.IntN(2<<20))
	}
	for _, size := range sizes {
		value := randomString(rng, size)
		require.Equal(t, "+OK", command(t, c, r, "SET", "sizes", value))
		got := command(t, c, r, "GET", "sizes")
		require.Equal(t, len(value), len(got))
		require.True(t, value == got, "the value of %d bytes changed", size)
	}
	s := c.Stats()
	require.Greater(t, s.WindowsReceived, uint64(16))
	require.Greater(t, s.WindowsSent, uint64(16))
	require.Zero(t, s.Unread)
}

// randomString makes n bytes, fast also with the race detector, which counts in the laboratory.
func randomString(rng *rand.Rand, n int) string {
	var seed [32]byte
	binary.LittleEndian.PutUint64(seed[:], rng.Uint64())
	b := make([]byte, n)
	_, _ = rand.NewChaCha8(seed).Read(b)
	return string(b)
}

// The scenario on which another client fails: large values in parallel on one multiplexed connection.
func TestConcurrentLargeValues(t *testing.T) {
	w := watchdog(t, 3*time.Minute)
	client, err := valkey.NewClient(valkey.ClientOption{
		InitAddress:  []string{rdmaAddr(t)},
		DisableCache: true,
		DialCtxFn: func(ctx context.Context, dst string, d *net.Dialer, cfg *tls.Config) (net.Conn, error) {
			c, err := DialCtxFn(ctx, dst, d, cfg)
			if err == nil {
				w.add(c)
			}
			return c, err
		},
	})
	require.NoError(t, err)
	defer client.Close()
	ctx := context.Background()
	var wg sync.WaitGroup
	errs := make(chan error, 4)
	for g := range 4 {
		wg.Go(func() {
			rng := rand.New(rand.NewPCG(uint64(g), 1))
			key := fmt.Sprint("large:", g)
			for round := range 20 {
				value := randomString(rng, 1<<20)
				if err := client.Do(ctx, client.B().Set().Key(key).Value(value).Build()).Error(); err != nil {
					errs <- fmt.Errorf("SET, round %d: %w", round, err)
					return
				}
				got, err := client.Do(ctx, client.B().Get().Key(key).Build()).ToString()
				if err != nil {
					errs <- fmt.Errorf("GET, round %d: %w", round, err)
					return
				}
				if got != value {
					errs <- fmt.Errorf("round %d: the value changed", round)
					return
				}
			}
		})
	}
	wg.Wait()
	close(errs)
	for err := range errs {
		require.NoError(t, err)
	}
}

// Many small commands in both directions at once: a lost wake-up of either side would end in the watchdog.
func TestPipelineSmall(t *testing.T) {
	c := dialLab(t, watchdog(t, 2*time.Minute))
	const total = 30_000
	var wg sync.WaitGroup
	wg.Go(func() {
		ping := []byte("PING\r\n")
		for range total {
			if _, err := c.Write(ping); err != nil {
				t.Errorf("write: %v", err)
				return
			}
		}
	})
	r := bufio.NewReader(c)
	for i := range total {
		s, err := readReply(r)
		require.NoError(t, err, "reply %d", i)
		require.Equal(t, "+PONG", s)
	}
	wg.Wait()
	s := c.Stats()
	require.Greater(t, s.Fences, uint64(1))
	t.Logf("%d writes, %d messages, %d fences, %d credit waits", total, s.MessagesSent, s.Fences, s.CreditWaits)
}

// The server sleeps while more small writes arrive than it has receives posted for.
func TestSleepingServer(t *testing.T) {
	c := dialLab(t, watchdog(t, time.Minute))
	r := bufio.NewReader(c)
	_, err := io.WriteString(c, "DEBUG SLEEP 2\r\n")
	require.NoError(t, err)
	const total = 4000
	start := time.Now()
	for range total {
		_, err := io.WriteString(c, "PING\r\n")
		require.NoError(t, err)
	}
	t.Logf("%d writes took %v", total, time.Since(start).Round(time.Millisecond))
	require.Equal(t, "+OK", reply(t, r))
	for range total {
		require.Equal(t, "+PONG", reply(t, r))
	}
	require.GreaterOrEqual(t, time.Since(start), 1900*time.Millisecond)
	require.NotZero(t, c.Stats().CreditWaits)
}

func TestDeadlines(t *testing.T) {
	c := dialLab(t, watchdog(t, time.Minute))
	r := bufio.NewReader(c)
	buf := make([]byte, 16)

	require.NoError(t, c.SetReadDeadline(time.Now().Add(-time.Second)))
	_, err := c.Read(buf)
	requireTimeout(t, err, "read")

	require.NoError(t, c.SetReadDeadline(time.Now().Add(100*time.Millisecond)))
	start := time.Now()
	_, err = c.Read(buf)
	requireTimeout(t, err, "read")
	require.GreaterOrEqual(t, time.Since(start), 100*time.Millisecond)
	require.Equal(t, "+PONG", func() string {
		require.NoError(t, c.SetReadDeadline(time.Time{}))
		return command(t, c, r, "PING")
	}(), "a timeout loses nothing")

	// Set while a Read waits, to earlier and to later.
	time.AfterFunc(50*time.Millisecond, func() { _ = c.SetReadDeadline(time.Now().Add(50 * time.Millisecond)) })
	_, err = c.Read(buf)
	requireTimeout(t, err, "read")
	require.NoError(t, c.SetReadDeadline(time.Now().Add(100*time.Millisecond)))
	time.AfterFunc(30*time.Millisecond, func() { _ = c.SetReadDeadline(time.Now().Add(300 * time.Millisecond)) })
	start = time.Now()
	_, err = c.Read(buf)
	requireTimeout(t, err, "read")
	require.GreaterOrEqual(t, time.Since(start), 300*time.Millisecond)

	// A Write that cannot go on says how much of it was taken, and can be continued there. SleepServer reads nothing.
	require.NoError(t, c.SetDeadline(time.Time{}))
	value := resp("SET", "deadline", strings.Repeat("v", 8<<20))
	_, err = io.WriteString(c, "DEBUG SLEEP 1\r\n")
	require.NoError(t, err)
	require.NoError(t, c.SetWriteDeadline(time.Now().Add(200*time.Millisecond)))
	n, err := io.WriteString(c, value)
	requireTimeout(t, err, "write")
	require.Greater(t, n, 0)
	require.Less(t, n, len(value))
	require.NoError(t, c.SetWriteDeadline(time.Time{}))
	_, err = io.WriteString(c, value[n:])
	require.NoError(t, err)
	require.Equal(t, "+OK", reply(t, r))
	require.Equal(t, "+OK", reply(t, r))
	require.Equal(t, ":8388608", command(t, c, r, "STRLEN", "deadline"))
}

func requireTimeout(t *testing.T, err error, op string) {
	t.Helper()
	require.ErrorIs(t, err, os.ErrDeadlineExceeded)
	var oe *net.OpError
	require.ErrorAs(t, err, &oe)
	require.Equal(t, op, oe.Op)
	require.True(t, oe.Timeout())
}

func TestClose(t *testing.T) {
	w := watchdog(t, time.Minute)
	c := dialLab(t, w)
	read := make(chan error, 1)
	go func() {
		_, err := c.Read(make([]byte, 1))
		read <- err
	}()
	time.Sleep(50 * time.Millisecond)
	require.NoError(t, c.Close())
	require.ErrorIs(t, <-read, net.ErrClosed)
	_, err := c.Read(make([]byte, 1))
	require.ErrorIs(t, err, net.ErrClosed)
	_, err = c.Write([]byte("x"))
	require.ErrorIs(t, err, net.ErrClosed)
	require.ErrorIs(t, c.Close(), net.ErrClosed)
	require.ErrorIs(t, c.SetDeadline(time.Now()), net.ErrClosed)
	require.NotEmpty(t, c.RemoteAddr().String())
	require.Zero(t, c.Stats())

	// A Write that waits is woken too.
	c = dialLab(t, w)
	_, err = io.WriteString(c, "DEBUG SLEEP 2\r\n")
	require.NoError(t, err)
	written := make(chan error, 1)
	go func() {
		_, err := c.Write(make([]byte, 32<<20))
		written <- err
	}()
	time.Sleep(200 * time.Millisecond)
	start := time.Now()
	require.NoError(t, c.Close())
	require.Less(t, time.Since(start), closeTimeout+time.Second)
	require.ErrorIs(t, <-written, net.ErrClosed)
}

// What Write took is delivered although Close follows at once.
func TestCloseDelivers(t *testing.T) {
	w := watchdog(t, time.Minute)
	probe := dialLab(t, w)
	r := bufio.NewReader(probe)
	for i, size := range []int{1, 1000, 100_000, 900_000} {
		c := dialLab(t, w)
		key := fmt.Sprint("last:", i)
		_, err := io.WriteString(c, resp("SET", key, strings.Repeat("x", size)))
		require.NoError(t, err)
		require.NoError(t, c.Close())
		require.Eventually(t, func() bool {
			return command(t, probe, r, "STRLEN", key) == fmt.Sprint(":", size)
		}, 5*time.Second, 10*time.Millisecond, "the last write of %d bytes was lost", size)
	}
}

// The server closes: every byte first, then a bare io.EOF; writing fails.
func TestServerCloses(t *testing.T) {
	c := dialLab(t, watchdog(t, time.Minute))
	_, err := io.WriteString(c, "PING\r\nQUIT\r\n")
	require.NoError(t, err)
	got, err := io.ReadAll(c)
	require.NoError(t, err)
	require.Equal(t, "+PONG\r\n+OK\r\n", string(got))
	_, err = c.Read(make([]byte, 1))
	require.True(t, err == io.EOF, "EOF is bare: %v", err)
	_, err = c.Write([]byte("PING\r\n"))
	require.ErrorIs(t, err, syscall.EPIPE)
}

// Pending Reads cost goroutines, not threads, and each the memory that docs/design.md says. A thousand of them, with the server's and
// the kernel's part, do not fit into the laboratory's 4 GiB: VALKEYRDMA_TEST_CONNECTIONS=1000 VALKEYRDMA_LAB_MEM=10240.
func TestIdleConnections(t *testing.T) {
	w := watchdog(t, 5*time.Minute)
	total, err := strconv.Atoi(cmp.Or(os.Getenv("VALKEYRDMA_TEST_CONNECTIONS"), "500"))
	require.NoError(t, err)
	first := dialLab(t, w)
	require.Equal(t, "+PONG", command(t, first, bufio.NewReader(first), "PING"))
	threadsBefore, goroutinesBefore, fdsBefore := threads(t), runtime.NumGoroutine(), openFDs(t)
	conns := make([]*conn, total)
	got := make(chan error, total)
	for i := range conns {
		conns[i] = dialLab(t, w)
		go func() {
			buf := make([]byte, 7)
			_, err := io.ReadFull(conns[i], buf)
			if err == nil && string(buf) != "+PONG\r\n" {
				err = fmt.Errorf("read %q", buf)
			}
			got <- err
		}()
	}
	time.Sleep(200 * time.Millisecond)
	t.Logf("%d connections: %d more threads, %d more goroutines, %d more descriptors", total, threads(t)-threadsBefore,
		runtime.NumGoroutine()-goroutinesBefore, openFDs(t)-fdsBefore)
	// The scheduler starts a thread now and then for a call into C that takes long, whatever the number of connections.
	require.Less(t, threads(t)-threadsBefore, 8)
	require.LessOrEqual(t, runtime.NumGoroutine()-goroutinesBefore, 2*total)
	require.LessOrEqual(t, openFDs(t)-fdsBefore, 3*total)
	for _, c := range conns {
		require.EqualValues(t, (recvDepth+sendDepth)*32+1<<20+txStaging, c.Stats().LockedBytes)
	}
	for _, c := range conns {
		_, err := io.WriteString(c, "PING\r\n")
		require.NoError(t, err)
	}
	for range conns {
		require.NoError(t, <-got)
	}
}

// Every connection gives back all that it took, and is counted while it is there, whichever thread has made it.
func TestNoLeaks(t *testing.T) {
	w := watchdog(t, 2*time.Minute)
	warm(t)
	fds, goroutines, resources := openFDs(t), runtime.NumGoroutine(), rdmaResources(t)
	const rounds, together = 7, 8
	for range rounds {
		before, err := rdmatest.Resources(os.Getpid())
		require.NoError(t, err)
		var dials sync.WaitGroup
		conns := make(chan net.Conn, together)
		for range together {
			dials.Go(func() {
				c, err := DialCtxFn(context.Background(), rdmaAddr(t), nil, nil)
				if err != nil {
					t.Error(err)
					return
				}
				conns <- w.add(c)
			})
		}
		dials.Wait()
		close(conns)
		during, err := rdmatest.Resources(os.Getpid())
		require.NoError(t, err)
		for _, kind := range []string{"qp", "cq", "cm_id"} {
			require.Equal(t, before[kind]+together, during[kind], "%s: %v, then %v", kind, before, during)
		}
		for c := range conns {
			require.Equal(t, "+PONG", command(t, c, bufio.NewReader(c), "PING"))
			require.NoError(t, c.Close())
		}
		requireNoLeak(t, fds, goroutines, resources)
	}
}

// Reads and writes in the steady state allocate nothing.
func TestAllocations(t *testing.T) {
	c := dialLab(t, watchdog(t, time.Minute))
	ping, buf := []byte("PING\r\n"), make([]byte, 64)
	require.Zero(t, testing.AllocsPerRun(200, func() {
		if err := c.SetDeadline(time.Now().Add(time.Minute)); err != nil {
			t.Fatal(err)
		}
		if _, err := c.Write(ping); err != nil {
			t.Fatal(err)
		}
		for n := 0; n < 7; {
			m, err := c.Read(buf)
			if err != nil {
				t.Fatal(err)
			}
			n += m
		}
	}))
}

// A slow reader holds the server back, and loses nothing.
func TestSlowReader(t *testing.T) {
	c := dialLab(t, watchdog(t, 2*time.Minute))
	r := bufio.NewReader(c)
	value := randomString(rand.New(rand.NewPCG(3, 4)), 5<<20)
	require.Equal(t, "+OK", command(t, c, r, "SET", "slow", value))
	_, err := io.WriteString(c, resp("GET", "slow"))
	require.NoError(t, err)
	time.Sleep(300 * time.Millisecond)
	require.LessOrEqual(t, c.Stats().Unread, 2<<20, "no more than two windows come unasked")
	var got bytes.Buffer
	buf := make([]byte, 70_000)
	for got.Len() < len(value)+12 {
		n, err := c.Read(buf)
		require.NoError(t, err)
		got.Write(buf[:n])
		time.Sleep(time.Millisecond)
	}
	require.Equal(t, sha256.Sum256([]byte("$5242880\r\n"+value+"\r\n")), sha256.Sum256(got.Bytes()))
}

// A program that has this package vendored builds and runs; scripts/test makes it.
func TestConsumer(t *testing.T) {
	watchdog(t, time.Minute)
	addr := rdmaAddr(t)
	out, err := exec.Command(labtest.Var(t, "VALKEYRDMA_CONSUMER"), addr).CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.Equal(t, "PONG by rdma from "+addr+"\n", string(out))
}
