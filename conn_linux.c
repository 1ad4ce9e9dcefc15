//go:build linux && cgo

/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Moving bytes.
 *
 * Out: vr_write copies into the staging ring and calls tx_flush, which posts what is staged as RDMA WRITEs with
 * immediate data into the peer's window; a small write into an idle queue goes inline, without the copy.
 * In: the peer writes into our window; drain counts the bytes its immediate data announces; vr_read copies them out.
 *
 * The peer reads and writes strictly by position, so a window is always filled to its last byte before the next
 * one is used (src/rdma.c announces again only then), and window k of ours is bytes [k*len, (k+1)*len) of the stream.
 */

#include "impl_linux.h"

#include <arpa/inet.h>
#include <endian.h>
#include <errno.h>
#include <string.h>

static uint16_t get16(const uint8_t *p)
{
	uint16_t v;

	memcpy(&v, p, sizeof(v));
	return be16toh(v);
}

static uint32_t get32(const uint8_t *p)
{
	uint32_t v;

	memcpy(&v, p, sizeof(v));
	return be32toh(v);
}

static uint64_t get64(const uint8_t *p)
{
	uint64_t v;

	memcpy(&v, p, sizeof(v));
	return be64toh(v);
}

static void put16(uint8_t *p, uint16_t v)
{
	v = htobe16(v);
	memcpy(p, &v, sizeof(v));
}

static void put32(uint8_t *p, uint32_t v)
{
	v = htobe32(v);
	memcpy(p, &v, sizeof(v));
}

static void put64(uint8_t *p, uint64_t v)
{
	v = htobe64(v);
	memcpy(p, &v, sizeof(v));
}

bool vr_broken(struct vr_conn *c)
{
	return vr_faulted(c) || atomic_load(&c->peer_closed) || atomic_load(&c->closed);
}

bool vr_unposted(struct vr_conn *c)
{
	return atomic_load(&c->tx_staged) != atomic_load(&c->tx_posted) ||
	       (atomic_load(&c->tx_unannounced) && !atomic_load(&c->tx_more));
}

uint64_t vr_unread(struct vr_conn *c)
{
	return atomic_load(&c->rx_received) - atomic_load(&c->rx_read);
}

/* Receives. */

static int post_receives(struct vr_conn *c, const uint32_t *index, uint32_t n)
{
	struct ibv_recv_wr wr[VR_REPOST_BATCH], *bad;
	struct ibv_sge sge[VR_REPOST_BATCH];
	uint32_t i;

	for (i = 0; i < n; i++) {
		sge[i].addr = (uintptr_t)(c->control.addr + (size_t)index[i] * VR_CONTROL_SIZE);
		sge[i].length = VR_CONTROL_SIZE;
		sge[i].lkey = c->control.mr->lkey;
		wr[i].wr_id = VR_WR_RECV | index[i];
		wr[i].next = i + 1 < n ? &wr[i + 1] : NULL;
		wr[i].sg_list = &sge[i];
		wr[i].num_sge = 1;
	}
	return n ? ibv_post_recv(c->qp, wr, &bad) : 0;
}

int vr_post_receives(struct vr_conn *c)
{
	uint32_t index[VR_REPOST_BATCH];
	uint32_t i = 0, n;
	int err = 0;

	while (i < c->recv_depth && !err) {
		for (n = 0; n < VR_REPOST_BATCH && i < c->recv_depth; n++)
			index[n] = i++;
		err = post_receives(c, index, n);
	}
	return err;
}

/* Gives receive index back. In chains, since each post is a doorbell; the ones held back are few beside recv_depth. */
static void repost(struct vr_conn *c, uint32_t index)
{
	int err;

	c->repost[c->repost_n++] = index;
	if (c->repost_n < VR_REPOST_BATCH)
		return;
	err = post_receives(c, c->repost, c->repost_n);
	c->repost_n = 0;
	if (err)
		vr_set_fault(c, VR_FAULT_SYSTEM, err, "post receives", 0, 0);
}

/* What the peer says. All of this runs under cq_lock. */

static void protocol_fault(struct vr_conn *c, int kind, uint64_t a, uint64_t b)
{
	vr_set_fault(c, kind, EPROTO, "receive", a, b);
	atomic_store(&c->rx_dead, true);
}

/* Where a window lies: by turns in the two buffers, once there are two. */
static struct vr_buf *rx_buffer(struct vr_conn *c, uint64_t window)
{
	uint64_t base = atomic_load(&c->rx_base);

	return &c->rx[window > base ? (window - base) % 2 : 0];
}

