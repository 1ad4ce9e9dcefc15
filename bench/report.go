package main

import (
	"bufio"
	"fmt"
	"io"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
	"unicode/utf8"
)

// load reads the results that save has written.
func load(dir string) (environment [][2]string, rows []row, err error) {
	f, err := os.Open(filepath.Join(dir, "results.csv"))
	if err != nil {
		return nil, nil, err
	}
	defer f.Close()
	if rows, err = readCSV(f); err != nil {
		return nil, nil, fmt.Errorf("%s: %w", f.Name(), err)
	}
	e, err := os.Open(filepath.Join(dir, "environment.txt"))
	if err != nil {
		return nil, nil, err
	}
	defer e.Close()
	sc := bufio.NewScanner(e)
	for sc.Scan() {
		if name, value, ok := strings.Cut(sc.Text(), ": "); ok {
			environment = append(environment, [2]string{name, value})
		}
	}
	return environment, rows, sc.Err()
}

// printReport writes tables of the results in dir for people to read, and to report.txt there.
func printReport(w io.Writer, dir string) error {
	environment, rows, err := load(dir)
	if err != nil {
		return err
	}
	f, err := os.Create(filepath.Join(dir, "report.txt"))
	if err != nil {
		return err
	}
	_, err = io.WriteString(io.MultiWriter(w, f), reportText(environment, rows))
	if err2 := f.Close(); err == nil {
		err = err2
	}
	return err
}

func reportText(environment [][2]string, rows []row) string {
	var b strings.Builder
	b.WriteString("Environment\n")
	for _, e := range environment {
		fmt.Fprintf(&b, "  %-8s %s\n", e[0], e[1])
	}
	b.WriteString("\nMedians over the rounds. The last column compares the rate with that of the first contestant: the median of the\n" +
		"ratios within each round, with the smallest and the largest. Ops are those of a round; of fewer than 1000, the 99.9th\n" +
		"percentile is the slowest.\n")
	for start := 0; start < len(rows); {
		end := start
		for end < len(rows) && rows[end].caseName() == rows[start].caseName() {
			end++
		}
		b.WriteString("\n" + rows[start].caseName() + "\n")
		b.WriteString(indent(caseTable(rows[start:end])))
		start = end
	}
	b.WriteString("\nTargets\n")
	some := slices.ContainsFunc(environment, func(e [2]string) bool { return e[0] == "run" && strings.Contains(e[1], ", only ") })
	b.WriteString(indent(targetTable(rows, some)))
	return b.String()
}

func caseTable(rows []row) string {
	t := table{{"contestant", "ops", "rate/s", "MB/s", "p50", "p99", "p99.9", "max", "CPU/op", "rate against the first"}}
	seen := make(map[string]bool)
	first := ""
	for i := range rows {
		name := rows[i].name()
		if seen[name] {
			continue
		}
		seen[name] = true
		if first == "" {
			first = name
		}
		over := func(figure func(*row) float64) float64 {
			var v []float64
			for _, x := range byRound(rows, name, figure) {
				v = append(v, x)
			}
			return median(v)
		}
		against := ""
		if s := spreadOf(ratios(byRound(rows, name, rate), byRound(rows, first, rate))); name != first && s.N > 0 {
			against = fmt.Sprintf("%.2f (%.2f–%.2f)", s.Median, s.Min, s.Max)
		}
		label := strings.TrimPrefix(name, rows[i].caseName()+"/")
		label = strings.TrimPrefix(label, "peer=")
		line := []string{label, count(over(func(r *row) float64 { return float64(r.Ops) })), count(over(rate)), megabytes(over(func(r *row) float64 { return r.BytesPS })), clock(over(p50)),
			clock(over(func(r *row) float64 { return r.P99 })), clock(over(func(r *row) float64 { return r.P999 })),
			clock(over(func(r *row) float64 { return r.Max })), clock(over(func(r *row) float64 { return r.CPUPerOp })), against}
		if failed, why := failures(rows, name); failed > 0 {
			line = append(line, fmt.Sprintf("failed in %d rounds: %s", failed, why))
		}
		t = append(t, line)
	}
	return t.String()
}

// failures counts the rounds in which a contestant failed, and says why the last one did.
func failures(rows []row, name string) (n int, why string) {
	for i := range rows {
		if rows[i].name() == name && rows[i].Failure != "" {
			n, why = n+1, rows[i].Failure
		}
	}
	return n, why
}

// targetTable is the list of targets; measured leaves out those that were not.
func targetTable(rows []row, measured bool) string {
	var verdicts []verdict
	for _, x := range targets() {
		verdicts = append(verdicts, x.judge(rows))
	}
	verdicts = append(verdicts,
		judgeEdges(rows, "edge-out", "slower than 10 times the median at a window edge, to the server"),
		judgeEdges(rows, "edge-in", "slower than 10 times the median at a window edge, from the server"))
	t := table{{"target", "wanted", "measured: median (min–max)", ""}}
	for _, v := range verdicts {
		if v.measured == notMeasured && measured {
			continue
		}
		t = append(t, []string{v.text, v.wanted, v.measured, v.reached})
	}
	return t.String()
}

// A table is written with its columns aligned: the first to the left, the others too where they are not numbers.
type table [][]string

func (t table) String() string {
	var widths []int
	for _, line := range t {
		for i, s := range line {
			if i == len(widths) {
				widths = append(widths, 0)
			}
			widths[i] = max(widths[i], utf8.RuneCountInString(s))
		}
	}
	var b strings.Builder
	for _, line := range t {
		var l strings.Builder
		for i, s := range line {
			pad := strings.Repeat(" ", widths[i]-utf8.RuneCountInString(s))
			if i == 0 || strings.ContainsAny(s, " ") {
				l.WriteString(s + pad + "  ")
			} else {
				l.WriteString(pad + s + "  ")
			}
		}
		b.WriteString(strings.TrimRight(l.String(), " ") + "\n")
	}
	return b.String()
}

func indent(s string) string {
	var b strings.Builder
	for line := range strings.Lines(s) {
		b.WriteString("  " + line)
	}
	return b.String()
}

// Figures, with three digits or so; nothing where there is none.

func count(v float64) string {
	switch {
	case math.IsNaN(v):
		return ""
	case v < 100:
		return fmt.Sprintf("%.3g", v)
	}
	return fmt.Sprintf("%.0f", v)
}

func megabytes(v float64) string {
	switch {
	case math.IsNaN(v):
		return ""
	case v < 10e6:
		return fmt.Sprintf("%.2f", v/1e6)
	}
	return fmt.Sprintf("%.0f", v/1e6)
}

func clock(ns float64) string {
	if math.IsNaN(ns) {
		return ""
	}
	d := time.Duration(ns)
	switch {
	case d >= time.Second:
		return fmt.Sprintf("%.2fs", d.Seconds())
	case d >= time.Millisecond:
		return fmt.Sprintf("%.3gms", ns/1e6)
	case d >= time.Microsecond:
		return fmt.Sprintf("%.3gµs", ns/1e3)
	}
	return fmt.Sprintf("%dns", d)
}
