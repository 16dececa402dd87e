"""The model `batchgen` of lm-evaluation-harness: it runs an evaluation's requests as rows of batchgen jobs."""

from __future__ import annotations

import json
import logging
from array import array
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import torch
from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.models.utils import postprocess_generated_text
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from batchgen._version import __version__
from batchgen.core.cache_folder import cache_dir
from batchgen.core.digest import json_sha256
from batchgen.core.errors import InputError, RowError, one_line
from batchgen.core.request import ChatOptions
from batchgen.job.job import resolve_job
from batchgen.job.option_table import names_of
from batchgen.job.options import JobOptions
from batchgen.lmeval.generation import generation
from batchgen.lmeval.jobs import Workplace, nested_token_lists, token_lists
from batchgen.lmeval.texts import Texts
from batchgen.models.files import resolve_model
from batchgen.models.identity import model_identity
from batchgen.models.tokenizers.loading import load_parts
from batchgen.models.tokenizers.tokenizer import Tokenizer
from batchgen.models.tokenizers.transformers_tokenizer import as_hf_tokenizer

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

# Options of a job that are passed through, beside those with a name of lm_eval's.
JOB_OPTIONS = tuple(name for name in names_of("lm_eval") if name != "max_model_len")
_Pair = tuple[Any, Sequence[int], Sequence[int]]  # lm_eval's key of a request, context and continuation
logger = logging.getLogger(__name__)


