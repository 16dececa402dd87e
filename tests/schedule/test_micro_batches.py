"""A sweep in micro-batches: nothing lost, limits kept, what depends on another comes after it."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from thorough import some_draws

from batchgen.core.kv_placement import KVPlacement
from batchgen.core.request import SamplingParams
from batchgen.schedule.block_manager import BlockManager
from batchgen.schedule.micro_batches import ORDERS, placement_in_sweep, split_batches, staged_blocks
from batchgen.schedule.scheduled_sequence import ScheduledSequence
from batchgen.schedule.scheduler import Scheduler
from batchgen.schedule.scheduler_limits import SchedulerLimits
from batchgen.schedule.sequence import Sequence

BLOCK = 4


def scheduled(kv_placement, num_tokens, num_computed=0, num_prompt=None):
    """By default the last of its tokens is a generated one where it decodes, and all are the prompt's otherwise."""
    length = num_computed + num_tokens
    sequence = Sequence(0, 0, 0, [1] * length, SamplingParams(max_tokens=8), kv_placement=KVPlacement(kv_placement))
    decodes = num_tokens == 1 and num_computed > 0
    sequence.num_prompt = num_prompt if num_prompt is not None else num_computed if decodes else length
    sequence.num_computed = num_computed
    return ScheduledSequence(sequence, num_tokens)


def split(
    sweep,
    num_gpu_batches,
    order="even",
    max_tokens=10**6,
    max_staged_blocks=10**6,
    compute_tier="gpu",
    max_seqs=10**6,
    balance_tokens=None,
    **cut,
):
    return split_batches(
        sweep,
        num_gpu_batches=num_gpu_batches,
        order=order,
        max_tokens=max_tokens,
        max_seqs=max_seqs,
        max_staged_blocks=max_staged_blocks,
        kv_block_size=BLOCK,
        compute_tier=compute_tier,
        balance_tokens=balance_tokens,
        **cut,
    )


def tokens_of(batches):
    return [sum(s.num_tokens for s in batch) for batch in batches]


def blocks_of(batch, compute_tier):
    return sum(staged_blocks(s, BLOCK) for s in batch if placement_in_sweep(s, compute_tier) == KVPlacement.STREAMED)


@pytest.mark.parametrize(
    ("kv_placement", "num_tokens", "num_computed", "num_prompt", "expected"),
    [
        ("gpu", 1, 9, 9, KVPlacement.DEVICE),
        ("gpu", 5, 0, 5, KVPlacement.DEVICE),
        ("cpu", 1, 9, 9, KVPlacement.CPU),
        ("cpu", 1, 12, 9, KVPlacement.CPU),
        ("cpu", 1, 8, 9, KVPlacement.STREAMED),  # the prompt's last token
        ("cpu", 1, 0, 1, KVPlacement.STREAMED),  # a prompt of one token
        ("cpu", 5, 9, 9, KVPlacement.STREAMED),  # run again after it was preempted
        ("cpu", 5, 0, 9, KVPlacement.STREAMED),
        ("streamed", 1, 9, 9, KVPlacement.STREAMED),
        ("disk", 1, 9, 9, KVPlacement.STREAMED),
    ],
)
def test_places_on_an_accelerator(kv_placement, num_tokens, num_computed, num_prompt, expected):
    assert placement_in_sweep(scheduled(kv_placement, num_tokens, num_computed, num_prompt), "gpu") == expected


def test_places_where_the_cpu_computes():
    assert [placement_in_sweep(scheduled(c, 1, 9), "cpu") for c in ("cpu", "streamed", "disk")] == [
        KVPlacement.DEVICE,
        KVPlacement.DEVICE,
        KVPlacement.STREAMED,
    ]


def test_staged_blocks_hold_old_and_new_tokens():
    assert [staged_blocks(scheduled("disk", *s), BLOCK) for s in ((1, 0), (4, 0), (1, 4), (3, 6))] == [1, 1, 2, 3]


