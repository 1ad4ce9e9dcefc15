package main

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/valkeyrdma/valkeyrdma/internal/rdmatest"
)

// measure returns what this process uses now.
func measure(at time.Duration) sample {
	count := func(dir string) int {
		entries, _ := os.ReadDir(dir)
		return len(entries)
	}
	s := sample{at: at, fds: count("/proc/self/fd") - 1, threads: count("/proc/self/task"), goroutines: runtime.NumGoroutine()}
	statm, _ := os.ReadFile("/proc/self/statm")
	if fields := strings.Fields(string(statm)); len(fields) > 1 {
		pages, _ := strconv.ParseInt(fields[1], 10, 64)
		s.rss = pages * int64(os.Getpagesize())
	}
	return s
}

func (r resources) String() string {
	var b []string
	for _, kind := range resourceKinds {
		b = append(b, fmt.Sprintf("%s %d", kind, r[kind]))
	}
	return strings.Join(b, " ")
}

// deviceCounters reads the counters of the device's ports.
func deviceCounters() map[string]int64 {
	counters := make(map[string]int64)
	files, _ := filepath.Glob("/sys/class/infiniband/" + os.Getenv("VALKEYRDMA_DEVICE") + "/ports/*/hw_counters/*")
	for _, file := range files {
		text, _ := os.ReadFile(file)
		if n, err := strconv.ParseInt(strings.TrimSpace(string(text)), 10, 64); err == nil {
			counters[filepath.Base(file)] += n
		}
	}
	delete(counters, "lifespan") // how often the kernel reads them, no counter
	return counters
}

// changed lists the counters that are not what they were.
func changed(before, now map[string]int64) string {
	var b []string
	for _, name := range slices.Sorted(maps.Keys(now)) {
		if d := now[name] - before[name]; d != 0 {
			b = append(b, fmt.Sprintf("%s %d", name, d))
		}
	}
	return strings.Join(b, ", ")
}

const heartbeat = 500 * time.Millisecond

// beat keeps the time that was calm, and finds out when the process was stopped or the machine stood still: neither is a failure of RDMA.
func (k *soak) beat(stop <-chan struct{}) {
	ticker := time.NewTicker(heartbeat)
	defer ticker.Stop()
	for last := time.Now(); ; {
		select {
		case <-stop:
			return
		case <-ticker.C:
		}
		gap := time.Since(last)
		last = time.Now()
		if gap > 5*time.Second {
			k.count(&k.notes, "times the process stood still for more than 5 s")
		}
		for _, s := range k.sides() {
			if gap > 5*time.Second {
				s.weather.begin()
				s.weather.over()
			}
			s.weather.tick(gap)
		}
		k.lookForHangs()
	}
}

// watch takes samples, and prints progress and minutes.
func (k *soak) watch(stop <-chan struct{}) {
	ticker := time.NewTicker(heartbeat)
	defer ticker.Stop()
	every := 10 * time.Second
	if k.live {
		every = time.Second
	}
	var nextSample, nextLine time.Duration
	nextMinute := k.every
	for {
		select {
		case <-stop:
			return
		case <-ticker.C:
		}
		if !k.working.Load() {
			continue
		}
		at := time.Since(k.begin)
		if at >= nextSample {
			k.samples = append(k.samples, measure(at))
			nextSample = at + 2*time.Second
		}
		if at >= nextLine {
			k.progress(at)
			nextLine = at + every
		}
		if at >= nextMinute {
			k.minute(at)
			nextMinute += k.every
		}
	}
}

// lookForHangs ends the process with the stacks of all goroutines if an operation hangs.
func (k *soak) lookForHangs() {
	for _, w := range k.workers {
		if b := w.busy.Load(); b != nil && time.Since(b.begin) > hang {
			k.hung(fmt.Sprintf("worker %d: %s has not ended after %v", w.id, b.what, time.Since(b.begin)))
		}
	}
	if b := k.phase.Load(); b != nil && time.Since(b.begin) > 2*hang {
		k.hung(fmt.Sprintf("%s has not ended after %v", b.what, time.Since(b.begin)))
	}
}

func (k *soak) hung(what string) {
	stacks := make([]byte, 16<<20)
	stacks = stacks[:runtime.Stack(stacks, true)]
	k.logf("HANG: %s\n%s", what, stacks)
	k.report()
	k.takedown()
	os.Exit(3)
}

// progress is a line that says that it is alive.
func (k *soak) progress(at time.Duration) {
	k.mu.Lock()
	defer k.mu.Unlock()
	ops := k.operations
	d := at - k.progressAt
	rate := float64(ops-k.progressOps) / max(d.Seconds(), 0.001)
	k.progressOps, k.progressAt = ops, at
	line := fmt.Sprintf("%s of %v: %d operations, %.0f/s, %d errors, %d wrong", clock(at), k.length, ops, rate, k.failures, len(k.violations))
	if k.live {
		fmt.Printf("\r\x1b[K%s", line)
	} else {
		fmt.Println(line)
	}
}

// minute is a line about all that should stay flat.
func (k *soak) minute(at time.Duration) {
	k.printing.Lock()
	defer k.printing.Unlock()
	if at < k.minuteAt+k.every/2 { // the last one, when the time is over
		return
	}
	s := measure(at)
	r, err := rdmatest.Resources(os.Getpid())
	text := resources(r).String()
	if err != nil {
		text = err.Error()
	}
	k.mu.Lock()
	ops, failures := k.operations-k.minuteOps, k.failures-k.minuteFailures
	k.minuteOps, k.minuteFailures = k.operations, k.failures
	d := at - k.minuteAt
	k.minuteAt = at
	k.mu.Unlock()
	counters := deviceCounters()
	k.logf("MINUTE %s: %.0f operations/s, %d errors | RSS %s, fds %d, threads %d, goroutines %d | RDMA %s | device: %s | "+
		"memory of the machine: %s left", clock(at), float64(ops)/d.Seconds(), failures, mib(s.rss), s.fds, s.threads, s.goroutines,
		text, changed(k.minuteCounters, counters), mib(memoryLeft()))
	k.minuteCounters = counters
}

// memoryLeft returns how much memory the machine has left.
func memoryLeft() int64 {
	text, _ := os.ReadFile("/proc/meminfo")
	for line := range strings.Lines(string(text)) {
		if fields := strings.Fields(line); len(fields) > 1 && fields[0] == "MemAvailable:" {
			kib, _ := strconv.ParseInt(fields[1], 10, 64)
			return kib << 10
		}
	}
	return 0
}

func clock(d time.Duration) string {
	return fmt.Sprintf("%d:%02d", int(d.Minutes()), int(d.Seconds())%60)
}
