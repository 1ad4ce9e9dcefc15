//go:build linux && cgo

/* SPDX-License-Identifier: Apache-2.0 */

#include "rdmatest_linux.h"

#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <poll.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <unistd.h>

/*
 * The libraries are opened when the first test needs them, so that a test binary starts on hosts without them.
 * ibv_poll_cq, ibv_post_send, ibv_post_recv and ibv_req_notify_cq are inline calls through the device context.
 */
#define RT_VERBS_SYMBOLS(X)                                                                                            \
	X(ibv_ack_cq_events)                                                                                           \
	X(ibv_alloc_pd)                                                                                                \
	X(ibv_create_comp_channel)                                                                                     \
	X(ibv_create_cq)                                                                                               \
	X(ibv_dealloc_pd)                                                                                              \
	X(ibv_dereg_mr)                                                                                                \
	X(ibv_destroy_comp_channel)                                                                                    \
	X(ibv_destroy_cq)                                                                                              \
	X(ibv_get_cq_event)                                                                                            \
	X(ibv_modify_qp)                                                                                               \
	X(ibv_reg_mr)                                                                                                  \
	X(ibv_wc_status_str)

#define RT_RDMACM_SYMBOLS(X)                                                                                           \
	X(rdma_accept)                                                                                                 \
	X(rdma_ack_cm_event)                                                                                           \
	X(rdma_bind_addr)                                                                                              \
	X(rdma_connect)                                                                                                \
	X(rdma_create_event_channel)                                                                                   \
	X(rdma_create_id)                                                                                              \
	X(rdma_create_qp)                                                                                              \
	X(rdma_destroy_event_channel)                                                                                  \
	X(rdma_destroy_id)                                                                                             \
	X(rdma_destroy_qp)                                                                                             \
	X(rdma_disconnect)                                                                                             \
	X(rdma_event_str)                                                                                              \
	X(rdma_get_cm_event)                                                                                           \
	X(rdma_get_src_port)                                                                                           \
	X(rdma_listen)                                                                                                 \
	X(rdma_migrate_id)                                                                                             \
	X(rdma_reject)                                                                                                 \
	X(rdma_resolve_addr)                                                                                           \
	X(rdma_resolve_route)

/* verbs.h hides this one behind a macro that may call a function which is not in the table. */
#undef ibv_reg_mr

static struct rt_lib {
#define X(name) __typeof__(name) *name;
	RT_VERBS_SYMBOLS(X)
	RT_RDMACM_SYMBOLS(X)
#undef X
} rt_lib;

struct rt_server {
	struct rdma_event_channel *channel;
	struct rdma_cm_id *id;
};

struct rt_conn {
	/* Each connection has a channel of its own, so that whoever drives it takes its events and no others. */
	struct rdma_event_channel *channel;
	struct rdma_cm_id *id;
	struct ibv_pd *pd;
	struct ibv_comp_channel *comp_channel;
	struct ibv_cq *cq;
	unsigned int cq_events_unacked;
	struct rt_options opt;
	struct rt_mem control; /* the receives, then the messages to send */
};

/* wr_id: the top bit marks a receive, whose index is below. */
#define RT_WR_RECV (1ull << 63)

static void *open_library(const char *name, char *msg, size_t size)
{
	void *h = dlopen(name, RTLD_NOW | RTLD_GLOBAL);

	if (!h) {
		const char *why = dlerror();

		snprintf(msg, size, "%s", why ? why : name);
	}
	return h;
}

