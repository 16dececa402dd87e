"""The plan is the candidate that the simulator finds fastest, and what it says is the prediction."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from planner_cases import cpu_box, gpu_box, opt
from thorough import some_of

from batchgen.core.errors import InputError
from batchgen.core.workload import Workload
from batchgen.models.config import ModelConfig
from batchgen.models.hf.config import config_of_hf
from batchgen.planner import part_of_layers
from batchgen.planner import plan_selection as choice
from batchgen.planner import sampled_simulation as sampled
from batchgen.planner.part_of_layers import layers_simulated
from batchgen.planner.phases import Phase
from batchgen.planner.plan_selection import Simulated, choose, plan_problem, simulate_candidates
from batchgen.planner.prediction import plan_of
from batchgen.planner.problem import Loading, problem_of
from batchgen.planner.sampled_simulation import simulate_sampled
from batchgen.planner.search import block_latency_s, candidates, first_rows_s
from batchgen.planner.simulation import simulate_job
from batchgen.profiler.shipped import shipped_profile

SHAPES = Path(__file__).parents[2] / "recipes" / "throughput" / "shapes"


def shape(name: str) -> ModelConfig:
    return config_of_hf(json.loads((SHAPES / name / "config.json").read_text()))


def llama_70b() -> ModelConfig:
    values = json.loads((SHAPES / "llama-3.1-8b" / "config.json").read_text())
    sizes = {"hidden_size": 8192, "num_hidden_layers": 80, "num_attention_heads": 64, "intermediate_size": 28672}
    return config_of_hf(values | sizes)


# The same of jobs of which only a part is simulated for a plan; before sweeps were jumped over, these were 28 and 13 %
# too short.
PARTS = {"128 + 128": Workload.uniform(1024, 128, 128), "256 + 32": Workload.uniform(1024, 256, 32)}

# machine, model, job, --weights: as the cost model alone would have it, 14 to 51 % slower than predicted.
CASES = {
    "OPT-6.7B in 4 bits": ("t4", shape("opt-6.7b"), Workload.uniform(72, 512, 32), "int4"),
    "Llama-70B": ("t4", llama_70b(), Workload.uniform(50, 1, 8), "native"),
    "Llama-8B": ("h100", shape("llama-3.1-8b"), Workload.uniform(700, 500, 2), "native"),
    "OPT-30B": ("t4", shape("opt-30b"), Workload.uniform(144, 512, 32), "native"),
    "OPT-30B, long prompts": ("t4", shape("opt-30b"), Workload.uniform(80, 1024, 32), "native"),
}


def problem_with(hardware, model, workload, **options):
    given = {"max_model_len": 2048, "process_bytes": 700 << 20} | options
    return problem_of(hardware, model, workload, dtype="float16", **given)


QUICK, LONG = list(CASES)[:3], list(CASES)[3:]


@pytest.mark.parametrize(
    "name", [*some_of(QUICK, 1, "chosen"), *(pytest.param(name, marks=pytest.mark.thorough) for name in LONG)]
)
def test_the_plan_is_within_5_percent_of_the_fastest_candidate(name):
    machine, model, workload, weights = CASES[name]
    hardware = shipped_profile(machine)
    problem = problem_with(hardware, model, workload, weights=weights)
    found = simulate_candidates(problem)
    assert len(found) >= 2
    whole = [simulate_job(plan_of(problem, s.candidate), model, hardware).total_s for s in found]
    for simulated, seconds in zip(found, whole, strict=True):
        assert simulated.seconds == pytest.approx(seconds, rel=0.05)
    best = choose(found)
    assert whole[found.index(best)] <= 1.05 * min(whole)
    plan = plan_problem(problem)
    assert plan.policy == plan_of(problem, best.candidate).policy
    predicted = plan.prediction
    rows_s = workload.num_seqs * hardware.row_overhead_s
    assert predicted.total_s - predicted.startup_s - rows_s == pytest.approx(best.seconds)


@pytest.mark.thorough
@pytest.mark.parametrize("name", PARTS)
def test_a_plan_is_within_10_percent_of_its_whole_job(name):
    hardware, model = shipped_profile("t4"), shape("opt-30b")
    problem = problem_with(hardware, model, PARTS[name])
    plan = plan_problem(problem)
    predicted_s = plan.prediction.total_s - plan.prediction.startup_s - 1024 * hardware.row_overhead_s
    assert predicted_s == pytest.approx(simulate_job(plan, model, hardware).total_s, rel=0.1)


@pytest.mark.parametrize(
    ("name", "num_batches"),
    [("OPT-6.7B in 4 bits", 1), ("OPT-6.7B in 4 bits", 2), ("Llama-70B", 4), ("Llama-8B", 1), ("Llama-8B", 4)],
)
def test_the_cost_model_knows_what_waits_for_what(name, num_batches):
    """Without activations that cross the bus and Steps behind a layer's weights it would be off by 14 to 46 %."""
    machine, model, workload, weights = CASES[name]
    options = {"weights": weights, "num_gpu_batches": num_batches}
    problem = problem_with(shipped_profile(machine), model, workload, **options)
    best = next(candidates(problem, 1))
    run = simulate_job(plan_of(problem, best), model, shipped_profile(machine))
    assert run.total_s == pytest.approx(best.seconds, rel=0.06)


