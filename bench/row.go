package main

import (
	"cmp"
	"encoding/csv"
	"fmt"
	"io"
	"math"
	"slices"
	"strconv"
	"strings"
)

// A row is what one contestant of one case did in one round: a line of results.csv. A field that has no meaning for its case
// is 0, one that could not be measured NaN.
type row struct {
	Workload string // echo, get, set, ...
	Size     int    // bytes of the value, or of the message
	Callers  int    // goroutines that share one client
	Conns    int    // connections, each with a goroutine of its own
	Pipeline int    // commands sent before the first reply is awaited
	Window   int    // bytes of the receive window under study
	Buffers  int    // that many of them take turns
	Class    string // of operations, see edgeStudy
	Peer     string
	Round    int

	Ops      int
	Seconds  float64
	OpsPerS  float64
	BytesPS  float64 // payload
	P50      float64 // nanoseconds, as the next ones
	P99      float64
	P999     float64
	Max      float64
	CPUPerOp float64 // of the client's process
	Slow     int     // operations slower than ten times the median of all
	Failure  string  // why there is nothing measured
}

// setTiming fills in what t says.
func (r *row) setTiming(t timing) {
	per := max(t.PerOp, 1)
	r.Ops, r.Seconds = t.Ops*per, t.Elapsed.Seconds()
	r.OpsPerS = float64(r.Ops) / r.Seconds
	r.BytesPS = r.OpsPerS * float64(r.Size)
	r.CPUPerOp = float64(t.CPU) / float64(r.Ops)
	r.setLatencies(t.Sorted)
}

// failed is a row of something that could not be measured.
func (r row) failed(err error) row {
	nan := math.NaN()
	r.Seconds, r.OpsPerS, r.BytesPS, r.P50, r.P99, r.P999, r.Max, r.CPUPerOp = nan, nan, nan, nan, nan, nan, nan, nan
	r.Failure = strings.Join(strings.Fields(err.Error()), " ")
	return r
}

func (r *row) setLatencies(sorted []int64) {
	r.P50, r.P99, r.P999 = math.NaN(), math.NaN(), math.NaN()
	r.Max = math.NaN()
	if len(sorted) == 0 {
		return
	}
	at := func(p float64) float64 { return float64(percentile(sorted, p)) }
	r.P50, r.P99, r.P999, r.Max = at(50), at(99), at(99.9), at(100)
}

// caseName is what the contestants of one case have in common.
func (r *row) caseName() string {
	var b strings.Builder
	b.WriteString(r.Workload)
	add := func(name string, v int, text string) {
		if v != 0 {
			fmt.Fprintf(&b, "/%s=%s", name, text)
		}
	}
	add("size", r.Size, bytesName(r.Size))
	add("window", r.Window, bytesName(r.Window))
	add("callers", r.Callers, strconv.Itoa(r.Callers))
	add("conns", r.Conns, strconv.Itoa(r.Conns))
	add("pipeline", r.Pipeline, strconv.Itoa(r.Pipeline))
	return b.String()
}

// name is what rounds of the same measurement have in common.
func (r *row) name() string {
	s := r.caseName()
	if r.Buffers != 0 {
		s += fmt.Sprintf("/buffers=%d", r.Buffers)
	}
	if r.Class != "" {
		s += "/class=" + r.Class
	}
	return s + "/peer=" + r.Peer
}

func bytesName(n int) string {
	switch {
	case n >= 1<<20 && n%(1<<20) == 0:
		return strconv.Itoa(n>>20) + "MiB"
	case n >= 1<<10 && n%(1<<10) == 0:
		return strconv.Itoa(n>>10) + "KiB"
	}
	return strconv.Itoa(n) + "B"
}

// A column is one of results.csv.
type column struct {
	name string
	get  func(*row) string
	set  func(*row, string) error
}

func word(name string, field func(*row) *string) column {
	return column{name, func(r *row) string { return *field(r) }, func(r *row, s string) error { *field(r) = s; return nil }}
}

func integer(name string, field func(*row) *int) column {
	return column{name, func(r *row) string { return strconv.Itoa(*field(r)) },
		func(r *row, s string) (err error) { *field(r), err = strconv.Atoi(s); return err }}
}

// number is empty in the file where it is NaN, as spreadsheets expect.
func number(name string, digits int, field func(*row) *float64) column {
	return column{name,
		func(r *row) string {
			if math.IsNaN(*field(r)) {
				return ""
			}
			return strconv.FormatFloat(*field(r), 'f', digits, 64)
		},
		func(r *row, s string) (err error) {
			if s == "" {
				*field(r) = math.NaN()
				return nil
			}
			*field(r), err = strconv.ParseFloat(s, 64)
			return err
		}}
}

