"""What a job asks for: lengths as values, and their estimate from a sample of the rows."""

import json
import random
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.core.errors import InputError
from batchgen.core.request import SamplingParams
from batchgen.core.typed_json import read_typed
from batchgen.core.workload import Lengths, Workload
from batchgen.job.options import JobOptions
from batchgen.job.step_source import open_rows
from batchgen.job.workload import measure_workload
from batchgen.models.files import resolve_model
from batchgen.models.pooling import VectorSpec
from batchgen.models.tokenizers.loading import load_tokenizer

CONTEXT = 512
WORDS = ("ferry", "harbour", "onions", "captain", "quay", "lemons", "timetable", "winter", "islands", "slate")


class TestLengths:
    @given(st.lists(st.integers(1, 5000), min_size=1, max_size=2000))
    def test_quantiles_keep_the_mean(self, counts):
        lengths = Lengths.of(counts)
        assert len(lengths.values) <= 64
        assert abs(lengths.mean - sum(counts) / len(counts)) <= 0.5 + 1e-6  # each value is rounded
        assert min(counts) <= lengths.values[0] and lengths.max <= max(counts)

    def test_a_long_tail_counts(self):
        for counts in ([10] * 990 + [4000] * 10, [1] * 63 + [5000] * 2):
            assert Lengths.of(counts).mean == pytest.approx(sum(counts) / len(counts), abs=0.5)
            assert Lengths.of(counts).quantile(0.5) == counts[0] and Lengths.of(counts).max > 2000

    def test_few_counts_are_kept_as_they_are(self):
        assert Lengths.of([5, 1, 3]).values == (1, 3, 5)

    def test_quantiles(self):
        lengths = Lengths(tuple(range(1, 101)))
        assert [lengths.quantile(share) for share in (0, 0.05, 0.5, 0.95, 1)] == [1, 5, 50, 95, 100]
        assert lengths.max == 100 and lengths.mean == 50.5
        assert lengths.mean_square == pytest.approx(sum(n * n for n in range(1, 101)) / 100)

    @pytest.mark.parametrize("values", [(), (-1, 4)])
    def test_what_is_no_length(self, values):
        with pytest.raises(InputError, match="one or more token counts"):
            Lengths(values)


class TestWorkload:
    def test_a_shared_prefix_is_not_computed(self):
        assert Workload.uniform(10, 512, 32, 200).computed_prompt_len == 312

    def test_survives_json(self):
        workload = Workload(900, Lengths((64, 200, 900)), Lengths((4, 40, 128)), 128, shared_prefix_len=100.5)
        assert read_typed(Workload, json.loads(json.dumps(workload.to_json()))) == workload

    @pytest.mark.parametrize(
        ("values", "words"),
        [
            ((0, 16, 4), "at least 1 row, not 0"),
            ((-3, 16, 4), "at least 1 row, not -3"),
            ((5, 0, 4), "at least 1 token"),
            ((5, 16, 0), "at least 1 token"),
            ((5, 16, 4, 16), "a shared prefix of 16 tokens does not fit prompts of 16"),
            ((5, 16, 4, -1), "does not fit"),
        ],
    )
    def test_what_is_no_workload(self, values, words):
        with pytest.raises(InputError) as caught:
            Workload.uniform(*values)
        assert words in str(caught.value) and "\n" not in str(caught.value)

    def test_outputs_beyond_their_limit(self):
        with pytest.raises(InputError, match="outputs of 9 tokens exceed the limit of 8"):
            Workload(5, Lengths((16,)), Lengths((9,)), 8)


@pytest.fixture(scope="module")
def tokenizer(tiny_models):
    return load_tokenizer(resolve_model(str(tiny_models("llama")[0])))


@pytest.fixture
def measure(tokenizer, tmp_path):
    """measure(rows or path, ...) -> (workload, whether its output lengths are known)."""

    def measure(rows, *, max_tokens=8, rows_left=..., finished=(), expected=None, sampling=None, head=None, **options):
        if isinstance(rows, list):
            path = tmp_path / "rows.parquet"
            pq.write_table(pa.table({"prompt": pa.array(rows, pa.string())}), path, row_group_size=500)
            rows = path
        sampling = replace(sampling or SamplingParams(), max_tokens=max_tokens)
        job = JobOptions("tiny", str(rows), None, sampling=sampling, expected_output_len=expected, **options)
        source = replace(open_rows(job), head=head)
        return measure_workload(
            source,
            tokenizer,
            job,
            CONTEXT,
            rows_left=source.dataset.num_rows if rows_left is ... else rows_left,
            finished_output_lens=finished,
        )[:2]

    return measure


def sentences(count, shortest=1, longest=30, seed=0):
    rng = random.Random(seed)
    return [" ".join(rng.choices(WORDS, k=rng.randint(shortest, longest))) for _ in range(count)]


