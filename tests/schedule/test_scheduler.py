"""The scheduler and its pools under random loads: every token runs once, no block leaks, nothing starves."""

import random
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import some_draws

from batchgen.core.kv_placement import KVPlacement
from batchgen.core.lane_costs import LaneCosts
from batchgen.core.plan import window_blocks
from batchgen.core.request import SamplingParams
from batchgen.schedule import block_tables, tier_admission
from batchgen.schedule.block_manager import BlockManager
from batchgen.schedule.deferral_choice import DeferralChoice
from batchgen.schedule.extents import ExtentManager
from batchgen.schedule.scheduled_sequence import ScheduledSequence
from batchgen.schedule.scheduler import Scheduler
from batchgen.schedule.scheduler_limits import SchedulerLimits
from batchgen.schedule.sequence import PENDING, Sequence
from batchgen.schedule.state_slots import NO_STATE, StateSlots
from batchgen.schedule.sweep_choice import SweepChoice
from batchgen.schedule.sweep_estimate import BatchCut
from batchgen.schedule.window_pool import NULL_BLOCK, WindowPool

BLOCK = 4


@pytest.fixture(autouse=True, scope="module")
def short_prefixes_are_worth_a_snapshot():
    """Prefixes here have few tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(block_tables, "_LEAST_TOKENS", 5)
        yield


def free_runs(extents):
    """(first block, number of blocks) of each free run, in ascending order."""
    return list(extents._free.runs())


def make(index, prompt, max_tokens):
    return Sequence(index, index, 0, list(prompt), SamplingParams(max_tokens=max_tokens))


@dataclass(frozen=True)
class Load:
    """Sequences, and what they run in.

    Attributes:
        prompts: (tokens, max_tokens, tokens until it ends) of each.
        pools: tier -> blocks.
        window: sliding window of some layers.
        windowed: tier -> blocks of these layers; 0: they have none of their own.
        states: tier -> slots of state layers; empty: there are none.
        chooses: whether sweeps go without sequences that the CPU is too late for.
        limits: the first limits, and those that they change to between sweeps, where the seed says so.
    """

    prompts: list
    pools: dict
    share: bool
    limits: list
    expected: int | None
    seed: int
    window: int = 0
    windowed: dict = field(default_factory=dict)
    states: dict = field(default_factory=dict)
    chooses: bool = False


@st.composite
def limits_of(draw, homes):
    classes = [c for c in KVPlacement if c.tier in homes]
    seqs = draw(st.none() | st.fixed_dictionaries({}, optional={c: st.integers(0, 6) for c in classes}))
    return SchedulerLimits(
        max_num_seqs=draw(st.sampled_from([1, 3, 8, 64])),
        max_num_batched_tokens=draw(st.sampled_from([1, 5, 16, 200])),
        kv_seqs=seqs,
        max_chunk_tokens=draw(st.sampled_from([None, None, 1, 3, 10])),
        compute_tier="gpu" if "gpu" in homes else "cpu",
    )


@st.composite
def loads(draw):
    prefixes = [list(range(100 * p, 100 * p + draw(st.integers(0, 24)))) for p in range(3)]
    rows = draw(
        st.lists(
            st.tuples(st.integers(0, 2), st.integers(1, 20), st.integers(1, 12), st.integers(1, 12)),
            min_size=1,
            max_size=25,
        )
    )
    prompts = [
        (prefixes[p] + [1000 + i] * own, budget, min(wish, budget)) for i, (p, own, budget, wish) in enumerate(rows)
    ]
    homes = draw(st.sampled_from([("cpu",), ("cpu", "disk"), ("gpu", "cpu"), ("gpu", "cpu", "disk"), ("gpu", "disk")]))
    admission = draw(st.sampled_from(["continuous", "static"]))
    limits = [replace(x, admission=admission) for x in draw(st.lists(limits_of(homes), min_size=1, max_size=4))]
    open_homes = [h for h in homes if any(c.tier == h and limits[0].quota(c) for c in KVPlacement)]
    if not open_homes:
        limits[0], open_homes = replace(limits[0], kv_seqs=None), list(homes)
    # Pools of any size, but the longest row fits one of those that have quota.
    longest = max(-(-(len(prompt) + budget - 1) // BLOCK) for prompt, budget, _ in prompts)
    pools = {h: draw(st.integers(1, 20)) for h in homes}
    pools[draw(st.sampled_from(open_homes))] = longest + draw(st.integers(0, 20))
    expected = draw(st.sampled_from([None, 1, 3]))
    window = draw(st.sampled_from([0, 0, 1, 3, 4, 5, 9, 14]))
    # The least with which any row runs to its end, and more.
    windowed = {h: window_blocks(window, BLOCK) + draw(st.integers(0, 15)) for h in homes if window and h != "disk"}
    states = {h: draw(st.integers(1, 8)) for h in homes} if draw(st.booleans()) else {}
    share, seed = draw(st.booleans()), draw(st.integers(0, 1 << 16))
    chooses = admission == "continuous" and {"gpu", "cpu"} <= set(homes) and draw(st.booleans())
    return Load(prompts, pools, share, limits, expected, seed, window, windowed, states, chooses)


def make_pools(sizes, share=True, window=0, windowed=(), states=()):
    def in_memory(home, blocks):
        own = WindowPool(windowed[home], BLOCK, window) if home in windowed else None
        return BlockManager(blocks, BLOCK, share, own, slots(home))

    def slots(home):
        return StateSlots(states[home]) if states else None

    return {
        home: ExtentManager(blocks, BLOCK, share, slots(home)) if home == "disk" else in_memory(home, blocks)
        for home, blocks in sizes.items()
    }


def check_accounts(scheduler):
    """What sequences hold is what the pools have given out; what is promised is there."""
    for home, pool in scheduler.pools.items():
        own = [s for s in scheduler.running if s.kv_placement.tier == home]
        users = Counter(b for s in own for b in s.block_table)
        if home == KVPlacement.CPU.tier:  # where KV comes from to the device
            users.update(b for _, table in scheduler._swapped for b in table)
        assert pool.num_used == len(users)
        assert 0 <= pool.num_used <= pool.num_blocks and all(0 <= b < pool.num_blocks for b in users)
        assert sum(s.reserved_blocks for s in own) == scheduler.tables.num_reserved[home] <= pool.num_available
        if isinstance(pool, ExtentManager):
            free = {b for start, length in free_runs(pool) for b in range(start, start + length)}
            assert not free & {*users, *pool._evictable}
            assert len(free) + len(pool._evictable) == pool.num_available
        assert all(pool._users[b] == n for b, n in users.items())
        check_windows(pool.windowed, own)
        check_states(pool.states, own)


def check_states(pool, own):
    """Each sequence has a slot of its own, and perhaps reads one more, which others may read too."""
    if pool is None:
        assert all(s.state is None for s in own)
        return
    users = Counter(slot for s in own for slot in {*s.state} - {NO_STATE})
    assert pool.num_used == len(users) and all(pool._users[slot] == n for slot, n in users.items())
    assert all(users[s.state.target] == 1 for s in own)


def check_windows(pool, own):
    """Each sequence has the blocks that its next tokens see, and of those before not one."""
    if pool is None:
        assert all(s.window_table is None for s in own)
        return
    held = {s: s.window_table[s.num_freed :] for s in own}
    users = Counter(b for blocks in held.values() for b in blocks)
    assert pool.num_used == len(users) and all(pool._users[b] == n for b, n in users.items())
    for s, blocks in held.items():
        assert NULL_BLOCK not in blocks and set(s.window_table[: s.num_freed]) <= {NULL_BLOCK}
        # A token on its way still sees the window before it.
        begun = s.num_computed - (s.kv_placement == "deferred" and s.num_remaining == 0)
        assert s.num_freed == pool.first_block(begun)
        new = len(s.block_table) * BLOCK - s.num_computed
        assert len(blocks) <= -(-(pool.window + new) // BLOCK) + 1


def check_quotas(scheduler, before):
    """Nobody entered above a limit; those in flight before a limit shrank may stay."""
    limits = scheduler.limits
    assert len(scheduler.running) <= max(limits.max_num_seqs, len(before))
    then, now = Counter(before.values()), Counter(s.kv_placement for s in scheduler.running)
    for kv_placement, count in now.items():
        # The only sequence in flight may be in a class without quota, where no other class could take it.
        first = next(iter(scheduler.running))
        alone = first.kv_placement == kv_placement != before.get(id(first))
        assert count <= max(limits.quota(kv_placement), then[kv_placement], alone)


class FakeExecutor:
    """Writes and reads KV as batches do: in the order of the sweep, storing behind what is not at home here."""

    def __init__(self, compute_tier, window):
        self.compute_tier, self.window = compute_tier, window
        # (home, whether of layers with a window, block, offset) -> the tokens that this slot's KV was computed from
        self.content = {}
        self.states = {}  # (home, slot) -> the tokens that this slot's state was computed from

    def update_states(self, sweep):
        """All states are read before any is written, as sequences are updated in any order."""
        updated, read = {}, set()
        for s in sweep:
            if s.sequence.state is None:
                continue
            (source, target), home, begun = s.sequence.state, s.sequence.kv_placement.tier, s.sequence.num_computed
            kept = () if source == NO_STATE else self.states[home, source]
            assert kept == tuple(s.sequence.tokens[:begun]), "another sequence's state"
            assert source == target or not s.defers, "what it reads is another's by the time it is updated"
            assert (home, target) not in updated, "two sequences write one state"
            updated[home, target] = tuple(s.sequence.tokens[: s.num_keys])
            read |= {(home, source)} - {(home, target)}
        assert not read & set(updated), "a state is written that another sequence reads"
        self.states |= updated

    def move(self, sequence, source, target):
        """Copy the KV of a sequence that moves to another pool."""
        for old, new in zip(sequence.swap_table or (), sequence.block_table, strict=False):
            for offset in range(BLOCK) if old != NULL_BLOCK else ():
                if (source, False, old, offset) in self.content:
                    self.content[target, False, new, offset] = self.content[source, False, old, offset]

    def run(self, sweep):
        self.update_states(sweep)
        written, behind = set(), {}
        for leaves in (True, False):  # what leaves the device goes first
            for sequence in [s.sequence for s in sweep if (s.sequence.kv_placement != "gpu") == leaves]:
                self.move(sequence, *(("gpu", "cpu") if leaves else ("cpu", "gpu")))
        for s in sweep:
            sequence, home = s.sequence, s.sequence.kv_placement.tier

            def slot(position, windowed, sequence=sequence, home=home):
                block = sequence.table(windowed)[position // BLOCK]
                assert block != NULL_BLOCK
                return home, windowed, block, position % BLOCK

            target = self.content if home == self.compute_tier else behind
            for windowed in (False, True) if sequence.window_table is not None else (False,):
                first = max(0, sequence.num_computed - self.window + 1) if windowed else 0
                for position in range(first, sequence.num_computed):
                    kept = self.content[slot(position, windowed)]
                    assert kept == tuple(sequence.tokens[: position + 1]), "attends to another prompt's KV"
                for position in range(sequence.num_computed, s.num_keys):
                    assert slot(position, windowed) not in written
                    written.add(slot(position, windowed))
                    target[slot(position, windowed)] = tuple(sequence.tokens[: position + 1])
        self.content |= behind


def arrivals(on_their_way, begun, change, *, pipelines):
    """Sequences whose deferred token is on its way after a sweep, and those whose token is there.

    Args:
        on_their_way: Sequences with a token on its way before it.
        begun: Sequences whose token began in it.
        change: Draws whose token is there.
        pipelines: Whether all tokens go through all layers that they have left.
    """
    if pipelines:
        return [], on_their_way + begun
    arrived = [s for s in on_their_way if change.random() < 0.4]
    return [s for s in on_their_way if s not in arrived] + begun, arrived


def measure(scheduler, busy_s):
    """Tell what chooses the scheduler's sweeps what the last one has taken."""
    if scheduler.sweep_choice:
        scheduler.sweep_choice.measured(max(busy_s.values()), busy_s)
    if scheduler.deferral_choice:
        scheduler.deferral_choice.measured(busy_s)


