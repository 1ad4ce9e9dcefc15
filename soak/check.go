package main

import (
	"bytes"
	"fmt"
	"hash/crc32"
	"math/rand/v2"
	"regexp"
	"strconv"
)

// Values carry their own check: "KEY SEQ LENGTH\n", noise, and the checksum of all that in 8 hex digits.

var castagnoli = crc32.MakeTable(crc32.Castagnoli)

// noise is what values are cut from. Its length is odd, so that no cut repeats at the sizes of windows and pages.
var noise = func() []byte {
	r := rand.New(rand.NewPCG(1, 2))
	b := make([]byte, 1<<20+7)
	for i := range b {
		b[i] = byte(r.Uint32())
	}
	return b
}()

const checkDigits = 8

// makeValue returns a value of size bytes, or of as many as its check needs.
func makeValue(key string, seq uint64, size int) []byte {
	size = max(size, len(key)+checkDigits+40)
	b := make([]byte, 0, size)
	b = fmt.Appendf(b, "%s %d %d\n", key, seq, size)
	at := int((uint64(crc32.Checksum([]byte(key), castagnoli)) + seq*7919) % uint64(len(noise)))
	for len(b) < size-checkDigits {
		n := min(size-checkDigits-len(b), len(noise)-at)
		b = append(b, noise[at:at+n]...)
		at = 0
	}
	return fmt.Appendf(b, "%08x", crc32.Checksum(b, castagnoli))
}

// checkValue returns the key and the number of a value, or says what is wrong with it.
func checkValue(b []byte) (key string, seq uint64, err error) {
	show := func() string { return fmt.Sprintf("%d bytes that begin with %.60q", len(b), b[:min(len(b), 60)]) }
	head, _, found := bytes.Cut(b[:min(len(b), 512)], []byte("\n"))
	fields := bytes.Fields(head)
	if !found || len(fields) != 3 || len(b) < len(head)+1+checkDigits {
		return "", 0, fmt.Errorf("not a value: %s", show())
	}
	seq, err = strconv.ParseUint(string(fields[1]), 10, 64)
	size, err2 := strconv.Atoi(string(fields[2]))
	if err != nil || err2 != nil {
		return "", 0, fmt.Errorf("not a value: %s", show())
	}
	if size != len(b) {
		return "", 0, fmt.Errorf("a value of %d bytes came as %s", size, show())
	}
	body, digits := b[:size-checkDigits], string(b[size-checkDigits:])
	if sum := fmt.Sprintf("%08x", crc32.Checksum(body, castagnoli)); sum != digits {
		return "", 0, fmt.Errorf("checksum %q where %q is due: %s", digits, sum, show())
	}
	return string(fields[0]), seq, nil
}

// A cell is a key with one writer, and what may be read from it.
type cell struct {
	key   string
	seq   uint64          // of the last attempt to write
	acked uint64          // of the last write that was acknowledged
	maybe map[uint64]bool // writes that failed: one still under way may be executed late, after others
}

func (c *cell) next() uint64 {
	c.seq++
	return c.seq
}

// wrote notes how the write of seq ended.
func (c *cell) wrote(seq uint64, err error) {
	if err == nil {
		c.acked = seq
		return
	}
	if c.maybe == nil {
		c.maybe = make(map[uint64]bool)
	}
	c.maybe[seq] = true
}

// read checks what was read. exact is false where acknowledged writes may be gone, because a replica has taken over.
func (c *cell) read(b []byte, missing, exact bool) error {
	if missing {
		if exact && c.acked > 0 {
			return fmt.Errorf("%s is missing, write %d was acknowledged", c.key, c.acked)
		}
		return nil
	}
	key, seq, err := checkValue(b)
	switch {
	case err != nil:
		return fmt.Errorf("%s: %w", c.key, err)
	case key != c.key:
		return fmt.Errorf("%s: the value of %s was read", c.key, key)
	case seq > c.seq || seq == 0:
		return fmt.Errorf("%s: write %d was read, the last was %d", c.key, seq, c.seq)
	case exact && seq != c.acked && !c.maybe[seq]:
		return fmt.Errorf("%s: write %d was read, %d was the last acknowledged, and %d did not fail", c.key, seq, c.acked, seq)
	}
	return nil
}

// A counter is incremented by one goroutine, and lies between what is certain and what was attempted.
type counter struct {
	key       string
	floor     uint64 // the highest value that must still be there
	attempted uint64
}

// got checks the reply to an increment.
func (c *counter) got(n uint64) error {
	if n <= c.floor || n > c.attempted {
		return fmt.Errorf("counter %s is %d after an increment: above %d and up to %d are possible", c.key, n, c.floor, c.attempted)
	}
	return nil
}

