"""The benchmarks for a machine with a GPU, as far as they run without one.

So that the first contact finds no other faults.
"""

import importlib.util
import json
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from batchgen.core.errors import InputError
from batchgen.models.hf.config import config_of_hf

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
sys.path[:0] = [str(BENCHMARKS), str(BENCHMARKS / "peers")]

import accelerate_gpu_offload  # noqa: E402
import gpu_case  # noqa: E402
import gpu_offload  # noqa: E402
import gpu_processes  # noqa: E402
import gpu_rates  # noqa: E402
import gpu_rehearsal  # noqa: E402
import run_flexgen  # noqa: E402
from gpu_bound import Job, Rates, bound  # noqa: E402

MIB = 1 << 20
TINY = {
    "architectures": ["OPTForCausalLM"], "model_type": "opt", "hidden_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "ffn_dim": 128, "word_embed_proj_dim": 64, "vocab_size": 256,
    "max_position_embeddings": 256,
    "do_layer_norm_before": True, "torch_dtype": "float16",
}  # fmt: skip


class TestBound:
    """The bound worked out by hand.

    168 numbers a layer (4 x 12 + 4 x 4 of attention, 3 x 4 x 8 of the MLP, 2 x 4 of norms) and 40 of the output matrix
    make W = 752 bytes; a token has 2 x 2 x 4 numbers or 32 bytes of KV. Three rows of 5 + 4 tokens read that of 5 + 6 +
    7 tokens each, so K = 1,728 bytes. A row takes 2 x 320 x 8 + 2 x 40 x 4 + 4 x 4 x 2 x 15 = 5,920 FLOPs.
    """

    MODEL = config_of_hf(
        {
            "architectures": ["LlamaForCausalLM"], "hidden_size": 4, "intermediate_size": 8, "num_hidden_layers": 2,
            "num_attention_heads": 1, "vocab_size": 10,
        }
    )  # fmt: skip
    JOB = Job(3, 5, 4, gpu_bytes=500, host_bytes=1000, dtype="float16", weight_format="float16", kv_format="float16")
    SLOW_LINK = Rates(h2d_bytes_per_s=100, gpu_flops_per_s=1e9, gpu_read_bytes_per_s=1e9, cpu_read_bytes_per_s=1e-6)

    def test_terms(self):
        found = bound(self.MODEL, self.JOB, self.SLOW_LINK)
        assert (found.weight_bytes, found.kv_read_bytes, found.gpu_flops) == (752, 1728, 3 * 5920)

    def test_what_the_gpu_does_not_hold_crosses_the_link_in_every_pass(self):
        found = bound(self.MODEL, self.JOB, self.SLOW_LINK)
        assert found.seconds == pytest.approx((4 * (752 - 500) + 1728) / 100)
        assert (found.passes, found.by) == (4, "link")

    def test_less_memory_takes_more_passes(self):
        """496 + 504 bytes hold KV of 248: all of 1,728 takes 7 times as much, and the last pass leaves none."""
        found = bound(self.MODEL, replace(self.JOB, host_bytes=500), self.SLOW_LINK)
        assert found.passes == 8 and found.seconds == pytest.approx((8 * 252 + 1728) / 100)

    def test_the_cpu_takes_the_share_of_the_kv_that_is_best(self):
        half = bound(self.MODEL, self.JOB, replace(self.SLOW_LINK, cpu_read_bytes_per_s=100))
        assert half.seconds == pytest.approx((4 * 252 + 1728) / 200)
        assert half.cpu_kv_frac == pytest.approx(1368 / 1728) and half.by == "link"
        most = bound(self.MODEL, self.JOB, replace(self.SLOW_LINK, cpu_read_bytes_per_s=1e9))
        assert most.seconds == pytest.approx(4 * 252 / 100) and most.cpu_kv_frac == 1

    def test_products(self):
        found = bound(self.MODEL, self.JOB, replace(self.SLOW_LINK, gpu_flops_per_s=100))
        assert found.seconds == pytest.approx(3 * 5920 / 100) and found.by == "GPU products"

    def test_all_on_the_gpu_is_read_from_its_memory(self):
        found = bound(
            self.MODEL, replace(self.JOB, gpu_bytes=10**6), replace(self.SLOW_LINK, gpu_read_bytes_per_s=1000)
        )
        assert found.seconds == pytest.approx((4 * 752 + 1728) / 1000) and found.by == "GPU memory"

    def test_where_the_weights_fit_more_passes_may_save_the_link(self):
        """1000 bytes of GPU hold 248 of KV: P (752 - 1000) + 1728 = 100 t and 752 P + 1728 = 1000 t, so t = 5.3467."""
        rates = replace(self.SLOW_LINK, gpu_read_bytes_per_s=1000)
        found = bound(self.MODEL, replace(self.JOB, gpu_bytes=1000), rates)
        assert found.seconds == pytest.approx((752 * 1728 / 248 + 1728) / (1000 + 75200 / 248))
        assert found.passes == pytest.approx((1728 - 100 * found.seconds) / 248)
        fast = replace(rates, h2d_bytes_per_s=1e9)  # then nothing is gained by more than there have to be
        assert bound(self.MODEL, replace(self.JOB, gpu_bytes=1000), fast).passes == 4

    def test_no_room(self):
        with pytest.raises(ValueError, match="752 bytes of weights do not fit"):
            bound(self.MODEL, replace(self.JOB, gpu_bytes=300, host_bytes=452), self.SLOW_LINK)


