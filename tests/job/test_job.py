"""Options are resolved once, whatever the command."""

import sys
from collections import Counter
from dataclasses import replace
from functools import wraps

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from quantized_checkpoints import gptq, requantize
from tiny_gguf import write_tiny_gguf
from tiny_models import make_tiny_model
from tiny_tokenizers import make_tiny_tokenizer

from batchgen.cli.commands import cli
from batchgen.core.device import Device, parse_device
from batchgen.core.errors import InputError
from batchgen.core.workload import Lengths, Workload
from batchgen.engine.loader import resolve_budgets, resolve_context, resolve_dtype
from batchgen.job.job import dequantized_line, resolve_for, resolve_job
from batchgen.job.options import JobOptions
from batchgen.job.weight_choice import with_faster_weights
from batchgen.models.files import read_config, resolve_model
from batchgen.profiler.shipped import shipped_profile

RESOLVING = (read_config, parse_device, resolve_dtype, resolve_context, resolve_budgets)


@pytest.fixture(scope="module")
def model(tiny_models):
    return str(tiny_models("llama")[0])


@pytest.fixture
def calls(monkeypatch):
    """How often each of `RESOLVING` has been called, from wherever."""
    import batchgen.job.bench
    import batchgen.job.run  # noqa: F401 - all of them are imported by now

    counted = Counter()

    def counting(function):
        @wraps(function)
        def counted_function(*args, **options):
            counted[function.__name__] += 1
            return function(*args, **options)

        return counted_function

    for function in RESOLVING:
        for name, module in list(sys.modules.items()):
            if name.startswith("batchgen.") and getattr(module, function.__name__, None) is function:
                monkeypatch.setattr(module, function.__name__, counting(function))
    return counted


def invoke(*arguments):
    result = CliRunner().invoke(cli, [str(a) for a in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize("command", ["run", "dry run", "bench"])
def test_a_command_resolves_everything_once(model, tmp_path, calls, command):
    table = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"prompt": ["one", "two"]}), table)
    options = ["-m", model, "--cpu-memory", "3GiB", "--progress", "none"]
    if command == "bench":
        invoke("bench", *options, "--num-prompts", 2, "--input-len", 4, "--output-len", 2)
    else:
        more = ["--dry-run"] if command == "dry run" else []
        invoke("run", *options, "-i", table, "-o", tmp_path / "out.parquet", "--max-tokens", 2, *more)
    assert calls == {function.__name__: 1 for function in RESOLVING}


def test_what_a_job_comes_to(model, tmp_path):
    options = JobOptions(
        model, None, None, device="emulated:gpu-memory=1GiB", cpu_memory="3GiB", max_model_len=64,
        offload_dir=str(tmp_path)
    )  # fmt: skip
    job = resolve_job(options, resolve_model(model))
    assert (job.device, job.dtype, job.context) == (Device("emulated", 1 << 30), "float32", 64)
    assert (job.cpu_memory, job.gpu_memory, job.disk_memory, job.offload_dir) == (3 << 30, None, None, tmp_path)
    assert job.budgets is job.budgets and job.budgets["gpu"] == 1 << 30 and job.budgets["cpu"] == 3 << 30


def test_another_machine_decides_the_dtype(model):
    files = resolve_model(model)
    config = read_config(files)
    for name, kind in (("t4", "cuda"), ("zen4", "cpu")):
        job = resolve_for(shipped_profile(name), JobOptions(model, None, None), files, config)
        assert (job.device.kind, job.dtype) == (kind, "float32")


@pytest.mark.parametrize(("card", "gpu_memory", "weights"), [
    ("h100", None, "dequantized"), ("h100", "2MiB", "w4_g64"), ("t4", "2MiB", "w4_g64"),
])  # fmt: skip
def test_a_card_that_would_not_hold_dequantized_weights_has_them_as_they_are_found(card, gpu_memory, weights, tmp_path):
    """The rates of products decide a plan, where they are known: a T4 has none of weights as they are found."""
    make_tiny_model("llama", tmp_path, hidden_size=256, intermediate_size=512, head_dim=128)
    requantize(tmp_path, gptq(64))
    files = resolve_model(str(tmp_path))
    options = JobOptions(str(tmp_path), None, None, dtype="bfloat16", gpu_memory=gpu_memory)
    job = resolve_for(shipped_profile(card), options, files, read_config(files))
    assert (job.options.weights, job.native_format) == (weights, "w4_g64")
    workload = Workload(16, Lengths.of([1]), Lengths.of([32]), 32)  # decoding, of which memory bounds products
    planned = with_faster_weights(replace(job, gpu_memory=None), shipped_profile(card), workload)
    assert planned.options.weights == ("w4_g64" if card == "h100" else "dequantized")


@pytest.mark.parametrize(
    "wrong", [{"device": "abacus"}, {"dtype": "float8"}, {"max_model_len": 1 << 20}, {"cpu_memory": "lots"}], ids=str
)
def test_what_means_nothing_is_refused(model, wrong):
    with pytest.raises(InputError) as refused:
        resolve_job(JobOptions(model, None, None, **wrong), resolve_model(model))
    assert "\n" not in str(refused.value)


def test_ranks_that_expand_packed_weights_say_so(tmp_path, monkeypatch):
    """Where blocks would be cut; one process has them as they are found."""
    monkeypatch.setattr("batchgen.engine.loader._DEQUANTIZED_FRAC", 0.0)  # as of a model that is large for its memory
    model = make_tiny_model("llama", tmp_path / "hf", num_key_value_heads=4, intermediate_size=96)
    write_tiny_gguf(model, tmp_path / "model.gguf", tensor_type="Q8_0", tokenizer=make_tiny_tokenizer(tmp_path / "hf"))

    def job(**options):
        options = JobOptions(str(tmp_path / "model.gguf"), None, None, dtype="float32", cpu_memory="4GiB", **options)
        return resolve_job(options, resolve_model(options.model))

    assert job().options.weights == "q8_0" and not dequantized_line(job())
    (line,) = dequantized_line(job(tensor_parallel=2))
    assert (
        line.startswith("--tensor-parallel expands weights in q8_0, whose blocks would be cut: ") and "float32" in line
    )
