package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"runtime"
	"strings"
	"syscall"
	"time"
)

// nothingLeftOut is what -only is when it is not given.
var nothingLeftOut = regexp.MustCompile("")

func main() {
	if err := run(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// config is what the command line says.
type config struct {
	quick  bool
	only   *regexp.Regexp
	rounds int
	each   time.Duration
	dir    string
}

func run(args []string) error {
	var (
		c      config
		flags  = flag.NewFlagSet("bench", flag.ExitOnError)
		only   = flags.String("only", "", "measure only what matches this `regexp`, such as get/size=64B.*go-")
		list   = flags.Bool("list", false, "list what there is to measure")
		serve  = flags.String("serve", "", "be the lean server that the bench starts with this")
		plot   = flags.Bool("plot", false, "measure nothing; draw what is in the directory of -o, into plots below it")
		report = flags.Bool("report", false, "measure nothing; report what is in the directory of -o")
	)
	flags.BoolVar(&c.quick, "quick", false, "only what the targets are about, in short rounds")
	flags.IntVar(&c.rounds, "rounds", 0, "how many `rounds` (5; with -quick 3)")
	flags.DurationVar(&c.each, "each", 0, "how long each contestant is measured in a round (1s; with -quick 500ms)")
	flags.StringVar(&c.dir, "o", "build/bench", "the `directory` for the results")
	_ = flags.Parse(args)
	if flags.NArg() > 0 {
		return fmt.Errorf("unexpected argument %q", flags.Arg(0))
	}
	if c.rounds == 0 {
		c.rounds = map[bool]int{false: 5, true: 3}[c.quick]
	}
	if c.each == 0 {
		c.each = map[bool]time.Duration{false: time.Second, true: 500 * time.Millisecond}[c.quick]
	}
	var err error
	if c.only, err = regexp.Compile(*only); err != nil {
		return err
	}
	switch {
	case *serve != "":
		return serveLean(*serve)
	case *report:
		return printReport(os.Stdout, c.dir)
	case *plot:
		environment, rows, err := load(c.dir)
		if err != nil {
			return err
		}
		return makePlots(filepath.Join(c.dir, "plots"), environment, rows)
	case *list:
		for _, g := range c.selected() {
			for _, p := range g.peers {
				r := p.row(g)
				fmt.Println(r.name())
			}
		}
		return nil
	}
	return c.measure()
}

// selected returns the cases of this run, with the contestants that take part.
func (c *config) selected() []group {
	var selected []group
	for _, g := range groups() {
		if c.quick && !g.quick {
			continue
		}
		var peers []opener
		for _, p := range g.peers {
			if r := p.row(g); (p.quick || !c.quick) && c.only.MatchString(r.name()) {
				peers = append(peers, p)
			}
		}
		if g.peers = peers; len(peers) > 0 {
			selected = append(selected, g)
		}
	}
	return selected
}

// measure runs the cases, writes the results and reports them. An interrupt ends it early, with the results so far.
func (c *config) measure() error {
	ctx, cancel := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer cancel()
	l, err := newLab(!c.quick)
	if err != nil {
		return err
	}
	defer l.close()
	if err := os.MkdirAll(c.dir, 0o777); err != nil {
		return err
	}
	selected := c.selected()
	if len(selected) == 0 {
		return errors.New("nothing matches -only; -list shows what there is")
	}
	environment := describe(c)
	began := time.Now()
	var rows []row
	var quiet paces
	for i, g := range selected {
		fmt.Fprintf(os.Stderr, "bench: %3.0f s, %d of %d: %s\n", time.Since(began).Seconds(), i+1, len(selected), g.row.caseName())
		rows = append(rows, c.compete(ctx, l, g, &quiet)...)
		if ctx.Err() != nil {
			break
		}
	}
	fmt.Fprintf(os.Stderr, "bench: measured in %.0f s\n", time.Since(began).Seconds())
	environment = append(environment, [2]string{"quiet", quiet.String()})
	sortRows(rows)
	if err := save(c.dir, environment, rows); err != nil {
		return err
	}
	if err := printReport(os.Stdout, c.dir); err != nil {
		return err
	}
	return ctx.Err()
}

// compete runs all rounds of one case.
func (c *config) compete(ctx context.Context, l *lab, g group, quiet *paces) []row {
	var rows []row
	d := c.each
	if g.longer > 0 {
		d = time.Duration(float64(d) * g.longer)
	}
	entrants := make([]entrant, len(g.peers))
	for i, p := range g.peers {
		entrants[i] = entrant{opener: p, l: l}
	}
	for round := 1; round <= c.rounds && ctx.Err() == nil; round++ {
		quiet.measure()
		for i := range entrants {
			e := &entrants[i]
			got, err := e.turn(ctx, d)
			if err != nil && ctx.Err() != nil {
				break
			}
			if err != nil {
				got = []row{e.row(g).failed(err)}
				fmt.Fprintf(os.Stderr, "bench: %s, %s, round %d: %v\n", g.row.caseName(), e.name, round, err)
			}
			for j := range got {
				got[j].Peer, got[j].Round = e.name, round
			}
			rows = append(rows, got...)
		}
	}
	for i := range entrants {
		entrants[i].close()
	}
	return rows
}

// An entrant is a contestant that may have to start afresh.
type entrant struct {
	opener
	l *lab
	c contestant
}

// turn measures once. A contestant that fails or does not come to an end is closed, and opened anew for its next turn.
func (e *entrant) turn(ctx context.Context, d time.Duration) ([]row, error) {
	if s := serverOf(e.c); s != nil && (s.Ended() || s.busy()) {
		fmt.Fprintf(os.Stderr, "bench: the server of %s has died, or works without being asked to: it gets a new one\n", e.name)
		e.close()
	}
	if e.c == nil {
		c, err := e.open(ctx, e.l, e.name)
		if err != nil {
			return nil, err
		}
		e.c = c
	}
	type outcome struct {
		rows []row
		err  error
	}
	done := make(chan outcome, 1)
	go func() {
		rows, err := e.c.measure(d)
		done <- outcome{rows, err}
	}()
	var o outcome
	select {
	case o = <-done:
	case <-time.After(2*patience + d):
		o.err = errors.New("did not finish")
	case <-ctx.Done():
		o.err = ctx.Err()
	}
	if o.err != nil {
		e.close()
	} else if s := serverOf(e.c); s != nil {
		s.left()
	}
	return o.rows, o.err
}

// close ends the contestant. One that hangs in it is left behind.
func (e *entrant) close() {
	if e.c == nil {
		return
	}
	done := make(chan struct{})
	go func(c contestant) {
		c.close()
		close(done)
	}(e.c)
	select {
	case <-done:
	case <-time.After(10 * time.Second):
		fmt.Fprintf(os.Stderr, "bench: %s does not come to an end\n", e.name)
	}
	e.c = nil
}

func serverOf(c contestant) *server {
	switch c := c.(type) {
	case *goClient:
		return c.server
	case *rawClient:
		return c.server
	case *cClient:
		return c.server
	case *edgeValkey:
		return c.server
	}
	return nil
}

// describe says where and how the results came about, as names and values.
func describe(c *config) [][2]string {
	e := [][2]string{
		{"goos", runtime.GOOS}, {"goarch", runtime.GOARCH}, {"pkg", "github.com/valkeyrdma/valkeyrdma/bench"},
		{"date", time.Now().UTC().Format("2006-01-02 15:04 UTC")},
		{"go", runtime.Version()},
		{"cpus", fmt.Sprint(runtime.NumCPU())},
		{"kernel", kernelRelease()},
		{"device", os.Getenv("VALKEYRDMA_DEVICE")},
		{"lab", os.Getenv("VALKEYRDMA_LAB_INFO")},
	}
	if commit := os.Getenv("VALKEYRDMA_BENCH_COMMIT"); commit != "" {
		e = append(e, [2]string{"commit", commit})
	}
	if b, err := os.ReadFile("/proc/loadavg"); err == nil {
		e = append(e, [2]string{"load", strings.Join(strings.Fields(string(b))[:3], " ")})
	}
	how := fmt.Sprintf("%d rounds of %v", c.rounds, c.each)
	if c.quick {
		how += ", quick"
	}
	if s := c.only.String(); s != "" {
		how += ", only " + s
	}
	return append(e, [2]string{"run", how})
}

func kernelRelease() string {
	b, _ := os.ReadFile("/proc/sys/kernel/osrelease")
	return strings.TrimSpace(string(b))
}

// save writes the results.
func save(dir string, environment [][2]string, rows []row) error {
	write := func(name string, f func(io.Writer) error) error {
		file, err := os.Create(filepath.Join(dir, name))
		if err != nil {
			return err
		}
		err = f(file)
		if err2 := file.Close(); err == nil {
			err = err2
		}
		return err
	}
	return errors.Join(
		write("environment.txt", func(w io.Writer) error {
			for _, e := range environment {
				if _, err := fmt.Fprintf(w, "%s: %s\n", e[0], e[1]); err != nil {
					return err
				}
			}
			return nil
		}),
		write("results.csv", func(w io.Writer) error { return writeCSV(w, rows) }),
		write("results.txt", func(w io.Writer) error {
			return writeBenchmarks(w, environment, runtime.GOMAXPROCS(0), rows)
		}),
	)
}
