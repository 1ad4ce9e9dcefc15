/* SPDX-License-Identifier: Apache-2.0 */
#include "peer_linux.h"

#include <arpa/inet.h>
#include <endian.h>
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <rdma/rdma_cma.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

enum {
	RECEIVES = 1024, /* as a real server has (VALKEY_RDMA_MAX_WQE in its src/rdma.c) */
	SENDS = 256,
	SIGNAL_EVERY = 32,
	REPOST_BATCH = 16,
	POLL_BATCH = 16,
	CONTROL_SIZE = 32,
	INLINE_MAX = 64,
	SOURCE_SIZE = 1 << 20, /* replies are written from here, in messages no larger than this */
	HEADER_SIZE = 24,
	EVENTS_PER_ACK = 1024,

	OP_GET_SERVER_FEATURE = 0,
	OP_SET_CLIENT_FEATURE = 1,
	OP_KEEPALIVE = 2,
	OP_REGISTER_XFER_MEMORY = 3,
};

/* What begins each request, in host byte order: both ends are on one machine. See Header in peer.go. */
struct header {
	uint64_t request; /* bytes, this header included */
	uint64_t reply;   /* bytes */
	uint64_t message; /* bytes of each message of the reply */
};

struct memory {
	uint8_t *addr;
	size_t size;
	struct ibv_mr *mr;
};

struct pe_server {
	struct rdma_event_channel *channel;
	struct rdma_cm_id *listener;
};

struct peer {
	const struct pe_options *opt;
	struct rdma_event_channel *channel;
	struct rdma_cm_id *id;
	struct ibv_pd *pd;
	struct ibv_comp_channel *comp_channel;
	struct ibv_cq *cq;
	unsigned int events;
	bool ended;

	struct memory control; /* a receive each */
	struct memory source;
	uint8_t *scratch;
	uint32_t repost[REPOST_BATCH];
	int repost_n;

	/* Receiving. */
	struct memory rx[2];
	uint32_t rx_index;
	uint32_t rx_used; /* bytes of the current window that have come */
	struct header head;
	uint32_t head_have; /* bytes of it */
	uint64_t request_left;

	/* Sending. */
	uint64_t win_addr;
	uint32_t win_key, win_length, win_used;
	uint64_t reply_left, reply_message;
	uint32_t source_at;
	uint32_t sq_posted, sq_done, sq_unsignaled;
};

static int fail(const char *what)
{
	fprintf(stderr, "peer: %s: %s\n", what, strerror(errno));
	return -1;
}

static int protocol_error(const char *what, uint64_t n)
{
	fprintf(stderr, "peer: the client broke the protocol: %s (%llu)\n", what, (unsigned long long)n);
	return -1;
}

static int make_memory(struct peer *p, struct memory *m, size_t size, int access)
{
	void *a = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);

	if (a == MAP_FAILED)
		return fail("mmap");
	m->addr = a;
	m->size = size;
	m->mr = ibv_reg_mr(p->pd, a, size, access);
	return m->mr ? 0 : fail("ibv_reg_mr");
}

static void free_memory(struct memory *m)
{
	if (m->mr)
		ibv_dereg_mr(m->mr);
	if (m->addr)
		munmap(m->addr, m->size);
	memset(m, 0, sizeof(*m));
}

/* Receives. */

static int post_receives(struct peer *p, const uint32_t *indices, int n)
{
	struct ibv_recv_wr wr[REPOST_BATCH], *bad;
	struct ibv_sge sge[REPOST_BATCH];

	if (!n)
		return 0;
	for (int i = 0; i < n; i++) {
		sge[i] = (struct ibv_sge){
			.addr = (uintptr_t)p->control.addr + (size_t)indices[i] * CONTROL_SIZE,
			.length = CONTROL_SIZE,
			.lkey = p->control.mr->lkey,
		};
		wr[i] = (struct ibv_recv_wr){
			.wr_id = indices[i],
			.next = i + 1 < n ? &wr[i + 1] : NULL,
			.sg_list = &sge[i],
			.num_sge = 1,
		};
	}
	errno = ibv_post_recv(p->id->qp, wr, &bad);
	return errno ? fail("ibv_post_recv") : 0;
}

