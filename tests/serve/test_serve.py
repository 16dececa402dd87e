"""The batch endpoint, by OpenAI's own client."""

from __future__ import annotations

import errno
import http.client
import itertools
import json
import os
import re
import shutil
import signal
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import openai
import pytest
import torch
from batch_endpoint import CHAT_URL, GREEDY, OPTIONS, serving
from doc_commands import commands_of
from processes import start_batchgen
from thorough import covering

import batchgen
from batchgen.core.atomic_file import storage_error
from batchgen.core.errors import BatchgenError, InputError
from batchgen.job import run as run_module
from batchgen.output import part_writer
from batchgen.serve import endpoint as endpoint_module
from batchgen.serve import storage as storage_module
from batchgen.serve import worker as work
from batchgen.serve.endpoint import Endpoint
from batchgen.serve.storage import Storage


@pytest.fixture(scope="module")
def model(tiny_models):
    return tiny_models("llama")[0]


@pytest.fixture
def server(model, tmp_path):
    with serving(model, tmp_path / "served") as server:
        yield server


def line(number: int, **body) -> dict:
    messages = [{"role": "user", "content": f"row {number}"}]
    return {
        "custom_id": f"r{number}",
        "method": "POST",
        "url": CHAT_URL,
        "body": {"messages": messages, **GREEDY, **body},
    }


def test_connections_of_somebody_without_a_key_leave_files_to_the_jobs(model, tmp_path, monkeypatch):
    monkeypatch.setattr(endpoint_module, "_most_connections", lambda: 3)
    with serving(model, tmp_path / "served") as server:
        held = [socket.create_connection(("127.0.0.1", server.endpoint.port)) for _ in range(20)]
        for connection in held:
            connection.settimeout(0.2)
        open_still, deadline = held, time.monotonic() + 60
        while len(open_still) > 3 and time.monotonic() < deadline:
            open_still = [connection for connection in open_still if not has_ended(connection)]
        assert len(open_still) == 3
        for _ in range(5):  # in place of the oldest of them
            assert server.request("/v1/models", Connection="close")[0] == 200
        for connection in held:
            connection.close()


def test_clients_with_the_key_keep_their_connections_and_no_more_are_let_in(model, tmp_path, monkeypatch):
    monkeypatch.setattr(endpoint_module, "_most_connections", lambda: 2)
    with serving(model, tmp_path / "served") as server:
        kept = [http.client.HTTPConnection("127.0.0.1", server.endpoint.port, timeout=30) for _ in range(2)]
        for _ in range(3):
            for connection in kept:
                connection.request("GET", "/v1/models", headers={"Authorization": f"Bearer {server.storage.key()}"})
                assert connection.getresponse().read()
            with pytest.raises(ConnectionError):
                server.request("/v1/models")
        for connection in kept:
            connection.close()


def has_ended(connection: socket.socket) -> bool:
    try:
        return connection.recv(1) == b""
    except TimeoutError:
        return False
    except ConnectionError:
        return True


def wanted_texts(model: Path, folder: Path, lines: list[dict]) -> list[str]:
    """The file of answers that `batchgen run` writes, line by line."""
    source = folder / "wanted.jsonl"
    source.write_text("".join(json.dumps(one) + "\n" for one in lines))
    batchgen.run(str(model), str(source), str(folder / "wanted.out.jsonl"), **OPTIONS)
    return (folder / "wanted.out.jsonl").read_text().splitlines()


def test_chats_of_many_clients_are_answered_as_a_job_answers_them_by_a_model_that_is_loaded_once(
    server, model, tmp_path
):
    with ThreadPoolExecutor(8) as clients:
        texts = list(clients.map(lambda number: server.chat(f"row {number}"), range(20)))
    wanted = [json.loads(text) for text in wanted_texts(model, tmp_path, [line(number) for number in range(20)])]
    assert texts == [one["response"]["body"]["choices"][0]["message"]["content"] for one in wanted]
    assert server.worker.loads == 1


