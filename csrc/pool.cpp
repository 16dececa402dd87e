#include "pool.h"

#include <pthread.h>
#include <sched.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <map>
#include <mutex>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "cpu.h"

namespace batchgen {
namespace {

// How long a thread looks for work, or for others to be done, before it sleeps: longer than what is between two kernels
// of a sweep, as waking up takes tens of microseconds.
constexpr std::chrono::microseconds kAwake(200);

constexpr int kMostThreads = 8192;

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Looks until there is something or the time is over. Returns whether there is.
template <class F>
bool look_for(F there_is) {
    const auto stop = std::chrono::steady_clock::now() + kAwake;
    do {
        for (int i = 0; i < 64; i++) {
            if (there_is()) return true;
            pause();
        }
    } while (std::chrono::steady_clock::now() < stop);
    return false;
}

// A set of so many CPUs: cpu_set_t by itself has room for 1,024.
class CpuSet {
  public:
    explicit CpuSet(int cpus) : words_(CPU_ALLOC_SIZE(cpus) / sizeof(unsigned long)) {}
    size_t bytes() const { return words_.size() * sizeof(unsigned long); }
    cpu_set_t* get() { return reinterpret_cast<cpu_set_t*>(words_.data()); }

  private:
    std::vector<unsigned long> words_;
};

// The CPUs that this process may use. The system refuses a set that is smaller than its own.
std::vector<int> own_cpus() {
    constexpr int kMostCpus = 1 << 20;
    std::vector<int> cpus;
    for (int most = CPU_SETSIZE; most <= kMostCpus && cpus.empty(); most *= 2) {
        CpuSet set(most);
        if (sched_getaffinity(0, set.bytes(), set.get()) != 0) continue;
        for (int cpu = 0; cpu < most; cpu++)
            if (CPU_ISSET_S(cpu, set.bytes(), set.get())) cpus.push_back(cpu);
    }
    if (cpus.empty()) cpus.push_back(0);
    return cpus;
}

thread_local bool alone = false;

class Pool {
  public:
    explicit Pool(std::vector<int> cpus) : cpus_(std::move(cpus)) {}

    void grow(int workers) {
        std::lock_guard lock(mutex_);
        workers_.reserve(workers);
        while (int(workers_.size()) < workers) {
            std::thread thread(&Pool::work, this);
            workers_.push_back({thread.native_handle(), -1});
            thread.detach();
            pin(workers_.back(), cpus_[workers_.size() % cpus_.size()]);
        }
    }

    // A worker on the caller's core moves to another one: pinned there, it would wait for the caller, and the caller
    // for it.
    void free_caller_core() {
        const int cpu = sched_getcpu();
        if (cpu == caller_cpu_.exchange(cpu, std::memory_order_relaxed)) return;
        std::lock_guard lock(mutex_);
        for (Worker& worker : workers_) {
            if (worker.cpu != cpu) continue;
            for (int other : cpus_) {
                const bool occupied =
                    std::any_of(workers_.begin(), workers_.end(), [&](const Worker& w) { return w.cpu == other; });
                if (!occupied) return pin(worker, other);
            }
        }
    }

    void add(Loop* loop) {
        {
            std::lock_guard lock(mutex_);
            loops_.push_back(loop);
            changes_.fetch_add(1, std::memory_order_release);
        }
        if (sleeping_.load(std::memory_order_seq_cst)) wake_.notify_all();
    }

    // After this no worker begins with it; waits for those that are at it.
    void take_back(Loop* loop) {
        {
            std::lock_guard lock(mutex_);
            loops_.erase(std::remove(loops_.begin(), loops_.end(), loop), loops_.end());
        }
        wait_for_users(loop);
    }

  private:
    // Who waits for long sleeps: a worker may have lost its core to another thread, which can take the caller's.
    void wait_for_users(Loop* loop) {
        const auto has_none = [&] { return loop->users.load(std::memory_order_seq_cst) == 0; };
        if (look_for(has_none)) return;
        std::unique_lock lock(mutex_);
        waiting_.fetch_add(1, std::memory_order_seq_cst);
        left_.wait(lock, has_none);
        waiting_.fetch_sub(1, std::memory_order_relaxed);
    }

    void leave(Loop* loop) {
        loop->users.fetch_sub(1, std::memory_order_seq_cst);  // after this the loop may be gone
        if (!waiting_.load(std::memory_order_seq_cst)) return;
        std::lock_guard lock(mutex_);
        left_.notify_all();
    }

    Loop* begin() {
        std::lock_guard lock(mutex_);
        for (Loop* loop : loops_)
            if (loop->next.load(std::memory_order_relaxed) < loop->count) {
                loop->users.fetch_add(1, std::memory_order_relaxed);
                return loop;
            }
        return nullptr;
    }

    struct Worker {
        pthread_t thread;
        int cpu;
    };

    static void pin(Worker& worker, int cpu) {
        CpuSet set(std::max(CPU_SETSIZE, cpu + 1));
        CPU_SET_S(cpu, set.bytes(), set.get());
        pthread_setaffinity_np(worker.thread, set.bytes(), set.get());
        worker.cpu = cpu;
    }

