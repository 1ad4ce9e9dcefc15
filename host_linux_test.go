//go:build linux && cgo

package valkeyrdma

import (
	"bufio"
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
	"github.com/valkeyrdma/valkeyrdma/internal/labtest"
)

// Hosts that lack something. Each test runs this test binary again as a child in a world of its own, which dials once and
// says what came of it.

const childAddr = "VALKEYRDMA_TEST_CHILD"

func TestMain(m *testing.M) {
	if addr := os.Getenv(childAddr); addr != "" {
		child(addr)
		return
	}
	os.Exit(m.Run())
}

func child(addr string) {
	c, err := DialCtxFn(context.Background(), addr, &net.Dialer{Timeout: 10 * time.Second}, nil)
	if err == nil {
		defer c.Close()
		if _, err = io.WriteString(c, "PING\r\n"); err == nil {
			var line string
			line, err = bufio.NewReader(c).ReadString('\n')
			fmt.Printf("answer: %q\n", line)
		}
		if err == nil && os.Getenv("VALKEYRDMA_TEST_LARGE") != "" {
			err = childLarge(c)
		}
	}
	for name, is := range map[string]error{"ErrNoLibrary": ErrNoLibrary, "ErrNoDevice": ErrNoDevice,
		"ErrLockedMemory": ErrLockedMemory} {
		if errors.Is(err, is) {
			fmt.Printf("is: %s\n", name)
		}
	}
	fmt.Printf("error: %v\n", err)
}

// childLarge takes a value of several windows there and back.
func childLarge(c net.Conn) error {
	r := bufio.NewReader(c)
	if _, err := io.WriteString(c, resp("SET", "child", strings.Repeat("x", 5<<20))+resp("GET", "child")); err != nil {
		return err
	}
	if s, err := readReply(r); err != nil || s != "+OK" {
		return fmt.Errorf("%q, %w", s, err)
	}
	value, err := readReply(r)
	if err == nil {
		fmt.Printf("large: %d bytes, locked less than 1.5 MiB: %v\n", len(value), c.(*conn).Stats().LockedBytes < 3<<19)
	}
	return err
}

// runChild runs a shell script in a mount namespace of its own, with $self as this test binary.
func runChild(t *testing.T, addr, script string) string {
	t.Helper()
	self, err := os.Executable()
	require.NoError(t, err)
	cmd := exec.Command("unshare", "-m", "sh", "-ec", script)
	cmd.Env = append(os.Environ(), childAddr+"="+addr, "self="+self)
	out, err := cmd.CombinedOutput()
	require.NoError(t, err, "%s", out)
	t.Logf("%s", out)
	return string(out)
}

func TestHostAsItIs(t *testing.T) {
	watchdog(t, time.Minute)
	require.Contains(t, runChild(t, rdmaAddr(t), `exec "$self"`), `answer: "+PONG\r\n"`)
}

// A program with this package in it starts without the libraries, and the dial names the packages to install.
func TestHostWithoutLibraries(t *testing.T) {
	watchdog(t, time.Minute)
	for _, lib := range []string{"libibverbs.so.1", "librdmacm.so.1"} {
		paths, err := filepath.Glob("/usr/lib/*/" + lib)
		require.NoError(t, err)
		require.NotEmpty(t, paths)
		out := runChild(t, rdmaAddr(t), `mount --bind /dev/null `+paths[0]+`; exec "$self"`)
		require.Contains(t, out, "is: ErrNoLibrary")
		require.Contains(t, out, "apt-get install librdmacm1 ibverbs-providers")
		require.Contains(t, out, strings.TrimSuffix(lib, ".1"))
	}
}

// The default binary needs neither library to start; with the tag valkeyrdma_link it names both.
func TestHostLinking(t *testing.T) {
	watchdog(t, time.Minute)
	addr := rdmaAddr(t)
	imports := func(path string) string {
		f, err := elf.Open(path)
		require.NoError(t, err)
		defer f.Close()
		libs, err := f.ImportedLibraries()
		require.NoError(t, err)
		return strings.Join(libs, " ")
	}
	self, err := os.Executable()
	require.NoError(t, err)
	require.NotContains(t, imports(self), "ibverbs")
	require.NotContains(t, imports(self), "rdmacm")

	linked := labtest.Var(t, "VALKEYRDMA_CONSUMER") + "-linked"
	require.Contains(t, imports(linked), "ibverbs")
	require.Contains(t, imports(linked), "rdmacm")
	out, err := exec.Command(linked, addr).CombinedOutput()
	require.NoError(t, err, "%s", out)
	require.Equal(t, "PONG by rdma from "+addr+"\n", string(out))
}

func TestHostWithoutDevice(t *testing.T) {
	watchdog(t, time.Minute)
	out := runChild(t, rdmaAddr(t), `mount -t tmpfs none /dev/infiniband; exec "$self"`)
	require.Contains(t, out, "is: ErrNoDevice")
	require.Contains(t, out, "modprobe rdma_ucm")
}

// A container may have been given the connection manager, but not the device.
func TestHostWithoutVerbs(t *testing.T) {
	watchdog(t, time.Minute)
	out := runChild(t, rdmaAddr(t), `for f in /dev/infiniband/uverbs*; do mount --bind /dev/null $f; done; exec "$self"`)
	require.Contains(t, out, "is: ErrNoDevice")
	require.Contains(t, out, "/dev/infiniband/uverbs")
}

// Root may lock any amount of memory, so the child gives that capability up.
func TestH16LockedMemory(t *testing.T) {
	watchdog(t, time.Minute)
	const limited = `exec prlimit --memlock=%d setpriv --bounding-set=-ipc_lock "$self"`
	out := runChild(t, rdmaAddr(t), fmt.Sprintf(limited, 1<<20))
	require.Contains(t, out, "is: ErrLockedMemory")
	require.Contains(t, out, "ulimit -l")
	require.Contains(t, out, "register ")
	require.Contains(t, runChild(t, rdmaAddr(t), fmt.Sprintf(limited, 2<<20)), `answer: "+PONG\r\n"`)
}

// An iWARP device has RDMA writes, but none with immediate data.
func TestH18IWARP(t *testing.T) {
	watchdog(t, time.Minute)
	addr, consumer := rdmaAddr(t), labtest.Var(t, "VALKEYRDMA_CONSUMER")
	cmd := exec.Command(consumer+"-linked", addr)
	cmd.Env = append(os.Environ(), "LD_PRELOAD="+consumer+"-iwarp.so")
	out, err := cmd.CombinedOutput()
	require.Error(t, err)
	require.Equal(t, "dial rdma "+addr+": "+ErrIWARP.Error()+"\n", string(out))
}