def test_a_batch_has_the_files_that_the_job_writes(server, model, tmp_path):
    lines = [*(line(number) for number in range(20)), {**line(99), "body": {}}]
    batch = server.ended(server.batch(server.upload(lines), metadata={"of": "a test"}).id)
    assert batch.status == "completed" and batch.metadata == {"of": "a test"}
    assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (21, 20, 1)
    wanted = wanted_texts(model, tmp_path, lines)
    answers = server.client.files.content(batch.output_file_id).text
    assert [json.loads(a)["response"]["body"]["choices"] for a in answers.splitlines()] == [
        json.loads(w)["response"]["body"]["choices"] for w in wanted
    ]
    (failed,) = server.client.files.content(batch.error_file_id).text.splitlines()
    assert json.loads(failed)["custom_id"] == "r99" and "messages is missing" in failed
    assert [one.id for one in server.client.batches.list()] == [batch.id]
    assert {one.id for one in server.client.files.list()} >= {batch.output_file_id, batch.error_file_id}


def test_a_chat_that_cannot_be_run_is_refused_with_the_reason_and_others_are_answered(server):
    with ThreadPoolExecutor(2) as clients:
        good = clients.submit(server.chat, "row 1")
        with pytest.raises(openai.BadRequestError, match="messages"):
            server.client.chat.completions.create(model="any", messages=[])
        assert isinstance(good.result(), str)
    with pytest.raises(openai.BadRequestError, match="stream"):
        server.client.chat.completions.create(model="any", messages=[{"role": "user", "content": "a"}], stream=True)


def test_a_chat_that_is_nested_deeply_is_answered_or_refused_alone(server, monkeypatch):
    monkeypatch.setattr(work, "_SETTLED_S", 0.3)
    for depth in (298, 299, 400, *range(955, 985, 5)):
        nested = json.dumps(CHAT)[:-1] + ', "metadata": ' + "[" * depth + "]" * depth + "}"
        with ThreadPoolExecutor(2) as clients:
            good = clients.submit(server.chat, "row 1")
            assert server.request(CHAT_URL, "POST", nested.encode())[0] == (200 if depth <= 298 else 400), depth
            assert isinstance(good.result(), str)


def test_a_seed_gives_the_same_answer_again_and_none_gives_others(server):
    how = {"temperature": 1.5, "max_tokens": 12}
    assert server.chat("row", seed=7, **how) == server.chat("row", seed=7, **how)
    assert len({server.chat("row", **how) for _ in range(4)}) > 1


def test_a_prompt_longer_than_the_loaded_model_has_room_for_loads_it_anew(server):
    assert server.chat("a") != ""
    assert server.chat("word " * 80, max_tokens=8) != ""
    assert server.worker.loads <= 2


def test_a_batch_makes_way_for_chats_and_loses_nothing(server, model, tmp_path, monkeypatch):
    monkeypatch.setattr(work, "_TURN_S", 0.0)
    lines = [line(number, max_tokens=40, ignore_eos=True) for number in range(100)]
    batch = server.batch(server.upload(lines))
    while server.client.batches.retrieve(batch.id).status == "validating":
        time.sleep(0.01)
    assert isinstance(server.chat("between"), str)
    batch = server.ended(batch.id)
    answers = [json.loads(a) for a in server.client.files.content(batch.output_file_id).text.splitlines()]
    wanted = [json.loads(w) for w in wanted_texts(model, tmp_path, lines)]
    assert [a["response"]["body"]["choices"] for a in answers] == [w["response"]["body"]["choices"] for w in wanted]


def test_a_cancelled_batch_ends_and_its_file_can_be_deleted(server):
    file_id = server.upload([line(number, max_tokens=200, ignore_eos=True) for number in range(300)])
    batch = server.batch(file_id)
    with pytest.raises(openai.ConflictError, match="cancel the batch first"):
        server.client.files.delete(file_id)
    assert server.client.batches.cancel(batch.id).status == "cancelling"
    assert server.ended(batch.id).status == "cancelled"
    assert server.client.files.delete(file_id).deleted


def test_who_has_not_the_key_or_is_a_page_of_a_browser_is_not_answered(server):
    assert server.request("/v1/models")[0] == 200
    assert server.request("/v1/models", Authorization="Bearer sk-wrong")[0] == 401
    assert server.request("/v1/models", Authorization="")[0] == 401
    assert server.request("/v1/models", Host="attacker.example")[0] == 403
    assert server.request("/v1/models", Origin="http://attacker.example")[0] == 403
    assert server.storage.key_path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("name", ["..%2F..%2Fapi_key", "%2Fetc%2Fpasswd", "file-..", "file-" + "0" * 24])
