#include "streams.h"

#include <dlfcn.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>
#include <random>

#include "account.h"
#include "memory.h"

namespace played {
namespace {

using Lock = std::unique_lock<std::mutex>;

constexpr auto kPoll = std::chrono::microseconds(100);  // of counters that the host raises
const char* const kWaitValue = "wait_value";

// Never destroyed: other libraries call CUDA when the process ends.
std::mutex& mutex = *new std::mutex;
std::condition_variable &queued = *new std::condition_variable, &progressed = *new std::condition_variable;
Stream& default_stream = *new Stream;
std::vector<Stream*>& streams = *new std::vector<Stream*>{&default_stream};
unsigned long long captures_begun = 0;
int captures_open = 0;
bool has_worker = false, is_stopped = false, has_ended = false;
std::mt19937& random_numbers = *new std::mt19937((unsigned)option("SEED", 1));

template <typename Function>
Function* of_python(const char* name) {
    return (Function*)dlsym(RTLD_DEFAULT, name);
}

// Kernels of torch's that this thread is in. torch calls them without the interpreter's lock, which those who play the
// card have there.
thread_local int in_torch = 0;

bool has_interpreter() {
    static auto* initialized = of_python<int()>("Py_IsInitialized");
    static auto* check = of_python<int()>("PyGILState_Check");
    return initialized && initialized() && check && check();
}

// As on a card.
bool holds_interpreter() { return has_interpreter() && !in_torch; }

// Threads that wait without the interpreter's lock, and have come with it: they may hold a lock of torch's.
std::atomic<int> num_waiting = 0;

class WithoutInterpreter {
    void* state_ = nullptr;

