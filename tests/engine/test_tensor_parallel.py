"""One model on several ranks, as processes.

They load a shard each, refuse what they cannot run, and a job of which one is killed ends and goes on.

That tokens are those of one process is in test_token_identity.py, with ranks that are threads.
"""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from command_line import invoke
from model_tables import MODELS
from processes import batchgen, start_batchgen
from rank_threads import make_parts_on_ranks
from ranks import check_memory_of_two, free_port
from thorough import quick_or
from tiered import CPU, make_parts, make_policy, make_request
from tiny_gguf import write_tiny_gguf
from tiny_models import make_tiny_model
from tiny_tokenizers import make_tiny_tokenizer

from batchgen import Engine, Request, SamplingParams
from batchgen.core.device import Device
from batchgen.core.errors import BatchgenError, InputError
from batchgen.engine.tensor_parallel import check_policy, first_shard, load_on_ranks, shard_weights
from batchgen.models.checkpoint import dummy_checkpoint, open_checkpoint
from batchgen.models.convert import convert
from batchgen.models.files import read_config, resolve_model
from batchgen.models.kept_stores import find_or_convert
from batchgen.models.shard import shard_of
from batchgen.models.state_layers import DeltaNet, ShortConv
from batchgen.models.tokenizers.loading import load_tokenizer


def loaded(checkpoint, config):
    layers = [checkpoint.load_layer(layer, torch.float32) for layer in range(config.num_layers)]
    return [checkpoint.load_embeddings(torch.float32), *layers, checkpoint.load_head(torch.float32)]


def put_together(config, layer, name, shards):
    """A layer's tensor put together from the parts that ranks have. The code is apart from that which cuts it."""
    stem, _, kind = name.partition(".")
    if stem in ("out", "down", "shared_down"):
        return torch.cat(shards, dim=1) if kind == "weight" else sum(shards)
    if stem in ("gate_up", "shared_gate_up"):  # of each expert gate, then up
        pieces = 2 * (config.num_experts if stem == "gate_up" and config.num_experts else 1)
        width = config.shared_expert_size if stem == "shared_gate_up" else config.intermediate_size
        if stem == "gate_up" and shards[0].shape[0] * len(shards) != pieces * width:
            pieces = 2  # a layer without experts
        split = [shard.chunk(pieces) for shard in shards]
        return torch.cat([part for parts in zip(*split, strict=True) for part in parts])
    of_all_heads = config.projection_norms and stem in ("q_norm", "k_norm")
    if stem in ("up", "a_log", "dt_bias") or of_all_heads:
        return torch.cat(shards)
    if stem in ("qkv", "ba", "conv"):
        sections = next(each for each in sections_of(config, layer, stem) if sum(each) == len(shards) * len(shards[0]))
        own = [s.split([n // len(shards) for n in sections]) for s in shards]
        return torch.cat([part for parts in zip(*own, strict=True) for part in parts])
    if stem == "sinks":
        own = [shard.view(config.num_layers, -1) for shard in shards]
        return torch.cat(own, dim=1).flatten()
    assert all(torch.equal(shard, shards[0]) for shard in shards)
    return shards[0]


def sections_of(config, layer, stem):
    """Rows of each section of a layer's tensor: with keys and values, without values, without both."""
    if stem == "qkv" and layer in config.attention_layers:
        shape = config.attention_of(layer)
        q, kv = shape.q_size, shape.kv_size
        yield from ([q, q, kv, kv],) if config.output_gate else ([q, kv, kv], [q, kv], [q])
    if isinstance(state := config.state, DeltaNet):
        if stem == "ba":
            yield [state.value_heads] * 2
        yield [state.key_size] * 2 + [state.out_size] * (2 if stem == "qkv" else 1)
    if isinstance(state, ShortConv):
        yield [state.channels] * (3 if stem == "qkv" else 1)


def assert_parts_of(whole, config, checkpoints):
    everything = zip(loaded(whole, config), *(loaded(c, config) for c in checkpoints), strict=True)
    for layer, (tensors, *parts) in enumerate(everything, start=-1):  # embeddings are before the first layer
        for name, tensor in tensors.items():
            assert torch.equal(put_together(config, layer, name, [part[name] for part in parts]), tensor), name


@pytest.mark.parametrize("model", MODELS)
def test_ranks_have_all_of_a_model(model, tiny_models):
    family, overrides = MODELS[model]
    path, _ = tiny_models(family, **overrides)
    files = resolve_model(str(path))
    config = read_config(files)
    if config.num_kv_heads == 1:
        with pytest.raises(InputError, match="--tensor-parallel 2 does not divide the model's 1 key/value heads"):
            shard_of(config, 0, 2)
        return
    parts = [open_checkpoint(files, shard=shard_of(config, rank, 2)) for rank in range(2)]
    assert_parts_of(open_checkpoint(files), config, parts)


def test_ranks_have_all_of_a_model_that_is_stored_otherwise(tmp_path):
    model = make_tiny_model("llama", tmp_path / "hf", num_key_value_heads=4)
    tokenizer = make_tiny_tokenizer(tmp_path / "hf")
    write_tiny_gguf(model, tmp_path / "model.gguf", tensor_type="Q8_0", tokenizer=tokenizer)
    convert(resolve_model(str(tmp_path / "hf")), tmp_path / "store", dtype="float32")
    for path in (tmp_path / "model.gguf", tmp_path / "store"):
        files = resolve_model(str(path))
        config = read_config(files)
        parts = [open_checkpoint(files, shard=shard_of(config, rank, 4)) for rank in range(4)]
        assert_parts_of(open_checkpoint(files), config, parts)
    shards = [shard_of(config, rank, 2) for rank in range(2)]
    assert_parts_of(dummy_checkpoint(config), config, [dummy_checkpoint(config, shard=shard) for shard in shards])


@pytest.mark.parametrize(
    ("size", "device", "weights", "message"),
    [
        (3, "cpu", "auto", "--tensor-parallel 3 does not divide the model's 2 key/value heads: use 2"),
        (0, "cpu", "auto", "must be at least 1, not 0"),
        (2, "cpu", "int8", "does not cut weights of int8, whose rows have one scale: give --weights int4"),
    ],
)
def test_what_ranks_cannot_share_is_refused(size, device, weights, message, tiny_models):
    files = resolve_model(str(tiny_models("llama")[0]))
    with pytest.raises(InputError, match=re.escape(message)):
        first_shard(files, read_config(files), size, Device(device), weights)


@pytest.mark.parametrize(
    ("has_nccl", "message"),
    [
        (False, "needs a torch with NCCL: install one, or give --device cpu"),
        (True, "needs 2 GPUs here, one for each rank"),
    ],
)
def test_cards_that_are_not_there_are_refused(has_nccl, message, tiny_models, monkeypatch):
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: has_nccl)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    files = resolve_model(str(tiny_models("llama")[0]))
    with pytest.raises(InputError, match=message):
        first_shard(files, read_config(files), 2, Device("cuda"), "auto")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"weight_format": "int8"}, "does not cut weights of int8"),
        ({"kv_seqs": {"cpu": 4, "deferred": 4}}, "no KV of placement deferred"),
    ],
)
def test_plans_that_ranks_cannot_follow_are_refused(changes, message, tiny_models):
    with pytest.raises(InputError, match=message):
        check_policy(make_policy(tiny_models("llama")[0], CPU, **changes))


