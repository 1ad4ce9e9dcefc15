package main

import (
	"bytes"
	"context"
	"crypto/sha1"
	"encoding/hex"
	"errors"
	"fmt"
	"math/rand/v2"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/valkey-io/valkey-go"
)

const (
	clientName = "soak"
	limit      = 40 * time.Second // of an operation
	hang       = 2 * time.Minute  // an operation that takes so long, although its limit is over, hangs
	smallKeys  = 8                // of each worker
	casGroups  = 4                // shared by all workers
)

// A side is what is worked on: the server alone, or the cluster.
type side struct {
	name    string
	cluster bool
	servers []*server
	weather weather
	epoch   atomic.Uint64 // changes when a replica may take over, and acknowledged writes may be lost

	auto, single, resp2, brief valkey.Client // pipelined; DisableAutoPipelining; AlwaysRESP2; ConnLifetime
	listen, slow               valkey.Client // DisableRetry: a Receive is one subscription of one connection

	casMu sync.Mutex
	cas   [casGroups]struct{ acked, attempted uint64 }

	published publishedNumbers
}

// publishedNumbers holds the numbers of messages that may be lost or late, because their PUBLISH failed.
type publishedNumbers struct {
	mu      sync.Mutex
	unacked map[string]map[uint64]bool
}

func (p *publishedNumbers) failed(key string, seq uint64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.unacked == nil {
		p.unacked = make(map[string]map[uint64]bool)
	}
	if p.unacked[key] == nil {
		p.unacked[key] = make(map[uint64]bool)
	}
	p.unacked[key][seq] = true
}

func (p *publishedNumbers) has(key string, seq uint64) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.unacked[key][seq]
}

// open makes the side's clients.
func (s *side) open() error {
	var err error
	make := func(change func(*valkey.ClientOption)) (c valkey.Client) {
		o := valkey.ClientOption{DialCtxFn: dial, ClientName: clientName, ForceSingleClient: !s.cluster,
			BlockingPoolSize: 12, BlockingPoolCleanup: time.Minute, CacheSizeEachConn: 16 << 20, ConnWriteTimeout: 30 * time.Second}
		o.Dialer.Timeout, o.Dialer.KeepAlive = 20*time.Second, 5*time.Second
		for _, server := range s.servers {
			o.InitAddress = append(o.InitAddress, server.Addr)
		}
		o.ReadBufferEachConn, o.WriteBufferEachConn = 64<<10, 64<<10 // a third of all memory otherwise
		change(&o)
		if err == nil {
			c, err = valkey.NewClient(o)
		}
		return c
	}
	s.auto = make(func(o *valkey.ClientOption) { o.ReadBufferEachConn, o.WriteBufferEachConn = 0, 0 })
	s.single = make(func(o *valkey.ClientOption) { o.DisableAutoPipelining = true })
	s.resp2 = make(func(o *valkey.ClientOption) { o.AlwaysRESP2, o.DisableCache = true, true })
	s.brief = make(func(o *valkey.ClientOption) { o.ConnLifetime = 15 * time.Second })
	s.listen = make(func(o *valkey.ClientOption) { o.DisableRetry = true })
	s.slow = make(func(o *valkey.ClientOption) { o.DisableRetry = true })
	return err
}

func (s *side) close() {
	for _, c := range []valkey.Client{s.auto, s.single, s.resp2, s.brief, s.listen, s.slow} {
		if c != nil {
			c.Close()
		}
	}
	// A closed client still holds its buffers.
	s.auto, s.single, s.resp2, s.brief, s.listen, s.slow = nil, nil, nil, nil, nil, nil
}

// any returns a client for commands that may be executed twice: valkey-go 1.0.79 sends a command once more, also a write, when
// its connection reaches its ConnLifetime and no reply has come for a second.
func (s *side) any(rng *rand.Rand) valkey.Client {
	return []valkey.Client{s.auto, s.auto, s.single, s.resp2, s.brief}[rng.IntN(5)]
}

// once returns a client for all others.
func (s *side) once(rng *rand.Rand) valkey.Client {
	return []valkey.Client{s.auto, s.single, s.resp2}[rng.IntN(3)]
}

