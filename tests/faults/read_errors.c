// Makes reads of checkpoints fail with EIO, in Python and in TensorStore: for LD_PRELOAD.
//
// "Reads" are those of a file's content or status, of a directory's entries, and opening a file for
// reading. A read of a file in TAIBAI_FAULTS_UNREADABLE/<step>/ fails if <step> is TAIBAI_FAULTS_STEP, or
// any number without this variable. Reads fail for TAIBAI_FAULTS_SECONDS after the first failure of
// the process; only in process TAIBAI_FAULTS_PROCESS of a run with several. The file
// TAIBAI_FAULTS_MARKER is created when a read fails.

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
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

static int is_in_checkpoint(const char *path) {
  const char *directory = getenv("TAIBAI_FAULTS_UNREADABLE");
  if (strncmp(path, directory, strlen(directory))) return 0;
  const char *step = path + strlen(directory);
  if (*step++ != '/') return 0;
  size_t digits = strspn(step, "0123456789");  // a save writes into a directory of another name
  return digits && step[digits] == '/' && is_equal_or_absent("TAIBAI_FAULTS_STEP", step, digits);
}

static int fails_at(const char *path) {
  static double begin_s = 0;
  const char *process = getenv("TAIBAI_PROCESS_ID");
  if (!getenv("TAIBAI_FAULTS_UNREADABLE") || !is_in_checkpoint(path)) return 0;
  if (process && !is_equal_or_absent("TAIBAI_FAULTS_PROCESS", process, strlen(process))) return 0;
  if (!begin_s) begin_s = now_s();
  if (now_s() - begin_s > atof(getenv("TAIBAI_FAULTS_SECONDS"))) return 0;
  close(open(getenv("TAIBAI_FAULTS_MARKER"), O_WRONLY | O_CREAT, 0600));
  errno = EIO;
  return 1;
}

static int fails(int file) {
  char link[32], path[4096];
  int before = errno;
  snprintf(link, sizeof link, "/proc/self/fd/%d", file);
  ssize_t length = readlink(link, path, sizeof path - 2);
  errno = before;
  if (length < 0) return 0;
  path[length] = '/';  // the file may be the directory of a step
  path[length + 1] = 0;
  return fails_at(path);
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

#define STATUS(name, type)                                                    \
  int name(const char *path, struct type *status) {                           \
    if (fails_at(path)) return -1;                                            \
    return (int)NEXT(name, const char *, struct type *)(path, status);        \
  }

STATUS(stat, stat)
STATUS(lstat, stat)
STATUS(stat64, stat64)
STATUS(lstat64, stat64)

struct dirent *readdir(DIR *directory) {
  if (fails(dirfd(directory))) return NULL;
  return ((struct dirent * (*)(DIR *)) dlsym(RTLD_NEXT, "readdir"))(directory);
}

struct dirent64 *readdir64(DIR *directory) {
  if (fails(dirfd(directory))) return NULL;
  return ((struct dirent64 * (*)(DIR *)) dlsym(RTLD_NEXT, "readdir64"))(directory);
}

static int open_with(const char *name, const char *path, int flags, int mode) {
  if ((flags & O_ACCMODE) == O_RDONLY && fails_at(path)) return -1;
  return ((int (*)(const char *, int, int))dlsym(RTLD_NEXT, name))(path, flags, mode);
}

#define OPEN(name)                              \
  int name(const char *path, int flags, ...) {  \
    va_list rest;                               \
    va_start(rest, flags);                      \
    int mode = va_arg(rest, int);               \
    va_end(rest);                               \
    return open_with(#name, path, flags, mode); \
  }

OPEN(open)
OPEN(open64)
