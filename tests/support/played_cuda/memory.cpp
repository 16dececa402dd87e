#include "memory.h"

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "account.h"

namespace played {
namespace {

using Ranges = std::map<char*, size_t>;  // start -> bytes

constexpr size_t kArena = 256ul << 30, kPage = 2ul << 20, kAlignment = 512;
// Larger allocations have zeros: their pages would take memory of the host. So has all memory where kernels do nothing,
// or tokens would be no tokens.
constexpr size_t kFilled = 64ul << 20;

std::mutex& mutex = *new std::mutex;  // never destroyed: other libraries call CUDA when the process ends
Ranges &allocated = *new Ranges, &pinned = *new Ranges;
size_t used = 0, pinned_bytes = 0;
char *device = nullptr, *shadow = nullptr;  // the same pages, mapped twice: without access, and with it
struct sigaction before;

// Says what has happened, then has the fault happen again with whatever handled it before.
void on_fault(int number, siginfo_t* info, void*) {
    if (on_device(info->si_addr)) {
        const char text[] = "played CUDA: fault: the host touches memory of the card\n";
        if (write(2, text, sizeof text - 1) < 0) _exit(139);
    }
    sigaction(number, &before, nullptr);
}

void open_memory() {
    int file = memfd_create("played-cuda", 0);
    if (ftruncate(file, kArena)) abort();
    auto map = [&](int access) { return (char*)mmap(nullptr, kArena, access, MAP_SHARED | MAP_NORESERVE, file, 0); };
    shadow = map(PROT_READ | PROT_WRITE);
    device = map(PROT_NONE);
    if (device == MAP_FAILED || shadow == MAP_FAILED) abort();
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO;
    sigaction(SIGSEGV, &action, &before);
}

size_t rounded(size_t number, size_t to) { return (number + to - 1) / to * to; }

// The range that contains the bytes; end(): none does.
Ranges::iterator containing(Ranges& ranges, const void* address, size_t num_bytes) {
    auto after = ranges.upper_bound((char*)address);
    if (after == ranges.begin()) return ranges.end();
    auto range = std::prev(after);
    return (char*)address + num_bytes <= range->first + range->second ? range : ranges.end();
}

// Notes a fault where pages are gone that the card would still copy from and to.
void look_for_unmapped() {
    for (auto& [start, size] : pinned) {
        auto page = (uintptr_t)start / 4096 * 4096;
        std::vector<unsigned char> there((size + (uintptr_t)start - page + 4095) / 4096);
        if (mincore((void*)page, size + (uintptr_t)start - page, there.data()))
            fault("memory was unmapped while it was pinned");
    }
}

bool overlaps(Ranges& ranges, char* address, size_t num_bytes) {
    auto after = ranges.upper_bound(address);
    if (after != ranges.end() && address + num_bytes > after->first) return true;
    return after != ranges.begin() && std::prev(after)->first + std::prev(after)->second > address;
}

}  // namespace

bool on_device(const void* address) { return device && address >= device && address < device + kArena; }

char* behind(const void* address) { return on_device(address) ? shadow + ((char*)address - device) : (char*)address; }

bool is_pinned(const void* address, size_t num_bytes) {
    std::lock_guard lock(mutex);
    return containing(pinned, address, num_bytes) != pinned.end();
}

size_t total_bytes() {
    static const size_t total = (size_t)option("MIB", 80 << 10) << 20;
    return total;
}

size_t used_bytes() {
    std::lock_guard lock(mutex);
    return used;
}

void* allocate(size_t num_bytes) {
    static const bool plays = option("KERNELS", 1);
    std::lock_guard lock(mutex);
    if (!device) open_memory();
    num_bytes = rounded(num_bytes, kAlignment);
    if (used + num_bytes > total_bytes()) return nullptr;
    char* place = device + kPage;
    for (auto& [start, size] : allocated) {
        if (place + num_bytes <= start) break;
        place = device + rounded(start + size - device, kPage);
    }
    if (place + num_bytes > device + kArena) return nullptr;
    allocated[place] = num_bytes;
    used += num_bytes;
    if (plays && num_bytes <= kFilled) memset(behind(place), 0xff, num_bytes);
    return place;
}

bool release(void* address) {
    std::lock_guard lock(mutex);
    auto range = allocated.find((char*)address);
    if (range == allocated.end()) return false;
    madvise(behind(address), rounded(range->second, 4096), MADV_REMOVE);
    used -= range->second;
    allocated.erase(range);
    return true;
}

Pinning pin(void* address, size_t num_bytes) {
    static const size_t most = (size_t)option("PINNABLE_MIB", 1 << 30) << 20;
    std::lock_guard lock(mutex);
    look_for_unmapped();
    if (overlaps(pinned, (char*)address, num_bytes)) return Pinning::already;
    if (pinned_bytes + num_bytes > most) return Pinning::too_much;
    pinned[(char*)address] = num_bytes;
    pinned_bytes += num_bytes;
    return Pinning::done;
}

Pinning unpin(void* address) {
    std::lock_guard lock(mutex);
    look_for_unmapped();
    auto range = pinned.find((char*)address);
    if (range == pinned.end()) return Pinning::not_pinned;
    pinned_bytes -= range->second;
    pinned.erase(range);
    return Pinning::done;
}

}  // namespace played

PLAYED_API long played_pinned_bytes() {
    std::lock_guard lock(played::mutex);
    return (long)played::pinned_bytes;
}

PLAYED_API void* played_behind(void* address) { return played::behind(address); }
