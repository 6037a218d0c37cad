/* What the environment asks for.  plugin.c has the list, with units and defaults. */
#include "gin.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <unistd.h>

#define KIB 1024ull
#define MIB (1024 * KIB)

static ep_status read_number(const char *name, uint64_t low, uint64_t high, uint64_t *value, struct ep_error *error)
{
    const char *text = getenv(name);
    char *end;
    unsigned long long number;

    if (!text || !*text)
        return EP_OK;
    errno = 0;
    number = strtoull(text, &end, 10);
    if (errno != 0 || *end || *text == '-' || number < low || number > high)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "%s is \"%.40s\": must be a number from %llu to %llu", name,
                            text, (unsigned long long)low, (unsigned long long)high);
    *value = number;
    return EP_OK;
}

static ep_status read_transport(enum ep_gin_transport_id *transport, struct ep_error *error)
{
    const char *text = getenv("EP_GIN_TRANSPORT");

    *transport = EP_GIN_AUTO;
    if (!text || !*text)
        return EP_OK;
    for (uint32_t t = 0; t <= EP_GIN_TRANSPORTS; t++)
        if (strcmp(text, ep_gin_transport_name(t)) == 0) {
            *transport = (enum ep_gin_transport_id)t;
            return EP_OK;
        }
    return ep_error_set(error, EP_INVALID_ARGUMENT, "EP_GIN_TRANSPORT is \"%.40s\": must be auto, host, verbs or tcp",
                        text);
}

/* NCCL's variable holds for those who have set it for NCCL. */
static ep_status read_interfaces(struct ep_gin_settings *settings, struct ep_error *error)
{
    const char *text = getenv("EP_GIN_INTERFACE");

    if (!text || !*text)
        text = getenv("NCCL_SOCKET_IFNAME");
    if (!text)
        text = "";
    if (snprintf(settings->interfaces, sizeof settings->interfaces, "%s", text) >= (int)sizeof settings->interfaces)
        return ep_error_set(error, EP_INVALID_ARGUMENT,
                            "EP_GIN_INTERFACE or NCCL_SOCKET_IFNAME has %zu bytes: must have "
                            "less than %zu",
                            strlen(text), sizeof settings->interfaces);
    return EP_OK;
}

static ep_status read_family(uint8_t *family, struct ep_error *error)
{
    const char *text = getenv("NCCL_SOCKET_FAMILY");

    *family = 0;
    if (!text || !*text)
        return EP_OK;
    if (strcasecmp(text, "AF_INET") == 0)
        *family = 4;
    else if (strcasecmp(text, "AF_INET6") == 0)
        *family = 6;
    else
        return ep_error_set(error, EP_INVALID_ARGUMENT, "NCCL_SOCKET_FAMILY is \"%.40s\": must be AF_INET or AF_INET6",
                            text);
    return EP_OK;
}

static bool has_many_cpus(void)
{
    return sysconf(_SC_NPROCESSORS_ONLN) >= EP_GIN_MANY_CPUS;
}

/* Many ranks have many connections anyway, and what staging memory they have is cut into as many parts. */
uint32_t ep_gin_usual_connections(uint32_t ranks)
{
    return has_many_cpus() && ranks <= 8 ? 8 : 4;
}

static ep_status read_numbers(struct ep_gin_settings *settings, struct ep_error *error)
{
    uint64_t connections = 0, movers = has_many_cpus() ? 16 : 0;
    uint64_t piece_kib = 512, staging_mib = 64, timeout_s = 20, silence_s = 20;
    /* To wake the receive thread costs more than a put; but where CPUs are few, whoever looks keeps off whoever works. */
    uint64_t spin_us = has_many_cpus() ? 1000 : 50;
    ep_status status = read_number("EP_GIN_CONNECTIONS", 1, EP_GIN_MAX_CONNECTIONS, &connections, error);

    if (status == EP_OK)
        status = read_number("EP_GIN_MOVERS", 0, 2 * EP_GIN_MAX_CONNECTIONS, &movers, error);
    if (status == EP_OK)
        status = read_number("EP_GIN_PIECE_KIB", 16, 4096, &piece_kib, error);
    if (status == EP_OK)
        status = read_number("EP_GIN_STAGING_MIB", 1, 4096, &staging_mib, error);
    if (status == EP_OK)
        status = read_number("EP_GIN_TIMEOUT_S", 1, 3600, &timeout_s, error);
    if (status == EP_OK)
        status = read_number("EP_GIN_SILENCE_S", 1, 3600, &silence_s, error);
    if (status == EP_OK)
        status = read_number("EP_GIN_SPIN_US", 0, 1000000, &spin_us, error);
    if (status != EP_OK)
        return status;
    settings->connections = (uint32_t)connections;
    settings->movers = (uint32_t)movers;
    settings->piece_bytes = (uint32_t)(piece_kib * KIB);
    settings->staging_bytes = staging_mib * MIB;
    settings->timeout_ns = timeout_s * EP_NS_PER_S;
    settings->silence_ms = (uint32_t)(silence_s * 1000);
    settings->spin_ns = spin_us * EP_NS_PER_US;
    return EP_OK;
}

ep_status ep_gin_settings_read(struct ep_gin_settings *settings, struct ep_error *error)
{
    ep_status status = read_transport(&settings->transport, error);

    if (status == EP_OK)
        status = read_interfaces(settings, error);
    if (status == EP_OK)
        status = read_family(&settings->family, error);
    if (status == EP_OK)
        status = read_numbers(settings, error);
    return status;
}
