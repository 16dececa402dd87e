"""Build the entity matching recipes from the raw text: a Parquet file of pairs and a few-shot prompt for each dataset.

    python recipes/data_wrangling/build_dataset.py [SOURCE] [--split test] [--output-dir DIR]

SOURCE holds <dataset>/{train,valid,test}.txt (default: the copy in data/ beside this script). A raw line is
"COL name VAL x COL addr VAL y ...<tab>COL name VAL x ...<tab>label". Written are <dataset>_<split>.parquet and
<dataset>/prompt.jinja, whose examples come from the train split alone, whatever --split says.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from build_command import build_command
from few_shot import Prompt

# `class` in Fodors-Zagats numbers the real restaurant behind a record: it is equal on both sides exactly
# where the label is 1, in all 946 pairs. It is the label, not something a restaurant guide prints.
ANNOTATIONS = {"class"}

# Wording, number of examples and seed were chosen on the valid split (see each recipe's README.md). A small model
# compares two strings poorly but copies well: B's line shows what follows a name or a number when it is seen again.
PROMPTS = {
    "Fodors-Zagats": Prompt(
        instruction="""\
Each entry below compares two restaurant listings, A and B. The phone number of B is marked Yes.
The phone number of A is marked Yes when A and B are the same restaurant, and No when they are not.

""",
        # One guide writes 404/351-9533, the other 404-351-9533.
        entry="""\
A: {{ left_name }}, {{ left_addr }}
B: {{ right_name }}, {{ right_addr }}
{{ right_phone | replace("/", "-") }}: Yes
{{ left_phone | replace("/", "-") }}:""",
        shots=24,
        hard=18,
        seed=1,
    ),
    "Beer": Prompt(
        instruction="""\
Each entry compares two beers, A and B. The name of B is marked Yes. The name of A is marked Yes when A and B are \
the same beer, and No when they are not.

""",
        entry="""\
{{ right_beer_name }}: Yes
{{ left_beer_name }}:""",
        shots=24,
        hard=12,
        seed=0,
    ),
    "iTunes-Amazon": Prompt(
        instruction="""\
Each entry compares two songs, A and B. The title and length of B is marked Yes. The title and length of A is marked \
Yes when A and B are the same song, and No when they are not.

""",
        entry="""\
{{ right_song_name }} {{ right_time }}: Yes
{{ left_song_name }} {{ left_time }}:""",
        shots=24,
        hard=18,
        seed=1,
    ),
}

# What the tokeniser that made the raw text did, undone in this order.
_UNDO = [
    (r"\s+", " "),
    (r"^'(em|till) ", r"'\1"),  # 'em press court ' was 'empress court', taken for a contraction
    (r"^(?:` ?|' ?)(.*?) ?'$", r"\1"),  # quoted: ` white house ', ' 3172 peachtree rd. ', '21 club '
    (r" ?\\ ` ", "'"),  # escaped apostrophes: l \ ` orangerie
    (r" ?\\ '", "'"),  # gallagher \ 's
    (r"&#(\d+);", lambda m: chr(int(m[1]))),  # &#40; IPA &#41;
    (r"(?<!\S)(?:``|'')(?!\S)", '"'),
    (r' " ([^"]*) " ', r' "\1" '),
    (r"(?<=\w) ('(?:s|m|d|ll|re|ve)|n't)\b", r"\1"),  # Sky 's, Do n't
    (r"\b([Gg]im|[Ll]em) me\b", r"\1me"),
    (r"\b([Gg]on|[Ww]an) na\b", r"\1na"),
    (r"\b([Gg]ot) ta\b", r"\1ta"),
    (r"(?<=\w) '(?= |$)", "'"),  # Gettin ' Over
    (r"\. \.(?= |$)", "."),  # Brewing Co. .
    (r" ([,.;:!?%)\]}])(?=[ )\]},]|$)", r"\1"),
    (r"([({\[]) ", r"\1"),
    (r"(?<!\S)([$#]) (?=\d)", r"\1"),
    (r"(?<=\d) ?/ ?(?=\d{3}-)", "/"),  # 212 / 921-9494
    (r"(?<=\d) -(?=\d|$)", "-"),  # 404/351 -9533
]


def clean(value: str) -> str:
    """The value as its source had it, as far as the tokeniser's marks can be undone; "" where it is empty."""
    for pattern, replacement in _UNDO:
        value = re.sub(pattern, replacement, value.strip())
    return value


