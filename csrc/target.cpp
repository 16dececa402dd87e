// All kernels for one instruction set: compiled once for each, with BATCHGEN_TARGET its name and flags to match. Only
// C's headers are used here: an inline function of the standard library compiled with these flags could be the one that
// the whole library is linked with, and then runs on machines that lack the instructions.
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

#include "kernels.h"

#define BATCHGEN_JOIN(a, b) a##b
#define BATCHGEN_NAME(a, b) BATCHGEN_JOIN(a, b)
#define BATCHGEN_TEXT(a) BATCHGEN_TEXT_OF(a)
#define BATCHGEN_TEXT_OF(a) #a

namespace batchgen {
namespace {
#include BATCHGEN_SIMD
#ifdef BATCHGEN_TILES
#include "simd/tile_config.h"
#include BATCHGEN_TILES
#endif
#include "simd/numeric.h"
#include "matmul/micro_kernel.h"
#include "matmul/tile_registers.h"
#include "quant/blocks.h"
#include "matmul/linear.h"
#include "norm.h"
#include "experts.h"
#include "quant/groups.h"
#include "attention/kv_tiles.h"
#include "attention/small_m.h"
#include "attention/attention.h"
#include "rotary.h"
#include "logits.h"

#ifdef BATCHGEN_FAST_BF16
constexpr bool kFastBF16 = true;
#else
constexpr bool kFastBF16 = false;
#endif
}  // namespace

const Kernels& BATCHGEN_NAME(BATCHGEN_TARGET, _kernels)() {
    static const Kernels kernels = {
        BATCHGEN_TEXT(BATCHGEN_TARGET),
        W,
        kFastBF16,
        kPanel,
        attention_scratch,
        linear_scratch,
        attend,
        merge,
        linear_cut,
        panel_bytes,
        pack_rows,
        linear,
        pack_panels,
        arrange_panels,
        rows_of_panels,
        norm,
        weighted_sums,
        rotary_store,
        quantize,
        dequantize,
        unpack_blocks,
        argmax,
        softmax_weights,
#ifdef BATCHGEN_TILES
        tile_dot,
#else
        nullptr,
#endif
    };
    return kernels;
}

}  // namespace batchgen
