/* ep_address: where clients and tools look for their ep-server when nobody says. */
#ifndef EP_ADDRESS_H
#define EP_ADDRESS_H

#include <stddef.h>

/* "unix:PATH": a path of a unix socket has at most 107 bytes. */
#define EP_ADDRESS_MAX 256

/*
 * $EP_SERVER; else the socket of the user's own server, $XDG_RUNTIME_DIR/ep-server/ep.sock, when it
 * is there; else the system's, /run/ep-server/ep.sock.  Fills out, cut to size, and returns it.
 */
const char *ep_address_default(char *out, size_t size);

#endif
