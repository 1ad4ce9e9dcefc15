package main

import (
	"math"
	"slices"
)

// percentile returns the nearest-rank percentile of sorted: the smallest value that at least p percent do not exceed.
func percentile(sorted []int64, p float64) int64 {
	if len(sorted) == 0 {
		return 0
	}
	// 99.9 is not a binary fraction: without the slack, 99.9 % of 1000 would be 999.0000000000001 values.
	rank := int(math.Ceil(p/100*float64(len(sorted)) - 1e-9))
	return sorted[min(max(rank, 1), len(sorted))-1]
}

// median returns the middle of values, or the mean of the two middle ones; NaN if there are none.
func median(values []float64) float64 {
	if len(values) == 0 {
		return math.NaN()
	}
	s := slices.Sorted(slices.Values(values))
	if n := len(s); n%2 == 0 {
		return (s[n/2-1] + s[n/2]) / 2
	}
	return s[len(s)/2]
}

// A spread is the median of some values, with the smallest and the largest.
type spread struct {
	Median, Min, Max float64
	N                int
}

func spreadOf(values []float64) spread {
	if len(values) == 0 {
		return spread{Median: math.NaN(), Min: math.NaN(), Max: math.NaN()}
	}
	return spread{median(values), slices.Min(values), slices.Max(values), len(values)}
}

// ratios divides what a and b have for the same round. Rounds that only one of them has do not count.
func ratios(a, b map[int]float64) []float64 {
	var r []float64
	for round, x := range a {
		if y, ok := b[round]; ok && y != 0 {
			r = append(r, x/y)
		}
	}
	return r
}

// binomialTail returns the probability of k or more successes in n trials that succeed with probability p.
func binomialTail(k, n int, p float64) float64 {
	switch {
	case k <= 0:
		return 1
	case k > n || p <= 0:
		return 0
	case p >= 1:
		return 1
	}
	lgamma := func(x int) float64 { v, _ := math.Lgamma(float64(x)); return v }
	sum := 0.0
	for i := k; i <= n; i++ {
		sum += math.Exp(lgamma(n+1) - lgamma(i+1) - lgamma(n-i+1) + float64(i)*math.Log(p) + float64(n-i)*math.Log1p(-p))
	}
	return min(sum, 1)
}
