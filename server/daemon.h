/*
 * ep_daemon: the running server: everything opened in order, served until a signal, closed in
 * reverse.
 *
 *     STARTING --groups formed--> SERVING --SIGTERM, SIGINT--> DRAINING --workers left,----> CLOSING
 *        |                                                         |     or drain-grace         ^
 *        +-------- failure or signal --------+---------------------+------ second signal -------+
 *
 * A lost GPU ends it at once, in whatever phase, as if it were killed: the process is of no more use to any GPU.
 *
 * Owned by the thread that calls ep_daemon_run().
 */
#ifndef EP_DAEMON_H
#define EP_DAEMON_H

#include "ep_error.h"
#include "options.h"

/* argc, argv: read again, with the file, on SIGHUP.  Returns when the server has ended. */
ep_status ep_daemon_run(struct ep_options *options, int argc, char **argv, struct ep_error *error);

#endif
