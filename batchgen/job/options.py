"""The options of all commands and of the Python API, each declared once.

An option is declared at the field for its value, or in `SAMPLING_OPTIONS` if it is a field of `SamplingParams`. The
command line, `batchgen.run`, lm_eval's `--model_args`, HELM's deployments and `MapFunction` take names, types, defaults
and help from here. This module imports nothing that takes long, as `batchgen --help` waits for it.
"""

# ruff: noqa: RUF009 - defaults of fields are declarations

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import MISSING, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from batchgen.core.attention_budget import ALL
from batchgen.core.draft_rates import MOST_DRAFTS
from batchgen.core.dtypes import KV_CODE_BITS, STATE_DTYPES, WEIGHTS
from batchgen.core.quality import EXACT, KV_LOSSES, NEAR, QUALITIES, SMALL, WEIGHT_LOSSES, format_losses
from batchgen.core.request import SamplingParams
from batchgen.core.text import without_credentials
from batchgen.core.units import parse_seconds
from batchgen.job.step import Step

# The groups, in the order in which help shows them.
MODEL, INPUT, SAMPLING, RESOURCES, RUN = GROUPS = ("model", "input", "sampling", "resources", "run")
# Takers of options: the commands, BatchgenLM, HELM's client, `Engine`, and MapFunction, which takes those of `Engine`
# too.
TAKERS = ("run", "plan", "bench", "profile", "convert", "serve-batches", "lm_eval", "helm", "engine", "map")
# Kinds of values that name something to read: a file; a file or a name; a text or @FILE; a file on the command line,
# whose text is the value in Python.
FILE, FILE_OR_NAME, AT_FILE, TEXT_OF_FILE = "FILE", "FILE|NAME", "@FILE", "text of FILE"
_DECLARED = "option"


@dataclass(frozen=True)
class Option:
    """An option, with its name, its type and its help for all commands and functions that take it.

    Attributes:
        name: The name in Python, TOML and JSON.
        flags: The flags of the command line.
        group: The group in which help shows the option.
        takers: The members of `TAKERS` that take the option.
        default: The value where the option is not given.
        type: A function from text to a value, or to each value where the option may be repeated; bool for a switch.
        help: The sentence that help shows.
        metavar: The word that stands for the value in help.
        choices: The allowed values; empty: any.
        multiple: True for an option that may be repeated.
        required: True for an option that must be given.
        typed: True for text in which a typed \\n and \\t are a newline and a tab (`batchgen.core.text.typed`).
        common: True for an option that the short help shows.
        reads: The kind of file that the value names: `FILE`, `FILE_OR_NAME`, `AT_FILE` or `TEXT_OF_FILE`; None: it
            names no file.
        python: The type of the value in Python, where it may be more than the field holds; None: the field's type.
    """

    name: str
    flags: tuple[str, ...]
    group: str
    takers: frozenset[str]
    default: Any = None
    type: Callable[[str], Any] = str
    help: str | None = None
    metavar: str | None = None
    choices: tuple[str, ...] = ()
    multiple: bool = False
    required: bool = False
    typed: bool = False
    common: bool = False
    reads: str | None = None
    python: str | None = None

    @property
    def flag(self) -> str:
        """The flag by which messages name the option."""
        return self.flags[-1].partition("/")[0]

    @property
    def decides_results(self) -> bool:
        """True where the results of rows depend on the option. Others decide where, when and how fast rows are run."""
        return self.group in (MODEL, INPUT, SAMPLING)


def _option(group: str, takers: str, *flags: str, default: Any = None, **more: Any) -> Any:
    """The dataclass field of an option.

    Args:
        group: The group in which help shows the option.
        takers: Names of the option's takers, with spaces between.
        *flags: The flags, where they are not the field's name.
        default: The value where the option is not given.
        **more: Further fields of `Option`.
    """
    metadata = {_DECLARED: {"group": group, "takers": frozenset(takers.split()), "flags": flags, **more}}
    return field(metadata=metadata) if more.get("required") else field(default=default, metadata=metadata)


