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

enum { Q_BEGIN, Q_COMMIT, Q_ROLLBACK, Q_REVISION, Q_PUT, Q_DELETE, Q_TICK, Q_LIST, QUERIES };
static const char *const queries[QUERIES] = {
    [Q_BEGIN] = "BEGIN IMMEDIATE",
    [Q_COMMIT] = "COMMIT",
    [Q_ROLLBACK] = "ROLLBACK",
    [Q_REVISION] = "SELECT revision FROM record WHERE key = ?1",
    [Q_PUT] = ("INSERT INTO record VALUES (?1, ?2, (SELECT revision FROM clock))"
               " ON CONFLICT (key) DO UPDATE SET value = excluded.value, revision = excluded.revision"),
    [Q_DELETE] = "DELETE FROM record WHERE key = ?1",
    [Q_TICK] = "UPDATE clock SET revision = revision + 1 RETURNING revision",
    [Q_LIST] = "SELECT key, value, revision FROM record WHERE substr(key, 1, length(?1)) = ?1 ORDER BY key",
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

void ep_record_list_clear(struct ep_record_list *list)
{
    for (size_t i = 0; i < list->n; i++) {
        free((void *)(uintptr_t)list->records[i].key);
        free((void *)(uintptr_t)list->records[i].value);
    }
    free(list->records);
    *list = (struct ep_record_list){ 0 };
}

static bool add_record(struct ep_record_list *list, sqlite3_stmt *row)
{
    size_t size = (size_t)sqlite3_column_bytes(row, 1);
    struct ep_record *records = realloc(list->records, (list->n + 1) * sizeof *records);
    char *key = strdup((const char *)sqlite3_column_text(row, 0));
    void *value = malloc(size ? size : 1);

    if (records)
        list->records = records;
    if (!records || !key || !value) {
        free(key);
        free(value);
        return false;
    }
    if (size)
        memcpy(value, sqlite3_column_blob(row, 1), size);
    list->records[list->n++] = (struct ep_record){
        .key = key, .value = value, .size = size, .revision = (uint64_t)sqlite3_column_int64(row, 2)
    };
    return true;
}

ep_status ep_sqlite_db_list(struct ep_sqlite_db *db, const char *prefix, struct ep_record_list *out,
                            struct ep_error *error)
{
    sqlite3_stmt *query = db->query[Q_LIST];
    struct ep_record_list list = { 0 };
    ep_status status = EP_OK;
    int rc;

    sqlite3_bind_text(query, 1, prefix, -1, SQLITE_STATIC);
    while ((rc = sqlite3_step(query)) == SQLITE_ROW)
        if (!add_record(&list, query)) {
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

/* ---- writing ----------------------------------------------------------------- */

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
    if (!revision)
        return ep_error_set(error, EP_FAILED_PRECONDITION,
                            "%s is not in the store, revision %" PRIu64 " was expected", write->key,
                            write->expected);
    if (write->expected == EP_STORE_ABSENT)
        return ep_error_set(error, EP_FAILED_PRECONDITION, "%s is in the store already, at revision %" PRId64,
                            write->key, revision);
    return ep_error_set(error, EP_FAILED_PRECONDITION,
                        "%s is at revision %" PRId64 ", revision %" PRIu64 " was expected", write->key,
                        revision, write->expected);
}

static ep_status apply(struct ep_sqlite_db *db, const struct ep_store_write *write, struct ep_error *error)
{
    int rc;

    if (write->value) {
        /* A zero-length blob needs a pointer, else it would be NULL. */
        sqlite3_bind_blob64(db->query[Q_PUT], 2, write->size ? write->value : "", write->size, SQLITE_STATIC);
        rc = run(db, Q_PUT, write->key, NULL);
    } else {
        rc = run(db, Q_DELETE, write->key, NULL);
    }
    return rc ? fail(db, error, "write to it") : EP_OK;
}

static ep_status transact(struct ep_sqlite_db *db, const struct ep_store_write *writes, size_t n,
                          int64_t *revision, struct ep_error *error)
{
    ep_status status;

    for (size_t i = 0; i < n; i++)
        if ((status = check_expected(db, &writes[i], error)))
            return status;
    if (run(db, Q_TICK, NULL, revision))
        return fail(db, error, "write to it");
    for (size_t i = 0; i < n; i++)
        if ((status = apply(db, &writes[i], error)))
            return status;
    return run(db, Q_COMMIT, NULL, NULL) ? fail(db, error, "write to it") : EP_OK;
}

ep_status ep_sqlite_db_commit(struct ep_sqlite_db *db, const struct ep_store_write *writes, size_t n,
                              uint64_t *revision, struct ep_error *error)
{
    int64_t value = 0;
    ep_status status;

    if (run(db, Q_BEGIN, NULL, NULL))
        return fail(db, error, "write to it");
    status = transact(db, writes, n, &value, error);
    if (status) {
        /* Some failures have rolled back already. */
        if (!sqlite3_get_autocommit(db->sqlite))
            (void)run(db, Q_ROLLBACK, NULL, NULL);
        return status;
    }
    *revision = (uint64_t)value;
    return EP_OK;
}