var columns = []column{
	word("workload", func(r *row) *string { return &r.Workload }),
	integer("size_bytes", func(r *row) *int { return &r.Size }),
	integer("callers", func(r *row) *int { return &r.Callers }),
	integer("conns", func(r *row) *int { return &r.Conns }),
	integer("pipeline", func(r *row) *int { return &r.Pipeline }),
	integer("window_bytes", func(r *row) *int { return &r.Window }),
	integer("buffers", func(r *row) *int { return &r.Buffers }),
	word("class", func(r *row) *string { return &r.Class }),
	word("peer", func(r *row) *string { return &r.Peer }),
	integer("round", func(r *row) *int { return &r.Round }),
	integer("ops", func(r *row) *int { return &r.Ops }),
	number("seconds", 6, func(r *row) *float64 { return &r.Seconds }),
	number("ops_per_s", 3, func(r *row) *float64 { return &r.OpsPerS }),
	number("bytes_per_s", 0, func(r *row) *float64 { return &r.BytesPS }),
	number("p50_ns", 0, func(r *row) *float64 { return &r.P50 }),
	number("p99_ns", 0, func(r *row) *float64 { return &r.P99 }),
	number("p99.9_ns", 0, func(r *row) *float64 { return &r.P999 }),
	number("max_ns", 0, func(r *row) *float64 { return &r.Max }),
	number("cpu_ns_per_op", 0, func(r *row) *float64 { return &r.CPUPerOp }),
	integer("slow_ops", func(r *row) *int { return &r.Slow }),
	word("failure", func(r *row) *string { return &r.Failure }),
}

func writeCSV(w io.Writer, rows []row) error {
	cw := csv.NewWriter(w)
	line := make([]string, len(columns))
	for i, c := range columns {
		line[i] = c.name
	}
	if err := cw.Write(line); err != nil {
		return err
	}
	for i := range rows {
		for j, c := range columns {
			line[j] = c.get(&rows[i])
		}
		if err := cw.Write(line); err != nil {
			return err
		}
	}
	cw.Flush()
	return cw.Error()
}

func readCSV(r io.Reader) ([]row, error) {
	lines, err := csv.NewReader(r).ReadAll()
	if err != nil {
		return nil, err
	}
	if len(lines) == 0 {
		return nil, io.ErrUnexpectedEOF
	}
	known := make([]*column, len(lines[0]))
	for i, name := range lines[0] {
		j := slices.IndexFunc(columns, func(c column) bool { return c.name == name })
		if j < 0 {
			return nil, fmt.Errorf("a column with the unknown name %q", name)
		}
		known[i] = &columns[j]
	}
	rows := make([]row, len(lines)-1)
	for i, line := range lines[1:] {
		for j, s := range line {
			if err := known[j].set(&rows[i], s); err != nil {
				return nil, fmt.Errorf("line %d, column %s: %w", i+2, known[j].name, err)
			}
		}
	}
	return rows, nil
}

// benchstatKeys are what of the environment benchstat is told. It makes a table of its own of what differs in any of it, so
// that what differs in every run is for people only.
var benchstatKeys = []string{"goos", "goarch", "pkg", "kernel", "device", "lab"}

// writeBenchmarks writes rows as Go benchmarks do, for benchstat: "benchstat -col /peer results.txt".
func writeBenchmarks(w io.Writer, environment [][2]string, procs int, rows []row) error {
	var b strings.Builder
	for _, e := range environment {
		if !slices.Contains(benchstatKeys, e[0]) {
			b.WriteString("# ")
		}
		fmt.Fprintf(&b, "%s: %s\n", e[0], e[1])
	}
	for i := range rows {
		r := &rows[i]
		if r.Failure != "" || r.Ops == 0 {
			continue
		}
		fmt.Fprintf(&b, "Benchmark%s-%d\t%d", strings.ToUpper(r.Workload[:1])+r.name()[1:], procs, r.Ops)
		unit := func(v float64, name string) {
			if !math.IsNaN(v) && v != 0 {
				fmt.Fprintf(&b, "\t%.6g %s", v, name)
			}
		}
		if r.OpsPerS != 0 {
			unit(1e9/r.OpsPerS, "ns/op")
		}
		unit(r.BytesPS, "B/s")
		unit(r.P50, "p50-ns")
		unit(r.P99, "p99-ns")
		unit(r.P999, "p99.9-ns")
		unit(r.CPUPerOp, "cpu-ns/op")
		b.WriteByte('\n')
	}
	_, err := io.WriteString(w, b.String())
	return err
}

// byRound returns one figure of the rows of a case and contestant, by round.
func byRound(rows []row, name string, figure func(*row) float64) map[int]float64 {
	m := make(map[int]float64)
	for i := range rows {
		r := &rows[i]
		if r.name() != name || r.Failure != "" {
			continue
		}
		if v := figure(r); !math.IsNaN(v) && v != 0 {
			m[r.Round] = v
		}
	}
	return m
}

// sortRows puts the rounds of a contestant one after the other, in the order in which cases and contestants first appear.
func sortRows(rows []row) {
	order := make(map[string]int)
	for i := range rows {
		if n := rows[i].name(); order[n] == 0 {
			order[n] = len(order) + 1
		}
	}
	slices.SortStableFunc(rows, func(a, b row) int {
		return cmp.Or(cmp.Compare(order[a.name()], order[b.name()]), cmp.Compare(a.Round, b.Round))
	})
}
