"""OpenAPI documents for schemathesis: for text, from the types of openai-python, and for pictures.

Pictures go to all routes that take them. Most are valid: small pictures of the five formats. The others are
of each kind that the server refuses: files of other formats, damaged files, texts, URLs. schemathesis itself
also draws values of wrong types.
"""

from __future__ import annotations

import base64
import io
from typing import Any

from PIL import Image

Schema = dict[str, Any]
MODELS = ["eyes", "demo"]  # one that reads pictures, and one that does not
TEXT = {"type": "string", "maxLength": 12}
MAX_TOKENS = {"type": "integer", "minimum": 1, "maximum": 4}  # of answers whose text does not matter
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
BOOLEAN = {"type": "boolean"}


def files() -> list[str]:
    """Return files in base64: pictures in five formats, and files that the server refuses."""
    found = []
    for kind in ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "ICO"):
        saved = io.BytesIO()
        Image.new("RGB", (9, 5), "red").save(saved, kind)
        found.append(saved.getvalue())
    cut = found[0][:40]
    return [base64.b64encode(data).decode() for data in (*found, cut, b"", b"hello")]


DATA = files()
URLS = [
    *(f"data:image/png;base64,{data}" for data in DATA),
    *DATA[:1],
    "",
    "data:,x",
    "data:image/png;base64,?",
]
URLS += ["https://example.com/a.png", "file:///etc/passwd"]


def record(required: str = "", **properties: Schema) -> Schema:
    """Return the schema of an object."""
    return {"type": "object", "properties": properties, "required": required.split()}


def parts(*kinds: Schema) -> Schema:
    """Return the schema of a text or a list of parts."""
    return {"anyOf": [TEXT, {"type": "array", "items": {"anyOf": kinds}, "minItems": 1, "maxItems": 3}]}


def one_of(*values: str) -> Schema:
    return {"enum": list(values)}


def messages(content: Schema, *others: Schema, **more: Schema) -> Schema:
    """Return the schema of turns of the user, the model and the system, and of other messages."""
    turn = record("role content", role=one_of("user", "user", "assistant", "system"), content=content, **more)
    return {"type": "array", "items": {"anyOf": [turn, *others]}, "minItems": 1, "maxItems": 3}


def bodies() -> dict[str, Schema]:
    """Return the schemas of requests by their route."""
    url = one_of(*URLS)
    text = record("type text", type=one_of("text"), text=TEXT)
    wrapped = record("url", url=url, detail=one_of("auto", "low", "high"))
    chat = record("type image_url", type=one_of("image_url"), image_url={"anyOf": [wrapped, url]})
    result = record("role tool_call_id", role=one_of("tool"), tool_call_id=TEXT, content=parts(text, chat))
    told = record("type text", type=one_of("input_text"), text=TEXT)
    shown = record(
        "type", type=one_of("input_image"), image_url=url, file_id=TEXT, detail=one_of("auto", "low")
    )
    output = record(
        "type call_id output",
        type=one_of("function_call_output"),
        call_id=one_of("1"),
        output=parts(told, shown),
    )
    call = record(
        "type call_id name arguments", type=one_of("function_call"), call_id=one_of("1"), name=one_of("look"),
        arguments=one_of("{}"),
    )  # fmt: skip
    source = record(
        "type", type=one_of("base64", "base64", "url", "file"), media_type=one_of("image/png", "x"),
        data=one_of(*DATA, "?"), url=url, file_id=TEXT,
    )  # fmt: skip
    block = record("type source", type=one_of("image"), source=source)
    use = record(
        "type id name input", type=one_of("tool_use"), id=one_of("1"), name=one_of("look"), input=record()
    )
    answer = record(
        "type tool_use_id", type=one_of("tool_result"), tool_use_id=one_of("1", "2"),
        content=parts(text, block), is_error=BOOLEAN,
    )  # fmt: skip
    images = {"type": "array", "items": one_of(*DATA, "?", URLS[0]), "maxItems": 3}
    named, least = {"model": one_of(*MODELS)}, {"stream": {"const": False}}
    limit = {"max_tokens": MAX_TOKENS}
    anthropic = {**named, "messages": messages(parts(text, block, use, answer))}
    ollama = {**named, **least, "options": record("num_predict", num_predict=MAX_TOKENS)}
    roles = one_of("user", "user", "assistant", "system", "tool")
    said = {
        "type": "array", "items": record("role", role=roles, content=TEXT, images=images), "minItems": 1,
        "maxItems": 3,
    }  # fmt: skip
    responses = {**named, "input": messages(parts(told, shown), call, output), "store": BOOLEAN}
    return {
        "/v1/chat/completions": record(
            "model messages max_tokens", **named, **limit, messages=messages(parts(text, chat), result)
        ),
        "/v1/responses": record(
            "model input max_output_tokens", **responses, max_output_tokens={**MAX_TOKENS, "maximum": 16}
        ),
        "/v1/responses/input_tokens": record("model input", **responses),
        "/v1/messages": record("model messages max_tokens", **anthropic, **limit),
        "/v1/messages/count_tokens": record("model messages", **anthropic),
        "/api/chat": record("model messages stream options", **ollama, messages=said),
        "/api/generate": record("model stream options", **ollama, prompt=TEXT, system=TEXT, images=images),
    }


