// Preloaded (LD_PRELOAD): counts a process's calls on files below a folder, and makes the k-th of a kind fail, come
// back short, or be the one before which the process is killed or the power goes. What is to be done stands in a page that is shared
// with the processes that are forked later; tests/faults/shim.py has its layout, too.
//
// What goes through libc is seen. Memory that is mapped, close() and what the kernel copies by itself are not.

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/file.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

enum kind { OPEN, OPENDIR, READDIR, STAT, READ, WRITE, FSYNC, RENAME, UNLINK, MKDIR, LINK, TRUNCATE, LOCK };
// In the place of a kind: any call after which the disk may be another one.
enum { CHANGES = 100 };
// In the place of an errno.
enum { SHORT = -1, KILL = -2, TORN = -3, CUT = -4 };
enum fate { GO_ON, FAIL, SHORTEN, TEAR };

#define CALLS (1 << 15)
#define PATH 240

struct page {
  char folder[PATH];
  int kind, at, action;
  atomic_int counted, calls;
  int hit;  // The number of the call that was met, from 1; 0: none has been.
  struct {
    int kind, changes;
    char path[PATH];
  } call[CALLS];
};

static struct page *page;
// Of this process: the one that says what is to be done is left alone.
static int watched;

__attribute__((constructor)) static void make_page(void) {
  page = mmap(NULL, sizeof *page, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
}

struct page *faults_page(void) { return page; }

void faults_watch(void) { watched = 1; }

// The file system's way to end as when the power goes: nothing more is written, not even its journal.
#define SHUT_DOWN _IOR('X', 125, unsigned)
static const unsigned without_journal = 2;

static void die(void) {
  if (page->action == CUT) {
    watched = 0;
    int fd = open(page->folder, O_RDONLY | O_DIRECTORY);
    if (fd < 0 || ioctl(fd, SHUT_DOWN, &without_journal)) perror("the power cannot be cut");
  }
  kill(getpid(), SIGKILL);
  for (;;) pause();
}

static enum fate meet(enum kind kind, int changes, const char *path) {
  if (!watched || path == NULL) return GO_ON;
  size_t length = strlen(page->folder);
  if (strncmp(path, page->folder, length) || (path[length] && path[length] != '/')) return GO_ON;
  int call = atomic_fetch_add(&page->calls, 1);
  if (call < CALLS) {
    page->call[call].kind = kind;
    page->call[call].changes = changes;
    snprintf(page->call[call].path, PATH, "%s", path + length);
  }
  if (page->kind != (int)kind && !(page->kind == CHANGES && changes)) return GO_ON;
  if (atomic_fetch_add(&page->counted, 1) + 1 != page->at) return GO_ON;
  page->hit = call + 1;
  if (page->action == SHORT) return SHORTEN;
  if (page->action == TORN && kind == WRITE) return TEAR;
  if (page->action < 0) die();
  errno = page->action;
  return FAIL;
}

static const char *at_path(int fd, const char *name, char *path) {
  if (name != NULL && name[0] == '/') return name;
  // Work directories are given as absolute paths.
  if (fd == AT_FDCWD) return NULL;
  int before = errno;
  char link[64];
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t length = readlink(link, path, PATH_MAX - 1);
  errno = before;
  if (length < 0) return NULL;
  if (name != NULL && name[0]) {
    length += snprintf(path + length, PATH_MAX - length, "/%s", name);
  }
  path[length < PATH_MAX ? length : PATH_MAX - 1] = 0;
  return path;
}

static enum fate meet_at(enum kind kind, int changes, int fd, const char *name) {
  char path[PATH_MAX];
  return watched ? meet(kind, changes, at_path(fd, name, path)) : GO_ON;
}

static enum fate meet_fd(enum kind kind, int changes, int fd) {
  // Streams are not the run's files.
  return fd > 2 ? meet_at(kind, changes, fd, NULL) : GO_ON;
}

#define REAL(type, name, ...)                      \
  static type (*real)(__VA_ARGS__);                \
  if (real == NULL) real = dlsym(RTLD_NEXT, #name)

// A call that may fail, and else does what it does.
#define CALL(type, failed, name, parameters, arguments, fate) \
  type name parameters {                                      \
    static type(*real) parameters;                            \
    if (real == NULL) real = dlsym(RTLD_NEXT, #name);         \
    if ((fate) == FAIL) return failed;                        \
    return real arguments;                                    \
  }

static mode_t mode_of(int flags, va_list more) {
  return flags & (O_CREAT | O_TMPFILE) ? va_arg(more, mode_t) : 0;
}

#define MAKES(flags) (((flags) & (O_CREAT | O_TRUNC)) != 0)

#define OPEN_CALL(name)                                                              \
  int name(const char *path, int flags, ...) {                                       \
    REAL(int, name, const char *, int, ...);                                         \
    va_list more;                                                                    \
    va_start(more, flags);                                                           \
    mode_t mode = mode_of(flags, more);                                              \
    va_end(more);                                                                    \
    if (meet_at(OPEN, MAKES(flags), AT_FDCWD, path) == FAIL) return -1;              \
    return real(path, flags, mode);                                                  \
  }
#define OPENAT_CALL(name)                                                            \
  int name(int fd, const char *path, int flags, ...) {                               \
    REAL(int, name, int, const char *, int, ...);                                    \
    va_list more;                                                                    \
    va_start(more, flags);                                                           \
    mode_t mode = mode_of(flags, more);                                              \
    va_end(more);                                                                    \
    if (meet_at(OPEN, MAKES(flags), fd, path) == FAIL) return -1;                    \
    return real(fd, path, flags, mode);                                              \
  }
OPEN_CALL(open)
OPEN_CALL(open64)
OPENAT_CALL(openat)
OPENAT_CALL(openat64)
#define PATH_CALL(name, kind, changes) \
  CALL(int, -1, name, (const char *path), (path), meet_at(kind, changes, AT_FDCWD, path))
#define FD_CALL(name, kind, changes) CALL(int, -1, name, (int fd), (fd), meet_fd(kind, changes, fd))
CALL(int, -1, creat, (const char *path, mode_t mode), (path, mode), meet_at(OPEN, 1, AT_FDCWD, path))
CALL(FILE *, NULL, fopen, (const char *path, const char *mode), (path, mode),
     meet_at(OPEN, mode[0] != 'r', AT_FDCWD, path))
CALL(FILE *, NULL, fopen64, (const char *path, const char *mode), (path, mode),
     meet_at(OPEN, mode[0] != 'r', AT_FDCWD, path))

CALL(DIR *, NULL, opendir, (const char *path), (path), meet_at(OPENDIR, 0, AT_FDCWD, path))
CALL(DIR *, NULL, fdopendir, (int fd), (fd), meet_fd(OPENDIR, 0, fd))
CALL(struct dirent *, NULL, readdir, (DIR *dir), (dir), meet_fd(READDIR, 0, dirfd(dir)))
CALL(struct dirent64 *, NULL, readdir64, (DIR *dir), (dir), meet_fd(READDIR, 0, dirfd(dir)))

#define STAT_CALLS(structure, stat_name, lstat_name, fstat_name, fstatat_name)                                 \
  CALL(int, -1, stat_name, (const char *path, struct structure *out), (path, out),                             \
       meet_at(STAT, 0, AT_FDCWD, path))                                                                       \
  CALL(int, -1, lstat_name, (const char *path, struct structure *out), (path, out),                            \
       meet_at(STAT, 0, AT_FDCWD, path))                                                                       \
  CALL(int, -1, fstat_name, (int fd, struct structure *out), (fd, out), meet_fd(STAT, 0, fd))                  \
  CALL(int, -1, fstatat_name, (int fd, const char *path, struct structure *out, int flags),                    \
       (fd, path, out, flags), meet_at(STAT, 0, fd, path))
STAT_CALLS(stat, stat, lstat, fstat, fstatat)
STAT_CALLS(stat64, stat64, lstat64, fstat64, fstatat64)
// What programs call that were linked with a C library before 2.33.
#define XSTAT_CALLS(structure, stat_name, lstat_name, fstat_name, fstatat_name)                                \
  CALL(int, -1, stat_name, (int version, const char *path, struct structure *out), (version, path, out),       \
       meet_at(STAT, 0, AT_FDCWD, path))                                                                       \
  CALL(int, -1, lstat_name, (int version, const char *path, struct structure *out), (version, path, out),      \
       meet_at(STAT, 0, AT_FDCWD, path))                                                                       \
  CALL(int, -1, fstat_name, (int version, int fd, struct structure *out), (version, fd, out),                  \
       meet_fd(STAT, 0, fd))                                                                                   \
  CALL(int, -1, fstatat_name, (int version, int fd, const char *path, struct structure *out, int flags),       \
       (version, fd, path, out, flags), meet_at(STAT, 0, fd, path))
XSTAT_CALLS(stat, __xstat, __lxstat, __fxstat, __fxstatat)
XSTAT_CALLS(stat64, __xstat64, __lxstat64, __fxstat64, __fxstatat64)
CALL(int, -1, statx, (int fd, const char *path, int flags, unsigned mask, struct statx *out),
     (fd, path, flags, mask, out), meet_at(STAT, 0, fd, path))
CALL(int, -1, access, (const char *path, int mode), (path, mode), meet_at(STAT, 0, AT_FDCWD, path))
CALL(int, -1, faccessat, (int fd, const char *path, int mode, int flags), (fd, path, mode, flags),
     meet_at(STAT, 0, fd, path))

#define HALF(count) ((count) > 1 ? (count) / 2 : (count))

// A call that moves bytes: half of them, if it is to come back short.
#define READ_CALL(name, parameters, arguments)        \
  ssize_t name parameters {                           \
    static ssize_t(*real) parameters;                 \
    if (real == NULL) real = dlsym(RTLD_NEXT, #name); \
    enum fate fate = meet_fd(READ, 0, fd);            \
    if (fate == FAIL) return -1;                      \
    if (fate == SHORTEN) count = HALF(count);         \
    return real arguments;                            \
  }
#define WRITE_CALL(name, parameters, arguments)                 \
  ssize_t name parameters {                                     \
    static ssize_t(*real) parameters;                           \
    if (real == NULL) real = dlsym(RTLD_NEXT, #name);           \
    enum fate fate = meet_fd(WRITE, 1, fd);                     \
    if (fate == FAIL) return -1;                                \
    if (fate == SHORTEN || fate == TEAR) count = HALF(count);   \
    ssize_t done = real arguments;                              \
    if (fate == TEAR) die();                                    \
    return done;                                                \
  }
READ_CALL(read, (int fd, void *bytes, size_t count), (fd, bytes, count))
READ_CALL(__read_chk, (int fd, void *bytes, size_t count, size_t room), (fd, bytes, count, room))
READ_CALL(pread, (int fd, void *bytes, size_t count, off_t at), (fd, bytes, count, at))
READ_CALL(pread64, (int fd, void *bytes, size_t count, off64_t at), (fd, bytes, count, at))
READ_CALL(readv, (int fd, const struct iovec *parts, int count), (fd, parts, count))
READ_CALL(preadv, (int fd, const struct iovec *parts, int count, off_t at), (fd, parts, count, at))
WRITE_CALL(write, (int fd, const void *bytes, size_t count), (fd, bytes, count))
WRITE_CALL(pwrite, (int fd, const void *bytes, size_t count, off_t at), (fd, bytes, count, at))
WRITE_CALL(pwrite64, (int fd, const void *bytes, size_t count, off64_t at), (fd, bytes, count, at))

// Of a list of parts half of the first one: with one part, half of the parts would be all of them.
ssize_t writev(int fd, const struct iovec *parts, int count) {
  REAL(ssize_t, writev, int, const struct iovec *, int);
  enum fate fate = meet_fd(WRITE, 1, fd);
  if (fate == FAIL) return -1;
  if (fate == GO_ON || count == 0) return real(fd, parts, count);
  struct iovec first = {parts[0].iov_base, HALF(parts[0].iov_len)};
  ssize_t done = real(fd, &first, 1);
  if (fate == TEAR) die();
  return done;
}

FD_CALL(fsync, FSYNC, 1)
FD_CALL(fdatasync, FSYNC, 1)
CALL(int, -1, rename, (const char *from, const char *to), (from, to), meet_at(RENAME, 1, AT_FDCWD, to))
CALL(int, -1, renameat, (int from_fd, const char *from, int to_fd, const char *to), (from_fd, from, to_fd, to),
     meet_at(RENAME, 1, to_fd, to))
CALL(int, -1, renameat2, (int from_fd, const char *from, int to_fd, const char *to, unsigned flags),
     (from_fd, from, to_fd, to, flags), meet_at(RENAME, 1, to_fd, to))
PATH_CALL(unlink, UNLINK, 1)
PATH_CALL(rmdir, UNLINK, 1)
CALL(int, -1, unlinkat, (int fd, const char *path, int flags), (fd, path, flags), meet_at(UNLINK, 1, fd, path))
CALL(int, -1, mkdir, (const char *path, mode_t mode), (path, mode), meet_at(MKDIR, 1, AT_FDCWD, path))
CALL(int, -1, mkdirat, (int fd, const char *path, mode_t mode), (fd, path, mode), meet_at(MKDIR, 1, fd, path))
CALL(int, -1, link, (const char *from, const char *to), (from, to), meet_at(LINK, 1, AT_FDCWD, to))
CALL(int, -1, linkat, (int from_fd, const char *from, int fd, const char *to, int flags),
     (from_fd, from, fd, to, flags), meet_at(LINK, 1, fd, to))
CALL(int, -1, symlink, (const char *target, const char *path), (target, path), meet_at(LINK, 1, AT_FDCWD, path))
CALL(int, -1, symlinkat, (const char *target, int fd, const char *path), (target, fd, path),
     meet_at(LINK, 1, fd, path))
CALL(int, -1, truncate, (const char *path, off_t size), (path, size), meet_at(TRUNCATE, 1, AT_FDCWD, path))
CALL(int, -1, truncate64, (const char *path, off64_t size), (path, size), meet_at(TRUNCATE, 1, AT_FDCWD, path))
CALL(int, -1, ftruncate, (int fd, off_t size), (fd, size), meet_fd(TRUNCATE, 1, fd))
CALL(int, -1, ftruncate64, (int fd, off64_t size), (fd, size), meet_fd(TRUNCATE, 1, fd))
CALL(int, -1, flock, (int fd, int operation), (fd, operation), meet_fd(LOCK, 0, fd))

static int locks(int command) {
  return command == F_SETLK || command == F_SETLKW || command == F_OFD_SETLK || command == F_OFD_SETLKW;
}

#define FCNTL_CALL(name)                                                    \
  int name(int fd, int command, ...) {                                      \
    REAL(int, name, int, int, ...);                                         \
    va_list more;                                                           \
    va_start(more, command);                                                \
    void *argument = va_arg(more, void *);                                  \
    va_end(more);                                                           \
    if (locks(command) && meet_fd(LOCK, 0, fd) == FAIL) return -1;          \
    return real(fd, command, argument);                                     \
  }
FCNTL_CALL(fcntl)
FCNTL_CALL(fcntl64)
