"""Does the server keep to OpenAI's interface for requests that nobody would think of?

schemathesis draws requests, valid and invalid, from an OpenAPI document of three paths: requests and answers
as the types of openai-python have them, and the error body that OpenAI documents for every status from 400
on. Checked are: no status of 500 or more, content types, bodies by schema, statuses that the document knows.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from on_off import check_log
from openai.pagination import SyncPage
from openai.types import Completion, Model, completion_create_params
from openai.types.chat import ChatCompletion
from openai.types.chat import completion_create_params as chat_create_params
from pydantic import TypeAdapter
from serving import serving
from timing import finish, parser, table

CHECKS = "not_a_server_error,content_type_conformance,response_schema_conformance,status_code_conformance"
PLACE = "#/components/schemas/{model}"
MOST = 4  # tokens: the answers do not matter
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--examples", type=int, default=400, help="drawn for each path")
    settings = options.parse_args()
    started = time.time()
    with tempfile.TemporaryDirectory() as folder, serving() as server:
        file = Path(folder) / "openapi.json"
        file.write_text(json.dumps(document()))
        command = [str(Path(sys.executable).with_name("schemathesis")), "run", str(file), "--url", server.url]
        command += ["--phases", "coverage,fuzzing", "--mode", "all", "--checks", CHECKS]
        command += ["--max-examples", "20" if settings.quick else str(settings.examples)]
        command += ["--seed", str(settings.seed), "--generation-database", "none", "--no-color"]
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
        alive = server.send("/health").json["status"] == "ok"
        errors = check_log(server)
    cases = re.search(r"(\d+) generated", done.stdout)
    found = re.search(r"(\d+) unique failures", done.stdout)
    failures = int(found[1]) if found else 0 if done.returncode == 0 else -1
    print(done.stdout[-4000:] if done.returncode else "")
    results = {
        "cases": int(cases[1]) if cases else 0,
        "failures": failures,
        "errors logged": errors,
        "alive": alive,
    }
    table(list(results), [list(results.values())])
    finish("conformance", results, settings, started)


def document() -> dict[str, Any]:
    """The OpenAPI document of the three paths."""
    schemas: dict[str, Any] = {"Error": ERROR}
    chat = _request(chat_create_params.CompletionCreateParamsNonStreaming, schemas)
    text = _request(completion_create_params.CompletionCreateParamsNonStreaming, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "mlx_spec", "version": "1"},
        "paths": {
            "/v1/chat/completions": {"post": _operation(chat, _schema(ChatCompletion, schemas))},
            "/v1/completions": {"post": _operation(text, _schema(Completion, schemas))},
            "/v1/models": {"get": _operation(None, _schema(SyncPage[Model], schemas))},
        },
        "components": {"schemas": schemas},
    }


def _operation(request: dict[str, Any] | None, answer: dict[str, Any]) -> dict[str, Any]:
    def content(schema: dict[str, Any]) -> dict[str, Any]:
        return {"application/json": {"schema": schema}}

    error = {"description": "refused", "content": content({"$ref": "#/components/schemas/Error"})}
    responses = {"200": {"description": "answered", "content": content(answer)}, "4XX": error}
    body = {"requestBody": {"required": True, "content": content(request)}} if request else {}
    return {**body, "responses": responses}


def _request(kind: Any, schemas: dict[str, Any]) -> dict[str, Any]:
    """The schema of a request, kept short and cheap to answer."""
    made = _schema(kind, schemas)
    properties = made["properties"]
    properties["model"] = {"enum": ["demo"]}
    for name in ("max_tokens", "max_completion_tokens"):
        if name in properties:
            properties[name] = {"type": "integer", "minimum": 1, "maximum": MOST}
    properties["n"] = {"type": ["integer", "null"], "minimum": 1, "maximum": 2}
    made["required"] = [*made["required"], "max_tokens"]
    return made


def _schema(kind: Any, schemas: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = TypeAdapter(kind).json_schema(ref_template=PLACE)
    schemas.update(made.pop("$defs", {}))
    return made


if __name__ == "__main__":
    main()
