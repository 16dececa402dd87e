"""The entity matching recipes: their shipped files, their prompts and their score."""

import functools
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path

import jinja2
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

ROOT = Path(__file__).resolve().parents[2]
RECIPE = ROOT / "recipes" / "data_wrangling"
RAW = RECIPE / "data"
SPLITS = ("train", "valid", "test")
TEST_PAIRS = {"fodors_zagats": (189, 22), "beer": (91, 14), "itunes_amazon": (109, 27)}


sys.path.insert(0, str(RECIPE))  # as for a script there


def _load(path: Path):
    """A script as a module, under a name that clashes with nothing."""
    spec = importlib.util.spec_from_file_location(f"_{path.stem}_script", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses looks its module up there
    spec.loader.exec_module(module)
    return module


build_dataset = _load(RECIPE / "build_dataset.py")
score = _load(RECIPE / "score.py")
azure = _load(ROOT / "benchmarks" / "make_azure_sample.py")
NAMES = {dataset: dataset.lower().replace("-", "_") for dataset in build_dataset.PROMPTS}
each_dataset = pytest.mark.parametrize("dataset", NAMES)


@functools.cache
def _pairs(split: str, dataset: str = "Fodors-Zagats"):
    return build_dataset.read_pairs(RAW / dataset / f"{split}.txt")


def _source(dataset: str) -> str:
    return (RECIPE / NAMES[dataset] / "prompt.jinja").read_text(encoding="utf-8")


def _prompts(split: str, dataset: str = "Fodors-Zagats") -> list[str]:
    template = jinja2.Template(_source(dataset))
    return [template.render(pair.row()) for pair in _pairs(split, dataset)]


# ---- the data


@pytest.fixture(scope="module")
def rebuilt(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("rebuilt")
    build_dataset.build(RAW, folder)
    return folder


@pytest.mark.parametrize("name", TEST_PAIRS)
def test_rebuilding_gives_the_shipped_parquet(rebuilt, name):
    shipped, again = RECIPE / f"{name}_test.parquet", rebuilt / f"{name}_test.parquet"
    table = pq.read_table(shipped)
    assert table.equals(pq.read_table(again), check_metadata=True)
    assert (table.num_rows, sum(table.column("label").to_pylist())) == TEST_PAIRS[name]
    # The writer's version is part of a Parquet file: another pyarrow may lay the same table out otherwise.
    if pq.read_metadata(shipped).created_by == pq.read_metadata(again).created_by:
        assert shipped.read_bytes() == again.read_bytes()


@pytest.mark.parametrize("name", TEST_PAIRS)
def test_rebuilding_gives_the_shipped_prompt(rebuilt, name):
    assert (rebuilt / name / "prompt.jinja").read_bytes() == (RECIPE / name / "prompt.jinja").read_bytes()


def test_the_shipped_columns():
    schema = pq.read_schema(RECIPE / "fodors_zagats_test.parquet")
    sides = [f"{side}_{c}" for side in ("left", "right") for c in ("name", "addr", "city", "phone", "type")]
    assert schema.names == ["id", *sides, "label"]
    assert {schema.field(name).type for name in ["id", *sides]} == {pa.string()}
    assert schema.field("label").type == pa.bool_()
    ids = pq.read_table(RECIPE / "fodors_zagats_test.parquet").column("id").to_pylist()
    assert len(set(ids)) == 189


def test_the_dropped_class_column_is_the_label():
    for split in SPLITS:
        for line in (RAW / "Fodors-Zagats" / f"{split}.txt").read_text(encoding="utf-8").splitlines():
            left, right, label = line.split("\t")
            classes = [re.search(r"COL class VAL (\d+)", side)[1] for side in (left, right)]
            assert (classes[0] == classes[1]) == (label == "1")


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("` white house restaurant '", "white house restaurant"),
        ("` gallagher \\ 's '", "gallagher's"),
        ("` l \\ ` orangerie '", "l'orangerie"),
        ("'21 club '", "21 club"),
        ("'em press court '", "empress court"),
        ("''", ""),
        ("` coyote cafe ( las vegas ) '", "coyote cafe (las vegas)"),
        ("' 3043 buford hwy . '", "3043 buford hwy."),
        ("404/351 -9533", "404/351-9533"),
        ("' 212 / 921-9494 '", "212/921-9494"),
        ("dive !", "dive!"),
        ("India Pale Ale &#40; IPA &#41;", "India Pale Ale (IPA)"),
        ("American Amber / Red Ale", "American Amber / Red Ale"),
        ("Dry Dock Brewing Co. .", "Dry Dock Brewing Co."),
        ("8.70 % ", "8.70%"),
        ("- ", "-"),
        ("The `` Ginger '' A Red Ale", 'The "Ginger" A Red Ale'),
        ("Single Hop # 3 Amber Ale", "Single Hop #3 Amber Ale"),
        ("$ 1.29", "$1.29"),
        ("Pricele $ $", "Pricele $ $"),
        ("Do n't Stop ( feat . Ne-Yo ) [ Remix ]", "Don't Stop (feat. Ne-Yo) [Remix]"),
        ("Gettin ' Over", "Gettin' Over"),
        ("Hip-Hop/Rap , Music", "Hip-Hop/Rap, Music"),
        ("Live At Carnegie Hall / 11/17/2014", "Live At Carnegie Hall / 11/17/2014"),
    ],
)
def test_clean_undoes_the_tokeniser(raw, expected):
    assert build_dataset.clean(raw) == expected


