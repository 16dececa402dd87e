"""Conversion of lm_eval's generation keywords to fields of SamplingParams."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lm_eval.models.utils import normalize_gen_kwargs

from batchgen.core.errors import InputError
from batchgen.core.request import SamplingParams

# Sampling parameters that lm_eval names in its own way, or decides.
_OTHERWISE = {"max_tokens", "stop", "n", "logprobs"}
# Keywords of other engines, with the value that has no effect here.
_NEUTRAL = {"num_beams": 1, "num_return_sequences": 1, "skip_special_tokens": True}


@dataclass(frozen=True)
class Generation:
    """Generation settings of an lm_eval request.

    Attributes:
        fields: Fields of SamplingParams that differ from the job's.
        until: Texts that end the generated text.
    """

    fields: dict[str, Any]
    until: tuple[str, ...]


def generation(gen_kwargs: dict[str, Any], max_gen_toks: int, special_ids: dict[str, int], thinks: bool) -> Generation:
    """The generation settings of an lm_eval request.

    Args:
        gen_kwargs: Keywords of `--gen_kwargs` and of the task.
        max_gen_toks: The most generated tokens, where the keywords give no number.
        special_ids: Ids of special tokens by their text, as `until` may name them.
        thinks: Whether texts in `until` end only the answer, not the thoughts before it.

    Raises:
        InputError: A keyword is not supported, or has an invalid value.
    """
    try:
        given = dict(normalize_gen_kwargs(gen_kwargs, max_gen_toks))
    except (TypeError, ValueError, AttributeError) as error:
        raise InputError(f"generation_kwargs {gen_kwargs!r} cannot be understood: {error}") from error
    limit = given.pop("max_gen_toks")
    stop = given.pop("stop", ())
    until = [text for text in (*given.pop("until"), *([stop] if isinstance(stop, str) else stop)) if text]
    if given.pop("do_sample") and "temperature" not in gen_kwargs:
        given["temperature"] = 1.0  # as everywhere else
    for name, value in _NEUTRAL.items():
        if given.get(name) == value:
            del given[name]
    known = set(SamplingParams.names()) - _OTHERWISE
    unknown = sorted(set(given) - known)
    if unknown:
        advice = ": give max_gen_toks" if unknown[0] == "max_length" else f" (it takes {', '.join(sorted(known))})"
        raise InputError(f"batchgen has no generation keyword {unknown[0]!r}{advice}")
    fields = {name: value for name, value in given.items() if value is not None} | {"max_tokens": limit}
    stop_token_ids = [special_ids[text] for text in until if text in special_ids]
    if stop_token_ids:
        fields["stop_token_ids"] = [*fields.get("stop_token_ids", ()), *stop_token_ids]
    texts = tuple(text for text in until if text not in special_ids)
    if texts and not thinks:
        fields["stop"] = list(texts)
    try:
        SamplingParams(**fields)
    except (InputError, TypeError) as error:
        raise InputError(f"generation_kwargs {gen_kwargs!r}: {error}") from error
    return Generation(fields, texts)