@pytest.fixture(scope="module")
def shape(tmp_path_factory):
    path = tmp_path_factory.mktemp("shape")
    (path / "config.json").write_text(json.dumps(TINY))
    return path


@pytest.fixture(scope="module")
def rates(tmp_path_factory):
    """What gpu_rates.py writes."""
    path = tmp_path_factory.mktemp("rates") / "rates.json"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["gpu_rates", "--device", "cpu", "--dtype", "float32", "--output", str(path)])
        gpu_rates.main()
    return path


@pytest.fixture
def run_case(shape, rates, tmp_path, monkeypatch):
    """run_case(policy, ...) -> what gpu_case.py writes, of an emulated accelerator."""

    def run(policy, *more):
        output = tmp_path / "case.json"
        arguments = [
            shape, "--policy", policy, "--device", "emulated:gpu-memory=96MiB", "--host-memory", "3GiB",
            "--num-prompts", 6,
            "--input-len", 20, "--output-len", 5, "--batched-tokens", 64, "--dtype", "float32", "--rates", rates,
            "--hardware", "zen4", "--output", output, *more,
        ]  # fmt: skip
        monkeypatch.setattr(sys, "argv", ["gpu_case", *map(str, arguments)])
        gpu_case.main()
        return json.loads(output.read_text())

    return run


