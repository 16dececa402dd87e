"""From hardware, model and workload to a plan: which profile, which budgets, what if, and plans as files."""

import itertools
import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from known_plans import plan_problem
from planner_cases import GIB, cpu_box, gpu_box, llama_8b, opt
from thorough import quick_or

from batchgen.core.device import Device
from batchgen.core.errors import InputError
from batchgen.core.hardware import HARDWARE_VARIABLE, ComputeRates
from batchgen.core.plan import Plan
from batchgen.core.workload import Lengths, Workload
from batchgen.job import machine_profile
from batchgen.job.given_hardware import given_hardware
from batchgen.job.given_plan import read_plan, runnable
from batchgen.job.job import Job, resolve_job
from batchgen.job.machine_profile import on_this_machine
from batchgen.job.options import JobOptions
from batchgen.job.planning import plan_job, problem_here, problem_of_job
from batchgen.job.what_if import what_if
from batchgen.job.workload import EstimatedWorkload
from batchgen.models.files import ModelFiles, resolve_model
from batchgen.planner.balance import with_unequal_batches
from batchgen.planner.explain import make_plan
from batchgen.planner.memory_requirements import most_kv_tokens
from batchgen.planner.problem import Loading, problem_of
from batchgen.planner.search import search
from batchgen.planner.sizes import group_bytes
from batchgen.planner.startup import loading_s
from batchgen.profiler.shipped import shipped_profile, shipped_profiles

CPU, EMULATED = Device("cpu"), Device("emulated", GIB)
SMALL = opt(1024, 12, 16)
GIVEN = {"model_name": "small", "dtype": "float16", "max_model_len": 512}
WORKLOAD = Workload(300, Lengths((50, 80, 120)), Lengths((10, 40)), 64, shared_prefix_len=16)
ESTIMATED = EstimatedWorkload(WORKLOAD, True)


def make(hardware=None, model=SMALL, workload=WORKLOAD, **given):
    return plan_problem(problem_of(hardware or cpu_box(), model, workload, **GIVEN | given))


def job_of(name="small", dtype="float16", context=512, device=CPU, config=SMALL, **options):
    return Job(
        JobOptions(name, None, None, **options), ModelFiles(Path(), "hf", name), config, dtype, device, context,
        Path(), None, None, None,
    )  # fmt: skip


@pytest.fixture(scope="module")
def in_memory():
    return make(disk_memory=0)


def complaint(function, *args, **options):
    with pytest.raises(InputError) as caught:
        function(*args, **options)
    assert len(str(caught.value).splitlines()) == 1
    return str(caught.value)


class TestGivenHardware:
    @pytest.fixture(autouse=True)
    def nothing_is_named(self, monkeypatch):
        monkeypatch.delenv(HARDWARE_VARIABLE, raising=False)

    def test_a_file(self, tmp_path):
        path = tmp_path / "box.json"
        path.write_text(json.dumps(gpu_box().to_json()))
        assert given_hardware(str(path)) == gpu_box()

    def test_one_that_ships(self):
        for name in shipped_profiles():
            assert given_hardware(name) is shipped_profile(name)

    def test_neither(self, tmp_path):
        assert "--hardware tpu: no such file" in complaint(given_hardware, "tpu")
        assert "a100, a10g" in complaint(given_hardware, "tpu")
        assert "Is a directory" in complaint(given_hardware, str(tmp_path))

    def test_none(self):
        assert given_hardware(None) is None and given_hardware("") is None

    def test_the_environment_names_one(self, monkeypatch):
        monkeypatch.setenv(HARDWARE_VARIABLE, "a100")
        assert given_hardware(None).name == "a100"
        assert given_hardware("t4").name == "t4"
        assert given_hardware("") is None
        monkeypatch.setenv(HARDWARE_VARIABLE, "tpu")
        assert "$BATCHGEN_HARDWARE tpu: no such file" in complaint(given_hardware, None)


