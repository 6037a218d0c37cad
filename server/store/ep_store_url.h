/* ep_store_url: "etcd://HOST:PORT,HOST:PORT/PREFIX", taken apart. */
#ifndef EP_STORE_URL_H
#define EP_STORE_URL_H

#include <stddef.h>

#include "ep_error.h"

#define EP_STORE_SCHEME         "etcd://"
#define EP_STORE_MAX_ENDPOINTS  16
#define EP_STORE_DEFAULT_PREFIX "/ep-server"

struct ep_store_url {
    char *endpoints[EP_STORE_MAX_ENDPOINTS]; /* "HOST:PORT" */
    size_t n;
    char *prefix; /* "/PREFIX/"; without one in the URL, EP_STORE_DEFAULT_PREFIX */
};

ep_status ep_store_url_parse(const char *text, struct ep_store_url *out, struct ep_error *error);
void ep_store_url_fini(struct ep_store_url *url);

#endif