class TestCase:
    @pytest.mark.parametrize("policy", gpu_case.POLICIES)
    def test_has_everything_that_the_table_is_made_of(self, run_case, policy):
        case = run_case(policy)
        assert case["limits"] == {"gpu_bytes": 96 * MIB, "host_bytes": 3 << 30, "dtype": "float32"}
        assert case["generated_tokens_per_s"] == pytest.approx(6 * 5 / case["generation_s"])
        assert (
            case["of_bound"] == pytest.approx(case["bound"]["seconds"] / case["generation_s"]) and case["of_bound"] > 0
        )
        assert case["sweeps"] >= 5 and case["busy_s"]["compute"] > 0
        assert (case["predicted_generation_s"] is not None) == (policy == "planned")
        said = gpu_case.summary(case)
        assert "of the bound" in said and ("not planned" in said) == (policy != "planned")

    def test_plain_policies_are_what_their_names_say(self, run_case):
        """The three ways of KV, each measured by itself: so the block is the same, and what is busy is not."""
        cases = {name: run_case(name, "--num-gpu-batches", 2) for name in ("resident", "cpu", "streamed")}
        assert [case["policy"]["kv_seqs"] for case in cases.values()] == [{"gpu": 6}, {"cpu": 6}, {"streamed": 6}]
        assert {case["block"] for case in cases.values()} == {6}
        attended = {name: case["busy_s"]["cpu_attention"] > 0 for name, case in cases.items()}
        assert attended == {"resident": False, "cpu": True, "streamed": False}
        moved = {name: case["bytes_moved"]["h2d"] for name, case in cases.items()}
        kv_bytes = cases["streamed"]["bound"]["kv_read_bytes"]
        assert moved["streamed"] - moved["resident"] > 0.9 * kv_bytes and moved["resident"] < 0.1 * kv_bytes

    @pytest.mark.parametrize("weights", ["int8", "int4"])
    def test_plain_policies_have_the_weights_that_are_asked_for(self, run_case, tmp_path, weights):
        case = run_case("resident", "--weights", weights, "--offload-dir", tmp_path / "offload", "--gpu-memory", "1GiB")
        assert case["policy"]["weight_format"] == weights
        assert case["bound"]["weight_bytes"] < 0.9 * run_case("resident")["bound"]["weight_bytes"]

    def test_weights_that_do_not_fit_stay_on_the_host(self, run_case):
        case = run_case("resident", "--gpu-memory", "33500KiB")
        on_gpu, on_host, on_disk = case["policy"]["weight_layers"]["qkv"]
        assert 0 <= on_gpu < 4 and on_gpu + on_host == 4 and on_disk == 0
        with pytest.raises(SystemExit, match=r"gpu_case: --gpu-memory 32\.0 MiB is too small"):
            run_case("resident", "--gpu-memory", "32MiB")

    @pytest.mark.parametrize("missing", ["highspy", "pulp"])
    def test_nothing_is_planned_in_silence_without_a_planner(self, run_case, monkeypatch, missing):
        monkeypatch.setattr(gpu_case, "find_spec", lambda name: None if name == missing else object())
        with pytest.raises(SystemExit, match=rf"needs {missing}.*--policy resident, cpu or streamed"):
            run_case("planned")

    def test_fewer_layers_and_what_takes_their_time(self, run_case, tmp_path):
        case = run_case("resident", "--layers", 2, "--kernel-trace", tmp_path / "trace.json", "--traced-rows", 2)
        assert case["policy"]["weight_layers"]["qkv"] == [2, 0, 0]
        assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
        assert sum(kernel["cpu_s"] for kernel in case["kernels"]) > 0

    def test_graphs_that_there_are_none_of_are_not_left_out_in_silence(self, run_case):
        with pytest.raises(SystemExit, match="--no-graphs: no sweep of this job would be captured"):
            run_case("resident", "--no-graphs")

    def test_a_card_that_is_not_there(self, run_case, monkeypatch):
        monkeypatch.setattr("batchgen.core.device.why_no_cuda", lambda: "there is none")
        with pytest.raises(SystemExit, match=r"gpu_case: .*no CUDA device"):
            run_case("cpu", "--device", "cuda")


