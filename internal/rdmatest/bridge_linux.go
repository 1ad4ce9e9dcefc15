//go:build linux && cgo

package rdmatest

/*
#include "rdmatest_linux.h"
*/
import "C"

import (
	"errors"
	"fmt"
	"io"
	"net"
	"sync"
	"syscall"
	"time"
)

// bridgeLinger is how long a Bridge whose net.Conn has ended waits for a client that takes nothing of what it still has
// to get.
const bridgeLinger = 5 * time.Second

// bridge is the net.Conn's half of Bridge: one goroutine in Read and one in Write, each with at most one buffer at a time.
// They hand over by channels, and make kick readable, for which the Peer's goroutine waits along with its own descriptors.
type bridge struct {
	c       net.Conn
	kick    C.int
	toRead  chan []byte // buffers to fill
	read    chan readResult
	toWrite chan []byte
	written chan error
}

type readResult struct {
	b   []byte
	err error
}

func (b *bridge) reader() {
	for buf := range b.toRead {
		n, err := b.c.Read(buf)
		b.read <- readResult{buf[:n], err}
		C.rt_eventfd_set(b.kick)
	}
}

func (b *bridge) writer() {
	for buf := range b.toWrite {
		_, err := b.c.Write(buf)
		b.written <- err
		C.rt_eventfd_set(b.kick)
	}
}

// Bridge copies between p and c, both ways, until one of them ends: when c does, what it sent is delivered and p
// disconnects; when p does, what it received is delivered. c is closed in any case, p is not. Each direction holds its
// sender back when its receiver takes nothing, without holding up the other one. Bridge drives p: nothing else may.
func Bridge(p *Peer, c net.Conn) error {
	b := &bridge{
		c:      c,
		toRead: make(chan []byte, 1), read: make(chan readResult, 1),
		toWrite: make(chan []byte, 1), written: make(chan error, 1),
	}
	b.kick = C.rt_eventfd()
	if err := errnoError(b.kick, "eventfd"); err != nil {
		_ = c.Close()
		return err
	}
	var wg sync.WaitGroup
	wg.Go(b.reader)
	wg.Go(b.writer)
	err := b.run(p)
	_ = c.Close() // wakes both
	close(b.toRead)
	close(b.toWrite)
	wg.Wait()
	_ = syscall.Close(int(b.kick))
	return err
}

func (b *bridge) run(p *Peer) error {
	var (
		in, out      = make([]byte, 64<<10), make([]byte, 64<<10)
		pending      []byte // what is left of out for the client
		reading      bool   // out is with the reader
		writing      bool   // in is with the writer
		ended        bool   // c sends no more
		broken       bool   // c takes no more
		lastProgress = time.Now()
	)
	for {
		// The order matters: clear the kick, then look at what it may have stood for.
		C.rt_eventfd_clear(b.kick)
		moved := false
		select {
		case r := <-b.read:
			reading, moved = false, true
			pending, ended = r.b, r.err != nil
		default:
		}
		select {
		case err := <-b.written:
			writing, moved = false, true
			broken = broken || err != nil
		default:
		}

		n, err := 0, error(nil)
		if len(pending) > 0 {
			if n, err = p.tryWrite(pending); err != nil && !errors.Is(err, syscall.EPIPE) {
				return err
			}
			if err != nil {
				pending, n = nil, 0 // the client has closed; reading notices
			}
			pending = pending[n:]
			moved = moved || n > 0
		}
		if !reading && !ended && len(pending) == 0 {
			b.toRead <- out
			reading = true
		}
		if !writing {
			n, err = p.tryRead(in)
			switch {
			case errors.Is(err, io.EOF):
				return nil
			case err != nil:
				return err
			case n > 0 && !broken:
				b.toWrite <- in[:n]
				writing = true
			}
			moved = moved || n > 0
		}
		if ended && len(pending) == 0 {
			return p.Disconnect()
		}

		n, err = p.progress()
		if err == nil && n == 0 && !moved {
			if err = p.arm(); err == nil {
				n, err = p.progress()
			}
		}
		if err != nil {
			return err
		}
		if moved || n > 0 {
			lastProgress = time.Now()
			continue
		}
		deadline := time.Now().Add(time.Minute)
		if ended {
			deadline = lastProgress.Add(bridgeLinger)
			if !time.Now().Before(deadline) {
				_ = p.Abort()
				return fmt.Errorf("rdmatest: the client did not take %d bytes in %v", len(pending), bridgeLinger)
			}
		}
		if err := waitFDs(deadline, p.fds[0], p.fds[1], b.kick); err != nil {
			return err
		}
	}
}
