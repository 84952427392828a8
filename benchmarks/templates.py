"""Do other people's chat templates give the same prompts here as in transformers?

Each file `*.jinja` in the folders renders each built-in conversation: by `Tokenizer.prompt`, and by
`apply_chat_template` of transformers. The result of a conversation is

- equal: the same tokens, and every text of the conversation is in them;
- better: transformers fails, loses a text or writes parts of a message as data, and ours has every text;
- refused: ours refuses with a reason, and transformers fails or loses a text, too;
- wrong: anything else.

This script looks for the texts itself, without mlx_spec: in the decoded prompt, plain or as JSON, ignoring
white space. A template may drop the reasoning of earlier turns, so that is only compared, not looked for.
Give folders of templates, such as those in llama.cpp and trl.
"""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import time as clock
from typing import Any

from timing import finish, parser, table
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from mlx_spec.errors import SpecError
from mlx_spec.tokenizer import Tokenizer
from mlx_spec.tokenizer.chat_template import ChatTemplate

Message = Mapping[str, Any]
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
SHOWN = 100  # characters of a reason
VERDICTS = ("equal", "better", "refused", "wrong")


@dataclass(frozen=True)
class Conversation:
    messages: Sequence[Message]
    tools: Sequence[Message] = ()
    variables: Mapping[str, Any] | None = None


def user(*texts: str) -> Message:
    parts = [{"type": "text", "text": text} for text in texts]
    return {"role": "user", "content": parts if len(parts) > 1 else texts[0]}


def system(text: str, role: str = "system") -> Message:
    return {"role": role, "content": text}


def answer(text: str | None, **more: Any) -> Message:
    return {"role": "assistant", "content": text, **more}


def calling(text: str | None, *calls: Mapping[str, Any], **more: Any) -> Message:
    return answer(text, tool_calls=list(calls), **more)


