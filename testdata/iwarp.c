/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Preloaded into a program, makes every RDMA device look like iWARP: the kernels of the laboratory have no device of that kind.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <rdma/rdma_cma.h>

int rdma_get_cm_event(struct rdma_event_channel *channel, struct rdma_cm_event **event)
{
	int (*next)(struct rdma_event_channel *, struct rdma_cm_event **) =
		(int (*)(struct rdma_event_channel *, struct rdma_cm_event **))dlsym(RTLD_NEXT, "rdma_get_cm_event");
	int ret = next(channel, event);

	if (!ret && (*event)->id->verbs)
		(*event)->id->verbs->device->transport_type = IBV_TRANSPORT_IWARP;
	return ret;
}
