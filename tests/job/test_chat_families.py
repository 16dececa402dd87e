"""Chats of each family, from a template of its shape to an answer that its own end token ends.

Templates are short ones with the turns that the family's have. A model's weights are written so that it answers a
script.
"""

import itertools
import json
from dataclasses import dataclass

import pytest
import torch
from tiny_models import make_tiny_model
from tiny_tokenizers import make_tiny_tokenizer

import batchgen
from batchgen.core.errors import RowError
from batchgen.core.request import ChatOptions
from batchgen.models.files import read_config, resolve_model
from batchgen.models.tokenizers.loading import load_tokenizer

ANSWER = "Yes. They came"
THOUGHT = "Hmm, two"  # which begins with a token that is in no prompt
TURNS = [
    [{"role": "user", "content": "Still, people came?"}],
    [
        {"role": "user", "content": "Which day has two sailings? "},
        {"role": "assistant", "content": "None of them."},
        {"role": "user", "content": "In winter?"},
    ],
]
SYSTEM = {"role": "system", "content": "Be short."}


@dataclass(frozen=True)
class Family:
    """A family of chat models.

    Attributes:
        template: the chat template.
        tokens: special tokens beside bos and eos.
        ends: the end tokens of the model's generation_config.json, not of its tokenizer.
        says: what a model says, with THOUGHT before ANSWER.
        on, off: arguments of the template with which the model thinks, and with which it does not; None: nothing
            switches its thinking off.
    """

    model: str
    template: str
    tokens: tuple[str, ...]
    ends: tuple[str, ...]
    bos: str = "<s>"
    eos: str = "</s>"
    has_system: bool = True
    words: tuple[str, ...] = ()  # tokens that are no special ones
    says: str = ANSWER
    on: tuple = ()
    off: tuple | None = None

    @property
    def thinks(self):
        return THOUGHT in self.says


_GEMMA = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.role == 'system' %}{{ raise_exception('no system role here') }}{% endif %}"
    "<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
