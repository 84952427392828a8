"""`exact` of a pair: measured once, kept by all passes, and said where it cannot be."""

from __future__ import annotations

from pathlib import Path

import mlx.core as mx
import pytest
from support import tiny
from support.lossless import texts
from support.pairs import make_pair, refused, save, shallow

from mlx_spec.decode.statistics import Statistics
from mlx_spec.errors import InvalidValue
from mlx_spec.load import load
from mlx_spec.model.row_class import RowClass
from mlx_spec.pair import Pair
from mlx_spec.prompt import text_prompt
from mlx_spec.sampling import GREEDY, Sampling
from mlx_spec.types import MAX_DRAFT_TOKENS

shallow_models = pytest.fixture(shallow, scope="module", autouse=True)


@pytest.fixture(scope="module")
def half(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny.full(num_hidden_layers=1)
    model.set_dtype(mx.bfloat16)
    return save(model, tmp_path_factory.mktemp("half"))


def statistics_of(pair: Pair, **options: object) -> Statistics:
    found = Statistics()
    for round in pair.generate(tiny.prompt(20), max_tokens=24, **options):
        found = found.plus(round, round.seconds)
    return found


def test_the_class_is_measured_once(
    half: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = load(half, "none").rows
    assert "measuring what passes of" in capsys.readouterr().err
    assert first.most == MAX_DRAFT_TOKENS + 1 and first.doubt is None
    pair = load(half, "lookup", num_draft_tokens=3)
    assert pair.rows == first and "measuring what passes" not in capsys.readouterr().err
    found = statistics_of(pair)
    assert found.drafted and found.exact and found.exact_words == "every token exact"
    assert found.as_dict()["exact"] is True and found.exact_tokens == found.generated_tokens


def test_off_says_so_from_the_first_draft_on(half: Path) -> None:
    found = statistics_of(load(half, "lookup", num_draft_tokens=3, exact="off"))
    assert not found.exact and found.exact_tokens < found.generated_tokens
    assert found.exact_words == f"exact up to token {found.exact_tokens}, then likely: --exact off"
    assert statistics_of(load(half, "none", exact="off")).exact, "without drafts it is plain decoding"


def test_float32_computes_in_float32(half: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pair = load(half, "lookup", num_draft_tokens=3, exact="float32")
    assert "measuring what passes" not in capsys.readouterr().err
    assert pair.check() == mx.float32 and pair.rows == RowClass()
    assert pair.info.target_bytes == 2 * load(half, "none").info.target_bytes
    assert statistics_of(pair).exact


def test_other_choices_are_refused(half: Path) -> None:
    assert "auto, on, off, float32" in refused(InvalidValue, half, "none", exact="sometimes")


def test_a_fixed_length_is_cut_to_the_class() -> None:
    pair = make_pair("full", K=8)
    pair.use_rows(RowClass(base=2, limits=((0, 4),), shared=4, edges=(30,)))
    rounds = list(pair.generate(tiny.prompt(20), max_tokens=24))
    assert max(round.drafted for round in rounds) == 3
    assert any(round.kind == "drained" and not round.drafted for round in rounds[:-1]), "plain at the edge"
    assert all(round.doubt is None for round in rounds)


@pytest.mark.parametrize(("shared", "doubt"), [(12, None), (2, "beside 2 other answers")])
def test_a_batch_says_when_it_leaves_the_class(shared: int, doubt: str | None) -> None:
    pair = make_pair("full", K=8)
    pair.use_rows(RowClass(base=2, limits=((0, 8),), shared=shared))
    rounds = [each for _, each in pair.generate_batch([tiny.prompt(n) for n in (18, 19, 20)], max_tokens=16)]
    together = [each for each in rounds if each.batch_size == 3]
    assert together and {each.doubt for each in together} == {doubt}
    assert max(each.drafted for each in together) == (3 if doubt is None else 8)


SEEDED = Sampling(temperature=0.9, seed=5)


@pytest.mark.parametrize(
    ("found", "together", "sampling"),
    [
        (RowClass(base=2, limits=((0, 8),), shared=2), 2, GREEDY),
        # They part to cross it one by one.
        (RowClass(base=2, limits=((0, 8),), shared=12, edges=(30,)), 3, GREEDY),
        (RowClass(base=2, limits=((0, 8),), shared=12, edges=(30,)), 3, SEEDED),
        (RowClass(base=2, limits=((0, 8),)), 1, SEEDED),
        (RowClass(doubt="one row a pass"), 1, GREEDY),
    ],
)
def test_a_batch_never_leaves_the_class_with_exact_on(
    found: RowClass, together: int, sampling: Sampling
) -> None:
    pair = make_pair("full", K=8)
    prompts = [tiny.prompt(n) for n in (18, 19, 20)]
    options = {"max_tokens": 16, "sampling": sampling}
    pair.use_rows(found.under("on"))
    alone = [[t for each in pair.generate(prompt, **options) for t in each.tokens] for prompt in prompts]
    rounds = list(pair.generate_batch(prompts, **options))
    assert {each.doubt for _, each in rounds} == {None}
    assert max(each.batch_size for _, each in rounds) == together
    if found.edges:
        assert min(each.batch_size for _, each in rounds[:-6]) == 1
    assert texts(rounds) == dict(enumerate(alone))


@pytest.mark.parametrize(
    ("rows", "later"), [(RowClass(2, ((0, 8),), 12), [1024, 1199]), (RowClass(), [1199])]
)
def test_passes_of_a_prompt_end_where_they_did(rows: RowClass, later: list[int]) -> None:
    """Where bits count: a row of a prompt may depend on the number of rows in its pass."""
    pair = make_pair("full", "none")
    pair.use_rows(rows)
    parts, prompt = pair.open(), text_prompt(tiny.prompt(1200))

    def ends() -> list[int]:
        running = pair.prepare(parts, prompt, max_tokens=1)
        return [parts.target.size for _ in running.prefill()]

    assert ends() == [1024, 1199]
    parts.target.rewind(700)
    assert ends() == later


def test_padding_is_not_counted_as_a_gain() -> None:
    pair = make_pair("full", "none")
    pair.use_rows(RowClass(base=2, limits=((0, 8),), cost=1.25))
    assert statistics_of(pair).gain == pytest.approx(0.8)
    pair.use_rows(RowClass())
    assert statistics_of(pair).gain == 1.0
