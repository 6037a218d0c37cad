/*
 * Records in etcd: pages of a range, and commits that are done once.
 *
 * An answer can get lost: the endpoint dies, the line is cut.  So every commit also writes the marker, a record that
 * this process alone writes, with the commit's number, and asks for the revision that the marker has had before.
 * Of two copies of one commit the second then finds the marker moved and does nothing but tell its value: if that
 * is the commit's own number, the first copy was done.  So a commit can be sent to the next endpoint at will, and
 * one that was given up can no longer happen after a later one.
 *
 * The marker's lease ends it when the process has not.  A marker is left behind for a new one long before.
 */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "etcd_client.h"

#define PAGE_RECORDS 128
#define OWN_PREFIX   "."
#define MARKERS      OWN_PREFIX "writers/"

/* Between these two lies the longest time that a commit may be on its way. */
#define MARKER_TTL_MS 3600000ull
#define MARKER_USE_NS (1800 * EP_NS_PER_S)

#define COMMIT_ROUNDS 4 /* markers found moved by commits that were given up */

/* ---- keys ---------------------------------------------------------------------------- */

ProtobufCBinaryData etcd_bytes(const char *text)
{
    return (ProtobufCBinaryData){ .len = strlen(text), .data = (uint8_t *)(uintptr_t)text };
}

char *etcd_key(const struct etcd *etcd, const char *key)
{
    char *full = NULL;

    if (asprintf(&full, "%s%s", etcd->url.prefix, key) < 0)
        abort();
    return full;
}

const char *etcd_key_of(const struct etcd *etcd, const ProtobufCBinaryData *key, char *text, size_t size)
{
    size_t prefix = strlen(etcd->url.prefix);

    if (key->len < prefix || key->len - prefix >= size || memchr(key->data, '\0', key->len))
        return NULL; /* none of ours has such a key */
    memcpy(text, key->data + prefix, key->len - prefix);
    text[key->len - prefix] = '\0';
    return strncmp(text, OWN_PREFIX, strlen(OWN_PREFIX)) == 0 ? NULL : text;
}

/* Keys begin with '/', so there always is a byte that can be raised. */
char *etcd_range_end(const char *prefix)
{
    char *end = store_copy_text(prefix);
    size_t n = strlen(end);

    while ((unsigned char)end[n - 1] == 0xff)
        end[--n] = '\0';
    end[n - 1]++;
    return end;
}

/* ---- reading ------------------------------------------------------------------------- */

static bool add_page(struct etcd *etcd, const Etcdserverpb__RangeResponse *page, struct ep_record_list *list)
{
    char key[1024];

    for (size_t i = 0; i < page->n_kvs; i++) {
        const Mvccpb__KeyValue *kv = page->kvs[i];

        if (etcd_key_of(etcd, &kv->key, key, sizeof key) &&
            !ep_record_list_add(list, key, kv->value.data ? kv->value.data : (const uint8_t *)"",
                                kv->value.len, (uint64_t)kv->mod_revision))
            return false;
    }
    return true;
}

/* The key right after this one: a zero byte more. */
static void set_next_key(Etcdserverpb__RangeRequest *request, const Mvccpb__KeyValue *last)
{
    uint8_t *next = store_allocate(last->key.len + 1, 1);

    memcpy(next, last->key.data, last->key.len);
    free(request->key.data);
    request->key = (ProtobufCBinaryData){ .len = last->key.len + 1, .data = next };
}

/* Pages after the first are of its revision, so that all are of one moment. */
static ep_status list_pages(struct etcd *etcd, struct etcd_call *call, Etcdserverpb__RangeRequest *request,
                            struct ep_record_list *list, struct ep_error *error)
{
    bool more = true;