_PHI_3 = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}"
)
_LLAMA_3 = (
    "{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
    "{{ m.content | trim }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
_MISTRAL = (
    "{{ bos_token }}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('user and assistant take turns') }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
_HARMONY = (
    "<|start|>system<|message|>Channels: analysis, final.<|end|>"
    "{% for m in messages %}"
    "{% if m.role in ('system', 'developer') %}<|start|>developer<|message|># Instructions\n\n{{ m.content }}<|end|>"
    "{% elif m.role == 'assistant' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
)
# The prompt begins the thoughts, or ends them at once.
_QWEN_3_5 = _CHATML + (
    "{% if enable_thinking is defined and enable_thinking is false %}<think>\n\n</think>\n\n"
    "{% else %}<think>\n{% endif %}{% endif %}"
)
# Its thoughts' tags are no tokens.
_OLMO_3 = _CHATML + "<think>{% endif %}"
_LFM_2 = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% generation %}{{ m.content.split('</think>')[-1] | trim }}{% endgeneration %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SMOL_3 = (
    "{% set first = messages[0].content if messages[0].role == 'system' else 'Help.' %}"
    "{% set thinks = enable_thinking is not defined or enable_thinking %}"
    "{% if '/no_think' in first %}{% set thinks = false %}{% endif %}"
    "<|im_start|>system\nToday: {{ strftime_now('%d %B %Y') }}\nMode: {{ '/think' if thinks else '/no_think' }}\n"
    "{{ first.replace('/no_think', '').replace('/think', '').rstrip() }}<|im_end|>\n"
    "{% for m in messages if m.role != 'system' %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if not thinks %}<think>\n\n</think>\n{% endif %}"
    "{% endif %}"
)
# Thinking is asked for within the system's turn, and without it the prompt has an empty channel of thoughts.
_GEMMA_4 = (
    "{{ bos_token }}{% set thinks = enable_thinking | default(false) %}"
    "{% set speaks = messages[0].role in ('system', 'developer') %}"
    "{% if thinks or speaks %}<|turn>system\n{{ '<|think|>' if thinks }}"
    "{{ messages[0].content | trim if speaks }}<turn|>\n{% endif %}"
    "{% for m in messages[1 if speaks else 0:] %}<|turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content.split('<channel|>')[-1] | trim }}<turn|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn>model\n{{ '' if thinks else '<|channel>thought\n<channel|>' }}{% endif %}"
)
_MINISTRAL_3 = (
    "{{ bos_token }}{% set speaks = messages[0].role == 'system' %}"
    "[SYSTEM_PROMPT]{{ messages[0].content if speaks else 'Draft [THINK]thoughts[/THINK] first.' }}[/SYSTEM_PROMPT]"
    "{% for m in messages[1 if speaks else 0:] %}"
    "{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]{% else %}{{ m.content }}{{ eos_token }}{% endif %}"
    "{% endfor %}"
)
_GRANITE = (
    "{% set speaks = messages[0].role == 'system' %}"
    "<|start_of_role|>system<|end_of_role|>{{ messages[0].content if speaks else 'Help.' }}"
    "{{ ' Write thoughts between <think></think> and the response between <response></response>.' if thinking }}"
    "<|end_of_text|>\n{% for m in messages[1 if speaks else 0:] %}"
    "<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}<|end_of_text|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start_of_role|>assistant<|end_of_role|>{% endif %}"
)
_SEED = (
    "{% if not thinking_budget is defined %}{% set thinking_budget = -1 %}{% endif %}"
    "{% for m in messages %}{{ bos_token }}{{ m.role }}\n{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ bos_token }}assistant\n"
    "{{ '<seed:think><seed:cot_budget_reflect>' if thinking_budget == 0 }}{% endif %}"
)
_THINK_TOKENS = ("<think>", "</think>")
_CHATML_TOKENS = ("<|im_start|>",)
_SEED_TOKENS = ("<seed:think>", "</seed:think>", "<seed:cot_budget_reflect>", "</seed:cot_budget_reflect>")
_GEMMA_TOKENS = ("<start_of_turn>", "<end_of_turn>")
_LLAMA_TOKENS = ("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>")
_LLAMA_BOS, _LLAMA_EOS = "<|begin_of_text|>", "<|end_of_text|>"
FAMILIES = {
    "Gemma 2": Family("gemma2", _GEMMA, _GEMMA_TOKENS, ("<eos>", "<end_of_turn>"), "<bos>", "<eos>", has_system=False),
    "Gemma 3": Family("gemma3", _GEMMA, _GEMMA_TOKENS, ("<eos>", "<end_of_turn>"), "<bos>", "<eos>", has_system=False),
    "Phi-3": Family(
        "phi3", _PHI_3, ("<|system|>", "<|user|>", "<|assistant|>", "<|end|>"), ("<|endoftext|>", "<|end|>"),
        eos="<|endoftext|>"
    ),
    "Phi-4": Family(
        "phi3", _PHI_3.replace("\n", ""), ("<|system|>", "<|user|>", "<|assistant|>"), ("<|endoftext|>", "<|end|>"),
        eos="<|endoftext|>", words=("<|end|>",),
    ),
    "Llama 3": Family(
        "llama", _LLAMA_3, _LLAMA_TOKENS, (_LLAMA_EOS, "<|eom_id|>", "<|eot_id|>"), _LLAMA_BOS, _LLAMA_EOS
    ),
    "Llama 3, whose tokenizer names its end": Family(
        "llama", _LLAMA_3, _LLAMA_TOKENS, (_LLAMA_EOS,), _LLAMA_BOS, "<|eot_id|>",
    ),
    "Mistral": Family("mistral", _MISTRAL, ("[INST]", "[/INST]"), ("</s>",), has_system=False),
    "Mixtral": Family("mixtral", _MISTRAL, (), ("</s>",), has_system=False),
    "gpt-oss": Family(
        "gpt_oss", _HARMONY, ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>"),
        ("<|return|>", "<|endoftext|>", "<|call|>"),
        "<|startoftext|>", "<|return|>", words=("system", "developer", "user", "assistant", "analysis", "final"),
        says=f"<|channel|>analysis<|message|>{THOUGHT}<|end|><|start|>assistant<|channel|>final<|message|>{ANSWER}",
    ),
    "Qwen3.5": Family(
        "qwen3", _QWEN_3_5, _CHATML_TOKENS, ("<|im_end|>", "<|endoftext|>"), "<|endoftext|>", "<|im_end|>",
        words=_THINK_TOKENS, says=f"{THOUGHT}</think>{ANSWER}", off=(("enable_thinking", False),),
    ),
    "SmolLM3": Family(
        "llama", _SMOL_3, _CHATML_TOKENS, ("<|im_end|>",), "<|begin_of_text|>", "<|im_end|>",
        words=_THINK_TOKENS, says=f"<think>{THOUGHT}</think>{ANSWER}", off=(("enable_thinking", False),),
    ),
    "Gemma 4": Family(
        "gemma3", _GEMMA_4, ("<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|think|>"),
        ("<eos>", "<turn|>", "<|tool_response>"), "<bos>", "<eos>", words=("thought\n",),
        says=f"<|channel>thought\n{THOUGHT}<channel|>{ANSWER}", on=(("enable_thinking", True),), off=(),
    ),
    "Olmo 3": Family(
        "llama", _OLMO_3, _CHATML_TOKENS, ("<|im_end|>", "<|endoftext|>"), "<|endoftext|>", "<|endoftext|>",
        words=(">\n\n",), says=f"{THOUGHT}</think>\n\n{ANSWER}",
    ),
    "Ministral 3": Family(
        "mistral", _MINISTRAL_3, ("[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[THINK]", "[/THINK]"),
        ("</s>",), says=f"[THINK]{THOUGHT}[/THINK]{ANSWER}",
    ),
    "Granite 3.3": Family(
        "llama", _GRANITE, ("<|start_of_role|>", "<|end_of_role|>"), ("<|end_of_text|>",),
        "<|end_of_text|>", "<|end_of_text|>", words=(*_THINK_TOKENS, "<response>", "</response>"),
        says=f"<think>{THOUGHT}</think><response>{ANSWER}</response>", on=(("thinking", True),), off=(),
    ),
    "Granite 4": Family(
        "llama", _GRANITE[: _GRANITE.index("{{ ' Write")] + _GRANITE[_GRANITE.index("<|end_of_text|>") :],
        ("<|start_of_role|>", "<|end_of_role|>"), ("<|end_of_text|>",), "<|end_of_text|>", "<|end_of_text|>",
    ),
    "Seed-OSS": Family(
        "llama", _SEED, _SEED_TOKENS, ("<seed:eos>",), "<seed:bos>", "<seed:eos>",
        says=f"<seed:think>{THOUGHT}</seed:think>{ANSWER}",
    ),
    "Seed-OSS without a budget": Family(
        "llama", _SEED, _SEED_TOKENS, ("<seed:eos>",), "<seed:bos>", "<seed:eos>",
        says=f"{THOUGHT}</seed:cot_budget_reflect></seed:think>{ANSWER}", on=(("thinking_budget", 0),),
    ),
    "LFM2.5": Family(
        "llama", _LFM_2, _CHATML_TOKENS, ("<|im_end|>",), "<|startoftext|>", "<|im_end|>",
        words=_THINK_TOKENS, says=f"<think>{THOUGHT}</think>{ANSWER}",
    ),
}  # fmt: skip
THINKERS = [name for name, family in FAMILIES.items() if family.thinks]
CASES = [(name, end) for name, family in FAMILIES.items() for end in {**dict.fromkeys(family.ends), family.eos: None}]


def make_tokenizer(folder, family):
    """With the family's tokens; like most it begins every text that is no chat with bos, if that can be said."""
    from tokenizers import processors

    hf = make_tiny_tokenizer(folder, chat_template=family.template)
    others = [token for token in (*family.tokens, *family.ends) if token not in family.words]
    hf.add_special_tokens({"bos_token": family.bos, "eos_token": family.eos, "additional_special_tokens": others})
    hf.add_tokens([*family.words, *(["Hmm"] if family.thinks else [])])
    if ":" not in family.bos:
        hf.backend_tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{family.bos} $A", special_tokens=[(family.bos, hf.bos_token_id)]
        )
    hf.save_pretrained(folder)
    return hf


def make_scripted(folder, family, hf, script, marker=None):
    """A model of one layer that follows the script: after each of its tokens comes the next one.

    marker: A token after whose first appearance the script is read from there, where the same token is followed by two
    others in turn.
    """
    hidden = 576
    model = make_tiny_model(
        family.model, folder, vocab_size=len(hf), hidden_size=hidden, num_hidden_layers=1, num_attention_heads=9,
        num_key_value_heads=3, head_dim=64, intermediate_size=32, tie_word_embeddings=False,
        **{"layer_types": ["full_attention"]} if family.model == "gpt_oss" else {},
    )  # fmt: skip
    assert len(hf) < hidden
    table = model.model.embed_tokens.weight
    with torch.no_grad():
        for name, weight in model.named_parameters():  # gemma's norms add 1 themselves
            weight.fill_(float(name.endswith("norm.weight") and not family.model.startswith("gemma")))
        table[:, : len(hf)] = torch.eye(len(hf))
        for now, following in itertools.pairwise(script):
            second = model.lm_head.weight[:, now].any()
            # Of two, the first, but for what attention has seen of the marker.
            model.lm_head.weight[following, now] = 0.0999 if second else 0.1
            if second:
                model.lm_head.weight[following, hidden - 1] = 0.05
        if marker is not None:  # attention is the mean of all tokens' values: whether the marker is one of them
            attention = model.model.layers[0].self_attn
            attention.v_proj.weight[0, marker] = 1.0
            attention.o_proj.weight[hidden - 1, 0] = 1.0
    model.generation_config.eos_token_id = hf.convert_tokens_to_ids([*family.ends])
    model.generation_config.do_sample = False
    model.save_pretrained(folder)
    hf.save_pretrained(folder)
    return model


def generated_by_transformers(model, hf, messages, on=()):
    ids = hf.apply_chat_template(
        messages, add_generation_prompt=True, return_tensors="pt", return_dict=True, **dict(on)
    )
    with torch.inference_mode():
        out = model.generate(**ids, max_new_tokens=40, pad_token_id=3)
    return out[0, ids["input_ids"].shape[1] :].tolist()


def run(folder, chats, on=(), **more):
    rows = folder / "rows.jsonl"
    rows.write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in chats))
    options = {"dtype": "float32", "cpu_memory": "4GiB", "max_tokens": 40, "messages_column": "messages"}
    options |= {"chat_template_kwargs": dict(on) or None, **more}
    batchgen.run(str(folder / "model"), str(rows), str(folder / "out.jsonl"), offload_dir=folder, **options)
    return [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]


