//go:build linux && cgo

package e2e

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/valkey-io/valkey-go"
	"github.com/valkeyrdma/valkeyrdma"
	"github.com/valkeyrdma/valkeyrdma/internal/labtest"
	"github.com/valkeyrdma/valkeyrdma/internal/outage"
	"github.com/valkeyrdma/valkeyrdma/internal/servers"
)

// patience is how long a test waits for what has to happen: long enough for a slow machine that is busy with other things.
const patience = 90 * time.Second

// host is the address of the RDMA device, by which servers are reached over TCP as well.
func host(t testing.TB) string {
	t.Helper()
	h, _, err := net.SplitHostPort(labtest.Var(t, "VALKEYRDMA_RDMA_ADDR"))
	require.NoError(t, err)
	return h
}

// watchdog ends the process if the test is not over within limit, after it has printed what every goroutine does and the ends of
// the servers' logs.
func watchdog(t testing.TB, limit time.Duration) {
	t.Helper()
	labtest.Watchdog(t, limit, func() {
		running.Range(func(key, _ any) bool {
			s := key.(*server)
			fmt.Fprintf(os.Stderr, "the end of the log of %s:\n%s\n", s.Addr, s.LogTail())
			return true
		})
	})
}

// eventually waits until done, and says what it waited for in vain.
func eventually(t testing.TB, what string, done func() bool) {
	t.Helper()
	require.NoError(t, servers.Wait(patience, what, func() (bool, error) { return done(), nil }))
}

// within is a context for calls that have to succeed: its end means that they hang.
func within(t testing.TB, limit time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	t.Cleanup(cancel)
	return ctx
}

// A transport is a way to reach servers. Their addresses, which is what clients and nodes tell each other, are those of TCP.
type transport struct {
	name   string
	tcp    bool
	offset int // RDMA port less TCP port
}

var (
	overRDMA      = transport{name: "rdma"}
	overOtherPort = transport{name: "rdma on other ports", offset: 1000}
	overTCP       = transport{name: "tcp", tcp: true}
)

// transports are those that tests run over. VALKEYRDMA_E2E_TCP=1 adds TCP, to compare with: what TCP does is no business of this
// library, but tells whether a failure is.
func transports() []transport {
	if os.Getenv("VALKEYRDMA_E2E_TCP") == "" {
		return []transport{overRDMA}
	}
	return []transport{overRDMA, overTCP}
}

func (tr transport) dialer() *valkeyrdma.Dialer {
	switch {
	case tr.tcp:
		return &valkeyrdma.Dialer{Route: func(string) (string, string) { return "tcp", "" }}
	case tr.offset != 0:
		return &valkeyrdma.Dialer{Route: func(dst string) (string, string) { return "rdma", addPort(dst, tr.offset) }}
	default:
		return new(valkeyrdma.Dialer)
	}
}

func addPort(addr string, n int) string {
	host, port, _ := net.SplitHostPort(addr)
	p, _ := strconv.Atoi(port)
	return net.JoinHostPort(host, strconv.Itoa(p+n))
}

// dials keeps the connections that a client makes, so that a test can tell what they really are.
type dials struct {
	dialer *valkeyrdma.Dialer
	mu     sync.Mutex
	conns  map[string][]net.Conn // by the address that the client asked for
	failed []error
}

func (d *dials) DialCtxFn(ctx context.Context, dst string, nd *net.Dialer, cfg *tls.Config) (net.Conn, error) {
	c, err := d.dialer.DialCtxFn(ctx, dst, nd, cfg)
	d.mu.Lock()
	defer d.mu.Unlock()
	if err != nil {
		d.failed = append(d.failed, err)
		return nil, err
	}
	if d.conns == nil {
		d.conns = make(map[string][]net.Conn)
	}
	d.conns[dst] = append(d.conns[dst], c)
	return c, nil
}

func (d *dials) count() int {
	d.mu.Lock()
	defer d.mu.Unlock()
	n := 0
	for _, conns := range d.conns {
		n += len(conns)
	}
	return n
}

