/*
 * ep_terminal: the full screen of `top`.
 *
 * Open switches to the other screen and reads keys without echo; close, also after SIGINT, SIGTERM and
 * SIGHUP and around Ctrl-Z, leaves the terminal as it was found.
 */
#ifndef EP_TERMINAL_H
#define EP_TERMINAL_H

#include <stdbool.h>
#include <stddef.h>

/* False when standard input or output is no terminal: nothing is changed then. */
bool ep_terminal_open(void);
void ep_terminal_close(void);

/* A signal asked to end. */
bool ep_terminal_ended(void);
/* The next key, 0 when none comes within timeout_ms.  Handles Ctrl-Z in passing. */
int ep_terminal_key(int timeout_ms);
void ep_terminal_size(size_t *rows, size_t *columns);
/* Draws the text from the upper left corner, cut to the screen. */
void ep_terminal_draw(const char *text);

#endif
