"""The model `batchgen` of lm-evaluation-harness against the harness's own `hf`, in fp32."""

import functools
import importlib.metadata
import json
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet as pq
import pytest

try:
    import tomllib
except ModuleNotFoundError:  # Python 3.10
    import tomli as tomllib

import demo_answers
from demo_answers import evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.model import CachingLM, TemplateLM
from lm_eval.api.registry import get_model
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from processes import start_in_process
from thorough import THOROUGH, quick_or
from tiny_models import make_tiny_model
from tiny_tokenizers import TEXT, make_tiny_sentencepiece_tokenizer, make_tiny_tokenizer

from batchgen.core.errors import BatchgenError, InputError
from batchgen.lmeval.__main__ import main
from batchgen.lmeval.generation import generation
from batchgen.lmeval.model import BatchgenLM
from batchgen.lmeval.texts import Texts
from batchgen.models.tokenizers.parts import TokenizerParts
from batchgen.models.tokenizers.tokenizer import Tokenizer

ROOT = Path(__file__).parents[2]
TASKS = ROOT / "recipes" / "lm_eval"
CONTEXT = 128
NEAR = 1e-3


@pytest.fixture(scope="module")
def llama(tiny_models):
    """A tiny model: its directory, and lm_eval's own `hf` around it."""
    path, model = tiny_models("llama", max_position_embeddings=CONTEXT)
    return path, hf_model(path, model)


def hf_model(path, model, **options):
    from transformers import AutoTokenizer

    options = {"max_length": CONTEXT, "batch_size": 4, "max_gen_toks": 16} | options
    del options["max_gen_toks"]
    return HFLM(model, tokenizer=AutoTokenizer.from_pretrained(path, **bos_option(options)), **options)


def bos_option(options):
    return {"add_bos_token": options["add_bos_token"]} if "add_bos_token" in options else {}


def batchgen_model(path, work_dir, **options):
    options = {"dtype": "float32", "cpu_memory": "4GiB", "progress": "none"} | options
    return BatchgenLM(str(path), work_dir=str(work_dir), **options)


def instances(kind, arguments):
    return [Instance(kind, {}, args, i, metadata=("task", i, 1)) for i, args in enumerate(arguments)]


def words(rng, count):
    return " ".join(rng.choice(TEXT.split()) for _ in range(count))


def reports(work_dir):
    """The jobs' reports, by type of request."""
    return {p.parent.name.rsplit("-", 1)[0]: json.loads(p.read_text()) for p in Path(work_dir).glob("*/report.json")}


def near(found, expected):
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    for (ours, _), (theirs, _) in zip(found, expected, strict=True):
        assert ours == pytest.approx(theirs, abs=NEAR)


@pytest.mark.parametrize("ranks", quick_or(["pipeline"], ["tensor_parallel", "pipeline"]))
def test_a_model_may_run_on_several_processes(ranks, llama, tmp_path):
    requests = instances("loglikelihood", [("The ferry left", " late"), ("Name: The", " Anchor")])
    # For two processes of the size of this one, which has many tests' memory.
    model = batchgen_model(llama[0], tmp_path, cpu_memory="8GiB", **{ranks: 2})
    near(model.loglikelihood(requests), llama[1].loglikelihood(requests))
    (report,) = reports(tmp_path).values()
    assert len(report["processes"]) == 2


# Registration, and what is refused before weights are read


def test_the_entry_point_names_the_model():
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"]
    point = importlib.metadata.EntryPoint("batchgen", groups["lm_eval.models"]["batchgen"], "lm_eval.models")
    assert point.load() is BatchgenLM
    assert issubclass(BatchgenLM, TemplateLM) and get_model("batchgen") is BatchgenLM


