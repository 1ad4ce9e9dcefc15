/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What dial_linux.c (making and ending a connection), conn_linux.c (moving bytes) and poll_linux.c (waiting) share.
 */
#ifndef VALKEYRDMA_IMPL_LINUX_H
#define VALKEYRDMA_IMPL_LINUX_H

#include "conn_linux.h"

#include <infiniband/verbs.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <stdatomic.h>
#include <stdbool.h>

/*
 * Both libraries are opened at the first dial, so that a program with this package in it also starts on hosts
 * without them. ibv_poll_cq, ibv_post_send, ibv_post_recv and ibv_req_notify_cq need no entry: they are inline
 * calls through the device context. The tag valkeyrdma_link links the libraries instead.
 */
#define VR_VERBS_SYMBOLS(X)                                                                                            \
	X(ibv_alloc_pd)                                                                                                \
	X(ibv_create_comp_channel)                                                                                     \
	X(ibv_create_cq)                                                                                               \
	X(ibv_create_qp)                                                                                               \
	X(ibv_dealloc_pd)                                                                                              \
	X(ibv_dereg_mr)                                                                                                \
	X(ibv_destroy_comp_channel)                                                                                    \
	X(ibv_destroy_cq)                                                                                              \
	X(ibv_destroy_qp)                                                                                              \
	X(ibv_ack_cq_events)                                                                                           \
	X(ibv_get_cq_event)                                                                                            \
	X(ibv_get_device_name)                                                                                         \
	X(ibv_modify_qp)                                                                                               \
	X(ibv_query_device)                                                                                            \
	X(ibv_query_port)                                                                                              \
	X(ibv_reg_mr)                                                                                                  \
	X(ibv_wc_status_str)

#define VR_RDMACM_SYMBOLS(X)                                                                                           \
	X(rdma_ack_cm_event)                                                                                           \
	X(rdma_connect)                                                                                                \
	X(rdma_create_event_channel)                                                                                   \
	X(rdma_create_id)                                                                                              \
	X(rdma_destroy_event_channel)                                                                                  \
	X(rdma_destroy_id)                                                                                             \
	X(rdma_disconnect)                                                                                             \
	X(rdma_establish)                                                                                              \
	X(rdma_get_cm_event)                                                                                           \
	X(rdma_init_qp_attr)                                                                                           \
	X(rdma_resolve_addr)                                                                                           \
	X(rdma_resolve_route)

/* verbs.h hides these two behind macros that may call functions which are not in the table. */
#undef ibv_reg_mr
#undef ibv_query_port

struct vr_lib {
#define X(name) __typeof__(name) *name;
	VR_VERBS_SYMBOLS(X)
	VR_RDMACM_SYMBOLS(X)
#undef X
};
extern struct vr_lib vr_lib; /* written by vr_load only */

/* The protocol's control messages: 32 bytes, big-endian (Valkey's src/rdma.c). */
enum {
	VR_CONTROL_SIZE = 32,
	VR_OP_GET_SERVER_FEATURE = 0,
	VR_OP_SET_CLIENT_FEATURE = 1,
	VR_OP_KEEPALIVE = 2,
	VR_OP_REGISTER_XFER_MEMORY = 3,
};

enum {
	/*
	 * The server keeps 1024 receives (VALKEY_RDMA_MAX_WQE in its src/rdma.c). Data may take up to this many
	 * before a fence is answered; what is left is for our control messages.
	 */
	VR_CREDIT_LIMIT = 976,
	VR_FENCE_EVERY = 488, /* messages; half the limit, so that the answer arrives before the credits are gone */
	VR_ANNOUNCE_EVERY = 256 << 10, /* bytes */
	VR_SQ_RESERVE = 8,             /* send queue slots kept for control messages */
	VR_POLL_BATCH = 16,            /* completions taken in one poll */
	VR_REPOST_BATCH = 32,          /* receives posted again in one chain */
};

/* The largest window a peer may announce, in bytes: far above any server's limit (16 MiB), far below wrap-around. */
#define VR_WINDOW_MAX (1u << 30)

/*
 * wr_id: the top bit marks a receive, whose index is below. A send has there what its completion gives back: in the low
 * 16 bits the send queue slots used up to and with it, above them 47 bits of the staged bytes posted so far.
 */
#define VR_WR_RECV (1ull << 63)
#define VR_POSTED_MASK ((1ull << 47) - 1)

struct vr_buf {
	uint8_t *addr;
	size_t size;
	struct ibv_mr *mr;
};

