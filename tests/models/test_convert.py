"""Conversion into a weight store: from everything, through everything that can go wrong, to the same tokens."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from model_tables import FAMILIES
from thorough import quick_or, some_of
from tiny_gguf import write_tiny_gguf
from tiny_models import make_tiny_model
from tiny_tokenizers import make_tiny_tokenizer

import batchgen
from batchgen.cli import commands
from batchgen.core.errors import BatchgenError, InputError
from batchgen.models import convert as converting
from batchgen.models.checkpoint import open_checkpoint
from batchgen.models.convert import convert
from batchgen.models.files import read_config, resolve_for_planning, resolve_model, weight_paths
from batchgen.models.identity import model_identity
from batchgen.models.kept_stores import find_or_convert, store_path
from batchgen.models.store.weight_store import open_store
from batchgen.models.tokenizers.loading import load_tokenizer

MESSAGES = [{"role": "user", "content": "Which day has two sailings?"}]


@pytest.fixture(scope="module")
def llama(tiny_models):
    return resolve_model(str(tiny_models("llama")[0]))


@pytest.fixture(scope="module")
def reference(llama, tmp_path_factory):
    """A whole store of the model in fp32; not to be changed."""
    return convert(llama, tmp_path_factory.mktemp("reference") / "store", dtype="float32").path


def content(store: Path) -> dict[str, bytes]:
    """Everything in a store but its lock."""
    return {
        str(path.relative_to(store)): path.read_bytes()
        for path in sorted(store.rglob("*"))
        if path.is_file() and path.name != "convert.lock"
    }


def assert_same_weights(first, second, dtype=torch.float32) -> None:
    ours, theirs = open_checkpoint(first), open_checkpoint(second)
    pairs = [
        (ours.load_embeddings(dtype), theirs.load_embeddings(dtype)),
        (ours.load_head(dtype), theirs.load_head(dtype)),
    ]
    pairs += [(ours.load_layer(j, dtype), theirs.load_layer(j, dtype)) for j in range(ours.config.num_layers)]
    for mine, other in pairs:
        assert mine.keys() == other.keys()
        for name in mine:
            assert torch.equal(mine[name], other[name]), name


# ---- sources


@pytest.mark.parametrize("family", some_of(FAMILIES, 10, "stand-ins"))
def test_a_store_stands_in_for_its_model(tmp_path, family):
    """The same greedy tokens and the same tokenizer, the source gone, from a sharded checkpoint."""
    make_tiny_model(family, tmp_path / "model", max_shard_size="60KB")
    files = resolve_model(str(tmp_path / "model"))

    def answers(model):
        engine = batchgen.Engine(str(model), dtype="float32", sampling=batchgen.SamplingParams(max_tokens=6))
        requests = [batchgen.Request(prompt) for prompt in ("The ferry left", "A restaurant by the quay", MESSAGES)]
        return {c.index: c.samples[0].text for c in engine.generate(requests)}, engine.parts.tokenizer.identity()

    expected = answers(files.path)
    store = convert(files, tmp_path / "store", dtype="float32")
    shutil.rmtree(files.path)
    found = resolve_model(str(store.path))
    assert (found.kind, found.name, found.path) == ("store", "store", store.path)
    assert answers(store.path) == expected
    assert weight_paths(found) == [file.path for file in store.files]
    assert resolve_for_planning(str(store.path))[1] == read_config(found) == store.config


@pytest.mark.parametrize("tensor_type", ["F32", "Q8_0"])
def test_a_gguf(tmp_path, monkeypatch, tensor_type):
    monkeypatch.setenv("BATCHGEN_CACHE", str(tmp_path / "cache"))
    model = make_tiny_model("llama", tmp_path / "model")
    hf = make_tiny_tokenizer(tmp_path / "model")
    write_tiny_gguf(model, tmp_path / "tiny.gguf", tensor_type=tensor_type, tokenizer=hf)
    files = resolve_model(str(tmp_path / "tiny.gguf"))
    store = convert(files, tmp_path / "store", dtype="float32")
    assert store.config == read_config(files) or tensor_type == "Q8_0"  # which states bfloat16
    assert_same_weights(resolve_model(str(store.path)), files)
    ours, theirs = load_tokenizer(resolve_model(str(store.path))), load_tokenizer(files)
    assert ours.identity() == theirs.identity() and ours.eos_token_ids == theirs.eos_token_ids
    assert ours.encode_chat(MESSAGES) == theirs.encode_chat(MESSAGES)


@pytest.mark.parametrize("kind", ["files of transformers", "GGUF in Q8_0"])
def test_tables_that_are_written_some_rows_at_a_time_are_the_same_bytes(tmp_path, monkeypatch, llama, kind):
    """Embeddings and output matrix are never in memory as a whole."""
    files = llama
    if kind != "files of transformers":
        model = make_tiny_model("llama", tmp_path / "model")
        tokenizer = make_tiny_tokenizer(tmp_path / "model")
        write_tiny_gguf(model, tmp_path / "tiny.gguf", tensor_type="Q8_0", tokenizer=tokenizer)
        files = resolve_model(str(tmp_path / "tiny.gguf"))
    stores, pieces = [], []
    monkeypatch.setattr(converting, "_in_pieces", counting_pieces(pieces))
    for table_bytes in (1 << 30, 1000):
        monkeypatch.setattr(converting, "_TABLE_BYTES", table_bytes)
        stores.append(content(convert(files, tmp_path / str(table_bytes), dtype="float32").path))
    assert stores[0] == stores[1]
    whole, parts = pieces[: len(pieces) // 2], pieces[len(pieces) // 2 :]
    assert whole and all(rows == 1 for rows in whole) and all(rows > 5 for rows in parts)


def counting_pieces(counts):
    """`_in_pieces`, with the number of pieces of each table added to a list."""
    in_pieces = converting._in_pieces

    def counted(*given):
        ((name, pieces),) = in_pieces(*given).items()
        pieces = list(pieces)
        counts.append(len(pieces))
        return {name: iter(pieces)}

    return counted


def test_a_model_without_a_tokenizer(tmp_path):
    model = make_tiny_model("llama", tmp_path / "model")
    write_tiny_gguf(model, tmp_path / "tiny.gguf")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "model" / name).unlink()
    for source, target in (("model", "a"), ("tiny.gguf", "b")):
        store = convert(resolve_model(str(tmp_path / source)), tmp_path / target, dtype="float32")
        with pytest.raises(InputError, match="no tokenizer"):
            load_tokenizer(resolve_model(str(store.path)))


def test_a_store_of_a_store(llama, tmp_path):
    """In another format: the same as from the source, where the first format loses nothing."""
    first = convert(llama, tmp_path / "first", dtype="float32")
    direct = convert(llama, tmp_path / "direct", dtype="bfloat16", weights="int4")
    again = convert(resolve_model(str(first.path)), tmp_path / "again", dtype="bfloat16", weights="int4")
    assert [p.read_bytes() for p in weight_paths(resolve_model(str(again.path)))] == [
        p.read_bytes() for p in weight_paths(resolve_model(str(direct.path)))
    ]
    found = resolve_model(str(again.path))
    assert load_tokenizer(found).identity() == load_tokenizer(llama).identity()
    assert (again.dtype, again.weight_format, read_config(found).dtype) == ("bfloat16", "int4", "bfloat16")
    back = convert(found, tmp_path / "back", dtype="float32")
    assert_same_weights(resolve_model(str(back.path)), found)


def test_identity_is_of_the_content(llama, reference, tmp_path):
    shutil.copytree(reference, tmp_path / "elsewhere")
    first, second = (model_identity(resolve_model(str(path))) for path in (reference, tmp_path / "elsewhere"))
    assert first == second == json.loads(json.dumps(first))
    other = convert(llama, tmp_path / "other", dtype="bfloat16")
    assert model_identity(resolve_model(str(other.path))) != first


# ---- going on


def test_the_second_time_nothing_is_written(llama, reference, tmp_path):
    target = tmp_path / "store"
    shutil.copytree(reference, target)
    before = {path: path.stat() for path in target.rglob("*") if path.name != "convert.lock"}
    seen = []
    store = convert(llama, target, dtype="float32", on_layer=lambda done, total: seen.append((done, total)))
    assert seen == [(1, 3), (2, 3), (3, 3)] and store == open_store(target)
    for path, stat in before.items():
        assert (path.stat().st_ino, path.stat().st_mtime_ns) == (stat.st_ino, stat.st_mtime_ns)


def test_what_is_missing_or_damaged_is_made_anew(llama, reference, tmp_path):
    target = tmp_path / "store"
    shutil.copytree(reference, target)
    expected = content(target)
    (target / "layer-00000.safetensors").unlink()
    (target / "head.safetensors").write_bytes(b"short")
    shutil.rmtree(target / "tokenizer")
    damaged = bytearray(expected["layer-00002.safetensors"])
    damaged[-5000] ^= 4
    (target / "layer-00002.safetensors").write_bytes(damaged)
    (target / "layer-00001.safetensors.tmp").write_bytes(b"left by a crash")
    kept = {name: (target / name).stat().st_ino for name in ("embeddings.safetensors", "layer-00001.safetensors")}
    convert(llama, target, dtype="float32")
    assert content(target) == expected
    assert kept == {name: (target / name).stat().st_ino for name in kept}


ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
KILLED_EVERYWHERE = """
import os, shutil, signal, sys
from pathlib import Path
import torch
torch.set_num_threads(1)  # forked children have no other threads
from batchgen.models.convert import convert
from batchgen.models.files import resolve_model
from batchgen.core.errors import InputError
from batchgen.models.store.weight_store import open_store
from test_convert import content

