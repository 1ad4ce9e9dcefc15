//go:build linux && cgo

package e2e

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/valkey-io/valkey-go"
)

// TestClient is a tour of valkey-go's features. docs/features.md lists them with these names, and says why io-threads are for those
// only who ask for them with VALKEYRDMA_E2E_IO_THREADS=4.
func TestClient(t *testing.T) {
	for _, tr := range transports() {
		t.Run(tr.name, func(t *testing.T) {
			watchdog(t, 20*time.Minute)
			s := start(t, 0, "--io-threads", cmp.Or(os.Getenv("VALKEYRDMA_E2E_IO_THREADS"), "1"))
			for _, feature := range []struct {
				name string
				test func(visit, *testing.T)
			}{
				{"pipelining", visit.pipelining},
				{"ring scale", visit.ringScale},
				{"transactions", visit.transactions},
				{"blocking", visit.blocking},
				{"cache", visit.cache},
				{"broadcast", visit.broadcast},
				{"RESP", visit.resp},
				{"pub/sub", visit.pubSub},
				{"slow subscriber", visit.slowSubscriber},
				{"values", visit.values},
				{"stream", visit.stream},
				{"Lua", visit.lua},
				{"ConnLifetime", visit.connLifetime},
				{"ConnWriteTimeout", visit.connWriteTimeout},
				{"AuthCredentialsFn", visit.authCredentials},
				{"BGSAVE", visit.bgsave},
			} {
				t.Run(feature.name, func(t *testing.T) { feature.test(visit{t, s, tr}, t) })
			}
		})
	}
}

// A visit is one test at one server over one transport.
type visit struct {
	t  *testing.T
	s  *server
	tr transport
}

func (v visit) connect(opt valkey.ClientOption) (valkey.Client, *dials) {
	v.t.Helper()
	opt.InitAddress, opt.ForceSingleClient = []string{v.s.Addr}, true
	client, d := connect(v.t, v.tr, opt)
	d.requireVia(v.t, v.tr, v.s.Addr)
	return client, d
}

// pipelined is how many connections valkey-go makes at most for commands that are pipelined, and the one for those that are not.
const pipelined = 1 + 1<<2

// Many callers at once, by each of the ways in which valkey-go sends their commands.
func (v visit) pipelining(t *testing.T) {
	ctx := within(t, patience)
	for name, opt := range map[string]valkey.ClientOption{"AutoPipelining": {}, "DisableAutoPipelining": {DisableAutoPipelining: true},
		"AlwaysPipelining": {AlwaysPipelining: true}} {
		client, d := v.connect(opt)
		require.NoError(t, client.Do(ctx, client.B().Del().Key("pipelining").Build()).Error())
		var wg sync.WaitGroup
		for range 16 {
			wg.Go(func() {
				for range 50 {
					assert.NoError(t, client.Do(ctx, client.B().Incr().Key("pipelining").Build()).Error())
				}
				incrs := make(valkey.Commands, 50)
				for i := range incrs {
					incrs[i] = client.B().Incr().Key("pipelining").Build()
				}
				last := int64(0)
				for _, r := range client.DoMulti(ctx, incrs...) {
					n, err := r.AsInt64()
					assert.NoError(t, err)
					assert.Greater(t, n, last)
					last = n
				}
			})
		}
		wg.Wait()
		n, err := client.Do(ctx, client.B().Get().Key("pipelining").Build()).AsInt64()
		require.NoError(t, err)
		require.Equal(t, int64(16*100), n, name)
		// Only without pipelining does a caller need a connection for itself.
		require.Equal(t, opt.DisableAutoPipelining, d.count() > pipelined, "%s: %d connections", name, d.count())
		d.requireVia(t, v.tr, v.s.Addr)
		client.Close()
	}
}