static int flush_reposts(struct peer *p)
{
	int n = p->repost_n;

	p->repost_n = 0;
	return post_receives(p, p->repost, n);
}

static int give_back(struct peer *p, uint32_t index)
{
	p->repost[p->repost_n++] = index;
	return p->repost_n == REPOST_BATCH ? flush_reposts(p) : 0;
}

/* Sends. */

static uint32_t slots_free(const struct peer *p)
{
	return SENDS - (p->sq_posted - p->sq_done);
}

static int post_send(struct peer *p, struct ibv_send_wr *wr, bool signal)
{
	struct ibv_send_wr *bad;

	p->sq_posted++;
	if (++p->sq_unsignaled >= SIGNAL_EVERY || signal) {
		wr->send_flags |= IBV_SEND_SIGNALED;
		p->sq_unsignaled = 0;
	}
	wr->wr_id = p->sq_posted;
	errno = ibv_post_send(p->id->qp, wr, &bad);
	return errno ? fail("ibv_post_send") : 0;
}

static int send_control(struct peer *p, const uint8_t *message)
{
	struct ibv_sge sge = {.addr = (uintptr_t)message, .length = CONTROL_SIZE};
	struct ibv_send_wr wr = {.opcode = IBV_WR_SEND, .sg_list = &sge, .num_sge = 1, .send_flags = IBV_SEND_INLINE};

	/* send_reply leaves the slots that this needs: a client has few control messages under way. */
	return slots_free(p) ? post_send(p, &wr, false)
	                     : protocol_error("too many control messages at once", p->sq_posted);
}

static void put16(uint8_t *at, uint16_t v)
{
	v = htobe16(v);
	memcpy(at, &v, sizeof(v));
}

static void put32(uint8_t *at, uint32_t v)
{
	v = htobe32(v);
	memcpy(at, &v, sizeof(v));
}

static void put64(uint8_t *at, uint64_t v)
{
	v = htobe64(v);
	memcpy(at, &v, sizeof(v));
}

static uint16_t get16(const uint8_t *at)
{
	uint16_t v;

	memcpy(&v, at, sizeof(v));
	return be16toh(v);
}

static uint32_t get32(const uint8_t *at)
{
	uint32_t v;

	memcpy(&v, at, sizeof(v));
	return be32toh(v);
}

static uint64_t get64(const uint8_t *at)
{
	uint64_t v;

	memcpy(&v, at, sizeof(v));
	return be64toh(v);
}

static int announce(struct peer *p)
{
	const struct memory *m = &p->rx[p->rx_index];
	uint8_t message[CONTROL_SIZE] = {0};

	put16(message, OP_REGISTER_XFER_MEMORY);
	put64(message + 16, (uintptr_t)m->addr);
	put32(message + 24, p->opt->window);
	put32(message + 28, m->mr->rkey);
	/* A client that sees a new window may take it that every receive used for the last one is posted again. */
	return flush_reposts(p) || send_control(p, message) ? -1 : 0;
}

/* Writes as much of the reply as window and send queue take. */
static int send_reply(struct peer *p)
{
	while (p->reply_left && p->win_used < p->win_length && slots_free(p) > 8) {
		uint64_t n = p->reply_message;
		struct ibv_sge sge;
		struct ibv_send_wr wr;

		if (n > p->reply_left)
			n = p->reply_left;
		if (n > p->win_length - p->win_used)
			n = p->win_length - p->win_used;
		if (p->source_at + n > SOURCE_SIZE)
			p->source_at = 0;
		sge = (struct ibv_sge){
			.addr = (uintptr_t)p->source.addr + p->source_at,
			.length = (uint32_t)n,
			.lkey = p->source.mr->lkey,
		};
		wr = (struct ibv_send_wr){
			.opcode = IBV_WR_RDMA_WRITE_WITH_IMM,
			.sg_list = &sge,
			.num_sge = 1,
			.send_flags = n <= INLINE_MAX ? IBV_SEND_INLINE : 0,
			.imm_data = htobe32((uint32_t)n),
			.wr.rdma = {.remote_addr = p->win_addr + p->win_used, .rkey = p->win_key},
		};
		p->source_at += (uint32_t)n;
		p->win_used += (uint32_t)n;
		p->reply_left -= n;
		if (post_send(p, &wr, slots_free(p) <= 9))
			return -1;
	}
	return 0;
}

