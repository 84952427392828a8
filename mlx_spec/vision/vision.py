"""The pictures of one model: how many rows they have, their places in a prompt, and the tower.

`read_vision` reads JSON and headers alone, so that pictures are counted for models that are not loaded.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx

from mlx_spec.checkpoint.config import Checkpoint, integer, text_config
from mlx_spec.checkpoint.files import LOADING_ERRORS, one_line
from mlx_spec.checkpoint.owners import missing_tower, tower_bytes
from mlx_spec.errors import InvalidValue, NoVision
from mlx_spec.prompt import LazyRows, Prompt, Span
from mlx_spec.tokenizer import Tokenizer
from mlx_spec.vision.family import Family, Rows
from mlx_spec.vision.pictures import MAX_PICTURES
from mlx_spec.vision.pixels import Grid, Pixels, check_processor
from mlx_spec.vision.tower import VISION_FAMILIES, read_tower


@dataclass(frozen=True, eq=False)
class Picture:
    """A picture that is ready for the tower."""

    pixels: Pixels
    grid: Grid
    digest: bytes  # of all that its rows depend on besides the weights

    @property
    def count(self) -> int:
        """Return the number of its rows, which are tokens of a prompt."""
        return self.grid[0] * self.grid[1]


class Vision:
    """The pictures of one model. Only rows need MLX and its weights."""

    def __init__(self, checkpoint: Checkpoint, family: Family, tokenizer: Tokenizer) -> None:
        config, processor = checkpoint.config, checkpoint.json("preprocessor_config.json")
        processor |= checkpoint.json("processor_config.json").get("image_processor") or {}
        check_processor(processor)
        self._checkpoint, self._family = checkpoint, family
        self._prepare = family.preparation(config, processor)
        self.sight = family.sight(text_config(config))
        # These tokens stand for a row, and before and after a picture.
        stated = {key: integer(config, f"{key}_id", f"{key}_index") for key in family.tokens}
        self._tokens = [usual if (i := stated[key]) is None else i for key, usual in family.tokens.items()]
        written = [tokenizer.token_bytes(token).decode() for token in self._tokens]
        if not all(written):
            raise InvalidValue(f"its tokenizer lacks the tokens of pictures, {self._tokens}")
        self.words = family.words(*written)
        self._tower: Any = None

    @property
    def nbytes(self) -> int:
        """Return the bytes of the tower in its files."""
        return tower_bytes(self._checkpoint.config, self._checkpoint.headers.tensors)

    def prepare(self, pixels: Pixels) -> Picture:
        """Return a picture [H, W, 3] resized for the tower. Works on any thread."""
        resized, grid = self._prepare(pixels)
        head = json.dumps([resized.shape, grid]).encode()
        return Picture(resized, grid, hashlib.sha256(head + resized.tobytes()).digest())

    def expand(self, rendered: str, pictures: Sequence[Picture]) -> str:
        """Return a rendered prompt with the words of each row where the template has a placeholder.

        Newlines beside it may be one token with newlines of the text, so this comes before tokenizing. A
        prompt without pictures stays as it is. Raises InvalidValue for too many pictures, and beside pictures
        for a text with a placeholder.
        """
        if not pictures:
            return rendered
        if len(pictures) > MAX_PICTURES:
            raise InvalidValue(f"the prompt has {len(pictures)} pictures: {MAX_PICTURES} are allowed")
        words = self.words
        first, *rest = rendered.split(words.placeholder)
        if len(rest) < len(pictures):
            raise InvalidValue(f"the chat template shows {len(rest)} of {len(pictures)} pictures: send fewer")
        marker = words.placeholder if len(rest) > len(pictures) else words.row
        if len(rest) > len(pictures) or (marker != words.placeholder and marker in rendered):
            raise InvalidValue(
                f"a text beside pictures holds {marker}, which stands for a picture: take it out"
            )
        shown = (f"{words.before}{words.row * picture.count}{words.after}" for picture in pictures)
        return first + "".join(picture + text for picture, text in zip(shown, rest, strict=True))

    def prompt(self, tokens: Sequence[int], pictures: Sequence[Picture]) -> Prompt:
        """Return the prompt of a text that was expanded with these pictures and tokenized."""
        rows_at = [i for i, token in enumerate(tokens) if token == self._tokens[0]]
        if len(rows_at) != sum(picture.count for picture in pictures):
            raise InvalidValue(f"{self.words.row} is not one token of this model's tokenizer")
        rows: dict[bytes, LazyRows] = {}  # a picture that comes twice is encoded once
        spans, taken = list[Span](), 0
        for picture in pictures:
            lazy = rows.setdefault(picture.digest, LazyRows(partial(self.encode, picture)))
            spans.append(Span(rows_at[taken], picture.count, picture.digest, lazy, picture.grid))
            taken += picture.count
        return Prompt(tuple(tokens), tuple(spans))

    def encode(self, picture: Picture) -> Rows:
        """Compute the rows of a picture, [count, D]. Yield after each step what it computed."""
        self.load()
        rows: mx.array = yield from self._tower.encode(picture.pixels, picture.grid)
        return rows

    def load(self) -> None:
        """Read the tower, whose weights are not read before the first picture. Raises NoVision."""
        if self._tower is None:
            self._tower = read_tower(self._checkpoint)


def read_vision(checkpoint: Checkpoint, tokenizer: Tokenizer) -> Vision:
    """Return what a checkpoint has for pictures. Raises NoVision with the reason if it has nothing."""
    if (reason := missing_tower(checkpoint.config, checkpoint.headers.tensors)) is not None:
        raise NoVision(reason)
    family = VISION_FAMILIES[checkpoint.config["model_type"]]
    try:
        return Vision(checkpoint, family, tokenizer)
    except (InvalidValue, *LOADING_ERRORS) as error:
        raise NoVision(one_line(error)) from error
