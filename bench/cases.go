package main

import "time"

// patience is how long one measurement may take; what takes longer is reported as "did not finish".
const patience = 25 * time.Second

// A group is one case with its contestants.
type group struct {
	row   row // what the rows of all contestants have in common; its caseName is the case's name
	quick bool
	// for how long each contestant is measured in a round, as a multiple of the run's usual time; 0 means 1
	longer float64
	peers  []opener
}

// groups returns all cases. The targets decide what is part of a quick run.
func groups() []group {
	var all []group
	add := func(quick bool, w work, peers ...opener) {
		all = append(all, group{row: w.row(), quick: quick, peers: peers})
	}

	for _, callers := range []int{1, 2, 16, 64} {
		w := work{workload: "echo", callers: callers}
		add(callers == 2 || callers == 64, w, opener{goTCP, true, openGo(w)}, opener{goRDMA, true, openGo(w)})
	}
	for _, size := range sizes {
		for _, workload := range []string{"get", "set"} {
			w := work{workload: workload, size: size, callers: 1}
			small := size <= 64
			add(workload == "get" && size == 64 || size >= 64<<10, w,
				opener{goTCP, small, openGo(w)},
				opener{goRDMA, true, openGo(w)},
				opener{rawTCP, false, openRaw(w)},
				opener{rawRDMA, true, openRaw(w)},
				opener{rawEvents, small, openRaw(w)},
				opener{cTCP, false, openC(w)},
				opener{cRDMA, true, openC(w)})
		}
	}
	for _, size := range sizes[:len(sizes)-1] {
		for _, workload := range []string{"get", "set"} {
			w := work{workload: workload, size: size, callers: 64}
			add(false, w, opener{goTCP, true, openGo(w)}, opener{goRDMA, true, openGo(w)})
		}
	}
	for _, conns := range []int{1, 16, 128} {
		w := work{workload: "conns", size: 64, conns: conns}
		add(conns == 16, w, opener{rawTCP, false, openRaw(w)}, opener{rawRDMA, true, openRaw(w)},
			opener{rawEvents, false, openRaw(w)}, opener{cTCP, false, openC(w)}, opener{cRDMA, true, openC(w)})
	}
	for _, pipeline := range []int{1, 16, 384} {
		w := work{workload: "pipeline", size: 64, pipeline: pipeline}
		add(false, w, opener{goTCP, true, openGo(w)}, opener{goRDMA, true, openGo(w)}, opener{rawTCP, true, openRaw(w)},
			opener{rawRDMA, true, openRaw(w)}, opener{cTCP, true, openC(w)}, opener{cRDMA, true, openC(w)})
	}
	return all
}

// sizes are those of the values, in bytes.
var sizes = []int{16, 64, 1 << 10, 16 << 10, 64 << 10, 1 << 20, 16 << 20}
