"""Templates within limits: whatever one does, its row alone fails, and this process neither waits nor grows."""

import os
import resource
import signal
import threading
from datetime import date
from decimal import Decimal
from signal import pthread_sigmask as mask

import pytest

from batchgen.core import templates
from batchgen.core.templates import SafeTemplate, TemplateFailed, TemplateLimits, TemplateSyntax

LIMITS = TemplateLimits(seconds=0.1, memory_bytes=64 << 20, length=1 << 20)

# What makes a row take too long or too much: each of them would fill the memory, or run for hours.
ENDLESS = [
    "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "{% for i in range(100000) %}{% for j in range(100000) %}{{ j }}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% set ns = namespace(x=q) %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x=[q]) %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}{{ ns.x }}",
    "{{ range(100000) | map('center', 100000) | join }}",
    "{{ q * n }}",
    "{{ [q] * n }}",
    "{{ 7 ** n }}",
    "{{ '%9999999999d' % 1 }}",
    "{{ '%*d' % (n, 1) }}",
    "{{ '{:>9999999999}'.format(n) }}",
    "{{ '{:>{}}'.format(1, n) }}",
    "{{ q.ljust(n) }}",
    "{{ q | center(n) }}",
    "{{ q | indent(n) }}",
    "{{ q | replace('t', q * 9999) | replace('t', q * 9999) | replace('t', q * 9999) }}",
    "{{ [q] | batch(n, q) | list }}",
    "{{ lipsum(n) }}",
    "{{ 'a' * 10 ** 10 }}",
    "{{ 'a' | center(10 ** 10) }}",
    "{{ 'a' * 2000000 }}",
]


@pytest.mark.parametrize(
    ("kind", "text"), [*(("rows", text) for text in ENDLESS), *(("chats", text) for text in ENDLESS[5:8])]
)
def test_a_row_that_takes_too_much_fails_alone(kind, text):
    row = {"q": "text", "n": 10**10}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    guarded = f"{{% if n %}}{text}{{% else %}}fine{{% endif %}}"
    found = list(SafeTemplate(kind, guarded, LIMITS).render([{"n": 0}, row, {"n": 0}]))
    assert [found[0], found[2]] == ["fine", "fine"]
    assert isinstance(found[1], TemplateFailed) and "shorten its values" in str(found[1]) and "\n" not in str(found[1])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 32 << 10, "KiB"


def test_what_a_template_uses_is_found_within_the_limits():
    for text in ENDLESS[5:]:
        assert set(SafeTemplate("rows", text, LIMITS).use().variables) <= {"q", "n"}


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}", "RecursionError"),
        ("{{ range(10 ** 9) | list }}", "OverflowError"),
        ("{{ q.__class__.__mro__ }}", "SecurityError"),
        ("{{ 1 // n }}", "ZeroDivisionError"),
        ("{{ q.upper(1, 2) }}", "TypeError"),
    ],
)
def test_what_a_row_raises_is_named(text, kind):
    (found,) = SafeTemplate("rows", text).render([{"q": "x", "n": 0}])
    assert isinstance(found, TemplateFailed) and found.kind == kind


def test_many_rows_keep_their_order_whatever_their_size_and_whichever_fail():
    rows = [{"a": "x" * (i % 7) ** 7} if i % 11 else ValueError(str(i)) for i in range(300)]
    found = list(SafeTemplate("rows", "{{ a }}{{ 1 // (a | length % 2) }}").render(rows))
    for row, result in zip(rows, found, strict=True):
        if isinstance(row, Exception):
            assert result is row
        elif len(row["a"]) % 2:
            assert result == row["a"] + "1"
        else:
            assert result.kind == "ZeroDivisionError"


def test_values_arrive_as_they_are():
    row = {
        "day": date(2020, 1, 2), "money": Decimal("1.10"), "raw": b"\xff", "none": None, "pair": (1, 2),
        "half": "\ud800", "wide": "\U0001f600", "number": 0.1,
    }  # fmt: skip
    text = "{{ day.year }} {{ money * 2 }} {{ raw }} {{ none }} {{ pair }} {{ half }} {{ wide }} {{ number }}"
    assert list(SafeTemplate("rows", text).render([row])) == ["2020 2.20 b'\\xff'  (1, 2) \ud800 \U0001f600 0.1"]


