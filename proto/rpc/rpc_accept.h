/* accept(2) and what to do when descriptors run out; see accept.c. */
#ifndef EP_RPC_ACCEPT_H
#define EP_RPC_ACCEPT_H

#include <stdbool.h>

/* Open the spare descriptor; a server does it before it listens. */
void rpc_accept_reserve(void);

/* A new connection, non-blocking and close-on-exec; -1 with errno as accept4(2) sets it. */
int rpc_accept(int fd);

/* Is there a place for this new connection?  Always, where its port is none of rpc_door_open().  Any thread. */
bool rpc_door_admits(int fd);

/* With the spare descriptor: accept one connection and hang up.  False: not even that. */
bool rpc_accept_and_drop(int fd);

#endif