// requireVia checks that the client talks to each address, and that all connections there were of that transport.
func (d *dials) requireVia(t testing.TB, tr transport, addrs ...string) {
	t.Helper()
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, addr := range addrs {
		require.NotEmpty(t, d.conns[addr], "no connection to %s", addr)
		for _, c := range d.conns[addr] {
			if tr.tcp {
				require.IsType(t, (*net.TCPConn)(nil), c)
				continue
			}
			s, ok := c.(interface{ Stats() valkeyrdma.Stats })
			require.True(t, ok, "%s is reached by a %T", addr, c)
			require.Equal(t, "rdma", c.RemoteAddr().Network())
			require.Equal(t, addPort(addr, tr.offset), c.RemoteAddr().String())
			if stats := s.Stats(); stats.Device != "" { // it is empty once the connection is closed
				require.Equal(t, labtest.Var(t, "VALKEYRDMA_DEVICE"), stats.Device)
				require.NotZero(t, stats.MessagesSent)
			}
		}
	}
}

// connect makes a client with connections of that transport.
func connect(t testing.TB, tr transport, opt valkey.ClientOption) (valkey.Client, *dials) {
	t.Helper()
	return connectBy(t, tr.dialer(), opt)
}

func connectBy(t testing.TB, dialer *valkeyrdma.Dialer, opt valkey.ClientOption) (valkey.Client, *dials) {
	t.Helper()
	d := &dials{dialer: dialer}
	opt.DialCtxFn = d.DialCtxFn
	opt.Dialer.Timeout = patience // the five seconds that valkey-go allows would be a timed assertion
	client, err := valkey.NewClient(opt)
	require.NoError(t, err)
	t.Cleanup(client.Close)
	return client, d
}

// --- servers ---

var running sync.Map // of *server, for the watchdog

func newPort(t testing.TB, host string) int {
	t.Helper()
	port, err := servers.NewPort(host)
	require.NoError(t, err)
	return port
}

// A server is a Valkey of the test's own.
type server struct {
	*servers.Server
	t testing.TB
}

// start starts a Valkey that listens on TCP and, with that offset, on RDMA. It ends with the test, which shows the log if it
// failed.
func start(t testing.TB, offset int, args ...string) *server {
	t.Helper()
	s := prepare(t, offset, args...)
	launch(t, s)
	return s
}

// prepare is start without the start.
func prepare(t testing.TB, offset int, args ...string) *server {
	t.Helper()
	host := host(t)
	port := newPort(t, host)
	return &server{t: t, Server: servers.New(host, port, port+offset, t.TempDir(), append([]string{"--enable-debug-command", "yes",
		"--repl-diskless-sync-delay", "0"}, args...)...)}
}

// launch starts servers, all at once because each takes a noticeable time, and waits for them.
func launch(t testing.TB, all ...*server) {
	t.Helper()
	for _, s := range all {
		s.t = t
		t.Cleanup(func() {
			if t.Failed() {
				t.Logf("the end of the log of %s:\n%s", s.Addr, s.LogTail())
			}
			running.Delete(s)
			s.HangUp()
			s.Kill()
		})
		running.Store(s, nil)
		require.NoError(t, s.Begin())
	}
	for _, s := range all {
		require.NoError(t, s.Await(patience))
	}
}

// run starts the process again, and waits until it accepts connections.
func (s *server) run() {
	s.t.Helper()
	require.NoError(s.t, s.Begin())
	require.NoError(s.t, s.Await(patience))
}

func (s *server) do(args ...string) string {
	s.t.Helper()
	text, err := s.Do(args...)
	require.NoError(s.t, err, "%q on %s", args, s.Addr)
	return text
}

// calls is how often the server has run a command.
func (s *server) calls(command string) int {
	s.t.Helper()
	calls, _, _ := strings.Cut(strings.TrimPrefix(s.Info("cmdstat_"+command), "calls="), ",")
	n, _ := strconv.Atoi(calls)
	return n
}

// errorsOf is how often the server has answered with an error of that kind.
func (s *server) errorsOf(kind string) int {
	s.t.Helper()
	n, _ := strconv.Atoi(strings.TrimPrefix(s.Info("errorstat_"+kind), "count="))
	return n
}