@pytest.fixture
def model_of(tmp_path):
    """(name of a family, its end token, what it says) -> (the model, its tokenizer, chats, ids of what it says)."""

    def make(name, end, text=None, on=None):
        family, folder = FAMILIES[name], tmp_path / "model"
        folder.mkdir()
        hf = make_tokenizer(folder, family)
        chats = [*TURNS, *([[SYSTEM, *messages] for messages in TURNS] if family.has_system else [])]
        on = dict(family.on if on is None else on)
        last = {hf.apply_chat_template(chat, add_generation_prompt=True, **on)["input_ids"][-1] for chat in chats}
        text, marker = text or family.says, None
        if name == "gpt-oss":
            (marker,) = hf.encode(THOUGHT, add_special_tokens=False)[:1]
        ids = hf.encode(f"{text}{end}", add_special_tokens=False)
        model = make_scripted(folder, family, hf, [*last, *ids], marker)
        return model, hf, chats, ids

    return make


@pytest.mark.parametrize("name", FAMILIES)
def test_the_prompt_has_the_tokens_of_transformers(name, tmp_path):
    family = FAMILIES[name]
    make_tiny_model(family.model, tmp_path)
    hf = make_tokenizer(tmp_path, family)
    ours = load_tokenizer(resolve_model(str(tmp_path)))
    for messages in TURNS:
        expected = hf.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert ours.encode_chat(messages) == expected
        if family.template.startswith("{{ bos_token }}"):
            assert expected.count(hf.bos_token_id) == 1
        for given in filter(None, (family.on, family.off)):
            expected = hf.apply_chat_template(messages, add_generation_prompt=True, **dict(given))["input_ids"]
            assert ours.encode_chat(messages, ChatOptions(dict(given))) == expected
        with_system = [SYSTEM, *messages]
        if family.has_system:
            expected = hf.apply_chat_template(with_system, add_generation_prompt=True)["input_ids"]
            assert ours.encode_chat(with_system) == expected
        else:
            with pytest.raises(RowError, match="the model's chat template refuses the messages: "):
                ours.encode_chat(with_system)


