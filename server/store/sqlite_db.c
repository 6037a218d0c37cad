#include "sqlite_db.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <libgen.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <sqlite3.h>

/* PRAGMA application_id: "epsr".  A file with another one is not ours to write. */
#define APPLICATION_ID 0x65707372
#define SCHEMA_VERSION 1

#define STR_(x) #x
#define STR(x)  STR_(x)

/* `clock` holds the revision of the last commit, so that it never goes back, not even when every
 * record has been deleted. */
static const char schema[] =
    "BEGIN IMMEDIATE;"
    "CREATE TABLE record (key TEXT PRIMARY KEY, value BLOB NOT NULL,"
    "                     revision INTEGER NOT NULL) WITHOUT ROWID;"
    "CREATE TABLE clock (id INTEGER PRIMARY KEY CHECK (id = 0),"
    "                    revision INTEGER NOT NULL);"
    "INSERT INTO clock VALUES (0, 0);"
    "PRAGMA application_id = " STR(APPLICATION_ID) "; PRAGMA user_version = " STR(SCHEMA_VERSION) "; COMMIT;";

/* Records of sessions: they end with the process, so that they need not outlive this connection. */
static const char bound_schema[] =
    "PRAGMA temp_store = MEMORY;"
    "CREATE TEMP TABLE bound (key TEXT PRIMARY KEY, value BLOB NOT NULL, revision INTEGER NOT NULL,"
    "                         session INTEGER NOT NULL) WITHOUT ROWID;";

enum {
    Q_BEGIN,
    Q_COMMIT,
    Q_ROLLBACK,
    Q_REVISION,
    Q_PUT,
    Q_PUT_BOUND,
    Q_DELETE,
    Q_DELETE_BOUND,
    Q_TICK,
    Q_CLOCK,
    Q_LIST,
    Q_LIST_SESSION,
    QUERIES
};
static const char *const queries[QUERIES] = {
    [Q_BEGIN] = "BEGIN IMMEDIATE",
    [Q_COMMIT] = "COMMIT",
    [Q_ROLLBACK] = "ROLLBACK",
    [Q_REVISION] = ("SELECT revision FROM record WHERE key = ?1"
                    " UNION ALL SELECT revision FROM bound WHERE key = ?1"),
    [Q_PUT] = "INSERT INTO record VALUES (?1, ?2, (SELECT revision FROM clock))",
    [Q_PUT_BOUND] = "INSERT INTO bound VALUES (?1, ?2, (SELECT revision FROM clock), ?3)",
    [Q_DELETE] = "DELETE FROM record WHERE key = ?1",
    [Q_DELETE_BOUND] = "DELETE FROM bound WHERE key = ?1",
    [Q_TICK] = "UPDATE clock SET revision = revision + 1 RETURNING revision",
    [Q_CLOCK] = "SELECT revision FROM clock",
    [Q_LIST] = ("SELECT key, value, revision FROM record WHERE substr(key, 1, length(?1)) = ?1"
                " UNION ALL SELECT key, value, revision FROM bound WHERE substr(key, 1, length(?1)) = ?1"
                " ORDER BY key"),
    [Q_LIST_SESSION] = "SELECT key, value, revision FROM bound WHERE session = ?1 ORDER BY key",
};

struct ep_sqlite_db {
    sqlite3 *sqlite;
    char *path;
    int cause; /* errno of the last query that failed: sqlite3_system_errno() does not tell it here */
    sqlite3_stmt *query[QUERIES];
};

/* ---- errors ------------------------------------------------------------------ */

static ep_status status_of(int code)
{
    switch (code & 0xff) {
    case SQLITE_FULL: return EP_RESOURCE_EXHAUSTED;
    case SQLITE_NOMEM: return EP_NO_MEMORY;
    case SQLITE_BUSY:
    case SQLITE_LOCKED:
    case SQLITE_READONLY:
    case SQLITE_PERM: return EP_UNAVAILABLE;
    default: return EP_IO;
    }
}

static const char *explain(int code)
{
    switch (code & 0xff) {
    case SQLITE_FULL: return "the disk is full";
    case SQLITE_BUSY: return "another process has it open";
    case SQLITE_READONLY: return "it is read-only";
    case SQLITE_NOTADB: return "it is not a store of ep-server";
    case SQLITE_CORRUPT: return "it is damaged: restore it from a copy, or move it away to start empty";
    default: return sqlite3_errstr(code);
    }
}

static ep_status fail(const struct ep_sqlite_db *db, struct ep_error *error, const char *what)
{
    int code = sqlite3_extended_errcode(db->sqlite);
    bool no_room = db->cause == ENOSPC || db->cause == EFBIG || db->cause == EDQUOT;

    if ((code & 0xff) == SQLITE_IOERR && db->cause)
        return ep_error_set(error, no_room ? EP_RESOURCE_EXHAUSTED : EP_IO, "store %s: cannot %s: %s",
                            db->path, what, strerror(db->cause));
    return ep_error_set(error, status_of(code), "store %s: cannot %s: %s", db->path, what, explain(code));
}

