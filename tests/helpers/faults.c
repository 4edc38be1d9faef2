/* Preloaded: lets the n-th call of one kind fail, once, in a thread of this process after `arm_fault`. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <unistd.h>

enum { NONE, OPEN, WRITE, FSYNC, RENAME, MMAP, FORK, THREAD, ALLOCATION };
static const size_t LARGE = 16384; /* smaller allocations are the interpreter's own */
static int kind = NONE;
static long fail_at = 0, calls = 0;

void arm_fault(int which, long number) { calls = 0; fail_at = number; kind = which; }
long count_of_calls(void) { return calls; }
void disarm_faults(void) { kind = NONE; }

static int fails(int which, int reason) {
    if (kind != which) return 0;
    if (__atomic_add_fetch(&calls, 1, __ATOMIC_SEQ_CST) != fail_at) return 0;
    errno = reason;
    return 1;
}

#define NEXT(name) ((__typeof__(&name))next_of(&next_##name, #name))
static void *next_of(void **kept, const char *name) {
    if (!*kept) *kept = dlsym(RTLD_NEXT, name);
    return *kept;
}
#define KEEP(name) static void *next_##name

KEEP(open); KEEP(open64); KEEP(openat); KEEP(write); KEEP(pwrite); KEEP(pwrite64); KEEP(fsync); KEEP(fdatasync);
KEEP(rename); KEEP(renameat); KEEP(mmap); KEEP(mmap64); KEEP(fork); KEEP(pthread_create);

#define MODE(flags) ({ mode_t mode_ = 0; if ((flags) & (O_CREAT | O_TMPFILE)) { va_list rest_; va_start(rest_, flags); \
    mode_ = va_arg(rest_, mode_t); va_end(rest_); } mode_; })

int open(const char *path, int flags, ...) {
    mode_t mode = MODE(flags);
    return fails(OPEN, EMFILE) ? -1 : NEXT(open)(path, flags, mode);
}
int open64(const char *path, int flags, ...) {
    mode_t mode = MODE(flags);
    return fails(OPEN, EMFILE) ? -1 : NEXT(open64)(path, flags, mode);
}
int openat(int folder, const char *path, int flags, ...) {
    mode_t mode = MODE(flags);
    return fails(OPEN, EMFILE) ? -1 : NEXT(openat)(folder, path, flags, mode);
}
ssize_t write(int file, const void *data, size_t size) {
    return file > 2 && fails(WRITE, ENOSPC) ? -1 : NEXT(write)(file, data, size);
}
ssize_t pwrite(int file, const void *data, size_t size, off_t at) {
    return fails(WRITE, ENOSPC) ? -1 : NEXT(pwrite)(file, data, size, at);
}
ssize_t pwrite64(int file, const void *data, size_t size, off64_t at) {
    return fails(WRITE, ENOSPC) ? -1 : NEXT(pwrite64)(file, data, size, at);
}
int fsync(int file) { return fails(FSYNC, EIO) ? -1 : NEXT(fsync)(file); }
int fdatasync(int file) { return fails(FSYNC, EIO) ? -1 : NEXT(fdatasync)(file); }
int rename(const char *from, const char *to) { return fails(RENAME, EIO) ? -1 : NEXT(rename)(from, to); }
int renameat(int a, const char *from, int b, const char *to) {
    return fails(RENAME, EIO) ? -1 : NEXT(renameat)(a, from, b, to);
}
void *mmap(void *at, size_t size, int rights, int flags, int file, off_t offset) {
    return fails(MMAP, ENOMEM) ? MAP_FAILED : NEXT(mmap)(at, size, rights, flags, file, offset);
}
void *mmap64(void *at, size_t size, int rights, int flags, int file, off64_t offset) {
    return fails(MMAP, ENOMEM) ? MAP_FAILED : NEXT(mmap64)(at, size, rights, flags, file, offset);
}
pid_t fork(void) { return fails(FORK, EAGAIN) ? -1 : NEXT(fork)(); }
int pthread_create(pthread_t *thread, const pthread_attr_t *how, void *(*run)(void *), void *value) {
    return fails(THREAD, EAGAIN) ? EAGAIN : NEXT(pthread_create)(thread, how, run, value);
}

/* glibc's own names: asking dlsym for malloc would allocate. */
extern void *__libc_malloc(size_t), *__libc_calloc(size_t, size_t), *__libc_realloc(void *, size_t);
void *malloc(size_t size) { return size >= LARGE && fails(ALLOCATION, ENOMEM) ? NULL : __libc_malloc(size); }
void *calloc(size_t count, size_t size) {
    return count && size >= LARGE / count && fails(ALLOCATION, ENOMEM) ? NULL : __libc_calloc(count, size);
}
void *realloc(void *old, size_t size) {
    return size >= LARGE && fails(ALLOCATION, ENOMEM) ? NULL : __libc_realloc(old, size);
}
