"""Tokens that drafts of each source would save, counted over answers that the demo model has given.

The demo model answers once: restaurant entries into JSON under a schema (benchmarks/structured_output.py), and the same
entries with the question for the address and the phone number alone. Then its rows go through the drafts of each set of
sources again, with so many rows in flight, and no layer computes: a row's next tokens are those of its answer. So the
counts do not depend on the machine, but for the microseconds. Under the schema, what it forces is drafted and taken as
in a job. `suffix tree` stands for SuffixDecoding (Oliaro et al., 2024): a tree of all
suffixes of the answers that have ended, in which the longest match of a row's last tokens is followed to the child that
most answers have.

    python benchmarks/draft_sources.py
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from recording import result_path, write
from structured_output import SCHEMA, conversations

from batchgen.core.request import Request, SamplingParams
from batchgen.engine.engine import Engine
from batchgen.runtime.grammar import Grammars
from batchgen.schedule.draft_proposer import Proposal, Proposer
from batchgen.schedule.drafting import Drafting
from batchgen.schedule.finished_rows_proposer import FinishedRowsProposer
from batchgen.schedule.grammar_proposer import GrammarProposer
from batchgen.schedule.lookup_proposer import LookupProposer
from batchgen.schedule.sequence import Sequence

_QUESTION = "Copy the address and the phone number of this restaurant entry, and nothing else.\n\n{}"
_MATCHED, _DEPTH = 8, 24  # tokens of a match, and of a path of the tree: those of a match and of what follows it


class Recorder(Drafting):
    """Drafts nothing, and keeps the tokens of rows that end: (prompt, answer)."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[list[int], list[int]]] = []

    def begin(self, num_tokens: int, num_rows: int) -> bool:
        return False

    def ended(self, sequences: list[Sequence]) -> None:
        self.rows += [(s.tokens[: s.num_prompt], s.tokens[s.num_prompt :]) for s in sequences]


class SuffixTreeProposer:
    """Proposes what most answers that have ended go on with after the longest match."""

    def __init__(self) -> None:
        self._root: dict[int, Any] = {}  # token -> [answers, children]

    def begin(self, sequences: Iterable[Sequence]) -> None:
        pass

    def propose(self, sequence: Sequence, most: int) -> Proposal | None:
        last = sequence.tokens[-_MATCHED:]
        for first in range(len(last)):
            children = self._after(last[first:])
            if children:
                tokens: list[int] = []
                while children and len(tokens) < most:
                    token, (_, children) = max(children.items(), key=lambda child: child[1][0])
                    tokens.append(token)
                return Proposal(tokens, len(last) - first)
        return None

    def ended(self, sequence: Sequence) -> None:
        tokens = sequence.tokens[sequence.num_prompt :]
        for first in range(len(tokens)):
            children = self._root
            for token in tokens[first : first + _DEPTH]:
                node = children.setdefault(token, [0, {}])
                node[0] += 1
                children = node[1]

    def _after(self, tokens: list[int]) -> dict[int, Any]:
        children = self._root
        for token in tokens:
            if token not in children:
                return {}
            children = children[token][1]
        return children


SOURCES: dict[str, list[type]] = {
    "prompt lookup": [LookupProposer],
    "prompt lookup and rows that have ended": [LookupProposer, FinishedRowsProposer],
    "prompt lookup and suffix tree": [LookupProposer, SuffixTreeProposer],
    "suffix tree": [SuffixTreeProposer],
}


def task_of(name: str, rows: int) -> tuple[list[Any], SamplingParams]:
    """Prompts and sampling parameters of a task."""
    prompts: list[Any] = conversations(rows)
    if name == "extraction":
        entries = [messages[0]["content"].split("\n\n", 1)[1] for messages in prompts]
        return [[{"role": "user", "content": _QUESTION.format(entry)}] for entry in entries], SamplingParams(
            max_tokens=96
        )
    return prompts, SamplingParams(max_tokens=320, json_schema=SCHEMA)


