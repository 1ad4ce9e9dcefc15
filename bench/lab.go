package main

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"time"
)

// A lab is where the bench runs: an address that RDMA and TCP share, and Valkey's programs.
type lab struct {
	host   string // IP address
	device string
	valkey string // directory of Valkey's programs
	dir    string // for logs; goes at the end
	port   atomic.Int32
	full   bool

	cpuOfStart map[string]time.Duration // of valkey-benchmark, see cClient
}

const labHint = "run it with scripts/bench, or below scripts/lab"

func newLab(full bool) (*lab, error) {
	l := &lab{
		device:     os.Getenv("VALKEYRDMA_DEVICE"),
		valkey:     os.Getenv("VALKEYRDMA_VALKEY_DIR"),
		full:       full,
		cpuOfStart: make(map[string]time.Duration),
	}
	addr := os.Getenv("VALKEYRDMA_RDMA_ADDR")
	if addr == "" || l.valkey == "" {
		return nil, errors.New("VALKEYRDMA_RDMA_ADDR or VALKEYRDMA_VALKEY_DIR is not set: " + labHint)
	}
	var err error
	if l.host, _, err = net.SplitHostPort(addr); err != nil {
		return nil, err
	}
	if l.dir, err = os.MkdirTemp("", "valkeyrdma-bench-"); err != nil {
		return nil, err
	}
	l.port.Store(16400)
	return l, nil
}

func (l *lab) close() { _ = os.RemoveAll(l.dir) }

// freePort returns a port that nothing listens on. RDMA has a port space of its own, and only who binds there can tell: each
// is used once.
func (l *lab) freePort() (int, error) {
	for range 1000 {
		port := int(l.port.Add(1))
		ln, err := net.Listen("tcp", net.JoinHostPort(l.host, strconv.Itoa(port)))
		if err == nil {
			return port, ln.Close()
		}
	}
	return 0, errors.New("no free port")
}

// program returns the path of one of Valkey's programs.
func (l *lab) program(name string) string { return filepath.Join(l.valkey, name) }

// A server is a Valkey of one contestant, which listens on the same port for TCP and for RDMA.
type server struct {
	addr string // host:port
	port int
	cmd  *exec.Cmd
	log  string
	done chan struct{} // closed when it has ended

	// Its CPU time when its contestant last left it.
	leftAt  time.Time
	leftCPU time.Duration
}

// startServer starts a Valkey that has nothing to do but to answer.
func (l *lab) startServer(ctx context.Context, args ...string) (*server, error) {
	port, err := l.freePort()
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp(l.dir, "server-")
	if err != nil {
		return nil, err
	}
	s := &server{addr: net.JoinHostPort(l.host, strconv.Itoa(port)), port: port, log: filepath.Join(dir, "log"),
		done: make(chan struct{})}
	s.cmd = exec.CommandContext(ctx, l.program("valkey-server"), append([]string{
		"--bind", l.host, "--port", strconv.Itoa(port), "--rdma-bind", l.host, "--rdma-port", strconv.Itoa(port),
		"--save", "", "--appendonly", "no", "--protected-mode", "no", "--dir", dir, "--logfile", s.log}, args...)...)
	if err := s.cmd.Start(); err != nil {
		return nil, err
	}
	go func() {
		_ = s.cmd.Wait()
		close(s.done)
	}()
	deadline := time.Now().Add(30 * time.Second)
	for {
		log, _ := os.ReadFile(s.log)
		// Dialled earlier, the server refuses.
		if strings.Contains(string(log), "Ready to accept connections rdma") &&
			strings.Contains(string(log), "Ready to accept connections tcp") {
			s.left()
			return s, nil
		}
		select {
		case <-s.done:
			return nil, fmt.Errorf("valkey-server has ended: %s", lastLine(string(log)))
		case <-time.After(10 * time.Millisecond):
		}
		if time.Now().After(deadline) {
			s.stop()
			return nil, fmt.Errorf("valkey-server is not ready: %s", lastLine(string(log)))
		}
	}
}

func lastLine(s string) string {
	s = strings.TrimSpace(s)
	return s[strings.LastIndexByte(s, '\n')+1:]
}

func (s *server) stop() {
	_ = s.cmd.Process.Kill()
	<-s.done
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

func (s *server) ended() bool {
	select {
	case <-s.done:
		return true
	default:
		return false
	}
}

// cpu is the CPU time of the server's main thread, 0 where the kernel does not tell.
func (s *server) cpu() time.Duration {
	b, err := os.ReadFile(fmt.Sprintf("/proc/%d/schedstat", s.cmd.Process.Pid))
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
	c, err := net.Dial("tcp", s.addr)
	if err != nil {
		return err
	}
	defer c.Close()
	if err := c.SetDeadline(time.Now().Add(30 * time.Second)); err != nil {
		return err
	}
	return newRaw(c).roundTrip(setCommand(size), okReply)
}
