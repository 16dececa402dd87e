"""Counts over all results of an output: finish reasons and the most frequent answers."""

import random
from collections import Counter

import pyarrow as pa
import pytest

from batchgen.output.columns import ONE_SAMPLE, SampleColumns, ScoreColumns
from batchgen.output.parts import part_paths, write_part
from batchgen.output.result_counts import AnswerCount, AnswerCounter, ResultCounter, count_parts
from batchgen.output.row_result import RowResult
from batchgen.output.score_result import ScoreResult


def answered(*texts, reason="stop", tokens=3):
    return RowResult(texts, (reason,) * len(texts), 5, (tokens,) * len(texts))


def counted(results, columns=ONE_SAMPLE):
    counter = ResultCounter()
    batch = type(results[0]).to_batch(dict(enumerate(results)))
    for start in range(0, batch.num_rows, 7):
        part = batch.slice(start, 7)
        counter.add(part, columns.answers(None, part))
    return counter.counts()


def test_finish_reasons_of_all_samples_are_counted_with_the_lengths_of_cut_texts():
    failed = RowResult((), (), 0, (), error="no prompt")
    rows = [answered("a", "b"), answered("c", reason="length", tokens=256), failed, answered("d", reason="length")]
    counts = counted(rows, SampleColumns(n=2))
    assert counts.finish_reasons == {"length": 2, "stop": 2} and counts.cut_tokens == (3, 256)
    assert counts.answered == 4


def test_the_ten_most_frequent_answers_are_listed_without_white_space_around_them():
    rows = [answered(f" label {i}\n") for i in range(12) for _ in range(20 - i)]
    counts = counted(rows)
    assert counts.answers == tuple(AnswerCount(f"label {i}", 20 - i) for i in range(10)) and counts.answers_exact


@pytest.mark.parametrize("text", ["answer {}", "a long text that nobody would take for a label of any kind: {}"])
def test_answers_that_are_all_different_are_not_listed(text):
    assert counted([answered(text.format(i)) for i in range(30)]).answers == ()


def test_long_texts_are_no_answers_however_often_they_come():
    assert counted([answered("word " * 40)] * 5).answers == ()


def test_choices_are_the_answers_of_a_job_that_scores():
    columns = ScoreColumns(choices=("yes", "no"))
    rows = [ScoreResult((-1.0, -2.0 + 2 * (i % 3 == 0)), (True, True), (1, 1), 4) for i in range(9)]
    counts = counted(rows, columns)
    assert counts.answers == (AnswerCount("yes", 6), AnswerCount("no", 3)) and counts.finish_reasons == {}
    assert counted(rows, ScoreColumns()).answered == 0


def test_frequent_answers_stay_exact_among_more_different_ones_than_are_kept():
    draw = random.Random(3)
    texts = [f"rare {i}" for i in range(2000)] + ["yes"] * 900 + ["no"] * 300
    draw.shuffle(texts)
    counter = AnswerCounter(most_kept=100)
    for text in ["yes", "no", *texts]:
        counter.add({text: 1})
    shown, exact = counter.most_common(2)
    assert exact and shown == [AnswerCount("yes", 901), AnswerCount("no", 301)]


@pytest.mark.parametrize("seed", range(5))
def test_what_is_said_to_be_exact_is_so_and_other_counts_are_lower_bounds(seed):
    draw = random.Random(seed)
    texts = [f"{int(draw.paretovariate(0.7)) % 500}" for _ in range(4000)]
    counter, truth = AnswerCounter(most_kept=40), Counter(texts)
    exact_so_far = []
    for text in texts:
        counter.add({text: 1})
    for most in range(1, 31):
        shown, exact = counter.most_common(most)
        exact_so_far.append(exact)
        assert all(one.count <= truth[one.answer] for one in shown)
        if exact:
            assert [one.count for one in shown] == [count for _, count in truth.most_common(most)]
    assert exact_so_far[0] and not exact_so_far[-1]


def test_counting_many_different_answers_keeps_few_of_them():
    counter = AnswerCounter(most_kept=1000)
    for i in range(100):
        counter.add({f"{i} {j}": 1 for j in range(500)})
    assert len(counter._counts) <= 1000 and len(counter._missed) <= 1000


def test_a_retried_row_counts_with_its_newest_result(tmp_path):
    write_part(tmp_path, 0, {0: answered("old"), 1: answered("new")})
    write_part(tmp_path, 1, {0: answered("new"), 2: answered("new", reason="length")})
    counts = count_parts(part_paths(tmp_path), ONE_SAMPLE)
    assert counts.answers == (AnswerCount("new", 3),) and counts.finish_reasons == {"stop": 2, "length": 1}


def test_no_results_have_no_counts():
    counter = ResultCounter()
    counter.add(RowResult.to_batch({0: answered("x")}).slice(0, 0), pa.array([], pa.list_(pa.string())))
    assert counter.counts().finish_reasons == {} and counter.counts().answers == ()