_COMMANDS = "run plan bench"
_ROWS = "run plan"  # those whose rows come from somewhere
_DTYPES = ("auto", "bfloat16", "float16", "float32")
_KV_DTYPES = ("auto", *KV_CODE_BITS)
STYLES = ("auto", "plain", "none")
GENERATE, SCORE, EMBED, CLASSIFY, RERANK = TASKS = ("generate", "score", "embed", "classify", "rerank")
OF_VECTORS = (EMBED, CLASSIFY, RERANK)  # tasks of models without an output matrix: they compute a vector of each row
# As `models.pooling` and `output.embed_columns` have them, which take longer to import.
POOLINGS = ("mean", "cls", "last")
VECTOR_DTYPES = ("float32", "float16", "int8")
LOG_FORMATS = ("text", "json")
STRATEGIES = ("GPU-only", "NEO", "APEX", "Pie", "FlexGen", "streamed", "in memory")  # as `planner.strategies` has them
_MODEL_HELP = (
    "Hugging Face directory or hub id (org/name, org/name@revision, org/name:Q4_K_M), .gguf file, weight store, or"
    " 'demo' (SmolLM2-135M-Instruct)."
)
_INPUT_HELP = (
    "Parquet, JSONL, JSON array or CSV file, glob or directory, here or at a URL (s3://...); saved or hub dataset;"
    " OpenAI batch JSONL; - is stdin."
)
_LORA_HELP = "LoRA adapter as PEFT saves it, merged into the weights when they are read; packed ones are dequantized."
_WEIGHTS_HELP = (
    "native: the layers' matrices in the model's own format; dequantized: in the dtype that is computed in; auto: "
    "whichever of"
    " these is faster; int8: in 8 bits, multiplied as integers with tokens quantized to 8 bits; int4: in 4 bits;"
    f" perplexity on the demo model is higher by {format_losses(WEIGHT_LOSSES)}."
)
_KV_HELP = (
    f"int8, int5, int4: KV in 8, 5 or 4 bits; perplexity on the demo model is higher by {format_losses(KV_LOSSES)}."
)
_QUALITY_HELP = (
    "Formats that the plan may choose for weights and KV whose options are auto. exact: none that loses quality; near,"
    f" small: those that together make perplexity at most {QUALITIES[NEAR]:.0%}, {QUALITIES[SMALL]:.0%} higher."
)
_STATE_HELP = (
    "bfloat16: the recurrent states of linear attention (Qwen3.5 and later, Qwen3-Next) take half of the memory, and"
    " are rounded after every token."
)
_BUDGET_HELP = (
    "Tokens that each generated token attends to: a share of those before it such as 10%, or a number of them; the KV"
    " blocks that matter most to it are chosen in each layer. Prompts are read whole. all: no choice."
)
_OFFLOAD_HELP = "Directory of the disk tier [default: the cache directory]."
_REPORT_HELP = "Write the report as JSON; - is stdout."


