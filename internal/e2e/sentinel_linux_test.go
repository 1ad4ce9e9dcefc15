//go:build linux && cgo

package e2e

import (
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/valkey-io/valkey-go"
	"github.com/valkeyrdma/valkeyrdma"
	"github.com/valkeyrdma/valkeyrdma/internal/servers"
)

// prepareSentinel makes a sentinel, which speaks TCP only, and has it watch master.
func prepareSentinel(t testing.TB, master *server) *server {
	t.Helper()
	host := host(t)
	port, dir := newPort(t, host), t.TempDir()
	config := filepath.Join(dir, "sentinel.conf")
	require.NoError(t, os.WriteFile(config, fmt.Appendf(nil, `bind %[1]s
port %[2]d
dir %[3]s
logfile %[3]s/log
protected-mode no
sentinel monitor mymaster %[1]s %[4]s 2
sentinel down-after-milliseconds mymaster 5000
sentinel failover-timeout mymaster 30000
`, host, port, dir, master.port()), 0o600))
	return &server{t: t, Server: servers.NewPlain(host, port, dir, "+monitor master mymaster", config, "--sentinel")}
}

// Sentinels are asked over TCP and data moves over RDMA, by one DialCtxFn. The client follows a failover.
func TestSentinel(t *testing.T) {
	watchdog(t, 10*time.Minute)
	tr := overOtherPort
	master := start(t, tr.offset)
	replica := start(t, tr.offset, "--replicaof", host(t)+" "+master.port())
	eventually(t, "the replica has the data", func() bool { return replica.Info("master_link_status") == "up" })
	sentinels := make(map[string]bool)
	var watching []*server
	var addrs []string
	for range 3 {
		s := prepareSentinel(t, master)
		watching, addrs, sentinels[s.Addr] = append(watching, s), append(addrs, s.Addr), true
	}
	launch(t, watching...)
	for _, s := range watching {
		eventually(t, "the sentinels know each other and the replica", func() bool {
			m, err := s.Message("SENTINEL", "MASTER", "mymaster")
			require.NoError(t, err)
			about, err := m.AsStrMap()
			require.NoError(t, err)
			return about["num-other-sentinels"] == "2" && about["num-slaves"] == "1"
		})
	}
	dialer := &valkeyrdma.Dialer{Route: func(dst string) (string, string) {
		if sentinels[dst] {
			return "tcp", dst
		}
		return "rdma", addPort(dst, tr.offset)
	}}
	opt := valkey.ClientOption{InitAddress: addrs, Sentinel: valkey.SentinelOption{MasterSet: "mymaster"}}

	client, d := connectBy(t, dialer, opt)
	require.Equal(t, valkey.ClientModeSentinel, client.Mode())
	d.requireVia(t, tr, master.Addr)

	// This client asks them by TLS.
	secure := make(map[string]string)
	for addr := range sentinels {
		secure[addr], opt.Sentinel.TLSConfig = overTLS(t, addr)
	}
	opt.SendToReplicas = func(cmd valkey.Completed) bool { return cmd.IsReadOnly() }
	reading, readingD := connectBy(t, &valkeyrdma.Dialer{Route: func(dst string) (string, string) {
		if sentinels[dst] {
			return "tcp", secure[dst]
		}
		return dialer.Route(dst)
	}}, opt)
	ctx := within(t, patience)
	require.NoError(t, replicated(ctx, reading, "sentinel", "value"))
	before := replica.calls("get")
	value, err := reading.Do(ctx, reading.B().Get().Key("sentinel").Build()).ToString()
	require.NoError(t, err)
	require.Equal(t, "value", value)
	require.Equal(t, before+1, replica.calls("get"))
	readingD.requireVia(t, tr, master.Addr, replica.Addr)
	requireAsked(t, readingD, sentinels, (*tls.Conn)(nil))
	reading.Close()

	// Between the promotion and the return of the killed server there is no replica that a write could wait for.
	var alone atomic.Bool
	l := startLoad(t, client, "sentinel", func(ctx context.Context, c valkey.Client, key, value string) error {
		if alone.Load() {
			return plain(ctx, c, key, value)
		}
		return replicated(ctx, c, key, value)
	})
	l.progress(50)
	master.Kill()
	eventually(t, "the replica is the master", func() bool { return replica.Info("role") == "master" })
	alone.Store(true)
	l.progress(50)
	master.run()
	eventually(t, "the old master is a replica", func() bool {
		return master.Info("role") == "slave" && master.Info("master_link_status") == "up"
	})
	alone.Store(false)
	l.progress(50)
	l.finish()
	require.NotEmpty(t, l.errors)
	d.requireVia(t, tr, master.Addr, replica.Addr)
	requireAsked(t, d, sentinels, (*net.TCPConn)(nil))
}

// requireAsked checks that the client has talked to sentinels, always by connections of that type.
func requireAsked(t testing.TB, d *dials, sentinels map[string]bool, by net.Conn) {
	t.Helper()
	d.mu.Lock()
	defer d.mu.Unlock()
	asked := 0
	for addr := range sentinels {
		for _, c := range d.conns[addr] {
			require.IsType(t, by, c)
			asked++
		}
	}
	require.NotZero(t, asked)
}

// overTLS is a proxy in front of a server that speaks no TLS itself: another address for it, and what to trust there.
func overTLS(t testing.TB, addr string) (proxy string, trust *tls.Config) {
	t.Helper()
	s := httptest.NewTLSServer(nil) // for its certificate
	s.Close()
	trust = s.Client().Transport.(*http.Transport).TLSClientConfig.Clone()
	trust.ServerName = "example.com"
	l, err := tls.Listen("tcp", "127.0.0.1:0", &tls.Config{Certificates: s.TLS.Certificates})
	require.NoError(t, err)
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			from, err := l.Accept()
			if err != nil {
				return
			}
			to, err := net.Dial("tcp", addr)
			if err != nil {
				_ = from.Close()
				continue
			}
			for _, way := range [][2]net.Conn{{from, to}, {to, from}} {
				go func() {
					_, _ = io.Copy(way[0], way[1])
					_ = way[0].Close()
				}()
			}
		}
	}()
	return l.Addr().String(), trust
}
