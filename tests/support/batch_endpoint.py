"""A batch endpoint in this process, with OpenAI's own client."""

from __future__ import annotations

import http.client
import json
import threading
import time
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import openai

from batchgen.core.request import SamplingParams
from batchgen.job.options import JobOptions
from batchgen.serve.endpoint import Endpoint
from batchgen.serve.storage import Storage
from batchgen.serve.worker import Worker

CHAT_URL = "/v1/chat/completions"
GREEDY = {"max_tokens": 4, "temperature": 0}
OPTIONS = {"dtype": "float32", "hardware": "zen4", "progress": "none", "cpu_memory": "2GiB"}


@dataclass(frozen=True)
class Server:
    """A server in this process.

    Attributes:
        client: OpenAI's client.
        endpoint, worker, storage: What it consists of.
        ended_by: The error that has ended the worker, or nothing.
    """

    client: openai.OpenAI
    endpoint: Endpoint
    worker: Worker
    storage: Storage
    ended_by: list[BaseException]

    def request(self, path: str, method: str = "GET", body: bytes | None = None, **headers: str) -> tuple[int, str]:
        """The status and the body of the answer to a request with these headers; `_` stands for a hyphen."""
        connection = http.client.HTTPConnection("127.0.0.1", self.endpoint.port, timeout=30)
        given = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, body, headers={"Authorization": f"Bearer {self.storage.key()}", **given})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()

    def upload(self, lines: list[dict] | str) -> str:
        text = lines if isinstance(lines, str) else "".join(json.dumps(line) + "\n" for line in lines)
        return self.client.files.create(file=("rows.jsonl", text.encode("latin-1")), purpose="batch").id

    def batch(self, file_id: str, **more) -> openai.types.Batch:
        given = {"input_file_id": file_id, "endpoint": CHAT_URL, "completion_window": "24h", **more}
        return self.client.batches.create(**given)

    def ended(self, batch_id: str) -> openai.types.Batch:
        while True:
            batch = self.client.batches.retrieve(batch_id)
            if batch.status in ("completed", "failed", "cancelled"):
                return batch
            time.sleep(0.02)

    def chat(self, text: str, **more) -> str:
        messages = [{"role": "user", "content": text}]
        answer = self.client.chat.completions.create(model="any", messages=messages, **{**GREEDY, **more})
        return answer.choices[0].message.content


@contextmanager
def serving(model: Path, directory: Path):
    storage = Storage(directory)
    worker = Worker(JobOptions(str(model), None, None, sampling=SamplingParams(), **OPTIONS), storage)
    endpoint = Endpoint(storage, worker, "tiny", 0)
    ended_by: list[BaseException] = []

    def run() -> None:
        try:
            worker.run()
        except BaseException as error:
            ended_by.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    client = openai.OpenAI(base_url=endpoint.url, api_key=storage.key(), max_retries=0, timeout=120)
    try:
        yield Server(client, endpoint, worker, storage, ended_by)
    finally:
        worker.close()
        thread.join()
        client.close()
        endpoint.close()
        storage.close()
