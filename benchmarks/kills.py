"""Jobs killed and interrupted at random moments, then run again to their end.

Each output must equal an undisturbed job's.

A moment is drawn uniformly over what is left of generation and the writing of the output, in the job's own progress: so
many sweeps have ended, and such a part of the next one's usual time has gone by. Three runs of ten are hit a second
time when they go on. Each tier has greedy and sampled rows, in fp32; parts are written all the time.

    python benchmarks/kills.py --kills 200 --interrupts 200 --seed 0
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import random
import shutil
import signal
import struct
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

import pyarrow as pa
import pyarrow.parquet as pq
from processes import start_in_process
from recording import result_path, write

TIERS = ("memory", "disk", "int4")
HOW = {"kills": signal.SIGKILL, "interrupts": signal.SIGINT}
_AGAIN = 0.3  # of the runs that were hit and go on, so many are hit again
_LIMIT_S = 600.0  # a run that takes longer hangs
_BINS = 10
_POLL_S = 0.0005
WORDS = ["ferry", "harbour", "onions", "captain", "quay", "lemons", "timetable", "winter", "islands", "slate"]


@dataclass(frozen=True)
class Progress:
    """The progress of a run.

    Attributes:
        sweeps: sweeps that have ended. rows: rows that the part writer has been given. started_s, finishing_s,
        finished_s: time.monotonic when it began to generate, began to write the output and had written
            it; 0 before that.
    """

    sweeps: int
    rows: int
    started_s: float
    finishing_s: float
    finished_s: float


class Board:
    """A run's Progress, which another process may read at any moment, and after its death."""

    _FORMAT = "qqddd"

    def __init__(self, path: Path) -> None:
        size = struct.calcsize(self._FORMAT)
        if not path.exists():
            path.write_bytes(bytes(size))
        with path.open("r+b") as file:
            self._map = mmap.mmap(file.fileno(), size)

    def read(self) -> Progress:
        return Progress(*struct.unpack_from(self._FORMAT, self._map))

    def write(self, **changes: float) -> None:
        struct.pack_into(self._FORMAT, self._map, 0, *({**vars(self.read()), **changes}.values()))


def watched_batchgen(arguments: list[str], board_path: str) -> None:
    """Runs `batchgen *arguments` in this process, which notes its progress on a board."""
    from batchgen import cli
    from batchgen.engine.engine import Engine
    from batchgen.output.part_writer import PartWriter
    from batchgen.output.run_directory import Run

    board = Board(Path(board_path))
    run, add, finish = Engine._run, PartWriter.add, Run.finish

    def noted_run(*args: Any, **kwargs: Any) -> Any:
        if not board.read().started_s:
            board.write(started_s=time.monotonic())
        sweep = run(*args, **kwargs)
        board.write(sweeps=board.read().sweeps + 1)  # on the CPU it has run
        return sweep

    def noted_add(*args: Any) -> None:
        add(*args)
        board.write(rows=board.read().rows + 1)

    def noted_finish(*args: Any, **kwargs: Any) -> Any:
        board.write(finishing_s=time.monotonic())
        result = finish(*args, **kwargs)
        board.write(finished_s=time.monotonic())
        return result

    Engine._run, PartWriter.add, Run.finish = noted_run, noted_add, noted_finish
    sys.argv = ["batchgen", *arguments]
    cli.main()


@dataclass(frozen=True)
class Tier:
    """A job in one placement, with what it does when nobody disturbs it.

    Attributes:
        arguments: the arguments of `batchgen` for an output.
        table: the output.
        sweeps: the number of sweeps.
        sweep_s: seconds of a sweep.
        finish_sweeps: the time of writing the output, in sweeps.
    """

    name: str
    arguments: Callable[[Path], list[str]]
    table: pa.Table
    sweeps: int
    sweep_s: float
    finish_sweeps: float


@dataclass(frozen=True)
class Moment:
    """A moment of a run, in sweeps; after the last of them the output is written."""

    sweeps: float
    in_output: float
    sweep_s: float

    def wait(self, board: Board, alive: Callable[[], bool]) -> bool:
        """Waits for the moment; False where the process ended before it came."""
        while alive():
            seen = board.read()
            if self.in_output and seen.finishing_s:
                time.sleep(self.in_output * self.sweep_s)
                return True
            if not self.in_output and seen.started_s and seen.sweeps >= int(self.sweeps):
                time.sleep((self.sweeps - int(self.sweeps)) * self.sweep_s)
                return True
            time.sleep(_POLL_S)
        return False


@dataclass
class Account:
    """The outcomes of a tier's jobs that were hit in one way.

    Attributes:
        hits_in_output: hits that came while the output was written.
        already_done: jobs that ended before they were hit, which do not count.
        rows_run_again: rows that were finished and not saved.
        moments: counts of the part of what was left that had been done, in bins of equal width.
        exit_codes: counts of the exit codes of all runs.
    """

    hits: int = 0
    hits_in_output: int = 0
    already_done: int = 0
    jobs: int = 0
    runs_resumed: int = 0
    rows_run_again: int = 0
    mismatches: int = 0
    moments: list[int] = field(default_factory=lambda: [0] * _BINS)
    exit_codes: dict[int, int] = field(default_factory=dict)

    def ended(self, code: int) -> None:
        self.exit_codes[code] = self.exit_codes.get(code, 0) + 1


