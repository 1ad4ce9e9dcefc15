//go:build linux && cgo

package valkeyrdma

import (
	"context"
	"net/netip"
	"slices"
	"sync"
	"time"
)

// A server accepts one client after the other, and answers nobody meanwhile. Of many dials at the same time each would take as long as
// all of them, so that many callers, as those of a pool after the server was restarted, might all be too late. So no more than
// maxActive are under way to a server, and others wait for their turn, in the order in which they came.
//
// Callers that have less time than it takes, and try again, would keep it busy with connections that come too late, for ever. So once a
// dial to a server was given up,
//
//   - it goes on, and its connection is for the next caller;
//   - there are no others than maxPending at a time, and none as long as there is a connection to be had;
//   - after each of those that were given up there is a pause, in which the server, and this host, can do something else; but not for
//     callers that have more time than it took.
//
// It ends when none is left that was given up. Nor may those stand in the way that nobody will ever answer, because the host was
// replaced, say, and they ask the old one: whenever none has begun for lostAfter, another may; and once one has succeeded, those that
// began before it do not count any more, if that was lostAfter ago.
const (
	maxActive  = 8
	maxPending = 2
	maxKept    = 8               // dials that go on as connections; others of those that were given up end when they are accepted
	maxPause   = time.Second / 4 // a pause is twice as long as the dial took, but no longer
	lostAfter  = 2 * time.Second
)

// littleTime is too little to make use of a connection, even on a slow host: a client first says who it is, and asks what it wants.
const littleTime = 50 * time.Millisecond

// spareTime is how long a connection that came too late for the dial that asked for it is kept for the next one.
const spareTime = time.Second

// pending are the dials that are under way, those included that were given up and go on because the server may not survive their
// end.
var pending = newDials()

type dials struct {
	mu sync.Mutex
	to map[path]*dialsTo
}

func newDials() *dials { return &dials{to: make(map[path]*dialsTo)} }

// dialsTo are those of one path.
type dialsTo struct {
	waiting   []*waiter   // in the order in which they came
	recheck   *time.Timer // for when it is lostAfter since the last one began
	began     time.Time   // when the last one began
	succeeded time.Time   // when the last one began that has succeeded
	active    []time.Time // when they began
	abandoned []time.Time // when they began
	kept      int         // of the abandoned, those that may become spare connections, and those that have
	pauses    int
	took      time.Duration // the last of the abandoned
	spares    []spare
}

// A path is from one address, which may be the zero AddrPort, to another.
type path struct{ remote, local netip.AddrPort }

type spare struct {
	conn *conn
	of   wish
}

// A wish is what a connection is to be.
type wish struct {
	path
	options options
}

// A waiter is a caller who waits for a turn.
type waiter struct {
	wish
	deadline time.Time     // zero: there is none
	half     time.Duration // of the time that it had at first
	turn     chan turn     // has room for the one that it gets
}

// A turn is a connection that is there already, or a dial that began then and has to end.
type turn struct {
	conn  *conn
	began time.Time
}

// begin waits for a turn.
func (d *dials) begin(ctx context.Context, w wish) (*conn, time.Time, error) {
	me := &waiter{wish: w, turn: make(chan turn, 1)}
	if deadline, limited := ctx.Deadline(); limited {
		me.deadline, me.half = deadline, time.Until(deadline)/2
	}
	for {
		d.enter(me)
		var t turn
		select {
		case t = <-me.turn:
		case <-ctx.Done():
			if d.leave(me) {
				return nil, time.Time{}, contextError(ctx, "waiting for earlier dials to this address to be over")
			}
			t = <-me.turn // it came at the same time
		}
		if t.conn == nil || !t.conn.ended() {
			return t.conn, t.began, nil
		}
		_ = t.conn.Close()
	}
}

func (d *dials) enter(me *waiter) {
	d.mu.Lock()
	defer d.mu.Unlock()
	to := d.to[me.path]
	if to == nil {
		to = new(dialsTo)
		d.to[me.path] = to
	}
	to.waiting = append(to.waiting, me)
	d.serve(me.path)
}

// leave is false if the turn has come.
func (d *dials) leave(me *waiter) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	to := d.to[me.path]
	if to == nil {
		return false
	}
	i := slices.Index(to.waiting, me)
	if i < 0 {
		return false
	}
	to.waiting = slices.Delete(to.waiting, i, i+1)
	d.serve(me.path)
	return true
}

