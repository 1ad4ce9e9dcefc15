//go:build linux && cgo

package e2e

import (
	"errors"
	"fmt"
	"net"
	"os/exec"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/valkey-io/valkey-go"
	"github.com/valkeyrdma/valkeyrdma/internal/labtest"
)

// A cluster of three masters and three replicas.
type cluster struct {
	nodes []*server
	ids   map[*server]string
}

// startCluster makes the cluster as "valkey-cli --cluster create" does. A node is declared dead only after a long time, so that a
// machine that is busy with other things does not start failovers; the test of failovers lowers that. Nodes tell each other more
// often than usual what they are, so that this does not take long.
func startCluster(t testing.TB, offset int) *cluster {
	t.Helper()
	c := &cluster{ids: map[*server]string{}}
	for range 6 {
		c.nodes = append(c.nodes, prepare(t, offset, "--cluster-enabled", "yes", "--cluster-node-timeout", "30000",
			"--cluster-ping-interval", "300", "--cluster-allow-replica-migration", "no", "--cluster-replica-validity-factor", "0"))
	}
	launch(t, c.nodes...)
	for _, s := range c.nodes {
		c.ids[s] = s.do("CLUSTER", "MYID")
	}
	for i, s := range c.nodes {
		s.do("CLUSTER", "SET-CONFIG-EPOCH", strconv.Itoa(i+1))
		if i < 3 {
			s.do("CLUSTER", "ADDSLOTSRANGE", strconv.Itoa(16384*i/3), strconv.Itoa(16384*(i+1)/3-1))
		}
		if i > 0 {
			h, p, _ := net.SplitHostPort(c.nodes[0].Addr)
			s.do("CLUSTER", "MEET", h, p)
		}
	}
	eventually(t, "all nodes know each other", func() bool {
		return !slices.ContainsFunc(c.nodes, func(s *server) bool {
			return s.Info("cluster_known_nodes", "CLUSTER", "INFO") != "6" || strings.Contains(s.do("CLUSTER", "NODES"), "handshake")
		})
	})
	for i := range 3 {
		c.nodes[3+i].do("CLUSTER", "REPLICATE", c.ids[c.nodes[i]])
	}
	// Clients are not shown a replica that has replicated nothing yet, so there has to be something: a key of each master's.
	for i, key := range []string{"b", "c", "a"} {
		eventually(t, "the new cluster takes writes", func() bool {
			_, err := c.nodes[i].Message("SET", key, "")
			return err == nil
		})
	}
	c.awaitWhole(t)
	return c
}

func (c *cluster) addrs() []string {
	var addrs []string
	for _, s := range c.nodes {
		addrs = append(addrs, s.Addr)
	}
	return addrs
}

// A shard has slots, and nodes that serve them, the master first.
type shard struct {
	slots [][2]int64 // from, to
	nodes []*server
}

// shards is what one node tells clients of the cluster, by the command that valkey-go uses as well. Nodes that failed or have no data
// yet are not in it.
func (c *cluster) shards(s *server) []shard {
	m, err := s.Message("CLUSTER", "SHARDS")
	if err != nil {
		return nil
	}
	list, _ := m.ToArray()
	var shards []shard
	for _, item := range list {
		fields, _ := item.AsMap()
		slots, nodes := fields["slots"], fields["nodes"]
		numbers, _ := slots.AsIntSlice()
		members, _ := nodes.ToArray()
		var sh shard
		for pair := range slices.Chunk(numbers, 2) {
			sh.slots = append(sh.slots, [2]int64{pair[0], pair[1]})
		}
		for _, member := range members {
			about, _ := member.AsMap()
			text := func(field string) string { m := about[field]; text, _ := m.ToString(); return text }
			port := about["port"]
			number, _ := port.AsInt64()
			i := slices.IndexFunc(c.nodes, func(s *server) bool { return s.port() == strconv.FormatInt(number, 10) })
			if i < 0 || text("health") != "online" {
				continue
			}
			if text("role") == "master" {
				sh.nodes = append([]*server{c.nodes[i]}, sh.nodes...)
			} else {
				sh.nodes = append(sh.nodes, c.nodes[i])
			}
		}
		if len(sh.slots) > 0 {
			shards = append(shards, sh)
		}
	}
	return shards
}

