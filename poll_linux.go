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
	"syscall"
	"time"
	"unsafe"
)

// Waiting is decided in poll_linux.c. Here are the two goroutines that it takes for all connections together, each of which
// exists only while there is something to do: the tender, and the poller.

// napsPerTurn is how many naps there are in a row between two turns for other goroutines, which may cost as much as a nap.
const napsPerTurn = 8

// nap gives the processor to whoever else wants it, which no yielding does: see late in poll_linux.c. The n-th nap in a row takes
// n times 10 µs, and what the kernel adds to it, so that long waits take few calls.
func nap(n int) {
	t := syscall.NsecToTimespec(int64(n) * int64(10*time.Microsecond))
	_ = syscall.Nanosleep(&t, nil)
	if n%napsPerTurn == 0 {
		runtime.Gosched()
	}
}

// maxSpinners is how many goroutines may spin at a time.
func maxSpinners() int { return max(1, processors()/2) }

// tendInterval is how often unarmed connections are looked at. The server's receive queue and ours hold several times what can
// come in twice that long.
const tendInterval = 5 * time.Millisecond

// tended are the connections whose completion queue is not armed, because their reader looks at it. Those whose reader has gone
// off to do something else are armed again, so that their receives are posted again and their writers hear of completions.
var tended tender

type tender struct {
	mu      sync.Mutex // taken before the poller's mu
	conns   []*conn
	running bool
}

// add has c looked after from here on. Without c, it only wakes the tender.
func (t *tender) add(c *conn) {
	t.mu.Lock()
	defer t.mu.Unlock()
	if c != nil && !c.tended {
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
		if !t.tend() {
			return
		}
	}
}

// tend is false when there is nothing left to look after.
func (t *tender) tend() bool {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.conns = slices.DeleteFunc(t.conns, func(c *conn) bool {
		res := C.vr_tend(c.c)
		c.signal(res.wake)
		c.tended = res.n == 0
		return !c.tended
	})
	on := polling.rest()
	t.running = len(t.conns) > 0 || on
	return t.running
}

// polling is the poller: when more readers wait than may spin, one goroutine looks at the completion queues of all of them.
var polling poller

type poller struct {
	mu       sync.Mutex // guards what follows, and polled and pollAgain of connections
	incoming []*conn
	running  bool // run runs
	on       bool // readers come here instead of spinning
	most     int  // readers that waited at the same time, since the last rest

	busy  sync.Mutex // held while connections are looked at; taken before mu; guards what follows
	conns []*conn
	c     []*C.struct_vr_conn
	wake  []C.uint32_t
	vain  time.Duration // how long it has looked since there was something to tell
	slice time.Duration
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
	if !p.running {
		p.running = true
		go p.run()
	}
}

// remove waits until c is not looked at any more.
func (p *poller) remove(c *conn) {
	p.busy.Lock()
	defer p.busy.Unlock()
	p.mu.Lock()
	defer p.mu.Unlock()
	if c.polled {
		c.polled = false
		p.conns = slices.DeleteFunc(p.conns, func(other *conn) bool { return other == c })
		p.incoming = slices.DeleteFunc(p.incoming, func(other *conn) bool { return other == c })
	}
}

// rest ends the poller's duty if no two readers have waited at the same time lately: a single one looks best itself.
func (p *poller) rest() (on bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.on && p.most < 2 {
		p.on = false
		C.vr_poller(false)
	}
	p.most = 0
	return p.on
}

// The poller looks for slices of up to maxSlice. If the turn for other goroutines between two of them takes longer than
// shortTurn, it was used, and the next slices are a single look. When nothing has come for napAfter, it naps as a reader does.
const (
	maxSlice  = 100 * time.Microsecond
	shortTurn = 10 * time.Microsecond
	napAfter  = 500 * time.Microsecond
)

func (p *poller) run() {
	p.busy.Lock()
	p.vain = 0
	p.busy.Unlock()
	for p.look() {
		if p.vain > napAfter {
			nap(1)
		}
		before := time.Now()
		runtime.Gosched()
		if time.Since(before) > shortTurn {
			p.slice = 0
		} else {
			p.slice = min(p.slice+maxSlice/16, maxSlice)
		}
	}
}

// look is false when nobody waits any more.
func (p *poller) look() bool {
	p.busy.Lock()
	defer p.busy.Unlock()
	if !p.take() {
		return false
	}
	p.c, p.wake = p.c[:0], p.wake[:0]
	for _, c := range p.conns {
		p.c, p.wake = append(p.c, c.c), append(p.wake, 0)
	}
	// A turn that others used is no sign that nothing comes.
	began := time.Now()
	if C.vr_poll(unsafe.SliceData(p.c), unsafe.SliceData(p.wake), C.size_t(len(p.c)), C.uint32_t(p.slice), C.uint64_t(p.vain)) {
		p.vain = 0
	} else {
		p.vain += time.Since(began)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	i := 0
	p.conns = slices.DeleteFunc(p.conns, func(c *conn) bool {
		wake := p.wake[i]
		i++
		c.signal(wake)
		// A reader that was woken by somebody else may have come back since.
		c.polled = wake&C.VR_POLLED == 0 || c.pollAgain
		c.pollAgain = false
		return !c.polled
	})
	return true
}

// take adds those that have come to those that are looked at, and is false if these are none.
func (p *poller) take() bool {
	p.mu.Lock()
	p.conns = append(p.conns, p.incoming...)
	clear(p.incoming)
	p.incoming = p.incoming[:0]
	p.most = max(p.most, len(p.conns))
	p.running = len(p.conns) > 0
	begins := len(p.conns) > 1 && !p.on
	if begins {
		p.on = true
		C.vr_poller(true)
	}
	p.mu.Unlock()
	if begins {
		tended.add(nil) // which calls rest
	}
	return len(p.conns) > 0
}