files, reference, target = resolve_model(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3])
expected = content(reference)

def killing(function, countdown):
    def call(*args, **kwargs):
        countdown[0] -= 1
        if countdown[0] < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return function(*args, **kwargs)
    return call

step = int(sys.argv[4])
for point in range(0, 1000, step):
    child = os.fork()
    if child == 0:
        countdown = [point]
        for name in ("fsync", "fdatasync", "replace", "rename", "unlink", "mkdir", "open"):
            setattr(os, name, killing(getattr(os, name), countdown))
        convert(files, target, dtype="float32")
        os._exit(0)
    status = os.waitpid(child, 0)[1]
    if status == 0:
        break
    assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL, status
    try:
        open_store(target)
        assert content(target) == expected  # never a store before it is one
    except InputError:
        pass
    if point // step % 2:  # once from where it was killed, once through the next kill, too
        assert convert(files, target, dtype="float32") == open_store(target)
        assert content(target) == expected, sorted(content(target))
        shutil.rmtree(target)
assert content(target) == expected
print(point)
"""


def test_killed_anywhere_and_run_again(llama, reference, tmp_path):
    """kill -9 before every file that is opened, synced, renamed or removed."""
    step = str(quick_or(3, 1))  # in `make test` every third of these moments
    script = [sys.executable, "-c", KILLED_EVERYWHERE, str(llama.path), str(reference), str(tmp_path / "store"), step]
    found = subprocess.run(script, capture_output=True, text=True, env=ENVIRONMENT)
    assert found.returncode == 0, found.stderr
    assert int(found.stdout) > 20


def test_an_interrupted_4_bit_store_is_finished_byte_for_byte(llama, tmp_path):
    """Layers are packed by what those before them make, which a second start has to know."""
    whole = convert(llama, tmp_path / "whole", dtype="float32", weights="int4")

    def interrupt(done, total):
        if done == 1:
            raise KeyboardInterrupt

    target = tmp_path / "store"
    with pytest.raises(KeyboardInterrupt):
        convert(llama, target, dtype="float32", weights="int4", on_layer=interrupt)
    convert(llama, target, dtype="float32", weights="int4")
    assert content(target) == content(whole.path)


def test_finished_files_survive_an_interruption(llama, reference, tmp_path):
    target = tmp_path / "store"

    def interrupt(done, total):
        if done == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(llama, target, dtype="float32", on_layer=interrupt)
    with pytest.raises(InputError, match="has not finished: run its `batchgen convert` again"):
        resolve_model(str(target))
    with pytest.raises(InputError, match="has not finished"):
        resolve_for_planning(str(target))
    layers = ("layer-00000.safetensors", "layer-00001.safetensors")
    kept = {name: (target / name).stat().st_ino for name in layers}
    convert(llama, target, dtype="float32")
    assert content(target) == content(reference)
    assert kept == {name: (target / name).stat().st_ino for name in layers}


def test_a_model_without_anything_behind_its_layers_has_a_store(tmp_path):
    """OPT with norms after each layer, tied, its embeddings as wide as its layers: the head's file has no tensor."""
    make_tiny_model("opt", tmp_path / "opt", do_layer_norm_before=False)
    files = resolve_model(str(tmp_path / "opt"))
    before = model_identity(files)
    for weights in ("native", "int4"):
        store = convert(files, tmp_path / weights, dtype="float32", weights=weights)
        assert convert(files, tmp_path / weights, dtype="float32", weights=weights).path == store.path
        assert store.head.num_bytes == store.head.path.stat().st_size
    assert_same_weights(files, resolve_model(str(tmp_path / "native")))
    tokens = []
    for path in (files.path, tmp_path / "native"):
        with batchgen.Engine(str(path), dtype="float32", cpu_memory="4GiB", max_model_len=64) as engine:
            tokens += [[each.samples[0].token_ids for each in engine.generate([batchgen.Request([5, 6, 7])])]]
    assert tokens[0] == tokens[1] and before == model_identity(files)


