"""Whole engines on a CUDA card, where there is one: tokens are those of the CPU, memory is no more than asked for."""

import random
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from quantized_checkpoints import fp8, gptq, requantize
from tiered import CPU, everything_moves, generate, make_parts, make_policy
from tiny_gguf import write_tiny_gguf
from tiny_models import make_tiny_model
from tiny_tokenizers import make_tiny_tokenizer

from batchgen import Engine, Request, SamplingParams
from batchgen.core.cache_folder import cache_dir
from batchgen.core.device import Device
from batchgen.core.errors import InputError
from batchgen.engine import loader as loading
from batchgen.engine.loader import native_formats
from batchgen.models.downloads import DEMO_MEMBER
from batchgen.models.files import read_config, resolve_model, resolve_weights

FP8_BY_BLOCKS = fp8(
    lambda r, c: (r // 128, c // 128), {"quant_method": "fp8", "weight_block_size": [128, 128]}, "weight_scale_inv"
)
on_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def rows(count, vocab_size, longest=90):
    draw = random.Random(7)
    return [[draw.randrange(vocab_size) for _ in range(draw.randrange(1, longest))] for _ in range(count)]


def completions(model, prompts, *, sampling=None, **options):
    """Completions in order. Several processes share a card, so each engine has a part of its memory."""
    sampling = sampling or SamplingParams(max_tokens=12)
    if options["device"] == "cuda":
        options = {"gpu_memory": "3GiB"} | options
    with Engine(model, cpu_memory="6GiB", sampling=sampling, **options) as engine:
        return sorted(engine.generate([Request(p) for p in prompts]), key=lambda c: c.index)


def token_ids(done):
    return [c.samples[0].token_ids for c in done]


def check_greedy_tokens(path, admission):
    prompts = rows(64, 400)
    options = {"dtype": "float32", "admission": admission}
    expected = token_ids(completions(path, prompts, device="cpu", **options))
    assert token_ids(completions(path, prompts, device="cuda", gpu_memory="3GiB", **options)) == expected


@pytest.mark.gpu
@on_card
@pytest.mark.parametrize("admission", ["continuous", "static"])
@pytest.mark.parametrize("family", ["llama", "opt", "qwen3"])
def test_greedy_tokens_are_those_of_the_cpu(tiny_models, family, admission):
    check_greedy_tokens(str(tiny_models(family)[0]), admission)


@pytest.mark.gpu
@on_card
@pytest.mark.parametrize(("family", "admission"), [("qwen3_moe", "static"), ("gpt_oss", "continuous")])
def test_greedy_tokens_of_experts_are_those_of_the_cpu(tiny_models, family, admission):
    check_greedy_tokens(str(tiny_models(family)[0]), admission)


@pytest.mark.gpu
@on_card
def test_tokens_where_everything_moves_are_those_of_the_cpu(tiny_models, tmp_path):
    """Weights of 4 bits in all tiers, KV in every placement, activations that leave the card."""
    path = tiny_models("llama")[0]
    prompts = rows(12, 400, longest=60)
    expected, on_card = (
        generate(make_parts(path, device, policy, tmp_path), prompts, [12] * len(prompts))
        for device, policy in (
            (CPU, make_policy(path, CPU, weight_format="int4")),
            (Device("cuda"), everything_moves(path)),
        )
    )
    assert on_card == expected


@pytest.mark.gpu
@on_card
@pytest.mark.parametrize("scheme", ["fp8_g128", "w4_g64", "q8_0", "q4_k"])
def test_weights_stay_as_they_are_found(scheme, tmp_path):
    """Tokens are those of the CPU, also with embeddings in blocks. A card before Ampere expands weights, or refuses."""
    tokenizer = make_tiny_tokenizer(tmp_path)
    model = make_tiny_model("llama", tmp_path, hidden_size=256, intermediate_size=512, head_dim=128)
    requantized, path = {"fp8_g128": FP8_BY_BLOCKS, "w4_g64": gptq(64)}.get(scheme), tmp_path
    if requantized is None:
        path = tmp_path / "model.gguf"
        write_tiny_gguf(model, path, tensor_type=scheme.upper(), tokenizer=tokenizer)
    else:
        requantize(path, requantized)
    asked, resolved = "native", scheme
    if torch.cuda.get_device_capability() < (8, 0):
        asked, resolved = "auto", "dequantized"
        with pytest.raises(InputError, match=f"--weights native: this device does not multiply weights in {scheme}"):
            Engine(str(path), device="cuda", weights="native")
    assert resolve_weights(resolve_model(str(path)), asked, native_formats(Device("cuda"))) == resolved
    prompts, dtype = rows(12, 400, longest=40), "float32"
    expected = token_ids(completions(str(path), prompts, device="cpu", dtype=dtype, weights="native"))
    done = completions(str(path), prompts, device="cuda", dtype=dtype, weights=asked, gpu_memory="2GiB")
    assert token_ids(done) == expected


@pytest.mark.gpu
@on_card
@pytest.mark.skipif(not (cache_dir() / Path(DEMO_MEMBER).name).exists(), reason="the demo model is not here")
@pytest.mark.skipif(find_spec("gguf") is None, reason="the demo model is read with gguf")
def test_greedy_tokens_of_the_demo_model_are_those_of_the_cpu():
    prompts = rows(64, 40_000)
    expected = token_ids(completions("demo", prompts, device="cpu", dtype="float32"))
    assert token_ids(completions("demo", prompts, device="cuda", dtype="float32")) == expected


@pytest.mark.gpu
@on_card
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_log_probabilities_in_16_bits_are_as_near_as_those_of_the_cpu(tiny_models, dtype):
    """To those in fp32: rounding is in other places, but not more of it."""
    path = str(tiny_models("llama")[0])
    prompts, sampling = rows(32, 400), SamplingParams(max_tokens=1, logprobs=5)
    wide, on_cpu, on_card = (
        completions(path, prompts, sampling=sampling, device=device, dtype=name)
        for device, name in (("cpu", "float32"), ("cpu", dtype), ("cuda", dtype))
    )
    by_cpu, by_card = (distances(narrow, wide) for narrow in (on_cpu, on_card))
    assert len(by_card) >= 0.9 * 5 * len(prompts)
    assert sum(by_card) / len(by_card) < 1.2 * sum(by_cpu) / len(by_cpu)
    assert max(by_card) < 1.5 * max(by_cpu)


def distances(done, others):
    """Distances of the log-probabilities of tokens that are among the most likely ones in both."""
    pairs = []
    for one, other in zip(done, others, strict=True):
        found = {t.token_id: t.logprob for t in one.samples[0].logprobs[0].top}
        tops = other.samples[0].logprobs[0].top
        pairs += [(t.logprob, found[t.token_id]) for t in tops if t.token_id in found]
    return [abs(x - y) for x, y in pairs]


@pytest.mark.gpu
@on_card
def test_a_card_behaves_as_a_smaller_one(tiny_models):
    from batchgen.runtime.cuda import _CONTEXT_BYTES

    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    completions(str(tiny_models("llama")[0]), rows(40, 400), device="cuda", gpu_memory="2GiB", dtype="float32")
    assert torch.cuda.max_memory_reserved() <= (2 << 30) - _CONTEXT_BYTES
    with pytest.raises(torch.OutOfMemoryError):
        torch.empty(3 << 30, dtype=torch.uint8, device="cuda")
    torch.cuda.set_per_process_memory_fraction(1.0)


@pytest.mark.gpu
@on_card
def test_more_memory_than_the_card_has_is_refused(tiny_models):
    with pytest.raises(InputError, match="this GPU has"):
        Engine(str(tiny_models("llama")[0]), device="cuda", gpu_memory="4000GiB")


def test_gpu_memory_without_a_gpu_is_refused(tiny_models):
    with pytest.raises(InputError, match="--gpu-memory is given, but no GPU is used"):
        Engine(str(tiny_models("llama")[0]), device="cpu", gpu_memory="1GiB")


@pytest.mark.parametrize(("capability", "expected"), [((7, 5), "float16"), ((8, 0), "bfloat16"), ((9, 0), "bfloat16")])
def test_auto_is_the_16_bits_that_the_card_multiplies(tiny_models, monkeypatch, capability, expected):
    """bfloat16 is emulated on a T4."""
    monkeypatch.setattr(loading, "compute_capability", lambda: capability)
    stored = read_config(resolve_model(str(tiny_models("llama")[0])))
    assert loading.resolve_dtype(replace(stored, dtype="bfloat16"), "auto", Device("cuda")) == expected
    assert loading.resolve_dtype(stored, "auto", Device("cuda")) == "float32"
    assert loading.resolve_dtype(stored, "bfloat16", Device("cuda")) == "bfloat16"
