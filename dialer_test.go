package valkeyrdma

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"net/netip"
	"os"
	"runtime"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

// requireDialError checks what every failed dial promises.
func requireDialError(t *testing.T, conn net.Conn, err error) *net.OpError {
	t.Helper()
	require.Error(t, err)
	require.Nil(t, conn)
	var op *net.OpError
	require.ErrorAs(t, err, &op)
	require.Equal(t, "dial", op.Op)
	require.Equal(t, "rdma", op.Net)
	require.NotNil(t, op.Addr)
	return op
}

func TestDialBadAddress(t *testing.T) {
	cancelled, cancel := context.WithCancel(context.Background())
	cancel()
	expired, cancel := context.WithDeadline(context.Background(), time.Unix(1, 0))
	defer cancel()
	for _, tc := range []struct {
		name, dst, text string
		ctx             context.Context
		d               *net.Dialer
		cfg             *tls.Config
		is              error
	}{
		{name: "no port", dst: "10.0.0.7", text: "missing port"},
		{name: "empty", dst: "", text: "missing port"},
		{name: "port too large", dst: "10.0.0.7:65536", text: "invalid port"},
		{name: "negative port", dst: "10.0.0.7:-1", text: "invalid port"},
		{name: "port 0", dst: "10.0.0.7:0", text: "port 0"},
		{name: "unknown service", dst: "10.0.0.7:no-such-service", text: "no-such-service"},
		{name: "no host", dst: ":6378", text: "missing host"},
		{name: "bare IPv6", dst: "2001:db8::1:6378", text: "too many colons"},
		{name: "unknown name", dst: "no-such-host.invalid:6378", text: "no-such-host.invalid",
			d: &net.Dialer{Timeout: 5 * time.Second}},
		{name: "cancelled", dst: "10.0.0.7:6378", ctx: cancelled, text: "cancelled", is: context.Canceled},
		{name: "expired", dst: "10.0.0.7:6378", ctx: expired, text: "timed out", is: context.DeadlineExceeded},
		{name: "expired dialer", dst: "10.0.0.7:6378", d: &net.Dialer{Deadline: time.Unix(1, 0)}, text: "timed out",
			is: os.ErrDeadlineExceeded},
		{name: "TLS", dst: "10.0.0.7:6378", cfg: &tls.Config{}, text: "TLS", is: ErrTLS},
		{name: "local address of another kind", dst: "10.0.0.7:6378", d: &net.Dialer{LocalAddr: &net.UnixAddr{Name: "x"}},
			text: "local address"},
		{name: "local address of another family", dst: "10.0.0.7:6378",
			d: &net.Dialer{LocalAddr: &net.TCPAddr{IP: net.IPv6loopback}}, text: "family of the local address"},
	} {
		t.Run(tc.name, func(t *testing.T) {
			ctx := tc.ctx
			if ctx == nil {
				ctx = context.Background()
			}
			start := time.Now()
			conn, err := DialCtxFn(ctx, tc.dst, tc.d, tc.cfg)
			requireDialError(t, conn, err)
			require.ErrorContains(t, err, tc.text)
			if tc.is != nil {
				require.ErrorIs(t, err, tc.is)
			}
			require.Less(t, time.Since(start), 10*time.Second)
		})
	}
}

func TestDialReceiveWindow(t *testing.T) {
	for _, w := range []int{-1, 1, 4096, 64<<10 + 1, 100 << 10, 17 << 20} {
		conn, err := (&Dialer{ReceiveWindow: w}).DialCtxFn(context.Background(), "10.0.0.7:6378", nil, nil)
		requireDialError(t, conn, err)
		require.ErrorContains(t, err, "ReceiveWindow")
		require.ErrorIs(t, err, os.ErrInvalid)
	}
	for w, want := range map[int]uint32{0: 1 << 20, 64 << 10: 64 << 10, 16 << 20: 16 << 20} {
		got, err := (&Dialer{ReceiveWindow: w}).receiveWindow()
		require.NoError(t, err)
		require.Equal(t, want, got)
	}
}

func TestDialDeadline(t *testing.T) {
	now := time.Unix(1000, 0)
	in := func(d time.Duration) context.Context {
		ctx, cancel := context.WithDeadline(context.Background(), now.Add(d))
		t.Cleanup(cancel)
		return ctx
	}
	bg := context.Background()
	for _, tc := range []struct {
		ctx  context.Context
		d    net.Dialer
		want time.Duration
	}{
		{bg, net.Dialer{}, defaultDialTimeout},
		{bg, net.Dialer{Timeout: 5 * time.Second}, 5 * time.Second},
		{bg, net.Dialer{Timeout: time.Minute}, time.Minute},
		{bg, net.Dialer{Timeout: time.Minute, Deadline: now.Add(time.Second)}, time.Second},
		{in(3 * time.Second), net.Dialer{Timeout: time.Minute, Deadline: now.Add(time.Hour)}, 3 * time.Second},
		{in(time.Hour), net.Dialer{}, time.Hour},
	} {
		require.Equal(t, now.Add(tc.want), dialDeadline(tc.ctx, &tc.d, now))
	}
}