@settings(max_examples=some_draws(400), deadline=None)
@given(loads())
def test_every_token_runs_once_and_no_block_leaks(load):
    pools = make_pools(load.pools, load.share, load.window, load.windowed, load.states)
    expected = load.expected
    scheduler = Scheduler(pools, load.limits[0], (lambda s: expected) if expected else None)
    executor = FakeExecutor(load.limits[0].compute_tier, load.window)
    if load.chooses:
        costs = LaneCosts(batch_s=3.0, token_s=1.0, gpu_key_s=0.1, cpu_key_s=0.1, cpu_seq_s=1.0)
        scheduler.sweep_choice = SweepChoice(costs, BatchCut(2, "neo", 3), quota=6)
    change = random.Random(load.seed)
    scheduler.adapts, scheduler.brings_kv = change.random() < 0.5, change.random() < 0.7
    if load.chooses and change.random() < 0.7:
        scheduler.deferral_choice = DeferralChoice(costs, num_layers=4)
    wanted = {}
    for i, (prompt, budget, wish) in enumerate(load.prompts):
        assert len(prompt) + budget - 1 <= scheduler.longest_tokens
        scheduler.add(make(i, prompt, budget))
        wanted[i] = wish
    done, computed, restarts = {}, {}, 0
    on_their_way = []  # sequences whose token takes more than one sweep
    for _ in range(5000):
        if not scheduler.has_work:
            break
        if change.random() < 0.2:
            scheduler.limits = change.choice(load.limits)
        for sequence in scheduler.running:
            if sequence.kv_placement in ("cpu", "streamed") and change.random() < 0.1:
                scheduler.set_placement(sequence, change.choice([KVPlacement.CPU, KVPlacement.STREAMED]))
        before = {id(s): s.kv_placement for s in scheduler.running}
        limits = scheduler.limits

        sweep = scheduler.schedule()

        assert sweep or on_their_way, "a scheduler with work gave an empty sweep"
        assert all(sequence in scheduler.running for sequence in on_their_way)
        check_quotas(scheduler, before)
        check_accounts(scheduler)
        decodes = sum(len(s.sequence.tokens) - s.sequence.num_computed == 1 for s in sweep)
        assert sum(s.num_tokens for s in sweep) <= max(limits.max_num_batched_tokens, decodes)
        assert all(s.num_tokens <= (limits.max_chunk_tokens or s.num_tokens) for s in sweep)
        assert len({id(s.sequence) for s in sweep}) == len(sweep)
        for s in sweep:
            start = computed.get(s.sequence.request_index)
            if start is None or start != s.sequence.num_computed:  # begins, for the first time or again
                restarts += start is not None
                assert s.sequence.num_computed == s.sequence.num_matched_blocks * BLOCK
            computed[s.sequence.request_index] = s.num_keys
        assert restarts <= scheduler.num_preempted + scheduler.num_moved
        executor.run(sweep)
        busy_s = {"compute": 10.0, "cpu_attention": 10.0 ** change.randrange(4)}
        measure(scheduler, busy_s)
        sampling = [s.sequence for s in sweep if s.samples]
        begun = [s.sequence for s in sweep if s.defers]
        scheduler.commit(sweep)
        on_their_way, arrived = arrivals(on_their_way, begun, change, pipelines=scheduler.pipelines or not sweep)
        for sequence in sampling + arrived:
            sequence.tokens.append(5000 + sequence.num_generated)
            if sequence.num_generated == wanted[sequence.request_index]:
                assert sequence.num_computed == len(sequence.tokens) - 1
                scheduler.finish(sequence)
                done[sequence.request_index] = sequence.generated
    assert sorted(done) == list(range(len(load.prompts)))
    assert all(len(done[i]) == wanted[i] for i in done)
    check_accounts(scheduler)
    check_nothing_is_held(scheduler, load)
    if expected is None and not load.chooses:
        assert scheduler.num_preempted == 0, "worst-case admission never preempts a sequence"