class TestBudgets:
    def test_all_of_the_machine_unless_told_otherwise(self):
        budgets = problem_of(gpu_box(), SMALL, WORKLOAD, **GIVEN).budgets
        assert budgets == {"gpu": 12 * GIB, "cpu": 48 * GIB, "disk": 450 * GIB}
        less = GIVEN | {"gpu_memory": 3 * GIB, "cpu_memory": 4 * GIB, "disk_memory": 0}
        assert problem_of(gpu_box(), SMALL, WORKLOAD, **less).budgets == {"gpu": 3 * GIB, "cpu": 4 * GIB, "disk": 0}
        assert "gpu" not in problem_of(cpu_box(), SMALL, WORKLOAD, **GIVEN).budgets

    @pytest.mark.parametrize(
        ("hardware", "changes", "said"),
        [
            (cpu_box(), {"gpu_memory": GIB}, "--gpu-memory is given, but cpu box has no GPU"),
            (cpu_box(), {"gpu_memory": 0}, "--gpu-memory is given, but cpu box has no GPU"),
            (gpu_box(), {"gpu_memory": 13 * GIB}, "--gpu-memory 13.0 GiB is more than gpu box has (12.0 GiB)"),
            (cpu_box(), {"cpu_memory": 33 * GIB}, "--cpu-memory 33.0 GiB is more than cpu box has (32.0 GiB)"),
            (gpu_box(), {"disk_memory": 501 * GIB}, "--disk-memory 501.0 GiB is more than gpu box has"),
            (gpu_box(), {"gpu_memory": 0}, "--gpu-memory must be above 0"),
            (gpu_box(), {"cpu_memory": 0}, "--cpu-memory must be above 0"),
            (cpu_box(), {"cpu_memory": 1 << 20, "disk_memory": 0}, "no plan fits"),
        ],
    )
    def test_what_the_machine_does_not_have(self, hardware, changes, said):
        assert said in complaint(make, hardware, **changes)

    def test_the_plan_stays_within_them(self):
        plan = make(gpu_box(), gpu_memory=GIB, cpu_memory=3 * GIB, max_num_seqs=64)
        for tier, parts in plan.prediction.memory_bytes.items():
            assert sum(parts.values()) <= plan.budgets[tier]
        assert plan.prediction.total_s >= make(gpu_box(), max_num_seqs=64).prediction.total_s

    def test_this_machines_memory_for_a_job_that_runs_here(self):
        here = on_this_machine(cpu_box(cpu_memory_bytes=1))
        assert 100 << 20 < here.cpu_memory_bytes < 1 << 46
        assert replace(here, cpu_memory_bytes=1) == cpu_box(cpu_memory_bytes=1)

    def test_this_gpus_memory_for_a_job_that_runs_here_with_the_rates_of_another_one(self, monkeypatch):
        """With `--hardware t4` on a larger card the memory is that of the larger card, not of a T4."""
        monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (90 * GIB, 96 * GIB))
        here = on_this_machine(gpu_box(gpu_memory_bytes=GIB))
        assert problem_of(here, SMALL, WORKLOAD, **GIVEN, gpu_memory=80 * GIB).budgets["gpu"] == 80 * GIB


