// NCCL as far as batchgen has torch call it: sums over the ranks of one host, by memory that their processes share.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <thread>

#include "account.h"
#include "memory.h"
#include "streams.h"

namespace {

enum Result { kSuccess = 0, kSystemError = 2, kInvalidArgument = 4 };
enum Type { kFloat16 = 6, kFloat32 = 7, kBfloat16 = 9 };

constexpr int kMostRanks = 16, kSlots = 2;
constexpr size_t kSlotBytes = 64ul << 20;
constexpr double kMostSeconds = 120;

struct UniqueId {
    char text[128];
};

// What the ranks share. Rank r writes its part of sum n into a slot of its own, n % kSlots, and then all read all
// parts.
struct Shared {
    std::atomic<int> joined;
    std::atomic<uint64_t> written[kMostRanks], read[kMostRanks];  // sums so far
};

struct Communicator {
    int rank, size;
    Shared* shared;
    char* parts;
    uint64_t launched = 0;
    std::atomic<bool> is_aborted{false};

    char* part(int of, uint64_t sum) const { return parts + ((size_t)of * kSlots + sum % kSlots) * kSlotBytes; }
};

template <typename Counters>
bool all_reach(const Communicator* ranks, const Counters& counters, uint64_t number) {
    for (int rank = 0; rank < ranks->size; rank++)
        if (counters[rank] < number) return ranks->is_aborted;
    return true;
}

float number_at(const char* numbers, Type type, size_t i) {
    if (type == kFloat32) return ((const float*)numbers)[i];
    if (type == kFloat16) return (float)((const _Float16*)numbers)[i];
    uint32_t bits = (uint32_t)((const uint16_t*)numbers)[i] << 16;
    float number;
    memcpy(&number, &bits, 4);
    return number;
}

void set_number(char* numbers, Type type, size_t i, float number) {
    if (type == kFloat32) {
        ((float*)numbers)[i] = number;
    } else if (type == kFloat16) {
        ((_Float16*)numbers)[i] = (_Float16)number;
    } else {  // rounded to the nearest, ties to even
        uint32_t bits;
        memcpy(&bits, &number, 4);
        ((uint16_t*)numbers)[i] = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
}

}  // namespace

PLAYED_API int ncclGetVersion(int* version) { return *version = 22907, kSuccess; }
PLAYED_API const char* ncclGetErrorString(int) { return "an error of the played NCCL"; }
PLAYED_API const char* ncclGetLastError(Communicator*) { return ""; }
PLAYED_API int ncclGetUniqueId(UniqueId* id) {
    std::random_device random;
    snprintf(id->text, sizeof id->text, "/played-nccl-%08x%08x", random(), random());
    return kSuccess;
}
PLAYED_API int ncclCommInitRankConfig(Communicator** made, int size, UniqueId id, int rank, void*) {
    constexpr size_t header = 4096;
    size_t num_bytes = header + (size_t)size * kSlots * kSlotBytes;
    int file = shm_open(id.text, O_RDWR | O_CREAT, 0600);
    if (size > kMostRanks || file < 0 || ftruncate(file, (off_t)num_bytes)) return kSystemError;
    auto* memory = (char*)mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    close(file);
    auto* ranks = new Communicator{rank, size, (Shared*)memory, memory + header};
    ranks->shared->joined++;
    double start_s = played::now_s();
    while (ranks->shared->joined < size) {
        if (played::now_s() > start_s + kMostSeconds) return kSystemError;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    if (rank == 0) shm_unlink(id.text);
    return *made = ranks, kSuccess;
}
PLAYED_API int ncclCommInitRank(Communicator** made, int size, UniqueId id, int rank) {
    return ncclCommInitRankConfig(made, size, id, rank, nullptr);
}
PLAYED_API int ncclCommGetAsyncError(Communicator*, int* error) { return *error = kSuccess, kSuccess; }
PLAYED_API int ncclCommAbort(Communicator* ranks) { return ranks->is_aborted = true, kSuccess; }
PLAYED_API int ncclCommFinalize(Communicator*) { return kSuccess; }
PLAYED_API int ncclCommDestroy(Communicator*) { return kSuccess; }  // operations may still refer to it
PLAYED_API int ncclGroupStart() { return kSuccess; }
PLAYED_API int ncclGroupEnd() { return kSuccess; }

PLAYED_API int ncclAllReduce(const void* from, void* to, size_t count, Type type, int operation, Communicator* ranks,
                             void* handle) {
    constexpr int kSum = 0;
    size_t num_bytes = count * (type == kFloat32 ? 4 : 2);
    bool is_known = type == kFloat16 || type == kFloat32 || type == kBfloat16;
    if (!count) return kSuccess;
    if (operation != kSum || !is_known || num_bytes > kSlotBytes || !played::on_device(from) ||
        !played::on_device(to)) {
        played::fault("a sum of NCCL's that is not played: operation " + std::to_string(operation) + ", type " +
                      std::to_string(type) + ", " + std::to_string(count) + " numbers");
        return kInvalidArgument;
    }
    uint64_t sum = ++ranks->launched;
    auto* stream = played::stream_of(handle);
    auto *source = played::behind(from), *target = played::behind(to);
    auto write = [=] {
        memcpy(ranks->part(ranks->rank, sum), source, num_bytes);
        ranks->shared->written[ranks->rank] = sum;
    };
    auto add = [=] {
        for (size_t i = 0; i < count; i++) {
            float total = 0;
            for (int rank = 0; rank < ranks->size; rank++) total += number_at(ranks->part(rank, sum), type, i);
            set_number(target, type, i, total);
        }
        ranks->shared->read[ranks->rank] = sum;
    };
    uint64_t before = sum > kSlots ? sum - kSlots : 0;
    played::put(stream, {"sum: write", write, [=] { return all_reach(ranks, ranks->shared->read, before); }}, false);
    played::put(stream, {"sum: add", add, [=] { return all_reach(ranks, ranks->shared->written, sum); }}, false);
    return kSuccess;
}
