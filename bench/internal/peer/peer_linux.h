/* SPDX-License-Identifier: Apache-2.0 */
#ifndef PEER_LINUX_H
#define PEER_LINUX_H

#include <stdint.h>

struct pe_options {
	uint32_t window;  /* bytes of each receive window */
	uint32_t buffers; /* 1 or 2: between so many memories the windows alternate */
	uint32_t spin_us; /* for how long to look at an empty completion queue before sleeping */
	int copy;         /* copy what arrives out of the window, as a server must that has but one buffer */
};

struct pe_server;

/* Listens. NULL and errno, with *step naming what failed. */
struct pe_server *pe_listen(const char *ip, int port, const char **step);

/*
 * Serves one client after the other, and returns only when the listening itself fails: -1 and errno. What goes wrong with one
 * client is printed.
 */
int pe_serve(struct pe_server *s, const struct pe_options *opt, const char **step);

#endif