/* ---- opening ----------------------------------------------------------------- */

/* sqlite makes files by the umask and follows whatever is there: make and look first. */
static ep_status prepare_file(const char *path, struct ep_error *error)
{
    struct stat st;
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NONBLOCK, 0600);

    if (fd < 0)
        return ep_error_errno(error, EP_IO, "store %s: cannot open it for writing", path);
    if (fstat(fd, &st) < 0 || !S_ISREG(st.st_mode)) {
        close(fd);
        return ep_error_set(error, EP_IO, "store %s: it is not a regular file", path);
    }
    close(fd);
    return EP_OK;
}

/* A new file is durable only with its directory's entry. */
static void sync_directory(const char *path)
{
    char *copy = strdup(path);
    int fd = copy ? open(dirname(copy), O_RDONLY | O_DIRECTORY | O_CLOEXEC) : -1;

    if (fd >= 0) {
        (void)fsync(fd);
        close(fd);
    }
    free(copy);
}

static int read_int(sqlite3 *sqlite, const char *sql, int64_t *value)
{
    sqlite3_stmt *statement = NULL;
    int rc = sqlite3_prepare_v2(sqlite, sql, -1, &statement, NULL);

    if (rc == SQLITE_OK)
        rc = sqlite3_step(statement);
    if (rc == SQLITE_ROW) {
        *value = sqlite3_column_int64(statement, 0);
        rc = SQLITE_OK;
    }
    sqlite3_finalize(statement);
    return rc;
}

static ep_status check_integrity(struct ep_sqlite_db *db, struct ep_error *error)
{
    sqlite3_stmt *statement = NULL;
    ep_status status = EP_OK;

    if (sqlite3_prepare_v2(db->sqlite, "PRAGMA integrity_check(1)", -1, &statement, NULL) != SQLITE_OK ||
        sqlite3_step(statement) != SQLITE_ROW)
        status = fail(db, error, "check it");
    else if (strcmp((const char *)sqlite3_column_text(statement, 0), "ok") != 0)
        status = ep_error_set(error, EP_IO, "store %s: %s (%s)", db->path, explain(SQLITE_CORRUPT),
                              sqlite3_column_text(statement, 0));
    sqlite3_finalize(statement);
    return status;
}

/* Ours and known: nothing to do.  Empty: make the tables.  Anything else stays as it is. */
static ep_status check_schema(struct ep_sqlite_db *db, struct ep_error *error)
{
    int64_t id = 0, version = 0, objects = 0;

    if (read_int(db->sqlite, "PRAGMA application_id", &id) != SQLITE_OK ||
        read_int(db->sqlite, "PRAGMA user_version", &version) != SQLITE_OK ||
        read_int(db->sqlite, "SELECT count(*) FROM sqlite_master", &objects) != SQLITE_OK)
        return fail(db, error, "read it");
    if (id == APPLICATION_ID && version == SCHEMA_VERSION)
        return EP_OK;
    if (id == APPLICATION_ID)
        return ep_error_set(error, EP_FAILED_PRECONDITION,
                            "store %s: it has schema %" PRId64 ", this server knows %d: start a newer server",
                            db->path, version, SCHEMA_VERSION);
    if (id || version || objects)
        return ep_error_set(error, EP_FAILED_PRECONDITION,
                            "store %s: it is a database of another program (application_id 0x%08" PRIx64 ")",
                            db->path, (uint64_t)id);
    if (sqlite3_exec(db->sqlite, schema, NULL, NULL, NULL) != SQLITE_OK)
        return fail(db, error, "make its tables");
    sync_directory(db->path);
    return EP_OK;
}

static ep_status prepare_queries(struct ep_sqlite_db *db, struct ep_error *error)
{
    for (int i = 0; i < QUERIES; i++)
        if (sqlite3_prepare_v3(db->sqlite, queries[i], -1, SQLITE_PREPARE_PERSISTENT, &db->query[i], NULL))
            return fail(db, error, "read its tables");
    return EP_OK;
}

