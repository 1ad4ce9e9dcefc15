package valkeyrdma

import (
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"runtime"
	"strings"
	"time"
)

// Errors of this package that a caller can act on. They arrive wrapped in a *net.OpError, so test with errors.Is.
var (
	// ErrUnsupported is returned by every dial on a platform without RDMA verbs, or in a program built without cgo.
	// It wraps errors.ErrUnsupported.
	ErrUnsupported = fmt.Errorf("RDMA needs linux and cgo: %w", errors.ErrUnsupported)

	// ErrNoLibrary means that libibverbs or librdmacm is not installed on this host.
	ErrNoLibrary = errors.New("the RDMA libraries are not installed (Debian, Ubuntu: apt-get install librdmacm1 " +
		"ibverbs-providers; RHEL, SUSE: rdma-core with librdmacm and libibverbs)")

	// ErrNoDevice means that the host has no RDMA device or connection manager, or none on the route to the address.
	ErrNoDevice = errors.New("no RDMA device")

	// ErrLockedMemory means that the memory of a connection, 1.3 MiB and another 1 MiB once 1 MiB has come in, could not
	// be registered, most often because of RLIMIT_MEMLOCK.
	ErrLockedMemory = errors.New("cannot lock memory for RDMA: raise RLIMIT_MEMLOCK (ulimit -l, LimitMEMLOCK= of " +
		"systemd, --ulimit memlock= of docker, or CAP_IPC_LOCK)")

	// ErrIWARP means that the device speaks iWARP, which cannot carry this protocol.
	ErrIWARP = errors.New("iWARP devices have no RDMA WRITE with immediate data: use a RoCE or InfiniBand device")

	// ErrTLS means that TLS was asked for. RDMA has none, and the connection would go on in the clear.
	ErrTLS = errors.New("TLS was asked for, and Valkey over RDMA has none: remove TLSConfig, or use TCP for this server")

	// ErrDropped means that the server ended a connection before it was of any use.
	ErrDropped = errors.New("the server dropped the connection before it was of any use: protected mode " +
		"(protected-mode no, or set a password) or maxclients, most likely; its log says")

	// ErrProtocol means that the server sent what the protocol does not allow.
	ErrProtocol = errors.New("RDMA protocol violated by the server")
)

// defaultDialTimeout bounds a dial to which neither the context nor the net.Dialer sets a limit. Without it a server
// that accepts and stays silent would hold the caller for ever.
const defaultDialTimeout = 30 * time.Second

// A Dialer makes connections over RDMA. Its zero value is ready to use, and is what DialCtxFn uses.
// A Dialer may be used by several goroutines at once, and must not be changed after its first use.
type Dialer struct {
	// ReceiveWindow is the size in bytes of the buffer the server writes into, one per connection and a second one once
	// the first has filled up. 64 KiB to 16 MiB, a multiple of 64 KiB; 0 means 1 MiB. All of it is locked memory.
	ReceiveWindow int

	// Spin is how long a Read that waits looks at the completion queue, at most, before it goes to sleep; a Write that waits for
	// room does so for up to 2 ms of it. Waking a goroutine takes longer than most answers take to come, but looking takes a
	// processor. 0 means 5 ms, negative never, and more than 20 ms is taken for 20 ms. Reads look for a small multiple of
	// the usual waiting time only, and not at all while that was in vain, while many requests are in flight on the
	// connection, or where the program has a single processor; and no more than half of the processors
	// look at any time: see docs/performance.md.
	Spin time.Duration

	// Route says how dst, an address that the client dials, is reached: network is "rdma", or one of net.Dialer's such as
	// "tcp"; address is where to, which is dst unless ports or hosts differ. Empty strings mean "rdma" and dst, and so does a nil
	// Route. It serves what does not speak RDMA (sentinels), nodes whose RDMA port is another than the one the cluster announces,
	// and NAT. It is called for every dial, by several goroutines at once.
	//
	// On routes that are not "rdma" the connection is the one that net.Dialer or, with a TLS config, tls.Dialer makes. The server has
	// to show a certificate for the host of dst, as without a Route, unless the config has a ServerName.
	Route func(dst string) (network, address string)

	// Fallback, if it is not nil, is told of each dial over RDMA that failed, and why; if it returns true, the client gets a
	// connection over TCP to dst (not to the address of Route). So that there is time for this, a dial over RDMA takes at
	// most half of the time there is. There is no fallback from ErrTLS, from a Dialer that is set up wrong, nor after ctx
	// has ended. It hears of dials alone: a server in protected mode may accept a connection and end it just after. It is called by
	// several goroutines at once.
	Fallback func(dst string, err error) bool
}

