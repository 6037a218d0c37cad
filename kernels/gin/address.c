/* Which interface to listen on, and which host this is. */
#include "gin.h"

#include <fcntl.h>
#include <ifaddrs.h>
#include <net/if.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* ---- this host ------------------------------------------------------------------------------ */

enum { BOOT_TEXT = 36 }; /* "01234567-89ab-cdef-0123-456789abcdef" */

static int digit(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

static bool parse_boot(const char *text, uint8_t boot[16])
{
    uint32_t n = 0;

    memset(boot, 0, 16);
    for (uint32_t i = 0; i < BOOT_TEXT; i++) {
        if (text[i] == '-')
            continue;
        if (digit(text[i]) < 0 || n == 32)
            return false;
        boot[n / 2] = (uint8_t)(boot[n / 2] << 4 | digit(text[i]));
        n++;
    }
    return n == 32;
}

static ep_status read_boot(uint8_t boot[16], struct ep_error *error)
{
    static const char path[] = "/proc/sys/kernel/random/boot_id";
    char text[BOOT_TEXT];
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    ssize_t n;

    if (fd < 0)
        return ep_error_errno(error, EP_IO, "%s", path);
    n = read(fd, text, sizeof text);
    close(fd);
    if (n != BOOT_TEXT || !parse_boot(text, boot))
        return ep_error_set(error, EP_IO, "%s: is no UUID", path);
    return EP_OK;
}

ep_status ep_gin_host_id_read(struct ep_gin_host_id *id, struct ep_error *error)
{
    static const char path[] = "/proc/self/ns/net";
    struct stat namespace;
    ep_status status;

    memset(id, 0, sizeof *id);
    status = read_boot(id->boot, error);
    if (status != EP_OK)
        return status;
    if (stat(path, &namespace) != 0)
        return ep_error_errno(error, EP_IO, "%s", path);
    id->network = namespace.st_ino;
    return EP_OK;
}

/* ---- interfaces ------------------------------------------------------------------------------- */

static bool entry_matches(const char *entry, size_t length, const char *name, bool exactly)
{
    return strncmp(name, entry, length) == 0 && (!exactly || name[length] == '\0');
}

bool ep_gin_interface_listed(const char *list, const char *name)
{
    const bool others = *list == '^';
    const char *at = list + others;
    const bool exactly = *at == '=';
    bool found = false;

    at += exactly;
    if (!*at)
        return true;
    while (*at) {
        const size_t length = strcspn(at, ",");

        found = found || (length > 0 && entry_matches(at, length, name, exactly));
        at += length + (at[length] == ',');
    }
    return found != others;
}

/* What the rest of a cluster can hardly reach; taken only when it is asked for, or nothing else is there. */
static bool secluded(const struct ifaddrs *i)
{
    return (i->ifa_flags & IFF_LOOPBACK) || strncmp(i->ifa_name, "docker", 6) == 0 ||
           strncmp(i->ifa_name, "veth", 4) == 0 || strncmp(i->ifa_name, "virbr", 5) == 0;
}

/* A link-local address needs to be told the interface of whoever dials it, which this rank does not know. */
static bool link_local(const struct sockaddr *address)
{
    return address->sa_family == AF_INET6 &&
           IN6_IS_ADDR_LINKLOCAL(&((const struct sockaddr_in6 *)(const void *)address)->sin6_addr);
}

static bool of_family(const struct ifaddrs *i, uint8_t family)
{
    const int wanted = family == 4 ? AF_INET : AF_INET6;

    return i->ifa_addr && i->ifa_addr->sa_family == wanted && !link_local(i->ifa_addr);
}

static const struct ifaddrs *first(const struct ifaddrs *all, const char *list, uint8_t family, bool any)
{
    for (const struct ifaddrs *i = all; i; i = i->ifa_next)
        if (of_family(i, family) && (i->ifa_flags & IFF_UP) && ep_gin_interface_listed(list, i->ifa_name) &&
            (any || !secluded(i)))
            return i;
    return NULL;
}

/* IPv4 before IPv6, and both before what is secluded, unless interfaces are named. */
static const struct ifaddrs *pick(const struct ifaddrs *all, const struct ep_gin_settings *settings)
{
    const bool named = settings->interfaces[0] != '\0' && settings->interfaces[0] != '^';
    const struct ifaddrs *found = NULL;

    for (uint32_t any = named; any < 2 && !found; any++)
        for (uint8_t family = 4; family <= 6 && !found; family += 2)
            if (settings->family == 0 || settings->family == family)
                found = first(all, settings->interfaces, family, any);
    return found;
}

ep_status ep_gin_address_choose(const struct ep_gin_settings *settings, struct sockaddr_storage *address,
                                struct ep_error *error)
{
    struct ifaddrs *all = NULL;
    const struct ifaddrs *found;

    if (getifaddrs(&all) != 0)
        return ep_error_errno(error, EP_IO, "getifaddrs");
    found = pick(all, settings);
    memset(address, 0, sizeof *address);
    if (found)
        memcpy(address, found->ifa_addr,
               found->ifa_addr->sa_family == AF_INET ? sizeof(struct sockaddr_in) : sizeof(struct sockaddr_in6));
    freeifaddrs(all);
    if (!found)
        return ep_error_set(error, EP_NOT_FOUND,
                            "no interface with an address is up and in \"%s\": set EP_GIN_INTERFACE",
                            settings->interfaces);
    return EP_OK;
}