def test_an_order_that_takes_much_longer_than_modelled_is_pruned(monkeypatch):
    """With several micro-batches and of one order; in more parts, sweeps are no nearer to the cost model."""
    problem = problem_with(cpu_box(), opt(1024, 12, 16), Workload.uniform(48, 100, 20), disk_memory=0)
    best = next(candidates(problem, 1))

    def modelled(seconds, num_batches, order="even", tokens=4096):
        inputs = replace(best.inputs, num_gpu_batches=num_batches, batch_order=order, max_num_batched_tokens=tokens)
        return replace(best, inputs=inputs, incumbent=replace(best.incumbent, seconds=seconds))

    offered = [
        modelled(100, 2), modelled(100, 2, "mixed"), modelled(140, 1), modelled(105, 4, tokens=8192),
        modelled(105, 4, "mixed", tokens=8192), modelled(145, 1), modelled(105, 4, "mixed"),
    ]  # fmt: skip
    took = {(2, "even"): 200.0, (2, "mixed"): 150.0, (1, "even"): 145.0, (4, "mixed"): 130.0}
    monkeypatch.setattr(choice, "candidates", lambda *args: iter(offered))
    monkeypatch.setattr(choice, "added_candidates", lambda *args: iter(()))

    class Run:
        settled = True

        def __init__(self, plan, candidate):
            self.seconds = took[candidate.inputs.num_gpu_batches, candidate.inputs.batch_order]

    monkeypatch.setattr(choice, "simulate_sampled", Run)
    found = [s.candidate for s in simulate_candidates(problem)]
    # 105 times 2 less a fifth is 175; 105 times 1.5 less a fifth is 131, below the 145 that are known; 105 times 1.5 is
    # 158.
    assert found == [offered[i] for i in (0, 1, 2, 4, 5)]


def test_neos_order_is_costed_and_tried():
    problem = problem_with(
        shipped_profile("t4"), shape("opt-6.7b"), Workload.uniform(72, 512, 32), weights="int4", num_gpu_batches=2
    )
    found = list(candidates(problem, 4))
    orders = [plan_of(problem, candidate).policy.batch_order for candidate in found]
    assert "neo" in orders and set(orders) <= {"even", "mixed", "neo"}
    for candidate, order in zip(found, orders, strict=True):
        on_cpu = candidate.counts.kv_seqs["cpu"]
        if 0 < on_cpu < candidate.inputs.max_num_seqs:
            assert order != "even", "the CPU would have nothing to do beside the first micro-batch"
    neo = found[orders.index("neo")]
    assert neo.inputs.balance is not None


def test_where_all_is_in_memory_sweeps_are_short():
    """A first sweep of all prompts would be no faster, and nothing would be saved before its end."""
    problem = problem_with(cpu_box(), opt(1024, 12, 16), Workload.uniform(48, 1100, 2), disk_memory=0)
    plan = plan_problem(problem)
    assert plan.policy.max_num_batched_tokens <= 8192 < 48 * 1100


