"""The choice, before each sweep, of how sequences whose attention is deferred go through it (APEX section 3.4).

In a sweep that overlaps, each of them goes a layer further beside the whole sweep. In a sweep that is pipelined they
are a second micro-batch, whose CPU attention runs beside the first one: they go through all layers that they have left.
Inequality (6) says when that pays, by the plan's seconds, corrected by what the CPU has taken so far. No tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from batchgen.core.dtypes import INT4
from batchgen.core.kv_placement import KVPlacement
from batchgen.core.lane_costs import NOT_KNOWN, LaneCosts
from batchgen.core.plan import Policy
from batchgen.schedule.scheduled_sequence import ScheduledSequence
from batchgen.schedule.sequence import PENDING, Sequence
from batchgen.schedule.sweep_estimate import SweepLoad, load_of

# What a sweep has shown of the CPU counts this much less with each sweep after it.
_DECAY = 0.98
# Part of the layers that a sequence under way is expected to have left.
_LAYERS_LEFT = 0.5
# Part of its window in which the CPU is given something to attend to.
_WINDOW_FRAC = 0.9
# Times as many tokens in a second that a pipelined sweep must have, by the estimate.
_WORTH_PIPELINING = 1.1


@dataclass(frozen=True)
class PipelineTimes:
    """Estimated seconds of a sweep, all layers together, as APEX section 3.2 names them.

    Attributes:
        products_s: T_glinear, of a sweep without prompts.
        attention_s: T_gatt, of a sweep without prompts.
        products_with_prompts_s: T_glinear_pref, with the prompts of the sweep.
        attention_with_prompts_s: T_gatt_pref, with the prompts of the sweep.
    """

    products_s: float
    attention_s: float
    products_with_prompts_s: float
    attention_with_prompts_s: float

    @property
    def alone_s(self) -> float:
        """Seconds of a sweep without prompts that the GPU has to itself: equation (1)."""
        return self.products_s + self.attention_s

    @property
    def pipelined_s(self) -> float:
        """Seconds of a sweep without prompts in two micro-batches: equation (2)."""
        return 2 * self.products_s + self.attention_s

    @property
    def window_s(self) -> float:
        """Seconds in which the CPU may attend in a pipelined sweep: equation (4), also in its form with prompts."""
        return self.products_with_prompts_s + self.products_s + self.attention_with_prompts_s


def pipelining_pays(times: PipelineTimes, gpu_tokens: float, cpu_tokens: float) -> bool:
    """Inequality (5), and so (6): whether a pipelined sweep generates more tokens in a second than the GPU alone.

    Args:
        times: Seconds of the sweep.
        gpu_tokens: N_G T_gatt, the sequences that the GPU attends to.
        cpu_tokens: The sequences that the CPU attends to in the window, N_C times its seconds where enough are there.
    """
    return (gpu_tokens + cpu_tokens) * times.alone_s > gpu_tokens * times.pipelined_s


class DeferralChoice:
    """The choice between overlapping and pipelining, for each sweep.

    Attributes:
        num_left_out: Tokens so far that could have begun in a pipelined sweep and were left for a later one.
        num_pipelined: Number of pipelined sweeps so far.
    """

    def __init__(self, costs: LaneCosts, num_layers: int) -> None:
        """Rely on the plan.

        Args:
            costs: The plan's seconds of what a sweep may have.
            num_layers: Layers that a token goes through.
        """
        self._costs, self._num_layers = costs, num_layers
        self._under_way: dict[Sequence, int] = {}  # tokens that its token attends to
        self._late: dict[Sequence, int] = {}  # pipelined sweeps in a row that a sequence was left out of
        self._planned_s = self._busy_s = 0.0  # of CPU attention so far; the former of tokens that have ended
        self._factor = 1.0
        self.num_left_out = self.num_pipelined = 0

    @property
    def cpu_factor(self) -> float:
        """The factor on planned seconds of CPU attention."""
        if not self._planned_s:
            return 1.0
        begun_s = (1 - _LAYERS_LEFT) * sum(map(self._planned_attention_s, self._under_way.values()))
        return self._busy_s / (self._planned_s + begun_s)

    def choose(self, sweep: list[ScheduledSequence]) -> tuple[list[ScheduledSequence], bool]:
        """Choose how a sweep is run.

        Args:
            sweep: Sequences of the sweep, with all those whose deferred token may begin in it.

        Returns:
            The sequences of the sweep, without those that the CPU would be too late for; and whether it is pipelined.
        """
        self._count_ended()
        self._factor = self.cpu_factor
        begins = sorted((one for one in sweep if one.defers), key=lambda one: -self._late.get(one.sequence, 0))
        kept = self._pipelined(load_of(one for one in sweep if not one.defers), begins)
        late = [] if kept is None else begins[kept:]
        self._late = {one.sequence: self._late.get(one.sequence, 0) + 1 for one in late}
        self.num_left_out += len(late)
        self.num_pipelined += kept is not None
        for one in begins[:kept]:
            self._under_way[one.sequence] = one.num_keys
        return [one for one in sweep if one.sequence not in self._late] if late else sweep, kept is not None

    def measured(self, busy_s: Mapping[str, float]) -> None:
        """Take the seconds that each lane was busy for a sweep."""
        self._planned_s *= _DECAY
        self._busy_s = _DECAY * self._busy_s + busy_s.get("cpu_attention", 0.0)

    def _pipelined(self, load: SweepLoad, begins: list[ScheduledSequence]) -> int | None:
        """The number of sequences that begin a token in the sweep if it is pipelined; None: it overlaps.

        Those under way come first: they add no more than the layers that they have left.

        Args:
            load: The part of the sweep that the GPU attends to.
            begins: Sequences that may begin a token, in order of preference.
        """
        if not load.tokens or not (begins or self._under_way):
            return None
        times, rest_s = self._times(load), _LAYERS_LEFT * sum(map(self._attention_s, self._under_way.values()))
        left_s, count = _WINDOW_FRAC * times.window_s - rest_s, 0
        while count < len(begins) and (left_s := left_s - self._attention_s(begins[count].num_keys)) >= 0:
            count += 1
        if rest_s > times.window_s:
            return None
        tokens = _LAYERS_LEFT * len(self._under_way) + count
        # Each of them takes a sweep for each layer, and one more, where they overlap.
        overlapped = (len(self._under_way) + len(begins)) / (self._num_layers + 1)
        pipelined_rate = (load.decodes + tokens) / (times.pipelined_s + tokens * self._costs.token_s)
        overlapped_rate = (load.decodes + overlapped) / (times.alone_s + overlapped * self._costs.token_s)
        is_faster = pipelined_rate > _WORTH_PIPELINING * overlapped_rate
        return count if is_faster and pipelining_pays(times, load.decodes, tokens) else None

    def _times(self, load: SweepLoad) -> PipelineTimes:
        costs = self._costs
        attention_s = load.decodes * costs.gpu_seq_s + load.keys * costs.gpu_key_s
        return PipelineTimes(
            costs.batch_s + load.decodes * costs.token_s,
            attention_s,
            costs.batch_s + load.tokens * costs.token_s,
            attention_s + load.prompt_keys * costs.prompt_key_s,
        )

    def _attention_s(self, keys: int) -> float:
        """Seconds of a token's attention on the CPU in all layers."""
        return self._factor * self._planned_attention_s(keys) + self._costs.sent_seq_s

    def _planned_attention_s(self, keys: int) -> float:
        """Planned seconds of a token's attention on the CPU in all layers."""
        return self._costs.cpu_seq_s + keys * self._costs.cpu_key_s

    def _count_ended(self) -> None:
        """Count the planned seconds of tokens that have been through all layers."""
        ended = [s for s in self._under_way if s.num_remaining > 0 and s.tokens[-1] != PENDING]
        self._planned_s += sum(self._planned_attention_s(self._under_way.pop(sequence)) for sequence in ended)


def deferral_choice(policy: Policy, costs: LaneCosts, num_layers: int) -> DeferralChoice | None:
    """The choice for a policy that defers attention in sweeps of one micro-batch; None where nothing is to be chosen.

    Where a plan limits the rows that enter the placement, they end when the job does anyway. Weights of 4 bits are
    dequantized for a layer at a time, and the two micro-batches of a pipelined sweep are at two.

    Args:
        policy: The policy.
        costs: The plan's seconds of what a sweep may have.
        num_layers: Layers of the model.
    """
    defers = policy.kv_seqs.get(KVPlacement.DEFERRED, 0) and not policy.kv_seqs.get(KVPlacement.CPU, 0)
    defers = defers and policy.deferred_rows is None
    if not defers or policy.num_gpu_batches > 1 or policy.weight_format == INT4 or policy.admission != "continuous":
        return None
    return None if costs == NOT_KNOWN or not (costs.cpu_seq_s or costs.cpu_key_s) else DeferralChoice(costs, num_layers)
