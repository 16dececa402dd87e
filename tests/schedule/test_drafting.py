"""Drafts: what proposers find, and how many drafts a sweep has by what it waits for and what was accepted."""

import random
from dataclasses import replace

import numpy as np
import pytest

from batchgen.core.draft_rates import DraftRates
from batchgen.core.kv_placement import KVPlacement
from batchgen.core.request import SamplingParams
from batchgen.schedule.block_manager import BlockManager
from batchgen.schedule.draft_proposer import Proposal
from batchgen.schedule.drafting import Drafting
from batchgen.schedule.finished_rows_proposer import FinishedRowsProposer
from batchgen.schedule.lookup_proposer import LookupProposer
from batchgen.schedule.scheduler import Scheduler
from batchgen.schedule.scheduler_limits import SchedulerLimits
from batchgen.schedule.sequence import NOT_FINITE, Sequence
from batchgen.schedule.sweep_fit import SweepFit


def sequence_of(prompt, generated=(), **sampling):
    sequence = Sequence(0, 0, 0, list(prompt), SamplingParams(max_tokens=100, **sampling))
    sequence.tokens += generated
    return sequence


def test_lookup_finds_what_followed_the_longest_earlier_match():
    proposer = LookupProposer()
    sequence = sequence_of([1, 2, 3, 40, 9, 2, 3, 50, 8], [1, 2, 3])
    assert proposer.propose(sequence, 2) == Proposal([40, 9], 3), "not the later match, which is shorter"
    sequence.tokens += [7, 2, 3]
    assert proposer.propose(sequence, 4) == Proposal([7, 2, 3, 7], 2), "the latest of equal ones; a period goes on"


def test_lookup_finds_nothing_where_two_tokens_are_new():
    assert LookupProposer().propose(sequence_of([1, 2, 3, 4, 3]), 4) is None
    assert LookupProposer().propose(sequence_of([1]), 4) is None


def test_lookup_equals_a_plain_search_over_random_texts():
    rng = random.Random(3)
    for _ in range(200):
        tokens = [rng.randrange(3) for _ in range(rng.randrange(1, 30))]
        best = (0, 0)
        for end in range(1, len(tokens)):
            length = 0
            while length < min(end, 8) and tokens[end - 1 - length] == tokens[len(tokens) - 1 - length]:
                length += 1
            best = max(best, (length, end))
        found = LookupProposer().propose(sequence_of(tokens), 3)
        if best[0] < 2:
            assert found is None
        else:
            assert found == Proposal(np.resize(tokens[best[1] : best[1] + 3], 3).tolist(), best[0])


def test_rows_that_have_ended_are_found_until_the_ring_is_full():
    proposer = FinishedRowsProposer(ring_tokens=64)
    assert proposer.propose(sequence_of([1], [2, 3, 4]), 4) is None
    proposer.ended(sequence_of([1, 2, 3], [4, 5, 6, 7, 8, 9]))
    assert proposer.propose(sequence_of([90, 91], [4, 5, 6]), 2) == Proposal([7, 8], 3)
    assert proposer.propose(sequence_of([90, 91], [7, 8, 9]), 2) is None, "the row ended there"
    proposer.ended(sequence_of([1, 2], [30, 6, 40]))
    assert proposer.propose(sequence_of([90, 91], [4, 5, 6]), 2) == Proposal([7, 8], 3), "not the match of 6 alone"
    assert proposer.propose(sequence_of([90, 91], [41, 6]), 2) == Proposal([40], 1)
    for row in range(20):
        proposer.ended(sequence_of([100 + row], list(range(1000 * row + 200, 1000 * row + 220))))
    assert proposer.propose(sequence_of([90, 91], [4, 5, 6]), 2) is None
    assert proposer.propose(sequence_of([90], [19_200, 19_201, 19_202]), 2) == Proposal([19_203, 19_204], 3)


def test_a_row_that_failed_leaves_no_token_to_draft_where_its_logits_were_not_finite():
    proposer = FinishedRowsProposer(ring_tokens=64)
    proposer.ended(sequence_of([1, 2, 3], [4, 5, NOT_FINITE]))
    assert proposer.propose(sequence_of([90], [2, 3, 4]), 4) == Proposal([5], 3)
    assert proposer.propose(sequence_of([90], [3, 4, 5]), 4) is None


def fit_of(sweeps, *, sweep_s, token_s, row_s, moved_s):
    """The fit of sweeps, (tokens, rows) each, that last as long as they compute or move."""
    fit, rng = SweepFit(), random.Random(1)
    for tokens, rows in sweeps:
        compute_s = (sweep_s + tokens * token_s + rows * row_s) * rng.uniform(0.98, 1.02)
        seconds = max(compute_s, moved_s)
        fit.add(tokens, rows, seconds, {"compute": compute_s, "disk_read": moved_s}, {"disk_read": seconds - compute_s})
    return fit