// awaitWhole waits until all agree on three masters with a replica each, which has all of the master's data.
func (c *cluster) awaitWhole(t testing.TB) {
	t.Helper()
	why := ""
	defer func() {
		if t.Failed() {
			t.Logf("the cluster was not whole when last looked at: %s", why)
		}
	}()
	eventually(t, "the cluster is whole", func() bool {
		for _, s := range c.nodes {
			if state := s.Info("cluster_state", "CLUSTER", "INFO"); state != "ok" {
				why = fmt.Sprintf("%s says that the cluster's state is %q", s.Addr, state)
				return false
			}
			shards := c.shards(s)
			if len(shards) != 3 {
				why = fmt.Sprintf("%s sees %d shards", s.Addr, len(shards))
				return false
			}
			for _, sh := range shards {
				if len(sh.nodes) != 2 || sh.nodes[0].Info("role") != "master" || sh.nodes[1].Info("master_link_status") != "up" {
					why = fmt.Sprintf("%s sees %d nodes at the slots %v, or the replica has not all data", s.Addr, len(sh.nodes), sh.slots)
					return false
				}
			}
		}
		return true
	})
}

// serving returns master and replica of a slot.
func (c *cluster) serving(t testing.TB, slot int64) (master, replica *server) {
	t.Helper()
	for _, sh := range c.shards(c.nodes[0]) {
		for _, r := range sh.slots {
			if r[0] <= slot && slot <= r[1] {
				require.Len(t, sh.nodes, 2)
				return sh.nodes[0], sh.nodes[1]
			}
		}
	}
	require.FailNow(t, "nobody serves it", "slot %d", slot)
	return nil, nil
}

func (c *cluster) slot(t testing.TB, key string) int64 {
	t.Helper()
	slot, err := strconv.ParseInt(c.nodes[0].do("CLUSTER", "KEYSLOT", key), 10, 64)
	require.NoError(t, err)
	return slot
}

// masters are those who serve slots.
func (c *cluster) masters() (masters, replicas []*server) {
	for _, sh := range c.shards(c.nodes[0]) {
		masters, replicas = append(masters, sh.nodes[0]), append(replicas, sh.nodes[1:]...)
	}
	return masters, replicas
}

// A migration takes one slot to another master, in steps, as "valkey-cli --cluster reshard" does.
type migration struct {
	c        *cluster
	slot     int64
	from, to *server
}

// migrate prepares the migration of key's slot to the next master.
func (c *cluster) migrate(t testing.TB, key string) migration {
	t.Helper()
	m := migration{c: c, slot: c.slot(t, key)}
	m.from, _ = c.serving(t, m.slot)
	masters, _ := c.masters()
	m.to = masters[(slices.Index(masters, m.from)+1)%len(masters)]
	return m
}

func (m migration) begin() {
	m.to.do("CLUSTER", "SETSLOT", strconv.FormatInt(m.slot, 10), "IMPORTING", m.c.ids[m.from])
	m.from.do("CLUSTER", "SETSLOT", strconv.FormatInt(m.slot, 10), "MIGRATING", m.c.ids[m.to])
}

func (m migration) moveKeys() {
	host, port, _ := net.SplitHostPort(m.to.Addr)
	for {
		found, err := m.from.Message("CLUSTER", "GETKEYSINSLOT", strconv.FormatInt(m.slot, 10), "10")
		require.NoError(m.from.t, err)
		keys, err := found.AsStrSlice()
		require.NoError(m.from.t, err)
		if len(keys) == 0 {
			return
		}
		m.from.do(append([]string{"MIGRATE", host, port, "", "0", "20000", "KEYS"}, keys...)...)
	}
}

func (m migration) end() {
	masters, _ := m.c.masters()
	// The new master first: between the two no node may claim that nobody has the slot.
	for _, s := range append([]*server{m.to, m.from}, masters...) {
		s.do("CLUSTER", "SETSLOT", strconv.FormatInt(m.slot, 10), "NODE", m.c.ids[m.to])
	}
}

func TestCluster(t *testing.T) {
	t.Run("same ports", func(t *testing.T) {
		watchdog(t, 15*time.Minute)
		c := startCluster(t, 0)
		for _, tr := range transports() {
			c.test(t, tr)
		}
	})
	t.Run("other ports", func(t *testing.T) {
		watchdog(t, 15*time.Minute)
		startCluster(t, overOtherPort.offset).test(t, overOtherPort)
	})
}

func (c *cluster) test(t *testing.T, tr transport) {
	for _, test := range []struct {
		name string
		run  func(*cluster, *testing.T, transport)
	}{
		{"slots", (*cluster).testSlots},
		{"replicas", (*cluster).testReplicas},
		{"sharded pub/sub", (*cluster).testShardedPubSub},
		{"redirects", (*cluster).testRedirects},
		{"resharding", (*cluster).testResharding},
		{"example", (*cluster).testExample},
		{"failover", (*cluster).testFailover},
	} {
		t.Run(tr.name+"/"+test.name, func(t *testing.T) { test.run(c, t, tr) })
	}
}

