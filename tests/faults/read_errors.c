// Makes reads of checkpoints fail with EIO, in Python and in TensorStore: for LD_PRELOAD.
//
// A read of a file in TAIBAI_FAULTS_UNREADABLE/<step>/ fails if <step> is TAIBAI_FAULTS_STEP, or
// any number without this variable. Reads fail for TAIBAI_FAULTS_SECONDS after the first failure of
// the process; only in process TAIBAI_FAULTS_PROCESS of a run with several. The file
// TAIBAI_FAULTS_MARKER is created when a read fails.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

static double now_s(void) {
  struct timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return now.tv_sec + 1e-9 * now.tv_nsec;
}

static int is_equal_or_absent(const char *variable, const char *text, size_t length) {
  const char *value = getenv(variable);
  return !value || (strlen(value) == length && !strncmp(value, text, length));
}

static int is_in_checkpoint(int file) {
  const char *directory = getenv("TAIBAI_FAULTS_UNREADABLE");
  char link[32], path[4096];
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  ssize_t length = readlink(link, path, sizeof path - 1);
  if (length < 0 || strncmp(path, directory, strlen(directory))) return 0;
  path[length] = 0;
  const char *step = path + strlen(directory);
  if (*step++ != '/') return 0;
  size_t digits = strspn(step, "0123456789");  // a save writes into a directory of another name
  return digits && step[digits] == '/' && is_equal_or_absent("TAIBAI_FAULTS_STEP", step, digits);
}

static int fails(int file) {
  static double begin_s = 0;
  const char *process = getenv("TAIBAI_PROCESS_ID");
  if (!getenv("TAIBAI_FAULTS_UNREADABLE")) return 0;
  if (process && !is_equal_or_absent("TAIBAI_FAULTS_PROCESS", process, strlen(process))) return 0;
  int before = errno;
  int is_hit = is_in_checkpoint(file);
  errno = before;
  if (!is_hit) return 0;
  if (!begin_s) begin_s = now_s();
  if (now_s() - begin_s > atof(getenv("TAIBAI_FAULTS_SECONDS"))) return 0;
  close(open(getenv("TAIBAI_FAULTS_MARKER"), O_WRONLY | O_CREAT, 0600));
  errno = EIO;
  return 1;
}

#define NEXT(name, ...) ((ssize_t (*)(__VA_ARGS__))dlsym(RTLD_NEXT, #name))

ssize_t read(int file, void *data, size_t size) {
  return fails(file) ? -1 : NEXT(read, int, void *, size_t)(file, data, size);
}

ssize_t pread(int file, void *data, size_t size, off_t at) {
  return fails(file) ? -1 : NEXT(pread, int, void *, size_t, off_t)(file, data, size, at);
}

ssize_t pread64(int file, void *data, size_t size, off64_t at) {
  return fails(file) ? -1 : NEXT(pread64, int, void *, size_t, off64_t)(file, data, size, at);
}

ssize_t readv(int file, const struct iovec *parts, int count) {
  return fails(file) ? -1 : NEXT(readv, int, const struct iovec *, int)(file, parts, count);
}

ssize_t preadv(int file, const struct iovec *parts, int count, off_t at) {
  return fails(file) ? -1
                     : NEXT(preadv, int, const struct iovec *, int, off_t)(file, parts, count, at);
}
