"""Plans of a job over several processes, and the table of their costs, the recommended and the refused ones."""

import json
import shlex
from dataclasses import replace
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from command_line import invoke, planned, planned_json, refused
from planner_cases import cpu_box, opt

from batchgen.core.errors import InputError
from batchgen.core.hardware import HARDWARE_VARIABLE
from batchgen.core.request import SamplingParams
from batchgen.core.units import parse_rate
from batchgen.core.workload import Workload
from batchgen.job import devices, machine_profile, planning
from batchgen.job.devices import Devices, Outcome
from batchgen.job.mixed_devices import Part, _sequences_of_each, share_out
from batchgen.job.option_table import options_of
from batchgen.job.options import JobOptions
from batchgen.job.run_command import run_command, torchrun_command
from batchgen.planner.problem import problem_of
from batchgen.profiler.shipped import shipped_profile

LENGTHS = ("--num-prompts", 48, "--input-len", 64, "--output-len", 8, "--max-num-seqs", 8)
HEADS = 16
A100 = shipped_profile("a100").name


@pytest.fixture(scope="module")
def shape(tmp_path_factory):
    """A model that is a configuration and nothing else."""
    path = tmp_path_factory.mktemp("opt") / "config.json"
    config = {
        "architectures": ["OPTForCausalLM"], "hidden_size": 2048, "num_hidden_layers": 6, "num_attention_heads": HEADS,
        "ffn_dim": 8192,
        "vocab_size": 50272, "max_position_embeddings": 2048, "torch_dtype": "float16",
    }  # fmt: skip
    path.write_text(json.dumps(config))
    return str(path)


def by_name(made):
    return {outcome["name"]: outcome for outcome in made["devices"]["outcomes"]}


class TestTable:
    @pytest.fixture(scope="class")
    def made(self, shape):
        """Of three hosts, and of the same hardware alone."""
        return planned_json("-m", shape, *LENGTHS, "--devices", "2x zen4", "--link-bandwidth", "10GB/s")

    def test_a_way_costs_what_a_plan_of_it_says(self, made, shape):
        """Also where nothing but the link between them is said of the processes' hosts."""
        found = by_name(made)
        assert set(found) == {"one worker", "2 workers", "tensor parallel", "pipeline"}
        assert found["one worker"]["seconds"] == made["prediction"]["total_s"]
        one_host = by_name(planned_json("-m", shape, *LENGTHS, "--devices", "2x zen4", "--hosts", 1))
        for name, flag in {"tensor parallel": "--tensor-parallel", "pipeline": "--pipeline"}.items():
            alone = planned_json("-m", shape, *LENGTHS, "--hardware", "zen4", flag, 2)
            assert one_host[name]["seconds"] == alone["prediction"]["total_s"], name
            parts = alone["prediction"]["memory_bytes"]["cpu"]
            assert one_host[name]["memory_bytes"]["cpu"] == pytest.approx(sum(parts.values()))
            assert found[name]["seconds"] < one_host[name]["seconds"], "a host of its own is more than half of one"

    def test_workers_have_a_part_of_the_rows_each(self, made):
        one, workers = (by_name(made)[name] for name in ("one worker", "2 workers"))
        assert one["seconds"] / 2 < workers["seconds"] < one["seconds"]
        tokens = [outcome["seconds"] * outcome["total_tokens_per_s"] for outcome in (one, workers)]
        assert tokens == pytest.approx([48 * (64 + 8)] * 2)

    def test_the_fastest_is_recommended_with_its_command(self, made, shape):
        found = by_name(made)
        fastest = min(found.values(), key=lambda outcome: outcome["seconds"])
        best = found[made["devices"]["recommended"]]
        assert best["seconds"] <= 1.02 * fastest["seconds"]
        commands = {name: outcome["command"] for name, outcome in found.items()}
        assert commands["one worker"].startswith("batchgen run ") and "--share" not in commands["one worker"]
        assert commands["2 workers"].startswith("batchgen run ") and commands["2 workers"].endswith(" --share")
        for name, flag in {"tensor parallel": "--tensor-parallel 2", "pipeline": "--pipeline 2"}.items():
            assert commands[name].startswith("torchrun --nnodes 2 --nproc-per-node 1 ") and flag in commands[name]
        text = planned("-m", shape, *LENGTHS, "--devices", "2x zen4", "--link-bandwidth", "10GB/s").splitlines()
        (marked,) = (line for line in text if line.endswith("<- recommended"))
        assert marked.startswith(best["name"]) and text[-1].startswith(f"recommended: {best['name']}")
        assert text[-1].endswith(best["command"])

    def test_what_cannot_be_says_why(self, shape):
        """Heads that are not divisible, and more stages than layers; without either nothing stands in the way."""
        found = by_name(planned_json("-m", shape, *LENGTHS, "--devices", "7x zen4"))
        assert "does not divide the model's 16 key/value heads" in found["tensor parallel"]["reason"]
        assert "more than the model's 6 layers" in found["pipeline"]["reason"]
        assert found["7 workers"]["seconds"] is not None and not found["7 workers"]["reason"]
        assert all(found[name]["seconds"] is None for name in ("tensor parallel", "pipeline"))

    def test_workers_of_a_host_share_its_memory(self, shape):
        """The model fits one of them, and half of the memory with half of the layers; not half of it as a whole."""
        found = by_name(
            planned_json("-m", shape, *LENGTHS, "--devices", "2x zen4", "--hosts", 1, "--cpu-memory", "2400MiB",
            "--disk-memory", 0)
        )  # fmt: skip
        assert found["one worker"]["seconds"] and found["tensor parallel"]["seconds"]
        assert "no plan fits: one process's weights" in found["2 workers"]["reason"]

    def test_gpus_of_a_host_run_every_way(self, shape):
        found = by_name(planned_json("-m", shape, *LENGTHS, "--devices", "2x t4", "--hosts", 1))
        assert all(outcome["seconds"] and not outcome["not_run"] for outcome in found.values())
        assert all("--device cuda" in outcome["command"] for outcome in found.values())

    def test_sums_of_gpus_are_for_one_host(self, shape):
        """The message names what is not run yet, and does not recommend it."""
        made = planned_json("-m", shape, *LENGTHS, "--devices", "2x t4", "--hosts", 2)
        found = by_name(made)
        assert "one host" in found["tensor parallel"]["not_run"]
        assert not any(outcome["not_run"] for name, outcome in found.items() if name != "tensor parallel")
        assert made["devices"]["recommended"] != "tensor parallel"

    def test_one_device_has_one_way(self, shape):
        found = by_name(planned_json("-m", shape, *LENGTHS, "--devices", "1x zen4"))
        reasons = {name: outcome["reason"] for name, outcome in found.items()}
        assert reasons == dict.fromkeys(found, "there is one device") | {"one worker": ""}

    def test_fewer_devices_are_the_choice_among_equals(self):
        def recommended(*seconds, not_run=None):
            ways = [Outcome(str(i), "", s, not_run="no" if i == not_run else "") for i, s in enumerate(seconds)]
            return devices._fastest(tuple(ways))

        assert recommended(10.1, 10.0) == "0"
        assert recommended(11.0, 10.0) == "1"
        assert recommended(None, 10.0, None, 9.0) == "3"
        assert recommended(11.0, 5.0, not_run=1) == "0"
        assert recommended(None) is None


