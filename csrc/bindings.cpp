// What Python sees (batchgen/ops/cpp.py): addresses and sizes in, nothing kept. The GIL is released while threads work.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>

#include "cpu.h"
#include "draw.h"
#include "attention/plan.h"
#include "pool.h"

namespace py = pybind11;
using namespace batchgen;

namespace {

using Address = uintptr_t;
template <class T>
using Array = py::array_t<T, py::array::c_style>;

template <class T = void>
T* at(Address address) {
    return reinterpret_cast<T*>(address);
}

int bytes_of(Type type) { return type == Type::F32 ? 4 : 2; }

KV make_kv(Address data, int type, int block_size, int kv_heads, int head_dim) {
    KV kv{};
    kv.data = at<uint8_t>(data);
    kv.type = Type(type);
    kv.block_size = block_size, kv.kv_heads = kv_heads, kv.head_dim = head_dim;
    const int bits = code_bits(kv.type);
    kv.row_bytes = bits ? packed_bytes(head_dim, bits) : head_dim * bytes_of(kv.type);
    kv.head_bytes = block_size * kv.row_bytes;
    kv.value_offset = kv_heads * kv.head_bytes;
    kv.block_bytes = 2 * kv.value_offset;
    return kv;
}

// Rows are shared out in pieces large enough to be worth a thread's while.
template <class F>
void over_rows(int64_t rows, int64_t row_cost, F f) {
    const int64_t piece = std::max<int64_t>({1, 16384 / std::max<int64_t>(1, row_cost), rows / (8 * num_threads())});
    run((rows + piece - 1) / piece, [&](int64_t i) { f(i * piece, std::min(rows, (i + 1) * piece)); });
}

// Attention of one layer as a loop: pieces of the plan's items, then merges.
struct Attending {
    const Kernels& kernels;
    Attention args;
    const AttentionPlan& plan;
    std::unique_ptr<float[]> partial;
    std::vector<int64_t> pieces;  // where each begins among the items, and the end
    static constexpr int64_t kMergesAtOnce = 16;

    Attending(const Attention& given, const AttentionPlan& plan)
        : kernels(kernels_of(plan.isa)), args(given), plan(plan) {
        partial.reset(new float[plan.partial_rows() * (args.kv.head_dim + 2)]);  // not filled
        args.partial = partial.get();
        // Several items at once, while there is enough for all threads: where one ends, the next one's KV comes in
        // already.
        const int64_t most = std::min<int64_t>(plan.cost() / (16 * num_threads()), kPieceCost);
        int64_t cost = most;
        for (size_t i = 0; i < plan.items().size(); i++) {
            if (cost >= most) pieces.push_back(i), cost = 0;
            cost += batchgen::cost(plan.items()[i]);
        }
        pieces.push_back(plan.items().size());
    }
    int64_t first_phase() const { return int64_t(pieces.size()) - 1; }
    int64_t count() const {
        return first_phase() + (int64_t(plan.merges().size()) + kMergesAtOnce - 1) / kMergesAtOnce;
    }
    void operator()(int64_t i) const {
        if (i < first_phase()) {
            kernels.attend(args, plan.items().data() + pieces[i], pieces[i + 1] - pieces[i],
                           scratch(kernels.attention_scratch(args)));
            return;
        }
        const int64_t first = (i - first_phase()) * kMergesAtOnce;
        const int64_t stop = std::min(first + kMergesAtOnce, int64_t(plan.merges().size()));
        for (int64_t m = first; m < stop; m++) kernels.merge(args, plan.merges()[m], plan.merge_rows().data());
    }

