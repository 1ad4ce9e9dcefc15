/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The contract between the two halves of a connection.
 *
 * conn_linux.go owns net.Conn semantics: parking, deadlines, closing, errors. The C half owns verbs and
 * the connection manager. No function here sleeps, prints or waits for the peer (vr_load reads files, and vr_destroy waits for
 * the kernel to let go of what it frees), each reports a failure as a negative errno, and none calls back into Go.
 *
 * Who may call what, and when:
 *
 *   vr_load                  anyone, any time
 *   vr_dial, vr_dial_step, vr_abandon     the dialling goroutine
 *   vr_read                  one reader at a time
 *   vr_write                 one writer at a time
 *   vr_pump, vr_probe        the connection's pump goroutine, and only it
 *   vr_poll, vr_poller       one poller in the process; vr_tend   anyone; until vr_destroy
 *   vr_flushed, vr_disconnect, vr_broken, vr_get_stats, vr_grow   anyone, until vr_destroy
 *   vr_destroy               once, after every other call has returned
 *
 * Reader, writer and pump may run at the same time. Whoever drains the completion queue accounts for both
 * directions, so each of these calls says in its result whom to wake.
 */
#ifndef VALKEYRDMA_CONN_LINUX_H
#define VALKEYRDMA_CONN_LINUX_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/socket.h>

struct vr_conn;

/* What to do after a call. */
enum {
	VR_WAKE_READER = 1, /* bytes, end of stream or a fault await the reader */
	VR_WAKE_WRITER = 2, /* staging space was freed, everything was sent, or a fault awaits the writer */
	VR_YIELD = 4,       /* from vr_read: it has spun for a while, other goroutines should have a turn */
	VR_POLL = 8,        /* from vr_read: give the connection to vr_poll, then sleep */
	VR_POLLED = 16,     /* from vr_poll: done with this connection */
	VR_UNARMED = 32,    /* from vr_pump: the reader looks at the queue from here on, so call vr_tend now and then */
	VR_GROW = 64,       /* call vr_grow, once, without keeping anybody waiting for it */
	VR_NAP = 128,       /* from vr_read: it has spun for long, whatever else this processor has to do should be done, by sleep */
};

/* What ended a connection or a dial. The first fault of a connection is kept, later ones are its echo. */
enum vr_fault_kind {
	VR_FAULT_NONE = 0,
	VR_FAULT_SYSTEM, /* a call failed; code is its errno, step names the call */
	VR_FAULT_MEMLOCK, /* registering memory failed with ENOMEM or EPERM; step names the buffer, a is its size in bytes */
	VR_FAULT_NO_DEVICE,       /* there is no RDMA connection manager, or no device at all */
	VR_FAULT_NOT_OPENED,      /* there is one on the route, but it cannot be opened */
	VR_FAULT_NO_ROUTE,        /* no RDMA device serves the route to this address; code is the CM's status */
	VR_FAULT_UNREACHABLE,     /* the address, route or peer did not answer; code is the CM's status */
	VR_FAULT_REJECTED,        /* the peer's CM refused; a is the CM's reject reason (IB spec 12.6.7.2) */
	VR_FAULT_NO_IMM,          /* the device is iWARP, which has no RDMA WRITE with immediate data */
	VR_FAULT_DROPPED,         /* the server accepted, then disconnected before it announced a window */
	VR_FAULT_DEVICE_GONE,     /* the RDMA device was removed, or its address changed */
	VR_FAULT_COMPLETION,      /* a work request failed; a is its ibv_wc_status, b the vendor's error */
	VR_FAULT_WINDOW_GONE,     /* the peer's device refused a write into the window that the peer announced */
	VR_FAULT_BAD_MESSAGE,     /* the device refused what the peer sent, such as a write outside of the window */
	VR_FAULT_CONTROL_SIZE,    /* a control message of a bytes, UINT64_MAX: more than the 32 that are due */
	VR_FAULT_CONTROL_OPCODE,  /* a control message with the unknown opcode a */
	VR_FAULT_WINDOW_EARLY,    /* a new window was announced with b of a bytes of the current one used */
	VR_FAULT_WINDOW_LENGTH,   /* a window of a bytes was announced */
	VR_FAULT_IMM_ZERO,        /* a write of 0 bytes was announced */
	VR_FAULT_IMM_OVERRUN,     /* a write of a bytes was announced where b were left of our window */
	VR_FAULT_COMPLETION_KIND, /* a completion with the unexpected opcode a */
};

