#include "matmul/parallel.h"

#include <algorithm>

#include "pool.h"

namespace batchgen {
namespace {

constexpr int64_t kManyRows = 64;  // of each thread: with fewer, threads take panels

// The calls of the kernels that the panels [first, stop) of a linear layer take.
struct PanelCalls {
    const Kernels& kernels;
    Linear args;
    const LinearCut& cut;
    int64_t first, stop, block, blocks, piece, pieces;
    int64_t groups, groups_at_once, packs;  // groups of rows of x that are packed before the calls

    // beside: the number of other layers that run at the same time, of about the same size.
    PanelCalls(const Kernels& kernels, const Linear& given, const LinearCut& cut, int64_t first, int64_t stop,
               int64_t beside = 0)
        : kernels(kernels), args(given), cut(cut), first(first), stop(stop) {
        const int64_t panels = stop - first, k = kernels.panel_bytes(args) / (4 * kernels.panel), tile = cut.row_tile;
        // As many rows in a call as the kernels want; fewer where threads would have nothing to do.
        blocks = (args.m + cut.rows - 1) / cut.rows;
        while ((beside + 1) * blocks * panels < 3 * num_threads() && args.m > blocks * tile) blocks++;
        block = ((args.m + blocks - 1) / blocks + tile - 1) / tile * tile;
        blocks = (args.m + block - 1) / block;
        // Pieces of at least a microsecond or two.
        const int64_t panel_cost = std::min(args.m, block) * k * kernels.panel;
        piece =
            std::clamp<int64_t>((1 << 19) / std::max<int64_t>(1, panel_cost), cut.panels, std::max(cut.panels, panels));
        // Many for each thread, so that none waits long for the last; fewer where panels share the blocks of x.
        const int64_t share = (beside + 1) * blocks * panels / num_threads();
        piece = std::max<int64_t>(1, std::min(piece, std::max(share / 12, std::min(share / 4, cut.panels))));
        // A gated panel makes half a panel of results: two together, or threads would write to the same lines of
        // memory. Small M is multiplied with two block-quantized panels at a time: a single one would be multiplied
        // twice.
        if (is_gated(args.activation) || (args.packed && args.packing != BlockType::F32)) piece += piece % 2;
        piece = std::min(piece, cut.most_panels);
        pieces = (panels + piece - 1) / piece;
        groups = cut.packed_bytes ? (args.m + cut.group - 1) / cut.group : 0;
        groups_at_once = groups ? std::max<int64_t>(1, 32768 * groups / cut.packed_bytes) : 1;
        packs = (groups + groups_at_once - 1) / groups_at_once;
    }
    int64_t count() const { return blocks * pieces; }
    void pack(int64_t i, void* packed) const {
        kernels.pack_rows(args, i * groups_at_once, std::min(groups, (i + 1) * groups_at_once), packed);
    }
    void multiply(int64_t i) const {
        const int64_t row = i / pieces * block, panel = first + i % pieces * piece;
        // Threads take turns, so this one's next piece is as many pieces further as there are threads.
        const int64_t next = std::min(stop - 1, panel + piece * num_threads());
        kernels.linear(args, row, std::min(args.m, row + block), panel, std::min(stop, panel + piece), next,
                       scratch(kernels.linear_scratch(args, block, piece)));
    }
};

void run_linear_panels(const Kernels& kernels, const Linear& args, const LinearCut& cut, int64_t first, int64_t stop) {
    PanelCalls calls(kernels, args, cut, first, stop);
    void* packed = calls.groups ? scratch(cut.packed_bytes, 1) : nullptr;
    calls.args.packed_x = packed;
    const auto item = [&](int64_t i) { i < calls.packs ? calls.pack(i, packed) : calls.multiply(i - calls.packs); };
    run(calls.packs + calls.count(), item, calls.packs);
}

void run_linear_rows(const Kernels& kernels, const Linear& args, const LinearCut& cut) {
    constexpr int64_t kMostUnpacked = 4 << 20;  // bytes of panels that are unpacked together
    const int64_t panels = num_panels(kernels, args);
    // Unpacked here, for all rows: the kernels would unpack a panel again for each block of rows.
    if (args.packing == BlockType::F32 || args.m <= cut.rows) return run_linear_panels(kernels, args, cut, 0, panels);
    const int64_t bytes = kernels.panel_bytes(args), some = std::max<int64_t>(2, kMostUnpacked / bytes / 2 * 2);
    auto* unpacked = static_cast<uint8_t*>(scratch(std::min(some, panels) * bytes, 2));
    for (int64_t first = 0; first < panels; first += some) {
        const int64_t stop = std::min(panels, first + some);
        // Where all panels would begin.
        void* whole = reinterpret_cast<void*>(reinterpret_cast<uintptr_t>(unpacked) - first * bytes);
        run(stop - first, [&](int64_t i) { kernels.prepack_panels(args, first + i, first + i + 1, whole); });
        Linear packed = args;
        packed.w = whole, packed.packed = packed.unpacked = true;
        if (!cut.keeps_quants) packed.packing = BlockType::F32;
        run_linear_panels(kernels, packed, cut, first, stop);
    }
}

// Each thread packs parts of the rows for itself and multiplies them with all panels: what it has packed stays in its
// cache, and threads do not wait for one another before the end.
void run_linear_parts(const Kernels& kernels, const Linear& args, const LinearCut& cut) {
    const int64_t threads = num_threads(), most = (args.m + cut.rows - 1) / cut.rows;
    const int64_t parts = (most + threads - 1) / threads * threads;
    const int64_t rows = ((args.m + parts - 1) / parts + cut.group - 1) / cut.group * cut.group;
    run((args.m + rows - 1) / rows, [&](int64_t i) {
        Linear part = slice_rows(args, i * rows, std::min(rows, args.m - i * rows));
        const LinearCut own = kernels.linear_cut(part);
        const int64_t panels = num_panels(kernels, args), some = std::min(own.most_panels, panels);
        void* packed = scratch(own.packed_bytes, 1);
        kernels.pack_rows(part, 0, (part.m + own.group - 1) / own.group, packed);
        part.packed_x = packed;
        void* space = scratch(kernels.linear_scratch(part, part.m, some));
        for (int64_t panel = 0; panel < panels; panel += some) {
            const int64_t stop = std::min(panels, panel + some);
            kernels.linear(part, 0, part.m, panel, stop, stop < panels ? stop : 0, space);
        }
    });
}

// Bytes of packed x, at most: more rows go a part at a time, which is still in a cache when products come to it.
int64_t most_packed_bytes() {
    constexpr int64_t kMost = 16 << 20, kOfThread = 1 << 20;
    return std::min(kMost, kOfThread * num_threads());
}

// Runs layers in one loop: first all of x is packed, then all is multiplied.
void run_together(const Kernels& kernels, const std::vector<Linear>& layers, const std::vector<LinearCut>& cuts) {
    std::vector<PanelCalls> calls;
    std::vector<int64_t> packs{0}, items{0}, packed_at;  // where those of each layer begin, and the end
    int64_t bytes = 0;
    for (size_t i = 0; i < layers.size(); i++) {
        calls.emplace_back(kernels, layers[i], cuts[i], 0, num_panels(kernels, layers[i]), int64_t(layers.size()) - 1);
        packs.push_back(packs.back() + calls[i].packs), items.push_back(items.back() + calls[i].count());
        packed_at.push_back(bytes);
        bytes += (cuts[i].packed_bytes + 63) / 64 * 64;
    }
    auto* packed = static_cast<uint8_t*>(bytes ? scratch(bytes, 1) : nullptr);
    for (size_t i = 0; i < calls.size(); i++)
        calls[i].args.packed_x = calls[i].groups ? packed + packed_at[i] : nullptr;
    const auto within = [](const std::vector<int64_t>& begins, int64_t i) {
        return size_t(std::upper_bound(begins.begin(), begins.end(), i) - begins.begin() - 1);
    };
    const auto item = [&](int64_t i) {
        if (i < packs.back()) {
            const size_t which = within(packs, i);
            return calls[which].pack(i - packs[which], packed + packed_at[which]);
        }
        i -= packs.back();
        const size_t which = within(items, i);
        calls[which].multiply(i - items[which]);
    };
    run(packs.back() + items.back(), item, packs.back());
}

}  // namespace

int64_t num_panels(const Kernels& kernels, const Linear& args) {
    const bool gated = is_gated(args.activation);
    const int64_t n = gated ? args.n / 2 : args.n, width = gated ? kernels.width : kernels.panel;
    return (n + width - 1) / width;
}

Linear slice_rows(const Linear& args, int64_t row, int64_t count) {
    Linear part = args;
    const int64_t bytes = element_bytes(args.type);
    part.m = count;
    part.x = static_cast<const uint8_t*>(args.x) + row * args.x_stride * bytes;
    if (args.residual) part.residual = static_cast<const uint8_t*>(args.residual) + row * args.residual_stride * bytes;
    part.out = static_cast<uint8_t*>(args.out) + row * args.out_stride * element_bytes(args.out_type);
    return part;
}

void run_linear(const Kernels& kernels, const Linear& args) {
    if (!args.m) return;
    const LinearCut cut = kernels.linear_cut(args);
    if (cut.by_rows && args.m >= kManyRows * num_threads()) return run_linear_parts(kernels, args, cut);
    const int64_t most_packed = most_packed_bytes();
    if (cut.packed_bytes <= most_packed) return run_linear_rows(kernels, args, cut);
    const int64_t most =
        std::max(cut.rows, int64_t(args.m * (double(most_packed) / cut.packed_bytes)) / cut.rows * cut.rows);
    for (int64_t row = 0; row < args.m; row += most) {
        Linear part = slice_rows(args, row, std::min(most, args.m - row));
        run_linear_rows(kernels, part, kernels.linear_cut(part));
    }
}

void run_grouped(const Kernels& kernels, const std::vector<Linear>& layers) {
    std::vector<Linear> some;
    std::vector<LinearCut> cuts;
    int64_t bytes = 0;
    const int64_t most = most_packed_bytes();
    const auto flush = [&] {
        run_together(kernels, some, cuts);
        some.clear(), cuts.clear(), bytes = 0;
    };
    for (const Linear& layer : layers) {
        if (!layer.m) continue;
        const LinearCut cut = kernels.linear_cut(layer);
        if (layer.m > cut.rows || cut.packed_bytes > most) {
            run_linear(kernels, layer);
            continue;
        }
        if (!some.empty() && bytes + cut.packed_bytes > most) flush();
        some.push_back(layer), cuts.push_back(cut), bytes += cut.packed_bytes;
    }
    if (!some.empty()) flush();
}

}  // namespace batchgen