def counts(tokenizer, rows):
    return [len(tokens) for tokens in tokenizer.encode_batch(rows)]


def test_lengths_are_those_of_the_tokens(measure, tokenizer):
    rows = sentences(50)
    workload, known = measure(rows)
    assert workload.prompt_len.values == tuple(sorted(counts(tokenizer, rows)))
    assert (workload.num_seqs, workload.output_len.values, workload.max_output_len) == (50, (8,) * 50, 8)
    assert not known
    assert measure(rows, sampling=SamplingParams(ignore_eos=True))[1] and measure(rows, max_tokens=1)[1]


def test_each_text_of_a_line_for_the_embeddings_endpoint_is_a_sequence(measure, tokenizer, tmp_path):
    rows = sentences(6)
    lines = [
        {"custom_id": str(i), "method": "POST", "url": "/v1/embeddings", "body": {"model": "m", "input": texts}}
        for i, texts in enumerate([rows[0], rows[1:]])
    ]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    workload, _ = measure(path, task="embed", head=VectorSpec("last"))
    assert workload.prompt_len.values == tuple(sorted(counts(tokenizer, rows))) and workload.num_seqs == 6


def test_any_format_gives_the_same(measure, tmp_path):
    rows = sentences(40)
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": row}) + "\n" for row in rows))
    assert measure(path) == measure(rows)


def test_outputs_end_with_the_context(measure, tokenizer):
    rows = sentences(20, 10, 100)
    workload, _ = measure(rows, max_tokens=500)
    assert workload.output_len.values == tuple(sorted(CONTEXT - n for n in counts(tokenizer, rows)))
    assert workload.max_output_len == workload.output_len.max


def test_rows_that_fail_are_left_out(measure, tokenizer):
    good = sentences(30)
    workload, _ = measure([None, *good[:10], "", "onions " * 600, *good[10:], None])
    assert workload.num_seqs == 30
    assert workload.prompt_len.values == tuple(sorted(counts(tokenizer, good)))


@pytest.mark.parametrize("side", ["left", "right"])
def test_prompts_are_cut_as_they_will_be(measure, tokenizer, side):
    short = sentences(9)
    workload, _ = measure([*short, "onions " * 600], on_overlong=f"truncate-{side}", max_tokens=100)
    assert workload.num_seqs == 10
    assert workload.prompt_len.values == (*sorted(counts(tokenizer, short)), CONTEXT - 100)
    assert workload.output_len.values == (100,) * 10


def test_rows_of_an_openai_batch_have_their_own_limits(measure, tmp_path, tokenizer):
    def line(i, **body):
        body = {"model": "m", "messages": [{"role": "user", "content": "The ferry"}]} | body
        return {"custom_id": str(i), "method": "POST", "url": "/v1/chat/completions", "body": body}

    lines = [line(i, max_tokens=3 + i) for i in range(4)] + [line(4, max_tokens=50, n=3, temperature=0.7)]
    lines += [line(5, tools=[{"type": "function"}]), line(6)]  # one that fails, one that leaves it to the job
    path = tmp_path / "batch.jsonl"
    path.write_text("".join(json.dumps(entry) + "\n" for entry in lines))
    workload, _ = measure(path, max_tokens=20)
    assert workload.output_len.values == (3, 4, 5, 6, 20, 50) and workload.max_output_len == 50
    assert workload.num_seqs == 5 + 3
    chat = len(tokenizer.encode_chat([{"role": "user", "content": "The ferry"}]))
    assert set(workload.prompt_len.values) == {chat}


def test_samples_share_their_rows_prompt(measure):
    rows = sentences(64, 20, 30)
    sampling = SamplingParams(n=4, temperature=0.7)
    workload, _ = measure(rows, sampling=sampling)
    assert workload.num_seqs == 4 * 64
    # Three of four take over all but the last block of 16 tokens.
    assert 0.75 * (workload.prompt_len.mean - 16) <= workload.shared_prefix_len < 0.75 * workload.prompt_len.mean
    assert measure(rows, sampling=sampling, share_prefixes=False)[0].shared_prefix_len == 0


def prefix_of(tokenizer, tokens):
    """A text of at least so many tokens, and how many it has."""
    text = ""
    rng = random.Random(4)
    while counts(tokenizer, [text or " "])[0] < tokens:
        text += rng.choice(WORDS) + " "
    return text, counts(tokenizer, [text])[0]


def test_a_common_prefix_is_found(measure, tokenizer):
    text, length = prefix_of(tokenizer, 100)
    rows = [text + row for row in sentences(120, 4, 12)]
    shared = measure(rows)[0].shared_prefix_len
    assert length - 17 <= shared <= length + 2  # shared by blocks of 16
    assert measure(rows, share_prefixes=False)[0].shared_prefix_len == 0


