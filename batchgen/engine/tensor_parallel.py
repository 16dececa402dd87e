"""Tensor parallelism: each rank has a part of every layer (`models/shard.py`); all run the same sweeps.

Rank 0 broadcasts the packed batches of each sweep before it runs them itself. All ranks run the same Steps, each with
its own attention heads and KV. After attention and after the MLP of each layer, an all-reduce sums the ranks' results;
all ranks get the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from batchgen.core.device import Device
from batchgen.core.dtypes import AUTO, CODE_GROUP, DEQUANTIZED, INT4, INT8, NATIVE, NATIVE_FORMATS
from batchgen.core.errors import InputError
from batchgen.core.kv_placement import KVPlacement
from batchgen.core.plan import MemoryPlan, Policy
from batchgen.distributed.launch import ranks_of_host
from batchgen.engine.loader import LoadRequest, load_executor, load_parts
from batchgen.engine.messages import WORK, ShardLoad, SweepMessage, decode, encode
from batchgen.engine.parts import EngineParts, SweepRunner, process_peaks
from batchgen.engine.ranks import RankGroup, RankZeroCounts, check_cards
from batchgen.models.config import ModelConfig
from batchgen.models.files import ModelFiles, stored_weights
from batchgen.models.kept_stores import find_or_convert
from batchgen.models.shard import Shard, shard_of
from batchgen.schedule.deferred_batches import DeferredBatches
from batchgen.schedule.packed_batch import PackedBatch

if TYPE_CHECKING:
    from torch import Tensor

    from batchgen.models.store.layout import WeightStore
    from batchgen.models.tokenizers.tokenizer import Tokenizer
    from batchgen.runtime.sweep_options import Largest

# KV placements that ranks may have: a deferred sequence joins a sweep at a time that differs between ranks.
KV_PLACEMENTS = tuple(p for p in KVPlacement if p is not KVPlacement.DEFERRED)


def first_shard(files: ModelFiles, config: ModelConfig, size: int, device: Device, weights: str) -> Shard:
    """The part of a model's layers that rank 0 holds.

    Args:
        files: The model's files.
        config: The model's configuration.
        size: Number of ranks.
        device: Compute device.
        weights: The value of `--weights`.

    Raises:
        InputError: So many ranks cannot run the model; the message names a number that can.
    """
    if size < 1:
        raise InputError(f"--tensor-parallel must be at least 1, not {size}")
    if device.kind == "cuda":
        _check_cuda(size)
    if weights == INT8:
        raise InputError(
            "--tensor-parallel does not cut weights of int8, whose rows have one scale: give --weights int4,"
            " or leave it out"
        )
    if weights in (AUTO, NATIVE) and stored_weights(files) == INT8:
        raise InputError(
            "--tensor-parallel does not cut this model's weights of 8 bits: give --weights dequantized to expand them"
        )
    return shard_of(config, 0, size)


def _check_cuda(size: int) -> None:
    import torch

    if not torch.distributed.is_nccl_available():
        raise InputError(
            "--tensor-parallel on --device cuda needs a torch with NCCL: install one, or give --device cpu"
        )
    check_hosts("cuda", size, ranks_of_host(size))
    check_cards("--tensor-parallel", size)


def check_hosts(device_kind: str, size: int, of_host: int) -> None:
    """Raise InputError where GPUs of several hosts would share every layer.

    Args:
        device_kind: Kind of the compute device.
        size: Number of ranks.
        of_host: Number of ranks on each host.
    """
    if device_kind == "cuda" and of_host < size:
        raise InputError("--tensor-parallel on --device cuda is for the GPUs of one host: start all ranks there")


def shard_weights(shard: Shard, weights: str) -> str:
    """The format of a rank's weights: that of the whole model, or dequantized where a shard would cut its blocks.

    Args:
        shard: A rank's part of the model.
        weights: Resolved weight format of the whole model.

    Raises:
        InputError: The shard would cut groups of int4 weights.
    """
    if weights not in (INT4, *NATIVE_FORMATS) or shard.divides(weights):
        return weights
    if weights in NATIVE_FORMATS:
        return DEQUANTIZED
    raise InputError(
        f"--tensor-parallel {shard.size} would cut groups of {CODE_GROUP} weights of int4: give fewer ranks,"
        " or leave out --weights"
    )


def check_policy(policy: Policy) -> None:
    """Raise InputError for a policy that the ranks of tensor parallelism cannot run."""
    if policy.weight_format == INT8:
        raise InputError("--tensor-parallel does not cut weights of int8: make another plan")
    if other := [name for name, count in policy.kv_seqs.items() if count and name not in KV_PLACEMENTS]:
        raise InputError(f"--tensor-parallel has no KV of placement {other[0]}: make another plan")


def load_on_ranks(
    request: LoadRequest,
    tokenizer: Callable[[], Tokenizer],
    shares: list[set[int]] | None = None,
    group: RankGroup | None = None,
) -> EngineParts:
    """Load a model in this process or, where the request has a shard, on all ranks.

    Args:
        request: The model to load.
        tokenizer: Function that returns the tokenizer.
        shares: Set of CPU cores of each rank; None: this function divides the cores.
        group: The group of ranks that a launcher has started; None: this function starts them.

    Raises:
        BatchgenError: The model does not fit, is not supported or cannot be read; or another rank has failed.
    """
    if request.shard is None:
        return load_parts(request, tokenizer)
    from batchgen.distributed.group import lead

    check_policy(request.policy)
    return load_parts_on_ranks(request, tokenizer, group or lead(request.shard.size, shares, work=WORK))


def load_parts_on_ranks(request: LoadRequest, tokenizer: Callable[[], Tokenizer], ranks: RankGroup) -> EngineParts:
    """Load a model on all ranks of a group, as rank 0.

    Args:
        request: The model to load, with rank 0's shard.
        tokenizer: Function that returns the tokenizer.
        ranks: The group, whose other ranks run `follow_sweeps`. They end when the executor is closed, or when loading
            fails.

    Raises:
        BatchgenError: The model does not fit, is not supported or cannot be read; or another rank, which the message
            names, has failed.
    """
    check_policy(request.policy)
    for_others = replace(request, on_step=None, on_load=None)
    try:
        parts = load_parts(
            replace(request, reduce=ranks.all_reduce),
            tokenizer,
            lambda memory: ranks.broadcast(encode(ShardLoad(for_others, memory))),
        )
        try:
            ranks.ready()
        except BaseException:
            parts.executor.close()
            raise
    except BaseException:
        ranks.close(done=False)
        raise
    return replace(parts, executor=LeadingRunner(parts.executor, ranks), peaks_of_others=ranks.peaks)


def follow_sweeps(ranks: RankGroup, request: LoadRequest, memory: MemoryPlan) -> dict[str, int]:
    """Load this rank's part of a model, and run the sweeps that rank 0 sends until rank 0 ends. Not for rank 0.

    Args:
        ranks: The group of ranks.
        request: The model to load, with the shard of rank 0.
        memory: The memory plan of rank 0; all ranks' parts are equally large.

    Returns:
        Peak bytes of each tier in this process.

    Raises:
        BatchgenError: The part cannot be loaded, or the connection to the others is lost.
    """
    assert request.shard is not None
    shard = replace(request.shard, rank=ranks.rank)
    if request.store is not None:
        request = replace(request, store=rank_store(request, shard))
    executor, _ = load_executor(replace(request, shard=shard, reduce=ranks.all_reduce), memory)
    try:
        ranks.ready()
        while True:
            sweep: SweepMessage = decode(ranks.receive_broadcast())
            if wait := executor.run(sweep.batches, _no_logits, vocabulary_chunks=sweep.vocabulary_chunks):
                wait()
    except EOFError:
        pass
    finally:
        executor.close()
    return process_peaks(executor)


def rank_store(request: LoadRequest, shard: Shard) -> WeightStore:
    """The weight store of a rank's part of a model. It is written where it does not exist.

    Args:
        request: The model to load.
        shard: The rank's part.
    """
    assert request.offload_dir is not None
    weight_format = request.policy.weight_format
    return find_or_convert(
        request.files,
        request.offload_dir,
        request.dtype,
        DEQUANTIZED if weight_format == request.dtype else weight_format,
        shard=shard,
    )


class LeadingRunner(RankZeroCounts):
    """The `SweepRunner` of rank 0, which makes the other ranks run the same sweeps."""

    def __init__(self, executor: SweepRunner, ranks: RankGroup) -> None:
        super().__init__(executor)
        self._ranks = ranks
        self._in_sweep = False

    def run(
        self,
        batches: Sequence[PackedBatch],
        on_logits: Callable,
        *,
        vocabulary_chunks: bool,
        deferred_batches: DeferredBatches,
        largest: Largest | None = None,
    ) -> None:
        """Run a sweep on all ranks; the sweep has run when this returns.

        Args:
            batches: Packed micro-batches of the sweep.
            on_logits: Function called with the logits of rank 0.
            vocabulary_chunks: Whether logits may be computed for a part of the vocabulary at a time.
            deferred_batches: Not used: ranks have no deferred batches.
            largest: Not used: sweeps of ranks are no CUDA graphs.

        Raises:
            BatchgenError: A rank has ended.
        """
        self._in_sweep = True
        self._ranks.broadcast(encode(SweepMessage([_for_others(batch) for batch in batches], vocabulary_chunks)))
        # Tokens are on rank 0's device alone: another sweep cannot begin with them before this one has run.
        if wait := self._executor.run(
            batches, on_logits, vocabulary_chunks=vocabulary_chunks, deferred_batches=deferred_batches
        ):
            wait()
            self._ranks.check()
        self._in_sweep = False

    def drop(self, deferred_batches: DeferredBatches) -> None:
        """Do nothing: ranks have no deferred batches."""

    def close(self) -> None:
        """End the other ranks: at once where a sweep was interrupted, otherwise when they have run the last sweep."""
        self._executor.close()
        self._ranks.close(done=not self._in_sweep)


def _no_logits(rows: Sequence, logits: Tensor, start: int) -> None:
    raise AssertionError("rank 0 alone makes logits")


def _for_others(batch: PackedBatch) -> PackedBatch:
    """A batch without its sequences, which rank 0 alone has; the number of rows with logits stays."""
    return replace(batch, logits_rows=[None] * len(batch.logits_rows))  # type: ignore[list-item]
