"""Loading of an actor's engine, with its share of the machine and the plan for this kind of machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from batchgen.core.errors import InputError
from batchgen.core.plan import Plan
from batchgen.core.request import SamplingParams
from batchgen.engine.engine import Engine
from batchgen.job.given_plan import runnable
from batchgen.job.job import resolve_job
from batchgen.job.kernels import kernels_here
from batchgen.job.loading import load_engine
from batchgen.job.progress import Progress
from batchgen.models.files import resolve_model
from batchgen.models.tokenizers.loading import load_tokenizer
from batchgen.ops.instruction_set import num_threads
from batchgen.ray.plans import job_options, machine_kind
from batchgen.ray.share import take_share
from batchgen.ray.stream import EngineStream

Plans = Mapping[str, Mapping[str, Any]]


def load_stream(
    model: str, sampling: SamplingParams, options: Mapping[str, Any], plans: Plans | None = None
) -> EngineStream:
    """Load the model in this process, which must not have run kernels before.

    Args:
        model: The model, as `batchgen run --model` takes it.
        sampling: Sampling parameters of most rows.
        options: Options of `batchgen.Engine`.
        plans: Plan for each kind of machine. Without one for this machine, weights and KV are in memory.

    Raises:
        BatchgenError: The model cannot be loaded.
    """
    if options.get("tensor_parallel", 1) != 1:
        raise InputError("an actor is one process: leave out tensor_parallel, and give more actors")
    cores, memory = take_share() or (num_threads(), None)
    options = dict(options) if memory is None else {"cpu_memory": memory, **options}
    given = plans.get(machine_kind(options.get("device", "auto"), cores)) if plans else None
    if given is None:
        return EngineStream(Engine(model, sampling=sampling, **options))
    job = resolve_job(
        replace(job_options(model, options), sampling=sampling), resolve_model(model, options.get("lora"))
    )
    plan = runnable(Plan.from_json(given), job)
    plan = replace(plan, kernels=kernels_here(plan.kernels))
    tokenizer = load_tokenizer(job.files, job.options.special_tokens, job.options.chat_template)
    return EngineStream(load_engine(job, plan, lambda: tokenizer, Progress("none"), None))