class TestWhatIf:
    def test_a_size_is_the_machines_and_the_budget_alike(self):
        job, hardware = what_if(job_of(), gpu_box(), {"gpu-memory": "48GiB", "cpu-memory": "8GB"})
        assert hardware == gpu_box(gpu_memory_bytes=48 * GIB, cpu_memory_bytes=8 * 10**9)
        assert (job.gpu_memory, job.cpu_memory) == (48 * GIB, 8 * 10**9)
        assert problem_of_job(job, hardware, ESTIMATED, startup_s=0.0).budgets["gpu"] == 48 * GIB

    def test_a_budget_of_nothing_and_none_at_all(self):
        none = replace(job_of(), disk_memory=0)
        assert what_if(none, gpu_box(), {"disk-memory": "x2"})[0].disk_memory == 0
        assert what_if(none, gpu_box(), {"disk-memory": "+1GiB"})[0].disk_memory == GIB
        assert what_if(job_of(), gpu_box(), {"disk-memory": "x1"}) == (job_of(), gpu_box())

    def test_a_budget_that_processes_share_grows_for_each_of_them(self):
        shared = replace(job_of(), cpu_memory=8 * GIB, of_host=2)
        changed, _ = what_if(shared, gpu_box(), {"cpu-memory": "+4GiB"})
        assert changed.cpu_memory == 16 * GIB and changed.process_memory["cpu_memory"] == 8 * GIB

    @pytest.mark.parametrize(
        ("name", "field"),
        [
            ("h2d", "h2d_bytes_per_s"),
            ("d2h", "d2h_bytes_per_s"),
            ("disk-read", "disk_read_bytes_per_s"),
            ("disk-write", "disk_write_bytes_per_s"),
            ("dram", "dram_bytes_per_s"),
        ],
    )
    def test_a_rate(self, name, field):
        for text in ("7GB/s", "7GB", "7000000000B/s"):
            assert what_if(job_of(), gpu_box(), {name: text}) == (job_of(), gpu_box(**{field: 7 * 10**9}))
        now = getattr(gpu_box(), field)
        assert what_if(job_of(), gpu_box(), {name: "+7GB/s"}) == (job_of(), gpu_box(**{field: now + 7 * 10**9}))
        assert what_if(job_of(), gpu_box(), {name: "x1.5"}) == (job_of(), gpu_box(**{field: now * 1.5}))

    def test_more_of_a_size_is_added_to_the_machine_and_to_a_budget(self):
        job = replace(job_of(), gpu_memory=8 * GIB)
        for text, machine, budget in (("+4GiB", 16, 12), ("x2", 24, 16), ("x0.5", 6, 4)):
            changed, hardware = what_if(job, gpu_box(), {"gpu-memory": text})
            assert (hardware.gpu_memory_bytes, changed.gpu_memory) == (machine * GIB, budget * GIB)
            unlimited, _ = what_if(job_of(), gpu_box(), {"gpu-memory": text})
            assert (
                problem_of_job(unlimited, hardware, ESTIMATED, startup_s=0.0).budgets["gpu"]
                == hardware.gpu_memory_bytes
            )

    def test_more_is_never_slower(self):
        model = opt(5120, 40, 40)
        base = make(gpu_box(), model, max_num_seqs=32).prediction.total_s
        for change in ({"gpu-memory": "48GiB"}, {"h2d": "25GB/s", "d2h": "25GB/s"}):
            job, hardware = what_if(job_of(), gpu_box(), change)
            faster = make(hardware, model, max_num_seqs=32, gpu_memory=job.gpu_memory)
            assert faster.prediction.total_s < base

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"gpu": "48GiB"}, "--what-if gpu: give one of gpu-memory, cpu-memory"),
            ({"gpu-memory": "lots"}, "'lots' is not a size"),
            ({"gpu-memory": "0"}, "--what-if gpu-memory=0 must be above 0"),
            ({"gpu-memory": "-4GiB"}, "is not a size"),
            ({"gpu-memory": "x0"}, "--what-if gpu-memory=x0 must be above 0"),
            ({"gpu-memory": "48Gb/s"}, "is a rate, not a size: give --what-if gpu-memory=48GiB"),
            ({"gpu-memory": "48Gb"}, "is in bits, not bytes"),
            ({"gpu-memory": "48"}, "has no unit: give --what-if gpu-memory=48GiB"),
            ({"h2d": "25"}, "has no unit: give --what-if h2d=25GB/s, h2d=+25GB/s or h2d=x2"),
            ({"h2d": "25Gb/s"}, "is in bits, not bytes"),
            ({"h2d": "fast"}, "'fast' is not a rate"),
            ({"gpu-memory": "48GiB"}, "cpu box has no GPU"),
            ({"h2d": "12GB/s"}, "cpu box has no GPU"),
        ],
    )
    def test_changes_that_make_no_sense(self, changes, said):
        hardware = cpu_box() if "no GPU" in said else gpu_box()
        assert said in complaint(what_if, job_of(), hardware, changes)