class Campaign:
    """The jobs of every tier, in one folder."""

    def __init__(self, folder: Path, seed: int, rows: int) -> None:
        self.folder, self.seed, self.rows, self.draw = folder, seed, rows, random.Random(seed)
        self.offload = folder / "offload"
        self._boards = 0
        os.environ["BATCHGEN_HARDWARE"] = "zen4"  # fixed rates: the machine is not measured
        _make_input(folder, rows, self.draw)
        self.tiers = [self._tier(name) for name in TIERS]

    def run(self, arguments: list[str], moment: Moment | None = None, how: int = 0) -> tuple[int, Progress, str]:
        """Runs the command, sends it the signal `how` at a moment, and returns its exit code, progress and output."""
        self._boards += 1
        path, log = self.folder / f"board-{self._boards}", self.folder / "log"
        board = Board(path)
        process = start_in_process(watched_batchgen, [arguments, str(path)], log)
        handle = os.pidfd_open(process.pid)
        try:
            if moment is not None and moment.wait(board, process.is_alive):
                with suppress(ProcessLookupError):  # it has just ended
                    signal.pidfd_send_signal(handle, how)
            process.join(_LIMIT_S)
            if process.is_alive():
                raise SystemExit(f"it hangs: {' '.join(arguments)}\n{log.read_text()}")
            return process.exitcode, board.read(), log.read_text()
        finally:
            process.kill()
            os.close(handle)
            path.unlink()

    def complete(self, arguments: list[str]) -> Progress:
        code, progress, said = self.run(arguments)
        if code != 0:
            raise SystemExit(f"exit code {code}: {' '.join(arguments)}\n{said}")
        return progress

    def _tier(self, name: str) -> Tier:
        common = [
            "-m", self.folder / "model", "-i", self.folder / "in.parquet", "--sampling-column", "sampling",
            "--max-tokens", 24,
            "--dtype", "float32", "--max-num-seqs", 16, "--progress", "none", "--cpu-memory", "2GiB", "--offload-dir",
            self.offload,
        ]  # fmt: skip
        if name == "int4":
            common += ["--weights", "int4", "--kv-cache-dtype", "int5"]
        if name == "disk":
            plan = self.folder / "plan.json"
            self.complete(["plan", *map(str, common), "-o", str(plan)])
            put_on_disk(plan)
            common = [*_without(common, "--max-num-seqs"), "--plan", plan]

        def arguments(output: Path) -> list[str]:
            return ["run", *map(str, common), "--output", str(output), "--flush-interval", "0.02s"]

        whole = self.folder / f"{name}.parquet"
        self.complete(arguments(self.folder / f"{name}-first.parquet"))  # converts what has to be
        seen = self.complete(arguments(whole))
        sweep_s = (seen.finishing_s - seen.started_s) / seen.sweeps
        return Tier(
            name, arguments, pq.read_table(whole), seen.sweeps, sweep_s, (seen.finished_s - seen.finishing_s) / sweep_s
        )

    def trial(self, tier: Tier, how: int, account: Account) -> None:
        """Runs a job that is hit, perhaps again when it goes on, and then to its end.

        Raises:
            SystemExit: it ended in another way.
        """
        output = self.folder / "out.parquet"
        hits = 0
        while hits == 0 or self.draw.random() < _AGAIN:
            before = saved_rows(output)
            left = max(1.0, tier.sweeps * (1 - before / self.rows))  # about
            place = self.draw.random()
            span = left + tier.finish_sweeps
            at = place * span
            moment = Moment(at, max(0.0, at - left), tier.sweep_s)
            code, progress, said = self.run(tier.arguments(output), moment, how)
            account.ended(code)
            if code == 0:
                account.already_done += 1
                break
            if code != (-how if how == signal.SIGKILL else 130):
                raise SystemExit(f"{tier.name}: exit code {code} after {signal.Signals(how).name}: {said}")
            hits += 1
            came_to = place if progress.finishing_s else min(place, progress.sweeps / span)
            account.moments[min(int(came_to * _BINS), _BINS - 1)] += 1
            account.hits_in_output += progress.finishing_s > 0
            account.rows_run_again += max(0, before + progress.rows - saved_rows(output))
        if code != 0:
            self.complete(tier.arguments(output))
            account.ended(0)
            account.runs_resumed += hits
        account.hits += hits
        account.jobs += 1
        self._check(output, tier, account)

    def _check(self, output: Path, tier: Tier, account: Account) -> None:
        """Compares the output, and takes it away again."""
        if not pq.read_table(output).equals(tier.table):
            account.mismatches += 1
            shutil.copy(output, self.folder / f"mismatch-{tier.name}-{account.jobs}.parquet")
        left_over = [path.name for path in self.offload.iterdir() if path.name != "stores"]
        if left_over:
            raise SystemExit(f"{tier.name}: left on the disk: {', '.join(left_over)}")
        output.unlink()
        shutil.rmtree(f"{output}.batchgen")