# ---- what is refused


def test_a_directory_that_holds_something_else(llama, reference, tmp_path):
    target = tmp_path / "store"
    shutil.copytree(reference, target)
    before = content(target)
    make_tiny_model("llama", tmp_path / "llama", seed=5)
    make_tiny_model("opt", tmp_path / "opt", num_hidden_layers=2)
    other, opt = resolve_model(str(tmp_path / "llama")), resolve_model(str(tmp_path / "opt"))

    def refusal(files, dtype="float32", weights="auto", target=target, overwrite=False):
        with pytest.raises(InputError) as caught:
            convert(files, target, dtype=dtype, weights=weights, overwrite=overwrite)
        assert "\n" not in str(caught.value)
        return str(caught.value)

    name = llama.name
    assert f"holds {name} in float32, not {name} in bfloat16" in refusal(llama, "bfloat16")
    assert f"not {name} in int4 for float32: give another directory, or replace it with --over" in refusal(
        llama, weights="int4"
    )
    assert f"holds {name} in float32, not llama in float32" in refusal(other)
    assert "not opt in float32" in refusal(opt)
    assert content(target) == before
    assert "is the model itself" in refusal(llama, target=llama.path, overwrite=True)
    assert "is not empty and no weight store" in refusal(llama, target=tmp_path / "opt", overwrite=True)
    assert "float8" in refusal(llama, "float8", target=tmp_path / "new")
    assert "int3" in refusal(llama, weights="int3", target=tmp_path / "new")
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert "convert into another directory, which you can write to" in refusal(llama, target=blocked)
    # replaced when told so, layers that the other model does not have included
    convert(opt, target, dtype="float32", overwrite=True)
    fresh = convert(opt, tmp_path / "fresh", dtype="float32")
    assert content(target) == content(fresh.path)
    (target / "manifest.json").write_text("{")
    assert "--overwrite" in refusal(opt)
    convert(opt, target, dtype="float32", overwrite=True)
    assert content(target) == content(fresh.path)


