"""What a sweep costs: seconds per resource lane and bytes per memory tier, each formula once.

Every function is linear in the `Shares` it is given. With numbers it explains; with PuLP variables it makes the rows
of the linear programme (lp.py). The equations follow FlexGen's appendix A.3; each docstring says which and what was
changed. The common changes: rates are curves measured on the machine instead of constants; prompts are prefilled
next to decoding sequences (continuous admission), so T_pre and T_gen are one function of a Stage; KV is counted
with grouped-query attention, in bytes; decode attention on CPU and GPU is bound by bytes, not FLOPs.
"""

from __future__ import annotations

from collections.abc import Mapping

from batchgen.core.direct_io import ALIGNMENT
from batchgen.core.dtypes import FORMAT_BYTES, INT4
from batchgen.core.hardware import ComputeRates, Rates
from batchgen.core.plan import PINNED_BYTES, VOCABULARY_CHUNKS, passing_bytes
from batchgen.planner.flow import Stage
from batchgen.planner.memory import (
    DEVICE_WORKSPACE_BYTES,
    WORKSPACE_BYTES,
    activation_bytes,
    planned_logit_rows,
    sent_bytes,
)
from batchgen.planner.setting import Linear, RuntimeModel, Setting, Shares

# Below these, sequences read a shared prefix one by one (ops/attention_plan.py).
_MIN_SHARED_TOKENS, _MIN_SHARED_SEQS = 64, 4

# Buffers of one kind: one in use, one being filled.
_SLOTS = 2


def _attended_on_cpu(s: Setting, at: Shares) -> Linear:
    return at.kv_cpu + (at.kv_disk if s.runtime.attends_disk_kv_on_cpu else 0)


def _brought_to_gpu(s: Setting, at: Shares) -> Linear:
    return at.kv_streamed + (0 if s.runtime.attends_disk_kv_on_cpu else at.kv_disk)


def linear_s(s: Setting, stage: Stage) -> float:
    """Matrix products of one layer: FlexGen's linear_layer^p and linear_layer^g over mm_flops. Changed: the rate
    depends on the tokens of one GPU batch (equal parts of the sweep), and prefill and decode tokens ride together."""
    if stage.tokens == 0:
        return 0.0
    rate = s.rates.rates("gemm_flops_per_s", s.compute_format).at(
        width=s.model.hidden_size, tokens=max(1.0, stage.tokens / s.num_gpu_batches)
    )
    return 2 * s.model.matmul_params_per_layer * stage.tokens / rate


def _with_kv(s: Setting, kind: str) -> Rates:
    """Rates of what handles KV along the way: their own with 4-bit KV, where they were measured."""
    packed = s.kv_format == INT4 and s.rates.has_rates(kind, INT4)
    return s.rates.rates(kind, INT4 if packed else s.compute_format)


def elementwise_s(s: Setting, stage: Stage) -> float:
    """Norms, rotary embedding, activation, adds and KV writes of one layer; not in FlexGen's model."""
    rate = _with_kv(s, "elementwise_bytes_per_s").at(tokens=max(1.0, stage.tokens))
    return stage.tokens * s.model.elementwise_bytes_per_token(int(s.element_bytes)) / rate


def _seen(s: Setting, context: float) -> float:
    """Tokens attended to, averaged over layers with and without a sliding window."""
    windows = s.model.windows
    return sum(context if w is None else min(w, context) for w in windows) / len(windows)


def _shared_tokens(s: Setting, stage: Stage) -> float:
    """Prefix tokens that the block attends to once for all, on a compute device that holds them."""
    shared = s.workload.shared_prefix_len
    worth_it = shared >= _MIN_SHARED_TOKENS and stage.decode_seqs >= _MIN_SHARED_SEQS and not any(s.model.windows)
    return shared if worth_it else 0.0