def call(id: str, name: str, **arguments: Any) -> Mapping[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(called: Mapping[str, Any], text: str) -> Message:
    return {"role": "tool", "tool_call_id": called["id"], "name": called["function"]["name"], "content": text}


def tool(name: str, about: str, *parameters: str) -> Message:
    properties = {each: {"type": "string", "description": f"The {each} asked for"} for each in parameters}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": about, "parameters": schema}}


TOOLS = (
    tool("read_tide", "Tells the tide of a harbour.", "harbour"),
    tool("read_wind", "Tells the wind at a place.", "place"),
)
TIDE = call("k3f9Qx01a", "read_tide", harbour="Old Quay")
WIND = call("k3f9Qx01b", "read_wind", place="North Pier")
BRIEF, LATIN = "Answer in one short line.", "From now on speak Latin only."
TIDES, SAILS = user("When does the tide turn?"), user("Can we sail after that?")
HOUR, FLOWS = answer("It turns at seven."), result(TIDE, "Flood until 19:05, then ebb")
HM = "The almanac says seven, I trust it."
KEEP = {"preserve_thinking": True, "clear_thinking": False, "truncate_history_thinking": False}
CONVERSATIONS = {
    "several turns": Conversation([system(BRIEF), TIDES, HOUR, SAILS]),
    "tools": Conversation([TIDES], TOOLS),
    "result of a call, content null": Conversation([TIDES, calling(None, TIDE), FLOWS], TOOLS),
    "text beside a call": Conversation([TIDES, calling("I look it up.", TIDE), FLOWS, HOUR, SAILS], TOOLS),
    "parallel calls": Conversation(
        [SAILS, calling("", TIDE, WIND), FLOWS, result(WIND, "Breeze from the south-west")], TOOLS
    ),
    "reasoning": Conversation([TIDES, {**HOUR, "reasoning_content": HM}, SAILS]),
    "reasoning, kept by a switch": Conversation([TIDES, {**HOUR, "reasoning": HM}, SAILS], (), KEEP),
    "reasoning before a call": Conversation([TIDES, calling("", TIDE, reasoning_content=HM), FLOWS], TOOLS),
    "reasoning alone": Conversation([TIDES, answer(None, reasoning_content=HM), SAILS]),
    "reasoning in the text": Conversation(
        [TIDES, answer(f"<think>\n{HM}\n</think>\n\nSeven, I say."), SAILS]
    ),
    "late system message": Conversation([system(BRIEF), TIDES, HOUR, system(LATIN), SAILS]),
    "system message after the question": Conversation([system(BRIEF), TIDES, system(LATIN)]),
    "system message after a result": Conversation([TIDES, calling("", TIDE), FLOWS, system(LATIN)], TOOLS),
    "developer": Conversation([system(BRIEF, "developer"), TIDES, HOUR, system(LATIN, "developer"), SAILS]),
    "system message alone": Conversation([system(BRIEF)]),
    "literal tags": Conversation(
        [TIDES, answer("Cut it: text.split('</think>')[-1], after `<think>`. That is all."), SAILS]
    ),
    "other alphabets": Conversation(
        [system("Отвечай кратко."), user('"潮"は\tいつ\nですか？'), answer("בשבע 👍🏽"), user("شكرا é")]
    ),
    "several users in a row": Conversation(
        [TIDES, user("At the old quay."), HOUR, SAILS, user("Or at dawn?")]
    ),
    "several parts": Conversation([user("When does the tide turn?", "At the old quay.")]),
    "greeting of the assistant": Conversation([answer("Ahoy there."), TIDES]),
}


# --- two prompts


class Tokenizers:
    """One byte-level vocabulary, here and in transformers."""

    def __init__(self) -> None:
        self._tokenizer = FastTokenizer(
            models.BPE(
                {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []
            )
        )
        self._tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        self._tokenizer.decoder = decoders.ByteLevel()
        self._theirs = PreTrainedTokenizerFast(tokenizer_object=self._tokenizer, **SPECIAL)

    def ours(self, source: str, one: Conversation) -> tuple[str, str]:
        """Return the prompt, or the reason why there is none."""
        try:
            tokenizer = Tokenizer(self._tokenizer, ChatTemplate(source, SPECIAL), ())
            found = tokenizer.prompt(one.messages, thinking=True, tools=one.tools, variables=one.variables)
        except SpecError as error:
            return "", str(error)
        return tokenizer.decode_raw(found), ""

    def theirs(self, source: str, one: Conversation) -> tuple[str, str]:
        """Return the prompt, or the reason why there is none."""
        try:
            found: str = self._theirs.apply_chat_template(
                [dict(message) for message in one.messages],
                chat_template=source,
                tools=list(one.tools) or None,
                add_generation_prompt=True,
                tokenize=False,
                enable_thinking=True,
                **(one.variables or {}),
            )
        except Exception as error:  # whatever the template or what it calls raises
            return "", f"fails: {error}"
        return found, ""


def texts(one: Conversation) -> Iterator[str]:
    for message in one.messages:
        content = message.get("content") or ""
        content = content.split("</think>\n\n")[-1] if isinstance(content, str) else content
        yield from [content] if isinstance(content, str) else [part["text"] for part in content]
        for made in message.get("tool_calls", ()):
            yield from (made["function"]["name"], *made["function"]["arguments"].values())
    yield from (each["function"]["description"] for each in one.tools)


def lacking(prompt: str, one: Conversation) -> str:
    """Return which text a prompt lacks or writes as data; "" if it is complete."""
    if "'type': 'text'" in prompt or '"type": "text"' in prompt:
        return "parts as data"
    squeezed = "".join(prompt.split())
    for text in texts(one):
        forms = (text, json.dumps(text, ensure_ascii=False)[1:-1], json.dumps(text)[1:-1])
        if not any("".join(form.split()) in squeezed for form in forms):
            return f"loses {text!r}"
    return ""


def verdict(tokenizers: Tokenizers, source: str, one: Conversation) -> tuple[str, str]:
    """Return one of VERDICTS, and why it is not "equal"."""
    (ours, refusal), (theirs, failure) = tokenizers.ours(source, one), tokenizers.theirs(source, one)
    problem = failure or lacking(theirs, one)
    if refusal:
        return ("refused" if problem else "wrong"), refusal
    if missing := lacking(ours, one):
        return "wrong", missing
    if problem:
        return "better", problem
    return ("equal", "") if ours == theirs else ("wrong", "another prompt")


def main() -> None:
    options = parser(__doc__)
    options.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    options.add_argument("--verbose", action="store_true", help="list all that is not equal")
    settings = options.parse_args()
    started = clock()
    logging.getLogger("transformers").setLevel(logging.ERROR)
    files = [file for folder in settings.folders for file in sorted(folder.glob("*.jinja"))]
    files = files[:2] if settings.quick else files
    tokenizers, counts = Tokenizers(), {name: Counter[str]() for name in CONVERSATIONS}
    reasons = Counter[str]()
    for file in files:
        source = file.read_text(encoding="utf-8")
        for name, one in CONVERSATIONS.items():
            found, why = verdict(tokenizers, source, one)
            counts[name][found] += 1
            if found == "better":
                reasons[why.split(":")[0].split()[0]] += 1
            if found == "wrong" or (settings.verbose and found != "equal"):
                print(f"{found}: {file.name}, {name}: {why.splitlines()[0][:SHOWN]}")
    total = sum(counts.values(), Counter[str]())
    rows = [[name, *(found[verdict] for verdict in VERDICTS)] for name, found in counts.items()]
    print(f"\n{len(files)} templates; where ours is better, transformers' {dict(reasons)}\n")
    table(["conversation", *VERDICTS], [*rows, ["all", *(total[verdict] for verdict in VERDICTS)]])
    results = {
        "templates": len(files),
        "conversations": {name: dict(found) for name, found in counts.items()},
        "all": dict(total),
        "better because transformers": dict(reasons),
    }
    settings.folders = ["/".join(folder.resolve().parts[-2:]) for folder in settings.folders]
    finish("templates", results, settings, started)


if __name__ == "__main__":
    main()