@each_dataset
def test_cleaning_keeps_every_letter_and_digit(dataset):
    cleaned, raw = [], []
    for split in SPLITS:
        for pair in _pairs(split, dataset):
            cleaned += [value for record in (pair.left, pair.right) for value in record.values()]
        text = (RAW / dataset / f"{split}.txt").read_text(encoding="utf-8")
        text = re.sub(r"COL class VAL \d+ ", "", text)
        raw += [v for v in re.findall(r"VAL (.*?)(?=COL |\t)", text)]
    assert len(cleaned) == len(raw) > 1000
    for value, source in zip(cleaned, raw, strict=True):
        source = re.sub(r"&#\d+;", "", source)
        assert re.sub(r"[\W_]", "", value) == re.sub(r"[\W_]", "", source)
        assert build_dataset.clean(value) == value
        assert not re.search(r"\\|^[`']|&#|\s{2}|\s$", value), value


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("COL name VAL a\tCOL name VAL b\n", "line 2"),
        ("COL name VAL a\tCOL name VAL b\t2\n", "line 2.*not 0 or 1"),
        ("name a\tCOL name VAL b\t1\n", "line 2.*not a record"),
    ],
)
def test_a_line_that_is_no_pair_is_named(tmp_path, line, complaint):
    path = tmp_path / "test.txt"
    path.write_text("COL name VAL a\tCOL name VAL b\t0\n" + line)
    with pytest.raises(ValueError, match=complaint):
        build_dataset.read_pairs(path)


# ---- the prompt


def _fixed_part(dataset: str) -> str:
    """The template's text before the row's own entry."""
    return _source(dataset).removesuffix(build_dataset.PROMPTS[dataset].entry + "\n")


@each_dataset
def test_every_prompt_starts_with_the_instruction_and_the_examples(dataset):
    fixed, prompts = _fixed_part(dataset), _prompts("test", dataset) + _prompts("valid", dataset)
    assert not re.search(r"\{[{%#]", fixed)
    assert all(prompt.encode().startswith(fixed.encode()) for prompt in prompts)
    assert len(re.findall(r": (?:Yes|No)\n\n", fixed)) == build_dataset.PROMPTS[dataset].shots
    assert len(fixed) > 10 * max(len(prompt) - len(fixed) for prompt in prompts)


def test_a_prompt_ends_with_the_cue_and_shows_the_pair():
    pair, prompt = _pairs("test")[1], _prompts("test")[1]
    assert prompt.endswith(
        "\n\nA: yujean kang's gourmet chinese cuisine, 67 n. raymond ave.\n"
        "B: yujean kang's, 67 n. raymond ave.\n818-585-0855: Yes\n818-585-0855:"
    )
    assert pair.left["phone"] == "818/585-0855"