/* Takes n bytes that have arrived at data: the requests in them. */
static int take(struct peer *p, const uint8_t *data, uint32_t n)
{
	while (n) {
		uint32_t part;

		if (p->head_have < HEADER_SIZE) {
			part = HEADER_SIZE - p->head_have;
			if (part > n)
				part = n;
			memcpy((uint8_t *)&p->head + p->head_have, data, part);
			p->head_have += part;
			data += part;
			n -= part;
			if (p->head_have < HEADER_SIZE)
				continue;
			if (p->head.request < HEADER_SIZE || !p->head.message || p->head.message > SOURCE_SIZE)
				return protocol_error("a header that makes no sense", p->head.request);
			p->request_left = p->head.request - HEADER_SIZE;
		}
		part = p->request_left < n ? (uint32_t)p->request_left : n;
		if (p->opt->copy)
			memcpy(p->scratch, data, part);
		data += part;
		n -= part;
		p->request_left -= part;
		if (p->request_left)
			continue;
		p->head_have = 0;
		p->reply_left += p->head.reply;
		p->reply_message = p->head.message;
		if (send_reply(p))
			return -1;
	}
	return 0;
}

static int on_data(struct peer *p, uint32_t n, uint32_t index)
{
	const uint8_t *data = p->rx[p->rx_index].addr + p->rx_used;
	bool full;

	if (n > p->opt->window - p->rx_used)
		return protocol_error("a write past the end of the window", n);
	if (give_back(p, index))
		return -1;
	p->rx_used += n;
	full = p->rx_used == p->opt->window;
	if (full) {
		p->rx_used = 0;
		p->rx_index = (p->rx_index + 1) % p->opt->buffers;
	}
	/* With a second buffer the next window is open before the last bytes are taken out of this one. */
	if (full && p->opt->buffers > 1 && announce(p))
		return -1;
	if (take(p, data, n))
		return -1;
	return full && p->opt->buffers == 1 ? announce(p) : 0;
}

static int on_control(struct peer *p, uint32_t length, uint32_t index)
{
	uint8_t message[CONTROL_SIZE];

	if (length != CONTROL_SIZE)
		return protocol_error("a control message of a wrong length", length);
	memcpy(message, p->control.addr + (size_t)index * CONTROL_SIZE, CONTROL_SIZE);
	if (give_back(p, index))
		return -1;
	switch (get16(message)) {
	case OP_GET_SERVER_FEATURE:
		/* The answer says that all receives used so far are posted again. */
		put64(message + 24, 0);
		return flush_reposts(p) || send_control(p, message) ? -1 : 0;
	case OP_SET_CLIENT_FEATURE:
	case OP_KEEPALIVE:
		return 0;
	case OP_REGISTER_XFER_MEMORY:
		if (p->win_used < p->win_length)
			return protocol_error("a window before the last one was used up", p->win_used);
		p->win_addr = get64(message + 16);
		p->win_length = get32(message + 24);
		p->win_key = get32(message + 28);
		p->win_used = 0;
		return send_reply(p);
	default:
		return protocol_error("an unknown opcode", get16(message));
	}
}

/* Takes completions: their number, or -1. */
static int progress(struct peer *p)
{
	struct ibv_wc wc[POLL_BATCH];
	int n = ibv_poll_cq(p->cq, POLL_BATCH, wc);

	if (n < 0)
		return fail("ibv_poll_cq");
	for (int i = 0; i < n; i++) {
		if (wc[i].status != IBV_WC_SUCCESS) {
			if (!p->ended && wc[i].status != IBV_WC_WR_FLUSH_ERR)
				fprintf(stderr, "peer: %s\n", ibv_wc_status_str(wc[i].status));
			p->ended = true;
			continue;
		}
		switch (wc[i].opcode) {
		case IBV_WC_RECV_RDMA_WITH_IMM:
			if (on_data(p, be32toh(wc[i].imm_data), (uint32_t)wc[i].wr_id))
				return -1;
			break;
		case IBV_WC_RECV:
			if (on_control(p, wc[i].byte_len, (uint32_t)wc[i].wr_id))
				return -1;
			break;
		default:
			p->sq_done = (uint32_t)wc[i].wr_id;
			if (send_reply(p))
				return -1;
		}
	}
	return n;
}