def test_batchgen_does_without_lm_eval():
    code = (
        "import sys, batchgen.cli.commands, batchgen.job.run, batchgen.lmeval, batchgen.lmeval.__main__\n"
        "sys.exit('lm_eval' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def launch(monkeypatch, *arguments):
    """The launcher's exit code."""
    monkeypatch.setattr(sys, "argv", ["lm_eval", *map(str, arguments)])
    before = signal.getsignal(signal.SIGTERM)
    try:
        main()
        return 0
    except SystemExit as end:
        return end.code
    finally:
        signal.signal(signal.SIGTERM, before)


def test_the_launcher_is_lm_evals_command_line(monkeypatch, capsys):
    assert launch(monkeypatch, "run", "--help") == 0
    assert "--apply_chat_template" in capsys.readouterr().out
    assert launch(monkeypatch, "--model", "batchgen", "--no-such-flag") == 2
    assert "--no-such-flag" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model_args", "named"),
    [
        ({"dtyp": "float32"}, "no 'dtyp'"),
        ({"pretrained": "/nowhere/model"}, "does not exist"),
        ({"dtype": "float8"}, "float8"),
        ({"max_length": 4096}, "max_model_len"),
        ({"max_length": 64, "max_model_len": 64}, "give one"),
        ({"max_gen_toks": 0}, "max_gen_toks"),
        ({"device": "cuda:3"}, "cuda:3"),
        ({"prefix_token_id": 5000}, "prefix_token_id"),
    ],
)
def test_bad_model_args_are_refused(llama, model_args, named):
    with pytest.raises(InputError, match=named) as caught:
        BatchgenLM(**{"pretrained": str(llama[0]), **model_args})
    assert "\n" not in str(caught.value)


def test_the_launcher_prints_one_line_for_bad_input(monkeypatch, capsys):
    if not THOROUGH:
        without_default_tasks(monkeypatch)
    arguments = [
        "--model",
        "batchgen",
        "--model_args",
        "dtype=float8",
        "--tasks",
        "listings_address",
        "--include_path",
        TASKS,
    ]
    assert launch(monkeypatch, *arguments) == 2
    assert capsys.readouterr().err.strip().splitlines()[-1].startswith("batchgen: dtype 'float8' is not supported")


def test_the_launcher_says_how_to_install_lm_eval(monkeypatch, capsys):
    for name in [name for name in sys.modules if name.split(".")[0] == "lm_eval"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "lm_eval", None)
    assert launch(monkeypatch, "--tasks", "arc_easy") == 2
    assert "pip install 'lm_eval>=0.4.13,<0.5'" in capsys.readouterr().err


def test_model_args_go_before_the_flags_of_lm_eval(llama, tmp_path):
    flags = {"device": "cuda:0", "batch_size": "auto", "max_batch_size": None}
    model = BatchgenLM.create_from_arg_obj({"pretrained": str(llama[0]), "device": "cpu", "batch_size": 4}, flags)
    assert model._work.options["device"] == "cpu"
    text = f"pretrained={llama[0]},max_model_len=64,max_gen_toks=8,work_dir={tmp_path}"
    model = BatchgenLM.create_from_arg_string(text, flags)
    assert (model._work.options["device"], model.max_length, model.max_gen_toks) == ("auto", 64, 8)
    assert model.get_model_info()["work_dir"] == str(tmp_path)


# Keywords of generation


SPECIAL = {"<|im_end|>": 2, "<|endoftext|>": 0}


@pytest.mark.parametrize(
    ("given", "fields", "until"),
    [
        ({}, {"max_tokens": 99}, ()),
        ({"until": "\n", "max_gen_toks": 5}, {"max_tokens": 5, "stop": ["\n"]}, ("\n",)),
        (
            {"until": ["a", "", "<|im_end|>"], "stop": ["b"]},
            {"max_tokens": 99, "stop": ["a", "b"], "stop_token_ids": [2]},
            ("a", "b"),
        ),
        ({"do_sample": False, "temperature": 0.7}, {"max_tokens": 99, "temperature": 0.0}, ()),
        (
            {"temperature": 0.7, "top_p": 0.9, "top_k": 5},
            {"max_tokens": 99, "temperature": 0.7, "top_p": 0.9, "top_k": 5},
            (),
        ),
        ({"do_sample": True}, {"max_tokens": 99, "temperature": 1.0}, ()),
        ({"max_new_tokens": 7, "num_beams": 1, "seed": 3}, {"max_tokens": 7, "seed": 3}, ()),
    ],
)  # fmt: skip
def test_generation_keywords(given, fields, until):
    how = generation(given, 99, SPECIAL, thinks=False)
    assert (how.fields, how.until) == (fields, until)


