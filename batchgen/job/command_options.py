"""The options of each command but `batchgen run`, whose options they take as `job`."""

from __future__ import annotations

from dataclasses import dataclass

from batchgen.core.dtypes import WEIGHTS
from batchgen.job.option import FILE, INPUT, MODEL, RESOURCES, RUN, option
from batchgen.job.options import (
    DTYPES,
    LORA_HELP,
    MODEL_HELP,
    OFFLOAD_HELP,
    STRATEGIES,
    STYLES,
    WEIGHTS_HELP,
    JobOptions,
)


@dataclass(frozen=True)
class PlanOptions:
    """All options of `batchgen plan`.

    Attributes:
        job: The options that `batchgen run` has too, under its names.
    """

    job: JobOptions
    num_prompts: int | None = option(
        INPUT,
        "plan",
        type=int,
        metavar="N",
        help="Plan for N prompts instead of an input, with --input-len and --output-len.",
    )
    input_len: int | None = option(
        INPUT, "plan", type=int, metavar="N", help="With --num-prompts: prompt tokens of each."
    )
    output_len: int | None = option(
        INPUT, "plan", type=int, metavar="N", help="With --num-prompts: tokens that each generates."
    )
    max_block_latency: str | None = option(
        RESOURCES, "plan", metavar="TIME", help="Longest time from a block's first prompt to its last token."
    )
    what_if: tuple[str, ...] = option(
        RUN,
        "plan",
        default=(),
        multiple=True,
        metavar="NAME=SIZE",
        help="Plan again with gpu-memory, cpu-memory, disk-memory, h2d, d2h, disk-read, disk-write or dram changed"
        " (gpu-memory=48GiB, cpu-memory=+64GiB, h2d=x2, disk-read=7GB/s), beside the current plan; may be repeated:"
        " a column for each, and one for all together.",
    )
    price_per_hour: float | None = option(
        RUN,
        "plan",
        type=float,
        metavar="MONEY",
        help="What the machine costs an hour, in any currency: --explain has the job's cost.",
    )
    watts: float | None = option(
        RUN, "plan", type=float, metavar="W", help="What power the machine takes: --explain has the job's energy."
    )
    devices: str | None = option(
        RUN,
        "plan",
        metavar="NxNAME",
        help="What the job would take on one of several devices, with a worker on each, by --tensor-parallel and by"
        " --pipeline, and the command of the fastest: '2x t4', each as of --hardware; '2x cpu' or 2: as the one "
        "planned for;"
        " '1x t4 + 1x a100': workers on several kinds.",
    )
    hosts: int | None = option(
        RUN,
        "plan",
        type=int,
        metavar="N",
        help="With --devices: hosts that they are in, of which each has the memory, cores and disk of one device's"
        " machine"
        " [default: one each].",
    )
    compare: bool = option(
        RUN, "plan", default=False, type=bool, help="With --hardware: beside this machine, which is measured for it."
    )
    explain: bool = option(
        RUN, "plan", default=False, type=bool, help="Placement, lanes, memory, and what more of each would buy."
    )
    frontier: bool = option(RUN, "plan", default=False, type=bool, help="Throughput against block latency.")
    html: str | None = option(
        RUN, "plan", metavar="FILE", help="Write a page: placement, a sweep's timeline, frontier, what would help."
    )
    as_json: bool = option(RUN, "plan", "--json", default=False, type=bool, help="The plan as JSON on stdout.")
    plan_file: str | None = option(
        RUN, "plan", "-o", "--output", metavar="FILE", help="Write the plan, for `batchgen run --plan`."
    )


@dataclass(frozen=True)
class BenchOptions:
    """All options of `batchgen bench`.

    Attributes:
        job: The options that `batchgen run` has too, under its names.
        load_format: "dummy" for random weights of the shape in `job.model`, which is a config.json or its directory.
        strategy: Name of the strategy that the plan keeps to; None: the fastest plan of all.
        serial: Whether each Step runs by itself, so that nothing overlaps.
    """

    job: JobOptions
    num_prompts: int = option(INPUT, "bench", default=64, type=int, metavar="N", help="Number of rows.")
    input_len: int = option(INPUT, "bench", default=512, type=int, metavar="N", help="Prompt tokens of each row.")
    output_len: int = option(INPUT, "bench", default=32, type=int, metavar="N", help="Tokens that each row generates.")
    load_format: str = option(
        MODEL,
        "bench",
        default="auto",
        choices=("auto", "dummy"),
        help="dummy: random weights for a config.json, or its directory, given as --model.",
    )
    strategy: str | None = option(
        RESOURCES,
        "bench",
        choices=STRATEGIES,
        help="The fastest plan of this strategy of the papers, instead of the fastest of all.",
    )
    serial: bool = option(
        RUN,
        "bench",
        default=False,
        type=bool,
        help="Steps run one after the other, and nothing overlaps; the prediction is for Steps that overlap.",
    )


@dataclass(frozen=True)
class ServeOptions:
    """All options of `batchgen serve-batches`.

    Attributes:
        job: The options that `batchgen run` has too, under its names.
        directory: The directory with files and batches, of which the server goes on with those that are unfinished.
        port: The port of the loopback interface.
    """

    job: JobOptions
    directory: str | None = option(
        RUN,
        "serve-batches",
        metavar="DIR",
        help="Directory of files, batches and the key [default: the cache directory].",
    )
    port: int = option(
        RUN, "serve-batches", default=8000, type=int, metavar="N", help="Port on 127.0.0.1; 0: any free one."
    )


@dataclass(frozen=True)
class ProfileOptions:
    """All options of `batchgen profile`."""

    model: str | None = option(
        MODEL,
        "profile",
        "-m",
        "--model",
        metavar="MODEL",
        help="Measure for this model's shapes and formats [default: models of any size].",
    )
    device: str = option(
        RESOURCES,
        "profile",
        default="auto",
        metavar="DEVICE",
        help="cpu, cuda or emulated:gpu-memory=512MiB,h2d=2GiB/s,d2h=2GiB/s.",
    )
    dtype: tuple[str, ...] = option(
        MODEL,
        "profile",
        default=(),
        choices=DTYPES,
        multiple=True,
        help="Formats to measure, may be repeated [default: the one models run in here].",
    )
    offload_dir: str | None = option(RESOURCES, "profile", metavar="DIR", help=OFFLOAD_HELP)
    refresh: bool = option(
        RUN, "profile", default=False, type=bool, help="Measure again, although this machine was measured before."
    )
    output: str | None = option(
        RUN, "profile", "-o", "--output", metavar="FILE", help="Write the profile as JSON; - is stdout."
    )


@dataclass(frozen=True)
class ConvertOptions:
    """All options of `batchgen convert`."""

    model: str = option(MODEL, "convert", "-m", "--model", required=True, metavar="MODEL", help=MODEL_HELP)
    output: str = option(
        RUN, "convert", "-o", "--output", required=True, metavar="DIR", help="Directory of the weight store."
    )
    lora: str | None = option(MODEL, "convert", metavar="DIR", reads=FILE, help=LORA_HELP)
    weights: str = option(MODEL, "convert", default="auto", choices=WEIGHTS, help=WEIGHTS_HELP)
    dtype: str = option(
        MODEL, "convert", default="auto", choices=DTYPES, help="Of everything else, and of what is computed."
    )
    overwrite: bool = option(
        RUN, "convert", default=False, type=bool, help="Replace a store of another model or format."
    )
    progress: str = option(RUN, "convert", default="auto", choices=STYLES)