def check_nothing_is_held(scheduler, load):
    for home, pool in scheduler.pools.items():
        sizes = [(pool, load.pools[home])]
        sizes += [(pool.windowed, load.windowed[home])] if pool.windowed is not None else []
        sizes += [(pool.states, load.states[home])] if pool.states is not None else []
        for of_kind, size in sizes:
            assert of_kind.num_used == 0 and of_kind.num_available == size
        assert scheduler.tables.num_reserved[home] == 0
        if home == "disk" and not load.share:  # else prefixes are kept
            assert free_runs(pool) == [(0, load.pools["disk"])]


def run_prompts(prompts, **kwargs):
    scheduler = Scheduler({"cpu": BlockManager(500, BLOCK, **kwargs)}, SchedulerLimits(64, 64))
    for i, prompt in enumerate(prompts):
        scheduler.add(make(i, prompt, 1))
    ran = 0
    while scheduler.has_work:
        sweep = scheduler.schedule()
        ran += sum(s.num_tokens for s in sweep)
        scheduler.commit(sweep)
        for s in sweep:
            if s.sequence.num_computed == len(s.sequence.tokens):
                scheduler.finish(s.sequence)
    return ran


def test_a_common_prefix_is_prefilled_once():
    prompts = [[*range(40), 900 + i, 901 + i] for i in range(30)]
    assert run_prompts(prompts) == 40 + 30 * 2
    assert run_prompts(prompts, share_prefixes=False) == 30 * 42