SWEEPS = st.lists(
    st.tuples(
        st.sampled_from(["gpu", "cpu", "streamed", "disk"]), st.integers(1, 30), st.integers(0, 40), st.booleans()
    ).map(lambda t: scheduled(t[0], 1 if t[3] else t[1], t[2])),
    min_size=1,
    max_size=30,
)


@settings(max_examples=some_draws(400), deadline=None)
@given(
    SWEEPS,
    st.integers(1, 5),
    st.sampled_from([*((order, None) for order in ORDERS), ("neo", 0), ("neo", 9), ("neo", 10**6)]),
    st.integers(1, 80),
    st.integers(0, 40),
    st.sampled_from(["gpu", "cpu"]),
)
def test_every_sequence_is_in_one_batch_in_order_and_within_limits(
    sweep, count, order_and_balance, max_tokens, spare, compute_tier
):
    order, balance_tokens = order_and_balance
    count = count if balance_tokens is None else 2
    if compute_tier == "cpu":
        sweep = [s for s in sweep if s.sequence.kv_placement != "gpu"] or [scheduled("disk", 1, 5)]
    largest = max(blocks_of([s], compute_tier) for s in sweep)
    batches = split(sweep, count, order, max_tokens, largest + spare, compute_tier, balance_tokens=balance_tokens)
    assert all(batches)
    flat = [s for batch in batches for s in batch]
    assert sorted(map(id, flat)) == sorted(map(id, sweep))
    position = {id(s): i for i, s in enumerate(sweep)}
    for tier in ("gpu", "cpu", "disk"):
        # Delegated sequences write no prompt, so only the others' order counts where they are moved.
        own = [s for s in flat if s.sequence.kv_placement.tier == tier]
        kept = [
            position[id(s)] for s in own if order == "even" or placement_in_sweep(s, compute_tier) != KVPlacement.CPU
        ]
        assert kept == sorted(kept)
    for batch in batches:
        assert len(batch) == 1 or sum(s.num_tokens for s in batch) <= max_tokens
        assert blocks_of(batch, compute_tier) <= largest + spare
    assert len(batches) >= min(count, len(sweep)) or order == "neo"
    if order != "neo":
        unlimited = split(sweep, count, order, compute_tier=compute_tier)
        assert len(unlimited) == min(count, len(sweep))
        total, biggest = sum(tokens_of(unlimited)), max(s.num_tokens for s in sweep)
        assert max(tokens_of(unlimited)) <= total / count + biggest


def test_even_batches_are_even():
    decodes = [scheduled("gpu", 1, 5) for _ in range(10)]
    assert tokens_of(split(decodes, 4)) == [3, 2, 3, 2]
    assert tokens_of(split(decodes[:3], 4)) == [1, 1, 1]
    mixed = [*decodes, scheduled("gpu", 30), scheduled("gpu", 10), scheduled("gpu", 10)]
    assert tokens_of(split(mixed, 2)) == [40, 20]
    assert tokens_of(split([scheduled("gpu", 90), *decodes], 3)) == [90, 5, 5], "one that is long alone"


@pytest.mark.parametrize("count", [2, 3, 4])
def test_each_mixed_batch_has_its_part_of_what_each_processor_and_link_does(count):
    """The scheduler admits class after class, so without mixing one batch would have all that the CPU attends to."""
    kinds = {"gpu": 24, "cpu": 12, "streamed": 8}
    sweep = [scheduled(kv_placement, 1, 9) for kv_placement, seqs in kinds.items() for _ in range(seqs)]
    for batch in split(sweep, count, "mixed"):
        for kv_placement, seqs in kinds.items():
            own = sum(s.sequence.kv_placement == kv_placement for s in batch)
            assert abs(own - seqs / count) <= 1, (kv_placement, own)


