"""Jobs whose input and output are URLs with credentials: these are on no screen, in no message and in no file."""

import json

import fsspec
import pytest
from command_line import invoke
from fsspec.implementations.memory import MemoryFileSystem

from batchgen.job.options import JobOptions
from batchgen.job.run_command import run_command

SECRETS = ("SecretKey", "Secret/Password", "SecretSignature")
USER = f"{SECRETS[0]}:{SECRETS[1]}@"


class _LockedFileSystem(MemoryFileSystem):
    """A file system that takes credentials from URLs, and quotes what it was given in its errors."""

    protocol = "locked"
    store = {}
    pseudo_dirs = [""]

    @classmethod
    def _strip_protocol(cls, path):
        path = path.removeprefix("locked://").partition("?sig=")[0]
        if path.lstrip("/").startswith(USER):
            path = path.lstrip("/").removeprefix(USER)
        if "refused" in path:
            raise ValueError(f"may not read {path} as {USER} ({SECRETS[1]})")
        return super()._strip_protocol(path)

    def put_file(self, local, remote, **kwargs):
        if "full" in remote:
            raise RuntimeError(f"no space for {USER}{remote} with {SECRETS[1]}")
        super().put_file(local, remote, **kwargs)


@pytest.fixture
def system(monkeypatch, tmp_path):
    monkeypatch.setenv("BATCHGEN_CACHE", str(tmp_path / "cache"))
    fsspec.register_implementation("locked", _LockedFileSystem, clobber=True)
    found = fsspec.filesystem("locked")
    found.pipe_file("/bucket/in.jsonl", b'{"prompt": "The ferry"}\n{"prompt": "left"}\n')
    yield found
    _LockedFileSystem.store.clear()


def run(model, source, output, *more):
    code, *texts = invoke("run", "-m", model, "-i", source, "-o", output, "--max-tokens", 2, *more)
    for text in texts:
        assert not any(secret in text for secret in SECRETS), text
    return code, *texts


def test_a_job_tells_of_its_urls_without_their_credentials(tiny_models, system, tmp_path):
    model = str(tiny_models("llama")[0])
    source = f"locked://{USER}bucket/in.jsonl?sig={SECRETS[2]}"
    output = f"locked://{USER}bucket/out.jsonl"
    report = tmp_path / "report.json"
    shown = ("--progress", "plain", "--report", report, "--report-html", tmp_path / "page.html")
    code, _, stderr = run(model, source, output, *shown)
    assert code == 0, stderr
    assert len(system.cat_file("/bucket/out.jsonl").splitlines()) == 2
    assert json.loads(report.read_text())["output"] == "locked://***@bucket/out.jsonl"
    code, stdout, _ = run(model, source, output, *shown)
    assert code == 0 and "already complete" in stdout, "it is known again"
    system.pipe_file("/bucket/out.jsonl", b"edited")
    code, _, stderr = run(model, source, output, *shown)
    assert code == 2 and "was changed since this job wrote it" in stderr
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any("manifest" in path.name for path in files)
    for path in files:
        content = path.read_bytes() + str(path).encode()
        assert not any(secret.encode() in content for secret in SECRETS), path


@pytest.mark.parametrize(
    ("source", "output"),
    [
        (f"locked://{USER}bucket/none.jsonl", "out.jsonl"),
        (f"locked://{USER}bucket/none*.jsonl", "out.jsonl"),
        (f"locked://{USER}refused/in.jsonl", "out.jsonl"),
        (f"locked://{USER}bucket/in.jsonl?sig={SECRETS[2]}", f"locked://{USER}bucket/out.xyz"),
        (f"locked://{USER}bucket/in.jsonl", f"locked://{USER}bucket/in.jsonl"),
        (f"locked://{USER}bucket/in.jsonl", f"locked://{USER}refused/out.jsonl"),
        (f"locked://{USER}bucket/in.jsonl", f"locked://{USER}full/out.jsonl"),
        (f"https://{USER}host/in.jsonl?X-Amz-Signature={SECRETS[2]}", "out.jsonl"),
        (f"nowhere://{USER}host/in.jsonl", "out.jsonl"),
        ("in.jsonl", f"https://{USER}host/out.jsonl?sig={SECRETS[2]}"),
    ],
)  # fmt: skip
def test_messages_about_urls_have_no_credentials(tiny_models, system, tmp_path, source, output):
    (tmp_path / "in.jsonl").write_text('{"prompt": "The ferry"}\n')
    model = str(tiny_models("llama")[0])
    source, output = (str(tmp_path / name) if "://" not in name else name for name in (source, output))
    code, _, stderr = run(model, source, output, "--progress", "none")
    assert code in (1, 2) and stderr.count("\n") == 0 and "Traceback" not in stderr


def test_a_command_to_copy_has_no_credentials():
    command = run_command(JobOptions("demo", f"s3://{USER}bucket/in.jsonl?sig={SECRETS[2]}", f"s3://{USER}b/out.jsonl"))
    assert "s3://***@bucket/in.jsonl?sig=***" in command and not any(secret in command for secret in SECRETS)