def test_equal_prompts_still_run_their_last_token():
    assert run_prompts([list(range(40))] * 5) == 40 + 4 * 4


def test_static_admission_takes_no_one_in_until_the_block_is_done():
    scheduler = Scheduler({"cpu": BlockManager(6, BLOCK)}, SchedulerLimits(64, 64, "static"))
    for i in range(4):  # each takes two blocks: three fit
        scheduler.add(make(i, [i] * 4, 4))
    entered = []
    while scheduler.has_work:
        sweep = scheduler.schedule()
        entered.append(sorted(s.sequence.request_index for s in sweep))
        sampling = [s.sequence for s in sweep if s.samples]
        scheduler.commit(sweep)
        for sequence in sampling:
            sequence.tokens.append(1)
            # Sequence 0 ends early; its quota stays unused until the whole block has ended.
            if sequence.num_generated == (1 if sequence.request_index == 0 else 4):
                scheduler.finish(sequence)
    assert entered == [[0, 1, 2], [1, 2], [1, 2], [1, 2], [3], [3], [3], [3]]


def test_releasing_a_block_twice_is_caught():
    blocks = BlockManager(2, BLOCK)
    block = blocks.allocate()
    blocks.release([block])
    with pytest.raises(AssertionError, match="twice"):
        blocks.release([block])


