package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net"
	"strconv"
	"time"

	"github.com/valkey-io/valkey-go"
	"github.com/valkeyrdma/valkeyrdma"
)

// The names of the contestants in results and in -only.
const (
	goTCP     = "go-tcp"      // valkey-go over TCP
	goRDMA    = "go-rdma"     // valkey-go over RDMA, by this library
	rawTCP    = "raw-tcp"     // the commands written to a net.TCPConn, the replies read from it
	rawRDMA   = "raw-rdma"    // the same with a connection of this library
	rawEvents = "raw-rdma-ev" // the same without spinning
	cTCP      = "c-tcp"       // valkey-benchmark
	cRDMA     = "c-rdma"      // valkey-benchmark --rdma
)

// A work is what the contestants of a case do.
type work struct {
	workload                 string
	size                     int
	callers, conns, pipeline int
}

func (w work) row() row {
	return row{Workload: w.workload, Size: w.size, Callers: w.callers, Conns: w.conns, Pipeline: w.pipeline}
}

// A contestant is ready to be measured, with a connection that is open, where it keeps one.
type contestant interface {
	measure(d time.Duration) ([]row, error)
	close()
}

// opener makes a contestant ready. The name says which.
type opener struct {
	name string
	// quick is for those that take part in a quick run as well.
	quick   bool
	buffers int // as in its rows
	open    openFunc
}

type openFunc func(ctx context.Context, l *lab, name string) (contestant, error)

// row is what the contestant's rows in the group have in common, but for the class of operations.
func (o opener) row(g group) row {
	r := g.row
	r.Peer, r.Buffers = o.name, o.buffers
	return r
}

// least is how many operations a measurement has at least, however long they take.
func least(size int) int {
	if size >= 1<<20 {
		return 3
	}
	return 10
}

// noSpin is a Dialer.Spin: every wait is for an event.
const noSpin = time.Duration(-1)

// valkey-go.

type goClient struct {
	w      work
	server *server
	client valkey.Client
	values []string
}

// openGo is valkey-go, one client for all callers, over TCP or over RDMA.
func openGo(w work) openFunc {
	return func(ctx context.Context, l *lab, name string) (contestant, error) {
		s, err := l.startServer(ctx)
		if err != nil {
			return nil, err
		}
		c := &goClient{w: w, server: s}
		option := valkey.ClientOption{InitAddress: []string{s.Addr}, DisableCache: true}
		if name == goRDMA {
			option.DialCtxFn = valkeyrdma.DialCtxFn
		}
		if err = s.fill(w.size); err == nil {
			c.client, err = valkey.NewClient(option)
		}
		if err != nil {
			c.close()
			return nil, err
		}
		return c, nil
	}
}

func (g *goClient) close() {
	if g.client != nil {
		g.client.Close()
	}
	g.server.Kill()
}

func (g *goClient) measure(d time.Duration) ([]row, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	c, b := g.client, g.client.B
	value := string(payload(g.w.size))
	get := func() error {
		v, err := c.Do(ctx, b().Get().Key(theKey).Build()).ToString()
		if err == nil && len(v) != g.w.size {
			err = fmt.Errorf("a value of %d bytes, want %d", len(v), g.w.size)
		}
		return err
	}
	var op func(int) error
	switch g.w.workload {
	case "echo":
		// What valkey-go's own benchmark of its RDMA connection does: the text of a random number.
		op = func(int) error {
			s := strconv.FormatUint(rand.Uint64N(100_000_000_000), 10)
			got, err := c.Do(ctx, b().Echo().Message(s).Build()).ToString()
			if err == nil && got != s {
				err = fmt.Errorf("the echo of %q is %q", s, got)
			}
			return err
		}
	case "get":
		op = func(int) error { return get() }
	case "set":
		op = func(int) error { return c.Do(ctx, b().Set().Key(theKey).Value(value).Build()).Error() }
	case "pipeline":
		op = func(int) error {
			cmds := make(valkey.Commands, g.w.pipeline)
			for i := range cmds {
				cmds[i] = b().Get().Key(theKey).Build()
			}
			for _, resp := range c.DoMulti(ctx, cmds...) {
				if v, err := resp.ToString(); err != nil || len(v) != g.w.size {
					return fmt.Errorf("a value of %d bytes, want %d: %w", len(v), g.w.size, err)
				}
			}
			return nil
		}
	}
	t, err := repeat(max(g.w.callers, 1), d, least(g.w.size), op)
	return g.w.result(t, err)
}

// result makes the row of a timing.
func (w work) result(t timing, err error) ([]row, error) {
	if err != nil {
		return nil, err
	}
	if w.pipeline > 0 {
		t.PerOp = w.pipeline
	}
	r := w.row()
	r.setTiming(t)
	return []row{r}, nil
}

// Connections used directly.

type rawClient struct {
	w      work
	server *server
	conns  []*raw
}

// openRaw is a program that uses connections itself: each has one goroutine.
func openRaw(w work) openFunc {
	return func(ctx context.Context, l *lab, name string) (contestant, error) {
		dial := rawDialer(name, 0)
		s, err := l.startServer(ctx)
		if err != nil {
			return nil, err
		}
		c := &rawClient{w: w, server: s}
		if err := s.fill(w.size); err != nil {
			c.close()
			return nil, err
		}
		for range max(w.conns, 1) {
			conn, err := dial(ctx, s.Addr)
			if err != nil {
				c.close()
				return nil, err
			}
			c.conns = append(c.conns, newRaw(conn))
		}
		return c, nil
	}
}

// rawDialer returns how the contestant of this name dials.
func rawDialer(name string, window int) func(context.Context, string) (net.Conn, error) {
	nd := &net.Dialer{Timeout: 10 * time.Second}
	if name == rawTCP {
		return func(ctx context.Context, addr string) (net.Conn, error) { return nd.DialContext(ctx, "tcp", addr) }
	}
	spin := time.Duration(0)
	if name == rawEvents {
		spin = noSpin
	}
	d := &valkeyrdma.Dialer{ReceiveWindow: window, Spin: spin}
	return func(ctx context.Context, addr string) (net.Conn, error) { return d.DialCtxFn(ctx, addr, nd, nil) }
}

func (c *rawClient) close() {
	for _, r := range c.conns {
		_ = r.c.Close()
	}
	c.server.Kill()
}

func (c *rawClient) measure(d time.Duration) ([]row, error) {
	request, want := getCommand(), getReply(c.w.size)
	if c.w.workload == "set" {
		request, want = setCommand(c.w.size), okReply
	}
	if n := c.w.pipeline; n > 0 {
		all := make([]byte, 0, n*len(request))
		for range n {
			all = append(all, request...)
		}
		request, want = all, want.times(n)
	}
	t, err := repeat(len(c.conns), d, least(c.w.size), func(i int) error { return c.conns[i].roundTrip(request, want) })
	return c.w.result(t, err)
}
