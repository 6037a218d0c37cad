/*
 * sqlite_db: the store's file, synchronously.  Everything here may block on the disk and belongs to
 * one thread at a time; store_sqlite.c gives it one of its own.
 *
 * The file is a sqlite database in WAL mode with synchronous=FULL: a commit that returned is on the
 * disk.  It is locked for this process as long as it is open.
 */
#ifndef EP_SQLITE_DB_H
#define EP_SQLITE_DB_H

#include "store_private.h"

struct ep_sqlite_db;

/* Makes the file if it is not there; checks that it is ours, whole and of a schema we know. */
ep_status ep_sqlite_db_open(const char *path, struct ep_sqlite_db **out, struct ep_error *error);
void ep_sqlite_db_close(struct ep_sqlite_db *db);

uint64_t ep_sqlite_db_revision(struct ep_sqlite_db *db); /* of the last commit */

/* Records whose key starts with prefix, by key. */
ep_status ep_sqlite_db_list(struct ep_sqlite_db *db, const char *prefix, struct ep_record_list *out,
                            struct ep_error *error);

/* All or nothing; *revision is one greater than that of the commit before.  changes: what is different now, a value
 * NULL for what is gone. */
ep_status ep_sqlite_db_commit(struct ep_sqlite_db *db, const struct ep_store_write *writes, size_t n,
                              struct ep_record_list *changes, uint64_t *revision, struct ep_error *error);

/* Deletes what was written for the session, in one commit; nothing there: no commit. */
ep_status ep_sqlite_db_end_session(struct ep_sqlite_db *db, int64_t session, struct ep_record_list *changes,
                                   uint64_t *revision, struct ep_error *error);

#endif
