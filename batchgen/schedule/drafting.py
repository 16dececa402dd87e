"""The drafts of each sweep: which sequences have some, and how many. No tensors.

A sweep lasts as long as its computation or as what it reads, whichever is longer. A draft costs computation alone, so
it is free while the sweep reads. Beyond that it is worth its seconds where these, spent on drafts, give more tokens
than a sweep does on average. Acceptance and seconds are measured. Where drafts seem not to be worth it, a sweep now and
then has some all the same, to see: soon at first, as sweeps of equally many tokens do not tell what one more costs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as List
from dataclasses import dataclass

from batchgen.core.draft_rates import MOST_DRAFTS, DraftRates, expected_accepted
from batchgen.schedule.draft_proposer import Proposal, Proposer
from batchgen.schedule.finished_rows_proposer import FinishedRowsProposer
from batchgen.schedule.grammar_proposer import GrammarProposer
from batchgen.schedule.lookup_proposer import LookupProposer
from batchgen.schedule.sequence import Sequence
from batchgen.schedule.sweep_fit import SweepFit

_MARGIN = 1.2  # by which drafts must be worth more than they cost
_HIGHEST, _LOWEST = 0.95, 0.02  # chance of acceptance that is thought possible, and below which nothing is drafted
_PRIOR = 4.0  # drafts that what is thought at first counts as
_WAITS = 1.25  # times its computation that a sweep takes which waits
_FIRST_TRIAL, _TRIAL_EVERY, _TRIAL_PART = 4, 64, 2  # sweeps; part of a sweep's sequences that have a draft on trial
_RECENT = 0.8  # weight of earlier sweeps in what choosing drafts costs, and in what they save
_ENOUGH_JUDGED = 64  # drafts until their rates say anything of those of other jobs
_JUDGED_AFTER = 12  # sweeps with drafts until that counts
_COMPARED, _ALIKE = 3, 0.1  # sweeps with drafts until they count; part by which the sequences of two sweeps may differ
_KEPT = 0.998  # of what was measured of acceptance, after each sweep: texts change


@dataclass
class _Acceptance:
    """Drafts of one kind that were judged: those before the first refused one, and that one.

    Attributes:
        thought: Chance of acceptance that is thought of before any was judged.
        accepted: Accepted drafts.
        judged: Judged drafts.
    """

    thought: float
    accepted: float = 0.0
    judged: float = 0.0

    @property
    def chance(self) -> float:
        """Chance that a draft is accepted, if those before it are."""
        return min(_HIGHEST, (self.accepted + _PRIOR * self.thought) / (self.judged + _PRIOR))


@dataclass(frozen=True)
class _Drafted:
    """Drafts in a sweep that is under way.

    Attributes:
        kind: Kind of the proposal.
        num_drafts: Number of drafts.
        num_tokens: Tokens of the sequence before the sweep.
    """

    kind: tuple[int, int]
    num_drafts: int
    num_tokens: int


class Drafting:
    """Chooses the drafts of sweeps.

    Attributes:
        active: Whether drafts could be worth their time in the last sweep that was scheduled.
        num_drafted: Drafts so far.
        num_accepted: Drafts of them that were accepted.
    """

    def __init__(
        self,
        proposers: List[Proposer] | None = None,
        *,
        always: int | Callable[[int], int] | None = None,
        only_while_waiting: bool = False,
        most: int = MOST_DRAFTS,
        reads_grow: bool = False,
        of_model: List[Proposer] = (),
    ) -> None:
        """Have measured nothing.

        Args:
            proposers: Proposers, in order of preference; None: a grammar's, lookup's, and that of rows that have ended.
            always: Drafts that each sequence has in each sweep, whatever they cost, or a function that gives them for
                the number of sequences that decode; None: as many as are worth it.
            only_while_waiting: Whether there are drafts, those on trial included, only while computation waits for
                weights or KV: where the next sweep is launched before the tokens of this one are known, drafts hold it
                up.
            most: Most drafts of a sequence in a sweep.
            of_model: Further proposers, which the model has.
            reads_grow: Whether sweeps with more tokens read more, as experts are read on demand.
        """
        self._most = most
        self._proposers = proposers or [GrammarProposer(), LookupProposer(), FinishedRowsProposer(), *of_model]
        self._always, self._only_while_waiting = always, only_while_waiting
        self._pause = 0  # sweeps
        self._cost_s = self._saved_s = 0.0  # of the last sweeps with drafts
        self._fit = SweepFit(reads_grow=reads_grow)
        self._worth = _Worth(self._fit, 0, 0)
        self._pace = _Pace()
        self._until_trial = self._trial_after = _FIRST_TRIAL
        self._acceptance: dict[tuple[int, int], _Acceptance] = {}
        self._under_way: dict[Sequence, _Drafted] = {}
        self._on_trial = self._last_accepted = self._num_active = 0
        self.active = always is not None
        self.num_drafted = self.num_accepted = 0
        self._num_judged = self._num_asked = self._num_proposed = self._num_forced = 0
        self._has_asked = False  # for the last sweep

    @property
    def rates(self) -> DraftRates | None:
        """Rates of all drafts so far; None: too few were judged to say anything."""
        if self._num_judged + self._num_forced < _ENOUGH_JUDGED or not self._num_asked:
            return None
        accepted = min(_HIGHEST, self.num_accepted / self._num_judged) if self._num_judged else 0.0
        asked = self._num_asked
        return DraftRates(self._num_proposed / asked, accepted, forced=self._num_forced / asked)

    def begin(self, num_tokens: int, num_rows: int) -> bool:
        """Begin with a sweep; False: no draft could be worth its time in it.

        Args:
            num_tokens: Tokens of the sweep without drafts.
            num_rows: Sequences in it.
        """
        self._has_asked = False
        self._worth = _Worth(self._fit, num_tokens, num_rows)
        self._pause = max(0, self._pause - 1)
        self.active = self._always is not None or (not self._pause and self._may_be_worth_it())
        self._until_trial = self._trial_after if self.active else self._until_trial - 1
        is_due = self._until_trial <= 0 and not self._only_while_waiting
        self._on_trial = -(-num_rows // _TRIAL_PART) if is_due else 0
        if self._on_trial:
            self._until_trial = self._trial_after = min(_TRIAL_EVERY, 2 * self._trial_after)
        return self.active or self._on_trial > 0

    def _may_be_worth_it(self) -> bool:
        if not self._fit.is_known or (self._only_while_waiting and not self._worth.waits):
            return False
        return self._worth.is_enough(_HIGHEST)

    def choose(self, rooms: Mapping[Sequence, int], budget: int) -> dict[Sequence, list[int]]:
        """The drafts of the sweep that has begun, by sequence.

        Args:
            rooms: Sequences that decode in it, each with the most drafts that it may have.
            budget: Most drafts of the sweep.
        """
        started = time.perf_counter()
        with_room = [(sequence, min(self._most, room)) for sequence, room in rooms.items() if room > 0]
        for proposer in self._proposers:
            proposer.begin([sequence for sequence, _ in with_room])
        proposals = {s: best for s, room in with_room if (best := self._best(s, room)) is not None}
        self._num_asked += len(with_room)
        self._has_asked = True
        self._num_proposed += len(proposals)
        if self._always is not None:
            always = self._always if isinstance(self._always, int) else self._always(len(rooms))
            counts = self._first(proposals, budget, always)
        elif self._on_trial:
            counts = self._first(proposals, min(budget, self._on_trial), self._most)
        else:
            counts = self._worth_most(proposals, budget, self._worth)
        for sequence, count in counts.items():
            self._under_way[sequence] = _Drafted(proposals[sequence][0], count, len(sequence.tokens))
            self.num_drafted += count
        self._cost_s += (1 - _RECENT) * (time.perf_counter() - started - self._cost_s)
        return {sequence: proposals[sequence][1].tokens[:count] for sequence, count in counts.items()}

    def taken(self) -> None:
        """Measure acceptance by the sweeps whose tokens have been taken."""
        for acceptance in self._acceptance.values():
            acceptance.accepted, acceptance.judged = _KEPT * acceptance.accepted, _KEPT * acceptance.judged
        before = self.num_accepted
        judged = [sequence for sequence in self._under_way if not sequence.drafts]
        for sequence in judged:
            drafted = self._under_way.pop(sequence)
            accepted = min(drafted.num_drafts, max(0, len(sequence.tokens) - drafted.num_tokens - 1))
            self.num_accepted += accepted
            self._num_judged += accepted + (accepted < drafted.num_drafts)
            acceptance = self._of(drafted.kind)
            acceptance.accepted += accepted
            acceptance.judged += accepted + (accepted < drafted.num_drafts)
        self._last_accepted = self.num_accepted - before

    def withdraw(self, sequence: Sequence) -> None:
        """Count drafts of a sequence that were chosen just now as never made."""
        self.num_drafted -= self._under_way.pop(sequence).num_drafts

    def ran(
        self,
        num_tokens: int,
        num_logits: int,
        seconds: float,
        busy_s: Mapping[str, float],
        stalled_s: Mapping[str, float],
    ) -> None:
        """Take the times of a sweep, as `SweepFit.add` does."""
        self._fit.add(num_tokens, num_logits, seconds, busy_s, stalled_s)
        if self._always is None and not self._worth.has_prompts:
            rows = self._worth.num_rows
            if not self._has_asked:
                self._pace.without(rows, seconds)
            elif self._pace.is_slower(rows, rows + self._last_accepted, seconds):
                self._pause, self._num_active = _TRIAL_EVERY, 0
        if self.active and self._always is None:
            # Accepted drafts would have taken sweeps like this one without drafts, with all rows in each.
            added_s = min(seconds, self._worth.added_s)
            saved_s = (seconds - added_s) * self._last_accepted / self._worth.num_rows - added_s
            self._saved_s += (1 - _RECENT) * (saved_s - self._saved_s)
            self._num_active += 1
            if self._num_active >= _JUDGED_AFTER and self._saved_s < self._cost_s:
                self._pause, self._num_active = _TRIAL_EVERY, 0

    def forced(self, num_tokens: int) -> None:
        """Count tokens that follow those of the last sweep, as grammars allow no others, if it was to have drafts."""
        if self._has_asked:
            self._num_forced += num_tokens

    def ended(self, sequences: List[Sequence]) -> None:
        """Note that sequences have ended."""
        for sequence in sequences:
            for proposer in self._proposers:
                proposer.ended(sequence)

    def _of(self, kind: tuple[int, int]) -> _Acceptance:
        acceptance = self._acceptance.get(kind)
        if acceptance is None:
            chance = 1 - 1 / max(2, kind[1]) if kind[1] else _HIGHEST
            acceptance = self._acceptance[kind] = _Acceptance(chance)
        return acceptance

    def _best(self, sequence: Sequence, most: int) -> tuple[tuple[int, int], Proposal] | None:
        """The kind and the proposal from which most is expected; None: there is none."""
        best, most_expected = None, 0.0
        for number, proposer in enumerate(self._proposers):
            proposal = proposer.propose(sequence, most)
            if proposal is None:
                continue
            kind = (number, proposal.strength)
            expected = expected_accepted(self._of(kind).chance, len(proposal.tokens))
            if expected > most_expected:
                best, most_expected = (kind, proposal), expected
        return best

    def _first(
        self, proposals: Mapping[Sequence, tuple[tuple[int, int], Proposal]], budget: int, most: int
    ) -> dict[Sequence, int]:
        """Numbers of drafts, at most so many for each sequence, of the first sequences within the budget."""
        counts = {}
        for sequence, (_, proposal) in proposals.items():
            count = min(len(proposal.tokens), most, budget)
            if count > 0:
                counts[sequence] = count
                budget -= count
        return counts

    def _worth_most(
        self, proposals: Mapping[Sequence, tuple[tuple[int, int], Proposal]], budget: int, worth: _Worth
    ) -> dict[Sequence, int]:
        """Number of drafts of each sequence: those of all proposals that are worth their time, the likeliest first."""
        likely: list[tuple[float, Sequence]] = []
        for sequence, (kind, proposal) in proposals.items():
            chance = self._of(kind).chance
            # After a refused draft, a sequence with a state has tokens run once more.
            tokens = 1 if sequence.state is None else 2
            likely += ((chance ** (k + 1) / tokens, sequence) for k in range(len(proposal.tokens)))
        likely.sort(key=lambda draft: -draft[0])
        counts: dict[Sequence, int] = {}
        for expected, sequence in likely[:budget]:
            if expected < _LOWEST or not worth.is_enough(expected):
                break
            worth.add(expected)
            counts[sequence] = counts.get(sequence, 0) + 1
        return counts


class _Pace:
    """Tokens in a second of sweeps with drafts, against sweeps of about as many sequences shortly before them.

    What a draft costs is estimated from sweeps of other sizes, and this notices where the estimate is wrong.
    """

    def __init__(self) -> None:
        self._num_rows, self._per_s, self._age = 0, 0.0, 0  # of sweeps without drafts
        self._faster, self._num_compared = 0.0, 0

    def without(self, num_rows: int, seconds: float) -> None:
        """Take a sweep in which no drafts were asked for."""
        rate = num_rows / max(seconds, 1e-9)
        self._per_s = _RECENT * self._per_s + (1 - _RECENT) * rate if self._is_like(num_rows) else rate
        self._num_rows, self._age = num_rows, 0

    def is_slower(self, num_rows: int, num_tokens: int, seconds: float) -> bool:
        """Take a sweep for which drafts were asked; returns whether the last of them were slower than those without."""
        self._age += 1
        if not self._is_like(num_rows):
            self._num_compared = 0
            return False
        faster = num_tokens / max(seconds, 1e-9) / self._per_s
        self._faster = _RECENT * self._faster + (1 - _RECENT) * faster if self._num_compared else faster
        self._num_compared += 1
        slower = self._num_compared >= _COMPARED and self._faster < 1
        if slower:
            self._num_compared = 0
        return slower

    def _is_like(self, num_rows: int) -> bool:
        """Tell whether a sweep of so many sequences can be compared with those before it."""
        return self._age < _TRIAL_EVERY and abs(num_rows - self._num_rows) <= _ALIKE * num_rows


class _Worth:
    """The seconds of a sweep and the tokens expected of it, while drafts are added.

    An accepted draft saves a token of a later sweep, so it is worth what a token costs in a sweep without prompts.

    Attributes:
        num_rows: Sequences in the sweep, at least 1.
        has_prompts: Whether the sweep has prompts.
    """

    def __init__(self, fit: SweepFit, num_tokens: int, num_rows: int) -> None:
        sweep_s, token_s, row_s = fit.compute_s
        self._moved_s, self._draft_s = fit.moved_s, token_s + row_s
        self._moved_draft_s = fit.moved_token_s
        self._compute_s = sweep_s + num_tokens * token_s + num_rows * row_s
        self._alone_s = sweep_s + num_rows * self._draft_s
        self.num_rows = max(1, num_rows)
        self.has_prompts = num_tokens >= 2 * self.num_rows  # a decode with a forced token has two
        self._expected = float(num_rows)
        self._without_s = max(self._moved_s, self._compute_s)

    @property
    def added_s(self) -> float:
        """Seconds by which the drafts that were added make the sweep longer."""
        return max(self._moved_s, self._compute_s) - self._without_s

    @property
    def waits(self) -> bool:
        """Tell whether computation waits in the sweep for a good part of it."""
        return self._moved_s > _WAITS * self._compute_s

    def is_enough(self, expected: float) -> bool:
        """Tell whether one more draft, of which so many accepted tokens are expected, is worth its seconds."""
        now_s = max(self._moved_s, self._compute_s)
        added_s = max(self._moved_s + self._moved_draft_s, self._compute_s + self._draft_s, now_s) - now_s
        return expected * max(self._moved_s, self._alone_s) >= _MARGIN * added_s * self._expected

    def add(self, expected: float) -> None:
        """Count one more draft."""
        self._compute_s += self._draft_s
        self._moved_s += self._moved_draft_s
        self._alone_s += self._draft_s
        self._expected += expected