class TestSeveralKinds:
    KINDS = "2x zen4 + 1x a100"
    MANY = ("--num-prompts", 20_000, "--input-len", 64, "--output-len", 8, "--max-num-seqs", 64, "--dtype", "float16")

    @pytest.fixture(scope="class")
    def made(self, shape):
        return planned_json("-m", shape, *self.MANY, "--devices", self.KINDS)

    def test_workers_have_rows_as_they_are_fast_and_end_together(self, made, shape):
        """As plans of one kind with these rows each say."""
        found = by_name(made)
        workers = found["3 workers"]
        assert not workers["reason"] and sum(workers["shares"].values()) == pytest.approx(1)
        assert workers["shares"][A100] > 0.5
        assert workers["seconds"] < found["one worker"]["seconds"]
        assert A100 in found["one worker"]["words"]
        assert workers["total_tokens_per_s"] == pytest.approx(20_000 * (64 + 8) / workers["seconds"])
        assert workers["command"].endswith(" --share") and "--device" not in workers["command"]

    def test_a_model_is_not_split_over_several_kinds(self, made):
        found = by_name(made)
        for name in ("tensor parallel", "pipeline"):
            assert (found[name]["seconds"], found[name]["reason"]) == (None, "is for devices of one kind")

    def test_as_text(self, shape):
        lines = planned("-m", shape, *self.MANY, "--devices", self.KINDS).splitlines()
        assert any("of the rows on" in line and line.endswith("<- recommended") for line in lines)
        assert any(line.startswith("on 2x ") and f" + 1x {A100}" in line for line in lines)
        assert lines[-1].startswith(
            "recommended: 3 workers, on each device's host, with --device as it has there: batchgen run"
        )


