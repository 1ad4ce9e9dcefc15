//go:build linux && cgo

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Who looks at the completion queue, and when.
 *
 * While the queue is armed, the next completion raises an event and the pump looks. Arming and events cost system calls and wake-ups,
 * so a reader that waits looks itself for a while (it spins), and arms the queue only before it sleeps. When more readers
 * wait than may spin, the poller looks for all of them. A queue that is not armed, because its reader is busy with what
 * it found, is armed again by vr_tend, should the reader not come back.
 */

#include "impl_linux.h"

#include <errno.h>
#include <sched.h>
#include <time.h>

enum {
	SPIN_TRIAL = 16,     /* waits in vain until spinning is given up */
	SPIN_SCORE_MAX = 32, /* the same, after spinning has been of use for long */
	SPIN_PAUSE = 16,     /* waits without spinning after that; twice as many each time... */
	SPIN_PAUSE_LOG = 4,  /* ...this often */
	SPIN_FACTOR = 32,    /* a wait may take this many times the usual one */
	LATE_FACTOR = 4,     /* one that takes this many times a short one is late */

	/* Nanoseconds. */
	SPIN_MIN = 50 * 1000,
	LATE_MIN = 100 * 1000,
	SPIN_WARMUP = 20 * 1000 * 1000, /* after a pause waits tell nothing for so long: see note_wait */
	SLICE_ONE_LOOK = 1,
	SLICE_MIN = 10 * 1000,          /* how long to look before other goroutines get a turn */
	SLICE_MAX = 2 * 1000 * 1000,
	YIELD_SHORT = 10 * 1000,        /* a turn that took no longer was not used */
	SLEEP_GUESS = 100 * 1000,       /* what a sleep takes, until the first has been measured */
	SLEEP_SHORT = 10 * 1000 * 1000, /* longer ones tell nothing about that */
	POLLED_MAX = 20 * 1000 * 1000,  /* how long the poller looks for one reader */
};

/* More requests than two in the usual wait, see note_requests. */
#define PIPELINED (2 * 16 + 8)

static uint64_t now_ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

uint32_t vr_progress(struct vr_conn *c)
{
	uint32_t wake;

	pthread_mutex_lock(&c->cq_lock);
	wake = vr_drain(c);
	vr_cq_unlock(c);
	return wake;
}

/* Arming. */

/* Under cq_lock. Arm first, then look: a completion that arrives in between raises an event. */
static uint32_t arm(struct vr_conn *c)
{
	if (!c->armed) {
		if (ibv_req_notify_cq(c->cq, 0))
			vr_set_fault(c, VR_FAULT_SYSTEM, EIO, "arm completion queue", 0, 0);
		c->armed = true;
		c->arms++;
	}
	return vr_drain(c);
}

uint32_t vr_arm(struct vr_conn *c)
{
	uint32_t wake;

	pthread_mutex_lock(&c->cq_lock);
	wake = arm(c);
	vr_cq_unlock(c);
	return wake;
}

/* The reader will be woken, unless there is something for it already. */
static uint32_t sleep_reader(struct vr_conn *c)
{
	uint32_t wake;

	pthread_mutex_lock(&c->cq_lock);
	wake = arm(c);
	if (!vr_unread(c) && !vr_broken(c)) {
		atomic_store(&c->rd_waiting, true);
		atomic_store(&c->slept_at, c->opt.spin_ns ? now_ns() : 0);
		c->sleeps++;
	}
	vr_cq_unlock(c);
	return wake;
}

uint32_t vr_sleep_writer(struct vr_conn *c)
{
	uint32_t wake;

	pthread_mutex_lock(&c->cq_lock);
	wake = arm(c);
	atomic_store(&c->wr_waiting, true);
	vr_cq_unlock(c);
	return wake;
}

/*
 * The pump has taken the events there were. A reader that this wakes, or that is busy with what it found itself, looks again
 * before it sleeps, so arming the queue for it would only wake the pump for nothing. Whoever else waits needs it.
 */
