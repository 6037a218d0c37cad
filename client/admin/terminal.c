#include "terminal.h"

#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <termios.h>
#include <unistd.h>

static const char enter_screen[] = "\033[?1049h\033[?25l"; /* other screen, no cursor */
static const char leave_screen[] = "\033[?25h\033[?1049l";

static struct termios before;
static bool is_open;
static volatile sig_atomic_t ended, stopped;

static void on_end(int number)
{
    (void)number;
    ended = 1;
}

static void on_stop(int number)
{
    (void)number;
    stopped = 1;
}

static void enter(void)
{
    struct termios raw = before;

    raw.c_lflag &= ~(tcflag_t)(ICANON | ECHO);
    raw.c_lflag |= NOFLSH; /* Ctrl-C does not throw away half of what is being drawn */
    raw.c_cc[VMIN] = 0;
    raw.c_cc[VTIME] = 0;
    tcsetattr(STDIN_FILENO, TCSADRAIN, &raw);
    fputs(enter_screen, stdout);
    fflush(stdout);
}

static void leave(void)
{
    tcsetattr(STDIN_FILENO, TCSADRAIN, &before); /* first: who sees the screen go back finds the modes as they were */
    fputs(leave_screen, stdout);
    fflush(stdout);
}

/* Writes go on after them, polls do not. */
static void catch_signals(void)
{
    struct sigaction end = { .sa_handler = on_end, .sa_flags = SA_RESTART };
    struct sigaction stop = { .sa_handler = on_stop, .sa_flags = SA_RESTART };
    static const int numbers[] = { SIGINT, SIGTERM, SIGHUP };

    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        sigaction(numbers[i], &end, NULL);
    sigaction(SIGTSTP, &stop, NULL);
}

bool ep_terminal_open(void)
{
    if (!isatty(STDIN_FILENO) || !isatty(STDOUT_FILENO) || tcgetattr(STDIN_FILENO, &before) != 0)
        return false;
    catch_signals();
    enter();
    is_open = true;
    return true;
}

void ep_terminal_close(void)
{
    if (is_open)
        leave();
    is_open = false;
}

bool ep_terminal_ended(void)
{
    return ended != 0;
}

/* Gives the terminal back, stops as Ctrl-Z wants it, and takes it again afterwards. */
static void stop_here(void)
{
    sigset_t set;

    stopped = 0;
    leave();
    signal(SIGTSTP, SIG_DFL);
    raise(SIGTSTP);
    sigemptyset(&set);
    sigaddset(&set, SIGTSTP);
    sigprocmask(SIG_UNBLOCK, &set, NULL);
    catch_signals();
    enter();
}

int ep_terminal_key(int timeout_ms)
{
    struct pollfd in = { .fd = STDIN_FILENO, .events = POLLIN };
    unsigned char key = 0;

    if (stopped)
        stop_here();
    if (poll(&in, 1, timeout_ms) <= 0)
        return 0;
    if (in.revents & (POLLHUP | POLLERR))
        ended = 1;
    return read(STDIN_FILENO, &key, 1) == 1 ? key : 0;
}

void ep_terminal_size(size_t *rows, size_t *columns)
{
    struct winsize size;
    bool known = ioctl(STDOUT_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_row > 0 && size.ws_col > 0;

    *rows = known ? size.ws_row : 24;
    *columns = known ? size.ws_col : 80;
}

void ep_terminal_draw(const char *text)
{
    size_t rows, columns;

    ep_terminal_size(&rows, &columns);
    fputs("\033[H", stdout);
    for (size_t row = 0; row < rows && *text; row++) {
        size_t length = strcspn(text, "\n");

        /* Text within colour sequences is not wider than the table was told to be. */
        fprintf(stdout, "%s%.*s\033[K", row ? "\r\n" : "", (int)length, text);
        text += length + (text[length] == '\n');
    }
    fputs("\033[J", stdout);
    fflush(stdout);
}
