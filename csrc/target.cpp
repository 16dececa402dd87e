// The table of kernels of one instruction set. This file is compiled once for each set, with BATCHGEN_TARGET its name
// and flags to match (simd/target.h).
#include "attention/attention.h"
#include "experts.h"
#include "kernels.h"
#include "logits.h"
#include "matmul/linear.h"
#include "matmul/panel_rows.h"
#include "matmul/tile_registers.h"
#include "norm.h"
#include "quant/blocks.h"
#include "quant/fit.h"
#include "quant/groups.h"
#include "rotary.h"
#include "simd/target.h"
#include "state/causal_conv.h"
#include "state/delta_chunks.h"
#include "state/delta_gates.h"
#include "state/delta_steps.h"
#include "state/gated.h"

#define BATCHGEN_JOIN(a, b) a##b
#define BATCHGEN_NAME(a, b) BATCHGEN_JOIN(a, b)
#define BATCHGEN_TEXT(a) BATCHGEN_TEXT_OF(a)
#define BATCHGEN_TEXT_OF(a) #a

namespace batchgen {
const Kernels& BATCHGEN_NAME(BATCHGEN_TARGET, _kernels)() {
    static const Kernels kernels = {
        BATCHGEN_TEXT(BATCHGEN_TARGET),
        W,
        kFastBF16,
        kPanelN,
        attention_scratch,
        linear_scratch,
        attend,
        merge,
        linear_cut,
        panel_bytes,
        pack_rows,
        linear,
        prepack_panels,
        prepack_block_panels,
        rows_of_panels,
        norm,
        weighted_sums,
        rotary_store,
        causal_conv,
        causal_conv_state,
        delta_scratch,
        delta_steps,
        delta_chunks,
        delta_gates,
        gated,
        quantize,
        quantize_fitted,
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
