/* What no single option can tell: combinations that make no sense, files that cannot be read. */
#include "options_private.h"

#include <ctype.h>
#include <fcntl.h>
#include <inttypes.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include "ep_kernels.h"
#include "ep_store_url.h"

#define NAME_MAX_BYTES 253 /* as of a host's; it is part of keys in the store */

static ep_status check_readable(const char *name, const char *path, struct ep_error *error)
{
    struct stat info;
    int fd;

    if (!*path)
        return EP_OK;
    fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return ep_error_errno(error, EP_INVALID_ARGUMENT, "%s: cannot read %s", name, path);

    const bool directory = fstat(fd, &info) == 0 && S_ISDIR(info.st_mode);

    close(fd);
    if (directory)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "%s: cannot read %s: it is a directory, not a file", name, path);
    return EP_OK;
}

/* What the server makes: the later one would replace the other. */
static ep_status check_made(const struct ep_options *o, struct ep_error *error)
{
    char beside[sizeof ((struct sockaddr_un *)NULL)->sun_path];
    const struct {
        const char *name, *path;
    } made[] = { { "socket", o->socket }, { "the socket beside it", beside }, { "pid-file", o->pid_file },
                 { "port-file", o->port_file } };

    snprintf(beside, sizeof beside, "%s" EP_OPTION_SIDE_SOCKET, o->socket);
    for (size_t i = 1; i < sizeof made / sizeof *made; i++)
        for (size_t j = 0; j < i; j++)
            if (*made[i].path && strcmp(made[i].path, made[j].path) == 0)
                return ep_error_set(error, EP_INVALID_ARGUMENT, "%s and %s are both %s: give each a path of its own",
                                    made[j].name, made[i].name, made[i].path);
    return EP_OK;
}

static ep_status check_paths(const struct ep_options *o, struct ep_error *error)
{
    const size_t room = sizeof ((struct sockaddr_un *)NULL)->sun_path - sizeof EP_OPTION_SIDE_SOCKET;

    if (!*o->socket)
        return ep_error_set(error, EP_INVALID_ARGUMENT,
                            "socket is empty: give --socket=PATH; it has a default where XDG_RUNTIME_DIR is set");
    if (strlen(o->socket) > room)
        return ep_error_set(error, EP_INVALID_ARGUMENT,
                            "socket is %zu bytes long: a path of a unix socket may have %zu here, the suffix "
                            EP_OPTION_SIDE_SOCKET " of the second one counted", strlen(o->socket), room);
    if (!*o->state_dir && !*o->store)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "state-dir is empty: give --state-dir=PATH; it has a default where "
                            "HOME is set");
    if (!*o->name)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "name is empty: give --name=TEXT");
    if (strlen(o->name) > NAME_MAX_BYTES)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "name is %zu bytes long: it may have %d", strlen(o->name),
                            NAME_MAX_BYTES);
    return check_readable("attach-token-file", o->attach_token_file, error);
}

static bool is_loopback(const char *address)
{
    size_t length = (size_t)(strrchr(address, ':') - address);

    return strncmp(address, "127.", 4) == 0 || (length == 5 && strncmp(address, "[::1]", 5) == 0) ||
           (length == 9 && strncmp(address, "localhost", 9) == 0);
}

static ep_status check_tls_files(const struct ep_options *o, struct ep_error *error)
{
    ep_status status = EP_OK;

    if (!*o->tls_cert != !*o->tls_key)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "%s is set without %s: both are needed",
                            *o->tls_cert ? "tls-cert" : "tls-key", *o->tls_cert ? "tls-key" : "tls-cert");
    if (*o->tls_ca && !*o->tls_cert)
        return ep_error_set(error, EP_INVALID_ARGUMENT,
                            "tls-ca is set without tls-cert and tls-key: all three are needed");
    if (*o->peer_ou && !*o->tls_ca)
        return ep_error_set(error, EP_INVALID_ARGUMENT,
                            "peer-ou is set without tls-ca: only a certificate has a unit");
    status = check_readable("tls-ca", o->tls_ca, error);
    if (status == EP_OK)
        status = check_readable("tls-cert", o->tls_cert, error);
    if (status == EP_OK)
        status = check_readable("tls-key", o->tls_key, error);
    return status;
}

static ep_status check_admin(const struct ep_options *o, struct ep_error *error)
{
    ep_status status = check_tls_files(o, error);

    if (status != EP_OK || !*o->listen)
        return status;
    if (!o->insecure && !is_loopback(o->listen) && !*o->tls_ca)
        return ep_error_set(error, EP_INVALID_ARGUMENT,
                            "listen is %s, which other machines reach, and %s: anyone there could administer "
                            "this node; set tls-ca, tls-cert and tls-key, or insecure if that is wanted",
                            o->listen, *o->tls_cert ? "tls-ca is not set" : "there is no TLS");
    return EP_OK;
}

/* What belongs to etcd is of no use, and most likely a mistake, where the store is a file. */
static ep_status check_no_store(const struct ep_options *o, struct ep_error *error)
{
    const struct { const char *name, *value; } parts[] = {
        { "store-ca", o->store_ca },     { "store-cert", o->store_cert },
        { "store-key", o->store_key },   { "store-user", o->store_user },
        { "store-password-file", o->store_password_file },
    };

    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++)
        if (*parts[i].value)
            return ep_error_set(error, EP_INVALID_ARGUMENT, "%s is set without store: give --store=etcd://HOST:PORT",
                                parts[i].name);
    return EP_OK;
}

