package main

import (
	"fmt"
	"math"
	"strings"
)

// A target is a ratio between two contestants that a run decides about.
type target struct {
	text   string
	a, b   string // names of rows: a figure of a divided by one of b
	figure func(*row) float64
	scale  float64 // the ratio is multiplied by this; 0 means 1
	// bound is what the median must reach, from above or, where the ratio is one of times, from below. NaN: it is only told.
	bound float64
	times bool
}

func rate(r *row) float64 { return r.OpsPerS }
func p50(r *row) float64  { return r.P50 }

func targets() []target {
	var all []target
	compare := func(text, name, a, b string, figure func(*row) float64, bound float64, times bool) {
		all = append(all, target{text: text, a: name + "/peer=" + a, b: name + "/peer=" + b, figure: figure, bound: bound, times: times})
	}
	only := math.NaN()
	compare("parallel ECHO by valkey-go, 2 callers: rate, RDMA / TCP", "echo/callers=2", goRDMA, goTCP, rate, 1, false)
	compare("parallel ECHO by valkey-go, 64 callers: rate, RDMA / TCP", "echo/callers=64", goRDMA, goTCP, rate, 1.25, false)
	compare("GET 64 B by valkey-go, 1 caller: p50, RDMA / TCP", "get/size=64B/callers=1", goRDMA, goTCP, p50, 1, true)
	compare("GET 64 B, 1 raw connection: p50, raw / C client", "get/size=64B/callers=1", rawRDMA, cRDMA, p50, 0.8, true)
	compare("    the same without spinning", "get/size=64B/callers=1", rawEvents, cRDMA, p50, only, true)
	compare("GET 64 B, 16 raw connections: rate, raw / C client", "conns/size=64B/conns=16", rawRDMA, cRDMA, rate, 1.2, false)
	for _, size := range []int{64 << 10, 1 << 20, 16 << 20} {
		for _, workload := range []string{"set", "get"} {
			name := row{Workload: workload, Size: size, Callers: 1}
			what := fmt.Sprintf("%s %s, 1 caller: rate, ", strings.ToUpper(workload), bytesName(size))
			compare(what+"valkey-go / C client", name.caseName(), goRDMA, cRDMA, rate, 1.3, false)
			compare("    the same, raw connection / C client", name.caseName(), rawRDMA, cRDMA, rate, only, false)
		}
	}
	ping := "pingpong/size=64B"
	compare("64 B there and back, halved: p50, raw / ib_write_lat", ping, rawRDMA, writeLat, p50, 2, true)
	compare("    the same without spinning", ping, rawEvents, writeLat, p50, only, true)
	bytes := func(r *row) float64 { return r.BytesPS }
	compare("stream to the server, 64KiB messages: raw / ib_write_bw", "stream/size=64KiB", rawOut, writeBW, bytes, 0.9, false)
	compare("stream from the server, 64KiB messages: raw / ib_write_bw", "stream/size=64KiB", rawIn, writeBW, bytes, 0.9, false)
	return all
}

// chance is the probability below which a difference is not taken for chance.
const chance = 0.05

// judgeEdges says whether operations that cross a window edge are slow more often than others, in one direction against the
// lean server, over all windows.
func judgeEdges(rows []row, workload, text string) verdict {
	v := verdict{text: text, wanted: "edge <= elsewhere", measured: notMeasured, reached: "-"}
	slow, ops := make(map[string]int), make(map[string]int)
	for i := range rows {
		if r := &rows[i]; r.Workload == workload && r.Peer == rawRDMA {
			class := r.Class
			if class == firstEdge {
				class = laterEdge
			}
			slow[class] += r.Slow
			ops[class] += r.Ops
		}
	}
	if ops[laterEdge] == 0 || ops[elsewhere] == 0 {
		return v
	}
	share := func(class string) float64 { return float64(slow[class]) / float64(ops[class]) }
	v.measured = fmt.Sprintf("%d of %d (%.2f %%), elsewhere %d of %d (%.2f %%)", slow[laterEdge], ops[laterEdge], 100*share(laterEdge),
		slow[elsewhere], ops[elsewhere], 100*share(elsewhere))
	p := binomialTail(slow[laterEdge], ops[laterEdge], share(elsewhere))
	switch {
	case share(laterEdge) <= share(elsewhere):
		v.reached = "reached"
	case p >= chance:
		v.reached = fmt.Sprintf("reached (a difference by chance: p = %.2f)", p)
	default:
		v.reached = "NOT reached"
	}
	return v
}

// A verdict is what a run says about a target.
type verdict struct {
	text, wanted, measured, reached string
}

const notMeasured = "not measured"

func (t target) judge(rows []row) verdict {
	v := verdict{text: t.text, measured: notMeasured, reached: "-"}
	if !math.IsNaN(t.bound) {
		sign := ">="
		if t.times {
			sign = "<="
		}
		v.wanted = fmt.Sprintf("%s %.2f", sign, t.bound)
	}
	r := ratios(byRound(rows, t.a, t.figure), byRound(rows, t.b, t.figure))
	if len(r) == 0 {
		return v
	}
	scale := t.scale
	if scale == 0 {
		scale = 1
	}
	s := spreadOf(r)
	v.measured = fmt.Sprintf("%.2f (%.2f–%.2f)", s.Median*scale, s.Min*scale, s.Max*scale)
	switch {
	case math.IsNaN(t.bound):
	case t.times && s.Median*scale <= t.bound, !t.times && s.Median*scale >= t.bound:
		v.reached = "reached"
	default:
		v.reached = "NOT reached"
	}
	return v
}
