"""Models of the Hugging Face hub: their names, and the download of their files.

A model is named as `org/name`, with a branch, tag or commit as `org/name@revision`, and a GGUF of a repository as
llama.cpp's users do, `org/name:Q4_K_M`, or by its path, `org/name/file.gguf`. Files lie in the cache of the hub's
library, and those that are complete are kept where a download is interrupted.
"""

from __future__ import annotations

import glob
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from batchgen.core.atomic_file import is_full
from batchgen.core.errors import InputError, one_line, reason_of
from batchgen.models.formats.gguf.header import stated_architecture
from batchgen.models.formats.gguf.split import model_stem
from batchgen.models.sentence_modules import module_folders, transformer_folder

logger = logging.getLogger(__name__)

_NAME = re.compile(
    r"(?P<repo>[\w-][\w.-]*(?:/[\w-][\w.-]*)?)(?:@(?P<revision>[\w.-]+(?:/[\w.-]+)*))?(?::(?P<gguf>[\w.-]+))?"
)
_FILE = re.compile(r"(?P<repo>[\w-][\w.-]*/[\w-][\w.-]*)(?:@(?P<revision>[\w.-]+))?/(?P<gguf>[^@:]+\.gguf)")
_SMALL = ["*.json", "*.model", "*.txt", "*.jinja"]
_ALL = [*_SMALL, "*.safetensors"]
_OTHER_LAYOUTS = ("consolidated*",)  # the same weights again
_IGNORED = (*_OTHER_LAYOUTS, "*/*")
_HEADER_BYTES = 1 << 16  # at the begin of a GGUF, where its architecture stands
# The end of a GGUF's name, which tells its quantization.
_QUANTIZATION = re.compile(r"(?:^|[-._/])((?:UD-)?(?:I?Q\d\w*|T?BF16|F16|F32|MXFP4\w*|TQ\d\w*))$", re.IGNORECASE)
_LOG_IN = "log in with `hf auth login`, or set HF_TOKEN"


@dataclass(frozen=True)
class HubName:
    """The name of a model on the hub.

    Attributes:
        repo: Repository, such as "org/name".
        revision: Branch, tag or commit; None: the main branch.
        gguf: Quantization or path of a GGUF in the repository; None: the model is of safetensors.
    """

    repo: str
    revision: str | None = None
    gguf: str | None = None

    @classmethod
    def parse(cls, spec: str) -> HubName | None:
        """The name that a text is; None: it cannot be one."""
        match = _FILE.fullmatch(spec) or (None if spec.endswith(".gguf") else _NAME.fullmatch(spec))
        return cls(**match.groupdict()) if match else None


def fetch_configuration(name: HubName) -> Path:
    """Fetch all files of a model but its weights.

    Returns:
        The folder of the files, whose name is the commit.

    Raises:
        InputError: The files cannot be fetched, or the repository has no config.json.
    """
    logger.warning("%s is not a local path: looking for it on the Hugging Face hub", name.repo)
    folder = _snapshot(name, name.revision, _SMALL)
    # Modules of sentence-transformers, and then those that a Router among them names.
    fetched: set[str] = set()
    while more := [place for place in module_folders(folder) if place not in fetched]:
        _snapshot(name, folder.name, _within(more, _SMALL), _OTHER_LAYOUTS)
        fetched.update(more)
    if not (transformer_folder(folder) / "config.json").exists():
        raise _without_config(name)
    return folder


def fetch_weights(name: HubName, folder: Path) -> None:
    """Fetch the weights of a model into the folder that `fetch_configuration` returned. Raises InputError."""
    _snapshot(name, folder.name, _ALL)
    if places := module_folders(folder):
        _snapshot(name, folder.name, _within(places, _ALL), _OTHER_LAYOUTS)


def _within(places: Sequence[str], patterns: Sequence[str]) -> list[str]:
    """The patterns of files in some directories of a repository."""
    return [f"{glob.escape(place)}/{pattern}" for place in places for pattern in patterns]


def fetch_gguf(name: HubName, accept: Callable[[str], object]) -> Path:
    """Fetch a GGUF of a repository, with all its parts if it is split.

    Args:
        name: Name of the model, with its `gguf`.
        accept: Function that raises InputError for an architecture that is not supported. It is called before the file
            is fetched.

    Returns:
        Path of the file, or of its first part.

    Raises:
        InputError: The repository has no such file, or it cannot be fetched.
    """
    assert name.gguf is not None
    logger.warning("%s is not a local path: looking for it on the Hugging Face hub", name.repo)
    commit, files = _files_of(name)
    parts = _parts_of(name, files)
    from huggingface_hub import try_to_load_from_cache

    if not isinstance(try_to_load_from_cache(name.repo, parts[0], revision=commit), str):
        with _refusing(name):
            begin = _begin_of(name, parts[0], commit)
        if (architecture := stated_architecture(begin)) is not None:
            accept(architecture)
    return _snapshot(name, name.revision, [glob.escape(part) for part in parts], ()) / parts[0]


def _snapshot(name: HubName, revision: str | None, patterns: Sequence[str], ignored: Sequence[str] = _IGNORED) -> Path:
    """Fetch the files of a revision whose names match any of `patterns` and none of `ignored`; gives their folder."""
    from huggingface_hub import snapshot_download

    with _refusing(name):
        folder = snapshot_download(
            name.repo, revision=revision, allow_patterns=list(patterns), ignore_patterns=list(ignored)
        )
    return Path(folder)


