"""Pre-tokenizers of vocabularies with merges in GGUFs: regular expressions that cut a text into words.

Pairs are merged only within a word. A file states a name (`tokenizer.ggml.pre`), and llama.cpp has the expressions for
each name. Its expressions know Unicode categories by their first letter only. The expressions here match the same
texts. They are written for the engine of Hugging Face's `tokenizers` (Oniguruma).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PreTokenizer:
    """The way in which a vocabulary with merges cuts texts into words.

    Attributes:
        splits: Regular expressions, applied in order. Each cuts every piece into its matches and the texts between
            them.
        ignores_merges: Whether a word that is a token itself is not built by merges.
        begins_with_bos: Whether a text begins with BOS if the file does not say it.
        spells_bytes: Whether words are spelled in bytes. Otherwise they are spelled in characters, with U+2581 for a
            space; a character that is no token is spelled in tokens such as `<0xE3>`.
        joins_lines: Whether a run of line feeds that is a token is that token, whatever the merges are.
    """

    splits: tuple[str, ...]
    ignores_merges: bool = False
    begins_with_bos: bool = False
    spells_bytes: bool = True
    joins_lines: bool = False


_SHORT = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"  # short forms of English words
_LINES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_OTHER = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_OTHER_OR_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_WORD = _LEAD + r"\p{L}+"
_UPPER, _LOWER = r"[\p{L}&&[^a-z]]", r"[\p{L}&&[^A-Z]]"
_UPPER_OR_MARK, _LOWER_OR_MARK = r"[\p{L}\p{M}&&[^a-z]]", r"[\p{L}\p{M}&&[^A-Z]]"
_ANY_OR_MARK = r"[\p{L}\p{M}]"


def _cased(upper: str, lower: str, short: str) -> str:
    """An expression for words in which a capital letter begins a new word."""
    return f"{_LEAD}{upper}*{lower}+{short}|{_LEAD}{upper}+{lower}*{short}"


_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_SHORT}|{_WORD}|\p{{N}}{{1,3}}|{_OTHER}|{_LINES}"
_QWEN2 = rf"{_SHORT}|{_WORD}|\p{{N}}|{_OTHER}|{_LINES}"
_QWEN35 = rf"{_SHORT}|{_LEAD}{_ANY_OR_MARK}+|\p{{N}}|" + r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*" + f"|{_LINES}"
_TEKKEN = _cased(_UPPER, _LOWER, "") + rf"|\p{{N}}|{_OTHER_OR_SLASH}|{_LINES}"
_GPT4O = _cased(_UPPER, _LOWER, f"{_SHORT}?") + rf"|\p{{N}}{{1,3}}|{_OTHER_OR_SLASH}|{_LINES}"
_GRANITE = _cased(_UPPER_OR_MARK, _LOWER_OR_MARK, f"{_SHORT}?") + rf"|\p{{N}}{{1,3}}|{_OTHER_OR_SLASH}|{_LINES}"
_THOUSANDS = r"\p{N}{1,3}(?=(?:\p{N}{3})*(?!\p{N}))"  # groups of three from the right
_AYA = _cased(_ANY_OR_MARK, _ANY_OR_MARK, f"{_SHORT}?") + f"|{_THOUSANDS}|{_OTHER_OR_SLASH}|{_LINES}"
_YOUTU = _cased(_ANY_OR_MARK, _ANY_OR_MARK, f"{_SHORT}?") + rf"|\p{{N}}|{_OTHER_OR_SLASH}|{_LINES}"
_BAILING = rf"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|{_WORD}|\p{{N}}|{_OTHER}|" + r"\s*[\r\n]|\s+(?!\S)|\s+"
_SEED = rf"{_SHORT}|{_WORD}|\p{{N}}|" + r" ?[^\s\p{L}\p{N}\r\n]+" + f"|{_LINES}"
_UFAKZEKA = rf"{_WORD}|\p{{N}}|{_OTHER}|{_LINES}"
_EXAONE_MOE = (
    rf"{_SHORT}|{_LEAD}" + r"(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_MINICPM5 = rf"{_SHORT}|{_WORD}|\p{{N}}+|{_OTHER}|{_LINES}"
_CHINESE_OR_KANA = r"[\x{4E00}-\x{9FA5}\x{3040}-\x{309F}\x{30A0}-\x{30FF}]+"
_MARK_AND_WORD = r"""[!"#$%\&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
_NO_LEAD_MARK = r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
_MARKS = r" ?[\p{P}\p{S}]+"
_DEEPSEEK3 = rf"{_MARK_AND_WORD}|{_NO_LEAD_MARK}|{_MARKS}" + r"[\r\n]*" + f"|{_LINES}"
_SPARK = rf"{_MARK_AND_WORD}|{_NO_LEAD_MARK}|{_MARKS}" + r"|[\r\n]|\s+(?!\S)|\s+"
_CASED_LETTERS = (
    r"A-Za-z\x{B5}\x{C0}-\x{D6}\x{D8}-\x{F6}\x{F8}-\x{1BA}\x{1BC}-\x{1BF}\x{1C4}-\x{293}\x{295}-\x{2AF}"
    r"\x{370}-\x{373}\x{376}\x{377}\x{37B}-\x{37D}\x{37F}\x{386}\x{388}-\x{38A}\x{38C}\x{38E}-\x{3A1}"
    r"\x{3A3}-\x{3F5}\x{3F7}-\x{481}\x{48A}-\x{52F}\x{531}-\x{556}\x{10A0}-\x{10C5}\x{13A0}-\x{13F5}"
    r"\x{13F8}-\x{13FD}\x{1C90}-\x{1CBA}\x{1CBD}-\x{1CBF}\x{1D00}-\x{1D2B}\x{1D6B}-\x{1D77}\x{1D79}-\x{1D9A}"
    r"\x{1E00}-\x{1F15}\x{1F18}-\x{1F1D}\x{1F20}-\x{1F45}\x{1F48}-\x{1F4D}\x{1F50}-\x{1F57}\x{1F59}\x{1F5B}"
    r"\x{1F5D}\x{1F5F}-\x{1F7D}\x{1F80}-\x{1FB4}\x{1FB6}-\x{1FBC}\x{1FBE}\x{1FC2}-\x{1FC4}\x{1FC6}-\x{1FCC}"
    r"\x{1FD0}-\x{1FD3}\x{1FD6}-\x{1FDB}\x{1FE0}-\x{1FEC}\x{1FF2}-\x{1FF4}\x{1FF6}-\x{1FFC}\x{2102}\x{2107}"
    r"\x{210A}-\x{2113}\x{2115}\x{2119}-\x{211D}\x{2124}\x{2126}\x{2128}\x{212A}-\x{212D}\x{212F}-\x{2134}\x{2139}"
    r"\x{213C}-\x{213F}\x{2145}-\x{2149}\x{214E}\x{2183}\x{2184}\x{2C00}-\x{2C7B}\x{2C7E}-\x{2CE4}"
    r"\x{2CEB}-\x{2CEE}\x{2CF2}\x{2CF3}\x{A640}-\x{A66D}\x{A680}-\x{A69B}\x{A722}-\x{A76F}\x{A771}-\x{A787}"
    r"\x{A78B}-\x{A78E}\x{AB70}-\x{ABBF}\x{FB00}-\x{FB06}\x{FB13}-\x{FB17}\x{FF21}-\x{FF3A}\x{FF41}-\x{FF5A}"
    r"\x{10400}-\x{1044F}\x{104B0}-\x{104D3}\x{104D8}-\x{104FB}\x{10C80}-\x{10CB2}\x{10CC0}-\x{10CF2}"
    r"\x{118A0}-\x{118DF}\x{1E900}-\x{1E943}"
)
_CHINESE_OR_KOREAN = r"[\x{4E00}-\x{9FA5}\x{800}-\x{4E00}\x{AC00}-\x{D7FF}&&[^\s]]+"
_BLOOM = r" ?[^(\s|.,!?\x{2026}\x{3002}\x{FF0C}\x{3001}\x{964}\x{6D4}\x{60C})]+"
_HAN = (
    r"[\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{20000}-\x{2A6DF}\x{2A700}-\x{2B73F}\x{2B740}-\x{2B81F}"
    r"\x{2B820}-\x{2CEAF}\x{2CEB0}-\x{2EBEF}\x{F900}-\x{FAFF}\x{2F800}-\x{2FA1F}]"
)
_KIMI = rf"{_HAN}+|{_LEAD}(?:(?!{_HAN})\p{{L}})+{_SHORT}?|\p{{N}}{{1,3}}|{_OTHER}|{_LINES}"
_YOUTU_SCRIPTS = (
    r"[\x{AC00}-\x{D7A3}\x{3131}-\x{318E}]+|[\x{FF01}\x{2026}\x{201C}\x{201D}\x{2018}\x{2019}\x{2014}\x{FF1A}\x{FF1B}"
    r"\x{FF0C}\x{3001}-\x{303F}\x{FE30}-\x{FE4F}]+|[\x{3105}-\x{312F}]+|" + _CHINESE_OR_KANA
)
_AFMOE_SCRIPTS = (
    r"[\x{4E00}-\x{9FFF}\x{3400}-\x{4DBF}\x{8C48}-\x{FAFF}\x{3040}-\x{309F}\x{30A0}-\x{30FF}\x{FF65}-\x{FF9F}"
    r"\x{2F00}-\x{2FDF}\x{E40}-\x{E7F}\x{E80}-\x{EFF}\x{1780}-\x{17FF}\x{1000}-\x{109F}\x{AA60}-\x{AA7F}"
    r"\x{A9E0}-\x{A9FF}\x{AC00}-\x{D7AF}\x{1100}-\x{11FF}]+"
)
_JAIS_SPACES = "|".join([*(rf"\s{{{2**i}}}(?!\S)" for i in range(9, 1, -1)), r"\s{1,2}(?!\S)", r"\s"])
_JAIS2 = rf"{_SHORT}|{_WORD}|\p{{N}}{{1,3}}|{_OTHER}|\s*[\r\n]+|{_JAIS_SPACES}"
_LINE_FEEDS = r"[^\n]+|[\n]+"
_NO_NAME = (r"[\p{P}$+<=>\^~|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")

_KINDS: tuple[tuple[str, PreTokenizer], ...] = (
    ("default", PreTokenizer(_NO_NAME)),
    (
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
        PreTokenizer((_LLAMA3,), ignores_merges=True, begins_with_bos=True),
    ),
    ("glm4", PreTokenizer((_LLAMA3,), ignores_merges=True)),
    ("dbrx smaug-bpe chatglm-bpe", PreTokenizer((_LLAMA3,))),
    ("jais-2", PreTokenizer((_JAIS2,))),
    (
        "deepseek-llm",
        PreTokenizer(
            (
                r"[\r\n]",
                rf"\s?[{_CASED_LETTERS}]+",
                r"\s?[!-/:-~\x{FF01}-\x{FF0F}\x{FF1A}-\x{FF5E}\x{2018}-\x{201F}\x{3001}-\x{3002}]+",
                r"\s+\z",
                _CHINESE_OR_KOREAN,
                r"\p{N}+",
            )
        ),
    ),
    ("deepseek-coder", PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CHINESE_OR_KOREAN, r"\p{N}"))),
    ("deepseek-v3 hunyuan-dense joyai-llm hy_v4", PreTokenizer((r"\p{N}{1,3}", _CHINESE_OR_KANA, _DEEPSEEK3))),
    ("spark2_5", PreTokenizer((r"\p{N}{1,3}", _CHINESE_OR_KANA, _SPARK, r"\p{N}"))),
    ("youtu", PreTokenizer((_YOUTU_SCRIPTS, _YOUTU), ignores_merges=True)),
    ("falcon", PreTokenizer((r"[\p{P}$+<=>\^~|`]+", _GPT2, "[0-9][0-9][0-9]"))),
    ("starcoder refact command-r smollm codeshell exaone minerva-7b mellum2", PreTokenizer((r"\p{N}", _GPT2))),
    (
        "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum modern-bert jina-v1-en jina-v2-code "
        "roberta-bpe mpt olmo jais trillion granite-docling exaone4",
        PreTokenizer((_GPT2,)),
    ),
    (
        "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2",
        PreTokenizer((_QWEN2,)),
    ),
    ("qwen35", PreTokenizer((_QWEN35,))),
    ("laguna", PreTokenizer((_LINE_FEEDS, _QWEN2))),
    ("ufakzeka", PreTokenizer((_UFAKZEKA,))),
    ("poro-chat bloom gpt3-finnish", PreTokenizer((_BLOOM,))),
    ("viking", PreTokenizer((_BLOOM, r"\p{N}"))),
    ("tekken", PreTokenizer((_TEKKEN,), ignores_merges=True, begins_with_bos=True)),
    (
        "chameleon",
        PreTokenizer(
            (
                "<sentinel:[0-9]+>",
                "(?:IMGIMG)(?:A|B|C|D|E|F|G|H|I){1,4}Z",
                r"[\t\n]|    |  ",
                r"\p{N}",
                r"[\p{P}!-/:-@\[-`{-~]",
                _GPT2,
            ),
            begins_with_bos=True,
        ),
    ),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", PreTokenizer((_GPT4O,))),
    ("granite-embed-multi-97m", PreTokenizer((_GRANITE,), ignores_merges=True)),
    ("tiny_aya cohere2moe", PreTokenizer((_AYA,))),
    ("kimi-k2", PreTokenizer((_KIMI,))),
    ("superbpe", PreTokenizer((r"\p{N}+", "(?=(?:[0-9]{3})+(?![0-9]))"))),
    ("bailingmoe bailingmoe2 llada-moe", PreTokenizer((_BAILING,))),
    ("seed-coder", PreTokenizer((_SEED,))),
    ("afmoe", PreTokenizer((r"\P{N}*" + _THOUSANDS, _AFMOE_SCRIPTS, _DEEPSEEK3))),
    ("exaone-moe", PreTokenizer((_EXAONE_MOE,))),
    ("minicpm5", PreTokenizer((r"\p{N}{1,3}", _MINICPM5), ignores_merges=True)),
    ("gemma4 granite-embed-multi-311m", PreTokenizer((_LINE_FEEDS,), spells_bytes=False, joins_lines=True)),
    ("sarvam-moe", PreTokenizer((_LINE_FEEDS,), spells_bytes=False)),
)
PRE_TOKENIZERS = {name: kind for names, kind in _KINDS for name in names.split()}