static ep_status check_store(const struct ep_options *o, struct ep_error *error)
{
    struct ep_store_url url;
    ep_status status;

    if (!*o->store)
        return check_no_store(o, error);
    if ((status = ep_store_url_parse(o->store, &url, error)))
        return status;
    ep_store_url_fini(&url);
    if (!*o->store_cert != !*o->store_key)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "%s is set without %s: both are needed",
                            *o->store_cert ? "store-cert" : "store-key", *o->store_cert ? "store-key" : "store-cert");
    if (!*o->store_user != !*o->store_password_file)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "%s is set without %s: both are needed",
                            *o->store_user ? "store-user" : "store-password-file",
                            *o->store_user ? "store-password-file" : "store-user");
    if ((status = check_readable("store-ca", o->store_ca, error)) ||
        (status = check_readable("store-cert", o->store_cert, error)) ||
        (status = check_readable("store-key", o->store_key, error)))
        return status;
    return check_readable("store-password-file", o->store_password_file, error);
}

static ep_status check_memory(const struct ep_options *o, struct ep_error *error)
{
    const uint64_t least = ep_layout_smallest();

    if (!o->memory || o->memory >= least)
        return EP_OK;
    return ep_error_set(error, EP_INVALID_ARGUMENT, "memory is %" PRIu64 " bytes: no window has less than %" PRIu64
                        "; 0 stands for half of what is free at start", o->memory, least);
}

/* Which of them there are is seen later. */
static ep_status check_gpus(const struct ep_options *o, struct ep_error *error)
{
    for (const char *at = o->gpus; *at; at++) {
        const bool digit = isdigit((unsigned char)*at);

        if (digit || (*at == ',' && at > o->gpus && isdigit((unsigned char)at[-1]) && isdigit((unsigned char)at[1])))
            continue;
        return ep_error_set(error, EP_INVALID_ARGUMENT, "gpus is \"%.80s\": must be numbers of GPUs with commas between "
                            "them, such as \"0,1\"", o->gpus);
    }
    return EP_OK;
}

/* What is for GPUs. */
static ep_status check_backend(const struct ep_options *o, struct ep_error *error)
{
    const struct {
        const char *name;
        bool is_set;
    } parts[] = { { "mps is require", o->mps == EP_OPTIONS_MPS_REQUIRE },
                  { "gpus is set", *o->gpus },
                  { "doorbell is poll", o->doorbell == EP_OPTIONS_DOORBELL_POLL },
                  { "sms-per-rank is set", o->sms_per_rank } };

    for (size_t i = 0; i < sizeof parts / sizeof *parts && o->backend == EP_OPTIONS_HOST; i++)
        if (parts[i].is_set)
            return ep_error_set(error, EP_INVALID_ARGUMENT,
                                "%s with backend host, which has no use for it: set backend to cuda or auto",
                                parts[i].name);
    return EP_OK;
}

static bool is_wildcard(const char *address)
{
    return strncmp(address, "0.0.0.0:", 8) == 0 || strncmp(address, "[::]:", 5) == 0 || *address == '*';
}

/* Others find this server by what it tells them. */
static ep_status check_cluster(const struct ep_options *o, struct ep_error *error)
{
    if (*o->advertise && !*o->listen)
        return ep_error_set(error, EP_INVALID_ARGUMENT,
                            "advertise is %s, and listen is not set: nobody could reach this server there",
                            o->advertise);
    if (*o->advertise && is_wildcard(o->advertise))
        return ep_error_set(error, EP_INVALID_ARGUMENT,
                            "advertise is %s, which is no address of a machine: give the one that others reach this "
                            "server by", o->advertise);
    if (!*o->store)
        return EP_OK;
    if (!*o->listen)
        return ep_error_set(error, EP_INVALID_ARGUMENT,
                            "store is etcd, and listen is not set: the servers of a cluster call each other; give "
                            "--listen=HOST:PORT");
    if (!*o->tls_ca && !o->insecure)
        return ep_error_set(
            error, EP_INVALID_ARGUMENT,
            "store is etcd, and tls-ca is not set: the servers of a cluster could not tell each other from "
            "whoever calls; set tls-ca, tls-cert and tls-key, or insecure if that is wanted");
    if (!*o->advertise && is_wildcard(o->listen))
        return ep_error_set(error, EP_INVALID_ARGUMENT,
                            "listen is %s, which tells the other servers of the cluster nothing: give "
                            "--advertise=HOST:PORT, the address that they reach this one by", o->listen);
    return EP_OK;
}

ep_status ep_options_check(const struct ep_options *options, struct ep_error *error)
{
    ep_status status = check_backend(options, error);

    if (status == EP_OK)
        status = check_memory(options, error);
    if (status == EP_OK)
        status = check_gpus(options, error);
    if (status == EP_OK)
        status = check_paths(options, error);
    if (status == EP_OK)
        status = check_made(options, error);
    if (status == EP_OK)
        status = check_admin(options, error);
    if (status == EP_OK)
        status = check_store(options, error);
    if (status == EP_OK)
        status = check_cluster(options, error);
    return status;
}
