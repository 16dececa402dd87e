"""`batchgen plan`, `run --plan` and the plan in front of every run, as a person meets them."""

import html
import itertools
import json
import random
import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from command_line import invoke, planned, planned_json, refused
from processes import batchgen as in_process
from thorough import quick_or

import batchgen
from batchgen.core.plan import Plan
from batchgen.job import machine_profile, planning
from batchgen.job.given_plan import read_plan

PROGRAM = Path(sys.executable).with_name("batchgen")  # as installed
WORDS = ("ferry", "harbour", "onions", "captain", "quay", "lemons", "timetable", "winter", "islands", "slate")


def program(*args, cwd):
    return subprocess.run([PROGRAM, *map(str, args)], capture_output=True, text=True, cwd=cwd)


@pytest.fixture(autouse=True)
def process_of_one_size(monkeypatch):
    """A test's process has grown by whatever ran before it."""
    monkeypatch.setattr(planning, "process_bytes", lambda: 700 << 20)


@pytest.fixture(scope="module")
def model(tiny_models):
    return str(tiny_models("llama")[0])


@pytest.fixture(scope="module")
def table(tmp_path_factory):
    rng = random.Random(3)
    path = tmp_path_factory.mktemp("rows") / "rows.parquet"
    pq.write_table(pa.table({"prompt": [" ".join(rng.choices(WORDS, k=rng.randint(2, 20))) for _ in range(40)]}), path)
    return str(path)


@pytest.fixture(scope="module")
def opt_30b(tmp_path_factory):
    """Its configuration and nothing else."""
    path = tmp_path_factory.mktemp("opt-30b") / "config.json"
    config = {
        "architectures": ["OPTForCausalLM"],
        "hidden_size": 7168,
        "num_hidden_layers": 48,
        "num_attention_heads": 56,
        "ffn_dim": 28672,
        "vocab_size": 50272,
        "max_position_embeddings": 2048,
        "torch_dtype": "float16",
    }
    path.write_text(json.dumps(config))
    return str(path)


LENGTHS = ("--num-prompts", 48, "--input-len", 256, "--output-len", 32)
FEW = ("--num-prompts", quick_or(8, 48))  # where the number of sequences does not matter: the search is shorter


def on_t4(model, *args):
    return ["-m", model, "--hardware", "t4", *LENGTHS, *args]


def job(model, table, output, *args):
    return ["-m", model, "-i", table, "-o", output, "--max-tokens", 4, "--dtype", "float32", *args]