def test_two_conversions_at_once(llama, tmp_path):
    target = tmp_path / "store"
    refused = []

    def second(done, total):
        with pytest.raises(
            BatchgenError, match=f"another batchgen is converting into .*process {os.getpid()} on"
        ) as caught:
            convert(llama, target, dtype="float32")
        refused.append(str(caught.value))

    convert(llama, target, dtype="float32", on_layer=second)
    assert len(refused) == 3
    with open(target / "convert.lock", "rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # free again


@pytest.mark.parametrize("finishes", [True, False])
def test_jobs_that_need_one_store_at_once_share_it(llama, tmp_path, reference, finishes, logged):
    """The second waits for the first, and makes the store itself where the first is stopped."""
    target = store_path(tmp_path, llama, "float32", "native")
    found, deadline_s = [], time.monotonic() + 60

    def second() -> None:
        found.append(find_or_convert(llama, tmp_path, "float32"))

    def first(done: int, total: int) -> None:
        if done == 2:
            other.start()
            while not any(line.startswith("waiting for ") for line in logged):
                assert time.monotonic() < deadline_s
                time.sleep(0.01)
            if not finishes:
                raise KeyboardInterrupt

    other = threading.Thread(target=second)
    with contextlib.nullcontext() if finishes else pytest.raises(KeyboardInterrupt):
        convert(llama, target, dtype="float32", on_layer=first)
    other.join(60)
    assert content(found[0].path) == content(reference)
    assert [line.split()[0] for line in logged] == ["waiting", *([] if finishes else ["converting"])]
    assert f"waiting for process {os.getpid()} on" in logged[0]


# ---- a full disk


def test_a_disk_that_is_too_small_is_refused_at_once(llama, reference, small_disk):
    target = small_disk("size=500k") / "store"
    with pytest.raises(
        BatchgenError, match=r"needs [\d,]+ bytes .* are free: free space and run the same command again"
    ):
        convert(llama, target, dtype="float32")
    assert not list(target.glob("*.safetensors"))
    small_disk("size=32m")
    convert(llama, target, dtype="float32")
    assert content(target) == content(reference)


def test_a_disk_that_fills_up(llama, reference, small_disk):
    disk = small_disk("size=32m")
    target, filler = disk / "store", disk / "filler"

    def fill(done, total):
        if done == 2:
            free = os.statvfs(disk)
            filler.write_bytes(bytes(free.f_bavail * free.f_bsize - 40_000))

    with pytest.raises(BatchgenError) as caught:
        convert(llama, target, dtype="float32", on_layer=fill)
    store = open_store(reference)
    missing = store.layers[2].num_bytes + store.head.num_bytes
    assert f"({missing:,} bytes, " in str(caught.value) and "No space left on device" in str(caught.value)
    assert "run the same command again" in str(caught.value) and "\n" not in str(caught.value)
    assert not list(target.glob("*.tmp"))
    kept = {path: path.stat().st_ino for path in target.glob("layer-*.safetensors")}
    assert len(kept) == 2
    filler.unlink()
    convert(llama, target, dtype="float32")
    assert content(target) == content(reference)
    assert kept == {path: path.stat().st_ino for path in kept}


def test_a_disk_that_is_full_when_the_tokenizer_is_copied_has_nothing_of_it(llama, reference, tmp_path, monkeypatch):
    target, copyfile = tmp_path / "store", shutil.copyfile

    def filling(source, copy):
        copyfile(source, copy)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(copy))

    with monkeypatch.context() as patch, pytest.raises(BatchgenError, match="free space and run the same command"):
        patch.setattr(shutil, "copyfile", filling)
        convert(llama, target, dtype="float32")
    assert sorted(path.name for path in target.iterdir()) == ["convert.lock", "manifest.partial.json"]
    convert(llama, target, dtype="float32")
    assert content(target) == content(reference)


