package main

import (
	"context"
	"crypto/tls"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"math/rand/v2"
	"net"
	"os"
	"os/signal"
	"runtime"
	"runtime/debug"
	"runtime/pprof"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/valkey-io/valkey-go"
	"github.com/valkeyrdma/valkeyrdma"
	"github.com/valkeyrdma/valkeyrdma/internal/outage"
	"github.com/valkeyrdma/valkeyrdma/internal/rdmatest"
)

type soak struct {
	length, every, think time.Duration
	rng                  *rand.Rand // of chaos
	live                 bool
	dir                  string

	alone, cluster *side
	workers        []*worker
	begin          time.Time
	working        atomic.Bool
	phase          atomic.Pointer[busy]
	samples        []sample
	ending         ending

	printing                      sync.Mutex // guards what minute keeps
	minuteAt                      time.Duration
	firstCounters, minuteCounters map[string]int64
	progressAt                    time.Duration
	farewells                     sync.Map // of subscriptions that have heard theirs

	mu                                     sync.Mutex
	operations, failures                   int64
	minuteOps, minuteFailures, progressOps int64
	kinds                                  map[string]int64 // operations that were right, by side and kind
	errors                                 map[string]int64 // by side, kind and text
	disturbances, notes                    map[string]int64
	violations                             []string
	enough                                 chan struct{} // closed after so many violations that more tell nothing
}

const maxViolations = 25

func (k *soak) sides() []*side { return []*side{k.alone, k.cluster} }

func main() {
	length := flag.Duration("for", 10*time.Minute, "how long")
	seed := flag.Uint64("seed", 0, "the seed of all that is random; 0: another one each time")
	goroutines := flag.Int("goroutines", 64, "how many work, subscribers included")
	think := flag.Duration("think", 15*time.Millisecond, "how long each waits between operations, on average")
	live := flag.Bool("live", false, "a line of progress each second, in place: for a terminal")
	pause := flag.Int("pause", 0, "internal: the process to stop")
	flag.Parse()
	if *pause != 0 {
		pauseProcess(*pause, *length)
		return
	}
	addr := os.Getenv("VALKEYRDMA_RDMA_ADDR")
	if addr == "" || os.Getenv("VALKEYRDMA_VALKEY_DIR") == "" || flag.NArg() > 0 || *goroutines < 16 || *length < 30*time.Second {
		fmt.Fprintln(os.Stderr, "soak: run it with make soak SOAK=10m, which brings RDMA and servers; 30s and 16 goroutines at least")
		flag.Usage()
		os.Exit(2)
	}
	if *seed == 0 {
		*seed = rand.Uint64()%1_000_000_000 + 1
	}
	host, _, err := net.SplitHostPort(addr)
	if err != nil {
		fmt.Fprintln(os.Stderr, "soak: VALKEYRDMA_RDMA_ADDR:", err)
		os.Exit(2)
	}
	k := &soak{length: *length, every: min(time.Minute, *length/6), think: *think, rng: rand.New(rand.NewPCG(*seed, 0)),
		live:  *live,
		alone: &side{name: "server"}, cluster: &side{name: "cluster", cluster: true},
		kinds: make(map[string]int64), errors: make(map[string]int64), disturbances: make(map[string]int64), notes: make(map[string]int64),
		enough: make(chan struct{})}
	k.logf("soak of %v with %d goroutines, seed %d: %s", *length, *goroutines, *seed, os.Getenv("VALKEYRDMA_LAB_INFO"))
	interrupt := make(chan os.Signal, 1)
	signal.Notify(interrupt, os.Interrupt, syscall.SIGTERM)
	if err := k.run(host, *seed, *goroutines, interrupt); err != nil {
		k.wrong("%v", err)
	}
	ok := k.report()
	k.takedown()
	if !ok {
		os.Exit(1)
	}
}

func (k *soak) run(host string, seed uint64, goroutines int, interrupt <-chan os.Signal) error {
	if err := k.startServers(host); err != nil {
		return err
	}
	if err := k.warm(); err != nil {
		return err
	}
	stopWatch := make(chan struct{})
	var watching sync.WaitGroup
	for id := range goroutines - len(k.subscriptions()) {
		k.workers = append(k.workers, &worker{soak: k, id: id, rng: rand.New(rand.NewPCG(seed, uint64(id)+1)), acked: make(epochs),
			lanes: [2]*lane{newLane(k.alone, id), newLane(k.cluster, id)}})
	}
	watching.Go(func() { k.watch(stopWatch) })
	watching.Go(func() { k.beat(stopWatch) })
	err := k.work(seed, interrupt)
	close(stopWatch)
	watching.Wait()
	if err != nil {
		return err
	}
	return k.settle()
}

