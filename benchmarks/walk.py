"""How many files of this repository must a reader open to follow one token, one chat request, one conversion?

A profiler records every function of `mlx_spec`, `convert` and `apps` that runs, and counts their files.
Module bodies, generated code of dataclasses and `__init__.py` files that only re-export do not count. One
token: a warm sequence of the demo pair decodes plain and speculative rounds. A chat request: the server in
this process answers one streamed request with a loaded model. A conversion: the command converts a small pair
of the tests and tests it; files of the library that the self-test runs (decoding, model, drafters) do not
count. More files than the limit is an error.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("mlx_spec", "convert", "apps")
WARM_REQUESTS = 3  # the first one imports more
REQUESTS = 3  # the shortest walk counts: some requests also save measured costs
LIMITS = {"one token": 20, "a chat request": 35, "a conversion": 30}
CONVERTING = ("apps/", "convert/", "mlx_spec/hub/", "mlx_spec/load.py")
LOAD_TIMEOUT_S = 120.0  # for loading the demo pair on a busy machine
GOLDEN = ROOT / "tests" / "golden" / "e2b-trained"


@contextmanager
def noted() -> Iterator[set[str]]:
    """Collect the files whose functions run, in all threads that start within."""
    files: set[str] = set()

    def note(frame: FrameType, event: str, _argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_name != "<module>" and code.co_filename.startswith(str(ROOT)):
            path = Path(code.co_filename).resolve().relative_to(ROOT)
            if path.parts[0] in PACKAGES:
                files.add(path.as_posix())

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield files
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def one_token() -> set[str]:
    """Decode some rounds of a warm sequence."""
    import mlx_spec

    pair = mlx_spec.load("demo")
    prompt = pair.tokenizer.prompt([{"role": "user", "content": "What does os.path.join do?"}])
    rounds = pair.generate(prompt, max_tokens=40)
    next(iter(rounds))
    with noted() as files:
        for _ in rounds:
            pass
    return files


def chat_request() -> set[str]:
    """Stream one answer of a server that has its model loaded."""
    from starlette.testclient import TestClient

    from mlx_spec.apps.server.app import create
    from mlx_spec.apps.server.engine.engine_thread import EngineThread
    from mlx_spec.apps.server.settings import parse

    body = {"messages": [{"role": "user", "content": "What does zip do?"}], "stream": True, "max_tokens": 40}
    settings = parse([])
    with noted() as files:
        engine = EngineThread(settings)
        with TestClient(create(settings, engine), base_url="http://localhost") as client:
            engine.wait_loaded(LOAD_TIMEOUT_S)

            def request() -> None:
                found = client.post("/v1/chat/completions", json=body)
                assert "data: [DONE]" in found.text, found.text

            for _ in range(WARM_REQUESTS):
                request()
            seen: list[set[str]] = []  # without what the shutdown runs
            for _ in range(REQUESTS):
                files.clear()
                request()
                seen.append(set(files))
    return min(seen, key=len)


def conversion() -> set[str]:
    """Convert a tiny pair, with its self-test."""
    from mlx_spec.convert.command import convert_main

    with tempfile.TemporaryDirectory() as folder, noted() as files:
        source = [str(GOLDEN / "target"), "--drafter", str(GOLDEN / "assistant")]
        assert convert_main([*source, "-o", f"{folder}/pair", "-q", "8"]) == 0
    return {name for name in files if name.startswith(CONVERTING)}


def main() -> int:
    walks: dict[str, Callable[[], set[str]]] = {
        "one token": one_token,
        "a chat request": chat_request,
        "a conversion": conversion,
    }
    found = {name: sorted(walk()) for name, walk in walks.items()}
    print("| walk | files | at most |\n|---|---|---|")
    for name, files in found.items():
        print(f"| {name} | {len(files)} | {LIMITS[name]} |")
    print(json.dumps(found))
    return int(any(len(files) > LIMITS[name] for name, files in found.items()))


if __name__ == "__main__":
    sys.exit(main())