// A lane is what a worker has on a side: it alone writes these keys.
type lane struct {
	*side
	small    [smallKeys]cell
	large    cell
	cached   cell
	plain    counter // INCR
	certain  counter // INCR and, on the cluster, WAIT
	script   counter // INCR in Lua
	inScript cell
	queue    queue
	messages map[string]uint64 // numbers of what was published, by channel
}

func newLane(s *side, id int) *lane {
	l := &lane{side: s, messages: make(map[string]uint64)}
	name := func(what string) string { return fmt.Sprintf("soak:%s:%d", what, id) }
	for i := range l.small {
		l.small[i].key = fmt.Sprintf("soak:small:%d:%d", id, i)
	}
	l.large.key, l.cached.key, l.queue.key = name("large"), name("cached"), name("queue")
	l.plain.key, l.certain.key = name("plain"), name("certain")
	l.script.key, l.inScript.key = fmt.Sprintf("soak:{lua%d}:count", id), fmt.Sprintf("soak:{lua%d}:value", id)
	return l
}

// exact returns a function that tells whether what was acknowledged before this call must still be there.
func (l *lane) exact() func() bool {
	epoch := l.epoch.Load()
	return func() bool { return !l.cluster || l.epoch.Load() == epoch }
}

// epochs remembers when a cell's last write was acknowledged: it may be lost once the epoch has changed.
type epochs map[*cell]uint64

type worker struct {
	*soak
	id    int
	rng   *rand.Rand
	lanes [2]*lane
	acked epochs
	busy  atomic.Pointer[busy]
}

type busy struct {
	what  string
	begin time.Time
}

// call runs one operation, and accounts for how it ends.
func (w *worker) call(s *side, kind string, f func(context.Context) error) error {
	begin := time.Now()
	w.busy.Store(&busy{s.name + ": " + kind, begin})
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	err := f(ctx)
	cancel()
	w.busy.Store(nil)
	if valkey.IsValkeyNil(err) {
		w.tally(s, kind, begin, nil)
	} else {
		w.tally(s, kind, begin, err)
	}
	return err
}

// check reports a check that failed.
func (w *worker) check(s *side, err error) {
	if err != nil {
		w.wrong("%s: %v", s.name, err)
	}
}

// Connections that are closed, as by cancelledPop, are rare among the jobs: Valkey up to 9.1.2 keeps a completion queue and a
// protection domain of each until it ends.
var jobs = []struct {
	weight int
	do     func(*worker, *lane)
}{
	{33, (*worker).setGet}, {8, (*worker).largeValue}, {12, (*worker).many}, {15, (*worker).increment}, {6, (*worker).certainIncrement},
	{8, (*worker).compareAndSet}, {8, (*worker).pop}, {1, (*worker).cancelledPop}, {8, (*worker).lua}, {8, (*worker).cache},
	{10, (*worker).publish},
}

func (w *worker) run(stop <-chan struct{}) {
	total := 0
	for _, j := range jobs {
		total += j.weight
	}
	for {
		select {
		case <-stop:
			return
		case <-time.After(time.Duration(w.rng.Int64N(int64(2 * w.think)))):
		}
		n := w.rng.IntN(total)
		for _, j := range jobs {
			if n -= j.weight; n < 0 {
				j.do(w, w.lanes[w.rng.IntN(2)])
				break
			}
		}
	}
}

// wrote notes the end of a write, and in which epoch it began.
func (w *worker) wrote(c *cell, seq, epoch uint64, err error) {
	c.wrote(seq, err)
	if err == nil {
		w.acked[c] = epoch
	}
}

// twice notes that a write may have been executed twice, once late: see side.any.
func (c *cell) twice(s *side, client valkey.Client, seq uint64, begin time.Time) {
	if client == s.brief && time.Since(begin) > 500*time.Millisecond {
		c.wrote(seq, errTwice)
	}
}

var errTwice = errors.New("it may have been sent twice")

// checkRead checks a value read of a cell.
func (w *worker) checkRead(l *lane, c *cell, b []byte, err error) {
	missing := valkey.IsValkeyNil(err)
	if err != nil && !missing {
		return
	}
	exact := !l.cluster || c.acked == 0 || w.acked[c] == l.epoch.Load()
	w.check(l.side, c.read(b, missing, exact))
}

