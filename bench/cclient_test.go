package main

import (
	"math"
	"testing"
)

// What valkey-benchmark 9.1 prints, shortened.
const benchmarkOutput = "SET: rps=0.0 (overall: -nan) avg_msec=-nan (overall: -nan) 0 requests\r      \rSET: rps=1618.7 (overall: 1618.7) " +
	"avg_msec=0.546 (overall: 0.546) 416 requests\r          \r====== SET ======\n" + `
  2000 requests completed in 0.85 seconds
  1 parallel clients
  64 bytes payload
  keep alive: 1
  host configuration "save": ` + `
  host configuration "appendonly": no
  multi-thread: no

Latency by percentile distribution:
0.000% <= 0.119 milliseconds (cumulative count 1)
50.000% <= 0.279 milliseconds (cumulative count 1010)
99.805% <= 3.567 milliseconds (cumulative count 1997)
99.902% <= 5.599 milliseconds (cumulative count 1999)
99.951% <= 15.407 milliseconds (cumulative count 2000)
100.000% <= 15.407 milliseconds (cumulative count 2000)

Cumulative distribution of latencies:
0.000% <= 0.103 milliseconds (cumulative count 0)
99.950% <= 6.103 milliseconds (cumulative count 1999)
100.000% <= 16.103 milliseconds (cumulative count 2000)

Summary:
  throughput summary: 2344.67 requests per second
  latency summary (msec):
          avg       min       p50       p95       p99       max
        0.370     0.112     0.279     0.703     1.151    15.407

`

func TestParseBenchmark(t *testing.T) {
	got, err := parseBenchmark(benchmarkOutput)
	if err != nil {
		t.Fatal(err)
	}
	want := benchmarkReport{requests: 2000, perSec: 2344.67, p50: 279e3, p99: 1151e3, p999: 5599e3, max: 15407e3}
	near := func(a, b float64) bool { return math.Abs(a-b) < 1 }
	if got.requests != want.requests || !near(got.perSec, want.perSec) || !near(got.p50, want.p50) || !near(got.p99, want.p99) ||
		!near(got.p999, want.p999) || !near(got.max, want.max) {
		t.Errorf("got %+v, want %+v", got, want)
	}
	for _, out := range []string{"", "Could not connect to server", benchmarkOutput[:len(benchmarkOutput)/2]} {
		if _, err := parseBenchmark(out); err == nil {
			t.Errorf("no error for %q", out)
		}
	}
}

func TestSubtract(t *testing.T) {
	r := row{Ops: 8, Seconds: 2.25, OpsPerS: 8 / 2.25}
	if err := r.subtract(row{Ops: 1, Seconds: 0.5, OpsPerS: 2}); err != nil || r.Ops != 7 || r.Seconds != 1.75 || r.OpsPerS != 4 {
		t.Errorf("got %+v, %v", r, err)
	}
	if err := r.subtract(row{Ops: 1, Seconds: 2}); err == nil {
		t.Error("a longer run has been subtracted")
	}
}