/*
 * Announces the next receive window once the current one has been received whole and the next one's buffer has been
 * read empty. Never before: the peer switches at whatever point the message reaches it.
 */
static void maybe_announce(struct vr_conn *c)
{
	uint64_t len = c->opt.rx_window;
	uint64_t next = atomic_load(&c->rx_announced);
	uint64_t buffers = c->rx[1].addr ? 2 : 1;

	if (atomic_load(&c->rx_received) != next * len)
		return;
	if (next >= buffers && atomic_load(&c->rx_read) < (next + 1 - buffers) * len)
		return; /* vr_read comes here again */
	atomic_store(&c->rx_announced, next + 1);
	atomic_store(&c->announce_due, true);
	atomic_store(&c->tx_due, true);
}

static void on_data(struct vr_conn *c, uint64_t n)
{
	uint64_t len = c->opt.rx_window;
	uint64_t received = atomic_load(&c->rx_received);
	uint64_t room = atomic_load(&c->rx_announced) * len - received;

	if (n == 0) {
		protocol_fault(c, VR_FAULT_IMM_ZERO, 0, 0);
		return;
	}
	if (n > room) {
		protocol_fault(c, VR_FAULT_IMM_OVERRUN, n, room);
		return;
	}
	c->rx_messages++;
	/*
	 * The first fence was posted before the server could have had our window, and a server answers in order: data
	 * with no answer before it means a server that does not answer fences.
	 */
	if (!atomic_load(&c->fence_answered) && !atomic_load(&c->fence_unsupported)) {
		atomic_store(&c->fence_unsupported, true);
		atomic_store(&c->tx_due, true);
	}
	received += n;
	atomic_store(&c->rx_received, received);
	if (n < room)
		return;
	/* Only connections that fill a window pay for a second buffer. */
	if (received == len && !c->opt.rx_single)
		atomic_store(&c->grow_due, true);
	maybe_announce(c);
}

static uint32_t on_fence_answer(struct vr_conn *c, uint16_t id)
{
	if (!atomic_load(&c->fence_out) || id != (uint16_t)atomic_load(&c->fence_id))
		return 0;
	atomic_store(&c->msgs_acked, atomic_load(&c->fence_mark));
	c->fences++;
	atomic_store(&c->fence_answered, true);
	atomic_store(&c->fence_out, false);
	atomic_store(&c->tx_due, true);
	return atomic_load(&c->draining) ? VR_WAKE_WRITER : 0;
}

static void on_window(struct vr_conn *c, const uint8_t *msg)
{
	uint64_t length = get32(msg + 24);
	uint32_t windows = atomic_load(&c->peer_windows);

	if (length == 0 || length > VR_WINDOW_MAX) {
		protocol_fault(c, VR_FAULT_WINDOW_LENGTH, length, 0);
		return;
	}
	c->peer_addr = get64(msg + 16);
	c->peer_length = (uint32_t)length;
	c->peer_rkey = get32(msg + 28);
	/* The server announces when it has read the window, so it has posted again every receive used for it. */
	if (windows > 0 && atomic_load(&c->window_mark) > atomic_load(&c->msgs_acked))
		atomic_store(&c->msgs_acked, atomic_load(&c->window_mark));
	atomic_store(&c->peer_windows, windows + 1);
	atomic_store(&c->tx_due, true);
}

static uint32_t on_control(struct vr_conn *c, const uint8_t *msg, uint32_t size)
{
	if (size != VR_CONTROL_SIZE) {
		protocol_fault(c, VR_FAULT_CONTROL_SIZE, size, 0);
		return 0;
	}
	switch (get16(msg)) {
	case VR_OP_GET_SERVER_FEATURE:
		return on_fence_answer(c, get16(msg + 2));
	case VR_OP_SET_CLIENT_FEATURE:
	case VR_OP_KEEPALIVE:
		break; /* neither wants an answer, nor do we know a feature */
	case VR_OP_REGISTER_XFER_MEMORY:
		on_window(c, msg);
		break;
	default:
		protocol_fault(c, VR_FAULT_CONTROL_OPCODE, get16(msg), 0);
	}
	return 0;
}