class TestElsewhere:
    """A model that is only a configuration, on a machine that is only a profile."""

    @pytest.fixture
    def explained(self, opt_30b, tmp_path):
        path = tmp_path / "plan.json"
        return planned(*on_t4(opt_30b, "--explain", "--compare", "-o", path)), json.loads(path.read_text())

    def test_says_what_for(self, explained):
        first, second = explained[0].splitlines()[:2]
        assert re.fullmatch(r"opt-30b\d* in float16 on t4", first)
        assert second == "48 sequences, prompts of 256 tokens (256 to 256), outputs of 32"

    def test_shows_where_everything_is(self, explained):
        text, plan = explained
        assert re.search(r"^ +GPU +CPU +disk$", text, re.M)
        for kind in ("weights", "KV", "activations"):
            cells = re.search(rf"^{kind} +(.*)$", text, re.M)[1]
            sizes = [float(size) for size in re.findall(r"([\d.]+) GiB", cells)]
            assert sizes == pytest.approx([b / 2**30 for b in plan["placement_bytes"][kind].values()], abs=0.006)
            assert sum(int(percent) for percent in re.findall(r"(\d+)%", cells)) == pytest.approx(100, abs=1)
        weights = sum(plan["placement_bytes"]["weights"].values())
        assert weights == pytest.approx(30e9 * 2, rel=0.02)

    def test_marks_the_lane_that_binds(self, explained):
        text, plan = explained
        lanes = text[text.index("lane ") : text.index("\nmemory ")].strip().splitlines()[1:]
        assert len(lanes) >= 3 and [line.endswith("<- binding") for line in lanes] == [True] + [False] * (
            len(lanes) - 1
        )
        assert plan["prediction"]["bottleneck"] in ("compute", "h2d")
        shares = [int(re.search(r"(\d+)%", line)[1]) for line in lanes]
        assert shares == sorted(shares, reverse=True) and shares[0] <= 100

    def test_shows_memory_within_its_budget(self, explained):
        text, plan = explained
        assert re.search(r"^memory +peak +budget$", text, re.M)
        assert re.search(r"^GPU +1\d\.\d GiB +15\.0 GiB +weights", text, re.M)
        for tier, parts in plan["prediction"]["memory_bytes"].items():
            assert sum(parts.values()) <= plan["budgets"][tier]

    def test_predicts_with_a_range_and_says_what_more_would_buy(self, explained):
        text, plan = explained
        assert re.search(r"predicted: .* \(.* to .*\); a block takes", text, re.M)
        assert re.search(
            r"^12,288 prompt tokens and 1,536 generated ones: .*; [\d.,]+ generated tokens/s, ", text, re.M
        )
        predicted = plan["prediction"]
        assert predicted["low_s"] < predicted["total_s"] < predicted["high_s"]
        assert 48 * 32 / predicted["generated_tokens_per_s"] == pytest.approx(predicted["total_s"])
        bought = text[text.index("would save") :]
        assert re.search(r"^  (10 % more|1 GiB more) [\w ]+: [\d.]+ (s|min).* \([\d.]+%\)$", bought, re.M)
        assert ", re-planned " in bought

    def test_stands_beside_this_machine(self, explained):
        text, _ = explained
        columns = re.search(r"^hardware +(\w+) +(\w+)$", text, re.M)
        assert columns and columns.groups() == ("zen4", "t4")

    def test_nothing_is_measured_for_another_machine(self, opt_30b, monkeypatch):
        def measure(*args, **options):
            raise AssertionError("this machine is measured")

        monkeypatch.setattr("batchgen.job.plan.problem_here", measure)
        for name in ("load_or_measure", "recall", "probed", "probe_disk", "available_memory_bytes"):
            monkeypatch.setattr(machine_profile, name, measure)
        assert "t4" in planned(*on_t4(opt_30b, *FEW, "--explain"))
        assert "give --hardware too" in refused("plan", "-m", opt_30b, *LENGTHS, "--compare")

    def test_text_json_and_page_explain_the_same(self, opt_30b, tmp_path):
        page, file = tmp_path / "plan.html", tmp_path / "plan.json"
        money = ("--price-per-hour", 2, "--watts", 300)
        text = planned(*on_t4(opt_30b, *FEW, "--explain", *money, "--html", page, "-o", file))
        explained = json.loads(file.read_text())["explanation"]
        assert read_plan(str(file)).prediction.total_s == explained["total_s"]
        hours = explained["total_s"] / 3600
        assert explained["cost"] == pytest.approx(2 * hours) and explained["energy_kwh"] == pytest.approx(0.3 * hours)
        shown = html.unescape(page.read_text())
        for sentence in explained["sentences"]:
            assert sentence in text.splitlines() and sentence in shown
        assert any("of weights stay in host memory" in sentence for sentence in explained["sentences"])
        for stage in explained["stages"]:
            assert re.search(rf"^{stage['name']} +[\d.]+ (s|min)", text, re.M) and f"<td>{stage['name']}</td>" in shown
        for line in text.splitlines():
            if line.startswith(("cost: ", "energy: ")) or "prompt tokens" in line:
                assert line in shown
        assert all(f"  {price['what']}: " in text for price in explained["prices"])
        said = refused("plan", *on_t4(opt_30b, *FEW, "--price-per-hour", 0))
        assert said == "--price-per-hour must be above 0, not 0"

    def test_rows_in_flight_are_no_more_than_there_are(self, opt_30b):
        lines = planned(*on_t4(opt_30b, "--num-prompts", 10, "--num-gpu-batches", 8)).splitlines()
        assert ", 10 in flight," in lines[0]

    def test_json_is_what_the_file_holds(self, opt_30b, tmp_path):
        path = tmp_path / "plan.json"
        shown = planned_json(*on_t4(opt_30b, "-o", path))
        assert shown == json.loads(path.read_text()) == json.loads(planned(*on_t4(opt_30b, "-o", "-")))
        assert read_plan(str(path)) == Plan.from_json(shown)
        assert shown["hardware"] == "t4" and shown["policy"]["weight_format"] == "float16"

    @pytest.mark.parametrize(
        ("hardware", "device", "said"),
        [
            ("t4", "cpu", "the profile of t4 has no rates of products on its CPU"),
            ("zen4", "cuda", "zen4 has no GPU"),
            ("zen4", "emulated:gpu-memory=2GiB", "is emulated on this machine"),
            ("t4", "emulated:gpu-memory=2GiB", "is emulated on this machine"),
            ("t4", "tpu", "device 'tpu' is not supported"),
        ],
    )
    def test_a_device_that_its_machine_has_not_is_refused(self, opt_30b, hardware, device, said):
        args = (
            "--num-prompts",
            "8",
            "--input-len",
            "8",
            "--output-len",
            "2",
            "--hardware",
            hardware,
            "--device",
            device,
        )
        assert said in refused("plan", "-m", opt_30b, *args)

    def test_a_card_that_is_not_here_is_planned_for_by_its_profile(self, opt_30b, monkeypatch):
        monkeypatch.setattr("batchgen.core.device.why_no_cuda", lambda: "there is none")
        args = ("--num-prompts", "8", "--input-len", "8", "--output-len", "2", "--device", "cuda")
        said = refused("plan", "-m", opt_30b, *args)
        assert said.startswith("--device cuda: torch finds no CUDA device here: ")
        named = re.findall(r"[\w-]+", said.partition("--hardware ")[2])
        assert "h100" in named and "zen4" not in named
        assert planned_json("-m", opt_30b, *args, "--hardware", "h100")["hardware"] == "h100"

    @pytest.mark.parametrize(("hardware", "device"), [("t4", "cuda"), ("zen4", "cpu")])
    def test_a_device_that_its_machine_has_may_be_named(self, model, hardware, device):
        args = ("--num-prompts", "8", "--input-len", "8", "--output-len", "2", "--hardware", hardware)
        assert planned("-m", model, *args, "--device", device) == planned("-m", model, *args)

    def test_a_directory_and_its_config_are_the_same_model(self, opt_30b):
        policies = [planned_json(*on_t4(path))["policy"] for path in (opt_30b, Path(opt_30b).parent)]
        assert policies[0] == policies[1]

    def test_what_if_stands_beside_it(self, opt_30b):
        text = planned(*on_t4(opt_30b, "--what-if", "gpu-memory=48GiB", "--what-if", "h2d=25GB/s"))
        header = text.splitlines().index("") + 1
        labels = re.split(r"  +", text.splitlines()[header].strip())
        assert labels == ["now", "gpu-memory=48GiB", "h2d=25GB/s", "gpu-memory=48GiB, h2d=25GB/s"]
        now, memory, link, both = map(
            float, re.search(r"^speed-up" + r" +([\d.]+)x(?: \(a tie\))?" * 4 + "$", text, re.M).groups()
        )
        assert now == 1 <= min(memory, link) and 1.2 < both >= max(memory, link) - 0.02
        assert float(re.search(r"^weights +GPU (\d+)%.*GPU (\d+)%", text, re.M)[2]) > 50

    def test_a_change_that_leaves_no_plan_by_itself(self, opt_30b):
        less, more = ("cpu-memory=2GiB", "gpu-memory=200GiB")
        text = planned(*on_t4(opt_30b, *FEW, "--disk-memory", 0, "--what-if", less, "--what-if", more))
        header = text.splitlines().index("") + 1
        assert re.split(r"  +", text.splitlines()[header].strip()) == ["now", more, f"{less}, {more}"]
        assert re.search(rf"^{less}: no plan fits", text, re.M)
        said = refused("plan", *on_t4(opt_30b, *FEW, "--disk-memory", 0, "--what-if", less))
        assert "no plan fits" in said

    def test_what_if_more_memory_alone_is_no_slower(self, opt_30b):
        text = planned(*on_t4(opt_30b, "--what-if", "gpu-memory=48GiB"))
        assert float(re.search(r"^speed-up +1.00x +([\d.]+)x(?: \(a tie\))?$", text, re.M)[1]) >= 1

    def test_frontier(self, opt_30b):
        text = planned("-m", opt_30b, "--hardware", "t4", "--num-prompts", 16, "--input-len", 64, "--output-len", 8,
                    "--frontier")  # fmt: skip
        lines = text[text.index("block latency") :].strip().splitlines()[1:]
        cells = [re.split(r"  +", line) for line in lines]
        assert len(cells) >= 4
        rates = [float(rate.replace(",", "")) for _, rate, *_ in cells]
        sizes = [int(block.split(" x ")[0]) * int(block.split(" x ")[1]) for _, _, block, _ in cells]
        assert all(a < b for a, b in itertools.pairwise(rates)) and max(sizes) == 16

    def test_a_latency_bound_costs_throughput(self, opt_30b):
        free = planned_json(*on_t4(opt_30b))["prediction"]
        bound = free["block_latency_s"] * 0.8
        kept = planned_json(*on_t4(opt_30b, "--max-block-latency", f"{bound:.3f}s"))["prediction"]
        assert kept["block_latency_s"] <= bound + 1e-3 and kept["total_s"] > free["total_s"]
        said = refused("plan", *on_t4(opt_30b, *FEW, "--max-block-latency", "1s"))
        assert "no plan has a block latency of 1 s" in said and "give --max-block-latency at least" in said

    def test_4_bit_weights_and_kv_only_where_asked_for(self, opt_30b):
        little = (*FEW, "--cpu-memory", "24GiB")  # 16-bit weights have to come from disk
        plain = planned_json(*on_t4(opt_30b, *little))
        weights = planned_json(*on_t4(opt_30b, *little, "--weights", "int4"))
        both = planned_json(*on_t4(opt_30b, *little, "--weights", "int4", "--kv-cache-dtype", "int5"))
        eight = planned_json(*on_t4(opt_30b, *little, "--weights", "int8", "--kv-cache-dtype", "int8"))
        formats = [(p["policy"]["weight_format"], p["policy"]["kv_format"]) for p in (plain, weights, both, eight)]
        assert formats == [("float16", "float16"), ("int4", "float16"), ("int4", "int5"), ("int8", "int8")]
        # Half of what 16 bits take to be streamed.
        assert plain["prediction"]["total_s"] > eight["prediction"]["total_s"]
        assert plain["prediction"]["total_s"] > weights["prediction"]["total_s"]

    def test_flags_are_kept(self, opt_30b):
        policy = planned_json(*on_t4(opt_30b, "--max-num-seqs", 24, "--num-gpu-batches", 2, "--admission", "static",
                                  "--max-num-batched-tokens", 2048, "--max-model-len", 512,
                                  "--no-enable-prefix-caching"))["policy"]  # fmt: skip
        assert (policy["gpu_batch_size"], policy["num_gpu_batches"], policy["admission"]) == (12, 2, "static")
        assert (policy["max_num_batched_tokens"], policy["max_model_len"], policy["share_prefixes"]) == (
            2048,
            512,
            False,
        )

    def test_samples_are_sequences(self, opt_30b):
        workload = planned_json(*on_t4(opt_30b, *FEW, "-n", 3, "--temperature", 0.7))["workload"]
        assert workload["num_seqs"] == 3 * FEW[1]

    def test_infeasible_jobs_are_told_the_smallest_change(self, opt_30b):
        budget = {"--cpu-memory": "10GiB", "--disk-memory": "8GiB"}

        def flags(**changes):
            return on_t4(opt_30b, *FEW, *itertools.chain.from_iterable((budget | changes).items()))

        said = refused("plan", *flags())
        assert said.startswith("no plan fits: the model's weights take 55.8 GiB") and "--weights int4" in said
        for flag in budget:
            amount = float(re.search(rf"{flag} ([\d.]+) GiB", said)[1])
            assert planned_json(*flags(**{flag: f"{amount + 0.1:.1f}GiB"}))["prediction"]["total_s"] > 0
            assert "no plan fits" in refused("plan", *flags(**{flag: f"{amount - 1:.1f}GiB"}))