// DialCtxFn connects to dst over RDMA. It has the type of valkey.ClientOption.DialCtxFn:
//
//	valkey.ClientOption{InitAddress: []string{"10.0.0.7:6378"}, DialCtxFn: valkeyrdma.DialCtxFn}
//
// It is the method of the zero Dialer.
func DialCtxFn(ctx context.Context, dst string, d *net.Dialer, cfg *tls.Config) (net.Conn, error) {
	return new(Dialer).DialCtxFn(ctx, dst, d, cfg)
}

// DialCtxFn connects to dst, "host:port", over RDMA, or as Route and Fallback say. A host name is resolved with d.Resolver, and its
// addresses are tried in turn. Of d, which may be nil, Timeout, Deadline, LocalAddr (a *net.TCPAddr, *net.IPAddr or Addr), Resolver
// and KeepAlive (how long nothing may come from the server before it is probed; at least 5 s, 0 means 15 s, negative never) are
// honoured; with no limit there nor in ctx, the dial fails after 30 seconds. It returns when the server has
// announced its receive window, so the connection can be written to at once. A server accepts one connection after the other, so
// no more than 8 dials from one address to another are under way at a time, 2 once one was given up; others
// wait for their turn, in the order in which they came.
//
// cfg must be nil: RDMA has no TLS, and the error is ErrTLS. Routes over TCP honour it.
//
// Every error is a *net.OpError with Op "dial" and, over RDMA, Net "rdma"; but for those of a TLS handshake, which are
// crypto/tls's own.
func (dl *Dialer) DialCtxFn(ctx context.Context, dst string, d *net.Dialer, cfg *tls.Config) (net.Conn, error) {
	if d == nil {
		d = &net.Dialer{}
	}
	deadline := dialDeadline(ctx, d, time.Now())
	ctx, cancel := context.WithDeadline(ctx, deadline)
	defer cancel()
	via, address := dl.route(dst)
	if via != network {
		return dialOther(ctx, via, address, dst, d, cfg)
	}
	if dl.Fallback == nil || cfg != nil {
		return dl.dial(ctx, address, d, cfg)
	}
	first, cancelFirst := context.WithTimeout(ctx, time.Until(deadline)/2)
	conn, err := dl.dial(first, address, d, nil)
	cancelFirst()
	if err == nil || errors.Is(err, os.ErrInvalid) || ctx.Err() != nil || !dl.Fallback(dst, err) {
		return conn, err
	}
	return dialOther(ctx, "tcp", dst, dst, d, nil)
}

func (dl *Dialer) route(dst string) (via, address string) {
	if dl.Route != nil {
		via, address = dl.Route(dst)
	}
	return cmp.Or(via, network), cmp.Or(address, dst)
}

// dialOther connects to address, which is dst's, by a network of net.Dialer.
func dialOther(ctx context.Context, via, address, dst string, d *net.Dialer, cfg *tls.Config) (net.Conn, error) {
	if a, err := localAddr(d.LocalAddr); err == nil && a != (netip.AddrPort{}) && strings.HasPrefix(via, "tcp") {
		other := *d // net.Dialer wants a local address of its own type
		other.LocalAddr = net.TCPAddrFromAddrPort(a)
		d = &other
	}
	if cfg != nil {
		if host, _, err := net.SplitHostPort(dst); err == nil && cfg.ServerName == "" {
			cfg = cfg.Clone()
			cfg.ServerName = host
		}
		return (&tls.Dialer{NetDialer: d, Config: cfg}).DialContext(ctx, via, address)
	}
	return d.DialContext(ctx, via, address)
}

// dial is DialCtxFn for RDMA alone. ctx has a deadline.
func (dl *Dialer) dial(ctx context.Context, dst string, d *net.Dialer, cfg *tls.Config) (net.Conn, error) {
	if cfg != nil {
		return nil, dialError(nil, dst, ErrTLS)
	}
	window, err := dl.receiveWindow()
	if err != nil {
		return nil, dialError(nil, dst, err)
	}
	local, err := localAddr(d.LocalAddr)
	if err != nil {
		return nil, dialError(d.LocalAddr, dst, err)
	}
	if ctx.Err() != nil {
		return nil, dialError(d.LocalAddr, dst, contextError(ctx, "starting to dial"))
	}
	addrs, err := resolve(ctx, d.Resolver, dst, local)
	if err != nil {
		return nil, dialError(d.LocalAddr, dst, err)
	}
	return dialInTurn(ctx, addrs, func(ctx context.Context, addr netip.AddrPort) (net.Conn, error) {
		conn, err := dialAddr(ctx, addr, ofFamily(local, addr), window, dl.spin(), d.KeepAlive)
		if err != nil {
			return nil, &net.OpError{Op: "dial", Net: network, Source: d.LocalAddr, Addr: Addr{addr}, Err: err}
		}
		return conn, nil
	})
}