def test_a_rank_that_fails_ends_the_sweep(tiny_models, tmp_path):
    path, _ = tiny_models("llama")
    parts, first = make_parts_on_ranks(2, path, CPU, make_policy(path, CPU), tmp_path)
    reduce, count = first.all_reduce, 0

    def fail_later(tensor):
        nonlocal count
        count += 1
        if count == 20:
            raise BatchgenError("rank 1 of 2 ended")
        reduce(tensor)

    object.__setattr__(parts.executor._executor._options, "reduce", fail_later)
    with Engine.from_parts(parts) as engine, pytest.raises(BatchgenError, match="rank 1 of 2 ended"):
        list(engine.generate([Request([5, 6, 7], SamplingParams(max_tokens=12, ignore_eos=True))]))
    assert not any(thread.is_alive() for thread in first.shared.threads)


@pytest.fixture(scope="module")
def job(tmp_path_factory):
    """Arguments of a job without its output, and the texts that it gives in one process."""
    folder = tmp_path_factory.mktemp("job")
    make_tiny_tokenizer(folder / "model")
    make_tiny_model("qwen3", folder / "model")
    (folder / "in.jsonl").write_text("".join(f'{{"prompt": "Row {k} of many"}}\n' for k in range(96)))
    arguments = ["run", "-m", folder / "model", "-i", folder / "in.jsonl", "--max-tokens", "32", "--ignore-eos"]
    arguments += ["--dtype", "float32", "--max-num-seqs", "4", "--flush-interval", "0.02s"]
    code, _, error = invoke(*arguments, "-o", folder / "one.parquet")
    assert code == 0, error
    return arguments, pq.read_table(folder / "one.parquet").column("text").to_pylist()


