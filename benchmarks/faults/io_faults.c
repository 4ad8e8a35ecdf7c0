/* Preloaded into the processes of the benchmark `faults`: counts what they do to files below one
 * directory, and strikes at the n-th of these operations. It can also set the clock of a process.
 *
 * An operation is a call that changes or reads a file, just before it happens: so a kill at
 * operation n leaves exactly n - 1 operations done. `io_faults.py` arms it.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

/* What happens at the n-th operation. */
enum { COUNT = 0, KILL_GROUP = 1, KILL_SELF = 2, STOP = 3, FAIL = 4 };
/* Which operations count. */
enum { CHANGES = 1, READS = 2, DATA = 4 };

static char prefix[4096];
static size_t prefix_length;
static volatile int mode = -1, kinds, failing;
static volatile long at, done;
static volatile long long clock_offset_s;

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

void io_faults_arm(int new_mode, long new_at, int new_kinds, int new_errno, const char *below) {
    snprintf(prefix, sizeof prefix, "%s", below);
    prefix_length = strlen(prefix);
    kinds = new_kinds, failing = new_errno, at = new_at, done = 0;
    mode = new_mode;
}

long io_faults_done(void) { return done; }

void io_faults_clock(long long offset_s) { clock_offset_s = offset_s; }

/* A process that is started by an armed one is armed by its environment. */
__attribute__((constructor)) static void begin(void) {
    const char *given = getenv("RECPOINT_IO_FAULT");
    if (given == NULL) return;
    int new_mode, new_kinds, new_errno, used = 0;
    long new_at;
    long long offset_s;
    if (sscanf(given, "%d:%ld:%d:%d:%lld:%n", &new_mode, &new_at, &new_kinds, &new_errno, &offset_s,
               &used) < 5)
        return;
    clock_offset_s = offset_s;
    if (given[used] != 0) io_faults_arm(new_mode, new_at, new_kinds, new_errno, given + used);
}

/* Returns whether the operation is to fail. */
static int strike(int kind) {
    if (!(kind & kinds)) return 0;
    if (__sync_add_and_fetch(&done, 1) != at) return 0;
    if (mode == KILL_GROUP) kill(0, SIGKILL);
    if (mode == KILL_SELF) kill(getpid(), SIGKILL);
    if (mode == STOP) kill(getpid(), SIGSTOP);
    if (mode == FAIL) {
        errno = failing;
        return 1;
    }
    return 0;
}

static int on_path(int directory, const char *path, int kind) {
    char whole[4096];
    if (mode < 0 || path == NULL) return 0;
    if (path[0] != '/') {
        char link[64];
        if (directory == AT_FDCWD) {
            if (getcwd(whole, sizeof whole) == NULL) return 0;
        } else {
            snprintf(link, sizeof link, "/proc/self/fd/%d", directory);
            ssize_t n = readlink(link, whole, sizeof whole - 1);
            if (n <= 0) return 0;
            whole[n] = 0;
        }
        size_t n = strlen(whole);
        snprintf(whole + n, sizeof whole - n, "/%s", path);
        path = whole;
    }
    return strncmp(path, prefix, prefix_length) == 0 && strike(kind);
}

static int on_fd(int fd, int kind) {
    char link[64], whole[4096];
    if (mode < 0 || !(kind & kinds)) return 0;
    int before = errno;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, whole, sizeof whole - 1);
    errno = before;
    if (n <= 0) return 0;
    whole[n] = 0;
    return strncmp(whole, prefix, prefix_length) == 0 && strike(kind);
}

static int opening(int flags) {
    return (flags & O_CREAT) || (flags & O_ACCMODE) != O_RDONLY ? CHANGES : READS;
}

#define OPEN(name, directory, ...)                                                      \
    mode_t rights = 0;                                                                  \
    if (flags & (O_CREAT | __O_TMPFILE)) {                                              \
        va_list more;                                                                   \
        va_start(more, flags);                                                          \
        rights = va_arg(more, mode_t);                                                  \
        va_end(more);                                                                   \
    }                                                                                   \
    if (on_path(directory, path, opening(flags))) return -1;                            \
    return REAL(name)(__VA_ARGS__, flags, rights)

int open(const char *path, int flags, ...) { OPEN(open, AT_FDCWD, path); }
int open64(const char *path, int flags, ...) { OPEN(open64, AT_FDCWD, path); }
int openat(int in, const char *path, int flags, ...) { OPEN(openat, in, in, path); }
int openat64(int in, const char *path, int flags, ...) { OPEN(openat64, in, in, path); }