    static constexpr int64_t kPieceCost = 5 * 32768;  // of decode items: so many keys and heads, some megabytes
};

Attention attention_args(const AttentionPlan& plan, Address q, int64_t q_stride, Address out, int64_t out_stride,
                         int type, Address kv, int kv_type, int head_dim, float softcap, Address sinks) {
    Attention args{};
    args.q = at(q), args.out = at(out), args.q_stride = q_stride, args.out_stride = out_stride;
    args.type = Type(type);
    args.heads = plan.kv_heads() * plan.group();
    args.softcap = softcap;
    args.sinks = (const float*)at(sinks);
    args.kv = make_kv(kv, kv_type, plan.block_size(), plan.kv_heads(), head_dim);
    return args;
}

int64_t num_panels(const Kernels& kernels, const Linear& args) {
    const bool gated = is_gated(args.activation);
    const int64_t n = gated ? args.n / 2 : args.n, width = gated ? kernels.width : kernels.panel;
    return (n + width - 1) / width;
}

// Rows [row, row + count) of a linear layer.
Linear slice_rows(const Linear& args, int64_t row, int64_t count) {
    Linear part = args;
    const int64_t bytes = bytes_of(args.type);
    part.m = count;
    part.x = at(Address(args.x) + row * args.x_stride * bytes);
    if (args.residual) part.residual = at(Address(args.residual) + row * args.residual_stride * bytes);
    part.out = at(Address(args.out) + row * args.out_stride * bytes_of(args.out_type));
    return part;
}

// Rows of panels [first, stop) of a linear layer as the calls that the kernels would have.
struct PanelCalls {
    const Kernels& kernels;
    Linear args;
    const LinearCut& cut;
    int64_t first, stop, block, blocks, piece, pieces;
    int64_t groups, groups_at_once,
        packs;  // where the kernels want x put in order first, some groups of rows at a time