def test_a_model_that_thinks_is_not_stopped_by_what_ends_its_answer():
    how = generation({"until": ["\n\n", "<|im_end|>"]}, 99, SPECIAL, thinks=True)
    assert how.fields == {"max_tokens": 99, "stop_token_ids": [2]} and how.until == ("\n\n",)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"num_beams": 4}, "num_beams"),
        ({"max_length": 512}, "give max_gen_toks"),
        ({"temperature": "warm"}, "warm"),
        ({"top_p": 7.0}, "top_p"),
        ({"top_p": "x"}, "top_p"),
        ({"max_gen_toks": 0}, "max_tokens"),
    ],
)
def test_bad_generation_keywords_are_named(given, named):
    with pytest.raises(InputError, match=named):
        generation(given, 99, SPECIAL, thinks=False)


# Texts as tokens, as the harness cuts them


@pytest.mark.parametrize("add_bos_token", [None, True, False])
@pytest.mark.parametrize("kind", ["bytes", "sentencepiece"])
def test_contexts_and_continuations_are_cut_as_by_hf(tmp_path, kind, add_bos_token):
    from transformers import AutoTokenizer

    make_tiny_model("llama", tmp_path)
    (make_tiny_tokenizer if kind == "bytes" else make_tiny_sentencepiece_tokenizer)(tmp_path)
    hf = AutoTokenizer.from_pretrained(tmp_path)
    theirs = SimpleNamespace(
        tokenizer=hf, add_bos_token=add_bos_token, backend="causal", prefix_token_id=hf.bos_token_id,
    )  # fmt: skip
    theirs.tok_encode = lambda text, **options: HFLM.tok_encode(theirs, text, **options)
    if kind == "bytes" and add_bos_token:  # this tokenizer adds none by itself: `hf` would leave it out too
        theirs.tok_encode = lambda text, **options: [
            *([hf.bos_token_id] if not (text.startswith(hf.bos_token) or "add_special_tokens" in options) else []),
            *HFLM.tok_encode(theirs, text, **options),
        ]
    theirs._encode_pair = lambda *pair: TemplateLM._encode_pair(theirs, *pair)
    rng = random.Random(0)
    pairs = [("", " an answer"), ("", hf.bos_token + "an answer"), ("A: ", "b"), (hf.bos_token + "A", " b")]
    for _ in range(60):
        text = words(rng, 12)
        cut = rng.randrange(1, len(text))
        pairs.append((text[:cut], text[cut:]))
    expected = []
    theirs._loglikelihood_tokens = lambda requests, **_: expected.extend(requests)
    TemplateLM.loglikelihood(theirs, instances("loglikelihood", pairs), disable_tqdm=True)
    texts = Texts(
        Tokenizer(TokenizerParts.of_transformers(AutoTokenizer.from_pretrained(tmp_path))), add_bos_token, None
    )
    assert [(list(a), list(b)) for a, b in texts.pairs(pairs)] == [(a, b) for _, a, b in expected]


# The same answers as the harness's own class


def choices(rng, count):
    """Contexts with several continuations each, of one token and of more; some longer than the model's context."""
    found = [("", words(rng, 5)), ("", " x")]
    for i in range(count):
        context = words(rng, rng.choice([1, 4, 12, 90])) + rng.choice(["", " "])
        found += [(context, " " + words(rng, rng.randrange(1, 4))) for _ in range(3)]
        found += [(context, letter) for letter in (" a", " b", " c")]
        if i % 3 == 0:
            found.append(found[-1])  # as tasks that repeat a request
    return found


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_loglikelihoods_equal_those_of_hf(tiny_models, tmp_path, family):
    path, model = tiny_models(family, max_position_embeddings=CONTEXT)
    requests = choices(random.Random(1), 12)
    rng = random.Random(2)
    rng.shuffle(requests)
    found = batchgen_model(path, tmp_path).loglikelihood(instances("loglikelihood", requests))
    near(found, hf_model(path, model).loglikelihood(instances("loglikelihood", requests), disable_tqdm=True))
    assert reports(tmp_path)["loglikelihood"]["rows"] < len(requests) / 2, "contexts are there once"


