package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"math"
	"net"
	"os/exec"
	"strconv"
	"strings"
	"time"

	"github.com/valkeyrdma/valkeyrdma/internal/servers"
)

// cClient is Valkey's own client, valkey-benchmark. Its single thread serves all its connections.
type cClient struct {
	w       work
	l       *lab
	server  *server
	rdma    bool
	perSec  float64       // commands, by the last measurement
	startup time.Duration // CPU time of a run that does next to nothing
}

func openC(w work) openFunc {
	return func(ctx context.Context, l *lab, name string) (contestant, error) {
		s, err := l.startServer(ctx)
		if err != nil {
			return nil, err
		}
		c := &cClient{w: w, l: l, server: s, rdma: name == cRDMA, perSec: cGuess(w)}
		if err := s.fill(w.size); err != nil {
			c.close()
			return nil, err
		}
		// The CPU time of starting the program, and of connecting once, is no part of an operation.
		if l.cpuOfStart[name] == 0 {
			_, cpu, err := c.run(1, patience)
			if err != nil {
				c.close()
				return nil, err
			}
			l.cpuOfStart[name] = cpu
		}
		c.startup = l.cpuOfStart[name]
		return c, nil
	}
}

func (c *cClient) close() { c.server.Kill() }

// cGuess is how many commands a second valkey-benchmark may be expected to do in a virtual machine. It says only how
// many to order in the first measurement.
func cGuess(w work) float64 {
	once := 300*time.Microsecond + time.Duration(float64(w.size)/60e6*1e9)
	return float64(time.Second) / float64(once) * min(float64(max(w.conns, 1)), 2) * math.Sqrt(float64(max(w.pipeline, 1)))
}

func (c *cClient) measure(d time.Duration) ([]row, error) {
	// valkey-benchmark has no warm-up worth the name for few commands: its first one takes half as long again as the others.
	// Nor does it count the first SET over RDMA: that is written before its clock starts. Where commands are many, neither
	// matters; where they are few, a run of one command is taken from the one of many.
	few := c.w.size >= 1<<20
	for try := 0; ; try++ {
		n := max(int(c.perSec*d.Seconds()), least(c.w.size)+1, c.w.conns*4, c.w.pipeline*4)
		r, cpu, err := c.run(n, patience)
		if err != nil {
			return nil, err
		}
		c.perSec = r.OpsPerS
		// An expectation that was far too low makes a run too short to tell anything.
		if r.Seconds < d.Seconds()/4 && try == 0 {
			continue
		}
		startup := c.startup
		if few {
			var one row
			if one, startup, err = c.run(1, patience); err != nil {
				return nil, err
			}
			if err := r.subtract(one); err != nil {
				return nil, err
			}
		}
		r.BytesPS = r.OpsPerS * float64(c.w.size)
		r.CPUPerOp = math.NaN()
		if cpu > startup {
			r.CPUPerOp = float64(cpu-startup) / float64(r.Ops)
		}
		if c.w.workload != "set" && c.w.size > 4<<10 {
			// It takes the time when the first bytes of a reply have come.
			r.P50, r.P99, r.P999, r.Max = math.NaN(), math.NaN(), math.NaN(), math.NaN()
		}
		return []row{r}, nil
	}
}

// subtract takes the commands of a shorter run, and their time, out of r.
func (r *row) subtract(shorter row) error {
	ops, seconds := r.Ops-shorter.Ops, r.Seconds-shorter.Seconds
	if ops <= 0 || seconds <= 0 {
		return fmt.Errorf("valkey-benchmark needed %.3f s for %d commands, and %.3f s for %d", shorter.Seconds, shorter.Ops, r.Seconds, r.Ops)
	}
	r.Ops, r.Seconds, r.OpsPerS = ops, seconds, float64(ops)/seconds
	return nil
}

// run lets valkey-benchmark do n commands.
func (c *cClient) run(n int, limit time.Duration) (row, time.Duration, error) {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	test := "get"
	if c.w.workload == "set" {
		test = "set"
	}
	host, port, err := net.SplitHostPort(c.server.Addr)
	if err != nil {
		return row{}, 0, err
	}
	args := []string{"-h", host, "-p", port, "-t", test, "-d", strconv.Itoa(c.w.size),
		"-n", strconv.Itoa(n), "-c", strconv.Itoa(max(c.w.conns, 1)), "-P", strconv.Itoa(max(c.w.pipeline, 1))}
	if c.rdma {
		args = append(args, "--rdma")
	}
	cmd := exec.CommandContext(ctx, servers.Program("valkey-benchmark"), args...)
	out, err := cmd.CombinedOutput()
	if ctx.Err() != nil {
		return row{}, 0, fmt.Errorf("valkey-benchmark did not finish %d commands within %v", n, limit)
	}
	if err != nil {
		return row{}, 0, fmt.Errorf("valkey-benchmark: %w: %s", err, lastLine(string(out)))
	}
	t, err := parseBenchmark(string(out))
	if err != nil {
		return row{}, 0, err
	}
	r := c.w.row()
	r.Ops, r.Seconds, r.OpsPerS = t.requests, float64(t.requests)/t.perSec, t.perSec
	r.P50, r.P99, r.P999, r.Max = t.p50, t.p99, t.p999, t.max
	return r, cmd.ProcessState.UserTime() + cmd.ProcessState.SystemTime(), nil
}

// benchmarkReport is what valkey-benchmark says of one test. Latencies are in nanoseconds.
type benchmarkReport struct {
	requests            int
	perSec              float64
	p50, p99, p999, max float64
}

// parseBenchmark reads the report that valkey-benchmark writes for people, because the one with --csv has no percentile above
// the 99th. Before it come lines of progress, each ended by a carriage return.
func parseBenchmark(out string) (benchmarkReport, error) {
	b := benchmarkReport{p999: math.NaN()}
	var names []string
	sc := bufio.NewScanner(strings.NewReader(out))
	for sc.Scan() {
		line := sc.Text()
		line = strings.TrimSpace(line[strings.LastIndexByte(line, '\r')+1:])
		f := strings.Fields(line)
		switch {
		case strings.Contains(line, " requests completed in "):
			b.requests, _ = strconv.Atoi(f[0])
		case len(f) > 4 && f[1] == "<=" && f[3] == "milliseconds":
			// The list of percentiles comes first, the one of times after it, with percentages that may be anything.
			p, err := strconv.ParseFloat(strings.TrimSuffix(f[0], "%"), 64)
			ms, err2 := strconv.ParseFloat(f[2], 64)
			if err == nil && err2 == nil && p >= 99.9 && math.IsNaN(b.p999) {
				b.p999 = ms * 1e6
			}
		case strings.HasPrefix(line, "throughput summary:") && len(f) > 2:
			b.perSec, _ = strconv.ParseFloat(f[2], 64)
		case len(f) > 1 && f[0] == "avg":
			names = f
		case names != nil && len(f) == len(names):
			for i, name := range names {
				ms, err := strconv.ParseFloat(f[i], 64)
				if err != nil {
					return b, fmt.Errorf("valkey-benchmark reports a latency of %q", f[i])
				}
				switch name {
				case "p50":
					b.p50 = ms * 1e6
				case "p99":
					b.p99 = ms * 1e6
				case "max":
					b.max = ms * 1e6
				}
			}
			names = nil
		}
	}
	if b.requests == 0 || b.perSec == 0 || b.p50 == 0 {
		return b, errors.New("the report of valkey-benchmark is not understood: " + lastLine(out))
	}
	return b, nil
}