static uint64_t now_us(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000 + (uint64_t)t.tv_nsec / 1000;
}

/* Takes what events of the connection manager there are. 1: the connection is established. */
static int cm_events(struct peer *p)
{
	struct rdma_cm_event *event;
	int established = 0;

	while (!rdma_get_cm_event(p->channel, &event)) {
		switch (event->event) {
		case RDMA_CM_EVENT_ESTABLISHED:
			established = 1;
			break;
		case RDMA_CM_EVENT_DISCONNECTED:
		case RDMA_CM_EVENT_CONNECT_ERROR:
		case RDMA_CM_EVENT_UNREACHABLE:
		case RDMA_CM_EVENT_REJECTED:
		case RDMA_CM_EVENT_DEVICE_REMOVAL:
			p->ended = true;
			break;
		default:
			break;
		}
		rdma_ack_cm_event(event);
	}
	return errno == EAGAIN ? established : fail("rdma_get_cm_event");
}

/* Sleeps until there is something. Both descriptors are looked at after the queue is armed, so that nothing is missed. */
static int wait_event(struct peer *p)
{
	struct pollfd fds[2] = {{.fd = p->comp_channel->fd, .events = POLLIN},
	                        {.fd = p->channel->fd, .events = POLLIN}};
	struct ibv_cq *cq;
	void *context;
	int n;

	errno = ibv_req_notify_cq(p->cq, 0);
	if (errno)
		return fail("ibv_req_notify_cq");
	n = progress(p);
	if (n)
		return n < 0 ? -1 : 0;
	if (poll(fds, 2, -1) < 0 && errno != EINTR)
		return fail("poll");
	if (fds[0].revents) {
		while (!ibv_get_cq_event(p->comp_channel, &cq, &context))
			p->events++;
		if (p->events >= EVENTS_PER_ACK) {
			ibv_ack_cq_events(p->cq, p->events);
			p->events = 0;
		}
	}
	return fds[1].revents ? cm_events(p) : 0;
}

static int serve(struct peer *p)
{
	while (!p->ended) {
		uint64_t since = 0;
		int n;

		while ((n = progress(p)) == 0) {
			uint64_t now = now_us();

			if (!since)
				since = now;
			if (now - since >= p->opt->spin_us)
				break;
		}
		if (n < 0 || (n == 0 && !p->ended && wait_event(p) < 0))
			return -1;
	}
	return 0;
}

static int set_nonblock(int fd)
{
	int flags = fcntl(fd, F_GETFL);

	return flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0 ? fail("fcntl") : 0;
}

static int accept_client(struct peer *p)
{
	struct ibv_qp_init_attr init = {
		.cap = {.max_send_wr = SENDS,
	                .max_recv_wr = RECEIVES,
	                .max_send_sge = 1,
	                .max_recv_sge = 1,
	                .max_inline_data = INLINE_MAX},
		.qp_type = IBV_QPT_RC,
	};
	struct rdma_conn_param param = {.retry_count = 6, .rnr_retry_count = 7};
	struct pollfd fd = {.events = POLLIN};
	int established;

	p->channel = rdma_create_event_channel();
	if (!p->channel)
		return fail("rdma_create_event_channel");
	if (set_nonblock(p->channel->fd))
		return -1;
	if (rdma_migrate_id(p->id, p->channel))
		return fail("rdma_migrate_id");
	p->pd = ibv_alloc_pd(p->id->verbs);
	if (!p->pd)
		return fail("ibv_alloc_pd");
	p->comp_channel = ibv_create_comp_channel(p->id->verbs);
	if (!p->comp_channel)
		return fail("ibv_create_comp_channel");
	if (set_nonblock(p->comp_channel->fd))
		return -1;
	p->cq = ibv_create_cq(p->id->verbs, RECEIVES + SENDS, NULL, p->comp_channel, 0);
	if (!p->cq)
		return fail("ibv_create_cq");
	init.send_cq = init.recv_cq = p->cq;
	if (rdma_create_qp(p->id, p->pd, &init))
		return fail("rdma_create_qp");
	if (make_memory(p, &p->control, (size_t)RECEIVES * CONTROL_SIZE, IBV_ACCESS_LOCAL_WRITE) ||
	    make_memory(p, &p->source, SOURCE_SIZE, IBV_ACCESS_LOCAL_WRITE))
		return -1;
	memset(p->source.addr, 'x', SOURCE_SIZE);
	for (uint32_t i = 0; i < p->opt->buffers; i++) {
		if (make_memory(p, &p->rx[i], p->opt->window, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE))
			return -1;
	}
	p->scratch = malloc(p->opt->window);
	if (!p->scratch)
		return fail("malloc");
	for (uint32_t i = 0; i < RECEIVES; i++) {
		if (give_back(p, i))
			return -1;
	}
	if (flush_reposts(p))
		return -1;
	if (rdma_accept(p->id, &param))
		return fail("rdma_accept");
	fd.fd = p->channel->fd;
	do {
		if (poll(&fd, 1, 10000) <= 0) {
			errno = ETIMEDOUT;
			return fail("waiting for the connection");
		}
		established = cm_events(p);
		if (established < 0 || p->ended)
			return -1;
	} while (!established);
	return announce(p);
}