func (c *cluster) connect(t testing.TB, tr transport, opt valkey.ClientOption) (valkey.Client, *dials) {
	t.Helper()
	opt.InitAddress = c.addrs()
	client, d := connect(t, tr, opt)
	require.Equal(t, valkey.ClientModeCluster, client.Mode())
	return client, d
}

// One DoMulti reaches all masters, and its answers come in the order of the commands.
func (c *cluster) testSlots(t *testing.T, tr transport) {
	ctx := within(t, patience)
	client, d := c.connect(t, tr, valkey.ClientOption{})
	const n = 300
	key := func(i int) string { return fmt.Sprintf("slots:%d", i) }
	var sets, gets valkey.Commands
	var cached []valkey.CacheableTTL
	var keys []string
	for i := range n {
		sets = append(sets, client.B().Set().Key(key(i)).Value(fmt.Sprint(tr.name, i)).Build())
		gets = append(gets, client.B().Get().Key(key(i)).Build())
		cached = append(cached, valkey.CT(client.B().Get().Key(key(i)).Cache(), time.Minute))
		keys = append(keys, key(i))
	}
	for _, r := range client.DoMulti(ctx, sets...) {
		require.NoError(t, r.Error())
	}
	for _, results := range [][]valkey.ValkeyResult{client.DoMulti(ctx, gets...), client.DoMultiCache(ctx, cached...)} {
		require.Len(t, results, n)
		for i, r := range results {
			value, err := r.ToString()
			require.NoError(t, err)
			require.Equal(t, fmt.Sprint(tr.name, i), value)
		}
	}
	found, err := valkey.MGet(client, ctx, keys)
	require.NoError(t, err)
	require.Len(t, found, n)
	masters, _ := c.masters()
	for _, s := range masters {
		d.requireVia(t, tr, s.Addr)
	}
}

// readReplicas makes a client whose SendToReplicas sends them what only reads.
func (c *cluster) readReplicas(t testing.TB, tr transport) (valkey.Client, *dials) {
	t.Helper()
	masters, _ := c.masters()
	// valkey-go keeps the connections of InitAddress, and does not say READONLY there: a replica among them would refuse to read.
	return connect(t, tr, valkey.ClientOption{
		InitAddress:    []string{masters[0].Addr, masters[1].Addr, masters[2].Addr},
		SendToReplicas: func(cmd valkey.Completed) bool { return cmd.IsReadOnly() },
	})
}

// SendToReplicas sends what only reads to replicas, and nothing else.
func (c *cluster) testReplicas(t *testing.T, tr transport) {
	ctx := within(t, patience)
	masters, replicas := c.masters()
	client, d := c.readReplicas(t, tr)
	const n = 60
	gets := func(servers []*server) (sum int) {
		for _, s := range servers {
			sum += s.calls("get")
		}
		return sum
	}
	for i := range n {
		require.NoError(t, replicated(ctx, client, fmt.Sprintf("replicas:%d", i), tr.name))
	}
	readsReplicas := func(client valkey.Client) {
		t.Helper()
		onMasters, onReplicas := gets(masters), gets(replicas)
		for i := range n {
			value, err := client.Do(ctx, client.B().Get().Key(fmt.Sprintf("replicas:%d", i)).Build()).ToString()
			require.NoError(t, err)
			require.Equal(t, tr.name, value)
		}
		require.Equal(t, onMasters, gets(masters))
		require.Equal(t, onReplicas+n, gets(replicas))
	}
	readsReplicas(client)
	for _, s := range replicas {
		d.requireVia(t, tr, s.Addr)
	}

	client, _ = connect(t, tr, valkey.ClientOption{InitAddress: []string{masters[0].Addr}, ReplicaOnly: true})
	readsReplicas(client)
}

