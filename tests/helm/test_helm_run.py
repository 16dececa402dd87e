"""HELM runs on batchgen: the numbers of HELM's own Hugging Face client, whatever runs the engine, and jobs that resume.

These need crfm-helm, which pins older packages than the other tests run with: `make helm-check` has an environment for
it.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

pytest.importorskip("helm.benchmark.run")

ROOT = Path(__file__).parents[2]
SUPPORT = ROOT / "tests" / "support"

from helm_side import (  # noqa: E402
    BATCHGEN,
    HUGGING_FACE,
    OF_CALIBRATION,
    OF_LOGPROBS,
    OF_THE_CLIENT,
    RAW_LOGITS,
    RUNNER,
    compare,
    helm_command,
    read_runs,
    write_deployment,
    write_questions,
)  # fmt: skip

pytestmark = pytest.mark.slow
WORDS = [
    "ferry",
    "harbour",
    "onions",
    "captain",
    "quay",
    "lemons",
    "timetable",
    "winter",
    "islands",
    "slate",
    "chapel",
    "funnel",
]
ENVIRONMENT = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{SUPPORT}", "HF_HUB_OFFLINE": "1"}


def questions(count):
    rng = random.Random(0)
    return [
        (f"Which of these did the {rng.choice(WORDS)} bring to the {rng.choice(WORDS)}?", rng.sample(WORDS, 4),
        rng.randrange(4))
        for _ in range(count)
    ]  # fmt: skip


class Side:
    """A deployment of the tiny model, and runs of it in a folder of their own."""

    def __init__(self, folder, model, client, **arguments):
        self.output = folder / "out"
        source = "model" if client == BATCHGEN else "pretrained_model_name_or_path"
        if client == BATCHGEN:
            arguments = {"dtype": "float32", "cpu_memory": "3GiB"} | arguments
        arguments = {source: str(model), "apply_chat_template": False} | arguments
        self.deployment = write_deployment(folder / "deployment", client, arguments, str(model), "<|endoftext|>", 2048)
        choices = write_questions(self.output, questions(8))
        self.entries = [
            "synthetic_reasoning:mode=pattern_match",
            "dyck_language:num_parenthesis_pairs=3",
            choices,
            f"{choices},method=multiple_choice_separate_original",
            f"{choices},method=multiple_choice_separate_calibrated",
        ]

    def command(self, *arguments, entries=None):
        return helm_command(self.deployment, self.output, entries or self.entries, "-m", "8", *arguments)

    def run(self, *arguments, entries=None, code=0, **variables):
        process = subprocess.run(
            self.command(*arguments, entries=entries), env=ENVIRONMENT | variables, cwd=self.output,
            capture_output=True, text=True
        )  # fmt: skip
        assert process.returncode == code, process.stdout[-3000:] + process.stderr[-3000:]
        return process

    def jobs(self):
        return sorted(path.parent for path in (self.output / "batchgen").rglob("requests.parquet"))


@pytest.fixture(scope="module")
def model(tiny_models):
    return tiny_models("llama", max_position_embeddings=2048)[0]


@pytest.fixture
def side(model, tmp_path):
    def make(client=BATCHGEN, name="side", source=model, **arguments):
        return Side(tmp_path / name, source, client, **arguments)

    return make


@pytest.fixture(scope="module")
def expected(model, tmp_path_factory):
    """What HELM's client says, as it is and with the model's log-probabilities."""
    runs = {}
    for client in (HUGGING_FACE, RAW_LOGITS):
        theirs = Side(tmp_path_factory.mktemp("theirs"), model, client)
        theirs.run("--exit-on-error")
        runs[client] = read_runs(theirs.output)
    return runs


def assert_equal_runs(runs, expected):
    plain, raw = expected[HUGGING_FACE], expected[RAW_LOGITS]
    assert runs.keys() == plain.keys() == raw.keys() and len(runs) == 5
    for name, run in runs.items():
        found = compare(run, plain[name])
        assert found["texts_differ"] == found["tokens_differ"] == 0 and found["requests"] >= 8
        assert found["stats_differ"].keys() <= OF_THE_CLIENT | OF_LOGPROBS | OF_CALIBRATION, name
        if "separate" in name:  # where it scores, it reports what the model says
            assert found["token_logprobs_differ"] < 1e-3
            assert max(found["stats_differ"][stat] for stat in OF_LOGPROBS) < 1e-3
        found = compare(run, raw[name])
        assert found["texts_differ"] == found["tokens_differ"] == 0
        assert found["token_logprobs_differ"] < 1e-3
        assert found["stats_differ"].keys() <= OF_THE_CLIENT | OF_LOGPROBS | OF_CALIBRATION
        assert max(found["stats_differ"][stat] for stat in OF_LOGPROBS) < 1e-3


def test_the_client_alone(side, expected):
    ours = side()
    ours.run("--exit-on-error", "-n", "16")
    assert_equal_runs(read_runs(ours.output), expected)


def test_all_entries_are_one_job_of_each_kind(side, expected):
    ours = side()
    ours.run("--exit-on-error", "--runner-class-name", RUNNER)
    assert_equal_runs(read_runs(ours.output), expected)
    assert [job.name.split("-")[0] for job in ours.jobs()] == ["generate", "score"]
    written = {job: (job / "results.parquet").stat().st_mtime_ns for job in ours.jobs()}
    # Once more, and with an entry that is new: what is answered stays answered.
    again = ours.run("--exit-on-error", "--runner-class-name", RUNNER,
    entries=[*ours.entries, "synthetic_reasoning:mode=variable_substitution"])  # fmt: skip
    assert "rows in" in again.stdout + again.stderr
    assert {job: (job / "results.parquet").stat().st_mtime_ns for job in ours.jobs() if job in written} == written
    (new,) = set(ours.jobs()) - set(written)
    assert pq.read_metadata(new / "results.parquet").num_rows == 8
    states = [state for _, states in read_runs(ours.output).values() for state in states]
    assert {state["result"]["cached"] for state in states} == {True, False}
    reasons = {c["finish_reason"]["reason"] for state in states for c in state["result"]["completions"]}
    assert reasons <= {"stop", "length", "endoftext"} and {"stop", "length"} <= reasons


def test_an_engine_in_another_environment(side, expected):
    ours = side()
    program = Path(sys.executable).with_name("batchgen")
    if not program.exists():
        program = ours.output / "batchgen.sh"
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -m batchgen "$@"\n')
        program.chmod(0o755)
    ours.run("--exit-on-error", "--runner-class-name", RUNNER, BATCHGEN_HELM_ENGINE=str(program))
    assert_equal_runs(read_runs(ours.output), expected)


def test_an_engine_that_is_handed_files(side, expected):
    ours = side(engine="files")
    first = ours.run("--exit-on-error", "--runner-class-name", RUNNER, code=3)
    assert read_runs(ours.output) == {}
    assert len(ours.jobs()) == 2 and not any(job.joinpath("results.parquet").exists() for job in ours.jobs())
    for job in ours.jobs():
        assert f"cd {job} && batchgen run --config job.toml" in first.stderr
        subprocess.run([sys.executable, "-m", "batchgen", "run", "--config", "job.toml"], cwd=job, env=ENVIRONMENT,
        check=True)  # fmt: skip
    ours.run("--exit-on-error", "--runner-class-name", RUNNER)
    assert_equal_runs(read_runs(ours.output), expected)


def test_results_of_other_requests_are_refused(side):
    ours = side(engine="files")
    ours.run("--runner-class-name", RUNNER, code=3)
    generate, _ = ours.jobs()
    table = pq.read_table(generate / "requests.parquet")
    assert table.num_rows > 8
    pq.write_table(table.slice(1), generate / "results.parquet")
    process = ours.run("--runner-class-name", RUNNER, code=2)
    assert "results.parquet" in process.stderr and "Traceback" not in process.stderr


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT])
def test_killed_in_the_middle_it_goes_on_where_it_was(side, expected, how):
    """No finished row is run twice: the rows that the second run finds done are all those that the first had saved."""
    ours = side(flush_interval="0.05s", max_num_seqs=2)
    arguments = ["--exit-on-error", "--runner-class-name", RUNNER]
    process = subprocess.Popen(
        ours.command(*arguments), env=ENVIRONMENT, cwd=ours.output, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    while process.poll() is None and not list(
        ours.output.glob("batchgen/*/*/*/results.parquet.batchgen/parts/part-*.parquet")
    ):
        time.sleep(0.01)
    process.send_signal(how)
    process.wait()
    before = saved(ours)
    job, _ = ours.jobs()  # of generation; scoring had not begun
    assert 0 < before < pq.read_metadata(job / "requests.parquet").num_rows, "killed too late: nothing was left to run"
    ours.run(*arguments)
    report = (job / "report.json").read_text()
    assert f'"rows_resumed": {before}' in report, report[:600]
    assert_equal_runs(read_runs(ours.output), expected)


def saved(side):
    return sum(
        pq.read_metadata(part).num_rows
        for job in side.jobs()
        for part in (job / "results.parquet.batchgen" / "parts").glob("part-*.parquet")
    )


def test_several_completions_are_drawn_apart(side):
    """A scenario with five outputs a request, at temperature 1: real samples, the same in every run."""
    entry = "synthetic_reasoning:mode=pattern_match,num_outputs=5,temperature=1.0"
    runs = []
    for name, arguments in (("jobs", ["--runner-class-name", RUNNER]), ("alone", ["-n", "3"])):
        ours = side(name=name)
        ours.run("--exit-on-error", *arguments, entries=[entry])
        ((_, states),) = read_runs(ours.output).values()
        runs.append([[c["text"] for c in state["result"]["completions"]] for state in states])
        assert all(c["logprob"] < 0 for state in states for c in state["result"]["completions"])
    assert runs[0] == runs[1]
    assert all(len(texts) == 5 and len(set(texts)) > 1 for texts in runs[0])


def test_what_cannot_be_run_fails_its_entry_alone(side):
    ours = side(max_model_len=200, on_overlong="error")
    entries = ["synthetic_reasoning:mode=pattern_match", ours.entries[2]]  # prompts longer than that, and shorter ones
    process = ours.run("--runner-class-name", RUNNER, entries=entries, code=1)
    assert "the context holds 200" in process.stdout + process.stderr
    assert [name.split(",")[0] for name in read_runs(ours.output)] == ["custom_mcqa"]


def test_a_model_that_is_not_there_is_one_line(side):
    ours = side(source="/no/such/model", engine="in-process")
    ours.deployment.joinpath("tokenizer_configs.yaml").write_text(
        side(name="other").deployment.joinpath("tokenizer_configs.yaml").read_text()
    )
    process = ours.run("--runner-class-name", RUNNER, code=2)
    assert "batchgen: model /no/such/model does not exist" in process.stderr and "Traceback" not in process.stderr
