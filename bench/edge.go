package main

import (
	"context"
	"fmt"
	"math"
	"slices"
	"strconv"
	"time"
)

// The study of window edges.

// An edgeStudy is about the bytes that go in one direction, which fill one window after the other.
type edgeStudy struct {
	window int
	// size is of each operation's bytes in the direction under study. It does not divide the window, so that the operation
	// at the edge has bytes on both sides of it.
	size int
	at   int // bytes that have gone since the connection was made
}

const (
	edgeRun  = 16 // operations timed around each edge
	edgeSkip = 4  // operations before them that are not timed: they find all as the filling has left it
)

// crosses says whether the n next bytes lie in more than one window.
func (e *edgeStudy) crosses(n int) bool { return e.at/e.window != (e.at+n-1)/e.window }

// fill returns how many bytes must go so that the edge is in the middle of the operations timed next; 0 if windows are so
// small that the operations meet their edges anyway.
func (e *edgeStudy) fill() int {
	if e.window < 2*(edgeRun+edgeSkip)*e.size {
		return 0
	}
	// The operation at the edge has half of its bytes before it.
	n := e.window - e.at%e.window - (edgeSkip+edgeRun/2)*e.size - e.size/2
	if n < 0 {
		n += e.window
	}
	if n < e.size {
		return 0
	}
	return n
}

// run times operations for d. do moves that many bytes in the direction under study, and returns when they have been answered;
// where it cannot move exactly as many, it says how many it has moved. It can for operations of e.size.
func (e *edgeStudy) run(d time.Duration, do func(n int) (int, error)) (edge, elsewhere []int64, err error) {
	end := time.Now().Add(d)
	for time.Now().Before(end) || len(edge) < 2 {
		skip := 0
		if n := e.fill(); n > 0 {
			moved, err := do(n)
			if err != nil {
				return nil, nil, err
			}
			e.at += moved
			skip = edgeSkip
		}
		for i := range skip + edgeRun {
			crosses := e.crosses(e.size)
			start := time.Now()
			if _, err := do(e.size); err != nil {
				return nil, nil, err
			}
			took := int64(time.Since(start))
			e.at += e.size
			switch {
			case crosses:
				edge = append(edge, took)
			case i >= skip:
				elsewhere = append(elsewhere, took)
			}
		}
	}
	return edge, elsewhere, nil
}

// rows makes one row for the operations at the edge and one for the others. Slow is what took more than ten times the median
// of all.
func (e *edgeStudy) rows(r row, edge, elsewhere []int64, d time.Duration) []row {
	all := slices.Sorted(slices.Values(append(slices.Clone(edge), elsewhere...)))
	limit := 10 * percentile(all, 50)
	var rows []row
	for _, class := range []struct {
		name    string
		samples []int64
	}{{"edge", edge}, {"elsewhere", elsewhere}} {
		x := r
		x.Class, x.Ops, x.Seconds = class.name, len(class.samples), d.Seconds()
		x.OpsPerS, x.BytesPS, x.CPUPerOp = math.NaN(), math.NaN(), math.NaN()
		slices.Sort(class.samples)
		x.setLatencies(class.samples)
		for _, s := range class.samples {
			if s > limit {
				x.Slow++
			}
		}
		rows = append(rows, x)
	}
	return rows
}

// edges studies one direction against the lean server.
func edges(out bool) func(*leanClient, time.Duration) ([]row, error) {
	var (
		e  *edgeStudy
		on *leanClient
	)
	return func(c *leanClient, d time.Duration) ([]row, error) {
		if on != c { // a new connection, with windows that begin at its first byte
			e, on = &edgeStudy{window: c.row.Window, size: c.row.Size}, c
		}
		edge, elsewhere, err := e.run(d, func(n int) (int, error) {
			if out {
				return n, c.call(n, 64, 64)
			}
			return n, c.call(64, n, min(n, 64<<10))
		})
		if err != nil {
			return nil, err
		}
		return e.rows(c.row, edge, elsewhere, d), nil
	}
}

// edgeValkey is the study against a real server, whose receive window is told to it when it starts.
type edgeValkey struct {
	rawClient
	row   row
	out   bool
	study edgeStudy
}

func openEdgeValkey(r row, out bool) openFunc {
	return func(ctx context.Context, l *lab, _ string) (contestant, error) {
		window, args := 0, []string{"--rdma-rx-size", strconv.Itoa(r.Window)}
		if !out {
			window, args = r.Window, nil
		}
		dial, err := rawDialer(rawRDMA, window)
		if err != nil {
			return nil, err
		}
		s, err := l.startServer(ctx, args...)
		if err != nil {
			return nil, err
		}
		e := &edgeValkey{rawClient: rawClient{server: s}, row: r, out: out, study: edgeStudy{window: r.Window, size: r.Size}}
		if err := s.fill(r.Window); err != nil {
			e.close()
			return nil, err
		}
		c, err := dial(ctx, s.addr)
		if err != nil {
			e.close()
			return nil, err
		}
		e.conns = []*raw{newRaw(c)}
		return e, nil
	}
}

func (e *edgeValkey) measure(d time.Duration) ([]row, error) {
	request, moved := setOfSize(e.study.size)
	if moved != e.study.size {
		return nil, fmt.Errorf("there is no SET of %d bytes", e.study.size)
	}
	edge, elsewhere, err := e.study.run(d, func(n int) (int, error) {
		if e.out {
			request, moved := request, moved
			if n != e.study.size {
				request, moved = setOfSize(n)
			}
			return moved, e.conns[0].roundTrip(request, okReply)
		}
		request, want := rangeOfSize(n)
		return want.size, e.conns[0].roundTrip(request, want)
	})
	if err != nil {
		return nil, err
	}
	return e.study.rows(e.row, edge, elsewhere, d), nil
}

// setOfSize returns a SET that has n bytes on the wire, or one fewer where none has n.
func setOfSize(n int) ([]byte, int) {
	for _, key := range []string{"edge", "edges"} {
		for digits := 1; digits < 9; digits++ {
			frame := len(command([]byte("SET"), []byte(key), nil)) - 1 + digits
			if v := n - frame; v >= 0 && len(strconv.Itoa(v)) == digits {
				return command([]byte("SET"), []byte(key), payload(v)), n
			}
		}
	}
	return setOfSize(n - 1)
}

// rangeOfSize returns a GETRANGE of theKey whose reply has n bytes on the wire, or one fewer where none has n.
func rangeOfSize(n int) ([]byte, reply) {
	for digits := 1; digits < 9; digits++ {
		if v := n - digits - len("$\r\n\r\n"); v > 0 && len(strconv.Itoa(v)) == digits {
			return command([]byte("GETRANGE"), []byte(theKey), []byte("0"), strconv.AppendInt(nil, int64(v-1), 10)), getReply(v)
		}
	}
	return rangeOfSize(n - 1)
}
