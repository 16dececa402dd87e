"""Which measurement a job waits for, with rates and probes of its own."""

import math
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from planner_cases import GIB, opt
from tiny_gguf import write_tiny_gguf
from tiny_models import make_tiny_model
from tiny_tokenizers import make_tiny_tokenizer

from batchgen.core.cores import dedicated_core
from batchgen.core.device import Device
from batchgen.core.hardware import HARDWARE_VARIABLE
from batchgen.core.knowledge import DISK, MANY, MEASURED, SPEED, Knowledge
from batchgen.core.machine import available_cores
from batchgen.core.workload import Workload
from batchgen.engine.loader import TYPICAL_PROCESS_BYTES
from batchgen.job import machine_profile, plan
from batchgen.job.command_options import ProfileOptions
from batchgen.job.job import Job
from batchgen.job.machine_profile import for_device, knowledge_of_table, profile_here, record_of_machine
from batchgen.job.options import JobOptions
from batchgen.models.files import ModelFiles
from batchgen.ops import cpp as kernels
from batchgen.ops.instruction_set import follow_affinity
from batchgen.planner.sizes import store_bytes
from batchgen.profiler import kinds
from batchgen.profiler.cache import BUSY
from batchgen.profiler.kinds import table_of_kind
from batchgen.profiler.machine_record import read_record, update_record
from batchgen.profiler.shipped import shipped_profile
from batchgen.profiler.transfer import DiskRates

PRODUCTS = {SPEED: 1.0, MANY: 1.0}
DISK_RATES = DiskRates(2e8, 1e8, 1e-4, 1e-4, 1e-5, 2e-4)