def prefill_attention_s(s: Setting, stage: Stage) -> float:
    """Attention of new prompts to themselves in one layer: FlexGen's att^p over bmm_flops. Changed: causal (half of
    s^2), and of a prompt whose prefix is shared only the rest, which is what is computed anew."""
    if stage.prefill_seqs == 0:
        return 0.0
    square = max(
        1.0, s.workload.prompt_len.mean_square - (s.workload.prompt_len.mean**2 - s.workload.computed_prompt_len**2)
    )
    longest = square**0.5
    flops = 4 * s.model.num_heads * s.model.head_dim * (square / 2) * (_seen(s, longest) / longest) * stage.prefill_seqs
    return flops / _with_kv(s, "prefill_attention_flops_per_s").at(context=longest)


def shared_attention_s(s: Setting, stage: Stage) -> float:
    """Attention of one layer to a prefix that rows share, by new prompts and by decoding sequences: one product for the
    block, bound by FLOPs. Not in FlexGen's model."""
    shared = s.workload.shared_prefix_len
    queries = stage.prefill_tokens + (stage.decode_seqs if _shared_tokens(s, stage) else 0.0)
    if not shared or not queries:
        return 0.0
    kind = "shared_attention_flops_per_s"
    if not s.rates.has_rates(kind, s.compute_format):
        kind = "prefill_attention_flops_per_s"
    flops = 4 * s.model.num_heads * s.model.head_dim * _seen(s, shared) * queries
    return flops / s.rates.rates(kind, s.compute_format).at(context=shared)


def decode_kv_bytes(s: Setting, stage: Stage) -> float:
    """Stored KV that one layer's decode attention reads if all sequences were of one class: 4 bls (s + n/2) h1 in
    FlexGen, which has one KV head per head and 2 bytes per number."""
    return stage.decode_seqs * (_seen(s, stage.context) - _shared_tokens(s, stage)) * s.kv_token_bytes


def decode_attention_s(s: Setting, stage: Stage, device: ComputeRates) -> float:
    """Decode attention of one layer if all of the block were on `device`: att^g of FlexGen's gpu_comp^g and cpu_comp^g.
    Changed: bytes of KV over a measured rate, per head group, batch and context."""
    if stage.decode_seqs == 0:
        return 0.0
    expands = s.kv_format == "int4" and not s.runtime.reads_int4_kv
    bytes_read = decode_kv_bytes(s, stage)
    if expands:
        bytes_read *= s.element_bytes / FORMAT_BYTES["int4"]
    rate = device.rates("decode_attention_bytes_per_s", s.compute_format if expands else s.kv_format).at(
        group=s.model.num_heads // s.model.num_kv_heads,
        batch=max(1.0, stage.decode_seqs / s.num_gpu_batches),
        context=max(1.0, _seen(s, stage.context) - _shared_tokens(s, stage)),
    )
    seconds = bytes_read / rate
    return seconds + (bytes_read / device.expand_bytes_per_s if expands else 0.0)


def expand_weights_s(s: Setting) -> float:
    """Turning one layer's 4-bit weights into the compute format, once per sweep (or per GPU batch, FlexGen)."""
    if s.weight_format != "int4":
        return 0.0
    return (
        s.expanded_layer_bytes
        / s.rates.expand_bytes_per_s
        * (s.num_gpu_batches if s.runtime.expands_per_gpu_batch else 1)
    )


def _history_tokens(s: Setting, stage: Stage) -> float:
    """Tokens whose KV is brought in for one decoding sequence: all of it whatever the window, in whole blocks."""
    return stage.context - 1 + (s.kv_block_size - 1) / 2


def streamed_kv_bytes(s: Setting, stage: Stage) -> float:
    """History of one layer that comes to the compute device in a sweep if all sequences were `streamed`: a shared prefix
    once for each GPU batch."""
    shared = s.workload.shared_prefix_len
    own = stage.decode_seqs * max(0.0, _history_tokens(s, stage) - shared)
    return (own + shared * min(stage.decode_seqs, s.num_gpu_batches)) * s.kv_token_bytes


def _disk_bytes(s: Setting, stage: Stage) -> tuple[float, float]:
    """(read, written) of one layer if all sequences were on disk: whole blocks. Every token rewrites its sequence's last
    one, prompts are written once, and share nothing."""
    prompts = stage.prefill_tokens + stage.prefill_seqs * (s.workload.shared_prefix_len + (s.kv_block_size - 1) / 2)
    read = stage.decode_seqs * _history_tokens(s, stage) / s.kv_block_size
    return read * s.disk_block_bytes, (stage.decode_seqs + prompts / s.kv_block_size) * s.disk_block_bytes


