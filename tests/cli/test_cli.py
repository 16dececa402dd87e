"""The command line as a person meets it: whole jobs on a tiny model, and one clear line for every mistake."""

import itertools
import json
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from command_line import invoke

import batchgen
from batchgen.cli import commands

PROGRAM = Path(sys.executable).with_name("batchgen")  # as installed


@pytest.fixture(scope="module")
def model(tiny_models):
    return str(tiny_models("llama")[0])


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "rows.parquet"
    rows = [f"The ferry left at {i}" for i in range(20)]
    rows[3], rows[7] = None, ""
    rows[11] = "onions " * 600
    pq.write_table(pa.table({"q": rows, "number": range(20), "nested": [{"a": [i]} for i in range(20)]}), path)
    return str(path)


def run(model, table, output, *args):
    defaults = ["--prompt-column", "q", "--no-chat", "--max-tokens", "5", "--dtype", "float32", "--progress", "none"]
    return invoke("run", "-m", model, "-i", table, "-o", output, *defaults, *args)


def test_a_job_end_to_end(model, table, tmp_path):
    output, report_path = tmp_path / "out.parquet", tmp_path / "report.json"
    code, stdout, _ = run(model, table, output, "--report", report_path)
    assert code == 0
    result = pq.read_table(output)
    assert result.column_names == [
        "q", "number", "nested", "text", "finish_reason", "prompt_tokens", "generated_tokens", "error",
    ]  # fmt: skip
    assert result["number"].to_pylist() == list(range(20))
    assert result["nested"].to_pylist()[4] == {"a": [4]}
    errors = result["error"].to_pylist()
    assert [i for i, e in enumerate(errors) if e] == [3, 7, 11]
    assert "null" in errors[3] and "empty" in errors[7] and "context holds 512" in errors[11]
    assert [r for r, e in zip(result["finish_reason"].to_pylist(), errors, strict=True) if e] == ["error"] * 3
    engine = batchgen.Engine(model, dtype="float32", sampling=batchgen.SamplingParams(max_tokens=5))
    texts = result["text"].to_pylist()
    for completion in engine.generate(["The ferry left at 0", "The ferry left at 19"]):
        assert texts[[0, 19][completion.index]] == completion.text
    report = json.loads(report_path.read_text())
    assert (report["rows_ok"], report["rows_failed"], report["rows_resumed"]) == (17, 3, 0)
    assert report["generated_tokens"] == sum(
        g for g, e in zip(result["generated_tokens"].to_pylist(), errors, strict=True) if not e
    )
    assert report["prompt_tokens"] == sum(
        p for p, e in zip(result["prompt_tokens"].to_pylist(), errors, strict=True) if not e
    )
    for key in ("wall_s", "total_tokens_per_s", "generated_tokens_per_s", "bottleneck", "peak_bytes", "bytes_moved",
                "busy_s", "policy", "versions", "predicted_wall_s"):  # fmt: skip
        assert key in report
    assert "17 rows ok, 3 failed" in stdout and str(output) in stdout and "tokens/s" in stdout

    code, stdout, _ = run(model, table, output)
    assert code == 0 and "already complete" in stdout
    before = output.stat().st_mtime_ns
    code, _, message = run(model, table, output, "--max-tokens", "6")
    assert code == 2 and "sampling.max_tokens" in message and "--overwrite" in message
    assert output.stat().st_mtime_ns == before

    code, stdout, _ = run(model, table, output, "--retry-failed")
    assert code == 0 and "17 of them from before" in stdout
    assert pq.read_table(output).equals(result)


def test_shards_make_up_the_whole(model, table, tmp_path):
    run(model, table, tmp_path / "whole.parquet")
    for i in range(3):
        assert run(model, table, tmp_path / f"{i}.parquet", "--shard", f"{i}/3")[0] == 0
    shards = pa.concat_tables([pq.read_table(tmp_path / f"{i}.parquet") for i in range(3)])
    assert shards.replace_schema_metadata().equals(pq.read_table(tmp_path / "whole.parquet").replace_schema_metadata())