class TestLoading:
    def test_no_faster_than_the_slower_of_disk_and_loader(self):
        size = SMALL.num_params * 2
        assert loading_s(cpu_box(), SMALL, "float16", "hf") == pytest.approx(size / 2e9)
        assert loading_s(cpu_box(disk_read_bytes_per_s=5e8), SMALL, "float16", "hf") == pytest.approx(size / 5e8)
        assert loading_s(cpu_box(), SMALL, "float32", "hf") == pytest.approx(2 * size / 2e9)

    def test_a_gguf_at_its_own_rate_if_it_is_known(self):
        assert loading_s(cpu_box(), SMALL, "float16", "gguf") == loading_s(cpu_box(), SMALL, "float16", "hf")
        slow = cpu_box(gguf_load_bytes_per_s=1e8)
        assert loading_s(slow, SMALL, "float16", "gguf") == pytest.approx(SMALL.num_params * 2 / 1e8)
        assert loading_s(slow, SMALL, "float32", "gguf") == pytest.approx(SMALL.num_params * 4 / 1e8)

    def test_stages_read_together_what_the_whole_model_does(self):
        """A stage has no embedding or output matrix of another one, in blocks either."""
        ends = (("embed", "q8_0"), ("lm_head", "q8_0"))
        whole = replace(SMALL, tied_embeddings=False, end_formats=ends)
        cuts = itertools.pairwise(range(whole.num_layers + 1))
        stages = [loading_s(cpu_box(), whole.stage(*cut), "float16", "hf", "q4_0") for cut in cuts]
        assert min(stages) > 0
        assert sum(stages) == pytest.approx(loading_s(cpu_box(), whole, "float16", "hf", "q4_0"), rel=1e-3)

    def test_weights_as_found_are_read_as_they_are(self):
        layers = SMALL.num_layers * sum(group_bytes(SMALL, "float16", "q4_0").values())
        rest = (SMALL.num_params - SMALL.layer_params) * 2
        box = cpu_box(gguf_load_bytes_per_s=1e8)
        wanted = layers / 2e9 + rest / 1e8
        assert loading_s(box, SMALL, "float16", "gguf", "q4_0") == pytest.approx(wanted)
        assert loading_s(cpu_box(), SMALL, "float16", "store", "q4_0") == pytest.approx((layers + rest) / 2e9)

    def test_a_gguf_on_a_slow_disk_has_fewer_bytes_to_be_read(self):
        box = cpu_box(gguf_load_bytes_per_s=4e9, disk_read_bytes_per_s=1e8)
        assert loading_s(box, SMALL, "float16", "gguf") < loading_s(box, SMALL, "float16", "hf") / 2
        assert loading_s(box, SMALL, "float16", "gguf") > SMALL.num_params * 0.5 / 1e8

    def test_grows_with_the_model(self):
        times = [
            loading_s(cpu_box(), model, "float16", "hf") for model in (SMALL, opt(5120, 40, 40), opt(9216, 64, 72))
        ]
        assert 0 < times[0] < times[1] < times[2]

    def test_is_part_of_the_job(self):
        in_memory, in_4_s = (Loading(seconds, store_bytes=1 << 50) for seconds in (0.0, 4.0))
        plain, late = make(loading={"float16": in_memory}), make(startup_s=3.0, loading={"float16": in_4_s})
        assert (plain.prediction.startup_s, late.prediction.startup_s) == (0, 7)
        assert late.prediction.total_s == pytest.approx(plain.prediction.total_s + 7)
        assert late.prediction.low_s >= 7

    def test_kv_pages_are_provided_as_they_are_first_used(self):
        given = {"max_num_seqs": 64, "num_gpu_batches": 1, "disk_memory": 0}

        def first_touch_s(rate, rows=300, box=cpu_box):
            workload = Workload.uniform(rows, 100, 20)
            return make(box(first_touch_bytes_per_s=rate), workload=workload, **given).prediction.startup_s

        assert first_touch_s(None) == 0
        assert 0 < first_touch_s(4e9) == pytest.approx(first_touch_s(1e9) / 4)
        times = [first_touch_s(1e9, rows) for rows in (8, 30, 60)]
        assert 0 < times[0] < times[1] < times[2]
        # Pages are used again: ten times the rows need no more of them.
        assert first_touch_s(1e9, 3000) == first_touch_s(1e9, 300)
        token_bytes = 2 * 2 * SMALL.num_layers * 1024
        assert first_touch_s(1e9, 64) == pytest.approx(64 * 120 * token_bytes / 1e9)
        # With all KV on the GPU the host has none to provide.
        assert first_touch_s(1e9, box=partial(gpu_box, cpu=ComputeRates())) == 0