def test_a_kv_placement_is_its_name_in_a_plan_and_has_a_tier():
    assert [f"{placement}" for placement in KVPlacement] == ["gpu", "cpu", "streamed", "disk", "deferred"]
    assert [placement.tier for placement in KVPlacement] == ["gpu", "cpu", "cpu", "disk", "cpu"]
    assert {"gpu": 1}[KVPlacement.DEVICE] == {KVPlacement.DEVICE: 1}["gpu"] == 1


def accelerator(sizes=None, **limits):
    pools = make_pools(sizes or {"gpu": 50, "cpu": 50, "disk": 50})
    return Scheduler(pools, SchedulerLimits(64, 1000, compute_tier="gpu", **limits))


def test_sequences_take_the_first_class_with_quota_and_capacity():
    scheduler = accelerator({"gpu": 4, "cpu": 50, "disk": 50}, kv_seqs={"gpu": 9, "cpu": 1, "streamed": 2, "disk": 1})
    for i in range(8):  # two blocks each, so the GPU holds two
        scheduler.add(make(i, [i] * 4, 4))
    assert [s.sequence.kv_placement for s in scheduler.schedule()] == [
        "gpu", "gpu", "cpu", "streamed", "streamed", "disk",
    ]  # fmt: skip
    assert len(scheduler.waiting) == 2


def test_a_token_that_others_follow_is_not_deferred():
    """A sequence that was preempted runs its output again, in chunks that may have one token."""
    sequence = make(0, [1, 2], 9)
    sequence.kv_placement, sequence.num_computed = KVPlacement.DEFERRED, 3
    sequence.tokens += [7, 8, 9]
    assert ScheduledSequence(sequence, 2).samples
    assert not ScheduledSequence(sequence, 1).defers and not ScheduledSequence(sequence, 1).samples
    sequence.num_computed = 4
    assert ScheduledSequence(sequence, 1).defers


def test_a_deferred_token_is_begun_once_and_keeps_its_sequence_in_flight():
    scheduler = accelerator({"gpu": 4, "cpu": 3}, kv_seqs={"gpu": 1, "deferred": 2})
    resident, deferred = make(0, [1] * BLOCK, 9), make(1, [2] * BLOCK, 9)
    for sequence in (resident, deferred):
        scheduler.add(sequence)

    def sweep():
        made = scheduler.schedule()
        begun = [s.sequence for s in made if s.defers]
        assert not any(s.samples or s.logits_positions for s in made if s.defers)
        sampled = [s.sequence for s in made if s.samples]
        scheduler.commit(made)
        for sequence in sampled:
            sequence.tokens.append(7)
        return begun, sampled

    assert sweep() == ([], [resident, deferred]), "prompts go through all layers"
    assert deferred.exchange_slot == 0 and resident.exchange_slot is None
    assert sweep() == ([deferred], [resident])
    younger = make(2, [3] * BLOCK, 9)
    scheduler.add(younger)
    for _ in range(3):
        begun, sampled = sweep()
        assert deferred not in begun + sampled, "its token is on its way"
    assert deferred in scheduler.running, "the CPU may be at its KV"
    deferred.tokens.append(PENDING)
    assert deferred not in sweep()[0], "it may have ended"
    deferred.tokens[-1] = 7
    assert deferred in sweep()[0]
    scheduler.finish(deferred)
    assert deferred.exchange_slot is None


