// The threads that share the work of an operation.
#pragma once

#include <cstdint>

namespace recpoint {

// Work that any number of threads do together. Each call of `work` takes one piece after the other.
// The job is done when all calls that have begun have returned.
struct Job {
    void (*work)(Job*);

    // Set and used by the pool.
    Job* next;
    int64_t wanted;
    int64_t running;
    uint64_t float_mode;
};

// What the calling thread does before it takes part in a job.
struct Errand {
    void (*run)(Errand*);
};

// Runs the job on up to `threads` threads: the calling thread and threads of our own pool. Does not
// wait for a thread that found no free core in time.
void run_in_pool(Job& job, int64_t threads);

// Runs the job on up to `threads` threads of torch's OpenMP. The calling thread runs the errand
// first, while the other threads work. In a forked child, or if the process has no OpenMP, the pool
// runs the job after the errand.
//
// After each operation of torch, its threads look for work for some milliseconds and keep the
// cores. So in a training process only these threads start at once. But OpenMP keeps a team of
// threads for each calling thread. So only the training thread and the thread that quantizes should
// call this.
void run_beside_torch(Job& job, int64_t threads, Errand* errand = nullptr);

}  // namespace recpoint
