"""Models of the hub, which is a server of the tests: their names, what is fetched and when, and what is refused."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import fake_hub
import pytest
from fake_hub import Repository
from tiny_encoders import into_transformer_folder, make_encoder, write_modules, write_router
from tiny_gguf import write_tiny_gguf
from tiny_models import make_tiny_model
from tiny_tokenizers import make_tiny_tokenizer

from batchgen.models import hub as hub_module
from batchgen.models.hub import HubName

# A process that starts one for each line that it reads, which resolves a model, and prints what it is or why it is
# refused. All modules are there but those of the hub's library, which reads the environment when it is imported.
RESOLVER = """
import json, os, sys, traceback
import huggingface_hub.hf_api, huggingface_hub.hf_file_system
from batchgen.core.errors import BatchgenError
from batchgen.models.files import read_config, resolve_for_planning, resolve_model, weight_paths

for name in [name for name in sys.modules if name.partition(".")[0] == "huggingface_hub"]:
    del sys.modules[name]

def resolve(spec, plans):
    try:
        if plans:
            files, config = resolve_for_planning(spec)
            return ["planned", files.name, config.num_layers]
        files = resolve_model(spec)
        return [files.kind, files.name, read_config(files).num_layers, [path.name for path in weight_paths(files)]]
    except BatchgenError as error:
        return ["refused", str(error)]

for line in sys.stdin:
    spec, plans, environment, folder = json.loads(line)
    child = os.fork()
    if child == 0:
        try:
            os.environ.clear()
            os.environ.update(environment)
            os.chdir(folder)
            print(json.dumps(resolve(spec, plans)), flush=True)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    if os.waitpid(child, 0)[1]:
        print(json.dumps(["failed"]), flush=True)