class TestOffload:
    RATES = {
        "h2d_bytes_per_s": 1e9,
        "gpu_flops_per_s": 1e12,
        "gpu_read_bytes_per_s": 1e11,
        "cpu_read_bytes_per_s": 1e10,
    }

    @pytest.fixture
    def offload(self, shape, tmp_path, monkeypatch):
        """A function that gives the result of all three engines, of which the peers only parse their arguments."""

        def run(command, output, limit_s, host_bytes):
            script, arguments = Path(command[1]).stem, [*map(str, command[2:]), "--output", str(output)]
            if script == "gpu_rates":
                return {"machine": {}, "rates": self.RATES}
            if script == "gpu_case":
                monkeypatch.setattr(sys, "argv", [script, *arguments])
                gpu_case.main()
                return json.loads(output.read_text()) | {"host_taken_bytes": 1}
            ran.append(script)
            if script == "run_flexgen" and len(ran) == 1:
                return {"failed": "Traceback:\nout of memory"}
            args = {"run_flexgen": run_flexgen, "accelerate_gpu_offload": accelerate_gpu_offload}[script].arguments(
                arguments
            )
            rows = args.batch_size if "batch_size" in args else args.gpu_batch_size * args.num_gpu_batches
            limits = {"gpu_bytes": args.gpu_memory_bytes, "host_bytes": args.host_memory_bytes, "dtype": dtype[0]}
            return {
                "limits": limits,
                "generation_s": 2.0 + len(ran),
                "generated_tokens_per_s": rows * args.gen_len / (2.0 + len(ran)),
            }

        ran, dtype = [], ["float16"]

        def offload(*arguments, peers_dtype="float16"):
            dtype[0] = peers_dtype
            path = tmp_path / "offload.json"
            given = [
                "--shape", shape, "--policy", "cpu", "--device", "emulated:gpu-memory=96MiB", "--gpu-memory", "96MiB",
                "--host-memory", "3GiB", "--num-prompts", 8, "--prompt-len", 20, "--gen-len", 4, "--output", path,
                *arguments,
            ]  # fmt: skip
            monkeypatch.setattr(sys, "argv", ["gpu_offload", *map(str, given)])
            gpu_offload.main()
            return json.loads(path.read_text())

        monkeypatch.setattr(gpu_offload, "run", run)
        offload.ran = ran
        return offload

    def test_two_rounds_in_turn_with_ratios_of_each(self, offload):
        result = offload()
        assert offload.ran == ["run_flexgen"] * 3 + ["accelerate_gpu_offload"] + [
            "run_flexgen",
            "accelerate_gpu_offload",
        ]
        assert [r["variant"] for r in result["flexgen"]["runs"]] == [0, 1, 2, 1]
        assert result["flexgen"]["runs"][0]["failed"].endswith("out of memory")
        for engine in ("flexgen", "accelerate"):
            pairs = zip(result["batchgen"]["rounds"], result[engine]["rounds"], strict=True)
            assert (
                result["times"][engine] == pytest.approx([a / b for a, b in pairs])
                and len(result["times"][engine]) == 2
            )
        assert result["batchgen_policy"] == "plain: cpu" and result["batchgen"]["runs"][0]["block"] == 8
        assert all(r["of_bound"] > 0 for e in gpu_offload.ENGINES for r in result[e]["runs"] if "failed" not in r)
        assert result["batchgen"]["runs"][0]["rows"] == 8

    def test_an_engine_that_always_fails_is_told_in_a_line(self, offload, capsys):
        offload("--engines", "flexgen", "accelerate", "--rounds", 1, "--variants", 1)
        summary = capsys.readouterr().out.splitlines()[-1]
        assert summary.startswith("summary: flexgen failed: out of memory, accelerate ")
        assert summary.endswith(" generated tokens/s")
        offload.ran.clear()
        with pytest.raises(SystemExit, match=r"^gpu_offload: flexgen failed: out of memory$"):
            offload("--engines", "flexgen", "--rounds", 1, "--variants", 1)

    def test_engines_with_other_limits_are_no_comparison(self, offload):
        with pytest.raises(SystemExit, match="that is no comparison"):
            offload(peers_dtype="bfloat16")

    def test_without_a_planner_a_planned_job_is_refused(self, offload, monkeypatch, capsys):
        monkeypatch.setattr(gpu_offload, "find_spec", lambda name: None if name == "highspy" else object())
        with pytest.raises(SystemExit):
            offload("--policy", "planned")
        assert "highspy not installed, so nothing can be planned: --policy cpu or streamed" in capsys.readouterr().err

    def test_who_takes_more_host_memory_than_allowed_is_stopped(self, tmp_path):
        free = iter([10_000, 9_500, 9_000, *[8_999] * 10_000])
        found = gpu_offload.run(["sh", "-c", "sleep 60"], tmp_path / "out", 60, 1000, lambda: next(free))
        assert found == {"failed": "took more host memory than 1,000 bytes"}

    def test_an_engine_ends_with_the_part_that_runs_it(self, tmp_path):
        """Or it would keep the card from the parts that come after."""
        begun, pipe = tmp_path / "begun", tmp_path / "pipe"
        os.mkfifo(pipe)
        engine = ["sh", "-c", f"exec 3>{pipe}; touch {begun}; sleep 600"]
        program = (
            f"import gpu_offload, pathlib; gpu_offload.run({engine}, pathlib.Path({str(tmp_path)!r}, 'out'), 600, 9e9)"
        )
        command = [sys.executable, "-c", program]
        part = gpu_processes._start(gpu_processes.Task(command, 600, tmp_path / "log", BENCHMARKS, os.environ))
        with ThreadPoolExecutor(1) as readers:
            ended = readers.submit(pipe.read_bytes)
            while not begun.exists():
                assert part.poll() is None, (tmp_path / "log").read_text()
                time.sleep(0.05)
            gpu_processes._end(part)
            assert ended.result(timeout=600) == b""

    def test_what_was_taken_is_in_the_result(self, tmp_path):
        free = iter([10_000, 9_500, *[9_900] * 10_000])
        program = "import sys, time; time.sleep(0.3); open(sys.argv[-1], 'w').write('{}')"
        found = gpu_offload.run([sys.executable, "-S", "-c", program], tmp_path / "out", 60, 1000, lambda: next(free))
        assert found == {"host_taken_bytes": 500}

    @pytest.mark.parametrize(
        ("script", "limit_s", "said"),
        [("exit 3", 600, "exit status 3"), ("echo broken >&2", 600, "broken"), ("sleep 60", 0.3, "longer")],
    )
    def test_what_went_wrong_is_told(self, tmp_path, script, limit_s, said):
        found = gpu_offload.run(["sh", "-c", script], tmp_path / "out", limit_s, 1 << 60)
        assert said in found["failed"]