@each_dataset
def test_the_template_uses_only_columns_of_the_shipped_parquet(dataset):
    strict = jinja2.Environment(undefined=jinja2.StrictUndefined).from_string(_source(dataset))
    table = pq.read_table(RECIPE / f"{NAMES[dataset]}_test.parquet")
    without_label = table.drop_columns(["label", "id"]).to_pylist()
    assert [strict.render(row) for row in without_label] == _prompts("test", dataset)


@functools.cache
def _examples(dataset: str):
    """The pairs of the training set, and those that the prompt has as examples."""
    train = build_dataset.read_train(RAW / dataset)
    return train, build_dataset.choose_examples(train, build_dataset.PROMPTS[dataset])


@each_dataset
def test_no_example_of_the_prompt_is_in_valid_or_test(dataset):
    (train, examples), prompt = _examples(dataset), build_dataset.PROMPTS[dataset]
    assert len(examples) == prompt.shots and sum(e.label for e in examples) == prompt.shots // 2
    assert all(e in train for e in examples)
    held_out = _pairs("valid", dataset) + _pairs("test", dataset)
    for example in examples:
        for pair in held_out:
            assert (example.left, example.right) not in ((pair.left, pair.right), (pair.right, pair.left))
    fixed, entry = _fixed_part(dataset), jinja2.Template(prompt.entry)
    assert all(entry.render(e.row()) in fixed for e in examples)


def test_no_example_reads_like_a_pair_of_valid_or_test():
    fixed, entry = _fixed_part("Fodors-Zagats"), jinja2.Template(build_dataset.PROMPTS["Fodors-Zagats"].entry)
    assert not any(entry.render(pair.row()) in fixed for pair in _pairs("valid") + _pairs("test"))


@each_dataset
def test_examples_hold_hard_cases_of_both_kinds(dataset):
    (train, examples), prompt = _examples(dataset), build_dataset.PROMPTS[dataset]
    assert any(e.label and next(iter(e.left.values())) != next(iter(e.right.values())) for e in examples)
    likeness = sorted(build_dataset.similarity(p) for p in train if not p.label)
    hardest_fifth = likeness[-(len(likeness) // 5)]
    hard = [e for e in examples if not e.label and build_dataset.similarity(e) >= hardest_fifth]
    assert len(hard) >= prompt.hard // 2


# ---- the score


def _output(path: Path, labels, texts, errors=None) -> str:
    texts, errors = (pa.array(c, pa.string()) for c in (texts, errors or [None] * len(labels)))
    pq.write_table(pa.table({"label": pa.array(labels), "text": texts, "error": errors}), path)
    return str(path)


def test_score_of_a_perfect_and_of_an_all_wrong_output(tmp_path):
    labels = [True, False, True, False, False]
    right = [" Yes" if label else " No" for label in labels]
    wrong = [" No" if label else " Yes" for label in labels]
    result = score.score_file(_output(tmp_path / "right.parquet", labels, right))
    assert (result["precision"], result["recall"], result["f1"]) == (1, 1, 1)
    assert (result["true_positives"], result["true_negatives"], result["rows"]) == (2, 3, 5)
    result = score.score_file(_output(tmp_path / "wrong.parquet", labels, wrong))
    assert (result["precision"], result["recall"], result["f1"]) == (0, 0, 0)
    assert (result["false_positives"], result["false_negatives"]) == (3, 2)


def test_rows_without_a_usable_answer_count_as_no_and_are_reported(tmp_path):
    labels = [1, 1, 1, 0, 0, 1, 0]
    texts = ["Yes", "yes.", "maybe", "NO", "Yes, they are", None, ""]
    errors = [None, None, None, None, None, "the prompt is empty", None]
    result = score.score_file(_output(tmp_path / "out.parquet", labels, texts, errors))
    assert (result["true_positives"], result["false_positives"]) == (2, 1)
    assert (result["false_negatives"], result["true_negatives"]) == (2, 2)
    assert (result["failed"], result["unparsable"]) == (1, 2)
    assert result["precision"] == pytest.approx(2 / 3) and result["recall"] == pytest.approx(1 / 2)
    assert result["f1"] == pytest.approx(4 / 7)


def test_a_failed_row_counts_as_no_even_with_a_text(tmp_path):
    result = score.score_file(_output(tmp_path / "out.parquet", [True], ["Yes"], ["stopped halfway"]))
    assert (result["false_negatives"], result["failed"], result["unparsable"]) == (1, 1, 0)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (" Yes", True), ("yes\n", True), ("**YES**", True), ('"No"', False), ("no, they differ", False),
        ("Yesterday", None), ("Not sure", None), ("", None), ("The answer is yes", None),
    ],
)  # fmt: skip
def test_parse_answer(text, answer):
    assert score.parse_answer(text) is answer


