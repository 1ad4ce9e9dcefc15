package valkeyrdma

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"net/netip"
	"os"
	"syscall"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// greeter listens on TCP, without an RDMA device on the route to it, and says hello to everybody.
func greeter(t *testing.T) string {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	require.NoError(t, err)
	t.Cleanup(func() { _ = l.Close() })
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			_, _ = io.WriteString(c, "hello")
			_ = c.Close()
		}
	}()
	return l.Addr().String()
}

func requireGreeting(t *testing.T, c net.Conn, err error) {
	t.Helper()
	require.NoError(t, err)
	defer c.Close()
	require.IsType(t, (*net.TCPConn)(nil), c)
	require.NoError(t, c.SetDeadline(time.Now().Add(10*time.Second)))
	b, err := io.ReadAll(c)
	require.NoError(t, err)
	require.Equal(t, "hello", string(b))
}

// With no limit of the caller's, a dial by a network of net.Dialer has that of DialCtxFn.
func TestRouteLimit(t *testing.T) {
	addr := greeter(t)
	dl := Dialer{Route: func(string) (string, string) { return "tcp", "" }}
	deadline := time.Time{}
	d := net.Dialer{ControlContext: func(ctx context.Context, _, _ string, _ syscall.RawConn) error {
		deadline, _ = ctx.Deadline()
		return nil
	}}
	latest := time.Now().Add(defaultDialTimeout)
	c, err := dl.DialCtxFn(t.Context(), addr, &d, nil)
	requireGreeting(t, c, err)
	require.False(t, deadline.Before(latest))
	require.Less(t, deadline.Sub(latest), defaultDialTimeout)
}

// What a Route names is what is dialled.
func TestRoute(t *testing.T) {
	addr := greeter(t)
	var asked []string
	dl := Dialer{Route: func(dst string) (string, string) {
		asked = append(asked, dst)
		switch dst {
		case "sentinel:26379":
			return "tcp", addr
		case addr:
			return "tcp", ""
		case "moved:1":
			return "", "10.0.0.7:0"
		case "wrong:1":
			return "carrier pigeon", addr
		}
		return "", ""
	}}
	ctx := context.Background()

	c, err := dl.DialCtxFn(ctx, "sentinel:26379", nil, nil)
	requireGreeting(t, c, err)
	c, err = dl.DialCtxFn(ctx, addr, &net.Dialer{LocalAddr: Addr{netip.MustParseAddrPort("127.0.0.1:0")}}, nil)
	requireGreeting(t, c, err)

	c, err = dl.DialCtxFn(ctx, "moved:1", nil, nil)
	require.Equal(t, "10.0.0.7:0", requireDialError(t, c, err).Addr.String())
	c, err = dl.DialCtxFn(ctx, "10.0.0.8:0", nil, nil)
	require.Equal(t, "10.0.0.8:0", requireDialError(t, c, err).Addr.String())
	_, err = dl.DialCtxFn(ctx, "wrong:1", nil, nil)
	require.ErrorContains(t, err, "carrier pigeon")
	require.Equal(t, []string{"sentinel:26379", addr, "moved:1", "10.0.0.8:0", "wrong:1"}, asked)
}

// TLS is honoured on a route over TCP, and refused on one over RDMA whatever Fallback says.
func TestRouteTLS(t *testing.T) {
	s := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, "hello") }))
	defer s.Close()
	addr := s.Listener.Addr().String()
	cfg := s.Client().Transport.(*http.Transport).TLSClientConfig.Clone()
	cfg.NextProtos = []string{"http/1.1"}
	dl := Dialer{
		Route: func(dst string) (string, string) {
			if dst == "10.0.0.7:6378" {
				return "rdma", addr
			}
			return "tcp", addr
		},
		Fallback: func(string, error) bool {
			t.Error("asked for a fallback")
			return true
		},
	}
	c, err := dl.DialCtxFn(context.Background(), addr, nil, cfg)
	require.NoError(t, err)
	defer c.Close()
	require.True(t, c.(*tls.Conn).ConnectionState().HandshakeComplete)

	// The certificate is for the name that the client knows, wherever the route goes. This one is for example.com and 127.0.0.1.
	c, err = dl.DialCtxFn(context.Background(), "example.com:6379", nil, cfg)
	require.NoError(t, err)
	defer c.Close()
	_, err = dl.DialCtxFn(context.Background(), "example.org:6379", nil, cfg)
	var wrong x509.HostnameError
	require.ErrorAs(t, err, &wrong)
	cfg.ServerName = "example.com"
	c, err = dl.DialCtxFn(context.Background(), "example.org:6379", nil, cfg)
	require.NoError(t, err)
	defer c.Close()
	cfg.ServerName = ""

	c, err = dl.DialCtxFn(context.Background(), "10.0.0.7:6378", nil, cfg)
	requireDialError(t, c, err)
	require.ErrorIs(t, err, ErrTLS)
}

// Fallback hears of each failure, and decides.
func TestFallback(t *testing.T) {
	addr := greeter(t)
	var failures []error
	allow := true
	dl := Dialer{
		Route: func(dst string) (string, string) { return "rdma", "127.0.0.1:1" },
		Fallback: func(dst string, err error) bool {
			require.Equal(t, addr, dst)
			requireDialError(t, nil, err)
			failures = append(failures, err)
			return allow
		},
	}
	ctx := context.Background()
	for n := range 3 {
		c, err := dl.DialCtxFn(ctx, addr, nil, nil)
		requireGreeting(t, c, err)
		require.Len(t, failures, n+1)
	}
	allow = false
	c, err := dl.DialCtxFn(ctx, addr, nil, nil)
	requireDialError(t, c, err)
	require.Equal(t, failures[3], err)

	// Without Fallback there is none.
	c, err = (&Dialer{Route: dl.Route}).DialCtxFn(ctx, addr, nil, nil)
	requireDialError(t, c, err)

	// Nor for a caller that has gone, or a Dialer that is set up wrong.
	gone, cancel := context.WithCancel(ctx)
	cancel()
	c, err = dl.DialCtxFn(gone, addr, nil, nil)
	requireDialError(t, c, err)
	require.ErrorIs(t, err, context.Canceled)
	wrong := dl
	wrong.ReceiveWindow = 1
	c, err = wrong.DialCtxFn(ctx, addr, nil, nil)
	requireDialError(t, c, err)
	require.ErrorIs(t, err, os.ErrInvalid)
	require.Len(t, failures, 4)

	// A name that does not exist is the error of both.
	nowhere := Dialer{Fallback: func(string, error) bool { return true }}
	_, err = nowhere.DialCtxFn(ctx, "no-such-host.invalid:6378", &net.Dialer{Timeout: 10 * time.Second}, nil)
	var op *net.OpError
	require.ErrorAs(t, err, &op)
	require.Equal(t, "tcp", op.Net)
}