/* A failed request. Only its wr_id and status mean anything. */
static void on_failed(struct vr_conn *c, const struct ibv_wc *wc)
{
	bool receive = wc->wr_id & VR_WR_RECV;

	switch (wc->status) {
	case IBV_WC_WR_FLUSH_ERR:
		/* The echo of our own hang-up, or of a failure, and then what failed is told first. */
		c->flushed = true;
		return;
	case IBV_WC_LOC_LEN_ERR:
	case IBV_WC_LOC_QP_OP_ERR: /* this one from rxe */
		if (receive) {
			protocol_fault(c, VR_FAULT_CONTROL_SIZE, UINT64_MAX, 0);
			return;
		}
		break;
	case IBV_WC_REM_ACCESS_ERR:
	case IBV_WC_REM_INV_REQ_ERR:
		if (receive) { /* rxe tells us what the peer's device is told, others only flush */
			protocol_fault(c, VR_FAULT_BAD_MESSAGE, 0, 0);
			return;
		}
		/* Also when Valkey closes: its memory goes before its queue pair does (connRdmaClose in src/rdma.c). */
		vr_set_fault(c, VR_FAULT_WINDOW_GONE, ECONNRESET, "send", wc->status, wc->vendor_err);
		return;
	case IBV_WC_RETRY_EXC_ERR:
	case IBV_WC_RNR_RETRY_EXC_ERR:
		vr_set_fault(c, VR_FAULT_COMPLETION, ETIMEDOUT, "send", wc->status, wc->vendor_err);
		return;
	default:
		break;
	}
	vr_set_fault(c, VR_FAULT_COMPLETION, ECONNRESET, receive ? "receive" : "send", wc->status, wc->vendor_err);
}

/* Gives back the slots and the staging that a signalled completion covers; both are in its wr_id, see post_chain. */
static void on_sent(struct vr_conn *c, uint64_t wr_id)
{
	uint32_t done = atomic_load(&c->sq_done);
	uint64_t freed = atomic_load(&c->tx_freed);

	atomic_store(&c->sq_done, done + (uint16_t)((uint16_t)wr_id - (uint16_t)done));
	atomic_store(&c->tx_freed, freed + (((wr_id >> 16) - freed) & VR_POSTED_MASK));
	atomic_store(&c->tx_due, true);
}

static uint32_t on_completion(struct vr_conn *c, const struct ibv_wc *wc)
{
	uint32_t index = (uint32_t)wc->wr_id;
	uint32_t wake;

	if (wc->status != IBV_WC_SUCCESS) { /* all but wr_id is undefined now */
		on_failed(c, wc);
		return 0;
	}
	if (!(wc->wr_id & VR_WR_RECV)) {
		on_sent(c, wc->wr_id);
		return VR_WAKE_WRITER;
	}
	if (atomic_load(&c->rx_dead))
		return 0;
	atomic_fetch_add(&c->heard, 1);
	switch (wc->opcode) {
	case IBV_WC_RECV_RDMA_WITH_IMM:
		on_data(c, ntohl(wc->imm_data));
		repost(c, index);
		/* It may have shown that the server does not answer fences, for one of which vr_flushed waits. */
		return VR_WAKE_READER | (atomic_load(&c->draining) ? VR_WAKE_WRITER : 0);
	case IBV_WC_RECV:
		wake = on_control(c, c->control.addr + (size_t)index * VR_CONTROL_SIZE, wc->byte_len);
		repost(c, index);
		return wake;
	default:
		protocol_fault(c, VR_FAULT_COMPLETION_KIND, wc->opcode, 0);
		return 0;
	}
}

uint32_t vr_drain(struct vr_conn *c)
{
	struct ibv_wc wc[VR_POLL_BATCH];
	uint32_t wake = 0;
	int i, n, left = c->cq->cqe;

	c->drains++;
	/* What came before the queue was armed is no more than it holds. A peer that sends on and on holds nobody here. */
	do {
		n = ibv_poll_cq(c->cq, VR_POLL_BATCH, wc);
		for (i = 0; i < n; i++)
			wake |= on_completion(c, &wc[i]);
		left -= n;
	} while (n == VR_POLL_BATCH && left > 0);
	if (n < 0)
		vr_set_fault(c, VR_FAULT_SYSTEM, EIO, "poll completion queue", 0, 0);
	/* Nobody said why: the device gave the queue pair up because of what the peer sent (IB spec 9.9.3, responder errors). */
	if (c->flushed && !atomic_load(&c->disconnected))
		protocol_fault(c, VR_FAULT_BAD_MESSAGE, 0, 0);
	return wake;
}

void vr_cq_unlock(struct vr_conn *c)
{
	pthread_mutex_unlock(&c->cq_lock);
	if (atomic_load(&c->tx_due))
		vr_tx_kick(c);
}