struct vr_fault {
	int kind;         /* enum vr_fault_kind */
	int code;         /* errno, positive; what the caller should map the fault to */
	uint64_t a, b;    /* as the kind says */
	const char *step; /* a static string naming what was being done */
};

struct vr_options {
	uint32_t rx_window;  /* bytes of one receive window: 64 KiB to 16 MiB, a multiple of the page size */
	uint32_t tx_staging; /* bytes of the send staging ring, a power of two */
	uint32_t recv_depth; /* receives to keep posted, clamped to the device's limits */
	uint32_t send_depth; /* send queue depth, clamped to the device's limits */
	int32_t resolve_ms;  /* limit of address and of route resolution, each, in milliseconds */
	uint32_t spin_ns;    /* how long to spin before sleeping, at most, in nanoseconds; 0: not at all */
	int32_t spinners;    /* how many may spin at a time in this process */
	bool rx_single;      /* never make a second receive window */
};

struct vr_result {
	int64_t n;     /* bytes, 0, or a negative errno: see each call */
	uint32_t wake; /* VR_WAKE_* */
};

struct vr_stats {
	uint64_t rx_bytes, tx_bytes;       /* payload received, and handed to the device */
	uint64_t rx_messages, tx_messages; /* writes with immediate data seen from, and sent to, the peer */
	uint64_t rx_windows, tx_windows;   /* receive windows announced, and windows the peer announced */
	uint64_t fences;                   /* credit fences answered */
	uint64_t credit_waits;             /* times unsent bytes had to wait for credits */
	uint64_t window_waits;             /* times unsent bytes had to wait for a window */
	uint64_t pinned;                   /* bytes of registered memory */
	uint64_t rx_unread;                /* bytes received that vr_read has not handed over */
	uint64_t tx_unposted;              /* bytes vr_write took that are not handed to the device yet */
	uint64_t spins, sleeps; /* waits of the reader that ended while it spun or was polled, and that it slept in */
	uint64_t arms;          /* times the completion queue was armed */
	uint32_t credits;       /* writes the peer's receive queue is known to have room for */
	uint32_t sq_used;       /* send queue slots in use */
	uint32_t tx_window;     /* bytes of the peer's window */
	uint32_t recv_depth, send_depth; /* as clamped to the device */
	uint32_t inline_max;             /* bytes sent inline at most */
	char device[64];                 /* name of the RDMA device */
};

/*
 * Loads libibverbs and librdmacm, once per process. 0, or -ENOENT or -ENOSYS with the loader's words in
 * msg (always terminated).
 */
int vr_load(char *msg, size_t size);

/*
 * Starts to connect. src may be NULL. On success *out is the connection and *epfd a non-blocking epoll
 * descriptor, owned by the caller, which is readable whenever vr_dial_step or, later, vr_pump has something
 * to do; close it before vr_destroy. On failure *fault says why and nothing remains.
 */
int vr_dial(struct vr_conn **out, int *epfd, const struct sockaddr *dst, const struct sockaddr *src,
            const struct vr_options *opt, struct vr_fault *fault);

/*
 * Does one turn of the dial. Returns one of these, or a negative errno: failed, see vr_get_fault. After VR_DIAL_DONE the pump takes
 * over.
 */
enum {
	VR_DIAL_WAIT = 0, /* more events must come */
	VR_DIAL_DONE,     /* connected, the peer's window is known */
	VR_DIAL_AGAIN,    /* there may be more to do: call again, unless the time is over */
};
int vr_dial_step(struct vr_conn *c);