class TestHere:
    def test_an_input_is_sampled(self, model, table):
        found = planned_json("-m", model, "-i", table, "--max-tokens", 4)
        assert found["workload"]["num_seqs"] == 40 and found["hardware"] == "zen4" and found["dtype"] == "float32"
        assert found["workload"]["output_len"]["values"] == [4] * 40
        assert set(found["budgets"]) == {"cpu", "disk"}
        limited = planned_json("-m", model, "-i", table, "--limit", 10, "--shard", "1/2", "--expected-output-len", 2)
        assert limited["workload"]["num_seqs"] == 5 and limited["workload"]["output_len"]["values"] == [2] * 5

    def test_a_plan_is_shown_in_three_lines_and_a_table_of_strategies(self, model, table):
        lines = planned("-m", model, "-i", table).splitlines()
        assert [line.split("  ")[0] for line in lines[3:]] == [
            "", "strategy", "streamed", "in memory", "quantized", "chosen",
        ]  # fmt: skip
        assert lines[2].startswith("with --quality small: ")
        assert lines[0].startswith("plan: 40 sequences of ") and re.match(
            r"predicted: .* \(.* to .*\), bound by", lines[1]
        )

    def test_a_config_file_of_a_run_will_do(self, model, table, tmp_path):
        path = tmp_path / "job.toml"
        path.write_text(f'model = "{model}"\ninput = "{table}"\noutput = "o.jsonl"\nmax-tokens = 3\noverwrite = true\n')
        assert planned_json("--config", path)["workload"]["max_output_len"] == 3


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], ["give an --input", "--num-prompts, --input-len and --output-len"]),
        (["--num-prompts", 8, "--input-len", 8], ["give an --input"]),
        (["--num-prompts", 0, "--input-len", 8, "--output-len", 8], ["--num-prompts must be at least 1, not 0"]),
        (["--num-prompts", 8, "--input-len", -8, "--output-len", 8], ["--input-len must be at least 1, not -8"]),
        (["--num-prompts", 8, "--input-len", 8, "--output-len", 0], ["--output-len must be at least 1, not 0"]),
        (["--num-prompts", 8, "--input-len", 500, "--output-len", 32], ["exceed the context of 512"]),
        (["-i", "TABLE", "--num-prompts", 8], ["stand in for an --input"]),
        (["-i", "nothing.parquet"], ["nothing.parquet"]),
        (["-i", "EMPTY"], ["no rows"]),
        (["-i", "UNUSABLE"], ["none of the 2 rows", "null"]),
        (["-i", "TABLE", "--prompt-column", "text"], ["'text'", "no such column"]),
        (["-i", "TABLE", "--hardware", "tpu"], ["--hardware tpu", "t4"]),
        (["-i", "TABLE", "--hardware", "BADPROFILE"], ["dram_bytes_per_s must be a number above 0, not -1"]),
        (["-i", "TABLE", "--gpu-memory", "8GiB"], ["--gpu-memory is given, but no GPU is used"]),
        (["-i", "TABLE", "--cpu-memory", "90000GiB"], ["--cpu-memory 87.9 TiB is more than"]),
        (["-i", "TABLE", "--cpu-memory", "0"], ["--cpu-memory must be above 0"]),
        (["-i", "TABLE", "--cpu-memory", "800MiB", "--disk-memory", "0"], ["no plan fits", "--cpu-memory"]),
        (["-i", "TABLE", "--hardware", "t4", "--gpu-memory", "0"], ["--gpu-memory must be above 0"]),
        (["-i", "TABLE", "--hardware", "t4", "--gpu-memory", "16GiB"], ["more than t4 has (15.0 GiB)"]),
        (["-i", "TABLE", "--cpu-memory", "much"], ["'much' is not a size"]),
        (["-i", "TABLE", "--what-if", "gpu-memory"], ["is not NAME=SIZE"]),
        (["-i", "TABLE", "--what-if", "gpu-memory=48GiB"], ["zen4 has no GPU"]),
        (["-i", "TABLE", "--what-if", "patience=48GiB"], ["--what-if patience", "gpu-memory"]),
        (["-i", "TABLE", "--what-if", "dram=0"], ["must be above 0"]),
        (["-i", "TABLE", "--what-if", "dram=8parsecs"], ["'8parsecs' is not a rate", "dram=25GB/s"]),
        (["-i", "TABLE", "--what-if", "dram=x2", "--what-if", "dram=x3"], ["--what-if dram is given twice"]),
        (["-i", "TABLE", "--max-block-latency", "soon"], ["'soon' is not a duration"]),
        (["-i", "TABLE", "--max-block-latency", "0s"], ["--max-block-latency must be above 0"]),
        (["-i", "TABLE", "--max-num-seqs", 0], ["--max-num-seqs must be at least 1, not 0"]),
        (["-i", "TABLE", "--max-num-batched-tokens", -1], ["--max-num-batched-tokens must be at least 1"]),
        (["-i", "TABLE", "--num-gpu-batches", 0], ["--num-gpu-batches must be at least 1, not 0"]),
        (["-i", "TABLE", "--expected-output-len", 0], ["--expected-output-len must be at least 1, not 0"]),
        (["-i", "TABLE", "--max-model-len", 0], ["max_model_len must be between 2 and the model's context of 512"]),
        (["-i", "TABLE", "--max-model-len", 513], ["max_model_len must be between 2"]),
        (["-i", "TABLE", "--max-tokens", 0], ["max_tokens must be at least 1"]),
        (["-i", "TABLE", "-o", "/nowhere/plan.json"], ["-o /nowhere/plan.json cannot be written"]),
        (["-m", "nothing/at/all", *LENGTHS], ["nothing/at/all"]),
        (["-m", "CONFIG", "-i", "TABLE"], ["tokenizer"]),
    ],
    ids=lambda value: " ".join(map(str, value))[:50] or "nothing",
)
def test_mistakes_get_one_clear_line(model, opt_30b, table, tmp_path, args, words):
    empty, unusable, profile = tmp_path / "empty.parquet", tmp_path / "unusable.parquet", tmp_path / "profile.json"
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), empty)
    pq.write_table(pa.table({"prompt": pa.array([None, ""], pa.string())}), unusable)
    from batchgen.profiler.shipped import shipped_profile

    profile.write_text(json.dumps(shipped_profile("zen4").to_json() | {"dram_bytes_per_s": -1}))
    names = {"TABLE": table, "EMPTY": empty, "UNUSABLE": unusable, "BADPROFILE": profile, "CONFIG": opt_30b}
    args = [names.get(a, a) for a in args]
    said = refused("plan", *([] if "-m" in args else ["-m", model]), *args)
    for word in words:
        assert word in said