class SlowClock:
    """Time goes by only when somebody looks: a second each time."""

    def __init__(self):
        self._now_s = itertools.count()

    def monotonic(self):
        return float(next(self._now_s))

    def __getattr__(self, name):
        return getattr(time, name)


def test_max_time_stops_and_the_next_run_goes_on(model, tmp_path, monkeypatch):
    table = tmp_path / "many.jsonl"
    table.write_text("".join(json.dumps({"prompt": f"The ferry {i}"}) + "\n" for i in range(60)))
    args = ["-m", model, "-i", table, "--dtype", "float32", "--max-tokens", "10", "--progress", "none", "--ignore-eos"]
    args += ["--max-num-seqs", "8"]
    whole = tmp_path / "whole.jsonl"
    assert invoke("run", "-o", whole, *args)[0] == 0
    parts = tmp_path / "parts.jsonl"
    codes, resumed, clock = [], [], SlowClock()
    for name, module in list(sys.modules.items()):
        if name.startswith("batchgen.job.") and hasattr(module, "time"):
            monkeypatch.setattr(module, "time", clock)
    for _ in range(20):
        report = tmp_path / "report.json"
        code, _, _ = invoke("run", "-o", parts, *args, "--max-time", "40s", "--report", report)
        codes.append(code)
        resumed.append(json.loads(report.read_text())["rows_resumed"])
        if code == 0:
            break
    assert codes[-1] == 0 and len(codes) > 1 and set(codes[:-1]) == {3}
    assert resumed == sorted(resumed) and resumed[-1] > 0
    assert parts.read_text() == whole.read_text()


def test_templates_chat_samples_and_logprobs(model, table, tmp_path):
    template = tmp_path / "prompt.jinja"
    template.write_text("Row {{ number }}: {{ q }}\n")
    output = tmp_path / "out.parquet"
    code, _, _ = invoke(
        "run", "-m", model, "-i", table, "-o", output, "--prompt-template", f"@{template}", "--system",
        "Be kind",
        "--max-tokens", 4, "-n", 2, "--temperature", 0.7, "--logprobs", 2, "--dtype", "float32", "--limit", 5,
        "--progress", "none",
    )  # fmt: skip
    assert code == 0
    result = pq.read_table(output).to_pylist()
    assert len(result) == 5
    for row in result:
        assert len(row["text"]) == len(row["generated_tokens"]) == len(row["finish_reason"]) == 2
        for sample, count in zip(row["logprobs"], row["generated_tokens"], strict=True):
            assert len(sample) == count and all(len(position["top"]) == 2 for position in sample)


