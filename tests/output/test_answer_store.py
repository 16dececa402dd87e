"""The store of answers that jobs share: what is kept is found, within its limit, and no failure reaches a job."""

import os
import sqlite3
import stat
import subprocess
import sys
import threading

import pytest

from batchgen.core.errors import InputError
from batchgen.output import answer_store
from batchgen.output.answer_store import DATABASE, AnswerStore


def key_of(number):
    return number.to_bytes(16, "big")


def store_in(folder, most_bytes=1 << 30):
    return AnswerStore(folder / "cache", most_bytes)


def test_what_is_kept_is_found_by_a_later_process(tmp_path):
    answers = {key_of(i): os.urandom(i * 37) + b"text " * i for i in range(300)}
    first = store_in(tmp_path)
    first.put(answers)
    first.close()
    second = store_in(tmp_path)
    assert second.get([*answers, key_of(1000)]) == answers
    second.put({key_of(5): b"another"})
    assert second.get([key_of(5)]) == {key_of(5): b"another"}


def test_only_this_user_can_read_it(tmp_path):
    before = os.umask(0)
    try:
        store = store_in(tmp_path)
        store.put({key_of(1): b"secret"})
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "cache").iterdir()}
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "cache").stat().st_mode) == 0o700
    assert DATABASE in modes and set(modes.values()) == {0o600}


def test_the_answers_that_were_used_longest_ago_go_first(tmp_path, monkeypatch):
    now = 1_000_000
    monkeypatch.setattr(answer_store.time, "time", lambda: now)
    store = store_in(tmp_path, 2 << 20)
    store.put({key_of(0): b"first"})
    for i in range(1, 60):
        now += 10_000
        store.put({key_of(i * 100 + j): os.urandom(4000) for j in range(20)})
        assert store.get([key_of(0)]), "it is used all the time"
    assert store.get([key_of(59 * 100)]) and not store.get([key_of(100)])
    store.close()
    assert sum(path.stat().st_size for path in (tmp_path / "cache").iterdir()) < 3 << 20


def test_an_answer_larger_than_the_limit_ends_nothing(tmp_path, logged):
    store = store_in(tmp_path, 1 << 20)
    store.put({key_of(1): os.urandom(3 << 20)})
    store.put({key_of(2): b"small"})
    assert store.get([key_of(2)]) == {key_of(2): b"small"} and not logged


def test_a_changed_byte_of_an_answer_is_noticed(tmp_path):
    store = store_in(tmp_path)
    store.put({key_of(1): b"yes", key_of(2): b"no " * 400})
    store.close()
    with sqlite3.connect(tmp_path / "cache" / DATABASE) as database:
        database.execute("UPDATE answers SET answer = substr(answer, 1, 5) || 'f' || substr(answer, 7)")
    database.close()
    assert store_in(tmp_path).get([key_of(1), key_of(2)]) == {}


@pytest.mark.parametrize("content", [b"no database at all" * 1000, None], ids=["another file", "holes"])
def test_a_damaged_database_is_said_once_and_left_alone(content, tmp_path, logged):
    store = store_in(tmp_path)
    store.put({key_of(i): os.urandom(500) for i in range(400)})
    store.close()
    path = tmp_path / "cache" / DATABASE
    whole = path.read_bytes()
    path.write_bytes(content or whole[:100] + bytes(len(whole) - 100))
    store = store_in(tmp_path)
    for i in range(400):
        assert store.get([key_of(i)]) == {}
        store.put({key_of(i): b"again"})
    assert len(logged) == 1 and "is not used from here on" in logged[0] and f"remove {path}" in logged[0]
    store.close()


def test_a_database_of_another_version_is_left_alone(tmp_path, logged):
    store_in(tmp_path).close()
    with sqlite3.connect(tmp_path / "cache" / DATABASE) as database:
        database.execute("PRAGMA user_version = 99")
    database.close()
    store = store_in(tmp_path)
    store.put({key_of(1): b"yes"})
    assert store.get([key_of(1)]) == {} and len(logged) == 1


def test_a_full_disk_is_said_once(small_disk, logged):
    store = store_in(small_disk("size=1m"))
    for i in range(100):
        store.put({key_of(i): os.urandom(50_000)})
    assert len(logged) == 1 and "full" in logged[0]


def test_a_link_in_place_of_the_database_is_not_followed(tmp_path, logged):
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / DATABASE).symlink_to(tmp_path / "elsewhere")
    store = store_in(tmp_path)
    store.put({key_of(1): b"yes"})
    assert not (tmp_path / "elsewhere").exists() and len(logged) == 1


def test_a_directory_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(InputError, match="--cache"):
        store_in(tmp_path)
    with pytest.raises(InputError, match="--cache-size"):
        AnswerStore(tmp_path / "other", 10)


_WRITER = """
import sys
from pathlib import Path
from batchgen.output.answer_store import AnswerStore
store, first = AnswerStore(Path(sys.argv[1]), 1 << 30), int(sys.argv[2])
for i in range(first, first + 2000, 20):
    store.put({j.to_bytes(16, "big"): b"answer %d" % j for j in range(i, i + 20)})
    print(i, flush=True)
"""


def test_processes_write_at_once_and_one_is_killed(tmp_path, logged):
    command = [sys.executable, "-c", _WRITER, str(tmp_path / "cache")]
    both = [subprocess.Popen([*command, str(first)], stdout=subprocess.PIPE, text=True) for first in (0, 10_000)]
    killed = subprocess.Popen([*command, "20000"], stdout=subprocess.PIPE, text=True)
    for _ in range(20):
        killed.stdout.readline()
    killed.kill()
    killed.communicate()
    for process in both:
        process.communicate()
        assert process.returncode == 0
    store = store_in(tmp_path)
    for first, count in ((0, 2000), (10_000, 2000), (20_000, 20 * 20)):
        keys = [key_of(i) for i in range(first, first + count)]
        assert store.get(keys) == {key: b"answer %d" % int.from_bytes(key, "big") for key in keys}
    assert not logged


def test_threads_read_and_write_at_once(tmp_path, logged):
    store = store_in(tmp_path)

    def work(first):
        for i in range(first, first + 200):
            store.put({key_of(i): b"%d" % i})
            assert store.get([key_of(i)]) == {key_of(i): b"%d" % i}

    threads = [threading.Thread(target=work, args=(first,)) for first in (0, 1000, 2000)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(store.get(map(key_of, range(3000)))) == 600 and not logged