    void work() {
        prepare_thread();
        for (;;) {
            const uint64_t seen = changes_.load(std::memory_order_acquire);
            if (Loop* loop = begin()) {
                loop->help();
                leave(loop);
                continue;
            }
            if (look_for([&] { return changes_.load(std::memory_order_acquire) != seen; })) continue;
            std::unique_lock lock(mutex_);
            sleeping_.fetch_add(1, std::memory_order_seq_cst);
            wake_.wait(lock, [&] { return changes_.load(std::memory_order_relaxed) != seen; });
            sleeping_.fetch_sub(1, std::memory_order_relaxed);
        }
    }

    std::vector<int> cpus_;
    std::mutex mutex_;
    std::condition_variable wake_, left_;
    std::deque<Loop*> loops_;
    std::atomic<uint64_t> changes_{0};
    std::atomic<int> sleeping_{0}, waiting_{0};
    std::vector<Worker> workers_;
    std::atomic<int> caller_cpu_{-1};
};

// What the environment says, else a thread for each CPU. OMP_NUM_THREADS is for others too: what is no number there is
// theirs.
int default_threads() {
    const char *own = std::getenv("BATCHGEN_NUM_THREADS"), *shared = std::getenv("OMP_NUM_THREADS");
    if (own && *own) {
        char* end;
        const long count = std::strtol(own, &end, 10);
        if (*end || count < 1 || count > kMostThreads)
            throw WrongEnvironment("BATCHGEN_NUM_THREADS=" + std::string(own) +
                                   " is no number of threads: give one from 1 to " + std::to_string(kMostThreads) +
                                   ", or take it out");
        return int(count);
    }
    const int count = shared ? std::atoi(shared) : 0;
    return count > 0 ? count : int(own_cpus().size());
}

std::atomic<Pool*> the_pool{nullptr};
std::atomic<int> thread_count{0};

// Of each set of CPUs that was used, never deleted: a loop may be at one, and threads may outlast the end of main.
std::mutex pools_mutex;
std::map<std::vector<int>, Pool*> pools;

void forget_pools_in_forks() {
    static std::once_flag once;
    // Threads do not come along into a forked process: it makes its own.
    std::call_once(once, [] {
        pthread_atfork([] { pools_mutex.lock(); }, [] { pools_mutex.unlock(); },
                       [] {
                           the_pool.store(nullptr);
                           pools.clear();
                           pools_mutex.unlock();
                       });
    });
}

Pool& pool() {
    if (Pool* found = the_pool.load(std::memory_order_acquire)) return *found;
    forget_pools_in_forks();
    std::vector<int> cpus = own_cpus();
    std::lock_guard lock(pools_mutex);
    Pool*& found = pools[cpus];
    if (!found) found = new Pool(std::move(cpus));
    the_pool.store(found, std::memory_order_release);
    return *found;
}

}  // namespace

void Loop::help() {
    for (;;) {
        const int64_t i = next.fetch_add(1, std::memory_order_relaxed);
        if (i >= count) return;
        if (i >= first_phase)
            while (done.load(std::memory_order_acquire) < first_phase) pause();
        try {
            if (!failed.load(std::memory_order_relaxed)) item(i);
        } catch (...) {
            if (!failed.exchange(true, std::memory_order_relaxed)) error = std::current_exception();
        }
        done.fetch_add(1, std::memory_order_acq_rel);  // after an error, too: others wait for the first phase
    }
}

int num_threads() {
    int count = thread_count.load(std::memory_order_relaxed);
    if (!count) thread_count.store(count = default_threads(), std::memory_order_relaxed);
    return count;
}

void set_num_threads(int count) { thread_count.store(std::max(1, count), std::memory_order_relaxed); }

void follow_affinity() {
    the_pool.store(nullptr, std::memory_order_release);
    thread_count.store(0, std::memory_order_relaxed);
}

void set_alone(bool value) { alone = value; }

void run(int64_t count, const std::function<void(int64_t)>& item, int64_t first_phase) {
    const int threads = alone ? 1 : num_threads();
    if (threads == 1 || count <= 1) {
        for (int64_t i = 0; i < count; i++) item(i);
        return;
    }
    Loop loop(count, item, first_phase);
    Pool& shared = pool();
    shared.grow(threads - 1);
    shared.free_caller_core();
    shared.add(&loop);
    loop.help();
    shared.take_back(&loop);
    if (loop.error) std::rethrow_exception(loop.error);
}

void* scratch(int64_t bytes, int which) {
    struct Buffer {
        void* data = nullptr;
        int64_t size = 0;
        ~Buffer() { std::free(data); }
    };
    static thread_local Buffer buffers[3];
    Buffer& buffer = buffers[which];
    if (buffer.size < bytes) {
        std::free(buffer.data);
        buffer.size = (bytes + 4095) / 4096 * 4096;
        buffer.data = std::aligned_alloc(64, buffer.size);
        if (!buffer.data) {
            buffer.size = 0;
            throw std::bad_alloc();
        }
    }
    return buffer.data;
}

}  // namespace batchgen
