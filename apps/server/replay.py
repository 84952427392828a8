"""`mlx-spec bench --agent`: replay a session of a coding agent, and say what each turn reads again.

The session has 20 turns: a main agent with three questions, the title that it asks for, two sub-agents at the
same time, and a new chat. Each turn is a request to the engine of the server, so chat template, tools, caches
and batches are the server's. The recorded answer follows in the next turn, whatever the model answered.
"""

from __future__ import annotations

import dataclasses
import math
import queue
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from mlx_spec.cli.command import table
from mlx_spec.errors import InvalidValue
from mlx_spec.hub.catalog import PairSpec
from mlx_spec.pair import Pair
from mlx_spec.sampling import Sampling

from .engine.answers import LAST_EVENTS, Event, Failed, Finished
from .engine.engine_thread import EngineThread
from .engine.models import Loader, load_served
from .requests.request import Chat, GenerationRequest, Tool, ToolUse
from .settings import ServedModel, Settings
from .tools.formats import find_tool_format

TURNS = 20
Message = Mapping[str, Any]

RULES = """You work in the folder of a program that keeps notes, and use its files by tools.
Read a file before you change it, and change as little as the task needs.
A change without a test is not done. Run the tests of the part that you changed, then all of them.
If a test fails that you did not touch, say so and leave it alone.
Names say what they hold. Do not abbreviate. Do not leave commented code behind.
Errors that a user sees name the cause and the way out, in one line.
Never write outside the folder. Never remove a file that you did not create.
Ask before you add a dependency, change a public name or touch the format of saved notes.
Notes are text files with a head: a title, a date and tags, one a line. The head ends with an empty line.
The importer reads the notes of other programs. It must never lose a line, whatever the encoding is.
The index is built from the notes and can be built anew at any time: never repair it by hand.
Dates are ISO 8601 in UTC. Paths are relative to the folder of the notes, with slashes on every system.
Keep answers short: what you found, what you changed, what is left. No praise, no apology.
Several independent calls of tools belong into one turn. Long searches belong to a helper.
The user reads your last message only. Everything that matters must be in it.
"""


@dataclass(frozen=True)
class Turn:
    """One request of the session."""

    agent: str
    messages: tuple[Message, ...]
    tools: tuple[Tool, ...]
    joins: bool = False  # it is sent together with the turn before it


@dataclass(frozen=True)
class TurnFigures:
    """The tokens that a turn read, and how long it waited."""

    agent: str
    prompt: int
    reused: int
    read_again: int  # known before, and read all the same
    reason: str | None  # why something was read again
    seconds: float  # to the first token
    tokens_per_second: float | None  # of the answer; None if it has one token

    @property
    def read(self) -> int:
        return self.prompt - self.reused


def _tool(name: str, about: str, **properties: str) -> Tool:
    fields = {key: {"type": "string", "description": text} for key, text in properties.items()}
    schema = {"type": "object", "properties": fields, "required": list(properties)}
    return Tool(name, about, schema)


def _tools() -> tuple[Tool, ...]:
    """Return the tools of the main agent; helpers have the first three."""
    return (
        _tool(
            "read", "Return the lines of a file with their numbers.", path="The file, relative to the folder."
        ),
        _tool(
            "search",
            "Return the lines that match.",
            pattern="A regular expression.",
            path="A folder or file.",
        ),
        _tool("run", "Run a command and return what it prints.", command="The command, as a shell reads it."),
        _tool(
            "edit", "Replace a text in a file.", path="The file.", old="The text there.", new="The new text."
        ),
        _tool("helper", "Give a task to a helper and return its report.", task="What to find out, in full."),
    )


# --- the session