def ranks_of(pid):
    """Processes of ranks that it has started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
            program = (stat.parent / "cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[1]) == pid and b"batchgen.distributed" in program:
            found.append(int(stat.parent.name))
    return found


def test_a_job_goes_on_after_a_rank_was_killed_and_reports_the_memory_of_every_process(job, tmp_path):
    arguments, texts = job
    output, log = tmp_path / "out.parquet", tmp_path / "log"
    arguments = [*arguments, "--tensor-parallel", "2", "-o", output]
    process = start_batchgen(arguments, log)
    while not list(tmp_path.glob("out.parquet.batchgen/parts/*")):
        assert process.is_alive(), log.read_text()
        time.sleep(0.005)
    (rank,) = ranks_of(process.pid)
    os.kill(rank, signal.SIGKILL)
    process.join()
    said = log.read_text().strip().splitlines()
    assert process.exitcode == 1, said
    assert said[-1].startswith("batchgen: rank 1 of 2 was killed by SIGKILL"), said
    assert said[-1].endswith("; the same command goes on from there")
    assert not output.exists()
    assert batchgen([*arguments, "--report", tmp_path / "report.json"], log) == 0, log.read_text()
    check_memory_of_two(tmp_path / "report.json", log)
    assert re.search(r"resuming: \d+ rows are done already", log.read_text())
    assert pq.read_table(output).column("text").to_pylist() == texts


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """A model whose int4 groups four ranks can share, its tokens in int4 in one process, and a folder for stores."""
    folder = tmp_path_factory.mktemp("wide")
    make_tiny_tokenizer(folder / "model")
    sizes = {"head_dim": 64, "num_key_value_heads": 4, "intermediate_size": 256, "num_hidden_layers": 2}
    make_tiny_model("qwen3", folder / "model", **sizes)
    policy = make_policy(folder / "model", CPU, weight_format="int4")
    return folder / "model", tokens_of(make_parts(folder / "model", CPU, policy, folder)), folder


def tokens_of(parts):
    with Engine.from_parts(parts, sampling=SamplingParams(max_tokens=8, ignore_eos=True)) as engine:
        done = {c.index: c for c in engine.generate([Request([5, 6, k]) for k in range(7, 12)])}
    return [done[k].samples[0].token_ids for k in range(5)]


@pytest.mark.parametrize("size", quick_or([2], [2, 4]))
def test_processes_stream_and_unpack_their_parts(size, wide):
    path, tokens, folder = wide
    files = resolve_model(str(path))
    layers = {group: (0, 1, 1) for group in read_config(files).layer_tensors}
    policy = make_policy(path, CPU, weight_format="int4", weight_layers=layers, kv_seqs={"cpu": 4, "disk": 4})
    request = make_request(path, CPU, policy, folder, shard=shard_of(read_config(files), 0, size))
    assert tokens_of(load_on_ranks(request, lambda: load_tokenizer(files))) == tokens


def test_a_store_of_a_part_is_no_model(wide):
    path, _, folder = wide
    config = read_config(resolve_model(str(path)))
    store = find_or_convert(resolve_model(str(path)), folder, "float32", shard=shard_of(config, 1, 2))
    with pytest.raises(InputError, match=r"has the part of rank 1 of 2 alone: give the model itself"):
        read_config(resolve_model(str(store.path)))


def test_blocks_that_ranks_would_cut_are_expanded(tiny_models):
    config = read_config(resolve_model(str(tiny_models("llama", intermediate_size=512, head_dim=64)[0])))
    assert [shard_weights(shard_of(config, 0, 2), name) for name in ("q4_0", "q4_k", "native")] == [
        "q4_0",
        "dequantized",
        "native",
    ]


@pytest.mark.thorough
def test_a_launcher_may_start_all_ranks(job, tmp_path):
    arguments, texts = job
    output = tmp_path / "out.parquet"
    arguments = [*arguments, "--limit", "12", "--tensor-parallel", "2", "-o", output]
    place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, "-m", "batchgen", *map(str, arguments)]
    ranks = [subprocess.Popen(command, env={**os.environ, **place, "RANK": str(rank)}) for rank in range(2)]
    assert [rank.wait() for rank in ranks] == [0, 0]
    assert pq.read_table(output).column("text").to_pylist() == texts[:12]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--tensor-parallel", "0"], "--tensor-parallel must be at least 1, not 0"),
        (["--tensor-parallel", "3"], "--tensor-parallel 3 does not divide the model's 2 key/value heads: use 2"),
        (["--tensor-parallel", "2", "--share"], "--tensor-parallel does not go with --share"),
        (["--tensor-parallel", "2", "--weights", "int8"], "does not cut weights of int8"),
        (
            ["--tensor-parallel", "2", "--weights", "int4"],
            "--tensor-parallel 2 would cut groups of 64 weights of int4",
        ),
    ],
)
def test_jobs_that_ranks_cannot_run_are_refused(more, message, job, tmp_path):
    code, _, error = invoke(*job[0], *more, "-o", tmp_path / "out.parquet")
    assert code == 2 and message in error, error
    assert not list(tmp_path.iterdir())


def test_a_launcher_must_start_as_many(job, tmp_path, monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    code, _, error = invoke(*job[0], "--tensor-parallel", "2", "-o", tmp_path / "out.parquet")
    assert code == 2 and "the launcher has started 4 ranks, --tensor-parallel is 2" in error
