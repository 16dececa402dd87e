"""A ladder of memory: the same rows by every engine, within limits from a quarter of the model to one and a half.

All rows are there at the start. Every engine reads the same numbers of the same weights, rounded to bfloat16, and
generates as many tokens for the same token ids. A run is a process of its own within a control group, in which page
cache counts, and it begins with an empty cache; it is timed from the start of the process until its output is on the
disk. The limit is a share of the weights' bytes, and `--beside` for what an interpreter and its libraries take, the
same for each engine.

An engine is an entry of ENGINES, a runner in peers/ and its packages in peers/environments.py. Each is tried with all
of its settings at the largest limit, where memory is ample, and goes on with those that were fastest; the result has
all of them. A run counts where its tokens are at least 99 % as likely as fp32's choices after the same tokens, by
transformers (peers/token_accuracy.py), and where there are at least 90 % as many as were asked for. Beside batchgen's
time stands what it had predicted, and beside every time its share of what the machine could do at best: reading the
weights once, or the job's products at the best rate of products, whichever takes longer. batchgen is killed three
times, too, and its output compared.

Shapes are models of well-known shapes with random weights of about 4 bits, and random rows, fewer and shorter: their
speed alone is compared, between engines that read a GGUF. batchgen's store of one has other random numbers than the
GGUF, and its tables in bfloat16, which count against it: limits are shares of the GGUF.

Every cell is written at once, and a command goes on where the last one ended. --minutes ends a part of it. Tokens are
judged when all cells are there, or with --judge, which times nothing. Needs root and cgroup v1.

    python benchmarks/ladder.py --prepare --work-dir DIR        installs engines and writes models, once
    python benchmarks/ladder.py --work-dir DIR
    python benchmarks/ladder.py --models demo --engines batchgen,llama.cpp --minutes 6 --work-dir DIR
    python benchmarks/ladder.py --judge --work-dir DIR
    python benchmarks/ladder.py --model qwen3-0.6b=FILE.gguf --work-dir DIR
    python benchmarks/ladder.py --shapes gpt-oss-20b --engines batchgen,llama.cpp --work-dir DIR
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import random_shapes
from peers.environments import python_of
from peers.machine_rates import disk_read_rate, gemm_rates
from peers.memory_limit import empty_page_cache, run_limited
from peers.model_files import write_bfloat16_gguf, write_directory
from peers.token_accuracy import load_fp32, token_accuracy
from peers.workloads import Row, Workload, work
from random_model import prompt_ids
from recording import machine, result_path, write

from batchgen.core.machine import available_cores
from batchgen.core.units import format_bytes, parse_bytes
from batchgen.models.config import ModelConfig
from batchgen.models.files import read_config, resolve_model
from batchgen.models.tokenizers.loading import load_tokenizer
from batchgen.profiler.timing import FULL
from batchgen.profiler.transfer import dram_read_rate

ROOT = Path(__file__).parents[1]
PEERS = Path(__file__).parent / "peers"
sys.path.insert(0, str(ROOT / "tests" / "support"))
TEXTS = ROOT / "recipes" / "data_wrangling" / "fodors_zagats_test.parquet"
BATCHGEN, OPENVINO = "batchgen", "openvino"
AMPLE = 16.0  # of the model: no engine is short of memory
SHARES = (AMPLE, 1.5, 1.0, 0.75, 0.5, 0.25)
ACCURACY, LENGTH = 0.99, 0.9
_MOST_MEMORY_FRAC = 0.8  # of the machine's
# Option -> its default for models, and for shapes; `limit_s` is the most seconds of a run.
_SIZES = {"rows": (64, 32), "prompt_tokens": (96, 32), "output_tokens": (32, 16), "limit_s": (120, 300)}
_GEMM_TOKENS = [64, 256, 1024]
_KILLED_AT = (0.35, 0.5, 0.65)  # of the time of an undisturbed run
_KILL_SHARE = 3.0  # in float32 the model is in memory then


@dataclass(frozen=True)
class Engine:
    """An engine of the ladder.

    Attributes:
        runner: Name of its script in peers/.
        weights: The form of the weights that it reads: a key of `FORMS`.
        sweep: Settings that are tried, in the runner's words.
        environment: Name of its environment (`python_of`); None: the engine's name.
    """

    runner: str
    weights: str
    sweep: tuple[dict[str, Any], ...]
    environment: str | None = None


ENGINES = {
    BATCHGEN: Engine("run_batchgen_job.py", "store", ({"dtype": "bfloat16", "resume": False},)),
    "llama.cpp": Engine("run_llama_cpp.py", "gguf", tuple({"sequences": n, "batch_tokens": 512} for n in (16, 64))),
    "transformers": Engine(
        "run_transformers.py", "directory", tuple({"batch_size": n} for n in (16, 64)), environment="accelerate"
    ),
    "accelerate": Engine("run_accelerate.py", "directory", ({"batch_size": 64},)),
    "vllm": Engine(
        "run_vllm.py",
        "directory",
        tuple({"max_num_seqs": 64, "max_num_batched_tokens": 2048, "cache_gb": 1, "eager": e} for e in (True, False)),
    ),
    "openvino": Engine(
        "run_openvino.py",
        OPENVINO,
        tuple({"max_num_seqs": 64, "max_num_batched_tokens": n, "cache_gb": 1, "bits": 16} for n in (256, 1024)),
    ),
    "ctranslate2": Engine(
        "run_ctranslate2.py",
        "ctranslate2",
        tuple({"batch_size": 64, "compute_type": kind} for kind in ("float32", "int8_float32")),
    ),
    "airllm": Engine("run_airllm.py", "airllm", ({"batch_size": 64},)),
}
# Form of the weights -> its name in a model's folder.
FORMS = {
    "gguf": "model.gguf",
    "directory": "directory",
    "store": "store",
    OPENVINO: "openvino",
    "ctranslate2": "ctranslate2",
    "airllm": "airllm",
}
# Form of the weights -> the script that writes it of a directory, in the engine's environment.
WRITERS = {"ctranslate2": "write_ctranslate2.py", "airllm": "write_airllm.py"}


def _demo() -> Path:
    return Path(resolve_model("demo").path)


def _gemma_270m() -> Path:
    from gemma_270m import gemma_file

    return gemma_file()


MODELS = {"demo": _demo, "gemma-3-270m": _gemma_270m}


@dataclass
class Model:
    """A model of the ladder, with its rows.

    Attributes:
        name: The name in the results.
        folder: The directory of its files.
        rows: The rows: prompt token ids, and the number of tokens to generate.
    """

    name: str
    folder: Path
    rows: list[Row] = field(default_factory=list)

    is_random = False  # its weights: then no token is judged

    def form(self, weights: str) -> Path:
        """The file or directory of the weights in a form."""
        return self.folder / FORMS[weights]

    def weight_files(self) -> list[Path]:
        """The files of the weights in the form that the limits are shares of."""
        return sorted(self.form("directory").glob("*.safetensors"))

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights."""
        return sum(path.stat().st_size for path in self.weight_files())

    def config(self) -> ModelConfig:
        """The model's configuration."""
        return read_config(resolve_model(str(self.form("directory"))))

    def prepare(self, source: Path) -> None:
        """Write the weights in each form, where they are not there. source: the GGUF that they come from."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_bfloat16_gguf(source, self.form("gguf"))
        directory = write_directory(source, self.form("directory"))
        convert = [
            str(Path(sys.executable).with_name("batchgen")),
            "convert",
            "--progress",
            "none",
            "--dtype",
            "bfloat16",
        ]
        subprocess.run([*convert, "-m", str(directory), "-o", str(self.form("store"))], check=True)

    def prepare_openvino(self, source: Path, python: Path) -> None:
        """Write the weights as OpenVINO's files. python: that of its environment. Raises CalledProcessError."""
        folder = self.form(OPENVINO)
        if folder.exists():
            return
        partial = folder.with_name("openvino.partial")
        partial.mkdir(exist_ok=True)
        gguf = write_bfloat16_gguf(source, partial / "float16.gguf", "F16")
        subprocess.run([str(python), str(PEERS / "write_openvino.py"), str(gguf)], check=True)
        if not (partial / "openvino_model.xml").exists():
            raise SystemExit(f"OpenVINO GenAI has converted {self.name} to no files of its own")
        gguf.unlink()
        partial.rename(folder)

    def prepare_own_form(self, weights: str, python: Path) -> None:
        """Write the weights in a form that only its engine writes. python: as above. Raises CalledProcessError."""
        folder = self.form(weights)
        partial = folder.with_name(f"{folder.name}.partial")
        if folder.exists():
            return
        shutil.rmtree(partial, ignore_errors=True)
        subprocess.run(
            [str(python), str(PEERS / WRITERS[weights]), str(self.form("directory")), str(partial)], check=True
        )
        partial.rename(folder)

    def make_rows(self, count: int, prompt_tokens: int, output_tokens: int) -> None:
        """Make prompts of records of the recipe's table, as many tokens of each as are asked for."""
        tokenizer = load_tokenizer(resolve_model(str(self.form("directory"))))
        records = pq.read_table(TEXTS).to_pylist()
        for number in range(count):
            several = (records[(number + i) % len(records)] for i in range(12))
            text = "\n".join(", ".join(f"{key}: {value}" for key, value in each.items()) for each in several)
            ids = tokenizer.encode_batch([text])[0][:prompt_tokens]
            if len(ids) < prompt_tokens:
                raise SystemExit(f"{prompt_tokens} prompt tokens are more than the records have: ask for fewer")
            self.rows.append(([int(token) for token in ids], output_tokens))