    // beside: how many others there are at the same time, of about the same size.
    PanelCalls(const Kernels& kernels, const Linear& given, const LinearCut& cut, int64_t first, int64_t stop,
               int64_t beside = 0)
        : kernels(kernels), args(given), cut(cut), first(first), stop(stop) {
        const int64_t panels = stop - first, k = kernels.panel_bytes(args) / (4 * kernels.panel), tile = cut.row_tile;
        // As many rows at once as the kernels would have. Fewer where threads would have nothing to do.
        blocks = (args.m + cut.rows - 1) / cut.rows;
        while ((beside + 1) * blocks * panels < 3 * num_threads() && args.m > blocks * tile) blocks++;
        block = ((args.m + blocks - 1) / blocks + tile - 1) / tile * tile;
        blocks = (args.m + block - 1) / block;
        // Pieces of at least a microsecond or two.
        const int64_t panel_cost = std::min(args.m, block) * k * kernels.panel;
        piece =
            std::clamp<int64_t>((1 << 19) / std::max<int64_t>(1, panel_cost), cut.panels, std::max(cut.panels, panels));
        piece = std::max<int64_t>(1, std::min(piece, (beside + 1) * blocks * panels / (4 * num_threads())));
        // A gated panel makes half a panel of results: two of them, or threads would write to the same lines of memory.
        // Of blocks in panels a few rows are multiplied with two panels at a time: one alone would be multiplied twice.
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
        // Threads take turns, so this one's next piece is as many further as there are threads.
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
    constexpr int64_t kMostUnpacked = 4 << 20;  // bytes of panels that are unpacked for all rows
    const int64_t panels = num_panels(kernels, args);
    // Within the kernels a panel would be unpacked again for each block of rows.
    if (args.packing == BlockType::F32 || args.m <= cut.rows) return run_linear_panels(kernels, args, cut, 0, panels);
    const int64_t bytes = kernels.panel_bytes(args), some = std::max<int64_t>(2, kMostUnpacked / bytes / 2 * 2);
    auto* unpacked = static_cast<uint8_t*>(scratch(std::min(some, panels) * bytes, 2));
    for (int64_t first = 0; first < panels; first += some) {
        const int64_t stop = std::min(panels, first + some);
        void* whole = at(Address(unpacked) - first * bytes);  // where all panels would begin
        run(stop - first, [&](int64_t i) { kernels.prepack_panels(args, first + i, first + i + 1, whole); });
        Linear packed = args;
        packed.w = whole, packed.packed = packed.unpacked = true;
        if (!cut.keeps_quants) packed.packing = BlockType::F32;
        run_linear_panels(kernels, packed, cut, first, stop);
    }
}

// Bytes of x put in order: many rows go a part at a time, which is still in a cache when products come to it.
int64_t most_packed_bytes() {
    constexpr int64_t kMost = 16 << 20, kOfThread = 1 << 20;
    return std::min(kMost, kOfThread * num_threads());
}

void run_linear(const Kernels& kernels, const Linear& args) {
    if (!args.m) return;
    const LinearCut cut = kernels.linear_cut(args);
    const int64_t most_packed = most_packed_bytes();
    if (cut.packed_bytes <= most_packed) return run_linear_rows(kernels, args, cut);
    const int64_t most =
        std::max(cut.rows, int64_t(args.m * (double(most_packed) / cut.packed_bytes)) / cut.rows * cut.rows);
    for (int64_t row = 0; row < args.m; row += most) {
        Linear part = slice_rows(args, row, std::min(most, args.m - row));
        run_linear_rows(kernels, part, kernels.linear_cut(part));
    }
}

// Linear layers that follow each other, in one loop: first all of x is put in order, then all is multiplied.
void run_together(const Kernels& kernels, const std::vector<Linear>& layers, const std::vector<LinearCut>& cuts) {
    std::vector<PanelCalls> calls;
    std::vector<int64_t> packs{0}, items{0}, packed_at;  // where those of each begin, and the end
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

// Layers of one shape, each with rows of its own. Those with so many rows that all threads are busy with one go by
// themselves.
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

}  // namespace

PYBIND11_MODULE(_kernels, m) {
    m.doc() = "Compute kernels on the CPU. Use batchgen.ops.cpp.";

    py::register_local_exception_translator([](std::exception_ptr thrown) {
        try {
            std::rethrow_exception(thrown);
        } catch (const WrongEnvironment& error) {
            PyErr_SetString(py::module_::import("batchgen.core.errors").attr("InputError").ptr(), error.what());
        }
    });

    m.def("built", &built_kernels);
    m.def("instruction_sets", [] {
        std::vector<std::string> names;
        for (const Kernels* kernels : usable_kernels()) names.push_back(kernels->name);
        return names;
    });
    m.def("plain_twins", [] {
        std::vector<std::string> names;
        for (const Kernels* kernels : plain_twins()) names.push_back(kernels->name);
        return names;
    });
    m.def("unavailable", &unavailable_kernels);
    m.def("active", [] { return std::string(active_kernels().name); });
    m.def("use", &use_kernels);
    m.def("fast_bf16", [](const std::string& isa) { return kernels_of(isa).fast_bf16; });
    m.def("num_threads", &num_threads);
    m.def("set_num_threads", &set_num_threads);
    m.def("follow_affinity", &follow_affinity);
    m.def("set_alone", &set_alone);

    m.attr("MAX_GROUP") = kTileRows;
    py::class_<AttentionPlan>(m, "AttentionPlan")
        .def(py::init<int, int, int, int>(), py::arg("kv_heads"), py::arg("group"), py::arg("block_size"),
             py::arg("row_bytes"))
        .def("add_decode",
             [](AttentionPlan& plan, int start, const Array<int32_t>& blocks, const Array<int64_t>& num_keys,
                const Array<int64_t>& first_key) {
                 plan.add_decode(start, int(blocks.shape(0)), blocks.data(), int(blocks.shape(1)), num_keys.data(),
                                 first_key.data());
             })
        .def("add_prefill",
             [](AttentionPlan& plan, int start, int stop, const Array<int32_t>& blocks, int offset, int window) {
                 plan.add_prefill(start, stop, blocks.data(), int(blocks.size()), offset, window);
             })
        .def("add_shared",
             [](AttentionPlan& plan, int start, int stop, const Array<int32_t>& blocks) {
                 plan.add_shared(start, stop, blocks.data(), int(blocks.size()));
             })
        .def("finish", &AttentionPlan::finish)
        .def_readwrite("isa", &AttentionPlan::isa);

    m.def("attention", [](const AttentionPlan& plan, Address q, int64_t q_stride, Address out, int64_t out_stride,
                          int type, Address kv, int kv_type, int head_dim, float softcap, Address sinks) {
        Attending work(attention_args(plan, q, q_stride, out, out_stride, type, kv, kv_type, head_dim, softcap, sinks),
                       plan);
        py::gil_scoped_release release;
        run(work.count(), std::cref(work), work.first_phase());
    });

    m.def("packed_bytes", [](int64_t n, int64_t k, int type, bool int8, int activation, const std::string& isa) {
        Linear args{};
        args.n = n, args.k = k, args.type = Type(type), args.activation = Activation(activation);
        args.int8 = int8;
        const Kernels& kernels = kernels_of(isa);
        return num_panels(kernels, args) * kernels.panel_bytes(args);
    });
    m.def("pack", [](Address w, int64_t stride, int64_t n, int64_t k, int type, bool int8, int activation, Address out,
                     const std::string& isa) {
        Linear args{};
        args.w = at(w), args.w_stride = stride, args.n = n, args.k = k, args.type = Type(type);
        args.int8 = int8, args.activation = Activation(activation);
        const Kernels& kernels = kernels_of(isa);
        py::gil_scoped_release release;
        over_rows(num_panels(kernels, args), k * kernels.panel,
                  [&](int64_t panel, int64_t stop) { kernels.prepack_panels(args, panel, stop, at(out)); });
    });
    m.def("arranged_bytes", [](int64_t row_bytes, int64_t n, int activation, const std::string& isa) {
        Linear args{};
        args.n = n, args.activation = Activation(activation);
        const Kernels& kernels = kernels_of(isa);
        return num_panels(kernels, args) * kernels.panel * row_bytes;
    });
    m.def("arrange", [](Address w, int64_t row_bytes, int64_t n, int64_t k, int type, int packing, int activation,
                        Address out, const std::string& isa) {
        Linear args{};
        args.w = at(w), args.w_stride = row_bytes, args.n = n, args.k = k, args.type = Type(type);
        args.packing = BlockType(packing), args.activation = Activation(activation);
        const Kernels& kernels = kernels_of(isa);
        py::gil_scoped_release release;
        over_rows(num_panels(kernels, args), k * kernels.panel,
                  [&](int64_t panel, int64_t stop) { kernels.prepack_block_panels(args, panel, stop, at(out)); });
    });
    m.def("packed_rows", [](Address w, int64_t row_bytes, int64_t n, int64_t k, int type, int packing, Address rows,
                            int64_t count, Address out, const std::string& isa) {
        Linear args{};
        args.w = at(w), args.w_stride = row_bytes, args.n = n, args.k = k, args.type = Type(type);
        args.packing = BlockType(packing), args.packed = true;
        const auto* which = at<const int64_t>(rows);
        for (int64_t i = 0; i < count; i++)
            if (which[i] < 0 || which[i] >= n) throw py::index_error("no such row: " + std::to_string(which[i]));
        const Kernels& kernels = kernels_of(isa);
        py::gil_scoped_release release;
        over_rows(count, k * 4,
                  [&](int64_t i, int64_t stop) { kernels.rows_of_panels(args, which, i, stop, at(out)); });
    });
    m.def("linear", [](Address x, int64_t x_stride, int64_t m, Address w, int64_t w_stride, int64_t n, int64_t k,
                       int type, bool int8, bool packed, int packing, int activation, Address bias, Address residual,
                       int64_t residual_stride, Address out, int64_t out_stride, int out_type, const std::string& isa) {
        Linear args{};
        args.x = at(x), args.w = at(w), args.bias = at(bias), args.residual = at(residual), args.out = at(out);
        args.x_stride = x_stride, args.w_stride = w_stride, args.residual_stride = residual_stride;
        args.out_stride = out_stride, args.m = m, args.n = n, args.k = k;
        args.type = Type(type), args.out_type = Type(out_type), args.activation = Activation(activation);
        args.packed = packed, args.int8 = int8, args.packing = BlockType(packing);
        const Kernels& kernels = kernels_of(isa);
        py::gil_scoped_release release;
        run_linear(kernels, args);
    });

    m.def("grouped_linear",
          [](Address x, int64_t x_stride, const Array<int64_t>& rows, const Array<int64_t>& w, int64_t w_stride,
             int64_t n, int64_t k, int type, bool int8, bool packed, int packing, int activation,
             const Array<int64_t>& bias, Address out, int64_t out_stride, int out_type, const std::string& isa) {
              Linear args{};
              args.x = at(x), args.out = at(out), args.x_stride = x_stride, args.w_stride = w_stride;
              args.out_stride = out_stride, args.n = n, args.k = k;
              args.type = Type(type), args.out_type = Type(out_type), args.activation = Activation(activation);
              args.packed = packed, args.int8 = int8, args.packing = BlockType(packing);
              std::vector<Linear> layers;
              int64_t row = 0;
              for (int64_t i = 0; i < rows.size(); row += rows.at(i), i++) {
                  layers.push_back(slice_rows(args, row, rows.at(i)));
                  layers.back().w = at(w.at(i)), layers.back().bias = at(bias.at(i));
              }
              const Kernels& kernels = kernels_of(isa);
              py::gil_scoped_release release;
              run_grouped(kernels, layers);
          });

    m.def("tile_dot", [](int kind, int rows, Address a, Address b, Address c) {
        const auto tile_dot = active_kernels().tile_dot;
        if (tile_dot) tile_dot(TileProduct(kind), rows, at(a), at(b), at(c));
        return tile_dot != nullptr;
    });

    m.def("norm", [](Address x, int64_t x_stride, int64_t rows, int64_t columns, Address weight, Address bias,
                     float eps, int type, Address out, int64_t out_stride) {
        const Norm args{at(x), at(weight), at(bias), at(out), x_stride, out_stride, columns, Type(type), eps};
        const Kernels& kernels = active_kernels();
        py::gil_scoped_release release;
        over_rows(rows, columns, [&](int64_t row, int64_t stop) { kernels.norm(args, row, stop); });
    });

    // Rows by expert, those of one in the order of tokens (counting sort). Returns how many rows each expert has.
    m.def("sort_by_expert", [](Address chosen, int64_t tokens, int64_t choices, int64_t experts, Address token_of_row,
                               Address row_of_choice) {
        const auto* expert = at<const int64_t>(chosen);
        std::vector<int64_t> counts(experts), next(experts);
        for (int64_t i = 0; i < tokens * choices; i++) {
            if (expert[i] < 0 || expert[i] >= experts)
                throw py::index_error("no such expert: " + std::to_string(expert[i]));
            counts[expert[i]]++;
        }
        for (int64_t e = 1; e < experts; e++) next[e] = next[e - 1] + counts[e - 1];
        for (int64_t i = 0; i < tokens * choices; i++) {
            const int64_t row = at<int64_t>(row_of_choice)[i] = next[expert[i]]++;
            at<int64_t>(token_of_row)[row] = i / choices;
        }
        return counts;
    });
    m.def("gather_rows",
          [](Address x, int64_t stride_bytes, int64_t row_bytes, Address rows, int64_t count, Address out) {
              py::gil_scoped_release release;
              over_rows(count, row_bytes / 4, [&](int64_t i, int64_t stop) {
                  for (; i < stop; i++)
                      memcpy(at<uint8_t>(out) + i * row_bytes, at<uint8_t>(x) + at<int64_t>(rows)[i] * stride_bytes,
                             row_bytes);
              });
          });
    m.def("weighted_sums", [](Address made, Address rows, Address shares, int64_t tokens, int choices, int64_t columns,
                              int type, Address out, bool in_fp32) {
        const WeightedSums args{at(made), at<int64_t>(rows), at<float>(shares), at(out),
                                columns,  choices,           Type(type),        in_fp32};
        const Kernels& kernels = active_kernels();
        py::gil_scoped_release release;
        over_rows(tokens, columns * choices,
                  [&](int64_t token, int64_t stop) { kernels.weighted_sums(args, token, stop); });
    });

    m.def("rotary_store", [](Address qkv, int64_t qkv_stride, int64_t tokens, int type, int heads, int kv_heads,
                             int head_dim, Address cos, Address sin, Address positions, float scale, Address q_norm,
                             Address k_norm, float eps, Address rotation, Address q_out, Address kv, int kv_type,
                             int block_size, Address slots, Address k_out, Address v_out) {
        RotaryStore args{};
        args.qkv = at(qkv), args.qkv_stride = qkv_stride, args.type = Type(type), args.heads = heads;
        args.cos = at<float>(cos), args.sin = at<float>(sin), args.positions = at<int64_t>(positions);
        args.scale = scale, args.q_norm = at(q_norm), args.k_norm = at(k_norm), args.eps = eps;
        args.rotation = at<float>(rotation), args.q_out = at(q_out), args.slots = at<int64_t>(slots);
        args.k_out = at(k_out), args.v_out = at(v_out);
        args.kv = make_kv(kv, kv_type, block_size, kv_heads, head_dim);
        const Kernels& kernels = active_kernels();
        py::gil_scoped_release release;
        over_rows(tokens, (heads + 2 * kv_heads) * head_dim * 2,
                  [&](int64_t token, int64_t stop) { kernels.rotary_store(args, token, stop); });
    });

    m.def("quantize", [](Address x, int64_t rows, int64_t columns, int type, Address packed, int bits) {
        Quant args{};
        args.x = at(x), args.packed = at<uint8_t>(packed), args.columns = columns, args.type = Type(type);
        args.bits = bits, args.row_bytes = packed_bytes(int(columns), bits);
        const Kernels& kernels = active_kernels();
        py::gil_scoped_release release;
        over_rows(rows, columns * 4, [&](int64_t row, int64_t stop) { kernels.quantize(args, row, stop); });
    });
    m.def("dequantize", [](Address packed, int64_t row_bytes, int64_t rows, int64_t columns, int type, Address out) {
        Quant args{};
        args.packed = at<uint8_t>(packed), args.out = at(out);
        args.rows = rows, args.columns = columns, args.row_bytes = row_bytes;
        args.type = Type(type);
        const Kernels& kernels = active_kernels();
        py::gil_scoped_release release;
        over_rows(rows, columns, [&](int64_t row, int64_t stop) { kernels.dequantize(args, row, stop); });
    });

    m.def("unpack_blocks", [](Address packed, int64_t row_bytes, int64_t rows, int64_t columns, int packing,
                              int64_t interleaved, int type, Address out) {
        const Blocks args{at<uint8_t>(packed), at(out),   columns, row_bytes, interleaved,
                          BlockType(packing),  Type(type)};
        const Kernels& kernels = active_kernels();
        py::gil_scoped_release release;
        over_rows(rows, columns, [&](int64_t row, int64_t stop) { kernels.unpack_blocks(args, row, stop); });
    });

    m.def("argmax", [](Address logits, int64_t stride, int64_t rows, int64_t columns, Address index, Address maximum,
                       Address lse) {
        const Argmax args{at<float>(logits), stride, columns, at<int64_t>(index), at<float>(maximum), at<float>(lse)};
        const Kernels& kernels = active_kernels();
        py::gil_scoped_release release;
        over_rows(rows, columns, [&](int64_t row, int64_t stop) { kernels.argmax(args, row, stop); });
    });
    m.def("draw", [](Address logits, int64_t stride, int64_t columns, const Array<float>& temperature,
                     const Array<int64_t>& top_k, const Array<double>& top_p, const Array<double>& min_p,
                     const Array<double>& uniform, Address index) {
        const Kernels& kernels = active_kernels();
        const int64_t rows = temperature.size();
        auto row = [&](int64_t i) {
            float* weights = static_cast<float*>(scratch(columns * sizeof(float)));
            kernels.softmax_weights(at<float>(logits) + i * stride, columns, temperature.data()[i], weights);
            const Filter filter{top_k.data()[i], top_p.data()[i], min_p.data()[i]};
            at<int64_t>(index)[i] = draw(weights, columns, filter, uniform.data()[i]);
        };
        py::gil_scoped_release release;
        run(rows, row);
    });
    m.def("forbid", [](Address logits, int64_t stride, int64_t columns, const Array<int64_t>& rows,
                       const Array<int32_t>& allowed) {
        const int64_t words = allowed.shape(1);
        const auto* masks = reinterpret_cast<const uint32_t*>(allowed.data());
        const int64_t* row = rows.data();
        py::gil_scoped_release release;
        over_rows(rows.size(), columns, [&](int64_t i, int64_t stop) {
            for (; i < stop; i++) forbid(at<float>(logits) + row[i] * stride, columns, masks + i * words);
        });
    });
}
