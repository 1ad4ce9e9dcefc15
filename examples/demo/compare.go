package main

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/valkey-io/valkey-go"
)

// compare prints a table of round trip times by TCP and by RDMA. The two take turns in short rounds, so that what else the
// machine does hits both alike.
func (d *demo) compare(ctx context.Context) error {
	tcp, err := valkey.NewClient(valkey.ClientOption{InitAddress: []string{d.tcpAddr}, DisableCache: true})
	if err != nil {
		return err
	}
	defer tcp.Close()
	d.printf("\n  Round trips of one caller, TCP beside RDMA, in rounds that take turns:\n\n")
	d.printf("  %-8s %-9s %18s    %18s    %s\n", "", "", "TCP", "RDMA", "RDMA / TCP")
	d.printf("  %-8s %-9s %9s %8s    %9s %8s    %s\n", "command", "value", "median", "p99", "median", "p99", "median")
	for _, size := range []struct {
		name  string
		bytes int
		calls int
	}{{"64 B", 64, 1000}, {"1 KiB", 1 << 10, 600}, {"16 KiB", 16 << 10, 300}, {"256 KiB", 256 << 10, 100}, {"1 MiB", 1 << 20, 40}} {
		value := strings.Repeat("x", size.bytes)
		for _, command := range []string{"SET", "GET"} {
			call := func(c valkey.Client) error {
				if command == "SET" {
					return c.Do(ctx, c.B().Set().Key("demo:bench").Value(value).Build()).Error()
				}
				got, err := c.Do(ctx, c.B().Get().Key("demo:bench").Build()).ToString()
				if err == nil && len(got) != size.bytes {
					err = fmt.Errorf("GET of %d bytes returned %d", size.bytes, len(got))
				}
				return err
			}
			times, err := turns([]valkey.Client{tcp, d.client}, size.calls, call)
			if err != nil {
				return err
			}
			t, r := times[0], times[1]
			d.printf("  %-8s %-9s %9s %8s    %9s %8s    %.2f\n", command, size.name,
				short(percentile(t, 50)), short(percentile(t, 99)), short(percentile(r, 50)), short(percentile(r, 99)),
				float64(percentile(r, 50))/float64(percentile(t, 50)))
		}
	}
	return nil
}

// turns times calls with each client, ten rounds each, after a short warm-up.
func turns(clients []valkey.Client, calls int, call func(valkey.Client) error) ([][]time.Duration, error) {
	const rounds = 10
	times := make([][]time.Duration, len(clients))
	for round := range rounds + 1 {
		for i, c := range clients {
			for range max(calls/rounds, 1) {
				start := time.Now()
				if err := call(c); err != nil {
					return nil, err
				}
				if round > 0 {
					times[i] = append(times[i], time.Since(start))
				}
			}
		}
	}
	for _, t := range times {
		slices.Sort(t)
	}
	return times, nil
}

func percentile(sorted []time.Duration, p int) time.Duration {
	return sorted[min(len(sorted)*p/100, len(sorted)-1)]
}
