"""What does it cost on a Mac that drafts change no bit? Arithmetic on PUBLISHED costs of a pass by its rows.

From M3 on, passes of 2 to 12 rows share one kernel and a pass of one row has another, so plain decoding runs
two rows a pass, and all drafts stay in the class. M1 and M2 need no second row. A round with K draft
tokens takes K passes of the drafter (3 % of a plain token each), a pass of K + 1 rows, and a wait for the
host (3 %).
Each draft token is accepted with the same probability. Speeds are multiples of plain decoding with one row a
pass, each with its best K.

  any        drafts of every length; near ties may fall otherwise
  --exact on rows of the class only; a plain pass has its fewest rows
  auto       as "on" if that plain pass costs at most 5 % more than one row, else as "any"

The second row of a plain pass may hold a guess that costs nothing, such as lookup's or the drafter's first
token. Then the host waits for the verdict (3 %), or the row stays a copy, whichever is faster.

The last table is the time to measure a class once, as `row_bits.py` does where plain passes need two rows: it
reads the weights in whole passes, and those of each distinct layer alone. Both take the published bandwidth.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
from timing import finish, parser, table

from mlx_spec.model.row_class import RowClass
from mlx_spec.types import MAX_DRAFT_TOKENS

DRAFTED = 0.03  # of a plain token: one draft token
HOST = 0.03  # of a plain token: a wait for the host
MOST = 17  # rows of a pass
ACCEPTANCES = (0.0, 0.5, 0.7, 0.8, 0.9)
GUESSES = (0.05, 0.2, 0.5)  # how often a free guess is right


@dataclass(frozen=True)
class Chip:
    """The cost of a pass by its rows, and the class of its kernels for layers in 4 bits."""

    passes: dict[int, float]  # rows -> plain tokens; straight lines between
    base: int  # rows of a plain pass in the class
    most: int  # rows of a pass in the class

    def cost(self, rows: int) -> float:
        """Return the time of a pass, in plain tokens."""
        return float(np.interp(rows, list(self.passes), list(self.passes.values())))

    def best(self, acceptance: float, base: int, most: int) -> tuple[float, int]:
        """Return the speed with the best draft length, and that length."""
        rounds = [(1 / self.cost(base), 0)]
        for K in range(1, min(most, max(self.passes))):
            tokens = sum(acceptance**i for i in range(K + 1))
            rounds.append((tokens / (K * DRAFTED + self.cost(K + 1) + HOST), K))
        return max(rounds)

    def guessing(self, right: float) -> tuple[float, float]:
        """Return the speed of plain passes whose second row is a copy, and with a free guess in it."""
        copied = 1 / self.cost(self.base)
        return copied, max(copied, (1 + right) / (self.cost(2) + HOST))


# Published passes of layers in 4 bits; "mlx#" are issues and pull requests of ml-explore/mlx. Limits as MLX
# has them: 5 rows on M1 and M2 for large layers; from M3 on 12, of which attention allows 8.
CHIPS = {
    "M1 or M2, 12B, rounds (mlxcel)": Chip({1: 1.0, 17: 1 + 16 * 0.346}, 1, 5),
    "M3 Max, 5120 to 17408 (mlx#3863)": Chip(
        {1: 1.0, 2: 1.0, 3: 1.14, 4: 1.28, 6: 2.04, 8: 2.5, 9: 3.1, 10: 3.95, 17: 3.95}, 2, 8
    ),
    "M3 Ultra, chained (mlx#4265)": Chip({1: 1.0, 4: 1.0, 5: 1.14, 6: 1.28, 8: 1.57}, 2, 8),
    "M4 Pro, 4096 to 24576 (mlx#3839)": Chip({1: 1.0, 2: 1.03, 3: 1.22, 4: 1.47, 6: 2.07, 8: 2.69}, 2, 8),
    "M4 Pro, 4096 to 4096 (mlx#3839)": Chip({1: 1.0, 2: 1.2, 3: 1.35, 4: 1.57, 6: 1.99, 8: 2.01}, 2, 8),
    "M5 Max, 70B, a pass (mlx#3791)": Chip({1: 1.0, 2: 1.06, 3: 1.12, 5: 1.46, 8: 2.2, 12: 3.2}, 2, 8),
    "M5 Max, LM head (mlxcel)": Chip({1: 1.0, 2: 1.036, 3: 1.168, 4: 1.37, 5: 1.88, 8: 3.46}, 2, 8),
}


@dataclass(frozen=True)
class Model:
    """The distinct layers of a model in 4 bits with groups of 64, [N, K], and how often it has each."""

    layers: dict[tuple[int, int], int]

    def measuring(self, passes: int = 27, outputs: int = 2**16, bits: float = 4.5) -> tuple[float, int]:
        """Return the bytes that measuring its class reads, and the calls of layers alone.

        The passes are a prompt, a recorded one, 8 plain ones, 7 of 2 to 8 rows, and 10 timed ones.
        """
        most = MAX_DRAFT_TOKENS + 1
        whole = sum(n * N * K for (N, K), n in self.layers.items()) * passes
        alone = calls = 0
        for N, K in self.layers:
            drawn = min(max(outputs // N, most), 3 * most)
            # Plain passes of one row, and of two; blocks of each number of rows; rows of other sequences.
            count = (
                2 * drawn + sum(drawn // T for T in (2, 3, 4, 5, 6, 7, 8, 9, 12, 17)) + drawn + drawn // 12
            )
            alone, calls = alone + count * N * K, calls + count
        return (whole + alone) * bits / 8, calls


def gemma3(layers: int, hidden: int, inner: int, heads: int, kv_heads: int, vocab: int = 262144) -> Model:
    """Return a Gemma 3 with heads of 256."""
    q, kv = heads * 256, kv_heads * 256
    shapes = {(q, hidden): 1, (kv, hidden): 2, (hidden, q): 1, (inner, hidden): 2, (hidden, inner): 1}
    return Model({shape: n * layers for shape, n in shapes.items()} | {(vocab, hidden): 1})


MODELS = {"Gemma 3 4B": gemma3(34, 2560, 10240, 8, 4), "Gemma 3 12B": gemma3(48, 3840, 15360, 16, 8)}
GIGABYTES = {"M3": 100, "M4": 120, "M4 Pro": 273, "M3 Max": 400, "M4 Max": 546}  # a second, by Apple


def main() -> None:
    settings = parser(__doc__).parse_args()
    started = time.time()
    rows, guesses, results = [], [], {}
    for name, chip in CHIPS.items():
        cost = chip.cost(chip.base)
        pads = RowClass(chip.base, ((0, chip.most),), cost=cost).under("auto").is_bitwise
        least = 1.0
        for acceptance in ACCEPTANCES:
            any_length, exact = chip.best(acceptance, 1, MOST), chip.best(acceptance, chip.base, chip.most)
            auto = exact if pads else any_length
            least = min(least, auto[0] / any_length[0])
            shown = [f"{speed:.2f} (K = {K})" for speed, K in (any_length, exact, auto)]
            rows.append([name, f"{cost:.2f}", acceptance, *shown, f"{auto[0] / any_length[0]:.3f}"])
        results[name] = {"plain pass": cost, "auto pads": pads, "auto to any, least": round(least, 4)}
        if chip.base > 1:
            speeds = [chip.guessing(right) for right in GUESSES]
            guesses.append([name, f"{speeds[0][0]:.2f}", *(f"{guessed:.2f}" for _, guessed in speeds)])
            results[name]["free guess"] = [round(guessed, 3) for _, guessed in speeds]
    print("Speeds over plain decoding with one row a pass, with the best K of each\n")
    head = ["chip", "plain pass", "acceptance", "any", "--exact on", "auto", "auto to any"]
    table(head, rows)
    print("\nPlain passes of two rows: a copy in the second row, or a free guess that is right this often\n")
    table(["chip", "copy", *(f"right {right:.2f}" for right in GUESSES)], guesses)
    print("\nSeconds to measure a class once\n")
    measured = {name: model.measuring() for name, model in MODELS.items()}
    rows = [
        [name, calls, *(f"{size / 1e9 / speed:.2f}" for speed in GIGABYTES.values())]
        for name, (size, calls) in measured.items()
    ]
    table(["model", "calls of layers", *GIGABYTES], rows)
    finish("exact_cost", results | {"measuring": measured}, settings, started)


if __name__ == "__main__":
    main()
