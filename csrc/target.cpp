// The table of kernels of one instruction set. This file is compiled once for each set, with BATCHGEN_TARGET its name
// and flags to match (simd/target.h). A set whose instructions are for linear layers alone, or with tile registers for
// attention too, has all other kernels of a set that it includes, BATCHGEN_BASE.
#include "attention/attention.h"
#include "attention/pages.h"
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

#ifdef BATCHGEN_BASE
#define BATCHGEN_OTHER(kernel) base.kernel
#else
#define BATCHGEN_OTHER(kernel) kernel
#endif
#ifdef BATCHGEN_TILES
#define BATCHGEN_ATTENTION(kernel) kernel
#else
#define BATCHGEN_ATTENTION(kernel) BATCHGEN_OTHER(kernel)
#endif

namespace batchgen {
#ifdef BATCHGEN_BASE
const Kernels& BATCHGEN_NAME(BATCHGEN_BASE, _kernels)();
#endif

const Kernels& BATCHGEN_NAME(BATCHGEN_TARGET, _kernels)() {
#ifdef BATCHGEN_BASE
    const Kernels& base = BATCHGEN_NAME(BATCHGEN_BASE, _kernels)();
#endif
    static const Kernels kernels = {
        BATCHGEN_TEXT(BATCHGEN_TARGET),
        W,
        kFastBF16,
        kPanelN,
        BATCHGEN_ATTENTION(attention_scratch),
        linear_scratch,
        BATCHGEN_ATTENTION(attend),
        BATCHGEN_ATTENTION(merge),
        BATCHGEN_OTHER(summarise_pages),
        BATCHGEN_OTHER(page_scores),
        linear_cut,
        panel_bytes,
        pack_rows,
        linear,
        prepack_panels,
        prepack_block_panels,
        rows_of_panels,
        BATCHGEN_OTHER(norm),
        BATCHGEN_OTHER(weighted_sums),
        BATCHGEN_OTHER(rotary_store),
        BATCHGEN_OTHER(causal_conv),
        BATCHGEN_OTHER(causal_conv_state),
        BATCHGEN_OTHER(delta_scratch),
        BATCHGEN_OTHER(delta_steps),
        BATCHGEN_OTHER(delta_chunks),
        BATCHGEN_OTHER(delta_gates),
        BATCHGEN_OTHER(gated),
        BATCHGEN_OTHER(quantize),
        BATCHGEN_OTHER(quantize_fitted),
        BATCHGEN_OTHER(dequantize),
        BATCHGEN_OTHER(unpack_blocks),
        BATCHGEN_OTHER(argmax),
        BATCHGEN_OTHER(softmax_weights),
#ifdef BATCHGEN_TILES
        tile_dot,
#else
        nullptr,
#endif
    };
    return kernels;
}

}  // namespace batchgen