def moved_bytes(s: Setting, stage: Stage, at: Shares) -> dict[str, Linear]:
    """Bytes of one layer over each transfer lane: FlexGen's ctog, gtoc, dtoc and ctod, prefill and decode together.

    Changed: CPU attention takes queries, keys and values of its sequences out and results back (FlexGen counts these
    with the activations); KV of streamed sequences comes over the bus; KV on disk moves in whole blocks.
    """
    kv_prefilled = stage.prefill_tokens * s.kv_token_bytes
    kv_new = kv_prefilled + stage.decode_seqs * s.kv_token_bytes
    from_disk, to_disk = _disk_bytes(s, stage)
    disk = {
        "disk_read": at.w_disk * s.layer_bytes + at.kv_disk * from_disk,
        "disk_write": at.kv_disk * to_disk,
    }
    if not s.on_gpu:
        return disk
    on_cpu = _attended_on_cpu(s, at)
    activations = at.act_cpu * (stage.tokens * s.hidden_bytes)
    result = s.model.num_heads * s.model.head_dim * s.element_bytes
    delegated_out = stage.decode_seqs * (result + s.kv_token_bytes) + kv_prefilled  # queries are as large as results
    h2d = at.w_streamed * s.layer_bytes + at.kv_streamed * streamed_kv_bytes(s, stage) + activations
    # What the last layer makes stays where the head is computed.
    d2h = on_cpu * delegated_out + at.kv_streamed * kv_new + activations * (1 - 1 / s.model.num_layers)
    if not s.runtime.attends_disk_kv_on_cpu:
        page = s.kv_block_bytes / s.disk_block_bytes  # of what is on disk the padding stays in host memory
        h2d += at.kv_disk * (from_disk * page)
        d2h += at.kv_disk * (to_disk * page)
    return {"h2d": h2d + on_cpu * (stage.decode_seqs * result), "d2h": d2h} | disk


def _disk_requests(stage: Stage, at: Shares) -> tuple[Linear, Linear]:
    """(reads, writes) of one layer's KV: one for each sequence."""
    return at.kv_disk * stage.decode_seqs, at.kv_disk * (stage.decode_seqs + stage.prefill_seqs)


def layer_lanes(s: Setting, stage: Stage, at: Shares) -> dict[str, Linear]:
    """Seconds of each lane for one layer of one sweep; T of FlexGen's T_pre and T_gen is their maximum (`bounds`).

    comp of FlexGen is two lanes here: with K >= 2 GPU batches, CPU attention of one runs during the products of
    another (NEO section 3). With K = 1 it only overlaps attention on the GPU: the lane `chain`. Where the GPU is
    emulated by the same cores, nothing overlaps that needs them: the lane `cores`. On a CPU-only machine attention is
    part of compute, as is what the kernel does for each request to the disk: products wait for their slowest core. DRAM
    carries every byte that enters or leaves host memory. Reads and writes share the disk: the lane `disk`. A GPU computes no
    faster than the host launches: the lane `launch`.
    """
    moved = moved_bytes(s, stage, at)
    overhead = s.num_gpu_batches * s.rates.step_overhead_s
    before = linear_s(s, stage) + elementwise_s(s, stage) + prefill_attention_s(s, stage) + shared_attention_s(s, stage)
    before += expand_weights_s(s) + overhead
    own_attention = decode_attention_s(s, stage, s.rates)
    hardware = s.hardware
    reads, writes = _disk_requests(stage, at)
    requests_s = (reads + writes) * hardware.disk_cpu_overhead_s
    lanes: dict[str, Linear] = {
        "disk_read": moved["disk_read"] * (1 / hardware.disk_read_bytes_per_s) + reads * hardware.disk_read_overhead_s,
        "disk_write": moved["disk_write"] * (1 / hardware.disk_write_bytes_per_s)
        + writes * hardware.disk_write_overhead_s,
    }
    if "disk_read" not in s.runtime.serial:  # or their sum counts anyway
        lanes["disk"] = lanes["disk_read"] + lanes["disk_write"]
    on_disk = moved["disk_read"] + moved["disk_write"]
    kv_read = decode_kv_bytes(s, stage)
    if s.on_gpu:
        # Where the CPU cannot attend to this format, no sequence is placed there, so its cost does not matter.
        cpu = decode_attention_s(s, stage, hardware.cpu) if can_delegate(s) else 0.0
        if s.rates.launch_overhead_s:
            lanes["launch"] = s.num_gpu_batches * s.rates.launch_overhead_s
        lanes["compute"] = before + (at.kv_gpu + _brought_to_gpu(s, at)) * own_attention
        lanes["cpu_attention"] = _attended_on_cpu(s, at) * cpu
        if "compute" not in s.runtime.serial:
            if s.num_gpu_batches == 1:
                lanes["chain"] = before + lanes["cpu_attention"]
            if hardware.shared_cores:
                lanes["cores"] = lanes["compute"] + lanes["cpu_attention"] + _copy_s(s, moved) + requests_s
        lanes["h2d"] = moved["h2d"] * (1 / hardware.h2d_bytes_per_s)
        lanes["d2h"] = moved["d2h"] * (1 / hardware.d2h_bytes_per_s)
        dram = moved["h2d"] + moved["d2h"] + on_disk + _attended_on_cpu(s, at) * kv_read
    else:
        lanes["compute"] = before + own_attention + requests_s
        dram = on_disk + (s.expanded_layer_bytes + kv_read)
    lanes["dram"] = dram * (1 / hardware.dram_bytes_per_s)
    return lanes