def test_no_more_rows_are_deferred_than_a_job_allows():
    """Near its end they would be in flight long after all others; what they leave is for nobody."""
    scheduler = accelerator(kv_seqs={"gpu": 1, "deferred": 2}, deferred_rows=3)
    for i in range(6):
        scheduler.add(make(i, [i] * BLOCK, 1))
    classes = []
    while scheduler.has_work:
        made = scheduler.schedule()
        classes.append([s.sequence.kv_placement for s in made])
        scheduler.commit(made)
        for s in made:
            scheduler.finish(s.sequence)
    assert classes == [["gpu", "deferred", "deferred"], ["gpu", "deferred"], ["gpu"]]


def test_nobody_is_preempted_for_tokens_that_are_on_their_way():
    scheduler = accelerator({"cpu": 4}, kv_seqs={"deferred": 2})
    sequence = make(0, [1, 2, 3], 4)
    scheduler.add(sequence)
    scheduler.commit(scheduler.schedule())
    sequence.tokens.append(7)
    scheduler.commit(scheduler.schedule())
    assert scheduler.schedule() == [] and list(scheduler.running) == [sequence] and scheduler.num_preempted == 0


def test_what_fits_one_pool_only_waits_for_it_and_holds_the_queue():
    scheduler = accelerator({"gpu": 4, "cpu": 10}, kv_seqs={"gpu": 4, "cpu": 4})
    assert scheduler.longest_tokens == 40
    first, long, last = make(0, [0] * 25, 8), make(1, [1] * 30, 8), make(2, [2] * 4, 1)
    for sequence in (first, long, last):
        scheduler.add(sequence)
    sweep = scheduler.schedule()
    assert [s.sequence for s in sweep] == [first] and first.kv_placement == "cpu"
    scheduler.commit(sweep)
    scheduler.finish(first)
    assert [s.sequence for s in scheduler.schedule()] == [long, last]
    assert (long.kv_placement, last.kv_placement) == ("cpu", "gpu")


def test_a_row_that_a_staging_buffer_does_not_hold_waits_for_the_memory_of_the_device():
    """However much memory there is elsewhere."""
    quotas = dict.fromkeys(("gpu", "cpu", "streamed", "disk", "deferred"), 1)
    scheduler = accelerator(kv_seqs=quotas, most_staged_tokens=20)
    first, short, long = make(0, [0] * 40, 8), make(1, [1] * 20, 1), make(2, [2] * 20, 2)
    for sequence in (first, short, long):
        scheduler.add(sequence)
    sweep = scheduler.schedule()
    assert [s.sequence for s in sweep] == [first, short]
    assert (first.kv_placement, short.kv_placement) == ("gpu", "cpu")
    scheduler.commit(sweep)
    scheduler.finish(first)
    scheduler.schedule()
    assert long.kv_placement == "gpu"


def test_growth_takes_blocks_from_the_youngest_of_the_same_pool():
    pools = make_pools({"gpu": 4, "cpu": 20}, share=False)
    limits = SchedulerLimits(64, 1000, kv_seqs={"gpu": 3, "cpu": 1}, compute_tier="gpu")
    scheduler = Scheduler(pools, limits, lambda s: 1)
    rows = [make(i, [i] * 4, 12) for i in range(3)]
    rows[2] = make(2, [2] * 20, 12)  # too long for what is left of the GPU
    old, young, other = rows
    for sequence in rows:
        scheduler.add(sequence)

    def sweep():
        scheduled = scheduler.schedule()
        scheduler.commit(scheduled)
        for s in scheduled:
            s.sequence.tokens.append(7)
        return [s.sequence for s in scheduled]

    assert sweep() == rows
    assert [s.kv_placement for s in rows] == ["gpu", "gpu", "cpu"]
    for _ in range(4):  # each of the two on the GPU grows to two blocks
        assert sweep() == rows
    assert sweep() == [old, other], "the younger one on the GPU gave way, though the one on the CPU is younger still"
    assert scheduler.num_preempted == 1 and list(scheduler.waiting) == [young]


def prefix_taken_in(home, same_sweep):
    kv_placement = {"gpu": "gpu", "cpu": "streamed", "disk": "disk"}[home]
    scheduler = accelerator(kv_seqs={kv_placement: 2})
    prompts = [make(0, [*range(20), 50], 4), make(1, [*range(20), 51], 4)]
    if same_sweep:
        for sequence in prompts:
            scheduler.add(sequence)
        scheduler.schedule()
    else:
        for sequence in prompts:
            scheduler.add(sequence)
            sweep = scheduler.schedule()
            scheduler.commit(sweep)
            for s in sweep:
                s.sequence.tokens.append(7)
    return prompts[1].num_cached