func (v visit) ringScale(t *testing.T) {
	ctx := within(t, patience)
	for scale := 4; scale <= 14; scale++ {
		client, _ := v.connect(valkey.ClientOption{RingScaleEachConn: scale, PipelineMultiplex: -1})
		var wg sync.WaitGroup
		for c := range 32 { // twice as many as the smallest ring has room for
			wg.Go(func() {
				for i := range 10 {
					want := fmt.Sprint(scale, c, i)
					got, err := client.Do(ctx, client.B().Echo().Message(want).Build()).ToString()
					assert.NoError(t, err)
					assert.Equal(t, want, got)
				}
			})
		}
		wg.Wait()
		client.Close()
	}
}

func (v visit) transactions(t *testing.T) {
	ctx := within(t, patience)
	client, _ := v.connect(valkey.ClientOption{})
	require.NoError(t, plain(ctx, client, "tx", "0"))

	// Somebody else writes between WATCH and EXEC.
	require.NoError(t, client.Dedicated(func(c valkey.DedicatedClient) error {
		if err := c.Do(ctx, c.B().Watch().Key("tx").Build()).Error(); err != nil {
			return err
		}
		if err := plain(ctx, client, "tx", "1"); err != nil {
			return err
		}
		answers := c.DoMulti(ctx, c.B().Multi().Build(), c.B().Set().Key("tx").Value("lost").Build(), c.B().Exec().Build())
		require.True(t, valkey.IsValkeyNil(answers[2].Error()))
		return nil
	}))

	// Increments by WATCH and EXEC, of several callers: each counts once.
	var wg sync.WaitGroup
	for range 4 {
		wg.Go(func() {
			for done := 0; done < 10 && !t.Failed(); {
				err := client.Dedicated(func(c valkey.DedicatedClient) error {
					if err := c.Do(ctx, c.B().Watch().Key("tx").Build()).Error(); err != nil {
						return err
					}
					n, err := c.Do(ctx, c.B().Get().Key("tx").Build()).AsInt64()
					if err != nil {
						return err
					}
					return c.DoMulti(ctx, c.B().Multi().Build(), c.B().Set().Key("tx").Value(strconv.FormatInt(n+1, 10)).Build(),
						c.B().Exec().Build())[2].Error()
				})
				if err == nil {
					done++
				} else if !valkey.IsValkeyNil(err) {
					assert.NoError(t, err)
				}
			}
		})
	}
	wg.Wait()
	n, err := client.Do(ctx, client.B().Get().Key("tx").Build()).AsInt64()
	require.NoError(t, err)
	require.Equal(t, int64(41), n)
}

func (v visit) blocking(t *testing.T) {
	ctx := within(t, patience)
	client, _ := v.connect(valkey.ClientOption{})
	blpop := func(ctx context.Context, timeout float64) ([]string, error) {
		return client.Do(ctx, client.B().Blpop().Key("queue").Timeout(timeout).Build()).AsStrSlice()
	}
	blocked := func() {
		t.Helper()
		eventually(t, "a client is blocked", func() bool { return v.s.Info("blocked_clients") == "1" })
	}

	_, err := blpop(ctx, 0.5)
	require.True(t, valkey.IsValkeyNil(err), "%v", err)

	type answer struct {
		values []string
		err    error
	}
	answers := make(chan answer, 1)
	for _, timeout := range []float64{0, 600} {
		go func() {
			values, err := blpop(ctx, timeout)
			answers <- answer{values, err}
		}()
		blocked()
		require.NoError(t, client.Do(ctx, client.B().Rpush().Key("queue").Element("it").Build()).Error())
		require.Equal(t, answer{[]string{"queue", "it"}, nil}, <-answers)
	}

	// Without a deadline, because valkey-go waits for that alone where there is one and nothing else on the connection.
	cancelled, cancel := context.WithCancel(context.Background())
	go func() {
		values, err := blpop(cancelled, 0)
		answers <- answer{values, err}
	}()
	blocked()
	cancel()
	require.ErrorIs(t, (<-answers).err, context.Canceled)

	short, cancel := context.WithTimeout(ctx, 300*time.Millisecond)
	defer cancel()
	_, err = blpop(short, 0)
	require.ErrorIs(t, err, context.DeadlineExceeded)
	require.NoError(t, plain(ctx, client, "after", "the client goes on"))

	client.Close() // and with it those who are blocked
	eventually(t, "nobody is blocked", func() bool { return v.s.Info("blocked_clients") == "0" })
	v.s.do("DEL", "queue")
}

