#include "pool.h"

#include <dlfcn.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>

namespace recpoint {
namespace {

struct Pool {
    pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    pthread_cond_t given = PTHREAD_COND_INITIALIZER;  // signals: a job wants helpers
    pthread_cond_t ended = PTHREAD_COND_INITIALIZER;  // signals: no helper works on a job any more
    Job* first = nullptr;
    int64_t threads = 0;
};

Pool* made() {
    Pool* pool = static_cast<Pool*>(malloc(sizeof(Pool)));
    if (pool != nullptr) *pool = Pool{};
    return pool;
}

// Never freed, because threads still wait on it while the process exits.
Pool* pool = made();

// A forked child has none of the threads, and another thread may have held the lock at the fork.
void renew_in_child() { pool = made(); }

const int registered = pthread_atfork(nullptr, nullptr, renew_in_child);

void take_out(Pool& pool, Job& job) {
    for (Job** place = &pool.first; *place != nullptr; place = &(*place)->next) {
        if (*place == &job) {
            *place = job.next;
            return;
        }
    }
}

// How a thread rounds, and whether it takes subnormal numbers for zeros
// (torch.set_flush_denormal). Each thread has a mode of its own; a job is done in the caller's, so
// that the number of threads changes no result.
uint64_t float_mode() {
#if defined(__x86_64__)
    return _mm_getcsr();
#elif defined(__aarch64__)
    uint64_t mode;
    __asm__ volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
#else
    return 0;
#endif
}

void set_float_mode(uint64_t mode) {
#if defined(__x86_64__)
    _mm_setcsr(static_cast<unsigned>(mode));
#elif defined(__aarch64__)
    __asm__ volatile("msr fpcr, %0" : : "r"(mode));
#else
    static_cast<void>(mode);
#endif
}

void* help(void* given) {
    Pool& pool = *static_cast<Pool*>(given);
    pthread_mutex_lock(&pool.lock);
    for (;;) {
        while (pool.first == nullptr) pthread_cond_wait(&pool.given, &pool.lock);
        Job& job = *pool.first;
        if (--job.wanted == 0) pool.first = job.next;
        ++job.running;
        pthread_mutex_unlock(&pool.lock);
        set_float_mode(job.float_mode);
        job.work(&job);
        pthread_mutex_lock(&pool.lock);
        if (--job.running == 0) pthread_cond_broadcast(&pool.ended);
    }
    return nullptr;
}

// The caller holds the lock.
bool add_thread(Pool& pool) {
    pthread_attr_t attributes;
    if (pthread_attr_init(&attributes) != 0) return false;
    pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
    pthread_attr_setstacksize(&attributes, 512 << 10);
    // A thread inherits the signal mask of the thread that creates it. The new thread blocks all
    // signals: a signal that arrived here would not interrupt a sleep in one of Python's threads.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_t thread;
    const bool made = pthread_create(&thread, &attributes, help, &pool) == 0;
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    pthread_attr_destroy(&attributes);
    pool.threads += made;
    return made;
}

}  // namespace

namespace {

// Lets up to `helpers` threads begin the job, or fewer if no more threads can be created.
void offer(Pool& pool, Job& job, int64_t helpers) {
    pthread_mutex_lock(&pool.lock);
    while (pool.threads < helpers && add_thread(pool)) {
    }
    job.next = nullptr;
    job.running = 0;
    job.float_mode = float_mode();
    job.wanted = helpers < pool.threads ? helpers : pool.threads;
    if (job.wanted > 0) {
        Job** last = &pool.first;
        while (*last != nullptr) last = &(*last)->next;
        *last = &job;
        pthread_cond_broadcast(&pool.given);
    }
    pthread_mutex_unlock(&pool.lock);
}

// When this returns, no thread will begin the job, and every thread that began it has finished.
void withdraw(Pool& pool, Job& job) {
    pthread_mutex_lock(&pool.lock);
    if (job.wanted > 0) take_out(pool, job);
    while (job.running > 0) pthread_cond_wait(&pool.ended, &pool.lock);
    pthread_mutex_unlock(&pool.lock);
}

// `GOMP_parallel(function, data, threads, flags)`: GNU's interface. LLVM's library has it too.
using Parallel = void (*)(void (*)(void*), void*, unsigned, unsigned);

bool is_forked = false;  // a forked child has no OpenMP threads, but OpenMP would wait for them

const int noted = pthread_atfork(nullptr, nullptr, [] { is_forked = true; });

Parallel openmp() {
    // Looked up among the loaded libraries: either torch has loaded OpenMP, or there is none.
    static const auto found = reinterpret_cast<Parallel>(dlsym(RTLD_DEFAULT, "GOMP_parallel"));
    return is_forked ? nullptr : found;
}

// The argument with which OpenMP calls each thread of a team.
struct Order {
    Job* job;
    Errand* errand;
    pthread_t leader;
};

void follow(void* given) {
    const Order& order = *static_cast<Order*>(given);
    // OpenMP's thread numbers are not used: if a process has two OpenMPs, the wrong one may answer.
    if (order.errand != nullptr && pthread_equal(pthread_self(), order.leader)) {
        order.errand->run(order.errand);
    }
    const uint64_t own = float_mode();
    set_float_mode(order.job->float_mode);
    order.job->work(order.job);
    set_float_mode(own);
}

}  // namespace

void run_in_pool(Job& job, int64_t threads) {
    Pool* const shared = threads > 1 ? pool : nullptr;
    if (shared != nullptr) offer(*shared, job, threads - 1);
    job.work(&job);
    if (shared != nullptr) withdraw(*shared, job);
}

void run_beside_torch(Job& job, int64_t threads, Errand* errand) {
    if (const Parallel parallel = openmp(); parallel != nullptr && threads > 1) {
        job.float_mode = float_mode();
        Order order = {&job, errand, pthread_self()};
        parallel(follow, &order, static_cast<unsigned>(threads), 0);
        return;
    }
    if (errand != nullptr) errand->run(errand);
    run_in_pool(job, threads);
}

}  // namespace recpoint
