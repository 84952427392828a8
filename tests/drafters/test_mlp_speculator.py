"""MLP and LSTM speculators beside their authors' torch, and the readings that would be wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from support import fitted
from support.fitted import Recorder, largest, opened
from support.synthetic import Checkpoint

from mlx_spec.types import Features, TargetParts

GOLDEN = Path(__file__).parents[1] / "golden" / "mlp_speculator"
CONFIGS: dict[str, dict[str, Any]] = json.loads((GOLDEN / "golden.json").read_text())
PARTS = TargetParts(lambda ids: ids, lambda x: x, lambda ids: lambda x: x)
PROMPT = [1, 2, 3, 4]


def difference(case: str, folder: Path, change: Callable[[Any], object] = id, rows: int = 1) -> float:
    """Return the largest difference of logits over three states, 1 for other tokens.

    The newest of `rows` features counts, whatever was accepted before.
    """
    golden = mx.load(str(GOLDEN / "golden.safetensors"))
    made = Checkpoint(
        mx.load(str(GOLDEN / f"{case}.safetensors")), CONFIGS[case], fitted.target_config(2, 24, 50)
    )
    source = opened(made, folder)
    change(source.network)
    worst, drafter = 0.0, source.make(PARTS)
    for i, (state, token) in enumerate(
        zip(golden[f"{case}.state"], golden[f"{case}.token"].tolist(), strict=True)
    ):
        history, recorder = [*PROMPT, token], Recorder()
        stale = golden[f"{case}.state"][: rows - 1]
        drafter.observe(history, Features(final_hidden=mx.concatenate([stale, state[None]])))
        tokens = drafter.draft(history, 16, recorder).tokens.tolist()
        worst = max(worst, largest(mx.concatenate(recorder.logits), golden[f"{case}.logits"][:, i]))
        if tokens != golden[f"{case}.chain"][i].tolist():
            worst = max(worst, 1.0)
    return worst


@pytest.mark.parametrize("case", CONFIGS)
def test_drafts_are_those_of_torch(case, tmp_path):
    for rows in (1, 3):
        assert difference(case, tmp_path / str(rows), rows=rows) < 1e-5


def no_memory(network: Any) -> None:
    next_memory = network.next_memory
    object.__setattr__(
        network, "next_memory", lambda mixed, cell, place: next_memory(mixed, mx.zeros_like(cell), place)
    )


def gates_in_another_order(network: Any) -> None:
    for linear in network.proj:
        forget, given, out, cell = mx.split(linear.weight, 4)
        linear.weight = mx.concatenate([given, forget, out, cell])


WRONG: dict[str, tuple[str, Callable[[Any], object]]] = {
    "no weight of embeddings": ("mlp", lambda network: setattr(network, "_weight", 1.0)),
    "an inner size of 0": ("mlp_inner_0", lambda network: setattr(network, "_weight", 0.0)),
    "an unscaled state": ("mlp_tied_scaled", lambda network: setattr(network, "_scaled", False)),
    "steps in another order": ("mlp", lambda network: network.emb.reverse()),
    "no bias of norms": ("rnn", lambda network: setattr(network.ln[0], "bias", mx.zeros(16))),
    "no weight of embeddings in an LSTM": ("lstm", lambda network: setattr(network, "_weight", 1.0)),
    "a cell that forgets": ("lstm", no_memory),
    "gates in another order": ("lstm", gates_in_another_order),
    "the norm of the cell as that of the state": (
        "lstm",
        lambda n: n.update({"ln": n.cell_ln, "cell_ln": n.ln}),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_reading_moves_the_logits(name, tmp_path):
    case, change = WRONG[name]
    assert difference(case, tmp_path, change) > 1e-2


def test_a_hidden_state_of_another_history_drafts_nothing(tmp_path):
    made = fitted.MADE["mlp_speculator"]()
    drafter = opened(made, tmp_path).make(PARTS)
    assert drafter.draft(PROMPT, 4, Recorder()).tokens.size == 0
    drafter.observe(PROMPT, Features(final_hidden=mx.zeros((2, 64))))
    assert drafter.draft([*PROMPT, 5], 4, Recorder()).tokens.size == 0
    assert [drafter.draft(PROMPT, k, Recorder()).tokens.size for k in (0, 1, 3, 9)] == [0, 1, 3, 4]
    drafter.observe(PROMPT, Features())
    assert drafter.draft(PROMPT, 4, Recorder()).tokens.size == 0