uint32_t vr_grow(struct vr_conn *c)
{
	struct vr_buf b;

	if (vr_broken(c) || vr_buf_make(c, &b, c->opt.rx_window, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE))
		return 0;
	pthread_mutex_lock(&c->cq_lock);
	c->rx[1] = b;
	/* The reader may be at any window up to the newest, and asks for later ones only when bytes have come for them. */
	atomic_store(&c->rx_base, atomic_load(&c->rx_announced) - 1);
	maybe_announce(c);
	vr_cq_unlock(c);
	return vr_finish(c, 0);
}

/* The last step of every call: the first to see a fault hangs up and wakes both sides. */
uint32_t vr_finish(struct vr_conn *c, uint32_t wake)
{
	if (vr_faulted(c) && !atomic_exchange(&c->fault_told, true)) {
		vr_hang_up(c);
		wake |= VR_WAKE_READER | VR_WAKE_WRITER;
	}
	/* While dialling there is nobody to tell. */
	if (atomic_load(&c->grow_due) && c->state == VR_CONNECTED && atomic_exchange(&c->grow_due, false))
		wake |= VR_GROW;
	return wake;
}

/* Sending. All of this runs under sq_lock. */

/* Gives sq_lock back. Whoever does so must look at tx_due next, and call vr_tx_kick if it is set. */
static void sq_unlock(struct vr_conn *c)
{
	pthread_mutex_unlock(&c->sq_lock);
	atomic_thread_fence(memory_order_seq_cst);
}

static uint32_t sq_free(struct vr_conn *c)
{
	return c->send_depth - (atomic_load(&c->sq_posted) - atomic_load(&c->sq_done));
}

/*
 * Posts a chain of n requests, staged bytes of which come from staging. Unsignalled requests hold their slot until a
 * later signalled one completes, so one is signalled at least every quarter of the queue and of the staging: then
 * whoever waits for either always waits for a completion that is on its way.
 */
static int post_chain(struct vr_conn *c, struct ibv_send_wr *wr, uint32_t n, uint32_t staged, bool signal)
{
	struct ibv_send_wr *bad = NULL, *last = &wr[n - 1];
	uint64_t posted = atomic_load(&c->tx_posted) + staged;
	uint32_t slots = atomic_load(&c->sq_posted) + n;
	uint32_t i;
	int err;

	c->sq_unsignaled += n;
	c->tx_unsignaled += staged;
	if (signal || c->sq_unsignaled >= c->send_depth / 4 || c->tx_unsignaled >= c->opt.tx_staging / 4) {
		last->send_flags |= IBV_SEND_SIGNALED;
		c->sq_unsignaled = 0;
		c->tx_unsignaled = 0;
	}
	for (i = 0; i < n; i++) {
		wr[i].wr_id = (posted & VR_POSTED_MASK) << 16 | (uint16_t)slots;
		wr[i].next = i + 1 < n ? &wr[i + 1] : NULL;
	}
	atomic_store(&c->tx_posted, posted);
	atomic_store(&c->sq_posted, slots);
	err = ibv_post_send(c->qp, wr, &bad);
	if (err)
		vr_set_fault(c, VR_FAULT_SYSTEM, err, "post send", 0, 0);
	return err;
}

/* Posts a control message. The caller knows of a free slot. */
static void post_control(struct vr_conn *c, const uint8_t *msg)
{
	/* Each slot of the send queue has a message of its own, so one is never overwritten while it is being sent. */
	uint32_t slot = c->recv_depth + atomic_load(&c->sq_posted) % c->send_depth;
	uint8_t *at = c->control.addr + (size_t)slot * VR_CONTROL_SIZE;
	struct ibv_sge sge = {.addr = (uintptr_t)at, .length = VR_CONTROL_SIZE, .lkey = c->control.mr->lkey};
	struct ibv_send_wr wr;

	memcpy(at, msg, VR_CONTROL_SIZE);
	memset(&wr, 0, sizeof(wr));
	wr.opcode = IBV_WR_SEND;
	wr.sg_list = &sge;
	wr.num_sge = 1;
	if (c->inline_max >= VR_CONTROL_SIZE)
		wr.send_flags = IBV_SEND_INLINE;
	if (!post_chain(c, &wr, 1, 0, false))
		atomic_fetch_add(&c->msgs_sent, 1);
}

static void post_announcement(struct vr_conn *c)
{
	uint8_t msg[VR_CONTROL_SIZE] = {0};
	uint64_t window = atomic_load(&c->rx_announced) - 1;
	struct vr_buf *b = rx_buffer(c, window);

	put16(msg, VR_OP_REGISTER_XFER_MEMORY);
	put64(msg + 16, (uintptr_t)b->addr);
	put32(msg + 24, c->opt.rx_window);
	put32(msg + 28, b->mr->rkey);
	post_control(c, msg);
}

