"""GGUFs in several files: all parts are one model, whichever is passed.

A part that is missing or of another model is named.
"""

import json
import shutil
import struct

import gguf
import pytest
import torch
from tiny_gguf import mixed_types, write_tiny_gguf
from tiny_models import make_tiny_model
from tiny_tokenizers import make_tiny_tokenizer

import batchgen
from batchgen.core.errors import InputError
from batchgen.models.checkpoint import open_checkpoint
from batchgen.models.convert import convert
from batchgen.models.files import read_config, resolve_model, resolve_weights, weight_paths, weight_tensors
from batchgen.models.formats.gguf import tensors as gguf_tensors
from batchgen.models.identity import model_identity
from batchgen.models.tokenizers.loading import load_tokenizer

SIZES = {"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2}
KINDS = {"numbers": "F32", "one format": "Q8_0", "formats of their own": mixed_types("qwen2")}
OPTIONS = {"dtype": "float32", "cpu_memory": "4GiB", "max_tokens": 8}


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("BATCHGEN_CACHE", str(tmp_path / "cache"))


def make(directory, tensor_type="F32", *, family="qwen2", tensors_per_part=7, **fields):
    """A model in one file and in parts: the file, and the first part."""
    directory.mkdir(exist_ok=True)
    tokenizer = make_tiny_tokenizer(directory / "hf")
    model = make_tiny_model(family, directory / "hf", **SIZES | fields)
    whole = write_tiny_gguf(model, directory / "whole.gguf", tensor_type=tensor_type, tokenizer=tokenizer)
    first = write_tiny_gguf(
        model, directory / "model.gguf", tensor_type=tensor_type, tokenizer=tokenizer, tensors_per_part=tensors_per_part
    )
    return whole, first


def parts_of(first):
    return sorted(first.parent.glob("model-*-of-*.gguf"))


def refusal(path) -> str:
    with pytest.raises(InputError) as caught:
        open_checkpoint(resolve_model(str(path)))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def state_number(path, key, value):
    """Put a number of 16 or 32 bits into a GGUF's metadata."""
    data = path.read_bytes()
    at = data.index(key.encode()) + len(key)
    (kind,) = struct.unpack_from("<I", data, at)
    code = {gguf.GGUFValueType.UINT16: "<H", gguf.GGUFValueType.INT32: "<i"}[kind]
    path.write_bytes(data[: at + 4] + struct.pack(code, value) + data[at + 4 + struct.calcsize(code) :])


def assert_same_weights(ours, theirs):
    for which, layer in (("embeddings", 0), ("head", 0), *(("layer", j) for j in range(ours.config.num_layers))):
        found, expected = ours.load(which, layer, torch.float32), theirs.load(which, layer, torch.float32)
        assert found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("kind", KINDS)
def test_all_parts_are_one_model(tmp_path, kind):
    whole, first = make(tmp_path, KINDS[kind])
    parts, expected = parts_of(first), resolve_model(str(whole))
    assert len(parts) > 3 and first == parts[0]
    found = [resolve_model(str(part)) for part in parts]
    assert set(found) == {found[0]} and found[0].name == "model" and weight_paths(found[0]) == parts
    assert read_config(found[0]) == read_config(expected)
    assert resolve_weights(found[0], "native") == resolve_weights(expected, "native")
    assert_same_weights(open_checkpoint(found[0]), open_checkpoint(expected))
    assert load_tokenizer(found[0]).identity() == load_tokenizer(expected).identity()
    stores = [convert(files, tmp_path / f"store{i}", dtype="float32") for i, files in enumerate((found[0], expected))]
    files = [sorted(store.path.glob("*.safetensors")) for store in stores]
    assert [f.read_bytes() for f in files[0]] == [f.read_bytes() for f in files[1]] and files[0]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("weights", ["native", "dequantized"])
def test_a_run_gives_the_rows_of_one_file(tmp_path, monkeypatch, kind, weights):
    """As found, where matrices are packed while they are read, and expanded."""
    monkeypatch.chdir(tmp_path)
    whole, first = make(tmp_path, KINDS[kind])
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"prompt": "The ferry " * n}) + "\n" for n in range(1, 5)))
    for name, path in (("whole", whole), ("parts", first)):
        report = batchgen.run(str(path), "rows.jsonl", f"{name}.jsonl", weights=weights, **OPTIONS)
        assert report["rows_ok"] == 4
    assert (tmp_path / "whole.jsonl").read_text() == (tmp_path / "parts.jsonl").read_text()


