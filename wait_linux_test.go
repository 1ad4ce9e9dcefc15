//go:build linux && cgo

package valkeyrdma

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"math"
	"os"
	"runtime"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/valkeyrdma/valkeyrdma/internal/rdmatest"
)

// How a Read waits: by looking itself, by the poller, or asleep. What is counted here is the device's and the kernel's work,
// never time; which way a wait takes is up to the moment, so the tests take the best of several tries.

// pingPong makes n requests on one goroutine.
func pingPong(t testing.TB, c io.ReadWriter, n int) {
	t.Helper()
	buf := make([]byte, 7)
	for range n {
		_, err := c.Write([]byte("PING\r\n"))
		require.NoError(t, err)
		_, err = io.ReadFull(c, buf)
		require.NoError(t, err)
		require.Equal(t, "+PONG\r\n", string(buf))
	}
}

// spinning makes requests until the reader of c looks for its answers itself.
func spinning(t testing.TB, c *conn) {
	t.Helper()
	for range 400 {
		before := c.Stats()
		pingPong(t, c, 50)
		if after := c.Stats(); after.Spins-before.Spins >= 45 && after.Sleeps-before.Sleeps < 3 {
			return
		}
	}
	t.Fatalf("the reader never spins: %+v", c.Stats())
}

// A request and its reply cost three calls into C at most, and a reader that spins neither arms the queue nor sleeps.
func TestWaitCalls(t *testing.T) {
	if processors() == 1 {
		t.Fatal("nothing spins on one processor: this test needs two")
	}
	c := dialLab(t, watchdog(t, 3*time.Minute))
	const total = 200
	limit := int64(3 * total)
	if testing.Short() { // with a sanitizer everything takes longer, and a wait several slices, each of them a call
		limit *= 3
	}
	calls, arms := int64(1e9), uint64(1e9)
	for tries := 0; tries < 10 || calls > limit && tries < 300; tries++ { // a host may be busy with other things for seconds
		spinning(t, c)
		before, calling := c.Stats(), runtime.NumCgoCall()
		pingPong(t, c, total)
		calls = min(calls, runtime.NumCgoCall()-calling)
		arms = min(arms, c.Stats().Arms-before.Arms)
	}
	t.Logf("%d requests: %d calls into C, the queue armed %d times", total, calls, arms)
	require.LessOrEqual(t, calls, limit)
	require.Less(t, arms, uint64(total/10))
}

// syscalls returns the system calls for reading and writing that this thread has made. Posting a send is a write on rxe.
func syscalls(t testing.TB) (n int) {
	t.Helper()
	b, err := os.ReadFile("/proc/thread-self/io")
	require.NoError(t, err)
	for line := range strings.Lines(string(b)) {
		var count int
		if _, err := fmt.Sscanf(line, "syscr: %d", &count); err == nil {
			n += count
		}
		if _, err := fmt.Sscanf(line, "syscw: %d", &count); err == nil {
			n += count
		}
	}
	return n
}

// A small Write is one system call, on a device that needs one to be told of it, and a Read of what has arrived none.
func TestWaitSystemCalls(t *testing.T) {
	w := watchdog(t, time.Minute)
	c, p := pair(t, w, fake(t, rdmatest.Options{}), defaults)
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	own := syscalls(t)
	own = syscalls(t) - own // what looking costs
	buf := make([]byte, 100)
	const total = 200
	writes := 1 << 30
	for range 5 {
		before := syscalls(t)
		for range total {
			_, err := c.Write(buf)
			require.NoError(t, err)
		}
		writes = min(writes, syscalls(t)-before-own)
		readPeer(t, p, total*len(buf))
		require.NoError(t, p.Idle(20*time.Millisecond)) // fences are answered
	}
	t.Logf("%d Writes: %d system calls", total, writes)
	require.LessOrEqual(t, writes, total)

	_, err := p.Write(make([]byte, total*len(buf)))
	require.NoError(t, err)
	require.NoError(t, p.Flush())
	require.Eventually(t, func() bool { return c.Stats().Unread == total*len(buf) }, 10*time.Second, time.Millisecond)
	before, arms := syscalls(t), c.Stats().Arms
	for range total {
		_, err := io.ReadFull(c, buf)
		require.NoError(t, err)
	}
	require.Equal(t, own, syscalls(t)-before, "system calls of %d Reads", total)
	require.Equal(t, arms, c.Stats().Arms)
}

// A reader that has spun leaves its queue unarmed. When it does not come back, receives are posted again and writers hear of
// completions all the same.
func TestWaitTended(t *testing.T) {
	w := watchdog(t, time.Minute)
	o := defaults
	o.recvDepth = 256
	c, p := pair(t, w, fake(t, rdmatest.Options{}), o)
	hot := func() { // the fake server answers at once, which the reader finds by looking
		for range 50 {
			done := make(chan error, 1)
			go func() {
				_, err := io.ReadFull(c, make([]byte, 4))
				done <- err
			}()
			_, err := p.Write([]byte("pong"))
			require.NoError(t, err)
			require.NoError(t, <-done)
		}
	}
	hot()
	require.NoError(t, p.SendKeepalives(10_000))
	require.NoError(t, p.Flush())

	hot()
	written := make(chan error, 1)
	go func() {
		_, err := c.Write(make([]byte, 4*txStaging))
		written <- err
	}()
	readPeer(t, p, 4*txStaging)
	require.NoError(t, <-written)

	hot()
	tended.mu.Lock()
	t.Logf("%d connections are tended", len(tended.conns))
	tended.mu.Unlock()
	require.Eventually(t, func() bool {
		tended.mu.Lock()
		defer tended.mu.Unlock()
		return !c.tended
	}, 5*time.Second, time.Millisecond, "an idle connection stays unarmed")
}