    while (more) {
        Etcdserverpb__RangeResponse *page;
        ep_status status = etcd_call(etcd, call, (ProtobufCMessage **)&page, error);

        if (status)
            return status;
        if (!request->revision)
            request->revision = page->header ? page->header->revision : 0;
        more = page->more && page->n_kvs;
        if (more)
            set_next_key(request, page->kvs[page->n_kvs - 1]);
        if (!add_page(etcd, page, list))
            status = ep_error_set(error, EP_NO_MEMORY, "store %s: out of memory", etcd->name);
        etcd_free(page);
        if (status)
            return status;
    }
    return EP_OK;
}

static ep_status list_once(struct etcd *etcd, const char *prefix, uint64_t deadline, const atomic_bool *stop,
                           struct ep_record_list *list, uint64_t *revision, struct ep_error *error)
{
    Etcdserverpb__RangeRequest request = ETCDSERVERPB__RANGE_REQUEST__INIT;
    struct etcd_call call = { .service = &etcdserverpb__kv__descriptor,
                              .method = "Range",
                              .what = "read",
                              .request = &request.base,
                              .deadline = deadline,
                              .stop = stop };
    char *from = etcd_key(etcd, prefix), *end = etcd_range_end(from);
    ep_status status;

    request.key = etcd_bytes(from);
    request.range_end = etcd_bytes(end);
    request.limit = PAGE_RECORDS;
    status = list_pages(etcd, &call, &request, list, error);
    if (!status && revision)
        *revision = (uint64_t)request.revision;
    free(request.key.data); /* from, or what has replaced it */
    free(end);
    return status;
}

/* A compaction between two pages: once more from the start. */
ep_status etcd_list(struct etcd *etcd, const char *prefix, uint64_t deadline, const atomic_bool *stop,
                    struct ep_record_list *out, uint64_t *revision, struct ep_error *error)
{
    struct ep_error local;
    ep_status status;

    do {
        struct ep_record_list list = { 0 };

        local = (struct ep_error)EP_ERROR_INIT;
        status = list_once(etcd, prefix, deadline, stop, &list, revision, &local);
        if (status)
            ep_record_list_clear(&list);
        else
            *out = list;
    } while (status && strstr(local.text, "compacted") && ep_clock_ns() < deadline);
    if (status && error)
        *error = local;
    return status;
}

ep_status etcd_ask_revision(struct etcd *etcd, uint64_t deadline, const atomic_bool *stop, uint64_t *revision,
                            struct ep_error *error)
{
    Etcdserverpb__RangeRequest request = ETCDSERVERPB__RANGE_REQUEST__INIT;
    struct etcd_call call = { .service = &etcdserverpb__kv__descriptor,
                              .method = "Range",
                              .what = "read",
                              .request = &request.base,
                              .deadline = deadline,
                              .stop = stop };
    char *key = etcd_key(etcd, MARKERS);
    Etcdserverpb__RangeResponse *reply;
    ep_status status;

    request.key = etcd_bytes(key);
    status = etcd_call(etcd, &call, (ProtobufCMessage **)&reply, error);
    free(key);
    if (status)
        return status;
    if (revision)
        *revision = reply->header ? (uint64_t)reply->header->revision : 0;
    etcd_free(reply);
    return EP_OK;
}

/* ---- transactions -------------------------------------------------------------------- */

/* One for each write, and one for the marker. */
#define STEPS (EP_STORE_MAX_WRITES + 1)

struct transaction {
    Etcdserverpb__TxnRequest request;
    char *keys[STEPS];
    size_t n_keys;
    Etcdserverpb__Compare compare[STEPS], *compares[STEPS];
    Etcdserverpb__RequestOp success[STEPS], *successes[STEPS], failure[STEPS], *failures[STEPS];
    Etcdserverpb__PutRequest put[STEPS];
    Etcdserverpb__DeleteRangeRequest erase[STEPS];
    Etcdserverpb__RangeRequest range[STEPS];
    const struct ep_store_write *asked[STEPS]; /* what each compare is of; NULL: the marker */
};

static struct transaction *transaction_new(void)
{
    struct transaction *t = store_allocate(1, sizeof *t);

