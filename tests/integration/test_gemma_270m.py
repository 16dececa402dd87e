"""A real file of mixed block formats: Gemma 3 270M in Q4_K_M, in fp32, against transformers with the same weights."""

import json

import gemma_270m
import pytest
from demo_answers import TIE, greedy_choices
from gemma_270m import MAX_TOKENS, PROMPTS, TOKENS
from thorough import quick_or
from tiered import CPU, EMULATED, generate, make_parts, make_policy

from batchgen.core.dtypes import MIXED
from batchgen.engine.loader import needs_store
from batchgen.models.files import read_config, resolve_model
from batchgen.models.kept_stores import find_or_convert
from batchgen.models.tokenizers.loading import load_tokenizer

STORED = json.loads(TOKENS.read_text())
CHATS = (
    "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content | trim }}<end_of_turn>\n"
    "{% endfor %}{{ '<start_of_turn>model\n' }}"
)


@pytest.fixture(scope="module")
def model():
    return gemma_270m.gemma_file()


def test_the_tokenizer_and_the_ends_of_texts_are_those_of_the_file(model):
    """The file names <eos>; <end_of_turn> and </s> end a text because of what they are called."""
    files = resolve_model(str(model))
    tokenizer = load_tokenizer(files)
    assert tokenizer.encode_batch(PROMPTS) == [row["prompt"] for row in STORED]
    ends = [tokenizer.token_id(token) for token in ("<eos>", "<end_of_turn>", "</s>")]
    assert sorted(read_config(files).eos_token_ids) == sorted(ends)
    assert not tokenizer.has_chat_template
    chats = load_tokenizer(files, chat_template=CHATS)
    bos, begin, end = map(tokenizer.token_id, ("<bos>", "<start_of_turn>", "<end_of_turn>"))
    prompt = chats.encode_chat([{"role": "user", "content": "Where to? "}])
    assert (prompt[:2], prompt.count(bos), prompt.count(begin), prompt.count(end)) == ([bos, begin], 1, 2, 1)
    assert chats.decode(prompt, skip_special_tokens=False).endswith("Where to?<end_of_turn>\n<start_of_turn>model\n")


GROUPS = ("qkv", "out", "up", "down")
PLACEMENTS = {
    "in memory, dequantized": (CPU, {}),
    "as found, two of three layers on disk": (
        CPU,
        {"weight_layers": dict.fromkeys(GROUPS, (0, 6, 12)), "weight_format": MIXED},
    ),
    "on a device, with weights and sequences in every tier": (
        EMULATED,
        {
            "weight_layers": dict.fromkeys(GROUPS, (6, 6, 6)),
            "weight_format": MIXED,
            "head_tier": "cpu",
            "kv_seqs": {"gpu": 3, "cpu": 2, "streamed": 1, "disk": 1, "deferred": 1},
        },
    ),
}


def generated(model, folder, device, count, **changes):
    """The first `count` tokens of each row."""
    lengths = {"max_model_len": 1024, "max_num_batched_tokens": 512, "gpu_batch_size": 8}
    policy = make_policy(model, device, **lengths | changes)
    files = resolve_model(str(model))
    store = find_or_convert(files, folder, "float32", MIXED) if needs_store(policy) else None
    parts = make_parts(model, device, policy, folder, store=store, longest_tokens=1024, most_kv_tokens=8192)
    return generate(parts, [row["prompt"] for row in STORED], [count] * len(STORED))


@pytest.mark.slow
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_greedy_tokens_equal_those_of_transformers(placement, model, tmp_path):
    """As stored. A row is compared up to its first tie that went the other way."""
    device, changes = PLACEMENTS[placement]
    count = quick_or(4 if device is EMULATED else 8, MAX_TOKENS)
    ties = 0
    for tokens, row in zip(generated(model, tmp_path, device, count, **changes), STORED, strict=True):
        assert len(tokens) == count
        differs = next((at for at in range(count) if tokens[at] != row["tokens"][at]), None)
        assert differs is None or differs in row["ties"], (row["prompt"][:20], differs)
        ties += differs is not None
    assert ties <= 1


@pytest.mark.slow
@pytest.mark.thorough
def test_the_stored_tokens_are_those_of_transformers_itself():
    """Each token is compared with the reference's choice after the same tokens."""
    hf = gemma_270m.load_hf()
    for row in STORED:
        choices, ahead = greedy_choices(hf, row["prompt"], row["tokens"])
        assert all(ahead[at] <= TIE for at in range(MAX_TOKENS) if choices[at] != row["tokens"][at])