def test_workers_that_would_make_different_rows():
    problem = problem_of(cpu_box(), opt(64, 1, 1), Workload.uniform(10, 5, 5), dtype="float16", max_model_len=64)
    kinds = [(1, None, problem, SimpleNamespace(dtype=dtype)) for dtype in ("bfloat16", "float32")]
    with pytest.raises(InputError, match="need the same --dtype, and here they would have bfloat16 and float32"):
        share_out(kinds)


def _part(count, sequences, start_s, end_s):
    return Part(count, sequences, SimpleNamespace(prediction=SimpleNamespace(startup_s=start_s, total_s=end_s)))


def test_a_device_that_begins_too_late_has_no_rows():
    fast, late = _part(1, 100, 1.0, 11.0), _part(4, 100, 60.0, 61.0)
    assert _sequences_of_each([fast, late], 100) == [100, 0]
    assert _sequences_of_each([fast, _part(2, 100, 1.0, 11.0)], 100) == [33, 34]  # three alike: a third each


@pytest.mark.parametrize("flag", ["--tensor-parallel", "--pipeline"])
def test_run_plan_and_table_say_the_same(flag, tiny_models, tmp_path, monkeypatch):
    """On this machine, by given rates, but for the time that each command takes until it plans."""
    monkeypatch.setenv(HARDWARE_VARIABLE, "zen4")
    monkeypatch.setattr(planning, "process_bytes", lambda: 700 << 20)
    monkeypatch.setattr(machine_profile, "available_memory_bytes", lambda: 16 << 30)
    monkeypatch.setattr(machine_profile, "resident_bytes", lambda: 1 << 30)
    table = tmp_path / "rows.parquet"
    pq.write_table(pa.table({"prompt": [f"Row {i} of the harbour." for i in range(24)]}), table)
    job = ["-m", tiny_models("llama")[0], "-i", table, "--max-tokens", 4, "--dtype", "float32", "--cpu-memory", "4GiB",
           "--disk-memory", 0, "--offload-dir", tmp_path, "--progress", "none"]  # fmt: skip
    code, said, message = invoke("run", *job, "-o", tmp_path / "out.jsonl", flag, 2, "--dry-run", "--json")
    assert code == 0, message
    run = json.loads(said)["plan"]["prediction"]
    alone = planned_json(*job, flag, 2)["prediction"]
    made = planned_json(*job, "--devices", "2x cpu", "--hosts", 1)
    (way,) = (o for o in made["devices"]["outcomes"] if f"{flag} 2" in o["command"])
    sweeps_s = [p["total_s"] - p["startup_s"] for p in (run, alone)]
    # Until weights are loaded the table counts the time of the plan that it stands below.
    startup_s = made["prediction"]["startup_s"]
    assert sweeps_s[0] == pytest.approx(sweeps_s[1], rel=1e-9)
    assert way["seconds"] - startup_s == pytest.approx(sweeps_s[0], abs=0.01)
    assert run["memory_bytes"] == alone["memory_bytes"]
    assert way["command"].startswith("batchgen run ") and way["memory_bytes"]["cpu"] == pytest.approx(
        sum(run["memory_bytes"]["cpu"].values())
    )