def test_only_ids_name_files(server, name):
    assert server.request(f"/v1/files/{name}")[0] == 404
    assert server.request(f"/v1/files/{name}/content")[0] == 404
    assert server.request(f"/v1/batches/{name}")[0] == 404


def test_a_directory_has_one_server_and_a_port_too(server, model, tmp_path):
    with pytest.raises(InputError, match="serves --directory"):
        Storage(tmp_path / "served")
    other = Storage(tmp_path / "other")
    try:
        with pytest.raises(InputError, match="cannot be listened on"):
            Endpoint(other, server.worker, "tiny", server.endpoint.port)
        for port in (-1, 65536):
            with pytest.raises(InputError, match="--port must be between"):
                Endpoint(other, server.worker, "tiny", port)
    finally:
        other.close()


def test_a_server_that_was_killed_goes_on_with_its_batch(model, tmp_path):
    lines = [line(number, max_tokens=24, ignore_eos=True) for number in range(160)]
    with serving(model, tmp_path / "served") as server:
        file_id = server.upload(lines)
        # Made and not begun: the worker is at its end.
        server.worker.close()
        batch_id = server.worker.add_batch(file_id, CHAT_URL, "24h", {}).id
    arguments = [
        "serve-batches",
        "--model",
        model,
        "--directory",
        tmp_path / "served",
        "--port",
        0,
        "--dtype",
        "float32",
    ]
    process = start_batchgen([*arguments, "--flush-interval", "0.1s"], tmp_path / "log")
    run_folder = tmp_path / "served" / "batches" / batch_id / "output.jsonl.batchgen"
    while not list(run_folder.glob("parts/*")) and process.is_alive():
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.join()
    with serving(model, tmp_path / "served") as server:
        batch = server.ended(batch_id)
        assert batch.status == "completed" and batch.request_counts.completed == 160
        answers = [json.loads(a) for a in server.client.files.content(batch.output_file_id).text.splitlines()]
    wanted = [json.loads(w) for w in wanted_texts(model, tmp_path, lines)]
    assert [a["response"]["body"]["choices"] for a in answers] == [w["response"]["body"]["choices"] for w in wanted]


def test_the_command_of_the_page_serves_until_it_is_interrupted(model, tmp_path):
    (command,) = (one for one in commands_of("docs/serving_batches.md") if one.text.startswith("batchgen"))
    words = [{"demo": str(model), "served": str(tmp_path / "served")}.get(word, word) for word in command.words[1:]]
    (tmp_path / "log").touch()
    process = start_batchgen([*words, "--port", 0], tmp_path / "log")
    while not (said := re.search(r"at (http://\S+/v1); the key is in (\S+)", (tmp_path / "log").read_text())):
        assert process.is_alive()
        time.sleep(0.02)
    with openai.OpenAI(base_url=said[1], api_key=Path(said[2]).read_text().strip(), timeout=120) as client:
        messages = [{"role": "user", "content": "a"}]
        assert client.chat.completions.create(model="any", messages=messages, max_tokens=3).usage.completion_tokens > 0
    os.kill(process.pid, signal.SIGINT)
    process.join()
    assert process.exitcode == 130
    assert "batches go on when it is started again" in (tmp_path / "log").read_text()


CHAT = {"messages": [{"role": "user", "content": "a"}], **GREEDY}
OF_FORM = {"Content_Type": "multipart/form-data; boundary=x"}
PART = b'--x\r\nContent-Disposition: form-data; name="%s"; filename="a"\r\n\r\n%s\r\n'
IN_BASE64 = PART.replace(b"\r\n\r\n", b"\r\nContent-Transfer-Encoding: base64\r\n\r\n") % (b"file", b"YWJj")