// Invalidations come when nobody has asked for anything.
func (v visit) cache(t *testing.T) {
	ctx := within(t, patience)
	var told atomic.Int64
	client, _ := v.connect(valkey.ClientOption{OnInvalidations: func(keys []valkey.ValkeyMessage) { told.Add(int64(len(keys))) }})
	get := func() (string, bool) {
		t.Helper()
		r := client.DoCache(ctx, client.B().Get().Key("cached").Cache(), time.Hour)
		value, err := r.ToString()
		require.NoError(t, err)
		return value, r.IsCacheHit()
	}
	for i := range 20 {
		want := strconv.Itoa(i)
		v.s.do("SET", "cached", want)
		eventually(t, "the invalidation came", func() bool { return i == 0 || told.Load() == int64(i) })
		value, hit := get()
		require.Equal(t, want, value)
		require.False(t, hit)
		value, hit = get()
		require.Equal(t, want, value)
		require.True(t, hit)
	}
	v.s.do("FLUSHALL")
	eventually(t, "the cache is empty", func() bool {
		r := client.DoCache(ctx, client.B().Get().Key("cached").Cache(), time.Hour)
		return valkey.IsValkeyNil(r.Error())
	})
}

// Every key with a prefix, whether it was read or not, and with no keys in the server's memory.
func (v visit) broadcast(t *testing.T) {
	ctx := within(t, patience)
	invalid := make(chan string, 10)
	client, _ := v.connect(valkey.ClientOption{ClientTrackingOptions: []string{"PREFIX", "broadcast:", "BCAST"}, SelectDB: 3,
		OnInvalidations: func(keys []valkey.ValkeyMessage) {
			for _, key := range keys {
				name, _ := key.ToString()
				invalid <- name
			}
		}})
	require.NoError(t, plain(ctx, client, "broadcast:a", "1"))
	require.Contains(t, v.s.Info("db3"), "keys=1")
	select {
	case key := <-invalid:
		require.Equal(t, "broadcast:a", key)
	case <-ctx.Done():
		require.FailNow(t, "no invalidation came")
	}
}

func (v visit) resp(t *testing.T) {
	ctx := within(t, patience)
	for version, opt := range map[string]valkey.ClientOption{"2": {AlwaysRESP2: true, DisableCache: true}, "3": {}} {
		client, _ := v.connect(opt)
		about, err := client.Do(ctx, client.B().ClientInfo().Build()).ToString()
		require.NoError(t, err)
		require.Contains(t, about, " resp="+version+" ")
		require.NoError(t, client.Do(ctx, client.B().Hset().Key("hash").FieldValue().FieldValue("a", "1").FieldValue("b", "").Build()).Error())
		hash, err := client.Do(ctx, client.B().Hgetall().Key("hash").Build()).AsStrMap()
		require.NoError(t, err)
		require.Equal(t, map[string]string{"a": "1", "b": ""}, hash)
		require.True(t, valkey.IsValkeyNil(client.Do(ctx, client.B().Get().Key("no such key").Build()).Error()))
		v.receives(client, forms[0], "resp", 20)
	}
}

// form is a way to subscribe to a channel.
type form struct {
	kind                   string // as in the server's confirmation
	subscribe, unsubscribe func(b valkey.Builder, channel string) valkey.Completed
	publish                func(b valkey.Builder, channel, message string) valkey.Completed
}

var forms = []form{{
	kind:      "subscribe",
	subscribe: func(b valkey.Builder, channel string) valkey.Completed { return b.Subscribe().Channel(channel).Build() },
	unsubscribe: func(b valkey.Builder, channel string) valkey.Completed {
		return b.Unsubscribe().Channel(channel).Build()
	},
	publish: publication,
}, {
	kind: "psubscribe",
	subscribe: func(b valkey.Builder, channel string) valkey.Completed {
		return b.Psubscribe().Pattern(channel[:3] + "*").Build()
	},
	unsubscribe: func(b valkey.Builder, channel string) valkey.Completed {
		return b.Punsubscribe().Pattern(channel[:3] + "*").Build()
	},
	publish: publication,
}, {
	kind: "ssubscribe",
	subscribe: func(b valkey.Builder, channel string) valkey.Completed {
		return b.Ssubscribe().Channel(channel).Build()
	},
	unsubscribe: func(b valkey.Builder, channel string) valkey.Completed {
		return b.Sunsubscribe().Channel(channel).Build()
	},
	publish: func(b valkey.Builder, channel, message string) valkey.Completed {
		return b.Spublish().Channel(channel).Message(message).Build()
	},
}}