/*
 * A fence is GetServerFeature: its echo says that the server has posted again every receive used before it
 * (connRdmaHandleRecv in src/rdma.c handles them in order, and reposts each before the next).
 */
static void post_fence(struct vr_conn *c)
{
	uint8_t msg[VR_CONTROL_SIZE] = {0};
	uint32_t id = atomic_fetch_add(&c->fence_id, 1) + 1;

	atomic_store(&c->fence_mark, atomic_load(&c->msgs_sent));
	atomic_store(&c->fence_due, false);
	atomic_store(&c->fence_out, true);
	put16(msg, VR_OP_GET_SERVER_FEATURE);
	put16(msg + 2, (uint16_t)id);
	post_control(c, msg);
}

static uint64_t credits(struct vr_conn *c)
{
	uint64_t used = atomic_load(&c->msgs_sent) - atomic_load(&c->msgs_acked);

	if (atomic_load(&c->fence_unsupported))
		return VR_CREDIT_LIMIT; /* nothing to go by; RNR retries carry us */
	return used < VR_CREDIT_LIMIT ? VR_CREDIT_LIMIT - used : 0;
}

/* Takes over the peer's newest window. It may replace only a window that has been used up. */
static void refresh_window(struct vr_conn *c)
{
	uint32_t windows = atomic_load(&c->peer_windows);

	if (windows == c->win_seen)
		return;
	if (windows - c->win_seen > 1 || c->win_used < c->win_length) {
		vr_set_fault(c, VR_FAULT_WINDOW_EARLY, EPROTO, "receive", c->win_length, c->win_used);
		return;
	}
	pthread_mutex_lock(&c->cq_lock);
	c->win_addr = c->peer_addr;
	c->win_rkey = c->peer_rkey;
	c->win_length = c->peer_length;
	pthread_mutex_unlock(&c->cq_lock);
	c->win_used = 0;
	c->win_seen = windows;
}

/* n more bytes of the peer's window are written. If they, and all before them, were announced, that took a receive of the peer's. */
static void window_advance(struct vr_conn *c, uint32_t n, bool announced)
{
	c->win_used += n;
	if (!announced)
		return;
	atomic_store(&c->tx_unannounced, 0);
	c->tx_messages++;
	atomic_fetch_add(&c->msgs_sent, 1);
	if (c->win_used == c->win_length)
		atomic_store(&c->window_mark, atomic_load(&c->msgs_sent));
}

static void maybe_fence(struct vr_conn *c)
{
	bool due = atomic_load(&c->fence_due) ||
	           atomic_load(&c->msgs_sent) - atomic_load(&c->msgs_acked) >= VR_FENCE_EVERY;

	if (due && !atomic_load(&c->fence_out) && !atomic_load(&c->fence_unsupported) && sq_free(c) > 0)
		post_fence(c);
}

static void prepare_write(struct vr_conn *c, struct ibv_send_wr *wr, struct ibv_sge *sge, uint32_t at)
{
	memset(wr, 0, sizeof(*wr));
	wr->opcode = IBV_WR_RDMA_WRITE;
	wr->sg_list = sge;
	wr->num_sge = 1;
	wr->wr.rdma.remote_addr = c->win_addr + at;
	wr->wr.rdma.rkey = c->win_rkey;
}

/* Posts n staged bytes, in two pieces where the ring wraps. announce: and tells the peer of all it has not been told of yet. */
static void post_staged(struct vr_conn *c, uint32_t n, bool announce)
{
	uint64_t posted = atomic_load(&c->tx_posted);
	uint32_t at = posted & (c->opt.tx_staging - 1);
	uint32_t first = (uint32_t)min64(n, c->opt.tx_staging - at);
	struct ibv_sge sge[2] = {
		{.addr = (uintptr_t)(c->tx.addr + at), .length = first, .lkey = c->tx.mr->lkey},
		{.addr = (uintptr_t)c->tx.addr, .length = n - first, .lkey = c->tx.mr->lkey},
	};
	struct ibv_send_wr wr[2];
	uint32_t pieces = first < n ? 2 : 1;

	prepare_write(c, &wr[0], &sge[0], c->win_used);
	if (!n) /* only the announcement: some devices take a piece of no bytes for one of 2^31 */
		wr[0].num_sge = 0;
	if (pieces == 2)
		prepare_write(c, &wr[1], &sge[1], c->win_used + first);
	if (announce) {
		wr[pieces - 1].opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
		wr[pieces - 1].imm_data = htonl(atomic_load(&c->tx_unannounced) + n);
	} else {
		/* Before they count as posted, so that there is no moment at which nothing seems to be left: see vr_unposted. */
		atomic_fetch_add(&c->tx_unannounced, n);
	}
	/* Whoever waits for all to be sent waits for a completion. */
	if (!post_chain(c, wr, pieces, n, atomic_load(&c->draining)))
		window_advance(c, n, announce);
}

