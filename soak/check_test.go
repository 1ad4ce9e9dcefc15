package main

import (
	"errors"
	"testing"
	"time"

	"github.com/stretchr/testify/require"
)

func TestValue(t *testing.T) {
	for _, size := range []int{0, 100, 4096, 1 << 20, 3<<20 + 1} {
		b := makeValue("k", 7, size)
		require.Len(t, b, max(size, len("k")+checkDigits+40))
		key, seq, err := checkValue(b)
		require.NoError(t, err)
		require.Equal(t, "k", key)
		require.EqualValues(t, 7, seq)
		for _, at := range []int{0, 2, len(b) / 2, len(b) - 1} {
			b[at] ^= 1
			_, _, err = checkValue(b)
			require.Error(t, err, "a changed byte at %d of %d", at, len(b))
			b[at] ^= 1
		}
		_, _, err = checkValue(b[:len(b)-1])
		require.Error(t, err)
		_, _, err = checkValue(append(b, 'x'))
		require.Error(t, err)
	}
	_, _, err := checkValue(nil)
	require.Error(t, err)
	require.NotEqual(t, makeValue("k", 1, 200), makeValue("k", 2, 200))
}

func TestCell(t *testing.T) {
	c := cell{key: "k"}
	require.NoError(t, c.read(nil, true, true), "nothing was written")
	for range 3 {
		seq := c.next()
		c.wrote(seq, nil)
	}
	c.wrote(c.next(), errors.New("lost"))
	value := func(seq uint64) []byte { return makeValue("k", seq, 0) }
	require.NoError(t, c.read(value(3), false, true))
	require.NoError(t, c.read(value(4), false, true), "a write that failed may have happened")
	require.Error(t, c.read(value(2), false, true), "an old value")
	require.NoError(t, c.read(value(2), false, false))
	require.Error(t, c.read(value(5), false, false), "never written")
	require.Error(t, c.read(nil, true, true))
	require.NoError(t, c.read(nil, true, false))
	require.Error(t, c.read(makeValue("other", 3, 0), false, false))
	c.wrote(c.next(), nil)
	require.NoError(t, c.read(value(4), false, true), "a write that failed may happen late")
	require.Error(t, c.read(value(3), false, true))
}

func TestCounter(t *testing.T) {
	c := counter{key: "n", floor: 5, attempted: 7}
	require.Error(t, c.got(5))
	require.NoError(t, c.got(6))
	require.NoError(t, c.got(7))
	require.Error(t, c.got(8))
	require.Error(t, c.final(4))
	require.NoError(t, c.final(5))
	require.NoError(t, c.final(7))
	require.Error(t, c.final(8))
}

func TestQueue(t *testing.T) {
	q := queue{cell: cell{key: "q"}}
	element := func(seq uint64) []byte { return makeValue("q", seq, 0) }
	for range 6 {
		q.wrote(q.next(), nil)
	}
	require.NoError(t, q.popped(element(1), true))
	require.Error(t, q.popped(element(1), true), "twice")
	require.Error(t, q.popped(element(3), true), "2 is missing")
	q.excuse = 1
	require.NoError(t, q.popped(element(5), true), "one pop failed")
	require.Error(t, q.empty(true), "6 is missing")
	require.NoError(t, q.empty(true))
	q.wrote(q.next(), errors.New("lost"))
	q.wrote(q.next(), nil)
	require.NoError(t, q.popped(element(8), true))
	require.NoError(t, q.popped(element(7), true), "late")
	require.Error(t, q.popped(element(7), true), "twice")
	q.wrote(q.next(), errors.New("lost"))
	q.wrote(q.next(), nil)
	require.NoError(t, q.popped(element(9), true), "in time, after all")
	require.NoError(t, q.popped(element(10), true), "and nothing is missing")
	require.Error(t, q.popped(element(11), false), "never pushed")
}

func TestListener(t *testing.T) {
	lost := map[uint64]bool{4: true}
	var l listener
	hear := func(seq uint64) (uint64, error) { return l.heard(seq, func(s uint64) bool { return lost[s] }) }
	for _, seq := range []uint64{2, 3, 5, 4, 6} {
		missing, err := hear(seq)
		require.NoError(t, err)
		require.Zero(t, missing)
	}
	missing, err := hear(8)
	require.NoError(t, err)
	require.EqualValues(t, 1, missing)
	_, err = hear(8)
	require.Error(t, err)
}

func TestUnordered(t *testing.T) {
	var u unordered
	for _, seq := range []uint64{2, 1, 3} {
		require.NoError(t, u.heard(seq))
	}
	require.Error(t, u.heard(1))
	for seq := range uint64(5 * unorderedBy) {
		if seq > 3 {
			require.NoError(t, u.heard(seq))
		}
	}
	require.LessOrEqual(t, len(u.seen), 2*unorderedBy)
	require.Error(t, u.heard(u.highest))
}

func TestNormal(t *testing.T) {
	require.Equal(t, "read rdma ADDR->ADDR: EOF", normal("read rdma 10.0.0.1:4711->10.0.0.2:6378: EOF"))
	require.Equal(t, normal("MOVED 12 10.0.0.1:7400"), normal("MOVED 9999 10.0.0.2:7401"))
	require.Equal(t, "status N, vendor error N", normal("status 12, vendor error 0x81"))
}

func TestLeaks(t *testing.T) {
	e := ending{sample{fds: 9, goroutines: 3, rss: 1}, sample{fds: 9, goroutines: 3, rss: 100}, resources{"cm_id": 1}, resources{"cm_id": 1}}
	require.Empty(t, e.leaks())
	e.after.fds++
	e.rdmaAfter["qp"] = 1
	e.after.rss += 100 << 20
	require.Len(t, e.leaks(), 3)
}

func TestGrowth(t *testing.T) {
	run := func(change func(i int, s *sample)) []string {
		samples := make([]sample, 120)
		for i := range samples {
			samples[i] = sample{at: time.Duration(i) * time.Second, rss: int64(300+i%50) << 20, threads: 10 + i%3}
			change(i, &samples[i])
		}
		return growth(samples)
	}
	require.Empty(t, run(func(int, *sample) {}))
	require.Empty(t, run(func(i int, s *sample) {
		if i == 110 {
			s.rss *= 10 // one spike is no growth
		}
	}))
	require.Len(t, run(func(i int, s *sample) { s.rss += int64(4*i) << 20 }), 1)
	require.Len(t, run(func(i int, s *sample) { s.threads += i / 4 }), 1)
	require.Len(t, run(func(i int, s *sample) { s.fds += 4 * i }), 1)
	require.Len(t, run(func(i int, s *sample) { s.goroutines += 4 * i }), 1)
	require.Len(t, growth(make([]sample, 5)), 1)
}