class _Recorder:
    """A conversation that grows. `ask` and `call` return what the agent sends then.

    A turn that `joins` is sent together with the turn before it.
    """

    def __init__(self, agent: str, system: str, tools: tuple[Tool, ...]) -> None:
        self._agent, self._tools = agent, tools
        self._messages: list[Message] = [{"role": "system", "content": system}]
        self._calls = 0

    def ask(self, text: str, *, joins: bool = False) -> Turn:
        self._messages.append({"role": "user", "content": text})
        return Turn(self._agent, tuple(self._messages), self._tools, joins)

    def call(self, thinking: str, *calls: tuple[str, dict[str, str], str], joins: bool = False) -> Turn:
        """Record an answer with calls, each with its result."""
        made, results = [], []
        for name, arguments, result in calls:
            self._calls += 1
            id = f"call_{self._calls}"
            function = {"name": name, "arguments": arguments}
            made.append({"id": id, "type": "function", "function": function})
            results.append({"role": "tool", "tool_call_id": id, "name": name, "content": result})
        answer = {"role": "assistant", "content": None, "reasoning_content": thinking, "tool_calls": made}
        self._messages += [answer, *results]
        return Turn(self._agent, tuple(self._messages), self._tools, joins)

    def say(self, thinking: str, text: str) -> None:
        self._messages.append({"role": "assistant", "content": text, "reasoning_content": thinking})


