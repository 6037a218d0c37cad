#include "ep_secret.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <unistd.h>

/* Until the line has ended, or is too long.  Short reads are what pipes give. */
static ssize_t read_line(int fd, char *out, size_t size)
{
    size_t used = 0;
    ssize_t n = 1;

    while (n > 0 && used < size && !memchr(out, '\n', used)) {
        n = read(fd, out + used, size - used);
        if (n < 0 && errno == EINTR)
            n = 1;
        else if (n > 0)
            used += (size_t)n;
    }
    return n < 0 ? n : (ssize_t)used;
}

/* Its length; 0: it is no such line. */
static size_t end_line(char *line, size_t n, size_t most)
{
    const char *end = memchr(line, '\n', n);

    if (end)
        n = (size_t)(end - line);
    while (n && line[n - 1] == '\r')
        n--;
    return n > most || memchr(line, '\0', n) ? 0 : n;
}

ep_status ep_secret_read(const char *path, char *out, size_t size, struct ep_error *error)
{
    char line[4096];
    /* room for the "\r\n" of a line that is as long as it may be */
    const size_t room = size + 1 < sizeof line ? size + 1 : sizeof line;
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    size_t length;
    ssize_t n;

    memset(out, 0, size);
    if (fd < 0)
        return ep_error_errno(error, EP_INVALID_ARGUMENT, "cannot read %s", path);
    n = read_line(fd, line, room);
    if (n < 0)
        ep_error_errno(error, EP_INVALID_ARGUMENT, "cannot read %s", path);
    close(fd);
    if (n < 0)
        return EP_INVALID_ARGUMENT;
    length = end_line(line, (size_t)n, size - 1);
    memcpy(out, line, length);
    explicit_bzero(line, sizeof line);
    if (!length)
        return ep_error_set(error, EP_INVALID_ARGUMENT, "the first line of %s must have 1 to %zu bytes of text", path,
                            size - 1);
    return EP_OK;
}
