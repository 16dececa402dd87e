"""The cost model and the simulator count the constant time of a call to the disk once for a micro-batch of a layer."""

from dataclasses import replace

import pytest
from planner_cases import cpu_box, gpu_box, opt

from batchgen.core.workload import Workload
from batchgen.planner.costs import layer_lanes
from batchgen.planner.linear import number
from batchgen.planner.phases import Phase
from batchgen.planner.prediction import plan_of
from batchgen.planner.problem import Allowed, problem_of
from batchgen.planner.search import search
from batchgen.planner.simulation import simulate_job

CALL_S, BATCHES, LAYERS = 1e-3, 2, 4
KV_ON_DISK = Allowed(("cpu",), ("disk",))


def candidate_on(hardware, allowed=KV_ON_DISK):
    workload = Workload.uniform(16, 100, 8)
    model = opt(1024, LAYERS, 16)
    problem = problem_of(
        hardware,
        model,
        workload,
        dtype="float16",
        max_num_seqs=16,
        num_gpu_batches=BATCHES,
        max_model_len=2048,
        process_bytes=700 << 20,
    )
    return problem, search(replace(problem, allowed=allowed))


def test_each_micro_batch_waits_for_its_calls_where_the_cores_compute():
    hardware = cpu_box()
    problem, candidate = candidate_on(hardware)
    plan, busy_s = plan_of(problem, candidate), []
    for overhead_s in (0.0, CALL_S):
        machine = replace(hardware, disk_call_overhead_s=overhead_s)
        busy_s.append(simulate_job(plan, problem.model, machine).busy_s)
    sweeps = simulate_job(plan, problem.model, hardware).sweeps
    written = (busy_s[1]["disk_write"] - busy_s[0]["disk_write"]) / CALL_S
    assert written == pytest.approx(sweeps * LAYERS * BATCHES, rel=0.2)
    read = (busy_s[1]["disk_read"] - busy_s[0]["disk_read"]) / CALL_S
    assert 0 < read <= written


@pytest.mark.parametrize(("box", "times"), [(cpu_box, BATCHES), (gpu_box, 0)], ids=["CPU", "GPU"])
def test_the_cost_model_counts_as_many_calls(box, times):
    """A thread beside a GPU is woken at once."""
    _, candidate = candidate_on(box())
    s, phase = candidate.inputs, Phase(1, 0, 0, 16, 100.0)
    slower = replace(s, hardware=replace(s.hardware, disk_call_overhead_s=CALL_S))
    lanes, with_calls = (layer_lanes(one, phase, candidate.counts.placement(one)) for one in (s, slower))
    for lane in ("disk_read", "disk_write"):
        assert number(with_calls[lane]) - number(lanes[lane]) == pytest.approx(times * CALL_S, abs=1e-9)


def test_weights_are_read_by_one_call_for_a_layer_of_a_sweep():
    problem, candidate = candidate_on(cpu_box(), Allowed(("disk",), ("cpu",)))
    plan = plan_of(problem, candidate)
    runs = [
        simulate_job(plan, problem.model, replace(cpu_box(), disk_call_overhead_s=overhead_s))
        for overhead_s in (0.0, CALL_S)
    ]
    read = (runs[1].busy_s["disk_read"] - runs[0].busy_s["disk_read"]) / CALL_S
    assert read == pytest.approx(runs[0].sweeps * LAYERS, abs=2)  # those of the next sweep are under way
    s, phase = candidate.inputs, Phase(1, 0, 0, 16, 100.0)
    slower = replace(s, hardware=replace(s.hardware, disk_call_overhead_s=CALL_S))
    lanes, with_calls = (layer_lanes(one, phase, candidate.counts.placement(one)) for one in (s, slower))
    assert number(with_calls["disk_read"]) - number(lanes["disk_read"]) == pytest.approx(CALL_S, rel=0.01)