func (k *soak) startServers(host string) error {
	var err error
	if k.dir, err = os.MkdirTemp("", "valkeyrdma-soak-"); err != nil {
		return err
	}
	died := func(s *server) {
		k.wrong("%s has ended, and was not killed; the end of its log:\n%s", s.name, s.LogTail())
	}
	for i := range 7 {
		side, name := k.cluster, fmt.Sprintf("node%d", i)
		args := []string{"--cluster-enabled", "yes", "--cluster-node-timeout", "10000", "--cluster-replica-validity-factor", "0",
			"--cluster-allow-replica-migration", "no", "--repl-diskless-sync-delay", "0", "--repl-backlog-size", "64mb"}
		if i == 0 {
			// What was acknowledged is on disk: it must be there after kill -9.
			side, name, args = k.alone, "server", []string{"--appendonly", "yes", "--appendfsync", "always"}
		}
		s, err := newServer(name, k.dir, host, died, args...)
		if err != nil {
			return err
		}
		side.servers = append(side.servers, s)
		if err := s.start(); err != nil {
			return err
		}
	}
	if err := formCluster(k.cluster.servers); err != nil {
		return err
	}
	k.logf("a server, %s, and a cluster of %d are up", k.alone.servers[0].Addr, len(k.cluster.servers))
	return nil
}

func (k *soak) takedown() {
	k.hangUp()
	for _, side := range k.sides() {
		for _, s := range side.servers {
			s.Kill()
		}
	}
	_ = os.RemoveAll(k.dir)
}

// hangUp closes the connections by which the servers are managed, so that only those under test are counted.
func (k *soak) hangUp() {
	for _, side := range k.sides() {
		for _, s := range side.servers {
			s.HangUp()
		}
	}
}

// warm does once what stays for the life of the process, and measures what there is then.
func (k *soak) warm() error {
	for _, s := range k.sides() {
		if err := s.open(); err != nil {
			return err
		}
		s.close()
	}
	k.hangUp()
	if _, err := rdmatest.Resources(os.Getpid()); err != nil {
		return err
	}
	// A dial and a Close go on in the background for a while.
	time.Sleep(3 * time.Second)
	var err error
	k.ending.before = k.rest()
	k.ending.rdmaBefore, err = rdmatest.Resources(os.Getpid())
	k.logf("at the start: %s", describe(k.ending.before, k.ending.rdmaBefore))
	return err
}

// rest measures after what can be freed was freed.
func (k *soak) rest() sample {
	runtime.GC() // twice, for what sync.Pool keeps
	debug.FreeOSMemory()
	return measure(time.Since(k.begin))
}

func describe(s sample, r resources) string {
	return fmt.Sprintf("RSS %s, fds %d, threads %d, goroutines %d | RDMA %v", mib(s.rss), s.fds, s.threads, s.goroutines, r)
}

func (k *soak) subscriptions() []subscription {
	a, c := k.alone, k.cluster
	return []subscription{
		{a, "SUBSCRIBE", "soak:plain", a.listen, false},
		{a, "PSUBSCRIBE", "soak:pattern:*", a.listen, false},
		{a, "SUBSCRIBE", "soak:slow", a.slow, true},
		{c, "SUBSCRIBE", "soak:plain", c.listen, false},
		{c, "PSUBSCRIBE", "soak:pattern:*", c.listen, false},
		{c, "SSUBSCRIBE", "soak:shard:0", c.listen, false},
		{c, "SSUBSCRIBE", "soak:shard:1", c.slow, true},
	}
}

// work is the soak proper: from the first client to the last.
func (k *soak) work(seed uint64, interrupt <-chan os.Signal) error {
	for _, s := range k.sides() {
		if err := s.open(); err != nil {
			return err
		}
		defer s.close()
	}
	k.begin = time.Now()
	k.firstCounters = deviceCounters()
	k.minuteCounters = k.firstCounters
	k.working.Store(true)
	stop, stopChaos := make(chan struct{}), make(chan struct{})
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	var working, listening, raging sync.WaitGroup
	for i, s := range k.subscriptions() {
		listening.Go(func() { k.subscribe(ctx, s, rand.New(rand.NewPCG(seed, uint64(1000+i)))) })
	}
	for _, w := range k.workers {
		working.Go(func() { w.run(stop) })
	}
	raging.Go(func() { k.chaos(stopChaos) })

	over := time.NewTimer(k.length)
	defer over.Stop()
	lastDisturbance := time.NewTimer(k.length - min(k.length/4, grace+10*time.Second))
	defer lastDisturbance.Stop()
	for stopping := false; !stopping; {
		select {
		case <-lastDisturbance.C:
			close(stopChaos)
			stopChaos = nil
		case <-over.C:
			stopping = true
		case s := <-interrupt:
			k.wrong("ended by %v", s)
			stopping = true
		case <-k.enough:
			stopping = true
		}
	}
	k.in("the last disturbance")
	if stopChaos != nil {
		close(stopChaos)
	}
	raging.Wait()
	k.in("the last operation")
	close(stop)
	working.Wait()
	at := time.Since(k.begin)
	k.progress(at)
	k.minute(at)
	k.working.Store(false)
	k.in("the last message")
	k.farewell()
	cancel()
	listening.Wait()
	k.in("comparing what is there with what was written")
	k.logf("comparing what is there with what was written")
	for _, w := range k.workers {
		working.Go(func() {
			for _, l := range w.lanes {
				w.verify(l)
			}
		})
	}
	working.Wait()
	k.in("closing the clients")
	return nil
}

