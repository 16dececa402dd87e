#include "plan.h"

#include <algorithm>
#include <cstring>

namespace batchgen {
namespace {

constexpr int kPartKeys = 1024;
constexpr int kTileKeys = 64;
// K and V of a tile of keys, of all heads of an item: this much stays in a core's cache while the next comes in.
constexpr int kTileBytes = 128 << 10;

}  // namespace

int64_t cost(const AttentionItem& item) {
    return int64_t(item.last_key - item.first_key) * item.num_heads * (item.num_tokens + 4);
}

AttentionPlan::AttentionPlan(int kv_heads, int group, int block_size, int row_bytes)
    : kv_heads_(kv_heads), group_(group), block_size_(block_size),
      most_heads_(std::max(1, kTileBytes / (2 * kTileKeys * row_bytes))) {}

const int32_t* AttentionPlan::keep(const int32_t* blocks, int count) {
    blocks_.push_back(std::make_unique<int32_t[]>(std::max(1, count)));
    std::memcpy(blocks_.back().get(), blocks, count * sizeof *blocks);
    return blocks_.back().get();
}

void AttentionPlan::add(int first_token, int num_tokens, int first_key, int last_key, int64_t causal, int64_t window,
                        const int32_t* blocks) {
    num_tokens_ = std::max(num_tokens_, first_token + num_tokens);
    // Heads of a block lie next to each other: as many as there is room for are read together.
    const int most = std::max(1, std::min(most_heads_, kTileRows / (num_tokens * group_)));
    const int pieces = (kv_heads_ + most - 1) / most, heads = (kv_heads_ + pieces - 1) / pieces;
    for (int head = 0; head < kv_heads_; head += heads)
        items_.push_back({first_token, num_tokens, head, std::min(heads, kv_heads_ - head), first_key, last_key,
                          int32_t(std::min<int64_t>(causal, kAllKeys)), int32_t(std::min<int64_t>(window, kNoWindow)),
                          blocks, -1});
}

void AttentionPlan::add_decode(int start, int sequences, const int32_t* blocks, int stride, const int64_t* num_keys,
                               const int64_t* first_key) {
    const int32_t* kept = keep(blocks, sequences * stride);
    for (int i = 0; i < sequences; i++) {
        const int first = int(first_key[i]), count = std::max(0, int(num_keys[i]) - first);
        const int parts = std::max(1, (count + kPartKeys - 1) / kPartKeys);
        const int size = ((count + parts - 1) / parts + kTileKeys - 1) / kTileKeys * kTileKeys;
        for (int part = 0; part == 0 || part * size < count; part++)
            add(start + i, 1, first + part * size, first + std::min(count, (part + 1) * size), kAllKeys, kNoWindow,
                kept + int64_t(i) * stride);
    }
}

void AttentionPlan::add_prefill(int start, int stop, const int32_t* blocks, int num_blocks, int offset, int window) {
    const int32_t* kept = keep(blocks, num_blocks);
    const int tokens = std::max(1, kTileRows / group_);
    for (int first = start; first < stop; first += tokens) {
        const int count = std::min(tokens, stop - first), at = offset + first - start;
        add(first, count, window ? std::max(0, at - window + 1) : 0, at + count, at, window ? window : kNoWindow, kept);
    }
}

void AttentionPlan::add_shared(int start, int stop, const int32_t* blocks, int num_blocks) {
    const int32_t* kept = keep(blocks, num_blocks);
    const int tokens = std::max(1, kTileRows / group_);
    for (int first = start; first < stop; first += tokens)
        add(first, std::min(tokens, stop - first), 0, num_blocks * block_size_, kAllKeys, kNoWindow, kept);
}

void AttentionPlan::finish() {
    // Tokens whose keys are in several items: their results are put together afterwards.
    std::vector<int> parts(num_tokens_);
    for (const AttentionItem& item : items_)
        if (item.first_head == 0)
            for (int i = 0; i < item.num_tokens; i++) parts[item.first_token + i]++;
    std::vector<std::vector<int64_t>> rows;  // by token and KV head, of each part its first row
    for (AttentionItem& item : items_) {
        bool several = false;
        for (int i = 0; i < item.num_tokens; i++) several |= parts[item.first_token + i] > 1;
        if (!several) continue;
        rows.resize(int64_t(num_tokens_) * kv_heads_);
        item.partial_row = partial_rows_;
        for (int h = 0; h < item.num_heads; h++)
            for (int i = 0; i < item.num_tokens; i++, partial_rows_ += group_)
                rows[int64_t(item.first_token + i) * kv_heads_ + item.first_head + h].push_back(partial_rows_);
    }
    for (int64_t i = 0; i < int64_t(rows.size()); i++) {
        if (rows[i].empty()) continue;
        for (int g = 0; g < group_; g++) {
            merges_.push_back({int32_t(i / kv_heads_), int32_t(i % kv_heads_ * group_ + g), int32_t(merge_rows_.size()),
                               int32_t(rows[i].size())});
            for (int64_t row : rows[i]) merge_rows_.push_back(row + g);
        }
    }
    for (const AttentionItem& item : items_) cost_ += batchgen::cost(item);
    // The longest first: no thread is left with one at the end.
    std::stable_sort(items_.begin(), items_.end(),
                     [](const AttentionItem& a, const AttentionItem& b) { return batchgen::cost(a) > batchgen::cost(b); });
}

}  // namespace batchgen
