"""Standard output and standard error.

Nothing that is shown acts on a terminal, and nothing that cannot be shown stops anything.
"""

import io
import json
import subprocess
import sys
import unicodedata

import pytest
from lost_streams import full, gone

from batchgen.core.errors import one_line
from batchgen.core.screen import ProductLost, Screen, leave_standard_output, put, say, takes_product
from batchgen.core.text import visible

HOSTILE = "".join(map(chr,
[*range(0x20), *range(0x7F, 0xA0), 0x61C, 0x200E, 0x200F, *range(0x2028, 0x202F), *range(0x2066, 0x206A)]))  # fmt: skip


def closed():
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    stream.close()
    return stream


def acts(text):
    """The characters of a text that a terminal would not show but obey."""
    return [c for c in text if unicodedata.category(c) in ("Cc", "Cs", "Zl", "Zp") or unicodedata.bidirectional(c) in
            ("LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI")]  # fmt: skip


def test_what_acts_on_a_terminal_is_spelled_out_and_all_else_stays():
    assert acts(visible(HOSTILE + "\udcff")) == ["\t"]
    assert acts(visible(HOSTILE, lines=True)) == ["\t", "\n"]
    assert visible("\x1b[31mred\x9b0m\r\n\u202egpj.exe") == r"\x1b[31mred\u009b0m\r\n\u202egpj.exe"
    plain = "Grüße, 世界 🏴 می‌خواهم שלום é \\ 100%"
    assert visible(plain) == plain


def test_json_stays_the_same_json():
    values = {HOSTILE: ["\x9b1m", "\u202e", "plain"], "at": 1.5}
    shown = visible(json.dumps(values, indent=2, ensure_ascii=False), lines=True)
    assert json.loads(shown) == values and set(acts(shown)) <= {"\n"}


def test_a_line_is_one_line():
    assert one_line("a\n b\x1b[2J\x85c\u2028d") == r"a b\x1b[2J c d"
    shown = io.StringIO()
    say("row 1 failed:\n\x1b]0;title\x07", shown)
    assert shown.getvalue() == "row 1 failed:\\n\\x1b]0;title\\x07\n"


@pytest.mark.parametrize("make", [gone, full, closed, lambda: None], ids=["reader gone", "full", "closed", "none"])
def test_a_screen_that_takes_nothing_is_let_be(make, monkeypatch):
    stream = make()
    monkeypatch.setattr(sys, "stderr", stream)
    for _ in range(3):
        say("a line")
        print("of a library", file=Screen.over(stream))
    Screen.over(stream).flush()
    assert not Screen.over(stream).isatty()


def test_letters_that_a_screen_does_not_have_are_spelled_out():
    raw = io.BytesIO()
    screen = io.TextIOWrapper(raw, encoding="ascii")
    say("é\udcff", screen)
    assert raw.getvalue() == b"\\xe9\\udcff\n"


@pytest.mark.parametrize("make", [gone, full, lambda: None], ids=["reader gone", "full", "none"])
def test_a_product_that_cannot_be_written_is_told(make, monkeypatch):
    monkeypatch.setattr(sys, "stdout", make())
    with pytest.raises(ProductLost):
        put(["a plan"])
    leave_standard_output()
    if sys.stdout is not None:
        sys.stdout.flush()  # as the interpreter does when it ends


def test_standard_output_that_cannot_be_written_is_known_beforehand(monkeypatch, tmp_path):
    (tmp_path / "in").write_text("")
    with open(tmp_path / "in") as read, open(tmp_path / "out", "w") as written:
        for stream, takes in ((None, False), (read, False), (written, True), (io.StringIO(), True)):
            monkeypatch.setattr(sys, "stdout", stream)
            assert takes_product() == takes


CHILD = """
import os, sys
from batchgen.core.screen import ProductLost, claim_standard_streams, leave_standard_output, put, say
claim_standard_streams()
with open(sys.argv[1], "w") as file:
    file.write("rows")
    file.flush()
    say("a line")
    os.write(2, b"a library's line")
    print("a warning", file=sys.stderr)
    try:
        put(["a plan"])
    except ProductLost:
        file.write(f" in {file.fileno() > 2}, product lost")
leave_standard_output()
"""


def test_nothing_meant_for_a_closed_screen_goes_into_the_first_file_that_is_opened(tmp_path):
    closing = 'exec "$@" <&- >&- 2>&-'
    path = tmp_path / "file"
    subprocess.run(["sh", "-c", closing, "sh", sys.executable, "-c", CHILD, str(path)], check=True)
    assert path.read_text() == "rows in True, product lost"
