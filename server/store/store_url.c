#include "ep_store_url.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static ep_status no_memory(struct ep_error *error)
{
    return ep_error_set(error, EP_NO_MEMORY, "out of memory");
}

static ep_status check_endpoint(const char *text, const char *endpoint, struct ep_error *error)
{
    const char *colon = strrchr(endpoint, ':');
    char *end;
    unsigned long port = colon ? strtoul(colon + 1, &end, 10) : 0;

    if (!colon || colon == endpoint || colon[1] < '0' || colon[1] > '9' || *end || port < 1 || port > 65535)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "store is \"%.100s\": \"%.60s\" must be HOST:PORT",
                            text, endpoint);
    return EP_OK;
}

static ep_status add_endpoint(const char *text, const char *from, size_t length, struct ep_store_url *out,
                              struct ep_error *error)
{
    if (out->n == EP_STORE_MAX_ENDPOINTS)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "store is \"%.100s\": more than %d endpoints", text,
                            EP_STORE_MAX_ENDPOINTS);
    out->endpoints[out->n] = strndup(from, length);
    if (!out->endpoints[out->n])
        return no_memory(error);
    return check_endpoint(text, out->endpoints[out->n++], error);
}

/* One slash at either end, whatever was written. */
static char *prefix_of(const char *path)
{
    char *prefix = NULL;
    size_t length;

    path += strspn(path, "/");
    length = strlen(path);
    while (length && path[length - 1] == '/')
        length--;
    if (!length)
        return strdup(EP_STORE_DEFAULT_PREFIX "/");
    return asprintf(&prefix, "/%.*s/", (int)length, path) < 0 ? NULL : prefix;
}

static ep_status parse(const char *text, struct ep_store_url *out, struct ep_error *error)
{
    const char *from = text + strlen(EP_STORE_SCHEME), *end;
    ep_status status;

    if (strncmp(text, EP_STORE_SCHEME, strlen(EP_STORE_SCHEME)) != 0)
        return ep_error_set(
            error, EP_INVALID_ARGUMENT,
            "store is \"%.100s\": must be " EP_STORE_SCHEME "HOST:PORT[,HOST:PORT...][/PREFIX]", text);
    for (;; from = end + 1) {
        end = from + strcspn(from, ",/");
        if ((status = add_endpoint(text, from, (size_t)(end - from), out, error)))
            return status;
        if (*end != ',')
            break;
    }
    out->prefix = prefix_of(end);
    return out->prefix ? EP_OK : no_memory(error);
}

ep_status ep_store_url_parse(const char *text, struct ep_store_url *out, struct ep_error *error)
{
    ep_status status;

    *out = (struct ep_store_url){ 0 };
    status = parse(text, out, error);
    if (status)
        ep_store_url_fini(out);
    return status;
}

void ep_store_url_fini(struct ep_store_url *url)
{
    for (size_t i = 0; i < url->n; i++)
        free(url->endpoints[i]);
    free(url->prefix);
    *url = (struct ep_store_url){ 0 };
}
