// Command cluster talks to a Valkey cluster over RDMA, and says how it reaches each node.
//
//	go run ./examples/cluster 10.0.0.7:6379 10.0.0.8:6379
//
// The addresses are those of TCP, which is what the nodes of a cluster announce. If RDMA has other ports, say how far they are
// apart: "-offset -1" if RDMA has port 6378 where TCP has 6379. With -fallback, a node that RDMA does not reach is reached over TCP.
package main

import (
	"context"
	"crypto/tls"
	"flag"
	"fmt"
	"log"
	"net"
	"slices"
	"strconv"
	"sync"
	"time"

	"github.com/valkey-io/valkey-go"
	"github.com/valkeyrdma/valkeyrdma"
)

// patience is how long a dial may take, and then all commands together.
const patience = time.Minute

func main() {
	offset := flag.Int("offset", 0, "RDMA port less TCP port")
	fallback := flag.Bool("fallback", false, "reach over TCP what RDMA does not reach")
	flag.Parse()
	if err := run(*offset, *fallback, flag.Args()); err != nil {
		log.Fatal(err)
	}
}

func run(offset int, fallback bool, addrs []string) error {
	dialer := &valkeyrdma.Dialer{
		// Where a node has RDMA, given the address that the cluster announces.
		Route: func(dst string) (network, address string) {
			host, port, _ := net.SplitHostPort(dst)
			n, _ := strconv.Atoi(port)
			return "rdma", net.JoinHostPort(host, strconv.Itoa(n+offset))
		},
	}
	if fallback {
		dialer.Fallback = func(dst string, err error) bool {
			log.Printf("%s over TCP, because: %v", dst, err)
			return true
		}
	}
	ways := &ways{by: map[string]string{}}
	client, err := valkey.NewClient(valkey.ClientOption{
		InitAddress: addrs,
		DialCtxFn:   ways.note(dialer.DialCtxFn),
		Dialer:      net.Dialer{Timeout: patience},
	})
	if err != nil {
		return err
	}
	defer client.Close()

	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	// Thirty keys are thirty slots, so that each master has some of them.
	var sets, gets valkey.Commands
	for i := range 30 {
		key, value := fmt.Sprintf("example:%d", i), fmt.Sprintf("value %d", i)
		sets = append(sets, client.B().Set().Key(key).Value(value).Build())
		gets = append(gets, client.B().Get().Key(key).Build())
	}
	for _, r := range client.DoMulti(ctx, sets...) {
		if err := r.Error(); err != nil {
			return err
		}
	}
	for i, r := range client.DoMulti(ctx, gets...) {
		value, err := r.ToString()
		if err != nil {
			return err
		}
		if want := fmt.Sprintf("value %d", i); value != want {
			return fmt.Errorf("got %q, want %q", value, want)
		}
	}
	fmt.Println("30 values written and read")
	ways.print()
	return nil
}

// ways notes how each node was reached.
type ways struct {
	mu sync.Mutex
	by map[string]string
}

type dialFunc = func(context.Context, string, *net.Dialer, *tls.Config) (net.Conn, error)

func (w *ways) note(dial dialFunc) dialFunc {
	return func(ctx context.Context, dst string, d *net.Dialer, cfg *tls.Config) (net.Conn, error) {
		conn, err := dial(ctx, dst, d, cfg)
		if err == nil {
			w.mu.Lock()
			w.by[dst] = conn.RemoteAddr().Network()
			w.mu.Unlock()
		}
		return conn, err
	}
}

func (w *ways) print() {
	w.mu.Lock()
	defer w.mu.Unlock()
	var lines []string
	for node, network := range w.by {
		lines = append(lines, node+" by "+network)
	}
	slices.Sort(lines)
	for _, line := range lines {
		fmt.Println(line)
	}
}