@dataclass(frozen=True)
class Pair:
    """Two records and whether they are the same thing. Both records have the same columns, in file order."""

    left: dict[str, str]
    right: dict[str, str]
    label: bool

    def row(self) -> dict[str, str]:
        """The pair as a template sees it: left_<column>, right_<column>."""
        return {f"{side}_{k}": v for side in ("left", "right") for k, v in getattr(self, side).items()}


def parse_record(text: str) -> dict[str, str]:
    """{lower-cased column: cleaned value} of "COL name VAL x COL addr VAL y", without ANNOTATIONS."""
    head, *fields = re.split(r"(?:^|(?<=\s))COL (\S+) VAL(?=\s|$)", text.strip())
    if head or not fields:
        raise ValueError(f"not a record: {text[:60]!r}")
    columns = zip(fields[::2], fields[1::2], strict=True)
    return {k.lower(): clean(v) for k, v in columns if k.lower() not in ANNOTATIONS}


def read_pairs(path: Path) -> list[Pair]:
    """Every pair of one raw file, in file order. Raises ValueError naming the line that is not a pair."""
    pairs = []
    for number, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        try:
            left, right, label = line.split("\t")
            if label.strip() not in ("0", "1"):
                raise ValueError(f"the label is {label.strip()!r}, not 0 or 1")
            pairs.append(Pair(parse_record(left), parse_record(right), label.strip() == "1"))
        except ValueError as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
    return pairs


def similarity(pair: Pair) -> float:
    """Shared words over all words of the two records, 0 to 1."""
    left, right = (set(re.findall(r"\w+", " ".join(r.values()))) for r in (pair.left, pair.right))
    return len(left & right) / max(len(left | right), 1)


def read_train(folder: Path) -> list[Pair]:
    """The pairs of the train split that are in neither of the others, where some datasets have a few of them again."""
    held_out = [pair for split in ("valid", "test") for pair in read_pairs(folder / f"{split}.txt")]
    known = [(p.left, p.right) for p in held_out] + [(p.right, p.left) for p in held_out]
    return [pair for pair in read_pairs(folder / "train.txt") if (pair.left, pair.right) not in known]


def choose_examples(train: list[Pair], prompt: Prompt) -> list[Pair]:
    """`prompt.shots` pairs in prompt order, half of them matches, drawn by `random.Random(prompt.seed)`.

    `prompt.hard` of them are from the hardest fifth of their class (the matches that look least alike, the
    non-matches that look most alike), the others from the rest of it.
    """
    rng = random.Random(prompt.seed)
    chosen = []
    for label in (True, False):
        # sorted() is stable: ties stay in file order, so the choice is the same everywhere
        ranked = sorted((p for p in train if p.label == label), key=similarity, reverse=not label)
        hardest = max(len(ranked) // 5, prompt.shots // 2)
        chosen += rng.sample(ranked[:hardest], prompt.hard // 2)
        chosen += rng.sample(ranked[hardest:], (prompt.shots - prompt.hard) // 2)
    rng.shuffle(chosen)
    return chosen


def prompt_template(train: list[Pair], prompt: Prompt) -> str:
    """The Jinja template: instruction and examples as plain text, then the entry for the row."""
    return prompt.template((pair.row(), "Yes" if pair.label else "No") for pair in choose_examples(train, prompt))


def to_table(pairs: list[Pair], name: str) -> pa.Table:
    """Columns id ("<name>-0000", by position in the raw file), left_*, right_* (strings), label (bool)."""
    rows = [{"id": f"{name}-{i:04d}", **p.row(), "label": p.label} for i, p in enumerate(pairs)]
    schema = pa.schema([(k, pa.bool_() if k == "label" else pa.string()) for k in rows[0]])
    return pa.Table.from_pylist(rows, schema=schema)


def build(source: Path, output_dir: Path, split: str = "test") -> list[Path]:
    """Write every file; returns their paths. The same source gives the same bytes (with the same pyarrow)."""
    written = []
    for dataset, prompt in PROMPTS.items():
        name = dataset.lower().replace("-", "_")
        (output_dir / name).mkdir(parents=True, exist_ok=True)
        written += [output_dir / f"{name}_{split}.parquet", output_dir / name / "prompt.jinja"]
        pairs = to_table(read_pairs(source / dataset / f"{split}.txt"), f"{name}_{split}")
        pq.write_table(pairs, written[-2])
        template = prompt_template(read_train(source / dataset), prompt)
        written[-1].write_text(template, encoding="utf-8", newline="\n")
    return written


if __name__ == "__main__":
    build_command(build, __doc__)