/*
 * Posts whatever window, credits and send queue allow. What keeps the rest back wakes us: see tx_due. A write without immediate
 * data takes none of the peer's receives and does not wake it, so while vr_write has more to stage, only the end of the window
 * and every VR_ANNOUNCE_EVERY bytes, for the peer to have work while the rest travels, are announced.
 */
static void tx_flush(struct vr_conn *c)
{
	uint64_t pending, room, n;
	bool announce;

	for (;;) {
		if (vr_faulted(c) || atomic_load(&c->disconnected))
			return;
		refresh_window(c);
		if (atomic_load(&c->announce_due) && sq_free(c) > 0) {
			atomic_store(&c->announce_due, false);
			post_announcement(c);
		}
		maybe_fence(c);
		announce = !atomic_load(&c->tx_more);
		pending = atomic_load(&c->tx_staged) - atomic_load(&c->tx_posted);
		room = c->win_length - c->win_used;
		if (!pending && !(announce && atomic_load(&c->tx_unannounced)))
			return;
		if (pending && !room) {
			c->window_waits++;
			return;
		}
		n = min64(pending, room);
		announce |= n == room || atomic_load(&c->tx_unannounced) + n >= VR_ANNOUNCE_EVERY;
		if (announce && !credits(c)) {
			c->credit_waits++;
			return;
		}
		if (sq_free(c) < 2 + VR_SQ_RESERVE)
			return;
		post_staged(c, (uint32_t)n, announce);
	}
}

/*
 * Runs tx_flush, or leaves it to whoever is in it: the flag is set before the lock is tried, and looked at again after
 * it is released, so a request is never lost and nobody waits for a lock here.
 */
bool vr_tx_kick(struct vr_conn *c)
{
	bool mine = false;

	atomic_store(&c->tx_due, true);
	while (atomic_load(&c->tx_due)) {
		/* Mutexes alone do not order the flag and a trylock that fails; on weakly ordered processors it would matter. */
		atomic_thread_fence(memory_order_seq_cst);
		if (pthread_mutex_trylock(&c->sq_lock))
			return mine;
		mine = true;
		atomic_store(&c->tx_due, false);
		tx_flush(c);
		sq_unlock(c);
	}
	return mine;
}

/* SetClientFeature with no feature set: there is none that we, or any server so far, would know. */
static void post_features(struct vr_conn *c)
{
	uint8_t msg[VR_CONTROL_SIZE] = {0};

	put16(msg, VR_OP_SET_CLIENT_FEATURE);
	post_control(c, msg);
}

void vr_hello(struct vr_conn *c)
{
	/* The features are asked for first, which is also the first fence: see on_data. */
	atomic_store(&c->fence_due, true);
	pthread_mutex_lock(&c->sq_lock);
	maybe_fence(c);
	post_features(c);
	atomic_store(&c->rx_announced, 1);
	post_announcement(c);
	sq_unlock(c);
}

bool vr_probe(struct vr_conn *c)
{
	uint8_t msg[VR_CONTROL_SIZE] = {0};
	uint64_t heard = atomic_load(&c->heard);
	bool probed = false;

	if (heard != c->heard_before || vr_broken(c)) {
		c->heard_before = heard;
		return false;
	}
	pthread_mutex_lock(&c->sq_lock);
	/* Where there is no room, requests are outstanding, and their retries are probes as well. */
	if (credits(c) && sq_free(c) > VR_SQ_RESERVE) {
		put16(msg, VR_OP_KEEPALIVE);
		post_control(c, msg);
		probed = true;
	}
	sq_unlock(c);
	if (atomic_load(&c->tx_due))
		vr_tx_kick(c);
	return probed;
}

/* Sends a small write inline if nothing is in its way; false means that it must be staged. */
static bool write_inline(struct vr_conn *c, const void *buf, uint32_t len)
{
	struct ibv_sge sge = {.addr = (uintptr_t)buf, .length = len};
	struct ibv_send_wr wr;
	bool sent = false;

	if (len > c->inline_max || pthread_mutex_trylock(&c->sq_lock))
		return false;
	refresh_window(c);
	if (!vr_faulted(c) && !vr_unposted(c) && c->win_length - c->win_used >= len && credits(c) &&
	    sq_free(c) > VR_SQ_RESERVE) {
		prepare_write(c, &wr, &sge, c->win_used);
		wr.opcode = IBV_WR_RDMA_WRITE_WITH_IMM;
		wr.imm_data = htonl(len);
		wr.send_flags = IBV_SEND_INLINE;
		if (!post_chain(c, &wr, 1, 0, false)) {
			window_advance(c, len, true);
			c->tx_inline += len;
			sent = true;
		}
		maybe_fence(c);
	}
	sq_unlock(c);
	if (atomic_load(&c->tx_due))
		vr_tx_kick(c);
	return sent;
}

