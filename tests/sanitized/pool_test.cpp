// Uses the pool from several threads at once, and in a forked child. Exits with 0 if every piece of
// every job was done once and the caller saw all results after `join`.
#include "../../kernels/native/pool.h"

#include <pthread.h>
#include <stdio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <vector>

namespace {

constexpr int64_t PIECES = 200;
constexpr int ROUNDS = 300;
constexpr int CALLERS = 4;

struct Counting : recpoint::Job {
    std::vector<int64_t> done = std::vector<int64_t>(PIECES);  // one thread writes each element
    int64_t turn = 0;
};

bool run_job(int64_t threads, bool is_beside_torch) {
    Counting job{};
    job.work = [](recpoint::Job* given) {
        auto& job = *static_cast<Counting*>(given);
        for (int64_t k; (k = __atomic_fetch_add(&job.turn, 1, __ATOMIC_RELAXED)) < PIECES;) {
            ++job.done[k];
        }
    };
    is_beside_torch ? recpoint::run_beside_torch(job, threads) : recpoint::run_in_pool(job, threads);
    for (int64_t count : job.done) {
        if (count != 1) return false;
    }
    return true;
}

void* run_rounds(void* right) {
    for (int round = 0; round < ROUNDS; ++round) {
        if (!run_job(1 + round % 6, round % 7 == 0)) __atomic_store_n(static_cast<int*>(right), 0, 5);
    }
    return nullptr;
}

}  // namespace

int main() {
    int right = 1;
    pthread_t callers[CALLERS];
    for (pthread_t& caller : callers) pthread_create(&caller, nullptr, run_rounds, &right);
    for (pthread_t& caller : callers) pthread_join(caller, nullptr);
    // At the fork, threads of the pool may still be on their way back to sleep.
    const pid_t child = fork();
    if (child == 0) _exit(run_job(4, false) && run_job(4, true) ? 0 : 1);
    int status = 0;
    waitpid(child, &status, 0);
    printf("%s\n", right && status == 0 ? "right" : "wrong");
    return right && status == 0 ? 0 : 1;
}