static int opening_stream(const char *how) { return strpbrk(how, "wa+") ? CHANGES : READS; }
FILE *fopen(const char *path, const char *how) {
    if (on_path(AT_FDCWD, path, opening_stream(how))) return NULL;
    return REAL(fopen)(path, how);
}
FILE *fopen64(const char *path, const char *how) {
    if (on_path(AT_FDCWD, path, opening_stream(how))) return NULL;
    return REAL(fopen64)(path, how);
}

#define ON_FD(type, name, kind, parameters, ...)                                        \
    type name parameters {                                                              \
        if (on_fd(fd, kind)) return -1;                                                 \
        return REAL(name)(__VA_ARGS__);                                                 \
    }
#define WRITTEN (CHANGES | DATA)
ON_FD(ssize_t, write, WRITTEN, (int fd, const void *b, size_t n), fd, b, n)
ON_FD(ssize_t, pwrite, WRITTEN, (int fd, const void *b, size_t n, off_t o), fd, b, n, o)
ON_FD(ssize_t, pwrite64, WRITTEN, (int fd, const void *b, size_t n, off64_t o), fd, b, n, o)
ON_FD(ssize_t, writev, WRITTEN, (int fd, const struct iovec *v, int n), fd, v, n)
ON_FD(ssize_t, pwritev, WRITTEN, (int fd, const struct iovec *v, int n, off_t o), fd, v, n, o)
ON_FD(ssize_t, pwritev64, WRITTEN, (int fd, const struct iovec *v, int n, off64_t o), fd, v, n, o)
ON_FD(int, fsync, CHANGES, (int fd), fd)
ON_FD(int, fdatasync, CHANGES, (int fd), fd)
ON_FD(int, ftruncate, CHANGES, (int fd, off_t n), fd, n)
ON_FD(int, ftruncate64, CHANGES, (int fd, off64_t n), fd, n)
ON_FD(ssize_t, read, READS, (int fd, void *b, size_t n), fd, b, n)
ON_FD(ssize_t, pread, READS, (int fd, void *b, size_t n, off_t o), fd, b, n, o)
ON_FD(ssize_t, pread64, READS, (int fd, void *b, size_t n, off64_t o), fd, b, n, o)
ON_FD(ssize_t, readv, READS, (int fd, const struct iovec *v, int n), fd, v, n)

#define ON_PATH(name, directory, path, parameters, ...)                                 \
    int name parameters {                                                               \
        if (on_path(directory, path, CHANGES)) return -1;                               \
        return REAL(name)(__VA_ARGS__);                                                 \
    }
ON_PATH(rename, AT_FDCWD, b, (const char *a, const char *b), a, b)
ON_PATH(renameat, d, b, (int c, const char *a, int d, const char *b), c, a, d, b)
ON_PATH(renameat2, d, b, (int c, const char *a, int d, const char *b, unsigned f), c, a, d, b, f)
ON_PATH(link, AT_FDCWD, b, (const char *a, const char *b), a, b)
ON_PATH(linkat, d, b, (int c, const char *a, int d, const char *b, int f), c, a, d, b, f)
ON_PATH(symlink, AT_FDCWD, b, (const char *a, const char *b), a, b)
ON_PATH(unlink, AT_FDCWD, a, (const char *a), a)
ON_PATH(unlinkat, c, a, (int c, const char *a, int f), c, a, f)
ON_PATH(rmdir, AT_FDCWD, a, (const char *a), a)
ON_PATH(mkdir, AT_FDCWD, a, (const char *a, mode_t m), a, m)
ON_PATH(mkdirat, c, a, (int c, const char *a, mode_t m), c, a, m)
ON_PATH(truncate, AT_FDCWD, a, (const char *a, off_t n), a, n)

int clock_gettime(clockid_t which, struct timespec *now) {
    int code = REAL(clock_gettime)(which, now);
    if (which == CLOCK_REALTIME) now->tv_sec += clock_offset_s;
    return code;
}
int gettimeofday(struct timeval *now, void *zone) {
    int code = REAL(gettimeofday)(now, zone);
    now->tv_sec += clock_offset_s;
    return code;
}
time_t time(time_t *into) {
    time_t now = REAL(time)(NULL) + clock_offset_s;
    if (into != NULL) *into = now;
    return now;
}