def test_a_job_whose_store_has_no_room_is_told_of_its_own_option(llama, small_disk):
    with pytest.raises(BatchgenError, match=r"and run the same command again, or give another --offload-dir$"):
        find_or_convert(llama, small_disk("size=500k"), "float32")


@pytest.mark.parametrize("inodes", range(1, 5))
def test_a_disk_without_room_for_one_more_file_is_full(llama, small_disk, inodes):
    """The directories of stores and of this store, its lock, and a first manifest come one after the other."""
    disk = small_disk(f"size=32m,nr_inodes={inodes}")
    with pytest.raises(BatchgenError, match=r"No space left on device.*: free space and run the same command again$"):
        find_or_convert(llama, disk, "float32")
    assert not list(disk.rglob("*.tmp"))


# ---- where stores are kept, and the command


def test_a_store_that_others_may_write_to_is_made_anew_beside_it(llama, tmp_path, logged):
    """Whoever shares the folder could have other weights answer."""
    first = find_or_convert(llama, tmp_path, "float32")
    first.path.chmod(0o777)
    own = find_or_convert(llama, tmp_path, "float32")
    assert own.path == first.path.with_name(f"{first.path.name}-user-{os.geteuid()}")
    assert logged[1] == (
        f"the weight store {first.path} is not used, as every user may write to it: this user's own is {own.path}"
    )
    assert find_or_convert(llama, tmp_path, "float32").path == own.path
    own.path.chmod(0o777)
    with pytest.raises(InputError, match=r"is not used, as every user may write to it: give another --offload-dir$"):
        find_or_convert(llama, tmp_path, "float32")


