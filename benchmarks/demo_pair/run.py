"""One training run: a model, its optimizer and how far it has come; saved so that it can go on."""

import json
import time
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from torch import nn

from demo_pair.optimizer import Optimizer

ModelT = TypeVar("ModelT", bound=nn.Module)
WARMUP, DECAY = 150, 0.35  # steps; share of the steps over which the rate falls to zero


def rate_at(step: int, steps: int, peak: float) -> float:
    """Return the learning rate: warm-up, constant, then linear to zero."""
    warmup = min(WARMUP, steps // 10)
    if step < warmup:
        return peak * (step + 1) / warmup
    return peak * min(1.0, max(0.0, (steps - step) / (steps * DECAY)))


class Run(Generic[ModelT]):
    """A training run of `steps` steps, going on from `file` if that exists."""

    def __init__(self, model: ModelT, file: Path, steps: int, peak: float) -> None:
        self.model, self.file, self.steps, self.peak = model, file, steps, peak
        self.optimizer = Optimizer(model)
        self.done, self.log = 0, list[dict[str, object]]()
        seconds = 0.0
        if file.exists():
            state = torch.load(file, weights_only=False)
            model.load_state_dict(state["model"])
            self.optimizer.load(state["optimizer"])
            self.done, seconds, self.log = state["step"], state["seconds"], state["log"]
        self._began = time.perf_counter() - seconds

    @property
    def seconds(self) -> float:
        """Return the seconds of this run and of the runs that it continues."""
        return time.perf_counter() - self._began

    def step(self, loss: torch.Tensor) -> float:
        """Take an optimizer step. Return the value of the loss."""
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step(rate_at(self.done, self.steps, self.peak))
        self.done += 1
        return loss.item()

    def note(self, entry: dict[str, object]) -> None:
        """Add a line to the log and prints it."""
        self.log.append({"step": self.done, **entry, "seconds": round(self.seconds)})
        print(json.dumps(self.log[-1]), flush=True)

    def save(self) -> None:
        """Write the checkpoint, whole or not at all."""
        state = {"model": self.model.state_dict(), "optimizer": self.optimizer.state()}
        temporary = self.file.with_suffix(".tmp")
        torch.save({**state, "step": self.done, "seconds": self.seconds, "log": self.log}, temporary)
        temporary.replace(self.file)

    def record(self) -> dict[str, Any]:
        """Return the record of the run for the log."""
        return {"steps": self.steps, "peak_rate": self.peak, "seconds": round(self.seconds), "log": self.log}

    def write_log(self, file: Path, about: dict[str, Any]) -> None:
        """Write the record of the run after other facts."""
        record = {**about, "torch": torch.__version__, **self.record()}
        file.write_text(json.dumps(record, indent=1) + "\n")
