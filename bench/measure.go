package main

import (
	"runtime"
	"slices"
	"sync"
	"syscall"
	"time"
)

// A timing is what one contestant did in one round.
type timing struct {
	Ops     int
	Elapsed time.Duration
	Sorted  []int64       // nanoseconds of each operation
	CPU     time.Duration // of this process, all threads, user and system
	// PerOp is how many commands an operation is; 0 means one. Latencies are those of the operation, rates of the commands.
	PerOp int
}

// warmUp is how long a contestant works before it is measured, so that no other one's traces are measured.
const warmUp = 50 * time.Millisecond

// repeat has callers goroutines call op in a loop for d, and until there were at least least calls in all, and times each
// call. An error of any ends it.
func repeat(callers int, d time.Duration, least int, op func(caller int) error) (timing, error) {
	if _, err := loop(callers, min(warmUp, d/4), 1, op); err != nil {
		return timing{}, err
	}
	runtime.GC()
	return loop(callers, d, least, op)
}

func loop(callers int, d time.Duration, least int, op func(caller int) error) (timing, error) {
	var (
		wg      sync.WaitGroup
		samples = make([][]int64, callers)
		errs    = make([]error, callers)
		share   = (least + callers - 1) / callers
	)
	for i := range samples {
		samples[i] = make([]int64, 0, max(1<<18/callers, 1<<10))
	}
	cpu := cpuTime()
	start := time.Now()
	end := start.Add(d)
	for i := range callers {
		wg.Go(func() {
			last := time.Now()
			for n := 0; n < share || last.Before(end); n++ {
				if errs[i] = op(i); errs[i] != nil {
					return
				}
				now := time.Now()
				samples[i] = append(samples[i], int64(now.Sub(last)))
				last = now
			}
		})
	}
	wg.Wait()
	t := timing{Elapsed: time.Since(start), CPU: cpuTime() - cpu}
	for i := range callers {
		if errs[i] != nil {
			return timing{}, errs[i]
		}
		t.Ops += len(samples[i])
		t.Sorted = append(t.Sorted, samples[i]...)
	}
	slices.Sort(t.Sorted)
	return t, nil
}

func cpuTime() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		return 0
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