@pytest.mark.parametrize(
    ("path", "body", "headers"),
    [
        (CHAT_URL, b"{}", {"Content_Type": "application/json; charset=none-such"}),
        (CHAT_URL, b"{}", {"Content_Encoding": "gzip"}),
        (CHAT_URL, b'{"messages": "\xff"}', {}),
        (CHAT_URL, b"[" * 100_000, {}),
        ("/v1/files", b"", {"Content_Type": "multipart/form-data"}),
        ("/v1/files", b"", OF_FORM),
        ("/v1/files", (PART % (b"file", b"abc"))[:-4], OF_FORM),
        ("/v1/files", PART % (b"file", b"abc") + PART % (b"file", b"abc") + b"--x--\r\n", OF_FORM),
        ("/v1/files", PART % (b"purpose", b"\xff") + PART % (b"file", b"abc") + b"--x--\r\n", OF_FORM),
        ("/v1/files", PART % (b"purpose", b"batch") + IN_BASE64 + b"--x--\r\n", OF_FORM),
    ],
)
def test_a_body_that_is_not_what_its_headers_say_is_refused_and_leaves_no_file(server, path, body, headers):
    status, answer = server.request(path, "POST", body, **headers)
    assert status == 400 and json.loads(answer)["error"]["message"]
    assert not list((server.storage.key_path.parent / "files").iterdir())
    assert server.request("/v1/models", Authorization="Bearer \xff")[0] == 401
    assert server.request(f"/v1/files?limit={'9' * 5000}")[0] == 400


@pytest.mark.parametrize("key", [True, False])
def test_requests_that_are_no_http_leave_no_traceback_in_the_log(server, caplog, key):
    authorized = {} if key else {"Authorization": "Bearer none"}
    for encoding in ("gzip", "deflate", "br", "zstd"):
        status, _ = server.request(CHAT_URL, "POST", b"x" * 1000, Content_Encoding=encoding, **authorized)
        assert status in ((400,) if key else (400, 401))
    for text in (b"\x16\x03\x01 TLS\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"GET /\r\nHost: [\r\n\r\n"):
        with socket.create_connection(("127.0.0.1", server.endpoint.port)) as stranger:
            stranger.sendall(text)
            stranger.settimeout(30)
            with suppress(ConnectionError):
                while stranger.recv(1 << 16):
                    pass
    assert server.request("/v1/models")[0] == 200 and not caplog.records


def test_a_chat_whose_client_has_gone_is_not_run(server, monkeypatch):
    asked = []
    monkeypatch.setattr(work, "_SETTLED_S", 0.5)
    monkeypatch.setattr(server.worker, "_run_job", lambda source, output: asked.append(source.read_text()))
    body = json.dumps(CHAT)
    with socket.create_connection(("127.0.0.1", server.endpoint.port)) as client:
        head = f"POST {CHAT_URL} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {server.storage.key()}\r\n"
        client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
        while not server.worker._chats:
            time.sleep(0.001)
    while server.worker._chats:
        time.sleep(0.01)
    assert asked == []


def test_a_chat_that_lets_a_job_be_refused_fails_alone(server, monkeypatch):
    run = server.worker._run_job

    def refuses(source, output):
        if "huge" in source.read_text():
            raise InputError("there is no room for it")
        return run(source, output)

    monkeypatch.setattr(work, "_SETTLED_S", 0.3)
    monkeypatch.setattr(server.worker, "_run_job", refuses)
    with ThreadPoolExecutor(5) as clients:
        good = [clients.submit(server.chat, f"row {number}") for number in range(4)]
        with pytest.raises(openai.BadRequestError, match="there is no room for it"):
            server.chat("huge")
        assert all(isinstance(one.result(), str) for one in good)


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), ZeroDivisionError("a fault")])
def test_a_fault_while_chats_run_is_answered_and_the_server_goes_on(server, monkeypatch, error):
    def fails(*_):
        raise error

    with monkeypatch.context() as patched, pytest.raises(openai.InternalServerError, match=r"No space|a fault"):
        patched.setattr(work, "run_job", fails)
        server.chat("a")
    assert isinstance(server.chat("a"), str)


ILLEGAL_ACCESS = "CUDA error: an illegal memory access was encountered"