def test_where_some_are_left_out_the_others_are_in_all_batches():
    """Sequences that the CPU attends to are spread over micro-batches, as one that had all of them would be held up."""
    sweep = [scheduled("gpu", 1, 9) for _ in range(12)] + [scheduled("cpu", 1, 9) for _ in range(4)]
    on_cpu = [[s.sequence.kv_placement for s in batch].count("cpu") for batch in split(sweep, 2, mixes=True)]
    assert on_cpu == [2, 2]
    assert [[s.sequence.kv_placement for s in batch].count("cpu") for batch in split(sweep, 2)] == [0, 4]
    assert split(sweep, 2, "neo", mixes=True) == split(sweep, 2, "neo")


def test_a_pipelined_sweep_has_its_deferred_tokens_in_a_last_batch():
    """It may be empty, where all deferred tokens are under way."""
    deferring = [scheduled("deferred", 1, 9), scheduled("deferred", 1, 5)]
    others = [scheduled("gpu", 1, 9), scheduled("deferred", 6), scheduled("gpu", 12)]
    mixed = [others[0], deferring[0], *others[1:], deferring[1]]
    assert split(mixed, 1, pipelines=True) == [others, deferring]
    assert split(others, 1, pipelines=True) == [others, []]
    assert split(mixed, 1) == [mixed]


def test_batches_above_a_limit_are_cut_into_even_pieces():
    assert tokens_of(split([scheduled("gpu", 10) for _ in range(8)], 2, max_tokens=20)) == [20] * 4
    assert tokens_of(split([scheduled("gpu", 10), scheduled("gpu", 50)], 1, max_tokens=20)) == [10, 50]
    # Ten decodes with five blocks each and room for 26: no more than five at a time.
    staged = [scheduled("streamed", 1, 19) for _ in range(10)]
    assert tokens_of(split(staged, 1, max_staged_blocks=26)) == [5, 5]
    assert tokens_of(split(staged, 2, max_staged_blocks=9)) == [1] * 10
    resident = [scheduled("gpu", 1, 19) for _ in range(10)]
    assert tokens_of(split(resident, 1, max_staged_blocks=0)) == [10]


def test_a_sequence_longer_than_the_staging_buffer_is_refused():
    with pytest.raises(AssertionError, match="capacity for 4"):
        split([scheduled("disk", 1, 16)], 1, max_staged_blocks=4)


def test_neo_order_puts_delegated_attention_in_the_second_batch():
    prefill, gpu = scheduled("cpu", 9), scheduled("gpu", 1, 9)
    cpu = [scheduled("cpu", 1, 9) for _ in range(3)]
    streamed = scheduled("streamed", 1, 9)
    sweep = [cpu[0], gpu, cpu[1], streamed, cpu[2], prefill]
    assert split(sweep, 2, "neo") == [[gpu, streamed, prefill], cpu]
    assert split(sweep, 2, "neo", max_tokens=10) == [[gpu, streamed], [prefill], cpu]
    assert split(cpu, 2, "neo") == split(cpu, 2) and len(split(cpu, 2)) == 2
    assert split([gpu, prefill], 2, "neo") == [[gpu], [prefill]]
    for count in (1, 3):
        assert split(sweep, count, "neo") == split(sweep, count)


def keys_of(batch):
    """That the CPU attends to."""
    return sum(s.num_keys for s in batch if placement_in_sweep(s, "gpu") == KVPlacement.CPU)


@pytest.mark.parametrize("balance_tokens", [0, 40, 400])
@pytest.mark.parametrize("prompt", [0, 60, 900])
def test_unequal_batches_have_attention_as_long_as_the_products_of_the_other(balance_tokens, prompt):
    """NEO section 3.2: neither the CPU nor the device waits, however many tokens of prompts there are."""
    others = [scheduled("gpu", 1, 9) for _ in range(20)] + [scheduled("cpu", prompt)] * (prompt > 0)
    cpu = [scheduled("cpu", 1, 9 + 7 * i % 50) for i in range(80)]
    first, second = split([*cpu, *others], 2, "neo", balance_tokens=balance_tokens)
    assert {id(s) for s in others} <= {id(s) for s in first}
    assert [s for s in [*first, *second] if placement_in_sweep(s, "gpu") == KVPlacement.CPU] == cpu
    products = [tokens + balance_tokens for tokens in tokens_of([first, second])]
    share = keys_of(first) / (keys_of(first) + keys_of(second))
    one = max(s.num_keys for s in cpu) / keys_of(cpu)
    assert share == pytest.approx(products[1] / sum(products), abs=2 * one)


