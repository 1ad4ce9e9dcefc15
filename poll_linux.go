//go:build linux && cgo

package valkeyrdma

/*
#cgo noescape vr_tend
#cgo nocallback vr_tend
#cgo noescape vr_poll
#cgo nocallback vr_poll
#include "conn_linux.h"
*/
import "C"

import (
	"runtime"
	"slices"
	"sync"
	"time"
	"unsafe"
)

// tendInterval is how often unarmed connections are looked at. The server's receive queue and ours hold several times what can
// come in twice that long.
const tendInterval = 5 * time.Millisecond

// tended are the connections whose completion queue is not armed, because their reader polls it. Those whose reader has gone
// off to do something else are armed again, so that their receives are posted again and their writers hear of completions.
var tended tender

type tender struct {
	mu      sync.Mutex
	conns   []*conn
	running bool
}

func (t *tender) add(c *conn) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if !c.tended {
		c.tended = true
		t.conns = append(t.conns, c)
	}
	if !t.running {
		t.running = true
		go t.run()
	}
}

func (t *tender) remove(c *conn) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if c.tended {
		c.tended = false
		t.conns = slices.DeleteFunc(t.conns, func(other *conn) bool { return other == c })
	}
}

func (t *tender) run() {
	tick := time.NewTicker(tendInterval)
	defer tick.Stop()
	for range tick.C {
		t.mu.Lock()
		t.conns = slices.DeleteFunc(t.conns, func(c *conn) bool {
			res := C.vr_tend(c.c)
			c.signal(res.wake)
			c.tended = res.n == 0
			return !c.tended
		})
		on := polling.rest()
		t.running = len(t.conns) > 0 || on
		running := t.running
		t.mu.Unlock()
		if !running {
			return
		}
	}
}

// pollSlice is how long the poller looks before it lets other goroutines run.
const pollSlice = 50 * time.Microsecond

// polling is the poller: when more readers wait than may spin, one goroutine looks at the completion queues of all of them.
var polling poller

type poller struct {
	mu            sync.Mutex // guards incoming, running, and polled and pollAgain of connections
	incoming      []*conn
	running       bool
	on            bool
	peak          int
	found, looked time.Time
	crowded       bool
	slice         time.Duration
	busy          sync.Mutex // held while conns are looked at; taken before mu
	conns         []*conn
	c             []*C.struct_vr_conn
	wake          []C.uint32_t
}

// add gives c to the poller until its reader is woken, or is to be woken by an event.
func (p *poller) add(c *conn) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if c.polled {
		c.pollAgain = true
		return
	}
	c.polled = true
	p.incoming = append(p.incoming, c)
	p.peak = max(p.peak, len(p.incoming)+len(p.conns))
	if !p.running {
		p.running = true
		go p.run()
	}
}

// rest ends the poller's duty when no two readers have waited at the same time lately: one looks best itself.
func (p *poller) rest() (on bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.on && p.peak < 2 {
		p.on = false
		C.vr_poller(false)
	}
	p.peak = 0
	return p.on
}

func (p *poller) remove(c *conn) {
	p.busy.Lock()
	defer p.busy.Unlock()
	p.mu.Lock()
	defer p.mu.Unlock()
	if c.polled {
		p.conns = slices.DeleteFunc(p.conns, func(other *conn) bool { return other == c })
		p.incoming = slices.DeleteFunc(p.incoming, func(other *conn) bool { return other == c })
		c.polled = false
	}
}

func (p *poller) run() {
	p.found, p.crowded = time.Now(), false
	for p.look() {
		t := p.looked
		runtime.Gosched()
		if time.Since(t) > 10*time.Microsecond {
			p.slice = 0
		} else {
			p.slice = min(p.slice+5*time.Microsecond, 100*time.Microsecond)
		}
	}
}

// look is false when nobody waits any more.
func (p *poller) look() bool {
	p.busy.Lock()
	defer p.busy.Unlock()
	p.mu.Lock()
	p.conns = append(p.conns, p.incoming...)
	p.incoming = p.incoming[:0]
	p.running = len(p.conns) > 0
	if p.running && !p.on {
		p.on = true
		C.vr_poller(true)
	}
	p.mu.Unlock()
	if len(p.conns) == 0 {
		return false
	}
	p.c, p.wake = p.c[:0], p.wake[:0]
	for _, c := range p.conns {
		p.c, p.wake = append(p.c, c.c), append(p.wake, 0)
	}
	giveUp := p.crowded || time.Since(p.found) > p.conns[0].spin
	found := C.vr_poll(unsafe.SliceData(p.c), unsafe.SliceData(p.wake), C.size_t(len(p.c)), C.uint32_t(p.slice), C.bool(giveUp))
	p.looked = time.Now()
	if found {
		p.found = p.looked
	}
	p.mu.Lock()
	kept := p.conns[:0]
	for i, c := range p.conns {
		c.signal(p.wake[i])
		if p.wake[i]&C.VR_POLLED == 0 || c.pollAgain {
			kept = append(kept, c)
		} else {
			c.polled = false
		}
		c.pollAgain = false
	}
	clear(p.conns[len(kept):])
	p.conns = kept
	p.mu.Unlock()
	return true
}