@pytest.fixture
def card(monkeypatch):
    """A played card: after the kernel of row 13 every call of CUDA in the process returns an error, until `new`."""
    card = SimpleNamespace(lost=False, fatal_row="row 13")

    def synchronize(*_):
        if card.lost:
            raise RuntimeError(f"{ILLEGAL_ACCESS}\nCUDA kernel errors might be asynchronously reported")

    def run_job(options, session):
        card.lost = card.lost or card.fatal_row in Path(options.input).read_text()
        synchronize()
        return real(options, session)

    def new():
        card.lost = False

    real, card.new = work.run_job, new
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    monkeypatch.setattr(work, "run_job", run_job)
    return card


def until_ended(server) -> str:
    """The line of the error that ends a server."""
    deadline = time.monotonic() + 60
    while not server.ended_by and time.monotonic() < deadline:
        time.sleep(0.01)
    (error,) = server.ended_by
    assert isinstance(error, BatchgenError) and error.exit_code == 1 and "\n" not in str(error)
    return str(error)


def test_a_server_whose_gpu_has_failed_ends_and_its_batches_wait_for_the_next_one(model, tmp_path, card):
    with serving(model, tmp_path / "served") as server:
        first, second = (server.batch(server.upload([line(number)])).id for number in (13, 14))
        message = until_ended(server)
        assert message == f"the GPU failed ({ILLEGAL_ACCESS}): run the same command again; {work._KEPT}"
        assert server.client.batches.retrieve(second).status == "validating"
    card.new()
    card.fatal_row = "a row that the next version computes"
    with serving(model, tmp_path / "served") as server:
        for batch in (first, second):
            assert server.ended(batch).status == "completed"


def test_a_batch_that_loses_each_gpu_fails_and_others_go_on(model, tmp_path, card):
    with serving(model, tmp_path / "served") as server:
        first, second = (server.batch(server.upload([line(number)])).id for number in (13, 14))
        until_ended(server)
    card.new()
    with serving(model, tmp_path / "served") as server:
        until_ended(server)
        failed = server.client.batches.retrieve(first)
        assert (
            failed.status == "failed"
            and "2 times, while this batch ran, the GPU failed" in failed.errors.data[0].message
        )
    card.new()
    with serving(model, tmp_path / "served") as server:
        assert server.ended(second).status == "completed"


def test_chats_of_a_job_that_has_lost_the_gpu_are_answered_before_the_server_ends(model, tmp_path, card):
    with serving(model, tmp_path / "served") as server:
        with pytest.raises(openai.InternalServerError, match="illegal memory access"):
            server.chat("row 13")
        assert until_ended(server).startswith("the GPU failed")


def test_a_batch_waits_while_the_disk_is_full(server, monkeypatch):
    run, tries, no_space = work.run_job, [], OSError(errno.ENOSPC, "No space left on device")

    def full(*given):
        tries.append(given)
        if len(tries) == 1:
            raise no_space
        if len(tries) == 2:
            raise storage_error(no_space, "write a part") from no_space
        return run(*given)

    monkeypatch.setattr(work, "_RETRY_S", 0.1)
    monkeypatch.setattr(work, "run_job", full)
    batch = server.ended(server.batch(server.upload([line(1)])).id)
    assert batch.status == "completed" and len(tries) == 3


def test_a_full_disk_within_a_job_of_a_batch_lets_it_wait(server, monkeypatch):
    write, tries = part_writer.write_part, []

    def full(*given, **more):
        tries.append(given)
        if len(tries) == 1:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(*given, **more)

    monkeypatch.setattr(work, "_RETRY_S", 0.1)
    monkeypatch.setattr(part_writer, "write_part", full)
    batch = server.ended(server.batch(server.upload([line(1)])).id)
    assert batch.status == "completed" and len(tries) > 1


FULL_AT = ["_output.jsonl", "_output.errors.jsonl", '"status": "completed"']