class TestRunnable:
    def runnable(self, plan, *job, **changes):
        return runnable(plan, job_of(*job, **changes))

    def test_a_plan_for_this_job(self, in_memory):
        assert self.runnable(in_memory) is in_memory

    def test_a_plan_for_another(self, in_memory):
        assert "--plan is for small in float16, not large in float16" in complaint(self.runnable, in_memory, "large")
        assert "not small in float32" in complaint(self.runnable, in_memory, dtype="float32")
        assert "--max-model-len 512" in complaint(self.runnable, in_memory, context=2048)

    def test_a_plan_for_another_device(self, in_memory):
        on_gpu = make(gpu_box())
        assert "--plan is for a machine with a GPU: give --device cuda, or emulated" in complaint(self.runnable, on_gpu)
        assert self.runnable(on_gpu, device=EMULATED) is on_gpu
        assert "--plan is for the CPU: leave out --device emulated" in complaint(
            self.runnable, in_memory, device=EMULATED
        )

    def test_a_plan_with_a_disk_and_several_batches(self):
        given = {"model_name": "llama", "max_num_seqs": 8, "num_gpu_batches": 2}
        plan = make(cpu_box(cpu_memory_bytes=12 * GIB), llama_8b(), **given)
        assert plan.placement_bytes["weights"]["disk"] > 0 and plan.policy.num_gpu_batches == 2
        assert self.runnable(plan, "llama", config=llama_8b()) is plan

    def test_a_plan_for_other_layers(self, in_memory):
        said = f"--plan does not place the {llama_8b().num_layers} layers of this model"
        assert said in complaint(self.runnable, in_memory, config=llama_8b())

    @pytest.mark.parametrize(
        ("name", "option", "stored"),
        [("weight_format", "weights", "int4"), ("weight_format", "weights", "int8"),
         ("kv_format", "kv_cache_dtype", "int5"), ("kv_format", "kv_cache_dtype", "int8")],
    )  # fmt: skip
    def test_a_plan_in_4_or_8_bits(self, in_memory, name, option, stored):
        plan = replace(in_memory, policy=replace(in_memory.policy, **{name: stored}))
        flag = "--" + option.replace("_", "-")
        assert f"--plan has {stored} where {flag} is" in complaint(self.runnable, plan)
        assert self.runnable(plan, **{option: stored}) is plan
        assert f"--plan has float16 where {flag} is {stored}" in complaint(self.runnable, in_memory, **{option: stored})
        other = {"int4": "int8", "int5": "int8", "int8": "int4" if name == "weight_format" else "int5"}[stored]
        assert f"--plan has {stored} where {flag} is {other}" in complaint(self.runnable, plan, **{option: other})

    def test_weights_as_found_need_less_memory(self):
        """A budget that the expanded ones do not fit."""
        stores = dict.fromkeys(("float16", "q4_0"), Loading(store_bytes=GIB))
        given = {"model_name": "llama", "disk_memory": 0, "loading": stores}
        box = cpu_box(cpu_memory_bytes=10 * GIB)
        assert "no plan fits" in complaint(make, box, llama_8b(), **given)
        plan = make(box, llama_8b(), weights="q4_0", **given)
        assert plan.policy.weight_format == "q4_0"
        model = llama_8b()
        matrices = sum(rows * columns for group in model.layer_matrices.values() for rows, columns in group)
        stored = model.num_layers * (matrices * 18 / 32 + 2 * (model.params_per_layer - matrices))
        assert plan.placement_bytes["weights"]["cpu"] == pytest.approx(
            stored + 2 * (model.embedding_params + model.head_params)
        )

    def test_without_a_disk_all_is_in_memory(self, in_memory):
        used = {tier for tiers in in_memory.placement_bytes.values() for tier, size in tiers.items() if size}
        assert used == {"cpu"} and in_memory.policy.kv_seqs == {"cpu": in_memory.policy.max_num_seqs}
        assert "no plan fits" in complaint(
            make,
            cpu_box(cpu_memory_bytes=8 * GIB),
            llama_8b(),
            disk_memory=0,
            loading={"float16": Loading(store_bytes=GIB)},
        )


