"""The options for fields of `SamplingParams`, each declared once."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from batchgen.core.request import SamplingParams
from batchgen.job.option import COMMANDS, ROWS, SAMPLING, TEXT_OF_FILE, Option, named


def _sampling(takers: str, name: str, type: Callable[[str], Any], help: str | None = None, **more: Any) -> Option:
    """An option for a field of SamplingParams, with the default value of that field."""
    (default,) = (f.default for f in fields(SamplingParams) if f.name == name)
    declared = {"group": SAMPLING, "takers": frozenset(takers.split()), "flags": (), "type": type, "help": help}
    return named(name, default, {**declared, **more})


def _bias(text: str) -> tuple[int, float]:
    """Token id and bias from text such as "50256=-100". Raises ValueError."""
    token_id, _, bias = text.partition("=")
    return int(token_id), float(bias)


SAMPLING_OPTIONS = (
    _sampling(f"{ROWS} serve-batches map", "max_tokens", int, "Most tokens generated per sample.", common=True),
    _sampling(f"{COMMANDS} map", "temperature", float, "0 is greedy.", common=True),
    _sampling(f"{COMMANDS} map", "top_p", float, "Keep the most likely tokens that together have this probability."),
    _sampling(f"{COMMANDS} map", "top_k", int, "Keep the k most likely tokens; 0 is off."),
    _sampling(f"{COMMANDS} map", "min_p", float, "Keep tokens with this part of the best one's probability."),
    _sampling(f"{COMMANDS} map", "repetition_penalty", float),
    _sampling(f"{ROWS} map", "presence_penalty", float, "Taken off the logits of tokens that the output has."),
    _sampling(f"{ROWS} map", "frequency_penalty", float, "The same, for each time that it has them."),
    _sampling(f"{ROWS} map", "logit_bias", _bias, "Added to the logit of a token, may be repeated.", multiple=True,
              metavar="ID=BIAS", python="Mapping[int, float] | Sequence[tuple[int, float]]"),
    _sampling(f"{COMMANDS} map", "n", int, "Samples per row.", flags=("-n", "--n")),
    _sampling(f"{COMMANDS} map helm serve-batches", "seed", int),
    _sampling(f"{ROWS} map", "stop", str, r"Stop string such as \n, may be repeated.", multiple=True, metavar="TEXT",
              typed=True, common=True, python="str | Sequence[str]"),
    _sampling(f"{ROWS} map", "stop_token_ids", int, "Stop token, may be repeated.", multiple=True, metavar="ID"),
    _sampling(f"{ROWS} map", "ignore_eos", bool, "Go on past end-of-text."),
    _sampling(f"{COMMANDS} map", "logprobs", int, "Log-probabilities of the chosen token and the top N.", metavar="N"),
    _sampling(f"{ROWS} map", "prompt_logprobs", int, "Log-probabilities of the prompt's tokens and the top N.",
              metavar="N"),
    _sampling(f"{ROWS} map", "json_schema", str, "Every text is JSON that is valid against this schema.",
              metavar="FILE", reads=TEXT_OF_FILE, common=True, python="str | Mapping[str, Any] | type | None"),
    _sampling(f"{ROWS} map", "compact_json", bool, "With --json-schema: no spaces between the parts of the JSON."),
    _sampling(f"{ROWS} map", "regex", str, "Every text matches this regular expression, as a whole.", metavar="TEXT"),
    _sampling(f"{ROWS} map", "grammar", str, "Every text follows this context-free grammar, in Lark's notation.",
              metavar="FILE", reads=TEXT_OF_FILE),
)  # fmt: skip
