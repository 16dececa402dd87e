// The plan of a batch's attention: items for threads, made once a sweep and used by every layer.
#pragma once
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "kernels.h"

namespace batchgen {

// The relative cost of an item.
int64_t cost(const AttentionItem& item);

// Cuts attention into items: tokens of prompts so that their rows fill a tile of the kernel, keys of a single query
// into parts of equal size. With shared keys, tokens of several prompts fill a tile together, and each goes on to its
// own keys. A row's result depends on its own keys and on where they are shared, not on the rest of the batch or on the
// number of threads.
class AttentionPlan {
  public:
    // row_bytes: bytes of K of one token and KV head.
    AttentionPlan(int kv_heads, int group, int block_size, int row_bytes);

    // Adds sequences of one query each: token start + i sees keys [first_key[i], num_keys[i]) of blocks[i * stride
    // ...].
    void add_decode(int start, int sequences, const int32_t* blocks, int stride, const int64_t* num_keys,
                    const int64_t* first_key);
    // Adds one query that sees the first num_keys keys of blocks, which may be other ones at each call: they are not
    // copied.
    void add_chosen(int token, const int32_t* blocks, int num_keys);
    // Adds sequences of several queries each: sequence i has num_tokens[i] from start[i] on, the first at key offset[i]
    // of the blocks from places[i] on, and the last at its last key. window: keys up to its own that each query sees;
    // 0: all. ahead: keys after its own that each query sees; 0 in causal attention.
    void add_sequences(int sequences, const int64_t* start, const int64_t* num_tokens, const int64_t* offset,
                       const int64_t* places, const int32_t* blocks, int num_blocks, int window, int ahead);
    // Adds queries [start, stop) of several sequences that see every key of the blocks, beside their own keys.
    void add_shared(int start, int stop, const int32_t* blocks, int num_blocks);
    // The instruction set that attends; "": the active one.
    std::string isa;

    // Sorts the items; to be called once, after the last of them.
    void finish();

    int kv_heads() const { return kv_heads_; }
    int group() const { return group_; }
    int block_size() const { return block_size_; }
    int num_tokens() const { return num_tokens_; }
    int64_t cost() const { return cost_; }
    int64_t partial_rows() const { return partial_rows_; }
    const std::vector<AttentionItem>& items() const { return items_; }
    const std::vector<Merge>& merges() const { return merges_; }
    const std::vector<int64_t>& merge_rows() const { return merge_rows_; }

  private:
    // Queries [start, stop) of a sequence at keys `offset` and on of `blocks`; and queries that share keys.
    struct Prompt {
        int start, stop;
        const int32_t* blocks;
        int offset, window, ahead;

        int num_keys() const { return offset + stop - start; }
    };
    struct Shared {
        int start, stop;
        const int32_t* blocks;
        int num_keys;
    };

    void add_query(int token, const int32_t* blocks, int first, int count);
    void add(int first_token, int num_tokens, std::vector<AttentionSpan> spans);
    void cut_prompts();
    void add_prompts(const Shared* shared, int start, int stop);
    void mark_partial();
    const int32_t* keep(const int32_t* blocks, int count);

    int kv_heads_, group_, block_size_, most_heads_, num_tokens_ = 0;
    int64_t partial_rows_ = 0, cost_ = 0;
    std::vector<std::unique_ptr<int32_t[]>> blocks_;
    std::vector<std::unique_ptr<AttentionSpan[]>> spans_;
    std::vector<Prompt> prompts_;  // sorted by their tokens
    std::vector<Shared> shared_;
    std::vector<AttentionItem> items_;
    std::vector<Merge> merges_;
    std::vector<int64_t> merge_rows_;
};

}  // namespace batchgen