@pytest.mark.parametrize(("full", "links"), covering(itertools.product(FULL_AT, [True, False]), 3, "full disks"))
def test_a_disk_that_is_full_while_a_batch_ends_leaves_no_second_copy_of_its_outputs(server, monkeypatch, full, links):
    write, failed = storage_module.write_atomically, []

    def fails_twice(path, content, **more):
        if full.encode() in content and len(failed) < 2:
            failed.append(path)
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, content, **more)

    def refuses(*_):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    if not links:
        monkeypatch.setattr(os, "link", refuses)
    monkeypatch.setattr(work, "_RETRY_S", 0.05)
    monkeypatch.setattr(storage_module, "write_atomically", fails_twice)
    file_id = server.upload([line(1), {**line(2), "body": {}}])
    batch = server.ended(server.batch(file_id).id)
    assert len(failed) == 2
    ids = {file_id, batch.output_file_id, batch.error_file_id}
    assert {one.id for one in server.client.files.list()} == ids
    assert {path.stem for path in (server.storage.key_path.parent / "files").iterdir()} == ids


def test_a_batch_that_waits_for_a_full_disk_can_be_cancelled_and_frees_its_space(server, monkeypatch):
    write, folder = storage_module.write_atomically, server.storage.key_path.parent / "batches"

    def full(path, content, **more):
        if list(folder.glob("*/output.jsonl")):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(path, content, **more)

    monkeypatch.setattr(storage_module, "write_atomically", full)
    batch = server.batch(server.upload([line(1)]))
    while server.worker._batches_from_s == 0:
        time.sleep(0.01)
    assert server.client.batches.cancel(batch.id).status == "cancelling"
    assert server.ended(batch.id).status == "cancelled"
    assert [path.name for path in (folder / batch.id).iterdir()] == ["batch.json"]
    assert [one.purpose for one in server.client.files.list()] == ["batch"]


def test_a_batch_that_waits_for_another_one_is_cancelled_at_once(server, monkeypatch):
    run, may_run = server.worker._run_job, threading.Event()
    monkeypatch.setattr(server.worker, "_run_job", lambda *given: (may_run.wait(), run(*given))[1])
    first, second = (server.batch(server.upload([line(1)])).id for _ in range(2))
    asked = server.client.batches.cancel(second), server.client.batches.retrieve(second)
    may_run.set()
    assert [batch.status for batch in asked] == ["cancelling", "cancelled"]
    assert server.ended(first).status == "completed"


def test_a_batch_for_which_there_is_no_space_leaves_nothing(server, monkeypatch):
    file_id = server.upload([line(1)])

    def full(*_, **__):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(storage_module, "write_atomically", full)
    with pytest.raises(openai.InternalServerError, match="No space left"):
        server.batch(file_id)
    assert not list((server.storage.key_path.parent / "batches").iterdir())


def test_what_a_kill_left_of_a_batch_that_ended_or_was_being_made_is_removed_at_the_next_start(model, tmp_path):
    folder = tmp_path / "served"
    with serving(model, folder) as server:
        ended = server.ended(server.batch(server.upload([line(1)])).id).id
    wanted = sorted(path.relative_to(folder) for path in folder.rglob("*") if path.name != "lock")
    job = folder / "batches" / ended / "output.jsonl.batchgen"
    unmade = folder / "batches" / f"batch_{'1' * 24}"
    left = job / "parts" / "a.parquet", job.with_suffix(""), unmade / "batch.json.tmp", folder / "files" / "a.tmp"
    for path in left:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("")
    with serving(model, folder):
        assert sorted(path.relative_to(folder) for path in folder.rglob("*") if path.name != "lock") == wanted


@pytest.mark.parametrize("text", ["", "\n\n", '{"prompt": "a"}\n', "no json\n", "\xff"])
def test_a_file_without_a_request_fails_its_batch(server, text):
    batch = server.ended(server.batch(server.upload(text)).id)
    assert batch.status == "failed" and "no line of the file is a request" in batch.errors.data[0].message


def test_a_line_that_is_no_json_fails_alone(server):
    batch = server.ended(server.batch(server.upload(json.dumps(line(1)) + "\nno json\n")).id)
    assert (batch.request_counts.completed, batch.request_counts.failed) == (1, 1)
    assert "not valid JSON" in server.client.files.content(batch.error_file_id).text


def test_batches_run_in_the_order_in_which_they_came(server, monkeypatch):
    order = []
    begun = server.worker._run_batch
    monkeypatch.setattr(server.worker, "_run_batch", lambda batch: (order.append(batch.id), begun(batch)))
    file_id = server.upload([line(1)])
    batches = [server.batch(file_id).id for _ in range(8)]
    for batch_id in batches:
        server.ended(batch_id)
    assert order == batches
    assert [one.id for one in server.client.batches.list()] == batches[::-1]