def test_prefixes_are_shared_as_soon_as_their_kv_can_be_read():
    assert prefix_taken_in("gpu", same_sweep=True) == 20
    assert prefix_taken_in("cpu", same_sweep=True) == 0, "KV that is stored behind is there after the sweep only"
    assert prefix_taken_in("cpu", same_sweep=False) == 20
    assert prefix_taken_in("disk", same_sweep=True) == 0
    assert prefix_taken_in("disk", same_sweep=False) == 20


def test_a_prefix_in_another_pool_is_not_taken():
    scheduler = accelerator(kv_seqs={"gpu": 1, "cpu": 1})
    rows = [make(i, [*range(20), 50 + i], 4) for i in range(2)]
    for sequence in rows:
        scheduler.add(sequence)
    scheduler.schedule()
    assert [s.kv_placement for s in rows] == ["gpu", "cpu"] and rows[1].num_cached == 0


def test_a_sweep_that_failed_leaves_no_prefix_behind():
    pool = BlockManager(50, BLOCK)
    scheduler = Scheduler({"cpu": pool}, SchedulerLimits(8, 12))
    prompt = list(range(30))
    scheduler.add(make(0, prompt, 4))
    scheduler.commit(scheduler.schedule())  # 12 tokens are there,
    scheduler.schedule()  # 12 more never will be
    scheduler.finish(next(iter(scheduler.running)))
    assert len(pool.known(prompt)) == 3 and pool.num_used == 0


def test_a_shrunk_class_takes_no_one_in_and_its_sequences_finish():
    scheduler = accelerator(kv_seqs={"gpu": 3})
    rows = [make(i, [i] * 4, 4) for i in range(5)]
    for sequence in rows:
        scheduler.add(sequence)
    scheduler.commit(scheduler.schedule())
    scheduler.limits = replace(scheduler.limits, kv_seqs={"gpu": 1, "disk": 1})
    for sequence in rows[:3]:
        sequence.tokens.append(7)
    sweep = scheduler.schedule()
    assert [s.sequence.kv_placement for s in sweep] == ["gpu", "gpu", "gpu", "disk"]
    scheduler.commit(sweep)
    scheduler.finish(rows[0])
    scheduler.finish(rows[1])
    for sequence in rows[2:4]:
        sequence.tokens.append(7)
    assert [s.sequence for s in scheduler.schedule()] == rows[2:4], "a quota of one, used up; the last row waits"


def test_a_row_whose_class_lost_its_quota_still_runs():
    scheduler = accelerator({"gpu": 2, "disk": 50}, kv_seqs={"gpu": 2, "disk": 2})
    short, long = make(0, [0] * 4, 1), make(1, [1] * 100, 1)
    scheduler.add(short)
    scheduler.add(long)
    scheduler.limits = replace(scheduler.limits, kv_seqs={"gpu": 2})
    assert scheduler.longest_tokens == 8
    sweep = scheduler.schedule()
    assert [s.sequence for s in sweep] == [short]
    scheduler.commit(sweep)
    scheduler.finish(short)
    assert [s.sequence for s in scheduler.schedule()] == [long] and long.kv_placement == "disk"


def test_set_placement_moves_no_kv():
    scheduler = accelerator(kv_seqs={"cpu": 1})
    scheduler.add(make(0, [0] * 4, 4))
    (scheduled,) = scheduler.schedule()
    table = list(scheduled.sequence.block_table)
    scheduler.set_placement(scheduled.sequence, KVPlacement.STREAMED)
    assert scheduled.sequence.kv_placement == "streamed" and list(scheduled.sequence.block_table) == table
    with pytest.raises(AssertionError, match="does not move"):
        scheduler.set_placement(scheduled.sequence, KVPlacement.DISK)


def test_a_chunk_limit_leaves_tokens_of_the_sweep_to_other_rows():
    scheduler = accelerator(kv_seqs={"gpu": 4}, max_chunk_tokens=8)
    for i in range(3):
        scheduler.add(make(i, [i] * 20, 1))
    chunks = []
    while scheduler.has_work:
        sweep = scheduler.schedule()
        chunks.append([s.num_tokens for s in sweep])
        scheduler.commit(sweep)
        for sequence in [s.sequence for s in sweep if s.sequence.num_computed == 20]:
            scheduler.finish(sequence)
    assert chunks == [[8, 8, 8], [8, 8, 8], [4, 4, 4]]