def picture_document() -> Schema:
    """Return an OpenAPI document of the routes, with the answer and the error body of each protocol."""
    from anthropic.types import Message
    from openai.types.chat import ChatCompletion
    from openai.types.responses import Response

    schemas: Schema = {"Error": ERROR}
    answers = {
        "/v1/chat/completions": schema_of(ChatCompletion, schemas),
        "/v1/responses": schema_of(Response, schemas),
        "/v1/responses/input_tokens": record("object input_tokens", input_tokens={"type": "integer"}),
        "/v1/messages": schema_of(Message, schemas),
        "/v1/messages/count_tokens": record("input_tokens", input_tokens={"type": "integer"}),
        "/api/chat": record("model created_at message done", done={"const": True}),
        "/api/generate": record("model created_at response done", done={"const": True}),
    }
    reason = record("type message", type=TEXT | {"maxLength": 99}, message={"type": "string"})
    theirs = record("type error", type=one_of("error"), error=reason)
    errors = {"/v1/messages": theirs, "/api/": record("error", error={"type": "string"})}
    paths = {}
    for route, body in bodies().items():
        error = next((e for start, e in errors.items() if route.startswith(start)), None)
        post = operation(body, answers[route], error)
        if route.startswith("/api/"):  # they stream unless a request says otherwise
            post["responses"]["200"]["content"]["application/x-ndjson"] = {}
        paths[route] = {"post": post}
    about = {"title": "mlx_spec with pictures", "version": "1"}
    return {"openapi": "3.1.0", "info": about, "paths": paths, "components": {"schemas": schemas}}


def text_document() -> dict[str, Any]:
    """Return an OpenAPI document of three paths, from the types of openai-python."""
    from openai.pagination import SyncPage
    from openai.types import Completion, Model, completion_create_params
    from openai.types.chat import ChatCompletion
    from openai.types.chat import completion_create_params as chat_create_params

    schemas: dict[str, Any] = {"Error": ERROR}
    chat = _request_schema(chat_create_params.CompletionCreateParamsNonStreaming, schemas)
    text = _request_schema(completion_create_params.CompletionCreateParamsNonStreaming, schemas)
    return {
        "openapi": "3.1.0",
        "info": {"title": "mlx_spec", "version": "1"},
        "paths": {
            "/v1/chat/completions": {"post": operation(chat, schema_of(ChatCompletion, schemas))},
            "/v1/completions": {"post": operation(text, schema_of(Completion, schemas))},
            "/v1/models": {"get": operation(None, schema_of(SyncPage[Model], schemas))},
        },
        "components": {"schemas": schemas},
    }


def operation(
    request: dict[str, Any] | None, answer: dict[str, Any], error: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Return an operation; its errors are those of OpenAI's protocol, unless another body is given."""

    def content(schema: dict[str, Any]) -> dict[str, Any]:
        return {"application/json": {"schema": schema}}

    refused = {"description": "refused", "content": content(error or {"$ref": "#/components/schemas/Error"})}
    responses = {"200": {"description": "answered", "content": content(answer)}, "4XX": refused}
    body = {"requestBody": {"required": True, "content": content(request)}} if request else {}
    return {**body, "responses": responses}


def _request_schema(kind: Any, schemas: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a request whose answer is short."""
    made = schema_of(kind, schemas)
    properties = made["properties"]
    properties["model"] = {"enum": ["demo"]}
    for name in ("max_tokens", "max_completion_tokens"):
        if name in properties:
            properties[name] = MAX_TOKENS
    properties["n"] = {"type": ["integer", "null"], "minimum": 1, "maximum": 2}
    made["required"] = [*made["required"], "max_tokens"]
    return made


def schema_of(kind: Any, schemas: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a type; what it refers to goes into `schemas`."""
    from pydantic import TypeAdapter

    prefix = f"{len(schemas)}."  # types of several packages have the same names
    place = f"#/components/schemas/{prefix}{{model}}"
    made: dict[str, Any] = TypeAdapter(kind).json_schema(ref_template=place)
    schemas.update({prefix + name: each for name, each in made.pop("$defs", {}).items()})
    return made
