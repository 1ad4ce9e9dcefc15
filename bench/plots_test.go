package main

import (
	"bytes"
	"math"
	"os"
	"path/filepath"
	"testing"
)

// made are rows of a full run that never was: for what a plot looks like, see the files that TestPlots leaves in
// $BENCH_TEST_PLOTS.
func made() []row {
	var rows []row
	c := config{only: nothingLeftOut}
	for _, g := range c.selected() {
		for i, p := range g.peers {
			for round := 1; round <= 3; round++ {
				r := p.row(g)
				r.Round = round
				once := (200e3 + float64(r.Size)*15) * (1 + float64(i)/20 + float64(round)/50)
				r.Ops, r.Seconds, r.OpsPerS, r.BytesPS = 1000, 1, 1e9/once, 1e9/once*float64(r.Size)
				r.P50, r.P99, r.P999, r.Max, r.CPUPerOp = once, once*3, once*9, once*12, once/2
				if r.Window == 0 {
					rows = append(rows, r)
					continue
				}
				for _, class := range []string{laterEdge, elsewhere, firstEdge} {
					r.Class, r.P50 = class, r.P50*0.8
					rows = append(rows, r)
				}
			}
		}
	}
	return rows
}

func TestPlots(t *testing.T) {
	dir := os.Getenv("BENCH_TEST_PLOTS")
	if dir == "" {
		dir = t.TempDir()
	}
	if err := makePlots(dir, [][2]string{{"lab", "nowhere"}}, made()); err != nil {
		t.Fatal(err)
	}
	for _, name := range []string{"latency", "throughput", "window-edges"} {
		for ext, begin := range map[string]string{".png": "\x89PNG", ".svg": "<?xml"} {
			b, err := os.ReadFile(filepath.Join(dir, name+ext))
			if err != nil || !bytes.HasPrefix(b, []byte(begin)) {
				t.Errorf("%s%s: %v, begins with %.8q", name, ext, err, b)
			}
		}
	}
}

// A run with -only has nothing for most plots, and gaps in the others.
func TestPlotsOfFew(t *testing.T) {
	for _, rows := range [][]row{nil, someRows(), made()[:7]} {
		dir := t.TempDir()
		if err := makePlots(dir, nil, rows); err != nil {
			t.Errorf("%d rows: %v", len(rows), err)
		}
	}
	rows := made()
	for i := range rows {
		if i%3 == 0 {
			rows[i].P99, rows[i].P50, rows[i].BytesPS = math.NaN(), math.NaN(), math.NaN()
		}
	}
	if err := makePlots(t.TempDir(), nil, rows); err != nil {
		t.Error(err)
	}
}

func TestReport(t *testing.T) {
	rows := made()
	rows[0].Failure = "did not finish"
	text := reportText([][2]string{{"lab", "nowhere"}}, rows)
	for _, want := range []string{"nowhere", "get/size=64B/callers=1", "failed in 1 rounds: did not finish", "Targets",
		"stream from the server, 64KiB messages: raw / ib_write_bw"} {
		if !bytes.Contains([]byte(text), []byte(want)) {
			t.Errorf("the report does not say %q", want)
		}
	}
	if bytes.Contains([]byte(text), []byte("NaN")) {
		t.Error("the report says NaN")
	}
}