static int load_symbols(char *msg, size_t size)
{
	void *verbs = open_library("libibverbs.so.1", msg, size);
	void *rdmacm = verbs ? open_library("librdmacm.so.1", msg, size) : NULL;

	if (!rdmacm)
		return -ENOENT; /* libibverbs stays open: providers it loaded cannot be unloaded safely */
#define X(from, name)                                                                                                  \
	rt_lib.name = (__typeof__(rt_lib.name))dlsym(from, #name);                                                     \
	if (!rt_lib.name) {                                                                                            \
		snprintf(msg, size, "symbol %s is missing", #name);                                                    \
		return -ENOSYS;                                                                                        \
	}
#define XV(name) X(verbs, name)
#define XR(name) X(rdmacm, name)
	RT_VERBS_SYMBOLS(XV)
	RT_RDMACM_SYMBOLS(XR)
#undef XR
#undef XV
#undef X
	return 0;
}

int rt_load(char *msg, size_t size)
{
	static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
	static bool loaded;
	int ret = 0;

	if (size)
		msg[0] = 0;
	pthread_mutex_lock(&lock);
	if (!loaded) {
		ret = load_symbols(msg, size);
		loaded = ret == 0;
	}
	pthread_mutex_unlock(&lock);
	return ret;
}

static int failed(const char **step, const char *name)
{
	*step = name;
	return errno > 0 ? -errno : -EIO; /* a provider may forget to set errno */
}

static int set_nonblock(int fd)
{
	int flags = fcntl(fd, F_GETFL);

	return flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0 ? -1 : 0;
}

/* Listening. */

static int make_sockaddr(struct sockaddr_storage *ss, const char *ip, int port)
{
	struct sockaddr_in *in = (struct sockaddr_in *)ss;
	struct sockaddr_in6 *in6 = (struct sockaddr_in6 *)ss;

	memset(ss, 0, sizeof(*ss));
	if (inet_pton(AF_INET, ip, &in->sin_addr) == 1) {
		in->sin_family = AF_INET;
		in->sin_port = htons((uint16_t)port);
		return 0;
	}
	if (inet_pton(AF_INET6, ip, &in6->sin6_addr) == 1) {
		in6->sin6_family = AF_INET6;
		in6->sin6_port = htons((uint16_t)port);
		return 0;
	}
	errno = EINVAL;
	return -1;
}

int rt_listen(struct rt_server **out, const char *ip, int port, const char **step)
{
	struct rt_server *s = calloc(1, sizeof(*s));
	struct sockaddr_storage ss;
	int ret;

	*out = NULL;
	errno = 0;
	if (!s)
		return failed(step, "calloc");
	if (make_sockaddr(&ss, ip, port)) {
		ret = failed(step, "inet_pton");
		goto failed;
	}
	s->channel = rt_lib.rdma_create_event_channel();
	if (!s->channel) {
		ret = failed(step, "rdma_create_event_channel");
		goto failed;
	}
	if (set_nonblock(s->channel->fd)) {
		ret = failed(step, "fcntl");
		goto failed;
	}
	if (rt_lib.rdma_create_id(s->channel, &s->id, s, RDMA_PS_TCP)) {
		s->id = NULL;
		ret = failed(step, "rdma_create_id");
		goto failed;
	}
	if (rt_lib.rdma_bind_addr(s->id, (struct sockaddr *)&ss)) {
		ret = failed(step, "rdma_bind_addr");
		goto failed;
	}
	if (rt_lib.rdma_listen(s->id, 128)) {
		ret = failed(step, "rdma_listen");
		goto failed;
	}
	*out = s;
	return 0;

failed:
	rt_server_free(s);
	return ret;
}

int rt_server_port(struct rt_server *s)
{
	return ntohs(rt_lib.rdma_get_src_port(s->id));
}

int rt_server_fd(struct rt_server *s)
{
	return s->channel->fd;
}

void rt_server_free(struct rt_server *s)
{
	if (s->id)
		rt_lib.rdma_destroy_id(s->id);
	if (s->channel)
		rt_lib.rdma_destroy_event_channel(s->channel);
	free(s);
}

static int adopt(struct rdma_cm_id *id, struct rt_conn **out, const char **step)
{
	struct rt_conn *c = calloc(1, sizeof(*c));
	int ret;

	if (!c) {
		ret = failed(step, "calloc");
		rt_lib.rdma_destroy_id(id);
		return ret;
	}
	c->id = id;
	id->context = c;
	c->channel = rt_lib.rdma_create_event_channel();
	if (!c->channel)
		ret = failed(step, "rdma_create_event_channel");
	else if (set_nonblock(c->channel->fd))
		ret = failed(step, "fcntl");
	else if (rt_lib.rdma_migrate_id(id, c->channel))
		ret = failed(step, "rdma_migrate_id");
	else
		ret = 0;
	if (ret)
		rt_free(c);
	else
		*out = c;
	return ret;
}

int rt_request(struct rt_server *s, struct rt_conn **out, struct rt_param *param, const char **step)
{
	struct rdma_cm_event *ev;
	struct rdma_cm_id *id;
	bool request;
	int ret;

	for (;;) {
		if (rt_lib.rdma_get_cm_event(s->channel, &ev))
			return errno == EAGAIN || errno == EINTR ? 0 : failed(step, "rdma_get_cm_event");
		id = ev->id;
		request = ev->event == RDMA_CM_EVENT_CONNECT_REQUEST;
		if (request) {
			param->retry_count = ev->param.conn.retry_count;
			param->rnr_retry_count = ev->param.conn.rnr_retry_count;
			param->responder_resources = ev->param.conn.responder_resources;
			param->initiator_depth = ev->param.conn.initiator_depth;
			param->private_data_len = ev->param.conn.private_data_len;
		}
		rt_lib.rdma_ack_cm_event(ev);
		if (!request)
			continue;
		ret = adopt(id, out, step);
		return ret ? ret : 1;
	}
}

/* A connection. */

int rt_mem_make(struct rt_conn *c, struct rt_mem *m, size_t size, int remote)
{
	size_t page = (size_t)sysconf(_SC_PAGESIZE);
	int access = IBV_ACCESS_LOCAL_WRITE | (remote ? IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_WRITE : 0);
	void *p;
	int err;

	memset(m, 0, sizeof(*m));
	m->size = size;
	m->mapped = (size + page - 1) & ~(page - 1);
	p = mmap(NULL, m->mapped, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (p == MAP_FAILED)
		return -errno;
	(void)madvise(p, m->mapped, MADV_DONTFORK);
	errno = 0;
	m->mr = rt_lib.ibv_reg_mr(c->pd, p, size, access);
	if (!m->mr) {
		err = errno > 0 ? -errno : -ENOMEM;
		munmap(p, m->mapped);
		return err;
	}
	m->addr = p;
	m->lkey = m->mr->lkey;
	m->rkey = m->mr->rkey;
	return 0;
}

void rt_mem_free(struct rt_mem *m)
{
	if (m->mr)
		rt_lib.ibv_dereg_mr(m->mr);
	if (m->addr)
		munmap(m->addr, m->mapped);
	memset(m, 0, sizeof(*m));
}

int rt_setup(struct rt_conn *c, const struct rt_options *opt, const char **step)
{
	struct ibv_context *verbs = c->id->verbs;
	struct ibv_qp_init_attr init;
	uint32_t i;
	int ret;

	c->opt = *opt;
	errno = 0;
	c->pd = rt_lib.ibv_alloc_pd(verbs);
	if (!c->pd)
		return failed(step, "ibv_alloc_pd");
	c->comp_channel = rt_lib.ibv_create_comp_channel(verbs);
	if (!c->comp_channel)
		return failed(step, "ibv_create_comp_channel");
	if (set_nonblock(c->comp_channel->fd))
		return failed(step, "fcntl");
	c->cq = rt_lib.ibv_create_cq(verbs, (int)(opt->receives + opt->sends), c, c->comp_channel, 0);
	if (!c->cq)
		return failed(step, "ibv_create_cq");
	memset(&init, 0, sizeof(init));
	init.qp_type = IBV_QPT_RC;
	init.send_cq = c->cq;
	init.recv_cq = c->cq;
	init.cap.max_send_wr = opt->sends;
	init.cap.max_recv_wr = opt->receives;
	init.cap.max_send_sge = 1;
	init.cap.max_recv_sge = 1;
	if (rt_lib.rdma_create_qp(c->id, c->pd, &init))
		return failed(step, "rdma_create_qp");
	ret = rt_mem_make(c, &c->control, (size_t)(opt->receives + opt->sends) * RT_CONTROL_SIZE, 0);
	if (ret) {
		*step = "ibv_reg_mr";
		return ret;
	}
	for (i = 0; i < opt->receives; i++) {
		ret = rt_post_recv(c, i);
		if (ret) {
			*step = "ibv_post_recv";
			return ret;
		}
	}
	return 0;
}

int rt_accept(struct rt_conn *c, int rnr_retry)
{
	/* All but rnr_retry_count is what rdmaHandleConnect in Valkey's src/rdma.c asks for. */
	struct rdma_conn_param param = {
		.responder_resources = 1,
		.initiator_depth = 1,
		.retry_count = 5,
		.rnr_retry_count = (uint8_t)rnr_retry,
	};

	return rt_lib.rdma_accept(c->id, &param) ? -errno : 0;
}

int rt_reject(struct rt_conn *c)
{
	return rt_lib.rdma_reject(c->id, NULL, 0) ? -errno : 0;
}

int rt_resolve_addr(struct rt_conn **out, const char *ip, int port, const char **step)
{
	struct rt_conn *c = calloc(1, sizeof(*c));
	struct sockaddr_storage ss;
	int ret;

	errno = 0;
	if (!c)
		return failed(step, "calloc");
	if (make_sockaddr(&ss, ip, port)) {
		ret = failed(step, "inet_pton");
		goto failed;
	}
	c->channel = rt_lib.rdma_create_event_channel();
	if (!c->channel) {
		ret = failed(step, "rdma_create_event_channel");
		goto failed;
	}
	if (set_nonblock(c->channel->fd)) {
		ret = failed(step, "fcntl");
		goto failed;
	}
	if (rt_lib.rdma_create_id(c->channel, &c->id, c, RDMA_PS_TCP)) {
		c->id = NULL;
		ret = failed(step, "rdma_create_id");
		goto failed;
	}
	if (rt_lib.rdma_resolve_addr(c->id, NULL, (struct sockaddr *)&ss, 2000)) {
		ret = failed(step, "rdma_resolve_addr");
		goto failed;
	}
	*out = c;
	return 0;

failed:
	rt_free(c);
	return ret;
}

int rt_resolve_route(struct rt_conn *c)
{
	return rt_lib.rdma_resolve_route(c->id, 2000) ? -errno : 0;
}

int rt_connect(struct rt_conn *c)
{
	struct rdma_conn_param param = {
		.responder_resources = 1,
		.initiator_depth = 1,
		.retry_count = 7,
		.rnr_retry_count = 7,
	};

	return rt_lib.rdma_connect(c->id, &param) ? -errno : 0;
}

int rt_set_rnr_timer(struct rt_conn *c, int timer)
{
	struct ibv_qp_attr attr;

	memset(&attr, 0, sizeof(attr));
	attr.min_rnr_timer = (uint8_t)timer;
	return -rt_lib.ibv_modify_qp(c->id->qp, &attr, IBV_QP_MIN_RNR_TIMER);
}

int rt_event(struct rt_conn *c, const char **name, int *status)
{
	struct rdma_cm_event *ev;
	enum rdma_cm_event_type type;

	if (rt_lib.rdma_get_cm_event(c->channel, &ev))
		return errno == EAGAIN || errno == EINTR ? 0 : -errno;
	type = ev->event;
	*name = rt_lib.rdma_event_str(type);
	*status = ev->status;
	/* rdma_destroy_id waits for every event that is not acknowledged. */
	rt_lib.rdma_ack_cm_event(ev);
	switch (type) {
	case RDMA_CM_EVENT_ESTABLISHED:
		return RT_EVENT_ESTABLISHED;
	case RDMA_CM_EVENT_ADDR_RESOLVED:
		return RT_EVENT_ADDR_RESOLVED;
	case RDMA_CM_EVENT_ROUTE_RESOLVED:
		return RT_EVENT_ROUTE_RESOLVED;
	case RDMA_CM_EVENT_ADDR_ERROR:
	case RDMA_CM_EVENT_ROUTE_ERROR:
	case RDMA_CM_EVENT_CONNECT_ERROR:
	case RDMA_CM_EVENT_UNREACHABLE:
	case RDMA_CM_EVENT_REJECTED:
	case RDMA_CM_EVENT_DISCONNECTED:
	case RDMA_CM_EVENT_DEVICE_REMOVAL:
	case RDMA_CM_EVENT_ADDR_CHANGE:
		return RT_EVENT_DISCONNECTED;
	default:
		return RT_EVENT_OTHER;
	}
}

static int kind_of(const struct ibv_wc *wc)
{
	if (!(wc->wr_id & RT_WR_RECV))
		return RT_SEND;
	if (wc->status != IBV_WC_SUCCESS) /* the opcode is undefined */
		return RT_OTHER;
	switch (wc->opcode) {
	case IBV_WC_RECV:
		return RT_RECV;
	case IBV_WC_RECV_RDMA_WITH_IMM:
		return RT_RECV_WRITE;
	default:
		return RT_OTHER;
	}
}

int rt_poll(struct rt_conn *c, struct rt_wc *out, int n)
{
	struct ibv_wc wc[32];
	int i, got;

	if (n > (int)(sizeof(wc) / sizeof(wc[0])))
		n = sizeof(wc) / sizeof(wc[0]);
	got = ibv_poll_cq(c->cq, n, wc);
	if (got < 0)
		return -EIO;
	for (i = 0; i < got; i++) {
		out[i] = (struct rt_wc){
			.kind = kind_of(&wc[i]),
			.status = wc[i].status,
			.index = (uint32_t)wc[i].wr_id,
			.length = wc[i].byte_len,
			.imm = ntohl(wc[i].imm_data),
		};
	}
	return got;
}

int rt_arm(struct rt_conn *c)
{
	struct ibv_cq *cq;
	void *ctx;

	while (!rt_lib.ibv_get_cq_event(c->comp_channel, &cq, &ctx))
		c->cq_events_unacked++;
	return ibv_req_notify_cq(c->cq, 0) ? -EIO : 0;
}

void rt_fds(struct rt_conn *c, int *completions, int *cm)
{
	*completions = c->comp_channel ? c->comp_channel->fd : -1;
	*cm = c->channel->fd;
}

uint8_t *rt_recv_slot(struct rt_conn *c, uint32_t index)
{
	return c->control.addr + (size_t)index * RT_CONTROL_SIZE;
}

uint8_t *rt_send_slot(struct rt_conn *c, uint32_t slot, uint32_t *lkey)
{
	*lkey = c->control.lkey;
	return c->control.addr + (size_t)(c->opt.receives + slot % c->opt.sends) * RT_CONTROL_SIZE;
}

int rt_post_recv(struct rt_conn *c, uint32_t index)
{
	struct ibv_sge sge = {
		.addr = (uintptr_t)rt_recv_slot(c, index), .length = RT_CONTROL_SIZE, .lkey = c->control.lkey};
	struct ibv_recv_wr wr = {.wr_id = RT_WR_RECV | index, .sg_list = &sge, .num_sge = 1}, *bad;

	return -ibv_post_recv(c->id->qp, &wr, &bad);
}

int rt_post_send(struct rt_conn *c, const struct rt_send *s)
{
	static const enum ibv_wr_opcode opcodes[] = {
		[RT_OP_SEND] = IBV_WR_SEND,
		[RT_OP_WRITE] = IBV_WR_RDMA_WRITE,
		[RT_OP_WRITE_IMM] = IBV_WR_RDMA_WRITE_WITH_IMM,
	};
	struct ibv_sge sge = {.addr = s->addr, .length = s->length, .lkey = s->lkey};
	struct ibv_send_wr wr, *bad;

	memset(&wr, 0, sizeof(wr));
	wr.sg_list = &sge;
	wr.num_sge = s->length > 0;
	wr.opcode = opcodes[s->opcode];
	/*
	 * A real server signals few of its writes. Every request is signalled here: the client cannot tell, and it is known
	 * at any time how much of the send queue is free and whether everything has arrived.
	 */
	wr.send_flags = IBV_SEND_SIGNALED;
	wr.imm_data = htonl(s->imm);
	wr.wr.rdma.remote_addr = s->remote_addr;
	wr.wr.rdma.rkey = s->rkey;
	return -ibv_post_send(c->id->qp, &wr, &bad);
}

int rt_disconnect(struct rt_conn *c)
{
	return rt_lib.rdma_disconnect(c->id) ? -errno : 0;
}

void rt_destroy_qp(struct rt_conn *c)
{
	if (c->id && c->id->qp)
		rt_lib.rdma_destroy_qp(c->id);
}

/* QP before CQ, CQ before channel, memory before PD, the id last: any other order fails with EBUSY and leaks. */
void rt_destroy_queues(struct rt_conn *c)
{
	rt_destroy_qp(c);
	if (c->cq) {
		if (c->cq_events_unacked)
			rt_lib.ibv_ack_cq_events(c->cq, c->cq_events_unacked);
		rt_lib.ibv_destroy_cq(c->cq);
		c->cq = NULL;
	}
	if (c->comp_channel) {
		rt_lib.ibv_destroy_comp_channel(c->comp_channel);
		c->comp_channel = NULL;
	}
}

void rt_free(struct rt_conn *c)
{
	rt_destroy_queues(c);
	rt_mem_free(&c->control);
	if (c->pd)
		rt_lib.ibv_dealloc_pd(c->pd);
	if (c->id)
		rt_lib.rdma_destroy_id(c->id);
	if (c->channel)
		rt_lib.rdma_destroy_event_channel(c->channel);
	free(c);
}

const char *rt_status_str(int status)
{
	return rt_lib.ibv_wc_status_str((enum ibv_wc_status)status);
}

/* Waiting. */

int rt_wait(const int *fds, int n, int timeout_ms)
{
	struct pollfd p[4];
	int i, ret, bits = 0;

	if (n > 4)
		return -EINVAL;
	for (i = 0; i < n; i++)
		p[i] = (struct pollfd){.fd = fds[i], .events = POLLIN};
	ret = poll(p, (nfds_t)n, timeout_ms);
	if (ret < 0)
		return errno == EINTR ? 0 : -errno;
	for (i = 0; i < n; i++) {
		if (p[i].revents)
			bits |= 1 << i;
	}
	return bits;
}

int rt_eventfd(void)
{
	int fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);

	return fd < 0 ? -errno : fd;
}

int rt_eventfd_set(int fd)
{
	return eventfd_write(fd, 1) ? -errno : 0;
}

int rt_eventfd_clear(int fd)
{
	eventfd_t v;

	return eventfd_read(fd, &v) && errno != EAGAIN ? -errno : 0;
}
