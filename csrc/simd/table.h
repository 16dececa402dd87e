// A table of sixteen numbers in memory, for instruction sets that have no permutation of floats.
#pragma once

#include <stdint.h>

namespace batchgen {
namespace {

// vf, vi: vectors of floats and of 32-bit words.
template <class vf, class vi>
struct IndexedTable {
    float numbers[16];
    explicit IndexedTable(const int8_t* values) {
        for (int i = 0; i < 16; i++) numbers[i] = values[i];
    }
    // The numbers that the low four bits of each lane stand for.
    vf operator()(vi index) const {
        vf result{};
        for (int i = 0; i < int(sizeof(vf) / sizeof(float)); i++) result[i] = numbers[index[i] & 15];
        return result;
    }
};

}  // namespace
}  // namespace batchgen