@pytest.mark.parametrize(("name", "end"), CASES)
def test_an_answer_ends_at_the_end_token_of_its_family(name, end, model_of, tmp_path):
    model, hf, chats, ids = model_of(name, end)
    family = FAMILIES[name]
    rows = run(tmp_path, chats, family.on)
    if hf.convert_tokens_to_ids(end) in model.generation_config.eos_token_id:  # transformers asks no tokenizer
        found = [generated_by_transformers(model, hf, messages, family.on) for messages in (chats[0], chats[-1])]
        assert found == [ids, ids]
    for messages, row in zip(chats, rows, strict=True):
        assert row["error"] is None and row["text"] == ANSWER
        assert (row["finish_reason"], row["generated_tokens"]) == ("stop", len(ids))
        prompt = hf.apply_chat_template(messages, add_generation_prompt=True, **dict(family.on))["input_ids"]
        assert row["prompt_tokens"] == len(prompt)
        assert without_tags(row.get("reasoning")) == (THOUGHT if family.thinks else None)


def without_tags(reasoning):
    return reasoning and reasoning.replace("</seed:cot_budget_reflect>", "")


@pytest.mark.parametrize("name", THINKERS)
def test_a_schema_rules_the_answer_and_not_the_thoughts(name, model_of, tmp_path):
    family = FAMILIES[name]
    _, _, chats, _ = model_of(name, family.eos)
    for row in run(tmp_path, chats, family.on, json_schema={"const": "Two"}):
        assert row["text"] == '"Two"' and row["finish_reason"] == "stop"
        assert without_tags(row["reasoning"]) == THOUGHT


