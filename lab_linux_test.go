//go:build linux && cgo

package valkeyrdma

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/valkeyrdma/valkeyrdma/internal/labtest"
	"github.com/valkeyrdma/valkeyrdma/internal/rdmatest"
	"github.com/valkeyrdma/valkeyrdma/internal/servers"
)

// Integration tests run inside the laboratory (scripts/lab), which tells them where RDMA and Valkey are.

func rdmaAddr(t testing.TB) string { return labtest.Var(t, "VALKEYRDMA_RDMA_ADDR") }

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

// watchdog ends the process if the test is not over within limit, after it has printed all goroutines and the state of the
// test's connections.
func watchdog(t testing.TB, limit time.Duration) *watched {
	t.Helper()
	w := new(watched)
	labtest.Watchdog(t, limit, w.print)
	return w
}

func (w *watched) print() {
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
}

// abandonedDials is how many dials were given up and go on.
func abandonedDials() (n int) {
	pending.mu.Lock()
	defer pending.mu.Unlock()
	for _, to := range pending.to {
		n += len(to.abandoned)
	}
	return n
}

// unsettledDials are those, what came of them and is to be had, and the pauses after them.
func unsettledDials() (n int) {
	pending.mu.Lock()
	defer pending.mu.Unlock()
	for _, to := range pending.to {
		n += len(to.abandoned) + to.kept + to.pauses
	}
	return n
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

// startServer starts a Valkey of the test's own beside the laboratory's, with the same port for RDMA and TCP.
func startServer(t testing.TB, args ...string) *servers.Server {
	t.Helper()
	host, _, err := net.SplitHostPort(rdmaAddr(t))
	require.NoError(t, err)
	port, err := servers.NewPort(host)
	require.NoError(t, err)
	s := servers.New(host, port, port, t.TempDir(), append([]string{"--enable-debug-command", "yes"}, args...)...)
	require.NoError(t, s.Begin())
	t.Cleanup(func() {
		s.Kill()
		if t.Failed() {
			t.Logf("the end of the server's log:\n%s", s.LogTail())
		}
	})
	require.NoError(t, s.Await(time.Minute))
	return s
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
