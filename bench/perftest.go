package main

import (
	"context"
	"errors"
	"fmt"
	"math"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/valkeyrdma/valkeyrdma/internal/servers"
)

// perftestPeer is ib_write_lat or ib_write_bw: what the device can do when nothing but the device is asked.
type perftestPeer struct {
	l        *lab
	program  string
	workload string
	size     int
	gid      int
	perSec   float64 // messages, by the last measurement
}

// openPerftest is the program of that name, for a workload and messages of a size.
func openPerftest(workload string, size int) openFunc {
	return func(_ context.Context, l *lab, name string) (contestant, error) {
		program, err := exec.LookPath(name)
		if err != nil {
			return nil, err
		}
		gid, err := gidIndex("/sys/class/infiniband/"+l.device, l.host)
		if err != nil {
			return nil, err
		}
		once := 30*time.Microsecond + time.Duration(float64(size)/60e6*1e9)
		return &perftestPeer{l: l, program: program, workload: workload, size: size, gid: gid,
			perSec: float64(time.Second) / float64(once)}, nil
	}
}

func (p *perftestPeer) close() {}

// gidIndex finds the device's entry for an address. Of several, RoCE v2 is the one that connections use.
func gidIndex(device, addr string) (int, error) {
	want, err := netip.ParseAddr(addr)
	if err != nil {
		return 0, err
	}
	found := -1
	for i := range 256 {
		gid, err := os.ReadFile(fmt.Sprintf("%s/ports/1/gids/%d", device, i))
		if err != nil {
			break
		}
		got, err := netip.ParseAddr(strings.TrimSpace(string(gid)))
		if err != nil || got.Unmap() != want {
			continue
		}
		kind, _ := os.ReadFile(fmt.Sprintf("%s/ports/1/gid_attrs/types/%d", device, i))
		if found < 0 || strings.TrimSpace(string(kind)) == "RoCE v2" {
			found = i
		}
	}
	if found < 0 {
		return 0, fmt.Errorf("%s has no GID for %s", filepath.Base(device), addr)
	}
	return found, nil
}

func (p *perftestPeer) measure(d time.Duration) ([]row, error) {
	for try := 0; ; try++ {
		n := min(max(int(p.perSec*d.Seconds()), 5), 1_000_000)
		out, err := p.run(n)
		if err != nil {
			return nil, err
		}
		fields, err := parsePerftest(out)
		if err != nil {
			return nil, err
		}
		r := row{Workload: p.workload, Size: p.size, Ops: n, P50: math.NaN(), P99: math.NaN(), P999: math.NaN(), Max: math.NaN()}
		if strings.HasSuffix(p.program, "_lat") {
			us := func(name string) float64 { return fields[name] * 1e3 }
			r.P50, r.P99, r.P999 = us("t_typical[usec]"), us("99% percentile[usec]"), us("99.9% percentile[usec]")
			r.Max = us("t_max[usec]")
			// There and back is one operation here, as for the other contestants; the times are of one way.
			r.OpsPerS = 1e9 / (2 * us("t_avg[usec]"))
			r.BytesPS = math.NaN()
		} else {
			r.BytesPS = fields["BW average[MB/sec]"] * (1 << 20) // it says MB and means MiB
			r.OpsPerS = r.BytesPS / float64(p.size)
		}
		if math.IsNaN(r.OpsPerS) || math.IsInf(r.OpsPerS, 0) || r.OpsPerS == 0 {
			return nil, fmt.Errorf("%s reports no result: %v", filepath.Base(p.program), fields)
		}
		p.perSec = r.OpsPerS
		r.Seconds = float64(n) / r.OpsPerS
		r.CPUPerOp = math.NaN() // most of it would be that of starting the program
		if r.Seconds < d.Seconds()/4 && try == 0 {
			continue
		}
		return []row{r}, nil
	}
}

// run starts the program twice, as a server and as its client, and returns what the client prints.
func (p *perftestPeer) run(n int) (string, error) {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	port, err := servers.NewPort(p.l.host)
	if err != nil {
		return "", err
	}
	args := []string{"-d", p.l.device, "-x", strconv.Itoa(p.gid), "-F", "-s", strconv.Itoa(p.size), "-n", strconv.Itoa(n),
		"-p", strconv.Itoa(port)}
	if !strings.HasSuffix(p.program, "_lat") {
		args = append(args, "--tx-depth", strconv.Itoa(min(128, n)))
	}
	server := exec.CommandContext(ctx, p.program, args...)
	if err := server.Start(); err != nil {
		return "", err
	}
	defer func() {
		cancel()
		_ = server.Wait()
	}()
	for !listens(port) {
		if ctx.Err() != nil {
			return "", errors.New(filepath.Base(p.program) + " does not listen")
		}
		time.Sleep(5 * time.Millisecond)
	}
	client := exec.CommandContext(ctx, p.program, append(args, p.l.host)...)
	out, err := client.CombinedOutput()
	if ctx.Err() != nil {
		err = fmt.Errorf("did not finish %d messages within %v", n, patience)
	}
	if err != nil {
		return "", fmt.Errorf("%s: %w: %s", filepath.Base(p.program), err, lastLine(string(out)))
	}
	_ = server.Wait()
	return string(out), nil
}

// listens says whether a program listens on a TCP port. To connect would be to be its client.
func listens(port int) bool {
	for _, name := range []string{"/proc/net/tcp", "/proc/net/tcp6"} {
		b, _ := os.ReadFile(name)
		if listensIn(string(b), port) {
			return true
		}
	}
	return false
}

func listensIn(procNetTCP string, port int) bool {
	want := fmt.Sprintf(":%04X", port)
	for line := range strings.Lines(procNetTCP) {
		if f := strings.Fields(line); len(f) > 3 && strings.HasSuffix(f[1], want) && f[3] == "0A" {
			return true
		}
	}
	return false
}

// parsePerftest reads the one line of results, with the names above it. Some names have spaces within; all but the first two
// end with their unit in brackets.
func parsePerftest(out string) (map[string]float64, error) {
	lines := strings.Split(out, "\n")
	for i, line := range lines {
		if !strings.HasPrefix(strings.TrimSpace(line), "#bytes") || i+1 == len(lines) {
			continue
		}
		var names []string
		name := ""
		for _, f := range strings.Fields(line) {
			if name != "" {
				name += " "
			}
			name += f
			if strings.HasPrefix(f, "#") || strings.HasSuffix(f, "]") {
				names = append(names, name)
				name = ""
			}
		}
		values := strings.Fields(lines[i+1])
		if len(values) != len(names) {
			return nil, fmt.Errorf("perftest reports %d values for %d names", len(values), len(names))
		}
		fields := make(map[string]float64)
		for j, v := range values {
			x, err := strconv.ParseFloat(v, 64)
			if err != nil {
				return nil, fmt.Errorf("perftest reports %q for %s", v, names[j])
			}
			fields[names[j]] = x
		}
		return fields, nil
	}
	return nil, errors.New("perftest reports no result: " + lastLine(out))
}
