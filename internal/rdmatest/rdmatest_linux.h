/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Verbs and the connection manager for the test server. The protocol is in rdmatest_linux.go; here is only what needs
 * the libraries. No function waits but rt_wait and the libraries' own; none prints or aborts. A failure is a negative
 * errno, and *step, where there is one, the name of the call that failed.
 *
 * A server and each connection are for one thread at a time.
 */
#ifndef RDMATEST_LINUX_H
#define RDMATEST_LINUX_H

#include <stddef.h>
#include <stdint.h>

struct rt_server;
struct rt_conn;
struct ibv_mr;

struct rt_options {
	uint32_t receives; /* receives of RT_CONTROL_SIZE bytes to post */
	uint32_t sends;    /* send queue slots */
};

enum {
	RT_CONTROL_SIZE = 32,
};

/* What the client asked for when it connected. */
struct rt_param {
	uint8_t retry_count;
	uint8_t rnr_retry_count;
	uint8_t responder_resources;
	uint8_t initiator_depth;
	uint8_t private_data_len;
};

enum rt_kind {
	RT_RECV = 0,       /* a receive that took a message */
	RT_RECV_WRITE = 1, /* a receive that a write with immediate data took */
	RT_SEND = 2,       /* a request of ours is complete */
	RT_OTHER = 3,      /* an opcode that must not come */
};

struct rt_wc {
	int32_t kind;    /* enum rt_kind; of a failed one only whether it is RT_SEND */
	int32_t status;  /* enum ibv_wc_status */
	uint32_t index;  /* of the receive */
	uint32_t length; /* bytes that came in by this very request */
	uint32_t imm;    /* host byte order */
};

enum rt_opcode {
	RT_OP_SEND = 0,
	RT_OP_WRITE = 1,
	RT_OP_WRITE_IMM = 2,
};

struct rt_send {
	int32_t opcode; /* enum rt_opcode */
	uint32_t length;
	uint64_t addr;
	uint64_t remote_addr;
	uint32_t lkey;
	uint32_t rkey;
	uint32_t imm; /* host byte order */
};

enum rt_event {
	RT_EVENT_ESTABLISHED = 1,
	RT_EVENT_DISCONNECTED = 2, /* also: rejected, unreachable, device gone */
	RT_EVENT_ADDR_RESOLVED = 3,
	RT_EVENT_ROUTE_RESOLVED = 4,
	RT_EVENT_OTHER = 5,
};

/* Memory of its own mapping, registered for exactly size bytes. */
struct rt_mem {
	uint8_t *addr;
	size_t size;
	size_t mapped;
	uint32_t lkey, rkey;
	struct ibv_mr *mr;
};

/* Opens libibverbs and librdmacm once. msg gets the loader's words. */
int rt_load(char *msg, size_t size);

int rt_listen(struct rt_server **out, const char *ip, int port, const char **step);
int rt_server_port(struct rt_server *s);
int rt_server_fd(struct rt_server *s);
void rt_server_free(struct rt_server *s);

/* 1: *out is a client that asks to connect; 0: none does. */
int rt_request(struct rt_server *s, struct rt_conn **out, struct rt_param *param, const char **step);

/* Makes the queue pair and posts the receives. */
int rt_setup(struct rt_conn *c, const struct rt_options *opt, const char **step);
int rt_accept(struct rt_conn *c, int rnr_retry);
int rt_reject(struct rt_conn *c);

/* The active side, for tests of the passive one: rt_event says when the next step is due. */
int rt_resolve_addr(struct rt_conn **out, const char *ip, int port, const char **step);
int rt_resolve_route(struct rt_conn *c);
int rt_connect(struct rt_conn *c);

/* How long the client waits after it found no receive: an encoded time of the IB specification, 9.7.5.2.8. */
int rt_set_rnr_timer(struct rt_conn *c, int timer);

/* The next event of the connection manager: an rt_event, or 0 if there is none. name and status are for messages. */
int rt_event(struct rt_conn *c, const char **name, int *status);

/* Takes up to n completions. */
int rt_poll(struct rt_conn *c, struct rt_wc *wc, int n);

/* Takes the events of the completion channel and asks for the next one. */
int rt_arm(struct rt_conn *c);

/* The descriptors to wait for. */
void rt_fds(struct rt_conn *c, int *completions, int *cm);

int rt_post_recv(struct rt_conn *c, uint32_t index);
int rt_post_send(struct rt_conn *c, const struct rt_send *s);

/* The message in receive index, and the memory for message number slot to send. */
uint8_t *rt_recv_slot(struct rt_conn *c, uint32_t index);
uint8_t *rt_send_slot(struct rt_conn *c, uint32_t slot, uint32_t *lkey);

int rt_mem_make(struct rt_conn *c, struct rt_mem *m, size_t size, int remote);
void rt_mem_free(struct rt_mem *m);

int rt_disconnect(struct rt_conn *c);
void rt_destroy_qp(struct rt_conn *c);

/* Frees all but what rt_mem_make made and rt_mem_free has to free before. */
void rt_destroy_queues(struct rt_conn *c);
void rt_free(struct rt_conn *c);

const char *rt_status_str(int status);

/* Waits until one of the descriptors is readable. Bit i is for fds[i]; 0: the time is over, or a signal came. */
int rt_wait(const int *fds, int n, int timeout_ms);

int rt_eventfd(void);
int rt_eventfd_set(int fd);
int rt_eventfd_clear(int fd);

#endif