enum vr_state {
	VR_RESOLVING_ADDR,
	VR_RESOLVING_ROUTE,
	VR_CONNECTING,
	VR_AWAITING_WINDOW,
	VR_CONNECTED,
	VR_FAILED,
};

/*
 * Locks. sq_lock guards the send queue: posting, and the sending side's position in the peer's window. cq_lock guards
 * the completion queue: polling, reposting receives, and all that completions tell. sq_lock may be held when cq_lock
 * is taken, never the other way about; neither is held across a copy of payload. What one side reads and the
 * other writes is atomic.
 *
 * Byte positions are counted from the start of the connection and never wrap in practice (2^64).
 */
struct vr_conn {
	struct vr_options opt;
	_Atomic enum vr_state state; /* the pump may declare a failure while others look */
	int epfd;
	struct rdma_event_channel *cm_channel;
	struct rdma_cm_id *id;
	struct ibv_pd *pd;
	struct ibv_comp_channel *comp_channel;
	struct ibv_cq *cq;
	struct ibv_qp *qp;              /* not on the cm_id, see connect_qp */
	unsigned int cq_events_unacked; /* pump only */
	uint32_t recv_depth, send_depth, inline_max;
	bool abandoned;   /* set while dialling: nobody wants the connection any more */
	bool established; /* set while dialling: the CM has a connection to disconnect */

	struct vr_buf control; /* recv_depth receives, then send_depth messages to send */
	struct vr_buf rx[2];   /* the second is made by vr_grow, and set under cq_lock */
	struct vr_buf tx;

	/* How it ended. */
	_Atomic int fault_set; /* 0: none, 1: being written, 2: readable */
	struct vr_fault fault;
	_Atomic bool fault_told; /* the disconnect and the wake-ups that a fault owes were given */
	_Atomic bool rx_dead;    /* the peer broke the protocol: count nothing more */
	_Atomic bool peer_closed;
	_Atomic bool closed;       /* vr_disconnect */
	_Atomic uint64_t heard;    /* messages of any kind from the peer */
	uint64_t heard_before;     /* at the last vr_probe */
	_Atomic bool disconnected; /* the QP is in error, the CM told */

	/* Receiving: windows 0, 1, 2... follow each other through one buffer or two, see rx_buffer. */
	pthread_mutex_t cq_lock;
	_Atomic uint64_t rx_base;      /* the last window that lay in buffer 0 because there was no other */
	_Atomic bool grow_due;         /* the first window has filled, and nobody has been told to call vr_grow yet */
	_Atomic uint64_t rx_received;  /* bytes that arrived */
	_Atomic uint64_t rx_read;      /* bytes handed to the reader */
	_Atomic uint64_t rx_announced; /* windows announced, or about to be */
	_Atomic bool announce_due;     /* the newest window's announcement is not posted yet */
	uint32_t repost[VR_REPOST_BATCH];
	uint32_t repost_n;
	bool flushed; /* requests were flushed */
	uint64_t rx_messages;

	/* Who hears of the next completion: the pump while the queue is armed, else whoever polls. See vr_on_event. */
	bool armed;              /* an event will come, or waits to be taken */
	_Atomic bool rd_waiting; /* the reader, or the writer, sleeps until it is woken */
	_Atomic bool wr_waiting;
	uint64_t drains, drains_before; /* at the last vr_tend */

	/* How the reader waits. Times in nanoseconds; what is not atomic, only the reader uses. */
	_Atomic bool rd_looking;              /* it spins */
	_Atomic bool rd_hot;                  /* it has just looked itself, or will in a moment */
	_Atomic bool polled;                  /* the poller looks in its stead */
	_Atomic bool poll_expired;            /* the poller has put it to sleep */
	_Atomic uint64_t polled_at, slept_at; /* since when; 0: does not */
	_Atomic uint32_t writes;              /* Writes that vr_write took wholly */
	uint32_t writes_seen, pipelining;     /* see note_requests */
	uint32_t spin_score, spin_pause, spin_backoff;
	uint64_t spin_wait, spin_sleep; /* averages */
	uint64_t spin_short;            /* what short waits take */
	uint64_t spin_began, spin_until, spin_slice, spin_trial, yielded_at;
	_Atomic uint64_t spins;
	uint64_t sleeps, arms; /* under cq_lock */

	/* The peer's newest window, written under cq_lock. */
	uint64_t peer_addr;
	uint32_t peer_rkey, peer_length;
	_Atomic uint32_t peer_windows; /* how many it announced */