func TestDialInTurn(t *testing.T) {
	a, b := netip.MustParseAddrPort("10.0.0.1:1"), netip.MustParseAddrPort("10.0.0.2:1")
	errA, errB := errors.New("a failed"), errors.New("b failed")
	want := new(net.TCPConn)

	var tried []netip.AddrPort
	conn, err := dialInTurn(context.Background(), []netip.AddrPort{a, b}, func(_ context.Context, ap netip.AddrPort) (net.Conn, error) {
		tried = append(tried, ap)
		if ap == a {
			return nil, errA
		}
		return want, nil
	})
	require.NoError(t, err)
	require.Same(t, want, conn)
	require.Equal(t, []netip.AddrPort{a, b}, tried)

	_, err = dialInTurn(context.Background(), []netip.AddrPort{a, b}, func(_ context.Context, ap netip.AddrPort) (net.Conn, error) {
		if ap == a {
			return nil, errA
		}
		return nil, errB
	})
	require.ErrorIs(t, err, errA, "the first address's error is the one reported")

	// An address that never answers leaves time for the next.
	ctx, cancel := context.WithTimeout(context.Background(), 10*time.Second)
	defer cancel()
	_, err = dialInTurn(ctx, []netip.AddrPort{a, b}, func(ctx context.Context, ap netip.AddrPort) (net.Conn, error) {
		deadline, ok := ctx.Deadline()
		require.True(t, ok)
		if ap == a {
			require.InDelta(t, 5, time.Until(deadline).Seconds(), 1)
			return nil, errA
		}
		require.InDelta(t, 10, time.Until(deadline).Seconds(), 1)
		return want, nil
	})
	require.NoError(t, err)

	// Once the context is over no further address is tried.
	ctx, cancel = context.WithCancel(context.Background())
	tried = nil
	_, err = dialInTurn(ctx, []netip.AddrPort{a, b}, func(_ context.Context, ap netip.AddrPort) (net.Conn, error) {
		tried = append(tried, ap)
		cancel()
		return nil, errA
	})
	require.ErrorIs(t, err, errA)
	require.Len(t, tried, 1)
}

func TestResolve(t *testing.T) {
	ctx := context.Background()
	addrs, err := resolve(ctx, nil, "10.0.0.7:6378", netip.AddrPort{})
	require.NoError(t, err)
	require.Equal(t, []netip.AddrPort{netip.MustParseAddrPort("10.0.0.7:6378")}, addrs)

	addrs, err = resolve(ctx, nil, "[fe80::1%eth0]:6378", netip.AddrPort{})
	require.NoError(t, err)
	require.Equal(t, []netip.AddrPort{netip.MustParseAddrPort("[fe80::1%eth0]:6378")}, addrs)

	addrs, err = resolve(ctx, nil, "[::ffff:10.0.0.7]:6378", netip.AddrPort{})
	require.NoError(t, err)
	require.True(t, addrs[0].Addr().Is4(), "an IPv4 address in IPv6 clothes is an IPv4 address")
}

func TestLocalAddr(t *testing.T) {
	for _, tc := range []struct {
		in   net.Addr
		want string
	}{
		{nil, "invalid AddrPort"},
		{(*net.TCPAddr)(nil), "invalid AddrPort"},
		{&net.TCPAddr{IP: net.IPv4(10, 0, 0, 1), Port: 7}, "10.0.0.1:7"},
		{&net.IPAddr{IP: net.IPv4(10, 0, 0, 1)}, "10.0.0.1:0"},
		{&net.IPAddr{IP: net.ParseIP("fe80::1"), Zone: "eth0"}, "[fe80::1%eth0]:0"},
		{Addr{netip.MustParseAddrPort("10.0.0.1:7")}, "10.0.0.1:7"},
	} {
		got, err := localAddr(tc.in)
		require.NoError(t, err)
		require.Equal(t, tc.want, got.String())
	}
}

func TestLocalAddrFamily(t *testing.T) {
	v4, v6 := netip.MustParseAddrPort("10.0.0.7:6378"), netip.MustParseAddrPort("[fd00::7]:6378")
	for _, tc := range []struct {
		in  net.Addr
		to4 string
		to6 string
	}{
		{&net.TCPAddr{}, "invalid AddrPort", "invalid AddrPort"},
		{&net.TCPAddr{Port: 7}, "0.0.0.0:7", "[::]:7"},
		{&net.TCPAddr{IP: net.IPv4zero}, "invalid AddrPort", "invalid AddrPort"},
		{&net.TCPAddr{IP: net.IPv6zero, Port: 7}, "0.0.0.0:7", "[::]:7"},
		{&net.IPAddr{IP: net.IPv4(10, 0, 0, 1)}, "10.0.0.1:0", "10.0.0.1:0"},
	} {
		local, err := localAddr(tc.in)
		require.NoError(t, err)
		require.Equal(t, tc.to4, ofFamily(local, v4).String())
		require.Equal(t, tc.to6, ofFamily(local, v6).String())
	}
}

func TestCauseError(t *testing.T) {
	err := error(&causeError{"the text", []error{ErrProtocol, os.ErrDeadlineExceeded}})
	require.EqualError(t, err, "the text")
	require.ErrorIs(t, err, ErrProtocol)
	require.ErrorIs(t, err, os.ErrDeadlineExceeded)
	var ne net.Error
	require.ErrorAs(t, err, &ne)
	require.True(t, ne.Timeout())
	require.False(t, (&causeError{"x", []error{ErrProtocol}}).Timeout())
	require.True(t, os.IsTimeout(&net.OpError{Op: "dial", Err: err}))
}

func TestAddr(t *testing.T) {
	a := Addr{netip.MustParseAddrPort("10.0.0.7:6378")}
	require.Equal(t, "rdma", a.Network())
	require.Equal(t, "10.0.0.7:6378", a.String())
}

func TestSpin(t *testing.T) {
	if processors() > 1 {
		require.Equal(t, 5*time.Millisecond, new(Dialer).spin())
		require.Equal(t, time.Millisecond, (&Dialer{Spin: time.Millisecond}).spin())
		require.Equal(t, 20*time.Millisecond, (&Dialer{Spin: time.Hour}).spin())
	}
	require.Zero(t, (&Dialer{Spin: -1}).spin())
	defer runtime.GOMAXPROCS(runtime.GOMAXPROCS(1))
	require.Zero(t, new(Dialer).spin(), "with one processor")
}
