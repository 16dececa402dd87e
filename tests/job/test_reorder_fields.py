"""`--reorder-fields` in whole jobs: said before the run, part of the fingerprint, and refused where it has no sense."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from command_line import invoke, refused

TEMPLATE = "Review: {{ review }}\nProduct: {{ product }}\nGood?"


@pytest.fixture(scope="module")
def reviews(tmp_path_factory):
    path = tmp_path_factory.mktemp("reviews") / "in.parquet"
    products = [f"lamp {k % 3} of many words in black and white" for k in range(12)]
    pq.write_table(pa.table({"product": products, "review": [f"number {k}" for k in range(12)]}), path)
    return path


def run(model, source, output, template, *options):
    return invoke(
        "run", "-m", model, "-i", source, "-o", output, "--prompt-template", template, "--max-tokens", 2,
        "--dtype", "float32", "--progress", "plain", "--no-chat", *options,
    )  # fmt: skip


def test_the_prompts_are_those_of_the_arranged_template(tiny_models, reviews, tmp_path):
    model = tiny_models("llama")[0]
    code, _, said = run(model, reviews, tmp_path / "out.parquet", TEMPLATE, "--reorder-fields", "review, product")
    assert code == 0 and "the prompts have product (3 values), review (12 values), in this order" in said
    arranged = "Product: {{ product }}\nReview: {{ review }}\nGood?"
    assert run(model, reviews, tmp_path / "wanted.parquet", arranged)[0] == 0
    assert pq.read_table(tmp_path / "out.parquet").equals(pq.read_table(tmp_path / "wanted.parquet"))


def test_rows_of_another_order_are_not_mixed_in(tiny_models, reviews, tmp_path):
    model, output = tiny_models("llama")[0], tmp_path / "out.parquet"
    assert run(model, reviews, output, TEMPLATE)[0] == 0
    code, _, said = run(model, reviews, output, TEMPLATE, "--reorder-fields", "review,product")
    assert code == 2 and "prompt.reorder_fields" in said


@pytest.mark.parametrize("share", [(), ("--share",)])
def test_an_output_keeps_its_order_when_the_input_grows(share, tiny_models, tmp_path):
    model, source, output = tiny_models("llama")[0], tmp_path / "in.jsonl", tmp_path / "out.jsonl"

    def write(rows):
        source.write_text("".join(json.dumps({"product": p, "review": r}) + "\n" for p, r in rows))

    rows = [(f"a long name of a product {k % 3}", f"number {k}") for k in range(12)]
    write(rows)
    options = ("--reorder-fields", "review,product", *share)
    code, _, said = run(model, source, output, TEMPLATE, *options)
    assert code == 0 and "product (3 values), review (12 values)" in said
    rows += [(f"lamp {k}", "as good as all the others that I had before") for k in range(40)]
    write(rows)
    code, _, said = run(model, source, output, TEMPLATE, *options)
    assert code == 0 and "product, review, in the order of the output's rows" in said, said
    arranged = "Product: {{ product }}\nReview: {{ review }}\nGood?"
    assert run(model, source, tmp_path / "wanted.jsonl", arranged)[0] == 0
    assert output.read_bytes() == (tmp_path / "wanted.jsonl").read_bytes()
    code, _, said = run(model, source, output, TEMPLATE, "--reorder-fields", "review,product", "--overwrite")
    assert code == 0 and "review (13 values), product (43 values), in this order" in said, said


def test_contexts_that_are_scored_are_arranged_too(tiny_models, reviews, tmp_path):
    code, _, said = invoke(
        "run", "-m", tiny_models("llama")[0], "-i", reviews, "-o", tmp_path / "out.parquet", "--task", "score",
        "--prompt-template", TEMPLATE, "--choices", "yes", "--choices", "no", "--reorder-fields", "product,review",
        "--dtype", "float32", "--progress", "plain", "--report", tmp_path / "report",
    )  # fmt: skip
    assert code == 0 and "product (3 values), review (12 values)" in said
    assert json.loads((tmp_path / "report").read_text())["rows_failed"] == 0


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--reorder-fields", "product,review"], "is for the columns of a --prompt-template"),
        (["--reorder-fields", "product", "--prompt-template", TEMPLATE], "from 2 to 8 different columns"),
        (["--reorder-fields", "product,price", "--prompt-template", TEMPLATE], "'price' is not a column"),
    ],
)
def test_what_cannot_be_done_is_refused_in_a_line(options, reason, reviews, tmp_path):
    assert reason in refused("run", "-m", "demo", "-i", reviews, "-o", tmp_path / "out.parquet", *options)