def test_a_fit_finds_the_seconds_of_tokens_and_rows():
    sweeps = [(2048, 8), (96, 96), (256, 256), (32, 32)] * 8
    fit = fit_of(sweeps, sweep_s=0.05, token_s=0.001, row_s=0.002, moved_s=0.5)
    assert fit.compute_s == pytest.approx((0.05, 0.001, 0.002), rel=0.2)


def test_a_fit_of_equal_sweeps_takes_all_seconds_for_those_of_tokens():
    fit = fit_of([(256, 256)] * 40, sweep_s=0.5, token_s=0.001, row_s=0.001, moved_s=0.0)
    sweep_s, token_s, row_s = fit.compute_s
    assert sweep_s < 0.1 * (0.5 + 256 * 0.002)
    assert 256 * (token_s + row_s) == pytest.approx(0.5 + 256 * 0.002, rel=0.1)


def test_a_fit_of_sweeps_that_read_more_for_more_tokens_finds_how_much():
    fit = SweepFit(reads_grow=True)
    for tokens in (16, 32, 64, 40) * 20:
        read_s = 0.4 + 0.01 * tokens
        fit.add(tokens, tokens, read_s, {"compute": 0.01, "disk_read": read_s}, {"disk_read": read_s - 0.01})
    assert fit.moved_token_s == pytest.approx(0.01, rel=0.25)
    alike = SweepFit(reads_grow=True)
    for _ in range(20):
        alike.add(16, 16, 0.56, {"compute": 0.01, "disk_read": 0.56}, {"disk_read": 0.55})
    assert alike.moved_token_s == pytest.approx(0.56 / 16, rel=0.05), "each token is taken to read its part"


def test_rates_of_drafts_are_those_that_were_judged():
    drafting = Drafting([Right()], always=4)
    sequences = [sequence_of([1, 2, 3], [4]) for _ in range(20)]
    assert drafting.rates is None
    for k in range(20):
        assert drafting.begin(20, 20)
        chosen = drafting.choose(dict.fromkeys(sequences[k % 2 :: 2], 16), 2048)
        for sequence in chosen:
            sequence.tokens += [7, 7, 8]  # two of four drafts are right, the third is judged, the fourth is not
        drafting.taken()
        drafting.forced(5)
    assert drafting.rates == DraftRates(proposed=1.0, accepted=pytest.approx(2 / 3), forced=0.5)


def test_the_rate_of_forced_tokens_is_that_of_sweeps_with_drafts_however_few_have_some():
    drafting = Drafting([Right()])
    sequences = [sequence_of([1, 2, 3], [4]) for _ in range(20)]
    num_asked = 0
    for _ in range(200):
        if drafting.begin(20, 20):
            num_asked += 1
            for sequence in drafting.choose(dict.fromkeys(sequences, 16), 2048):
                sequence.tokens += [8]
        drafting.taken()
        drafting.forced(10)
    assert 0 < num_asked < 20
    assert drafting.rates is not None
    assert drafting.rates.forced == 0.5


class Right:
    """Drafts of which as many are accepted as the test says."""

    def begin(self, sequences):
        pass

    def propose(self, sequence, most):
        return Proposal([7] * most, 1) if most else None

    def ended(self, sequence):
        pass


def drafts_of(seconds, *, rows=32, accepted=1.0, sweeps=100):
    """Drafts of the last sweep of a job, and tokens of all its sweeps by their seconds.

    Args:
        seconds: Function of the tokens of a sweep: (seconds of computation, seconds of what it waits for).
        accepted: Chance of a draft.
    """
    drafting, rng = Drafting([Right()]), random.Random(0)
    sequences = [sequence_of([1, 2, 3], [4]) for _ in range(rows)]
    total_s, tokens, count = 0.0, 0, 0
    for k in range(sweeps):
        prompt = 512 if k % 10 == 0 else 0
        chosen = {}
        if drafting.begin(rows + prompt, rows):
            chosen = drafting.choose(dict.fromkeys(sequences, 16), 2048)
        count = sum(map(len, chosen.values()))
        compute_s, moved_s = seconds(rows + prompt + count)
        last = max(compute_s, moved_s)
        for sequence in sequences:
            right = 0
            while right < len(chosen.get(sequence, ())) and rng.random() < accepted:
                right += 1
            sequence.tokens += [7] * (1 + right)
            tokens += 1 + right
        total_s += last
        drafting.taken()
        busy, stalled = {"compute": compute_s, "disk_read": moved_s}, {"disk_read": last - compute_s}
        drafting.ran(rows + prompt + count, rows + count, last, busy, stalled)
    return count, tokens / total_s


