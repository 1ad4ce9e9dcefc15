package main

import (
	"time"

	"github.com/valkeyrdma/valkeyrdma/bench/internal/peer"
)

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

// by is the contestant of a name; quick says whether it takes part in a quick run.
func by(name string, quick bool, open openFunc) opener { return opener{name, quick, 0, open} }

// groups returns all cases. The targets decide what is part of a quick run.
func groups() []group {
	var all []group
	add := func(quick bool, w work, peers ...opener) {
		all = append(all, group{row: w.row(), quick: quick, peers: peers})
	}

	for _, callers := range []int{1, 2, 16, 64} {
		w := work{workload: "echo", callers: callers}
		add(callers == 2 || callers == 64, w, by(goTCP, true, openGo(w)), by(goRDMA, true, openGo(w)))
	}
	for _, size := range sizes {
		for _, workload := range []string{"get", "set"} {
			w := work{workload: workload, size: size, callers: 1}
			small := size <= 64
			add(workload == "get" && size == 64 || size >= 64<<10, w,
				by(goTCP, small, openGo(w)),
				by(goRDMA, true, openGo(w)),
				by(rawTCP, false, openRaw(w)),
				by(rawRDMA, true, openRaw(w)),
				by(rawEvents, small, openRaw(w)),
				by(cTCP, false, openC(w)),
				by(cRDMA, true, openC(w)))
		}
	}
	for _, size := range sizes[:len(sizes)-1] {
		for _, workload := range []string{"get", "set"} {
			w := work{workload: workload, size: size, callers: 64}
			add(false, w, by(goTCP, true, openGo(w)), by(goRDMA, true, openGo(w)))
		}
	}
	for _, conns := range []int{1, 16, 128} {
		w := work{workload: "conns", size: 64, conns: conns}
		add(conns == 16, w, by(rawTCP, false, openRaw(w)), by(rawRDMA, true, openRaw(w)),
			by(rawEvents, false, openRaw(w)), by(cTCP, false, openC(w)), by(cRDMA, true, openC(w)))
	}
	for _, pipeline := range []int{1, 16, 384} {
		w := work{workload: "pipeline", size: 64, pipeline: pipeline}
		add(false, w, by(goTCP, true, openGo(w)), by(goRDMA, true, openGo(w)), by(rawTCP, true, openRaw(w)),
			by(rawRDMA, true, openRaw(w)), by(cTCP, true, openC(w)), by(cRDMA, true, openC(w)))
	}
	return append(append(all, limits()...), edgeGroups()...)
}

// leanWindow is the window of the lean server where it is not what is studied; a real server has the same.
const leanWindow = 1 << 20

// leanSpin is for how long the lean server looks before it sleeps, where both sides are to look: longer than any answer takes.
const leanSpin = 5 * time.Millisecond

// limits returns the cases that have to do with what the device can do.
func limits() []group {
	ping := row{Workload: "pingpong", Size: 64}
	spinning := peer.Options{Window: leanWindow, Buffers: 1, Spin: leanSpin}
	all := []group{{row: ping, quick: true, peers: []opener{
		by(writeLat, true, openPerftest("pingpong", 64)),
		by(rawRDMA, true, openLean(ping, spinning, 0, pingPong)),
		by(rawEvents, true, openLean(ping, spinning, 0, pingPong)),
	}}}
	for _, size := range []int{64, 1 << 10, 4 << 10, 16 << 10, 64 << 10, 1 << 20} {
		r := row{Workload: "stream", Size: size}
		opt := peer.Options{Window: leanWindow, Buffers: 1}
		all = append(all, group{row: r, quick: size == 64<<10, peers: []opener{
			by(writeBW, true, openPerftest("stream", size)),
			by(rawOut, true, openLean(r, opt, 0, stream(true))),
			by(rawIn, true, openLean(r, opt, 0, stream(false))),
		}})
	}
	return all
}

// The contestants of the study of window edges: the row says of how many buffers the receiving side has.
const edgeReal = "raw-rdma-valkey" // against a real server

// edgeSizes are those of the operations' bytes: values of 1 and 4 KiB with what a SET has around them. They divide no window.
var edgeSizes = []int{1<<10 + 31, 4<<10 + 31}

func edgeGroups() []group {
	var all []group
	for _, workload := range []string{"edge-out", "edge-in"} {
		out := workload == "edge-out"
		for _, window := range []int{64 << 10, 1 << 20, 16 << 20} {
			for _, size := range edgeSizes {
				r := row{Workload: workload, Size: size, Window: window}
				g := group{row: r, quick: window < 16<<20 && size == edgeSizes[1]}
				if window == 16<<20 {
					g.longer = 2 // it takes a quarter of a second to fill
				}
				lean := func(buffers int, quick bool, opt peer.Options, window int) {
					r := r
					r.Buffers = buffers
					g.peers = append(g.peers, opener{rawRDMA, quick, buffers, openLean(r, opt, window, edges(out))})
				}
				if out {
					lean(1, true, peer.Options{Window: window, Buffers: 1, Copy: true}, 0)
					lean(2, false, peer.Options{Window: window, Buffers: 2, Copy: true}, 0)
				} else {
					// This library makes the second one when the first window is full, unless it is told not to.
					lean(2, true, peer.Options{Window: leanWindow, Buffers: 1}, window)
					lean(1, false, peer.Options{Window: leanWindow, Buffers: 1}, window)
				}
				real := r
				real.Buffers = map[bool]int{true: 1, false: 2}[out]
				g.peers = append(g.peers, opener{edgeReal, false, real.Buffers, openEdgeValkey(real, out)})
				all = append(all, g)
			}
		}
	}
	return all
}

// sizes are those of the values, in bytes.
var sizes = []int{16, 64, 1 << 10, 16 << 10, 64 << 10, 1 << 20, 16 << 20}
