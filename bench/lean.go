package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"math"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"github.com/valkeyrdma/valkeyrdma/bench/internal/peer"
	"github.com/valkeyrdma/valkeyrdma/internal/servers"
	"github.com/valkeyrdma/valkeyrdma/internal/tune"
)

// Contestants of the cases against the lean server of internal/peer, which is a process of its own, this program once more.
const (
	rawOut   = "raw-rdma-out" // a stream to the server
	rawIn    = "raw-rdma-in"  // a stream from the server
	writeBW  = "ib_write_bw"
	writeLat = "ib_write_lat"
)

// serveLean is the server's process. spec is what leanServer makes of its options.
func serveLean(spec string) error {
	var (
		addr       string
		opt        peer.Options
		spin, copy int
	)
	if _, err := fmt.Sscanf(spec, "%s window %d buffers %d spin %d copy %d", &addr, &opt.Window, &opt.Buffers, &spin, &copy); err != nil {
		return fmt.Errorf("-serve %q: %w", spec, err)
	}
	opt.Spin, opt.Copy = time.Duration(spin), copy != 0
	host, service, err := net.SplitHostPort(addr)
	if err != nil {
		return err
	}
	port, err := strconv.Atoi(service)
	if err != nil {
		return err
	}
	return peer.Serve(host, port, opt, func() { fmt.Println("ready") })
}

type leanServer struct {
	addr string
	cmd  *exec.Cmd
}

func (l *lab) startLean(ctx context.Context, opt peer.Options) (*leanServer, error) {
	port, err := servers.NewPort(l.host)
	if err != nil {
		return nil, err
	}
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	s := &leanServer{addr: net.JoinHostPort(l.host, strconv.Itoa(port))}
	copies := 0
	if opt.Copy {
		copies = 1
	}
	s.cmd = exec.CommandContext(ctx, self, "-serve",
		fmt.Sprintf("%s window %d buffers %d spin %d copy %d", s.addr, opt.Window, opt.Buffers, opt.Spin, copies))
	s.cmd.Stderr = os.Stderr
	out, err := s.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := s.cmd.Start(); err != nil {
		return nil, err
	}
	if line, err := bufio.NewReader(out).ReadString('\n'); err != nil || strings.TrimSpace(line) != "ready" {
		s.stop()
		return nil, fmt.Errorf("the lean server is not ready: %q: %w", line, err)
	}
	return s, nil
}

func (s *leanServer) stop() {
	_ = s.cmd.Process.Kill()
	_ = s.cmd.Wait()
}

// A leanClient has a connection to a lean server of its own.
type leanClient struct {
	row     row // what its rows have in common
	server  *leanServer
	c       net.Conn
	request []byte
	reply   []byte
	work    func(*leanClient, time.Duration) ([]row, error)
}

// openLean connects to a lean server with these options. window is that of the client.
func openLean(r row, opt peer.Options, window int, work func(*leanClient, time.Duration) ([]row, error)) openFunc {
	return func(ctx context.Context, l *lab, name string) (contestant, error) {
		dial := rawDialer(name, window)
		s, err := l.startLean(ctx, opt)
		if err != nil {
			return nil, err
		}
		c := &leanClient{row: r, server: s, work: work}
		// In the study of edges a row says how many buffers the receiving side has. Where that is not the server, it is us.
		tune.OneReceiveBuffer.Store(window != 0 && r.Buffers == 1)
		c.c, err = dial(ctx, s.addr)
		tune.OneReceiveBuffer.Store(false)
		if err != nil {
			s.stop()
			return nil, err
		}
		return c, nil
	}
}

func (c *leanClient) close() {
	_ = c.c.Close()
	c.server.stop()
}

func (c *leanClient) measure(d time.Duration) ([]row, error) { return c.work(c, d) }

// call sends a request of so many bytes and takes a reply of so many, which comes in messages of that size.
func (c *leanClient) call(request, reply, message int) error {
	if err := c.send(request, request, reply, message); err != nil {
		return err
	}
	return c.receive(reply, min(reply, 1<<20))
}

// send writes a request in pieces of that size.
func (c *leanClient) send(request, piece, reply, message int) error {
	if request < peer.HeaderSize {
		return errors.New("a request without room for its header")
	}
	if len(c.request) < piece {
		c.request = payload(piece)
	}
	peer.Header(c.request, request, reply, message)
	for request > 0 {
		n := min(request, piece)
		if _, err := c.c.Write(c.request[:n]); err != nil {
			return err
		}
		request -= n
	}
	return nil
}

// receive takes so many bytes, with Reads of at most piece.
func (c *leanClient) receive(reply, piece int) error {
	if len(c.reply) < piece {
		c.reply = make([]byte, piece)
	}
	for reply > 0 {
		n, err := c.c.Read(c.reply[:min(reply, piece)])
		if err == nil && n == 0 {
			err = io.ErrNoProgress
		}
		if err != nil {
			return err
		}
		reply -= n
	}
	return nil
}

// pingPong times half round trips, as ib_write_lat does.
func pingPong(c *leanClient, d time.Duration) ([]row, error) {
	size := c.row.Size
	t, err := repeat(1, d, 10, func(int) error { return c.call(size, size, size) })
	if err != nil {
		return nil, err
	}
	r := c.row
	r.setTiming(t)
	r.BytesPS = math.NaN()
	for _, x := range []*float64{&r.P50, &r.P99, &r.P999, &r.Max} {
		*x /= 2
	}
	return []row{r}, nil
}

// streamTotal is how many bytes of messages of a size are one operation of a stream, at the end of which it waits for the
// server: so many that the waiting does not count.
func streamTotal(size int) int { return min(max(2048*size, 64<<10), 16<<20) }

// stream times streams to or from the server. What it counts are messages, or what would be messages if the library did not
// join or divide them.
func stream(out bool) func(*leanClient, time.Duration) ([]row, error) {
	return func(c *leanClient, d time.Duration) ([]row, error) {
		size := c.row.Size
		total := streamTotal(size)
		t, err := repeat(1, d, 2, func(int) error {
			if out {
				if err := c.send(total, max(size, peer.HeaderSize), 64, 64); err != nil {
					return err
				}
				return c.receive(64, 64)
			}
			if err := c.send(64, 64, total, size); err != nil {
				return err
			}
			return c.receive(total, max(size, 64<<10))
		})
		if err != nil {
			return nil, err
		}
		t.PerOp = total / size
		r := c.row
		r.setTiming(t)
		// The latency of a whole stream tells nothing.
		r.setLatencies(nil)
		return []row{r}, nil
	}
}
