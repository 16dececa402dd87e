// A pool of threads that share the items of a loop, pinned to the cores that the thread which ran the first loop may
// use.
#pragma once
#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>

namespace batchgen {

// A loop whose items run at once and in any order; those from `first_phase` on begin when all before them are done.
// After an item throws, items that have not begun are skipped.
struct Loop {
    int64_t count;
    int64_t first_phase;
    std::function<void(int64_t)> item;
    std::atomic<int64_t> next{0}, done{0};
    std::atomic<int> users{0};
    std::atomic<bool> failed{false};
    std::exception_ptr error;  // what the first item threw; to be read when all are done

    Loop(int64_t count, std::function<void(int64_t)> item, int64_t first_phase = 0)
        : count(count), first_phase(first_phase), item(std::move(item)) {}
    // Runs items until none is left to begin.
    void help();
};

// The number of threads that share a loop, the caller among them. Throws WrongEnvironment (cpu.h) where
// BATCHGEN_NUM_THREADS is not a number of threads.
int num_threads();
// Sets the number of threads of later loops, at least 1.
void set_num_threads(int count);
// Moves the pool, from the next loop on, to the cores that the thread which runs that loop may use.
void follow_affinity();
// Sets whether the calling thread runs its loops alone.
void set_alone(bool alone);

// Runs a loop, in the calling thread too. Throws what an item threw, once all threads have left the loop.
void run(int64_t count, const std::function<void(int64_t)>& item, int64_t first_phase = 0);

// Memory of the calling thread, aligned to 64 bytes, valid until its next call with the same `which`: 0, 1 or 2.
void* scratch(int64_t bytes, int which = 0);

}  // namespace batchgen