func publication(b valkey.Builder, channel, message string) valkey.Completed {
	return b.Publish().Channel(channel).Message(message).Build()
}

// receive subscribes, and returns when the server has confirmed it. The channel has the error with which the subscription ends.
func (f form) receive(ctx context.Context, t *testing.T, client valkey.Client, channel string, on func(valkey.PubSubMessage)) chan error {
	t.Helper()
	confirmed, over := make(chan struct{}), make(chan error, 1)
	hook := valkey.WithOnSubscriptionHook(ctx, func(s valkey.PubSubSubscription) {
		if s.Kind == f.kind {
			close(confirmed)
		}
	})
	go func() { over <- client.Receive(hook, f.subscribe(client.B(), channel), on) }()
	select {
	case <-confirmed:
	case err := <-over:
		require.FailNow(t, "not subscribed", "%v", err)
	}
	return over
}

// receives subscribes, publishes n messages, and checks that they come in order.
func (v visit) receives(client valkey.Client, f form, channel string, n int) {
	t := v.t
	t.Helper()
	ctx := within(t, patience)
	messages := make(chan string, n)
	receive, stop := context.WithCancel(ctx)
	defer stop()
	over := f.receive(receive, t, client, channel, func(m valkey.PubSubMessage) { messages <- m.Message })
	publisher, _ := v.connect(valkey.ClientOption{})
	for i := range n {
		require.NoError(t, publisher.Do(ctx, f.publish(publisher.B(), channel, strconv.Itoa(i))).Error())
	}
	publisher.Close()
	for i := range n {
		select {
		case m := <-messages:
			require.Equal(t, strconv.Itoa(i), m)
		case err := <-over:
			require.FailNow(t, "the subscription is over", "%v", err)
		case <-ctx.Done():
			require.FailNow(t, "messages are missing", "from number %d on", i)
		}
	}
	require.NoError(t, client.Do(ctx, f.unsubscribe(client.B(), channel)).Error())
	require.NoError(t, <-over)
}

func (v visit) pubSub(t *testing.T) {
	ctx := within(t, patience)
	client, _ := v.connect(valkey.ClientOption{})
	const n = 300
	for _, f := range forms {
		v.receives(client, f, "channel", n)
	}

	// By hooks, on a dedicated connection, which may have commands of other kinds as well.
	c, release := client.Dedicate()
	defer release()
	messages := make(chan string, n)
	subscribed := make(chan struct{}, 1)
	c.SetPubSubHooks(valkey.PubSubHooks{
		OnMessage:      func(m valkey.PubSubMessage) { messages <- m.Message },
		OnSubscription: func(valkey.PubSubSubscription) { subscribed <- struct{}{} },
	})
	require.NoError(t, c.Do(ctx, c.B().Subscribe().Channel("channel").Build()).Error())
	<-subscribed
	for i := range n {
		require.NoError(t, client.Do(ctx, publication(client.B(), "channel", strconv.Itoa(i))).Error())
		require.NoError(t, c.Do(ctx, c.B().Ping().Build()).Error())
		require.Equal(t, strconv.Itoa(i), <-messages)
	}
}