uint32_t vr_on_event(struct vr_conn *c, bool taken)
{
	uint32_t wake;

	pthread_mutex_lock(&c->cq_lock);
	if (taken)
		c->armed = false;
	wake = vr_drain(c);
	/* A writer that has taken what this event was for may not have told the reader yet. */
	if (atomic_load(&c->rd_waiting) && (vr_unread(c) || vr_broken(c)))
		wake |= VR_WAKE_READER;
	if ((wake & VR_WAKE_READER) && atomic_exchange(&c->rd_waiting, false))
		atomic_store(&c->rd_hot, c->opt.spin_ns > 0);
	/* A reader that looks does so for the writer as well. */
	if (!atomic_load(&c->rd_looking) &&
	    (!atomic_load(&c->rd_hot) || atomic_load(&c->rd_waiting) || vr_unposted(c) ||
	     (atomic_load(&c->wr_waiting) && !(wake & VR_WAKE_WRITER))))
		wake |= arm(c);
	else if (!c->armed)
		wake |= VR_UNARMED;
	vr_cq_unlock(c);
	return wake;
}

struct vr_result vr_tend(struct vr_conn *c)
{
	struct vr_result r = {0, 0};

	pthread_mutex_lock(&c->cq_lock);
	if (c->drains == c->drains_before) {
		atomic_store(&c->rd_hot, false);
		r.wake = arm(c);
	}
	c->drains_before = c->drains;
	r.n = c->armed;
	vr_cq_unlock(c);
	r.wake = vr_finish(c, r.wake);
	return r;
}

/*
 * Spinning pays if the answer comes in time, and if nobody else needs the processor: other goroutines, which get a turn after every
 * slice (VR_YIELD), or other programs, the server on this host among them, for which sched_yield is. No more than
 * opt.spinners spin at a time.
 */
static _Atomic int32_t spinning;
static _Atomic bool poller_on;

/* True as long as the caller may look once more. */
bool vr_spin(struct vr_conn *c, struct vr_spin *s)
{
	if (s->began) {
		sched_yield();
		s->crowded = atomic_load(&poller_on);
		return !s->crowded && now_ns() - s->began < s->budget;
	}
	if (!s->budget || s->crowded)
		return false;
	if (atomic_fetch_add(&spinning, 1) >= c->opt.spinners) {
		atomic_fetch_sub(&spinning, 1);
		s->crowded = true;
		return false;
	}
	s->began = now_ns();
	return true;
}

void vr_spin_end(struct vr_spin *s)
{
	if (s->began)
		atomic_fetch_sub(&spinning, 1);
}

struct vr_spin vr_spin_writer(struct vr_conn *c)
{
	return (struct vr_spin){.budget = min64(c->opt.spin_ns, SLICE_MAX)};
}

/* Whether spinning is worth it: what is known of the reader's waits. */

/* A wait that was far longer than usual, because some processor was taken away, says little about the next. */
static void average(uint64_t *avg, uint64_t ns)
{
	*avg = *avg ? *avg + min64(ns, 4 * *avg) / 8 - *avg / 8 : ns;
}

static void pause_spinning(struct vr_conn *c)
{
	c->spin_wait = 0;
	c->spin_trial = 0;
	c->spin_score = SPIN_TRIAL;
	c->spin_pause = SPIN_PAUSE << c->spin_backoff;
	c->spin_backoff += c->spin_backoff < SPIN_PAUSE_LOG;
}

/*
 * After sleeps Go's monitor is awake and looks every 20 us whether there is work, until nothing has slept for a while (sysmon in
 * Go's runtime/proc.go). Where that takes the processor from the server, the first waits after a pause are no
 * shorter than sleeps were.
 */
static void note_wait(struct vr_conn *c, uint64_t now)
{
	if (!c->spin_trial)
		c->spin_trial = now;
	if (now - c->spin_trial > SPIN_WARMUP)
		average(&c->spin_wait, now - c->spin_began);
}

/* Down fast and up slowly. */
static void note_short(struct vr_conn *c, uint64_t ns)
{
	if (!c->spin_short)
		c->spin_short = ns;
	else if (ns < c->spin_short)
		c->spin_short -= (c->spin_short - ns) / 4;
	else
		c->spin_short += min64(ns - c->spin_short, c->spin_short) / 32;
}

