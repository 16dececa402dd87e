// Prefetching of the next tile of keys beside the products of this one.
#pragma once

#include <stdint.h>

#include "attention/scratch.h"
#include "kernels.h"

namespace batchgen {
namespace {

// The memory of the next tile, prefetched a few lines at a time: all at once they would stall the work that they
// overlap with.
struct Ahead {
    struct Run {
        const uint8_t *start, *stop;
    };
    static constexpr int kPiece = 256;  // bytes of a prefetch, four lines
    // Into the second-level cache on CPUs with AMX: the first one waits for 16 lines at most, fewer than memory could
    // deliver meanwhile.
    static constexpr int kInto = kTiles ? 2 : 3;
    static constexpr int kParts = 256;  // parts of a piece, in which the share of a call is counted
    Run runs[2 * kKeys * kMostHeads];
    int count, at;
    int64_t pieces, each, due;  // pieces left; parts of a call, and parts that are due

    void clear() { count = at = 0, pieces = each = due = 0; }
    void add(const uint8_t* start, int64_t bytes) {
        runs[count++] = {start, start + bytes};
        pieces += (bytes + kPiece - 1) / kPiece;
    }
    // Spreads all that is left over so many calls of `fetch`.
    void spread(int64_t calls) { each = (pieces * kParts + calls - 1) / calls; }
    void fetch() {
        due += each;
        while (due >= kParts && at < count) {
            Run& run = runs[at];
            const uint8_t* line = run.start;
            for (; due >= kParts && line < run.stop; line += kPiece, due -= kParts, pieces--) {
#pragma GCC unroll 4
                for (int i = 0; i < kPiece; i += 64) __builtin_prefetch(line + i, 0, kInto);
            }
            run.start = line;
            at += line >= run.stop;
        }
    }
};

}  // namespace
}  // namespace batchgen
