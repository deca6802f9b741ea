/* The wall clock of programs on a host whose clock is wrong, for LD_PRELOAD: real time and CLOCK_SHIFT_S seconds.
 * Monotonic clocks, and what the kernel itself compares with a clock, stay as they are. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>

static time_t shift_s(void) {
  static time_t shift = 0;
  static int is_known = 0;
  if (!is_known) {
    const char *text = getenv("CLOCK_SHIFT_S");
    shift = text ? (time_t)atol(text) : 0;
    is_known = 1;
  }
  return shift;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
  static int (*real)(clockid_t, struct timespec *) = NULL;
  if (!real) real = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
  int result = real(clock, now);
  if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) now->tv_sec += shift_s();
  return result;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  (void)zone;
  struct timespec found;
  int result = clock_gettime(CLOCK_REALTIME, &found);
  if (result == 0 && now) {
    now->tv_sec = found.tv_sec;
    now->tv_usec = found.tv_nsec / 1000;
  }
  return result;
}

time_t time(time_t *copy) {
  struct timespec found;
  clock_gettime(CLOCK_REALTIME, &found);
  if (copy) *copy = found.tv_sec;
  return found.tv_sec;
}
