// The functions that Python sees (batchgen/ops/cpp.py): addresses and sizes in, nothing kept. The GIL is released while
// threads work.
#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstring>

#include "cpu.h"
#include "draw.h"
#include "interface.h"  // BATCHGEN_INTERFACE, which CMakeLists.txt writes
#include "attention/pages_parallel.h"
#include "attention/plan.h"
#include "matmul/parallel.h"
#include "pool.h"
#include "state/parallel.h"

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

KV make_kv(Address data, int type, int block_size, int kv_heads, int head_dim) {
    KV kv{};
    kv.data = at<uint8_t>(data);
    kv.type = Type(type);
    kv.block_size = block_size, kv.kv_heads = kv_heads, kv.head_dim = head_dim;
    const int bits = code_bits(kv.type);
    kv.row_bytes = bits ? packed_bytes(head_dim, bits) : head_dim * element_bytes(kv.type);
    kv.head_bytes = block_size * kv.row_bytes;
    kv.value_offset = kv_heads * kv.head_bytes;
    kv.block_bytes = 2 * kv.value_offset;
    return kv;
}

// Calls f(first, stop) for pieces of the rows, large enough to be worth a thread's while.
template <class F>
void over_rows(int64_t rows, int64_t row_cost, F f) {
    const int64_t piece = std::max<int64_t>({1, 16384 / std::max<int64_t>(1, row_cost), rows / (8 * num_threads())});
    run((rows + piece - 1) / piece, [&](int64_t i) { f(i * piece, std::min(rows, (i + 1) * piece)); });
}

// The attention of one layer as a loop: pieces of the plan's items, then merges.
struct Attending {
    const Kernels& kernels;
    Attention args;
    const AttentionPlan& plan;
    std::unique_ptr<float[]> partial;
    std::vector<int64_t> pieces;  // the first item of each, and the end
    static constexpr int64_t kMergesAtOnce = 16;