    etcdserverpb__txn_request__init(&t->request);
    t->request.compare = t->compares;
    t->request.success = t->successes;
    t->request.failure = t->failures;
    return t;
}

static void transaction_free(struct transaction *t)
{
    for (size_t i = 0; i < t->n_keys; i++)
        free(t->keys[i]);
    free(t);
}

static const char *add_key(const struct etcd *etcd, struct transaction *t, const char *key)
{
    return t->keys[t->n_keys++] = etcd_key(etcd, key);
}

/* The key must have this revision, 0: must not be there.  If anything is amiss, all that was asked for is read. */
static void add_compare(struct transaction *t, const char *key, int64_t revision,
                        const struct ep_store_write *write)
{
    size_t i = t->request.n_compare;

    etcdserverpb__compare__init(&t->compare[i]);
    t->compare[i].result = ETCDSERVERPB__COMPARE__COMPARE_RESULT__EQUAL;
    t->compare[i].target = ETCDSERVERPB__COMPARE__COMPARE_TARGET__MOD;
    t->compare[i].key = etcd_bytes(key);
    t->compare[i].target_union_case = ETCDSERVERPB__COMPARE__TARGET_UNION_MOD_REVISION;
    t->compare[i].mod_revision = revision;
    t->compares[i] = &t->compare[i];
    etcdserverpb__range_request__init(&t->range[i]);
    t->range[i].key = etcd_bytes(key);
    t->range[i].keys_only = write != NULL; /* of the marker the value is what matters */
    etcdserverpb__request_op__init(&t->failure[i]);
    t->failure[i].request_case = ETCDSERVERPB__REQUEST_OP__REQUEST_REQUEST_RANGE;
    t->failure[i].request_range = &t->range[i];
    t->failures[i] = &t->failure[i];
    t->asked[i] = write;
    t->request.n_compare = t->request.n_failure = i + 1;
}

static void add_put(struct transaction *t, const char *key, const void *value, size_t size, int64_t lease)
{
    size_t i = t->request.n_success;

    etcdserverpb__put_request__init(&t->put[i]);
    t->put[i].key = etcd_bytes(key);
    t->put[i].value = (ProtobufCBinaryData){ .len = size, .data = (uint8_t *)(uintptr_t)value };
    t->put[i].lease = lease;
    etcdserverpb__request_op__init(&t->success[i]);
    t->success[i].request_case = ETCDSERVERPB__REQUEST_OP__REQUEST_REQUEST_PUT;
    t->success[i].request_put = &t->put[i];
    t->successes[i] = &t->success[i];
    t->request.n_success = i + 1;
}

static void add_delete(struct transaction *t, const char *key)
{
    size_t i = t->request.n_success;

    etcdserverpb__delete_range_request__init(&t->erase[i]);
    t->erase[i].key = etcd_bytes(key);
    etcdserverpb__request_op__init(&t->success[i]);
    t->success[i].request_case = ETCDSERVERPB__REQUEST_OP__REQUEST_REQUEST_DELETE_RANGE;
    t->success[i].request_delete_range = &t->erase[i];
    t->successes[i] = &t->success[i];
    t->request.n_success = i + 1;
}

static void add_write(const struct etcd *etcd, struct transaction *t, const struct ep_store_write *write)
{
    const char *key = add_key(etcd, t, write->key);

    if (write->expected != EP_STORE_ANY)
        add_compare(t, key, (int64_t)write->expected, write);
    if (write->check_only)
        return;
    if (write->value)
        add_put(t, key, write->value, write->size, write->session ? write->session->lease : 0);
    else
        add_delete(t, key);
}

