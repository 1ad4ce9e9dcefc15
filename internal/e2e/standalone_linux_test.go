//go:build linux && cgo

package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
	"github.com/valkey-io/valkey-go"
	"github.com/valkeyrdma/valkeyrdma"
	"github.com/valkeyrdma/valkeyrdma/internal/labtest"
)

// overEach runs a test over each transport.
func overEach(t *testing.T, test func(*testing.T, transport)) {
	for _, tr := range transports() {
		t.Run(tr.name, func(t *testing.T) {
			watchdog(t, 10*time.Minute)
			test(t, tr)
		})
	}
}

func single(s *server) valkey.ClientOption {
	return valkey.ClientOption{InitAddress: []string{s.Addr}, ForceSingleClient: true}
}

// A primary whose replicas the client is told of.
func TestStandaloneReplicas(t *testing.T) {
	overEach(t, func(t *testing.T, tr transport) {
		primary := start(t, 0)
		replica := start(t, 0, "--replicaof", host(t)+" "+primary.port())
		eventually(t, "the replica has the data", func() bool { return replica.Info("master_link_status") == "up" })
		client, d := connect(t, tr, valkey.ClientOption{
			InitAddress:    []string{primary.Addr},
			Standalone:     valkey.StandaloneOption{ReplicaAddress: []string{replica.Addr}},
			SendToReplicas: func(cmd valkey.Completed) bool { return cmd.IsReadOnly() },
		})
		ctx := within(t, patience)
		before := replica.calls("get")
		for i := range 20 {
			key := fmt.Sprintf("standalone:%d", i)
			require.NoError(t, replicated(ctx, client, key, key))
			value, err := client.Do(ctx, client.B().Get().Key(key).Build()).ToString()
			require.NoError(t, err)
			require.Equal(t, key, value)
		}
		require.Equal(t, before+20, replica.calls("get"))
		require.Zero(t, primary.calls("get"))
		d.requireVia(t, tr, primary.Addr, replica.Addr)

		// A client that knows only the replica is told where the primary is, and goes there.
		client, d = connect(t, tr, valkey.ClientOption{
			InitAddress: []string{replica.Addr},
			Standalone:  valkey.StandaloneOption{EnableRedirect: true},
		})
		require.NoError(t, plain(ctx, client, "redirect", "1"))
		require.Equal(t, "1", primary.do("GET", "redirect"))
		d.requireVia(t, tr, primary.Addr, replica.Addr)
	})
}

// A server is killed under load, and started again. It writes to disk before it says OK, so nothing it said OK to may be lost.
func TestServerKilled(t *testing.T) {
	overEach(t, func(t *testing.T, tr transport) {
		s := start(t, 0, "--appendonly", "yes", "--appendfsync", "always")
		client, d := connect(t, tr, single(s))
		l := startLoad(t, client, "killed", plain)
		for range 3 {
			l.progress(50)
			s.Kill()
			s.run()
		}
		l.progress(50)
		l.finishDurable()
		require.NotEmpty(t, l.errors)
		require.Greater(t, d.count(), 3)
		d.requireVia(t, tr, s.Addr)
	})
}