class Shape(Model):
    """A model of a well-known shape with random weights of about 4 bits, for engines that read a GGUF or a store."""

    is_random = True

    def weight_files(self) -> list[Path]:
        return [self.form("gguf")]

    def config(self) -> ModelConfig:
        return random_shapes.config_of(self.name)[0]

    def write(self) -> None:
        """Write the weights in each form, where they are not there."""
        self.folder.mkdir(parents=True, exist_ok=True)
        random_shapes.write_gguf(self.form("gguf"), self.name)
        random_shapes.write_store(self.form("store"), self.name)

    def make_rows(self, count: int, prompt_tokens: int, output_tokens: int) -> None:
        """Make random prompts."""
        self.rows += [(ids, output_tokens) for ids in prompt_ids(count, prompt_tokens, self.config().vocab_size)]


class Ladder:
    """The cells of a result file, and what runs those that are missing."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.started = time.monotonic()
        self.result: dict[str, Any] = {"arguments": self._same_job(), "models": {}}
        if args.output.exists():
            before = json.loads(args.output.read_text())
            if before["machine"] != machine() or before["arguments"] != self.result["arguments"]:
                raise SystemExit(f"{args.output} is of another machine or another job: give another --output")
            self.result = {name: before[name] for name in ("arguments", "models")}

    def _same_job(self) -> dict[str, Any]:
        args = self.args
        return {
            "rows": args.rows,
            "prompt_tokens": args.prompt_tokens,
            "output_tokens": args.output_tokens,
            "beside_bytes": args.beside,
            "limit_s": args.limit_s,
        }

    @property
    def must_stop(self) -> bool:
        """True where another run might end after --minutes."""
        if self.args.minutes is None:
            return False
        return time.monotonic() - self.started + self.args.limit_s > 60 * self.args.minutes

    def cells_of(self, model: Model) -> dict[str, Any]:
        """The cells of a model, to be changed."""
        about = {"weight_bytes": model.weight_bytes, "random": model.is_random, "cells": {}}
        entry = self.result["models"].setdefault(model.name, about)
        cells: dict[str, Any] = entry["cells"]
        return cells

    def write(self) -> None:
        write(self.args.output, self.result)

    def run(self, model: Model, engine: str) -> bool:
        """Run the missing cells of an engine; returns whether it was done before the time was over."""
        cells, fastest = self.cells_of(model), None
        for name, settings, share in _cells(engine):
            if share != SHARES[0] and fastest is None:
                fastest = _fastest(cells, engine)
                if fastest is None:
                    return True  # it did not run at the largest limit
            if share != SHARES[0] and settings != fastest:
                continue
            if name in cells:
                continue
            if self.must_stop:
                return False
            cells[name] = self._cell(model, engine, settings, share)
            self.write()
            print(f"{model.name:13} {name:60} {_said(cells[name])}", flush=True)
        return True

    def _cell(self, model: Model, engine: str, settings: dict[str, Any], share: float) -> dict[str, Any]:
        about = {"engine": engine, "share": share, "asked": settings}
        try:
            python = self._python(engine)
        except (subprocess.CalledProcessError, OSError):
            return about | {"failed": "its packages cannot be installed"}
        limit = min(int(share * model.weight_bytes) + self.args.beside, int(_MOST_MEMORY_FRAC * _memory_bytes()))
        measured = any(cell["engine"] == BATCHGEN for cell in self.cells_of(model).values())
        if engine == BATCHGEN and not measured:  # the machine is measured for the model at the first run
            self._limited(model, engine, python, settings, limit, rows=2)
        return about | {"limit_bytes": limit} | self._limited(model, engine, python, settings, limit)

    def _python(self, engine: str) -> str:
        """The Python of an engine's environment. Raises CalledProcessError where it cannot be installed."""
        if engine == BATCHGEN:
            return sys.executable
        return str(python_of(ENGINES[engine].environment or engine, self.args.engines_dir))

    def _limited(
        self,
        model: Model,
        engine: str,
        python: str,
        settings: dict[str, Any],
        limit: int,
        *,
        rows: int | None = None,
        timeout_s: float | None = None,
        form: str | None = None,
    ) -> dict[str, Any]:
        """Run a job within a memory limit; returns its cell.

        Args:
            model: The model.
            engine: The engine's name.
            python: The Python of its environment.
            settings: Its settings.
            limit: The limit in bytes.
            rows: Number of rows; None: all.
            timeout_s: Seconds after which it is killed; None: those of --limit-s.
            form: Form of the weights; None: that of the engine.
        """
        folder = self.args.work_dir
        job, result, log = (folder / f"{engine}.{end}" for end in ("job.json", "result.json", "log"))
        result.unlink(missing_ok=True)
        weights = model.form(form or ENGINES[engine].weights)
        if not weights.exists():
            return {"failed": "it cannot read the model's files"}
        given = settings | {"memory_bytes": limit, "beside_bytes": self.args.beside, "folder": str(folder)}
        job.write_text(
            json.dumps(
                {
                    "model": str(weights),
                    "rows": model.rows[:rows],
                    "warm_up": [],
                    "share_prefixes": False,
                    "threads": self.args.threads,
                    "settings": given,
                }
            )
        )
        empty_page_cache([weights] if weights.is_file() else [path for path in weights.rglob("*") if path.is_file()])
        command = [python, str(PEERS / ENGINES[engine].runner), str(job), str(result)]
        started = time.time()
        timeout_s = timeout_s or self.args.limit_s
        limited = run_limited(command, limit, log, timeout_s=timeout_s)
        for left in folder.glob("offload-*"):
            shutil.rmtree(left, ignore_errors=True)
        cell: dict[str, Any] = {"limited": asdict(limited)}
        if limited.oom_kills:
            return cell | {"failed": "out of memory"}
        if limited.exit_code == -9:
            return cell | {"failed": f"not done in {timeout_s:.0f} s"}
        if limited.exit_code or not result.exists():
            return cell | {"failed": _last_line(log)}
        found = json.loads(result.read_text())
        found["generation_s"] = found.pop("wall_s")
        found.get("settings", {}).pop("folder", None)  # a path of this machine
        cell["wall_s"] = result.stat().st_mtime - started
        generated = found.pop("generated")
        outputs = folder / "outputs" / f"{_digest(generated)}.json"
        outputs.parent.mkdir(exist_ok=True)
        outputs.write_text(json.dumps(generated))
        return cell | found | {"tokens": outputs.stem, "versions": found["versions"]}

    def check_kills(self, model: Model) -> bool:
        """Kill batchgen three times and compare its output; returns whether it was done before the time was over."""
        entry = self.result["models"][model.name]
        if "kills" in entry:
            return True
        if self.must_stop:
            return False
        limit = int(_KILL_SHARE * model.weight_bytes) + self.args.beside
        settings = {"dtype": "float32", "resume": False, "flush_interval": 0.2, "max_num_seqs": 16}

        def run(resume: bool, timeout_s: float | None = None) -> dict[str, Any]:
            return self._limited(
                model,
                BATCHGEN,
                sys.executable,
                settings | {"resume": resume},
                limit,
                timeout_s=timeout_s,
                form="directory",  # a store has one dtype
            )

        whole = run(resume=False)
        if "failed" in whole:
            entry["kills"] = {"failed": whole["failed"]}
            return True
        shutil.rmtree(self.args.work_dir / "batchgen-output.parquet.batchgen")
        (self.args.work_dir / "batchgen-output.parquet").unlink()
        killed = [run(resume=True, timeout_s=at * whole["wall_s"]) for at in _KILLED_AT]
        last = run(resume=True)
        entry["kills"] = {
            "killed": sum("failed" in each for each in killed),
            "sha256": whole["sha256"],
            "sha256_after_kills": last.get("sha256"),
            "same": last.get("sha256") == whole["sha256"],
        }
        self.write()
        print(
            f"{model.name:13} after {entry['kills']['killed']} kills: same output {entry['kills']['same']}", flush=True
        )
        return True

    def measure(self, model: Model) -> None:
        """Measure what the machine can do at best for a model."""
        entry = self.result["models"][model.name]
        if "bound" in entry:
            return
        config = model.config()
        # A CPU without 16-bit products is at its best in float32.
        rates = {dtype: gemm_rates(config, _GEMM_TOKENS, dtype=dtype) for dtype in ("bfloat16", "float32")}
        best = max(rate for of_dtype in rates.values() for rate in of_dtype.values())
        disk = disk_read_rate(model.weight_files())
        memory = dram_read_rate(FULL)
        todo = work(Workload(model.rows), config)
        flops = todo["linear_flops"] + todo["logits_flops"] + todo["prefill_attention_flops"]
        compute_s = flops / best + todo["decode_kv_bytes"] / memory
        disk_s = model.weight_bytes / disk
        entry["bound"] = {
            "gemm_flops_per_s": rates,
            "disk_read_bytes_per_s": disk,
            "dram_read_bytes_per_s": memory,
            "compute_s": compute_s,
            "disk_s": disk_s,
            "bound_s": max(compute_s, disk_s),
        }
        self.write()

    def judge(self, model: Model) -> None:
        """Add the accuracy and the length of each cell's tokens by the fp32 model."""
        cells = [cell for cell in self.cells_of(model).values() if "tokens" in cell and "accuracy" not in cell]
        if model.is_random or not cells:
            return
        fp32 = load_fp32(model.form("directory"))
        for name in {cell["tokens"] for cell in cells}:
            outputs = self.args.work_dir / "outputs" / f"{name}.json"
            if not outputs.exists():
                raise SystemExit(
                    f"{outputs} is not there: take its cells out of {self.args.output}, and run them again"
                )
            tokens = json.loads(outputs.read_text())
            judged = token_accuracy(fp32, model.rows, tokens)
            valid = judged.accuracy >= ACCURACY and judged.length >= LENGTH
            for cell in cells:
                if cell["tokens"] == name:
                    cell |= asdict(judged) | {"valid": valid}
        self.write()


