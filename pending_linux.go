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
// It ends when none is left that was given up.
const (
	maxPending = 2
	maxKept    = 8               // dials that go on as connections; others of those that were given up end when they are accepted
	maxPause   = time.Second / 4 // a pause is twice as long as the dial took, but no longer
)

// spareTime is how long a connection that came too late for the dial that asked for it is kept for the next one.
const spareTime = time.Second

// pending are the dials that are under way, those included that were given up and go on because the server may not survive their
// end.
var pending = dials{to: make(map[netip.AddrPort]*dialsTo), changed: make(chan struct{})}

type dials struct {
	mu      sync.Mutex
	to      map[netip.AddrPort]*dialsTo
	changed chan struct{} // closed, and made anew, when there may be something for those who wait
}

type dialsTo struct {
	active, abandoned int
	kept              int // of the abandoned, those that may become spare connections, and those that have
	pauses            int
	took              time.Duration // the last of the abandoned
	spares            []spare
}

type spare struct {
	conn *conn
	of   wish
}

// A wish is what a connection is to be.
type wish struct {
	remote, local netip.AddrPort
	options       options
}

// begin waits for the turn of a dial, which then has to end; or returns a connection that is there already.
func (d *dials) begin(ctx context.Context, w wish) (*conn, error) {
	// A caller that has waited for more than half of its time, and has little left, leaves a connection to those who can still make use
	// of it.
	deadline, limited := ctx.Deadline()
	fresh := deadline.Add(-time.Until(deadline) / 2)
	for {
		d.mu.Lock()
		to := d.to[w.remote]
		if to == nil {
			to = new(dialsTo)
			d.to[w.remote] = to
		}
		short := limited && time.Until(deadline) <= to.took
		wanted := func(s spare) bool { return s.of == w }
		isThere := slices.ContainsFunc(to.spares, wanted)
		if isThere && !(short && time.Now().After(fresh)) {
			c := d.take(w.remote, wanted)
			ended := c.ended()
			d.mu.Unlock()
			if !ended {
				return c, nil
			}
			_ = c.Close()
			continue
		}
		paused := to.pauses > 0 && short
		if to.calm() || !isThere && !paused && to.active+to.abandoned < maxPending {
			to.active++
			d.mu.Unlock()
			return nil, nil
		}
		changed := d.changed
		d.mu.Unlock()
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, contextError(ctx, "waiting for earlier dials to this address, which were given up and not answered yet")
		}
	}
}

// calm says whether nothing is left of dials that were given up.
func (to *dialsTo) calm() bool { return to.abandoned+to.kept+to.pauses == 0 }

// take removes a spare connection, the first that is wanted. nil: there is none.
func (d *dials) take(remote netip.AddrPort, wanted func(spare) bool) *conn {
	to := d.to[remote]
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
	d.tidy(remote)
	return c
}

// tidy is called when less is pending.
func (d *dials) tidy(remote netip.AddrPort) {
	if to := d.to[remote]; to.active == 0 && to.calm() {
		delete(d.to, remote)
	}
	close(d.changed)
	d.changed = make(chan struct{})
}

func (d *dials) end(remote netip.AddrPort) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.to[remote].active--
	d.tidy(remote)
}

// abandon counts a dial that goes on after its end. True: as a connection that may be of use.
func (d *dials) abandon(remote netip.AddrPort) (keep bool) {
	d.mu.Lock()
	defer d.mu.Unlock()
	to := d.to[remote]
	to.abandoned++
	keep = to.kept < maxKept
	if keep {
		to.kept++
	}
	return keep
}

// abandoned is called once for each abandon: the dial does not go on any more, and if it was to be kept, this came of it. It took so
// long; 0: it did not go on at all.
func (d *dials) abandoned(w wish, kept bool, c *conn, took time.Duration) {
	d.mu.Lock()
	defer d.mu.Unlock()
	to := d.to[w.remote]
	to.abandoned--
	if took > 0 {
		to.took = took
		to.pauses++
		time.AfterFunc(min(2*took, maxPause), func() {
			d.mu.Lock()
			defer d.mu.Unlock()
			to.pauses--
			d.tidy(w.remote)
		})
	}
	if c != nil {
		to.spares = append(to.spares, spare{c, w})
		time.AfterFunc(spareTime, func() { d.discard(w.remote, c) })
	} else if kept {
		to.kept--
	}
	d.tidy(w.remote)
}

// discard closes a spare connection that nobody wanted.
func (d *dials) discard(remote netip.AddrPort, c *conn) {
	d.mu.Lock()
	unwanted := d.take(remote, func(s spare) bool { return s.conn == c })
	d.mu.Unlock()
	if unwanted != nil {
		_ = unwanted.Close()
	}
}