func (w *worker) size() int {
	switch n := w.rng.IntN(100); {
	case n < 60:
		return 64 + w.rng.IntN(1<<10)
	case n < 95:
		return w.rng.IntN(16 << 10)
	default:
		return w.rng.IntN(100 << 10)
	}
}

func (w *worker) write(l *lane, client valkey.Client, kind string, c *cell, size int) error {
	seq, epoch := c.next(), l.epoch.Load()
	value := valkey.BinaryString(makeValue(c.key, seq, size))
	begin := time.Now()
	err := w.call(l.side, kind, func(ctx context.Context) error {
		return client.Do(ctx, client.B().Set().Key(c.key).Value(value).Build()).Error()
	})
	w.wrote(c, seq, epoch, err)
	c.twice(l.side, client, seq, begin)
	return err
}

func (w *worker) setGet(l *lane) {
	c := &l.small[w.rng.IntN(smallKeys)]
	if w.rng.IntN(2) == 0 {
		_ = w.write(l, l.any(w.rng), "SET", c, w.size())
	}
	client := l.any(w.rng)
	var b []byte
	err := w.call(l.side, "GET", func(ctx context.Context) (err error) {
		b, err = client.Do(ctx, client.B().Get().Key(c.key).Build()).AsBytes()
		return err
	})
	w.checkRead(l, c, b, err)
}

// largeValue writes a large value now and then, and reads it whole or as a stream.
func (w *worker) largeValue(l *lane) {
	most := 1 << 20
	if w.id%8 == 0 {
		most = 8 << 20
	}
	if w.rng.IntN(3) == 0 {
		size := 64<<10 + w.rng.IntN(most/4)
		if w.rng.IntN(8) == 0 {
			size = most
		}
		_ = w.write(l, l.any(w.rng), "SET large", &l.large, size)
	}
	var b []byte
	var err error
	if client := l.any(w.rng); w.rng.IntN(2) == 0 {
		err = w.call(l.side, "GET large", func(ctx context.Context) (err error) {
			b, err = client.Do(ctx, client.B().Get().Key(l.large.key).Build()).AsBytes()
			return err
		})
	} else {
		err = w.call(l.side, "DoStream", func(ctx context.Context) (err error) {
			into := slowBuffer{pause: time.Duration(w.rng.IntN(2)*w.rng.IntN(20)) * time.Millisecond}
			stream := client.DoStream(ctx, client.B().Get().Key(l.large.key).Build())
			for err = stream.Error(); err == nil && stream.HasNext(); {
				_, err = stream.WriteTo(&into)
			}
			b = into.got.Bytes()
			return err
		})
	}
	w.checkRead(l, &l.large, b, err)
}

// slowBuffer takes its time. It has no ReadFrom, so that a stream has to come in pieces.
type slowBuffer struct {
	got   bytes.Buffer
	pause time.Duration // before each piece
}

func (b *slowBuffer) Write(p []byte) (int, error) {
	time.Sleep(b.pause)
	return b.got.Write(p)
}

// many writes and reads several keys, of several slots, with DoMulti.
func (w *worker) many(l *lane) {
	client := l.any(w.rng)
	cells := l.small[:2+w.rng.IntN(smallKeys-1)]
	seqs, epoch := make([]uint64, len(cells)), l.epoch.Load()
	errs := make([]error, len(cells))
	begin := time.Now()
	_ = w.call(l.side, "DoMulti SET", func(ctx context.Context) error {
		var multi []valkey.Completed
		for i := range cells {
			seqs[i] = cells[i].next()
			value := valkey.BinaryString(makeValue(cells[i].key, seqs[i], w.size()))
			multi = append(multi, client.B().Set().Key(cells[i].key).Value(value).Build())
		}
		for i, r := range client.DoMulti(ctx, multi...) {
			errs[i] = r.Error()
		}
		return errors.Join(unique(errs)...)
	})
	for i := range cells {
		w.wrote(&cells[i], seqs[i], epoch, errs[i])
		cells[i].twice(l.side, client, seqs[i], begin)
	}
	values := make([][]byte, len(cells))
	_ = w.call(l.side, "DoMulti GET", func(ctx context.Context) error {
		var multi []valkey.Completed
		for i := range cells {
			multi = append(multi, client.B().Get().Key(cells[i].key).Build())
		}
		failed := make([]error, len(cells))
		for i, r := range client.DoMulti(ctx, multi...) {
			if values[i], errs[i] = r.AsBytes(); !valkey.IsValkeyNil(errs[i]) {
				failed[i] = errs[i]
			}
		}
		return errors.Join(unique(failed)...)
	})
	for i := range cells {
		w.checkRead(l, &cells[i], values[i], errs[i])
	}
}