static void free_peer(struct peer *p)
{
	rdma_disconnect(p->id);
	if (p->id->qp)
		rdma_destroy_qp(p->id);
	if (p->cq) {
		ibv_ack_cq_events(p->cq, p->events);
		ibv_destroy_cq(p->cq);
	}
	if (p->comp_channel)
		ibv_destroy_comp_channel(p->comp_channel);
	free_memory(&p->control);
	free_memory(&p->source);
	free_memory(&p->rx[0]);
	free_memory(&p->rx[1]);
	free(p->scratch);
	if (p->pd)
		ibv_dealloc_pd(p->pd);
	rdma_destroy_id(p->id);
	if (p->channel)
		rdma_destroy_event_channel(p->channel);
}

struct pe_server *pe_listen(const char *ip, int port, const char **step)
{
	struct pe_server *s = calloc(1, sizeof(*s));
	struct sockaddr_storage ss = {0};
	struct sockaddr_in *in = (struct sockaddr_in *)&ss;
	struct sockaddr_in6 *in6 = (struct sockaddr_in6 *)&ss;

	*step = "calloc";
	if (!s)
		return NULL;
	if (inet_pton(AF_INET, ip, &in->sin_addr) == 1) {
		in->sin_family = AF_INET;
		in->sin_port = htons((uint16_t)port);
	} else {
		in6->sin6_family = AF_INET6;
		in6->sin6_port = htons((uint16_t)port);
		*step = "inet_pton";
		errno = EINVAL;
		if (inet_pton(AF_INET6, ip, &in6->sin6_addr) != 1)
			goto failed;
	}
	*step = "rdma_create_event_channel";
	s->channel = rdma_create_event_channel();
	if (!s->channel)
		goto failed;
	*step = "rdma_create_id";
	if (rdma_create_id(s->channel, &s->listener, NULL, RDMA_PS_TCP))
		goto failed;
	*step = "rdma_bind_addr";
	if (rdma_bind_addr(s->listener, (struct sockaddr *)&ss))
		goto failed;
	*step = "rdma_listen";
	if (rdma_listen(s->listener, 8))
		goto failed;
	return s;

failed:
	/* The caller's process has nothing else to do and ends: that frees what the libraries hold. */
	free(s);
	return NULL;
}

int pe_serve(struct pe_server *s, const struct pe_options *opt, const char **step)
{
	struct rdma_cm_event *event;

	for (;;) {
		struct peer p = {.opt = opt};

		if (rdma_get_cm_event(s->channel, &event)) {
			*step = "rdma_get_cm_event";
			return -1;
		}
		if (event->event == RDMA_CM_EVENT_CONNECT_REQUEST)
			p.id = event->id;
		rdma_ack_cm_event(event);
		if (!p.id)
			continue;
		if (!accept_client(&p))
			serve(&p);
		free_peer(&p);
	}
}