// CLIENT KILL ends connections: what only reads is repeated, what writes and what blocks has a clear error.
func TestClientKill(t *testing.T) {
	overEach(t, func(t *testing.T, tr transport) {
		s := start(t, 0)
		opt := single(s)
		opt.ConnWriteTimeout = patience // rxe may hold the server up for 50 s (docs/features.md)
		client, d := connect(t, tr, opt)
		l := startLoad(t, client, "client kill", plain)
		blocked := make(chan error, 1)
		for range 10 {
			go func() {
				blocked <- client.Do(l.ctx, client.B().Blpop().Key("nothing").Timeout(0).Build()).Error()
			}()
			eventually(t, "a client is blocked", func() bool { return s.Info("blocked_clients") == "1" })
			l.progress(20)
			before := d.count()
			s.do("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
			select {
			case err := <-blocked:
				require.True(t, isClear(err), "%v", err)
			case <-l.ctx.Done():
				require.FailNow(t, "BLPOP does not notice that its connection was killed")
			}
			l.progress(20)
			require.Greater(t, d.count(), before)
		}
		l.finishDurable()
		d.requireVia(t, tr, s.Addr)
	})
}

// Where the server takes no more clients, the error says so, as far as Valkey lets it over RDMA.
func TestMaxClients(t *testing.T) {
	overEach(t, func(t *testing.T, tr transport) {
		s := start(t, 0)
		opt := single(s)
		opt.PipelineMultiplex = -1 // one connection, so that there is no other to dial when there is no room
		working, _ := connect(t, tr, opt)
		s.do("CONFIG", "SET", "maxclients", "1")
		requireRefused(t, tr, single(s), "max number of clients reached", valkeyrdma.ErrDropped)
		ctx := within(t, patience)
		require.NoError(t, plain(ctx, working, "maxclients", "those who are in stay"))
		s.do("CONFIG", "SET", "maxclients", "100")
		client, d := connect(t, tr, single(s))
		require.NoError(t, plain(ctx, client, "maxclients", "there is room again"))
		d.requireVia(t, tr, s.Addr)
	})
}

// requireRefused checks that a client cannot be made. Over TCP valkey-go sees the end of the connection, or what the server said
// before, whichever its first commands run into.
func requireRefused(t *testing.T, tr transport, opt valkey.ClientOption, overTCP string, overRDMA ...error) {
	t.Helper()
	opt.DialCtxFn = (&dials{dialer: tr.dialer()}).DialCtxFn
	_, err := valkey.NewClient(opt)
	require.Error(t, err)
	if tr.tcp {
		require.True(t, isClear(err) || strings.Contains(err.Error(), overTCP), "%v", err)
	} else {
		require.True(t, slices.ContainsFunc(overRDMA, func(want error) bool { return errors.Is(err, want) }), "%v", err)
	}
	t.Logf("%v", err)
}

// A server in protected mode has nobody from elsewhere in until it has a password. Over RDMA, "elsewhere" is an address that is not the
// server's own.
func TestProtectedMode(t *testing.T) {
	overEach(t, func(t *testing.T, tr transport) {
		s := start(t, 0, "--protected-mode", "yes")
		opt := single(s)
		opt.Dialer.LocalAddr = &net.TCPAddr{IP: elsewhere(t)}
		// It is dropped a moment after it was accepted, so that it may have the server's window already, which ends the dial; then
		// the first Read or Write meets the end of the connection.
		requireRefused(t, tr, opt, "protected mode", valkeyrdma.ErrDropped, io.EOF, syscall.EPIPE)
		if !tr.tcp {
			client, d := connect(t, tr, single(s))
			require.NoError(t, plain(within(t, patience), client, "protected", "from here"))
			d.requireVia(t, tr, s.Addr)
		}

		s = start(t, 0, "--protected-mode", "yes", "--requirepass", "secret")
		opt.InitAddress, opt.Password = []string{s.Addr}, "secret"
		client, d := connect(t, tr, opt)
		require.NoError(t, plain(within(t, patience), client, "protected", "by password"))
		d.requireVia(t, tr, s.Addr)
		opt.Password = "wrong"
		opt.DialCtxFn = d.DialCtxFn
		_, err := valkey.NewClient(opt)
		require.ErrorContains(t, err, "WRONGPASS")
	})
}

// A server with I/O threads serves clients that wait for each answer before they send on. docs/features.md tells why not others.
func TestIOThreads(t *testing.T) {
	overEach(t, func(t *testing.T, tr transport) {
		ctx := within(t, patience)
		s := start(t, 0, "--io-threads", "4")
		opt := single(s)
		opt.DisableAutoPipelining = true
		client, d := connect(t, tr, opt)
		var wg sync.WaitGroup
		for g := range 16 {
			wg.Go(func() {
				key := fmt.Sprint("io-threads:", g)
				for i := range 100 {
					value := strings.Repeat(string(rune('a'+i%26)), 1+i*g)
					assert.NoError(t, client.Do(ctx, client.B().Set().Key(key).Value(value).Build()).Error())
					got, err := client.Do(ctx, client.B().Get().Key(key).Build()).ToString()
					assert.NoError(t, err)
					assert.Equal(t, value, got)
				}
			})
		}
		wg.Wait()
		require.Greater(t, d.count(), 1)
		d.requireVia(t, tr, s.Addr)
		for _, field := range []string{"io_threaded_reads_processed", "io_threaded_writes_processed"} {
			t.Logf("%s: %s", field, s.Info(field))
			require.Regexp(t, "^[1-9]", s.Info(field))
		}
	})
}

// elsewhere returns an address of the RDMA device's network device that is not the one where servers listen. It adds one if need be.
func elsewhere(t *testing.T) net.IP {
	t.Helper()
	netdev, err := net.InterfaceByName(labtest.Var(t, "VALKEYRDMA_NETDEV"))
	require.NoError(t, err)
	addrs, err := netdev.Addrs()
	require.NoError(t, err)
	here := net.ParseIP(host(t)).To4()
	for _, a := range addrs {
		if ip, _, _ := net.ParseCIDR(a.String()); ip.To4() != nil && !ip.Equal(here) {
			return ip
		}
	}
	there := net.IPv4(198, 18, 255, byte(os.Getpid())) // from the range for tests of network equipment
	out, err := exec.Command("ip", "addr", "add", there.String()+"/32", "dev", netdev.Name).CombinedOutput()
	require.NoError(t, err, "%s", out)
	t.Cleanup(func() { _ = exec.Command("ip", "addr", "del", there.String()+"/32", "dev", netdev.Name).Run() })
	return there
}

// A server without RDMA is reached over TCP where Fallback says so, and not otherwise.
func TestFallbackOfClient(t *testing.T) {
	watchdog(t, 5*time.Minute)
	s := start(t, 0)
	elsewhere := func(dst string) (string, string) { return "rdma", addPort(dst, 1000) } // nobody listens there
	opt := single(s)
	opt.PipelineMultiplex = -1 // one connection, so that nobody else appends to reasons
	var reasons []error
	client, d := connectBy(t, &valkeyrdma.Dialer{Route: elsewhere, Fallback: func(dst string, err error) bool {
		reasons = append(reasons, err)
		return true
	}}, opt)
	require.NoError(t, plain(within(t, patience), client, "fallback", "yes"))
	d.requireVia(t, overTCP, s.Addr)
	require.Len(t, reasons, d.count())
	for _, err := range reasons {
		require.True(t, isClear(err), "%v", err)
	}

	opt.DialCtxFn = (&valkeyrdma.Dialer{Route: elsewhere}).DialCtxFn
	_, err := valkey.NewClient(opt)
	require.True(t, isClear(err), "%v", err)
	require.False(t, errors.Is(err, context.DeadlineExceeded))
}
