"""What every package uses: texts that can be encoded, digests that do not change, locks, whole files."""

import gc
import hashlib
import json
import os

import pytest

from batchgen.core.atomic_file import write_atomically
from batchgen.core.digest import json_sha256
from batchgen.core.errors import BatchgenError, InputError, OtherSettings, TooManyFailed, reason_of
from batchgen.core.file_lock import LockHeld, lock_file
from batchgen.core.rare_collections import collected_rarely
from batchgen.core.text import repair_surrogates


@pytest.mark.parametrize("kind", [BatchgenError, InputError, OtherSettings, TooManyFailed])
def test_an_error_is_one_line_whatever_the_names_in_it(kind):
    error = kind("no adapter_config.json in one\ntwo\r\x1b[31m\u2028: give another --lora")
    assert str(error) == "no adapter_config.json in one\\ntwo\\r\\x1b[31m\\u2028: give another --lora"
    assert len(f"{error}".splitlines()) == 1 and reason_of(error) == str(error)


@pytest.mark.parametrize(
    ("text", "repaired"),
    [
        ("plain é 😀", "plain é 😀"),
        ("cut \ud83d", "cut \ufffd"),
        ("\ude00 cut", "\ufffd cut"),
        ("\ud83d\ude00", "😀"),
        ("", ""),
    ],
)
def test_lone_surrogates_become_a_replacement_character(text, repaired):
    assert repair_surrogates(text) == repaired
    nest = [(text, 1), {"k": [text, None]}, {text: 2.5}]
    assert repair_surrogates(nest) == [(repaired, 1), {"k": [repaired, None]}, {repaired: 2.5}]


def test_digests_go_by_the_value():
    a, b = {"x": 1, "y": [2, "é"]}, {"y": [2, "é"], "x": 1}
    assert json_sha256(a) == json_sha256(b) == hashlib.sha256(json.dumps(a, sort_keys=True).encode()).hexdigest()
    assert json_sha256(a) != json_sha256(a | {"x": 2})
    assert json_sha256({1, 2}, default=sorted) == json_sha256([1, 2])


def test_one_holder_a_lock(tmp_path):
    held = lock_file(tmp_path / "lock")
    with pytest.raises(LockHeld, match=f"process {os.getpid()} on "):
        lock_file(tmp_path / "lock")
    os.close(held)
    os.close(lock_file(tmp_path / "lock"))


@pytest.mark.parametrize("contended", [False, True])
def test_a_file_is_replaced_whole(tmp_path, contended):
    for content in (b"old", b"new"):
        write_atomically(tmp_path / "file", content, contended=contended)
        assert (tmp_path / "file").read_bytes() == content
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("the first line\nand more", "the first line"),
        ("\n  indented\n", "indented"),
        (
            "Validation error for field 'x':\n    TypeError: expected int\n  more",
            "Validation error for field 'x': TypeError: expected int",
        ),
        ("ends here:", "ends here:"),
        ("", "ValueError"),
    ],
)
def test_a_reason_does_not_end_at_its_colon(text, reason):
    assert reason_of(ValueError(text)) == reason


def test_the_reason_of_a_validation_error_of_transformers_is_told():
    from transformers import LlamaConfig

    with pytest.raises(Exception) as caught:  # of a kind of its own, which its library does not promise
        LlamaConfig(hidden_size="64")
    assert "hidden_size" in reason_of(caught.value) and "str" in reason_of(caught.value)


@pytest.fixture
def threshold():
    """Sets the threshold of garbage collections, which is the process's own again at the end."""
    before = gc.get_threshold()
    yield gc.set_threshold
    gc.set_threshold(*before)


def test_garbage_is_searched_for_rarely_until_the_last_of_several_blocks_ends(threshold):
    threshold(500, 7, 8)
    first, second = collected_rarely(), collected_rarely()
    with first:
        assert gc.get_threshold() == (500_000, 7, 8)
        second.__enter__()
    assert gc.get_threshold() == (500_000, 7, 8)
    second.__exit__(None, None, None)
    assert gc.get_threshold() == (500, 7, 8)


@pytest.mark.parametrize("young", [0, 1_000_000])
def test_a_process_that_searches_for_garbage_more_rarely_or_never_goes_on_so(threshold, young):
    threshold(young, 10, 10)
    with collected_rarely():
        assert gc.get_threshold() == (young, 10, 10)
    assert gc.get_threshold() == (young, 10, 10)
