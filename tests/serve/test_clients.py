"""Programs that know OpenAI's API, unchanged, with the batch endpoint: LiteLLM, LOTUS and DocETL.

They are in an environment of their own (`make clients-check`), as they pin older packages than the others run with.
BATCHGEN_CLIENTS_VENV names another one.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
from batch_endpoint import serving
from tiny_models import make_tiny_model
from tiny_tokenizers import make_tiny_tokenizer

ROOT = Path(__file__).parents[2]
VENV = Path(os.environ.get("BATCHGEN_CLIENTS_VENV", ROOT / ".venv-clients"))
TOOLS = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant: "
)
pytestmark = [
    pytest.mark.thorough,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not VENV.exists(), reason="LiteLLM, LOTUS and DocETL are not installed (make clients-check)"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("served")
    make_tiny_model("llama", folder / "model", max_position_embeddings=8192)
    make_tiny_tokenizer(folder / "model", chat_template=TOOLS)
    with serving(folder / "model", folder / "directory") as server:
        yield server


def said_by(client: str, server, folder: Path) -> dict:
    """The values that a script in tests/support/clients prints at its end."""
    tokenizers = next(VENV.glob("lib/python*/site-packages/litellm/litellm_core_utils/tokenizers"))
    environment = {name: value for name, value in os.environ.items() if not name.lower().endswith("_proxy")} | {
        "OPENAI_BASE_URL": server.endpoint.url,
        "OPENAI_API_KEY": server.storage.key(),
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # no network: what they would download comes with LiteLLM
        "TIKTOKEN_CACHE_DIR": str(tokenizers),
        "HOME": str(folder),  # for caches of answers
    }
    script = ROOT / "tests" / "support" / "clients" / client
    command = [VENV / "bin" / "python", script]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_litellm_chats_and_batches_have_the_same_answers(server, tmp_path):
    said = said_by("ask_litellm.py", server, tmp_path)
    assert len(said["chats"]) == 8 and said["chats"] == said["batch"]
    assert said["chats"] == [server.chat(f"row {number}") for number in range(8)]


def test_lotus_maps_filters_and_aggregates(server, tmp_path):
    said = said_by("ask_lotus.py", server, tmp_path)
    assert len(said["mapped"]) == 4 and len(set(said["mapped"])) > 1 and all(said["mapped"])
    assert said["kept"] == ["a", "b", "c", "d"]  # the model says neither true nor false, and LOTUS takes the default
    assert len(said["joined"]) == 1 and said["joined"][0]


def test_docetl_gets_rows_of_its_schema_by_a_function_and_by_a_schema(server, tmp_path):
    said = said_by("ask_docetl.py", server, tmp_path)
    for rows in (said["by_function"], said["by_schema"]):
        assert [row["id"] for row in rows] == list(range(6))
        assert all(row["kind"] in ("good", "bad") and isinstance(row["certain"], bool) for row in rows)
