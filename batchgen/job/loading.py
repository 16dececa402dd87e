"""Loading of a job's engine according to its plan."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import numpy as np

from batchgen.core.dtypes import DEQUANTIZED, NATIVE_FORMATS
from batchgen.engine.engine import Engine
from batchgen.engine.loader import LoadRequest, needs_store
from batchgen.engine.tensor_parallel import load_on_ranks
from batchgen.job.rest_of_job import Sweeps, SweepTable
from batchgen.models.files import stated_scheme
from batchgen.models.formats.fp8 import Fp8
from batchgen.models.kept_stores import find_or_convert
from batchgen.planner.drafts import why_no_drafts
from batchgen.planner.memory_requirements import most_kv_tokens, process_share
from batchgen.planner.parallel import split_layers, stage_policy
from batchgen.schedule.trace import TraceWriter

if TYPE_CHECKING:
    from batchgen.core.plan import Plan
    from batchgen.distributed.group import Group
    from batchgen.engine.parts import EngineParts
    from batchgen.job.job import Job
    from batchgen.job.progress import Progress
    from batchgen.models.tokenizers.tokenizer import Tokenizer
    from batchgen.runtime.lanes import OnStep

# Sweeps of all sequences take at most so many times as those of a quarter, where streamed weights bind.
_NEARLY = 1.25
_NOT_USED = ", as weights only: scales of activations are not used"


def load_engine(
    job: Job,
    plan: Plan,
    tokenizer: Callable[[], Tokenizer],
    progress: Progress,
    on_step: OnStep | None,
    group: Group | None = None,
    *,
    serial: bool = False,
) -> Engine:
    """Load the model of a job as its plan says, from a weight store where the plan needs one.

    Args:
        job: The job.
        plan: The job's plan.
        tokenizer: Function that returns the tokenizer; called before weights are read.
        progress: Display of the number of loaded layers.
        on_step: Function called for every Step of the run, as `tracing` yields it; None: no timeline is written.
        group: Group of ranks that a launcher has started; None: this function starts ranks where the job has any.
        serial: Whether the Steps of a sweep run one after the other.

    Raises:
        BatchgenError: The model is broken, or memory or disk do not suffice.
    """
    options, files, policy = job.options, job.files, plan.policy
    generates = options.task == "generate"
    store, weights = None, _quantization(options.weights, policy.weight_format)
    if needs_store(policy):
        with progress.layers() as on_layer:
            store = find_or_convert(
                files,
                job.offload_dir,
                plan.dtype,
                weights,
                on_layer=on_layer,
                shard=job.shard,
            )
    scheme = stated_scheme(files)
    progress.say(
        f"loading {files.name}"
        + (f" ({scheme.describe()}{_NOT_USED if isinstance(scheme, Fp8) else ''})" if scheme else "")
    )
    if options.drafts and (reason := why_no_drafts(plan)):
        progress.say(f"--drafts has no effect: {reason}")
    request = LoadRequest(
        files,
        job.config,
        policy,
        dtype=plan.dtype,
        device=job.device,
        budgets=_budgets(job, plan),
        min_output_len=options.sampling.max_tokens if generates else 1,
        sampling=options.sampling if generates else None,
        task="generate" if generates else "score",
        longest_tokens=plan.workload.max_seq_len,
        most_kv_tokens=most_kv_tokens(plan),
        planned_process_bytes=process_share(plan),
        offload_dir=job.offload_dir,
        store=store,
        serial=serial,
        kernels=plan.kernels,
        on_step=on_step,
        shard=job.shard,
        drafts=options.drafts,
    )
    shares = [set(share) for share in job.shares] or None
    parts = (
        load_on_ranks(request, tokenizer, shares, group)
        if options.pipeline == 1
        else _load_stages(job, plan, request, tokenizer, group)
    )
    return Engine.from_parts(
        parts,
        expected_output_len=options.expected_output_len,
        planned_output_len=plan.workload.output_len.mean if options.pipeline == 1 else None,
        lane_costs=plan.prediction.lane_costs,
        on_overlong=options.on_overlong,
        sampling=options.sampling,
        longest_first=streaming_binds(plan),
        drafts=options.drafts,
    )


def streaming_binds(plan: Plan) -> bool:
    """Tell whether a sweep with a quarter of the sequences takes nearly as long as one with all of them."""
    times = plan.prediction.sweep_times
    if not times.seconds or plan.policy.admission == "static":
        return False
    context = plan.workload.prompt_len.mean + plan.workload.output_len.mean / 2
    seqs, nothing = plan.policy.max_num_seqs * np.array([0.25, 1.0]), np.zeros(2)
    few_s, all_s = SweepTable(times)(Sweeps(nothing, nothing, seqs, np.full(2, context)))
    return bool(all_s <= _NEARLY * few_s)


def _load_stages(
    job: Job, plan: Plan, request: LoadRequest, tokenizer: Callable[[], Tokenizer], group: Group | None
) -> EngineParts:
    """Load the stages of a pipeline in this process and in the other ranks, which are started if `group` is None."""
    from batchgen.distributed.group import lead
    from batchgen.engine.messages import WORK
    from batchgen.engine.pipeline import Stage, load_pipeline

    layers = split_layers(job.config, job.options.pipeline)
    stages = [Stage(first, stop, stage_policy(plan.policy, stop - first)) for first, stop in layers]
    group = group or lead(len(stages), [set(share) for share in job.shares], work=WORK)
    try:
        return load_pipeline(request, stages, group, tokenizer)
    except BaseException:
        group.close(done=False)
        raise


def _quantization(resolved: str, weight_format: str) -> str:
    """The format in which a plan's weights are loaded, where the job allows packed or dequantized weights.

    Args:
        resolved: The job's weight format.
        weight_format: The plan's weight format.

    Returns:
        `weight_format` if it is block-quantized; "dequantized" if only `resolved` is; else `resolved`.
    """
    if weight_format in NATIVE_FORMATS:
        return weight_format
    return DEQUANTIZED if resolved in NATIVE_FORMATS else resolved


def _budgets(job: Job, plan: Plan) -> dict[str, int]:
    """The job's memory budgets. For the disk it is the plan's budget, as a new weight store has taken space since."""
    budgets = dict(job.budgets)
    if job.options.plan is None:
        budgets["disk"] = min(budgets["disk"], plan.budgets["disk"])
    return budgets


@contextlib.contextmanager
def tracing(job: Job) -> Iterator[OnStep | None]:
    """Yield the function that records every Step for `--trace`, or None without it; the file is complete at the end."""
    if job.options.trace is None:
        yield None
        return
    trace = TraceWriter(job.options.trace, f"{job.files.name}: run")
    try:
        yield trace.add
    finally:
        trace.close()
