"""The options of `batchgen run`, each declared once; `batchgen/job/option_table.py` has those of all commands."""

# ruff: noqa: RUF009 - defaults of fields are declarations

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from batchgen.core.attention_budget import ALL
from batchgen.core.draft_rates import MOST_DRAFTS
from batchgen.core.dtypes import KV_CODE_BITS, STATE_DTYPES, WEIGHTS
from batchgen.core.quality import EXACT, KV_LOSSES, NEAR, QUALITIES, SMALL, WEIGHT_LOSSES, format_losses
from batchgen.core.request import SamplingParams
from batchgen.core.text import without_credentials
from batchgen.core.units import parse_seconds
from batchgen.job.option import (
    AT_FILE,
    COMMANDS,
    FILE,
    FILE_OR_NAME,
    INPUT,
    MODEL,
    RESOURCES,
    ROWS,
    RUN,
    SAMPLING,
    TEXT_OF_FILE,
    option,
)
from batchgen.job.step import Step

DTYPES = ("auto", "bfloat16", "float16", "float32")
_KV_DTYPES = ("auto", *KV_CODE_BITS)
STYLES = ("auto", "plain", "none")
GENERATE, SCORE, EMBED, CLASSIFY, RERANK = TASKS = ("generate", "score", "embed", "classify", "rerank")
OF_VECTORS = (EMBED, CLASSIFY, RERANK)  # tasks of models without an output matrix: they compute a vector of each row
# As `models.pooling` and `output.embed_columns` have them, which take longer to import.
POOLINGS = ("mean", "cls", "last")
VECTOR_DTYPES = ("float32", "float16", "int8")
LOG_FORMATS = ("text", "json")
STRATEGIES = ("GPU-only", "NEO", "APEX", "Pie", "FlexGen", "streamed", "in memory")  # as `planner.strategies` has them
MODEL_HELP = (
    "Hugging Face directory or hub id (org/name, org/name@revision, org/name:Q4_K_M), .gguf file, weight store, or"
    " 'demo' (SmolLM2-135M-Instruct)."
)
_INPUT_HELP = (
    "Parquet, JSONL, JSON array or CSV file, glob or directory, here or at a URL (s3://...); saved or hub dataset;"
    " OpenAI batch JSONL; - is stdin."
)
LORA_HELP = "LoRA adapter as PEFT saves it, merged into the weights when they are read; packed ones are dequantized."
WEIGHTS_HELP = (
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
OFFLOAD_HELP = "Directory of the disk tier [default: the cache directory]."
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

    model: str = option(
        MODEL,
        f"{COMMANDS} helm serve-batches engine map",
        "-m",
        "--model",
        required=True,
        metavar="MODEL",
        reads=FILE_OR_NAME,
        help=MODEL_HELP,
    )
    input: Any = option(INPUT, ROWS, "-i", "--input", required=True, metavar="PATH", reads=FILE, help=_INPUT_HELP)
    output: str | Path | None = option(
        RUN,
        "run",
        "-o",
        "--output",
        metavar="FILE",
        common=True,
        help="A .parquet, .jsonl, .csv or .arrow file, here or at a URL (s3://...); - is stdout, in JSON lines"
        " [default: beside the input, data.out.parquet for data.parquet].",
    )

    lora: str | None = option(
        MODEL,
        f"{COMMANDS} lm_eval helm serve-batches engine",
        metavar="DIR",
        reads=FILE,
        help=LORA_HELP,
    )
    lora_column: str | None = option(
        MODEL,
        "run",
        metavar="NAME",
        help="Column with the directory of each row's LoRA adapter, or nothing; rows are run adapter by adapter.",
    )
    cascade: str | None = option(
        MODEL,
        ROWS,
        metavar="SMALL",
        reads=FILE_OR_NAME,
        help="A smaller model that answers first; rows in which it is not sure enough go to --model. For --choices,"
        " --json-schema and the like, and for --task score with choices.",
    )
    agree: float = option(
        MODEL,
        ROWS,
        default=0.95,
        type=float,
        metavar="SHARE",
        help="With --cascade: least share of all rows whose answer is that of --model.",
    )
    confidence: float = option(
        MODEL,
        ROWS,
        default=0.95,
        type=float,
        metavar="SHARE",
        help="With --cascade: least probability that --agree is kept.",
    )
    agree_on: str | None = option(
        MODEL,
        ROWS,
        metavar="CHOICE",
        help="With --cascade and --choices: the promise is about this choice, its recall and its precision, in place of"
        " all rows.",
    )
    agree_within: float = option(
        MODEL,
        ROWS,
        default=0.0,
        type=float,
        metavar="X",
        help="With --cascade and --json-schema: numbers that differ by at most X agree.",
    )
    cascade_sample: int | None = option(
        MODEL,
        ROWS,
        type=int,
        metavar="N",
        help="With --cascade: draws of rows that both models answer [default: as the promise needs, and up to 5% of the"
        " rows].",
    )
    dtype: str = option(MODEL, f"{COMMANDS} lm_eval helm serve-batches engine", default="auto", choices=DTYPES)
    weights: str = option(
        MODEL, f"{COMMANDS} lm_eval helm serve-batches engine", default="auto", choices=WEIGHTS, help=WEIGHTS_HELP
    )
    kv_cache_dtype: str = option(
        MODEL, f"{COMMANDS} lm_eval helm serve-batches engine", default="auto", choices=_KV_DTYPES, help=_KV_HELP
    )
    quality: str = option(MODEL, COMMANDS, default=EXACT, choices=tuple(QUALITIES), help=_QUALITY_HELP)
    state_dtype: str = option(
        MODEL,
        f"{COMMANDS} lm_eval helm serve-batches engine",
        default="float32",
        choices=STATE_DTYPES,
        help=_STATE_HELP,
    )
    attention_budget: str = option(
        MODEL, f"{COMMANDS} lm_eval helm engine", default=ALL, metavar="TOKENS", help=_BUDGET_HELP
    )
    max_model_len: int | None = option(
        MODEL,
        f"{COMMANDS} lm_eval helm serve-batches engine",
        type=int,
        metavar="N",
        help="Longest prompt plus output [default: the model's].",
    )

    prompt_column: str | None = option(
        INPUT,
        f"{ROWS} map",
        metavar="NAME",
        common=True,
        help="Column that holds the prompts [default: messages, prompt, text, or the only column of text].",
    )
    prompt_template: str | None = option(
        INPUT,
        f"{ROWS} map",
        metavar="TEXT",
        reads=AT_FILE,
        typed=True,
        common=True,
        help=r"Jinja template over the columns, where \n is a newline; @FILE reads it from a file.",
    )
    reorder_fields: str | None = option(
        INPUT,
        ROWS,
        metavar="A,B,...",
        help="Columns of --prompt-template whose lines may change places, so that more rows begin alike.",
    )
    messages_column: str | None = option(
        INPUT,
        f"{ROWS} map",
        metavar="NAME",
        help="Column of chat messages: lists of {role, content}, or of ShareGPT's {from, value}.",
    )
    system_prompt: str | None = option(
        INPUT,
        f"{ROWS} map",
        "--system",
        metavar="TEXT",
        typed=True,
        common=True,
        help="System message before each row's messages; implies --chat.",
    )
    chat: bool | None = option(
        INPUT,
        f"{ROWS} map",
        "--chat/--no-chat",
        type=bool,
        common=True,
        help="Send text prompts as a user's message in the chat template, or as plain text [default: --chat where the"
        " model has a chat template].",
    )
    chat_template: str | None = option(
        INPUT,
        f"{ROWS} serve-batches engine",
        metavar="FILE",
        reads=TEXT_OF_FILE,
        help="Chat template in Jinja that replaces the model's.",
    )
    chat_template_kwargs: str | Mapping[str, Any] | None = option(
        INPUT,
        f"{ROWS} map",
        metavar="JSON",
        common=True,
        help="""Variables for the model's chat template, such as '{"enable_thinking": false}'.""",
    )
    continue_final: bool = option(
        INPUT,
        f"{ROWS} map",
        default=False,
        type=bool,
        help="Go on with the assistant's message that a row's messages end with, rather than begin another behind it.",
    )
    tools_column: str | None = option(
        INPUT,
        ROWS,
        metavar="NAME",
        help="Column of tools that the chat template writes into the prompt: lists of JSON schemas, or JSON of them.",
    )
    task: str = option(
        INPUT,
        ROWS,
        default="generate",
        choices=TASKS,
        common=True,
        help="score: log-probabilities of continuations of the prompt, or of the prompt itself; embed: the text's"
        " vector; classify: probabilities of a classifier's labels; rerank: the score of a query and a document.",
    )
    prompt_name: str | None = option(
        INPUT,
        ROWS,
        metavar="NAME",
        help="With --task embed: prompt of the model's config_sentence_transformers.json that comes before each text,"
        " such as query.",
    )
    instruction: str | None = option(
        INPUT,
        ROWS,
        metavar="TEXT",
        typed=True,
        help="With --task embed: what the texts are queries for, as Qwen3-Embedding is told it; with --task rerank what"
        " Qwen3-Reranker judges by.",
    )
    pair_column: str | None = option(
        INPUT,
        ROWS,
        metavar="NAME",
        help="With --task classify or rerank: column of the second text of each pair [default with rerank: document;"
        " --prompt-column has the first one, by default query].",
    )
    pooling: str | None = option(
        INPUT,
        ROWS,
        choices=POOLINGS,
        help="With --task embed: tokens whose hidden states make the vector [default: as the model's files say].",
    )
    normalize: bool | None = option(
        INPUT,
        ROWS,
        "--normalize/--no-normalize",
        type=bool,
        help="With --task embed: divide vectors by their length [default: as the model's files say].",
    )
    dimensions: int | None = option(
        INPUT,
        ROWS,
        type=int,
        metavar="N",
        help="With --task embed: only the first N values of each vector (Matryoshka).",
    )
    vector_dtype: str = option(
        INPUT, ROWS, default="float32", choices=VECTOR_DTYPES, help="With --task embed: format of the vectors."
    )
    continuations_column: str | None = option(
        INPUT,
        ROWS,
        metavar="NAME",
        help="With --task score: column of what may follow the prompt, one or a list, texts or token ids.",
    )
    choices: tuple[str, ...] = option(
        INPUT,
        f"{ROWS} map",
        default=(),
        multiple=True,
        metavar="TEXT",
        typed=True,
        common=True,
        help="A text that an answer may be, repeated for each: every generated text is one of them. With --task score"
        " the most likely one is the choice.",
    )
    choices_column: str | None = option(
        INPUT, ROWS, metavar="NAME", help="Column with a list of choices for each row, as of --choices."
    )
    on_overlong: str = option(
        INPUT,
        f"{ROWS} helm serve-batches engine",
        default="error",
        choices=("error", "truncate-left", "truncate-right"),
        help="A prompt that does not fit the context.",
    )
    special_tokens: str = option(
        INPUT,
        ROWS,
        default="parse",
        choices=("parse", "text"),
        help="The model's special tokens in prompts and messages, such as <|im_start|>: tokens, or plain text.",
    )
    shard: str | None = option(
        INPUT, ROWS, metavar="I/N", help="Only the I-th of N equal parts of the input, I from 0."
    )
    limit: int | None = option(INPUT, ROWS, type=int, metavar="N", common=True, help="Only the first N rows.")
    split: str | None = option(INPUT, ROWS, metavar="NAME", help="Split of a dataset that has several.")
    id_column: str | None = option(
        INPUT,
        f"{ROWS} map",
        metavar="NAME",
        help="Column whose value, rather than the row number, seeds a row's draws.",
    )
    on_bad_line: str = option(
        INPUT,
        ROWS,
        default="fail",
        choices=("fail", "skip"),
        help="A line that is no JSON object: stop before the first row, or note it as a row that failed and go on.",
    )
    input_format: str | None = option(INPUT, ROWS, choices=("parquet", "jsonl", "csv", "datasets", "openai"))
    csv_delimiter: str | None = option(
        INPUT,
        ROWS,
        metavar="CHAR",
        help="Separator of the fields of CSV files: a character, or tab [default: a comma, a tab in .tsv"
        " files, or"
        " what gives columns].",
    )

    sampling: SamplingParams = field(default_factory=SamplingParams)
    sampling_column: str | None = option(
        SAMPLING,
        ROWS,
        metavar="NAME",
        help="Column of structs or JSON objects with sampling parameters of the row's own.",
    )

    device: str = option(
        RESOURCES,
        f"{COMMANDS} lm_eval helm serve-batches engine",
        default="auto",
        metavar="DEVICE",
        help="cpu; cuda; or an accelerator that is emulated on the CPU, with memory and links of its own:"
        " emulated:gpu-memory=512MiB,h2d=2GiB/s,d2h=2GiB/s; with slowdown=2 on a core of its own.",
    )
    gpu_memory: str | int | None = option(
        RESOURCES,
        f"{COMMANDS} lm_eval helm serve-batches engine",
        metavar="SIZE",
        help="GPU memory budget [default: all of it].",
    )
    cpu_memory: str | int | None = option(
        RESOURCES,
        f"{COMMANDS} lm_eval helm serve-batches engine",
        metavar="SIZE",
        help="Memory budget such as 14GiB [default: what is free, less 10%].",
    )
    disk_memory: str | int | None = option(
        RESOURCES,
        f"{COMMANDS} lm_eval helm serve-batches",
        metavar="SIZE",
        help="Disk budget [default: what is free, less 10%]; 0 is none.",
    )
    hardware: str | None = option(
        RESOURCES,
        f"{COMMANDS} lm_eval helm",
        metavar="FILE|NAME",
        reads=FILE_OR_NAME,
        help="Plan with this profile's rates: a file of `batchgen profile`, or t4, a10g, rtx3090, a100, h100, h200,"
        " gh200, zen4 [default: this machine's, measured once].",
    )
    offload_dir: str | Path | None = option(
        RESOURCES, f"{COMMANDS} lm_eval helm serve-batches", metavar="DIR", help=OFFLOAD_HELP
    )
    plan: str | None = option(
        RESOURCES, "run bench helm", metavar="FILE", reads=FILE, help="Run as this plan of `batchgen plan -o` says."
    )
    tensor_parallel: int = option(
        RESOURCES,
        f"{COMMANDS} lm_eval helm engine",
        default=1,
        type=int,
        metavar="N",
        help="Processes that share every layer, each with its part of weights, KV and cores, and of memory budgets.",
    )
    admission: str = option(
        RESOURCES,
        f"{COMMANDS} lm_eval helm serve-batches engine",
        default="auto",
        choices=("auto", "continuous", "static"),
    )
    max_num_seqs: int | None = option(
        RESOURCES,
        f"{COMMANDS} lm_eval helm serve-batches engine",
        type=int,
        metavar="N",
        help="Most samples in flight [default: as planned].",
    )
    num_gpu_batches: int | None = option(
        RESOURCES,
        f"{COMMANDS} lm_eval helm serve-batches",
        type=int,
        metavar="N",
        help="Micro-batches in a block [default: as planned].",
    )
    max_num_batched_tokens: int | None = option(
        RESOURCES,
        f"{COMMANDS} lm_eval helm serve-batches engine",
        type=int,
        metavar="N",
        help="Most tokens in one sweep; longer prompts are chunked [default: as planned].",
    )
    share_prefixes: bool = option(
        RESOURCES,
        f"{ROWS} lm_eval helm serve-batches engine",
        "--enable-prefix-caching/--no-enable-prefix-caching",
        default=True,
        type=bool,
        help="Compute a prompt prefix that rows share once [default: on].",
    )
    drafts: int | None = option(
        RESOURCES,
        f"{ROWS} lm_eval helm serve-batches engine",
        type=int,
        metavar="N",
        help=f"Most drafted tokens of a sequence, up to {MOST_DRAFTS}, that are checked together in a sweep, where that"
        " saves time. Drafts change no text, but for rounding in 16 bits"
        f" [default: {MOST_DRAFTS} where weights or KV stream, else 0].",
    )
    pipeline: int = option(
        RESOURCES,
        f"{ROWS} lm_eval helm",
        default=1,
        type=int,
        metavar="N",
        help="Split the layers into N stages, each a process with its part of cores and memory budgets: started on"
        " this host, or by torchrun.",
    )
    link_bandwidth: str | None = option(
        RESOURCES,
        ROWS,
        metavar="RATE",
        help="Rate of the link between the processes of --tensor-parallel or --pipeline, for planning: 1.25GB/s"
        " [default: 0.8GB/s; in a host with GPUs their bus].",
    )
    expected_output_len: int | None = option(
        RESOURCES,
        f"{ROWS} lm_eval helm serve-batches engine",
        type=int,
        metavar="N",
        help="Tokens a sample usually generates, for planning and admission.",
    )

    resume: bool = option(
        RUN,
        "run helm",
        "--resume/--no-resume",
        default=True,
        type=bool,
        help="Go on from rows that are done already [default: resume].",
    )
    overwrite: bool = option(
        RUN,
        "run helm",
        default=False,
        type=bool,
        common=True,
        help="Drop old progress; the old output stays until the new one is whole.",
    )
    retry_failed: bool = option(
        RUN, "run helm", default=False, type=bool, common=True, help="Run the rows that failed again."
    )
    max_time: str | float | None = option(
        RUN,
        "run helm",
        metavar="TIME",
        common=True,
        help="Stop cleanly after 6h, 90m, ...; the next run goes on (exit code 3).",
    )
    flush_interval: str | float = option(
        RUN,
        "run lm_eval helm serve-batches",
        default="5s",
        metavar="TIME",
        help="How often finished rows are saved: what a crash can cost.",
    )
    cache: str | Path | None = option(
        RUN,
        "run",
        metavar="DIR",
        help="Take answers that jobs with the same directory have computed before, and keep those of this one there.",
    )
    cache_size: str | int = option(
        RUN,
        "run",
        default="10GiB",
        metavar="SIZE",
        help="Limit of --cache; the answers that were used longest ago go first.",
    )
    share: bool = option(
        RUN,
        "run",
        default=False,
        type=bool,
        help="Be one of any number of workers on this output, each started with this command, on machines that share"
        " the directory.",
    )
    share_lease: str | float = option(
        RUN,
        "run",
        default="60s",
        metavar="TIME",
        help="With --share: a worker that gives no sign for so long is dead to the others, who take over its rows.",
    )
    on_error: str = option(
        RUN,
        "run helm",
        default="record",
        choices=("record", "fail"),
        help="A bad row: note it in the row, or stop the job.",
    )
    max_failed: str | int | None = option(
        RUN,
        "run",
        metavar="N|P%",
        help="End with exit code 4 once more rows than this failed [default: where all failed, or the first 100].",
    )
    reasoning_column: bool = option(
        RUN,
        "run",
        "--reasoning-column/--no-reasoning-column",
        default=True,
        type=bool,
        help="Thoughts of a model, between tags such as <think> and </think>: in a column, or left in the text"
        " [default: a column].",
    )
    token_ids: bool = option(
        RUN, "run map", default=False, type=bool, help="Add the columns prompt_token_ids and token_ids."
    )
    json_columns: bool = option(
        RUN,
        "run",
        default=False,
        type=bool,
        help="With --json-schema: a column for each property of the answers, beside the text; null where an answer is"
        " not complete.",
    )
    output_prefix: str = option(
        RUN,
        "run map",
        default="",
        metavar="TEXT",
        help="Put before the names of the output columns [default: nothing, or gen_ where the input has one of the"
        " names].",
    )
    report: str | None = option(RUN, "run bench", metavar="FILE", common=True, help=_REPORT_HELP)
    report_html: str | None = option(
        RUN,
        "run",
        metavar="FILE",
        help="Write a page: predicted beside measured, throughput, lengths, errors, sample rows.",
    )
    trace: str | None = option(
        RUN,
        f"{COMMANDS} helm",
        metavar="FILE",
        help="Write a timeline of every lane, for chrome://tracing: of the run, or what the plan expects.",
    )
    progress: str = option(RUN, f"{COMMANDS} lm_eval helm", default="auto", choices=STYLES)
    log_format: str = option(
        RUN,
        "run",
        default="text",
        choices=LOG_FORMATS,
        help="Lines of a log, on stderr where it is no terminal: text with the time and the output's name, or a JSON"
        " object each.",
    )
    metrics_file: str | None = option(
        RUN,
        "run",
        metavar="FILE",
        help="Write rows done, tokens and time left every few seconds, in Prometheus' text format.",
    )
    dry_run: bool = option(
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


def seconds(value: str | float) -> float:
    """A duration in seconds, from a number or from text such as "90s" or "2h"."""
    return parse_seconds(value) if isinstance(value, str) else float(value)