/*
 * Gives an unfinished dial up gently. 1: the server may have been asked to connect, so vr_dial_step is to be called as
 * before, until it fails or, at the latest, a time of the caller's choice has passed; then vr_destroy. 0: vr_destroy at
 * once. A server whose client is gone before it could accept crashes three seconds later (Valkey up to 9.1.2:
 * rdmaHandleConnect in src/rdma.c leaves its keepalive timer behind when rdma_accept fails), so one that is merely
 * busy is given the time to accept. With keep, the connection may be of use when it has. Without, it ends then, and most of its
 * memory is free until then.
 */
int vr_abandon(struct vr_conn *c, bool keep);

/* What an unfinished dial is doing, in words. */
const char *vr_dial_stage(struct vr_conn *c);

/* The local address of a connected connection. */
void vr_local_address(struct vr_conn *c, struct sockaddr_storage *local);

/*
 * Copies received bytes into buf. n > 0: bytes copied; 0: end of stream; -EAGAIN: nothing yet, call again if wake names the
 * reader (after a turn for others if it has VR_YIELD, after a nap if it has VR_NAP), else sleep until woken, see VR_POLL; otherwise
 * the connection is broken (every byte that arrived before has been handed over). Spins as opt.spin_ns allows and experience
 * advises. goes_on: it is called again because it said so.
 */
struct vr_result vr_read(struct vr_conn *c, void *buf, size_t len, bool goes_on);

/*
 * Takes bytes for sending: what fits is copied, and posted as far as window, credits and send queue allow;
 * the rest of what was taken is posted as these return. n > 0: bytes taken; -EAGAIN: none, staging is full,
 * wait to be woken; otherwise the connection is broken. len must not be 0. more: another piece of the same Write follows.
 */
struct vr_result vr_write(struct vr_conn *c, const void *buf, size_t len, bool more);

/*
 * Serves the descriptors behind epfd: completion events, CM events. n is 1 if it found something to do,
 * 0 if not.
 */
struct vr_result vr_pump(struct vr_conn *c);

/*
 * After VR_GROW: makes the second receive window, which takes milliseconds because memory is locked. A connection that cannot have
 * it goes on with one.
 */
uint32_t vr_grow(struct vr_conn *c);

/*
 * After VR_UNARMED, to be called every few milliseconds until n is 1: if nobody has polled since the last call, it arms the queue,
 * so that the pump hears of completions again.
 */
struct vr_result vr_tend(struct vr_conn *c);

/*
 * Looks at n connections that vr_read gave a VR_POLL for, until there is something to tell of any, or slice_ns are over. wake gets
 * VR_WAKE_* and VR_POLLED for each; false: there was none of VR_WAKE_*. vain_ns is for how long that has been so: those with an
 * opt.spin_ns of less are put to sleep. While vr_poller is on, readers that wait come to the poller instead of spinning.
 */
bool vr_poll(struct vr_conn *const *conns, uint32_t *wake, size_t n, uint32_t slice_ns, uint64_t vain_ns);
void vr_poller(bool on);

/*
 * If nothing at all has come from the peer since the last call, sends a message that needs no answer: where the peer's host is
 * gone, its retries run out and the connection fails. True if it did.
 */
bool vr_probe(struct vr_conn *c);

/*
 * 1: the peer has read all that vr_write took (or, if it answers no fences, has it in its memory); 0: not yet, wait for
 * VR_WAKE_WRITER; negative: it never will. Nothing may be written any more.
 */
struct vr_result vr_flushed(struct vr_conn *c);

/* Ends the connection for the peer; both sides of ours fail with EPIPE from here on, unless a fault came first. */
void vr_disconnect(struct vr_conn *c);

/* Whether it has ended, by a fault, by the peer or by vr_disconnect. There may be bytes to read. */
bool vr_broken(struct vr_conn *c);

/* The first fault, or kind VR_FAULT_NONE. */
void vr_get_fault(struct vr_conn *c, struct vr_fault *out);

/* Returns VR_WAKE_*: what others handed over to it while it held the locks may have ended in a fault. */
uint32_t vr_get_stats(struct vr_conn *c, struct vr_stats *out);

/* Frees everything, connected or not. */
void vr_destroy(struct vr_conn *c);

/* The verbs library's words for a completion status. */
const char *vr_wc_status_str(int status);

#endif