// dialInTurn tries each address with a fair share of the time that is left, as net.Dialer does. The first error is
// the one reported: names usually list their best address first.
func dialInTurn(ctx context.Context, addrs []netip.AddrPort,
	dial func(context.Context, netip.AddrPort) (net.Conn, error)) (net.Conn, error) {
	var first error
	for i, addr := range addrs {
		turn, cancel := ctx, context.CancelFunc(func() {})
		if deadline, ok := ctx.Deadline(); ok && i < len(addrs)-1 {
			share := max(time.Until(deadline)/time.Duration(len(addrs)-i), 2*time.Second)
			turn, cancel = context.WithTimeout(ctx, share)
		}
		conn, err := dial(turn, addr)
		cancel()
		if err == nil {
			return conn, nil
		}
		if first == nil {
			first = err
		}
		if ctx.Err() != nil {
			break
		}
	}
	return nil, first
}

// processors is how many of them this program may use.
func processors() int { return min(runtime.NumCPU(), runtime.GOMAXPROCS(0)) }

func (dl *Dialer) spin() time.Duration {
	switch {
	case dl.Spin < 0 || processors() == 1:
		return 0
	case dl.Spin == 0:
		return 5 * time.Millisecond
	default:
		return min(dl.Spin, 20*time.Millisecond)
	}
}

func (dl *Dialer) receiveWindow() (uint32, error) {
	const unit, least, most = 64 << 10, 64 << 10, 16 << 20
	switch w := dl.ReceiveWindow; {
	case w == 0:
		return 1 << 20, nil
	case w < least || w > most || w%unit != 0:
		return 0, fmt.Errorf("Dialer.ReceiveWindow is %d bytes, want a multiple of 64 KiB up to 16 MiB: %w", w, os.ErrInvalid)
	default:
		return uint32(w), nil
	}
}

// dialDeadline is the earliest of the limits that apply, or the default.
func dialDeadline(ctx context.Context, d *net.Dialer, now time.Time) time.Time {
	var earliest time.Time
	consider := func(t time.Time) {
		if !t.IsZero() && (earliest.IsZero() || t.Before(earliest)) {
			earliest = t
		}
	}
	if d.Timeout != 0 {
		consider(now.Add(d.Timeout))
	}
	consider(d.Deadline)
	if t, ok := ctx.Deadline(); ok {
		consider(t)
	}
	if earliest.IsZero() {
		return now.Add(defaultDialTimeout)
	}
	return earliest
}

func localAddr(a net.Addr) (netip.AddrPort, error) {
	switch a := a.(type) {
	case nil:
		return netip.AddrPort{}, nil
	case *net.TCPAddr:
		if a == nil {
			return netip.AddrPort{}, nil
		}
		ap := a.AddrPort()
		return netip.AddrPortFrom(ap.Addr().Unmap(), ap.Port()), nil
	case *net.IPAddr:
		if a == nil {
			return netip.AddrPort{}, nil
		}
		return netip.AddrPortFrom(ipAddr(a), 0), nil
	case Addr:
		return a.AddrPort, nil
	default:
		return netip.AddrPort{}, &net.AddrError{Err: fmt.Sprintf("local address of type %T, want *net.TCPAddr, "+
			"*net.IPAddr or valkeyrdma.Addr", a), Addr: a.String()}
	}
}

// isAny says whether an address of ours leaves it open which: as for net.Dialer, a port may come without an address, and 0.0.0.0 and
// :: are for both families.
func isAny(a netip.Addr) bool { return !a.IsValid() || a.IsUnspecified() }

// ofFamily is local in the family of remote; the zero AddrPort if there is nothing to bind to.
func ofFamily(local, remote netip.AddrPort) netip.AddrPort {
	switch {
	case !isAny(local.Addr()):
		return local
	case local.Port() == 0:
		return netip.AddrPort{}
	case remote.Addr().Is4():
		return netip.AddrPortFrom(netip.IPv4Unspecified(), local.Port())
	default:
		return netip.AddrPortFrom(netip.IPv6Unspecified(), local.Port())
	}
}

func ipAddr(a *net.IPAddr) netip.Addr {
	ip, _ := netip.AddrFromSlice(a.IP)
	return ip.Unmap().WithZone(a.Zone)
}