def saved_rows(output: Path) -> int:
    """The number of rows that are safe: in parts, or all of them in the output."""
    if output.exists():
        return pq.read_metadata(output).num_rows
    parts = Path(f"{output}.batchgen") / "parts"
    return sum(pq.read_metadata(path).num_rows for path in parts.glob("part-*.parquet"))


def _make_input(folder: Path, rows: int, draw: random.Random) -> None:
    """A tiny model, and prompts of different lengths, of which every other one is sampled."""
    from tiny_models import make_tiny_model

    make_tiny_model("llama", folder / "model")
    prompts = [" ".join(draw.choices(WORDS, k=draw.randrange(1, 30))) for _ in range(rows)]
    prompts[rows // 3] = None  # it fails
    sampling = [{"temperature": 0.8 * (i % 2), "top_p": 0.95} for i in range(rows)]
    pq.write_table(pa.table({"prompt": prompts, "sampling": sampling}), folder / "in.parquet", row_group_size=100)


def put_on_disk(plan: Path) -> None:
    """Changes a plan so that all weights but one layer, and half of the KV, are on disk."""
    planned = json.loads(plan.read_text())
    policy = planned["policy"]
    layers = sum(next(iter(policy["weight_layers"].values())))
    policy["weight_layers"] = {group: [0, 1, layers - 1] for group in policy["weight_layers"]}
    half = policy["max_num_seqs"] // 2
    policy["kv_seqs"] = {"cpu": policy["max_num_seqs"] - half, "disk": half}
    plan.write_text(json.dumps(planned))


def _without(options: list, name: str) -> list:
    """Options without one that has a value."""
    place = options.index(name)
    return options[:place] + options[place + 2 :]


def run_campaign(
    folder: Path,
    *,
    kills: int,
    interrupts: int,
    seed: int,
    rows: int,
    notify: Callable[[dict], None] = lambda found: None,
) -> dict[str, Any]:
    """Hits jobs as often as asked for, by turns over kinds and tiers, and returns the results, as JSON values.

    Args:
        notify: called with the results after each job.

    Raises:
        SystemExit: a run hangs, or ends as it should not.
    """
    campaign = Campaign(folder, seed, rows)
    accounts = {(tier.name, kind): Account() for tier in campaign.tiers for kind in HOW}
    wanted = {"kills": kills, "interrupts": interrupts}
    trials = 0
    while short := [kind for kind in HOW if _hits(accounts)[kind] < wanted[kind]]:
        if trials > 20 + 3 * (kills + interrupts):
            raise SystemExit(f"jobs end before they are hit: {_hits(accounts)} of {wanted}")
        tier = campaign.tiers[trials // len(HOW) % len(campaign.tiers)]
        kind = short[trials % len(short)]
        campaign.trial(tier, HOW[kind], accounts[tier.name, kind])
        trials += 1
        notify(_results(campaign, accounts))
    return _results(campaign, accounts)


def _hits(accounts: dict[tuple[str, str], Account]) -> dict[str, int]:
    return {kind: sum(accounts[name, kind].hits for name in TIERS) for kind in HOW}


def _results(campaign: Campaign, accounts: dict[tuple[str, str], Account]) -> dict[str, Any]:
    tiers = {
        tier.name: {
            "sweeps": tier.sweeps,
            "generation_s": tier.sweeps * tier.sweep_s,
            "writing_output_s": tier.finish_sweeps * tier.sweep_s,
            **{kind: asdict(accounts[tier.name, kind]) for kind in HOW},
        }
        for tier in campaign.tiers
    }
    moments = {kind: zip(*(accounts[name, kind].moments for name in TIERS), strict=True) for kind in HOW}
    return {
        "seed": campaign.seed,
        "rows": campaign.rows,
        "exact_tiers_are_equal": campaign.tiers[0].table.equals(campaign.tiers[1].table),
        "hits": _hits(accounts),
        "mismatches": sum(account.mismatches for account in accounts.values()),
        "moments": {kind: [sum(column) for column in columns] for kind, columns in moments.items()},
        "tiers": tiers,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--interrupts", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rows", type=int, default=120)
    parser.add_argument("--output", type=Path, default=result_path("kills"))
    args = parser.parse_args()
    # A shell may have started this deaf to it, and so its jobs.
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def note(found: dict[str, Any]) -> None:
        write(args.output, found)
        print(json.dumps({name: found[name] for name in ("hits", "mismatches", "moments")}), file=sys.stderr)

    with tempfile.TemporaryDirectory(prefix="batchgen-kills-") as folder:
        found = run_campaign(
            Path(folder), kills=args.kills, interrupts=args.interrupts, seed=args.seed, rows=args.rows, notify=note
        )
        if found["mismatches"]:
            sys.exit(f"{found['mismatches']} outputs differ")


if __name__ == "__main__":
    main()