def _copy_s(s: Setting, moved: Mapping[str, Linear]) -> Linear:
    """Seconds for which copies to and from an emulated GPU take the cores that compute."""
    rate = s.hardware.copy_bytes_per_s
    return 0.0 if rate is None else (moved.get("h2d", 0.0) + moved.get("d2h", 0.0)) * (1 / rate)


def can_delegate(s: Setting) -> bool:
    """Whether decode attention can run on the CPU beside the GPU: FlexGen cannot with compressed KV."""
    if s.kv_format == "int4" and not s.runtime.reads_int4_kv:
        return False
    return s.hardware.cpu.has_rates("decode_attention_bytes_per_s", s.kv_format)


def head_lanes(s: Setting, stage: Stage, at: Shares) -> dict[str, Linear]:
    """Seconds of each lane for what comes before the first and after the last layer: embeddings in, logits and what is made of
    them out. FlexGen leaves them out (footnote 1); with small models or large vocabularies they count."""
    params = s.model.vocab_size * s.model.embed_size
    gemm = s.rates.rates("gemm_flops_per_s", s.compute_format).at(
        width=s.model.hidden_size, tokens=max(1.0, stage.asked / s.num_gpu_batches)
    )
    compute = 2 * params * stage.asked / gemm + stage.asked * s.model.vocab_size / s.hardware.sampling_logits_per_s
    lanes: dict[str, Linear] = {"compute": compute}
    if s.on_gpu:
        moved = at.head_cpu * s.head_bytes + at.act_gpu * (stage.tokens * s.hidden_bytes)
        lanes["h2d"] = moved * (1 / s.hardware.h2d_bytes_per_s)
        lanes["dram"] = moved * (1 / s.hardware.dram_bytes_per_s)
        if s.hardware.shared_cores and "compute" not in s.runtime.serial:
            lanes["cores"] = compute + _copy_s(s, {"h2d": moved})
    return lanes


def sweep_overhead_s(s: Setting, stage: Stage) -> float:
    """Scheduling, packing and bookkeeping of one sweep, during which nothing else runs."""
    return s.hardware.sweep_overhead_s + stage.sampled * s.hardware.sequence_overhead_s


def bounds(runtime: RuntimeModel, lanes: Mapping[str, Linear]) -> list[Linear]:
    """Expressions none of which may exceed the time: max over lanes under perfect overlap (FlexGen 4.3), plus what the
    runtime runs by itself."""
    alone = [lanes[name] for name in runtime.serial if name in lanes]
    together = [lane for name, lane in lanes.items() if name not in runtime.serial]
    base = sum(alone) if alone else 0.0
    return [base + lane for lane in together] or [base]


