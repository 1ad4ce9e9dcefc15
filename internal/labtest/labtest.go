// Package labtest is what integration tests have in common.
package labtest

import (
	"fmt"
	"os"
	"runtime/pprof"
	"testing"
	"time"
)

// Var returns a variable of the laboratory (scripts/lab), or skips. "make test" counts a skip inside the laboratory as a failure.
func Var(t testing.TB, name string) string {
	t.Helper()
	v := os.Getenv(name)
	if v == "" {
		t.Skipf("needs RDMA and Valkey (%s is not set): run make test, which brings both", name)
	}
	return v
}

// Watchdog ends the process if the test is not over within limit, after it has printed what every goroutine does and what state
// prints, if that is not nil: a hang is the worst bug, and a bare timeout does not explain it.
func Watchdog(t testing.TB, limit time.Duration, state func()) {
	t.Helper()
	if v, err := time.ParseDuration(os.Getenv("VALKEYRDMA_WATCHDOG")); err == nil { // scripts/guards has no time for hangs
		limit = v
	}
	timer := time.AfterFunc(limit, func() {
		fmt.Fprintf(os.Stderr, "\nWATCHDOG: %s is not over after %v\n", t.Name(), limit)
		_ = pprof.Lookup("goroutine").WriteTo(os.Stderr, 2)
		if state != nil {
			state()
		}
		os.Exit(3)
	})
	t.Cleanup(func() { timer.Stop() })
}