// unique leaves out errors whose text is there already.
func unique(errs []error) (some []error) {
	seen := make(map[string]bool)
	for _, err := range errs {
		if err != nil && !seen[normal(err.Error())] {
			seen[normal(err.Error())] = true
			some = append(some, err)
		}
	}
	return some
}

func (w *worker) increment(l *lane) {
	client := l.once(w.rng)
	l.plain.attempted++
	var n uint64
	err := w.call(l.side, "INCR", func(ctx context.Context) (err error) {
		n, err = client.Do(ctx, client.B().Incr().Key(l.plain.key).Build()).AsUint64()
		return err
	})
	if err == nil {
		w.check(l.side, l.plain.got(n))
		if !l.cluster {
			l.plain.floor = n
		}
	}
}

// certainIncrement makes sure that an increment outlives a master, and is possible again afterwards.
func (w *worker) certainIncrement(l *lane) {
	if !l.cluster {
		w.increment(l)
		return
	}
	client := l.once(w.rng)
	l.certain.attempted++
	_ = w.call(l.side, "INCR and WAIT", func(ctx context.Context) error {
		return client.Dedicated(func(d valkey.DedicatedClient) error {
			n, err := d.Do(ctx, d.B().Incr().Key(l.certain.key).Build()).AsUint64()
			if err != nil {
				return err
			}
			w.check(l.side, l.certain.got(n))
			replicas, err := d.Do(ctx, d.B().Wait().Numreplicas(1).Timeout(5000).Build()).AsInt64()
			if err == nil && replicas >= 1 {
				l.certain.floor = n
			}
			return err
		})
	})
}

// compareAndSet increments two keys that all workers share, with WATCH, MULTI and EXEC. They are always the same.
func (w *worker) compareAndSet(l *lane) {
	group := w.rng.IntN(casGroups)
	tag := fmt.Sprintf("soak:{cas%d}:", group)
	a, b := tag+"a", tag+"b"
	state := &l.cas[group]
	client := l.once(w.rng)
	l.casMu.Lock()
	floor := state.acked
	l.casMu.Unlock()
	conflict := false
	err := w.call(l.side, "WATCH, MULTI, EXEC", func(ctx context.Context) error {
		return client.Dedicated(func(d valkey.DedicatedClient) error {
			if err := d.Do(ctx, d.B().Watch().Key(a).Build()).Error(); err != nil {
				return err
			}
			both, err := d.Do(ctx, d.B().Mget().Key(a, b).Build()).ToArray()
			if err != nil {
				return err
			}
			if len(both) != 2 {
				w.wrong("%s: MGET of 2 keys returned %d values", l.name, len(both))
				return nil
			}
			x, _ := both[0].ToString()
			y, _ := both[1].ToString()
			n, _ := strconv.ParseUint(x, 10, 64)
			l.casMu.Lock()
			state.attempted++
			most := state.attempted
			l.casMu.Unlock()
			if x != y || n > most || !l.cluster && n < floor {
				w.wrong("%s: %s is %q and %s is %q: they are set together, and %d to %d are possible", l.name, a, x, b, y, floor, most)
			}
			next := strconv.FormatUint(n+1, 10)
			r := d.DoMulti(ctx, d.B().Multi().Build(), d.B().Set().Key(a).Value(next).Build(), d.B().Set().Key(b).Value(next).Build(),
				d.B().Exec().Build())
			for _, one := range r[:3] {
				if err := one.Error(); err != nil {
					return err
				}
			}
			err = r[3].Error()
			conflict = valkey.IsValkeyNil(err)
			return err
		})
	})
	if err == nil && !conflict {
		l.casMu.Lock()
		state.acked++
		l.casMu.Unlock()
	}
	if conflict {
		w.count(&w.notes, "transactions that met another")
	}
}