def _cells(engine: str) -> Iterator[tuple[str, dict[str, Any], float]]:
    """Name, settings and share of each cell of an engine, the largest limit first."""
    for share in SHARES:
        for settings in ENGINES[engine].sweep:
            shown = ",".join(f"{key}={value}" for key, value in settings.items())
            yield f"{engine}/{share:g}/{shown}", settings, share


def _fastest(cells: dict[str, Any], engine: str) -> dict[str, Any] | None:
    """The settings of an engine that were fastest at the largest limit; None: none of them ran."""
    ran = [c for c in cells.values() if c["engine"] == engine and c["share"] == SHARES[0] and "wall_s" in c]
    return min(ran, key=lambda cell: cell["wall_s"])["asked"] if ran else None


def _digest(generated: list[list[int]]) -> str:
    return hashlib.sha256(json.dumps(generated).encode()).hexdigest()[:16]


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:200] if lines else "it said nothing"


def _said(cell: dict[str, Any]) -> str:
    return cell["failed"] if "failed" in cell else f"{cell['wall_s']:.1f} s"


def _parse() -> argparse.Namespace:
    def names(text: str) -> list[str]:
        return text.split(",")

    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "batchgen-benchmarks"
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", type=names, help="separated by commas [default: all; none beside --shapes]")
    parser.add_argument("--model", action="append", default=[], metavar="NAME=GGUF", help="a further model")
    shapes = ", ".join(random_shapes.SHAPES)
    parser.add_argument("--shapes", type=names, default=[], help=f"with random weights, by commas: {shapes}")
    parser.add_argument("--engines", type=names, default=list(ENGINES), help="separated by commas [default: all]")
    for name, (of_models, of_shapes) in _SIZES.items():
        told = f"[default: {of_models}, {of_shapes} of shapes]"
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help=told)
    parser.add_argument(
        "--beside", type=parse_bytes, default="768MiB", help="memory beside the share [default: 768MiB]"
    )
    parser.add_argument("--minutes", type=float, help="start no run that might end later")
    parser.add_argument("--threads", type=int, default=available_cores(), help="of the peers")
    parser.add_argument("--prepare", action="store_true", help="install engines and write models, and run nothing")
    parser.add_argument("--judge", action="store_true", help="judge the tokens of the cells that are there")
    parser.add_argument("--work-dir", type=Path, default=cache / "ladder", help="for models and outputs")
    parser.add_argument("--engines-dir", type=Path, default=cache, help="for the engines' environments")
    parser.add_argument("--output", type=Path, help="[default: benchmarks/results/ladder-CPU.json]")
    args = parser.parse_args()
    if args.models and args.shapes:
        parser.error("models and shapes have different rows: give one of --models and --shapes at a time")
    args.models = args.models or ([] if args.shapes else list(MODELS))
    args.output = args.output or result_path("ladder-shapes" if args.shapes else "ladder", by_cpu=True)
    for name, defaults in _SIZES.items():
        if getattr(args, name) is None:
            setattr(args, name, defaults[bool(args.shapes)])
    for kind, given, known in (("engine", args.engines, ENGINES), ("shape", args.shapes, random_shapes.SHAPES)):
        if unknown := sorted(set(given) - set(known)):
            parser.error(f"no {kind} {unknown[0]!r}: there are {', '.join(known)}")
    return args


