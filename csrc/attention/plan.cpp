#include "attention/plan.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace batchgen {
namespace {

constexpr int kPartKeys = 1024;
constexpr int kTileKeys = 64;
// K and V of a tile of keys, of all heads of an item, at most and at least: a core's cache has it beside the next one,
// which is fetched meanwhile, and what products use. Longer runs of memory are read faster, until the next tile pushes
// this one out.
constexpr long kMostTileBytes = 256 << 10, kFewestTileBytes = 32 << 10;
constexpr int kHeadRows = 72;  // rows of several heads together: with more there is nothing to gain from it

int tile_bytes() {
    static const int bytes = [] {
#ifdef _SC_LEVEL2_CACHE_SIZE
        const long cache = sysconf(_SC_LEVEL2_CACHE_SIZE);
        if (cache > 0) return int(std::clamp(cache / 4, kFewestTileBytes, kMostTileBytes));
#endif
        return int(kMostTileBytes);  // not known
    }();
    return bytes;
}

}  // namespace

int64_t cost(const AttentionItem& item) {
    int64_t keys = 0;
    for (int i = 0; i < item.num_spans; i++) {
        const AttentionSpan& span = item.spans[i];
        keys += int64_t(span.last_key - span.first_key) * (span.num_tokens + 4);
    }
    return keys * item.num_heads;
}

AttentionPlan::AttentionPlan(int kv_heads, int group, int block_size, int row_bytes)
    : kv_heads_(kv_heads),
      group_(group),
      block_size_(block_size),
      most_heads_(std::clamp(tile_bytes() / (2 * kTileKeys * row_bytes), 1, kMostHeads)) {}

const int32_t* AttentionPlan::keep(const int32_t* blocks, int count) {
    blocks_.push_back(std::make_unique<int32_t[]>(std::max(1, count)));
    std::memcpy(blocks_.back().get(), blocks, count * sizeof *blocks);
    return blocks_.back().get();
}

void AttentionPlan::add(int first_token, int num_tokens, std::vector<AttentionSpan> spans) {
    num_tokens_ = std::max(num_tokens_, first_token + num_tokens);
    spans_.push_back(std::make_unique<AttentionSpan[]>(spans.size()));
    std::copy(spans.begin(), spans.end(), spans_.back().get());
    // Heads of a block lie next to each other: as many as fit are read together.
    const int most = std::max(1, std::min(most_heads_, kHeadRows / (num_tokens * group_)));
    const int pieces = (kv_heads_ + most - 1) / most, heads = (kv_heads_ + pieces - 1) / pieces;
    for (int head = 0; head < kv_heads_; head += heads)
        items_.push_back({first_token, num_tokens, head, std::min(heads, kv_heads_ - head), spans_.back().get(),
                          int32_t(spans.size()), -1});
}

void AttentionPlan::add_decode(int start, int sequences, const int32_t* blocks, int stride, const int64_t* num_keys,
                               const int64_t* first_key) {
    const int32_t* kept = keep(blocks, sequences * stride);
    for (int i = 0; i < sequences; i++) {
        const int first = int(first_key[i]);
        add_query(start + i, kept + int64_t(i) * stride, first, std::max(0, int(num_keys[i]) - first));
    }
}

void AttentionPlan::add_chosen(int token, const int32_t* blocks, int num_keys) {
    add_query(token, blocks, 0, num_keys);
}

// Adds a query that sees `count` keys from `first` on, in parts.
void AttentionPlan::add_query(int token, const int32_t* blocks, int first, int count) {
    const int parts = std::max(1, (count + kPartKeys - 1) / kPartKeys);
    const int size = ((count + parts - 1) / parts + kTileKeys - 1) / kTileKeys * kTileKeys;
    for (int part = 0; part == 0 || part * size < count; part++)
        add(token, 1,
            {{0, 1, first + part * size, first + std::min(count, (part + 1) * size), kAllKeys, kNoWindow, blocks}});
}

