// Streams of the played card: queues of operations, which a thread carries out one at a time.
//
// Of the streams whose next operation may begin it takes any one, and holds some operations back, both by the seed:
// what is right by good timing alone is wrong here.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace played {

struct Operation {
    const char* kind;
    std::function<void()> run = {};    // none: it does nothing
    std::function<bool()> ready = {};  // none: at once
};

struct Graph {
    std::vector<Operation> operations;
};

struct Stream {
    int priority = 0;
    std::deque<Operation> queue = {};
    long issued = 0, done = 0;
    long launched = 0, held = 0;  // of a card's own: so far, and in the queue
    bool is_running = false, is_held = false;
    double held_until_s = 0;
    long most_held_us = 0;
    std::shared_ptr<Graph> captured = nullptr;  // what is being captured; none: nothing is
    unsigned long long capture_id = 0;
    std::thread::id capturing_thread = {};
};

struct Event {
    bool is_timed;
    long recorded = 0, reached = 0;  // records so far: launched, carried out
    double at_s = 0;
    unsigned long long capture_id = 0;  // the capture in which it was recorded last; 0: none
};

enum class Put { done, refused };

Stream* new_stream(int priority);
// The stream of a handle of CUDA's.
Stream* stream_of(void* handle);
double now_s();

// What those who play the card put there: it takes no place in a card's queue.
inline const char* const kPlayed = "played";

// Queues an operation, or adds it to what the stream captures. Refused is what cannot be captured.
Put put(Stream* stream, Operation operation, bool can_be_captured = true);
void record(Event* event, Stream* stream);
// Refused is an event of outside in a capture.
Put wait_event(Stream* stream, Event* event);
// Has the stream wait until the counter has come as far as `value`, counted as a difference. It cannot be captured.
Put wait_value(Stream* stream, std::atomic<uint32_t>* counter, uint32_t value);
bool is_reached(Event* event);

// Each waits without the interpreter's lock, which a thread of a real card does not need.
void finish(Stream* stream);
void finish(Event* event);
void finish_all(const char* who);

bool is_idle(Stream* stream);
bool is_capturing(Stream* stream);
// Whether this thread may not do now what a capture forbids.
bool captures_here(bool is_relaxed);
void begin_capture(Stream* stream);
std::shared_ptr<Graph> end_capture(Stream* stream);
void replay(std::shared_ptr<Graph> graph, Stream* stream);

// Notes that this thread enters (1) or leaves (-1) a kernel of torch's.
void note_in_torch(int change);

// Notes a fault where something is used that may wait for the whole device while a stream waits for the host.
void note_if_closed(const char* what);

}  // namespace played
