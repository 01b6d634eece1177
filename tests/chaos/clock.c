/* Adds the seconds in the file $CLOCK_SHIFT to the time of day that a process asks for, and leaves every other clock
 * alone. libfaketime shifts what sleeps wait for as well: with its monotonic clock left alone, Python's sleep ends with
 * EINVAL (wolfcw/libfaketime#426), with it shifted, waits for locks never end. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *shift;

__attribute__((constructor)) static void open_shift(void) {
  const char *name = getenv("CLOCK_SHIFT");
  int file = name ? open(name, O_RDONLY | O_CLOEXEC) : -1;
  if (file < 0) return;
  void *mapped = mmap(0, sizeof *shift, PROT_READ, MAP_SHARED, file, 0);
  close(file);
  if (mapped != MAP_FAILED) shift = mapped;
}

int clock_gettime(clockid_t clock, struct timespec *time) {
  static int (*given)(clockid_t, struct timespec *);
  if (!given) given = dlsym(RTLD_NEXT, "clock_gettime");
  int answer = given(clock, time);
  if (!answer && shift && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) time->tv_sec += *shift;
  return answer;
}

int gettimeofday(struct timeval *time, void *zone) {
  struct timespec now;
  int answer = clock_gettime(CLOCK_REALTIME, &now);
  (void)zone;
  if (!answer) time->tv_sec = now.tv_sec, time->tv_usec = now.tv_nsec / 1000;
  return answer;
}

time_t time(time_t *place) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (place) *place = now.tv_sec;
  return now.tv_sec;
}
