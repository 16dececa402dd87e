#include "plan.h"

#include <algorithm>
#include <cstring>

namespace batchgen {
namespace {

constexpr int kTileRows = 72;
constexpr int kPartKeys = 1024;
constexpr int kTileKeys = 64;

int64_t cost(const AttentionItem& item) { return int64_t(item.last_key - item.first_key) * (item.num_tokens + 4); }

}  // namespace

const int32_t* AttentionPlan::keep(const int32_t* blocks, int count) {
    blocks_.push_back(std::make_unique<int32_t[]>(std::max(1, count)));
    std::memcpy(blocks_.back().get(), blocks, count * sizeof *blocks);
    return blocks_.back().get();
}

void AttentionPlan::add(int first_token, int num_tokens, int first_key, int last_key, int64_t causal, int64_t window,
                        const int32_t* blocks) {
    num_tokens_ = std::max(num_tokens_, first_token + num_tokens);
    for (int head = 0; head < kv_heads_; head++)
        items_.push_back({first_token, num_tokens, head, first_key, last_key, int32_t(std::min<int64_t>(causal, kAllKeys)),
                          int32_t(std::min<int64_t>(window, kNoWindow)), blocks, -1});
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
        if (item.kv_head == 0)
            for (int i = 0; i < item.num_tokens; i++) parts[item.first_token + i]++;
    std::vector<std::vector<int64_t>> rows(num_tokens_);  // of KV head 0; then of the next one, ...
    for (AttentionItem& item : items_) {
        bool several = false;
        for (int i = 0; i < item.num_tokens; i++) several |= parts[item.first_token + i] > 1;
        if (!several) continue;
        item.partial_row = partial_rows_;
        for (int i = 0; i < item.num_tokens; i++) rows[item.first_token + i].push_back(partial_rows_ + int64_t(i) * group_);
        partial_rows_ += int64_t(item.num_tokens) * group_;
    }
    for (int token = 0; token < num_tokens_; token++) {
        const auto& found = rows[token];  // the KV heads of one part follow each other
        if (found.empty()) continue;
        const int count = int(found.size()) / kv_heads_;
        for (int head = 0; head < kv_heads_ * group_; head++) {
            merges_.push_back({token, head, int32_t(merge_rows_.size()), count});
            for (int part = 0; part < count; part++)
                merge_rows_.push_back(found[part * kv_heads_ + head / group_] + head % group_);
        }
    }
    // The longest first: no thread is left with one at the end. KV heads of the same keys stay together.
    std::stable_sort(items_.begin(), items_.end(),
                     [](const AttentionItem& a, const AttentionItem& b) { return cost(a) > cost(b); });
}

}  // namespace batchgen