def test_the_fewer_tokens_the_second_batch_has_the_less_is_hidden_behind_it():
    def first_part(prompt, balance_tokens):
        sweep = [scheduled("cpu", 1, 9) for _ in range(64)] + [scheduled("cpu", prompt)]
        return len(split(sweep, 2, "neo", balance_tokens=balance_tokens)[0]) - 1

    by_prompt = [first_part(prompt, 32) for prompt in (8, 64, 512, 4096)]
    assert by_prompt == sorted(by_prompt, reverse=True) and by_prompt[0] > 24 and by_prompt[-1] <= 2
    by_balance = [first_part(512, tokens) for tokens in (0, 64, 1024, 10**6)]
    assert by_balance == sorted(by_balance) and by_balance[-1] == 32, "products that take no longer for more tokens"


def test_unequal_batches_of_a_sweep_of_one_kind():
    cpu, gpu = [scheduled("cpu", 1, 9) for _ in range(10)], [scheduled("gpu", 1, 9) for _ in range(10)]
    assert split(cpu, 2, "neo", balance_tokens=7) == [cpu[:5], cpu[5:]]
    assert split(gpu, 2, "neo", balance_tokens=7) == [gpu], "there is nothing to hide"
    assert split(cpu[:1], 2, "neo", balance_tokens=7) == [cpu[:1]]


CUTS = [*((order, count, None) for order in ORDERS for count in (1, 2, 3, 4)), ("neo", 2, 0), ("neo", 2, 9)]


@pytest.mark.parametrize(("order", "num_gpu_batches", "balance_tokens"), CUTS)
def test_who_takes_a_prefix_of_the_same_sweep_comes_no_earlier_than_its_writer(order, num_gpu_batches, balance_tokens):
    pools = {"gpu": BlockManager(60, BLOCK), "cpu": BlockManager(200, BLOCK)}
    limits = SchedulerLimits(40, 60, kv_seqs={"gpu": 12, "cpu": 20}, compute_tier="gpu", max_chunk_tokens=16)
    scheduler = Scheduler(pools, limits)
    for i in range(60):
        prefix = [100 * (i % 3) + k for k in range(24)]
        scheduler.add(Sequence(i, i, 0, [*prefix, 900 + i], SamplingParams(max_tokens=2 + i % 5)))
    content = {}  # (tier, block) -> the tokens that a full block's KV was computed from
    taken = 0
    while scheduler.has_work:
        sweep = scheduler.schedule()
        behind, fresh = {}, set()
        for batch in split(sweep, num_gpu_batches, order, max_tokens=25, balance_tokens=balance_tokens):
            for s in batch:  # all of a batch is written before any of it is read
                sequence, tier = s.sequence, s.sequence.kv_placement.tier
                for b in range(sequence.num_computed // BLOCK, s.num_keys // BLOCK):
                    target = content if tier == "gpu" else behind
                    target[tier, sequence.block_table[b]] = sequence.tokens[: (b + 1) * BLOCK]
                    fresh.add((tier, sequence.block_table[b]))
            for s in batch:
                sequence, tier = s.sequence, s.sequence.kv_placement.tier
                for b in range(sequence.num_computed // BLOCK):
                    assert content[tier, sequence.block_table[b]] == sequence.tokens[: (b + 1) * BLOCK]
                    taken += (tier, sequence.block_table[b]) in fresh
        content |= behind
        scheduler.commit(sweep)
        for sequence in [s.sequence for s in sweep if s.sequence.num_computed == len(s.sequence.tokens)]:
            sequence.tokens.append(7)
            if sequence.num_generated == sequence.sampling.max_tokens:
                scheduler.finish(sequence)
    assert taken > 3, "prefixes were to be shared within a sweep"