def test_kv_stays_off_the_disk_where_that_saves_no_more_than_touching_memory_first():
    """Each Step of KV on disk takes the host's time, which the cost model does not see."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}
    small = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2, "vocab_size": 1024, **sizes}
    model = config_of_hf(small | {"max_position_embeddings": 2048})
    hardware = cpu_box(first_touch_bytes_per_s=1e9)
    problem = problem_with(hardware, model, Workload.uniform(10_000, 10, 4), cpu_memory=3 << 30)
    assert not plan_problem(problem).policy.kv_seqs.get("disk")


def test_of_equal_candidates_the_one_whose_first_rows_are_done_first_is_chosen():
    problem = problem_with(cpu_box(), opt(1024, 12, 16), Workload.uniform(48, 1100, 2), disk_memory=0)
    short, long = (next(candidates(replace(problem, max_num_batched_tokens=tokens), 1)) for tokens in (2048, 48 * 1100))
    assert first_rows_s(short) < first_rows_s(long)
    assert choose([Simulated(long, 10.0), Simulated(short, 10.1)]).candidate is short
    assert choose([Simulated(long, 10.0), Simulated(short, 10.3)]).candidate is long


def test_a_latency_holds_for_simulated_blocks():
    problem = problem_with(cpu_box(), opt(1024, 12, 16), Workload.uniform(48, 100, 20), disk_memory=0)
    best = next(candidates(problem, 1))
    latency_s = block_latency_s(best)
    assert choose([Simulated(best, best.seconds)], latency_s * 1.01).candidate is best
    assert choose([Simulated(best, best.seconds * 1.1)], latency_s * 1.01) is None


@pytest.mark.parametrize("hardware", [cpu_box(), gpu_box(gpu_memory_bytes=2 << 30)], ids=lambda h: h.name)
def test_a_sampled_simulation_is_near_the_whole_job(hardware):
    workload = Workload.uniform(600, 100, 40)
    problem = problem_with(hardware, opt(1024, 12, 16), workload, max_num_seqs=64)
    best = next(candidates(problem, 1))
    run = simulate_sampled(plan_of(problem, best), best)
    assert not run.settled
    assert run.seconds == pytest.approx(simulate_job(plan_of(problem, best), problem.model, hardware).total_s, rel=0.06)


def test_a_candidate_that_holds_none_of_the_sampled_rows_is_no_candidate():
    """Their KV is planned for rows of mean length; one sequence in flight may be all that there is memory for."""
    problem = problem_with(gpu_box(gpu_memory_bytes=2 << 30), opt(1024, 12, 16), Workload.uniform(600, 100, 40))
    best = next(candidates(replace(problem, max_num_seqs=1), 1))
    longer = replace(best, inputs=replace(best.inputs, workload=Workload.uniform(600, 20_000, 40)))
    with pytest.raises(InputError, match="longer than most"):
        simulate_sampled(plan_of(problem, best), longer)


@pytest.mark.parametrize("tiers", [("gpu", "cpu"), ("cpu", "disk"), ("gpu", "cpu", "disk")], ids="+".join)
def test_two_parts_of_the_layers_say_what_all_of_them_take(monkeypatch, tiers):
    problem = problem_with(
        gpu_box(gpu_memory_bytes=2 << 30, cpu_memory_bytes=4 << 30),
        opt(2048, 48, 16),
        Workload.uniform(600, 100, 40),
        max_num_seqs=64,
        num_gpu_batches=8,
    )
    problem = replace(problem, allowed=replace(problem.allowed, weight_tiers=tiers))
    best = next(candidates(problem, 1))
    smaller, larger = layers_simulated(best)
    assert smaller < larger < 48
    in_parts = simulate_sampled(plan_of(problem, best), best)
    monkeypatch.setattr(part_of_layers, "_MOST_STEPS", 1 << 30)
    assert layers_simulated(best) == (48,)
    whole = simulate_sampled(plan_of(problem, best), best)
    assert in_parts.seconds == pytest.approx(whole.seconds, rel=0.03) and in_parts != whole


def test_sweeps_of_each_kind_are_simulated_and_no_more_than_asked_for():
    """Prompts come in every fourth of 64 sweeps; of the others two thirds decode a full block."""
    problem = problem_with(cpu_box(), opt(1024, 12, 16), Workload.uniform(48, 100, 20), disk_memory=0, max_num_seqs=12)
    s = next(candidates(problem, 1)).inputs
    mixes = {(True, 2): 0.5, (False, 2): 0.45, (False, 0): 0.05}
    sweeps = [Phase(1, 100.0 * (i % 4 == 0), 0, 12 if i < 48 or i % 4 == 0 else 1, 100) for i in range(64)]
    for most in (3, 8, 1000):
        chosen = sampled._Chosen(s, mixes, most)
        taken = [i for i, sweep in enumerate(sweeps) if chosen.takes(sweep, later=False)]
        numbers = chosen.numbers(len(sweeps))
        kinds = [sampled._mix(sweeps[i], 12) for i in numbers]
        assert set(kinds) == set(mixes) and len(numbers) <= min(most, 64) and set(numbers) <= set(taken)
        if most < 1000:
            assert len(taken) < 3 * most + 8  # loads are computed for few that are not simulated
    rare = sampled._Chosen(s, {**mixes, (False, 0): sampled._RARE / 2}, 8)
    assert not any([rare.takes(sweep, later=False) for sweep in sweeps if sampled._mix(sweep, 12) != (True, 2)][36:])


@pytest.mark.parametrize("hardware", [cpu_box(), gpu_box(gpu_memory_bytes=2 << 30)], ids=lambda h: h.name)
def test_decoding_may_be_jumped_over(monkeypatch, hardware):
    """Sweeps that differ in their contexts alone are costed with the mean of these, in which attention is linear."""
    workload = Workload.uniform(40, 100, 64)
    problem = problem_with(hardware, opt(1024, 12, 16), workload, max_num_seqs=40)
    best = next(candidates(problem, 1))
    jumped = simulate_sampled(plan_of(problem, best), best)
    monkeypatch.setattr(sampled, "_JUMPS", 1 << 30)
    each = simulate_sampled(plan_of(problem, best), best)
    assert jumped.settled and each.settled
    # KV moves in blocks of 16 tokens, so a context is off by less than one of them, in at least 100.
    assert jumped.seconds == pytest.approx(each.seconds, rel=0.05) and jumped.seconds != each.seconds


@pytest.mark.parametrize("longer", [100.0, 130.0])
def test_only_what_may_be_the_fastest_is_simulated_for_longer(monkeypatch, longer):
    problem = problem_with(cpu_box(), opt(1024, 12, 16), Workload.uniform(48, 100, 20), disk_memory=0)
    best = next(candidates(problem, 1))
    offered = [replace(best, incumbent=replace(best.incumbent, seconds=seconds)) for seconds in (90.0, 99.0, 101.0)]
    asked = []

    def run(plan, candidate, **options):
        asked.append((candidate, bool(options)))
        short = {90.0: 100.0, 99.0: 110.0, 101.0: 140.0}[candidate.seconds]
        seconds = longer if options and candidate is offered[0] else short
        return sampled.SampledRun(seconds, False)

    monkeypatch.setattr(choice, "candidates", lambda *args: iter(offered))
    monkeypatch.setattr(choice, "added_candidates", lambda *args: iter(()))
    monkeypatch.setattr(choice, "simulate_sampled", run)
    found = simulate_candidates(problem)
    again = [candidate for candidate, longer_run in asked if longer_run]
    assert again == (offered[:1] if longer == 100 else offered[:2])
    assert choose(found).candidate is offered[0 if longer == 100 else 1]


def test_a_candidate_that_no_memory_plan_holds_stands_with_its_modelled_time(monkeypatch):
    def refuse(plan, candidate):
        raise InputError("too small")

    monkeypatch.setattr(choice, "simulate_sampled", refuse)
    problem = problem_with(cpu_box(), opt(1024, 12, 16), Workload.uniform(8, 100, 20))
    (only,) = simulate_candidates(problem)
    assert only.slower == 1


def test_a_plan_with_more_memory_is_no_slower_where_it_holds_more_sequences_than_sweeps_have_tokens_for():
    """The cost model has larger blocks as fast, whose last KV quotas are never used; simulated they are 4 % slower."""
    model, hardware, workload = shape("opt-30b"), shipped_profile("t4"), Workload.uniform(10_000, 512, 32)
    held = {
        "num_gpu_batches": 2,
        "max_num_batched_tokens": 4096,
        "admission": "continuous",
    }  # as chosen: a shorter search
    less, more = (
        plan_problem(problem_with(box, model, workload, **held)).prediction.total_s
        for box in (hardware, hardware.scaled(cpu_memory_bytes=2))
    )
    assert more <= 1.01 * less


def test_no_store_is_written_for_a_placement_that_moves_less_where_the_fastest_needs_none():
    """Room for a store on the disk made a job of five hours 1.5 % longer, and had 56 GiB written first."""
    model, hardware, workload = shape("opt-30b"), shipped_profile("t4"), Workload.uniform(10_000, 512, 32)
    size = model.weight_bytes(2)
    held = {"max_num_seqs": 240, "num_gpu_batches": 2, "max_num_batched_tokens": 4096, "admission": "continuous"}
    options = {"loading": {"float16": Loading(size / hardware.load_bytes_per_s, size)}, "process_bytes": 450 << 20}
    seconds = []
    for disk in (size // 2, 10 * size):
        found = list(candidates(problem_with(hardware, model, workload, disk_memory=disk, **held, **options), 2))
        assert all(c.counts.placement(c.inputs).needs_store == 0 for c in found)
        seconds.append(min(c.job_s for c in found))
    assert seconds[1] <= 1.001 * seconds[0]
