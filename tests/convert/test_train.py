"""`mlx-spec train`: the chain that is trained is the one that drafts, runs go on, and the result is used."""

from __future__ import annotations

import io
import json
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from support.checkpoints import full_disk
from support.commands import run
from support.faults import Writer, sweep
from support.vocabularies import byte_level
from tokenizers import processors

import mlx_spec
from mlx_spec.checkpoint.config import read_checkpoint
from mlx_spec.checkpoint.files import new_folder, read_object
from mlx_spec.cli.progress import StageProgress
from mlx_spec.convert.command import _describe_training, long_run, run_training
from mlx_spec.convert.options import TrainingOptions
from mlx_spec.convert.train import train
from mlx_spec.convert.train.answers import (
    AnswerPlan,
    AnswerRequest,
    read_answer,
    record,
    recording,
    write_answer,
)
from mlx_spec.convert.train.fit import (
    Fit,
    Heads,
    batch_of,
    frequent_tokens,
    tokens_a_round,
    unroll,
)
from mlx_spec.convert.train.loss import Step, loss_of, sample_tokens
from mlx_spec.convert.train.prompts import TrainingPrompt, bundled_prompt, encode, own_prompts, rules
from mlx_spec.convert.train.train import WORK, of_all_kinds
from mlx_spec.drafters.gemma4 import AssistantConfig, AssistantNetwork, Gemma4Assistant
from mlx_spec.errors import BadCheckpoint, InvalidValue, SpecError
from mlx_spec.pair import Pair
from mlx_spec.sampling import Sampling
from mlx_spec.tokenizer import Tokenizer
from mlx_spec.types import Features, KVRows

ROOT = Path(__file__).parents[2]
PROMPTS = ROOT / "benchmarks" / "prompts" / "demo" / "facts.jsonl"
FACTS = ROOT / "benchmarks" / "demo_pair" / "facts.json"
SMALL = TrainingOptions("demo", Path("out"), vocabulary=300, width=48)


@pytest.fixture(autouse=True)
def small_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlx_spec.convert.train.fit.STEP_ROWS", 128)