@register_model("batchgen")
class BatchgenLM(TemplateLM):
    """The model of `lm_eval --model batchgen --model_args pretrained=demo,...`.

    Args:
        pretrained: The model, as `batchgen run --model` takes it.
        max_length: Length of the context in tokens; None: the model's.
        max_model_len: Another name of max_length.
        max_gen_toks: The most generated tokens, where a request gives no number.
        seed: Seed of random draws; None: the torch seed of lm_eval's `--seed`.
        add_bos_token: Whether texts begin with the beginning-of-text token; None: as the tokenizer does.
        prefix_token_id: Id of the token before texts without a context; None: beginning of text, or else end of text.
        chat_template_args: Variables of the chat template.
        enable_thinking: Variable of the chat template.
        think_end_token: Text that separates a model's thoughts from its answer.
        work_dir: Directory of the jobs; None: `lmeval` in batchgen's cache directory.
        resume: Whether results of earlier evaluations are used.
        device: The compute device, as `batchgen run --device` takes it; lm_eval's default "cuda:0" is "auto" here.
        batch_size: Ignored.
        max_batch_size: Ignored.
        trust_remote_code: Ignored.
        **options: Further options of the jobs, named in JOB_OPTIONS.

    Raises:
        InputError: An option is invalid, or the model is unsupported or broken.
    """

    def __init__(  # a parameter for each keyword of --model_args, as lm_eval calls it
        self,
        pretrained: str = "demo",
        *,
        max_length: int | None = None,
        max_model_len: int | None = None,
        max_gen_toks: int = 256,
        seed: int | None = None,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        chat_template_args: dict[str, Any] | None = None,
        enable_thinking: bool | None = None,
        think_end_token: str | None = None,
        work_dir: str | None = None,
        resume: bool = True,
        device: str | None = None,
        batch_size: Any = None,
        max_batch_size: Any = None,
        trust_remote_code: Any = None,
        **options: Any,
    ) -> None:
        super().__init__()
        unknown = sorted(set(options) - set(JOB_OPTIONS))
        if unknown:
            named = "pretrained, max_length, max_gen_toks, seed, add_bos_token, prefix_token_id, work_dir, resume"
            raise InputError(f"--model_args has no {unknown[0]!r}; it takes {named}, {', '.join(JOB_OPTIONS)}")
        if max_length is not None and max_model_len is not None:
            raise InputError("--model_args: max_length and max_model_len are the same: give one")
        if device not in (None, "cuda:0"):
            options["device"] = device
        files = resolve_model(pretrained, options.get("lora"))
        options["max_model_len"] = max_length if max_length is not None else max_model_len
        job = resolve_job(JobOptions(pretrained, None, None, **options), files)
        self._max_length = options["max_model_len"] = job.context
        # batchgen.run shows no progress by default.
        options |= {name: getattr(job.options, name) for name in ("device", "progress")}
        if max_gen_toks < 1:
            raise InputError(f"max_gen_toks must be at least 1, not {max_gen_toks}")
        self.max_gen_toks = max_gen_toks
        parts = load_parts(files)
        self._tokens, self.tokenizer = Tokenizer(parts), as_hf_tokenizer(parts)
        self._tokenizer_name = f"{files.name.replace('/', '__')}-{self._tokens.identity()[:16]}"
        self._texts = Texts(self._tokens, add_bos_token, prefix_token_id)
        text_of = self.tokenizer.convert_ids_to_tokens
        self._special_ids = {str(text_of(token_id)): token_id for token_id in sorted(self._tokens.special_ids)}
        self._template_args = dict(chat_template_args or {})
        if enable_thinking is not None:
            self._template_args["enable_thinking"] = enable_thinking
        self._think_end = think_end_token
        self._seed = torch.initial_seed() if seed is None else seed
        identity = {
            "batchgen": __version__,
            "model": model_identity(files),
            "tokenizer": self._tokens.identity(),
            "dtype": job.dtype,
            "max_model_len": self._max_length,
            "formats": job.deciding_formats,
        }
        digest = json_sha256(identity["model"])
        self._info = {"model_dtype": job.dtype, "model_sha": digest, "batchgen_version": __version__}
        directory = cache_dir() / "lmeval" if work_dir is None else Path(work_dir).expanduser()
        self._work = Workplace(pretrained, options, identity, directory, resume)

    @classmethod
    def create_from_arg_obj(
        cls, arg_dict: dict[str, Any], additional_config: dict[str, Any] | None = None
    ) -> BatchgenLM:
        """Make the model from lm_eval's arguments; those of `--model_args` override lm_eval's own flags."""
        return cls(**{**(additional_config or {}), **arg_dict})

    @classmethod
    def create_from_arg_string(cls, arg_string: str, additional_config: dict[str, Any] | None = None) -> BatchgenLM:
        """Make the model from lm_eval's arguments as text, "key=value,key=value"."""
        from lm_eval.utils import simple_parse_args_string

        return cls.create_from_arg_obj(simple_parse_args_string(arg_string), additional_config)

    def get_model_info(self) -> dict[str, Any]:
        """Information about the model that lm_eval stores with the results."""
        return self._info | {"work_dir": str(self._work.directory)}

    @property
    def tokenizer_name(self) -> str:
        """Name under which lm_eval caches prompts made with this model's chat template."""
        return self._tokenizer_name

    @property
    def max_length(self) -> int:
        """Length of the model's context, in tokens."""
        return self._max_length

    @property
    def eot_token_id(self) -> int:
        """Id of the end-of-text token."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """Id of the token before a text without a context."""
        return self._texts.prefix_token_id

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """The token ids of a text.

        Args:
            string: The text. If it begins with the text of the beginning-of-text token, that token is not added again.
            add_special_tokens: Whether special tokens are added; None: as `add_bos_token` says.
            **kwargs: Ignored.
        """
        return list(next(self._texts.encode([string], add_special_tokens)))

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Chat messages as one text.

        Args:
            chat_history: Messages with "role" and "content".
            add_generation_prompt: Whether the text ends where an answer begins; otherwise it ends where the last
                message can go on.
        """
        options = ChatOptions(self._template_args, continue_final=not add_generation_prompt)
        self._tokens.require_chat_template(options)
        try:
            try:
                return self._tokens.render_chat(chat_history, options)
            except RowError:
                others = [message for message in chat_history if message["role"] != "system"]
                if not 0 < len(others) < len(chat_history):
                    raise
                logger.warning("the chat template knows no system message: it is left out")
                return self._tokens.render_chat(others, options)
        except RowError as error:
            raise InputError(str(error)) from error

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """(log-probability, is greedy) of each request's continuation after its context."""
        if self._think_end is not None or self._template_args.get("enable_thinking"):
            raise InputError("a model that thinks cannot be asked for log-likelihoods: choose tasks that generate")
        texts = [request.args for request in requests]
        return self._loglikelihood_tokens(
            [(key, *pair) for key, pair in zip(texts, self._texts.pairs(texts), strict=True)]
        )

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """The log-probability of each request's text, computed in windows where the text is longer than the context."""
        windows: list[_Pair] = []
        owners: list[int] = []
        texts = [request.args[0] for request in requests]
        for owner, tokens in enumerate(self._texts.encode(texts)):
            for pair in get_rolling_token_windows(list(tokens), self.prefix_token_id, self.max_length, context_len=1):
                windows.append((None, *make_disjoint_window(pair)))
                owners.append(owner)
        totals = [0.0] * len(requests)
        for owner, (logprob, _) in zip(owners, self._score("loglikelihood_rolling", windows), strict=True):
            totals[owner] += logprob
        for text, total in zip(texts, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (text,), total)
        return totals

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """The text generated after each request's context, up to one of the texts in its keyword `until`."""
        rows: dict[tuple, int] = {}  # row by prompt, parameters and, where draws differ, the request
        row_of: list[int] = []
        untils, limits, cut = [], [1], 0
        for request, prompt in zip(
            requests, self._texts.encode([request.args[0] for request in requests]), strict=True
        ):
            try:
                how = generation(request.args[1], self.max_gen_toks, self._special_ids, self._think_end is not None)
                capacity = self.max_length - how.fields["max_tokens"]
                if capacity < 1:
                    raise InputError(f"max_gen_toks must be below the context of {self.max_length}")
            except InputError as error:
                raise InputError(f"task {request.task_name}: {error}") from error
            draw = len(row_of) if how.fields.get("temperature") else None
            key = _key(prompt[-capacity:] or [self.prefix_token_id]), json.dumps(how.fields, sort_keys=True), draw
            row_of.append(rows.setdefault(key, len(rows)))
            untils.append(list(how.until))
            cut += len(prompt) > capacity
            limits.append(how.fields["max_tokens"])
        self._warn_of_cuts("generate_until", cut)
        if not rows:
            return []
        texts = self._work.run(
            "generate_until",
            pa.table(
                {"prompt": token_lists([prompt for prompt, _, _ in rows]), "sampling": [how for _, how, _ in rows]}
            ),
            ["text"],
            prompt_column="prompt",
            sampling_column="sampling",
            max_tokens=max(limits),
            seed=self._seed,
        )["text"].to_pylist()
        answers = []
        for request, row, until in zip(requests, row_of, untils, strict=True):
            answers.append(postprocess_generated_text(texts[row], until, self._think_end))
            self.cache_hook.add_partial("generate_until", request.args, answers[-1])
        return answers

    def _loglikelihood_tokens(self, requests: list[_Pair], **kwargs: Any) -> list[tuple[float, bool]]:
        answers = self._score("loglikelihood", requests)
        for (texts, _, _), answer in zip(requests, answers, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def _score(self, kind: str, requests: Iterable[_Pair]) -> list[tuple[float, bool]]:
        """(log-probability, is greedy) of each pair's continuation after its context.

        Continuations of one context are one row of the job, so that the context is computed once. If the context is a
        single token, each continuation is a row of its own: a shared row would save nothing, and could only be resumed
        as a whole.

        Args:
            kind: Type of the requests.
            requests: Pairs of context and continuation.

        Returns:
            The log-probability, and whether each token of the continuation is the most likely one.
        """
        rows: dict[
            tuple, tuple[int, dict[bytes, int]]
        ] = {}  # row of each context, and index of each continuation in it
        places, cut = [], 0
        for texts, context, continuation in requests:
            if not 0 < len(continuation) <= self.max_length:
                what = "adds no token to its context" if not continuation else f"has {len(continuation):,} tokens"
                text = one_line(repr(texts[1] if texts else self._tokens.decode(continuation)))
                raise InputError(f"the continuation {text} {what}: it must have 1 to {self.max_length:,}")
            # The last token is not fed to the model, so that the two may have one more than the context holds.
            capacity = self.max_length + 1 - len(continuation)
            cut += len(context) > capacity
            context = context[-capacity:]
            key = _key(context), (_key(continuation) if len(context) == 1 else None)
            row, continuations = rows.setdefault(key, (len(rows), {}))
            places.append((row, continuations.setdefault(_key(continuation), len(continuations))))
        self._warn_of_cuts(kind, cut)
        if not rows:
            return []
        scores = self._work.run(
            kind,
            pa.table(
                {
                    "context": token_lists([context for context, _ in rows]),
                    "continuations": nested_token_lists([list(known) for _, known in rows.values()]),
                }
            ),
            ["logprobs", "is_greedy"],
            task="score",
            prompt_column="context",
            continuations_column="continuations",
        )
        logprobs, greedy = (scores[name].to_pylist() for name in ("logprobs", "is_greedy"))
        return [(logprobs[row][index], greedy[row][index]) for row, index in places]

    def _warn_of_cuts(self, kind: str, count: int) -> None:
        if count:
            logger.warning(
                "%s %s requests do not fit the context of %s tokens: their contexts lose tokens at the beginning",
                f"{count:,}", kind, f"{self.max_length:,}",
            )  # fmt: skip


def _key(token_ids: Sequence[int]) -> bytes:
    """Token ids as bytes, four each, for a dictionary's key."""
    return array("i", token_ids).tobytes()