def _run_score(*args: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, RECIPE / "score.py", *args], capture_output=True, text=True)


def test_score_prints_aligned_lines_or_json(tmp_path):
    path = _output(tmp_path / "out.parquet", [True, False], ["Yes", "Yes"])
    done = _run_score(path)
    assert done.returncode == 0 and re.search(r"^f1 +0\.667$", done.stdout, re.MULTILINE)
    assert len({len(line) for line in done.stdout.splitlines()}) == 1
    assert json.loads(_run_score(path, "--json").stdout)["f1"] == pytest.approx(2 / 3)


def test_a_wrong_file_gets_one_line_and_a_failing_exit(tmp_path, monkeypatch, capsys):
    text = tmp_path / "a.txt"
    text.write_text("label,text\n1,Yes\n")
    lists = tmp_path / "n.parquet"
    two_samples = {"label": [True], "text": [["Yes", "No"]], "error": pa.nulls(1, pa.string())}
    pq.write_table(pa.table(two_samples), lists)
    for path, complaint in [
        (tmp_path / "missing.parquet", "missing.parquet"),
        (text, "not a Parquet file"),
        (RECIPE / "fodors_zagats_test.parquet", "no column 'text'"),
        (lists, "'text' must hold one text a row"),
        (_output(tmp_path / "empty.parquet", pa.array([], pa.bool_()), []), "no rows"),
        (_output(tmp_path / "label.parquet", [True, None], ["Yes", "No"]), "row 1: the label is None"),
        (_output(tmp_path / "seven.parquet", [0, 7], ["Yes", "No"]), "row 1: the label is 7"),
    ]:
        monkeypatch.setattr(sys, "argv", ["score.py", str(path)])
        with pytest.raises(SystemExit) as ended:
            score.main()
        assert len(ended.value.code.splitlines()) == 1 and complaint in ended.value.code
        assert capsys.readouterr().out == ""
    done = _run_score(str(path))
    assert done.returncode == 1 and done.stdout == "" and done.stderr == f"{ended.value.code}\n"


# ---- the trace sample of the benchmarks


def test_the_azure_sample_is_a_seeded_draw_in_order(tmp_path):
    trace = tmp_path / "trace.csv"
    rows = [(i, 2 * i) for i in range(1000)]
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(f"t,{a},{b}\n" for a, b in rows))
    drawn = azure.draw(trace, 50, seed=0)
    assert drawn == azure.draw(trace, 50, seed=0) != azure.draw(trace, 50, seed=1)
    assert len(set(drawn)) == 50 and set(drawn) <= set(rows) and drawn != sorted(drawn)
    with pytest.raises(ValueError, match="1000 rows"):
        azure.draw(trace, 1001, seed=0)
    trace.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="ContextTokens"):
        azure.draw(trace, 1, seed=0)


def test_the_shipped_azure_sample():
    lines = azure.DEFAULT_OUTPUT.read_text().splitlines()
    assert lines[0] == "ContextTokens,GeneratedTokens" and len(lines) == 513
    lengths = [tuple(map(int, line.split(","))) for line in lines[1:]]
    assert min(map(min, lengths)) > 0
    assert max(n for n, _ in lengths) > 1024 and max(n for _, n in lengths) > 256  # not clipped