static ep_status run_transaction(struct etcd *etcd, const struct transaction *t, struct etcd_call *call,
                                 Etcdserverpb__TxnResponse **reply, struct ep_error *error)
{
    size_t expected;
    ep_status status;

    call->service = &etcdserverpb__kv__descriptor;
    call->method = "Txn";
    call->what = "write";
    call->request = &t->request.base;
    status = etcd_call(etcd, call, (ProtobufCMessage **)reply, error);
    if (status)
        return status;
    expected = (*reply)->succeeded ? t->request.n_success : t->request.n_failure;
    if ((*reply)->header && (*reply)->n_responses == expected)
        return EP_OK;
    etcd_free(*reply);
    return ep_error_set(error, EP_PROTOCOL, "store %s: cannot write: the answer does not fit the question",
                        etcd->name);
}

/* The record that the i-th compare read; NULL: it is not there. */
static const Mvccpb__KeyValue *found(const Etcdserverpb__TxnResponse *reply, size_t i)
{
    const Etcdserverpb__ResponseOp *op = reply->responses[i];

    if (op->response_case != ETCDSERVERPB__RESPONSE_OP__RESPONSE_RESPONSE_RANGE || !op->response_range->n_kvs)
        return NULL;
    return op->response_range->kvs[0];
}

/* ---- the marker ---------------------------------------------------------------------- */

void etcd_forget_marker(struct etcd *etcd)
{
    free(etcd->marker.key);
    etcd->marker.key = NULL;
    etcd->marker.born = 0;
}

/* Written only where it is not, so that a copy that comes late cannot move it. */
static ep_status write_marker(struct etcd *etcd, uint64_t deadline, struct ep_error *error)
{
    struct transaction *t = transaction_new();
    struct etcd_call call = { .deadline = deadline };
    Etcdserverpb__TxnResponse *reply;
    const Mvccpb__KeyValue *kv;
    ep_status status;

    add_compare(t, etcd->marker.key, 0, NULL);
    add_put(t, etcd->marker.key, "0", 1, etcd->marker.lease);
    status = run_transaction(etcd, t, &call, &reply, error);
    transaction_free(t);
    if (status)
        return status;
    kv = reply->succeeded ? NULL : found(reply, 0); /* an earlier copy has written it */
    etcd->marker.revision = kv ? kv->mod_revision : reply->header->revision;
    etcd_free(reply);
    return EP_OK;
}

/* The old one goes for certain: a commit that asks for it must not be done any more. */
static ep_status retire_marker(struct etcd *etcd, uint64_t deadline, struct ep_error *error)
{
    ep_status status;

    if (!etcd->marker.born)
        return EP_OK;
    status = etcd_revoke(etcd, etcd->marker.lease, deadline, error);
    if (status && status != EP_NOT_FOUND)
        return status;
    etcd_forget_marker(etcd);
    return EP_OK;
}

static ep_status ensure_marker(struct etcd *etcd, uint64_t deadline, struct ep_error *error)
{
    uint64_t now = ep_clock_boot_ns(), granted_ms;
    char name[64];
    ep_status status;

    if (etcd->marker.born && now - etcd->marker.born < MARKER_USE_NS)
        return EP_OK;
    if ((status = retire_marker(etcd, deadline, error)) ||
        (status = etcd_grant(etcd, MARKER_TTL_MS, deadline, &etcd->marker.lease, &granted_ms, error)))
        return status;
    snprintf(name, sizeof name, MARKERS "%016" PRIx64, etcd_random());
    etcd->marker.key = etcd_key(etcd, name);
    status = write_marker(etcd, deadline, error);
    if (status)
        etcd_forget_marker(etcd); /* its lease ends it, if it is there */
    else
        etcd->marker.born = now;
    return status;
}

/* ---- commits ------------------------------------------------------------------------- */

enum outcome { DONE, REFUSED, AGAIN };

static enum outcome done_at(struct etcd *etcd, int64_t at, uint64_t *revision)
{
    etcd->marker.revision = at;
    *revision = (uint64_t)at;
    return DONE;
}