static uint64_t staging_room(struct vr_conn *c)
{
	return c->opt.tx_staging - (atomic_load(&c->tx_staged) - atomic_load(&c->tx_freed));
}

static void stage(struct vr_conn *c, const uint8_t *from, uint32_t n)
{
	uint64_t staged = atomic_load(&c->tx_staged);
	uint32_t at = staged & (c->opt.tx_staging - 1);
	uint32_t first = (uint32_t)min64(n, c->opt.tx_staging - at);

	memcpy(c->tx.addr + at, from, first);
	memcpy(c->tx.addr, from + first, n - first);
	atomic_store(&c->tx_staged, staged + n);
}

struct vr_result vr_write(struct vr_conn *c, const void *buf, size_t len, bool more)
{
	struct vr_result r = {0, 0};
	size_t done = 0;
	/* The first piece is small so that the wire starts early; later ones are copied while it works. */
	uint64_t piece = 16 << 10;
	struct vr_spin s = vr_spin_writer(c);
	uint64_t n;

	if (vr_broken(c)) {
		r.n = vr_fault_errno(c);
		r.wake = vr_finish(c, 0);
		return r;
	}
	if (atomic_load(&c->wr_waiting))
		atomic_store(&c->wr_waiting, false);
	if (write_inline(c, buf, len > UINT32_MAX ? UINT32_MAX : (uint32_t)len)) {
		atomic_fetch_add(&c->writes, !more);
		r.n = (int64_t)len;
		r.wake = vr_finish(c, 0);
		return r;
	}
	while (done < len) {
		n = min64(min64(len - done, piece), staging_room(c));
		if (!n) {
			r.wake |= vr_progress(c);
			if (vr_broken(c))
				break;
			if (staging_room(c) || vr_spin(c, &s))
				continue;
			r.wake |= vr_sleep_writer(c);
			if (vr_broken(c) || !staging_room(c))
				break;
			continue;
		}
		/* Before the last piece is staged, so that whoever posts it announces it. */
		atomic_store(&c->tx_more, done + n < len);
		stage(c, (const uint8_t *)buf + done, (uint32_t)n);
		done += n;
		/*
		 * Another thread that posts in our stead would do so for as long as we stage, and has connections to look after.
		 * While we wait for it, we stage nothing, so it leaves.
		 */
		c->tx_helped = vr_tx_kick(c) ? 0 : c->tx_helped + 1;
		if (c->tx_helped == 4) {
			c->tx_helped = 0;
			pthread_mutex_lock(&c->sq_lock);
			sq_unlock(c);
			vr_tx_kick(c);
		}
		if (piece < c->opt.tx_staging / 4)
			piece *= 2;
		if (vr_broken(c))
			break;
	}
	if (atomic_exchange(&c->tx_more, false))
		vr_tx_kick(c);
	vr_spin_end(&s);
	atomic_fetch_add(&c->writes, done == len && !more);
	/* What could not be posted is, by whoever hears of the completion it waits for. */
	if (vr_unposted(c) && !atomic_load(&c->rd_looking))
		r.wake |= vr_arm(c);
	r.n = done ? (int64_t)done : vr_broken(c) ? vr_fault_errno(c) : -EAGAIN;
	r.wake = vr_finish(c, r.wake);
	return r;
}

static size_t copy_out(struct vr_conn *c, uint8_t *to, size_t want)
{
	uint64_t len = c->opt.rx_window;
	uint64_t at = atomic_load(&c->rx_read);
	size_t done = 0;

	while (done < want) {
		uint64_t window = at / len, off = at % len;
		uint64_t n = min64(want - done, len - off);

		memcpy(to + done, rx_buffer(c, window)->addr + off, n);
		at += n;
		done += n;
	}
	atomic_store(&c->rx_read, at);
	/* The window was full and waited for this buffer: the peer may have it now. */
	if (atomic_load(&c->rx_received) == atomic_load(&c->rx_announced) * len) {
		pthread_mutex_lock(&c->cq_lock);
		maybe_announce(c);
		vr_cq_unlock(c);
	}
	return done;
}