func (c *cluster) testShardedPubSub(t *testing.T, tr transport) {
	ctx := within(t, patience)
	client, d := c.connect(t, tr, valkey.ClientOption{})
	master, _ := c.serving(t, c.slot(t, "shard channel"))
	const n = 200
	received := make(chan string, n)
	var wg sync.WaitGroup
	wg.Go(func() {
		err := client.Receive(ctx, client.B().Ssubscribe().Channel("shard channel").Build(), func(m valkey.PubSubMessage) {
			received <- m.Message
		})
		assert.NoError(t, err)
	})
	eventually(t, "the subscription is there", func() bool {
		m, err := master.Message("PUBSUB", "SHARDNUMSUB", "shard channel")
		require.NoError(t, err)
		counts, err := m.AsIntMap()
		require.NoError(t, err)
		return counts["shard channel"] == 1
	})
	for i := range n {
		require.NoError(t, client.Do(ctx, client.B().Spublish().Channel("shard channel").Message(strconv.Itoa(i)).Build()).Error())
	}
	for i := range n {
		select {
		case m := <-received:
			require.Equal(t, strconv.Itoa(i), m)
		case <-ctx.Done():
			require.FailNow(t, "messages are missing", "from number %d on", i)
		}
	}
	d.requireVia(t, tr, master.Addr)
	require.NoError(t, client.Do(ctx, client.B().Sunsubscribe().Channel("shard channel").Build()).Error())
	wg.Wait()
}

// ASK and MOVED are followed, each at a time when no other answer is possible, by each of valkey-go's ways to send commands.
func (c *cluster) testRedirects(t *testing.T, tr transport) {
	ctx := within(t, patience)
	key := func(way int) string { return fmt.Sprintf("{redirects}:%d", way) }
	m := c.migrate(t, key(0))
	elsewhere := "elsewhere" // in a slot that stays with the new master, so that batches have answers of both kinds
	for {
		if master, _ := c.serving(t, c.slot(t, elsewhere)); master == m.to {
			break
		}
		elsewhere += "+"
	}
	const lifetime, uncached = time.Minute, 3
	ways := []func(valkey.Client, string) []valkey.ValkeyResult{
		func(c valkey.Client, key string) []valkey.ValkeyResult {
			return []valkey.ValkeyResult{c.Do(ctx, c.B().Get().Key(key).Build())}
		},
		func(c valkey.Client, key string) []valkey.ValkeyResult {
			return c.DoMulti(ctx, c.B().Get().Key(key).Build(), c.B().Get().Key(elsewhere).Build(), c.B().Get().Key(key).Build())
		},
		func(c valkey.Client, key string) []valkey.ValkeyResult {
			set := func(key string) valkey.Completed { return c.B().Set().Key(key).Value(tr.name).Get().Build() }
			return c.DoMulti(ctx, set(key), set(elsewhere), set(key))
		},
		func(c valkey.Client, key string) []valkey.ValkeyResult {
			return []valkey.ValkeyResult{c.DoCache(ctx, c.B().Get().Key(key).Cache(), lifetime)}
		},
		func(c valkey.Client, key string) []valkey.ValkeyResult {
			return c.DoMultiCache(ctx, valkey.CT(c.B().Get().Key(key).Cache(), lifetime), valkey.CT(c.B().Get().Key(elsewhere).Cache(), lifetime))
		},
	}
	// They look at the topology now, and not again, and have a connection to the first node only until they need others.
	client, d := c.connect(t, tr, valkey.ClientOption{})
	others, othersD := make([]valkey.Client, len(ways)), make([]*dials, len(ways))
	for way := range ways {
		others[way], othersD[way] = c.connect(t, tr, valkey.ClientOption{})
		require.NoError(t, plain(ctx, client, key(way), tr.name))
	}
	require.NoError(t, plain(ctx, client, elsewhere, tr.name))
	requireRedirects := func(kind string, way int, client valkey.Client) {
		t.Helper()
		before := m.from.errorsOf(kind)
		for i, r := range ways[way](client, key(way)) {
			value, err := r.ToString()
			require.NoError(t, err, "way %d, answer %d", way, i)
			require.Equal(t, tr.name, value)
		}
		require.Greater(t, m.from.errorsOf(kind), before, "way %d", way)
	}

	m.begin()
	m.moveKeys()
	for way := range uncached { // with the others valkey-go 1.0.79 has ErrDoCacheAborted here, over TCP as well
		requireRedirects("ASK", way, client)
	}
	d.requireVia(t, tr, m.from.Addr, m.to.Addr)

	m.end()
	for way := range ways {
		requireRedirects("MOVED", way, others[way])
		othersD[way].requireVia(t, tr, m.from.Addr, m.to.Addr)
	}
	c.awaitWhole(t)
}

