"""Archives of what a check leaves on a machine, for the next machine and for whoever looks at traces.

Where files come back from a machine, they may have to be few and small. So files go into a few zip archives, each of
which is whole by itself.

What is carried on to the next machine: the compiled C++ kernels, and what Triton has compiled. Of the latter a launch
needs the machine code, the launchers and their descriptions.
"""

from __future__ import annotations

import contextlib
import json
import os
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path

ARCHIVE_BYTES = 15 << 20  # most bytes of an archive
CARRIED, TRACES = "carried", "traces"  # names of archives
MOST_ARCHIVES = {CARRIED: 3, TRACES: 2}
_TRITON, _MODULE = "triton", "module"
_TRITON_KINDS = (".cubin", ".json", ".so")
_HEADER_BYTES = 200  # of a file in an archive, besides its name twice


def carried_files(triton_cache: Path, module: Path) -> dict[str, Path]:
    """The files to carry on, by their names in the archive."""
    # Files that are being written lie one folder further down.
    compiled = sorted(path for path in triton_cache.glob("*/*") if path.suffix in _TRITON_KINDS)
    names = {f"{_TRITON}/{path.relative_to(triton_cache).as_posix()}": path for path in compiled}
    return ({f"{_MODULE}/{module.name}": module} if module.exists() else {}) | names


def stamp(files: Mapping[str, Path]) -> list:
    """The names of files and the times of their last changes, which show whether they were packed already."""
    times = []
    for name, path in files.items():
        with contextlib.suppress(OSError):  # replaced meanwhile
            times.append((name, path.stat().st_mtime_ns))
    return times


def pack(files: Mapping[str, Path], folder: Path, name: str) -> list[str]:
    """Write archives name-1.zip, name-2.zip and so on, which replace older ones.

    Returns:
        Names of the files that no archive had capacity for.
    """
    archives: list[dict[str, bytes]] = [{}]
    used, left_out = 0, []
    for file, path in files.items():
        try:
            data = path.read_bytes()
        except OSError:  # replaced meanwhile
            continue
        size = len(zlib.compress(data, 6)) + 2 * len(file.encode()) + _HEADER_BYTES
        if size > ARCHIVE_BYTES:
            left_out.append(file)
            continue
        if used + size > ARCHIVE_BYTES:
            if len(archives) == MOST_ARCHIVES[name]:
                left_out.append(file)
                continue
            archives.append({})
            used = 0
        archives[-1][file] = data
        used += size
    for number, contents in enumerate(archives, 1):
        if contents:
            temporary = folder / f".{name}-{number}.new"
            with zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as archive:
                for file, data in contents.items():
                    archive.writestr(file, data)
            temporary.replace(folder / f"{name}-{number}.zip")
    return left_out


def unpack_carried(folder: Path, triton_cache: Path, module: Path) -> int:
    """Put what archives of a folder carry where it is used, unless there is something newer.

    Triton notes the files of a kernel with their whole paths; here they are those of the cache.

    Returns:
        The number of files.
    """
    count = 0
    for path in sorted(folder.glob(f"{CARRIED}-*.zip")):
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                kind, _, rest = name.partition("/")
                target = module if kind == _MODULE else triton_cache / rest
                if target.exists() or (kind == _MODULE and rest != module.name) or ".." in Path(rest).parts:
                    continue
                data = archive.read(name)
                if target.name.startswith("__grp__"):
                    data = _of_folder(data, target.parent)
                target.parent.mkdir(parents=True, exist_ok=True)
                temporary = target.with_name(f".{target.name}.{os.getpid()}")
                temporary.write_bytes(data)
                temporary.replace(target)
                count += 1
    return count


def _of_folder(group: bytes, folder: Path) -> bytes:
    """Triton's list of a kernel's files, for a folder."""
    content = json.loads(group)
    content["child_paths"] = {name: str(folder / name) for name in content.get("child_paths", {})}
    return json.dumps(content).encode()
