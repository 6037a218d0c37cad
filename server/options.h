/*
 * ep_options: how ep-server is configured.
 *
 * One table (options_table.c) says of every option its name, type, default, range, section, help and
 * whether it can be reloaded.  Flags, environment variables, the YAML file, --help and
 * --print-config all follow from it.
 *
 *     flag --host-ranks=4  >  environment EP_SERVER_HOST_RANKS=4  >  file host-ranks: 4  >  default
 *
 * In the file an option stands at the top level or in its section:
 *
 *     node:
 *       host-ranks: 4
 *       memory: 8GiB
 *     log-level: debug
 *
 * Every value given anywhere is checked, also one that another overrides.  An error names the
 * option, the value, where it came from and what would be right.
 */
#ifndef EP_OPTIONS_H
#define EP_OPTIONS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <sys/types.h>

#include "ep_error.h"

enum ep_options_action { EP_ACTION_RUN, EP_ACTION_CHECK, EP_ACTION_PRINT };
enum ep_options_backend { EP_OPTIONS_AUTO, EP_OPTIONS_HOST, EP_OPTIONS_CUDA };
enum ep_options_mps { EP_OPTIONS_MPS_AUTO, EP_OPTIONS_MPS_REQUIRE, EP_OPTIONS_MPS_OFF };
enum ep_options_doorbell { EP_OPTIONS_DOORBELL_WAIT, EP_OPTIONS_DOORBELL_POLL };

struct ep_id_list {
    uint32_t *ids;
    size_t n;
};

struct ep_option_origin {
    enum { EP_ORIGIN_DEFAULT, EP_ORIGIN_FILE, EP_ORIGIN_ENVIRONMENT, EP_ORIGIN_FLAG } kind;
    int line; /* in the file */
};

#define EP_OPTIONS_MAX 48

/* Strings are owned by the struct; "" means none. */
struct ep_options {
    enum ep_options_action action;
    char *config;

    /* node */
    char *name;
    int backend; /* enum ep_options_backend */
    int mps;     /* enum ep_options_mps */
    int doorbell; /* enum ep_options_doorbell */
    char *gpus;  /* "0,2"; "": all */
    uint64_t host_ranks;
    uint64_t sms_per_rank;
    uint64_t memory; /* bytes, of each GPU where there are GPUs; 0: half of what is free at start */
    char *state_dir;
    char *store; /* "": a file in state_dir */
    uint64_t lost_after; /* ms */
    char *store_ca, *store_cert, *store_key;
    char *store_user, *store_password_file;

    /* workers */
    char *socket;
    mode_t socket_mode;
    struct ep_id_list allow_uid, allow_gid;
    char *attach_token_file;

    /* admin */
    char *listen, *advertise;
    struct ep_id_list admin_uid, admin_gid;
    char *tls_ca, *tls_cert, *tls_key;
    char *peer_ou; /* "": none */
    bool insecure;

    /* limits */
    uint64_t max_message_bytes;
    uint64_t max_connections;
    uint64_t max_watches;
    uint64_t max_region_bytes;

    /* service */
    char *metrics;
    int log_level;  /* enum ep_log_level */
    int log_format; /* enum ep_log_format */
    uint64_t drain_grace; /* ms */
    char *port_file;
    char *pid_file;

    struct ep_option_origin origins[EP_OPTIONS_MAX]; /* by place in the table */
};

/*
 * Reads all sources.  environment: as environ(7).  --help, --usage and --version print and end the
 * process.  On an error nothing is left to free.
 */
ep_status ep_options_load(int argc, char **argv, char **environment, struct ep_options **out,
                          struct ep_error *error);
void ep_options_free(struct ep_options *options); /* NULL is allowed */

/* What no single option can tell: combinations that make no sense, files that cannot be read. */
ep_status ep_options_check(const struct ep_options *options, struct ep_error *error);

/* Valid YAML, every option with its origin in a comment; read again it gives the same values. */
void ep_options_print(const struct ep_options *options, FILE *out);

/*
 * Moves the values that may change while the server runs out of `from`.  changed is called for every
 * option whose value differs: applied says whether it was taken, text is the new value.
 */
void ep_options_reload(struct ep_options *options, struct ep_options *from,
                       void (*changed)(const char *name, const char *text, bool applied, void *user),
                       void *user);

#endif
