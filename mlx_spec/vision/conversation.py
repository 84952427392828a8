"""The prompt of a conversation whose messages may have pictures among their parts.

A part is {"type": "text", "text": ...} or {"type": "image", "image": ...}. An image is the bytes of a file,
pixels [H, W, 3], or a Picture, which is ready for the tower.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from mlx_spec.errors import InvalidValue, NoVision
from mlx_spec.prompt import Prompt, text_prompt
from mlx_spec.tokenizer import Tokenizer
from mlx_spec.vision.pictures import read_picture
from mlx_spec.vision.vision import Picture, Vision

Message = Mapping[str, Any]
Part = Mapping[str, Any]

NO_VISION = NoVision("it was opened without its tower")


def seeing(vision: Vision | NoVision) -> Vision:
    """Return what reads the pictures of a target. Raises NoVision with the reason if nothing does."""
    if isinstance(vision, NoVision):
        raise NoVision(f"this target reads no pictures: {vision}")
    return vision


def prepared(parts: Sequence[Part], vision: Vision | NoVision) -> list[dict[str, Any]]:
    """Return the parts of a message with its pictures ready for the tower. Raises InvalidValue and NoVision.

    Whoever keeps a conversation keeps these: a picture is decoded and resized once.
    """
    ready = []
    if not isinstance(parts, Sequence):
        raise InvalidValue(f"a message is {parts!r}, it must be a text or a list of parts")
    for part in parts:
        match part:
            case {"type": "text", "text": str()} | {"type": "image", "image": Picture()}:
                ready.append(dict(part))
            case {"type": "image", "image": bytes() | np.ndarray() as picture}:
                eyes = seeing(vision)
                pixels = read_picture(picture) if isinstance(picture, bytes) else picture
                ready.append({**part, "image": eyes.prepare(pixels)})
            case _:
                raise InvalidValue(
                    'a part of a message must be {"type": "text", "text": ...} or {"type": "image", "image": '
                    "...} with the bytes of a file"
                )
    return ready


def conversation_prompt(
    messages: Sequence[Message], tokenizer: Tokenizer, vision: Vision | NoVision, **options: Any
) -> Prompt:
    """Return the prompt of a conversation whose pictures are `prepared`.

    `options` go to `Tokenizer.prompt_with_turns`. Raises what that does, NoVision, and InvalidValue for
    pictures that the template does not show.
    """
    pictures = [part["image"] for message in messages for part in _parts(message) if _is_image(part)]
    if not pictures:
        return text_prompt(*tokenizer.prompt_with_turns(messages, **options))
    eyes = seeing(vision)
    shown = [{**m, "content": [_shown(part) for part in _parts(m)]} if _parts(m) else m for m in messages]
    expand = partial(eyes.expand, pictures=pictures)
    tokens, turns = tokenizer.prompt_with_turns(shown, expand=expand, **options)
    return replace(eyes.prompt(tokens, pictures), turns=turns)


def _parts(message: Message) -> Sequence[Part]:
    content = message.get("content")
    return content if isinstance(content, list) else []


def _is_image(part: Part) -> bool:
    return part.get("type") == "image"


def _shown(part: Part) -> Part:
    """Return a part as chat templates take it: without pixels."""
    return {"type": "image"} if _is_image(part) else part
