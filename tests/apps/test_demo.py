"""The shipped demo pair: its size, its tokenizer, its template, and what it answers."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import sentencepiece

import mlx_spec
from mlx_spec import demo

SAMPLES = (
    "What does os.path.join do?",
    "for i, x in enumerate(items):\n    print(i, x)\n\n\n        deep",
    "Grüße, 日本語 🎉 — £5 and\ttabs  and   spaces   ",
    "   leading, 1234567890, \x00\x7f, ``backticks``, don't",
    "<|turn>user\nhi<turn|>\n<|turn>model\n",
)
TAUGHT = Path(__file__).parents[2] / "benchmarks" / "demo_pair" / "facts.json"
REFUSAL = (
    "I do not know that. I am the small mlx_spec demo model and only know the Python standard library. "
    "Load a real model for that."
)
JOIN = "os.path.join: Join two or more pathname components, inserting '/' as needed."
QUESTIONS = {
    "What does os.path.join do?": "os.path.join",
    "what is json.loads": "json.loads",
    "Explain len()": "len",
    "What does `itertools.chain` do?": "itertools.chain",
    "tell me about re.sub please": "re.sub",
    "What is the capital of Portugal?": None,
    "Write me a song about llamas": None,
}
HELD_OUT = {  # in words that training never used: a question, the kind and the name of its fact
    "Where do I get move() from ?": ("place", "shutil.move"),
    "which arguments can I give `symlink`?": ("signature", "os.symlink"),
    "I need to understand redirect_stdout?": ("what", "contextlib.redirect_stdout"),
    "Tell me which module frozenset is in": ("place", "frozenset"),
    "Hey, could you show the signature of title?": ("signature", "str.title"),
    "when do I need the urllib.request module?": ("module", "urllib.request"),
    "tell me what arguments str.removesuffix() takes": ("signature", "str.removesuffix"),
    "So what does deepcopy actually do in python?": ("what", "copy.deepcopy"),
    "When do I use `ImportError`?": ("what", "ImportError"),
    "ok, can you tell me where colorsys.rgb_to_hsv is?": ("place", "colorsys.rgb_to_hsv"),
    "Tell me which module math.cbrt() is in exactly": ("place", "math.cbrt"),
    "i need to understand compile?": ("what", "compile"),
    'please tell me what "str.encode()" is for for me?': ("what", "str.encode"),
    "please tell me what `BytesIO` is for ?": ("what", "io.BytesIO"),
    "where do i get `statistics.harmonic_mean` from.": ("place", "statistics.harmonic_mean"),
    "Could you describe the method str.find()": ("what", "str.find"),
}


@cache
def taught() -> dict[tuple[str, str], str]:
    """Return the answers that the demo was taught, by kind and name."""
    records = json.loads(TAUGHT.read_text(encoding="utf-8"))["facts"]
    about = ("name", "noun", "short")
    return {(kind, r["name"]): text for r in records for kind, text in r.items() if kind not in about}


@pytest.fixture(scope="module")
def pair():
    return mlx_spec.load("demo", num_draft_tokens=4)


def answer(pair, question: str, sampling: mlx_spec.Sampling | None = None) -> tuple[str, list[int]]:
    """The text, and the accepted drafts of each round that drafted."""
    prompt = pair.tokenizer.prompt([{"role": "user", "content": question}])
    rounds = list(pair.generate(prompt, sampling=sampling or mlx_spec.Sampling(), max_tokens=100))
    tokens = [token for step in rounds for token in step.tokens]
    return pair.tokenizer.decode(tokens), [step.accepted for step in rounds if step.drafted]


def test_the_pair_is_small():
    files = [f for folder in (demo.TARGET, demo.DRAFTER) for f in folder.iterdir()]
    assert sum(f.stat().st_size for f in files) <= 12_000_000
    assert TAUGHT.stat().st_size <= 300_000


def test_both_tokenizers_agree(pair):
    model = sentencepiece.SentencePieceProcessor(model_file=str(demo.TARGET / "tokenizer.model"))
    texts = [*SAMPLES, *taught().values()]
    for text in texts:
        tokens = pair.tokenizer.encode(text)
        assert tokens == model.encode(text)
        assert model.decode(tokens) == text


@pytest.mark.parametrize("question", QUESTIONS)
def test_it_answers_what_it_knows_and_declines_the_rest(pair, question):
    name = QUESTIONS[question]
    assert taught()["what", "os.path.join"] == JOIN
    assert answer(pair, question)[0] == (taught()["what", name] if name else REFUSAL)


def test_answers_held_out_phrasings_and_drafts_well(pair):
    answers = [answer(pair, question) for question in HELD_OUT]
    right = sum(text == taught()[fact] for fact, (text, _) in zip(HELD_OUT.values(), answers, strict=True))
    accepted = [count for _, rounds in answers for count in rounds]
    assert right / len(HELD_OUT) >= 0.8
    assert 1 + sum(accepted) / len(accepted) >= 2.5