/*
 * Whether the reader may be what the answer waits for. The kernel lets a thread that has slept run for milliseconds before one on the
 * same processor that has not (place_entity in its kernel/sched/fair.c), and sched_yield changes nothing about that: only
 * sleep does. If the one that has not slept is the server, it could not answer while we look, and another processor that is
 * idle need not help it, since the kernel does not look for one where it thinks all are busy (select_idle_cpu).
 */
static bool late(struct vr_conn *c, uint64_t now)
{
	uint64_t usual = LATE_FACTOR * (c->spin_short ? c->spin_short : SLEEP_GUESS);

	return now - c->spin_began > (usual > LATE_MIN ? usual : LATE_MIN);
}

static void note_hit(struct vr_conn *c)
{
	c->spin_score += c->spin_score < SPIN_SCORE_MAX;
	c->spin_backoff = 0;
	c->spins++;
}

static void note_miss(struct vr_conn *c)
{
	if (!c->spin_score || !--c->spin_score)
		pause_spinning(c);
}

/*
 * How many requests go out in one wait for an answer, on average, times 16. Where they are many, whoever sleeps finds many answers when
 * it wakes, while one that spins takes them singly, and takes a processor from those who make the requests.
 */
static void note_requests(struct vr_conn *c)
{
	uint32_t writes = atomic_load(&c->writes);

	c->pipelining += 2 * (uint32_t)min64(writes - c->writes_seen, 16) - c->pipelining / 8;
	c->writes_seen = writes;
}

/*
 * How long the next wait may spin. Spinning takes spin_wait, sleeping spin_sleep, and then the wake-ups that follow it (note_wait):
 * where the two waits are much the same, because it is the server that takes its time, spinning is better.
 */
static uint64_t spin_budget(struct vr_conn *c)
{
	uint64_t budget = SPIN_FACTOR * c->spin_wait;

	if (c->spin_pause) {
		c->spin_pause--;
		return 0;
	}
	if (c->pipelining > PIPELINED)
		return 0;
	if (c->spin_score == SPIN_SCORE_MAX && c->spin_wait > 2 * (c->spin_sleep ? c->spin_sleep : SLEEP_GUESS)) {
		if (c->spin_sleep)
			pause_spinning(c);
		return 0;
	}
	if (!budget || budget > c->opt.spin_ns)
		return c->opt.spin_ns;
	return budget > SPIN_MIN ? budget : min64(SPIN_MIN, c->opt.spin_ns);
}

/* There is something to do before the reader may wait: bytes, the end, or a writer that is to be woken first. */
static bool busy(struct vr_conn *c, uint32_t wake)
{
	return vr_unread(c) || vr_broken(c) || ((wake & VR_WAKE_WRITER) && atomic_load(&c->wr_waiting));
}

/* The budget of the next slice. 0 if the time is over. */
static uint64_t next_slice(struct vr_conn *c)
{
	uint64_t now = now_ns();

	if (!c->spin_began) {
		note_requests(c);
		c->spin_until = spin_budget(c);
		if (!c->spin_until)
			return 0;
		c->spin_until += now;
		c->spin_began = now;
	} else if (late(c, now)) {
		return now < c->spin_until ? SLICE_ONE_LOOK : 0;
	} else {
		/* A turn that others used shows that there is work: they should not wait for long. */
		c->spin_slice = now - c->yielded_at < YIELD_SHORT ? min64(2 * c->spin_slice, SLICE_MAX) : SLICE_MIN;
	}
	return now < c->spin_until ? min64(c->spin_until - now, c->spin_slice) : 0;
}

/*
 * Waits for bytes, or the end, as long as spinning is worth it. Returns VR_WAKE_*: if that names the reader, it looks again, after
 * others had a turn where VR_YIELD says so; else it sleeps, and the pump or, with VR_POLL, the poller wakes it.
 */