def test_what_is_one_row(llama, tmp_path):
    """Choices of a question; not texts without context, whose first token is all that they share.

    Nothing is run twice.
    """
    requests = [("Which? ", letter) for letter in "abc"] + [("", word) for word in ("one", "two", "three")]
    batchgen_model(llama[0], tmp_path).loglikelihood(instances("loglikelihood", [*requests, *requests]))
    rows = pq.read_table(next(tmp_path.glob("*/requests.parquet"))).to_pylist()
    assert [len(row["continuations"]) for row in rows] == [3, 1, 1, 1]


def test_rolling_loglikelihoods_equal_those_of_hf(llama, tmp_path):
    rng = random.Random(3)
    texts = [(words(rng, n),) for n in (1, 5, 30, 60, 150, 400)] + [("",)]
    ours = batchgen_model(llama[0], tmp_path).loglikelihood_rolling(instances("loglikelihood_rolling", texts))
    theirs = llama[1].loglikelihood_rolling(instances("loglikelihood_rolling", texts[:-1]), disable_tqdm=True)
    assert ours == pytest.approx([*theirs, 0.0], abs=NEAR)
    assert reports(tmp_path)["loglikelihood_rolling"]["rows"] > len(texts), "each window is a row"


def test_generated_texts_equal_those_of_hf(llama, tmp_path):
    rng = random.Random(4)
    kwargs = [
        {"until": ["\n"], "max_gen_toks": 12},
        {"until": [" the", "e"], "max_gen_toks": 24, "do_sample": False},
        {"max_gen_toks": 5, "do_sample": False, "temperature": 0.0},
        {"until": ["<|im_start|>"], "max_gen_toks": 100},
    ]
    requests = [(words(rng, rng.choice([1, 8, 40])), dict(rng.choice(kwargs))) for _ in range(24)]
    requests += requests[:3]
    ours = batchgen_model(llama[0], tmp_path).generate_until(instances("generate_until", requests))
    assert ours == llama[1].generate_until(instances("generate_until", requests), disable_tqdm=True)
    assert len(set(map(len, ours))) > 3
    assert reports(tmp_path)["generate_until"]["rows"] == len({json.dumps(request) for request in requests})


def test_draws_follow_the_seed_and_differ_between_repeats(llama, tmp_path):
    requests = instances("generate_until", [("Once", {"temperature": 1.0, "max_gen_toks": 12})] * 4)
    first = batchgen_model(llama[0], tmp_path / "a", seed=1).generate_until(requests)
    assert len(set(first)) > 1
    assert batchgen_model(llama[0], tmp_path / "b", seed=1).generate_until(requests) == first
    assert batchgen_model(llama[0], tmp_path / "c", seed=2).generate_until(requests) != first


def test_bad_requests_are_refused_with_their_task(llama, tmp_path):
    model = batchgen_model(llama[0], tmp_path)
    with pytest.raises(InputError, match=r"task task: .*num_beams"):
        model.generate_until(instances("generate_until", [("a", {"num_beams": 3})]))
    with pytest.raises(InputError, match=f"max_gen_toks must be below the context of {CONTEXT}"):
        model.generate_until(instances("generate_until", [("a", {"max_gen_toks": CONTEXT})]))
    with pytest.raises(InputError, match="adds no token"):
        model.loglikelihood(instances("loglikelihood", [("a", "")]))
    with pytest.raises(InputError, match="must have 1 to 128"):
        model.loglikelihood(instances("loglikelihood", [("a", " b" * 500)]))
    assert not list(tmp_path.iterdir()), "no job was begun"


def test_rows_that_fail_are_an_error_and_tried_again(llama, tmp_path, monkeypatch):
    requests = instances("loglikelihood", [("a b c", " d")])
    model = batchgen_model(llama[0], tmp_path)
    from batchgen.core.request import Scored
    from batchgen.engine.engine import Engine

    def fails(self, requests, **_):
        for index, request in enumerate(requests):
            yield Scored(index, index, 0, error="no headroom", row=request.row)

    with monkeypatch.context() as patch:
        patch.setattr(Engine, "score", fails)
        with pytest.raises(BatchgenError, match=r"1 of 1 loglikelihood rows failed \(the first: no headroom\)"):
            model.loglikelihood(requests)
    near(model.loglikelihood(requests), llama[1].loglikelihood(requests, disable_tqdm=True))


# Chat templates