@dataclass(frozen=True)
class JobOptions:
    """All options of `batchgen run`, under the names of its flags (`batchgen run --help` explains them).

    Attributes:
        input: The input; a `datasets.Dataset` or `IterableDataset` in Python.
        output: The output; None: no output, for a plan, or a file in the cache directory.
        read_before: (flag, path) of the files from which values of other options were read.
        steps: The job's steps, `[[step]]` in a job file; empty: each row has one prompt.
    """

    model: str = _option(
        MODEL,
        f"{_COMMANDS} helm serve-batches engine map",
        "-m",
        "--model",
        required=True,
        metavar="MODEL",
        reads=FILE_OR_NAME,
        help=_MODEL_HELP,
    )
    input: Any = _option(INPUT, _ROWS, "-i", "--input", required=True, metavar="PATH", reads=FILE, help=_INPUT_HELP)
    output: str | Path | None = _option(
        RUN,
        "run",
        "-o",
        "--output",
        metavar="FILE",
        common=True,
        help="A .parquet, .jsonl, .csv or .arrow file, here or at a URL (s3://...); - is stdout, in JSON lines"
        " [default: beside the input, data.out.parquet for data.parquet].",
    )

    lora: str | None = _option(
        MODEL,
        f"{_COMMANDS} lm_eval helm serve-batches engine",
        metavar="DIR",
        reads=FILE,
        help=_LORA_HELP,
    )
    lora_column: str | None = _option(
        MODEL,
        "run",
        metavar="NAME",
        help="Column with the directory of each row's LoRA adapter, or nothing; rows are run adapter by adapter.",
    )
    cascade: str | None = _option(
        MODEL,
        _ROWS,
        metavar="SMALL",
        reads=FILE_OR_NAME,
        help="A smaller model that answers first; rows in which it is not sure enough go to --model. For --choices,"
        " --json-schema and the like, and for --task score with choices.",
    )
    agree: float = _option(
        MODEL,
        _ROWS,
        default=0.95,
        type=float,
        metavar="SHARE",
        help="With --cascade: least share of all rows whose answer is that of --model.",
    )
    confidence: float = _option(
        MODEL,
        _ROWS,
        default=0.95,
        type=float,
        metavar="SHARE",
        help="With --cascade: least probability that --agree is kept.",
    )
    agree_on: str | None = _option(
        MODEL,
        _ROWS,
        metavar="CHOICE",
        help="With --cascade and --choices: the promise is about this choice, its recall and its precision, in place of"
        " all rows.",
    )
    agree_within: float = _option(
        MODEL,
        _ROWS,
        default=0.0,
        type=float,
        metavar="X",
        help="With --cascade and --json-schema: numbers that differ by at most X agree.",
    )
    cascade_sample: int | None = _option(
        MODEL,
        _ROWS,
        type=int,
        metavar="N",
        help="With --cascade: draws of rows that both models answer [default: as the promise needs, and up to 5% of the"
        " rows].",
    )
    dtype: str = _option(MODEL, f"{_COMMANDS} lm_eval helm serve-batches engine", default="auto", choices=_DTYPES)
    weights: str = _option(
        MODEL, f"{_COMMANDS} lm_eval helm serve-batches engine", default="auto", choices=WEIGHTS, help=_WEIGHTS_HELP
    )
    kv_cache_dtype: str = _option(
        MODEL, f"{_COMMANDS} lm_eval helm serve-batches engine", default="auto", choices=_KV_DTYPES, help=_KV_HELP
    )
    quality: str = _option(MODEL, _COMMANDS, default=EXACT, choices=tuple(QUALITIES), help=_QUALITY_HELP)
    state_dtype: str = _option(
        MODEL,
        f"{_COMMANDS} lm_eval helm serve-batches engine",
        default="float32",
        choices=STATE_DTYPES,
        help=_STATE_HELP,
    )
    attention_budget: str = _option(
        MODEL, f"{_COMMANDS} lm_eval helm engine", default=ALL, metavar="TOKENS", help=_BUDGET_HELP
    )
    max_model_len: int | None = _option(
        MODEL,
        f"{_COMMANDS} lm_eval helm serve-batches engine",
        type=int,
        metavar="N",
        help="Longest prompt plus output [default: the model's].",
    )

    prompt_column: str | None = _option(
        INPUT,
        f"{_ROWS} map",
        metavar="NAME",
        common=True,
        help="Column that holds the prompts [default: messages, prompt, text, or the only column of text].",
    )
    prompt_template: str | None = _option(
        INPUT,
        f"{_ROWS} map",
        metavar="TEXT",
        reads=AT_FILE,
        typed=True,
        common=True,
        help=r"Jinja template over the columns, where \n is a newline; @FILE reads it from a file.",
    )
    reorder_fields: str | None = _option(
        INPUT,
        _ROWS,
        metavar="A,B,...",
        help="Columns of --prompt-template whose lines may change places, so that more rows begin alike.",
    )
    messages_column: str | None = _option(
        INPUT,
        f"{_ROWS} map",
        metavar="NAME",
        help="Column of chat messages: lists of {role, content}, or of ShareGPT's {from, value}.",
    )
    system_prompt: str | None = _option(
        INPUT,
        f"{_ROWS} map",
        "--system",
        metavar="TEXT",
        typed=True,
        common=True,
        help="System message before each row's messages; implies --chat.",
    )
    chat: bool | None = _option(
        INPUT,
        f"{_ROWS} map",
        "--chat/--no-chat",
        type=bool,
        common=True,
        help="Send text prompts as a user's message in the chat template, or as plain text [default: --chat where the"
        " model has a chat template].",
    )
    chat_template: str | None = _option(
        INPUT,
        f"{_ROWS} serve-batches engine",
        metavar="FILE",
        reads=TEXT_OF_FILE,
        help="Chat template in Jinja that replaces the model's.",
    )
    chat_template_kwargs: str | Mapping[str, Any] | None = _option(
        INPUT,
        f"{_ROWS} map",
        metavar="JSON",
        help="""Variables for the model's chat template, such as '{"enable_thinking": false}'.""",
    )
    continue_final: bool = _option(
        INPUT,
        f"{_ROWS} map",
        default=False,
        type=bool,
        help="Go on with the assistant's message that a row's messages end with, rather than begin another behind it.",
    )
    tools_column: str | None = _option(
        INPUT,
        _ROWS,
        metavar="NAME",
        help="Column of tools that the chat template writes into the prompt: lists of JSON schemas, or JSON of them.",
    )
    task: str = _option(
        INPUT,
        _ROWS,
        default="generate",
        choices=TASKS,
        common=True,
        help="score: log-probabilities of continuations of the prompt, or of the prompt itself; embed: the text's"
        " vector; classify: probabilities of a classifier's labels; rerank: the score of a query and a document.",
    )
    prompt_name: str | None = _option(
        INPUT,
        _ROWS,
        metavar="NAME",
        help="With --task embed: prompt of the model's config_sentence_transformers.json that comes before each text,"
        " such as query.",
    )
    instruction: str | None = _option(
        INPUT,
        _ROWS,
        metavar="TEXT",
        typed=True,
        help="With --task embed: what the texts are queries for, as Qwen3-Embedding is told it; with --task rerank what"
        " Qwen3-Reranker judges by.",
    )
    pair_column: str | None = _option(
        INPUT,
        _ROWS,
        metavar="NAME",
        help="With --task classify or rerank: column of the second text of each pair [default with rerank: document;"
        " --prompt-column has the first one, by default query].",
    )
    pooling: str | None = _option(
        INPUT,
        _ROWS,
        choices=POOLINGS,
        help="With --task embed: tokens whose hidden states make the vector [default: as the model's files say].",
    )
    normalize: bool | None = _option(
        INPUT,
        _ROWS,
        "--normalize/--no-normalize",
        type=bool,
        help="With --task embed: divide vectors by their length [default: as the model's files say].",
    )
    dimensions: int | None = _option(
        INPUT,
        _ROWS,
        type=int,
        metavar="N",
        help="With --task embed: only the first N values of each vector (Matryoshka).",
    )
    vector_dtype: str = _option(
        INPUT, _ROWS, default="float32", choices=VECTOR_DTYPES, help="With --task embed: format of the vectors."
    )
    continuations_column: str | None = _option(
        INPUT,
        _ROWS,
        metavar="NAME",
        help="With --task score: column of what may follow the prompt, one or a list, texts or token ids.",
    )
    choices: tuple[str, ...] = _option(
        INPUT,
        f"{_ROWS} map",
        default=(),
        multiple=True,
        metavar="TEXT",
        typed=True,
        common=True,
        help="A text that an answer may be, repeated for each: every generated text is one of them. With --task score"
        " the most likely one is the choice.",
    )
    choices_column: str | None = _option(
        INPUT, _ROWS, metavar="NAME", help="Column with a list of choices for each row, as of --choices."
    )
    on_overlong: str = _option(
        INPUT,
        f"{_ROWS} helm serve-batches engine",
        default="error",
        choices=("error", "truncate-left", "truncate-right"),
        help="A prompt that does not fit the context.",
    )
    special_tokens: str = _option(
        INPUT,
        _ROWS,
        default="parse",
        choices=("parse", "text"),
        help="The model's special tokens in prompts and messages, such as <|im_start|>: tokens, or plain text.",
    )
    shard: str | None = _option(
        INPUT, _ROWS, metavar="I/N", help="Only the I-th of N equal parts of the input, I from 0."
    )
    limit: int | None = _option(INPUT, _ROWS, type=int, metavar="N", common=True, help="Only the first N rows.")
    split: str | None = _option(INPUT, _ROWS, metavar="NAME", help="Split of a dataset that has several.")
    id_column: str | None = _option(
        INPUT,
        f"{_ROWS} map",
        metavar="NAME",
        help="Column whose value, rather than the row number, seeds a row's draws.",
    )
    on_bad_line: str = _option(
        INPUT,
        _ROWS,
        default="fail",
        choices=("fail", "skip"),
        help="A line that is no JSON object: stop before the first row, or note it as a row that failed and go on.",
    )
    input_format: str | None = _option(INPUT, _ROWS, choices=("parquet", "jsonl", "csv", "datasets", "openai"))
    csv_delimiter: str | None = _option(
        INPUT,
        _ROWS,
        metavar="CHAR",
        help="Separator of the fields of CSV files: a character, or tab [default: a comma, a tab in .tsv"
        " files, or"
        " what gives columns].",
    )

    sampling: SamplingParams = field(default_factory=SamplingParams)
    sampling_column: str | None = _option(
        SAMPLING,
        _ROWS,
        metavar="NAME",
        help="Column of structs or JSON objects with sampling parameters of the row's own.",
    )

    device: str = _option(
        RESOURCES,
        f"{_COMMANDS} lm_eval helm serve-batches engine",
        default="auto",
        metavar="DEVICE",
        help="cpu; cuda; or an accelerator that is emulated on the CPU, with memory and links of its own:"
        " emulated:gpu-memory=512MiB,h2d=2GiB/s,d2h=2GiB/s; with slowdown=2 on a core of its own.",
    )
    gpu_memory: str | int | None = _option(
        RESOURCES,
        f"{_COMMANDS} lm_eval helm serve-batches engine",
        metavar="SIZE",
        help="GPU memory budget [default: all of it].",
    )
    cpu_memory: str | int | None = _option(
        RESOURCES,
        f"{_COMMANDS} lm_eval helm serve-batches engine",
        metavar="SIZE",
        help="Memory budget such as 14GiB [default: what is free, less 10%].",
    )
    disk_memory: str | int | None = _option(
        RESOURCES,
        f"{_COMMANDS} lm_eval helm serve-batches",
        metavar="SIZE",
        help="Disk budget [default: what is free, less 10%]; 0 is none.",
    )
    hardware: str | None = _option(
        RESOURCES,
        f"{_COMMANDS} lm_eval helm",
        metavar="FILE|NAME",
        reads=FILE_OR_NAME,
        help="Plan with this profile's rates: a file of `batchgen profile`, or t4, a10g, rtx3090, a100, h100, h200,"
        " gh200, zen4 [default: this machine's, measured once].",
    )
    offload_dir: str | Path | None = _option(
        RESOURCES, f"{_COMMANDS} lm_eval helm serve-batches", metavar="DIR", help=_OFFLOAD_HELP
    )
    plan: str | None = _option(
        RESOURCES, "run bench helm", metavar="FILE", reads=FILE, help="Run as this plan of `batchgen plan -o` says."
    )
    tensor_parallel: int = _option(
        RESOURCES,
        f"{_COMMANDS} lm_eval helm engine",
        default=1,
        type=int,
        metavar="N",
        help="Processes that share every layer, each with its part of weights, KV and cores, and of memory budgets.",
    )
    admission: str = _option(
        RESOURCES,
        f"{_COMMANDS} lm_eval helm serve-batches engine",
        default="auto",
        choices=("auto", "continuous", "static"),
    )
    max_num_seqs: int | None = _option(
        RESOURCES,
        f"{_COMMANDS} lm_eval helm serve-batches engine",
        type=int,
        metavar="N",
        help="Most samples in flight [default: as planned].",
    )
    num_gpu_batches: int | None = _option(
        RESOURCES,
        f"{_COMMANDS} lm_eval helm serve-batches",
        type=int,
        metavar="N",
        help="Micro-batches in a block [default: as planned].",
    )
    max_num_batched_tokens: int | None = _option(
        RESOURCES,
        f"{_COMMANDS} lm_eval helm serve-batches engine",
        type=int,
        metavar="N",
        help="Most tokens in one sweep; longer prompts are chunked [default: as planned].",
    )
    share_prefixes: bool = _option(
        RESOURCES,
        f"{_ROWS} lm_eval helm serve-batches engine",
        "--enable-prefix-caching/--no-enable-prefix-caching",
        default=True,
        type=bool,
        help="Compute a prompt prefix that rows share once [default: on].",
    )
    drafts: int | None = _option(
        RESOURCES,
        f"{_ROWS} lm_eval helm serve-batches engine",
        type=int,
        metavar="N",
        help=f"Most drafted tokens of a sequence, up to {MOST_DRAFTS}, that are checked together in a sweep, where that"
        " saves time. Drafts change no text, but for rounding in 16 bits"
        f" [default: {MOST_DRAFTS} where weights or KV stream, else 0].",
    )
    pipeline: int = _option(
        RESOURCES,
        f"{_ROWS} lm_eval helm",
        default=1,
        type=int,
        metavar="N",
        help="Split the layers into N stages, each a process with its part of cores and memory budgets: started on"
        " this host, or by torchrun.",
    )
    link_bandwidth: str | None = _option(
        RESOURCES,
        _ROWS,
        metavar="RATE",
        help="Rate of the link between the processes of --tensor-parallel or --pipeline, for planning: 1.25GB/s"
        " [default: 0.8GB/s; in a host with GPUs their bus].",
    )
    expected_output_len: int | None = _option(
        RESOURCES,
        f"{_ROWS} lm_eval helm serve-batches engine",
        type=int,
        metavar="N",
        help="Tokens a sample usually generates, for planning and admission.",
    )

    resume: bool = _option(
        RUN,
        "run helm",
        "--resume/--no-resume",
        default=True,
        type=bool,
        help="Go on from rows that are done already [default: resume].",
    )
    overwrite: bool = _option(
        RUN,
        "run helm",
        default=False,
        type=bool,
        common=True,
        help="Drop old progress; the old output stays until the new one is whole.",
    )
    retry_failed: bool = _option(
        RUN, "run helm", default=False, type=bool, common=True, help="Run the rows that failed again."
    )
    max_time: str | float | None = _option(
        RUN,
        "run helm",
        metavar="TIME",
        common=True,
        help="Stop cleanly after 6h, 90m, ...; the next run goes on (exit code 3).",
    )
    flush_interval: str | float = _option(
        RUN,
        "run lm_eval helm serve-batches",
        default="5s",
        metavar="TIME",
        help="How often finished rows are saved: what a crash can cost.",
    )
    cache: str | Path | None = _option(
        RUN,
        "run",
        metavar="DIR",
        help="Take answers that jobs with the same directory have computed before, and keep those of this one there.",
    )
    cache_size: str | int = _option(
        RUN,
        "run",
        default="10GiB",
        metavar="SIZE",
        help="Limit of --cache; the answers that were used longest ago go first.",
    )
    share: bool = _option(
        RUN,
        "run",
        default=False,
        type=bool,
        help="Be one of any number of workers on this output, each started with this command, on machines that share"
        " the directory.",
    )
    share_lease: str | float = _option(
        RUN,
        "run",
        default="60s",
        metavar="TIME",
        help="With --share: a worker that gives no sign for so long is dead to the others, who take over its rows.",
    )
    on_error: str = _option(
        RUN,
        "run helm",
        default="record",
        choices=("record", "fail"),
        help="A bad row: note it in the row, or stop the job.",
    )
    max_failed: str | int | None = _option(
        RUN,
        "run",
        metavar="N|P%",
        help="End with exit code 4 once more rows than this failed [default: where all failed, or the first 100].",
    )
    reasoning_column: bool = _option(
        RUN,
        "run",
        "--reasoning-column/--no-reasoning-column",
        default=True,
        type=bool,
        help="Thoughts of a model, between tags such as <think> and </think>: in a column, or left in the text"
        " [default: a column].",
    )
    token_ids: bool = _option(
        RUN, "run map", default=False, type=bool, help="Add the columns prompt_token_ids and token_ids."
    )
    json_columns: bool = _option(
        RUN,
        "run",
        default=False,
        type=bool,
        help="With --json-schema: a column for each property of the answers, beside the text; null where an answer is"
        " not complete.",
    )
    output_prefix: str = _option(
        RUN,
        "run map",
        default="",
        metavar="TEXT",
        help="Put before the names of the output columns [default: nothing, or gen_ where the input has one of the"
        " names].",
    )
    report: str | None = _option(RUN, "run bench", metavar="FILE", common=True, help=_REPORT_HELP)
    report_html: str | None = _option(
        RUN,
        "run",
        metavar="FILE",
        help="Write a page: predicted beside measured, throughput, lengths, errors, sample rows.",
    )
    trace: str | None = _option(
        RUN,
        f"{_COMMANDS} helm",
        metavar="FILE",
        help="Write a timeline of every lane, for chrome://tracing: of the run, or what the plan expects.",
    )
    progress: str = _option(RUN, f"{_COMMANDS} lm_eval helm", default="auto", choices=STYLES)
    log_format: str = _option(
        RUN,
        "run",
        default="text",
        choices=LOG_FORMATS,
        help="Lines of a log, on stderr where it is no terminal: text with the time and the output's name, or a JSON"
        " object each.",
    )
    metrics_file: str | None = _option(
        RUN,
        "run",
        metavar="FILE",
        help="Write rows done, tokens and time left every few seconds, in Prometheus' text format.",
    )
    dry_run: bool = _option(
        RUN,
        "run",
        default=False,
        type=bool,
        common=True,
        help="Check everything, show the plan and the first prompt; run nothing.",
    )
    read_before: tuple[tuple[str, str], ...] = ()
    steps: tuple[Step, ...] = ()

    @property
    def log_name(self) -> str:
        """The name of the output in logs, or else of the input, without its folder and without credentials."""
        named = self.output if self.output not in (None, "-") else self.input
        return Path(without_credentials(str(named))).name if isinstance(named, str | Path) else ""

    def __post_init__(self) -> None:
        if self.choices and self.task == "generate":
            object.__setattr__(self, "sampling", replace(self.sampling, choice=self.choices))