    Attending(const Attention& given, const AttentionPlan& plan)
        : kernels(kernels_of(plan.isa)), args(given), plan(plan) {
        partial.reset(new float[plan.partial_rows() * (args.kv.head_dim + 2)]);  // without initialisation
        args.partial = partial.get();
        // A piece is several items while there are enough for all threads: where one ends, the KV of the next is
        // prefetched.
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

    static constexpr int64_t kPieceCost = 5 * 32768;  // decode items with so many keys and heads read some megabytes
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

// The slots of a batch's states, once they are known to be ones.
StateSlots make_slots(const Array<int64_t>& source, const Array<int64_t>& target, const Array<int64_t>& starts,
                      int64_t slots, int64_t tokens) {
    const int64_t sequences = source.size();
    if (target.size() != sequences || starts.size() != sequences + 1) throw py::value_error("not a batch of sequences");
    for (int64_t i = 0; i < sequences; i++) {
        if (source.at(i) >= slots || target.at(i) < 0 || target.at(i) >= slots)
            throw py::index_error("no such slot of a state: " + std::to_string(source.at(i)) + " or " +
                                  std::to_string(target.at(i)));
        if (starts.at(i) < 0 || starts.at(i + 1) < starts.at(i) || starts.at(i + 1) > tokens)
            throw py::index_error("no such token of a sequence: " + std::to_string(starts.at(i + 1)));
    }
    return {source.data(), target.data(), starts.data()};
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

    m.attr("INTERFACE") = BATCHGEN_INTERFACE;
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
        .def("add_sequences",
             [](AttentionPlan& plan, const Array<int64_t>& start, const Array<int64_t>& num_tokens,
                const Array<int64_t>& offset, const Array<int64_t>& places, const Array<int32_t>& blocks, int window,
                int ahead) {
                 plan.add_sequences(int(start.size()), start.data(), num_tokens.data(), offset.data(), places.data(),
                                    blocks.data(), int(blocks.size()), window, ahead);
             })
        .def("add_shared",
             [](AttentionPlan& plan, int start, int stop, const Array<int32_t>& blocks) {
                 plan.add_shared(start, stop, blocks.data(), int(blocks.size()));
             })
        .def(
            "add_chosen",
            [](AttentionPlan& plan, const Array<int64_t>& tokens, const Array<int32_t>& table,
               const Array<int64_t>& num_keys) {
                for (py::ssize_t i = 0; i < tokens.size(); i++)
                    plan.add_chosen(int(tokens.at(i)), table.data(i, 0), int(num_keys.at(i)));
            },
            py::keep_alive<1, 3>())
        .def("finish", &AttentionPlan::finish)
        .def_readwrite("isa", &AttentionPlan::isa);

    m.def("attention", [](const AttentionPlan& plan, Address q, int64_t q_stride, Address out, int64_t out_stride,
                          int type, Address kv, int kv_type, int head_dim, float softcap, Address sinks) {
        Attending work(attention_args(plan, q, q_stride, out, out_stride, type, kv, kv_type, head_dim, softcap, sinks),
                       plan);
        py::gil_scoped_release release;
        run(work.count(), std::cref(work), work.first_phase());
    });

    m.attr("FIRST_PAGES") = kFirstPages;
    m.attr("RECENT_PAGES") = kRecentPages;
    m.def("summarise_pages",
          [](Address kv, int kv_type, int block_size, int kv_heads, int head_dim, const Array<int64_t>& blocks,
             const Array<int64_t>& targets, Address out, int type, const std::string& isa) {
              const PageSummaries args{make_kv(kv, kv_type, block_size, kv_heads, head_dim), blocks.data(),
                                       targets.data(), at(out), Type(type)};
              const Kernels& kernels = kernels_of(isa);
              const int64_t count = blocks.size();
              py::gil_scoped_release release;
              over_rows(count, int64_t(block_size) * kv_heads * head_dim,
                        [&](int64_t page, int64_t stop) { kernels.summarise_pages(args, page, stop); });
          });
    m.def("choose_pages",
          [](Address q, int64_t q_stride, int type, int heads, int kv_heads, int head_dim, Address summaries,
             int summary_type, const Array<int64_t>& tokens, const Array<int32_t>& summary_blocks,
             const Array<int32_t>& blocks, const Array<int64_t>& starts, const Array<int64_t>& num_pages,
             Array<int32_t> table, const std::string& isa) {
              const PageScores scores{at(q),    q_stride, Type(type),    heads,
                                      kv_heads, head_dim, at(summaries), Type(summary_type)};
              const PageChoice choice{tokens.size(), tokens.data(),    summary_blocks.data(), blocks.data(),
                                      starts.data(), num_pages.data(), table.mutable_data(),  table.shape(1)};
              const Kernels& kernels = kernels_of(isa);
              py::gil_scoped_release release;
              choose_pages(kernels, scores, choice);
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

    // Sorts tokens by expert (counting sort), those of one expert in the order of tokens. Returns the number of rows of
    // each expert.
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

    m.def("causal_conv", [](Address x, int64_t x_stride, int64_t tokens, int64_t channels, int kernel, Address weight,
                            Address bias, Address states, int64_t state_stride, int64_t slots,
                            const Array<int64_t>& source, const Array<int64_t>& target, const Array<int64_t>& starts,
                            bool silu, int type, Address out, int64_t out_stride) {
        CausalConv args{};
        args.x = at(x), args.weight = at(weight), args.bias = at(bias), args.states = at(states);
        args.out = at(out), args.slots = make_slots(source, target, starts, slots, tokens);
        args.x_stride = x_stride, args.out_stride = out_stride, args.state_stride = state_stride;
        args.channels = channels, args.kernel = kernel, args.silu = silu, args.type = Type(type);
        py::gil_scoped_release release;
        run_causal_conv(active_kernels(), args, source.size());
    });
    m.def("delta_rule", [](Address qkv, int64_t qkv_stride, int64_t tokens, int type, Address g, Address beta,
                           Address states, int64_t state_stride, int state_type, int64_t slots,
                           const Array<int64_t>& source, const Array<int64_t>& target, const Array<int64_t>& starts,
                           int key_heads, int value_heads, int key_dim, int value_dim, Address out) {
        DeltaRule args{};
        args.qkv = at(qkv), args.g = at<float>(g), args.beta = at<float>(beta), args.states = at(states);
        args.out = at(out), args.slots = make_slots(source, target, starts, slots, tokens);
        args.qkv_stride = qkv_stride, args.state_stride = state_stride;
        args.key_heads = key_heads, args.value_heads = value_heads;
        args.key_dim = key_dim, args.value_dim = value_dim;
        args.type = Type(type), args.state_type = Type(state_type);
        py::gil_scoped_release release;
        run_delta_rule(active_kernels(), args, source.size());
    });
    m.def("delta_gates", [](Address a, int64_t a_stride, Address b, int64_t b_stride, int64_t tokens, int64_t heads,
                            int type, Address a_log, Address dt_bias, Address g, Address beta) {
        const DeltaGates args{at(a),        at(b),           at<float>(a_log), at<float>(dt_bias),
                              at<float>(g), at<float>(beta), a_stride,         b_stride,
                              heads,        Type(type)};
        const Kernels& kernels = active_kernels();
        py::gil_scoped_release release;
        over_rows(tokens, heads * 8, [&](int64_t token, int64_t stop) { kernels.delta_gates(args, token, stop); });
    });
    m.def("gated", [](Address x, Address gate, int64_t gate_stride, int64_t tokens, int64_t heads, int64_t columns,
                      Address weight, float eps, int type, Address out) {
        const Gated args{at(x), at(gate), at(weight), at(out), gate_stride, heads, columns, Type(type), eps};
        const Kernels& kernels = active_kernels();
        py::gil_scoped_release release;
        over_rows(tokens * heads, columns * 2, [&](int64_t row, int64_t stop) { kernels.gated(args, row, stop); });
    });

    m.def("quantize", [](Address x, int64_t rows, int64_t columns, int type, Address packed, int bits) {
        Quant args{};
        args.x = at(x), args.packed = at<uint8_t>(packed), args.columns = columns, args.type = Type(type);
        args.bits = bits, args.row_bytes = packed_bytes(int(columns), bits);
        const Kernels& kernels = active_kernels();
        py::gil_scoped_release release;
        over_rows(rows, columns * 4, [&](int64_t row, int64_t stop) { kernels.quantize(args, row, stop); });
    });
    m.def("quantize_fitted", [](Address x, int64_t rows, int64_t columns, int type, Address shares, Address packed) {
        Quant args{};
        args.x = at(x), args.packed = at<uint8_t>(packed), args.columns = columns, args.type = Type(type);
        args.shares = at<float>(shares), args.row_bytes = packed_bytes(int(columns), 4);
        const Kernels& kernels = active_kernels();
        const int64_t lanes = kernels.width, blocks = (rows + lanes - 1) / lanes;
        py::gil_scoped_release release;
        over_rows(blocks, columns * lanes * 16, [&](int64_t block, int64_t stop) {
            kernels.quantize_fitted(args, block * lanes, std::min(rows, stop * lanes));
        });
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