def _files_of(name: HubName) -> tuple[str, list[str]]:
    """The commit of a repository, and its files; without a network, those of them that are in the cache."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    with _refusing(name):
        try:
            info = HfApi().model_info(name.repo, revision=name.revision)
            return str(info.sha), [file.rfilename for file in info.siblings or ()]
        except HfHubHTTPError:
            raise
        except Exception:  # no network, or none that is allowed: of several kinds
            nothing: dict[str, Any] = {"local_files_only": True, "allow_patterns": []}
            folder = Path(snapshot_download(name.repo, revision=name.revision, **nothing))
            paths = [path for path in folder.rglob("*.gguf") if path.exists()]
            return folder.name, [path.relative_to(folder).as_posix() for path in paths]


def _begin_of(name: HubName, file: str, commit: str) -> bytes:
    from huggingface_hub import HfFileSystem

    with HfFileSystem().open(f"{name.repo}/{file}", revision=commit, block_size=_HEADER_BYTES) as opened:
        begin: bytes = opened.read(_HEADER_BYTES)
    return begin


def _parts_of(name: HubName, files: list[str]) -> list[str]:
    """The file of a repository that is a GGUF's, or its parts in order. Raises InputError."""
    models = _ggufs(files)
    wanted = str(name.gguf)
    if wanted.endswith(".gguf"):
        chosen = [parts for parts in models.values() if wanted in parts]
    else:
        whole = re.compile(rf"(^|[-._/]){re.escape(wanted)}([-./]|$)", re.IGNORECASE)
        chosen = [parts for stem, parts in models.items() if whole.search(stem)]
    if len(chosen) == 1:
        return chosen[0]
    if not models:
        raise InputError(f"model {name.repo} has no GGUF on the hub: leave out {wanted!r}")
    if chosen:
        several = ", ".join(f"{name.repo}/{parts[0]}" for parts in chosen[:4])
        raise InputError(f"model {name.repo} has several GGUFs {wanted!r}: give the file, one of {several}")
    raise InputError(f"model {name.repo} has no GGUF {wanted!r}: {_listed(name, models)}")


def _ggufs(files: list[str]) -> dict[str, list[str]]:
    """The files of each GGUF of a language model in a list of files, by path without suffix and number of the part."""
    models: dict[str, list[str]] = {}
    for file in sorted(files):
        path = PurePosixPath(file)
        if path.suffix.lower() == ".gguf" and not path.name.lower().startswith(("mmproj", "imatrix")):
            models.setdefault(str(path.parent / model_stem(Path(path))), []).append(file)
    return models


def _listed(name: HubName, models: dict[str, list[str]]) -> str:
    """The end of a message that lists how to name each GGUF of a repository."""
    at = f"@{name.revision}" if name.revision else ""
    tags = {stem: _QUANTIZATION.search(stem) for stem in models}
    texts = [f"{name.repo}{at}:{tag[1]}" if tag else f"{name.repo}{at}/{models[stem][0]}" for stem, tag in tags.items()]
    return f"it has {', '.join(texts[:12])}{', ...' if len(texts) > 12 else ''}"


def _without_config(name: HubName) -> InputError:
    """The error for a repository without a config.json, which names its GGUFs if it has any."""
    _, files = _files_of(name)
    if models := _ggufs(files):
        return InputError(f"model {name.repo} has no config.json, but GGUFs: {_listed(name, models)}")
    return InputError(f"model {name.repo} has no config.json: it is no model of transformers, and has no GGUF")


@contextmanager
def _refusing(name: HubName) -> Iterator[None]:
    """Within a `with` block, turn errors of the hub's library into InputErrors of one line that say what to do."""
    try:
        yield
    except (InputError, MemoryError):
        raise
    except Exception as error:  # network, authentication, unknown repository, disk: many kinds
        raise InputError(_reason(name, error)) from error


def _reason(name: HubName, error: Exception) -> str:
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None and isinstance(cause, Exception):
        causes.append(cause)
    if any(isinstance(each, OSError) and is_full(each) for each in causes):
        return (
            f"the disk of {constants.HF_HUB_CACHE} is full: free some space, or set HF_HOME to a folder on another"
            f" disk; files of {name.repo} that are complete are kept"
        )
    if any(isinstance(each, GatedRepoError) for each in causes):
        page = f"{constants.ENDPOINT}/{name.repo}"
        return f"model {name.repo} is gated: ask for access at {page}, then {_LOG_IN}"
    if name.revision and any(isinstance(each, RevisionNotFoundError) for each in causes):
        return (
            f"model {name.repo} has no revision {name.revision!r} on the hub: give a branch, tag or commit of it, or"
            f" leave out @{name.revision}"
        )
    if any(isinstance(each, RepositoryNotFoundError) for each in causes):
        return (
            f"{name.repo} is not a local path, and the hub has no such model that you may read: check its name, and if"
            f" it is private, {_LOG_IN}"
        )
    if constants.HF_HUB_OFFLINE and isinstance(error, (LocalEntryNotFoundError, OfflineModeIsEnabled)):
        return (
            f"model {name.repo} is not in the cache with all its files, and HF_HUB_OFFLINE is set: unset it for once,"
            " or give a directory that has the model"
        )
    told = causes[1] if isinstance(error, LocalEntryNotFoundError) and len(causes) > 1 else error
    return (
        f"model {name.repo} is not a local path and could not be fetched from the hub ({one_line(reason_of(told))}):"
        " check its name and the network, or give a directory that has it"
    )
