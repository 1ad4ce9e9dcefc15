//go:build linux && cgo

/* SPDX-License-Identifier: Apache-2.0 */
/* Making a connection, watching the connection manager, and taking everything down again. */

#include "impl_linux.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <unistd.h>

struct vr_lib vr_lib;

#ifdef VALKEYRDMA_LINK

int vr_load(char *msg, size_t size)
{
	if (size)
		msg[0] = 0;
#define X(name) vr_lib.name = name;
	VR_VERBS_SYMBOLS(X)
	VR_RDMACM_SYMBOLS(X)
#undef X
	return 0;
}

#else

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
	vr_lib.name = (__typeof__(vr_lib.name))dlsym(from, #name);                                                     \
	if (!vr_lib.name) {                                                                                            \
		snprintf(msg, size, "symbol %s is missing", #name);                                                    \
		return -ENOSYS;                                                                                        \
	}
#define XV(name) X(verbs, name)
#define XR(name) X(rdmacm, name)
	VR_VERBS_SYMBOLS(XV)
	VR_RDMACM_SYMBOLS(XR)
#undef XR
#undef XV
#undef X
	return 0;
}

int vr_load(char *msg, size_t size)
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

#endif

const char *vr_wc_status_str(int status)
{
	return vr_lib.ibv_wc_status_str((enum ibv_wc_status)status);
}

/* Faults. */

void vr_set_fault(struct vr_conn *c, int kind, int code, const char *step, uint64_t a, uint64_t b)
{
	int none = 0;

	if (!atomic_compare_exchange_strong(&c->fault_set, &none, 1))
		return;
	c->fault = (struct vr_fault){.kind = kind, .code = code, .a = a, .b = b, .step = step};
	atomic_store(&c->fault_set, 2);
}

bool vr_faulted(struct vr_conn *c)
{
	return atomic_load(&c->fault_set) == 2;
}

int vr_fault_errno(struct vr_conn *c)
{
	return vr_faulted(c) && c->fault.code ? -c->fault.code : -EPIPE;
}

void vr_get_fault(struct vr_conn *c, struct vr_fault *out)
{
	memset(out, 0, sizeof(*out));
	out->step = "";
	if (vr_faulted(c))
		*out = c->fault;
}

static int fail(struct vr_conn *c, int kind, int code, const char *step, uint64_t a)
{
	vr_set_fault(c, kind, code, step, a, 0);
	c->state = VR_FAILED;
	return vr_fault_errno(c);
}

/* A call of the libraries failed with errno err: memory is the usual cause, and the one with a cure. */
static int fail_call(struct vr_conn *c, int err, const char *step, uint64_t size)
{
	if (err <= 0)
		err = EIO; /* a provider forgot to set errno */
	return fail(c, err == ENOMEM || err == EPERM ? VR_FAULT_MEMLOCK : VR_FAULT_SYSTEM, err, step, size);
}

/* Memory. */

int vr_buf_make(struct vr_conn *c, struct vr_buf *b, size_t size, int access)
{
	size_t page = (size_t)sysconf(_SC_PAGESIZE);
	void *p;
	int err;

	size = (size + page - 1) & ~(page - 1);
	p = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (p == MAP_FAILED)
		return errno;
	/*
	 * A forked child must not turn these pages copy-on-write under the device. Both hints may fail on odd
	 * kernels without harm to a program that does not fork.
	 */
	(void)madvise(p, size, MADV_DONTFORK);
	(void)madvise(p, size, MADV_DONTDUMP);
	b->mr = vr_lib.ibv_reg_mr(c->pd, p, size, access);
	if (!b->mr) {
		err = errno ? errno : ENOMEM;
		munmap(p, size);
		return err;
	}
	b->addr = p;
	b->size = size;
	return 0;
}

void vr_buf_free(struct vr_buf *b)
{
	if (b->mr)
		vr_lib.ibv_dereg_mr(b->mr);
	if (b->addr)
		munmap(b->addr, b->size);
	memset(b, 0, sizeof(*b));
}

/* Queue pair. */

static int set_nonblock(int fd)
{
	int flags = fcntl(fd, F_GETFL);

	return flags < 0 || fcntl(fd, F_SETFL, flags | O_NONBLOCK) < 0 ? errno : 0;
}

static int watch(struct vr_conn *c, int fd)
{
	struct epoll_event ev = {.events = EPOLLIN, .data.fd = fd};

	return epoll_ctl(c->epfd, EPOLL_CTL_ADD, fd, &ev) ? errno : 0;
}

static int create_qp(struct vr_conn *c)
{
	/* Small commands travel in the work request itself; how much a device allows is only known by asking. */
	static const uint32_t inline_sizes[] = {256, 128, 64, 0};
	struct ibv_qp_init_attr init;
	size_t i;

	for (i = 0; i < sizeof(inline_sizes) / sizeof(inline_sizes[0]); i++) {
		memset(&init, 0, sizeof(init));
		init.qp_type = IBV_QPT_RC;
		init.send_cq = c->cq;
		init.recv_cq = c->cq;
		init.cap.max_send_wr = c->send_depth;
		init.cap.max_recv_wr = c->recv_depth;
		init.cap.max_send_sge = 1;
		init.cap.max_recv_sge = 1;
		init.cap.max_inline_data = inline_sizes[i];
		errno = 0;
		c->qp = vr_lib.ibv_create_qp(c->pd, &init);
		if (c->qp) {
			c->inline_max = init.cap.max_inline_data;
			return 0;
		}
		if (errno == ENOMEM || errno == EPERM)
			break;
	}
	return errno ? errno : EIO;
}

/*
 * Asks the CM for the attributes of a state and applies them; tune may change them in between. An errno, negative if it was
 * the CM that failed.
 */
static int move_qp(struct vr_conn *c, enum ibv_qp_state to, void (*tune)(struct vr_conn *, struct ibv_qp_attr *, int *))
{
	struct ibv_qp_attr attr;
	int mask = 0;

	memset(&attr, 0, sizeof(attr));
	attr.qp_state = to;
	if (vr_lib.rdma_init_qp_attr(c->id, &attr, &mask))
		return -errno;
	if (tune)
		tune(c, &attr, &mask);
	return vr_lib.ibv_modify_qp(c->qp, &attr, mask);
}

static void tune_rtr(struct vr_conn *c, struct ibv_qp_attr *attr, int *mask)
{
	struct ibv_port_attr port;

	/*
	 * When our receives run dry the peer waits this long before it tries again. The CM leaves the field at 0,
	 * which means 655 ms (IB spec 9.7.5.2.8); 12 means 0.64 ms.
	 */
	attr->min_rnr_timer = 12;
	*mask |= IBV_QP_MIN_RNR_TIMER;
	/* Kernels report RoCE address bits on InfiniBand links too, where modify_qp refuses them (librdmacm's cma.c). */
	memset(&port, 0, sizeof(port));
	if (!vr_lib.ibv_query_port(c->id->verbs, c->id->port_num, (struct _compat_ibv_port_attr *)&port) &&
	    port.link_layer == IBV_LINK_LAYER_INFINIBAND)
		*mask &= ~0xe00000;
}

static void tune_rts(struct vr_conn *c, struct ibv_qp_attr *attr, int *mask)
{
	(void)c;
	/*
	 * The server accepts with an RNR retry count of 0, and the CM would give that to our queue pair: the first
	 * write that finds no receive posted would kill the connection. 7 means for ever (IB spec 9.7.5.2.8).
	 */
	attr->rnr_retry = 7;
	*mask |= IBV_QP_RNR_RETRY;
}

/*
 * The queue pair is walked by hand, because librdmacm gives no chance to change its attributes. INIT comes twice: the
 * CM knows the access flags only once the peer has answered, and without them the peer's first write fails.
 */
static int connect_qp(struct vr_conn *c)
{
	int err = move_qp(c, IBV_QPS_INIT, NULL);

	if (!err)
		err = move_qp(c, IBV_QPS_RTR, tune_rtr);
	if (!err)
		err = move_qp(c, IBV_QPS_RTS, tune_rts);
	return err;
}

static uint32_t at_most(uint32_t want, int64_t limit)
{
	return limit > 0 && want > (uint64_t)limit ? (uint32_t)limit : want;
}

static int make_resources(struct vr_conn *c)
{
	struct ibv_context *verbs = c->id->verbs;
	struct ibv_device_attr dev;
	int err;

	err = vr_lib.ibv_query_device(verbs, &dev);
	if (err)
		return fail_call(c, err, "query device", 0);
	c->send_depth = at_most(c->opt.send_depth, dev.max_qp_wr);
	c->recv_depth = at_most(c->opt.recv_depth, dev.max_qp_wr);
	c->recv_depth = at_most(c->recv_depth, (int64_t)dev.max_cqe - c->send_depth);
	if (c->send_depth < 4 * VR_SQ_RESERVE || c->recv_depth < 2 * VR_REPOST_BATCH)
		return fail(c, VR_FAULT_SYSTEM, ENOSPC, "the device's queues are too short", 0);

	errno = 0;
	c->pd = vr_lib.ibv_alloc_pd(verbs);
	if (!c->pd)
		return fail_call(c, errno, "allocate protection domain", 0);
	c->comp_channel = vr_lib.ibv_create_comp_channel(verbs);
	if (!c->comp_channel)
		return fail_call(c, errno, "create completion channel", 0);
	err = set_nonblock(c->comp_channel->fd);
	if (err)
		return fail_call(c, err, "make the completion channel non-blocking", 0);
	c->cq = vr_lib.ibv_create_cq(verbs, (int)(c->send_depth + c->recv_depth), c, c->comp_channel, 0);
	if (!c->cq)
		return fail_call(c, errno, "create completion queue", 0);
	err = create_qp(c);
	if (err)
		return fail_call(c, err, "create queue pair", 0);

	err = vr_buf_make(c, &c->control, (size_t)(c->recv_depth + c->send_depth) * VR_CONTROL_SIZE,
	                  IBV_ACCESS_LOCAL_WRITE);
	if (err)
		return fail_call(c, err, "register control messages",
		                 (uint64_t)(c->recv_depth + c->send_depth) * VR_CONTROL_SIZE);
	err = vr_buf_make(c, &c->rx[0], c->opt.rx_window, IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE);
	if (err)
		return fail_call(c, err, "register receive window", c->opt.rx_window);
	err = vr_buf_make(c, &c->tx, c->opt.tx_staging, IBV_ACCESS_LOCAL_WRITE);
	if (err)
		return fail_call(c, err, "register send staging", c->opt.tx_staging);

	err = move_qp(c, IBV_QPS_INIT, NULL);
	if (err)
		return fail_call(c, abs(err), "move queue pair to INIT", 0);
	err = vr_post_receives(c);
	if (err)
		return fail_call(c, err, "post receives", 0);
	vr_arm(c);
	if (vr_faulted(c))
		return fail_call(c, EIO, "arm completion queue", 0);
	err = watch(c, c->comp_channel->fd);
	return err ? fail_call(c, err, "watch completion channel", 0) : 0;
}

/* The dial: what each event of the connection manager means in each state. */

static int on_addr_resolved(struct vr_conn *c)
{
	if (!c->id->verbs)
		return fail(c, VR_FAULT_NO_ROUTE, ENODEV, "resolve address", 0);
	if (c->id->verbs->device->transport_type == IBV_TRANSPORT_IWARP)
		return fail(c, VR_FAULT_NO_IMM, EOPNOTSUPP, "resolve address", 0);
	if (vr_lib.rdma_resolve_route(c->id, c->opt.resolve_ms))
		/* ENODEV: the address is the host's own, on an interface without a device, such as the loopback. */
		return errno == ENODEV ? fail(c, VR_FAULT_NO_ROUTE, ENODEV, "resolve route", 0)
		                       : fail_call(c, errno, "resolve route", 0);
	c->state = VR_RESOLVING_ROUTE;
	return 0;
}

static int on_route_resolved(struct vr_conn *c)
{
	struct rdma_conn_param param;
	int ret = make_resources(c);

	if (ret)
		return ret;
	memset(&param, 0, sizeof(param));
	param.responder_resources = 1;
	param.initiator_depth = 1;
	/*
	 * Not 7, which rxe takes for endless (retry_cnt in the kernel's rxe_comp.c): a host that is gone would never be noticed.
	 * The server's queue pair gets the same count.
	 */
	param.retry_count = 6;
	param.rnr_retry_count = 7; /* this one becomes the server's: it waits for our receives without limit */
	param.qp_num = c->qp->qp_num;
	if (vr_lib.rdma_connect(c->id, &param))
		return fail_call(c, errno, "connect", 0);
	c->state = VR_CONNECTING;
	return 0;
}

static int on_connect_response(struct vr_conn *c)
{
	int err;

	if (c->abandoned) {
		/* The server accepted after all. It gets a connection that ends at once: see vr_abandon. */
		c->established = !vr_lib.rdma_establish(c->id);
		return fail(c, VR_FAULT_SYSTEM, ECANCELED, "connect", 0);
	}
	err = connect_qp(c);
	if (err > 0)
		return fail_call(c, err, "move queue pair to RTS", 0);
	if (!err && vr_lib.rdma_establish(c->id))
		err = -errno;
	if (err == -EINVAL) /* the CM has left the state for this, because the server is gone again */
		return fail(c, VR_FAULT_DROPPED, ECONNRESET, "establish", 0);
	if (err)
		return fail_call(c, -err, "establish", 0);
	c->established = true;
	c->state = VR_AWAITING_WINDOW;
	vr_hello(c);
	return 0;
}

/*
 * An event that ends the connection, or the attempt; status is the CM's: a negative errno or a reject reason, or librdmacm's own
 * LIBRARY_FAILED, which has then put the cause into errno.
 */
#define LIBRARY_FAILED (-1)

static void on_end(struct vr_conn *c, enum rdma_cm_event_type event, int status, int err)
{
	bool dialling = c->state != VR_CONNECTED;
	int code = status < 0 ? -status : 0;

	switch (event) {
	case RDMA_CM_EVENT_ADDR_ERROR:
		/* The kernel has found a device; librdmacm says ENODEV whatever is in the way of opening it. */
		if (status == LIBRARY_FAILED && err == ENODEV)
			fail(c, VR_FAULT_NOT_OPENED, err, "resolve address", 0);
		else if (status == LIBRARY_FAILED)
			fail_call(c, err, "open the RDMA device", 0);
		else if (code == ENODEV || code == EADDRNOTAVAIL || code == 0)
			fail(c, VR_FAULT_NO_ROUTE, code ? code : ENODEV, "resolve address", 0);
		else
			fail(c, VR_FAULT_UNREACHABLE, code == ETIMEDOUT ? EHOSTUNREACH : code, "resolve address", 0);
		break;
	case RDMA_CM_EVENT_ROUTE_ERROR:
		fail(c, VR_FAULT_UNREACHABLE, EHOSTUNREACH, "resolve route", (uint64_t)code);
		break;
	case RDMA_CM_EVENT_UNREACHABLE:
		fail(c, VR_FAULT_UNREACHABLE, dialling ? EHOSTUNREACH : ECONNRESET, "connect", (uint64_t)code);
		break;
	case RDMA_CM_EVENT_REJECTED:
		fail(c, VR_FAULT_REJECTED, ECONNREFUSED, "connect", (uint64_t)status);
		break;
	case RDMA_CM_EVENT_CONNECT_ERROR:
		fail_call(c, code, "connect", 0);
		break;
	case RDMA_CM_EVENT_ADDR_CHANGE:
	case RDMA_CM_EVENT_DEVICE_REMOVAL:
		fail(c, VR_FAULT_DEVICE_GONE, ENODEV,
		     event == RDMA_CM_EVENT_ADDR_CHANGE ? "its address changed" : "it was removed", 0);
		break;
	case RDMA_CM_EVENT_DISCONNECTED:
		if (dialling)
			fail(c, VR_FAULT_DROPPED, ECONNRESET, "await the server's window", 0);
		break;
	default:
		break;
	}
}

static uint32_t on_cm_event(struct vr_conn *c, enum rdma_cm_event_type event, int status, int err)
{
	uint32_t wake = 0;

	switch (event) {
	case RDMA_CM_EVENT_ADDR_RESOLVED:
		if (c->state == VR_RESOLVING_ADDR)
			on_addr_resolved(c);
		break;
	case RDMA_CM_EVENT_ROUTE_RESOLVED:
		if (c->state == VR_RESOLVING_ROUTE)
			on_route_resolved(c);
		break;
	case RDMA_CM_EVENT_CONNECT_RESPONSE:
		if (c->state == VR_CONNECTING)
			on_connect_response(c);
		break;
	case RDMA_CM_EVENT_ESTABLISHED:
	case RDMA_CM_EVENT_TIMEWAIT_EXIT:
		break;
	case RDMA_CM_EVENT_DISCONNECTED:
		/*
		 * It may overtake data: what has arrived is counted before the end is declared. Hanging up answers the peer,
		 * whose CM otherwise waits for it; after that nothing more can arrive.
		 */
		if (c->cq)
			wake = vr_progress(c);
		on_end(c, event, status, err);
		vr_hang_up(c);
		if (c->cq)
			wake |= vr_progress(c);
		atomic_store(&c->peer_closed, true);
		wake |= VR_WAKE_READER | VR_WAKE_WRITER;
		break;
	default:
		on_end(c, event, status, err);
		break;
	}
	return wake;
}

static uint32_t serve_cm(struct vr_conn *c, bool *did)
{
	struct rdma_cm_event *ev;
	enum rdma_cm_event_type event;
	uint32_t wake = 0;
	int status, err;

	while (errno = 0, !vr_lib.rdma_get_cm_event(c->cm_channel, &ev)) {
		err = errno;
		/* An event must be acknowledged before rdma_destroy_id, which waits for it; here, at once. */
		event = ev->event;
		status = ev->status;
		vr_lib.rdma_ack_cm_event(ev);
		*did = true;
		wake |= on_cm_event(c, event, status, err);
	}
	return wake;
}

static uint32_t serve_completions(struct vr_conn *c, uint32_t events, bool *did)
{
	struct ibv_cq *cq;
	bool taken = false;
	void *ctx;

	while (!vr_lib.ibv_get_cq_event(c->comp_channel, &cq, &ctx)) {
		c->cq_events_unacked++;
		*did = true;
		taken = true;
	}
	if (events & (EPOLLERR | EPOLLHUP)) {
		/* The kernel has closed the channel, for ever readable from now on, because the device is gone. */
		epoll_ctl(c->epfd, EPOLL_CTL_DEL, c->comp_channel->fd, NULL);
		fail(c, VR_FAULT_DEVICE_GONE, ENODEV, "its completion channel was closed", 0);
		return vr_progress(c);
	}
	/* Acknowledging takes a lock of the library, so it is done in batches; vr_destroy does the rest. */
	if (c->cq_events_unacked >= 64) {
		vr_lib.ibv_ack_cq_events(c->cq, c->cq_events_unacked);
		c->cq_events_unacked = 0;
	}
	return vr_on_event(c, taken);
}

struct vr_result vr_pump(struct vr_conn *c)
{
	struct epoll_event ev[2];
	struct vr_result r = {0, 0};
	bool did = false;
	int i, n;

	do
		n = epoll_wait(c->epfd, ev, 2, 0);
	while (n < 0 && errno == EINTR);
	for (i = 0; i < n; i++) {
		if (c->comp_channel && ev[i].data.fd == c->comp_channel->fd)
			r.wake |= serve_completions(c, ev[i].events, &did);
	}
	for (i = 0; i < n; i++) {
		if (ev[i].data.fd == c->cm_channel->fd)
			r.wake |= serve_cm(c, &did);
	}
	r.n = did;
	r.wake = vr_finish(c, r.wake);
	return r;
}

int vr_dial(struct vr_conn **out, int *epfd, const struct sockaddr *dst, const struct sockaddr *src,
            const struct vr_options *opt, struct vr_fault *fault)
{
	struct vr_conn *c = calloc(1, sizeof(*c));
	int err, ret;

	*out = NULL;
	memset(fault, 0, sizeof(*fault));
	fault->step = "";
	if (!c) {
		*fault = (struct vr_fault){.kind = VR_FAULT_SYSTEM, .code = ENOMEM, .step = "allocate"};
		return -ENOMEM;
	}
	c->opt = *opt;
	c->state = VR_RESOLVING_ADDR;
	atomic_store(&c->rx_base, UINT64_MAX);
	vr_spin_init(c);
	pthread_mutex_init(&c->cq_lock, NULL);
	pthread_mutex_init(&c->sq_lock, NULL);

	c->epfd = epoll_create1(EPOLL_CLOEXEC);
	if (c->epfd < 0) {
		ret = fail_call(c, errno, "create epoll descriptor", 0);
		goto failed;
	}
	err = set_nonblock(c->epfd);
	if (err) {
		ret = fail_call(c, err, "make the epoll descriptor non-blocking", 0);
		goto failed;
	}
	errno = 0;
	c->cm_channel = vr_lib.rdma_create_event_channel();
	if (!c->cm_channel) {
		/* librdmacm finds no character device, no ABI version, or nothing at all. */
		err = errno ? errno : ENODEV;
		ret = err == EMFILE || err == ENFILE || err == ENOMEM || err == EACCES || err == EPERM
		              ? fail(c, VR_FAULT_SYSTEM, err, "open the RDMA connection manager", 0)
		              : fail(c, VR_FAULT_NO_DEVICE, ENODEV, "open the RDMA connection manager", 0);
		goto failed;
	}
	err = set_nonblock(c->cm_channel->fd);
	if (!err)
		err = watch(c, c->cm_channel->fd);
	if (err) {
		ret = fail_call(c, err, "watch the connection manager", 0);
		goto failed;
	}
	if (vr_lib.rdma_create_id(c->cm_channel, &c->id, c, RDMA_PS_TCP)) {
		c->id = NULL;
		ret = fail_call(c, errno, "create connection identifier", 0);
		goto failed;
	}
	if (vr_lib.rdma_resolve_addr(c->id, (struct sockaddr *)(uintptr_t)src, (struct sockaddr *)(uintptr_t)dst,
	                             opt->resolve_ms)) {
		err = errno;
		ret = err == ENODEV ? fail(c, VR_FAULT_NO_ROUTE, err, "resolve address", 0)
		      : err == EHOSTUNREACH || err == ENETUNREACH
		              ? fail(c, VR_FAULT_UNREACHABLE, err, "resolve address", 0)
		              : fail(c, VR_FAULT_SYSTEM, err, src ? "bind and resolve address" : "resolve address", 0);
		goto failed;
	}
	*out = c;
	*epfd = c->epfd;
	return 0;

failed:
	vr_get_fault(c, fault);
	if (c->epfd >= 0)
		close(c->epfd);
	vr_destroy(c);
	return ret;
}

int vr_dial_step(struct vr_conn *c)
{
	struct vr_result r = vr_pump(c);

	if (c->state == VR_FAILED || vr_faulted(c))
		return vr_fault_errno(c);
	if (c->state == VR_AWAITING_WINDOW && atomic_load(&c->peer_windows) > 0) {
		c->state = VR_CONNECTED;
		return VR_DIAL_DONE;
	}
	return r.n > 0 ? VR_DIAL_AGAIN : VR_DIAL_WAIT;
}

int vr_abandon(struct vr_conn *c, bool keep)
{
	if (c->state != VR_CONNECTING && c->state != VR_AWAITING_WINDOW)
		return 0;
	if (keep)
		return 1;
	/* The queue pair stays, so that its number, which the server knows, is not given to another connection. */
	c->abandoned = true;
	if (c->state == VR_CONNECTING) {
		vr_buf_free(&c->tx);
		vr_buf_free(&c->rx[0]);
	}
	return 1;
}

const char *vr_dial_stage(struct vr_conn *c)
{
	switch (atomic_load(&c->state)) {
	case VR_RESOLVING_ADDR:
		return "resolving the address to an RDMA device";
	case VR_RESOLVING_ROUTE:
		return "resolving the route";
	case VR_CONNECTING:
		return "waiting for the server to accept";
	case VR_AWAITING_WINDOW:
		return "waiting for the server to announce its receive window";
	default:
		return "connecting";
	}
}

void vr_local_address(struct vr_conn *c, struct sockaddr_storage *local)
{
	const struct sockaddr *from = &c->id->route.addr.src_addr;

	memset(local, 0, sizeof(*local));
	memcpy(local, from, from->sa_family == AF_INET6 ? sizeof(struct sockaddr_in6) : sizeof(struct sockaddr_in));
}

void vr_hang_up(struct vr_conn *c)
{
	struct ibv_qp_attr attr;

	if (atomic_exchange(&c->disconnected, true))
		return;
	/* The QP is not on the cm_id, so the CM does not know it: moving it to error is our part. */
	if (c->qp) {
		memset(&attr, 0, sizeof(attr));
		attr.qp_state = IBV_QPS_ERR;
		vr_lib.ibv_modify_qp(c->qp, &attr, IBV_QP_STATE);
	}
	if (c->established)
		vr_lib.rdma_disconnect(c->id); /* fails where the CM already knows */
}

void vr_disconnect(struct vr_conn *c)
{
	atomic_store(&c->closed, true);
	vr_hang_up(c);
}

/* QP before CQ, CQ before channel, MRs before PD, the id last: any other order fails with EBUSY and leaks. */
void vr_destroy(struct vr_conn *c)
{
	if (c->qp)
		vr_lib.ibv_destroy_qp(c->qp);
	if (c->cq) {
		if (c->cq_events_unacked)
			vr_lib.ibv_ack_cq_events(c->cq, c->cq_events_unacked);
		vr_lib.ibv_destroy_cq(c->cq);
	}
	if (c->comp_channel)
		vr_lib.ibv_destroy_comp_channel(c->comp_channel);
	vr_buf_free(&c->tx);
	vr_buf_free(&c->rx[1]);
	vr_buf_free(&c->rx[0]);
	vr_buf_free(&c->control);
	if (c->pd)
		vr_lib.ibv_dealloc_pd(c->pd);
	if (c->id)
		vr_lib.rdma_destroy_id(c->id);
	if (c->cm_channel)
		vr_lib.rdma_destroy_event_channel(c->cm_channel);
	pthread_mutex_destroy(&c->cq_lock);
	pthread_mutex_destroy(&c->sq_lock);
	free(c);
}