// farewell says good-bye to all subscriptions, and waits until each has heard it: nothing was disturbed lately, so all of them listen.
func (k *soak) farewell() {
	left := k.subscriptions()
	for begin, seq := time.Now(), uint64(1); ; seq++ {
		for _, s := range left {
			channel := strings.Replace(s.channel, "*", "1", 1)
			command := publication(s.auto, s.command == "SSUBSCRIBE", channel, makeValue(channel+goodbye, seq, 0))
			ctx, cancel := context.WithTimeout(context.Background(), limit)
			err := s.auto.Do(ctx, command).Error()
			cancel()
			k.tally(s.side, "the farewell to "+s.command, time.Now(), err)
		}
		time.Sleep(time.Second)
		left = slices.DeleteFunc(left, func(s subscription) bool {
			_, heard := k.farewells.Load(s.id())
			return heard
		})
		if len(left) == 0 {
			return
		}
		if time.Since(begin) > limit {
			for _, s := range left {
				k.wrong("%s: %s %s has not heard the last messages", s.name, s.command, s.channel)
			}
			return
		}
	}
}

// in notes for the watchdog what the soak waits for.
func (k *soak) in(what string) { k.phase.Store(&busy{what, time.Now()}) }

// settle waits until all is given back that was taken.
func (k *soak) settle() error {
	k.hangUp()
	before, err := k.ending.rdmaBefore, error(nil)
	for begin := time.Now(); ; time.Sleep(time.Second) {
		k.ending.after = k.rest()
		if k.ending.rdmaAfter, err = rdmatest.Resources(os.Getpid()); err != nil {
			return err
		}
		// A dial that was given up goes on for up to 30 s.
		if len(k.ending.leaks()) == 0 || time.Since(begin) > time.Minute {
			break
		}
	}
	var pids []int
	for _, side := range k.sides() {
		for _, s := range side.servers {
			pids = append(pids, s.Pid())
		}
	}
	servers, err := rdmatest.Resources(pids...)
	k.logf("at the start: %s\nat the end:   %s\nthe servers, which listen: RDMA %v", describe(k.ending.before, before),
		describe(k.ending.after, k.ending.rdmaAfter), resources(servers))
	var heap runtime.MemStats
	runtime.ReadMemStats(&heap)
	k.logf("of the RSS at the end Go's heap is %s in use; Go has %s of the system", mib(int64(heap.HeapInuse)), mib(int64(heap.Sys-heap.HeapReleased)))
	leaks := k.ending.leaks()
	for _, complaint := range leaks {
		k.wrong("not given back: %s", complaint)
	}
	if len(leaks) > 0 {
		_ = pprof.Lookup("goroutine").WriteTo(os.Stdout, 1)
	}
	if k.length < steadyAfter {
		k.logf("whether anything grows is not judged: in less than %v everything still warms up", steadyAfter)
		return err
	}
	for _, complaint := range growth(k.samples) {
		k.wrong("growing: %s", complaint)
	}
	return err
}

func (k *soak) count(what *map[string]int64, name string) {
	k.mu.Lock()
	defer k.mu.Unlock()
	(*what)[name]++
}

// tally notes the end of an operation.
func (k *soak) tally(s *side, kind string, begin time.Time, err error) {
	if err == nil {
		k.mu.Lock()
		defer k.mu.Unlock()
		k.operations++
		k.kinds[kind+" ("+s.name+")"]++
		return
	}
	excused := s.weather.excuses(begin)
	if ended := new(endedError); errors.As(err, &ended) {
		excused = excused || s.weather.since(ended.used)
	}
	excused = excused && explicable(err)
	k.mu.Lock()
	k.failures++
	k.errors[s.name+": "+kind+": "+normal(err.Error())]++
	k.mu.Unlock()
	if !excused {
		k.wrong("%s: %s failed when nothing was disturbed, or as it never should: %v (after %v)", s.name, kind, err, time.Since(begin))
	}
}

