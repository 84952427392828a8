"""`POST /race`, for the page: one question answered twice at the same time, with drafts and plain.

Both answers take turns of a few tokens between the rounds of other requests, which wait for one turn at most.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from mlx_spec.decode.statistics import Statistics
from mlx_spec.tokenizer.stream import AnswerStream

from ...race import NAMES, Race, race, verdict
from ..engine import answers
from ..engine.models import LoadedModel
from ..engine.preparation import PreparedRequest
from ..errors import invalid_field, unsupported_field
from ..http import Api, Json, data_event
from ..protocols import openai_chat
from ..protocols.openai_chat import ChatBody
from ..requests.request import GenerationRequest


def parse(body: ChatBody, model: str) -> GenerationRequest:
    """Return the request, limited to 256 tokens unless it has a limit. Raises Failure (400)."""
    left_out = {"n", "tools", "logprobs", "prediction", "stop", "stream_options"}
    for name in body.model_dump(include=left_out, exclude_defaults=True):
        raise unsupported_field(name, "a race has none: leave it out")
    request = openai_chat.parse(body, model)
    if request.sampling.temperature > 0 and request.sampling.seed is None:
        raise invalid_field("seed", "answers without a seed differ: give one, or temperature 0")
    return replace(request, max_tokens=request.max_tokens or 256)  # enough turns to compare


def turns(
    model: LoadedModel, request: GenerationRequest, prepared: PreparedRequest
) -> Iterator[answers.Event | None]:
    """Yield the events of a race, one for each turn; None while it waits for memory.

    Raises Failure (400) if nothing drafts with this model.
    """
    pair, (prompt,), most = model.pair, prepared.prompts, request.max_tokens
    assert most is not None
    if not pair.drafts:
        way = "start the server without --drafter none and --num-draft-tokens 0"
        raise invalid_field("model", f"nothing drafts with this model, so there is no race: {way}")
    tokens = 2 * (len(prompt) + most)  # in the caches of both answers
    while not model.has_room(tokens, 0):
        yield None
    model.prefix_cache.shrink(round(tokens * model.token_bytes))
    streams = [AnswerStream(pair.tokenizer, prompt, ends=prepared.ends) for _ in NAMES]
    read, last = [0, 0], None
    # A chunk of 64 tokens takes as long as a few rounds: other requests can wait for that.
    for last in race(pair, prompt, most, prepared.sampling, prepared.ends, step=64):
        texts = list[str]()
        for i, run in enumerate(last.runs):
            pieces = [piece for round in run.done[read[i] :] for piece in streams[i].read(round)]
            read[i] = len(run.done)
            texts.append("".join(piece.text for piece in pieces))
        yield _turn(last, texts)
    if last is not None:
        rests = ["".join(piece.text for piece in stream.end()) for stream in streams]
        yield _turn(last, rests, verdict(last, pair.tokenizer))
    timings = answers.Timings(Statistics(), None, 0.0, 0.0)
    yield answers.Finished(answers.Usage(0, 0, 0, 0), timings)


def _turn(race: Race, texts: Sequence[str], lines: Sequence[str] = ()) -> answers.RaceTurn:
    drafted, plain = (
        answers.Racer(name, texts[i], len(race.runs[i].tokens), race.pace(i)) for i, name in enumerate(NAMES)
    )
    return answers.RaceTurn((drafted, plain), race.multiple, len(race.ratios), race.difference, tuple(lines))


class RaceWriter:
    """Writes a race: an event for each turn, or its end as one object."""

    def __init__(self, body: ChatBody, request: GenerationRequest) -> None:
        self._head = {"model": request.model, **answers.notes_json(request.notes)}

    def frames(self, event: answers.Event | None) -> Iterator[str]:
        match event:
            case None:
                yield openai_chat.KEEPALIVE
            case answers.RaceTurn():
                yield data_event(self._head | _json(event))
            case answers.Finished():
                yield openai_chat.DONE
            case answers.Failed(failure=failure):
                yield data_event(failure.body)

    def whole(self, events: list[answers.Event]) -> Json:
        turns = [event for event in events if isinstance(event, answers.RaceTurn)]
        body = self._head | _json(turns[-1])
        for i, racer in enumerate(body["racers"]):
            racer["text"] = "".join(turn.racers[i].text for turn in turns)
        return body


def _json(turn: answers.RaceTurn) -> Json:
    low, middle, high = turn.multiple or (None, None, None)
    return {
        "racers": [dict(vars(racer)) for racer in turn.racers],
        "multiple": middle,
        "multiple_least": low,
        "multiple_most": high,
        "turns": turn.turns,
        "first_difference": turn.difference,
        "is_same": turn.difference is None,
        "verdict": list(turn.verdict),
    }


API = Api(ChatBody, parse, RaceWriter, turns=turns)