def test_stores_are_for_this_user_to_write_whatever_the_umask_is(llama, tmp_path):
    old = os.umask(0)
    try:
        store = find_or_convert(llama, tmp_path, "float32")
    finally:
        os.umask(old)
    assert not [path for path in (store.path, *store.path.rglob("*")) if path.stat().st_mode & 0o022]


def test_find_or_convert(llama, tmp_path, logged):
    first = find_or_convert(llama, tmp_path, "float32")
    assert first.path == store_path(tmp_path, llama, "float32", "native") and first.path.is_relative_to(tmp_path)
    again = find_or_convert(llama, tmp_path, "float32")
    assert again == first and len(logged) == 1 and llama.name in logged[0] and str(first.path) in logged[0]
    packed = find_or_convert(llama, tmp_path, "bfloat16", "int4")
    assert packed.path != first.path and packed.num_bytes < first.num_bytes and len(logged) == 2
    itself = find_or_convert(resolve_model(str(packed.path)), tmp_path, "bfloat16", "int4")
    assert itself == packed and len(logged) == 2
    expected = content(first.path)
    (first.path / "layer-00001.safetensors").unlink()
    find_or_convert(llama, tmp_path, "float32")
    assert content(first.path) == expected and len(logged) == 3
    (first.path / "manifest.json").unlink()
    find_or_convert(llama, tmp_path, "float32")
    assert content(first.path) == expected
    names = {
        store_path(tmp_path, llama, dtype, q).name for dtype in ("float32", "bfloat16") for q in ("native", "int4")
    }
    assert len(names) == 4


def test_the_command(llama, reference, tmp_path):
    def invoke(*args):
        return CliRunner().invoke(commands.cli, ["convert", *map(str, args)])

    done = invoke("-m", llama.path, "-o", tmp_path / "a" / "store", "--dtype", "float32")
    assert done.exit_code == 0, done.exception
    assert "3 of 3 layers" in done.stderr
    (line,) = done.stdout.splitlines()
    assert "KiB in " in line and line.endswith(str(tmp_path / "a" / "store"))
    assert content(tmp_path / "a" / "store") == content(reference)
    done = invoke("-m", llama.path, "-o", tmp_path / "b", "--weights", "int4", "--progress", "none")
    assert done.exit_code == 0 and done.stderr == ""
    assert open_store(tmp_path / "b").weight_format == "int4"
    assert read_config(resolve_model(str(tmp_path / "b"))).dtype == "float32"  # auto: as it is stored
    found = invoke("-m", llama.path, "-o", tmp_path / "b", "--progress", "none")
    assert isinstance(found.exception, InputError) and "--overwrite" in str(found.exception)
    assert invoke("-m", llama.path, "-o", tmp_path / "b", "--overwrite", "--progress", "none").exit_code == 0
    assert open_store(tmp_path / "b").weight_format == "float32"
    assert invoke("-m", llama.path).exit_code == 2