struct vr_result vr_read(struct vr_conn *c, void *buf, size_t len, bool goes_on)
{
	struct vr_result r = {-EAGAIN, 0};
	uint64_t have = vr_unread(c);
	bool end;

	if (c->opt.spin_ns)
		vr_awake(c);
	if (!have) {
		r.wake = vr_await(c, goes_on);
		end = vr_broken(c); /* before the count: whatever arrived before the end is counted */
		have = vr_unread(c);
		if (!have && end) {
			r.wake |= vr_progress(c);
			have = vr_unread(c);
		}
		if (!have && end)
			r.n = vr_faulted(c) || atomic_load(&c->closed) || !atomic_load(&c->peer_closed)
			              ? vr_fault_errno(c)
			              : 0;
	}
	if (have)
		r.n = (int64_t)copy_out(c, buf, min64(have, len));
	r.wake = vr_finish(c, r.wake);
	return r;
}

/*
 * All has been posted: does the server have it? That it is in the server's memory is not enough, because the server drops what
 * it has not read when it hears of the disconnect, which comes by another channel (rdmaHandleDisconnect in src/rdma.c).
 * The answer to one more fence tells that it has: it reads in the same turn in which it answers.
 */
static bool arrived(struct vr_conn *c)
{
	struct ibv_send_wr wr;

	if (!atomic_load(&c->fence_unsupported)) {
		if (!c->last_fence && !atomic_load(&c->fence_out) && sq_free(c) > 0) {
			post_fence(c);
			c->last_fence = true;
		}
		return c->last_fence && !atomic_load(&c->fence_out);
	}
	if (c->sq_unsignaled && sq_free(c) > 0) {
		/* A write of no bytes takes nothing from the peer, and completes after all before it. */
		memset(&wr, 0, sizeof(wr));
		wr.opcode = IBV_WR_RDMA_WRITE;
		wr.wr.rdma.remote_addr = c->win_addr;
		wr.wr.rdma.rkey = c->win_rkey;
		post_chain(c, &wr, 1, 0, true);
	}
	return atomic_load(&c->sq_posted) == atomic_load(&c->sq_done);
}

struct vr_result vr_flushed(struct vr_conn *c)
{
	struct vr_result r = {0, 0};

	atomic_store(&c->draining, true);
	r.wake = vr_progress(c);
	if (vr_broken(c)) {
		r.n = vr_fault_errno(c);
	} else {
		pthread_mutex_lock(&c->sq_lock);
		if (!vr_unposted(c))
			r.n = arrived(c);
		sq_unlock(c);
		if (atomic_load(&c->tx_due))
			vr_tx_kick(c);
		if (!r.n)
			r.wake |= vr_sleep_writer(c);
	}
	r.wake = vr_finish(c, r.wake);
	return r;
}

uint32_t vr_get_stats(struct vr_conn *c, struct vr_stats *out)
{
	const char *name = c->id && c->id->verbs ? vr_lib.ibv_get_device_name(c->id->verbs->device) : NULL;

	memset(out, 0, sizeof(*out));
	pthread_mutex_lock(&c->sq_lock);
	out->tx_bytes = atomic_load(&c->tx_posted) + c->tx_inline;
	out->tx_unposted = atomic_load(&c->tx_staged) - atomic_load(&c->tx_posted);
	out->credits = (uint32_t)credits(c);
	out->sq_used = c->send_depth - sq_free(c);
	out->tx_messages = c->tx_messages;
	out->credit_waits = c->credit_waits;
	out->window_waits = c->window_waits;
	out->tx_window = c->win_length;
	sq_unlock(c);
	pthread_mutex_lock(&c->cq_lock);
	out->rx_bytes = atomic_load(&c->rx_received);
	out->rx_unread = out->rx_bytes - atomic_load(&c->rx_read);
	out->rx_messages = c->rx_messages;
	out->rx_windows = atomic_load(&c->rx_announced);
	out->tx_windows = atomic_load(&c->peer_windows);
	out->fences = c->fences;
	out->spins = c->spins;
	out->sleeps = c->sleeps;
	out->arms = c->arms;
	out->pinned = c->control.size + c->rx[0].size + c->rx[1].size + c->tx.size;
	pthread_mutex_unlock(&c->cq_lock);
	out->recv_depth = c->recv_depth;
	out->send_depth = c->send_depth;
	out->inline_max = c->inline_max;
	if (name)
		strncpy(out->device, name, sizeof(out->device) - 1);
	if (atomic_load(&c->tx_due))
		vr_tx_kick(c);
	return vr_finish(c, 0);
}