def answers(loaded: Engine, prompts: list[Any], sampling: SamplingParams) -> list[tuple[list[int], list[int]]]:
    """Prompt and answer of each row, in the order in which they ended."""
    recorder = Recorder()
    engine = Engine.from_parts(loaded.parts, drafts=lambda: recorder)
    errors = [c.error for c in engine.generate([Request(prompt, sampling) for prompt in prompts]) if c.error]
    if errors:
        raise SystemExit(f"{len(errors)} rows failed: {errors[0]}")
    return [(prompt, answer) for prompt, answer in recorder.rows if len(answer) > 1]


def replay(
    rows: list[tuple[list[int], list[int]]],
    proposers: list[Proposer],
    grammars: Grammars,
    sampling: SamplingParams,
    args: argparse.Namespace,
) -> dict[str, Any]:
    """Counts of the drafts of one set of sources over the rows, and the seconds that finding them took."""
    drafting, grammar = Drafting(proposers, always=args.drafts), grammars.compile(sampling)
    waiting, running, steps, forced, seconds = list(enumerate(rows))[::-1], [], 0, 0, 0.0

    def chosen_tokens(sequence: Sequence, tokens: list[int]) -> None:
        """Append tokens, and those that the grammar then forces."""
        nonlocal forced
        sequence.tokens += tokens
        answer = rows[sequence.request_index][1]
        if sequence.constraint is None or sequence.num_generated == len(answer):
            return
        grammars.advance({sequence.constraint: tokens}, [sequence.constraint])
        ahead = sequence.constraint.take_ahead()
        if ahead != answer[sequence.num_generated :][: len(ahead)]:
            raise SystemExit("a grammar forces other tokens than it did")
        sequence.tokens += ahead
        forced += len(ahead)

    while waiting or running:
        while waiting and len(running) < args.rows_in_flight:
            number, (prompt, answer) = waiting.pop()
            sequence = Sequence(number, number, 0, list(prompt), SamplingParams(max_tokens=len(answer)))
            sequence.constraint = None if grammar is None else grammar.start()
            chosen_tokens(sequence, answer[:1])
            running.append(sequence)
        rooms = {s: len(rows[s.request_index][1]) - s.num_generated - 1 for s in running}
        started = time.perf_counter()
        drafting.begin(len(running), len(running))
        chosen = drafting.choose(rooms, args.drafts * len(running))
        seconds += time.perf_counter() - started
        for sequence in running:
            answer = rows[sequence.request_index][1]
            rest = answer[sequence.num_generated :]
            right = 0
            for draft, token in zip(chosen.get(sequence, ()), rest, strict=False):
                if draft != token:
                    break
                right += 1
            chosen_tokens(sequence, rest[: right + 1])
            steps += 1
        drafting.taken()
        ended = [s for s in running if s.num_generated == len(rows[s.request_index][1])]
        started = time.perf_counter()
        drafting.ended(ended)
        seconds += time.perf_counter() - started
        running = [s for s in running if s not in ended]
    tokens = sum(len(answer) for _, answer in rows)
    return {
        "tokens": tokens,
        "steps": steps,
        "tokens_per_step": tokens / steps,
        "drafted": drafting.num_drafted,
        "accepted": drafting.num_accepted,
        "forced": forced,
        "microseconds_per_step": 1e6 * seconds / steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=200)
    parser.add_argument("--rows-in-flight", type=int, default=32)
    parser.add_argument("--drafts", type=int, default=8, help="most drafts of a row in a sweep")
    parser.add_argument("--output", type=Path, default=result_path("draft_sources"))
    args = parser.parse_args()
    results: dict[str, dict[str, Any]] = {}
    with Engine("demo", max_num_seqs=128, drafts=0) as loaded:
        assert loaded.parts.grammars is not None
        for task in ("json", "extraction"):
            prompts, sampling = task_of(task, args.rows)
            rows = answers(loaded, prompts, sampling)
            for name, kinds in SOURCES.items():
                proposers = [GrammarProposer(), *(kind() for kind in kinds)]
                results.setdefault(task, {})[name] = replay(rows, proposers, loaded.parts.grammars, sampling, args)
                print(task, name, results[task][name], flush=True)
    write(args.output, {"arguments": vars(args), "tasks": results})


if __name__ == "__main__":
    main()
