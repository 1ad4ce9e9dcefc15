//go:build linux && cgo

package valkeyrdma

import (
	"context"
	"net/netip"
	"slices"
	"sync"
	"time"
)

// maxPending is how many dials to a server are under way at a time, once it has been too slow for one of them. Those that were
// given up count, and others wait: callers that give up quickly and try again would only add to what keeps it busy. As many of
// those that were given up keep what they need to become connections: else callers that all have less time than a dial
// takes, as a pool with short deadlines, would never have any.
const maxPending = 8

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
	for {
		d.mu.Lock()
		to := d.to[w.remote]
		if to == nil {
			to = new(dialsTo)
			d.to[w.remote] = to
		}
		if i := slices.IndexFunc(to.spares, func(s spare) bool { return s.of == w }); i >= 0 {
			c := to.spares[i].conn
			to.spares = slices.Delete(to.spares, i, i+1)
			to.kept--
			ended := c.ended()
			d.tidy(w.remote)
			d.mu.Unlock()
			if !ended {
				return c, nil
			}
			_ = c.Close()
			continue
		}
		if to.abandoned == 0 || to.active+to.abandoned < maxPending {
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

// tidy is called when less is pending.
func (d *dials) tidy(remote netip.AddrPort) {
	if to := d.to[remote]; to.active+to.abandoned+to.kept == 0 {
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
	keep = to.kept < maxPending
	if keep {
		to.kept++
	}
	return keep
}

// abandoned is called once for each abandon: the dial does not go on any more, and if it was to be kept, this came of it.
func (d *dials) abandoned(w wish, kept bool, c *conn) {
	d.mu.Lock()
	defer d.mu.Unlock()
	to := d.to[w.remote]
	to.abandoned--
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
	unwanted := false
	if to := d.to[remote]; to != nil {
		if i := slices.IndexFunc(to.spares, func(s spare) bool { return s.conn == c }); i >= 0 {
			unwanted = true
			to.spares = slices.Delete(to.spares, i, i+1)
			to.kept--
			d.tidy(remote)
		}
	}
	d.mu.Unlock()
	if unwanted {
		_ = c.Close()
	}
}