/* A foreign database must not even change its journal mode, so identity comes before WAL. */
static ep_status set_up(struct ep_sqlite_db *db, struct ep_error *error)
{
    ep_status status;

    sqlite3_extended_result_codes(db->sqlite, 1);
    if (sqlite3_db_readonly(db->sqlite, "main") == 1)
        return ep_error_set(error, EP_UNAVAILABLE, "store %s: it is read-only", db->path);
    if (sqlite3_exec(db->sqlite, "PRAGMA locking_mode = EXCLUSIVE; PRAGMA trusted_schema = OFF", NULL, NULL,
                     NULL))
        return fail(db, error, "lock it");
    if ((status = check_schema(db, error)) || (status = check_integrity(db, error)))
        return status;
    if (sqlite3_exec(db->sqlite, "PRAGMA journal_mode = WAL; PRAGMA synchronous = FULL", NULL, NULL, NULL))
        return fail(db, error, "open it for writing");
    /* Takes the lock now, not at the first change. */
    if (sqlite3_exec(db->sqlite, "BEGIN IMMEDIATE; COMMIT", NULL, NULL, NULL))
        return fail(db, error, "lock it");
    if (sqlite3_exec(db->sqlite, bound_schema, NULL, NULL, NULL))
        return fail(db, error, "make its tables");
    return prepare_queries(db, error);
}

ep_status ep_sqlite_db_open(const char *path, struct ep_sqlite_db **out, struct ep_error *error)
{
    struct ep_sqlite_db *db;
    ep_status status = prepare_file(path, error);

    if (status)
        return status;
    db = calloc(1, sizeof *db);
    if (!db || !(db->path = strdup(path))) {
        free(db);
        return ep_error_set(error, EP_NO_MEMORY, "store %s: out of memory", path);
    }
    if (sqlite3_open_v2(path, &db->sqlite, SQLITE_OPEN_READWRITE | SQLITE_OPEN_NOMUTEX, NULL) != SQLITE_OK)
        status = db->sqlite ? fail(db, error, "open it")
                            : ep_error_set(error, EP_NO_MEMORY, "store %s: out of memory", path);
    else
        status = set_up(db, error);
    if (status) {
        ep_sqlite_db_close(db);
        return status;
    }
    *out = db;
    return EP_OK;
}

void ep_sqlite_db_close(struct ep_sqlite_db *db)
{
    for (int i = 0; i < QUERIES; i++)
        sqlite3_finalize(db->query[i]);
    sqlite3_close(db->sqlite);
    free(db->path);
    free(db);
}

/* ---- reading ----------------------------------------------------------------- */

static bool add_row(struct ep_record_list *list, sqlite3_stmt *row)
{
    size_t size = (size_t)sqlite3_column_bytes(row, 1);
    const void *value = sqlite3_column_blob(row, 1); /* NULL when there are no bytes */

    return ep_record_list_add(list, (const char *)sqlite3_column_text(row, 0), value ? value : "", size,
                              (uint64_t)sqlite3_column_int64(row, 2));
}

/* Runs a query whose parameters are bound. */
static ep_status list_rows(struct ep_sqlite_db *db, sqlite3_stmt *query, struct ep_record_list *out,
                           struct ep_error *error)
{
    struct ep_record_list list = { 0 };
    ep_status status = EP_OK;
    int rc;

    while ((rc = sqlite3_step(query)) == SQLITE_ROW)
        if (!add_row(&list, query)) {
            status = ep_error_set(error, EP_NO_MEMORY, "store %s: out of memory", db->path);
            break;
        }
    if (!status && rc != SQLITE_DONE)
        status = fail(db, error, "read it");
    sqlite3_reset(query);
    if (status)
        ep_record_list_clear(&list);
    else
        *out = list;
    return status;
}

ep_status ep_sqlite_db_list(struct ep_sqlite_db *db, const char *prefix, struct ep_record_list *out,
                            struct ep_error *error)
{
    sqlite3_bind_text(db->query[Q_LIST], 1, prefix, -1, SQLITE_STATIC);
    return list_rows(db, db->query[Q_LIST], out, error);
}

/* ---- writing ----------------------------------------------------------------- */

/* What goes to a file without a name ends with this process. */
static ep_status check_place(struct ep_sqlite_db *db, struct ep_error *error)
{
    int moved = 0;

    (void)sqlite3_file_control(db->sqlite, "main", SQLITE_FCNTL_HAS_MOVED, &moved);
    if (!moved)
        return EP_OK;
    return ep_error_set(error, EP_UNAVAILABLE, "store %s: cannot write to it: it has been removed, or another file is in its "
                        "place: put it back, or start the server again with what is there", db->path);
}

/* Runs a query that gives at most one number. */
static int run(struct ep_sqlite_db *db, int which, const char *key, int64_t *value)
{
    sqlite3_stmt *query = db->query[which];
    int rc;

    if (key)
        sqlite3_bind_text(query, 1, key, -1, SQLITE_STATIC);
    errno = 0;
    rc = sqlite3_step(query);
    db->cause = rc == SQLITE_ROW || rc == SQLITE_DONE ? 0 : errno;
    if (rc == SQLITE_ROW) {
        if (value)
            *value = sqlite3_column_int64(query, 0);
        rc = sqlite3_step(query); /* RETURNING takes effect when it is done */
    }
    if (rc == SQLITE_DONE)
        rc = SQLITE_OK;
    return rc ? (sqlite3_reset(query), rc) : sqlite3_reset(query);
}

