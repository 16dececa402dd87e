"""Part files of a shared job, `parts/RANGE-GENERATION/part-NUMBER.parquet`, and their transfer to an ordinary run."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from batchgen.output.parts import DamagedPart, part_number, part_paths, quarantine, scan_part, write_part
from batchgen.share.lease import Parts


class PartStore:
    """The part files of a shared job, with one folder for each generation of a range. All methods may raise OSError.

    Attributes:
        origin: JSON values about the job that every part file records.
    """

    def __init__(self, path: Path, origin: dict[str, Any]) -> None:
        self._path, self.origin = path, origin

    def count(self, name: str, generation: int) -> int:
        """The number of intact part files of a generation of a range, counted from the first one up to a gap."""
        count = 0
        with contextlib.suppress(DamagedPart, FileNotFoundError):
            for path in self.paths(name, generation):
                if part_number(path) != count:
                    break
                for _ in scan_part(path):
                    pass
                count += 1
        return count

    def rows(self, name: str, generation: int, count: int) -> Iterator[tuple[Sequence[int], Sequence[bool]]]:
        """Yield (row indices, flags of failed rows) for each of the first part files of a generation.

        Args:
            name: Name of the range.
            generation: Generation of the range's lease.
            count: Number of part files to read.
        """
        for path in self.paths(name, generation)[:count]:
            for group in scan_part(path):
                yield group.rows.tolist(), group.failed.tolist()

    def write(self, name: str, generation: int, number: int, results: Mapping[int, Any]) -> int:
        """Write a part file to stable storage; gives the number of its failed rows.

        Args:
            name: Name of the range.
            generation: Generation of the range's lease.
            number: Number of the part file in this generation.
            results: Results by row index.
        """
        folder = self._folder(name, generation)
        folder.mkdir(exist_ok=True)
        batch = write_part(folder, number, results, self.origin)
        return int(batch.num_rows - batch.column("error").null_count)

    def paths(self, name: str, generation: int) -> list[Path]:
        """The paths of a generation's part files, oldest first. Raises FileNotFoundError where there are none."""
        return part_paths(self._folder(name, generation))

    def all_paths(self) -> list[Path]:
        """The paths of all part files of all ranges, those of a range's later generations last."""
        return [path for folder in sorted(self._path.iterdir()) for path in part_paths(folder)]

    def damaged(self, name: str, parts: Parts) -> bool:
        """True where a part file that counts for a range is damaged or missing; a damaged one is quarantined.

        Args:
            name: Name of the range.
            parts: Number of part files that count, by generation.
        """
        for generation, count in parts.items():
            paths = self.paths(name, generation)[:count]
            if len(paths) < count:
                return True
            for path in paths:
                try:
                    for _ in scan_part(path):
                        pass
                except DamagedPart:
                    quarantine(path)
                    return True
        return False

    def _folder(self, name: str, generation: int) -> Path:
        return self._path / f"{name}-{generation:04d}"


def link_parts(store: PartStore, done: Mapping[str, Parts], parts_dir: Path, first_number: int) -> None:
    """Link the part files of all finished ranges into an ordinary run's directory of parts. Raises OSError.

    Of two parts with the same row, the one with the higher number counts.

    Args:
        store: The part files of the shared job.
        done: For each range, the number of part files that count, by generation.
        parts_dir: The ordinary run's directory of part files.
        first_number: Number of the first linked part file.
    """
    number = first_number
    for name, parts in sorted(done.items()):
        for generation, count in sorted(parts.items()):
            for path in store.paths(name, generation)[:count]:
                _link(path, parts_dir / f"part-{number:06d}.parquet")
                number += 1
    for path in part_paths(parts_dir):
        if part_number(path) >= number:
            path.unlink(missing_ok=True)


def _link(source: Path, target: Path) -> None:
    if target.exists() and target.samefile(source):
        return
    temporary = target.with_name(f".{uuid.uuid4().hex}.tmp")
    os.link(source, temporary)
    os.replace(temporary, target)
