"""Tiny tokenizers on disk, of the kinds that models have."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

from model_tables import VOCAB_SIZE

SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
TEXT = """\
The ferry left the harbour at half past six, an hour late, with forty-one passengers and a cargo of onions.
On the upper deck a schoolteacher was reading the timetable aloud to nobody in particular: "Monday, Wednesday,
Friday; in winter, only Fridays." The captain's dog slept beside the funnel. Question: which day has two
sailings? Answer: none of them. In 1987 the company had owned three ships; by 1994 it owned one, and the bank
owned most of that. Still, people came. They came for the islands, for the light, for the cheap hotels with
their blue shutters, and because there was no other way to get there.

A restaurant by the quay served grilled fish, bread, lemons and a white wine that tasted of stones. Name: The
Anchor; address: 12 Harbour Road; city: Port Ellen; phone: 310-246-1501; type: seafood. Are these two entries
the same? Yes. The cook had worked in Lyon, Osaka and Buenos Aires before the weather, as she put it, blew her
home. She wrote the menu every morning on a slate, and every evening she wiped it clean with a wet cloth.

def total(prices):
    return sum(price for price in prices if price is not None)

When the storm came the lights went out one street after another, first the school, then the post office, then
the long row of houses above the beach. Somebody rang the bell of the chapel. Children counted the seconds
between the flash and the thunder: one, two, three, four. Nobody slept much. By morning the sea was flat and
grey, the roofs were where they had always been, and the ferry, with its onions, was waiting outside the bar.
"""


def make_tiny_tokenizer(path: Path, *, chat_template: str | None = CHAT_TEMPLATE):
    """A byte-level BPE tokenizer of at most VOCAB_SIZE tokens, saved to `path`."""
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

    hf = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained_tokenizer()),
        bos_token=SPECIAL_TOKENS[0],
        eos_token=SPECIAL_TOKENS[0],
        pad_token=SPECIAL_TOKENS[3],
    )
    hf.chat_template = chat_template
    hf.save_pretrained(path)
    return hf


@cache
def _trained_tokenizer() -> str:
    """The tokenizer.json of TEXT."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer.to_str()


def make_tiny_sentencepiece_tokenizer(path: Path):
    """A tokenizer as Llama 2's: "▁" for spaces, one before the first word, bytes for unknown characters."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=240, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *model["vocab"]]
    merges = [tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in model["merges"]]
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=merges,
            unk_token="<unk>",
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    hf = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    hf.save_pretrained(path)
    return hf


# How SentencePiece tokenizers differ between families: where the space comes from that stands before the first word.
SENTENCEPIECE_STYLES = {"llama": "normalizer", "phi3": "normalizer", "gemma2": "none", "gemma3": "none"}


def make_sentencepiece_tokenizer(path: Path, style: str, *, bos: bool = True, eos: bool = False):
    """A tokenizer as transformers has them for models with a SentencePiece vocabulary: all merges that give a token.

    style: of `SENTENCEPIECE_STYLES`. bos, eos: whether these stand around a text. It has tokens for bytes, one special
    token more, "<|end|>", and two that are no special ones, "<tool>" and two line breaks.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator([TEXT], trainers.BpeTrainer(vocab_size=225, show_progress=False))
    model = json.loads(trained.to_str())["model"]
    pairs = [pair.split(" ") if isinstance(pair, str) else pair for pair in model["merges"]]
    learned = dict.fromkeys("".join(pair) for pair in pairs)
    begin, end = ("<bos>", "<eos>") if style == "none" else ("<s>", "</s>")
    special = ["<pad>", end, begin, "<unk>", "<mask>"] if style == "none" else ["<unk>", begin, end]
    spaces = ["▁" * count for count in range(2, 5)] if style == "none" else []
    added = ["<|end|>", "<tool>", "\n\n"]
    characters = [token for token in model["vocab"] if len(token) == 1]
    tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), *added, *spaces, *learned, *characters]
    vocab = {token: i for i, token in enumerate(tokens)}
    merged = [*spaces, *learned]
    splits = [(token[:i], token[i:]) for token in merged for i in range(1, len(token))]
    merges = [(left, right) for left, right in splits if left in vocab and right in vocab]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, fuse_unk=True, byte_fallback=True))
    tokenizer.add_special_tokens([*special, added[0]])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token in added[1:]])
    first = [normalizers.Prepend("▁")] if style == "normalizer" else []
    tokenizer.normalizer = normalizers.Sequence([*first, normalizers.Replace(" ", "▁")])
    last = [decoders.Strip(" ", 1, 0)] if first else []
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *last])
    around = f"{begin} $A" if bos else "$A"
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{around} {end}" if eos else around,
        special_tokens=[(token, vocab[token]) for token in (begin, end)],
    )
    hf = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=begin, eos_token=end, unk_token="<unk>")
    hf.chat_template = "{{ bos_token }}" + CHAT_TEMPLATE.replace("<|im_start|>", "<tool>").replace(
        "<|im_end|>", "<|end|>"
    )
    hf.save_pretrained(path)
    return hf
