//go:build linux && cgo

package valkeyrdma

import (
	"context"
	"net/netip"
	"slices"
	"sync"
	"time"
)

// A server accepts one client after the other, and answers nobody meanwhile. Callers that have less time than that takes, and try
// again, as a pool with short deadlines does after the server was restarted, would keep it busy with connections that come too late,
// for ever. So once a dial to a server was given up,
//
//   - it goes on, and its connection is for the next caller;
//   - there are no others than maxPending at a time, and none as long as there is a connection to be had;
//   - after each of those that were given up there is a pause, in which the server, and this host, can do something else; but not for
//     callers that have more time than it took.
//
// It ends when none is left that was given up. Nor may those stand in the way that nobody will ever answer, because the host was
// replaced, say, and they ask the old one: whenever none has begun for lostAfter, another may; and once one has succeeded, those that
// began before it do not count any more.
const (
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
var pending = dials{to: make(map[path]*dialsTo), changed: make(chan struct{})}

type dials struct {
	mu      sync.Mutex
	to      map[path]*dialsTo
	changed chan struct{} // closed, and made anew, when there may be something for those who wait
}

// dialsTo are those of one path.
type dialsTo struct {
	active    int
	began     time.Time   // the last of those that were let through
	succeeded time.Time   // when the one began that succeeded; the last such time
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

// begin waits for the turn of a dial, which then has to end; or returns a connection that is there already.
func (d *dials) begin(ctx context.Context, w wish) (*conn, error) {
	deadline, limited := ctx.Deadline()
	left := func() time.Duration { return time.Until(deadline) }
	half := left() / 2
	for {
		d.mu.Lock()
		to := d.to[w.path]
		if to == nil {
			to = new(dialsTo)
			d.to[w.path] = to
		}
		wanted := func(s spare) bool { return s.of == w }
		isThere := slices.ContainsFunc(to.spares, wanted)
		// A caller that has waited for long, and has little time left, leaves a connection to those who can still make use of it.
		if isThere && !(limited && left() < min(half, littleTime)) {
			c := d.take(w.path, wanted)
			ended := c.ended()
			d.mu.Unlock()
			if !ended {
				return c, nil
			}
			_ = c.Close()
			continue
		}
		paused := to.pauses > 0 && limited && left() <= to.took
		lost := lostAfter - time.Since(to.began)
		if to.calm() || !isThere && !paused && (to.active+to.unanswered() < maxPending || lost <= 0) {
			to.active++
			to.began = time.Now()
			d.mu.Unlock()
			return nil, nil
		}
		changed := d.changed
		d.mu.Unlock()
		var mayBeLost <-chan time.Time
		if !isThere && !paused {
			mayBeLost = time.After(lost)
		}
		select {
		case <-changed:
		case <-mayBeLost:
		case <-ctx.Done():
			return nil, contextError(ctx, "waiting for earlier dials to this address, which were given up and are not settled yet")
		}
	}
}

// unanswered is how many were given up and may still be answered. A server accepts in turn.
func (to *dialsTo) unanswered() (n int) {
	for _, began := range to.abandoned {
		if !began.Before(to.succeeded) {
			n++
		}
	}
	return n
}

// answered notes that the dial that began then has succeeded.
func (to *dialsTo) answered(began time.Time) {
	if began.After(to.succeeded) {
		to.succeeded = began
	}
}

// calm says whether nothing is left of dials that were given up.
func (to *dialsTo) calm() bool { return to.unanswered()+len(to.spares)+to.pauses == 0 }

// take removes a spare connection, the first that is wanted. nil: there is none.
func (d *dials) take(of path, wanted func(spare) bool) *conn {
	to := d.to[of]
	if to == nil {
		return nil
	}
	i := slices.IndexFunc(to.spares, wanted)
	if i < 0 {
		return nil
	}
	c := to.spares[i].conn
	to.spares = slices.Delete(to.spares, i, i+1)
	to.kept--
	d.tidy(of)
	return c
}

// tidy is called when less is pending.
func (d *dials) tidy(of path) {
	if to := d.to[of]; to.active+len(to.abandoned)+len(to.spares)+to.pauses == 0 {
		delete(d.to, of)
	}
	close(d.changed)
	d.changed = make(chan struct{})
}

// end is called when a dial that was let through has succeeded or failed; it began then.
func (d *dials) end(of path, began time.Time, succeeded bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	to := d.to[of]
	to.active--
	if succeeded {
		to.answered(began)
	}
	d.tidy(of)
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

// abandoned is called once for each abandon: the dial does not go on any more, and if it was to be kept, this came of it. It took so
// long; 0: it did not go on at all.
func (d *dials) abandoned(w wish, began time.Time, kept bool, c *conn, took time.Duration) {
	d.mu.Lock()
	defer d.mu.Unlock()
	to := d.to[w.path]
	i := slices.Index(to.abandoned, began)
	to.abandoned = slices.Delete(to.abandoned, i, i+1)
	if took > 0 {
		to.took = took
		to.pauses++
		time.AfterFunc(min(2*took, maxPause), func() {
			d.mu.Lock()
			defer d.mu.Unlock()
			to.pauses--
			d.tidy(w.path)
		})
	}
	if c != nil {
		to.answered(began)
		to.spares = append(to.spares, spare{c, w})
		time.AfterFunc(spareTime, func() { d.discard(w.path, c) })
	} else if kept {
		to.kept--
	}
	d.tidy(w.path)
}

// discard closes a spare connection that nobody wanted.
func (d *dials) discard(of path, c *conn) {
	d.mu.Lock()
	unwanted := d.take(of, func(s spare) bool { return s.conn == c })
	d.mu.Unlock()
	if unwanted != nil {
		_ = unwanted.Close()
	}
}
