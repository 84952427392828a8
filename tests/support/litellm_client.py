"""LiteLLM against a running server: python litellm_client.py URL MODEL. Prints what it got, as JSON.

A program of its own: LiteLLM makes an event loop and never closes it, which others would have to hear of.
"""

from __future__ import annotations

import gc
import json
import sys
from typing import Any

gc.disable()  # what an import makes stays: to look through it all, time and again, takes a second
import litellm  # noqa: E402


def main() -> None:
    url, model = sys.argv[1:]
    question = [{"role": "user", "content": "What does zip do?"}]
    ask: dict[str, Any] = {"messages": question, "max_tokens": 12, "temperature": 0, "num_retries": 0}
    ask["api_key"] = "none"
    texts = []
    for dialect, base in (("openai", f"{url}/v1"), ("ollama_chat", url)):
        ask |= {"model": f"{dialect}/{model}", "api_base": base}
        texts.append(litellm.completion(**ask).choices[0].message.content)
        pieces = litellm.completion(**ask, stream=True)
        texts.append("".join(piece.choices[0].delta.content or "" for piece in pieces))
    try:
        litellm.completion(**ask | {"model": "openai/none", "api_base": f"{url}/v1"})
        refused = None
    except litellm.NotFoundError as error:
        refused = error.status_code
    print(json.dumps({"texts": texts, "refused": refused}))


if __name__ == "__main__":
    main()
