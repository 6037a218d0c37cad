/*
 * ep_files: the small files around a server: directories, locks with a pid, the port file, a token.
 */
#ifndef EP_FILES_H
#define EP_FILES_H

#include <sys/types.h>

#include "ep_error.h"

/* Makes a directory and the ones above it; mode is for the last, and only if it is made here. */
ep_status ep_files_make_directory(const char *path, mode_t mode, struct ep_error *error);
/* The same for the directory that `path` is in. */
ep_status ep_files_make_parent(const char *path, mode_t mode, struct ep_error *error);

/*
 * A file with our process id in it, locked with flock(2) as long as this process lives.  Somebody
 * else's lock is an error that names `what` and the process.
 */
struct ep_lock_file {
    char *path; /* NULL: not held */
    int fd;
};
ep_status ep_lock_file_take(struct ep_lock_file *lock, const char *path, const char *what,
                            struct ep_error *error);
void ep_lock_file_release(struct ep_lock_file *lock);

/* A reader sees the whole text or none of it. */
ep_status ep_files_write_atomically(const char *path, const char *text, struct ep_error *error);

/* The file's text without the newline at its end, malloc'ed; empty is an error. */
ep_status ep_files_read_secret(const char *path, char **secret, struct ep_error *error);

#endif
