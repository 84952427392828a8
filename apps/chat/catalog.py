"""What `/model` shows and fetches: the models on this disk and those that can be had."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass

from mlx_spec import hub
from mlx_spec.apps.chat.models import PairChoice, is_local
from mlx_spec.apps.chat.settings import typed_path
from mlx_spec.apps.command import table
from mlx_spec.apps.models import summary
from mlx_spec.apps.server.models import machine_bytes
from mlx_spec.errors import SpecError
from mlx_spec.hub.catalog import ALIASES, DEMO, aliases, made_for, resolve
from mlx_spec.hub.files import human_bytes
from mlx_spec.hub.local import LocalModel, cache_folder, default_folder, local_models, partners

PATIENCE = 3.0  # seconds for the hub to say how large the models of the catalogue are
ROOM, SPARE = 1.1, 500_000_000  # what a pair needs of memory beside its weights: a factor, and bytes


@dataclass(frozen=True)
class Wanted:
    """A model to be loaded, and the repositories of it that are not here."""

    name: str  # as the user gave it
    choice: PairChoice
    missing: tuple[str, ...]


def names() -> list[str]:
    """What can be given to `/model`."""
    here = [model.name for model in local_models() if not model.is_drafter]
    return [*here, *(name for name in aliases() if name not in here)]


def wanted(name: str, before: PairChoice) -> Wanted:
    """What a name stands for. Raises NotFound."""
    own = default_folder() / typed_path(name)
    if name == DEMO or typed_path(name).is_dir():
        return Wanted(name, PairChoice(name, kv_bits=before.kv_bits), ())
    if own.is_dir():
        return Wanted(name, PairChoice(str(own), kv_bits=before.kv_bits), ())
    ready = resolve(name)
    drafter = None if ready.drafter == made_for(ready.target) else ready.drafter
    parts = [ready.target, *([ready.drafter] if ready.drafter else [])]
    missing = tuple(part for part in parts if not is_local(part))
    return Wanted(name, PairChoice(ready.target, drafter, kv_bits=before.kv_bits), missing)


def listing(present: str) -> list[str]:
    """Lines for the user: what is here, the present one marked, and what can be fetched."""
    models = local_models()
    targets = [model for model in models if not model.is_drafter]
    rows = [_row(model, models, present) for model in targets]
    here = {model.name for model in models if model.problem is None}
    there = [alias for alias in ALIASES if resolve(alias).target not in here]
    lines = ["on this disk:", *table(rows)] if rows else []
    if there:
        sizes = _sizes(there)
        rows = [("  " + alias, *_offer(sizes.get(alias)), resolve(alias).target) for alias in there]
        lines += ["to be fetched:", *table(rows)]
    return [*lines, "/model NAME loads one, and asks before it downloads anything"]


def offer(wanted: Wanted) -> list[str]:
    """What a download is, in lines. Raises SpecError where the hub cannot be asked or the disk is full."""
    plans = [hub.plan(name) for name in wanted.missing]
    size, total = sum(plan.missing for plan in plans), sum(plan.total for plan in plans)
    place = cache_folder()
    hub.check_space(" and ".join(plan.name for plan in plans), size, place)
    lines = [
        f"{plan.name}: {human_bytes(plan.missing)} of {human_bytes(plan.total)} to fetch" for plan in plans
    ]
    return [*lines, f"{human_bytes(hub.free_bytes(place))} are free on the disk; memory: {fit(total)}"]


def fetch(wanted: Wanted) -> bool:
    """Download it as `mlx-spec pull` does: Ctrl-C stops it, the next one goes on there. Whether it came."""
    command = [sys.executable, "-m", "mlx_spec", "pull", wanted.name]
    return subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL).returncode == 0


def fit(size: int) -> str:
    """Whether weights of that many bytes go into the memory of this machine."""
    machine = machine_bytes()
    needed = int(size * ROOM) + SPARE
    if needed <= machine:
        return f"fits, about {human_bytes(needed)} of {human_bytes(machine)}"
    return f"does not fit, about {human_bytes(needed)} and there are {human_bytes(machine)}"


def _row(model: LocalModel, models: list[LocalModel], present: str) -> tuple[str, ...]:
    mark = "*" if model.name == present else " "
    about = summary(model, partners(model, models))
    return f"{mark} {model.name}", human_bytes(model.size), fit(model.size), about


def _offer(size: int | None) -> tuple[str, str]:
    return ("size not known", "") if size is None else (human_bytes(size), fit(size))


def _sizes(names: list[str]) -> dict[str, int]:
    """Bytes of target and drafter by alias, as far as the hub says so in time."""
    found: dict[str, int] = {}

    def ask(name: str) -> None:
        ready = resolve(name)
        with suppress(SpecError):
            plans = [hub.plan(part) for part in (ready.target, ready.drafter) if part]
            found[name] = sum(plan.total for plan in plans)

    import huggingface_hub  # noqa: F401 (imported once, not by all threads together)

    threads = [threading.Thread(target=ask, args=(name,), daemon=True) for name in names]
    deadline = time.monotonic() + PATIENCE
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0))
    return dict(found)
