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

// Classes of operations. At the first edge a connection may have something to do that it has to do only once.
const (
	firstEdge = "first-edge"
	laterEdge = "edge"
	elsewhere = "elsewhere"
)

// samples are the times of operations, in nanoseconds, by class.
type samples map[string][]int64

func (s samples) add(class string, d time.Duration) { s[class] = append(s[class], int64(d)) }

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
func (e *edgeStudy) run(d time.Duration, do func(n int) (int, error)) (samples, error) {
	took := make(samples)
	end := time.Now().Add(d)
	for time.Now().Before(end) || len(took[laterEdge]) < 2 {
		skip := 0
		if n := e.fill(); n > 0 {
			moved, err := do(n)
			if err != nil {
				return nil, err
			}
			e.at += moved
			skip = edgeSkip
		}
		for i := range skip + edgeRun {
			class := elsewhere
			if e.crosses(e.size) {
				class = laterEdge
				if e.at < e.window {
					class = firstEdge
				}
			}
			start := time.Now()
			if _, err := do(e.size); err != nil {
				return nil, err
			}
			if i >= skip || class != elsewhere {
				took.add(class, time.Since(start))
			}
			e.at += e.size
		}
	}
	return took, nil
}

// rows makes a row for each class of operations. Slow is what took more than ten times the median of all.
func (e *edgeStudy) rows(r row, took samples, d time.Duration) []row {
	var all []int64
	for _, s := range took {
		all = append(all, s...)
	}
	slices.Sort(all)
	limit := 10 * percentile(all, 50)
	var rows []row
	for _, class := range []string{elsewhere, laterEdge, firstEdge} {
		s := took[class]
		if len(s) == 0 {
			continue
		}
		x := r
		x.Class, x.Ops, x.Seconds = class, len(s), d.Seconds()
		x.OpsPerS, x.BytesPS, x.CPUPerOp = math.NaN(), math.NaN(), math.NaN()
		slices.Sort(s)
		x.setLatencies(s)
		for _, t := range s {
			if t > limit {
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
		took, err := e.run(d, func(n int) (int, error) {
			if out {
				return n, c.call(n, 64, 64)
			}
			return n, c.call(64, n, min(n, 64<<10))
		})
		if err != nil {
			return nil, err
		}
		return e.rows(c.row, took, d), nil
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
		dial := rawDialer(rawRDMA, window)
		s, err := l.startServer(ctx, args...)
		if err != nil {
			return nil, err
		}
		e := &edgeValkey{rawClient: rawClient{server: s}, row: r, out: out, study: edgeStudy{window: r.Window, size: r.Size}}
		if err := s.fill(r.Window); err != nil {
			e.close()
			return nil, err
		}
		c, err := dial(ctx, s.Addr)
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
	took, err := e.study.run(d, func(n int) (int, error) {
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
	return e.study.rows(e.row, took, d), nil
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
