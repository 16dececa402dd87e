"""Each option is declared once; whatever takes options has them from there, and no defaults of its own."""

import inspect
import subprocess
import sys
from dataclasses import fields

import pytest
from click.testing import CliRunner

import batchgen
from batchgen.cli.commands import cli
from batchgen.cli.options import read_job_file
from batchgen.core.errors import InputError
from batchgen.core.request import SamplingParams
from batchgen.dataset.source import FORMATS
from batchgen.engine.engine import ON_OVERLONG, Engine
from batchgen.job.checks import check_options
from batchgen.job.command_options import BenchOptions, ConvertOptions, PlanOptions, ProfileOptions, ServeOptions
from batchgen.job.option import GROUPS, TAKERS
from batchgen.job.option_table import OPTIONS, names_of, options_of
from batchgen.job.options import JobOptions

COMMANDS = {
    "run": (JobOptions,),
    "plan": (JobOptions, PlanOptions),
    "bench": (JobOptions, BenchOptions),
    "profile": (ProfileOptions,),
    "convert": (ConvertOptions,),
    "serve-batches": (JobOptions, ServeOptions),
}
# What an engine in memory decides for itself, where a job is planned.
PLANNED = {"model", "admission", "max_num_seqs", "max_num_batched_tokens"}


def declared(taker):
    return {option.name: option for option in options_of(taker)}


def test_declarations_make_sense():
    for option in OPTIONS:
        assert option.takers and option.takers <= set(TAKERS) and option.group in GROUPS, option.name
        assert all(flag.startswith("-") for flag in option.flags)
        assert option.default is None or not option.choices or option.multiple or option.default in option.choices
    for taker in TAKERS:
        names = names_of(taker)
        assert names and len(set(names)) == len(names), taker
    assert declared("run")["on_overlong"].choices == ON_OVERLONG
    assert declared("run")["input_format"].choices == FORMATS


def test_every_field_is_an_option():
    undeclared = {"sampling", "read_before", "job", "steps"}
    for owner in {owner for owners in COMMANDS.values() for owner in owners}:
        takers = [command for command, owners in COMMANDS.items() if owner in owners]
        assert {f.name for f in fields(owner)} - undeclared <= set(names_of(*takers))
    assert set(SamplingParams.names()) - {"choice"} <= set(names_of("run"))
    assert JobOptions("m", None, None, choices=("a", "b")).sampling.choice == ("a", "b")


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_have_the_options_declared_for_them(command):
    parameters = {p.name: p for p in cli.commands[command].params}
    options = declared(command)
    assert set(parameters) - {"config", "as_json", "help_all"} == set(options) - {"as_json"}
    for name, option in options.items():
        parameter = parameters[name]
        assert parameter.required == (option.required and (command, name) != ("plan", "input")), name
        if not parameter.required:
            default = parameter.to_info_dict()["default"]
            assert default == option.default or (not default and not option.default), name
        assert all(set(parameter.opts + parameter.secondary_opts) >= set(flag.split("/")) for flag in option.flags)
        assert list(getattr(parameter.type, "choices", ())) == list(option.choices)
        assert (option.help or "") in (parameter.help or "")


@pytest.mark.parametrize("command", COMMANDS)
def test_help_has_every_option_in_its_group(command):
    whole = "--help-all" if command == "run" else "--help"
    text = CliRunner().invoke(cli, [command, whole], terminal_width=200).output
    titles = [f"\n{group.capitalize()}:\n" for group in GROUPS if f"\n{group.capitalize()}:\n" in text]
    sections = dict(
        zip(titles, text.split("\nOther:")[0].replace("\n\n  -", "  -").split("\n\n")[-len(titles) :], strict=True)
    )
    for option in options_of(command):
        (section,) = [body for title, body in sections.items() if title.strip().rstrip(":").lower() == option.group]
        assert f"{option.flags[-1].partition('/')[0]} " in section + " ", option.name


