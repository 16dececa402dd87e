"""Loading a model into the parts of an engine: configuration, memory plan, weights, KV pools, tokenizer."""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from batchgen.core.attention_budget import ALL, DENSE_LAYERS, AttentionBudget
from batchgen.core.device import Device, compute_capability, has_cuda, sixteen_bits
from batchgen.core.direct_io import make_offload_dir
from batchgen.core.dtypes import (
    AUTO,
    DEQUANTIZED,
    FORMAT_BYTES,
    INT4,
    KV_CODE_BITS,
    NATIVE,
    NATIVE_FORMATS,
    STATE_DTYPES,
    weight_format_of,
)
from batchgen.core.errors import BatchgenError, InputError
from batchgen.core.kernel_choice import PROCESS_SET, KernelChoice
from batchgen.core.kv_placement import KVPlacement
from batchgen.core.machine import (
    available_cores,
    available_memory_bytes,
    give_back_freed_memory,
    keep_freed_memory,
    resident_bytes,
    trim_freed_memory,
)
from batchgen.core.plan import (
    DEFAULT_KV_BLOCK_SIZE,
    UNPLANNED_CAPTURED_TOKENS,
    UNPLANNED_PACKED_TOKENS,
    MemoryPlan,
    Policy,
    kv_on_device,
)
from batchgen.core.request import SamplingParams
from batchgen.core.units import size_bytes
from batchgen.engine.parts import EngineParts
from batchgen.models.config import DTYPES, ModelConfig
from batchgen.models.files import ModelFiles, resolve_weights
from batchgen.models.kept_stores import made_before, store_path
from batchgen.models.mtp import mtp_bytes
from batchgen.models.state_layers import StateRow
from batchgen.models.store.manifest import STORE_MANIFEST, read_store_manifest
from batchgen.ops.instruction_set import has_fast_bfloat16, instruction_set, num_threads
from batchgen.planner.kv_memory import Demand
from batchgen.planner.memory import plan_memory
from batchgen.planner.sizes import chunk_tokens, most_captured_tokens
from batchgen.runtime.grammar import Grammars
from batchgen.schedule.from_policy import kv_pools, longest_sequence, scheduler_limits, splitter
from batchgen.schedule.residency import WeightResidency
from batchgen.schedule.scheduled_sequence import ScheduledSequence
from batchgen.schedule.scheduler import Scheduler

if TYPE_CHECKING:
    from batchgen.models.layers import Reduce
    from batchgen.models.shard import Shard
    from batchgen.models.store.layout import WeightStore
    from batchgen.models.tokenizers.tokenizer import Tokenizer
    from batchgen.runtime.executor import Executor
    from batchgen.runtime.lanes import OnStep
    from batchgen.runtime.memory.kv_cache import KVCache
    from batchgen.runtime.memory.state_cache import StateCache
    from batchgen.runtime.memory.tiers import Tiers
    from batchgen.runtime.memory.weights import Weights
    from batchgen.runtime.sweep_options import AdjacentRanks
    from batchgen.schedule.draft_proposer import Proposer
    from batchgen.schedule.packed_batch import PackedBatch

ADMISSIONS = ("continuous", "static")
_MARGIN_FRAC = 0.1  # part of the free memory that is left for everything else on the machine
_DEQUANTIZED_FRAC = 0.5  # part of the memory that dequantized weights may take, so that KV has capacity
# Bytes of KV pools whose pages are touched before they are used: rows may share most of their KV, so that the rest may
# never be. Loading keeps two or three cores busy: with fewer cores than these pages come at their first use.
_PREFAULT_BYTES, _PREFAULT_CORES = 1 << 30, 4
# Resident bytes of interpreter, torch, transformers and pyarrow without any model, where they cannot be measured; and
# bytes that threads, compiled kernels and buffers take later.
TYPICAL_PROCESS_BYTES, _PROCESS_GROWTH_BYTES = 450 << 20, 64 << 20


def resolve_dtype(config: ModelConfig, dtype: str, device: Device) -> str:
    """The compute dtype: the given name, or the one that "auto" stands for.

    Args:
        config: The model's configuration.
        dtype: Name of a dtype; or "auto": "float32" for models stored in it, else 16 bits where the device is fast at
            them.
        device: Compute device.

    Raises:
        InputError: The name is unknown.
    """
    if dtype == "auto":
        if config.dtype == "float32":
            return "float32"
        if device.kind == "cuda":
            return sixteen_bits(compute_capability())
        return "bfloat16" if has_fast_bfloat16() else "float32"
    if dtype not in DTYPES:
        raise InputError(f"dtype {dtype!r} is not supported: use auto, {', '.join(DTYPES)}")
    return dtype


