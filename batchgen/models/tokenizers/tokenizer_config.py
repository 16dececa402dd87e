"""Special tokens and chat template that the files of a tokenizer state, read and written as transformers does.

Transformers takes a second to import. `tokenizers` alone turns text into tokens, and these files tell the rest.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from batchgen.core.errors import InputError

CONFIG = "tokenizer_config.json"
_SPECIAL_TOKENS = "special_tokens_map.json"
_CHAT_TEMPLATE = "chat_template.jinja"
_MORE_TEMPLATES = "additional_chat_templates"  # folder of templates by name
# Names of special tokens that any tokenizer may have.
_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def read_special_tokens(directory: Path) -> dict[str, str]:
    """The special tokens that the files of a directory name, such as "bos_token", with their texts.

    Raises:
        InputError: A file is damaged.
    """
    stated = _read(directory / CONFIG)
    explicit = {key: value for key, value in stated.items() if _is_of_model(key) and isinstance(value, str)}
    explicit |= _named(stated.get("extra_special_tokens") or stated.get("additional_special_tokens"))
    explicit = explicit or _named(stated.get("model_specific_special_tokens"))
    if "added_tokens_decoder" not in stated:  # transformers reads the older file only then
        older = _read(directory / _SPECIAL_TOKENS)
        explicit |= _named(older.get("extra_special_tokens"))
        stated |= older
    named = {name: stated[name] for name in _NAMES if stated.get(name) is not None}
    others = {key: value for key, value in stated.items() if _is_of_model(key) and _is_token(value)}
    return {name: _text(name, token) for name, token in (named | others | explicit).items()}


def read_chat_template(directory: Path) -> str | dict[str, str] | None:
    """The chat template that the files of a directory have, or templates by name; None: they have none.

    Raises:
        InputError: A file is damaged.
    """
    paths = {path.name.removesuffix(".jinja"): path for path in (directory / _MORE_TEMPLATES).glob("*.jinja")}
    if (path := directory / _CHAT_TEMPLATE).exists():
        paths = {"default": path, **paths}
    texts = {name: path.read_text(encoding="utf-8") for name, path in paths.items()}
    if texts:
        return texts["default"] if texts.keys() == {"default"} else texts
    stated = _read(directory / CONFIG).get("chat_template")
    if isinstance(stated, list):
        stated = {template["name"]: template["template"] for template in stated}
    if isinstance(stated, dict) and not all(isinstance(text, str) for text in stated.values()):
        raise InputError(f"a chat template is no text: fetch {CONFIG} again")
    if stated is not None and not isinstance(stated, str | dict):
        raise InputError(f"its chat template is no text: fetch {CONFIG} again")
    return stated


def write_tokenizer_config(
    directory: Path, special_tokens: Mapping[str, str], chat_template: str | dict[str, str] | None
) -> None:
    """Write files that `read_special_tokens`, `read_chat_template` and transformers read. Raises OSError."""
    stated: dict[str, Any] = {**special_tokens, "tokenizer_class": "PreTrainedTokenizerFast"}
    stated["clean_up_tokenization_spaces"] = False
    if isinstance(chat_template, str):
        (directory / _CHAT_TEMPLATE).write_text(chat_template, encoding="utf-8")
    elif chat_template is not None:
        stated["chat_template"] = [{"name": name, "template": text} for name, text in chat_template.items()]
    (directory / CONFIG).write_text(json.dumps(stated, ensure_ascii=False, indent=2), encoding="utf-8")


def _read(path: Path) -> dict[str, Any]:
    """The JSON object in a file; an empty one where there is no such file."""
    value = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if not isinstance(value, dict):
        raise InputError(f"{path.name} is not a JSON object: fetch it again")
    return value


def _is_of_model(key: str) -> bool:
    """Tell whether a key of a file is the name of a special token that only some models have."""
    return key.endswith("_token") and key not in _NAMES


def _is_token(value: Any) -> bool:
    """Tell whether a value is a token, not a switch such as that of "add_bos_token"."""
    return isinstance(value, str) or (isinstance(value, dict) and "content" in value)


def _named(tokens: Any) -> dict[str, Any]:
    """The special tokens by name of an entry that may also be a list of tokens without names."""
    return tokens if isinstance(tokens, dict) else {}


def _text(name: str, token: Any) -> str:
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        raise InputError(f"its {name} is no text: fetch {CONFIG} and {_SPECIAL_TOKENS} again")
    return text
