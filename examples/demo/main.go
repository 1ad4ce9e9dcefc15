// Command demo shows valkey-go talking to a Valkey server over RDMA. Run it with "make demo", which brings a server and, on a
// machine without RDMA hardware, RDMA itself; or point it at servers of your own:
//
//	go run ./examples/demo -rdma 10.0.0.7:6378 -tcp 10.0.0.7:6379
//
// It exits with status 0 only if every step was right.
package main

import (
	"context"
	"crypto/sha256"
	"crypto/tls"
	"errors"
	"flag"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"strings"
	"sync"
	"time"

	"github.com/valkey-io/valkey-go"
	"github.com/valkeyrdma/valkeyrdma"
)

func main() {
	rdma := flag.String("rdma", os.Getenv("VALKEYRDMA_RDMA_ADDR"), "host:port on which Valkey listens for RDMA")
	tcp := flag.String("tcp", os.Getenv("VALKEYRDMA_TCP_ADDR"), "host:port of the same Valkey over TCP; empty leaves the comparison out")
	limit := flag.Duration("timeout", 5*time.Minute, "give up after this long")
	flag.Parse()
	if *rdma == "" {
		fmt.Fprintln(os.Stderr, "demo: no server: say -rdma host:port, or run make demo")
		os.Exit(2)
	}
	ctx, cancel := context.WithTimeout(context.Background(), *limit)
	defer cancel()
	d := &demo{out: os.Stdout, rdmaAddr: *rdma, tcpAddr: *tcp, environment: os.Getenv("VALKEYRDMA_LAB_INFO")}
	if err := d.run(ctx); err != nil {
		fmt.Fprintf(os.Stdout, "\nFAILED: %v\n", err)
		os.Exit(1)
	}
}

type demo struct {
	out               io.Writer
	rdmaAddr, tcpAddr string
	environment       string

	client valkey.Client
	number int

	mu    sync.Mutex
	conns []net.Conn // those made by dial
}

// dial is the one changed field, with a note kept of each connection for the counters at the end.
func (d *demo) dial(ctx context.Context, dst string, nd *net.Dialer, cfg *tls.Config) (net.Conn, error) {
	conn, err := valkeyrdma.DialCtxFn(ctx, dst, nd, cfg)
	if err == nil {
		d.mu.Lock()
		d.conns = append(d.conns, conn)
		d.mu.Unlock()
	}
	return conn, err
}

func (d *demo) run(ctx context.Context) error {
	d.printf("valkey-go over RDMA: a demonstration\n\n")
	if d.environment != "" {
		d.printf("  environment   %s\n", d.environment)
	}
	d.printf("  server        %s by RDMA", d.rdmaAddr)
	if d.tcpAddr != "" {
		d.printf(", %s by TCP", d.tcpAddr)
	}
	d.printf("\n\n")

	steps := []struct {
		name string
		do   func(context.Context) (string, error)
	}{
		{"connect and ask who is there", d.connect},
		{"SET a value and GET it back", d.setGet},
		{"10 000 commands in pipelines", d.pipeline},
		{"a 16 MiB value there and back", d.large},
		{"pub/sub: 1000 messages, in order", d.pubsub},
		{"BLPOP: a command that waits 11 s", d.blocking},
	}
	for _, s := range steps {
		d.number++
		d.printf("  %d of %d  %-34s", d.number, len(steps), s.name)
		start := time.Now()
		result, err := s.do(ctx)
		if err != nil {
			d.printf("wrong\n")
			return fmt.Errorf("%s: %w", s.name, err)
		}
		d.printf("right, %s  (%s)\n", result, short(time.Since(start)))
	}
	defer d.client.Close()
	if d.tcpAddr != "" {
		if err := d.compare(ctx); err != nil {
			return fmt.Errorf("comparing with TCP: %w", err)
		}
	}
	d.counters()
	d.printf("\nEverything was right.\n")
	return nil
}

func (d *demo) connect(ctx context.Context) (string, error) {
	client, err := valkey.NewClient(valkey.ClientOption{
		InitAddress:  []string{d.rdmaAddr},
		DialCtxFn:    d.dial,
		DisableCache: true,
	})
	if err != nil {
		return "", err
	}
	d.client = client
	info, err := client.Do(ctx, client.B().Info().Section("server").Build()).ToString()
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(info) {
		if v, ok := strings.CutPrefix(strings.TrimSpace(line), "valkey_version:"); ok {
			return "Valkey " + v + " answers", nil
		}
	}
	return "the server answers", nil
}

func (d *demo) setGet(ctx context.Context) (string, error) {
	const key, want = "demo:greeting", "hello by RDMA"
	if err := d.client.Do(ctx, d.client.B().Set().Key(key).Value(want).Build()).Error(); err != nil {
		return "", err
	}
	got, err := d.client.Do(ctx, d.client.B().Get().Key(key).Build()).ToString()
	if err != nil {
		return "", err
	}
	if got != want {
		return "", fmt.Errorf("got %q, want %q", got, want)
	}
	return fmt.Sprintf("%q", got), nil
}

func (d *demo) pipeline(ctx context.Context) (string, error) {
	const total, batch = 10_000, 500
	const key = "demo:counter"
	if err := d.client.Do(ctx, d.client.B().Del().Key(key).Build()).Error(); err != nil {
		return "", err
	}
	start := time.Now()
	for range total / batch {
		cmds := make(valkey.Commands, batch)
		for i := range cmds {
			cmds[i] = d.client.B().Incr().Key(key).Build()
		}
		for _, resp := range d.client.DoMulti(ctx, cmds...) {
			if err := resp.Error(); err != nil {
				return "", err
			}
		}
	}
	took := time.Since(start)
	n, err := d.client.Do(ctx, d.client.B().Get().Key(key).Build()).AsInt64()
	if err != nil {
		return "", err
	}
	if n != total {
		return "", fmt.Errorf("the counter is %d, want %d", n, total)
	}
	return fmt.Sprintf("the counter is %d, %.0f commands a second", n, total/took.Seconds()), nil
}

