/* Transport security: PEM files, read again at every handshake so that rotation needs no restart. */
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "rpc_private.h"

#define PEM_MAX_BYTES (1u << 20)

/* ---- files --------------------------------------------------------------------------- */

static void wipe(char *text)
{
    if (text)
        explicit_bzero(text, strlen(text)); /* one of them is a private key */
    free(text);
}

void rpc_pem_fini(struct rpc_pem *pem)
{
    wipe(pem->ca);
    wipe(pem->cert);
    wipe(pem->key);
    *pem = (struct rpc_pem){ 0 };
}

static bool same(const char *a, const char *b)
{
    return a == b || (a && b && strcmp(a, b) == 0);
}

bool rpc_pem_equal(const struct rpc_pem *a, const struct rpc_pem *b)
{
    return same(a->ca, b->ca) && same(a->cert, b->cert) && same(a->key, b->key);
}

static ep_status read_all(int fd, const char *path, char *text, size_t size, struct ep_error *error)
{
    size_t n = 0;

    while (n < size) {
        ssize_t k = read(fd, text + n, size - n);

        if (k < 0 && errno == EINTR)
            continue;
        if (k < 0)
            return ep_error_errno(error, EP_IO, "cannot read %s", path);
        if (k == 0)
            break;
        n += (size_t)k;
    }
    if (!strstr(text, "-----BEGIN "))
        return ep_error_set(error, EP_INVALID_ARGUMENT, "%s is not a PEM file", path);
    return EP_OK;
}

static ep_status read_open(int fd, const char *path, char **out, struct ep_error *error)
{
    struct stat st;

    if (fstat(fd, &st) != 0)
        return ep_error_errno(error, EP_IO, "cannot read %s", path);
    if (!S_ISREG(st.st_mode) || st.st_size > PEM_MAX_BYTES)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "%s is not a PEM file", path);
    *out = calloc(1, (size_t)st.st_size + 1);
    if (!*out)
        return ep_error_set(error, EP_NO_MEMORY, "cannot read %s: out of memory", path);
    return read_all(fd, path, *out, (size_t)st.st_size, error);
}

static ep_status read_pem(const char *path, char **out, struct ep_error *error)
{
    *out = NULL;
    if (!path)
        return EP_OK;

    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);

    if (fd < 0)
        return ep_error_errno(error, errno == ENOENT ? EP_NOT_FOUND : EP_PERMISSION_DENIED,
                              "cannot open %s", path);

    ep_status status = read_open(fd, path, out, error);

    close(fd);
    return status;
}

ep_status rpc_pem_read(const struct ep_rpc_tls *tls, struct rpc_pem *out, struct ep_error *error)
{
    struct rpc_pem pem = { 0 };
    ep_status status;

    if (!tls->cert != !tls->key)
        return ep_error_set(error, EP_INVALID_ARGUMENT,
                            "TLS: a certificate and its key are given together or not at all");
    if ((status = read_pem(tls->ca, &pem.ca, error)) != EP_OK
        || (status = read_pem(tls->cert, &pem.cert, error)) != EP_OK
        || (status = read_pem(tls->key, &pem.key, error)) != EP_OK) {
        rpc_pem_fini(&pem);
        return status;
    }
    *out = pem;
    return EP_OK;
}

/* ---- client -------------------------------------------------------------------------- */

grpc_channel_credentials *rpc_client_credentials(const struct rpc_pem *pem)
{
    grpc_ssl_pem_key_cert_pair pair = { pem->key, pem->cert };

    return grpc_ssl_credentials_create_ex(pem->ca, pem->key ? &pair : NULL, NULL, NULL);
}

/* ---- server -------------------------------------------------------------------------- */

/*
 * Where a server's credentials come from.  Lives as long as the runtime, because a handshake
 * that gRPC still has open may ask it after the server is gone.
 */
struct rpc_server_tls {
    struct rpc_server_tls *next;
    struct ep_rpc_tls paths; /* owned copies */
    pthread_mutex_t lock;         /* handshakes ask from any of gRPC's threads */
    struct rpc_pem loaded;   /* what gRPC has now */
};

/*
 * gRPC asks at start and at every handshake.  The files are small and a handshake costs
 * milliseconds, so they are compared by content: no clock granularity to fall into.  A broken or
 * half-written set leaves the previous one in force.
 */
static grpc_ssl_certificate_config_reload_status
fetch(void *user, grpc_ssl_server_certificate_config **config)
{
    struct rpc_server_tls *tls = user;
    grpc_ssl_certificate_config_reload_status result = GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_UNCHANGED;
    struct ep_error error = EP_ERROR_INIT;
    struct rpc_pem pem;

    if (rpc_pem_read(&tls->paths, &pem, &error) != EP_OK) {
        EP_WARN("rpc", "certificates not reloaded", EP_S("error", error.text));
        return GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_FAIL;
    }
    pthread_mutex_lock(&tls->lock);
    if (!rpc_pem_equal(&pem, &tls->loaded)) {
        grpc_ssl_pem_key_cert_pair pair = { pem.key, pem.cert };

        *config = grpc_ssl_server_certificate_config_create(pem.ca, &pair, 1);
        if (tls->loaded.cert)
            EP_INFO("rpc", "certificates reloaded", EP_S("file", tls->paths.cert));
        rpc_pem_fini(&tls->loaded);
        tls->loaded = pem;
        pem = (struct rpc_pem){ 0 };
        result = GRPC_SSL_CERTIFICATE_CONFIG_RELOAD_NEW;
    }
    pthread_mutex_unlock(&tls->lock);
    rpc_pem_fini(&pem);
    return result;
}