def test_a_prefix_shared_by_half_of_the_rows_counts_half(measure, tokenizer):
    text, length = prefix_of(tokenizer, 160)
    rows = sentences(200, 3, 10)
    rows = [text + row if i % 2 else row for i, row in enumerate(rows)]
    assert measure(rows)[0].shared_prefix_len == pytest.approx(length / 2, rel=0.15)


def test_rows_without_a_common_prefix(measure):
    rng = random.Random(1)
    rows = [f"{rng.random()} {row}" for row in sentences(100, 20, 40)]
    assert measure(rows)[0].shared_prefix_len == 0


def test_short_rows_before_long_ones_that_share_nearly_all(measure, tokenizer):
    """What the later rows share is more than the mean prompt has."""
    text, length = prefix_of(tokenizer, 320)
    rows = ["Yes"] * 128 + [f"{text}{i}" for i in range(128)]
    shared = measure(rows)[0].shared_prefix_len
    assert shared == pytest.approx(length / 2, rel=0.1)


def test_a_large_parquet_file_is_sampled_over_its_whole_length(measure, tokenizer):
    rows = sentences(3000, 2, 6) + sentences(3000, 30, 60)
    workload, _ = measure(rows)
    assert workload.num_seqs == 6000
    for part, options in ((rows, {}), (rows[3000:], {"shard": "1/2"}), (rows[:700], {"limit": 700})):
        workload, _ = measure(rows, **options)
        lengths = counts(tokenizer, part)
        assert workload.num_seqs == len(part)
        assert workload.prompt_len.mean == pytest.approx(sum(lengths) / len(lengths), rel=0.1)
        assert workload.prompt_len.quantile(0.25) == pytest.approx(sorted(lengths)[len(lengths) // 4], rel=0.3)


def test_shards_of_a_small_file(measure, tokenizer):
    rows = sentences(90)
    workload, _ = measure(rows, shard="2/3", limit=60)
    assert workload.prompt_len.values == tuple(sorted(counts(tokenizer, rows[40:60])))
    assert workload.num_seqs == 20


def test_finished_rows_tell_the_output_lengths(measure):
    rows = sentences(60)
    few, known = measure(rows, finished=[2] * 31)
    assert few.output_len.values == (8,) * 60 and not known
    enough, known = measure(rows, finished=[2, 4] * 16)
    assert enough.output_len.mean == 3 and enough.max_output_len == 8 and known
    # Of rows that had other limits, or stopped at once.
    odd, _ = measure(rows, finished=[0] * 16 + [100] * 16)
    assert set(odd.output_len.values) == {1, 8}


def test_an_expected_output_length_is_taken_at_its_word(measure):
    rows = sentences(60)
    workload, known = measure(rows, expected=5, finished=[2] * 100)
    assert set(workload.output_len.values) == {5} and workload.max_output_len == 8 and known
    assert set(measure(rows, expected=500)[0].output_len.values) == {8}


def test_texts_that_are_choices_are_as_long_as_the_longest_of_these(measure, tokenizer):
    choices = ("yes", "probably not")
    workload, known = measure(sentences(60), max_tokens=100, sampling=SamplingParams(choice=choices))
    longest = max(len(tokens) for tokens in tokenizer.encode_batch(choices, add_special_tokens=False))
    assert set(workload.output_len.values) == {longest + 1} and workload.max_output_len == 100 and known
    cut, _ = measure(sentences(60), max_tokens=1, sampling=SamplingParams(choice=choices))
    assert set(cut.output_len.values) == {1}


def test_a_model_that_thinks_before_it_chooses_may_take_all_its_tokens(measure, monkeypatch):
    monkeypatch.setattr("batchgen.job.workload.Thinking.of", lambda tokenizer: object())
    workload, known = measure(sentences(60), max_tokens=100, sampling=SamplingParams(choice=("yes", "no")))
    assert set(workload.output_len.values) == {100} and not known


def test_only_the_rows_that_are_left_count(measure):
    rows = sentences(60)
    assert measure(rows, rows_left=7)[0].num_seqs == 7
    assert measure(rows, rows_left=None)[0].num_seqs > 1000  # a stream: nobody knows


@pytest.mark.parametrize(
    ("rows", "reason"),
    [([None, ""] * 10, "null"), (["", None], "the prompt is empty"), (["onions " * 600] * 3, "too long")],
)
def test_no_row_that_can_be_run(measure, rows, reason):
    with pytest.raises(InputError) as caught:
        measure(rows)
    said = str(caught.value)
    assert f"none of the {len(rows)} rows" in said and reason in said and "\n" not in said