// resolve turns "host:port" into addresses to try, leaving out those of another family than local.
func resolve(ctx context.Context, r *net.Resolver, dst string, local netip.AddrPort) ([]netip.AddrPort, error) {
	if r == nil {
		r = net.DefaultResolver
	}
	host, service, err := net.SplitHostPort(dst)
	if err != nil {
		return nil, err
	}
	port, err := r.LookupPort(ctx, "tcp", service)
	if err != nil {
		return nil, err
	}
	if port == 0 {
		return nil, &net.AddrError{Err: "port 0 cannot be dialled", Addr: dst}
	}
	if host == "" {
		return nil, &net.AddrError{Err: "missing host in address", Addr: dst}
	}
	ips, err := r.LookupIPAddr(ctx, host) // LookupNetIP would lose the zone of a link-local address
	if err != nil {
		return nil, resolveError(ctx, err)
	}
	var addrs []netip.AddrPort
	for i := range ips {
		ip := ipAddr(&ips[i])
		if !isAny(local.Addr()) && local.Addr().Is4() != ip.Is4() {
			continue
		}
		addrs = append(addrs, netip.AddrPortFrom(ip, uint16(port)))
	}
	if len(addrs) == 0 {
		return nil, &net.AddrError{Err: "no address of the family of the local address " + local.Addr().String(), Addr: dst}
	}
	return addrs, nil
}

// resolveError keeps a context's own error visible: the resolver reports a cancelled look-up in its own words.
func resolveError(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return contextError(ctx, "resolving the name")
	}
	return err
}

func dialError(source net.Addr, dst string, err error) error {
	return &net.OpError{Op: "dial", Net: network, Source: source, Addr: dialAddress(dst), Err: err}
}

// dialAddress is the address of an error about a destination that could not be resolved.
type dialAddress string

func (a dialAddress) Network() string { return network }
func (a dialAddress) String() string  { return string(a) }

// causeError is an error with a text of its own that is, for errors.Is, also each of its causes.
type causeError struct {
	text   string
	causes []error
}

func (e *causeError) Error() string   { return e.text }
func (e *causeError) Unwrap() []error { return e.causes }

// Timeout makes net.OpError.Timeout and os.IsTimeout true where one of the causes is a deadline.
func (e *causeError) Timeout() bool {
	for _, cause := range e.causes {
		if t, ok := cause.(interface{ Timeout() bool }); ok && t.Timeout() {
			return true
		}
	}
	return false
}

// Temporary is part of net.Error.
func (e *causeError) Temporary() bool { return e.Timeout() }

// contextError says what a dial was doing when its context ended.
func contextError(ctx context.Context, stage string) error {
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return &causeError{"timed out while " + stage, []error{os.ErrDeadlineExceeded, context.DeadlineExceeded}}
	}
	return &causeError{"cancelled while " + stage, []error{context.Canceled}}
}

const network = "rdma"

// Addr is the address of one end of a connection.
type Addr struct {
	netip.AddrPort
}

// Network returns "rdma".
func (Addr) Network() string { return network }

// Stats are the counters of one connection since it was made. A connection of this package has the method
// Stats() Stats; it may be called at any time by any goroutine, and returns the zero Stats after Close.
type Stats struct {
	Device string // name of the RDMA device, such as mlx5_0 or rxe0

	BytesReceived, BytesSent       uint64 // payload; sent means handed to the device
	MessagesReceived, MessagesSent uint64 // RDMA WRITEs with immediate data
	WindowsReceived, WindowsSent   uint64 // windows the server announced to us, and we to it

	Fences      uint64 // credit fences the server answered
	CreditWaits uint64 // times that bytes had to wait because the server's receive queue might have been full
	WindowWaits uint64 // times that bytes had to wait for a new window of the server
	Spins       uint64 // waits of Read that ended while the completion queue was looked at, see Dialer.Spin
	Sleeps      uint64 // waits of Read that it slept in
	Arms        uint64 // times the completion queue was armed: a system call on rxe, a doorbell on hardware

	Unread      int // bytes received that Read has not handed over
	Unsent      int // bytes Write took that are not handed to the device yet
	Credits     int // further writes that the server's receive queue has room for
	SendsQueued int // send queue slots in use, of SendDepth

	LockedBytes  uint64 // registered, so locked, memory
	ServerWindow int    // size in bytes of the server's receive window
	ReceiveDepth int    // receives kept posted
	SendDepth    int    // send queue slots
	InlineMax    int    // size in bytes of the largest write that travels in its work request
}