def resolve_context(config: ModelConfig, max_model_len: int | None) -> int:
    """The context in tokens: the most tokens of a prompt and its output together.

    Args:
        config: The model's configuration.
        max_model_len: The context that the user asks for, in tokens; None: the model's.

    Raises:
        InputError: `max_model_len` is above the model's context, or below 2.
    """
    if max_model_len is None:
        return config.max_position
    if not 2 <= max_model_len <= config.max_position:
        raise InputError(f"max_model_len must be between 2 and the model's context of {config.max_position}")
    return max_model_len


def resolve_budget(cpu_memory: int | str | None, processes: int) -> int:
    """The host memory that each process of a job on this machine may use, in bytes.

    Args:
        cpu_memory: Budget of all the job's processes together, in bytes or as text such as "14GiB"; None: the free
            memory less a margin.
        processes: Number of processes, which share the budget evenly.
    """
    if cpu_memory is None:
        return int((available_memory_bytes() + resident_bytes()) * (1 - _MARGIN_FRAC)) // processes
    return size_bytes(cpu_memory) // processes


def process_bytes() -> int:
    """Bytes of host memory that this process uses before it loads a model, once all imports are done."""
    import batchgen.models.tokenizers.loading
    import batchgen.runtime.executor  # noqa: F401

    trim_freed_memory()  # of imports and of the tokenizer; a few milliseconds
    if resident_bytes() > TYPICAL_PROCESS_BYTES:  # perhaps an earlier model; collecting garbage takes a while
        give_back_freed_memory()
    here = resident_bytes()
    return here + _PROCESS_GROWTH_BYTES if here else TYPICAL_PROCESS_BYTES