def test_a_batch_that_took_long_to_load_has_its_turn_before_it_makes_way(server, monkeypatch):
    stops = []

    def loads_long(source, output):
        time.sleep(0.3)
        server.worker._chats.append(work.Chat(CHAT_URL, CHAT, lambda *_: None, lambda: True))
        stops.append(server.worker._session.should_stop())
        raise InputError("enough")

    monkeypatch.setattr(work, "_TURN_S", 0.2)
    monkeypatch.setattr(server.worker, "_run_job", loads_long)
    server.ended(server.batch(server.upload([line(1)])).id)
    assert stops[0] is False


@pytest.mark.parametrize(("key", "mode", "reason"), [("", 0o600, "has no key"), ("sk-mine", 0o644, "user's alone")])
def test_a_key_that_others_know_is_refused(tmp_path, key, mode, reason):
    storage = Storage(tmp_path / "served")
    try:
        storage.key_path.write_text(key)
        storage.key_path.chmod(mode)
        with pytest.raises(InputError, match=reason):
            storage.key()
    finally:
        storage.close()


def test_outputs_are_kept_where_there_are_no_hard_links(server, monkeypatch):
    def refuses(*_):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuses)
    batch = server.ended(server.batch(server.upload([line(1)])).id)
    assert len(server.client.files.content(batch.output_file_id).text.splitlines()) == 1


def test_a_batch_that_is_cancelled_as_it_begins_is_cancelling_until_it_ends(server, monkeypatch):
    begun = server.worker._run_batch

    def cancelled_first(batch):
        server.worker.cancel(batch)
        begun(batch)

    monkeypatch.setattr(server.worker, "_run_batch", cancelled_first)
    batch = server.ended(server.batch(server.upload([line(number) for number in range(50)])).id)
    assert batch.status == "cancelled" and batch.cancelling_at is not None


def test_broken_files_of_the_directory_are_left_out_and_the_server_goes_on(server, caplog):
    folder = server.storage.key_path.parent
    (folder / "batches" / f"batch_{'0' * 24}").mkdir()
    (folder / "batches" / f"batch_{'0' * 24}" / "batch.json").write_text("{}")
    (folder / "files" / f"file-{'0' * 24}.json").write_text("no json")
    batch = server.ended(server.batch(server.upload([line(1)])).id)
    assert batch.status == "completed"
    assert [one.id for one in server.client.batches.list()] == [batch.id]
    assert f"file-{'0' * 24}" not in {one.id for one in server.client.files.list()}
    assert caplog.text.count("is broken, and left out") == 2


def test_an_interrupt_while_a_chat_runs_ends_the_server_and_says_nothing_of_its_rows(model, tmp_path):
    (tmp_path / "log").touch()
    words = ["serve-batches", "--model", model, "--directory", tmp_path / "served", "--port", 0]
    process = start_batchgen(words, tmp_path / "log")
    while not (said := re.search(r"at (http://\S+/v1); the key is in (\S+)", (tmp_path / "log").read_text())):
        assert process.is_alive()
        time.sleep(0.02)
    with (
        openai.OpenAI(
            base_url=said[1], api_key=Path(said[2]).read_text().strip(), max_retries=0, timeout=120
        ) as client,
        ThreadPoolExecutor(1) as clients,
    ):
        many = {"max_tokens": 400, "n": 128, "extra_body": {"ignore_eos": True}}
        chat = clients.submit(client.chat.completions.create, model="any", messages=CHAT["messages"], **many)
        while not list((tmp_path / "served" / "chats").glob("*/output.jsonl.batchgen")):
            time.sleep(0.01)
        os.kill(process.pid, signal.SIGINT)
        process.join()
        assert isinstance(chat.exception(), openai.APIConnectionError)
    assert process.exitcode == 130
    log = (tmp_path / "log").read_text()
    assert "interrupted; batches go on when it is started again" in log and "output.jsonl" not in log
    with serving(model, tmp_path / "served") as server:
        assert not list(server.storage.chats.iterdir())