// Slots change their master under load. INCR shows commands that were lost or done twice, and no caller sees an error.
func (c *cluster) testResharding(t *testing.T, tr transport) {
	ctx := within(t, 2*patience)
	client, _ := c.connect(t, tr, valkey.ClientOption{})
	const counters = 12
	key := func(i int) string { return fmt.Sprintf("resharding:%s:%d", tr.name, i) }
	// Every other counter has a companion, in another slot, and is counted in one DoMulti with it.
	increment := func(i int) (int64, error) {
		if i%2 == 0 {
			return client.Do(ctx, client.B().Incr().Key(key(i)).Build()).AsInt64()
		}
		incrs := make(valkey.Commands, 2)
		for j, key := range []string{key(i), "companion of " + key(i)} {
			incrs[j] = client.B().Incr().Key(key).Build()
		}
		results := client.DoMulti(ctx, incrs...)
		n, err := results[0].AsInt64()
		companion, err2 := results[1].AsInt64()
		if err = errors.Join(err, err2); err == nil && companion != n {
			err = fmt.Errorf("%s is %d, its companion %d", key(i), n, companion)
		}
		return n, err
	}
	var counts [counters]atomic.Int64
	sum := int64(0)
	stop := make(chan struct{})
	var wg sync.WaitGroup
	for i := range counters {
		wg.Go(func() {
			for {
				select {
				case <-stop:
					return
				default:
				}
				n, err := increment(i)
				if !assert.NoError(t, err) || !assert.Equal(t, counts[i].Load()+1, n) {
					return
				}
				counts[i].Store(n)
			}
		})
	}
	redirects := func(kind string) (n int) {
		for _, s := range c.nodes {
			n += s.errorsOf(kind)
		}
		return n
	}
	// Each step of a migration is under load: the slot's counter goes on in it.
	progress := func(i int) {
		t.Helper()
		before := counts[i].Load()
		eventually(t, key(i)+" goes on", func() bool { return t.Failed() || counts[i].Load() > before+1 })
		require.False(t, t.Failed())
	}
	asks, moves := redirects("ASK"), redirects("MOVED")
	for i := range counters {
		m := c.migrate(t, key(i))
		progress(i)
		m.begin()
		progress(i)
		m.moveKeys()
		progress(i)
		m.end()
		progress(i)
	}
	close(stop)
	wg.Wait()
	require.False(t, t.Failed())
	asks, moves = redirects("ASK")-asks, redirects("MOVED")-moves
	require.NotZero(t, asks)
	require.NotZero(t, moves)
	for i := range counters {
		n, err := client.Do(ctx, client.B().Get().Key(key(i)).Build()).AsInt64()
		require.NoError(t, err)
		require.Equal(t, counts[i].Load(), n)
		sum += n
	}
	t.Logf("%d times ASK and %d times MOVED in %d INCRs", asks, moves, sum)
	c.awaitWhole(t)
}

// A master is killed under load: its replica takes over, and comes to know it as its own replica when it is back.
func (c *cluster) testFailover(t *testing.T, tr transport) {
	client, d := c.connect(t, tr, valkey.ClientOption{})
	l := startLoad(t, client, "failover:"+tr.name, replicated)
	replicasClient, replicasD := c.readReplicas(t, tr)
	readReplicas, finishReplicas := l.readBeside(replicasClient)
	l.progress(50)
	readReplicas(50)
	victim, heir := c.serving(t, 0)
	replicasD.requireVia(t, tr, heir.Addr)
	timeout := func(ms string, nodes []*server) {
		for _, s := range nodes {
			s.do("CONFIG", "SET", "cluster-node-timeout", ms)
		}
	}
	timeout("3000", c.nodes)
	victim.Kill()
	eventually(t, "the replica is the master", func() bool { return heir.Info("role") == "master" })
	// Back to the long time at once, so that no other node is declared dead. The killed one starts with it.
	timeout("30000", slices.DeleteFunc(slices.Clone(c.nodes), func(s *server) bool { return s == victim }))
	readReplicas(50)
	finishReplicas() // before there is a replica which has nothing at first
	victim.run()
	c.awaitWhole(t)
	l.progress(50)
	l.finish()
	require.NotEmpty(t, l.errors)
	masters, _ := c.masters()
	for _, s := range masters {
		d.requireVia(t, tr, s.Addr)
	}
}

// The example that the README shows works with this cluster, over RDMA and, where RDMA does not answer, by falling back.
func (c *cluster) testExample(t *testing.T, tr transport) {
	masters, _ := c.masters()
	for network, args := range map[string][]string{
		"rdma": {"-offset", strconv.Itoa(tr.offset)},
		"tcp":  {"-offset", "20000", "-fallback"}, // nobody listens for RDMA at this distance
	} {
		cmd := exec.Command(labtest.Var(t, "VALKEYRDMA_EXAMPLE_CLUSTER"), append(args, c.addrs()...)...)
		out, err := cmd.CombinedOutput()
		require.NoError(t, err, "%s", out)
		t.Logf("%s", out)
		for _, s := range masters {
			require.Contains(t, string(out), s.Addr+" by "+network)
		}
	}
}