"""


@pytest.fixture(scope="module")
def resolver():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", RESOLVER], text=True, **pipes) as process:
        yield process


@pytest.fixture
def hub():
    """A hub without models."""
    made, server = fake_hub.serve()
    yield made
    server.shutdown()
    server.server_close()


@pytest.fixture
def resolve(hub, resolver, tmp_path):
    """Resolves a model in a new process, with the hub and a cache of this test."""

    def run(spec, *arguments, **variables):
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
        environment |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf-home"), "HF_HUB_DISABLE_XET": "1"}
        environment |= {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "NO_PROXY": "127.0.0.1"} | variables
        print(json.dumps([spec, arguments == ("plan",), environment, str(tmp_path)]), file=resolver.stdin, flush=True)
        found = json.loads(resolver.stdout.readline())
        assert found != ["failed"], "see what it has written to stderr"
        return found

    return run


def refused(found):
    """The message of a refusal, which is one line."""
    assert found[0] == "refused", found
    assert "\n" not in found[1]
    return found[1]


@pytest.fixture
def llama(hub, tmp_path):
    """A repository of a small model with two files of weights, some megabytes together."""
    folder = tmp_path / "hub" / "llama"
    make_tiny_model("llama", folder, max_shard_size="500KB", intermediate_size=2048)
    make_tiny_tokenizer(folder)
    (folder / "consolidated.safetensors").write_bytes(b"not to be fetched")
    hub.repositories["org/llama"] = Repository(folder, ("main", "v1.0", "refs/pr/1"))
    return hub.repositories["org/llama"]


@pytest.fixture
def ggufs(hub, tmp_path):
    """A repository of GGUFs alone: two quantizations, one in a folder and in parts."""
    folder = tmp_path / "hub" / "ggufs"
    (folder / "BF16").mkdir(parents=True)
    model = make_tiny_model("llama", tmp_path / "source")
    write_tiny_gguf(model, folder / "tiny-Q4_K_M.gguf", tokenizer=make_tiny_tokenizer(tmp_path / "source"))
    write_tiny_gguf(model, folder / "tiny-Q4_K_S.gguf")
    write_tiny_gguf(model, folder / "BF16" / "tiny-BF16.gguf", tensors_per_part=10)
    (folder / "mmproj-F16.gguf").write_bytes(b"GGUF of another kind")
    hub.repositories["org/ggufs"] = Repository(folder)
    return hub.repositories["org/ggufs"]


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ("org/name", HubName("org/name")),
        ("gpt2", HubName("gpt2")),
        ("org/name@v1.0", HubName("org/name", "v1.0")),
        ("org/name@refs/pr/1", HubName("org/name", "refs/pr/1")),
        ("org/name:Q4_K_M", HubName("org/name", None, "Q4_K_M")),
        ("org/name@main:UD-Q4_K_XL", HubName("org/name", "main", "UD-Q4_K_XL")),
        ("org/name/file.gguf", HubName("org/name", None, "file.gguf")),
        ("org/name@v1/folder/file.gguf", HubName("org/name", "v1", "folder/file.gguf")),
        ("folder/file.gguf", None),
        ("/org/name", None),
        ("./name", None),
        ("a/b/c", None),
        ("org/name@", None),
        ("org/na me", None),
    ],
)
def test_names(spec, name):
    assert HubName.parse(spec) == name


def test_a_model_is_fetched_and_then_needs_no_network(hub, resolve, llama):
    found = resolve("org/llama@v1.0")
    assert found[:3] == ["hf", "org/llama@v1.0", 3] and len(found[3]) > 1
    assert hub.sent_bytes(".safetensors") == sum(
        path.stat().st_size for path in llama.folder.glob("model*.safetensors")
    )
    sent = len(hub.sent)
    assert resolve("org/llama@v1.0") == found and len(hub.sent) == sent
    assert resolve("org/llama@v1.0", HF_HUB_OFFLINE="1") == found
    assert resolve("org/llama@v1.0", HF_ENDPOINT="http://127.0.0.1:9") == found, "the hub cannot be reached"
    assert resolve(f"org/llama@{llama.commit}", HF_HUB_OFFLINE="1")[3] == found[3]


def test_modules_of_sentence_transformers_are_fetched_with_their_model(hub, resolve, tmp_path):
    """Each has files in a folder of its own, and so may the Transformer, and those that a Router names."""
    folder = tmp_path / "hub" / "encoder"
    make_encoder("BertModel", folder)
    dense = write_modules(folder, "mean_tokens", dense=(64, 24))
    (folder / "onnx").mkdir()
    (folder / "onnx" / "model.safetensors").write_bytes(b"not to be fetched")
    hub.repositories["org/encoder"] = Repository(folder)
    assert resolve("org/encoder")[0] == "hf"
    fetched = {name for name, _, _ in hub.sent}
    assert {"1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"} <= fetched and dense
    assert "onnx/model.safetensors" not in fetched
    routed = tmp_path / "hub" / "routed"
    shutil.copytree(folder, routed)
    into_transformer_folder(routed)
    write_router(routed, {"query": ["0_Transformer", "1_Pooling"], "document": ["0_Transformer", "2_Dense"]}, "query")
    hub.repositories["org/routed"] = Repository(routed)
    hub.sent.clear()
    assert resolve("org/routed", "plan") == ["planned", "org/routed", 3]
    assert not hub.sent_bytes(".safetensors")
    found = resolve("org/routed")
    assert found[1:] == ["org/routed", 3, ["model.safetensors"]]
    sent = {name for name, _, _ in hub.sent}
    assert {"1_Pooling/config.json", "2_Dense/model.safetensors", "0_Transformer/model.safetensors"} <= sent
    assert resolve("org/routed", HF_HUB_OFFLINE="1") == found


def test_a_plan_fetches_no_weights_and_a_job_does_not_take_them_for_there(hub, resolve, llama):
    assert resolve("org/llama", "plan") == ["planned", "org/llama", 3]
    assert hub.sent_bytes(".safetensors") == 0
    message = refused(resolve("org/llama", HF_HUB_OFFLINE="1"))
    assert "org/llama is not in the cache with all its files, and HF_HUB_OFFLINE is set" in message
    assert resolve("org/llama", "plan", HF_HUB_OFFLINE="1") == ["planned", "org/llama", 3]


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"architectures": ["GPTJForCausalLM"], "model_type": "gptj"}, "GPTJForCausalLM"),
        ({"quantization_config": {"quant_method": "aqlm"}}, "aqlm"),
    ],
)
def test_a_model_that_is_not_supported_is_refused_before_its_weights_are_fetched(hub, resolve, llama, changed, named):
    path = llama.folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    assert named in refused(resolve("org/llama"))
    assert hub.sent_bytes(".safetensors") == 0


def test_a_download_whose_connection_breaks_goes_on(hub, resolve, tmp_path):
    """The hub's library keeps what has come in pieces of 10 MiB."""
    made = Repository(tmp_path / "hub", cut_at=12 << 20, cuts=1)
    make_tiny_model("llama", made.folder, vocab_size=60_000)
    hub.repositories["org/large"] = made
    assert resolve("org/large")[0] == "hf"
    size = (made.folder / "model.safetensors").stat().st_size
    sent = [(first, first + count) for name, first, count in hub.sent if name == "model.safetensors"]
    assert sent == [(0, 12 << 20), (10 << 20, size)]