def test_a_value_that_cannot_leave_this_process_fails_its_row():
    first, second = SafeTemplate("rows", "{{ a }}").render([{"a": threading.Lock()}, {"a": 1}])
    assert first.kind == "TypeError" and second == "1"


def test_a_text_that_is_no_template():
    for text, line in (("a\n{{ b", 2), ("{{ a | no_such_filter }}", 1), ("{{ " + "(" * 20000, 1), ("{% include %}", 1)):
        with pytest.raises(TemplateSyntax) as raised:
            SafeTemplate("rows", text).use()
        assert raised.value.line == line and "\n" not in str(raised.value)


def test_one_process_renders_for_all_threads_and_starts_anew_where_it_was_ended():
    template = SafeTemplate("rows", "{{ a }}")
    texts = {}

    def render(start):
        texts[start] = list(template.render({"a": i} for i in range(start, start + 200)))

    threads = [threading.Thread(target=render, args=(1000 * k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(texts[1000 * k] == [str(i) for i in range(1000 * k, 1000 * k + 200)] for k in range(4))
    process = templates._renderer._process._process
    os.kill(process.pid, 9)
    first, second = template.render([{"a": 1}, {"a": 2}])
    assert second == "2" and (first == "1" or isinstance(first, TemplateFailed))
    assert templates._renderer._process._process.pid != process.pid


def test_an_interrupt_between_question_and_answer_leaves_nothing_to_be_read(monkeypatch):
    template = SafeTemplate("rows", "{{ a }}")
    assert list(template.render([{"a": 1}])) == ["1"]

    def interrupted(file):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(templates, "read_frame", interrupted)
        list(template.render([{"a": 2}]))
    assert list(template.render([{"a": 3}])) == ["3"]


def test_a_fork_renders_in_a_process_of_its_own():
    template = SafeTemplate("rows", "{{ a }}")
    assert list(template.render([{"a": 1}])) == ["1"]
    child = os.fork()
    if child == 0:
        os._exit(0 if list(template.render([{"a": 2}])) == ["2"] else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert list(template.render([{"a": 3}])) == ["3"]


@pytest.mark.parametrize(
    "hide", [lambda: signal.signal(signal.SIGPROF, signal.SIG_IGN), lambda: mask(signal.SIG_BLOCK, [signal.SIGPROF])]
)
def test_the_time_limit_holds_where_the_signal_is_ignored_or_blocked(hide):
    """Both are inherited by the process that renders, from whatever program has imported this package."""
    handler, blocked = signal.getsignal(signal.SIGPROF), mask(signal.SIG_BLOCK, [])
    templates._renderer.close()
    guard = threading.Timer(5.0, lambda: templates._renderer._process._process.kill())
    guard.start()
    try:
        hide()
        endless = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
        (result,) = SafeTemplate("rows", endless, TemplateLimits(seconds=0.1)).render([{}])
    finally:
        guard.cancel()
        templates._renderer.close()
        signal.signal(signal.SIGPROF, handler)
        mask(signal.SIG_SETMASK, blocked)
    assert "takes longer than 0.1 s" in str(result)


def test_a_fork_renders_though_another_thread_of_its_parent_was_rendering():
    with templates._renderer._lock:
        child = os.fork()
        if child == 0:
            signal.alarm(10)  # where the lock is held for ever
            found = list(SafeTemplate("rows", "{{ x }}").render([{"x": 1}]))
            os._exit(0 if found == ["1"] else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_values_that_are_larger_than_the_memory_of_a_row_say_so(capfd):
    small = TemplateLimits(memory_bytes=8 << 20)
    assert "more than 8 MiB" in str(*SafeTemplate("rows", "{{ x }}", small).render([{"x": b"a" * (30 << 20)}]))
    assert capfd.readouterr().err == ""