@dataclass(frozen=True)
class PlanOptions:
    """All options of `batchgen plan`.

    Attributes:
        job: The options that `batchgen run` has too, under its names.
    """

    job: JobOptions
    num_prompts: int | None = _option(
        INPUT,
        "plan",
        type=int,
        metavar="N",
        help="Plan for N prompts instead of an input, with --input-len and --output-len.",
    )
    input_len: int | None = _option(
        INPUT, "plan", type=int, metavar="N", help="With --num-prompts: prompt tokens of each."
    )
    output_len: int | None = _option(
        INPUT, "plan", type=int, metavar="N", help="With --num-prompts: tokens that each generates."
    )
    max_block_latency: str | None = _option(
        RESOURCES, "plan", metavar="TIME", help="Longest time from a block's first prompt to its last token."
    )
    what_if: tuple[str, ...] = _option(
        RUN,
        "plan",
        default=(),
        multiple=True,
        metavar="NAME=SIZE",
        help="Plan again with gpu-memory, cpu-memory, disk-memory, h2d, d2h, disk-read, disk-write or dram changed"
        " (gpu-memory=48GiB, cpu-memory=+64GiB, h2d=x2, disk-read=7GB/s), beside the current plan; may be repeated:"
        " a column for each, and one for all together.",
    )
    price_per_hour: float | None = _option(
        RUN,
        "plan",
        type=float,
        metavar="MONEY",
        help="What the machine costs an hour, in any currency: --explain has the job's cost.",
    )
    watts: float | None = _option(
        RUN, "plan", type=float, metavar="W", help="What power the machine takes: --explain has the job's energy."
    )
    devices: str | None = _option(
        RUN,
        "plan",
        metavar="NxNAME",
        help="What the job would take on one of several devices, with a worker on each, by --tensor-parallel and by"
        " --pipeline, and the command of the fastest: '2x t4', each as of --hardware; '2x cpu' or 2: as the one "
        "planned for;"
        " '1x t4 + 1x a100': workers on several kinds.",
    )
    hosts: int | None = _option(
        RUN,
        "plan",
        type=int,
        metavar="N",
        help="With --devices: hosts that they are in, of which each has the memory, cores and disk of one device's"
        " machine"
        " [default: one each].",
    )
    compare: bool = _option(
        RUN, "plan", default=False, type=bool, help="With --hardware: beside this machine, which is measured for it."
    )
    explain: bool = _option(
        RUN, "plan", default=False, type=bool, help="Placement, lanes, memory, and what more of each would buy."
    )
    frontier: bool = _option(RUN, "plan", default=False, type=bool, help="Throughput against block latency.")
    html: str | None = _option(
        RUN, "plan", metavar="FILE", help="Write a page: placement, a sweep's timeline, frontier, what would help."
    )
    as_json: bool = _option(RUN, "plan", "--json", default=False, type=bool, help="The plan as JSON on stdout.")
    plan_file: str | None = _option(
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
    num_prompts: int = _option(INPUT, "bench", default=64, type=int, metavar="N", help="Number of rows.")
    input_len: int = _option(INPUT, "bench", default=512, type=int, metavar="N", help="Prompt tokens of each row.")
    output_len: int = _option(INPUT, "bench", default=32, type=int, metavar="N", help="Tokens that each row generates.")
    load_format: str = _option(
        MODEL,
        "bench",
        default="auto",
        choices=("auto", "dummy"),
        help="dummy: random weights for a config.json, or its directory, given as --model.",
    )
    strategy: str | None = _option(
        RESOURCES,
        "bench",
        choices=STRATEGIES,
        help="The fastest plan of this strategy of the papers, instead of the fastest of all.",
    )
    serial: bool = _option(
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
    directory: str | None = _option(
        RUN,
        "serve-batches",
        metavar="DIR",
        help="Directory of files, batches and the key [default: the cache directory].",
    )
    port: int = _option(
        RUN, "serve-batches", default=8000, type=int, metavar="N", help="Port on 127.0.0.1; 0: any free one."
    )


@dataclass(frozen=True)
class ProfileOptions:
    """All options of `batchgen profile`."""

    model: str | None = _option(
        MODEL,
        "profile",
        "-m",
        "--model",
        metavar="MODEL",
        help="Measure for this model's shapes and formats [default: models of any size].",
    )
    device: str = _option(
        RESOURCES,
        "profile",
        default="auto",
        metavar="DEVICE",
        help="cpu, cuda or emulated:gpu-memory=512MiB,h2d=2GiB/s,d2h=2GiB/s.",
    )
    dtype: tuple[str, ...] = _option(
        MODEL,
        "profile",
        default=(),
        choices=_DTYPES,
        multiple=True,
        help="Formats to measure, may be repeated [default: the one models run in here].",
    )
    offload_dir: str | None = _option(RESOURCES, "profile", metavar="DIR", help=_OFFLOAD_HELP)
    refresh: bool = _option(
        RUN, "profile", default=False, type=bool, help="Measure again, although this machine was measured before."
    )
    output: str | None = _option(
        RUN, "profile", "-o", "--output", metavar="FILE", help="Write the profile as JSON; - is stdout."
    )


@dataclass(frozen=True)
class ConvertOptions:
    """All options of `batchgen convert`."""

    model: str = _option(MODEL, "convert", "-m", "--model", required=True, metavar="MODEL", help=_MODEL_HELP)
    output: str = _option(
        RUN, "convert", "-o", "--output", required=True, metavar="DIR", help="Directory of the weight store."
    )
    lora: str | None = _option(MODEL, "convert", metavar="DIR", reads=FILE, help=_LORA_HELP)
    weights: str = _option(MODEL, "convert", default="auto", choices=WEIGHTS, help=_WEIGHTS_HELP)
    dtype: str = _option(
        MODEL, "convert", default="auto", choices=_DTYPES, help="Of everything else, and of what is computed."
    )
    overwrite: bool = _option(
        RUN, "convert", default=False, type=bool, help="Replace a store of another model or format."
    )
    progress: str = _option(RUN, "convert", default="auto", choices=STYLES)


def seconds(value: str | float) -> float:
    """A duration in seconds, from a number or from text such as "90s" or "2h"."""
    return parse_seconds(value) if isinstance(value, str) else float(value)


def _named(name: str, default: Any, declared: dict[str, Any]) -> Option:
    """An option, from its name, its default value and the other fields of its declaration."""
    flags = declared["flags"] or ("--" + name.replace("_", "-"),)
    return Option(name=name, default=default, **{**declared, "flags": flags})


def _sampling(takers: str, name: str, type: Callable[[str], Any], help: str | None = None, **more: Any) -> Option:
    """An option for a field of SamplingParams, with the default value of that field."""
    (default,) = (f.default for f in fields(SamplingParams) if f.name == name)
    declared = {"group": SAMPLING, "takers": frozenset(takers.split()), "flags": (), "type": type, "help": help}
    return _named(name, default, {**declared, **more})


def _bias(text: str) -> tuple[int, float]:
    """Token id and bias from text such as "50256=-100". Raises ValueError."""
    token_id, _, bias = text.partition("=")
    return int(token_id), float(bias)


SAMPLING_OPTIONS = (
    _sampling(f"{_ROWS} serve-batches map", "max_tokens", int, "Most tokens generated per sample.", common=True),
    _sampling(f"{_COMMANDS} map", "temperature", float, "0 is greedy.", common=True),
    _sampling(f"{_COMMANDS} map", "top_p", float, "Keep the most likely tokens that together have this probability."),
    _sampling(f"{_COMMANDS} map", "top_k", int, "Keep the k most likely tokens; 0 is off."),
    _sampling(f"{_COMMANDS} map", "min_p", float, "Keep tokens with this part of the best one's probability."),
    _sampling(f"{_COMMANDS} map", "repetition_penalty", float),
    _sampling(f"{_ROWS} map", "presence_penalty", float, "Taken off the logits of tokens that the output has."),
    _sampling(f"{_ROWS} map", "frequency_penalty", float, "The same, for each time that it has them."),
    _sampling(f"{_ROWS} map", "logit_bias", _bias, "Added to the logit of a token, may be repeated.", multiple=True,
              metavar="ID=BIAS", python="Mapping[int, float] | Sequence[tuple[int, float]]"),
    _sampling(f"{_COMMANDS} map", "n", int, "Samples per row.", flags=("-n", "--n")),
    _sampling(f"{_COMMANDS} map helm serve-batches", "seed", int),
    _sampling(f"{_ROWS} map", "stop", str, r"Stop string such as \n, may be repeated.", multiple=True, metavar="TEXT",
              typed=True, common=True, python="str | Sequence[str]"),
    _sampling(f"{_ROWS} map", "stop_token_ids", int, "Stop token, may be repeated.", multiple=True, metavar="ID"),
    _sampling(f"{_ROWS} map", "ignore_eos", bool, "Go on past end-of-text."),
    _sampling(f"{_COMMANDS} map", "logprobs", int, "Log-probabilities of the chosen token and the top N.", metavar="N"),
    _sampling(f"{_ROWS} map", "prompt_logprobs", int, "Log-probabilities of the prompt's tokens and the top N.",
              metavar="N"),
    _sampling(f"{_ROWS} map", "json_schema", str, "Every text is JSON that is valid against this schema.",
              metavar="FILE", reads=TEXT_OF_FILE, common=True, python="str | Mapping[str, Any] | type | None"),
    _sampling(f"{_ROWS} map", "compact_json", bool, "With --json-schema: no spaces between the parts of the JSON."),
    _sampling(f"{_ROWS} map", "regex", str, "Every text matches this regular expression, as a whole.", metavar="TEXT"),
    _sampling(f"{_ROWS} map", "grammar", str, "Every text follows this context-free grammar, in Lark's notation.",
              metavar="FILE", reads=TEXT_OF_FILE),
)  # fmt: skip


def declared_in(owner: type) -> tuple[Option, ...]:
    """The options that are declared at the fields of a dataclass, in the order of the fields."""
    return tuple(
        _named(f.name, None if f.default is MISSING else f.default, dict(f.metadata[_DECLARED]))
        for f in fields(owner)
        if _DECLARED in f.metadata
    )


OPTIONS = tuple(
    option
    for owner in (JobOptions, PlanOptions, BenchOptions, ServeOptions, ProfileOptions, ConvertOptions)
    for option in (*declared_in(owner), *(SAMPLING_OPTIONS if owner is JobOptions else ()))
)


def options_of(*takers: str) -> tuple[Option, ...]:
    """The options of one or several takers, sorted by group. takers: members of `TAKERS`."""
    taken = [option for option in OPTIONS if not option.takers.isdisjoint(takers)]
    return tuple(option for group in GROUPS for option in taken if option.group == group)


def names_of(*takers: str) -> tuple[str, ...]:
    """Names of the options of one or several takers. takers: members of `TAKERS`."""
    return tuple(option.name for option in options_of(*takers))


def check_names(function: str, given: Iterable[str], known: Collection[str]) -> None:
    """Raise TypeError for a keyword that a function does not take, with the nearest name that it takes.

    Args:
        function: Name of the function.
        given: The keywords.
        known: The names of all its options.
    """
    for name in sorted(set(given) - set(known)):
        near = difflib.get_close_matches(name, known, n=1)
        raise TypeError(f"{function}() has no option {name!r}" + (f": did you mean {near[0]!r}?" if near else ""))


def flag_of(name: str) -> str:
    """The flag by which messages name an option of `batchgen run`. name: name of the option in Python."""
    return next(option.flag for option in options_of("run") if option.name == name)