def line(*, sweep_s=0.0, token_s, moved_s=0.0):
    """Seconds of a sweep by its tokens: of computation, and of what it waits for."""
    return lambda tokens: (sweep_s + token_s * tokens, moved_s)


@pytest.mark.parametrize("accepted", [0.9, 0.5, 0.1])
def test_drafts_fill_the_time_in_which_a_sweep_reads(accepted):
    seconds = line(token_s=0.01, moved_s=3.0)  # 300 tokens are free
    count, rate = drafts_of(seconds, accepted=accepted)
    assert count > 0
    assert rate > 1.05 * 100 * 32 / sum(max(seconds(32 + (512 if k % 10 == 0 else 0))) for k in range(100))
    assert count < 3 * 268, "beyond that a draft costs more than it gives"


@pytest.mark.parametrize("accepted", [0.9, 0.5, 0.0])
def test_nothing_is_lost_where_computation_binds(accepted):
    seconds = line(token_s=0.01, moved_s=0.1)
    _, rate = drafts_of(seconds, rows=256, accepted=accepted, sweeps=300)
    without = 300 * 256 / sum(max(seconds(256 + (512 if k % 10 == 0 else 0))) for k in range(300))
    assert rate >= 0.98 * without


@pytest.mark.parametrize("rows", [4, 1])
def test_drafts_are_made_where_products_of_few_tokens_take_the_time_of_their_weights(rows):
    """In memory, with few rows: it takes trials to see that more tokens cost nothing, and they come soon."""
    seconds = line(sweep_s=0.1, token_s=0.001)
    count, _ = drafts_of(seconds, rows=rows, accepted=0.9, sweeps=40)
    assert count > rows


def test_drafts_that_are_thought_to_be_free_and_are_slower_than_sweeps_before_stop_after_a_few():
    class Wrong(SweepFit):
        """A fit that never learns that more tokens take longer."""

        def add(self, *args):
            self.is_known, self.compute_s = True, (1.0, 0.0, 0.0)

    drafting, sequences = Drafting([Right()]), [sequence_of([1, 2, 3], [4]) for _ in range(32)]
    drafting._fit = Wrong()
    drafted = []
    for _ in range(60):
        asked = drafting.begin(32, 32)
        chosen = drafting.choose(dict.fromkeys(sequences, 16), 2048) if asked else {}
        count = sum(map(len, chosen.values()))
        drafted.append(count > 0)
        for sequence in sequences:
            sequence.tokens += [7, 8] if sequence in chosen else [7]  # the first draft is right
        drafting.taken()
        drafting.ran(32 + count, 32 + count, 1.0 + 0.1 * count, {"compute": 1.0}, {})
    assert 3 <= sum(drafted) <= 10


def test_where_drafts_are_only_for_sweeps_that_wait_none_are_tried_in_others():
    drafting = Drafting([Right()], only_while_waiting=True)
    for _ in range(200):
        assert not drafting.begin(8, 8)
        drafting.taken()
        drafting.ran(8, 8, 1.0, {"compute": 1.0}, {})


def test_drafts_that_are_always_refused_become_few():
    count, _ = drafts_of(line(token_s=0.05, moved_s=3.0), accepted=0.0)
    assert count < 32


def test_a_sweep_that_decodes_more_than_its_budget_of_tokens_has_no_drafts():
    limits = SchedulerLimits(8, 64, kv_seqs={KVPlacement.CPU: 8}, compute_tier="cpu")
    scheduler = Scheduler({"cpu": BlockManager(64, 16)}, limits)
    scheduler.drafting = Drafting([Right()])
    scheduler.drafting.ran(8, 8, 3.0, {"compute": 0.1, "disk_read": 3.0}, {"disk_read": 2.9})  # many would be free
    for row in range(8):
        scheduler.add(Sequence(row, row, 0, [row, 1, 2], SamplingParams(max_tokens=40)))
    counts = []
    for budget in (64, 64, 4):
        scheduler.limits = replace(limits, max_num_batched_tokens=budget)
        sweep = scheduler.schedule()
        counts.append(sum(count for _, count in sweep))
        scheduler.commit(sweep)
        for sequence, _ in sweep:
            sequence.drafts = []
            sequence.tokens.append(7)
        scheduler.drafting.taken()
    assert counts[1] > 8, "there are drafts where the budget allows them"
    assert counts[2] == 8