	/* Sending. */
	pthread_mutex_t sq_lock;
	_Atomic bool draining;      /* somebody waits until all is sent, see vr_flushed */
	bool last_fence;            /* the fence after all that was written is posted */
	_Atomic bool tx_due;        /* somebody wants tx_flush to run, see vr_tx_kick */
	_Atomic uint64_t tx_staged; /* bytes copied into staging */
	_Atomic uint64_t tx_posted; /* of these, posted */
	_Atomic uint64_t tx_freed;  /* of these, completed: their staging may be used again */
	_Atomic uint32_t sq_posted; /* send queue slots ever used, modulo 2^32 */
	_Atomic uint32_t sq_done;   /* slots ever given back */
	uint32_t sq_unsignaled;     /* slots since the last signalled one */
	uint32_t tx_unsignaled;     /* staged bytes since then */
	uint64_t win_addr;          /* the window being written */
	uint32_t win_rkey, win_length, win_used, win_seen;
	_Atomic bool tx_more;            /* vr_write is about to stage more */
	uint32_t tx_helped;              /* pieces in a row that another thread has posted; writer only */
	_Atomic uint32_t tx_unannounced; /* bytes of the window that were written and not announced */
	uint64_t tx_inline;              /* bytes that were sent inline, past the staging */

	/* Credits: messages sent and messages whose receive the peer is known to have posted again. */
	_Atomic uint64_t msgs_sent;
	_Atomic uint64_t msgs_acked;
	_Atomic uint64_t window_mark; /* msgs_sent when the current window filled */
	_Atomic uint64_t fence_mark;  /* msgs_sent when the outstanding fence was posted */
	_Atomic uint32_t fence_id;    /* its 16 bit select */
	_Atomic bool fence_out;
	_Atomic bool fence_due;      /* post one whatever the count */
	_Atomic bool fence_answered; /* at least once */
	_Atomic bool fence_unsupported;
	uint64_t tx_messages, fences, credit_waits, window_waits;
};

static inline uint64_t min64(uint64_t a, uint64_t b)
{
	return a < b ? a : b;
}

/* Notes a fault; the first one stays. Safe under any lock. */
void vr_set_fault(struct vr_conn *c, int kind, int code, const char *step, uint64_t a, uint64_t b);
bool vr_faulted(struct vr_conn *c);
int vr_fault_errno(struct vr_conn *c);

/* Moves the QP to error and tells the CM, once. */
void vr_hang_up(struct vr_conn *c);

/* Takes what is in the completion queue, under cq_lock; returns VR_WAKE_*. */
uint32_t vr_drain(struct vr_conn *c);

/* Takes what is in the completion queue and posts what became possible; returns VR_WAKE_*. */
uint32_t vr_progress(struct vr_conn *c);
/* The same, and arms the queue, so that the pump hears of what comes later. */
uint32_t vr_arm(struct vr_conn *c);
uint32_t vr_on_event(struct vr_conn *c, bool taken);
uint32_t vr_sleep_writer(struct vr_conn *c);

/* Waiting, see poll_linux.c. */
struct vr_spin {
	uint64_t began;  /* 0: has not */
	uint64_t budget; /* nanoseconds */
	bool crowded;    /* too many spin: the poller is to look in our stead */
};
bool vr_spin(struct vr_conn *c, struct vr_spin *s);
void vr_spin_end(struct vr_spin *s);
struct vr_spin vr_spin_writer(struct vr_conn *c);
void vr_spin_init(struct vr_conn *c);
uint32_t vr_await(struct vr_conn *c, bool goes_on);
void vr_awake(struct vr_conn *c);

/* What there is. */
bool vr_unposted(struct vr_conn *c); /* bytes that were taken and are not announced to the peer */
uint64_t vr_unread(struct vr_conn *c);

/* Called last by every call from outside. */
uint32_t vr_finish(struct vr_conn *c, uint32_t wake);

/* What a connection opens with: all receives posted; the exchange of features and the first window's announcement. */
int vr_post_receives(struct vr_conn *c);
void vr_hello(struct vr_conn *c);
bool vr_tx_kick(struct vr_conn *c);   /* false: another thread does it */
void vr_cq_unlock(struct vr_conn *c); /* and sends what those under the lock found to be due */

/* Page-aligned memory of its own mapping, registered. 0 or a positive errno. */
int vr_buf_make(struct vr_conn *c, struct vr_buf *b, size_t size, int access);
void vr_buf_free(struct vr_buf *b);

#endif