def test_files_that_were_complete_when_a_download_ended_are_kept(hub, resolve, llama):
    weights = sorted(llama.folder.glob("model*.safetensors"), key=lambda path: path.stat().st_size)
    llama.cut_at, llama.cuts = weights[-1].stat().st_size - 1, 100
    message = refused(resolve("org/llama"))
    assert message.startswith("model org/llama is not a local path and could not be fetched from the hub")
    sizes = {path.name: path.stat().st_size for path in weights}
    complete = {name for name, first, count in hub.sent if first + count == sizes.get(name)}
    llama.cuts, before = 0, len(hub.sent)
    assert resolve("org/llama")[0] == "hf"
    again = {name for name, _, _ in hub.sent[before:]}
    assert complete and complete | again == sizes.keys() and not complete & again


def test_a_gguf_is_named_by_its_quantization_or_its_file(hub, resolve, ggufs):
    found = resolve("org/ggufs:q4_k_m")
    assert found == ["gguf", "org/ggufs:q4_k_m", 3, ["tiny-Q4_K_M.gguf"]]
    assert hub.sent_bytes("Q4_K_S.gguf") == hub.sent_bytes("BF16.gguf") == 0
    assert resolve("org/ggufs/tiny-Q4_K_M.gguf")[3] == found[3]
    split = resolve("org/ggufs:BF16")
    assert split[0] == "gguf", split
    assert len(split[3]) > 1 and split[3][0].startswith("tiny-BF16-00001-of-")
    for spec, expected in (("org/ggufs:q4_k_m", found), ("org/ggufs:BF16", split)):
        assert resolve(spec, HF_HUB_OFFLINE="1") == resolve(spec, HF_ENDPOINT="http://127.0.0.1:9") == expected


def test_ggufs_that_a_name_does_not_say_are_listed(hub, resolve, ggufs):
    tags = "org/ggufs:BF16, org/ggufs:Q4_K_M, org/ggufs:Q4_K_S"
    assert refused(resolve("org/ggufs")).endswith(f"has no config.json, but GGUFs: it has {tags}")
    assert refused(resolve("org/ggufs:Q8_0")).endswith(f"has no GGUF 'Q8_0': it has {tags}")
    assert refused(resolve("org/ggufs:tiny")).startswith("model org/ggufs has several GGUFs 'tiny': give the file, one")
    assert "has no GGUF 'other.gguf'" in refused(resolve("org/ggufs/other.gguf"))
    assert hub.sent_bytes(".gguf") == 0


def test_a_gguf_of_another_architecture_is_refused_before_it_is_fetched(hub, resolve, ggufs):
    path = ggufs.folder / "tiny-Q4_K_M.gguf"
    content = path.read_bytes().replace(b"\x05\0\0\0\0\0\0\0llama", b"\x05\0\0\0\0\0\0\0mamba", 1)
    path.write_bytes(content + bytes(1 << 20))
    assert "GGUF architecture 'mamba' is not supported" in refused(resolve("org/ggufs:Q4_K_M"))
    assert hub.sent_bytes(".gguf") <= 1 << 17


def test_what_the_hub_refuses_is_one_line_that_says_what_to_do(hub, resolve, llama):
    assert refused(resolve("org/llama@v9")) == (
        "model org/llama has no revision 'v9' on the hub: give a branch, tag or commit of it, or leave out @v9"
    )
    message = refused(resolve("org/other"))
    assert message.startswith("org/other is not a local path, and the hub has no such model that you may read")
    assert "hf auth login" in message
    llama.gated = True
    assert refused(resolve("org/llama")) == (
        f"model org/llama is gated: ask for access at {hub.url}/org/llama, then log in with `hf auth login`, or set "
        "HF_TOKEN"
    )
    llama.private = True
    assert "the hub has no such model that you may read" in refused(resolve("org/llama"))


def test_a_hub_that_cannot_be_reached_is_one_line(resolve):
    message = refused(resolve("org/llama", HF_ENDPOINT="http://127.0.0.1:9"))
    assert message.startswith("model org/llama is not a local path and could not be fetched from the hub (")
    assert message.endswith(": check its name and the network, or give a directory that has it")
    message = refused(resolve("org/llama:Q4_K_M", HF_HUB_OFFLINE="1"))
    assert "org/llama is not in the cache with all its files, and HF_HUB_OFFLINE is set" in message


def test_a_full_disk_is_one_line(monkeypatch):
    import huggingface_hub

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/somewhere")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", full)
    with pytest.raises(hub_module.InputError, match=r"^the disk of \S+ is full: free some space, or set HF_HOME"):
        hub_module.fetch_configuration(HubName("org/name"))


def test_a_local_path_comes_first(resolve, llama, tmp_path):
    make_tiny_model("llama", tmp_path / "org" / "llama", num_hidden_layers=1)
    assert resolve("org/llama")[2] == 1
    assert Path(tmp_path, "org", "llama").is_dir()