def test_openai_batch(model, tmp_path):
    lines = [
        {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions",
         "body": {"model": "m", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4, "temperature": 0,
                  "logprobs": True, "top_logprobs": 1}},
        {"custom_id": "b", "method": "POST", "url": "/v1/completions",
         "body": {"model": "m", "prompt": "The ferry", "max_tokens": 3, "n": 2, "seed": 5}},
        {"custom_id": "c", "method": "POST", "url": "/v1/chat/completions",
         "body": {"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": [{"type": "function"}]}},
    ]  # fmt: skip
    batch = tmp_path / "batch.jsonl"
    batch.write_text("".join(json.dumps(line) + "\n" for line in lines))
    output = tmp_path / "answers.jsonl"
    code, stdout, _ = invoke("run", "-m", model, "-i", batch, "-o", output, "--dtype", "float32", "--progress", "none")
    assert code == 0 and "answers.errors.jsonl" in stdout
    first, second = (json.loads(line) for line in output.read_text().splitlines())
    assert first["custom_id"] == "a" and first["response"]["status_code"] == 200
    choice = first["response"]["body"]["choices"][0]
    assert choice["message"]["role"] == "assistant" and len(choice["logprobs"]["content"]) <= 4
    assert [c["index"] for c in second["response"]["body"]["choices"]] == [0, 1]
    usage = second["response"]["body"]["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    (failed,) = (json.loads(line) for line in (tmp_path / "answers.errors.jsonl").read_text().splitlines())
    assert failed["custom_id"] == "c" and "tools" in failed["error"]["message"]


def test_config_file(model, table, tmp_path):
    config = tmp_path / "job.toml"
    config.write_text(f'model = "{model}"\ninput = "{table}"\nprompt-column = "q"\nmax-tokens = 2\nlimit = 3\n'
                      'progress = "none"\nstop = ["x", "y"]\n')  # fmt: skip
    output = tmp_path / "out.csv"
    assert invoke("run", "--config", config, "-o", output, "--limit", 2)[0] == 0
    assert len(output.read_text().strip().splitlines()) == 3
    for line, message in (
        ("max-tokens = true", "max_tokens must be a whole number, not True"),
        ("max-tokens = 3.9", "must be a whole number"),
        ("temperature = true", "must be a number"),
        ("seed = 2026-01-01", "must be a whole number"),
        ("chat = 1", "chat must be true or false"),
        ("system-prompt = {a = 1}", "must be a text"),
        ("chat-template-kwargs = {messages = 1}", "cannot have 'messages'"),
        ("chat = false\n[chat-template-kwargs]\nday = 2020-01-01", "--chat-template-kwargs is for chat messages"),
        ('chat = false\nsystem-prompt = "x"', "--system and --no-chat exclude each other"),
        ('chat-template = "none.jinja"', "--chat-template none.jinja cannot be read"),
        ('model = ["x"]', "must be a text"),
        ('config = "other.toml"', "is no option"),
    ):
        config.write_text(
            f'model = "{model}"\ninput = "{table}"\nprompt-column = "q"\n' * ("kwargs" in line or "chat" in line)
            + f"{line}\n"
        )
        code, _, said = invoke("run", "--config", config, "-o", output)
        assert code == 2 and message in said
    config.write_text("max-toke = 2\n")
    code, _, message = invoke("run", "--config", config, "-o", output)
    assert code == 2 and "max_toke" in message


def test_files_beside_a_config_file_are_found_from_anywhere(model, table, tmp_path, monkeypatch):
    job, elsewhere = tmp_path / "job [1]", tmp_path / "elsewhere"
    job.mkdir()
    elsewhere.mkdir()
    (job / "rows.parquet").write_bytes(Path(table).read_bytes())
    (job / "say.jinja").write_text("Say {{ q }}")
    config = job / "job.toml"
    config.write_text(f'model = "{model}"\ninput = "*.parquet"\nprompt-template = "@say.jinja"\nmax-tokens = 2\n')
    monkeypatch.chdir(elsewhere)
    found = invoke("run", "--config", config, "-o", "out.parquet", "--limit", 2)
    assert found[0] == 0, found
    assert pq.read_table(elsewhere / "out.parquet").num_rows == 2
    (elsewhere / "here.jinja").write_text("Here {{ q }}")  # not beside it: where the command is run
    config.write_text(config.read_text().replace("say.jinja", "here.jinja"))
    result = CliRunner().invoke(commands.cli, ["run", "--config", str(config), "-o", "o.parquet", "--dry-run"])
    assert result.exit_code == 0 and "Here The ferry" in result.stdout
    code, _, message = invoke("run", "--config", config, "-i", "rows.parquet", "-o", "o.parquet", "--limit", 2)
    assert code == 2 and "rows.parquet" in message  # a flag's path has nothing to do with the file


def test_dry_run_shows_the_prompt_and_writes_nothing(model, table, tmp_path):
    result = CliRunner().invoke(
        commands.cli, ["run", "-m", model, "-i", table, "-o", str(tmp_path / "x.parquet"), "--prompt-template",
                  "Say {{ q }}", "--dry-run"]
    )  # fmt: skip
    assert result.exit_code == 0 and "Say The ferry left at 0" in result.stdout and "x.parquet" in result.stdout
    assert not list(tmp_path.glob("x.parquet*"))


def test_a_dry_run_gives_programs_json_and_no_other_run_does(model, table, tmp_path):
    arguments = ["run", "-m", model, "-i", table, "-o", tmp_path / "x.parquet", "--prompt-column", "q"]
    code, stdout, _ = invoke(*arguments, "--dry-run", "--json")
    report = json.loads(stdout)
    assert code == 0 and report["rows"] == 20 and report["output_columns"][0] == "text"
    assert "The ferry left at 0" in report["first_prompt"] and report["plan"]["prediction"]
    code, _, message = invoke(*arguments, "--json")
    assert code == 2 and "--json is for --dry-run" in message


def test_a_plan_says_that_max_time_ends_the_run_first(model, table, tmp_path):
    dry = ["run", "-m", model, "-i", table, "-o", tmp_path / "x.parquet", "--prompt-column", "q", "--dry-run"]
    assert "before it has finished a row: give it more time" in invoke(*dry, "--max-time", "0.001s")[1]
    assert "--max-time" not in invoke(*dry, "--max-time", "6h")[1]


def test_a_dry_run_on_a_terminal_ends_with_the_prompt(model, table, tmp_path, monkeypatch, capsys):
    line = [
        "batchgen",
        "run",
        "-m",
        model,
        "-i",
        table,
        "-o",
        str(tmp_path / "x.parquet"),
        "--prompt-column",
        "q",
        "--dry-run",
    ]
    monkeypatch.setattr("sys.argv", line)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert commands.run_cli() == 0
    assert capsys.readouterr().out.endswith("user\nThe ferry left at 0<|im_end|>\n<|im_start|>assistant\n\n")


def test_a_value_whose_quotes_were_forgotten_is_told_of(monkeypatch, capsys):
    monkeypatch.setattr(
        "sys.argv",
        ["batchgen", "run", "-m", "M", "-i", "in", "-o", "out", "--prompt-template", "Classify:", "{{", "text", "}}"],
    )
    assert commands.run_cli() == 2
    assert "needs quotes around it" in capsys.readouterr().err


def test_on_error_fail_stops_but_keeps_rows(model, table, tmp_path):
    code, _, message = run(model, table, tmp_path / "out.parquet", "--on-error", "fail")
    assert code == 1 and "row 3" in message and "null" in message
    assert run(model, table, tmp_path / "out.parquet")[0] == 0


def test_library_run_returns_the_report(model, table, tmp_path):
    report = batchgen.run(
        model, table, tmp_path / "o.parquet", prompt_column="q", max_tokens=2, limit=3, dtype="float32"
    )
    assert report["state"] == "complete" and report["rows_ok"] == 3
    with pytest.raises(TypeError, match="max_token'"):
        batchgen.run(model, table, tmp_path / "p.parquet", max_token=2)


def test_library_run_takes_a_datasets_object(model, tmp_path):
    import datasets

    data = datasets.Dataset.from_dict({"prompt": ["The ferry", "A restaurant"]})
    assert batchgen.run(model, data, tmp_path / "o.jsonl", max_tokens=2, dtype="float32")["rows_ok"] == 2
    assert [json.loads(line)["prompt"] for line in (tmp_path / "o.jsonl").read_text().splitlines()] == data["prompt"]


@pytest.fixture
def broken_models(tmp_path, model):
    import shutil

    unsupported = tmp_path / "falcon"
    unsupported.mkdir()
    (unsupported / "config.json").write_text(
        json.dumps({"architectures": ["FalconForCausalLM"], "model_type": "falcon"})
    )
    (unsupported / "model.safetensors").write_bytes(b"not read")
    corrupt = tmp_path / "corrupt"
    shutil.copytree(model, corrupt)
    weights = corrupt / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    return {"unsupported": str(unsupported), "corrupt": str(corrupt), "empty": str(tmp_path)}


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--prompt-column", "text"], ["'text'", "no such column", "number"]),
        (["--prompt-column", "Q"], ["did you mean 'q'"]),
        (["--prompt-template", "{{ title }}"], ["'title' is not a column"]),
        (["--prompt-template", "{{ q"], ["line 1"]),
        (["--prompt-column", "q", "--prompt-template", "x"], ["exclude each other"]),
        (["-i", "missing.parquet"], ["missing.parquet"]),
        (["-i", "TRUNCATED"], ["truncated.parquet"]),
        (["-i", "BADJSON"], ["bad.jsonl", "line 2"]),
        (["-m", "UNSUPPORTED"], ["FalconForCausalLM", "LlamaForCausalLM"]),
        (["-m", "CORRUPT"], ["model.safetensors"]),
        (["-m", "NOMODEL"], ["config.json"]),
        (["-m", "no/such-model"], ["no/such-model"]),
        (["--cpu-memory", "300MiB", "--prompt-column", "q"], ["no plan fits", "give at least"]),
        (["--cpu-memory", "plenty", "--prompt-column", "q"], ["'plenty' is not a size"]),
        (["--max-tokens", "0"], ["max_tokens must be at least 1"]),
        (["--top-p", "1.5"], ["top_p"]),
        (["--temperature", "-1"], ["temperature"]),
        (["-n", "3"], ["temperature above 0"]),
        (["--shard", "4/4"], ["0 to N-1"]),
        (["--max-time", "soon"], ["'soon' is not a duration"]),
        (["--overwrite", "--retry-failed"], ["exclude each other"]),
        (["--report", "/nowhere/report.json"], ["--report"]),
        (["--trace", "-"], ["--trace - is no file"]),
        (["-o", ""], ["cannot write ''", ".parquet"]),
        (["-o", "out.xlsx", "--prompt-column", "q"], [".parquet", ".jsonl"]),
        (["-o", "/nowhere/at/all/out.parquet", "--prompt-column", "q"], ["/nowhere/at/all"]),
        (["-o", "/proc/out.parquet", "--prompt-column", "q"], ["/proc"]),
        (["--limit", "0", "--prompt-column", "q"], ["--limit"]),
        (["--config", "nowhere.toml"], ["nowhere.toml"]),
        (["--prompt-column", "q", "--id-column", "nested"], ["nested"]),
    ],
    ids=lambda value: " ".join(value)[:40],
)
def test_mistakes_get_one_clear_line(model, table, tmp_path, broken_models, args, words):
    truncated, bad = tmp_path / "truncated.parquet", tmp_path / "bad.jsonl"
    truncated.write_bytes(Path(table).read_bytes()[:-200])
    bad.write_text('{"prompt": "x"}\n{"prompt": \n')
    names = {
        "TRUNCATED": str(truncated), "BADJSON": str(bad), "UNSUPPORTED": broken_models["unsupported"],
        "CORRUPT": broken_models["corrupt"], "NOMODEL": broken_models["empty"],
    }  # fmt: skip
    args = [names.get(a, a) for a in args]
    for flag, value in (("-m", model), ("-i", table), ("-o", str(tmp_path / "out.parquet"))):
        if flag not in args:
            args += [flag, value]
    if "-m" in args and not {"--prompt-column", "--prompt-template"} & set(args):
        args += ["--prompt-column", "q"]
    code, _, message = invoke("run", *args, "--progress", "none")
    assert code in (1, 2)
    assert len(message.strip().splitlines()) == 1, message
    for word in words:
        assert word in message
    assert not (tmp_path / "out.parquet").exists()