def sweeps_of_random_rows(seed, num_blocks, max_num_seqs, sharing=0.5):
    """The sweeps of rows, each as (number of the row, tokens) of its sequences. sharing: part that shares a prefix."""
    draw = random.Random(seed)
    limits = SchedulerLimits(max_num_seqs, 16)
    scheduler = Scheduler(make_pools({"cpu": num_blocks}), limits, lambda s: s.sampling.max_tokens)
    source = None
    for i in range(40):
        shared = draw.random() < sharing
        sequence = make(i, [*(range(9) if shared else ()), *[1000 + i] * draw.randint(1, 12)], draw.randint(1, 30))
        if shared and source is not None:
            sequence.prefix_source, sequence.num_source_tokens, sequence.sampling = source, 8, source.sampling
        source = source or (sequence if shared else None)
        scheduler.add(sequence)
    sweeps = []
    while scheduler.has_work:
        sweep = scheduler.schedule()
        sweeps.append([(s.sequence.request_index, s.num_tokens) for s in sweep])
        sampled = [s.sequence for s in sweep if s.samples]
        scheduler.commit(sweep)
        for sequence in sampled:
            sequence.tokens.append(0)
            if sequence.is_complete:
                scheduler.finish(sequence)
    return sweeps


@pytest.mark.parametrize("seed", range(4))
def test_only_those_that_may_enter_are_looked_at(monkeypatch, seed):
    """The sweeps are the same as if all that wait were."""
    few = sweeps_of_random_rows(seed, 60, 8)
    monkeypatch.setattr(Scheduler, "_admissible", lambda self: iter(self.waiting))
    assert few == sweeps_of_random_rows(seed, 60, 8)


@pytest.mark.parametrize("num_blocks", [14, 30, 60, 400])
@pytest.mark.parametrize("seed", range(4))
def test_where_all_fit_at_their_longest_the_projection_admits_the_same(monkeypatch, seed, num_blocks):
    sweeps, projected = sweeps_of_random_rows(seed, num_blocks, 12, sharing=0), []
    make_admission, project = Scheduler._admission, tier_admission._Projected.__init__

    def without_spare_blocks(self, tier, sweep):
        admission = make_admission(self, tier, sweep)
        admission._spare = -1
        return admission

    def counted(self, *args, **options):
        projected.append(None)
        project(self, *args, **options)

    monkeypatch.setattr(tier_admission._Projected, "__init__", counted)
    assert sweeps_of_random_rows(seed, num_blocks, 12, sharing=0) == sweeps
    few = len(projected)
    monkeypatch.setattr(Scheduler, "_admission", without_spare_blocks)
    assert sweeps_of_random_rows(seed, num_blocks, 12, sharing=0) == sweeps
    assert few <= len(projected) - few and (few == 0) == (num_blocks == 400)


def sweeps_of_a_job(seed, *, looks_at_all):
    """The contents of each sweep of a random job, whose pool holds some or all sequences at their longest."""
    draw = random.Random(seed)
    home = draw.choice(["cpu", "gpu"])
    pool = BlockManager(draw.choice([12, 40, 200]), BLOCK, share_prefixes=draw.random() < 0.7)
    limits = SchedulerLimits(
        draw.choice([3, 8]),
        draw.choice([9, 40]),
        kv_seqs=draw.choice([None, {KVPlacement(home): 4}]),
        max_chunk_tokens=draw.choice([None, 5]),
        compute_tier=home,
    )
    scheduler = Scheduler({home: pool}, limits, draw.choice([None, lambda s: 2]))
    if looks_at_all:
        scheduler._room = lambda admission_to: None
    begins = [[draw.randrange(3)] * draw.randrange(12) for _ in range(4)]
    for i in range(30):
        prompt = draw.choice(begins) + [100 + i] * draw.randrange(1, 9)
        sequence = make(i, prompt, draw.randrange(1, 9))
        sequence.is_whole = draw.random() < 0.1 and len(prompt) <= (limits.max_chunk_tokens or 9)
        scheduler.add(sequence)
    seen = []
    while scheduler.has_work:
        sweep = scheduler.schedule()
        check_accounts(scheduler)
        seen.append([(s.sequence.request_index, s.num_tokens, list(s.sequence.block_table)) for s in sweep])
        scheduler.commit(sweep)
        for s in [s.sequence for s in sweep if s.samples]:
            s.tokens.append(7)
            if s.num_generated == s.sampling.max_tokens:
                scheduler.finish(s)
    return seen


@pytest.mark.parametrize("seed", range(30))
def test_sequences_that_fit_are_let_in_as_if_they_were_looked_at(seed):
    assert sweeps_of_a_job(seed, looks_at_all=False) == sweeps_of_a_job(seed, looks_at_all=True)
