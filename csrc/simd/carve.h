// One allocation of scratch memory, carved into pieces.
#pragma once

#include <stdint.h>

namespace batchgen {
namespace {

inline int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

// Hands out pieces of an allocation, each at a multiple of 64 bytes. With a null base it only adds up their bytes.
struct Carve {
    uint8_t* base;
    int64_t used = 0;
    template <class T>
    T* take(int64_t count) {
        T* piece = base ? (T*)(base + used) : nullptr;
        used += round_up(count * int64_t(sizeof(T)), 64);
        return piece;
    }
};

}  // namespace
}  // namespace batchgen