// final checks what the counter is at the end.
func (c *counter) final(n uint64) error {
	if n < c.floor || n > c.attempted {
		return fmt.Errorf("counter %s is %d at the end: %d to %d are possible", c.key, n, c.floor, c.attempted)
	}
	return nil
}

// A queue is a list into which one goroutine pushes numbered elements, and from which it pops them in order.
type queue struct {
	cell
	last   uint64 // the last element popped
	excuse uint64 // how many elements pops that were cancelled or failed may have taken
}

// uncertain tells whether the push of an element failed. Such an element is in maybe, with false once it was popped.
func (q *queue) uncertain(seq uint64) bool {
	_, ok := q.maybe[seq]
	return ok
}

// popped checks an element. exact as in cell.read.
func (q *queue) popped(b []byte, exact bool) error {
	key, seq, err := checkValue(b)
	switch {
	case err != nil:
		return fmt.Errorf("%s: %w", q.key, err)
	case key != q.key || seq > q.seq || seq == 0:
		return fmt.Errorf("%s: element %d of %s was popped, the last pushed was %d", q.key, seq, key, q.seq)
	case !exact:
		q.last = max(q.last, seq)
		return nil
	case q.uncertain(seq): // its push failed: it may come at any time, but once
		if !q.maybe[seq] {
			return fmt.Errorf("%s: element %d was popped twice", q.key, seq)
		}
		q.maybe[seq] = false
		return nil
	case seq <= q.last:
		return fmt.Errorf("%s: element %d was popped after %d", q.key, seq, q.last)
	}
	var skipped uint64
	for s := q.last + 1; s < seq; s++ {
		if !q.uncertain(s) {
			skipped++
		}
	}
	q.last = seq
	if skipped > q.excuse {
		return fmt.Errorf("%s: %d elements before %d are missing, and pops that failed explain %d", q.key, skipped, seq, q.excuse)
	}
	q.excuse -= skipped
	return nil
}

// empty checks that a pop found nothing.
func (q *queue) empty(exact bool) error {
	var missing uint64
	for s := q.last + 1; s <= q.seq; s++ {
		if !q.uncertain(s) {
			missing++
		}
	}
	excuse := q.excuse
	q.last, q.excuse = q.seq, 0
	if exact && missing > excuse {
		return fmt.Errorf("%s is empty, but %d elements are missing, and pops that failed explain %d", q.key, missing, excuse)
	}
	return nil
}

// A listener checks what one subscription receives from one publisher.
type listener struct{ last uint64 }

// heard returns how many messages are missing before this one. unacked tells of messages whose PUBLISH failed.
func (l *listener) heard(seq uint64, unacked func(uint64) bool) (missing uint64, err error) {
	if unacked(seq) { // it may be late
		l.last = max(l.last, seq)
		return 0, nil
	}
	if l.last > 0 {
		if seq <= l.last {
			return 0, fmt.Errorf("message %d came after %d", seq, l.last)
		}
		for s := l.last + 1; s < seq; s++ {
			if !unacked(s) {
				missing++
			}
		}
	}
	l.last = seq
	return missing, nil
}

// unordered checks messages that come by several ways and so in any order, but once: what a cluster passes on between nodes.
type unordered struct {
	seen    map[uint64]bool
	highest uint64
}

// unorderedBy is how late a message may be before it is no longer compared.
const unorderedBy = 1000

func (u *unordered) heard(seq uint64) error {
	if u.seen == nil {
		u.seen = make(map[uint64]bool)
	}
	if u.seen[seq] {
		return fmt.Errorf("message %d came twice", seq)
	}
	u.seen[seq] = true
	u.highest = max(u.highest, seq)
	if len(u.seen) > 2*unorderedBy {
		for s := range u.seen {
			if s+unorderedBy < u.highest {
				delete(u.seen, s)
			}
		}
	}
	return nil
}

var (
	addresses = regexp.MustCompile(`\[?[0-9a-fA-F:.]*\d[.:][0-9a-fA-F:.]*\d\]?(:\d+)?`)
	numbers   = regexp.MustCompile(`\b(0x)?[0-9a-f]*\d[0-9a-f]*\b`)
)

// normal makes texts of the same kind of error the same.
func normal(text string) string {
	text = addresses.ReplaceAllString(text, "ADDR")
	text = numbers.ReplaceAllString(text, "N")
	if len(text) > 160 {
		text = text[:160] + "..."
	}
	return text
}