func (d *demo) large(ctx context.Context) (string, error) {
	const key = "demo:large"
	value := make([]byte, 16<<20)
	rng := rand.NewChaCha8([32]byte{1})
	_, _ = rng.Read(value)
	want := sha256.Sum256(value)
	if err := d.client.Do(ctx, d.client.B().Set().Key(key).Value(valkey.BinaryString(value)).Build()).Error(); err != nil {
		return "", err
	}
	back, err := d.client.Do(ctx, d.client.B().Get().Key(key).Build()).AsBytes()
	if err != nil {
		return "", err
	}
	if got := sha256.Sum256(back); got != want {
		return "", fmt.Errorf("%d bytes with SHA-256 %x, want %d with %x", len(back), got, len(value), want)
	}
	return fmt.Sprintf("SHA-256 %x… on both sides", want[:6]), d.client.Do(ctx, d.client.B().Del().Key(key).Build()).Error()
}

func (d *demo) pubsub(ctx context.Context) (string, error) {
	const total = 1000
	ctx, cancel := context.WithTimeout(ctx, 30*time.Second)
	defer cancel()
	subscribed := make(chan struct{})
	received := make(chan error, 1)
	go func() {
		next := 0
		hooked, stop := d.client.Dedicate()
		defer stop()
		wait := hooked.SetPubSubHooks(valkey.PubSubHooks{
			OnSubscription: func(valkey.PubSubSubscription) { close(subscribed) },
			OnMessage: func(m valkey.PubSubMessage) {
				if m.Message != fmt.Sprint(next) {
					received <- fmt.Errorf("message %q came as number %d", m.Message, next)
				}
				if next++; next == total {
					received <- nil
				}
			},
		})
		if err := hooked.Do(ctx, hooked.B().Subscribe().Channel("demo:news").Build()).Error(); err != nil {
			received <- err
		}
		select {
		case err := <-wait:
			received <- err
		case <-ctx.Done():
		}
	}()
	select {
	case <-subscribed:
	case err := <-received:
		return "", err
	case <-ctx.Done():
		return "", errors.New("the subscription was not confirmed")
	}
	for i := range total {
		if err := d.client.Do(ctx, d.client.B().Publish().Channel("demo:news").Message(fmt.Sprint(i)).Build()).Error(); err != nil {
			return "", err
		}
	}
	select {
	case err := <-received:
		if err != nil {
			return "", err
		}
	case <-ctx.Done():
		return "", errors.New("not all messages came")
	}
	return "all came", nil
}

func (d *demo) blocking(ctx context.Context) (string, error) {
	const wait = 11 * time.Second
	const key, want = "demo:queue", "worth waiting for"
	if err := d.client.Do(ctx, d.client.B().Del().Key(key).Build()).Error(); err != nil {
		return "", err
	}
	pushed := make(chan error, 1)
	go func() {
		tick := time.NewTicker(time.Second)
		defer tick.Stop()
		for until := time.Now().Add(wait); time.Now().Before(until); {
			<-tick.C
			d.printf(".")
		}
		pushed <- d.client.Do(ctx, d.client.B().Rpush().Key(key).Element(want).Build()).Error()
	}()
	start := time.Now()
	got, err := d.client.Do(ctx, d.client.B().Blpop().Key(key).Timeout(60).Build()).AsStrSlice()
	if err != nil {
		return "", err
	}
	if err := <-pushed; err != nil {
		return "", err
	}
	d.printf(" ")
	if len(got) != 2 || got[1] != want {
		return "", fmt.Errorf("got %q", got)
	}
	if took := time.Since(start); took < 10*time.Second {
		return "", fmt.Errorf("it was answered after %v", took)
	}
	return fmt.Sprintf("%q", got[1]), nil
}

func (d *demo) counters() {
	d.mu.Lock()
	defer d.mu.Unlock()
	var sum valkeyrdma.Stats
	conns := 0
	for _, c := range d.conns {
		s := c.(interface{ Stats() valkeyrdma.Stats }).Stats()
		if s.Device == "" {
			continue // closed
		}
		conns++
		sum.Device = s.Device
		sum.BytesSent += s.BytesSent
		sum.BytesReceived += s.BytesReceived
		sum.MessagesSent += s.MessagesSent
		sum.MessagesReceived += s.MessagesReceived
		sum.LockedBytes += s.LockedBytes
	}
	d.printf("\n  By RDMA, through device %s: %.1f MiB sent in %d writes, %.1f MiB received in %d, on %d connections\n"+
		"  with %.1f MiB of locked memory.\n", sum.Device, mib(sum.BytesSent), sum.MessagesSent, mib(sum.BytesReceived),
		sum.MessagesReceived, conns, mib(sum.LockedBytes))
}

func mib(n uint64) float64 { return float64(n) / (1 << 20) }

func (d *demo) printf(format string, args ...any) { fmt.Fprintf(d.out, format, args...) }

// short rounds a duration to three digits or so.
func short(t time.Duration) string {
	switch {
	case t >= time.Second:
		return t.Round(10 * time.Millisecond).String()
	case t >= time.Millisecond:
		return t.Round(10 * time.Microsecond).String()
	default:
		return t.Round(100 * time.Nanosecond).String()
	}
}
