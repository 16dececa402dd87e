"""Plans for each kind of machine in a Ray cluster, made once before the actors begin.

If each actor planned by itself, several would measure one machine at the same time.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from batchgen.core.device import parse_device
from batchgen.core.digest import json_sha256
from batchgen.core.machine import available_memory_bytes
from batchgen.core.request import SamplingParams
from batchgen.job.job import resolve_job
from batchgen.job.options import JobOptions
from batchgen.job.planning import make_plan
from batchgen.job.step_source import open_rows
from batchgen.job.workload import measure_workload
from batchgen.models.files import resolve_model
from batchgen.models.tokenizers.loading import load_tokenizer
from batchgen.profiler.measure import identity
from batchgen.ray.share import share_of, use_cores


def machine_kind(device: str, cores: int) -> str:
    """Name of this machine's kind. Actors on machines of one kind run at the same speed and share a plan.

    Args:
        device: Compute device.
        cores: Number of CPU cores of an actor.
    """
    kind = "cuda" if parse_device(device).kind == "cuda" else "cpu"
    return json_sha256(identity(kind) | {"cores": cores})[:16]


def plan_here(model: str, input: Any, options: Mapping[str, Any], memory: int, rows: int) -> dict[str, Any]:
    """The plan of an actor on this machine, as JSON values.

    Args:
        model: The model, as `batchgen run --model` takes it.
        input: The input, as `batchgen run --input` takes it.
        options: Options of `Generate`.
        memory: Memory of an actor, in bytes.
        rows: Number of rows that an actor will run.

    Raises:
        InputError: An option is invalid, or no plan fits.
    """
    started_s = time.monotonic()
    job = resolve_job(
        job_options(model, {"cpu_memory": memory, **options}, input), resolve_model(model, options.get("lora"))
    )
    tokenizer = load_tokenizer(job.files, job.options.special_tokens, job.options.chat_template)
    source = open_rows(job.options).for_model(job.config, tokenizer, job.options)
    plan = make_plan(
        job,
        lambda: measure_workload(source, tokenizer, job.options, job.context, rows_left=rows),
        started_s=started_s,
    )
    return plan.to_json()


def cluster_plans(
    model: str, input: Any, options: Mapping[str, Any], *, num_cpus: float, workers: int, rows: int
) -> dict[str, dict[str, Any]]:
    """A plan for each kind of machine that has enough cores for an actor, by the kind's name.

    This is the argument `plans` of `Generate`. A machine of another kind may join the cluster later; its actors hold
    the model in memory.

    Args:
        model: The model, as `batchgen run --model` takes it.
        input: The input, as `batchgen run --input` takes it, which all machines can read.
        options: Options of `Generate`.
        num_cpus: CPU cores of an actor.
        workers: Number of actors.
        rows: Number of rows of the job.

    Raises:
        InputError: An option is invalid, or no plan fits.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    cores = max(1, int(num_cpus))

    def on(node: Mapping[str, Any], function: Callable[..., Any], cpus: float) -> Any:
        """A function that runs `function` as a Ray task on one machine.

        The task gets a new process, since measuring pins its process to cores.
        """
        there = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        return ray.remote(num_cpus=cpus, max_calls=1, max_retries=0, scheduling_strategy=there)(function).remote

    nodes = [node for node in ray.nodes() if node["Alive"] and node["Resources"].get("CPU", 0) >= num_cpus]
    kinds = ray.get([on(node, machine_kind, 0)(options.get("device", "auto"), cores) for node in nodes])
    one_of_each = {kind: node for kind, node in reversed([*zip(kinds, nodes, strict=True)])}
    share = math.ceil(rows / workers)
    plans = ray.get([
        on(node, _plan_of_actor, num_cpus)(model, input, dict(options), num_cpus, dict(node["Resources"]), share)
        for node in one_of_each.values()
    ])  # fmt: skip
    return dict(zip(one_of_each, plans, strict=True))


def job_options(model: str, options: Mapping[str, Any], input: Any = None) -> JobOptions:
    """The options of a job, made from options of `Generate`.

    Args:
        model: The model, as `batchgen run --model` takes it.
        options: Options of `Generate`.
        input: The input, as `batchgen run --input` takes it; None: there is none.
    """
    sampling = {name: options[name] for name in SamplingParams.names() if name in options}
    others = {name: value for name, value in options.items() if name not in sampling}
    return JobOptions(model, input, None, sampling=SamplingParams(**sampling), **others)


def _plan_of_actor(
    model: str, input: Any, options: dict[str, Any], num_cpus: float, node: dict[str, float], rows: int
) -> dict[str, Any]:
    cores, memory = share_of({"CPU": num_cpus}, node, available_memory_bytes())
    use_cores(cores)
    return plan_here(model, input, options, memory, rows)
