package main

import (
	"math"
	"testing"
)

func TestPercentile(t *testing.T) {
	thousand := make([]int64, 1000)
	for i := range thousand {
		thousand[i] = int64(i + 1)
	}
	for _, test := range []struct {
		sorted []int64
		p      float64
		want   int64
	}{
		{nil, 50, 0},
		{[]int64{7}, 50, 7},
		{[]int64{7}, 99.9, 7},
		{[]int64{1, 2}, 50, 1},
		{[]int64{1, 2, 3}, 50, 2},
		{[]int64{1, 2, 3}, 100, 3},
		{thousand, 50, 500},
		{thousand, 99, 990},
		{thousand, 99.9, 999},
		{thousand, 100, 1000},
		{thousand, 0, 1},
	} {
		if got := percentile(test.sorted, test.p); got != test.want {
			t.Errorf("the %v. percentile of %d values is %d, want %d", test.p, len(test.sorted), got, test.want)
		}
	}
}

func TestMedian(t *testing.T) {
	if got := median(nil); !math.IsNaN(got) {
		t.Errorf("the median of nothing is %v", got)
	}
	values := []float64{3, 1, 2}
	if got := median(values); got != 2 {
		t.Errorf("got %v, want 2", got)
	}
	if values[0] != 3 {
		t.Error("median has sorted its argument")
	}
	if got := median([]float64{4, 1, 3, 2}); got != 2.5 {
		t.Errorf("got %v, want 2.5", got)
	}
}

func TestRatios(t *testing.T) {
	// Round 3 is missing on one side, round 4 on the other, and nothing is divided by 0.
	a := map[int]float64{1: 10, 2: 30, 3: 50, 5: 1}
	b := map[int]float64{1: 5, 2: 10, 4: 7, 5: 0}
	s := spreadOf(ratios(a, b))
	if want := (spread{Median: 2.5, Min: 2, Max: 3, N: 2}); s != want {
		t.Errorf("got %+v, want %+v", s, want)
	}
	if s := spreadOf(nil); s.N != 0 || !math.IsNaN(s.Median) {
		t.Errorf("the spread of nothing is %+v", s)
	}
}

func TestBinomialTail(t *testing.T) {
	for _, test := range []struct {
		k, n int
		p    float64
		want float64
	}{
		{0, 10, 0.1, 1},
		{11, 10, 0.1, 0},
		{1, 1, 0.25, 0.25},
		{1, 2, 0.5, 0.75},
		{2, 2, 0.5, 0.25},
		{3, 10, 0, 0},
		{3, 10, 1, 1},
		{5, 10, 0.5, 0.623046875},
	} {
		if got := binomialTail(test.k, test.n, test.p); math.Abs(got-test.want) > 1e-9 {
			t.Errorf("%d or more of %d at %v: %v, want %v", test.k, test.n, test.p, got, test.want)
		}
	}
}
