#include "ep_address.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#define PREFIX "unix:"
#define SYSTEM_ADDRESS PREFIX "/run/ep-server/ep.sock"

static const char *variable(const char *name)
{
    const char *value = getenv(name);

    return value && *value ? value : NULL;
}

const char *ep_address_default(char *out, size_t size)
{
    const char *server = variable("EP_SERVER"), *runtime = variable("XDG_RUNTIME_DIR");
    struct stat info;

    if (server) {
        snprintf(out, size, "%s", server);
        return out;
    }
    if (runtime) {
        int n = snprintf(out, size, PREFIX "%s/ep-server/ep.sock", runtime);

        if (n > 0 && (size_t)n < size && stat(out + strlen(PREFIX), &info) == 0)
            return out;
    }
    snprintf(out, size, "%s", SYSTEM_ADDRESS);
    return out;
}
