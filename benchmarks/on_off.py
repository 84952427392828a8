"""Does a request get the same answer with speculation on and off?

Two servers on the same pair, one with `--drafter none`. Random requests that mix all parameters, at
temperature 0 (and with `--seeded` also sampled with a seed), go to both, one after the other. Bodies must be
equal but for ids, times and `timings`; streams are put together first, because their chunks follow rounds.
"""

from __future__ import annotations

import json
import time
from typing import Any

from mixture import Mixture
from serving import Reply, Serving, serving
from timing import finish, parser, table

VOLATILE = {"id", "created", "timings", "system_fingerprint", "mlx_spec"}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--requests", type=int, default=240)
    options.add_argument("--target", default="demo")
    options.add_argument("--seeded", action="store_true", help="half of the requests sample with a seed")
    settings = options.parse_args()
    count = 24 if settings.quick else settings.requests
    started = time.time()
    mixture = Mixture(settings.seed, greedy=not settings.seeded)
    target = ["--target", settings.target]
    statuses: dict[int, int] = {}
    different: list[dict[str, Any]] = []
    drafted = 0
    with serving(*target) as on, serving(*target, "--drafter", "none") as off:
        for _ in range(count):
            path, body = mixture.next()
            a, b = on.send(path, body), off.send(path, body)
            statuses[a.status] = statuses.get(a.status, 0) + 1
            drafted += drafts(a)
            if (a.status, stable(a)) != (b.status, stable(b)):
                different.append({"path": path, "request": body, "on": stable(a), "off": stable(b)})
        errors = check_log(on) + check_log(off)
    table(["requests", "statuses", "draft tokens", "different"], [[count, statuses, drafted, len(different)]])
    for found in different[:3]:
        print(json.dumps(found, indent=1)[:3000])
    results = {"requests": count, "statuses": statuses, "draft tokens": drafted, "different": len(different)}
    finish("on_off", results | {"errors logged": errors}, settings, started)


def stable(reply: Reply) -> Any:
    """A body without what may differ, a stream as one body."""
    if reply.body.startswith(b"data:") or b"\n\ndata:" in reply.body:
        return _joined([json.loads(data) for data in reply.events if data != "[DONE]"])
    return _without(reply.json)


def drafts(reply: Reply) -> int:
    """Draft tokens that a reply reports."""
    if reply.body.startswith(b"data:"):
        bodies = [json.loads(data) for data in reply.events if data != "[DONE]"]
    else:
        bodies = [reply.json]
    return sum((body.get("timings") or {}).get("draft_n", 0) for body in bodies)


def check_log(server: Serving) -> int:
    """Lines of a server's log that tell of an error."""
    return sum("Traceback" in line or "ERROR" in line for line in server.log)


def _without(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without(v) for key, v in value.items() if key not in VOLATILE}
    return [_without(v) for v in value] if isinstance(value, list) else value


def _joined(chunks: list[dict[str, Any]]) -> Any:
    """What a stream of chat chunks comes to."""
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    for chunk in chunks:
        usage = chunk.get("usage") or usage
        for choice in chunk.get("choices", ()):
            found = choices.setdefault(
                choice["index"], {"text": {}, "calls": {}, "logprobs": [], "end": None}
            )
            for key, value in choice["delta"].items():
                if key == "tool_calls":
                    for call in value:
                        made = found["calls"].setdefault(call["index"], {"name": None, "arguments": ""})
                        made["name"] = call["function"].get("name") or made["name"]
                        made["arguments"] += call["function"].get("arguments") or ""
                elif isinstance(value, str):
                    found["text"][key] = found["text"].get(key, "") + value
            found["logprobs"] += (choice.get("logprobs") or {}).get("content") or []
            found["end"] = choice.get("finish_reason") or found["end"]
    return {"choices": choices, "usage": _without(usage)}


if __name__ == "__main__":
    main()
