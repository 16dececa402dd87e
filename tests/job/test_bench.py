"""`batchgen bench`: random rows and, where wanted, dummy weights."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from batchgen.cli.commands import cli
from batchgen.core.errors import InputError
from batchgen.core.request import SamplingParams
from batchgen.job import loading
from batchgen.job.bench import BenchOptions, run_bench
from batchgen.job.options import STRATEGIES, JobOptions
from batchgen.models.files import read_config, without_weights
from batchgen.models.identity import model_identity
from batchgen.planner.strategies import ON_CPU, WITH_GPU


def options(path, tmp_path, *, load_format="dummy", num_prompts=6, input_len=12, output_len=5, **given):
    own = {name: given.pop(name) for name in ("strategy", "serial") if name in given}
    job = {"dtype": "float32", "progress": "none", "cpu_memory": "3GiB", "offload_dir": tmp_path} | given
    return BenchOptions(
        JobOptions(str(path), None, None, **job), num_prompts, input_len, output_len, load_format, **own
    )


def test_every_row_is_as_long_as_asked_for(tiny_models, tmp_path):
    path = tiny_models("llama")[0]
    report = run_bench(options(path, tmp_path, load_format="auto", report=str(tmp_path / "report.json")))
    assert (report["prompt_tokens"], report["generated_tokens"]) == (6 * 12, 6 * 5)
    assert report["weights"] == "real"
    assert 0 < report["generation_s"] < report["wall_s"]
    assert report["predicted_generation_s"] > 0
    written = json.loads((tmp_path / "report.json").read_text())
    assert written["generation_tokens_per_s"] == report["generation_tokens_per_s"]


@pytest.mark.parametrize("given", ["directory", "file"])
def test_a_config_without_weights_is_enough(tiny_models, tmp_path, given):
    shape = tmp_path / "shape"
    shape.mkdir()
    (shape / "config.json").write_text((tiny_models("opt")[0] / "config.json").read_text())
    report = run_bench(options(shape if given == "directory" else shape / "config.json", tmp_path))
    assert report["weights"] == "dummy"
    assert report["generated_tokens"] == 30


@pytest.mark.slow
@pytest.mark.parametrize(("weights", "kv"), [("int4", "int5"), ("int8", "auto")])
def test_dummy_weights_in_few_bits_and_on_disk(tiny_models, tmp_path, weights, kv):
    """They go through a weight store, which has no tokenizer."""
    shape = tmp_path / "config.json"
    shape.write_text((tiny_models("llama")[0] / "config.json").read_text())
    report = run_bench(options(shape, tmp_path, weights=weights, kv_cache_dtype=kv))
    assert report["generated_tokens"] == 30
    assert report["policy"]["weight_format"] == weights


def test_several_samples_a_prompt(tiny_models, tmp_path):
    sampling = SamplingParams(n=2, temperature=1.0)
    report = run_bench(options(tiny_models("llama")[0], tmp_path, sampling=sampling))
    assert report["generated_tokens"] == 2 * 30


def test_identity_of_a_shape_is_that_of_its_config(tiny_models, tmp_path):
    path = tmp_path / "config.json"
    values = json.loads((tiny_models("llama")[0] / "config.json").read_text())
    path.write_text(json.dumps(values))
    first = model_identity(without_weights(str(path)))
    path.write_text(json.dumps(values | {"num_hidden_layers": 5}))
    assert read_config(without_weights(str(path))).num_layers == 5
    assert model_identity(without_weights(str(path))) != first


def test_the_option_has_all_strategies_of_the_planner():
    assert tuple(strategy.name for strategy in (*WITH_GPU, *ON_CPU)) == STRATEGIES


def test_steps_run_by_themselves_under_a_strategy(tiny_models, tmp_path, monkeypatch):
    """The engine is loaded with both, and the report says so."""
    requests = []

    def load(request, *rest):
        requests.append(request)
        return loading_on_ranks(request, *rest)

    loading_on_ranks = loading.load_on_ranks
    monkeypatch.setattr(loading, "load_on_ranks", load)
    report = run_bench(options(tiny_models("llama")[0], tmp_path, strategy="in memory", serial=True))
    assert requests[0].serial
    assert (report["strategy"], report["serial"], report["generated_tokens"]) == ("in memory", True, 30)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"num_prompts": 0}, "--num-prompts must be at least 1"),
        ({"input_len": 10_000}, "exceed the context"),
        ({"load_format": "nothing"}, "--load-format must be auto or dummy"),
        ({"strategy": "NEO"}, "--strategy must be one of streamed, in memory on this device, not 'NEO'"),
        ({"strategy": "streamed"}, "--strategy streamed does not apply: all of it is in memory"),
        ({"strategy": "in memory", "plan": "plan.json"}, "--strategy makes a plan for one engine: leave out --plan"),
    ],
)
def test_bad_input_is_refused(tiny_models, tmp_path, changed, message):
    with pytest.raises(InputError, match=message):
        run_bench(options(tiny_models("llama")[0], tmp_path, **changed))


def test_a_shape_needs_a_config(tmp_path):
    file = tmp_path / "model.gguf"
    file.write_bytes(b"GGUF")
    with pytest.raises(InputError):
        without_weights(str(file))


def test_the_command(tiny_models, tmp_path, monkeypatch):
    path = str(tiny_models("llama")[0])
    args = [
        "bench",
        "-m",
        path,
        "--load-format",
        "dummy",
        "--num-prompts",
        "4",
        "--input-len",
        "8",
        "--output-len",
        "3",
    ]
    args += ["--dtype", "float32", "--progress", "none", "--offload-dir", str(tmp_path)]
    found = CliRunner().invoke(cli, args, catch_exceptions=False)
    assert found.exit_code == 0
    assert "4 prompts of 8 tokens, 3 out each" in found.output
    assert CliRunner().invoke(cli, [*args, "--prompt-column", "x"]).exit_code == 2


RECIPE = Path(__file__).parents[2] / "recipes" / "throughput"


@pytest.mark.parametrize(
    ("shape", "billions"),
    [("opt-1.3b", 1.3), ("opt-6.7b", 6.7), ("opt-30b", 30), ("opt-175b", 175), ("llama-3.1-8b", 8.0)],
)
def test_shapes_of_the_recipe_are_those_of_their_models(shape, billions):
    config = read_config(without_weights(str(RECIPE / "shapes" / shape)))
    assert config.num_params / 1e9 == pytest.approx(billions, rel=0.03)


@pytest.mark.slow
def test_the_recipe_runs_and_prints_its_metric(tiny_models, tmp_path, monkeypatch):
    """As it stands, but for the shape and the number of rows."""
    monkeypatch.chdir(RECIPE.parents[1])
    args = ["bench", "--config", "recipes/throughput/job.toml", "-m", str(tiny_models("opt")[0]), "--num-prompts", "3"]
    args += ["--input-len", "64", "--progress", "none", "--offload-dir", str(tmp_path)]
    found = CliRunner().invoke(cli, args, catch_exceptions=False)
    assert found.exit_code == 0
    assert "3 prompts of 64 tokens, 32 out each" in found.output and "generated tokens/s" in found.output


def test_prompts_are_drawn_as_they_are_needed(tiny_models, tmp_path, monkeypatch):
    """A job of a thousand million prompts does not hold all of them before it begins."""

    def generate(engine, requests, **more):
        assert len(next(iter(requests)).prompt) == 12
        raise KeyboardInterrupt

    monkeypatch.setattr("batchgen.engine.engine.Engine.generate", generate)
    with pytest.raises(KeyboardInterrupt):
        run_bench(options(tiny_models("llama")[0], tmp_path, num_prompts=1_000_000_000, max_num_seqs=8))