def test_chats_are_rendered_as_by_hf(llama, tmp_path):
    chat = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Hello"}]
    ours, theirs = batchgen_model(llama[0], tmp_path), llama[1]
    assert ours.apply_chat_template(chat) == theirs.apply_chat_template(chat)
    begun = [*chat, {"role": "assistant", "content": "Well"}]
    assert ours.apply_chat_template(begun, False) == theirs.apply_chat_template(begun, False)
    assert ours.chat_template(True) == theirs.chat_template(True)
    assert ours.tok_encode("Hello there") == theirs.tok_encode("Hello there")


def test_templates_that_refuse(tmp_path):
    def model(template, **options):
        path = tmp_path / str(len(list(tmp_path.iterdir())))
        make_tiny_model("llama", path)
        (path / "chat_template.jinja").unlink()
        make_tiny_tokenizer(path, chat_template=template)
        return batchgen_model(path, tmp_path / "work", **options)

    template = (
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{{ m['role'] }}: {{ m['content'] }} {{ mood }}\n{% endfor %}"
    )
    user = {"role": "user", "content": "Hello"}
    without = model(template, chat_template_args={"mood": "calm"})
    assert without.apply_chat_template([{"role": "system", "content": "Be short."}, user]) == "user: Hello calm\n"
    with pytest.raises(InputError, match="refuses the messages: never"):
        model("{{ raise_exception('never') }}").apply_chat_template([user])
    with pytest.raises(InputError, match="no chat template"):
        model(None).apply_chat_template([user])


# Whole evaluations


def same_evaluation(ours, theirs):
    for task, samples in theirs["samples"].items():
        for mine, reference in zip(ours["samples"][task], samples, strict=True):
            assert mine["arguments"] == reference["arguments"]
            for a, b in zip(mine["filtered_resps"], reference["filtered_resps"], strict=True):
                if isinstance(b, tuple):
                    near([a], [b])
                else:
                    assert a == (b if isinstance(b, str) else pytest.approx(b, abs=NEAR))
        for name in ("acc,none", "acc_norm,none", "exact_match,stripped"):
            assert ours["results"][task].get(name) == theirs["results"][task].get(name)


@pytest.fixture(scope="module")
def wide(tiny_models):
    """As `llama`, with room for the prompts of the tasks."""
    path, model = tiny_models("llama", max_position_embeddings=1024)
    return path, hf_model(path, model, max_length=1024)


def test_the_local_tasks_give_the_same_scores(wide, tmp_path):
    ours = evaluate(batchgen_model(wide[0], tmp_path))
    same_evaluation(ours, evaluate(wide[1]))
    kinds = reports(tmp_path)
    assert sorted(kinds) == ["generate_until", "loglikelihood", "loglikelihood_rolling"], (
        "a job for each type of request"
    )
    assert kinds["loglikelihood"]["rows"] == 4, "the choices of a question are one row"


def test_chat_system_instruction_and_turns_reach_the_prompts(wide, tmp_path):
    options = {"apply_chat_template": True, "fewshot_as_multiturn": True, "system_instruction": "Copy."}
    tasks = ("listings_match", "listings_address")
    ours = evaluate(batchgen_model(wide[0], tmp_path), tasks, limit=2, **options)
    same_evaluation(ours, evaluate(wide[1], tasks, limit=2, **options))
    prompt = ours["samples"]["listings_address"][0]["arguments"]
    assert "<|im_start|>system\nCopy." in json.dumps(
        prompt["gen_args_0"]["arg_0"] if isinstance(prompt, dict) else prompt[0][0]
    ).replace("\\n", "\n")


def test_lm_evals_cache_is_filled_and_used(llama, tmp_path):
    rng = random.Random(5)
    calls = {
        "loglikelihood": choices(rng, 2),
        "loglikelihood_rolling": [(words(rng, 9),)],
        "generate_until": [(words(rng, 3), {"until": ["\n"], "max_gen_toks": 6})],
    }
    inner = batchgen_model(llama[0], tmp_path / "work")
    cached = CachingLM(inner, str(tmp_path / "cache.db"))
    answers = {kind: getattr(inner, kind)(instances(kind, args)) for kind, args in calls.items()}
    inner._work = None  # whatever is run now fails
    for kind, args in calls.items():
        found = getattr(cached, kind)(instances(kind, args))
        assert [tuple(a) if isinstance(a, list) else a for a in found] == answers[kind]