// port is the TCP port.
func (s *server) port() string {
	_, port, _ := net.SplitHostPort(s.Addr)
	return port
}

// --- load ---

var errUnreplicated = errors.New("written, but no replica has it yet")

func isClear(err error) bool { return errors.Is(err, errUnreplicated) || outage.Explains(err) }

// kind is the text of err without what differs from one to the next.
func kind(err error) string {
	if word := outage.Word(err); word != "" {
		return word
	}
	var op *net.OpError
	if errors.As(err, &op) {
		return op.Op + " " + op.Net + ": " + op.Err.Error()
	}
	return err.Error()
}

// replicated writes key, and succeeds only if a replica has it: replication is asynchronous, so that the master's own OK means
// nothing once another takes its place. WAIT is about what its own connection wrote, hence the dedicated client.
func replicated(ctx context.Context, client valkey.Client, key, value string) error {
	return client.Dedicated(func(c valkey.DedicatedClient) error {
		answers := c.DoMulti(ctx, c.B().Set().Key(key).Value(value).Build(), c.B().Wait().Numreplicas(1).Timeout(1000).Build())
		if err := answers[0].Error(); err != nil {
			return err
		}
		n, err := answers[1].AsInt64()
		if err == nil && n == 0 {
			err = errUnreplicated
		}
		return err
	})
}

// plain writes key; it suffices where the server that says OK is not replaced.
func plain(ctx context.Context, client valkey.Client, key, value string) error {
	return client.Do(ctx, client.B().Set().Key(key).Value(value).Build()).Error()
}

// load is a number of writers and readers that go on until finish, whatever happens to the servers.
type load struct {
	t      testing.TB
	client valkey.Client
	prefix string // of its keys
	ctx    context.Context
	stop   chan struct{}
	wg     sync.WaitGroup
	tries  [4]int // of pipelined INCRs, each the number of its goroutine's, until that is over

	mu     sync.Mutex
	acked  []string       // keys; the value is the key
	reads  int            // that brought the right value
	incrs  [4]int         // of the tries, those that succeeded
	errors map[string]int // of writes, by their text without addresses
	odd    []error        // those that a caller could make nothing of
}

func startLoad(t testing.TB, client valkey.Client, prefix string, set func(context.Context, valkey.Client, string, string) error) *load {
	t.Helper()
	l := &load{t: t, client: client, prefix: prefix, ctx: within(t, 3*patience), stop: make(chan struct{}), errors: map[string]int{}}
	for w := range 3 {
		l.wg.Go(func() {
			for i := 0; !l.stopped(); i++ {
				key := fmt.Sprintf("%s:%d:%d", prefix, w, i)
				for !l.stopped() {
					err := set(l.ctx, client, key, key)
					l.note(err, func() { l.acked = append(l.acked, key) })
					if err == nil {
						break
					}
					time.Sleep(20 * time.Millisecond)
				}
			}
		})
	}
	for range 2 {
		l.wg.Go(func() { l.read(client, l.stopped, &l.reads) })
	}
	// Those that share a connection: what fails is not repeated, and whatever succeeds shows that no INCR was done twice. A server that
	// takes over may have missed the last ones.
	for w := range l.incrs {
		key := l.counter(w)
		l.wg.Go(func() {
			for !l.stopped() {
				l.tries[w]++
				n, err := client.Do(l.ctx, client.B().Incr().Key(key).Build()).AsInt64()
				l.note(err, func() { l.incrs[w]++ })
				if err != nil {
					time.Sleep(20 * time.Millisecond)
				} else if !assert.Positive(t, n) || !assert.LessOrEqual(t, n, int64(l.tries[w]), key) {
					return
				}
			}
		})
	}
	return l
}