@pytest.fixture(scope="module")
def demo() -> Iterator[Pair]:
    """The demo, which trainings load and probe for batches once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(train, "load", cache(train.load))
        pair = recording(train.load("demo", "none"))
        patch.setattr("mlx_spec.pair.probe_batch", lambda *_, support=pair.batch_support: support)
        yield pair


@pytest.fixture(scope="module")
def answers(demo: Pair, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("answers")
    lines = [json.loads(line) for line in PROMPTS.read_text().splitlines()]
    questions = [
        AnswerRequest(
            folder / f"{i:06d}.safetensors",
            "chat",
            demo.tokenizer.prompt([{"role": "user", "content": line}]),
            Sampling(temperature=float(i % 2), seed=i),
        )
        for i, line in enumerate(lines[:3])
    ]
    assert all(tokens > 0 for tokens in record(demo, questions, 40, 2))
    return [question.file for question in questions]


def new_network(answers: list[Path], demo: Pair) -> AssistantNetwork:
    network, _ = train._network(demo, SMALL)
    train._begin(network, demo, answers, SMALL)
    network.freeze(recurse=False, keys=["draft_ids"])
    return network


def test_answers_are_those_of_the_target_alone(demo: Pair, answers: list[Path]) -> None:
    """A batch records what decoding alone gives: tokens, hidden states, K/V and the sum of all logits."""
    line = json.loads(PROMPTS.read_text().splitlines()[0])
    prompt = demo.tokenizer.prompt([{"role": "user", "content": line}])
    alone = [t for r in demo.generate(prompt, sampling=Sampling(), max_tokens=40) for t in r.tokens]
    answer = read_answer(answers[0])
    assert answer.tokens.tolist() == alone
    assert answer.greedy
    assert answer.prompt_tokens == len(prompt)
    parts = demo.open()
    parts.target.prefill(prompt[:-1])
    logits = parts.target.verify(mx.array([prompt[-1], *alone[:-1]]))
    assert mx.allclose(mx.logsumexp(logits.astype(mx.float32), axis=-1), answer.logsumexp, atol=0.1)
    parts.target.commit(len(alone))
    for kind, rows in parts.target.shared_kv().items():
        keys = answer.shared[kind].keys
        assert mx.allclose(rows.keys[:, :, -keys.shape[2] :].astype(mx.float32), keys, atol=0.1)


def test_rows_of_a_window_are_kept_for_the_whole_answer(demo: Pair, tmp_path: Path) -> None:
    """Only those before the last token were: the others were trained beside rows of other places."""
    question = AnswerRequest(
        tmp_path / "000000.safetensors",
        "chat",
        demo.tokenizer.prompt([{"role": "user", "content": "What does zip do?"}]),
        Sampling(min_tokens=55, late_tokens=demo.tokenizer.eos),
    )
    assert list(record(demo, [question], 55, 2)) == [55]
    answer, target = read_answer(question.file), demo.open().target
    assert answer.prompt_tokens == len(question.tokens) < 64
    rows, history = batch_of([answer], 64, mx.float32), [*question.tokens, *answer.tokens.tolist()]
    for place in (0, 27, 54):  # of the pending token, in the answer
        target.prefill(history[target.size : answer.prompt_tokens + place])
        for kind, seen in target.shared_kv().items():
            shared = rows.shared[kind]
            assert shared.mask is not None
            (visible,) = np.nonzero(np.array(shared.mask[0, 0, place]))
            ours = shared.keys[:, :, int(visible[0]) : int(visible[-1]) + 1]
            assert mx.allclose(ours, seen.keys.astype(mx.float32), atol=0.1)


@pytest.mark.parametrize("place", [0, 5])
def test_the_trained_chain_is_the_one_that_drafts(demo: Pair, answers: list[Path], place: int) -> None:
    """Tokens that the real drafter drafts are the best ones of each unrolled step."""
    mx.random.seed(3)
    network, answer = new_network(answers, demo), read_answer(answers[0])
    for name, weight in tree_flatten(network.parameters()):
        if "norm" in name:  # so that attention and MLP count
            assert isinstance(weight, mx.array)
            weight[...] = 1.0
    seen = answer.prompt_tokens + place  # rows of K/V, without the pending token's
    rows = {
        kind: KVRows(*(a[:, :, :seen].astype(mx.float32) for a in (kept.keys, kept.values)))
        for kind, kept in answer.shared.items()
    }
    drafter = Gemma4Assistant(network, 64, demo.parts)
    history = [0] * seen + [int(answer.tokens[place])]
    hidden = answer.hidden[place : place + 1].astype(mx.float32)
    drafter.observe(history, Features(final_hidden=hidden, shared_kv=lambda: rows))
    drafted = drafter.draft(history, 4, Sampling().sampler(seen, 2816)).tokens.tolist()

    tokens = mx.array([*answer.tokens.tolist()[: place + 1], *drafted, 0])
    size = len(tokens)
    end, pad = answer.prompt_tokens + size - 1, [(0, 0), (0, 0), (0, size), (0, 0)]
    changed = replace(
        answer,
        tokens=tokens,
        hidden=mx.broadcast_to(answer.hidden[place], (size, 192)),
        shared={
            kind: KVRows(*(mx.pad(a, pad)[:, :, :end] for a in (kept.keys, kept.values)))
            for kind, kept in answer.shared.items()
        },
        logsumexp=mx.zeros(size),
    )
    batch = batch_of([changed], 64, mx.float32)
    heads = Heads(network, demo.parts, network.draft_ids)
    steps = unroll(network, batch, 4, heads, demo.parts.embed)
    best = [int(heads.ids[int(mx.argmax(step.logits[0, place]))]) for step in steps]
    assert best == drafted


def test_padding_changes_nothing(demo: Pair, answers: list[Path]) -> None:
    """The loss of two answers in one batch is the mean of their losses, weighted by their rows."""
    network = new_network(answers, demo)
    heads = Heads(network, demo.parts, network.draft_ids)
    both = [read_answer(file) for file in answers[:2]]
    assert both[0].tokens.size != both[1].tokens.size

    def loss(chosen: list[Any]) -> float:
        steps = unroll(network, batch_of(chosen, 64, mx.float32), 1, heads, demo.parts.embed)
        return float(loss_of(steps))

    sizes = [answer.tokens.size - 1 for answer in both]
    mean = sum(n * loss([a]) for n, a in zip(sizes, both, strict=True)) / sum(sizes)
    assert loss(both) == pytest.approx(mean, rel=1e-4)


def test_a_run_in_pieces_is_a_run_in_one(
    demo: Pair, answers: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights after an interruption are those without one, to the last bit."""
    monkeypatch.setattr("mlx_spec.convert.train.fit.STEP_ROWS", 48)

    def fit(folder: Path, *, stop: int | None) -> Fit:
        mx.random.seed(0)
        made = Fit(
            new_network(answers, demo),
            demo.parts,
            frequent_tokens(answers, 300, 2816),
            (answers[:2], answers[-1:]),
            folder,
            window=64,
            epochs=2,
            fine_tunes=False,
            seed=1,
        )
        for progress in made.run():
            if progress.step == stop:
                made.save()
                break
        return made

    for name in ("whole", "pieces"):
        (tmp_path / name).mkdir()
    whole = fit(tmp_path / "whole", stop=None)
    assert whole.steps > 2
    fit(tmp_path / "pieces", stop=1)
    pieces = fit(tmp_path / "pieces", stop=None)
    ours, theirs = (dict(tree_flatten(each.network.parameters())) for each in (pieces, whole))
    assert all(mx.array_equal(ours[name], theirs[name]) for name in theirs)
    assert float(whole.progress.curve[-1][1]) < float(whole.progress.curve[1][1])


