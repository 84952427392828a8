"""What does a long prompt cost after a restart with `--cache-folder`, compared to reading it?

A series starts a server on an empty folder, and then two more servers on the same folder. Each gets a short
request to warm up, and then a document of `--tokens` tokens with a question, for an answer of one token. The
seconds of this request are compared. "First" reads the prompt, "in memory" is the same request again,
"restart" is the same request to the second server, "restart, another question" is a prompt with another end
to the third. Afterwards all servers give a long answer. Drafts have a fixed length, so texts and draft tokens
must equal those of the first server.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from serving import Serving, serving
from timing import finish, parser, table

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))

from support.random_requests import CHAT, questions

ARMS = ("first", "in memory", "restart", "restart, another question")
ASKED = ("Which of these is the first?", "And which one is the last?")
COMPARED = ("predicted_n", "draft_n", "draft_n_accepted", "draft_rounds")  # of an answer


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--target", default="demo")
    options.add_argument("--tokens", type=int, default=4000, help="of the prompt")
    options.add_argument("--answer", type=int, default=32, help="tokens")
    options.add_argument("--series", type=int, default=3)
    options.add_argument("--num-draft-tokens", type=int, default=4)
    settings = options.parse_args()
    if settings.quick:
        settings.series, settings.tokens = 1, 1300
    started = time.time()
    given = ["--target", settings.target, "--num-draft-tokens", str(settings.num_draft_tokens)]
    found = [series(given, settings.tokens, settings.answer) for _ in range(settings.series)]
    results = summary(found)
    rows = [[arm, *results["arms"][arm].values()] for arm in ARMS]
    table(["one token after a long prompt", "seconds", "of first", "cached tokens"], rows)
    print(f"{results['prompt tokens']} tokens, {results['megabytes']} MB, same answers: {results['same']}\n")
    finish("restart", results, settings, started)


def series(given: list[str], tokens: int, answer: int) -> dict[str, Any]:
    """Return seconds, cached tokens, and True if the answers agree."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "cache"
        options = [*given, "--cache-folder", str(folder)]
        arms = {}
        with serving(*options) as first:
            document = text(first, tokens)
            arms["first"] = ask(first, document, 0)
            arms["in memory"] = ask(first, document, 0)
            expected = [told(first, document, i, answer) for i in (0, 1)]
        nbytes = sum(file.stat().st_size for file in folder.iterdir())
        answers = []
        for i, arm in enumerate(ARMS[2:]):
            with serving(*options) as again:
                arms[arm] = ask(again, document, i)
                answers.append(told(again, document, i, answer))
    return {"arms": arms, "same": answers == expected, "bytes": nbytes}


def text(server: Serving, tokens: int) -> str:
    """Return a text of about that many tokens."""
    words = " ".join(questions() * 50).split(" ")
    sample = " ".join(words[:500])
    body = {"model": "", "messages": [{"role": "user", "content": sample}]}
    counted = server.send("/v1/messages/count_tokens", body).json["input_tokens"]
    return " ".join(words[: int(500 * tokens / counted)])


def ask(server: Serving, document: str, question: int) -> dict[str, Any]:
    """Return the seconds of a request for one token, and its usage."""
    server.send(CHAT, request("Hello", 4))
    body, began = request(f"{document}\n{ASKED[question]}", 1), time.perf_counter()
    reply = server.send(CHAT, body).json
    seconds, usage = time.perf_counter() - began, reply["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {"seconds": seconds, "prompt": usage["prompt_tokens"], "cached": cached}


def told(server: Serving, document: str, question: int, tokens: int) -> dict[str, Any]:
    """Return an answer and how it was drafted."""
    reply = server.send(CHAT, request(f"{document}\n{ASKED[question]}", tokens)).json
    return {"text": reply["choices"][0]["message"]["content"]} | {
        key: reply["timings"][key] for key in COMPARED
    }


def request(content: str, tokens: int) -> dict[str, Any]:
    return {
        "messages": [{"role": "user", "content": content}],
        "max_tokens": tokens,
        "temperature": 0,
    }


def summary(found: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Return medians over the series."""
    found = list(found)

    def median(arm: str) -> float:
        return statistics.median(one["arms"][arm]["seconds"] for one in found)

    arms = {
        arm: {
            "seconds": round(median(arm), 3),
            "of first": round(median(arm) / median("first"), 4),
            "cached": found[0]["arms"][arm]["cached"],
        }
        for arm in ARMS
    }
    return {
        "arms": arms,
        "prompt tokens": found[0]["arms"]["first"]["prompt"],
        "megabytes": round(found[0]["bytes"] / 1e6, 1),
        "same": all(one["same"] for one in found),
    }


if __name__ == "__main__":
    main()