class TestPlanFiles:
    @pytest.mark.parametrize("box", [cpu_box, gpu_box])
    def test_survive_a_round_trip(self, box, tmp_path):
        plan = make(box())
        path = tmp_path / "plan.json"
        path.write_text(json.dumps(plan.to_json()))
        assert read_plan(str(path)) == plan

    def test_that_cannot_be_read(self, tmp_path):
        assert "nothing.json cannot be read: No such file" in complaint(read_plan, str(tmp_path / "nothing.json"))
        assert "Is a directory" in complaint(read_plan, str(tmp_path))

    @pytest.mark.parametrize("content", ["", "{", "\x00"])
    def test_that_hold_no_json(self, tmp_path, content):
        path = tmp_path / "plan.json"
        path.write_text(content)
        assert "plan.json is not valid JSON" in complaint(read_plan, str(path))

    @pytest.mark.parametrize("values", [{}, [], "plan", 5, None], ids=repr)
    def test_that_hold_something_else(self, tmp_path, values):
        path = tmp_path / "plan.json"
        path.write_text(json.dumps(values))
        assert "not a plan" in complaint(read_plan, str(path))

    @pytest.mark.parametrize(
        ("field", "value"),
        [
            ("policy", None), ("policy", {}), ("workload", {}), ("prediction", {}), ("prediction/total_s", ...),
            ("policy/admission", ...), ("policy/gpu_batch_size", 0), ("policy/gpu_batch_size", "many"),
            ("policy/num_kv_blocks", 1.5), ("policy/max_model_len", True), ("policy/max_num_seqs", 3),
            ("policy/weight_layers", 5), ("workload/prompt_len", 5), ("budget", {}),
            ("policy/embedding_tier", "attic"), ("policy/embedding_tier", 5), ("policy/embedding_tier", None),
            ("policy/head_tier", "attic"), ("policy/kv_layers", 1), ("policy/kv_layers", None),
            ("policy/on_demand_tokens", -1), ("policy/packed_tokens", -1),
            ("policy/balance_tokens", 10),  # in batches of equal size
        ],
    )  # fmt: skip
    def test_that_were_edited_badly(self, in_memory, field, value):
        values = json.loads(json.dumps(in_memory.to_json()))
        inner = values
        *outer, last = field.split("/")
        for name in outer:
            inner = inner[name]
        if value is ...:
            del inner[last]
        else:
            inner[last] = value
        assert "not a plan" in complaint(Plan.from_json, values)

    @pytest.mark.parametrize(
        ("changes", "budgets", "words"),
        [
            ({"kv_layers": 3}, {"gpu": 1}, "below 3, not 3"),
            ({"kv_layers": -1}, {"gpu": 1}, "below 3, not -1"),
            ({"kv_layers": 2, "kv_seqs": {"streamed": 4, "cpu": 4}}, {"gpu": 1}, "of placement 'streamed'"),
            ({"kv_layers": 2}, {}, "for a machine with a GPU"),
            ({"kv_layers": 2}, {"gpu": 1}, None),
        ],
    )
    def test_layers_whose_kv_stays(self, in_memory, changes, budgets, words):
        values = json.loads(json.dumps(in_memory.to_json()))
        layers = {group: [3, 0, 0] for group in values["policy"]["weight_layers"]}
        values["policy"] |= {"weight_layers": layers, "kv_seqs": {"streamed": 8}} | changes
        values["budgets"] |= budgets
        if words:
            assert words in complaint(Plan.from_json, values)
        else:
            assert Plan.from_json(values).policy.kv_layers == 2

    @pytest.mark.parametrize(
        ("budgets", "words"), [({"gpu": 1}, "head_tier 'disk' is for a machine without a GPU"), ({}, None)]
    )
    def test_an_output_matrix_on_disk(self, in_memory, budgets, words):
        values = json.loads(json.dumps(in_memory.to_json()))
        values["policy"]["head_tier"] = "disk"
        values["budgets"] |= budgets
        if words:
            assert words in complaint(Plan.from_json, values)
        else:
            assert Plan.from_json(values).policy.head_tier == "disk"

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"balance_tokens": -1}, "a number of 0 or more, not -1"),
            ({"batch_order": "even"}, "two micro-batches in batch_order 'neo'"),
            ({"num_gpu_batches": 4, "max_num_seqs": 16}, "two micro-batches in batch_order 'neo'"),
            ({}, None),
            ({"balance_tokens": None, "num_gpu_batches": 4, "max_num_seqs": 16}, None),
        ],
    )
    def test_batches_of_unequal_size(self, in_memory, changes, words):
        values = json.loads(json.dumps(in_memory.to_json()))
        unequal = {
            "gpu_batch_size": 4,
            "num_gpu_batches": 2,
            "max_num_seqs": 8,
            "batch_order": "neo",
            "balance_tokens": 9,
        }
        values["policy"] |= unequal | changes
        if words:
            assert words in complaint(Plan.from_json, values)
        else:
            assert Plan.from_json(values).to_json()["policy"]["balance_tokens"] == values["policy"]["balance_tokens"]

    def test_that_were_edited_well(self, in_memory):
        values = json.loads(json.dumps(in_memory.to_json()))
        values["policy"] |= {"gpu_batch_size": 7, "max_num_seqs": 7}
        assert Plan.from_json(values).policy.max_num_seqs == 7


def test_kv_pools_hold_the_block_at_full_length(in_memory):
    assert most_kv_tokens(in_memory) >= in_memory.policy.max_num_seqs * (120 + 64)


