#include "state/parallel.h"

#include <algorithm>
#include <vector>

#include "pool.h"

namespace batchgen {
namespace {

int64_t pieces_of(int64_t count, int64_t piece) { return (count + piece - 1) / piece; }

// The most value heads of a delta_chunks piece: those that share keys, but not so many that their states do not fit a
// cache (kDeltaHeads in state/delta_operands.h), nor that threads would have nothing to do.
int heads_of_piece(const DeltaRule& args, int64_t sequences) {
    constexpr int kMost = 4;
    const int group = args.value_heads / args.key_heads;
    int heads = std::min(group, kMost);
    while (heads > 1 && sequences * args.key_heads * pieces_of(group, heads) < 4 * num_threads()) heads--;
    return heads;
}

}  // namespace

void run_causal_conv(const Kernels& kernels, const CausalConv& args, int64_t sequences) {
    constexpr int64_t kTokens = 64, kFewestChannels = 256;
    const int64_t* starts = args.slots.starts;
    std::vector<ConvPiece> pieces, cut;  // cut: sequences that are in several pieces
    for (int64_t i = 0; i < sequences;) {
        ConvPiece piece{i, i + 1, starts[i], starts[i + 1], 0, args.channels};
        while (piece.sequence_stop < sequences && starts[piece.sequence_stop + 1] - piece.first <= kTokens)
            piece.stop = starts[++piece.sequence_stop];
        i = piece.sequence_stop;
        if (piece.stop - piece.first > kTokens) cut.push_back(piece);
        for (const int64_t stop = piece.stop; piece.first < stop || piece.stop == piece.first;
             piece.first = piece.stop) {
            piece.stop = std::min(stop, piece.first + kTokens);
            pieces.push_back(piece);
            if (piece.stop == stop) break;
        }
    }
    // Channels are cut too where there are few tokens.
    const int64_t wanted = pieces_of(4 * num_threads(), std::max<int64_t>(1, pieces.size()));
    const int64_t most = std::max<int64_t>(1, args.channels / kFewestChannels);
    const int64_t channels = pieces_of(pieces_of(args.channels, std::min(wanted, most)), 64) * 64;
    const int64_t parts = pieces_of(args.channels, channels), phase = pieces.size() * parts;
    const auto part_of = [&](ConvPiece piece, int64_t part) {
        piece.channel = part * channels, piece.channel_stop = std::min(args.channels, (part + 1) * channels);
        return piece;
    };
    run(
        phase + int64_t(cut.size()),
        [&](int64_t i) {
            if (i < phase) return kernels.causal_conv(args, part_of(pieces[i / parts], i % parts));
            kernels.causal_conv_state(args, cut[i - phase]);
        },
        phase);
}

void run_delta_rule(const Kernels& kernels, const DeltaRule& args, int64_t sequences) {
    std::vector<int64_t> single, longer;
    for (int64_t i = 0; i < sequences; i++)
        (args.slots.starts[i + 1] - args.slots.starts[i] == 1 ? single : longer).push_back(i);
    // The longest first, so that none is left when others are done.
    const auto tokens = [&](int64_t i) { return args.slots.starts[i + 1] - args.slots.starts[i]; };
    std::stable_sort(longer.begin(), longer.end(), [&](int64_t a, int64_t b) { return tokens(a) > tokens(b); });
    std::vector<DeltaPiece> pieces;
    const int group = args.value_heads / args.key_heads, heads = heads_of_piece(args, int64_t(longer.size()));
    for (int64_t i : longer)
        for (int key_head = 0; key_head < args.key_heads; key_head++)
            for (int head = 0; head < group; head += heads)
                pieces.push_back({i, key_head * group + head, key_head * group + std::min(group, head + heads)});

    constexpr int64_t kStateBytes = 1 << 20;  // of a piece of single tokens
    const int64_t pairs = int64_t(single.size()) * args.value_heads;
    const int64_t bytes = int64_t(args.key_dim) * args.value_dim * element_bytes(args.state_type);
    const int64_t most = std::max<int64_t>(1, kStateBytes / std::max<int64_t>(1, bytes));
    const int64_t at_once = std::clamp<int64_t>(pairs / (4 * num_threads()), 1, most);
    const int64_t chunks = int64_t(pieces.size());
    run(chunks + pieces_of(pairs, at_once), [&](int64_t i) {
        void* memory = scratch(kernels.delta_scratch(args));
        if (i < chunks) return kernels.delta_chunks(args, pieces[i], memory);
        const int64_t pair = (i - chunks) * at_once;
        kernels.delta_steps(args, single.data(), pair, std::min(pairs, pair + at_once), memory);
    });
}

}  // namespace batchgen