def session(lines: int, rules: str = RULES) -> Iterator[Turn]:
    """Yield the 20 turns of the session. Files have `lines` lines, system prompts begin with `rules`."""
    tools = _tools()
    role = "You are the main agent. You may give a task to helpers; they see nothing of this conversation."
    system = rules + role
    main = _Recorder("main", system, tools)
    question = "The importer drops the last line of notes that come from Windows. Find out why and mend it."
    yield main.ask(question)
    about = "Write a title of at most six words for the conversation that begins so. Only the title."
    yield _Recorder("title", about, ()).ask(question, joins=True)
    search = {"pattern": "def .*read", "path": "notes"}
    yield main.call("First see what is there.", ("search", search, _matches(lines)))
    source = ("read", {"path": "notes/importer.py"}, _source("importer", lines))
    yield main.call("The importer splits lines by itself.", source)
    tests = ("read", {"path": "tests/test_importer.py"}, _source("test_importer", lines))
    yield main.call("What do its tests say?", tests)
    tested = ("run", {"command": "pytest tests/test_importer.py"}, _log(lines, failed=3))
    yield main.call("Run them as they are.", tested)
    edit = {"path": "notes/importer.py", "old": 'text.split("\\r\\n")[:-1]', "new": "text.splitlines()"}
    thinking = "The last part is cut off. splitlines knows all line ends."
    yield main.call(thinking, ("edit", edit, "1 replacement"))
    yield main.call("Again.", ("run", {"command": "pytest"}, _log(2 * lines, failed=0)))
    text = "A note without a final line end lost its last line. `read_lines` now splits by `splitlines`."
    main.say("All pass.", text)
    yield main.ask("Do other readers have the same fault? Look at the exporter and at the index at once.")
    parts = ("exporter", "index")
    tasks = [f"Does notes/{part}.py split lines by hand? Name each place." for part in parts]
    role = "You are a helper. Do the one task that you are given, change nothing, and report what you found."
    helpers = [_Recorder(f"helper {i + 1}", rules + role, tools[:3]) for i in range(2)]
    for i, (helper, task) in enumerate(zip(helpers, tasks, strict=True)):
        yield helper.ask(task, joins=i > 0)
    for i, (helper, part) in enumerate(zip(helpers, parts, strict=True)):
        read = ("read", {"path": f"notes/{part}.py"}, _source(part, lines))
        yield helper.call(f"Look at notes/{part}.py.", read, joins=i > 0)
    for i, (helper, part) in enumerate(zip(helpers, parts, strict=True)):
        counted = ("run", {"command": f"wc -l notes/{part}.py"}, _matches(lines // 2))
        yield helper.call(f"Look at notes/{part}.py.", counted, joins=i > 0)
    reports = ["The exporter joins lines and never splits.", "The index splits once, by splitlines."]
    asked = [("helper", {"task": task}, report) for task, report in zip(tasks, reports, strict=True)]
    yield main.call("Two helpers can look.", *asked)
    main.say("Nothing to do.", "No. The exporter never splits, and the index uses `splitlines`.")
    yield main.ask("Then add a line to the changelog.")
    yield main.call("Read it first.", ("read", {"path": "CHANGES.md"}, _changes(lines)))
    entry = "## Next\n- Notes from Windows keep their last line.\n"
    edit = {"path": "CHANGES.md", "old": "## Next\n", "new": entry}
    yield main.call("At the top.", ("edit", edit, "1 replacement"))
    yield _Recorder("new chat", system, tools).ask("How do I run one test alone?")


def _source(name: str, lines: int) -> str:
    """Return a file as `read` shows it."""
    parts = ("head", "title", "date", "tags", "body", "link", "quote", "table")
    code = [
        line
        for i in range(math.ceil(lines / 4))
        for line in (
            f"def {name}_{parts[i % 8]}_{i}(note: Note, start: int = {i}) -> list[str]:",
            f'    """Return the {parts[i % 8]} of a note from line {7 * i} on."""',
            f"    return [line for line in note.lines[start + {i} :] if line[:1] == {parts[i % 8][0]!r}]",
            "",
        )
    ]
    return "\n".join(f"{number + 1:4} {line}" for number, line in enumerate(code[:lines]))


def _matches(lines: int) -> str:
    return "\n".join(
        f"notes/part_{i % 9}.py:{13 * i + 4}: def read_{i}(path: Path, encoding: str)" for i in range(lines)
    )


def _log(lines: int, failed: int) -> str:
    outcomes = ["FAILED" if i < failed else "PASSED" for i in range(lines)]
    rows = [f"tests/test_part_{i % 11}.py::test_case_{i} {word}" for i, word in enumerate(outcomes)]
    return "\n".join([*rows, f"{failed} failed, {lines - failed} passed in {lines * 0.03:.2f} s"])


def _changes(lines: int) -> str:
    return "\n".join(
        ["## Next", *(f"- {i}: notes with {i + 2} tags are found by each of them." for i in range(lines))]
    )


def _as_text(turn: Turn) -> Turn:
    """Return a turn for a model without tools: calls and results are texts."""
    messages = list[Message]()
    for message in turn.messages:
        text = message["content"] or ""
        for call in message.get("tool_calls", ()):
            arguments = ", ".join(f"{k}={v!r}" for k, v in call["function"]["arguments"].items())
            text += f"{call['function']['name']}({arguments})\n"
        role = "user" if message["role"] == "tool" else message["role"]
        if messages and messages[-1]["role"] == role:  # most templates want them to alternate
            text = f"{messages.pop()['content']}\n{text}"
        messages.append({"role": role, "content": text})
    return dataclasses.replace(turn, messages=tuple(messages), tools=())


# --- the replay


def replay(
    spec: PairSpec, tokens: int, loader: Loader = load_served, rules: str = RULES
) -> Iterator[TurnFigures]:
    """Send the turns to an engine that loads a pair, and yield the figures of each.

    An answer has at most `tokens` tokens; system prompts begin with `rules`. Raises SpecError.
    """
    name, pairs = "bench", list[Pair]()

    def load(served: ServedModel) -> Pair:
        pairs.append(loader(served))
        return pairs[0]

    engine = EngineThread(Settings((ServedModel(name, spec),)), load)
    engine.start()
    try:
        if not engine.wait_loaded():
            raise InvalidValue(f"--agent: {engine.status().problem}")
        (pair,) = pairs
        if not pair.tokenizer.chats:
            raise InvalidValue("--agent: this model has no chat template: give an instruction-tuned one")
        requests = _fitting(pair, engine, name, tokens, rules)
        for turns in _together(requests):
            arrived: queue.SimpleQueue[tuple[int, Event]] = queue.SimpleQueue()
            for i, (_, request) in enumerate(turns):
                engine.submit(request, partial(_put, arrived, i))
            ended = dict[int, TurnFigures]()
            while len(ended) < len(turns):
                i, event = arrived.get()
                if type(event) in LAST_EVENTS:
                    ended[i] = _figures(turns[i][0], event)
            yield from (ended[i] for i in sorted(ended))
    finally:
        engine.close()


def _put(arrived: queue.SimpleQueue[tuple[int, Event]], number: int, event: Event) -> None:
    arrived.put((number, event))


def _fitting(
    pair: Pair, engine: EngineThread, model: str, tokens: int, rules: str
) -> list[tuple[Turn, GenerationRequest]]:
    """Return the requests, with files as long as the context allows. Raises InvalidValue if none fit."""
    calls = find_tool_format(pair.tokenizer) is not None
    limit = pair.info.context_length
    for lines in (40, 20, 10, 5):
        turns = [turn if calls else _as_text(turn) for turn in session(lines, rules)]
        requests = [(turn, _request(turn, model, tokens)) for turn in turns]
        longest = max(engine.count_tokens(request) for _, request in requests) + tokens
        if limit is None or longest <= limit:
            return requests
    raise InvalidValue(
        f"--agent: the session needs {longest} tokens, and this model has a context of {limit}"
    )


def _request(turn: Turn, model: str, tokens: int) -> GenerationRequest:
    tools = ToolUse(turn.tools, "auto") if turn.tools else None
    chat = Chat(turn.messages, tools, thinking=True)
    return GenerationRequest(
        model, chat, Sampling(), max_tokens=tokens, ignore_eos=True, earlier_answers=False
    )


def _together(
    requests: Sequence[tuple[Turn, GenerationRequest]],
) -> list[list[tuple[Turn, GenerationRequest]]]:
    """Return the requests in groups that are sent at the same time."""
    groups: list[list[tuple[Turn, GenerationRequest]]] = []
    for turn, request in requests:
        if turn.joins:
            groups[-1].append((turn, request))
        else:
            groups.append([(turn, request)])
    return groups


def _figures(turn: Turn, event: Event) -> TurnFigures:
    if isinstance(event, Failed):
        raise InvalidValue(f"--agent: {turn.agent}: {event.failure.message}")
    assert isinstance(event, Finished)
    statistics, timings = event.timings.statistics, event.timings
    return TurnFigures(
        turn.agent,
        statistics.prompt_tokens,
        statistics.reused_tokens,
        statistics.reread_tokens,
        statistics.reread_words,
        timings.first_token_seconds,
        statistics.tokens_per_second or None,
    )


def report(turns: Sequence[TurnFigures]) -> list[str]:
    """Return the lines of a table of turns, and what all of them read."""
    head = ("turn", "agent", "prompt", "reused", "new", "again", "first token", "tokens/s", "why again")
    rows = [
        (
            str(i + 1),
            one.agent,
            f"{one.prompt}",
            f"{one.reused}",
            f"{one.read - one.read_again}",
            f"{one.read_again}",
            f"{one.seconds:.2f} s",
            "" if one.tokens_per_second is None else f"{one.tokens_per_second:.1f}",
            one.reason or "",
        )
        for i, one in enumerate(turns)
    ]
    read, again = sum(one.read for one in turns), sum(one.read_again for one in turns)
    total = sum(one.prompt for one in turns)
    over = f"{again / max(read - again, 1):.1%} over the least"
    return [
        *table([head, *rows], right=(0, 2, 3, 4, 5, 6, 7)),
        "",
        f"{total} tokens of prompts, {read} read, {again} of them again: {over}",
        "new: never seen before; again: known before, but not in memory, or not in a place to go on from",
    ]
