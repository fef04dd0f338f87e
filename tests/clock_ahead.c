/* Lets a process have another clock: the variable CLOCK_AHEAD_SEC says by how many seconds it is ahead. The variable may
   be set after a fork, so it is read until it exists. Monotonic clocks stay as they are. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>

static long ahead(void) {
    static long seconds = 0;
    static int known = 0;
    if (!known) {
        const char *given = getenv("CLOCK_AHEAD_SEC");
        if (given) {
            seconds = atol(given);
            known = 1;
        }
    }
    return seconds;
}

int clock_gettime(clockid_t clock, struct timespec *found) {
    static int (*real)(clockid_t, struct timespec *) = 0;
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int failed = real(clock, found);
    if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE) found->tv_sec += ahead();
    return failed;
}

int gettimeofday(struct timeval *found, void *zone) {
    struct timespec now;
    int failed = clock_gettime(CLOCK_REALTIME, &now);
    (void)zone;
    found->tv_sec = now.tv_sec;
    found->tv_usec = now.tv_nsec / 1000;
    return failed;
}

time_t time(time_t *found) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (found) *found = now.tv_sec;
    return now.tv_sec;
}