// A subscriber that does not read loses nothing while the server keeps it, and has a clear error when the server has had enough. The
// server counts little of such messages, because it keeps them once for all subscribers: hence the small limit.
func (v visit) slowSubscriber(t *testing.T) {
	defer v.s.do("CONFIG", "SET", "client-output-buffer-limit", "pubsub 32mb 8mb 60") // its default
	for _, f := range forms {
		v.s.do("CONFIG", "SET", "client-output-buffer-limit", "pubsub 0 0 0")
		kept := v.sleeper(t, f)
		const total = 1000 // 16 MB, of which the window holds one
		for i := range total {
			require.Equal(t, int64(1), kept.publish(i))
		}
		close(kept.awake)
		eventually(t, "all messages have come", func() bool { return kept.received.Load() == total })
		require.NoError(t, kept.client.Do(kept.ctx, f.unsubscribe(kept.client.B(), "slow")).Error())
		require.NoError(t, <-kept.over)

		v.s.do("CONFIG", "SET", "client-output-buffer-limit", "pubsub 128kb 0 0")
		dropped := v.sleeper(t, f)
		n := 0
		for ; dropped.publish(n) == 1; n++ {
		}
		close(dropped.awake)
		err := <-dropped.over
		require.True(t, isClear(err), "%v", err)
		require.Less(t, dropped.received.Load(), int64(n))
		t.Logf("%s: after %d messages the server dropped the subscriber, which got %d and then: %v", f.kind, n, dropped.received.Load(), err)
	}
}

// sleeper is a subscriber that reads nothing until it is awake, and then checks what comes.
type sleeper struct {
	ctx      context.Context
	client   valkey.Client
	publish  func(i int) int64 // the message number i; it returns how many subscribers it went to
	awake    chan struct{}
	over     chan error // of the subscription
	received atomic.Int64
}

func (v visit) sleeper(t *testing.T, f form) *sleeper {
	s := &sleeper{ctx: within(t, patience), awake: make(chan struct{})}
	s.client, _ = v.connect(valkey.ClientOption{DisableRetry: true})
	publisher, _ := v.connect(valkey.ClientOption{})
	message := func(i int64) string { return fmt.Sprint(i, ":", strings.Repeat("x", 16<<10)) }
	s.publish = func(i int) int64 {
		n, err := publisher.Do(s.ctx, f.publish(publisher.B(), "slow", message(int64(i)))).AsInt64()
		require.NoError(t, err)
		return n
	}
	s.over = f.receive(s.ctx, t, s.client, "slow", func(m valkey.PubSubMessage) {
		<-s.awake
		assert.True(t, m.Message == message(s.received.Load()), "message %d", s.received.Load())
		s.received.Add(1)
	})
	return s
}

// noise is n bytes that no two places of which are alike.
func noise(n int) []byte {
	b := make([]byte, n)
	_, _ = rand.NewChaCha8([32]byte{byte(n)}).Read(b)
	return b
}

// Values of all sizes, up to the largest that Valkey takes, come back as they were. VALKEYRDMA_E2E_LARGE is the largest in MiB, for
// machines with less memory than the 2 GiB that client and server need together for 512.
func (v visit) values(t *testing.T) {
	ctx := within(t, 4*patience)
	client, _ := v.connect(valkey.ClientOption{ConnWriteTimeout: 4 * patience})
	largest, err := strconv.Atoi(cmp.Or(os.Getenv("VALKEYRDMA_E2E_LARGE"), "512"))
	require.NoError(t, err)
	for _, size := range []int{0, 1, 64<<10 - 1, 64 << 10, 1<<20 - 1, 1<<20 + 1, 64 << 20, largest << 20} {
		value := noise(size)
		require.NoError(t, client.Do(ctx, client.B().Set().Key("value").Value(valkey.BinaryString(value)).Build()).Error(), "%d bytes", size)
		if size <= 64<<20 {
			got, err := client.Do(ctx, client.B().Get().Key("value").Build()).AsBytes()
			require.NoError(t, err, "%d bytes", size)
			require.True(t, bytes.Equal(value, got), "%d bytes", size)
			continue
		}
		// As a stream, which does not need the memory for a second copy.
		stream := client.DoStream(ctx, client.B().Get().Key("value").Build())
		n, err := stream.WriteTo(&comparer{want: value})
		require.NoError(t, err)
		require.Equal(t, int64(size), n)
	}
	require.NoError(t, client.Do(ctx, client.B().Del().Key("value").Build()).Error())
}