@pytest.fixture
def job(tmp_path, monkeypatch):
    """job(tokens of prompts) -> its profile; job.probes and job.disks: seconds that each probe was given."""
    monkeypatch.delenv(HARDWARE_VARIABLE, raising=False)
    monkeypatch.setenv("BATCHGEN_CACHE", str(tmp_path / "cache"))

    monkeypatch.setattr(kinds, "instruction_set", lambda: "avx2")
    monkeypatch.setattr(kinds, "available_cores", lambda: 2)

    monkeypatch.setattr(machine_profile, "_BESIDE", SimpleNamespace(slowdown=lambda for_s=0.0: job.slowdown))

    def probed(known, trials, seconds):
        job.probes.append(seconds)
        return known.after(PRODUCTS, math.log(3), 0.05)

    def probe_disk(directory, seconds):
        job.disks.append(seconds)
        return job.disk

    def job(tokens, *, memory=8 * GIB, workload=None, **options):
        config = opt(1024, 12, 16)
        resolved = Job(
            JobOptions("small", None, None, **options), ModelFiles(tmp_path, "hf", "small"), config, "float32",
            Device("cpu"), 512, tmp_path, None, memory, None,
        )  # fmt: skip
        job.probes, job.disks = [], []
        return profile_here(resolved, workload or Workload.uniform(max(1, tokens // 256), 256, 1))

    job.disk, job.slowdown = DISK_RATES, 1.0
    monkeypatch.setattr(machine_profile, "probed", probed)
    monkeypatch.setattr(machine_profile, "probe_disk", probe_disk)
    return job


def test_a_short_job_measures_nothing(job):
    profile = job(256)
    assert (job.probes, job.disks) == ([], [])
    assert profile.knowledge.source == "this machine's kind"


def test_a_longer_one_probes_for_a_fiftieth_of_its_time_and_at_most_a_second(job):
    seconds = []
    for tokens in (8_192, 16_384, 100_000_000):
        assert job(tokens).knowledge.mean(PRODUCTS) == pytest.approx(math.log(3), rel=0.1)
        seconds += job.probes
        record_of_machine().unlink()
    assert seconds[1] == pytest.approx(2 * seconds[0]) and seconds[2] == 1.0
    assert 0.1 <= seconds[0] < 0.5


def test_what_is_known_is_not_probed_again(job):
    first = job(100_000_000)
    second = job(100_000_000)
    assert job.probes == [] and second.knowledge == first.knowledge
    assert first.knowledge.source == "this machine's kind and a probe of 1.0 s"


def test_what_earlier_jobs_have_shown_is_used(job):
    known = Knowledge(table_of_kind(), jobs=3).after(PRODUCTS, math.log(2), 0.05)
    update_record(record_of_machine(), lambda record: record.with_knowledge(known))
    fast, slow = job(256).cpu, job(256)
    assert slow.knowledge.source == "this machine's kind and 3 earlier jobs"
    assert fast.rates("gemm_flops_per_s", "float32") == slow.cpu.rates("gemm_flops_per_s", "float32")


def test_weights_that_may_stream_have_their_disk_probed_and_kept(job):
    profile = job(1_000_000, memory=GIB // 4)
    (seconds,) = job.disks
    assert 0 < seconds <= 1.0
    assert profile.disk_read_bytes_per_s == DISK_RATES.read_bytes_per_s
    assert profile.knowledge.deviation({DISK: 1.0}) < Knowledge("t").deviation({DISK: 1.0})
    assert list(read_record(record_of_machine()).disks.values()) == [DISK_RATES]
    job.disk = None  # it was full, or there was no time
    assert job(1_000_000, memory=GIB // 4).disk_read_bytes_per_s == DISK_RATES.read_bytes_per_s
    assert job(1_000_000).disk_read_bytes_per_s > 0 and job.disks == []


def test_a_long_row_is_a_long_job_by_its_attention_and_may_leave_its_memory_by_its_kv(job):
    """The model's products alone would take a tenth of the time, and its weights a tenth of the memory."""
    row = Workload.uniform(1, 131_072, 8)
    profile = job(256)
    config = opt(1024, 12, 16)
    pairs = row.num_seqs * 131_072**2 / 2
    attention_s = 12 * 4 * 1024 * pairs / profile.cpu.rates("prefill_attention_flops_per_s", "float32").at(context=2048)
    short, long = (
        machine_profile._rough_seconds(
            profile, SimpleNamespace(process_config=config, dtype="float32"), workload, streams=False
        )
        for workload in (Workload.uniform(512, 256, 8), row)
    )
    assert attention_s < long < short + 1.1 * attention_s and long > 5 * short
    memory = TYPICAL_PROCESS_BYTES + 4 * store_bytes(config, "float32", "native")
    job(None, memory=memory, workload=Workload.uniform(100_000, 256, 1))
    assert job.disks == []
    job(None, memory=memory, workload=row)
    assert len(job.disks) == 1


def test_a_process_that_leaves_little_for_the_weights_has_its_disk_probed(job):
    weights_bytes = store_bytes(opt(1024, 12, 16), "float32", "native")
    job(1_000_000, memory=2 * weights_bytes + TYPICAL_PROCESS_BYTES // 2)
    assert len(job.disks) == 1


def test_a_job_beside_others_is_expected_to_take_longer_but_the_machine_is_not_taken_for_slow(job):
    first = job(100_000_000)
    job.slowdown = 2.0
    beside = job(100_000_000)
    assert math.exp(beside.knowledge.mean(PRODUCTS) - first.knowledge.mean(PRODUCTS)) == pytest.approx(2)
    (kept,) = read_record(record_of_machine()).knowledge.values()
    assert kept.mean(PRODUCTS) == pytest.approx(first.knowledge.mean(PRODUCTS))


def test_a_measured_profile_is_used_where_there_is_one(job, monkeypatch):
    kind = job(256)
    measured = replace(kind, name="measured", knowledge=None)
    monkeypatch.setattr(machine_profile, "recall", lambda wanted, **where: measured)
    profile = job(100_000_000)
    assert job.probes == [] and profile.name == "measured"
    assert profile.knowledge.source == "this machine's measured rates"


def test_a_profile_that_was_measured_on_a_busy_machine_is_not_trusted():
    quiet, busy = knowledge_of_table(f"{MEASURED} cpu-1"), knowledge_of_table(f"{MEASURED} {BUSY} cpu-1")
    assert busy.deviation(PRODUCTS) > 2 * quiet.deviation(PRODUCTS)


def test_profile_measures_the_shapes_and_formats_of_the_model_that_is_named(tmp_path, monkeypatch):
    model = make_tiny_model("llama", tmp_path, hidden_size=256, intermediate_size=256)
    file = tmp_path / "model.gguf"
    write_tiny_gguf(model, file, tensor_type="Q4_0", tokenizer=make_tiny_tokenizer(tmp_path))
    asked = []

    def measured(wanted, offload_dir, *, refresh):
        asked.append(wanted)
        return shipped_profile("zen4")

    monkeypatch.setattr(plan, "measured_hardware", measured)
    plan.run_profile(ProfileOptions(model=str(file), device="cpu", dtype=("float32",)))
    plan.run_profile(ProfileOptions(device="cpu", dtype=("float32",)))
    of_model, of_any = asked
    assert of_model.model.hidden_size == 256 and of_model.weight_formats[0] == "q4_0"
    assert of_any.model is None and of_model.dtypes == of_any.dtypes == ("float32",)


@pytest.mark.skipif(available_cores() < 2, reason="an emulated device has a core of its own beside others")
def test_kernels_and_torch_keep_to_the_cores_that_are_measured():
    def threads():
        return sorted(os.sched_getaffinity(0)), kernels.num_threads(), torch.get_num_threads()

    before, (core, others) = threads(), dedicated_core()
    device = Device("emulated", GIB, 1e9, 1e9, slowdown=2.0)
    for known in (True, False):  # whether anybody had asked for the number of threads before
        if not known:
            follow_affinity()
        of_others, of_core = for_device(device, threads)
        assert of_core == (sorted(core), 1, 1)
        assert of_others == (sorted(others), *(min(count, len(others)) for count in before[1:]))
        assert threads() == before
