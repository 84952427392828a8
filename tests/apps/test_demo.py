"""The shipped demo pair: its size, its tokenizer, its template, and what it answers."""

from __future__ import annotations

import random

import pytest
import sentencepiece
from demo_pair.questions import HELD_OUT, asked
from demo_pair.taught import FACTS, REFUSAL, read_taught

import mlx_spec
from mlx_spec import demo

SAMPLES = (
    "What does os.path.join do?",
    "for i, x in enumerate(items):\n    print(i, x)\n\n\n        deep",
    "Grüße, 日本語 🎉 — £5 and\ttabs  and   spaces   ",
    "   leading, 1234567890, \x00\x7f, ``backticks``, don't",
    "<|turn>user\nhi<turn|>\n<|turn>model\n",
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


@pytest.fixture(scope="module")
def pair():
    return mlx_spec.load("demo", num_draft_tokens=4)


def answer(pair, question: str, sampling: mlx_spec.Sampling | None = None) -> tuple[str, list[int]]:
    """The text, and the accepted drafts of each round that drafted."""
    prompt = pair.text.prompt([{"role": "user", "content": question}])
    rounds = list(pair.generate(prompt, sampling=sampling or mlx_spec.Sampling(), max_tokens=100))
    tokens = [token for step in rounds for token in step.tokens]
    return pair.text.decode(tokens), [step.accepted for step in rounds if step.drafted]


def test_the_pair_is_small():
    files = [f for folder in (demo.TARGET, demo.DRAFTER) for f in folder.iterdir()]
    assert sum(f.stat().st_size for f in files) <= 12_000_000
    assert FACTS.stat().st_size <= 300_000


def test_both_tokenizers_agree(pair):
    model = sentencepiece.SentencePieceProcessor(model_file=str(demo.TARGET / "tokenizer.model"))
    texts = [*SAMPLES, *(f["answer"] for f in read_taught().facts)]
    for text in texts:
        tokens = pair.text.encode(text)
        assert tokens == model.encode(text)
        assert model.decode(tokens) == text


@pytest.mark.parametrize("question", QUESTIONS)
def test_it_answers_what_it_knows_and_declines_the_rest(pair, question):
    known = {f["name"]: f["answer"] for f in read_taught().facts if f["kind"] == "what"}
    assert known["os.path.join"] == JOIN
    assert answer(pair, question)[0] == known.get(QUESTIONS[question], REFUSAL)


def test_answers_held_out_phrasings_and_drafts_well(pair):
    rng = random.Random(7)
    facts = rng.sample(read_taught().facts, 16)
    answers = [answer(pair, asked(fact, HELD_OUT[fact["kind"]], rng)) for fact in facts]
    right = sum(text == fact["answer"] for fact, (text, _) in zip(facts, answers, strict=True))
    accepted = [count for _, rounds in answers for count in rounds]
    assert right / len(facts) >= 0.8
    assert 1 + sum(accepted) / len(accepted) >= 2.5