def without_default_tasks(patch):
    """Keeps the launcher from looking through lm_eval's hundreds of tasks, which takes longer than all the rest."""
    patch.setattr(TaskManager, "__init__", functools.partialmethod(TaskManager.__init__, include_defaults=False))


def launched(arguments):
    """The launcher, in this process."""
    without_default_tasks(pytest.MonkeyPatch())
    sys.argv = ["lm_eval", *arguments]
    main()


@pytest.mark.slow
def test_a_killed_evaluation_goes_on(wide, tmp_path, monkeypatch):
    """Killed while it generates: scores are not computed again, nor texts that were finished."""
    work, limit, tasks = tmp_path / "work", 6, ("listings_match", "listings_address")
    options = f"pretrained={wide[0]},dtype=float32,cpu_memory=4GiB,progress=none,flush_interval=0.001,max_num_seqs=1"
    arguments = ["--model", "batchgen", "--model_args", f"{options},work_dir={work}", "--include_path", TASKS]
    arguments += ["--tasks", ",".join(tasks), "--limit", limit, "--output_path", tmp_path / "results.json"]
    process = start_in_process(launched, [[str(a) for a in arguments]], tmp_path / "log")
    try:
        while not list(work.glob("generate_until-*/results.parquet.batchgen/parts/*.parquet")):
            assert process.is_alive(), (tmp_path / "log").read_text()[-2000:]
            time.sleep(0.002)
    finally:
        process.kill()
        process.join()
    assert not list(work.glob("generate_until-*/results.parquet"))
    without_default_tasks(monkeypatch)
    assert launch(monkeypatch, *arguments) == 0
    found = reports(work)
    assert found["loglikelihood"]["state"] == "already complete"
    assert 0 < found["generate_until"]["rows_resumed"] < found["generate_until"]["rows"]
    written = json.loads(next(tmp_path.glob("**/results*.json")).read_text())["results"]
    undisturbed = evaluate(batchgen_model(wide[0], tmp_path / "again"), tasks, limit)
    for task, values in undisturbed["results"].items():
        for name in ("acc,none", "acc_norm,none", "exact_match,stripped"):
            assert written[task].get(name) == values.get(name)


def test_resume_false_runs_all_of_it_again(llama, tmp_path):
    requests = instances("loglikelihood", choices(random.Random(6), 2))
    first = batchgen_model(llama[0], tmp_path).loglikelihood(requests)
    again = batchgen_model(llama[0], tmp_path).loglikelihood(requests)
    assert again == first and reports(tmp_path)["loglikelihood"]["state"] == "already complete"
    assert batchgen_model(llama[0], tmp_path, resume=False).loglikelihood(requests) == first
    report = reports(tmp_path)["loglikelihood"]
    assert report["state"] == "complete" and report["rows_resumed"] == 0


def same_answers(found, expected):
    assert found.keys() == expected.keys()
    for task, documents in expected.items():
        for ours, theirs in zip(found[task], documents, strict=True):
            assert (ours["prompts"], ours["metrics"]) == (theirs["prompts"], theirs["metrics"]), task
            for a, b in zip(ours["answers"], theirs["answers"], strict=True):
                if isinstance(b, list):
                    near([a], [b])
                else:
                    assert a == (b if isinstance(b, str) else pytest.approx(b, abs=NEAR))


def demo_model(tmp_path):
    return batchgen_model("demo", tmp_path, cpu_memory="6GiB", max_length=1024)


@pytest.mark.slow
def test_the_demo_model_gives_the_answers_of_hf(tmp_path):
    stored = json.loads(demo_answers.ANSWERS.read_text())
    limit = quick_or(1, demo_answers.LIMIT)
    found = demo_answers.answers(evaluate(demo_model(tmp_path), limit=limit))
    same_answers(found, {task: documents[:limit] for task, documents in stored.items()})


@pytest.mark.slow
@pytest.mark.thorough
def test_the_stored_answers_are_those_of_hf(tmp_path):
    """And the scores made of them are ours."""
    theirs = demo_answers.evaluate_hf(demo_answers.LIMIT)
    same_answers(json.loads(demo_answers.ANSWERS.read_text()), demo_answers.answers(theirs))
    same_evaluation(evaluate(demo_model(tmp_path), limit=demo_answers.LIMIT), theirs)