def _sources(args: argparse.Namespace) -> dict[str, Path]:
    """The GGUF of each model by its name."""
    given = dict(text.split("=", 1) for text in args.model)
    return {name: MODELS[name]() for name in args.models} | {name: Path(path) for name, path in given.items()}


def _prepare_engine(engine: str, models: list[Model], sources: dict[str, Path], folder: Path) -> None:
    """Install an engine, and write the weights as it alone reads them; what cannot be done is said."""
    if engine == BATCHGEN:
        return
    try:
        python = python_of(ENGINES[engine].environment or engine, folder)
        for model in models:
            if engine == OPENVINO:
                model.prepare_openvino(sources[model.name], python)
            elif ENGINES[engine].weights in WRITERS:
                model.prepare_own_form(ENGINES[engine].weights, python)
    except subprocess.CalledProcessError as error:
        print(f"{engine} cannot be prepared: {error}", flush=True)


def main() -> None:
    args = _parse()
    args.work_dir.mkdir(parents=True, exist_ok=True)
    sources = _sources(args)
    models = [Model(name, args.work_dir / name) for name in sources]
    shapes = [Shape(name, args.work_dir / name) for name in args.shapes]
    if args.prepare:
        for model in models:
            model.prepare(sources[model.name])
            print(f"{model.name}: {format_bytes(model.weight_bytes)} of weights", flush=True)
        for shape in shapes:
            shape.write()
            print(f"{shape.name}: {format_bytes(shape.weight_bytes)} of weights", flush=True)
        for engine in args.engines:
            _prepare_engine(engine, models, sources, args.engines_dir)
        return
    ladder = Ladder(args)
    for model in [*models, *shapes]:
        model.make_rows(args.rows, args.prompt_tokens, args.output_tokens)
        ladder.cells_of(model)
        if args.judge:
            ladder.judge(model)
            continue
        done = all([ladder.run(model, engine) for engine in args.engines])
        if BATCHGEN in args.engines and not model.is_random:  # in float32, which shapes are not written in
            done = done and ladder.check_kills(model)
        if not done:
            print("the time is over: the same command goes on", flush=True)
            return
        ladder.measure(model)
        ladder.judge(model)


if __name__ == "__main__":
    main()