def resolve_budgets(
    device: Device,
    *,
    cpu_memory: int | str | None = None,
    gpu_memory: int | str | None = None,
    disk_memory: int | str | None = None,
    offload_dir: Path | None = None,
    processes: int = 1,
) -> dict[str, int]:
    """The bytes of each tier (GPU memory, host memory, disk) that one process of a job may use.

    Args:
        device: Compute device.
        cpu_memory: Host memory of all of the job's processes on this host, in bytes or as text ("14GiB"); None: the
            free memory less a margin.
        gpu_memory: Accelerator memory of each process, in bytes or as text; None: all of it.
        disk_memory: Bytes in the offload directory for all processes on this host; None: the free space less a margin.
        offload_dir: Directory of the disk tier; None: there is none.
        processes: Number of processes on this host, which share host memory and disk evenly.

    Returns:
        Bytes by tier; no "gpu" without an accelerator, 0 for "disk" without a directory.

    Raises:
        InputError: A size cannot be read, or a GPU is asked for that is not there.
    """
    budgets = {"cpu": resolve_budget(cpu_memory, processes), "disk": 0}
    if offload_dir is not None:
        free = int(shutil.disk_usage(make_offload_dir(offload_dir)).free * (1 - _MARGIN_FRAC)) // processes
        budgets["disk"] = free if disk_memory is None else min(free, size_bytes(disk_memory) // processes)
    if device.kind == "cuda":
        from batchgen.runtime.cuda import usable_memory

        budgets["gpu"] = usable_memory(None if gpu_memory is None else size_bytes(gpu_memory))
    elif device.accelerated:
        assert device.gpu_memory_bytes is not None
        budgets["gpu"] = device.gpu_memory_bytes if gpu_memory is None else size_bytes(gpu_memory)
        if cpu_memory is None:  # an emulated memory is a part of the host's
            budgets["cpu"] = max(1, budgets["cpu"] - budgets["gpu"])
    elif gpu_memory is not None:
        raise InputError(
            "--gpu-memory is given, but no GPU is used: leave it out, or give --device cuda or --device emulated:..."
        )
    return budgets


def native_formats(device: Device) -> Collection[str]:
    """The packed formats of models' files that a device multiplies as they are: all, but for GPUs without kernels.

    A GPU that is not here, as in a plan for another machine, is taken for one that has them.
    """
    if device.kind != "cuda" or not has_cuda():
        return NATIVE_FORMATS
    import torch

    from batchgen.ops.dispatch import multiplies_packed

    return NATIVE_FORMATS if multiplies_packed(torch.device(device.kind)) else ()


def choose_weights(
    files: ModelFiles,
    config: ModelConfig,
    weights: str,
    dtype: str,
    device: Device,
    memory_bytes: Callable[[], int],
) -> str:
    """The format of the layers' matrices that a value of `--weights` stands for.

    With "auto", quantized weights are dequantized where that takes a small part of the memory. Quantized and
    dequantized weights hold the same numbers but for rounding to the compute dtype. GEMMs of quantized weights are
    faster with few tokens; those of dequantized weights are a little faster with many.

    Args:
        files: The model's files.
        config: The model's configuration.
        weights: The value of `--weights`.
        dtype: Compute dtype.
        device: Compute device.
        memory_bytes: Function that returns the bytes of memory that the process has for weights: the host's, or of a
            CUDA GPU its own; called only where the choice depends on it.

    Raises:
        InputError: There is no such format, or the model's weights are in another one.
    """
    resolved = resolve_weights(files, weights, native_formats(device))
    if weights != AUTO or resolved not in NATIVE_FORMATS:
        return resolved
    expanded_bytes = config.held_params * FORMAT_BYTES[dtype]
    return DEQUANTIZED if expanded_bytes <= memory_bytes() * _DEQUANTIZED_FRAC else resolved


def in_memory_policy(
    config: ModelConfig,
    device: Device,
    *,
    dtype: str,
    admission: str,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    share_prefixes: bool,
    weights: str = NATIVE,
    kv_cache_dtype: str = "auto",
    state_dtype: str = STATE_DTYPES[0],
    attention_budget: str = ALL,
) -> Policy:
    """The policy for a model whose weights and KV are all in the compute device's memory.

    Args:
        config: The model's configuration.
        device: Compute device.
        dtype: Compute dtype, which is also that of KV unless `kv_cache_dtype` names another.
        admission: "continuous" or "static".
        max_num_seqs: The most samples in flight.
        max_num_batched_tokens: The most tokens in one sweep.
        max_model_len: Longest prompt plus output, in tokens.
        share_prefixes: Whether rows reuse the KV of a prompt prefix that another row has computed.
        weights: Resolved format of the layers' matrices.
        kv_cache_dtype: "auto" (KV in `dtype`), "int8", "int5" or "int4".
        state_dtype: Format of recurrent states, "float32" or "bfloat16".
        attention_budget: Tokens that a decoding token attends to: "all", a share such as "10%", or a number.

    Raises:
        InputError: A value is out of range.
    """
    if kv_cache_dtype not in ("auto", *KV_CODE_BITS):
        raise InputError(f"kv_cache_dtype {kv_cache_dtype!r} is not one of auto, {', '.join(KV_CODE_BITS)}")
    check_state_dtype(config, state_dtype)
    check_attention_budget(config, attention_budget)
    if admission not in ADMISSIONS:
        raise InputError(f"admission {admission!r} is not one of {', '.join(ADMISSIONS)}")
    for name, value in (("max_num_seqs", max_num_seqs), ("max_num_batched_tokens", max_num_batched_tokens)):
        if value < 1:
            raise InputError(f"{name} must be at least 1, not {value}")
    tier = "gpu" if device.accelerated else "cpu"
    layers = (config.num_layers, 0, 0) if tier == "gpu" else (0, config.num_layers, 0)  # of GPU, CPU and disk
    return Policy(
        admission=admission,
        gpu_batch_size=max_num_seqs,
        num_gpu_batches=1,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=max_model_len,
        kv_block_size=DEFAULT_KV_BLOCK_SIZE,
        kv_blocks={},
        share_prefixes=share_prefixes and config.causal,
        weight_format=weight_format_of(dtype, weights),
        kv_format=dtype if kv_cache_dtype == "auto" else kv_cache_dtype,
        state_dtype=state_dtype,
        attention_budget=attention_budget,
        weight_layers=dict.fromkeys(config.layer_tensors, layers),
        packed_tokens=UNPLANNED_PACKED_TOKENS if tier == "gpu" and weights == INT4 else 0,
        captured_tokens=min(UNPLANNED_CAPTURED_TOKENS, max_num_batched_tokens) if device.kind == "cuda" else 0,
        head_tier=tier,
        embedding_tier=tier,
        kv_seqs={tier: max_num_seqs},
        activation_batches=(1, 0) if device.accelerated else (0, 1),
    )


def check_state_dtype(config: ModelConfig, state_dtype: str) -> None:
    """Refuse a format of recurrent states that is none, or that the model has no use for. Raises InputError."""
    if state_dtype not in STATE_DTYPES:
        raise InputError(f"state_dtype {state_dtype!r} is not one of {', '.join(STATE_DTYPES)}")
    if state_dtype != STATE_DTYPES[0] and not (config.state and config.state.matrix_shape[0]):
        raise InputError(f"--state-dtype {state_dtype}: no layer of this model keeps a recurrent state, leave it out")


def check_attention_budget(config: ModelConfig, attention_budget: str) -> None:
    """Refuse an attention budget that is none, or that no layer of the model keeps to. Raises InputError."""
    if AttentionBudget.of(attention_budget) is None:
        return
    if not any(map(config.chooses_pages, range(config.num_layers))):
        raise InputError(
            f"--attention-budget {attention_budget}: no layer of this model attends to its whole context after the"
            f" first {DENSE_LAYERS} layers, leave it out"
        )


def existing_store(files: ModelFiles, offload_dir: Path, dtype: str, weights: str, shard: Shard | None) -> bool:
    """Tell whether the offload directory has a weight store of a model in a given format.

    Args:
        files: The model's files.
        offload_dir: Directory of the disk tier, which holds the stores.
        dtype: Compute dtype of the store.
        weights: Format of the layers' matrices in the store.
        shard: Part of the model that the store is of; None: the whole model.
    """
    if shard is None and files.kind == "store":
        manifest = read_store_manifest(files.path / STORE_MANIFEST)
        if (manifest["dtype"], manifest["weight_format"]) == (dtype, weight_format_of(dtype, weights)):
            return True
    return made_before(store_path(offload_dir, files, dtype, weights, shard)) is not None


def needs_store(policy: Policy) -> bool:
    """Tell whether a policy needs a weight store: for weights that stay on disk, or that are quantized to int4."""
    on_disk = "disk" in (policy.head_tier, policy.embedding_tier)
    return policy.weight_format == INT4 or on_disk or any(layers for _, _, layers in policy.weight_layers.values())


_loaded_in: int | None = None  # the process in which a model was first loaded


def _refuse_in_fork() -> None:
    """Raise BatchgenError in a fork of a process that has loaded a model: the parent's threads do not exist here."""
    global _loaded_in
    if _loaded_in not in (None, os.getpid()):
        raise BatchgenError(
            "a model was loaded in the process that this one was forked from, whose threads it lacks: load it only in"
            " the children, or start them by spawn (multiprocessing.set_start_method)"
        )
    _loaded_in = os.getpid()


@dataclass(frozen=True)
class LoadRequest:
    """A model to load with its policy, every option resolved to a value.

    Attributes:
        files: The model's files.
        config: The model's configuration; for a shard or a pipeline stage, the configuration of that part.
        policy: Placement of weights and KV, and schedule.
        dtype: Compute dtype.
        device: Compute device.
        budgets: Bytes of each tier that this process may use.
        min_output_len: Tokens that every row must be able to generate.
        task: "generate" or "score"; None: the engine does both.
        sampling: Sampling parameters of most rows; their grammar is compiled before weights are read.
        longest_tokens: Longest prompt plus output that is expected, in tokens; None: the context.
        most_kv_tokens: The most tokens whose KV the job is expected to hold; KV pools are no larger.
        planned_process_bytes: Host bytes that the plan reserves for the process itself, without model.
        offload_dir: Directory for KV on disk.
        store: The weight store, where the policy needs one.
        kernels: Kernel of each shape; other shapes run on the process's instruction set.
        serial: Whether the Steps of a sweep run one after the other on one thread.
        on_step: Function called with each Step and the seconds at which it begins and ends.
        on_load: Function called with (layers loaded, layers in all) after each layer.
        shard: This rank's part of the model under tensor parallelism.
        reduce: Function that sums a tensor over the ranks.
        drafts: The most drafts of a sequence in a sweep that are asked for; None: the usual number where something
            streams.
    """

    files: ModelFiles
    config: ModelConfig
    policy: Policy
    dtype: str
    device: Device
    budgets: Mapping[str, int]
    min_output_len: int
    task: str | None = "generate"
    sampling: SamplingParams | None = None
    longest_tokens: int | None = None
    most_kv_tokens: int | None = None
    planned_process_bytes: int | None = None
    offload_dir: Path | None = None
    store: WeightStore | None = None
    kernels: KernelChoice = PROCESS_SET
    serial: bool = False
    on_step: OnStep | None = None
    on_load: Callable[[int, int], None] | None = None
    shard: Shard | None = None
    reduce: Reduce | None = None
    drafts: int | None = 0

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that is expected: at most the context."""
        context = self.policy.max_model_len
        return min(context, self.longest_tokens or context)


def load_parts(
    request: LoadRequest,
    tokenizer: Callable[[], Tokenizer],
    on_planned: Callable[[MemoryPlan], None] = lambda memory: None,
) -> EngineParts:
    """Load a model for the engine.

    Args:
        request: The model to load.
        tokenizer: Function that returns the tokenizer; called after all quick checks, and before weights are read.
        on_planned: Function called with the memory plan before anything is allocated.

    Raises:
        InputError: Something does not fit or is not supported; before weights are read where possible.
        BatchgenError: Memory or disk failed.
    """
    from batchgen.runtime.sampler import sample
    from batchgen.runtime.scorer import Scorer

    _refuse_in_fork()
    instruction_set(), num_threads()  # refuse a wrong BATCHGEN_ISA and BATCHGEN_NUM_THREADS
    config, policy = request.config, request.policy
    memory = plan_load(request)
    words = load_words(request, tokenizer)
    on_planned(memory)
    executor, tiers = load_executor(request, memory, words.check)  # refused before weights are read
    split, pack = splitter(policy, memory, tiers.compute_tier), pack_for(request, tiers.compute_tier, memory.kv_blocks)
    return EngineParts(
        config=config,
        tokenizer=words.tokenizer,
        executor=executor,
        draft_proposers=_draft_proposers(request, executor),
        split=split,
        pack=pack,
        sample=sample,
        scorer=Scorer,
        policy=replace(policy, kv_blocks=memory.kv_blocks),
        memory=memory,
        eos_token_ids=words.eos_token_ids,
        dtype=request.dtype,
        loaded_bytes=executor.weights.num_bytes,
        kernels=request.kernels,
        compute_tier=tiers.compute_tier,
        load_s=words.seconds(),
        grammars=words.grammars,
    )


def _draft_proposers(request: LoadRequest, executor: Executor) -> Callable[[], Sequence[Proposer]]:
    """A function that makes the proposer of a model's MTP module, where it is wanted and there is one."""
    import torch

    from batchgen.models.mtp import load_mtp
    from batchgen.runtime.mtp import MtpProposer

    if not _wants_mtp(request):
        return tuple
    module = load_mtp(request.files, request.config, getattr(torch, request.dtype))
    if module is None:
        return tuple
    policy = request.policy

    def proposers() -> list[Proposer]:
        proposer = MtpProposer(
            module, executor.weights, max_num_seqs=policy.max_num_seqs, max_positions=policy.max_model_len
        )
        executor.context.take_hidden = proposer.take
        return [proposer]

    return proposers


def _wants_mtp(request: LoadRequest) -> bool:
    """Tell whether a model's MTP module drafts, if there is one: where drafts are asked for, as it takes memory.

    One process must compute all on the CPU, and have all of the output matrix in memory.
    """
    alone = request.shard is None and not request.device.accelerated and request.policy.head_tier != "disk"
    return alone and request.task != "score" and request.policy.most_drafts(request.drafts or 0, "cpu") > 0


def load_executor(
    request: LoadRequest,
    memory: MemoryPlan,
    before_weights: Callable[[], object] = lambda: None,
    adjacent_ranks: AdjacentRanks | None = None,
) -> tuple[Executor, Tiers]:
    """Load the executor of sweeps with its weights and KV pools; on a GPU, also run warm-up sweeps.

    Args:
        request: The model to load; for a pipeline's stage, its `config` is the stage's.
        memory: Bytes of each tier and number of KV blocks; a stage may have fewer KV blocks than `plan_load` gives it.
        before_weights: Function called when everything but the weights is loaded.
        adjacent_ranks: Ranks of the previous and the next pipeline stage; None: there is one stage.

    Raises:
        BatchgenError: The weights are broken, or memory or disk do not suffice.
    """
    from batchgen.runtime.devices import open_tiers

    _refuse_in_fork()
    keep_freed_memory()
    with contextlib.ExitStack() as undo:
        tiers = open_tiers(request.device, request.budgets.get("gpu"))
        undo.callback(tiers.close)
        kv_cache = _make_kv_cache(request, memory, tiers)
        undo.callback(kv_cache.close)
        states = _make_states(request, memory, tiers)
        if states is not None:
            undo.callback(states.close)
        if not request.device.accelerated and available_cores() >= _PREFAULT_CORES:
            kv_cache.prefault(_PREFAULT_BYTES)
        before_weights()
        weights = _load_weights(request, tiers)
        undo.callback(weights.close)
        executor = _make_executor(request, memory, tiers, weights, kv_cache, states, adjacent_ranks)
        undo.pop_all()
    with contextlib.ExitStack() as undo:
        undo.callback(executor.close)
        if tiers.driver is not None:
            split = splitter(request.policy, memory, tiers.compute_tier)
            pack = pack_for(request, tiers.compute_tier, memory.kv_blocks)
            sampling = request.sampling or SamplingParams()
            warm_up(executor, request.policy, memory, tiers.compute_tier, split, pack, sampling, request.task)
        undo.pop_all()
    return executor, tiers


@dataclass(frozen=True)
class Words:
    """The tokenizer of an engine, the tokens that end a text, and the grammars of outputs.

    Attributes:
        tokenizer: The model's tokenizer.
        eos_token_ids: Ids of the tokens that end a text.
        grammars: Grammars over the tokens.
        grammar: Future of the grammar of most rows, which is compiled in a thread; None: most rows have no grammar.
        started_s: Start of loading, of time.perf_counter.
    """

    tokenizer: Tokenizer
    eos_token_ids: frozenset[int]
    grammars: Grammars
    grammar: Future | None
    started_s: float

    def check(self) -> None:
        """Wait until the grammar of most rows is compiled. Raises InputError where no output can follow it."""
        if self.grammar is not None:
            self.grammar.result()

    def seconds(self) -> float:
        """Seconds since loading began."""
        return time.perf_counter() - self.started_s


def load_words(request: LoadRequest, tokenizer: Callable[[], Tokenizer]) -> Words:
    """Load the tokenizer of a model, the ids of its end-of-text tokens and the grammar of most rows.

    Args:
        request: The model to load.
        tokenizer: Function that returns the tokenizer.

    Raises:
        InputError: The tokenizer or the grammar cannot be used.
    """
    started_s = time.perf_counter()
    loaded, config = tokenizer(), request.config
    eos_token_ids = frozenset(config.eos_token_ids) | frozenset(loaded.eos_token_ids)
    grammars = Grammars(loaded.to_json, config.vocab_size, tuple(eos_token_ids))
    sampling = request.sampling or SamplingParams()
    grammar = grammars.compile_ahead(sampling) if sampling.constrained else None
    return Words(loaded, eos_token_ids, grammars, grammar, started_s)


def with_fitting_states(request: LoadRequest) -> LoadRequest:
    """The request with so few sequences in flight that memory holds their states and, for KV, half as much again.

    Models without states keep `request.policy`: there, KV of as many sequences as fit is shared out while rows run.
    """
    tier = "gpu" if request.device.accelerated else "cpu"
    while request.config.state is not None and request.policy.max_num_seqs > 1:
        try:
            parts = plan_load(request).parts[tier]
            if request.budgets[tier] - sum(parts.values()) + parts.get("KV", 0) >= parts["state"] / 2:
                break
        except InputError:
            pass  # what is missing even with one sequence is said when it is loaded
        fewer = request.policy.max_num_seqs // 2
        request = replace(request, policy=replace(request.policy, gpu_batch_size=fewer, kv_seqs={tier: fewer}))
    return request


def plan_load(request: LoadRequest) -> MemoryPlan:
    """The bytes of each tier and the KV blocks of a model to load. Raises InputError if budgets are too small."""
    # With a KV block fewer than planned, one sequence would be left to run in a block by itself.
    held_bytes = process_bytes()
    if request.planned_process_bytes:
        held_bytes = max(resident_bytes(), request.planned_process_bytes)
    elif _wants_mtp(request):
        held_bytes += mtp_bytes(request.files, request.config, request.dtype)
    context = request.policy.max_model_len
    memory = plan_memory(
        request.config,
        request.policy,
        dtype=request.dtype,
        budgets=request.budgets,
        process_bytes=held_bytes,
        demand=Demand(
            min_tokens=min(request.min_output_len + 1, context),
            longest_tokens=request.longest,
            most_kv_tokens=request.most_kv_tokens,
            task=request.task,
        ),
    )
    # Ranks are not told of changes.
    return memory if request.shard is None else replace(memory, expansion=None)


def _make_kv_cache(request: LoadRequest, memory: MemoryPlan, tiers: Tiers) -> KVCache:
    """Allocate the KV pools, and with them the device's memory for activations."""
    from batchgen.runtime.memory.kv_cache import KVCache

    if request.device.accelerated:
        tiers.arenas["gpu"].take(memory.parts["gpu"]["activations"], "activations")
    kv_cache = KVCache(
        request.config,
        request.policy.kv_block_size,
        request.policy.kv_format,
        memory.kv_blocks,
        tiers=tiers,
        staging_blocks=memory.staging_blocks,
        offload_dir=request.offload_dir,
        on_device=kv_on_device(request.config.num_layers, request.policy.kv_layers),
        window_blocks=memory.window_blocks or None,
        summaries_in=request.policy.summary_tier(tiers.compute_tier) if chooses_pages(request.policy) else None,
        expansion=memory.expansion,
    )
    return kv_cache


def _make_states(request: LoadRequest, memory: MemoryPlan, tiers: Tiers) -> StateCache | None:
    """Allocate the pools of states; None: the layers keep none."""
    from batchgen.runtime.memory.state_cache import StateCache

    config, policy = request.config, request.policy
    if config.state is None:
        return None
    return StateCache(
        config,
        StateRow(config.state, policy.state_dtype, request.dtype),
        memory.state_slots,
        tiers=tiers,
        staging_rows=memory.staging_states,
        offload_dir=request.offload_dir,
        on_device=kv_on_device(config.num_layers, policy.kv_layers),
    )


def _load_weights(request: LoadRequest, tiers: Tiers) -> Weights:
    import torch

    from batchgen.models.checkpoint import open_checkpoint
    from batchgen.runtime.memory.weights import Weights

    policy = request.policy
    whole = request.config if request.config.model_layers == 0 else None  # a stage reads the whole model's again
    return Weights(
        request.config,
        WeightResidency.of_policy(policy, request.config),
        getattr(torch, request.dtype),
        checkpoint=None if request.store else open_checkpoint(request.files, whole, request.shard),
        store=request.store,
        tiers=tiers,
        dequantized_slots=2 if request.device.accelerated and policy.kv_seqs.get("cpu") else 1,
        updates_on_host=request.device.accelerated and any(map(policy.kv_seqs.get, ("cpu", "deferred"))),
        kernels=request.kernels,
        on_layer=request.on_load,
    )


def _make_executor(
    request: LoadRequest,
    memory: MemoryPlan,
    tiers: Tiers,
    weights: Weights,
    kv_cache: KVCache,
    states: StateCache | None,
    adjacent_ranks: AdjacentRanks | None = None,
) -> Executor:
    import torch

    from batchgen.runtime.executor import Executor
    from batchgen.runtime.sweep_options import SweepOptions, attention_isas

    config, policy, accelerated = request.config, request.policy, request.device.accelerated
    options = SweepOptions(
        max_positions=policy.max_model_len,
        rotary_positions=None if accelerated else request.longest,
        attention_budget=policy.attention_budget,
        batches_on_host=policy.activation_batches[1] if accelerated else 0,
        batch_tokens=memory.batch_tokens,
        delegated_seqs=policy.batch_seqs if accelerated and policy.kv_seqs.get("cpu") else 0,
        deferred_seqs=policy.kv_seqs.get(KVPlacement.DEFERRED, 0) if accelerated else 0,
        chunk_tokens=chunk_tokens(request.config, int(FORMAT_BYTES[request.dtype]), on_gpu=accelerated),
        logit_rows=memory.logit_rows,
        captured_tokens=most_captured_tokens(policy) if policy.all_on_gpu and not chooses_pages(policy) else 0,
        attention_isa=attention_isas(config, request.kernels, request.dtype),
        reduce=request.reduce,
        makes_logits=request.shard is None or request.shard.rank == 0,
        stage_tokens=policy.num_gpu_batches * policy.batch_tokens if adjacent_ranks else 0,
        adjacent_ranks=adjacent_ranks,
        serial=request.serial,
        shared_cores=request.device.shares_cores,
        on_step=request.on_step,
    )
    executor = Executor(request.config, weights, kv_cache, tiers, options, states)
    if tiers.driver is not None:
        torch.cuda.synchronize()  # memory is zeroed on another stream than it is used on
    return executor


def chooses_pages(policy: Policy) -> bool:
    """Tell whether decoding tokens attend to chosen pages only."""
    return AttentionBudget.of(policy.attention_budget) is not None


def pack_for(
    request: LoadRequest, compute_tier: str, kv_blocks: Mapping[str, int]
) -> Callable[[list[ScheduledSequence]], PackedBatch]:
    """A function that packs scheduled sequences into a batch, with the model's and the policy's arguments bound.

    Args:
        request: The model to load.
        compute_tier: Tier of the compute device.
        kv_blocks: KV blocks of each tier's pool.
    """
    from batchgen.schedule.packed_batch import pack

    config, chooses = request.config, chooses_pages(request.policy)
    return partial(
        pack,
        kv_block_size=request.policy.kv_block_size,
        key_bytes=config.kv_size * int(FORMAT_BYTES[request.dtype]),
        windows=frozenset(config.window_layers) | frozenset(config.layer_windows(chooses=chooses)),
        compute_tier=compute_tier,
        in_place=request.policy.kv_layers > 0,
        on_card=request.device.kind == "cuda",
        attention_budget=request.policy.attention_budget,
        host_blocks=kv_blocks.get("cpu", 0),
        causal=config.causal,
    )


def warm_up(
    executor: Executor,
    policy: Policy,
    memory: MemoryPlan,
    compute_tier: str,
    split: Callable,
    pack: Callable,
    sampling: SamplingParams,
    task: str | None = "generate",
) -> None:
    """Run dummy sweeps on a device, so that all memory is allocated and all kernels are compiled.

    Args:
        executor: The executor on the device.
        policy: The policy whose sweeps are run.
        memory: The memory plan.
        compute_tier: Tier of the device.
        split: Function from a sweep's scheduled sequences to micro-batches.
        pack: Function from a micro-batch to a packed batch.
        sampling: Sampling parameters of most rows.
        task: "generate" or "score"; None: the engine does both.
    """
    from batchgen.runtime.sampler import sample
    from batchgen.runtime.scorer import Scorer
    from batchgen.runtime.warm_up import dummy_sweeps, sampled_every_way, scored

    scoring = {}  # first row -> scorer of the vocabulary chunks of its logits, and its rows
    sampled = set[int]()  # numbers of rows that have been sampled in every way

    def on_logits(rows, logits, start):
        if executor.config.hidden_output:
            return None
        if task != "generate":
            if start == 0:
                scoring[rows[0]] = Scorer(), scored(rows)
            scorer, own = scoring[rows[0]]
            scorer.take(own, logits, start)
            list(scorer.results())
        if task == "score":
            return None
        sequences = [sequence for sequence, _ in rows]
        if len(sequences) not in sampled:
            sampled.add(len(sequences))
            for varied in sampled_every_way(sequences, logits.shape[1]):
                sample(logits, varied)
        return sample(logits, sequences).token_ids

    for lane, num_bytes in memory.stream_bytes.items():
        executor.lanes.reserve(lane, num_bytes)
    budget = AttentionBudget.of(policy.attention_budget)
    sweeps = dummy_sweeps(
        Scheduler(kv_pools(policy, memory), scheduler_limits(policy, memory, compute_tier)),
        split,
        pack,
        max_num_seqs=policy.max_num_seqs,
        max_num_batched_tokens=policy.max_num_batched_tokens,
        longest=min(policy.max_model_len, longest_sequence(policy, memory, compute_tier)),
        vocab_size=executor.config.vocab_size,
        sampling=sampling,
        sampled_token=executor.sampled_token,
        dense_tokens=budget.most_dense_tokens(policy.kv_block_size) if budget else 0,
    )
    executor.warm_up(sweeps, on_logits, vocabulary_chunks=task == "score")
