// The threads that operations share their work with.
#pragma once

#include <cstdint>

namespace recpoint {

// Work that any number of threads do together. Each thread that calls `work` takes one piece after
// the other. When the calls that have begun have returned, everything is done.
struct Job {
    void (*work)(Job*) = nullptr;

    // For the pool.
    Job* next = nullptr;
    int64_t wanted = 0;
    int64_t running = 0;
};

// Something that the calling thread does before it takes part in a job.
struct Errand {
    void (*run)(Errand*) = nullptr;
};

// Does the job in up to `threads` threads of our own pool, the calling thread among them. It does not
// wait for a thread that found no free core before the work was done.
void run_in_pool(Job& job, int64_t threads);

// Does the job in up to `threads` threads of torch's OpenMP, or in the pool where there is none. The
// calling thread runs the errand first, while the other threads are at work.
//
// After each operation of torch its threads look for work for some milliseconds, and keep other threads
// from the cores. So they alone start at once in a training process. But OpenMP keeps threads for each
// thread that calls it: this is for the training thread and for the one that quantizes.
void run_beside_torch(Job& job, int64_t threads, Errand* errand = nullptr);

}  // namespace recpoint