static void free_tls(struct rpc_server_tls *tls)
{
    pthread_mutex_destroy(&tls->lock);
    rpc_pem_fini(&tls->loaded);
    free((char *)(uintptr_t)tls->paths.ca);
    free((char *)(uintptr_t)tls->paths.cert);
    free((char *)(uintptr_t)tls->paths.key);
    free(tls);
}

static struct rpc_server_tls *new_tls(const struct ep_rpc_tls *paths)
{
    struct rpc_server_tls *tls = calloc(1, sizeof *tls);

    if (!tls)
        return NULL;
    if (pthread_mutex_init(&tls->lock, NULL) != 0) {
        free(tls);
        return NULL;
    }
    tls->paths.ca = paths->ca ? strdup(paths->ca) : NULL;
    tls->paths.cert = strdup(paths->cert);
    tls->paths.key = strdup(paths->key);
    if (!tls->paths.cert || !tls->paths.key || !tls->paths.ca != !paths->ca) {
        free_tls(tls);
        return NULL;
    }
    return tls;
}

ep_status rpc_server_credentials(struct ep_rpc *rpc, const struct ep_rpc_tls *paths,
                                 grpc_server_credentials **out, struct ep_error *error)
{
    struct rpc_server_tls *tls;
    struct rpc_pem pem;
    ep_status status;

    if (!paths->cert || !paths->key)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "TLS: a server needs a certificate and a key");
    status = rpc_pem_read(paths, &pem, error); /* gRPC would only log why it failed */
    if (status != EP_OK)
        return status;
    rpc_pem_fini(&pem);
    tls = new_tls(paths);
    if (!tls)
        return ep_error_set(error, EP_NO_MEMORY, "TLS: out of memory");
    tls->next = rpc->tls;
    rpc->tls = tls;
    *out = grpc_ssl_server_credentials_create_with_options(
        grpc_ssl_server_credentials_create_options_using_config_fetcher(
            paths->ca ? GRPC_SSL_REQUEST_AND_REQUIRE_CLIENT_CERTIFICATE_AND_VERIFY
                      : GRPC_SSL_DONT_REQUEST_CLIENT_CERTIFICATE,
            fetch, tls));
    if (!*out)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "TLS: gRPC refuses %s with %s",
                            paths->cert, paths->key);
    return EP_OK;
}

void rpc_server_tls_free_all(struct ep_rpc *rpc)
{
    while (rpc->tls) {
        struct rpc_server_tls *tls = rpc->tls;

        rpc->tls = tls->next;
        free_tls(tls);
    }
}

/* ---- who calls ----------------------------------------------------------------------- */

/* Of the certificate that the caller has shown, malloc'ed; NULL: there is none, or it does not say. */
static char *property_of(grpc_call *call, const char *name)
{
    grpc_auth_context *context = grpc_call_auth_context(call);
    char *value = NULL;

    if (context) {
        grpc_auth_property_iterator it = grpc_auth_context_find_properties_by_name(context, name);
        const grpc_auth_property *p = grpc_auth_property_iterator_next(&it);

        if (p && p->value_length > 0)
            value = strndup(p->value, p->value_length);
        grpc_auth_context_release(context);
    }
    return value;
}

char *rpc_certificate_name(grpc_call *call)
{
    char *name = property_of(call, GRPC_X509_CN_PROPERTY_NAME);

    return name ? name : property_of(call, GRPC_X509_SAN_PROPERTY_NAME);
}

/* A ',' or '+' that belongs to a value has a backslash before it, and so has a backslash. */
static bool is_separated(const char *subject, const char *at)
{
    size_t escapes = 0;

    if (at == subject)
        return true;
    if (at[-1] != ',' && at[-1] != '+')
        return false;
    while (at - 1 - escapes > subject && at[-2 - (ptrdiff_t)escapes] == '\\')
        escapes++;
    return escapes % 2 == 0;
}

/* The subject is written as in RFC 2253: "OU=viewer,CN=alice". */
bool rpc_certificate_has_unit(grpc_call *call, const char *unit)
{
    char *subject = property_of(call, GRPC_X509_SUBJECT_PROPERTY_NAME);
    const size_t n = strlen(unit);
    bool found = false;

    for (const char *at = subject; at && !found && (at = strstr(at, "OU=")); at++)
        found = is_separated(subject, at) && !strncmp(at + 3, unit, n) && strchr(",+", at[3 + n]);
    free(subject);
    return found;
}
