import gc
import importlib.util
import math
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

# Without bytecode each process of a test compiles all that it imports: five seconds of ten.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
sys.path[:0] = [str(Path(__file__).parent / folder) for folder in ("support", "models", "engine")]
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
if "PYTEST_XDIST_WORKER" in os.environ:  # one worker a core: threads of several would wait for each other
    os.environ.setdefault("OMP_NUM_THREADS", "1")
# Jobs in tests are planned with fixed rates; measuring the machine is tested by itself.
os.environ.setdefault("BATCHGEN_HARDWARE", "zen4")
# A shell starts what it runs in the background deaf to interrupts, which are what some tests send.
signal.signal(signal.SIGINT, signal.default_int_handler)


if "BATCHGEN_KERNELS" in os.environ:  # kernels built otherwise than those installed: `make sanitize`
    spec = importlib.util.spec_from_file_location("batchgen.ops._kernels", os.environ["BATCHGEN_KERNELS"])
    sys.modules["batchgen.ops._kernels"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules["batchgen.ops._kernels"])


def pytest_addoption(parser):
    parser.addoption(
        "--all",
        action="store_true",
        help="tests marked thorough too, and larger draws (make test-all); see tests/BUDGET.md",
    )
    parser.addoption("--part", type=float, default=1.0, metavar="FRACTION", help="run this part of the tests")


@pytest.hookimpl(tryfirst=True)  # before Hypothesis reads its own option
def pytest_configure(config):
    if not config.pluginmanager.hasplugin("timeout"):
        config.addinivalue_line("markers", "timeout(seconds): has no effect without pytest-timeout")
    if getattr(config.option, "all", False):
        os.environ["BATCHGEN_TEST_ALL"] = "1"
    from thorough import SEED, THOROUGH, same_draws_in_every_process

    if getattr(config.option, "hypothesis_seed", "") is None:
        config.option.hypothesis_seed = str(SEED)
    if not THOROUGH:
        same_draws_in_every_process()


@pytest.hookimpl(trylast=True)  # a part of those that -m and -k leave
def pytest_collection_modifyitems(config, items):
    from budget import longest_first, read_budget
    from thorough import THOROUGH, rotating

    if config.option.part < 1:
        kept = set(rotating("part", len(items)).sample(range(len(items)), math.ceil(config.option.part * len(items))))
        config.hook.pytest_deselected(items=[item for i, item in enumerate(items) if i not in kept])
        items[:] = [item for i, item in enumerate(items) if i in kept]

    if not THOROUGH:
        for item in items:
            if item.get_closest_marker("thorough"):
                item.add_marker(pytest.mark.skip(reason="make test-all runs it"))
    longest_first(items, read_budget())


_seconds = Counter()


def pytest_runtest_logreport(report):
    _seconds[report.nodeid] += report.duration


def pytest_terminal_summary(terminalreporter):
    from budget import LIMIT_S, not_listed, read_budget
    from thorough import SEED

    if lines := not_listed(_seconds, read_budget()):
        terminalreporter.section(f"over {LIMIT_S:g} s and not in tests/BUDGET.md")
        terminalreporter.write_line("\n".join(lines))
    if terminalreporter.stats.get("failed") or terminalreporter.stats.get("error"):
        terminalreporter.write_line(f"Drawn from seed {SEED}: BATCHGEN_TEST_SEED={SEED} in the environment repeats it.")


def pytest_ignore_collect(collection_path, config):
    """`-m gpu` looks only at files with such tests: a machine with a GPU may lack what others import."""
    if config.option.markexpr != "gpu" or collection_path.suffix != ".py":
        return None
    return True if "\n@pytest.mark.gpu" not in collection_path.read_text() else None


_frozen_modules = 0


@pytest.fixture(autouse=True)
def little_to_collect():
    """Freezes what tests have imported so far: an engine collects garbage, a quarter of a second with all of it."""
    global _frozen_modules
    if len(sys.modules) > _frozen_modules + 100:
        _frozen_modules = len(sys.modules)
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def plans_of_the_same_problem_are_made_once(monkeypatch):
    """Jobs of this process share their plans. Planning is not imported for those that have no jobs."""
    if planning := sys.modules.get("batchgen.job.planning"):
        import known_plans

        monkeypatch.setattr(planning, "plan_problem", known_plans.plan_of_job)
        monkeypatch.setattr(planning, "with_strategies", known_plans.with_strategies)
        monkeypatch.setattr(planning, "other_quality", known_plans.other_quality)


@pytest.fixture
def logged():
    """Lines that the package logs, as a job shows them."""
    from batchgen.job.progress import log_lines

    lines = []
    with log_lines(lambda line, **_: lines.append(line)):
        yield lines


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory):
    """family -> (path, transformers model), made when first asked for."""
    from tiny_models import make_tiny_model

    made = {}

    def get(family, **overrides):
        key = (family, repr(sorted(overrides.items())))
        if key not in made:
            path = tmp_path_factory.mktemp(family)
            made[key] = path, make_tiny_model(family, path, **overrides)
        return made[key]

    return get


@pytest.fixture(scope="module")
def one_thread():
    """Lanes have a thread each; torch's own would only wait for each other."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def small_disk(tmp_path):
    """A function that mounts a tmpfs with options such as "size=500k", or remounts it with others.

    The test is skipped where none can be mounted.
    """
    folder = tmp_path / "disk"
    folder.mkdir()

    def mount(options: str) -> Path:
        action = "remount," if os.path.ismount(folder) else ""
        command = ["mount", "-t", "tmpfs", "-o", action + options, "tmpfs", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"cannot mount a small filesystem here: {done.stderr.strip()}")
        return folder

    if os.geteuid() != 0:
        pytest.skip("only root can mount a small filesystem")
    yield mount
    if os.path.ismount(folder):
        subprocess.run(["umount", "-l", str(folder)], check=True)