def kv_bytes(s: Setting, at: Shares) -> dict[str, Linear]:
    """KV reserved in each tier: of its sequences, and in memory once for a prefix that they share."""
    all_seqs = s.block_size * s.seq_kv_bytes
    shared = s.workload.shared_prefix_len * s.kv_token_bytes * s.model.num_layers
    return {
        "gpu": at.kv_gpu * all_seqs + (shared if s.on_gpu else 0.0),
        "cpu": (at.kv_cpu + at.kv_streamed) * all_seqs + shared,
        "disk": at.kv_disk * (s.block_size * s.disk_seq_kv_bytes),
    }


def peak_bytes(s: Setting, at: Shares) -> dict[str, Linear]:
    """Most bytes held in each tier, of the whole job: FlexGen's gpu_peak, cpu_peak and nvme_peak, prefill and decode
    in one, as both may be in one sweep.

    Changed: weights in transit are double-buffered in pieces of a layer's streamed part; KV in transit for two
    GPU batches; activations for the tokens of one sweep; logits; KV is what the scheduler reserves. It is what
    `memory.plan_memory` gives the runtime for the same placement, or a little more. Of the disk, weights take what they
    took before.
    """
    model, element = s.model, s.element_bytes
    kv = kv_bytes(s, at)
    weights = s.layer_bytes * model.num_layers
    between = s.batch_tokens * s.hidden_bytes
    rows = planned_logit_rows(model, int(element), s.batch_tokens, s.gpu_batch_size, s.workload.task)
    captured = s.gpu_batch_size if s.on_gpu else 0
    work = activation_bytes(model, int(element), s.batch_tokens, rows, on_gpu=s.on_gpu, captured_tokens=captured)
    expanded = s.expanded_layer_bytes if s.weight_format == INT4 else 0.0
    cpu = s.process_bytes + WORKSPACE_BYTES + (1 - at.embed_gpu) * s.embedding_bytes + at.w_cpu * weights + kv["cpu"]
    cpu += at.disk_peak * (_SLOTS * sum(s.disk_group_bytes.values()))
    staging = at.staged_blocks * (_SLOTS * s.kv_block_bytes)
    if s.on_gpu or s.kv_block_bytes % ALIGNMENT:
        # In and out; what attends on the CPU writes what it has read.
        buffers = _SLOTS if s.runtime.attends_disk_kv_on_cpu else 2 * _SLOTS
        cpu += at.disk_blocks * (buffers * s.disk_block_bytes)
    if not s.on_gpu:
        cpu += s.head_bytes + work + expanded + (s.num_gpu_batches - 1) * between + staging
        return {"cpu": cpu, "disk": kv["disk"]}
    pieces = _SLOTS * -(-model.vocab_size // VOCABULARY_CHUNKS) * model.embed_size * element
    exchanged = s.gpu_batch_size * (model.qkv_size + model.num_heads * model.head_dim) * element
    batches = s.num_gpu_batches
    gpu = work + DEVICE_WORKSPACE_BYTES + at.w_gpu * weights + at.streamed_peak * (_SLOTS * s.layer_bytes) + kv["gpu"]
    whole_logits = 0 if s.workload.task == "score" else s.block_size * model.vocab_size * 4
    gpu += at.head_gpu * s.head_bytes + at.head_cpu * (pieces + whole_logits)
    gpu += staging + expanded + at.delegates * expanded + at.embed_gpu * s.embedding_bytes
    gpu += 2 * passing_bytes(int(s.disk_block_bytes)) + at.delegates * sent_bytes(model, int(element), s.gpu_batch_size)
    gpu += at.act_gpu * (batches * between) + at.acts_wait * (_SLOTS * between)
    cpu += PINNED_BYTES + at.head_cpu * s.head_bytes + at.act_cpu * (batches * between) + at.delegates * (2 * exchanged)
    return {"gpu": gpu, "cpu": cpu, "disk": kv["disk"]}
