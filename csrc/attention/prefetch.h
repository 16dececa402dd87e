// Prefetching of the next tile of keys beside the products of this one.
#pragma once

#include <stdint.h>

#include "attention/scratch.h"
#include "kernels.h"

namespace batchgen {
namespace {

// Lines of memory that the next tile will need, asked for a few at a time: all at once they would stop the work that
// they are to overlap with.
struct Ahead {
    struct Run {
        const uint8_t *start, *stop;
    };
    static constexpr int kPiece = 256;  // bytes, four lines: what is asked for at once
    static constexpr int kParts = 256;  // of a piece, in which shares of calls are counted
    Run runs[2 * kKeys * kMostHeads];
    int count, at;
    int64_t pieces, each, due;  // left in all runs; of a call, and due by now, in parts

    void clear() { count = at = 0, pieces = each = due = 0; }
    void add(const uint8_t* start, int64_t bytes) {
        runs[count++] = {start, start + bytes};
        pieces += (bytes + kPiece - 1) / kPiece;
    }
    // In so many calls to come, the part of all that is left.
    void spread(int64_t calls) { each = (pieces * kParts + calls - 1) / calls; }
    void fetch() {
        due += each;
        while (due >= kParts && at < count) {
            Run& run = runs[at];
            const uint8_t* line = run.start;
            for (; due >= kParts && line < run.stop; line += kPiece, due -= kParts, pieces--) {
#pragma GCC unroll 4
                for (int i = 0; i < kPiece; i += 64) __builtin_prefetch(line + i);
            }
            run.start = line;
            at += line >= run.stop;
        }
    }
};

}  // namespace
}  // namespace batchgen
