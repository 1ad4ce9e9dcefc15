package main

import (
	"fmt"
	"slices"
	"time"
)

// A sample is what this process uses at a time.
type sample struct {
	at         time.Duration
	rss        int64 // bytes
	fds        int
	threads    int
	goroutines int
}

// resources counts what "rdma resource" lists for a process, by kind.
type resources map[string]int

// An ending compares what was used before the first client was made with what is used after the last was closed.
type ending struct {
	before, after         sample
	rdmaBefore, rdmaAfter resources
}

const (
	// steadyAfter is how long a soak has to last for its second quarter to be like the last.
	steadyAfter = 4 * time.Minute

	threadSlack = 8        // Go gives no thread back; so many more, or a half, may be needed later than in the first third
	connSlack   = 64       // and a half: what file descriptors and goroutines vary by, as connections come and go
	rssSlack    = 64 << 20 // and a quarter of what was used in the second quarter; or of RSS at the end more than at the start
)

// leaks says what is left at the end.
func (e ending) leaks() (complaints []string) {
	compare := func(what string, before, after int) {
		if after > before {
			complaints = append(complaints, fmt.Sprintf("%s: %d at the start, %d at the end", what, before, after))
		}
	}
	compare("file descriptors", e.before.fds, e.after.fds)
	compare("goroutines", e.before.goroutines, e.after.goroutines)
	if e.after.rss > e.before.rss+rssSlack {
		complaints = append(complaints, fmt.Sprintf("RSS: %s at the start, %s at the end", mib(e.before.rss), mib(e.after.rss)))
	}
	for _, kind := range resourceKinds {
		compare("RDMA "+kind, e.rdmaBefore[kind], e.rdmaAfter[kind])
	}
	return complaints
}

var resourceKinds = []string{"qp", "cq", "mr", "pd", "cm_id"}

// growth says what grew while the load was the same.
func growth(samples []sample) (complaints []string) {
	n := len(samples)
	if n < 12 {
		return []string{fmt.Sprintf("only %d samples were taken: too few to tell whether anything grows", n)}
	}
	threads := func(s sample) int64 { return int64(s.threads) }
	first, last := slices.Max(values(samples[:n/3], threads)), slices.Max(values(samples[n-n/3:], threads))
	if last > first+max(threadSlack, first/2) {
		complaints = append(complaints, fmt.Sprintf("threads: up to %d in the first third, up to %d in the last", first, last))
	}
	medians := func(of func(sample) int64) (second, fourth int64) {
		return median(values(samples[n/4:n/2], of)), median(values(samples[n-n/4:], of))
	}
	second, fourth := medians(func(s sample) int64 { return s.rss })
	if fourth > second+second/4+rssSlack {
		complaints = append(complaints, fmt.Sprintf("RSS: median of %s in the second quarter, of %s in the last", mib(second), mib(fourth)))
	}
	// Each connection over RDMA has file descriptors of its own, and each one of the client a goroutine or two: these also tell of
	// queue pairs and what belongs to them.
	for what, of := range map[string]func(sample) int64{
		"file descriptors": func(s sample) int64 { return int64(s.fds) },
		"goroutines":       func(s sample) int64 { return int64(s.goroutines) },
	} {
		if second, fourth := medians(of); fourth > second+second/2+connSlack {
			complaints = append(complaints, fmt.Sprintf("%s: median of %d in the second quarter, of %d in the last", what, second, fourth))
		}
	}
	return complaints
}

func values(samples []sample, of func(sample) int64) []int64 {
	v := make([]int64, len(samples))
	for i, s := range samples {
		v[i] = of(s)
	}
	return v
}

func median(v []int64) int64 {
	slices.Sort(v)
	return v[len(v)/2]
}

func mib(bytes int64) string { return fmt.Sprintf("%d MiB", bytes>>20) }
