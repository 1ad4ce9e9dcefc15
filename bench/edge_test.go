package main

import (
	"slices"
	"testing"
	"time"
)

func TestCrosses(t *testing.T) {
	for _, test := range []struct {
		at, n int
		want  bool
	}{
		{0, 100, false},   // fills the window to its last byte
		{0, 101, true},    // and one more
		{99, 1, false},    // the last byte of the window
		{99, 2, true},     //
		{100, 100, false}, // the whole next window
		{150, 50, false},
		{150, 51, true},
		{50, 250, true}, // more than one edge
	} {
		e := edgeStudy{window: 100, at: test.at}
		if got := e.crosses(test.n); got != test.want {
			t.Errorf("%d bytes at %d: %v", test.n, test.at, got)
		}
	}
}

// The bytes that a study moves add up, each edge is met by an operation that lies across it, and in its middle; and operations are
// timed on both sides.
func TestEdgeStudy(t *testing.T) {
	for _, window := range []int{64 << 10, 1 << 20, 16 << 20} {
		for _, size := range []int{1055, 4127} {
			e := edgeStudy{window: window, size: size}
			sum, ops := 0, 0
			took, err := e.run(time.Millisecond, func(n int) (int, error) {
				if sum != e.at {
					t.Fatalf("%d bytes have gone, the study says %d", sum, e.at)
				}
				if n == size {
					ops++
				} else if e.crosses(n) {
					t.Fatalf("filling %d bytes at %d goes over an edge", n, sum)
				}
				sum += n
				return n, nil
			})
			if err != nil {
				t.Fatal(err)
			}
			edge := slices.Concat(took[firstEdge], took[laterEdge])
			if len(took[firstEdge]) != 1 {
				t.Errorf("window %d, size %d: %d operations at the first edge", window, size, len(took[firstEdge]))
			}
			if want := sum / window; len(edge) < want-1 || len(edge) > want+1 {
				t.Errorf("window %d, size %d: %d operations at edges, %d windows", window, size, len(edge), want)
			}
			if len(took[elsewhere]) < 10*len(edge) {
				t.Errorf("window %d, size %d: %d operations at edges, %d elsewhere", window, size, len(edge), len(took[elsewhere]))
			}
			if len(edge)+len(took[elsewhere]) > ops {
				t.Errorf("window %d, size %d: more samples than operations", window, size)
			}
		}
	}
}

func TestOfSize(t *testing.T) {
	for _, n := range []int{1055, 4127, 129, 130, 131, 132, 133, 134, 135, 1029, 1030, 1031, 1032, 1033, 16 << 20} {
		request, size := setOfSize(n)
		if size != len(request) || size > n || size < n-1 {
			t.Errorf("a SET of %d bytes has %d, and says %d", n, len(request), size)
		}
		if _, want := rangeOfSize(n); want.size > n || want.size < n-1 {
			t.Errorf("a reply of %d bytes has %d", n, want.size)
		}
	}
	for _, n := range []int{1055, 4127} { // the sizes that are studied
		if _, size := setOfSize(n); size != n {
			t.Errorf("a SET of %d bytes has %d", n, size)
		}
		if _, want := rangeOfSize(n); want.size != n {
			t.Errorf("a reply of %d bytes has %d", n, want.size)
		}
	}
}

func TestEdgeRows(t *testing.T) {
	e := edgeStudy{}
	most := make([]int64, 100)
	for i := range most {
		most[i] = 10
	}
	most[5] = 101
	rows := e.rows(row{Workload: "edge-out"}, samples{laterEdge: {20, 100, 1000}, elsewhere: most}, time.Second)
	if len(rows) != 2 || rows[0].Class != elsewhere || rows[1].Class != laterEdge {
		t.Fatalf("got %+v", rows)
	}
	if rows[1].Slow != 1 || rows[1].Ops != 3 || rows[1].P50 != 100 || rows[1].Max != 1000 {
		t.Errorf("edge: %+v", rows[1])
	}
	if rows[0].Slow != 1 || rows[0].Ops != 100 || rows[0].P50 != 10 {
		t.Errorf("elsewhere: %+v", rows[0])
	}
}
