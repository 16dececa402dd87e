#include "account.h"

#include <cstdio>
#include <cstring>
#include <map>
#include <mutex>

namespace played {
namespace {

using Numbers = std::map<std::string, long>;

std::mutex& mutex = *new std::mutex;  // never destroyed: other libraries call CUDA when the process ends
Numbers &counts = *new Numbers, &faults = *new Numbers;

std::string report() {
    std::lock_guard lock(mutex);
    std::string text;
    for (auto& [what, number] : counts) text += std::to_string(number) + " " + what + "\n";
    for (auto& [what, number] : faults) text += "FAULT " + std::to_string(number) + " " + what + "\n";
    return text;
}

// Adds the report of a process to a file when it ends.
struct AtExit {
    ~AtExit() {
        const char* path = std::getenv("PLAYED_CUDA_REPORT");
        std::FILE* file = path ? std::fopen(path, "a") : nullptr;
        if (!file) return;
        std::fputs(report().c_str(), file);
        std::fclose(file);
    }
} at_exit;

}  // namespace

void count(const char* what, long by) {
    static const bool counting = option("COUNTS", 1);
    if (!counting) return;
    std::lock_guard lock(mutex);
    counts[what] += by;
}

void fault(const std::string& what) {
    std::lock_guard lock(mutex);
    if (!faults[what]++) std::fprintf(stderr, "played CUDA: fault: %s\n", what.c_str());
}

}  // namespace played

// The report as text, a line for each count and each fault, cut at `size` bytes. Returns its length.
PLAYED_API long played_report(char* text, long size) {
    std::string found = played::report();
    std::snprintf(text, size, "%s", found.c_str());
    return (long)found.size();
}

PLAYED_API void played_forget() {
    std::lock_guard lock(played::mutex);
    played::counts.clear();
    played::faults.clear();
}
