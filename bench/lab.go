package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/valkeyrdma/valkeyrdma/internal/servers"
)

// A lab is where the bench runs: an address that RDMA and TCP share, and Valkey's programs.
type lab struct {
	host   string // IP address
	device string
	dir    string // for logs; goes at the end
	full   bool

	cpuOfStart map[string]time.Duration // of valkey-benchmark, see cClient
}

const labHint = "run it with scripts/bench, or below scripts/lab"

func newLab(full bool) (*lab, error) {
	l := &lab{
		device:     os.Getenv("VALKEYRDMA_DEVICE"),
		full:       full,
		cpuOfStart: make(map[string]time.Duration),
	}
	addr := os.Getenv("VALKEYRDMA_RDMA_ADDR")
	if addr == "" || os.Getenv("VALKEYRDMA_VALKEY_DIR") == "" {
		return nil, errors.New("VALKEYRDMA_RDMA_ADDR or VALKEYRDMA_VALKEY_DIR is not set: " + labHint)
	}
	var err error
	if l.host, _, err = net.SplitHostPort(addr); err != nil {
		return nil, err
	}
	if l.dir, err = os.MkdirTemp("", "valkeyrdma-bench-"); err != nil {
		return nil, err
	}
	return l, nil
}

func (l *lab) close() { _ = os.RemoveAll(l.dir) }

// A server is a Valkey of one contestant, which listens on the same port for TCP and for RDMA.
type server struct {
	*servers.Server

	// Its CPU time when its contestant last left it.
	leftAt  time.Time
	leftCPU time.Duration
}

// startServer starts a Valkey that has nothing to do but to answer. It ends with ctx, if not before.
func (l *lab) startServer(ctx context.Context, args ...string) (*server, error) {
	port, err := servers.NewPort(l.host)
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp(l.dir, "server-")
	if err != nil {
		return nil, err
	}
	s := &server{Server: servers.New(l.host, port, port, dir, args...)}
	if err := s.Begin(); err != nil {
		return nil, err
	}
	context.AfterFunc(ctx, s.Kill)
	if err := s.Await(30 * time.Second); err != nil {
		s.Kill()
		return nil, err
	}
	s.left()
	return s, nil
}

func lastLine(s string) string {
	s = strings.TrimSpace(s)
	return s[strings.LastIndexByte(s, '\n')+1:]
}

// left notes that nobody makes the server work from here on.
func (s *server) left() {
	s.leftAt, s.leftCPU = time.Now(), s.cpu()
}

// busy says whether the server has worked since left although nobody made it. One whose client is gone while a window was
// full may do so for ever, and would be slow for the next client.
func (s *server) busy() bool {
	idle := time.Since(s.leftAt)
	return idle > 100*time.Millisecond && s.cpu()-s.leftCPU > idle/4
}

// cpu is the CPU time of the server's main thread, 0 where the kernel does not tell.
func (s *server) cpu() time.Duration {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/schedstat", s.Pid()))
	if err != nil {
		return 0
	}
	first, _, _ := strings.Cut(string(b), " ")
	ns, _ := strconv.ParseInt(first, 10, 64)
	return time.Duration(ns)
}

// theKey is the key of all GETs and SETs, because it is the one that valkey-benchmark uses when told no range of random keys.
const theKey = "key:__rand_int__"

// fill sets theKey to a value of size bytes.
func (s *server) fill(size int) error {
	c, err := net.Dial("tcp", s.Addr)
	if err != nil {
		return err
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(30 * time.Second)); err != nil {
		return err
	}
	return newRaw(c).roundTrip(setCommand(size), okReply)
}
