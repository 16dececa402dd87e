// How the attention of a batch is cut into items, made once and used by every layer.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels.h"

namespace batchgen {

// What an item takes, in some unit.
int64_t cost(const AttentionItem& item);

// Tokens are cut so that their rows fill a tile of the kernel; keys of a single query into parts of equal size. Neither
// depends on what else is in the batch, or on the number of threads: nor does the result.
class AttentionPlan {
  public:
    // row_bytes: of K of one token and KV head.
    AttentionPlan(int kv_heads, int group, int block_size, int row_bytes);

    // Sequences of one query each: token start + i sees keys [first_key[i], num_keys[i]) of blocks[i * stride ...].
    void add_decode(int start, int sequences, const int32_t* blocks, int stride, const int64_t* num_keys,
                    const int64_t* first_key);
    // Queries [start, stop) of one sequence, the first at key `offset`; window: keys that each sees, or 0: all before it.
    void add_prefill(int start, int stop, const int32_t* blocks, int num_blocks, int offset, int window);
    // Queries [start, stop) of several sequences that see every key of the blocks.
    void add_shared(int start, int stop, const int32_t* blocks, int num_blocks);
    // Puts items in order; call once, after the last of them.
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
    void add(int first_token, int num_tokens, int first_key, int last_key, int64_t causal, int64_t window,
             const int32_t* blocks);
    const int32_t* keep(const int32_t* blocks, int count);

    int kv_heads_, group_, block_size_, most_heads_, num_tokens_ = 0;
    int64_t partial_rows_ = 0, cost_ = 0;
    std::vector<std::unique_ptr<int32_t[]>> blocks_;
    std::vector<AttentionItem> items_;
    std::vector<Merge> merges_;
    std::vector<int64_t> merge_rows_;
};

}  // namespace batchgen