// Many readers wait at the same time: more than may spin. Each gets its own replies, some of them by way of the poller, and
// Close ends a wait of each kind.
func TestWaitPoller(t *testing.T) {
	w := watchdog(t, 2*time.Minute)
	warm(t)
	fds, goroutines, resources := openFDs(t), runtime.NumGoroutine(), rdmaResources(t)
	const conns, total = 16, 300
	var wg sync.WaitGroup
	var spins, sleeps uint64
	var mu sync.Mutex
	for i := range conns {
		c := dialLab(t, w)
		wg.Go(func() {
			r := bufio.NewReader(c)
			for j := range total {
				want := fmt.Sprintf("%d-%d", i, j)
				if _, err := io.WriteString(c, resp("ECHO", want)); err != nil {
					t.Errorf("write: %v", err)
					return
				}
				if _, err := r.ReadString('\n'); err != nil {
					t.Errorf("read: %v", err)
					return
				}
				if got, err := r.ReadString('\n'); err != nil || strings.TrimSpace(got) != want {
					t.Errorf("got %q, %v; want %q", got, err, want)
					return
				}
			}
			s := c.Stats()
			mu.Lock()
			spins, sleeps = spins+s.Spins, sleeps+s.Sleeps
			mu.Unlock()
			// A last wait, which Close ends.
			time.AfterFunc(time.Duration(i)*time.Millisecond, func() { _ = c.Close() })
			if _, err := r.ReadByte(); err == nil {
				t.Error("read after Close")
			}
		})
	}
	wg.Wait()
	t.Logf("%d waits: %d found by looking, %d slept", conns*total, spins, sleeps)
	require.NotZero(t, spins)
	requireNoLeak(t, fds, goroutines, resources)
	require.Eventually(t, func() bool {
		polling.mu.Lock()
		defer polling.mu.Unlock()
		return !polling.on && !polling.running
	}, 5*time.Second, time.Millisecond, "the poller is on although nobody waits")
}

// With a negative Spin every wait is asleep.
func TestWaitWithoutSpinning(t *testing.T) {
	watchdog(t, time.Minute)
	conn, err := (&Dialer{Spin: -1}).DialCtxFn(context.Background(), rdmaAddr(t), nil, nil)
	require.NoError(t, err)
	defer conn.Close()
	pingPong(t, conn, 100)
	s := conn.(interface{ Stats() Stats }).Stats()
	require.Zero(t, s.Spins)
	require.NotZero(t, s.Sleeps)
}

// A Write is one request, into however many calls it is divided, so its reply is worth spinning for.
func TestWaitLargeWrites(t *testing.T) {
	if processors() == 1 {
		t.Fatal("nothing spins on one processor: this test needs two")
	}
	w := watchdog(t, 2*time.Minute)
	c, p := pair(t, w, fake(t, rdmatest.Options{}), defaults)
	request, reply := make([]byte, 8*maxPerCall), []byte("+OK\r\n")
	answer := make([]byte, len(reply))
	const warmup, total = 10, 10
	var server sync.WaitGroup
	server.Go(func() {
		for range warmup + total {
			if _, err := io.CopyN(io.Discard, p, int64(len(request))); err != nil {
				return
			}
			if _, err := p.Write(reply); err != nil {
				return
			}
		}
	})
	var before Stats
	for i := range warmup + total {
		if i == warmup {
			before = c.Stats()
		}
		_, err := c.Write(request)
		require.NoError(t, err)
		_, err = io.ReadFull(c, answer)
		require.NoError(t, err)
	}
	server.Wait()
	t.Logf("%d waits ended while the reader looked, %d asleep", c.Stats().Spins-before.Spins, c.Stats().Sleeps-before.Sleeps)
	require.NotZero(t, c.Stats().Spins-before.Spins)
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
	// Of several tries the one that counts is that in which nothing else in the process called C.
	calls := func(do func([]byte) (int, error)) int64 {
		least := int64(math.MaxInt64)
		for range 5 {
			settle()
			before := runtime.NumCgoCall()
			for range total {
				_, err := do(buf)
				require.NoError(t, err)
			}
			least = min(least, runtime.NumCgoCall()-before)
		}
		return least
	}
	require.EqualValues(t, total, calls(c.Read), "calls into C for %d Reads", total)
	require.Zero(t, testing.AllocsPerRun(100, func() { _, _ = c.Read(buf) }))
	require.EqualValues(t, total, calls(c.Write), "calls into C for %d Writes", total)
	require.Zero(t, testing.AllocsPerRun(100, func() { _, _ = c.Write(buf) }))
	require.Zero(t, testing.AllocsPerRun(100, func() { _ = c.SetDeadline(time.Now().Add(time.Hour)) }))
}