// pop waits for an element that is pushed while it waits.
func (w *worker) pop(l *lane) {
	client, pusher := l.once(w.rng), l.once(w.rng)
	q := &l.queue
	seq, exact := q.next(), l.exact()
	value := valkey.BinaryString(makeValue(q.key, seq, w.size()/4))
	cancelled := w.rng.IntN(20) == 0
	var popped []byte
	var none, failed bool
	done := make(chan struct{})
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	begin := time.Now()
	go func() {
		defer close(done)
		pair, err := client.Do(ctx, client.B().Blpop().Key(q.key).Timeout(20).Build()).AsStrSlice()
		none = valkey.IsValkeyNil(err)
		failed = err != nil && !none
		if len(pair) == 2 {
			popped = []byte(pair[1])
		}
		switch {
		case failed && cancelled && errors.Is(err, context.Canceled):
			w.count(&w.notes, "pops that were cancelled")
		case failed:
			w.tally(l.side, "BLPOP", begin, err)
		default:
			w.tally(l.side, "BLPOP", begin, nil)
		}
	}()
	time.Sleep(time.Duration(w.rng.IntN(5)) * time.Millisecond)
	if cancelled {
		cancel()
	}
	q.wrote(seq, w.call(l.side, "RPUSH", func(ctx context.Context) error {
		return pusher.Do(ctx, pusher.B().Rpush().Key(q.key).Element(value).Build()).Error()
	}))
	w.busy.Store(&busy{l.name + ": BLPOP", begin})
	<-done
	w.busy.Store(nil)
	switch {
	case failed:
		q.excuse++
	case none:
		w.check(l.side, q.empty(exact() && !l.cluster))
	default:
		w.check(l.side, q.popped(popped, exact() && !l.cluster))
	}
}

// cancelledPop waits for what never comes, and is cancelled.
func (w *worker) cancelledPop(l *lane) {
	client := l.once(w.rng)
	begin := time.Now()
	w.busy.Store(&busy{l.name + ": BLPOP to be cancelled", begin})
	ctx, cancel := context.WithTimeout(context.Background(), time.Duration(5+w.rng.IntN(200))*time.Millisecond)
	err := client.Do(ctx, client.B().Blpop().Key(fmt.Sprintf("soak:never:%d", w.id)).Timeout(30).Build()).Error()
	cancel()
	w.busy.Store(nil)
	if errors.Is(err, context.DeadlineExceeded) {
		w.count(&w.notes, "pops that were cancelled")
		return
	}
	if err == nil {
		w.wrong("%s: an element was popped from a list that was never made", l.name)
	}
	w.tally(l.side, "BLPOP to be cancelled", begin, err)
}

var luaScript = valkey.NewLuaScript(`local n = redis.call('INCR', KEYS[1])
redis.call('SET', KEYS[2], ARGV[1])
return {n, redis.sha1hex(ARGV[1]), redis.call('GET', KEYS[2])}`)

func (w *worker) lua(l *lane) {
	client := l.once(w.rng)
	seq, epoch := l.inScript.next(), l.epoch.Load()
	value := makeValue(l.inScript.key, seq, w.size()/8)
	l.script.attempted++
	var reply []valkey.ValkeyMessage
	err := w.call(l.side, "EVALSHA", func(ctx context.Context) (err error) {
		reply, err = luaScript.Exec(ctx, client, []string{l.script.key, l.inScript.key}, []string{string(value)}).ToArray()
		return err
	})
	w.wrote(&l.inScript, seq, epoch, err)
	if err != nil {
		return
	}
	if len(reply) != 3 {
		w.wrong("%s: the script returned %d values", l.name, len(reply))
		return
	}
	n, _ := reply[0].AsInt64()
	w.check(l.side, l.script.got(uint64(n)))
	if !l.cluster {
		l.script.floor = uint64(n)
	}
	sum := sha1.Sum(value)
	if hash, _ := reply[1].ToString(); hash != hex.EncodeToString(sum[:]) {
		w.wrong("%s: the script saw another argument of %s than was sent", l.name, l.inScript.key)
	}
	if back, _ := reply[2].AsBytes(); !bytes.Equal(back, value) {
		w.wrong("%s: the script returned another value of %s than it was given", l.name, l.inScript.key)
	}
}