static ep_status check_expected(struct ep_sqlite_db *db, const struct ep_store_write *write,
                                struct ep_error *error)
{
    int64_t revision = 0;

    if (write->expected == EP_STORE_ANY)
        return EP_OK;
    if (run(db, Q_REVISION, write->key, &revision))
        return fail(db, error, "read it");
    if ((uint64_t)revision == write->expected)
        return EP_OK;
    return store_say_mismatch(write, (uint64_t)revision, error);
}

static int put(struct ep_sqlite_db *db, const struct ep_store_write *write)
{
    int which = write->session ? Q_PUT_BOUND : Q_PUT;

    /* A zero-length blob needs a pointer, else it would be NULL. */
    sqlite3_bind_blob64(db->query[which], 2, write->size ? write->value : "", write->size, SQLITE_STATIC);
    if (write->session)
        sqlite3_bind_int64(db->query[which], 3, write->session->lease);
    return run(db, which, write->key, NULL);
}

/* A put is a delete before: the record may change between the tables. */
static ep_status apply(struct ep_sqlite_db *db, const struct ep_store_write *write, int64_t revision,
                       struct ep_record_list *changes, struct ep_error *error)
{
    int before = sqlite3_total_changes(db->sqlite);

    if (write->check_only)
        return EP_OK;
    if (run(db, Q_DELETE, write->key, NULL) || run(db, Q_DELETE_BOUND, write->key, NULL) ||
        (write->value && put(db, write)))
        return fail(db, error, "write to it");
    if (sqlite3_total_changes(db->sqlite) == before)
        return EP_OK; /* it was not there, and is not now */
    if (!ep_record_list_add(changes, write->key, write->value, write->size, (uint64_t)revision))
        return ep_error_set(error, EP_NO_MEMORY, "store %s: out of memory", db->path);
    return EP_OK;
}

static ep_status transact(struct ep_sqlite_db *db, const struct ep_store_write *writes, size_t n,
                          struct ep_record_list *changes, int64_t *revision, struct ep_error *error)
{
    ep_status status;

    for (size_t i = 0; i < n; i++)
        if ((status = check_expected(db, &writes[i], error)))
            return status;
    if (run(db, Q_TICK, NULL, revision))
        return fail(db, error, "write to it");
    for (size_t i = 0; i < n; i++)
        if ((status = apply(db, &writes[i], *revision, changes, error)))
            return status;
    return run(db, Q_COMMIT, NULL, NULL) ? fail(db, error, "write to it") : EP_OK;
}

ep_status ep_sqlite_db_commit(struct ep_sqlite_db *db, const struct ep_store_write *writes, size_t n,
                              struct ep_record_list *changes, uint64_t *revision, struct ep_error *error)
{
    struct ep_record_list list = { 0 };
    int64_t value = 0;
    ep_status status;

    status = check_place(db, error);
    if (status)
        return status;
    if (run(db, Q_BEGIN, NULL, NULL))
        return fail(db, error, "write to it");
    status = transact(db, writes, n, &list, &value, error);
    if (status) {
        /* Some failures have rolled back already. */
        if (!sqlite3_get_autocommit(db->sqlite))
            (void)run(db, Q_ROLLBACK, NULL, NULL);
        ep_record_list_clear(&list);
        return status;
    }
    *changes = list;
    *revision = (uint64_t)value;
    return EP_OK;
}

ep_status ep_sqlite_db_end_session(struct ep_sqlite_db *db, int64_t session, struct ep_record_list *changes,
                                   uint64_t *revision, struct ep_error *error)
{
    struct ep_record_list held = { 0 };
    struct ep_store_write *writes;
    ep_status status;

    sqlite3_bind_int64(db->query[Q_LIST_SESSION], 1, session);
    status = list_rows(db, db->query[Q_LIST_SESSION], &held, error);
    if (status || !held.n)
        return status;
    writes = store_allocate(held.n, sizeof *writes);
    for (size_t i = 0; i < held.n; i++)
        writes[i] = (struct ep_store_write){ .key = held.records[i].key, .expected = EP_STORE_ANY };
    status = ep_sqlite_db_commit(db, writes, held.n, changes, revision, error);
    free(writes);
    ep_record_list_clear(&held);
    return status;
}

uint64_t ep_sqlite_db_revision(struct ep_sqlite_db *db)
{
    int64_t revision = 0;

    (void)run(db, Q_CLOCK, NULL, &revision);
    return (uint64_t)revision;
}
