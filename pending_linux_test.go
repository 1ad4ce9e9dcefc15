//go:build linux && cgo

package valkeyrdma

import (
	"context"
	"net"
	"net/netip"
	"os"
	"slices"
	"testing"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/valkeyrdma/valkeyrdma/internal/rdmatest"
)

// letThrough waits for the turn of a dial, for so long.
func (d *dials) letThrough(w wish, timeout time.Duration) (began time.Time, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), timeout)
	defer cancel()
	_, began, err = d.begin(ctx, w)
	return began, err
}

// Dials that are never answered, because the host that they ask is gone, do not keep others from the one that is there now: not
// those from another address of ours, and those from the same one not for long.
func TestDialsNeverAnswered(t *testing.T) {
	watchdog(t, time.Minute)
	d := newDials()
	w := wish{path: path{netip.MustParseAddrPort("10.0.0.7:6378"), netip.MustParseAddrPort("10.0.0.1:0")}}
	var lost []time.Time
	for range maxPending {
		began, err := d.letThrough(w, time.Second)
		require.NoError(t, err)
		d.abandon(w.path, began)
		d.end(w.path, began, false)
		lost = append(lost, began)
	}
	_, err := d.letThrough(w, 100*time.Millisecond)
	require.ErrorIs(t, err, os.ErrDeadlineExceeded)
	require.ErrorContains(t, err, "waiting for earlier dials to this address")

	other := w
	other.local = netip.MustParseAddrPort("10.0.1.1:0")
	began, err := d.letThrough(other, 100*time.Millisecond)
	require.NoError(t, err)
	d.end(other.path, began, true)

	began, err = d.letThrough(w, time.Minute)
	require.NoError(t, err)
	_, err = d.letThrough(w, 100*time.Millisecond)
	require.ErrorIs(t, err, os.ErrDeadlineExceeded, "one more is enough")
	d.end(w.path, began, true)

	// It was answered, so the others will not be.
	for range 2 * maxPending {
		began, err := d.letThrough(w, 100*time.Millisecond)
		require.NoError(t, err)
		d.end(w.path, began, false)
	}
	for _, began := range lost {
		d.abandoned(w, began, true, nil, false)
	}
	require.Empty(t, d.to)
}

// Of many dials, some are under way at the same time and the others wait; but not for those that are stuck.
func TestDialsAtOnce(t *testing.T) {
	watchdog(t, time.Minute)
	d := newDials()
	w := wish{path: path{remote: netip.MustParseAddrPort("10.0.0.7:6378")}}
	var active []time.Time
	begin := func(timeout time.Duration) error {
		began, err := d.letThrough(w, timeout)
		if err == nil {
			active = append(active, began)
		}
		return err
	}
	end := func(i int, succeeded bool) {
		d.end(w.path, active[i], succeeded)
		active = slices.Delete(active, i, i+1)
	}
	for range maxActive {
		require.NoError(t, begin(time.Second))
	}
	require.ErrorIs(t, begin(100*time.Millisecond), os.ErrDeadlineExceeded)
	end(0, false)
	require.NoError(t, begin(100*time.Millisecond))
	require.ErrorIs(t, begin(100*time.Millisecond), os.ErrDeadlineExceeded)

	require.NoError(t, begin(time.Minute), "after some time")
	require.ErrorIs(t, begin(100*time.Millisecond), os.ErrDeadlineExceeded, "one more is enough")
	end(maxActive, true)
	require.Len(t, active, maxActive)
	require.NoError(t, begin(100*time.Millisecond), "what was overtaken does not count")
	for len(active) > 0 {
		end(0, false)
	}
	require.Empty(t, d.to)

	for range maxActive {
		require.NoError(t, begin(time.Second))
	}
	end(maxActive-1, true)
	require.NoError(t, begin(100*time.Millisecond))
	require.ErrorIs(t, begin(100*time.Millisecond), os.ErrDeadlineExceeded, "those that were overtaken just now are not stuck")
	for len(active) > 0 {
		end(0, false)
	}
	require.Empty(t, d.to)
}

// Those who wait have their turns in the order in which they came, however many come after them.
func TestDialsInOrder(t *testing.T) {
	watchdog(t, time.Minute)
	d := newDials()
	w := wish{path: path{remote: netip.MustParseAddrPort("10.0.0.7:6378")}}
	waiting := func() int {
		d.mu.Lock()
		defer d.mu.Unlock()
		if to := d.to[w.path]; to != nil {
			return len(to.waiting)
		}
		return 0
	}
	type turn struct {
		who   int
		began time.Time
	}
	const callers = 5 * maxActive
	turns := make(chan turn, callers)
	for who := range callers {
		go func() {
			began, err := d.letThrough(w, time.Minute)
			assert.NoError(t, err)
			turns <- turn{who, began}
		}()
		require.Eventually(t, func() bool { return waiting()+len(turns) == who+1 }, 10*time.Second, time.Millisecond)
	}
	// As many as may be under way, in any order, and then one for each that ends.
	var active []turn
	for range maxActive {
		active = append(active, <-turns)
	}
	for next := maxActive; next < callers; next++ {
		d.end(w.path, active[0].began, true)
		_, err := d.letThrough(w, 10*time.Millisecond)
		require.ErrorIs(t, err, os.ErrDeadlineExceeded, "a newcomer has overtaken those who wait")
		active = append(active[1:], <-turns)
		require.Equal(t, next, active[len(active)-1].who)
	}
	for _, last := range active {
		d.end(w.path, last.began, true)
	}
	require.Empty(t, d.to)
}

// A caller that has waited for most of its time takes a connection that comes then, if it can still make use of it.
func TestDialSpareLate(t *testing.T) {
	watchdog(t, time.Minute)
	warm(t)
	s := fake(t, rdmatest.Options{})
	dial := func(timeout time.Duration) error {
		conn, err := DialCtxFn(context.Background(), s.Addr(), &net.Dialer{Timeout: timeout}, nil)
		if err == nil {
			_ = conn.Close()
		}
		return err
	}
	for range maxPending {
		require.ErrorIs(t, dial(50*time.Millisecond), os.ErrDeadlineExceeded)
	}
	late := make(chan error, 1)
	go func() { late <- dial(lostAfter - 100*time.Millisecond) }()
	time.Sleep(lostAfter * 2 / 3)
	p, err := s.Accept(5 * time.Second)
	require.NoError(t, err)
	defer func() { _ = p.Close() }()
	require.NoError(t, <-late)
	p, err = s.Accept(5 * time.Second)
	require.NoError(t, err)
	defer func() { _ = p.Close() }()
	requireFalls(t, 0, unsettledDials, "it is not as before")
}