// cache reads through the client-side cache, and waits until a write by another connection has invalidated it.
func (w *worker) cache(l *lane) {
	c := &l.cached
	clients := []valkey.Client{l.auto, l.single, l.brief}
	reader := clients[w.rng.IntN(len(clients))]
	if c.seq == 0 || w.rng.IntN(3) == 0 {
		if w.write(l, l.any(w.rng), "SET", c, w.size()) != nil {
			return
		}
	}
	begin := time.Now()
	for tries := 1; ; tries++ {
		var r valkey.ValkeyResult
		var b []byte
		err := w.call(l.side, "DoCache", func(ctx context.Context) (err error) {
			r = reader.DoCache(ctx, reader.B().Get().Key(c.key).Cache(), 5*time.Minute)
			b, err = r.AsBytes()
			return err
		})
		if err != nil && !valkey.IsValkeyNil(err) {
			return
		}
		missing := valkey.IsValkeyNil(err)
		if err == nil && r.IsCacheHit() {
			w.count(&w.notes, "values from the client-side cache")
		}
		w.check(l.side, c.read(b, missing, false))
		if l.cluster || c.read(b, missing, true) == nil {
			return
		}
		if time.Since(begin) > limit && !l.weather.excuses(begin) {
			w.wrong("%s: after %d reads in %v the client-side cache has an old value: %v", l.name, tries, time.Since(begin), c.read(b, missing, true))
			return
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// publish sends a numbered message to one of the channels.
func (w *worker) publish(l *lane) {
	channel := []string{"soak:plain", "soak:plain", "soak:pattern:1", "soak:pattern:2", "soak:slow"}[w.rng.IntN(5)]
	sharded := l.cluster && w.rng.IntN(2) == 0
	kind := "PUBLISH"
	if sharded {
		channel = fmt.Sprintf("soak:shard:%d", w.rng.IntN(2))
		kind = "SPUBLISH"
	}
	l.messages[channel]++
	seq := l.messages[channel]
	key := fmt.Sprintf("%s:by:%d", channel, w.id)
	client := l.once(w.rng)
	message := makeValue(key, seq, min(w.size(), 16<<10))
	err := w.call(l.side, kind, func(ctx context.Context) error {
		return client.Do(ctx, publication(client, sharded, channel, message)).Error()
	})
	if err != nil {
		l.published.failed(key, seq) // before the next one is sent
	}
}

func publication(client valkey.Client, sharded bool, channel string, message []byte) valkey.Completed {
	if sharded {
		return client.B().Spublish().Channel(channel).Message(valkey.BinaryString(message)).Build()
	}
	return client.B().Publish().Channel(channel).Message(valkey.BinaryString(message)).Build()
}

// goodbye is what the keys of the last messages end with.
const goodbye = ":by:farewell"

// A subscription of one of the subscribers.
type subscription struct {
	*side
	command string // SUBSCRIBE, PSUBSCRIBE, SSUBSCRIBE
	channel string
	client  valkey.Client
	slow    bool
}

func (s subscription) id() string { return s.name + s.command + s.channel }

// subscribe listens until ctx ends, and subscribes again whenever its connection is lost.
func (k *soak) subscribe(ctx context.Context, s subscription, rng *rand.Rand) {
	for ctx.Err() == nil {
		begin := time.Now()
		from := make(map[string]*listener)
		last := make(map[string]time.Time)
		anyOrder := make(map[string]*unordered)
		var command valkey.Completed
		switch s.command {
		case "SUBSCRIBE":
			command = s.client.B().Subscribe().Channel(s.channel).Build()
		case "PSUBSCRIBE":
			command = s.client.B().Psubscribe().Pattern(s.channel).Build()
		case "SSUBSCRIBE":
			command = s.client.B().Ssubscribe().Channel(s.channel).Build()
		}
		err := s.client.Receive(ctx, command, func(m valkey.PubSubMessage) {
			key, seq, err := checkValue([]byte(m.Message))
			if err != nil {
				k.wrong("%s: a message on %s: %v", s.name, m.Channel, err)
				return
			}
			if strings.HasSuffix(key, goodbye) {
				k.farewells.Store(s.id(), nil)
				return
			}
			if s.cluster && s.command != "SSUBSCRIBE" {
				// PUBLISH goes to any node, which passes it on to the others.
				if anyOrder[key] == nil {
					anyOrder[key] = new(unordered)
				}
				if err := anyOrder[key].heard(seq); err != nil {
					k.wrong("%s: %s of %s: %v", s.name, s.command, key, err)
				}
				k.tally(s.side, s.command, time.Now(), nil)
				return
			}
			if from[key] == nil {
				from[key], last[key] = new(listener), time.Now()
			}
			missing, err := from[key].heard(seq, func(seq uint64) bool { return s.published.has(key, seq) })
			if err != nil {
				k.wrong("%s: %s of %s: %v", s.name, s.command, key, err)
			}
			if missing > 0 {
				// What a node has acknowledged may be lost with it.
				if s.cluster && s.weather.excuses(last[key]) {
					k.count(&k.notes, "messages lost on the disturbed cluster")
				} else {
					k.wrong("%s: %s of %s: %d messages before %d are missing", s.name, s.command, key, missing, seq)
				}
			}
			last[key] = time.Now()
			k.tally(s.side, s.command, last[key], nil)
			if s.slow {
				pause := time.Duration(5+rng.IntN(60)) * time.Millisecond
				if rng.IntN(50) == 0 {
					pause = 2 * time.Second
				}
				time.Sleep(pause)
			}
		})
		if ctx.Err() != nil {
			return
		}
		if err == nil {
			err = errors.New("the subscription ended without an error")
		}
		k.tally(s.side, s.command, maxTime(begin, time.Now().Add(-grace)), err)
		time.Sleep(200 * time.Millisecond)
	}
}

func maxTime(a, b time.Time) time.Time {
	if a.After(b) {
		return a
	}
	return b
}

// verify compares everything that was written with what is there at the end.
func (w *worker) verify(l *lane) {
	get := func(key string) (b []byte, err error) {
		err = w.call(l.side, "GET at the end", func(ctx context.Context) error {
			b, err = l.auto.Do(ctx, l.auto.B().Get().Key(key).Build()).AsBytes()
			return err
		})
		if err != nil && !valkey.IsValkeyNil(err) {
			w.wrong("%s: %s could not be read at the end: %v", l.name, key, err)
		}
		return b, err
	}
	cells := []*cell{&l.large, &l.cached, &l.inScript}
	for i := range l.small {
		cells = append(cells, &l.small[i])
	}
	for _, c := range cells {
		b, err := get(c.key)
		w.checkRead(l, c, b, err)
	}
	counters := []*counter{&l.plain, &l.script}
	if l.cluster {
		counters = append(counters, &l.certain)
	}
	for _, c := range counters {
		b, err := get(c.key)
		if err != nil && !valkey.IsValkeyNil(err) {
			continue
		}
		n, _ := strconv.ParseUint(string(b), 10, 64)
		w.check(l.side, c.final(n))
		w.count(&w.notes, "counters compared at the end")
		if n == c.attempted {
			w.count(&w.notes, "counters that are exactly what was attempted")
		}
	}
	if w.id == 0 {
		for group := range casGroups {
			a, err := get(fmt.Sprintf("soak:{cas%d}:a", group))
			b, err2 := get(fmt.Sprintf("soak:{cas%d}:b", group))
			n, _ := strconv.ParseUint(string(a), 10, 64)
			floor, most := l.cas[group].acked, l.cas[group].attempted
			if l.cluster {
				floor = 0
			}
			if (err == nil || valkey.IsValkeyNil(err)) && (err2 == nil || valkey.IsValkeyNil(err2)) &&
				(!bytes.Equal(a, b) || n < floor || n > most) {
				w.wrong("%s: the keys of transactions %d are %q and %q at the end: %d to %d are possible", l.name, group, a, b, floor, most)
			}
		}
	}
}
