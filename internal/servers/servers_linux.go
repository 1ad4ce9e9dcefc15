// Package servers runs Valkeys for tests, for the soak and for the bench, inside the laboratory (scripts/lab).
package servers

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/valkey-io/valkey-go"
)

// A Server is a Valkey process. Its methods may be called by several goroutines, except that Begin, Await and Kill are for one.
type Server struct {
	Addr    string // of TCP, and that by which clients and nodes know it
	program string
	args    []string
	log     string // its log file
	ready   string // what the log says when it accepts connections
	past    int    // how long the log was before the process started

	mu     sync.Mutex
	cmd    *exec.Cmd
	ended  chan struct{} // closed when the process has ended
	killed bool
	died   func()

	adminMu sync.Mutex
	admin   valkey.Client // over TCP, so that it works whatever state RDMA is in
}

// Program returns the path of a program of Valkey's, such as valkey-cli.
func Program(name string) string { return filepath.Join(os.Getenv("VALKEYRDMA_VALKEY_DIR"), name) }

// New describes a Valkey that listens on TCP and on RDMA. dir, which must be there, gets its log and its data.
func New(host string, port, rdmaPort int, dir string, args ...string) *Server {
	s := NewPlain(host, port, dir, "Ready to accept connections rdma", append([]string{
		"--bind", host, "--port", strconv.Itoa(port), "--rdma-bind", host, "--rdma-port", strconv.Itoa(rdmaPort),
		"--protected-mode", "no", "--dir", dir, "--save", ""}, args...)...)
	s.args = append(s.args, "--logfile", s.log)
	return s
}

// NewPlain describes a valkey-server with just these arguments, which listens at that port of TCP and writes dir/log.
func NewPlain(host string, port int, dir, ready string, args ...string) *Server {
	return &Server{Addr: net.JoinHostPort(host, strconv.Itoa(port)), log: filepath.Join(dir, "log"), ready: ready, args: args,
		program: Program("valkey-server")}
}

// OnDeath has f called when the process ends and Kill was not called.
func (s *Server) OnDeath(f func()) { s.died = f }

// Begin starts the process, for the first time or again.
func (s *Server) Begin() error {
	log, _ := os.ReadFile(s.log)
	s.past = len(log)
	cmd := exec.Command(s.program, s.args...)
	// A signal from the terminal is for the parent alone, and should that die, so does the server.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	begun, ended := make(chan error), make(chan struct{})
	go func() {
		runtime.LockOSThread() // the kernel takes the end of the thread that starts a process for that of its parent
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		if err == nil {
			s.mu.Lock()
			s.cmd, s.ended, s.killed = cmd, ended, false
			s.mu.Unlock()
		}
		begun <- err
		if err != nil {
			return
		}
		_ = cmd.Wait()
		close(ended)
		s.mu.Lock()
		unexpected := !s.killed
		s.mu.Unlock()
		if unexpected && s.died != nil {
			s.died()
		}
	}()
	return <-begun
}

// Await waits until the process accepts connections.
func (s *Server) Await(limit time.Duration) error {
	return Wait(limit, s.Addr+" to accept connections", func() (bool, error) {
		if s.Ended() {
			return false, fmt.Errorf("%s has ended:\n%s", s.Addr, s.LogTail())
		}
		log, _ := os.ReadFile(s.log)
		return strings.Contains(string(log[min(s.past, len(log)):]), s.ready), nil
	})
}

// Kill ends the process as kill -9 does, also one that is stopped.
func (s *Server) Kill() {
	s.mu.Lock()
	s.killed = true
	ended := s.ended
	s.mu.Unlock()
	if ended != nil {
		s.Signal(syscall.SIGKILL)
		<-ended
	}
}

// Ended says whether there was a process and it has ended.
func (s *Server) Ended() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	select {
	case <-s.ended:
		return true
	default:
		return false
	}
}

// Signal sends the process a signal, if there is one.
func (s *Server) Signal(sig syscall.Signal) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.cmd != nil {
		_ = s.cmd.Process.Signal(sig)
	}
}

// Pid is that of the process begun last.
func (s *Server) Pid() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.cmd.Process.Pid
}

// LogTail returns the end of the log.
func (s *Server) LogTail() string {
	log, err := os.ReadFile(s.log)
	if err != nil {
		return err.Error()
	}
	return string(log[max(0, len(log)-5000):])
}

// patience is how long a command may take: more than the 50 s for which rxe may hold a server up (docs/features.md).
const patience = 80 * time.Second

// Message runs a command, over TCP.
func (s *Server) Message(args ...string) (valkey.ValkeyMessage, error) {
	admin, err := s.connect()
	if err != nil {
		return valkey.ValkeyMessage{}, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	return admin.Do(ctx, admin.B().Arbitrary(args...).Build()).ToMessage()
}

func (s *Server) connect() (valkey.Client, error) {
	s.adminMu.Lock()
	defer s.adminMu.Unlock()
	if s.admin == nil {
		admin, err := valkey.NewClient(valkey.ClientOption{InitAddress: []string{s.Addr}, ForceSingleClient: true, DisableCache: true,
			ConnWriteTimeout: patience})
		if err != nil {
			return nil, err
		}
		s.admin = admin
	}
	return s.admin, nil
}

// HangUp closes the connection that Message and Do have made, which the next one makes again.
func (s *Server) HangUp() {
	s.adminMu.Lock()
	defer s.adminMu.Unlock()
	if s.admin != nil {
		s.admin.Close()
		s.admin = nil
	}
}

// Do runs a command, over TCP, and returns its reply as text.
func (s *Server) Do(args ...string) (string, error) {
	m, err := s.Message(args...)
	if err != nil {
		return "", err
	}
	if n, err := m.ToInt64(); err == nil {
		return strconv.FormatInt(n, 10), nil
	}
	if text, err := m.ToString(); err == nil {
		return strings.TrimPrefix(text, "txt:"), nil // which marks RESP3's verbatim strings
	}
	return m.String(), nil
}

// Info returns one field of INFO ALL, or of what command returns, such as CLUSTER INFO; "" if it is not to be had.
func (s *Server) Info(field string, command ...string) string {
	if len(command) == 0 {
		command = []string{"INFO", "ALL"}
	}
	text, _ := s.Do(command...)
	for line := range strings.Lines(text) {
		if v, ok := strings.CutPrefix(line, field+":"); ok {
			return strings.TrimSpace(v)
		}
	}
	return ""
}

// Wait waits until done says so, or fails.
func Wait(limit time.Duration, what string, done func() (bool, error)) error {
	for begin := time.Now(); ; time.Sleep(50 * time.Millisecond) {
		ok, err := done()
		if err != nil || ok {
			return err
		}
		if time.Since(begin) > limit {
			return fmt.Errorf("waited in vain for %s, for %v", what, limit)
		}
	}
}

var ports = struct {
	sync.Mutex
	last int
}{last: 7000}

// NewPort returns a port that is free for TCP here, as is the one 10000 above it, for the cluster bus. No two calls return the
// same, so that no server waits for what the kernel remembers of another. The ports 1000 above are for RDMA.
func NewPort(host string) (int, error) {
	ports.Lock()
	defer ports.Unlock()
	free := func(port int) bool {
		l, err := net.Listen("tcp", net.JoinHostPort(host, strconv.Itoa(port)))
		if err == nil {
			_ = l.Close()
		}
		return err == nil
	}
	for ports.last < 7999 {
		ports.last++
		if free(ports.last) && free(ports.last+10000) {
			return ports.last, nil
		}
	}
	return 0, errors.New("no free ports")
}