def test_errors_of_the_real_program(opt_30b, tmp_path):
    found = program("plan", *on_t4(opt_30b, "--gpu-memory", "48GiB"), cwd=tmp_path)
    assert (found.returncode, found.stdout) == (2, "") and found.stderr.count("\n") == 1
    assert found.stderr == "batchgen: --gpu-memory 48.0 GiB is more than t4 has (15.0 GiB): give at most that\n"


POLICY = ("--max-num-seqs", 8, "--max-num-batched-tokens", 96, "--admission", "static", "--no-enable-prefix-caching")


class TestRunPlan:
    @pytest.fixture(scope="class")
    def plan_file(self, model, table, tmp_path_factory):
        path = tmp_path_factory.mktemp("plan") / "plan.json"
        planned("-m", model, "-i", table, "--max-tokens", 4, *POLICY, "-o", path)
        return path

    def test_the_job_runs_as_planned(self, model, table, tmp_path, plan_file):
        output, report = tmp_path / "out.jsonl", tmp_path / "r.json"
        code = in_process(
            ["run", *job(model, table, output, "--plan", plan_file, "--report", report)], tmp_path / "log"
        )
        said = (tmp_path / "log").read_text()
        assert code == 0, said
        report, planned = json.loads(report.read_text()), json.loads(plan_file.read_text())
        # How large the pool is in the end depends on the memory that is free.
        assert report["policy"] | {"kv_blocks": 0} == planned["policy"] | {"kv_blocks": 0}
        assert report["policy"]["max_num_seqs"] == 8 and report["policy"]["admission"] == "static"
        assert report["predicted_wall_s"] == planned["prediction"]["total_s"] and report["wall_s"] > 0
        assert report["hardware"] == "zen4" and report["cached_prompt_tokens"] == 0
        assert "plan: 40 sequences" in said and "predicted: " in said

    def test_and_gives_what_it_gives_without(self, model, table, tmp_path, plan_file):
        outputs = [tmp_path / "with.jsonl", tmp_path / "without.jsonl"]
        for output, args in zip(outputs, (["--plan", plan_file], []), strict=True):
            assert invoke("run", *job(model, table, output, *args, "--progress", "none"))[0] == 0
        assert outputs[0].read_text() == outputs[1].read_text()

    def test_plans_for_something_else(self, model, tiny_models, table, tmp_path, plan_file):
        output = tmp_path / "o.jsonl"
        other = str(tiny_models("qwen2")[0])
        said = refused("run", *job(other, table, output, "--plan", plan_file))
        assert Path(model).name in said and Path(other).name in said and "batchgen plan" in said
        said = refused("run", *job(model, table, output, "--plan", plan_file, "--max-model-len", 128))
        assert "--max-model-len 512" in said
        path = tmp_path / "other.json"
        planned("-m", model, "-i", table, "--hardware", "t4", "--dtype", "float32", "-o", path)
        assert "--plan is for a machine with a GPU" in refused("run", *job(model, table, output, "--plan", path))
        assert not list(tmp_path.glob("o.jsonl*/parts/*")) and not output.exists()

    @pytest.mark.parametrize(
        "flags",
        [["--max-num-seqs", 4], ["--max-num-batched-tokens", 64], ["--admission", "continuous"], ["--hardware", "zen4"],
         ["--no-enable-prefix-caching"]],
        ids=lambda flags: flags[0],
    )  # fmt: skip
    def test_a_plan_leaves_nothing_to_say(self, model, table, tmp_path, plan_file, flags):
        said = refused("run", *job(model, table, tmp_path / "o.jsonl", "--plan", plan_file, *flags))
        assert said.startswith("--plan says it all") and flags[0] in said

    def test_files_that_are_no_plan(self, model, table, tmp_path):
        bad = tmp_path / "bad.json"
        for content, words in (("[1]", "not a plan"), ("{", "not valid JSON"), (None, "cannot be read")):
            bad.unlink(missing_ok=True)
            if content:
                bad.write_text(content)
            assert words in refused("run", *job(model, table, tmp_path / "o.jsonl", "--plan", bad))


