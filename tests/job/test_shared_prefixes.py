"""The part of prompt tokens that rows share, estimated from a sample, against the tree of all rows."""

import random
import zlib
from functools import cache
from itertools import chain

import pytest

from batchgen.job.shared_prefixes import SampledPrompt, shared_prefixes


def shared_part(prompts, num_seqs):
    return shared_prefixes(prompts, num_seqs).part


BLOCK, STRETCHES, STRETCH_ROWS = 16, 8, 32


def block(name):
    return [zlib.crc32(repr(name).encode()) % 50_000 + i for i in range(BLOCK)]


def table(count, prefixes):
    """Rows of a block of their own behind the blocks that `prefixes` gives for a random number."""
    rng = random.Random(7)
    return [[*chain.from_iterable(map(block, prefixes(rng))), i, *block(("row", i)), 1] for i in range(count)]


def zipf(rng):
    return [("template", 0), ("product", int(1 / (rng.random() + 1e-3)))]


# name -> (number of rows, the blocks of each), in the order of the input
TABLES = {
    "nothing": (900, lambda rng: []),
    "one text of all": (900, lambda rng: ["text"] * 5),
    "150 products": (900, lambda rng: [("product", rng.randrange(150))] * 4),
    "150 products, sorted": (900, lambda rng: [("product", rng.randrange(150))] * 4),
    "1,500 products of 6,000 rows": (6000, lambda rng: [("product", rng.randrange(1500))] * 4),
    "a text of all, and 40 products": (3000, lambda rng: ["text", ("product", rng.randrange(40))]),
    "half of the rows have a product of 60": (
        2000, lambda rng: [("product", rng.randrange(60))] * 3 if rng.random() < 0.5 else [("own", rng.random())] * 3
    ),
    "products of very unequal numbers": (4000, zipf),
    "as many products as rows, nearly": (3000, lambda rng: [("product", rng.randrange(30_000))] * 4),
}  # fmt: skip


@cache
def rows_of(name):
    rows = table(*TABLES[name])
    return sorted(rows) if name.endswith("sorted") else rows


def of_all(rows):
    """The part of their tokens that rows share in blocks of the tree of all rows."""
    blocks = [tuple(row[: end * BLOCK]) for row in rows for end in range(1, (len(row) - 1) // BLOCK + 1)]
    return (len(blocks) - len(set(blocks))) * BLOCK / sum(map(len, rows))


def sampled(rows):
    """Stretches of neighbouring rows, as a job's sample has them."""
    starts = [k * (len(rows) - STRETCH_ROWS) // (STRETCHES - 1) for k in range(STRETCHES)]
    return [
        SampledPrompt(row, len(row) - 1, k)
        for k, start in enumerate(starts)
        for row in rows[start : start + STRETCH_ROWS]
    ]


@pytest.mark.parametrize("name", TABLES)
def test_a_sample_tells_what_all_rows_share(name):
    rows = rows_of(name)
    assert shared_part(sampled(rows), len(rows)) == pytest.approx(of_all(rows), abs=0.08)


@pytest.mark.parametrize("name", TABLES)
def test_what_all_rows_share_is_counted_where_the_sample_has_them_all(name):
    rows = rows_of(name)[:200]
    prompts = [SampledPrompt(row, len(row) - 1, 0) for row in rows]
    assert shared_part(prompts, len(rows)) == pytest.approx(of_all(rows))


def test_prompts_whose_own_logits_are_all_needed_share_nothing():
    rows = rows_of("one text of all")[:200]
    assert shared_part([SampledPrompt(row, 0, 0) for row in rows], len(rows)) == 0


def test_of_more_rows_than_wait_at_a_time_only_those_count():
    """Few of 100,000 rows with 50,000 products wait together with one of the same product."""
    rows = table(256, lambda rng: [("product", rng.randrange(50))] * 4)
    all_wait, many = shared_part(sampled(rows), 2000), shared_part(sampled(rows), 2_000_000)
    assert many == pytest.approx(all_wait, abs=0.1)
    few = table(256, lambda rng: [("product", rng.randrange(50_000))] * 4)
    assert shared_part(sampled(few), 2_000_000) < 0.3


def test_sorted_rows_share_wherever_they_are():
    """A part of the 2,000,000 rows of 2,000 products wait at a time; sorted, all of them follow one another."""
    few = table(256, lambda rng: [("product", rng.randrange(2000))] * 4)
    wait, are_sorted = (shared_prefixes(sampled(few), 2_000_000, are_sorted=order).part for order in (False, True))
    assert are_sorted > wait and are_sorted > 0.6


@pytest.mark.parametrize(
    ("name", "num_seqs"),
    [("150 products", 6), ("150 products, sorted", 6), ("1,500 products of 6,000 rows", 4), ("one text of all", None)],
)
def test_a_sample_tells_how_many_rows_have_a_prefix(name, num_seqs):
    rows = rows_of(name)
    estimated = shared_prefixes(sampled(rows), len(rows)).num_seqs
    assert estimated is None if num_seqs is None else num_seqs / 1.6 < estimated < num_seqs * 1.6
    assert shared_prefixes(sampled(rows_of("nothing")), 900).num_seqs is None