  public:
    WithoutInterpreter() {
        if (!has_interpreter()) return;
        num_waiting++;
        state_ = of_python<void*()>("PyEval_SaveThread")();
    }
    ~WithoutInterpreter() {
        if (!state_) return;
        of_python<void(void*)>("PyEval_RestoreThread")(state_);
        num_waiting--;
    }
};

bool is_closed() {
    for (Stream* stream : streams)
        for (Operation& operation : stream->queue)
            if (operation.kind == kWaitValue && !operation.ready()) return true;
    return false;
}

bool has_waits(Stream* stream) {
    return std::any_of(stream->queue.begin(), stream->queue.end(), [](auto& o) { return o.ready && !o.ready(); });
}

void push(Stream* stream, Operation operation) {
    stream->issued++;
    if (operation.kind != kPlayed) stream->launched++, stream->held++;
    stream->queue.push_back(std::move(operation));
}

// With the lock held: waits for progress. `holds` says that the thread came with the interpreter's lock, as torch's
// does not where it knows that it may wait: then no other thread of the host can open what a stream waits at.
template <typename Condition>
void wait_until(Lock& lock, bool holds, const char* what, Condition condition) {
    if (condition()) return;
    if (holds && is_closed())
        fault(std::string("waits with the interpreter's lock for a stream that waits for the host: ") + what);
    progressed.wait(lock, condition);
}

bool may_begin(Stream* stream) {
    if (stream->queue.empty() || stream->is_running) return false;
    Operation& next = stream->queue.front();
    if (next.ready && !next.ready()) return false;
    if (!stream->is_held && stream->most_held_us) {
        stream->held_until_s = now_s() + 1e-6 * (double)(random_numbers() % stream->most_held_us);
        stream->is_held = true;
    }
    return now_s() >= stream->held_until_s;
}

void carry_out() {
    Lock lock(mutex);
    std::vector<Stream*> ready;
    while (!is_stopped) {
        ready.clear();
        for (Stream* stream : streams)
            if (may_begin(stream)) ready.push_back(stream);
        if (ready.empty()) {
            queued.wait_for(lock, kPoll);
            continue;
        }
        Stream* stream = ready[random_numbers() % ready.size()];
        Operation& operation = stream->queue.front();  // stays where it is: others are added behind it
        stream->is_running = true;
        lock.unlock();
        if (operation.run) operation.run();
        lock.lock();
        if (operation.kind != kPlayed) stream->held--;
        stream->queue.pop_front();
        stream->is_running = stream->is_held = false;
        stream->done++;
        progressed.notify_all();
    }
    has_ended = true;
    progressed.notify_all();
}

// Ends the thread that carries operations out, for good.
void stop() {
    Lock lock(mutex);
    is_stopped = true;
    if (has_worker) progressed.wait(lock, [] { return has_ended; });
}

struct AtExit {
    ~AtExit() { stop(); }
} at_exit;

}  // namespace

double now_s() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

Stream* new_stream(int priority) {
    static const long most_us = option("DELAY_US", 0);
    Lock lock(mutex);
    auto* stream = new Stream{priority};
    // Some streams hurry and some lag far behind.
    double share = (double)(random_numbers() % 1000) / 1000;
    stream->most_held_us = most_us ? 1 + (long)((double)most_us * share * share) : 0;
    streams.push_back(stream);
    return stream;
}

Stream* stream_of(void* handle) { return (uintptr_t)handle <= 2 ? &default_stream : (Stream*)handle; }

Put put(Stream* stream, Operation operation, bool can_be_captured) {
    // With no thread at all, for the time that the host takes: what is launched is done at once, in the order of
    // launches.
    static const bool at_once = option("AT_ONCE", 0);
    static const long most = option("QUEUE", 1024);
    count(operation.kind);
    if (at_once && !stream->captured) {
        if (operation.run) operation.run();
        return Put::done;
    }
    Lock lock(mutex);
    if (stream->captured) {
        if (!can_be_captured) {
            fault(std::string("in a capture: ") + operation.kind);
            return Put::refused;
        }
        stream->captured->operations.push_back(std::move(operation));
        return Put::done;
    }
    if (!has_worker) {
        has_worker = true;
        std::thread(carry_out).detach();
    }
    if (operation.kind != kPlayed && stream->held >= most) {
        count("waits for a full queue");
        // A card's driver may hold a lock meanwhile that the lanes of the host need for what the stream waits for.
        if (has_waits(stream) && is_closed()) fault("a launch into a full queue while the stream waits for the host");
        lock.unlock();
        bool holds = holds_interpreter();
        WithoutInterpreter released;
        lock.lock();
        wait_until(lock, holds, "a full queue", [=] { return stream->held < most; });
        push(stream, std::move(operation));
        lock.unlock();
    } else {
        push(stream, std::move(operation));
        lock.unlock();
    }
    queued.notify_one();
    return Put::done;
}

void record(Event* event, Stream* stream) {
    long number;
    {
        Lock lock(mutex);
        number = ++event->recorded;
        event->capture_id = stream->captured ? stream->capture_id : 0;
        if (stream->captured) event->reached = number;
    }
    if (event->capture_id) return;
    put(stream, {"record", [=] {
                     Lock lock(mutex);
                     event->reached = std::max(event->reached, number);
                     event->at_s = now_s();
                 }});
}

Put wait_event(Stream* stream, Event* event) {
    long number;
    {
        Lock lock(mutex);
        number = event->recorded;
        if (stream->captured) {
            if (event->capture_id == stream->capture_id) return Put::done;
            fault("a capture waits for an event of outside");
            return Put::refused;
        }
    }
    return put(stream, {"wait_event", nullptr, [=] { return event->reached >= number; }});
}

Put wait_value(Stream* stream, std::atomic<uint32_t>* counter, uint32_t value) {
    return put(stream, {kWaitValue, nullptr, [=] { return (int32_t)(counter->load() - value) >= 0; }}, false);
}

bool is_reached(Event* event) {
    Lock lock(mutex);
    return event->reached >= event->recorded;
}

void finish(Stream* stream) {
    bool holds = holds_interpreter();
    WithoutInterpreter released;
    Lock lock(mutex);
    long issued = stream->issued;
    wait_until(lock, holds, "a stream", [=] { return stream->done >= issued; });
}

void finish(Event* event) {
    bool holds = holds_interpreter();
    WithoutInterpreter released;
    Lock lock(mutex);
    long recorded = event->recorded;
    wait_until(lock, holds, "an event", [=] { return event->reached >= recorded; });
}

void finish_all(const char* who) {
    note_if_closed(who);
    bool holds = holds_interpreter();
    WithoutInterpreter released;
    Lock lock(mutex);
    for (size_t i = 0; i < streams.size(); i++) {
        Stream* stream = streams[i];
        long issued = stream->issued;
        wait_until(lock, holds, who, [=] { return stream->done >= issued; });
    }
}

bool is_idle(Stream* stream) {
    Lock lock(mutex);
    return stream->done == stream->issued;
}

bool is_capturing(Stream* stream) {
    Lock lock(mutex);
    return stream->captured != nullptr;
}

bool captures_here(bool is_relaxed) {
    Lock lock(mutex);
    if (!captures_open || is_relaxed) return false;
    for (Stream* stream : streams)
        if (stream->captured && stream->capturing_thread == std::this_thread::get_id()) return true;
    return false;
}

void begin_capture(Stream* stream) {
    Lock lock(mutex);
    stream->captured = std::make_shared<Graph>();
    stream->capture_id = ++captures_begun;
    stream->capturing_thread = std::this_thread::get_id();
    captures_open++;
}

std::shared_ptr<Graph> end_capture(Stream* stream) {
    Lock lock(mutex);
    captures_open--;
    return std::move(stream->captured);
}

void replay(std::shared_ptr<Graph> graph, Stream* stream) {
    put(stream, {"graph", [=] {
                     for (Operation& operation : graph->operations)
                         if (operation.run) operation.run();
                 }});
}

void note_in_torch(int change) { in_torch += change; }

void note_if_closed(const char* what) {
    Lock lock(mutex);
    if (is_closed()) fault(std::string("while a stream waits for the host: ") + what);
}

}  // namespace played

// Queues a function of those who play the card. Returns 1 where it is captured, so that it may be called again.
PLAYED_API int played_enqueue(void* handle, void (*run)(long), long number) {
    played::Stream* stream = played::stream_of(handle);
    bool captured = played::is_capturing(stream);
    played::put(stream, {played::kPlayed, [=] { run(number); }});
    return captured;
}

// Fills memory that has no contents yet, which a card does not do.
PLAYED_API void played_fill(void* address, int byte, size_t num_bytes, void* handle) {
    char* to = played::behind(address);
    played::put(played::stream_of(handle), {played::kPlayed, [=] { memset(to, byte, num_bytes); }});
}

// Operations that a card's stream would have had so far.
PLAYED_API long played_launched(void* handle) { return played::stream_of(handle)->launched; }

PLAYED_API int played_waiting() { return played::num_waiting; }

PLAYED_API void played_in_torch(int change) { played::note_in_torch(change); }

// For those who play the card, before they end.
PLAYED_API void played_stop() { played::stop(); }