def test_defaults_of_the_command_line_are_those_of_a_job():
    """As they arrive: nothing given is nothing told."""
    seen = {}

    def run_job(options):
        seen["options"] = options
        return {"state": "stopped"}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("batchgen.job.run.run_job", run_job)
        assert CliRunner().invoke(cli, ["run", "-m", "m", "-i", "i", "-o", "o.parquet", "--report", "-"]).exit_code == 3
    assert seen["options"] == JobOptions("m", "i", "o.parquet", report="-")


def test_run_takes_every_option_of_a_run(monkeypatch):
    monkeypatch.setattr("batchgen.job.run.run_job", lambda options: options)
    defaults = {option.name: option.default for option in options_of("run")}
    given = {name: value for name, value in defaults.items() if name not in ("model", "input", "output", "progress")}
    assert batchgen.run("m", "i", "o", **given, progress="auto") == JobOptions("m", "i", "o")
    with pytest.raises(TypeError, match="no option 'read_before'"):
        batchgen.run("m", "i", "o", read_before=())


def test_an_engine_has_the_options_declared_for_it():
    parameters = dict(inspect.signature(Engine).parameters)
    assert set(parameters) - {"sampling", "on_load"} == set(names_of("engine"))
    for name, option in declared("engine").items():
        assert name in PLANNED or parameters[name].default == option.default, name


def test_a_map_function_takes_its_options_and_no_others():
    options = {o.name: o.default for o in options_of("map", "engine") if o.name != "model"}
    batchgen.MapFunction("m", **options)
    for name in set(names_of("run")) - set(options) - {"model"}:
        with pytest.raises(TypeError, match=f"no option '{name}'"):
            batchgen.MapFunction("m", **{name: None})


def test_lm_eval_takes_its_options_and_has_no_defaults_of_its_own():
    model = pytest.importorskip("batchgen.lmeval.model")
    assert {*model.JOB_OPTIONS, "max_model_len"} == set(names_of("lm_eval"))
    own = inspect.signature(model.BatchgenLM).parameters
    assert all(own[name].default is None for name in set(own) & set(names_of("lm_eval")))
    with pytest.raises(InputError, match="has no 'shard'"):
        model.BatchgenLM("m", shard="0/2")


def test_what_decides_helms_results_is_what_it_always_was():
    """The folder of a deployment's jobs is named after these: with others, jobs done before would not be found."""
    deciding = {option.name for option in options_of("helm") if option.decides_results}
    assert deciding == {
        "model", "lora", "dtype", "weights", "kv_cache_dtype", "state_dtype", "max_model_len",
        "attention_budget", "on_overlong", "seed",
    }  # fmt: skip
    assert set(names_of("helm")) <= set(names_of("run"))


@pytest.mark.parametrize("option", [o for o in options_of("run") if o.choices], ids=lambda o: o.name)
def test_a_choice_that_is_none_is_refused_in_python_too(option):
    with pytest.raises(InputError, match=f"{option.flag} must be one of .*'abacus'"):
        check_options(JobOptions("m", None, None, **{option.name: "abacus"}))


def test_files_are_looked_for_beside_the_job_file(tmp_path):
    for name in ("in.parquet", "template", "schema.json", "plan.json", "t4", "demo"):
        (tmp_path / name).touch()
    job = tmp_path / "job.toml"
    job.write_text(
        'input = "in.parquet"\nprompt_template = "@template"\njson-schema = "schema.json"\nplan = "plan.json"\n'
        'hardware = "t4"\nmodel = "demo"\noutput = "in.parquet"\n'
    )
    assert read_job_file(job) == {
        "input": str(tmp_path / "in.parquet"),
        "prompt_template": f"@{tmp_path / 'template'}",
        "json_schema": str(tmp_path / "schema.json"),
        "plan": str(tmp_path / "plan.json"),
        "hardware": "t4",  # names, before they are files
        "model": "demo",
        "output": "in.parquet",
    }


def test_declarations_are_imported_in_no_time():
    """`batchgen --help` waits for them."""
    heavy = "{'torch', 'transformers', 'pyarrow', 'numpy', 'datasets', 'highspy'}"
    code = f"import sys, batchgen.cli.options; sys.exit(bool({heavy} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
