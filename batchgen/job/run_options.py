"""`RunOptions`, the keyword options of `batchgen.run` as types.

`docs/describe_options.py` makes this module from the table of options in `batchgen/job/option_table.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict


class RunOptions(TypedDict, total=False):
    """The keyword options of `batchgen.run`, all optional: those of the command line, with underscores."""

    lora: str | None
    """LoRA adapter as PEFT saves it, merged into the weights when they are read; packed ones are dequantized."""

    lora_column: str | None
    """Column with the directory of each row's LoRA adapter, or nothing; rows are run adapter by adapter."""

    cascade: str | None
    """A smaller model that answers first; rows in which it is not sure enough go to --model. For --choices,
    --json-schema and the like, and for --task score with choices.
    """

    agree: float
    """With --cascade: least share of all rows whose answer is that of --model. Default: 0.95."""

    confidence: float
    """With --cascade: least probability that --agree is kept. Default: 0.95."""

    agree_on: str | None
    """With --cascade and --choices: the promise is about this choice, its recall and its precision, in place of all
    rows.
    """

    agree_within: float
    """With --cascade and --json-schema: numbers that differ by at most X agree. Default: 0.0."""

    cascade_sample: int | None
    """With --cascade: draws of rows that both models answer [default: as the promise needs, and up to 5% of the rows].
    """

    dtype: Literal["auto", "bfloat16", "float16", "float32"]
    """The dtype. Default: 'auto'."""

    weights: Literal["auto", "native", "dequantized", "int8", "int4"]
    """native: the layers' matrices in the model's own format; dequantized: in the dtype that is computed in; auto:
    whichever of these is faster; int8: in 8 bits, multiplied as integers with tokens quantized to 8 bits; int4: in 4
    bits; perplexity on the demo model is higher by 0.4 %, 7.5 %. Default: 'auto'.
    """

    kv_cache_dtype: Literal["auto", "int8", "int5", "int4"]
    """int8, int5, int4: KV in 8, 5 or 4 bits; perplexity on the demo model is higher by 0.06 %, 1.6 %, 7.3 %. Default:
    'auto'.
    """

    quality: Literal["exact", "near", "small"]
    """Formats that the plan may choose for weights and KV whose options are auto. exact: none that loses quality; near,
    small: those that together make perplexity at most 1%, 10% higher. Default: 'exact'.
    """

    state_dtype: Literal["float32", "bfloat16"]
    """bfloat16: the recurrent states of linear attention (Qwen3.5 and later, Qwen3-Next) take half of the memory, and
    are rounded after every token. Default: 'float32'.
    """

    attention_budget: str
    """Tokens that each generated token attends to: a share of those before it such as 10%, or a number of them; the KV
    blocks that matter most to it are chosen in each layer. Prompts are read whole. all: no choice. Default: 'all'.
    """

    max_model_len: int | None
    """Longest prompt plus output [default: the model's]."""

    prompt_column: str | None
    """Column that holds the prompts [default: messages, prompt, text, or the only column of text]."""

    prompt_template: str | None
    r"""Jinja template over the columns, where \n is a newline; @FILE reads it from a file."""

    reorder_fields: str | None
    """Columns of --prompt-template whose lines may change places, so that more rows begin alike."""

    messages_column: str | None
    """Column of chat messages: lists of {role, content}, or of ShareGPT's {from, value}."""

    system_prompt: str | None
    """System message before each row's messages; implies --chat."""

    chat: bool | None
    """Send text prompts as a user's message in the chat template, or as plain text [default: --chat where the model has
    a chat template].
    """

    chat_template: str | None
    """Chat template in Jinja that replaces the model's."""

    chat_template_kwargs: str | Mapping[str, Any] | None
    """Variables for the model's chat template, such as '{"enable_thinking": false}'."""

    continue_final: bool
    """Go on with the assistant's message that a row's messages end with, rather than begin another behind it. Default:
    False.
    """

    tools_column: str | None
    """Column of tools that the chat template writes into the prompt: lists of JSON schemas, or JSON of them."""

    task: Literal["generate", "score", "embed", "classify", "rerank"]
    """score: log-probabilities of continuations of the prompt, or of the prompt itself; embed: the text's vector;
    classify: probabilities of a classifier's labels; rerank: the score of a query and a document. Default: 'generate'.
    """

    prompt_name: str | None
    """With --task embed: prompt of the model's config_sentence_transformers.json that comes before each text, such as
    query.
    """

    instruction: str | None
    """With --task embed: what the texts are queries for, as Qwen3-Embedding is told it; with --task rerank what
    Qwen3-Reranker judges by.
    """

    pair_column: str | None
    """With --task classify or rerank: column of the second text of each pair [default with rerank: document;
    --prompt-column has the first one, by default query].
    """

    pooling: Literal["mean", "cls", "last"] | None
    """With --task embed: tokens whose hidden states make the vector [default: as the model's files say]."""

    normalize: bool | None
    """With --task embed: divide vectors by their length [default: as the model's files say]."""

    dimensions: int | None
    """With --task embed: only the first N values of each vector (Matryoshka)."""

    vector_dtype: Literal["float32", "float16", "int8"]
    """With --task embed: format of the vectors. Default: 'float32'."""

    continuations_column: str | None
    """With --task score: column of what may follow the prompt, one or a list, texts or token ids."""

    choices: Sequence[str]
    """A text that an answer may be, repeated for each: every generated text is one of them. With --task score the most
    likely one is the choice.
    """

    choices_column: str | None
    """Column with a list of choices for each row, as of --choices."""

    on_overlong: Literal["error", "truncate-left", "truncate-right"]
    """A prompt that does not fit the context. Default: 'error'."""

    special_tokens: Literal["parse", "text"]
    """The model's special tokens in prompts and messages, such as <|im_start|>: tokens, or plain text. Default:
    'parse'.
    """

    shard: str | None
    """Only the I-th of N equal parts of the input, I from 0."""

    limit: int | None
    """Only the first N rows."""

    split: str | None
    """Split of a dataset that has several."""

    id_column: str | None
    """Column whose value, rather than the row number, seeds a row's draws."""

    on_bad_line: Literal["fail", "skip"]
    """A line that is no JSON object: stop before the first row, or note it as a row that failed and go on. Default:
    'fail'.
    """

    input_format: Literal["parquet", "jsonl", "csv", "datasets", "openai"] | None
    """The input format."""

    csv_delimiter: str | None
    """Separator of the fields of CSV files: a character, or tab [default: a comma, a tab in .tsv files, or what gives
    columns].
    """

    sampling_column: str | None
    """Column of structs or JSON objects with sampling parameters of the row's own."""

    max_tokens: int
    """Most tokens generated per sample. Default: 256."""

    temperature: float
    """0 is greedy. Default: 0.0."""

    top_p: float
    """Keep the most likely tokens that together have this probability. Default: 1.0."""

    top_k: int
    """Keep the k most likely tokens; 0 is off. Default: 0."""

    min_p: float
    """Keep tokens with this part of the best one's probability. Default: 0.0."""

    repetition_penalty: float
    """The repetition penalty. Default: 1.0."""

    presence_penalty: float
    """Taken off the logits of tokens that the output has. Default: 0.0."""

    frequency_penalty: float
    """The same, for each time that it has them. Default: 0.0."""

    logit_bias: Mapping[int, float] | Sequence[tuple[int, float]]
    """Added to the logit of a token, may be repeated."""

    n: int
    """Samples per row. Default: 1."""

    seed: int
    """The seed. Default: 0."""

    stop: str | Sequence[str]
    r"""Stop string such as \n, may be repeated."""

    stop_token_ids: Sequence[int]
    """Stop token, may be repeated."""

    ignore_eos: bool
    """Go on past end-of-text. Default: False."""

    logprobs: int | None
    """Log-probabilities of the chosen token and the top N."""

    prompt_logprobs: int | None
    """Log-probabilities of the prompt's tokens and the top N."""

    json_schema: str | Mapping[str, Any] | type | None
    """Every text is JSON that is valid against this schema."""

    compact_json: bool
    """With --json-schema: no spaces between the parts of the JSON. Default: False."""

    regex: str | None
    """Every text matches this regular expression, as a whole."""

    grammar: str | None
    """Every text follows this context-free grammar, in Lark's notation."""

    device: str
    """cpu; cuda; or an accelerator that is emulated on the CPU, with memory and links of its own:
    emulated:gpu-memory=512MiB,h2d=2GiB/s,d2h=2GiB/s; with slowdown=2 on a core of its own. Default: 'auto'.
    """

    gpu_memory: str | int | None
    """GPU memory budget [default: all of it]."""

    cpu_memory: str | int | None
    """Memory budget such as 14GiB [default: what is free, less 10%]."""

    disk_memory: str | int | None
    """Disk budget [default: what is free, less 10%]; 0 is none."""

    hardware: str | None
    """Plan with this profile's rates: a file of `batchgen profile`, or t4, a10g, rtx3090, a100, h100, h200, gh200, zen4
    [default: this machine's, measured once].
    """

    offload_dir: str | Path | None
    """Directory of the disk tier [default: the cache directory]."""

    plan: str | None
    """Run as this plan of `batchgen plan -o` says."""

    tensor_parallel: int
    """Processes that share every layer, each with its part of weights, KV and cores, and of memory budgets. Default: 1.
    """

    admission: Literal["auto", "continuous", "static"]
    """The admission. Default: 'auto'."""

    max_num_seqs: int | None
    """Most samples in flight [default: as planned]."""

    num_gpu_batches: int | None
    """Micro-batches in a block [default: as planned]."""

    max_num_batched_tokens: int | None
    """Most tokens in one sweep; longer prompts are chunked [default: as planned]."""

    share_prefixes: bool
    """Compute a prompt prefix that rows share once [default: on]."""

    drafts: int | None
    """Most drafted tokens of a sequence, up to 16, that are checked together in a sweep, where that saves time. Drafts
    change no text, but for rounding in 16 bits [default: 16 where weights or KV stream, else 0].
    """

    pipeline: int
    """Split the layers into N stages, each a process with its part of cores and memory budgets: started on this host,
    or by torchrun. Default: 1.
    """

    link_bandwidth: str | None
    """Rate of the link between the processes of --tensor-parallel or --pipeline, for planning: 1.25GB/s [default:
    0.8GB/s; in a host with GPUs their bus].
    """

    expected_output_len: int | None
    """Tokens a sample usually generates, for planning and admission."""

    resume: bool
    """Go on from rows that are done already [default: resume]."""

    overwrite: bool
    """Drop old progress; the old output stays until the new one is whole. Default: False."""

    retry_failed: bool
    """Run the rows that failed again. Default: False."""

    max_time: str | float | None
    """Stop cleanly after 6h, 90m, ...; the next run goes on (exit code 3)."""

    flush_interval: str | float
    """How often finished rows are saved: what a crash can cost. Default: '5s'."""

    cache: str | Path | None
    """Take answers that jobs with the same directory have computed before, and keep those of this one there."""

    cache_size: str | int
    """Limit of --cache; the answers that were used longest ago go first. Default: '10GiB'."""

    share: bool
    """Be one of any number of workers on this output, each started with this command, on machines that share the
    directory. Default: False.
    """

    share_lease: str | float
    """With --share: a worker that gives no sign for so long is dead to the others, who take over its rows. Default:
    '60s'.
    """

    on_error: Literal["record", "fail"]
    """A bad row: note it in the row, or stop the job. Default: 'record'."""

    max_failed: str | int | None
    """End with exit code 4 once more rows than this failed [default: where all failed, or the first 100]."""

    reasoning_column: bool
    """Thoughts of a model, between tags such as <think> and </think>: in a column, or left in the text [default: a
    column].
    """

    token_ids: bool
    """Add the columns prompt_token_ids and token_ids. Default: False."""

    json_columns: bool
    """With --json-schema: a column for each property of the answers, beside the text; null where an answer is not
    complete. Default: False.
    """

    output_prefix: str
    """Put before the names of the output columns [default: nothing, or gen_ where the input has one of the names]."""

    report: str | None
    """Write the report as JSON; - is stdout."""

    report_html: str | None
    """Write a page: predicted beside measured, throughput, lengths, errors, sample rows."""

    trace: str | None
    """Write a timeline of every lane, for chrome://tracing: of the run, or what the plan expects."""

    progress: Literal["auto", "plain", "none"]
    """The progress. Default: 'auto'."""

    log_format: Literal["text", "json"]
    """Lines of a log, on stderr where it is no terminal: text with the time and the output's name, or a JSON object
    each. Default: 'text'.
    """

    metrics_file: str | None
    """Write rows done, tokens and time left every few seconds, in Prometheus' text format."""

    dry_run: bool
    """Check everything, show the plan and the first prompt; run nothing. Default: False."""

    steps: Sequence[Mapping[str, Any]]
    """Steps that each row goes through: a mapping of options for each, as the tables `[[step]]` of a job file."""