// read reads acknowledged writes until over, and counts them.
func (l *load) read(client valkey.Client, over func() bool, reads *int) {
	for i := 0; !over(); i++ {
		key, ok := l.pick(i)
		if !ok {
			time.Sleep(time.Millisecond)
			continue
		}
		// valkey-go repeats what only reads until it succeeds, so a failover must not show here, but for the moment when no node
		// knows a master of the slot: that valkey-go says itself, before it asks any server.
		value, err := client.Do(l.ctx, client.B().Get().Key(key).Build()).ToString()
		if errors.Is(err, valkey.ErrNoSlot) {
			time.Sleep(20 * time.Millisecond)
			continue
		}
		if !assert.NoError(l.t, err, "GET %s", key) || !assert.Equal(l.t, key, value) {
			return
		}
		l.mu.Lock()
		*reads++
		l.mu.Unlock()
	}
}

// readBeside reads with another client, too, which does not notice what happens meanwhile. finish is to be called before that of l.
func (l *load) readBeside(client valkey.Client) (progress func(n int), finish func()) {
	stop, done, reads := make(chan struct{}), make(chan struct{}), 0
	go func() {
		defer close(done)
		l.read(client, func() bool { return closed(stop) || l.stopped() }, &reads)
	}()
	progress = func(n int) {
		l.t.Helper()
		l.await(n, "reads", func() []int { return []int{reads} })
	}
	return progress, func() {
		close(stop)
		<-done
	}
}

func (l *load) counter(w int) string { return fmt.Sprintf("%s:pipelined:%d", l.prefix, w) }

func (l *load) stopped() bool { return closed(l.stop) || l.t.Failed() }

func closed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

func (l *load) pick(i int) (string, bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.acked) == 0 {
		return "", false
	}
	return l.acked[i*7919%len(l.acked)], true
}

// note counts the outcome of a write; succeeded runs under the lock.
func (l *load) note(err error, succeeded func()) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if err == nil {
		succeeded()
		return
	}
	l.errors[kind(err)]++
	if !isClear(err) {
		l.odd = append(l.odd, err)
	}
}

// progress waits until there are n more acknowledged writes, as many reads, and as many INCRs of each writer.
func (l *load) progress(n int) {
	l.t.Helper()
	l.await(n, "writes and reads of each kind", func() []int { return append([]int{len(l.acked), l.reads}, l.incrs[:]...) })
}

// await waits until each of the counts is n more. They are taken while mu is held.
func (l *load) await(n int, of string, counts func() []int) {
	l.t.Helper()
	get := func() []int {
		l.mu.Lock()
		defer l.mu.Unlock()
		return counts()
	}
	before := get()
	eventually(l.t, fmt.Sprintf("%d more %s", n, of), func() bool {
		for i, done := range get() {
			if done < before[i]+n {
				return l.t.Failed()
			}
		}
		return true
	})
	require.False(l.t, l.t.Failed())
}

// finishDurable is finish where no server takes over from another, so that INCRs, too, are all there: as many as succeeded, and of
// those that failed each once or not at all.
func (l *load) finishDurable() {
	l.t.Helper()
	l.finish()
	for w := range l.incrs {
		n, err := l.client.Do(l.ctx, l.client.B().Get().Key(l.counter(w)).Build()).AsInt64()
		require.NoError(l.t, err)
		require.GreaterOrEqual(l.t, n, int64(l.incrs[w]), "acknowledged INCRs are lost")
		require.LessOrEqual(l.t, n, int64(l.tries[w]), "INCRs were done twice")
	}
}

// finish stops, and looks for every acknowledged write.
func (l *load) finish() {
	l.t.Helper()
	close(l.stop)
	l.wg.Wait()
	require.False(l.t, l.t.Failed())
	for i := 0; i < len(l.acked); i += 500 {
		keys := l.acked[i:min(i+500, len(l.acked))]
		gets := make(valkey.Commands, len(keys))
		for i, key := range keys {
			gets[i] = l.client.B().Get().Key(key).Build()
		}
		for i, r := range l.client.DoMulti(l.ctx, gets...) {
			value, err := r.ToString()
			require.NoError(l.t, err, "an acknowledged write of %s is lost", keys[i])
			require.Equal(l.t, keys[i], value)
		}
	}
	l.t.Logf("%d acknowledged writes are there, %d reads without an error, pipelined INCRs %v; errors of writes: %v",
		len(l.acked), l.reads, l.incrs, l.errors)
	require.Empty(l.t, l.odd, "errors that a caller can make nothing of")
}