def test_other_packages_are_out_of_reach_in_a_rehearsal(tmp_path):
    """What is not listed cannot be imported, nor found: as if it were not installed."""
    gpu_rehearsal.link_packages(gpu_rehearsal.with_required(gpu_rehearsal.PACKAGES), tmp_path / "packages")
    program = (
        "import click, numpy, pluggy, pytest, importlib.util, importlib.metadata\n"
        "assert importlib.util.find_spec('highspy') is None\n"
        "assert not {'xdist', 'timeout'} & {p.name for p in importlib.metadata.entry_points(group='pytest11')}\n"
        "import xxhash\n"
    )
    environment = {"PYTHONPATH": str(tmp_path / "packages")}
    done = subprocess.run([sys.executable, "-S", "-c", program], capture_output=True, text=True, env=environment)
    assert done.stderr.endswith("No module named 'xxhash'\n"), done.stderr


def test_kernels_of_an_installation_are_within_reach_in_a_rehearsal():
    """Also where its environment is a folder of the checkout."""
    kernels = gpu_rehearsal.gpu_check.KERNELS
    installed = gpu_rehearsal.gpu_check.ROOT / ".venv" / "site-packages" / "batchgen" / "ops" / kernels.name
    assert gpu_rehearsal.package_of_kernels(installed) == {"batchgen"}
    assert gpu_rehearsal.package_of_kernels(kernels) == set()


def test_profiles_are_measured_without_gguf(monkeypatch):
    from batchgen.profiler import overheads

    monkeypatch.setitem(sys.modules, "gguf", None)
    assert overheads._gguf_load_bytes_per_s() is None


def test_made_for_what_is_asked_for(shape):
    """Rates that gpu_rates.py writes are those that gpu_bound.py reads."""
    assert set(asdict(Rates(1, 1, 1, 1))) == set(TestOffload.RATES)
    assert importlib.util.find_spec("gpu_bound") is not None
    with pytest.raises(InputError):
        gpu_case.run(gpu_case.arguments([str(shape), "--device", "cpu", "--policy", "cpu", "--output", "x"]))