def test_experts_of_a_layer_may_lie_in_several_parts(tmp_path):
    sizes = {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 256}
    whole, first = make(tmp_path, "Q4_0", family="qwen2_moe", tensors_per_part=2, **sizes)
    assert_same_weights(open_checkpoint(resolve_model(str(first))), open_checkpoint(resolve_model(str(whole))))


def test_a_job_heeds_every_part(tmp_path):
    _, first = make(tmp_path)
    moved = tmp_path / "moved"
    moved.mkdir()
    for part in parts_of(first):
        shutil.copy(part, moved)
    files = resolve_model(str(first))
    before = model_identity(files)
    assert before == model_identity(resolve_model(str(moved / first.name)))
    for part in parts_of(first):
        data = part.read_bytes()
        part.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        changed = model_identity(files)
        assert changed["config_sha256"] == before["config_sha256"] and changed != before
        part.write_bytes(data)
    assert model_identity(files) == before


def test_the_next_layer_is_read_ahead_in_all_its_files(tmp_path, monkeypatch):
    _, first = make(tmp_path)
    files, asked = resolve_model(str(first)), []
    monkeypatch.setattr(gguf_tensors, "read_ahead", lambda path, start, stop: asked.append((path, start, stop)))
    open_checkpoint(files).load_layer(1, torch.float32)
    own = [info for name, info in weight_tensors(files).items() if name.startswith("blk.1.")]
    assert len({info.path for info in own}) > 1
    for info in own:
        assert any(
            p == info.path and start <= info.offset and info.offset + info.num_bytes <= stop for p, start, stop in asked
        )


def test_a_part_that_is_missing_is_named(tmp_path):
    _, first = make(tmp_path)
    for part in parts_of(first):
        part.rename(tmp_path / "away")
        for given in parts_of(first)[:2]:
            assert f"{part} is missing: the model has" in refusal(given)
        (tmp_path / "away").rename(part)
    open_checkpoint(resolve_model(str(first)))


def test_a_part_of_another_model_is_named(tmp_path):
    _, first = make(tmp_path)
    parts = parts_of(first)
    second, data = parts[1], parts[1].read_bytes()
    shutil.copy(parts[2], second)
    assert f"{second} has the name of part 2, but its split.no is 2, not 1: fetch it again" in refusal(first)
    second.write_bytes(data)
    state_number(second, "split.count", 9)
    assert f"{second} is of a GGUF in 9 parts" in refusal(first)
    second.write_bytes(data)
    state_number(second, "split.tensors.count", 99)
    assert f"{second} is of a model with 99 tensors" in refusal(first)
    for part in parts:
        state_number(part, "split.tensors.count", 99)
    assert "split.tensors.count says 99" in refusal(first)


def test_a_tensor_that_is_there_twice_is_named(tmp_path):
    _, first = make(tmp_path)
    parts = parts_of(first)
    shutil.copy(parts[2], parts[1])
    state_number(parts[1], "split.no", 1)
    message = refusal(first)
    assert "tensor blk." in message and str(parts[1]) in message and str(parts[2]) in message


def test_names_and_counts_must_agree(tmp_path):
    whole, first = make(tmp_path)
    other = tmp_path / "renamed.gguf"
    shutil.copy(first, other)
    assert f"NAME-00001-of-0000{len(parts_of(first))}.gguf" in refusal(other)
    named = tmp_path / "part-00001-of-00002.gguf"
    shutil.copy(whole, named)
    assert f"{named} has the name of a GGUF in 2 parts, but says that there are 1" in refusal(named)


@pytest.mark.parametrize("count", [None, 0, 1])
def test_one_part_of_one_is_a_model(tmp_path, count):
    """Merged files say 0."""
    whole, _ = make(tmp_path)
    named = tmp_path / "model-00001-of-00001.gguf"
    if count is None:
        shutil.copy(whole, named)
    else:
        data = whole.read_bytes()
        pairs, key = struct.unpack_from("<Q", data, 16)[0], b"split.count"
        entry = struct.pack("<Q", len(key)) + key + struct.pack("<IH", gguf.GGUFValueType.UINT16, count)
        entry += struct.pack("<Q", 3) + b"pad" + struct.pack("<IQ", gguf.GGUFValueType.STRING, 0)
        pad = -len(entry) % 32
        entry = entry[:-8] + struct.pack("<Q", pad) + bytes(pad)
        named.write_bytes(data[:16] + struct.pack("<Q", pairs + 2) + entry + data[24:])
    files = resolve_model(str(named))
    assert files.name == "model"
    assert_same_weights(open_checkpoint(files), open_checkpoint(resolve_model(str(whole))))