def test_a_model_whose_files_were_replaced_is_loaded_anew(tiny_models, model, tmp_path):
    other = tiny_models("llama", seed=1)[0]
    for name, source in {"first": model, "second": other}.items():
        shutil.copytree(source, tmp_path / name)
    lines, place = [line(1, max_tokens=12, ignore_eos=True)], tmp_path / "first"
    wanted = {}
    for name in ("first", "second"):
        (text,) = wanted_texts(tmp_path / name, tmp_path / name, lines)
        wanted[name] = json.loads(text)["response"]["body"]["choices"][0]["message"]["content"]
    assert wanted["first"] != wanted["second"]
    with serving(place, tmp_path / "served") as server:
        how = {"max_tokens": 12, "extra_body": {"ignore_eos": True}}
        assert server.chat("row 1", **how) == wanted["first"]
        shutil.copy(tmp_path / "second" / "model.safetensors", place / "new")
        os.replace(place / "new", place / "model.safetensors")
        assert server.chat("row 1", **how) == wanted["second"]
        assert server.worker.loads == 2


def test_what_a_batch_wrote_is_gone_when_its_files_are_deleted(server):
    file_id = server.upload([line(1), {**line(2), "body": {}}])
    batch = server.ended(server.batch(file_id).id)
    for one in (file_id, batch.output_file_id, batch.error_file_id):
        server.client.files.delete(one)
    folder = server.storage.key_path.parent
    assert list((folder / "files").iterdir()) == []
    while [path.name for path in (folder / "batches" / batch.id).iterdir()] != ["batch.json"]:  # just after it ended
        time.sleep(0.01)


def test_an_upload_that_a_kill_cut_short_is_removed_at_the_next_start(model, tmp_path):
    with serving(model, tmp_path / "served") as server:
        file_id = server.upload([line(1)])
        _, cut_short = server.storage.new_file_path()
        cut_short.write_text("{")
    with serving(model, tmp_path / "served") as server:
        assert [one.id for one in server.client.files.list()] == [file_id]
        assert server.client.files.content(file_id).text
        assert not cut_short.exists()


def test_metadata_of_any_length_is_not_kept(server):
    with pytest.raises(openai.BadRequestError, match="metadata must have at most"):
        server.batch(server.upload([line(1)]), metadata={"a": "x" * 100_000})


def test_pages_of_a_list_go_on_after_a_file_that_was_deleted(server):
    ids = [server.upload([line(number)]) for number in range(5)][::-1]
    first = json.loads(server.request("/v1/files?limit=2")[1])
    assert [one["id"] for one in first["data"]] == ids[:2] and first["has_more"]
    server.client.files.delete(first["last_id"])
    second = json.loads(server.request(f"/v1/files?limit=2&after={first['last_id']}")[1])
    assert [one["id"] for one in second["data"]] == ids[2:4] and second["has_more"]
    assert [one.id for one in server.client.files.list(limit=1)] == [ids[0], *ids[2:]]


def test_a_batch_that_another_model_has_begun_waits_for_it_and_others_run(
    tiny_models, model, tmp_path, caplog, monkeypatch
):
    monkeypatch.setitem(OPTIONS, "flush_interval", "0.1s")
    make_result, stopped = run_module._row_result, threading.Event()

    def one_by_one(*args):
        stopped.wait(0.02)  # so that the batch has not ended when its first rows are saved
        return make_result(*args)

    monkeypatch.setattr(run_module, "_row_result", one_by_one)
    with serving(model, tmp_path / "served") as server:
        lines = [line(number, max_tokens=1 + number % 50, ignore_eos=True) for number in range(60)]
        begun = server.batch(server.upload(lines)).id
        while not list((tmp_path / "served" / "batches" / begun).glob("output.jsonl.batchgen/parts/*")):
            time.sleep(0.02)
        server.worker.close()
        stopped.set()
    with serving(tiny_models("llama", seed=1)[0], tmp_path / "served") as server:
        assert server.ended(server.batch(server.upload([line(1)])).id).status == "completed"
        assert server.client.batches.retrieve(begun).status == "in_progress"
        assert "start the server with the old settings" in caplog.text
    with serving(model, tmp_path / "served") as server:
        batch = server.ended(begun)
        assert batch.status == "completed" and batch.request_counts.completed == 60