class TestEveryRun:
    def test_says_before_and_after_how_long(self, model, table, tmp_path):
        report = tmp_path / "r.json"
        code, stdout, stderr = invoke("run", *job(model, table, tmp_path / "o.jsonl", "--report", report))
        assert code == 0
        values = json.loads(report.read_text())
        assert 0 < values["predicted"]["low_s"] <= values["predicted_wall_s"] <= values["predicted"]["high_s"]
        assert values["predicted_wall_s"] == values["predicted"]["total_s"] and values["wall_s"] > 0
        assert re.search(r"plan: 40 sequences of \d+ \+ 4 tokens", stderr, re.M)
        assert re.search(r"predicted: .* \(.* to .*\), bound by ", stderr, re.M)
        assert re.search(r"^done in [\d.]+ s \(predicted [\d.]+ s(, [\d.]+ s when 3% of it was done)?\)", stdout, re.M)

    def test_keeps_to_flags(self, model, table, tmp_path):
        report = batchgen.run(model, table, tmp_path / "o.jsonl", max_tokens=2, max_num_seqs=3, admission="static",
                              max_num_batched_tokens=40, share_prefixes=False, dtype="float32")  # fmt: skip
        policy = report["policy"]
        assert (policy["max_num_seqs"], policy["max_num_batched_tokens"], policy["admission"]) == (3, 40, "static")
        assert policy["share_prefixes"] is False and report["predicted_wall_s"] > 0

    def test_dry_run_shows_the_plan(self, model, table, tmp_path):
        code, stdout, _ = invoke("run", *job(model, table, tmp_path / "o.jsonl", "--dry-run"))
        assert code == 0 and "plan: 40 sequences" in stdout and "predicted: " in stdout
        _, stdout, _ = invoke("run", *job(model, table, tmp_path / "o.jsonl", "--dry-run", "--json"))
        assert Plan.from_json(json.loads(stdout)["plan"]).workload.num_seqs == 40
        assert not list(tmp_path.iterdir())

    def test_cannot_take_a_gpus_rates(self, model, table, tmp_path):
        said = refused("run", *job(model, table, tmp_path / "o.jsonl", "--hardware", "t4"))
        assert "t4 has a GPU" in said and "batchgen plan" in said

    def test_a_resumed_job_plans_the_rows_that_are_left(self, model, tmp_path, monkeypatch):
        table = tmp_path / "rows.jsonl"
        rows = [f"The ferry left at {i}" for i in range(80)]
        rows[70] = None  # where --on-error fail stops
        table.write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows))
        args = job(model, table, tmp_path / "o.jsonl", "--max-num-seqs", 4, "--ignore-eos", "--progress", "plain")
        with monkeypatch.context() as patch:  # the row that fails would come at once
            patch.setattr("batchgen.engine.engine._in_order", lambda source, lengths, share_prefixes: source)
            code, _, message = invoke("run", *args, "--on-error", "fail")
        assert code == 1 and "row 70" in message
        report = tmp_path / "r.json"
        code, _, stderr = invoke("run", *args, "--report", report)
        values = json.loads(report.read_text())
        assert code == 0 and 32 <= values["rows_resumed"] <= 70
        left = 80 - values["rows_resumed"]
        planned = int(re.search(r"plan: (\d+) sequences", stderr, re.M)[1])
        assert abs(planned - left) <= 1  # one of them fails
        assert 0 < values["predicted_wall_s"] < 60 and f"{values['rows_resumed']} rows are done" in stderr

    def test_rows_that_fail_one_after_another_do_not_stop_it(self, model, tmp_path):
        """More of them than are sampled: nothing is known of the rows after."""
        table = tmp_path / "rows.jsonl"
        rows = [None, ""] * 150 + ["The ferry left", "The captain's dog"]
        table.write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows))
        code, _, stderr = invoke(
            "run", *job(model, table, tmp_path / "o.jsonl", "--progress", "plain", "--max-failed", "100%")
        )
        assert code == 0 and "none of the 256 rows sampled" in stderr
        result = [json.loads(line) for line in (tmp_path / "o.jsonl").read_text().splitlines()]
        assert [bool(row["error"]) for row in result] == [True] * 300 + [False] * 2
        code, _, _ = invoke("run", *job(model, table, tmp_path / "p.jsonl", "--limit", 5, "--progress", "none"))
        assert code == 4 and len((tmp_path / "p.jsonl").read_text().splitlines()) == 5