// serve is called after each change. It gives turns to those who wait, the first of those for whom there is something: were it any
// of them, as it happens, some would be overtaken until their time is over.
func (d *dials) serve(of path) {
	to := d.to[of]
	for i := 0; i < len(to.waiting); i++ {
		m := to.waiting[i]
		if t, ok := to.turn(m); ok {
			m.turn <- t
			to.waiting = slices.Delete(to.waiting, i, i+1)
			i = -1 // it may have been what those before it waited for
		}
	}
	if to.recheck != nil {
		to.recheck.Stop()
	}
	if len(to.waiting)+len(to.active)+len(to.abandoned)+len(to.spares)+to.pauses == 0 {
		delete(d.to, of)
		return
	}
	if lost := lostAfter - time.Since(to.began); lost > 0 && len(to.waiting) > 0 {
		to.recheck = time.AfterFunc(lost, func() {
			d.mu.Lock()
			defer d.mu.Unlock()
			if d.to[of] == to {
				d.serve(of)
			}
		})
	}
}

// turn is what there is for m, if anything.
func (to *dialsTo) turn(m *waiter) (turn, bool) {
	limited, left := !m.deadline.IsZero(), time.Until(m.deadline)
	if i := slices.IndexFunc(to.spares, func(s spare) bool { return s.of == m.wish }); i >= 0 {
		// A caller that has waited for long, and has little time left, leaves a connection to those who can still make use of it.
		if limited && left < min(m.half, littleTime) {
			return turn{}, false
		}
		return turn{conn: to.takeSpare(i)}, true
	}
	if to.pauses > 0 && limited && left <= to.took {
		return turn{}, false
	}
	most := maxPending
	if to.calm() {
		most = maxActive
	}
	if to.unanswered(to.active)+to.unanswered(to.abandoned) >= most && time.Since(to.began) < lostAfter {
		return turn{}, false
	}
	to.began = time.Now()
	to.active = append(to.active, to.began)
	return turn{began: to.began}, true
}

func (to *dialsTo) takeSpare(i int) *conn {
	c := to.spares[i].conn
	to.spares = slices.Delete(to.spares, i, i+1)
	to.kept--
	return c
}

// unanswered is how many dials, which began at these times, may still be answered. A server accepts in turn, but those that it accepts
// one after the other may end in any order.
func (to *dialsTo) unanswered(dials []time.Time) (n int) {
	for _, began := range dials {
		if !began.Before(to.succeeded) || time.Since(began) < lostAfter {
			n++
		}
	}
	return n
}

// without is dials less one that began then.
func without(dials []time.Time, began time.Time) []time.Time {
	i := slices.Index(dials, began)
	return slices.Delete(dials, i, i+1)
}

// answered notes that the dial that began then has succeeded.
func (to *dialsTo) answered(began time.Time) {
	if began.After(to.succeeded) {
		to.succeeded = began
	}
}

// calm says whether nothing is left of dials that were given up.
func (to *dialsTo) calm() bool { return to.unanswered(to.abandoned)+len(to.spares)+to.pauses == 0 }

// end is called when a dial that was let through has succeeded or failed; it began then.
func (d *dials) end(of path, began time.Time, succeeded bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	to := d.to[of]
	to.active = without(to.active, began)
	if succeeded {
		to.answered(began)
	}
	d.serve(of)
}

// abandon counts a dial that goes on after its end. True: as a connection that may be of use.
func (d *dials) abandon(of path, began time.Time) (keep bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	to := d.to[of]
	to.abandoned = append(to.abandoned, began)
	keep = to.kept < maxKept
	if keep {
		to.kept++
	}
	return keep
}

// abandoned is called once for each abandon: the dial does not go on any more, and if it was to be kept, this came of it.
// wentOn is false if it did not go on at all.
func (d *dials) abandoned(w wish, began time.Time, kept bool, c *conn, wentOn bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	to := d.to[w.path]
	to.abandoned = without(to.abandoned, began)
	if wentOn {
		to.took = time.Since(began)
		to.pauses++
		time.AfterFunc(min(2*to.took, maxPause), func() {
			d.mu.Lock()
			defer d.mu.Unlock()
			to.pauses--
			d.serve(w.path)
		})
	}
	if c != nil {
		to.answered(began)
		to.spares = append(to.spares, spare{c, w})
		time.AfterFunc(spareTime, func() { d.discard(w.path, c) })
	} else if kept {
		to.kept--
	}
	d.serve(w.path)
}

// discard closes a spare connection that nobody wanted.
func (d *dials) discard(of path, c *conn) {
	if d.unwanted(of, c) {
		_ = c.Close()
	}
}

func (d *dials) unwanted(of path, c *conn) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	to := d.to[of]
	if to == nil {
		return false
	}
	i := slices.IndexFunc(to.spares, func(s spare) bool { return s.conn == c })
	if i < 0 {
		return false
	}
	to.takeSpare(i)
	d.serve(of)
	return true
}