// comparer is a writer to which the right bytes have to be written.
type comparer struct {
	want  []byte
	pause time.Duration // after each MiB
	n     int
}

func (w *comparer) Write(b []byte) (int, error) {
	if len(b) > len(w.want) || !bytes.Equal(b, w.want[:len(b)]) {
		return 0, fmt.Errorf("wrong bytes among the %d before which %d are left", len(b), len(w.want))
	}
	w.want = w.want[len(b):]
	if w.n += len(b); w.n >= 1<<20 {
		w.n = 0
		time.Sleep(w.pause)
	}
	return len(b), nil
}

// A reader that takes its time gets all of a stream, and others are served meanwhile.
func (v visit) stream(t *testing.T) {
	ctx := within(t, 2*patience)
	client, _ := v.connect(valkey.ClientOption{})
	value := noise(64 << 20)
	require.NoError(t, client.Do(ctx, client.B().Set().Key("stream").Value(valkey.BinaryString(value)).Build()).Error())
	done := make(chan struct{})
	var others sync.WaitGroup
	others.Go(func() {
		for i := 0; ; i++ {
			select {
			case <-done:
				return
			default:
			}
			if !assert.NoError(t, plain(ctx, client, "beside the stream", strconv.Itoa(i))) {
				return
			}
			time.Sleep(time.Millisecond)
		}
	})
	s := client.DoStream(ctx, client.B().Get().Key("stream").Build())
	n, err := s.WriteTo(&comparer{want: value, pause: 30 * time.Millisecond})
	close(done)
	others.Wait()
	require.NoError(t, err)
	require.Equal(t, int64(len(value)), n)
	require.False(t, s.HasNext())

	get := func(key string) valkey.Completed { return client.B().Get().Key(key).Build() }
	several := client.DoMultiStream(ctx, get("stream"), get("no such key"), get("stream"))
	for _, want := range [][]byte{value, nil, value} {
		require.True(t, several.HasNext())
		n, err := several.WriteTo(&comparer{want: want})
		require.Equal(t, int64(len(want)), n)
		require.Equal(t, want == nil, valkey.IsValkeyNil(err), "%v", err)
		require.True(t, want == nil || err == nil, "%v", err)
	}
	require.False(t, several.HasNext())
	require.NoError(t, client.Do(ctx, client.B().Del().Key("stream").Build()).Error())
}

func (v visit) lua(t *testing.T) {
	ctx := within(t, patience)
	client, _ := v.connect(valkey.ClientOption{})
	v.s.do("SCRIPT", "FLUSH")
	script := valkey.NewLuaScript("redis.call('SET', KEYS[1], ARGV[1]); return {KEYS[1], redis.call('GET', KEYS[1])}")
	for i := range 3 { // the first has to bring the script along
		values, err := script.Exec(ctx, client, []string{"lua"}, []string{strconv.Itoa(i)}).AsStrSlice()
		require.NoError(t, err)
		require.Equal(t, []string{"lua", strconv.Itoa(i)}, values)
	}
	var execs []valkey.LuaExec
	for i := range 50 {
		execs = append(execs, valkey.LuaExec{Keys: []string{"lua"}, Args: []string{strconv.Itoa(i)}})
	}
	for i, r := range script.ExecMulti(ctx, client, execs...) {
		values, err := r.AsStrSlice()
		require.NoError(t, err)
		require.Equal(t, []string{"lua", strconv.Itoa(i)}, values)
	}
}

// Connections are replaced when they are old, and nobody notices.
func (v visit) connLifetime(t *testing.T) {
	ctx := within(t, patience)
	client, d := v.connect(valkey.ClientOption{ConnLifetime: 300 * time.Millisecond})
	var wg sync.WaitGroup
	var want atomic.Int64
	require.NoError(t, client.Do(ctx, client.B().Del().Key("lifetime").Build()).Error())
	first := d.count()
	for range 4 {
		wg.Go(func() {
			for d.count() < first+8 {
				if !assert.NoError(t, client.Do(ctx, client.B().Incr().Key("lifetime").Build()).Error()) {
					return
				}
				want.Add(1)
			}
		})
	}
	wg.Wait()
	n, err := client.Do(ctx, client.B().Get().Key("lifetime").Build()).AsInt64()
	require.NoError(t, err)
	require.Equal(t, want.Load(), n)
	d.requireVia(t, v.tr, v.s.Addr)
}