@pytest.mark.parametrize(
    ("options", "field", "value"),
    [
        ({"admission": "static"}, "admission", "static"),
        ({"admission": "continuous"}, "admission", "continuous"),
        ({"max_num_seqs": 24}, "max_num_seqs", 24),
        ({"max_num_batched_tokens": 333}, "max_num_batched_tokens", 333),
        ({"num_gpu_batches": 4, "max_num_seqs": 32}, "num_gpu_batches", 4),
        ({"share_prefixes": False}, "share_prefixes", False),
        ({"max_model_len": 700}, "max_model_len", 700),
    ],
    ids=str,
)
def test_what_is_asked_for_is_in_the_plan(options, field, value):
    options = {"max_num_seqs": 16, "num_gpu_batches": 1} | options  # so that the search is short
    assert getattr(make(gpu_box(), **options).policy, field) == value


def test_a_prediction_adds_up(in_memory):
    predicted = in_memory.prediction
    assert 0 < predicted.low_s <= predicted.total_s <= predicted.high_s
    assert predicted.bottleneck == max(predicted.lane_s, key=predicted.lane_s.get)
    assert predicted.generated_tokens_per_s == pytest.approx(300 * 25 / predicted.total_s)
    assert predicted.total_tokens_per_s == pytest.approx(300 * (25 + 250 / 3) / predicted.total_s)
    assert predicted.bound_s <= 1.05 * predicted.total_s  # one by the cost model, the other by simulation


def test_more_rows_take_longer():
    counts = quick_or((1, 30, 300), (1, 10, 100, 1000, 10_000))
    times = [make(workload=replace(WORKLOAD, num_seqs=rows)).prediction.total_s for rows in counts]
    assert all(b > a for a, b in itertools.pairwise(times))


@pytest.mark.parametrize(
    ("kv_placements", "costed", "order"),
    [
        (("gpu", "cpu"), "neo", "neo"),
        (("streamed", "cpu"), "neo", "neo"),
        (("cpu",), "neo", "neo"),
        (("gpu", "cpu"), "even", "even"),
        (("gpu", "streamed"), "mixed", "mixed"),
        (("gpu",), "mixed", "even"),
        (("gpu", "streamed"), "neo", "even"),
        (("cpu",), "mixed", "even"),
        (("gpu",), "neo", "even"),
    ],
)
def test_two_batches_are_in_another_order_where_they_were_costed_so_and_it_has_something_to_part(
    kv_placements, costed, order
):
    problem = problem_of(gpu_box(), SMALL, WORKLOAD, **GIVEN, num_gpu_batches=2, max_num_seqs=16)
    best = search(problem)
    share, rest = divmod(16, len(kv_placements))
    seqs = {name: share + (i < rest) for i, name in enumerate(kv_placements)}
    placed = replace(best, incumbent=replace(best.incumbent, counts=replace(best.counts, kv_seqs=seqs)))
    if costed == "neo":
        placed = replace(placed, inputs=with_unequal_batches(placed.inputs, seqs.get("cpu", 0)))
    else:
        placed = replace(placed, inputs=replace(placed.inputs, batch_order=costed))
    policy = make_plan(problem, placed, startup_s=0.0).policy
    assert policy.batch_order == order and policy.kv_seqs == seqs
    assert (policy.balance_tokens is not None) == (order == "neo")


def test_memory_that_others_take_after_the_job_began_is_not_planned_with(tiny_models, monkeypatch):
    """Where no budget was given, there is none to complain of."""
    path, _ = tiny_models("llama")
    workload = EstimatedWorkload(Workload.uniform(8, 16, 4), True)

    def planning_here(**options):
        job = resolve_job(
            JobOptions(str(path), "in.jsonl", "out.jsonl", dtype="float32", **options), resolve_model(str(path))
        )
        left = job.budgets["cpu"] - (1 << 20)
        monkeypatch.setattr(machine_profile, "available_memory_bytes", lambda: left)
        monkeypatch.setattr(machine_profile, "resident_bytes", lambda: 0)
        return problem_here(job, workload, started_s=0.0), left

    (job, problem), left = planning_here()
    assert plan_job(job, problem).budgets["cpu"] == job.cpu_memory == left
    given, _ = planning_here(cpu_memory="2GiB")
    assert "--cpu-memory 2.0 GiB is more than" in complaint(plan_job, *given)
