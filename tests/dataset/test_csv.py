"""Delimiters of CSV files: known by the name, by an option, or found in the file and said."""

import gzip

import pytest

from batchgen.core.errors import InputError
from batchgen.dataset import open_dataset
from batchgen.dataset.prompts import PromptSpec, compile_prompts

ROWS = [
    ["1", "plain"],
    ["2", 'a "quoted" text; with, all | of \t them'],
    ["3", "two\nlines"],
    ["4", ""],
    ["", "Zürich"],
]


def write(path, rows, delimiter, ending="\n", encoding="utf-8"):
    """Fields are quoted where they must be."""

    def field(text):
        quote = any(c in text for c in f'{delimiter}"\n')
        return '"' + text.replace('"', '""') + '"' if quote else text

    text = "".join(delimiter.join(map(field, row)) + ending for row in rows)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode(encoding)))
    else:
        path.write_bytes(text.encode(encoding))
    return path


def rows_of(dataset):
    return [list(row.values()) for _, batch in dataset.batches() for row in batch.to_pylist()]


@pytest.mark.parametrize("delimiter", [";", "\t", "|", ","])
@pytest.mark.parametrize("name", ["in.csv", "in.tsv", "in.csv.gz"])
@pytest.mark.parametrize(("ending", "encoding"), [("\n", "utf-8"), ("\r\n", "utf-8-sig")])
def test_the_delimiter_is_found_and_said_where_it_is_another(tmp_path, name, delimiter, ending, encoding):
    path = write(tmp_path / name, [["id", "prompt"], *ROWS], delimiter, ending, encoding)
    dataset = open_dataset(path)
    assert dataset.schema.names == ["id", "prompt"] and rows_of(dataset) == ROWS
    usual = "\t" if ".tsv" in name else ","
    assert len(dataset.notices) == (delimiter != usual)
    assert all("--csv-delimiter" in line and repr(delimiter) in line for line in dataset.notices)


@pytest.mark.parametrize(
    ("given", "delimiter"), [(";", ";"), ("tab", "\t"), ("\\t", "\t"), ("\t", "\t"), ("§", "§"), (" ", " ")]
)
def test_an_option_says_the_delimiter(tmp_path, given, delimiter):
    dataset = open_dataset(write(tmp_path / "in.csv", [["id", "prompt"], *ROWS], delimiter), csv_delimiter=given)
    assert rows_of(dataset) == ROWS and dataset.notices == ()


@pytest.mark.parametrize("given", ["", ";;", '"', "\n", "tabs"])
def test_an_option_that_is_no_delimiter_is_refused(tmp_path, given):
    with pytest.raises(InputError, match="--csv-delimiter must be one character"):
        open_dataset(write(tmp_path / "in.csv", [["a"]], ","), csv_delimiter=given)


def test_the_option_is_for_csv_alone(tmp_path):
    (tmp_path / "in.jsonl").write_text('{"a": 1}\n')
    with pytest.raises(InputError, match="--csv-delimiter is for CSV"):
        open_dataset(tmp_path / "in.jsonl", csv_delimiter=";")


def test_one_column_of_free_text_stays_one_column(tmp_path):
    texts = [["one; two"], ["a | b | c"], ["none"], ["tab\tbed"]]
    dataset = open_dataset(write(tmp_path / "in.csv", [["prompt"], *texts], ","))
    assert rows_of(dataset) == texts and dataset.notices == ()


def test_a_header_that_looks_like_several_columns_and_is_one_is_said(tmp_path):
    path = tmp_path / "in.csv"
    path.write_text("id;prompt\n1;a;b\n2;c\n")
    dataset = open_dataset(path)
    assert dataset.schema.names == ["id;prompt"]
    assert "read as one column" in dataset.notices[0] and "--csv-delimiter" in dataset.notices[0]
    for spec in (PromptSpec(), PromptSpec(column="prompt"), PromptSpec(template="{{ prompt }}")):
        with pytest.raises(InputError, match="--csv-delimiter"):
            compile_prompts(spec, dataset.schema)
    with pytest.raises(InputError, match=r"line 2: 3 fields, but the header has 2.*--csv-delimiter"):
        open_dataset(path, csv_delimiter=";")


def test_each_file_has_its_delimiter_and_each_delimiter_is_said_once(tmp_path):
    for i, delimiter in enumerate([";", ",", ";", "\t"]):
        write(tmp_path / f"{i}.csv", [["id", "prompt"], [str(i), "x"]], delimiter)
    dataset = open_dataset(tmp_path)
    assert rows_of(dataset) == [[str(i), "x"] for i in range(4)]
    assert [line.split("fields")[0].strip(": ").rpartition("/")[2] for line in dataset.notices] == ["0.csv", "3.csv"]
