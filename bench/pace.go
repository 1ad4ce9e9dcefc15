package main

import (
	"fmt"
	"math"
	"runtime"
	"sync"
	"sync/atomic"
	"time"
)

// paces are the times that a fixed piece of work took, one before each round of each case. On a machine that is left alone they
// are all alike.
type paces []float64

var paceSink atomic.Uint64

// measure adds the time that the work takes now, on all processors at once: the best of three tries, since what goes on beside
// a measurement goes on for longer.
func (p *paces) measure() {
	best := time.Duration(math.MaxInt64)
	for range 3 {
		best = min(best, someWork())
	}
	*p = append(*p, float64(best))
}

func someWork() time.Duration {
	var wg sync.WaitGroup
	start := time.Now()
	for i := range runtime.GOMAXPROCS(0) {
		wg.Go(func() {
			x := uint64(i + 1)
			for range 3_000_000 {
				x ^= x << 13
				x ^= x >> 7
				x ^= x << 17
			}
			paceSink.Add(x)
		})
	}
	wg.Wait()
	return time.Since(start)
}

// disturbed is how many times as long as usual the work takes when something else runs.
const disturbed = 1.5

func (p paces) String() string {
	s := spreadOf(p)
	n := 0
	for _, x := range p {
		if x > disturbed*s.Median {
			n++
		}
	}
	return fmt.Sprintf("the same work on all CPUs took %s (%s–%s), over %.1f times the median in %d of %d rounds",
		clock(s.Median), clock(s.Min), clock(s.Max), disturbed, n, len(p))
}