// explicable says whether err can come of a disturbance: it tells of a server that is gone or of one that takes over, or that time was
// up, or that commands which belong together were torn apart by one of these.
func explicable(err error) bool {
	if joined, ok := err.(interface{ Unwrap() []error }); ok { // each of those of a DoMulti
		return !slices.ContainsFunc(joined.Unwrap(), func(err error) bool { return !explicable(err) })
	}
	return outage.Explains(err) || errors.Is(err, os.ErrDeadlineExceeded) || errors.Is(err, context.DeadlineExceeded) ||
		errors.Is(err, valkey.ErrDoCacheAborted) || outage.Word(err) == "EXECABORT"
}

// wrong notes what must not happen.
func (k *soak) wrong(format string, args ...any) {
	text := fmt.Sprintf(format, args...)
	k.mu.Lock()
	k.violations = append(k.violations, text)
	n := len(k.violations)
	k.mu.Unlock()
	if n <= maxViolations {
		k.logf("WRONG: %s", text)
	}
	if n == maxViolations {
		close(k.enough)
	}
}

func (k *soak) logf(format string, args ...any) {
	k.mu.Lock()
	defer k.mu.Unlock()
	if k.live {
		fmt.Print("\r\x1b[K")
	}
	fmt.Printf(format+"\n", args...)
}

// report prints what there was, and tells whether all was right.
func (k *soak) report() bool {
	k.printing.Lock()
	defer k.printing.Unlock()
	k.mu.Lock()
	defer k.mu.Unlock()
	list := func(title string, counts map[string]int64) {
		if len(counts) == 0 {
			return
		}
		fmt.Printf("\n%s\n", title)
		for _, name := range slices.Sorted(maps.Keys(counts)) {
			fmt.Printf("  %9d  %s\n", counts[name], name)
		}
	}
	list("Operations that were right", k.kinds)
	list("Disturbances", k.disturbances)
	list("Besides", k.notes)
	list("Errors", k.errors)
	fmt.Printf("\nThe device's counters, in all: %s\n", changed(k.firstCounters, k.minuteCounters))
	fmt.Printf("Calm, when any error counts: %.0f s of the server, %.0f s of the cluster\n", k.alone.weather.calm.Seconds(),
		k.cluster.weather.calm.Seconds())
	if k.operations == 0 {
		k.violations = append(k.violations, "nothing was done")
	}
	if len(k.violations) > 0 {
		fmt.Printf("\nWrong (%d)\n", len(k.violations))
		for _, v := range k.violations[:min(len(k.violations), maxViolations)] {
			fmt.Printf("  - %s\n", strings.ReplaceAll(v, "\n", "\n    "))
		}
		fmt.Printf("\nFAILED: %d operations, %d errors, %d things wrong\n", k.operations, k.failures, len(k.violations))
		return false
	}
	fmt.Printf("\nPASSED: %d operations, %d errors while disturbed, every value and counter right, nothing left\n", k.operations, k.failures)
	return true
}

// dial is what the soak is about.
func dial(ctx context.Context, dst string, d *net.Dialer, t *tls.Config) (net.Conn, error) {
	c, err := valkeyrdma.DialCtxFn(ctx, dst, d, t)
	if err != nil {
		return nil, err
	}
	n := &noted{Conn: c}
	n.used.Store(time.Now().UnixNano())
	return n, nil
}

// A noted connection remembers when it was used. One that lies idle in a pool while a disturbance ends it is found out when it is used
// next, maybe long after.
type noted struct {
	net.Conn
	used atomic.Int64 // Unix time in nanoseconds
}

// An endedError is the error of a Write to a connection that the server had ended already.
type endedError struct {
	error
	used time.Time // the last time that the connection was good for anything
}

func (e *endedError) Unwrap() error { return e.error }

func (c *noted) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	if n > 0 {
		c.used.Store(time.Now().UnixNano())
	}
	return n, err
}

func (c *noted) Write(b []byte) (int, error) { return c.written(c.Conn.Write(b)) }

func (c *noted) WriteString(s string) (int, error) { return c.written(io.WriteString(c.Conn, s)) }

func (c *noted) written(n int, err error) (int, error) {
	if errors.Is(err, syscall.EPIPE) {
		return n, &endedError{err, time.Unix(0, c.used.Load())}
	}
	if err == nil {
		c.used.Store(time.Now().UnixNano())
	}
	return n, err
}
