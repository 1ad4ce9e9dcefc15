package main

import (
	"bufio"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

// A server is a Valkey of the soak's own, with the same port for TCP and RDMA.
type server struct {
	name, addr string
	program    string
	args       []string
	log        string
	died       func(*server) // called when it ends and nobody killed it

	mu     sync.Mutex
	cmd    *exec.Cmd
	ended  chan struct{}
	killed atomic.Bool
}

func newServer(name, dir, host string, port int, died func(*server), args ...string) (*server, error) {
	s := &server{name: name, addr: net.JoinHostPort(host, strconv.Itoa(port)), died: died,
		program: filepath.Join(os.Getenv("VALKEYRDMA_VALKEY_DIR"), "valkey-server")}
	home := filepath.Join(dir, name)
	s.log = home + ".log"
	s.args = append([]string{"--bind", host, "--port", strconv.Itoa(port), "--rdma-bind", host, "--rdma-port", strconv.Itoa(port),
		"--protected-mode", "no", "--dir", home, "--logfile", s.log, "--save", ""}, args...)
	return s, os.Mkdir(home, 0o755)
}

// start returns when the server answers and has loaded what it had.
func (s *server) start() error {
	_ = os.Rename(s.log, s.log+".before")
	cmd := exec.Command(s.program, s.args...)
	// A soak that dies takes its servers with it, and a signal from the terminal is for the soak alone.
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	if err := cmd.Start(); err != nil {
		return err
	}
	ended := make(chan struct{})
	s.mu.Lock()
	s.cmd, s.ended = cmd, ended
	s.mu.Unlock()
	s.killed.Store(false)
	go func() {
		_ = cmd.Wait()
		close(ended)
		if !s.killed.Load() {
			s.died(s)
		}
	}()
	return wait(90*time.Second, s.name+" to accept connections", func() (bool, error) {
		select {
		case <-ended:
			return false, fmt.Errorf("%s has ended: %s", s.name, s.tail())
		default:
		}
		log, _ := os.ReadFile(s.log)
		if !strings.Contains(string(log), "Ready to accept connections rdma") {
			return false, nil
		}
		pong, err := s.do("PING")
		return err == nil && pong == "PONG", nil
	})
}

// kill is kill -9.
func (s *server) kill() {
	s.killed.Store(true)
	s.signal(syscall.SIGKILL)
	s.mu.Lock()
	ended := s.ended
	s.mu.Unlock()
	if ended != nil {
		<-ended
	}
}

func (s *server) signal(sig syscall.Signal) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.cmd != nil {
		_ = s.cmd.Process.Signal(sig)
	}
}

func (s *server) pid() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.cmd.Process.Pid
}

// tail returns the end of the log.
func (s *server) tail() string {
	log, _ := os.ReadFile(s.log)
	return "the end of its log:\n" + string(log[max(0, len(log)-6000):])
}

// do runs a command over a TCP connection of its own, which does not depend on what RDMA is put through.
func (s *server) do(args ...string) (string, error) {
	c, err := net.DialTimeout("tcp", s.addr, 10*time.Second)
	if err != nil {
		return "", err
	}
	defer c.Close()
	_ = c.SetDeadline(time.Now().Add(30 * time.Second))
	var b strings.Builder
	fmt.Fprintf(&b, "*%d\r\n", len(args))
	for _, a := range args {
		fmt.Fprintf(&b, "$%d\r\n%s\r\n", len(a), a)
	}
	if _, err := io.WriteString(c, b.String()); err != nil {
		return "", err
	}
	r := bufio.NewReader(c)
	line, err := r.ReadString('\n')
	if err != nil {
		return "", err
	}
	line = strings.TrimSuffix(line, "\r\n")
	switch line[0] {
	case '-':
		return "", errors.New(line[1:])
	case '$':
		n, err := strconv.Atoi(line[1:])
		if err != nil || n < 0 {
			return "", err
		}
		bulk := make([]byte, n)
		_, err = io.ReadFull(r, bulk)
		return string(bulk), err
	}
	return line[1:], nil
}

// info returns a field of INFO, or of CLUSTER INFO.
func (s *server) info(field string, command ...string) string {
	text, _ := s.do(command...)
	for line := range strings.Lines(text) {
		if name, value, ok := strings.Cut(strings.TrimSpace(line), ":"); ok && name == field {
			return value
		}
	}
	return ""
}

func (s *server) role() string    { return s.info("role", "INFO", "replication") }
func (s *server) clusterOK() bool { return s.info("cluster_state", "CLUSTER", "INFO") == "ok" }
func (s *server) isReplicaOK() bool {
	return s.info("master_link_status", "INFO", "replication") == "up"
}

// clients returns the identities of the soak's RDMA connections to the server.
func (s *server) clients() (ids []string) {
	text, _ := s.do("CLIENT", "LIST")
	for line := range strings.Lines(text) {
		if id, _, ok := strings.Cut(strings.TrimPrefix(line, "id="), " "); ok && strings.Contains(line, " name="+clientName+" ") {
			ids = append(ids, id)
		}
	}
	return ids
}

// masterOf returns the index of the replica's master among servers, or -1.
func masterOf(servers []*server, replica *server) int {
	if replica.role() != "slave" {
		return -1
	}
	addr := net.JoinHostPort(replica.info("master_host", "INFO", "replication"), replica.info("master_port", "INFO", "replication"))
	for i, s := range servers {
		if s.addr == addr {
			return i
		}
	}
	return -1
}

// formCluster makes a cluster of three masters and three replicas.
func formCluster(servers []*server) error {
	args := []string{"--cluster", "create"}
	for _, s := range servers {
		args = append(args, s.addr)
	}
	cli := filepath.Join(filepath.Dir(servers[0].program), "valkey-cli")
	out, err := exec.Command(cli, append(args, "--cluster-replicas", "1", "--cluster-yes")...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("valkey-cli --cluster create: %w\n%s", err, out)
	}
	return wait(2*time.Minute, "the cluster to be complete", func() (bool, error) {
		replicas := 0
		for _, s := range servers {
			if !s.clusterOK() {
				return false, nil
			}
			if s.isReplicaOK() {
				replicas++
			}
		}
		return replicas == 3, nil
	})
}

// wait waits until done says so, or fails.
func wait(limit time.Duration, what string, done func() (bool, error)) error {
	for begin := time.Now(); ; {
		ok, err := done()
		if err != nil || ok {
			return err
		}
		if time.Since(begin) > limit {
			return fmt.Errorf("waited %v for %s", limit, what)
		}
		time.Sleep(200 * time.Millisecond)
	}
}

// freePorts returns the first of n+1 ports in a row that nothing listens on, nor on those of the cluster's bus above them.
func freePorts(host string, n int) (int, error) {
	for first := 7400; first < 9400; first += 100 {
		free := true
		for port := first; port < first+n && free; port++ {
			for _, p := range []int{port, port + 10000} {
				ln, err := net.Listen("tcp", net.JoinHostPort(host, strconv.Itoa(p)))
				if err != nil {
					free = false
					break
				}
				_ = ln.Close()
			}
		}
		if free {
			return first, nil
		}
	}
	return 0, errors.New("no free ports")
}