def test_usage_errors_and_messages_come_from_the_real_program(model, tmp_path):
    def program(*args):
        return subprocess.run([PROGRAM, *args], capture_output=True, text=True, cwd=tmp_path)

    found = program("run", "-m", model, "-i", "rows.jsonl", "-o", "out.parquet")
    assert found.returncode == 2 and found.stdout == ""
    assert found.stderr.startswith("batchgen: ") and "rows.jsonl" in found.stderr and found.stderr.count("\n") == 1
    found = program("run", "-m", model)
    assert found.returncode == 2 and "--input" in found.stderr and "Traceback" not in found.stderr
    assert program("--version").stdout.startswith("batchgen, version 0.")


def test_help_imports_next_to_nothing():
    """Beside click itself, which is what makes it quick on any machine."""

    def imported(*command):
        told = subprocess.run(
            [sys.executable, "-X", "importtime", *command], check=True, capture_output=True, text=True
        )
        return {line.rpartition("|")[2].strip() for line in told.stderr.splitlines() if line.startswith("import time:")}

    own = imported("-m", "batchgen", "run", "--help") - imported("-c", "import click")
    assert "batchgen.cli.main" in own or "batchgen.cli" in own
    assert len(own) < 80, sorted(own)
    assert not {"torch", "numpy", "pyarrow", "transformers", "highspy"} & own
