// Threads that share out the items of a loop. One pool a process, its threads pinned to the cores the process may use.
#pragma once
#include <atomic>
#include <cstdint>
#include <functional>

namespace batchgen {

// A loop whose items may run at once and in any order; those from `first_phase` on begin when all before them are done.
struct Loop {
    int64_t count;
    int64_t first_phase;
    std::function<void(int64_t)> item;
    std::atomic<int64_t> next{0}, done{0};
    std::atomic<int> users{0};

    Loop(int64_t count, std::function<void(int64_t)> item, int64_t first_phase = 0)
        : count(count), first_phase(first_phase), item(std::move(item)) {}
    void help();
};

// Threads that a loop is shared by, the caller among them.
int num_threads();
// For the loops after it. At least 1.
void set_num_threads(int count);
// Whether loops of the calling thread are run by it alone.
void set_alone(bool alone);

// Runs a loop, the caller helping.
void run(int64_t count, const std::function<void(int64_t)>& item, int64_t first_phase = 0);

// Memory of the calling thread, aligned to 64 bytes, until its next call with the same `which`, 0 or 1.
void* scratch(int64_t bytes, int which = 0);

}  // namespace batchgen