def test_a_faster_link_is_worth_what_the_sums_take(shape):
    """Without overlap the link's bytes are all that differs: two all-reduces a layer of each token's activations."""

    def sweeps_s(rate):
        made = planned_json("-m", shape, *LENGTHS, "--hardware", "zen4", "--tensor-parallel", 2, "--link-bandwidth",
        rate,
                            "--admission", "static", "--max-num-batched-tokens", 512, "--num-gpu-batches",
                            1)  # fmt: skip
        return made["prediction"]["total_s"]

    tokens = 48 * (64 + 8 - 1)
    moved = 2 * 6 * tokens * 2048 * 2
    last = 2 * 48 * 63 * 2048 * 2  # of the last layer only what has logits goes on; at most both of its sums
    gained = sweeps_s("0.5GB/s") - sweeps_s("1GB/s")
    assert (moved - last) * 1e-9 <= gained * (1 + 1e-6) and gained <= moved * 1e-9 * (1 + 1e-6)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--devices", "0x zen4"], "give how many and of what"),
        (["--devices", "zen4"], "give how many and of what"),
        (["--devices", ""], "give how many and of what"),
        (["--devices", "2x abacus"], "--devices 2x abacus: abacus is no file, nor one of cpu, a100"),
        (["--devices", "3x zen4", "--hardware", "t4"], "leave out --hardware"),
        (["--devices", "3x zen4", "--hosts", 2], "--hosts 2: 3 devices are not shared out evenly"),
        (["--devices", "3x zen4", "--hosts", 0], "--hosts 0: 3 devices are not shared out evenly"),
        (["--devices", "1x zen4 + 1x a100", "--hosts", 2], "--hosts is for devices of one kind"),
        (["--devices", "1x zen4 + 2x zen4"], "zen4 is there twice"),
        (["--devices", "1x zen4 + 1x abacus"], "abacus is no file"),
        (["--devices", "1x zen4 + t4"], "give how many and of what"),
        (["--devices", "1x zen4 + 1x t4", "--hardware", "t4"], "leave out --hardware"),
        (["--hosts", 2], "--hosts says where --devices are"),
        (["--devices", "2x zen4", "--pipeline", 2], "--devices has --pipeline in its table"),
        (["--tensor-parallel", 2, "--pipeline", 2], "--tensor-parallel does not go with --pipeline"),
        (["--hardware", "zen4", "--pipeline", 7], "--pipeline 7 is more than the model's 6 layers"),
        (["--hardware", "zen4", "--tensor-parallel", 3], "--tensor-parallel 3 does not divide the model's 16"),
        (["--hardware", "zen4", "--pipeline", 2, "--frontier"], "--frontier is for plans without stages"),
        (["--hardware", "zen4", "--pipeline", 2, "--max-block-latency", "9s"], "--max-block-latency is for plans"),
        (["--hardware", "zen4", "--tensor-parallel", 2, "-o", "x.json"], "-o is for plans of one process"),
        (["--hardware", "zen4", "--pipeline", 2, "--link-bandwidth", "10Gbit/s"], "write it as 1.25GB/s"),
        (["--hardware", "zen4", "--pipeline", 2, "--link-bandwidth", "fast"], "write it as 1.25GB/s"),
        (["--hardware", "zen4", "--pipeline", 2, "--link-bandwidth", "0GB/s"], "must be above 0"),
    ],
)
def test_what_means_nothing_is_refused(args, message, shape):
    assert message in refused("plan", "-m", shape, *LENGTHS, *args)


def test_devices_are_read_as_people_write_them():
    assert Devices.parse("2") == Devices(2, None, 2) == Devices.parse("2x cpu")
    assert Devices.parse("2xt4") == Devices.parse("2 x t4") == Devices(2, "t4", 2)
    assert Devices.parse("8x t4", 2) == Devices(8, "t4", 2)
    assert (parse_rate("1.25GB/s", "--link"), parse_rate("1GiB", "--link")) == (1.25e9, 2.0**30)
    with pytest.raises(InputError, match="--link 'a/s' is not a rate"):
        parse_rate("a/s", "--link")


def test_a_workers_rows_are_rounded_up(monkeypatch):
    seen = []
    monkeypatch.setattr(devices, "plan_job", lambda job, problem: seen.append(problem.workload.num_seqs))
    problem = problem_of(cpu_box(), opt(64, 1, 1), Workload.uniform(10, 5, 5), dtype="float16", max_model_len=64)
    for workers in (1, 3, 20):
        devices.plan_split(None, problem, devices.Split(workers))
    assert seen == [10, 4, 1]


def test_a_command_says_what_was_asked(tmp_path):
    """Read back by the command line, each option has the value that it had."""
    asked = JobOptions(
        "a model", "my rows.jsonl", None, prompt_template="{{ a }} and 'b'", choices=(), chat=True,
        share_prefixes=False, max_model_len=64,
        chat_template_kwargs={"enable_thinking": False}, continue_final=True, reasoning_column=False,
        sampling=SamplingParams(max_tokens=7, temperature=0.5, stop=("x y", "z"), logit_bias=((5, -1.5),)),
        hardware="zen4",
    )  # fmt: skip
    words = shlex.split(run_command(asked, share=True))
    assert words[:2] == ["batchgen", "run"] and "--hardware" not in words
    from batchgen.cli import commands

    context = commands.run.make_context("run", words[2:])
    given = {option.name: context.params[option.name] for option in options_of("run")}
    wanted = replace(asked, share=True, hardware=None)
    for option in options_of("run"):
        holder = wanted if hasattr(wanted, option.name) else wanted.sampling
        expected = getattr(holder, option.name)
        if option.name == "chat_template_kwargs":
            expected = json.dumps(expected)
        assert given[option.name] == expected or (not given[option.name] and not expected), option.name
    assert torchrun_command("batchgen run -m M", 2, 4).endswith("-m batchgen run -m M")
    assert "--nnodes 2 --nproc-per-node 4" in torchrun_command("batchgen run -m M", 2, 4)