/* What the store has said no to, or how that no is to be read. */
static enum outcome read_refusal(struct etcd *etcd, const struct transaction *t,
                                 const Etcdserverpb__TxnResponse *reply, const char *number,
                                 uint64_t *revision, struct ep_error *error)
{
    const Mvccpb__KeyValue *marker = found(reply, 0);

    if (marker && marker->value.len == strlen(number) &&
        memcmp(marker->value.data, number, marker->value.len) == 0)
        return done_at(etcd, marker->mod_revision, revision);
    if (!marker || marker->mod_revision != etcd->marker.revision) {
        if (marker)
            etcd->marker.revision = marker->mod_revision;
        else
            etcd_forget_marker(etcd);
        return AGAIN;
    }
    for (size_t i = 1; i < t->request.n_compare; i++) {
        const Mvccpb__KeyValue *kv = found(reply, i);
        int64_t is = kv ? kv->mod_revision : 0;

        if (is != (int64_t)t->asked[i]->expected) {
            store_say_mismatch(t->asked[i], (uint64_t)is, error);
            return REFUSED;
        }
    }
    ep_error_set(error, EP_PROTOCOL, "store %s: cannot write: etcd refuses it without a reason", etcd->name);
    return REFUSED;
}

static struct transaction *new_commit(const struct etcd *etcd, const struct ep_store_write *writes, size_t n,
                                      const char *number)
{
    struct transaction *t = transaction_new();

    add_compare(t, etcd->marker.key, etcd->marker.revision, NULL);
    add_put(t, etcd->marker.key, number, strlen(number), etcd->marker.lease);
    for (size_t i = 0; i < n; i++)
        add_write(etcd, t, &writes[i]);
    return t;
}

/*
 * A lease that is gone is a session that is over.  A marker that is gone tells nothing of what was sent more than
 * once.
 */
static enum outcome judge(struct etcd *etcd, const struct transaction *t, const struct etcd_call *call,
                          ep_status status, const Etcdserverpb__TxnResponse *reply, const char *number,
                          uint64_t *revision, struct ep_error *error)
{
    enum outcome outcome;

    if (status == EP_NOT_FOUND)
        store_say_session_over(error);
    if (status)
        return REFUSED;
    if (reply->succeeded)
        return done_at(etcd, reply->header->revision, revision);
    outcome = read_refusal(etcd, t, reply, number, revision, error);
    if (outcome == AGAIN && !etcd->marker.born && call->tries > 1) {
        ep_error_set(error, EP_UNAVAILABLE,
                     "store %s: whether it was written is not known: etcd has lost the record "
                     "that tells",
                     etcd->name);
        return REFUSED;
    }
    return outcome;
}

static enum outcome commit_once(struct etcd *etcd, const struct ep_store_write *writes, size_t n,
                                uint64_t deadline, uint64_t *revision, struct ep_error *error)
{
    struct etcd_call call = { .deadline = deadline };
    Etcdserverpb__TxnResponse *reply = NULL;
    struct transaction *t;
    char number[24];
    enum outcome outcome;
    ep_status status;

    if (ensure_marker(etcd, deadline, error))
        return REFUSED;
    snprintf(number, sizeof number, "%" PRIu64, ++etcd->marker.commits);
    t = new_commit(etcd, writes, n, number);
    status = run_transaction(etcd, t, &call, &reply, error);
    outcome = judge(etcd, t, &call, status, reply, number, revision, error);
    if (!status)
        etcd_free(reply);
    transaction_free(t);
    return outcome;
}

ep_status etcd_commit(struct etcd *etcd, const struct ep_store_write *writes, size_t n, uint64_t deadline,
                      uint64_t *revision, struct ep_error *error)
{
    for (int round = 0; round < COMMIT_ROUNDS; round++) {
        struct ep_error local = EP_ERROR_INIT;
        enum outcome outcome = commit_once(etcd, writes, n, deadline, revision, &local);

        if (outcome == DONE)
            return EP_OK;
        if (outcome == REFUSED)
            return ep_error_set(error, local.status, "%s", local.text);
    }
    return ep_error_set(error, EP_UNAVAILABLE, "store %s: cannot write: another process writes its marker",
                        etcd->name);
}
