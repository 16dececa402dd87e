"""Names of special tokens and chat templates of tokenizer files, against what transformers reads from them."""

from __future__ import annotations

import json
import shutil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from thorough import some_draws
from tiny_tokenizers import SPECIAL_TOKENS, make_tiny_tokenizer

from batchgen.core.errors import InputError
from batchgen.models.files import ModelFiles
from batchgen.models.tokenizers.loading import load_parts
from batchgen.models.tokenizers.tokenizer_config import read_chat_template, read_special_tokens, write_tokenizer_config

NAMES = ["bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token"]
OF_MODELS = ["image_token", "boi_token", "think_token"]
token = st.sampled_from([*SPECIAL_TOKENS, "the", "<of no vocabulary>"])


@st.composite
def spelled(draw, typed):
    """A token as files spell it: its text, or an object of its text and switches."""
    text = draw(token)
    if draw(st.booleans()):
        return text
    flags = {"lstrip": False, "normalized": False, "rstrip": draw(st.booleans()), "single_word": False}
    return {"content": text, **flags} | ({"__type": "AddedToken", "special": True} if typed else {})


def named(names, typed, **more):
    return st.fixed_dictionaries({}, optional={name: spelled(typed) for name in names} | more)


configs = named(
    [*NAMES, *OF_MODELS], True,
    pad_token=st.none() | spelled(True),
    add_bos_token=st.booleans(),
    add_eos_token=st.booleans(),
    clean_up_tokenization_spaces=st.booleans(),
    model_max_length=st.just(10**30),
    tokenizer_class=st.sampled_from(["LlamaTokenizer", "PreTrainedTokenizerFast"]),
    additional_special_tokens=st.lists(token, max_size=2, unique=True),
    extra_special_tokens=st.lists(token, max_size=2, unique=True) | named(OF_MODELS, True),
    added_tokens_decoder=st.just({"0": {"content": SPECIAL_TOKENS[0], "special": True}}),
    chat_template=st.sampled_from(["{{ messages }}", [{"name": "default", "template": "a"}], None])
    | st.just([{"name": "default", "template": "a"}, {"name": "tool_use", "template": "b"}]),
)  # fmt: skip
older_files = named(
    [*NAMES, *OF_MODELS], False, additional_special_tokens=st.lists(token, max_size=2, unique=True)
) | named(["bos_token"], False, extra_special_tokens=st.dictionaries(st.sampled_from(OF_MODELS), token))
templates = st.dictionaries(st.sampled_from(["default", "rag"]), st.just("{{ messages[0] }}"))


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """A directory with a tokenizer.json alone."""
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tiny_tokenizer(folder)
    for path in folder.iterdir():
        if path.name != "tokenizer.json":
            path.unlink()
    return folder


def reference(folder):
    """The tokenizer of transformers whose class changes nothing."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(str(folder))


def write(folder, config, older, files):
    """Write the files of a tokenizer, each of them only where it is not None."""
    for name, value in (("tokenizer_config.json", config), ("special_tokens_map.json", older)):
        (folder / name).unlink(missing_ok=True)
        if value is not None:
            (folder / name).write_text(json.dumps(value))
    shutil.rmtree(folder / "additional_chat_templates", ignore_errors=True)
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    for name, text in files.items():
        path = folder / ("chat_template.jinja" if name == "default" else f"additional_chat_templates/{name}.jinja")
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)


@settings(max_examples=some_draws(60), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(config=st.none() | configs, older=st.none() | older_files, files=templates)
def test_names_and_templates_are_those_of_transformers(plain, config, older, files):
    write(plain, config, older, files)
    expected = reference(plain)
    assert read_special_tokens(plain) == expected.special_tokens_map
    assert read_chat_template(plain) == expected.chat_template
    parts = load_parts(ModelFiles(plain, "hf", "x"))
    known = expected.backend_tokenizer.token_to_id
    for name in NAMES:
        if (text := expected.special_tokens_map.get(name)) and parts.backend.token_to_id(text) is not None:
            assert parts.special_id(name) == known(text)


def test_what_is_written_is_read_by_transformers_and_batchgen(plain):
    for template in (None, "{{ messages }}\n é", {"default": "a", "tool_use": "b"}):
        write(plain, None, None, {})
        names = {"bos_token": "<|im_start|>", "image_token": "<|pad|>"}
        write_tokenizer_config(plain, names, template)
        expected = reference(plain)
        assert read_special_tokens(plain) == expected.special_tokens_map == names
        assert read_chat_template(plain) == expected.chat_template == template


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("tokenizer_config.json", "{"),
        ("tokenizer_config.json", "[1]"),
        ("tokenizer_config.json", '{"bos_token": 3}'),
        ("tokenizer_config.json", '{"chat_template": 3}'),
        ("tokenizer_config.json", '{"chat_template": [{"name": "x"}]}'),
        ("tokenizer_config.json", '{"chat_template": [{"name": "default", "template": 3}]}'),
        ("special_tokens_map.json", '{"eos_token": {"id": 3}}'),
        ("special_tokens_map.json", "\udcff"),
    ],
)
def test_damaged_files_are_one_line(plain, name, text):
    write(plain, None, None, {})
    (plain / name).write_bytes(text.encode("utf-8", "surrogateescape"))
    with pytest.raises(InputError, match="cannot load the tokenizer of") as caught:
        load_parts(ModelFiles(plain, "hf", "x"))
    assert "\n" not in str(caught.value)