// A server that does not answer is given up after ConnWriteTimeout. There is no limit in the context.
func (v visit) connWriteTimeout(t *testing.T) {
	client, _ := v.connect(valkey.ClientOption{ConnWriteTimeout: time.Second})
	ctx := context.Background()
	require.NoError(t, plain(ctx, client, "timeout", "1"))
	givenUp := func(value string) {
		t.Helper()
		began := time.Now()
		err := plain(ctx, client, "timeout", value)
		require.True(t, errors.Is(err, context.DeadlineExceeded) || errors.Is(err, os.ErrDeadlineExceeded), "%v", err)
		t.Logf("after %v: %v", time.Since(began).Round(time.Millisecond), err)
		require.GreaterOrEqual(t, time.Since(began), time.Second)
	}
	v.s.do("CLIENT", "PAUSE", "600000", "WRITE") // commands are read
	givenUp("2")
	v.s.do("CLIENT", "UNPAUSE")
	require.NoError(t, plain(ctx, client, "timeout", "3"))
	v.s.Signal(syscall.SIGSTOP) // nothing is read, and there is no room for all of the value
	givenUp(strings.Repeat("x", 32<<20))
	v.s.Signal(syscall.SIGCONT)
	eventually(t, "the client is back", func() bool { return plain(ctx, client, "timeout", "4") == nil })
}

// The credentials are asked for at each connection, so that they can change.
func (v visit) authCredentials(t *testing.T) {
	ctx := within(t, patience)
	v.s.do("ACL", "SETUSER", "e2e", "reset", "on", ">first", "~*", "&*", "+@all")
	defer v.s.do("ACL", "DELUSER", "e2e")
	var password atomic.Value
	password.Store("first")
	var asked atomic.Int64
	opt := valkey.ClientOption{AuthCredentialsFn: func(c valkey.AuthCredentialsContext) (valkey.AuthCredentials, error) {
		asked.Add(1)
		return valkey.AuthCredentials{Username: "e2e", Password: password.Load().(string)}, nil
	}}
	client, d := v.connect(opt)
	whoami := func() {
		t.Helper()
		name, err := client.Do(ctx, client.B().AclWhoami().Build()).ToString()
		require.NoError(t, err)
		require.Equal(t, "e2e", name)
	}
	whoami()
	v.s.do("ACL", "SETUSER", "e2e", ">second", "<first")
	password.Store("second")
	before, conns := asked.Load(), d.count()
	v.s.do("CLIENT", "KILL", "USER", "e2e")
	eventually(t, "the client is back", func() bool {
		return client.Do(ctx, client.B().AclWhoami().Build()).Error() == nil && d.count() > conns
	})
	whoami()
	require.Greater(t, asked.Load(), before)

	password.Store("wrong")
	opt.InitAddress, opt.ForceSingleClient, opt.DialCtxFn = []string{v.s.Addr}, true, d.DialCtxFn
	_, err := valkey.NewClient(opt)
	require.ErrorContains(t, err, "WRONGPASS")
}

// The server forks while RDMA writes into its memory, and both go on.
func (v visit) bgsave(t *testing.T) {
	client, _ := v.connect(valkey.ClientOption{})
	l := startLoad(t, client, "bgsave", plain)
	for range 2 {
		l.progress(50)
		before := v.s.Info("rdb_saves")
		v.s.do("BGSAVE")
		l.progress(50)
		eventually(t, "the data is saved", func() bool {
			return v.s.Info("rdb_saves") != before && v.s.Info("rdb_bgsave_in_progress") == "0"
		})
		require.Equal(t, "ok", v.s.Info("rdb_last_bgsave_status"))
	}
	l.progress(50)
	l.finishDurable()
	require.Empty(t, l.errors)
}
