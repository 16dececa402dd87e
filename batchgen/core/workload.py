"""The workload of a job for planning: the number of sequences and their lengths in tokens."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from batchgen.core.draft_rates import DraftRates
from batchgen.core.errors import InputError
from batchgen.core.routing import INDEPENDENT, Routing


@dataclass(frozen=True)
class Lengths:
    """A distribution of token counts, given by equally likely values.

    Attributes:
        values: The values in ascending order, such as quantiles of a sample.
    """

    values: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", tuple(sorted(self.values)))
        if not self.values or self.values[0] < 0:
            raise InputError(f"lengths must be one or more token counts of 0 or more, not {self.values!r}")

    @classmethod
    def of(cls, counts: Iterable[int], limit: int = 64) -> Lengths:
        """Summarize token counts by at most `limit` equally likely values, which keep the mean but for rounding.

        Each value is the mean of an equal part of the sorted counts.
        """
        ordered = sorted(counts)
        if len(ordered) <= limit:
            return cls(tuple(ordered))
        sums = [0, *itertools.accumulate(ordered)]
        width = len(ordered) / limit  # of a part, in counts; one that is cut belongs to both

        def sum_to(position: float) -> float:
            whole = int(position)
            return sums[whole] + (position - whole) * (sums[min(whole + 1, len(ordered))] - sums[whole])

        edges = [sum_to(i * len(ordered) / limit) for i in range(limit + 1)]
        return cls(tuple(round((b - a) / width) for a, b in itertools.pairwise(edges)))

    @property
    def mean(self) -> float:
        return sum(self.values) / len(self.values)

    @property
    def mean_square(self) -> float:
        return sum(v * v for v in self.values) / len(self.values)

    @property
    def max(self) -> int:
        return self.values[-1]

    def quantile(self, fraction: float) -> int:
        """The token count that a fraction of the lengths, 0 to 1, does not exceed."""
        return self.values[max(0, math.ceil(fraction * len(self.values)) - 1)]


@dataclass(frozen=True)
class Workload:
    """The number of sequences of a job, and their lengths in tokens.

    Attributes:
        num_seqs: Number of sequences (rows times samples).
        prompt_len: Distribution of prompt tokens per sequence.
        output_len: Distribution of generated tokens per sequence.
        max_output_len: The most tokens that a sequence may generate, for which KV is reserved.
        shared_prefix_len: Mean number of prompt tokens per sequence whose KV an earlier row has computed.
        scored_len: For a job that scores: mean number of positions per sequence whose logits are computed. Such
            sequences end after prefill and count as if they generated 1 token. None: the job generates.
        routing: Spread of the tokens over experts, for a mixture-of-experts model.
        is_pooled: Whether these positions are not scored, but make the sequence's vector.
        prefix_seqs: Mean number of sequences with the same shared prefix, above 1; None: all of them have the same one.
        drafts: Rates of the drafts that sequences have while weights or KV stream; None: nothing is drafted
            or forced.
    """

    num_seqs: int
    prompt_len: Lengths
    output_len: Lengths
    max_output_len: int
    shared_prefix_len: float = 0.0
    scored_len: float | None = None
    routing: Routing = INDEPENDENT
    prefix_seqs: float | None = None
    is_pooled: bool = False
    drafts: DraftRates | None = None

    def __post_init__(self) -> None:
        if self.num_seqs < 1:
            raise InputError(f"a workload needs at least 1 row, not {self.num_seqs}")
        if self.prompt_len.values[0] < 1 or self.output_len.values[0] < 1:
            raise InputError("prompts and outputs have at least 1 token")
        if self.output_len.max > self.max_output_len:
            raise InputError(f"outputs of {self.output_len.max} tokens exceed the limit of {self.max_output_len}")
        if self.scored_len is not None and not 0 < self.scored_len <= self.prompt_len.mean:
            raise InputError(f"{self.scored_len:g} scored tokens do not fit prompts of {self.prompt_len.mean:g}")
        if self.prefix_seqs is not None and not self.prefix_seqs > 1:
            raise InputError(f"a prefix is shared by more than one sequence, not by {self.prefix_seqs:g}")
        if not 0 <= self.shared_prefix_len < self.prompt_len.mean:
            raise InputError(
                f"a shared prefix of {self.shared_prefix_len:g} tokens does not fit prompts of {self.prompt_len.mean:g}"
            )

    @classmethod
    def uniform(cls, num_seqs: int, prompt_len: int, output_len: int, shared_prefix_len: float = 0.0) -> Workload:
        """A workload with sequences of equal lengths, as in the benchmarks of FlexGen.

        Args:
            num_seqs: Number of sequences.
            prompt_len: Prompt tokens of each sequence.
            output_len: Generated tokens of each sequence.
            shared_prefix_len: Prompt tokens of each sequence whose KV an earlier row has computed.
        """
        lengths = Lengths((prompt_len,)), Lengths((output_len,))
        return cls(num_seqs, *lengths, output_len, shared_prefix_len)

    @property
    def task(self) -> str:
        """The task of the job: "generate", or "score" where `scored_len` is set."""
        return "generate" if self.scored_len is None else "score"

    @property
    def made(self) -> str:
        """The participle that says what is done with `made_len` tokens."""
        return "generated" if self.task == "generate" else "pooled" if self.is_pooled else "scored"

    @property
    def made_len(self) -> float:
        """Mean number of tokens that are generated or scored per sequence."""
        return self.output_len.mean if self.scored_len is None else self.scored_len

    @property
    def max_seq_len(self) -> int:
        """The number of tokens of the longest prompt plus the longest output."""
        return self.prompt_len.max + self.max_output_len

    @property
    def prefix_len(self) -> float:
        """Mean number of prompt tokens that a sequence has in common with others, one of which computes them."""
        if self.prefix_seqs is None:
            return self.shared_prefix_len
        return min(self.prompt_len.mean - 1, self.shared_prefix_len * self.prefix_seqs / (self.prefix_seqs - 1))

    def prefixes_of(self, seqs: float) -> float:
        """The number of different prefixes of so many sequences in flight, which start in the order of their prompts.

        Args:
            seqs: Number of sequences.
        """
        return min(seqs, 1.0 if self.prefix_seqs is None else max(1.0, seqs / self.prefix_seqs))

    @property
    def computed_prompt_len(self) -> float:
        """Mean number of prompt tokens per sequence that prefill computes: all but the shared prefix."""
        return self.prompt_len.mean - self.shared_prefix_len

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def uniform_workload(num_prompts: int, input_len: int, output_len: int, samples: int, context: int) -> Workload:
    """A workload of rows with equal lengths, for benchmarks. Raises InputError.

    Args:
        num_prompts: Number of rows.
        input_len: Prompt tokens of each row.
        output_len: Generated tokens of each sample.
        samples: Samples of each row.
        context: The model's context length in tokens.
    """
    for name, value in (("num-prompts", num_prompts), ("input-len", input_len), ("output-len", output_len)):
        if value < 1:
            raise InputError(f"--{name} must be at least 1, not {value}: a workload of nothing needs no plan")
    if input_len + output_len > context:
        raise InputError(f"--input-len {input_len} and --output-len {output_len} exceed the context of {context}")
    return Workload.uniform(num_prompts * samples, input_len, output_len)
