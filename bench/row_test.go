package main

import (
	"bytes"
	"math"
	"reflect"
	"strings"
	"testing"
)

func someRows() []row {
	var rows []row
	for round := 1; round <= 3; round++ {
		r := row{Workload: "get", Size: 64 << 10, Callers: 1, Peer: goTCP, Round: round, Ops: 100, Seconds: 0.5, OpsPerS: 200,
			BytesPS: 13107200, P50: 4e6, P99: 5e6, P999: 6e6, Max: 7e6, CPUPerOp: 1e6}
		rows = append(rows, r)
		r.Peer, r.OpsPerS, r.P50, r.P999 = goRDMA, float64(200+20*round), 2e6, math.NaN()
		rows = append(rows, r)
	}
	return append(rows, row{Workload: "get", Size: 64 << 10, Callers: 1, Peer: cRDMA, Round: 1, Failure: `did not finish, "alas"`})
}

func TestCSV(t *testing.T) {
	rows := someRows()
	var b bytes.Buffer
	if err := writeCSV(&b, rows); err != nil {
		t.Fatal(err)
	}
	got, err := readCSV(&b)
	if err != nil {
		t.Fatal(err)
	}
	for i := range rows { // since NaN is not equal to itself
		if !math.IsNaN(got[i].P999) && got[i].Failure == "" && got[i].Peer == goRDMA {
			t.Errorf("row %d: NaN came back as %v", i, got[i].P999)
		}
		got[i].P999, rows[i].P999 = 0, 0
	}
	if !reflect.DeepEqual(got, rows) {
		t.Errorf("got\n%+v\nwant\n%+v", got, rows)
	}
}

func TestReadCSVErrors(t *testing.T) {
	for _, in := range []string{"", "peer,colour\n", "round\nthree\n", "peer,round\nx\n"} {
		if _, err := readCSV(strings.NewReader(in)); err == nil {
			t.Errorf("%q: no error", in)
		}
	}
}

func TestNames(t *testing.T) {
	for _, test := range []struct {
		r    row
		want string
	}{
		{row{Workload: "echo", Callers: 2, Peer: goTCP}, "echo/callers=2/peer=go-tcp"},
		{row{Workload: "get", Size: 16 << 20, Callers: 1, Peer: cRDMA}, "get/size=16MiB/callers=1/peer=c-rdma"},
		{row{Workload: "edge-out", Size: 1055, Window: 64 << 10, Buffers: 2, Class: "edge", Peer: rawRDMA},
			"edge-out/size=1055B/window=64KiB/buffers=2/class=edge/peer=raw-rdma"},
	} {
		if got := test.r.name(); got != test.want {
			t.Errorf("got %s, want %s", got, test.want)
		}
	}
}

func TestBenchmarks(t *testing.T) {
	var b bytes.Buffer
	if err := writeBenchmarks(&b, [][2]string{{"goos", "linux"}, {"date", "today"}}, 2, someRows()[:1]); err != nil {
		t.Fatal(err)
	}
	want := "goos: linux\n# date: today\nBenchmarkGet/size=64KiB/callers=1/peer=go-tcp-2\t100\t5e+06 ns/op\t1.31072e+07 B/s\t4e+06 p50-ns\t" +
		"5e+06 p99-ns\t6e+06 p99.9-ns\t1e+06 cpu-ns/op\n"
	if b.String() != want {
		t.Errorf("got\n%s\nwant\n%s", b.String(), want)
	}
}

func TestSortRows(t *testing.T) {
	rows := someRows()
	sortRows(rows)
	var got []string
	for _, r := range rows {
		got = append(got, r.Peer)
	}
	if s := strings.Join(got, " "); s != "go-tcp go-tcp go-tcp go-rdma go-rdma go-rdma c-rdma" {
		t.Errorf("got %s", s)
	}
}

func TestJudge(t *testing.T) {
	x := target{a: "get/size=64KiB/callers=1/peer=go-rdma", b: "get/size=64KiB/callers=1/peer=go-tcp", figure: rate, bound: 1.2}
	if v := x.judge(someRows()); v.measured != "1.20 (1.10–1.30)" || v.reached != "reached" || v.wanted != ">= 1.20" {
		t.Errorf("got %+v", v)
	}
	x.bound = 1.21
	if v := x.judge(someRows()); v.reached != "NOT reached" {
		t.Errorf("got %+v", v)
	}
	x.figure, x.bound, x.times, x.scale = p50, 0.2, true, 0.5
	if v := x.judge(someRows()); v.measured != "0.25 (0.25–0.25)" || v.reached != "NOT reached" || v.wanted != "<= 0.20" {
		t.Errorf("got %+v", v)
	}
	x.b = "get/peer=nobody"
	if v := x.judge(someRows()); v.measured != "not measured" || v.reached != "-" {
		t.Errorf("got %+v", v)
	}
}

// The targets name rows by hand: each must be one that the full run and the quick one measure.
func TestTargetsAreMeasured(t *testing.T) {
	for _, quick := range []bool{false, true} {
		measured := make(map[string]bool)
		c := config{quick: quick, only: nothingLeftOut}
		for _, g := range c.selected() {
			for _, p := range g.peers {
				r := p.row(g)
				measured[r.name()] = true
			}
		}
		for _, x := range targets() {
			for _, name := range []string{x.a, x.b} {
				if !measured[name] {
					t.Errorf("quick %v: %q needs %s, which is not measured", quick, x.text, name)
				}
			}
		}
	}
}
