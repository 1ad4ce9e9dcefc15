//go:build linux && cgo

package valkeyrdma

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"runtime/pprof"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/valkeyrdma/valkeyrdma/internal/rdmatest"
)

// Integration tests run inside the laboratory (scripts/lab), which tells them where RDMA and Valkey are.

// labAddr returns a variable of the laboratory, or skips. "make test" counts a skip inside the laboratory as a failure.
func labAddr(t testing.TB, name string) string {
	t.Helper()
	addr := os.Getenv(name)
	if addr == "" {
		t.Skipf("needs RDMA and a Valkey server (%s is not set): run make test, which brings both", name)
	}
	return addr
}

func rdmaAddr(t testing.TB) string { return labAddr(t, "VALKEYRDMA_RDMA_ADDR") }

// watched keeps the connections of a test for the watchdog.
type watched struct {
	mu    sync.Mutex
	conns []*conn
}

func (w *watched) add(c net.Conn) *conn {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.conns = append(w.conns, c.(*conn))
	return c.(*conn)
}

// watchdog ends the process, after it has printed all goroutines and the state of the test's connections, if the
// test is not over within limit: a hang is the worst bug, and a bare timeout does not explain it.
func watchdog(t testing.TB, limit time.Duration) *watched {
	t.Helper()
	if v, err := time.ParseDuration(os.Getenv("VALKEYRDMA_WATCHDOG")); err == nil { // scripts/guards has no time for hangs
		limit = v
	}
	w := new(watched)
	timer := time.AfterFunc(limit, func() {
		fmt.Fprintf(os.Stderr, "\nWATCHDOG: %s is not over after %v\n", t.Name(), limit)
		_ = pprof.Lookup("goroutine").WriteTo(os.Stderr, 2)
		w.mu.Lock()
		for i, c := range w.conns {
			state := make(chan string, 1)
			go func() { state <- fmt.Sprintf("closed %v, %+v", c.closed.Load(), c.Stats()) }()
			select {
			case s := <-state:
				fmt.Fprintf(os.Stderr, "connection %d: %s\n", i, s)
			case <-time.After(time.Second):
				fmt.Fprintf(os.Stderr, "connection %d: its locks are taken\n", i)
			}
		}
		os.Exit(3)
	})
	t.Cleanup(func() { timer.Stop() })
	return w
}

// dialLab connects to the laboratory's Valkey.
func dialLab(t testing.TB, w *watched) *conn {
	t.Helper()
	return dialTo(t, w, rdmaAddr(t))
}

func dialTo(t testing.TB, w *watched, addr string) *conn {
	t.Helper()
	c, err := DialCtxFn(context.Background(), addr, &net.Dialer{Timeout: 10 * time.Second}, nil)
	require.NoError(t, err)
	t.Cleanup(func() { _ = c.Close() })
	return w.add(c)
}

// command sends one command in RESP and returns the reply's payload: the text of a simple reply, or the bulk string.
func command(t testing.TB, c net.Conn, r *bufio.Reader, args ...string) string {
	t.Helper()
	_, err := io.WriteString(c, resp(args...))
	require.NoError(t, err)
	return reply(t, r)
}

func resp(args ...string) string {
	var b strings.Builder
	fmt.Fprintf(&b, "*%d\r\n", len(args))
	for _, a := range args {
		fmt.Fprintf(&b, "$%d\r\n", len(a))
		b.WriteString(a)
		b.WriteString("\r\n")
	}
	return b.String()
}

func reply(t testing.TB, r *bufio.Reader) string {
	t.Helper()
	s, err := readReply(r)
	require.NoError(t, err)
	return s
}

func readReply(r *bufio.Reader) (string, error) {
	line, err := r.ReadString('\n')
	if err != nil {
		return "", err
	}
	line = strings.TrimSuffix(line, "\r\n")
	if !strings.HasPrefix(line, "$") {
		return line, nil
	}
	n, err := strconv.Atoi(line[1:])
	if err != nil || n < 0 {
		return line, err
	}
	buf := make([]byte, n+2)
	if _, err := io.ReadFull(r, buf); err != nil {
		return "", err
	}
	return string(buf[:n]), nil
}

// serverDo runs a command over TCP, so that a test can act on the server while RDMA is in the state under test.
func serverDo(t testing.TB, addr string, args ...string) string {
	t.Helper()
	c, err := net.Dial("tcp", addr)
	require.NoError(t, err)
	defer c.Close()
	require.NoError(t, c.SetDeadline(time.Now().Add(30*time.Second)))
	return command(t, c, bufio.NewReader(c), args...)
}

// startServer starts a Valkey of the test's own beside the laboratory's, and returns its address, the same for RDMA and TCP.
func startServer(t testing.TB, args ...string) string {
	t.Helper()
	host, _, err := net.SplitHostPort(rdmaAddr(t))
	require.NoError(t, err)
	dir := t.TempDir()
	const port = "6400"
	addr := net.JoinHostPort(host, port)
	cmd := exec.Command(labAddr(t, "VALKEYRDMA_VALKEY_DIR")+"/valkey-server", append([]string{
		"--bind", host, "--port", port, "--rdma-bind", host, "--rdma-port", port, "--save", "", "--dir", dir,
		"--logfile", dir + "/log", "--enable-debug-command", "yes"}, args...)...)
	require.NoError(t, cmd.Start())
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if t.Failed() {
			log, _ := os.ReadFile(dir + "/log")
			t.Logf("the server's log:\n%s", log)
		}
	})
	require.Eventually(t, func() bool {
		log, _ := os.ReadFile(dir + "/log")
		return strings.Contains(string(log), "Ready to accept connections rdma")
	}, 20*time.Second, 50*time.Millisecond)
	return addr
}

// warm makes the first dial of the process, which opens what stays open for its life: the libraries, the device.
func warm(t testing.TB) {
	t.Helper()
	c, err := DialCtxFn(context.Background(), rdmaAddr(t), nil, nil)
	require.NoError(t, err)
	require.NoError(t, c.Close())
}

// openFDs counts the process's file descriptors.
func openFDs(t testing.TB) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	require.NoError(t, err)
	return len(entries)
}

// threads counts the process's threads.
func threads(t testing.TB) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/task")
	require.NoError(t, err)
	return len(entries)
}

// rdmaResources counts the process's QPs, CQs, MRs, PDs and connection identifiers.
func rdmaResources(t testing.TB) int {
	t.Helper()
	counts, err := rdmatest.Resources(os.Getpid())
	require.NoError(t, err)
	total := 0
	for _, n := range counts {
		total += n
	}
	return total
}