uint32_t vr_await(struct vr_conn *c, bool goes_on)
{
	struct vr_spin s = {0, 0, false};
	uint32_t wake;
	uint64_t now;

	/* The last wait may have ended elsewhere: by a deadline, or by a completion that came while others had a turn. */
	if (!goes_on)
		c->spin_began = 0;
	atomic_store(&c->rd_waiting, false);
	wake = vr_progress(c);
	if (!c->opt.spin_ns)
		return busy(c, wake) ? wake | VR_WAKE_READER : wake | sleep_reader(c);
	if (!busy(c, wake)) {
		s.budget = next_slice(c);
		s.crowded = atomic_load(&poller_on) && c->pipelining <= PIPELINED;
		atomic_store(&c->rd_looking, true);
		while (!busy(c, wake) && vr_spin(c, &s))
			wake |= vr_progress(c);
		vr_spin_end(&s);
		atomic_store(&c->rd_looking, false);
		/* From here on nobody looks for whoever waits for room. */
		if (vr_unposted(c) || atomic_load(&c->wr_waiting))
			wake |= vr_arm(c);
	}
	now = now_ns();
	if (busy(c, wake)) {
		if (c->spin_began) {
			note_short(c, now - c->spin_began);
			note_wait(c, now);
			note_hit(c);
		}
		c->spin_began = 0;
		atomic_store(&c->rd_hot, true);
		/*
		 * Go's monitor takes the processor away from a goroutine that has not been through the scheduler for 10 ms, again
		 * and again, which costs more than a turn for others now and then (retake in Go's runtime/proc.go).
		 */
		if (now - c->yielded_at > SLICE_MAX) {
			c->yielded_at = now;
			wake |= VR_YIELD;
		}
		return wake | VR_WAKE_READER;
	}
	if (s.crowded) {
		c->spin_began = 0;
		atomic_store(&c->polled_at, now);
		atomic_store(&c->rd_hot, true);
		atomic_store(&c->poll_expired, false);
		atomic_store(&c->polled, true);
		return wake | VR_POLL;
	}
	if (c->spin_began && now < c->spin_until) {
		if (late(c, now))
			return wake | VR_NAP | VR_WAKE_READER;
		c->yielded_at = now;
		return wake | VR_YIELD | VR_WAKE_READER;
	}
	if (c->spin_began) {
		note_wait(c, now);
		note_miss(c);
	}
	c->spin_began = 0;
	atomic_store(&c->rd_hot, false);
	return wake | sleep_reader(c);
}

/* The reader is back, from a sleep or from the poller, and learns from it. */
void vr_awake(struct vr_conn *c)
{
	uint64_t ns;

	if (atomic_exchange(&c->polled_at, 0)) {
		if (!atomic_exchange(&c->polled, false) && atomic_load(&c->poll_expired))
			note_miss(c);
		else if (vr_unread(c))
			note_hit(c);
	}
	if (atomic_load(&c->slept_at)) {
		ns = now_ns() - atomic_exchange(&c->slept_at, 0);
		if (ns < SLEEP_SHORT)
			average(&c->spin_sleep, ns);
	}
}

/* The poller. */

static uint32_t poll_one(struct vr_conn *c, uint64_t now, uint64_t vain_ns)
{
	uint32_t wake;

	if (!atomic_load(&c->polled))
		return VR_POLLED;
	if (pthread_mutex_trylock(&c->cq_lock))
		return 0; /* somebody else is looking */
	wake = vr_drain(c);
	vr_cq_unlock(c);
	if (busy(c, wake)) {
		wake |= VR_WAKE_READER | VR_POLLED;
	} else if (vain_ns > c->opt.spin_ns || now > atomic_load(&c->polled_at) + POLLED_MAX) {
		atomic_store(&c->poll_expired, true);
		atomic_store(&c->polled, false);
		atomic_store(&c->rd_hot, false);
		wake |= sleep_reader(c) | VR_POLLED;
	}
	return vr_finish(c, wake);
}

bool vr_poll(struct vr_conn *const *conns, uint32_t *wake, size_t n, uint32_t slice_ns, uint64_t vain_ns)
{
	uint64_t now = now_ns(), end = now + slice_ns;
	uint32_t all = 0;
	size_t i;

	for (;;) {
		for (i = 0; i < n; i++) {
			wake[i] = poll_one(conns[i], now, vain_ns);
			all |= wake[i];
		}
		now = now_ns();
		if (all || now >= end)
			return all & ~VR_POLLED;
		sched_yield();
	}
}

void vr_poller(bool on)
{
	atomic_fetch_add(&spinning, on ? 1 : -1);
	atomic_store(&poller_on, on);
}

void vr_spin_init(struct vr_conn *c)
{
	c->spin_score = SPIN_TRIAL;
	c->spin_slice = SLICE_MIN * 10;
}