void AttentionPlan::add_sequences(int sequences, const int64_t* start, const int64_t* num_tokens, const int64_t* offset,
                                  const int64_t* places, const int32_t* blocks, int num_blocks, int window, int ahead) {
    const int32_t* kept = keep(blocks, num_blocks);
    for (int i = 0; i < sequences; i++)
        prompts_.push_back(
            {int(start[i]), int(start[i] + num_tokens[i]), kept + places[i], int(offset[i]), window, ahead});
}

void AttentionPlan::add_shared(int start, int stop, const int32_t* blocks, int num_blocks) {
    shared_.push_back({start, stop, keep(blocks, num_blocks), num_blocks * block_size_});
}

// Tokens [start, stop) in tiles: those of prompts with their own keys, after the keys that all of them share.
void AttentionPlan::add_prompts(const Shared* shared, int start, int stop) {
    const int most = std::max(1, kTileRows / group_);
    auto prompt = std::lower_bound(prompts_.begin(), prompts_.end(), start,
                                   [](const Prompt& p, int token) { return p.stop <= token; });
    for (int first = start; first < stop; first += most) {
        const int last = std::min(stop, first + most);
        std::vector<AttentionSpan> spans;
        if (shared) spans.push_back({0, last - first, 0, shared->num_keys, kAllKeys, kNoWindow, shared->blocks});
        for (; prompt != prompts_.end() && prompt->start < last; prompt++) {
            const int from = std::max(first, prompt->start), to = std::min(last, prompt->stop);
            const int at = prompt->offset + from - prompt->start, window = prompt->window;
            // The kernel counts a window from the last key that a query sees.
            const int ahead = std::min(prompt->ahead, prompt->num_keys());
            spans.push_back({from - first, to - from, window ? std::max(0, at - window + 1) : 0,
                             std::min(at + to - from + ahead, prompt->num_keys()), at + ahead,
                             window ? window + ahead : kNoWindow, prompt->blocks});
            if (prompt->stop > last) break;
        }
        add(first, last - first, std::move(spans));
    }
}

void AttentionPlan::cut_prompts() {
    const auto before = [](const auto& a, const auto& b) { return a.start < b.start; };
    std::sort(prompts_.begin(), prompts_.end(), before);
    std::sort(shared_.begin(), shared_.end(), before);
    auto shared = shared_.begin();
    // Sequences that share keys are next to each other, those of them that decode by themselves.
    for (size_t i = 0; i < prompts_.size();) {
        while (shared != shared_.end() && shared->stop <= prompts_[i].start) shared++;
        const bool shares = shared != shared_.end() && shared->start <= prompts_[i].start;
        size_t stop = i + 1;
        while (shares && stop < prompts_.size() && prompts_[stop].start == prompts_[stop - 1].stop &&
               prompts_[stop].start < shared->stop)
            stop++;
        add_prompts(shares ? &*shared : nullptr, prompts_[i].start, prompts_[stop - 1].stop);
        i = stop;
    }
    auto prompt = prompts_.begin();
    for (const Shared& given : shared_) {
        for (int token = given.start; token < given.stop;) {
            while (prompt != prompts_.end() && prompt->stop <= token) prompt++;
            const bool inside = prompt != prompts_.end() && prompt->start <= token;
            const int stop =
                prompt == prompts_.end() ? given.stop : std::min(given.stop, inside ? prompt->stop : prompt->start);
            if (!inside) add_prompts(&given, token, stop);
            token = stop;
        }
    }
}

// Tokens whose keys are in several items: their results are put together afterwards.
void AttentionPlan::mark_partial() {
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
}

void AttentionPlan::finish() {
    cut_prompts();
    mark_partial();
    for (const AttentionItem& item : items_) cost_ += batchgen::cost(item);
    // The longest first: no thread is left with one at the end.
    std::stable_sort(items_.begin(), items_.end(), [](const AttentionItem& a, const AttentionItem& b) {
        return batchgen::cost(a) > batchgen::cost(b);
    });
}

}  // namespace batchgen