@pytest.mark.parametrize("name", [name for name in THINKERS if FAMILIES[name].off is not None])
def test_arguments_of_the_template_switch_thinking_off(name, model_of, tmp_path):
    """The answer begins at once, also under a schema, and there are no thoughts."""
    family = FAMILIES[name]
    _, _, chats, _ = model_of(name, family.eos, ANSWER, family.off)
    for row in run(tmp_path, chats, family.off):
        assert (row["text"], row["reasoning"], row["finish_reason"]) == (ANSWER, None, "stop")
    for row in run(tmp_path, chats, family.off, json_schema={"const": "Two"}, overwrite=True):
        assert (row["text"], row["reasoning"]) == ('"Two"', None)


def test_a_word_in_the_system_message_switches_thinking_off(model_of, tmp_path):
    """SmolLM3's template takes the word out of the message, which is no text that is left out."""
    system = {"role": "system", "content": "Be short. /no_think"}
    model_of("SmolLM3", "<|im_end|>", ANSWER, FAMILIES["SmolLM3"].off)
    (row,) = run(tmp_path, [[system, *TURNS[0]]])
    assert (row["error"], row["text"], row["reasoning"]) == (None, ANSWER, None)


def test_thoughts_that_are_cut_short_are_no_answer(model_of, tmp_path):
    """The bound comes within the first channel, or between the two."""
    _, hf, chats, ids = model_of("gpt-oss", "<|return|>")
    in_thought, between = (
        3 + len(hf.encode(THOUGHT, add_special_tokens=False)) - 1,
        ids.index(hf.convert_tokens_to_ids("<|start|>")),
    )
    found = {}
    for length in (in_thought, between):
        rows = tmp_path / f"{length}.jsonl"
        rows.write_text(json.dumps({"messages": chats[0]}) + "\n")
        options = {"dtype": "float32", "cpu_memory": "4GiB", "max_tokens": length, "messages_column": "messages"}
        batchgen.run(
            str(tmp_path / "model"), str(rows), str(tmp_path / f"out{length}.jsonl"), offload_dir=tmp_path, **options
        )
        found[length] = json.loads((tmp_path / f"out{length}.jsonl").read_text())
    assert [(row["text"], row["finish_reason"]) for row in found.values()] == [("", "length")] * 2
    assert found[between]["reasoning"] == THOUGHT and THOUGHT.startswith(found[in_thought]["reasoning"])
    assert len(found[in_thought]["reasoning"]) < len(THOUGHT)


def test_a_row_with_a_role_that_the_template_refuses_fails_alone(model_of, tmp_path):
    model_of("Gemma 2", "<end_of_turn>")
    refused, answered = run(tmp_path, [[SYSTEM, *TURNS[0]], TURNS[0]])
    assert refused["text"] is None and "no system role here" in refused["error"]
    assert answered["error"] is None and answered["text"] == ANSWER


def test_ends_may_be_in_the_configuration_alone(model_of, tmp_path):
    _, hf, chats, _ = model_of("Llama 3", "<|eot_id|>")
    (tmp_path / "model" / "generation_config.json").unlink()
    path = tmp_path / "model" / "config.json"
    ends = hf.convert_tokens_to_ids([*FAMILIES["Llama 3"].ends])
    path.write_text(json.dumps(json.loads(path.read_text()) | {"eos_token_id": ends}))
    assert read_config(resolve_model(str(path.parent))).eos_token_ids == tuple(ends)
    assert [row["text"] for row in run(tmp_path, chats)] == [ANSWER] * len(chats)
