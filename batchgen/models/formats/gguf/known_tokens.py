"""Special tokens that llama.cpp recognizes by their text.

They end a text, whatever the GGUF states about them, or surround a gap to be filled in.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchgen.core.errors import InputError

ENDS = (
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "</s>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<｜end▁of▁sentence｜>",
    "[e~[",
)
# Tokens around the gap in a text to be filled: the key that names each, and its texts. Those behind the gap end a text.
_GAPS = {
    "fim_pre": (
        "<|fim_prefix|>",
        "<fim-prefix>",
        "<fim_prefix>",
        "<｜fim▁begin｜>",
        "<PRE>",
        "▁<PRE>",
        "<|code_prefix|>",
        "<|prefix|>",
    ),
    "fim_suf": (
        "<|fim_suffix|>",
        "<fim-suffix>",
        "<fim_suffix>",
        "<｜fim▁hole｜>",
        "<SUF>",
        "▁<SUF>",
        "<|code_suffix|>",
        "<|suffix|>",
    ),
    "fim_mid": (
        "<|fim_middle|>",
        "<fim-middle>",
        "<fim_middle>",
        "<｜fim▁end｜>",
        "<MID>",
        "▁<MID>",
        "<|code_middle|>",
        "<|middle|>",
    ),
    "fim_pad": ("<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]"),
    "fim_rep": ("<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>", "<reponame>"),
    "fim_sep": ("<|file_sep|>",),
}
# Tokens of gpt-oss between channels.
_CHANNELS = ("<|channel|>", "<|message|>", "<|start|>", "<|constrain|>")
_ENDING_GAPS = ("fim_pad", "fim_rep", "fim_sep")
KNOWN = (*ENDS, *(text for texts in _GAPS.values() for text in texts), *_CHANNELS)
# The ids in SentencePiece's vocabularies where a file states none.
_USUAL_IDS = {"bos": 1, "eos": 2, "unknown": 0}
# In a vocabulary that has all tokens of a row, "<|end|>" ends a message among several, and not the text.
_GOES_ON = (
    ("<|return|>", "<|call|>"),
    ("<|call|>", "<|flush|>"),
    ("<|calls|>", "<|flush|>"),
    ("<|return|>", "<|calls|>"),
)


def special_id(metadata: Mapping[str, Any], name: str) -> int | None:
    """The id of a special token of a GGUF; None: there is none.

    It is `tokenizer.ggml.{name}_token_id`, or llama.cpp's default.

    Raises:
        InputError: The value is not an id.
    """
    stated = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if stated is None and metadata.get("tokenizer.ggml.model") == "llama":
        return _USUAL_IDS.get(name)
    if stated is not None and (isinstance(stated, bool) or not isinstance(stated, int)):
        raise InputError(f"tokenizer.ggml.{name}_token_id is {stated!r}, not the id of a token")
    return stated


def end_ids(metadata: Mapping[str, Any], known: Mapping[str, int]) -> tuple[int, ...]:
    """The ids of the tokens that end a text.

    Args:
        metadata: Key-value pairs of a GGUF.
        known: Ids of the tokens of `KNOWN` that are in the vocabulary, by text.
    """
    stated = [special_id(metadata, name) for name in ("eos", "eot", "eom")]
    of_gaps = [_gap_id(metadata, known, name) for name in _ENDING_GAPS]
    ids = dict.fromkeys(i for i in (*stated, *of_gaps, *map(known.get, ENDS)) if i is not None)
    goes_on = any(all(text in known for text in texts) for texts in _GOES_ON)
    others = (plain_id(known), known.get("<|end|>") if goes_on else None)
    return tuple(i for i in ids if i not in others)


def plain_id(known: Mapping[str, int]) -> int | None:
    """The id of the token "</s>" in Gemma 4's vocabulary, which is plain text there; None for other vocabularies.

    Args:
        known: Ids of the tokens of `KNOWN` that are in the vocabulary, by text.
    """
    return known.get("</s>") if "<|tool_response>" in known else None


def cut_out_ids(metadata: Mapping[str, Any], known: Mapping[str, int]) -> frozenset[int]:
    """The ids of known tokens that are found in a text before it is tokenized otherwise, whatever the file states.

    Args:
        metadata: Key-value pairs of a GGUF.
        known: Ids of the tokens of `KNOWN` that are in the vocabulary, by text.
    """
    ids = {known[text] for text in (*ENDS, *_CHANNELS) if text in known}
    ids |= {
        i for name in _GAPS if special_id(metadata, name) is None and (i := _gap_id(metadata, known, name)) is not None
    }
    return frozenset(ids)


def _gap_id(metadata: Mapping[str, Any], known: Mapping[str, int], name: str) -> int | None:
    stated = special_id(metadata, name)
    return stated if stated is not None else next((known[text] for text in _GAPS[name] if text in known), None)