def test_train_interrupted_and_gone_on(
    demo: Pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command goes on from the answers it has, refuses other options, and the drafter keeps the text."""
    out, prompts, work = tmp_path / "drafter", tmp_path / "prompts.txt", tmp_path / f"drafter{WORK}"
    names = [fact["name"] for fact in json.loads(FACTS.read_text())["facts"][:6]]
    prompts.write_text("\n".join(f"What does {name} do?" for name in names))
    options = TrainingOptions("demo", out, None, [prompts], 6, 12, 2.0, 300, 48)  # fewer than typer lets in

    def interrupt(file: Path, answer: Any) -> None:
        write_answer(file, answer)
        if len(list(work.glob("answers/*"))) == 3:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("mlx_spec.convert.train.answers.write_answer", interrupt)
        run_training(options)
    assert f"the same command goes on from {work}" in capsys.readouterr().err
    with pytest.raises(InvalidValue, match=r"epochs 2\.0, this one has 3\.0"):
        run_training(replace(options, epochs=3.0))
    capsys.readouterr()
    assert run_training(options) == 0
    shown = capsys.readouterr()
    assert "answers: 4 of 6" in shown.err and f"chat --target demo --drafter {out}" in shown.out
    report = json.loads((out / "training.json").read_text())
    assert report["tokens_a_round"]["0"]["all"] > 1  # some drafts are accepted after so few steps
    assert not work.exists()

    fast = mlx_spec.load("demo", out, num_draft_tokens=4)
    prompt = fast.tokenizer.prompt([{"role": "user", "content": f"What does {names[0]} do?"}])
    texts = [[t for r in pair.generate(prompt, max_tokens=20) for t in r.tokens] for pair in (demo, fast)]
    assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("lines", "source", "text"),
    [
        (["What does zip do?"], None, "at least two are needed"),
        (["What does zip do?", "x " * 5000], None, "at least two are needed"),
        ([], "quantized", "cannot be trained"),
        ([], "of another target", "hidden size"),
    ],
)
def test_what_cannot_be_trained_is_refused_before_answers_are_made(
    lines: list[str],
    source: str | None,
    text: str,
    demo: Pair,
    tmp_path: Path,
) -> None:
    """It was refused after hours of answers."""
    (tmp_path / "lines.txt").write_text("\n".join(lines))
    if source is not None:
        wrong = {"quantization": {"bits": 4}} if source == "quantized" else {"backbone_hidden_size": 64}
        (tmp_path / source).mkdir()
        published = train._network(demo, SMALL)[1]
        (tmp_path / source / "config.json").write_text(json.dumps(published | wrong))
        mx.save_safetensors(str(tmp_path / source / "model.safetensors"), {"a": mx.zeros(1)})
    options = TrainingOptions(
        "demo",
        tmp_path / "out",
        source and str(tmp_path / source),
        [tmp_path / "lines.txt"] if lines else None,
    )
    with pytest.raises(SpecError, match=text):
        run_training(options)
    assert not (tmp_path / f"out{WORK}").exists()


def test_a_run_goes_on_where_only_the_rest_fits_on_the_disk(
    answers: list[Path], demo: Pair, tmp_path: Path
) -> None:
    options, plan = TrainingOptions("demo", tmp_path / "out"), AnswerPlan(tmp_path, 60, 16, 0)
    whole = train._announce(demo, plan, options)
    shutil.copy(answers[0], tmp_path / "000000.safetensors")
    assert train._announce(demo, plan, options) == whole - answers[0].stat().st_size


def test_answers_too_short_for_a_draft_are_no_figures(
    answers: list[Path], demo: Pair, tmp_path: Path
) -> None:
    """The command ended with a KeyError after it had written the drafter."""
    own = tuple(bundled_prompt(i, 0, held_out=False) for i in range(2))
    plan = AnswerPlan(tmp_path, 2, 1, 0, own)
    _, config = train._network(demo, SMALL)
    tests = train._test(demo, plan, new_network(answers, demo), config, StageProgress(io.StringIO()))
    report = {"rows": 1, "steps": 1, "tokens_a_round": tests}
    assert len(_describe_training(report, TrainingOptions("demo", tmp_path / "out"))) == 2


def test_an_improved_drafter_is_stored_in_the_order_it_was_read(tmp_path: Path) -> None:
    """Its table stayed in the order of the centroids and was sorted once more when it was loaded."""
    pair = ROOT / "tests" / "golden" / "e2b-trained"
    network, read = train._published(str(pair / "assistant"), read_checkpoint(pair / "target").config)
    train._write(tmp_path, network, read, {})
    before, after = (read_checkpoint(folder).tensors() for folder in (pair / "assistant", tmp_path))
    assert "masked_embedding.token_ordering" in after
    assert all(mx.allclose(before[name], array, rtol=0.01) for name, array in after.items())


def test_a_full_disk_ends_in_one_line(demo: Pair, tmp_path: Path) -> None:
    """MLX raised an error that says nothing of the disk. What is left does not stop the next run."""
    question = AnswerRequest(
        tmp_path / "000000.safetensors", "chat", demo.tokenizer.encode("zip"), Sampling()
    )
    with full_disk(1000), pytest.raises(SpecError, match="is full"), long_run(tmp_path / "out", ""):
        list(record(demo, [question], 20, 1))
    assert not question.file.exists()
    assert list(record(demo, [question], 20, 1)) == [20]


def test_the_nth_write_of_a_training_fails(demo: Pair, answers: list[Path], tmp_path: Path) -> None:
    """Of settings, the state with the optimizer's, and the drafter. `test_nth_write.py` has the answers."""
    ids = frequent_tokens(answers, 300, 2816)
    _, config = train._network(demo, SMALL)
    config["text_config"]["layer_types"] = config["text_config"]["layer_types"][:1]
    network = AssistantNetwork(AssistantConfig.from_dict(config))

    def fit(folder: Path) -> Fit:
        files = (answers[:2], answers[-1:])
        return Fit(network, demo.parts, ids, files, folder, window=64, epochs=2, fine_tunes=False, seed=1)

    def save(folder: Path, step: int) -> None:
        state = fit(folder)
        mx.eval(network.parameters(), state._best, state._optimizer.state)  # at once, not one by one
        state.progress.step = step
        state.save()

    def write(folder: Path) -> None:
        train._check_settings(folder / "run.json", {"epochs": 2})
        save(folder, 2)
        if not (folder / "out").exists():
            with new_folder(folder / "out") as place:
                train._write(place, network, config, {"step": 2})

    def check(folder: Path, done: bool) -> None:
        settings = folder / "run.json"
        assert read_object(settings) == {"epochs": 2} if settings.exists() else not done
        assert fit(folder).progress.step in ([2] if done else [1, 2])
        out = folder / "out"
        assert out.exists() or not done
        if out.exists():
            assert read_object(out / "training.json") == {"step": 2}
            assert len(read_checkpoint(out).tensors()) == len(tree_flatten(network.parameters()))

    save(tmp_path, 1)
    begun = [*tmp_path.iterdir()]
    writer = Writer(write, check, lambda folder: [shutil.copy(file, folder) for file in begun], places=12)
    assert sweep(writer, tmp_path, ("full", "memory")) >= 12


@pytest.mark.parametrize("parent", ["file", "nowhere"])
def test_a_place_in_no_folder(parent: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A mistyped place was made, and hours of answers began in it."""
    (tmp_path / "file").write_text("")
    assert run("train", "demo", "-o", str(tmp_path / parent / "out")) == 1
    assert f"there is no folder {tmp_path / parent}" in capsys.readouterr().err.splitlines()[-1]
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_all_kinds_are_tested() -> None:
    """Kinds take turns, so that every second prompt would be of two kinds only."""
    prompts = [(kind, [i]) for i in range(16) for kind in ("chat", "list", "writing", "code")]
    for least in (20, 32, 64, 100):
        counts = Counter(kind for kind, _ in of_all_kinds(prompts, least))
        assert len(counts) == 4 and max(counts.values()) - min(counts.values()) <= 1
        assert sum(counts.values()) >= min(least, 64)


def test_a_prompt_without_a_template_begins_as_when_it_is_answered() -> None:
    """The token at the beginning was missing."""
    tokenizer = byte_level()
    beginning = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
    )
    tokenizer.post_processor = beginning
    prompt = TrainingPrompt("own", ({"role": "user", "content": "Hi"},))
    assert encode(Tokenizer(tokenizer, None, ()), prompt)[0] == 0


def test_bundled_prompts() -> None:
    """Kinds take turns, no slot stays, and held-out prompts share no list with the others."""
    texts = {}
    for held_out in (False, True):
        prompts = [bundled_prompt(i, 5, held_out=held_out) for i in range(300)]
        assert len({prompt.kind for prompt in prompts[:6]}) == 6
        texts[held_out] = {prompt.messages[0]["content"] for prompt in prompts}
        assert not any(re.search(r"\$[a-z]", text) for text in texts[held_out])
    assert len(texts[False]) > 290 and not texts[False] & texts[True]
    for name in ("topic", "task", "sentence", "code_body", "chat", "code", "edit", "list", "summary"):
        assert not set(rules(name, held_out=False)) & set(rules(name, held_out=True))
    assert bundled_prompt(7, 5, held_out=True) == bundled_prompt(7, 5, held_out=True)


def test_a_part_of_the_vocabulary_teaches_what_all_of_it_does() -> None:
    """Over many samples, the gradient of the loss is near that of a full softmax, which MLX's own gives."""
    logits, target = mx.random.normal((1, 3, 64), key=mx.random.key(0)), mx.random.normal((1, 3, 64))
    target = 0.9 * mx.softmax(4 * target, axis=-1)  # the drafter does not know a tenth
    real = mx.array([[True, True, False]])

    def full(logits: mx.array) -> mx.array:
        entropy = -(target * (logits - mx.logsumexp(logits, axis=-1, keepdims=True))).sum(axis=-1)
        return mx.where(real, entropy, 0).sum() / 2

    def part(logits: mx.array, key: mx.array | None) -> mx.array:
        sample = None if key is None else sample_tokens(target, key, likely=24, sampled=20)
        if sample is None:
            return loss_of([Step(logits, target, real)])
        chosen = logits[..., sample.places] + sample.log_weights
        return loss_of([Step(chosen, target[..., sample.places], real)])

    expected = mx.grad(full)(logits)
    assert mx.allclose(part(logits, None), full(logits), atol=1e-5)
    assert mx.allclose(mx.grad(part)(logits, None), expected, atol=1e-6)
    sampled = [mx.grad(part)(logits, mx.random.key(i)) for i in range(100)]
    error = mx.abs(sum(sampled[1:], sampled[0]) / 100 - expected).max()
    assert float(error) < 0.1 * float(mx.abs(expected).max())


def test_prompts_of_a_user(tmp_path: Path) -> None:
    """They come from lines, JSON strings and saved chats."""
    lines = tmp_path / "lines.txt"
    lines.write_text('What is tea?\n\n"two\\nlines"\n')
    assert [p.messages[0]["content"] for p in own_prompts([lines])] == ["What is tea?", "two\nlines"]
    saved = tmp_path / "chat.json"
    turns = [("user", "Hi"), ("assistant", "Hello"), ("user", "Bye")]
    saved.write_text(json.dumps({"messages": [{"role": r, "content": c} for r, c in turns]}))
    assert [len(prompt.messages) for prompt in own_prompts([saved])] == [1, 3]
    saved.write_text("\ufeff" + saved.read_text())  # as editors of Windows write files
    assert [len(prompt.messages) for prompt in own_prompts([saved])] == [1, 3]
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(InvalidValue, match="there is no prompt in it"):
        own_prompts([tmp_path / "empty.txt"])
    with pytest.raises(BadCheckpoint, match="cannot be read"):
        own_prompts([tmp_path / "absent.txt"])


def test_acceptance_names_the_answers_that_were_measured() -> None:
    assert tokens_a_round(2.104, 1.5) == "tokens a round: 2.10 greedy, 1.50 sampled"
    assert tokens_a_round(2.0, 0.0) == "tokens a round: 2.00 greedy"
    assert tokens_a_round(0.0, 0.0) == "tokens a round: not measured"
