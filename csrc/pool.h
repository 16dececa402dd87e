// Threads that share out the items of a loop, pinned to the cores that the thread which ran the first loop may use.
#pragma once
#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>

namespace batchgen {

// A loop whose items may run at once and in any order; those from `first_phase` on begin when all before them are done.
// When an item throws, those that have not begun are left out.
struct Loop {
    int64_t count;
    int64_t first_phase;
    std::function<void(int64_t)> item;
    std::atomic<int64_t> next{0}, done{0};
    std::atomic<int> users{0};
    std::atomic<bool> failed{false};
    std::exception_ptr error;  // of the first item that threw; to be read when all are done

    Loop(int64_t count, std::function<void(int64_t)> item, int64_t first_phase = 0)
        : count(count), first_phase(first_phase), item(std::move(item)) {}
    void help();
};

// Threads that a loop is shared by, the caller among them. Throws WrongEnvironment (cpu.h) for a BATCHGEN_NUM_THREADS
// that is no number of threads.
int num_threads();
// For the loops after it. At least 1.
void set_num_threads(int count);
// From the next loop on, threads are those of the cores that the thread which runs it may use.
void follow_affinity();
// Whether loops of the calling thread are run by it alone.
void set_alone(bool alone);

// Runs a loop, the caller helping. Throws what an item threw, once all threads have left the loop.
void run(int64_t count, const std::function<void(int64_t)>& item, int64_t first_phase = 0);

// Memory of the calling thread, aligned to 64 bytes, until its next call with the same `which`, 0 or 1.
void* scratch(int64_t bytes, int which = 0);

}  // namespace batchgen
