// The arguments of kernels, and the table of kernels that each instruction set fills in. Plain data: translation units
// that are compiled with different flags share this header, so it includes nothing that has inline functions.
#pragma once
#include <stdint.h>

namespace batchgen {

struct bf16 {
    uint16_t bits;
};
struct f16 {
    uint16_t bits;
};

// Numbered as in batchgen/ops/cpp.py. Int4, Int5, Int8: rows packed in groups of 64 as batchgen/ops/quant.py describes
// them.
enum class Type : int { F32 = 0, BF16 = 1, F16 = 2, Int5 = 3, Int8 = 4, Int4 = 5 };

// Bytes of a number of one of the first three.
inline int element_bytes(Type type) { return type == Type::F32 ? 4 : 2; }

enum class Activation : int {
    None = 0,
    Relu = 1,
    Gelu = 2,
    GeluTanh = 3,
    SiluMul = 4,
    GeluTanhMul = 5,
    SwigluOaiMul = 6,
    GeluMul = 7
};
// Whether an activation takes two columns, one of them the gate of the other.
inline bool is_gated(Activation activation) { return activation >= Activation::SiluMul; }

constexpr int kGroup = 64;  // values of a group of quantized KV
constexpr int kMaxHeadDim = 512;
constexpr int kTileRows = 288;           // query rows of an item, at most: whole tiles of 12 or 6
constexpr int kMostHeads = 64;           // KV heads of an item, at most
constexpr int kAllKeys = INT32_MAX / 2;  // `causal` of tokens that see all keys
constexpr int kNoWindow = INT32_MAX;

// Bits of a quantized value; 0 where numbers are stored as they are.
inline int code_bits(Type type) {
    switch (type) {
        case Type::Int4: return 4;
        case Type::Int5: return 5;
        case Type::Int8: return 8;
        default: return 0;
    }
}
// Bytes of a group of up to kGroup values: with 4 and 5 bits each byte has the nibbles of two, with 5 bits the fifth
// bits of both halves follow.
inline int group_bytes(int size, int bits) {
    const int half = (size + 1) / 2;
    return bits == 8 ? size : bits == 5 ? half + 2 * ((half + 7) / 8) : half;
}
// Bytes of the values of a quantized row of n; its table of (scale, minimum) follows.
inline int code_bytes(int n, int bits) {
    return n / kGroup * group_bytes(kGroup, bits) + group_bytes(n % kGroup, bits);
}
inline int packed_bytes(int n, int bits) { return code_bytes(n, bits) + (n + kGroup - 1) / kGroup * 4; }

// ---- attention -----------------------------------------------------------------------------------------------------

// The KV of one layer, [blocks, 2, kv_heads, block_size, row], K before V.
struct KV {
    uint8_t* data;
    Type type;
    int64_t block_bytes, head_bytes, value_offset, row_bytes;
    int block_size, kv_heads, head_dim;
};

// The operands of attention.
struct Attention {
    const void* q;                 // [tokens, heads, head_dim], scaled
    void* out;                     // [tokens, heads, head_dim], of q's type
    int64_t q_stride, out_stride;  // values from token to token
    Type type;
    int heads;
    float softcap;       // scores become softcap tanh(score / softcap); 0: they stay
    const float* sinks;  // [heads], a score without a key, which takes its part of the softmax (gpt-oss); or null
    KV kv;
    float* partial;  // [rows, head_dim + 2]: result before normalisation, maximum score, sum of softmax weights
};

// A range of keys for some of an item's tokens [first_token, first_token + num_tokens), counted from the item's first.
// Token i of them sees the keys k of [first_key, last_key) with k <= causal + i and k > causal + i - window.
struct AttentionSpan {
    int32_t first_token, num_tokens;
    int32_t first_key, last_key, causal, window;
    const int32_t* blocks;
};

// Some query tokens and KV heads, at most kTileRows rows, and their keys.
struct AttentionItem {
    int32_t first_token, num_tokens, first_head, num_heads;
    const AttentionSpan* spans;
    int32_t num_spans;
    int64_t partial_row;  // first of [heads, tokens, group] rows; -1: these are all keys of the tokens
};

// A query head of a token whose keys are in several parts: rows of `partial` to merge.
struct Merge {
    int32_t token, head, first, count;  // rows[first .. first + count)
};

// Pages to summarise: of each block and KV head the smallest and then the largest number of each channel of its keys.
struct PageSummaries {
    KV kv;
    const int64_t* blocks;   // of the KV
    const int64_t* targets;  // of the summaries
    void* out;               // [blocks, kv_heads, 2, head_dim]
    Type type;               // of it
};

// The operands of scores of pages.
constexpr int kPageQueries = 8;  // rows of scratch memory
struct PageScores {
    const void* q;     // [tokens, heads, head_dim]
    int64_t q_stride;  // values from token to token
    Type type;
    int heads, kv_heads, head_dim;
    const void* summaries;  // [blocks, kv_heads, 2, head_dim]
    Type summary_type;
};

// ---- linear layers -------------------------------------------------------------------------------------------------

// Block formats, numbered as in GGUF files; from 1000 on those that are in no GGUF (quant/int4_groups.h, quant/fp8.h).
enum class BlockType : int {
    F32 = 0,
    F16 = 1,
    Q4_0 = 2,
    Q4_1 = 3,
    Q5_0 = 6,
    Q5_1 = 7,
    Q8_0 = 8,
    Q2_K = 10,
    Q3_K = 11,
    Q4_K = 12,
    Q5_K = 13,
    Q6_K = 14,
    IQ4_NL = 20,
    IQ4_XS = 23,
    BF16 = 30,
    MXFP4 = 39,
    W4_G32 = 1032,
    W4_G64 = 1064,
    W4_G128 = 1128,
    FP8_G32 = 2032,
    FP8_G128 = 2128
};

// out [M, N] = activation(x [M, K] w^T + bias) + residual, w [N, K]. With a gated activation the first half of w's rows
// is the gate, and out has N / 2 columns.
//
// With `int8` the rows of w are quantized as batchgen/ops/int8.py describes, x is quantized on the way, and sums are
// exact integers.
//
// With a `packing` other than F32 w is block-quantized: rows as they lie in a file (quant/blocks.h), or with `packed`
// panels (matmul/block_panels.h).
struct Linear {
    const void* x;         // [M, K]
    const void* packed_x;  // x as `pack_rows` makes it, where a LinearCut asks for it
    const void* w;         // [N, K], or panels (prepack_panels, prepack_block_panels)
    const void* bias;      // [N] or null
    const void* residual;  // of the shape of out, or null
    void* out;
    // Numbers from row to row; bytes of a row of w with `int8` or a packing, also where w is panels.
    int64_t x_stride, w_stride, residual_stride, out_stride;
    int64_t m, n, k;
    Type type, out_type;  // of x, w, bias and residual; of out
    Activation activation;
    bool packed, int8;
    bool unpacked;      // w is what prepack_panels makes of block-quantized rows
    BlockType packing;  // F32: w has x's type
};

// The best cut of a linear layer into calls.
struct LinearCut {
    int64_t row_tile;             // rows of a call are a multiple of it
    int64_t rows;                 // rows of a call, at most
    int64_t panels, most_panels;  // panels of a call where there is enough for all threads, and at most
    int64_t packed_bytes;         // bytes of x as `pack_rows` makes it before all calls; 0: x is read as it lies
    int64_t group;                // rows of a group of `pack_rows`
    bool by_rows;                 // threads take parts of many rows, which each packs for itself
    bool keeps_quants;            // panels that are unpacked for many rows stay quantized (matmul/quant_panels.h)
};

// The products of tile registers.
enum class TileProduct : int { BF16 = 0, I8 = 1, U8 = 2 };

// ---- state layers --------------------------------------------------------------------------------------------------

// The sequences of a batch whose states are in slots. Tokens are packed: those of sequence i are [starts[i],
// starts[i + 1]). Its state before them is in slot source[i], or is zero where that is negative; its state after them
// goes to slot target[i], which no other sequence reads or writes.
struct StateSlots {
    const int64_t* source;
    const int64_t* target;
    const int64_t* starts;
};

// The causal convolution of each channel over the tokens of each sequence. A state has the last kernel - 1 inputs of
// each channel, the oldest first.
struct CausalConv {
    const void* x;       // [tokens, channels]
    const void* weight;  // [channels, kernel], that of the oldest input first
    const void* bias;    // [channels] or null
    void* states;        // [slots, channels, kernel - 1]
    void* out;           // [tokens, channels]
    StateSlots slots;
    int64_t x_stride, out_stride, state_stride;  // numbers from token to token, and from slot to slot
    int64_t channels;
    int kernel;
    bool silu;
    Type type;  // of all
};

// Tokens [first, stop) of the sequences [sequence, sequence_stop), and channels: a part of one sequence's tokens, or
// all tokens of each.
struct ConvPiece {
    int64_t sequence, sequence_stop, first, stop, channel, channel_stop;
};

// The gated delta rule. For each token and value head the state S [key_dim, value_dim] becomes exp(g) S, then
// beta k (v - S^T k)^T is added to it, and S^T q is the result.
struct DeltaRule {
    const void* qkv;    // [tokens, 2 key_heads * key_dim + value_heads * value_dim]
    const float* g;     // [tokens, value_heads]
    const float* beta;  // [tokens, value_heads]
    void* states;       // [slots, value_heads, key_dim, value_dim]
    void* out;          // [tokens, value_heads, value_dim]
    StateSlots slots;
    int64_t qkv_stride, state_stride;  // numbers from token to token, and from slot to slot
    int key_heads, value_heads, key_dim, value_dim;
    Type type, state_type;  // of qkv and out; of states, fp32 or bf16
};

// Value heads [head, head_stop) of a sequence, which share a key head.
struct DeltaPiece {
    int64_t sequence;
    int head, head_stop;
};

// g = -exp(a_log) softplus(a + dt_bias) and beta = sigmoid(b).
struct DeltaGates {
    const void* a;  // [tokens, heads]
    const void* b;
    const float* a_log;  // [heads]
    const float* dt_bias;
    float* g;  // [tokens, heads]
    float* beta;
    int64_t a_stride, b_stride;
    int64_t heads;
    Type type;  // of a and b
};

// out = RMSNorm(x) weight silu(gate) of each head, or x sigmoid(gate) where weight is null.
struct Gated {
    const void* x;       // [tokens, heads, columns]
    const void* gate;    // of x's shape
    const void* weight;  // [columns] or null
    void* out;
    int64_t gate_stride;  // numbers from token to token
    int64_t heads, columns;
    Type type;
    float eps;
};

// ---- other kernels -------------------------------------------------------------------------------------------------

// RMSNorm or LayerNorm of rows.
struct Norm {
    const void* x;
    const void* weight;
    const void* bias;  // null: RMSNorm
    void* out;
    int64_t x_stride, out_stride;
    int64_t columns;
    Type type;
    float eps;
};

// Rotary embedding of fused QKV; K and V go to their slots in the KV.
struct RotaryStore {
    const void* qkv;   // [tokens, heads + 2 kv_heads, head_dim]
    void* q_out;       // [tokens, heads, head_dim], scaled
    const float* cos;  // [positions, head_dim / 2] or null
    const float* sin;
    const int64_t* positions;  // [tokens]
    const int64_t* slots;      // [tokens], block * block_size + offset
    const void* q_norm;        // [head_dim] weights of an RMSNorm over each head, or null
    const void* k_norm;
    const float* rotation;  // [head_dim, head_dim], multiplied with queries and keys; or null
    int64_t qkv_stride;
    Type type;
    int heads;
    float scale, eps;
    KV kv;  // data null: K and V go to k_out, v_out [tokens, kv_heads, head_dim]
    void* k_out;
    void* v_out;
};

// out[t] = the sum over j of shares[t][j] made[rows[t][j]], in the order of j.
struct WeightedSums {
    const void* made;     // [rows, columns]
    const int64_t* rows;  // [tokens, choices]
    const float* shares;  // [tokens, choices]
    void* out;            // [tokens, columns], of the type of `made` or in fp32
    int64_t columns;
    int choices;
    Type type;
    bool in_fp32;
};

// Quantization in groups (quant/groups.h, quant/fit.h).
struct Quant {
    const void* x;    // [rows, columns]
    uint8_t* packed;  // [rows, row_bytes]
    void* out;
    int64_t rows, columns, row_bytes;
    Type type;
    int bits;             // of a value
    const float* shares;  // [columns] parts of a squared error that is to be small (quant/fit.h)
};

// Block-quantized rows to dequantize (quant/blocks.h).
struct Blocks {
    const uint8_t* packed;  // [rows, row_bytes]
    void* out;              // [rows, columns]
    int64_t columns, row_bytes;
    int64_t interleaved;  // so many rows at a time are those of two halves in turn, to be put in order; 0: none
    BlockType packing;
    Type type;
};

// The argmax of rows of logits.
struct Argmax {
    const float* logits;
    int64_t stride, columns;
    int64_t* index;  // [rows], the first of the largest
    float* maximum;  // [rows]
    float* lse;      // [rows] log of the sum of exponentials, or null
};

// The kernels of one instruction set.
struct Kernels {
    const char* name;
    int width;       // floats of a vector
    bool fast_bf16;  // has products of bf16 pairs
    int panel;       // columns of a panel
    // Bytes of scratch memory of a call, aligned to 64.
    int64_t (*attention_scratch)(const Attention&);
    int64_t (*linear_scratch)(const Linear&, int64_t rows, int64_t panels);
    void (*attend)(const Attention&, const AttentionItem* items, int64_t count, void* scratch);
    void (*merge)(const Attention&, const Merge&, const int64_t* rows);
    void (*summarise_pages)(const PageSummaries&, int64_t page, int64_t stop);
    // Scores of pages for a token's queries. Scratch memory has kPageQueries rows, each with `count` numbers rounded up
    // to 16, as `out` has.
    void (*page_scores)(const PageScores&, int64_t token, const int32_t* pages, int64_t count, float* bounds,
                        float* out);
    LinearCut (*linear_cut)(const Linear&);
    int64_t (*panel_bytes)(const Linear&);  // bytes of a panel as prepack_panels makes it
    // Packs groups [group, stop) of rows of x, each to its place among all of them.
    void (*pack_rows)(const Linear&, int64_t group, int64_t stop, void* out);
    // Rows [row, row_stop) times panels [panel, panel_stop); next_panel is what the thread probably works on then.
    void (*linear)(const Linear&, int64_t row, int64_t row_stop, int64_t panel, int64_t panel_stop, int64_t next_panel,
                   void* scratch);
    void (*prepack_panels)(const Linear&, int64_t panel, int64_t panel_stop, void* out);
    // Panels of block-quantized weights, `panel` times w_stride bytes each.
    void (*prepack_block_panels)(const Linear&, int64_t panel, int64_t panel_stop, void* out);
    // Writes rows rows[first], ..., rows[stop - 1] of a prepacked w to out [rows, K].
    void (*rows_of_panels)(const Linear&, const int64_t* rows, int64_t first, int64_t stop, void* out);
    void (*norm)(const Norm&, int64_t row, int64_t stop);
    void (*weighted_sums)(const WeightedSums&, int64_t token, int64_t stop);
    void (*rotary_store)(const RotaryStore&, int64_t token, int64_t stop);
    // The results of a piece; of sequences with all their tokens in it also the states after them.
    void (*causal_conv)(const CausalConv&, const ConvPiece&);
    // The states after all tokens of a piece's sequences, whose tokens are in several pieces.
    void (*causal_conv_state)(const CausalConv&, const ConvPiece&);
    // Bytes of scratch memory of a call of the next two.
    int64_t (*delta_scratch)(const DeltaRule&);
    // Pairs [pair, stop) of a sequence, which has one token, and a value head: pair / value_heads is its place in
    // `sequences`.
    void (*delta_steps)(const DeltaRule&, const int64_t* sequences, int64_t pair, int64_t stop, void* scratch);
    // All tokens of a piece, in chunks.
    void (*delta_chunks)(const DeltaRule&, const DeltaPiece&, void* scratch);
    void (*delta_gates)(const DeltaGates&, int64_t token, int64_t stop);
    void (*gated)(const Gated&, int64_t row, int64_t stop);  // rows of [tokens, heads]
    void (*quantize)(const Quant&, int64_t row, int64_t stop);
    void (*quantize_fitted)(const Quant&, int64_t row, int64_t stop);  // best with `width` rows
    void (*dequantize)(const Quant&, int64_t row, int64_t stop);
    void (*unpack_blocks)(const Blocks&, int64_t row, int64_t stop);
    void (*argmax)(const Argmax&, int64_t row, int64_t stop);
    void (*softmax_weights)(const float* logits, int64_t columns, float temperature, float* out);
    // c [rows, 16] += a [rows, 64 bytes] b [16, 64 bytes] in tile registers, or null where there are none.
    void (*tile_dot)(TileProduct kind, int rows, const void* a, const void* b, void* c);
};

}  // namespace batchgen
