"""How byte-level vocabularies cut text before merging, by the names that GGUF files use.

Each cut is a sequence of patterns. A pattern cuts every piece that the patterns before it left, into its
matches and the text between them. The patterns come from the published tokenizers. Other names are refused,
because another cut gives other tokens.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PreTokenizer:
    """How a vocabulary prepares text."""

    patterns: tuple[str, ...]
    whole_words: bool = False  # a word that is a token is not merged
    composed: bool = False  # text is brought into Unicode's composed form
    with_bos: bool = False  # a text begins with BOS, unless the metadata say otherwise


# --- patterns that several vocabularies share

CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
LINES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
SENTENCES = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
HAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"
KANA = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
ATTACHED = (
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~]"
    r"[A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"
)
# The letters with upper and lower case of DeepSeek LLM: no category of Unicode has the same.
LETTERS = (
    "A-Za-z"
    "\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481"
    "\u048a-\u052f\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf"
    "\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d"
    "\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4"
    "\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107"
    "\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d"
    "\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17"
    "\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb"
    "\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)


def _plain(count: str) -> str:
    """Return the pattern of words and lines, and of digits with a quantifier: "{1,3}" for up to three."""
    return r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + count + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|" + LINES


def _words(count: str) -> str:
    """Return the pattern of `_plain`, with contractions cut first."""
    return f"{CONTRACTIONS}|{_plain(count)}"


def _single_lines(word: str, line_ends: str) -> str:
    """Return the pattern that keeps each line end apart; `line_ends` closes the set after symbols."""
    lines = r"[\r\n" + line_ends + r"|\s*[\r\n]|\s+(?!\S)|\s+"
    return CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?" + word + r"|\p{N}| ?[^\s\p{L}\p{N}]+" + lines


def _cased(digits: str, suffix: str = "") -> str:
    """Return the pattern that cuts before a capital letter; words may end in `suffix`."""
    upper, lower = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
    start = r"[^\r\n\p{L}\p{N}]?"
    words = f"{start}{upper}*{lower}+{suffix}|{start}{upper}+{lower}*{suffix}"
    return rf"{words}|{digits}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{LINES}"


def _runs_of_spaces() -> str:
    """Return the pattern that cuts runs of spaces into powers of two, the longest first."""
    return "".join(rf"\s{{{2**i}}}(?!\S)|" for i in range(9, 1, -1)) + r"\s{1,2}(?!\S)|\s"


# --- the table

PRE_TOKENIZERS = {
    name: cut
    for names, cut in (
        (
            "gpt-2 phi-2 gigachat a.x-4.0 mellum exaone4 mpt olmo jais trillion granite-docling",
            PreTokenizer((GPT2,)),
        ),
        (
            "smollm starcoder refact command-r codeshell exaone minerva-7b mellum2",
            PreTokenizer((r"\p{N}", GPT2)),
        ),
        (
            "llama-bpe llama3 llama-v3 falcon3 falcon-h1 pixtral midm-2.0 lfm2",
            PreTokenizer((_words("{1,3}"),), whole_words=True, with_bos=True),
        ),
        ("dbrx smaug-bpe chatglm-bpe", PreTokenizer((_words("{1,3}"),))),
        ("glm4 glm5", PreTokenizer((_words("{1,3}"),), whole_words=True)),
        ("qwen2 deepseek-r1-qwen", PreTokenizer((_words(""),), composed=True)),
        ("kormo megrez stablelm2 hunyuan solar-open grok-2", PreTokenizer((_words(""),))),
        ("tekken", PreTokenizer((_cased(r"\p{N}"),), whole_words=True, with_bos=True)),
        (
            "gpt-4o llama4 kanana2 talkie minimax-m2",
            PreTokenizer((_cased(r"\p{N}{1,3}", f"{CONTRACTIONS}?"),)),
        ),
        (
            "deepseek-llm",
            PreTokenizer(
                (
                    r"[\r\n]",
                    rf"\s?[{LETTERS}]+",
                    r"\s?" "[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+",
                    r"\s+$",
                    HAN,
                    r"\p{N}+",
                )
            ),
        ),
        ("deepseek-coder", PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", HAN, r"\p{N}"))),
        (
            "deepseek-v3 hunyuan-dense joyai-llm hy_v4",
            PreTokenizer((r"\p{N}{1,3}", KANA, ATTACHED + r"[\r\n]*|" + LINES)),
        ),
        ("spark2_5", PreTokenizer((r"\p{N}{1,3}", KANA, ATTACHED + r"|[\r\n]|\s+(?!\S)|\s+", r"\p{N}"))),
        (
            "youtu",  # Korean, Chinese punctuation and bopomofo stand apart
            PreTokenizer(
                (
                    "[\uac00-\ud7a3\u3131-\u318e]+|"
                    "[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+|"
                    f"[\u3105-\u312f]+|{KANA}",
                    _cased(r"\p{N}", f"{CONTRACTIONS}?"),
                ),
                whole_words=True,
            ),
        ),
        ("falcon", PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", GPT2, "[0-9][0-9][0-9]"))),
        ("poro-chat bloom gpt3-finnish", PreTokenizer((SENTENCES,))),
        ("viking", PreTokenizer((SENTENCES, r"\p{N}"))),
        (
            "chameleon",
            PreTokenizer(
                (
                    "<sentinel:[0-9]+>",
                    "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z",  # a token of a picture
                    r"([\t\n]|    |  )",
                    r"\p{N}",
                    r"[\p{P}!-/:-@\[-`{-~]",
                    GPT2,
                ),
                with_bos=True,
            ),
        ),
        ("bailingmoe bailingmoe2 llada-moe", PreTokenizer((_single_lines(r"\p{L}+", "]*"),))),
        ("exaone-moe", PreTokenizer((_single_lines(r"(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+", "/]?"),))),
        (
            "seed-coder",
            PreTokenizer(
                (CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}\r\n]+|" + LINES,)
            ),
        ),
        ("ufakzeka", PreTokenizer((_plain(""),))),
        ("laguna", PreTokenizer((r"[^\n]+|[\n]+", _words("")))),
        ("minicpm5", PreTokenizer((r"\p{N}{1,3}", _words("+")), whole_words=True)),
        (
            "jais-2",
            PreTokenizer((_words("{1,3}").removesuffix(LINES) + r"\s*[\r\n]+|" + _runs_of_spaces(),)),
        ),
    )
    for name in names.split()
}
