"""All that mlx_spec reads from strangers, for `support/fuzz.py`. Each function makes a reader in a folder.

Models are made by the functions: a process that has computed with MLX cannot be forked.
"""

from __future__ import annotations

import io
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import mlx.core as mx
from pydantic import ValidationError
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders as token_decoders
from tokenizers import models, normalizers, pre_tokenizers, processors

from mlx_spec import demo
from mlx_spec.apps.chat import saved as conversations
from mlx_spec.apps.server.engine.prefix_files import CacheFolder, PrefixFiles
from mlx_spec.apps.server.errors import Failure
from mlx_spec.apps.server.protocols import (
    anthropic_messages,
    ollama,
    openai_chat,
    openai_completions,
    openai_responses,
)
from mlx_spec.apps.server.protocols.stored_responses import ItemField, ResponseStore
from mlx_spec.apps.server.requests import parsing
from mlx_spec.apps.server.settings import Limits
from mlx_spec.checkpoint import gguf_model
from mlx_spec.checkpoint.config import Checkpoint, read_checkpoint
from mlx_spec.checkpoint.generation import read_generation_config
from mlx_spec.convert.train import answers as training
from mlx_spec.drafters import open_drafter
from mlx_spec.drafters.earlier import EarlierAnswers
from mlx_spec.grammar.json_schema import enforced
from mlx_spec.grammar.schema_reader import read_schema
from mlx_spec.hub.inspect import inspect_stored
from mlx_spec.model.read import read_model
from mlx_spec.model.row_class import RowClass
from mlx_spec.policy import saved_costs
from mlx_spec.policy.costs import Table
from mlx_spec.prompt import text_prompt
from mlx_spec.session import Piece
from mlx_spec.tokenizer import read_tokenizer
from mlx_spec.vision.pictures import read_picture
from support import gguf_files, pairs, tiny
from support.fuzz import Reader, Valid

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello, wörld 42"}]


def _json(value: Any) -> Valid:
    return Valid(json.dumps(value).encode(), "json")


def _checkpoint(folder: Path, kind: str = "full") -> None:
    """Write a tiny checkpoint with a tokenizer."""
    pairs.save(tiny.smallest() if kind == "full" else pairs.MODELS[kind], folder)


def _valid(folder: Path, *names: str, form: str = "json") -> dict[str, Valid]:
    return {name: Valid((folder / name).read_bytes(), form) for name in names}


def _reader(
    folder: Path, files: Mapping[str, Valid], read: Callable[[Path, bytes], object], *rest: Any, **limits: Any
) -> Reader:
    """Return a reader of the files one by one, of which only a damaged one is read."""

    def read_damaged() -> None:
        for name, valid in files.items():
            if (data := (folder / name).read_bytes()) != valid.content:
                read(folder / name, data)

    return Reader(files, read_damaged, *rest, **limits)


# --- checkpoints


def safetensors(folder: Path) -> Reader:
    """Headers, index and weights, as `inspect` and drafters read them."""
    _checkpoint(folder)
    names = dict.fromkeys(mx.load(str(folder / "model.safetensors")), "model.safetensors")
    index = {"metadata": {"total_size": 1}, "weight_map": names}

    def read() -> None:
        inspect_stored(Checkpoint(folder, "x"))
        checkpoint = read_checkpoint(folder)
        assert checkpoint.fingerprint
        mx.eval(list(checkpoint.tensors().values()))

    files = _valid(folder, "model.safetensors", form="safetensors")
    return Reader(files | {"model.safetensors.index.json": _json(index)}, read)


def config(folder: Path) -> Reader:
    """config.json of several families, as `inspect` and loading read it."""
    kinds = ("full", "sliding", "recurrent", "shared")
    for kind in kinds:
        _checkpoint(folder / kind, kind)

    def read(file: Path, data: bytes) -> None:
        inspect_stored(Checkpoint(file.parent, "x"))
        read_model(read_checkpoint(file.parent), lazy=True)

    return _reader(folder, _valid(folder, *(f"{kind}/config.json" for kind in kinds)), read)


def generation(folder: Path) -> Reader:
    """generation_config.json."""
    words = {
        "bad_words_ids": [[3], [4, 5]],
        "suppress_tokens": [1, 2],
        "begin_suppress_tokens": [7],
        "top_k": 20,
    }
    words |= {
        "do_sample": True,
        "temperature": 0.7,
        "top_p": 0.9,
        "repetition_penalty": 1.1,
        "eos_token_id": [2],
    }
    _checkpoint(folder)
    files = {"generation_config.json": _json(words)}
    return Reader(files, lambda: (read_generation_config(Checkpoint(folder), {2}), _use_tokenizer(folder)))


def _use_tokenizer(folder: Path) -> None:
    tokenizer = read_tokenizer(read_checkpoint(folder))
    tokens = tokenizer.prompt_tokens("Hello, wörld 42 <bos>\n", most=1000)
    tokenizer.decode(tokens), tokenizer.decode_raw(range(0, 300, 7))
    for i in range(0, 300, 11):
        tokenizer.token_bytes(i)
    if tokenizer.chats:
        tokenizer.prompt(MESSAGES, most=4096)


def tokenizer(folder: Path) -> Reader:
    """tokenizer.json of three kinds, and the files beside it."""
    pieces = [*(f"<0x{i:02X}>" for i in range(256)), "▁", "H", "e", "l", "o", "▁H", "He", "ll"]
    spaces = FastTokenizer(
        models.BPE(
            {piece: i for i, piece in enumerate(pieces)},
            [("▁", "H"), ("H", "e"), ("l", "l")],
            byte_fallback=True,
        )
    )
    spaces.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [token_decoders.Replace("▁", " "), token_decoders.ByteFallback(), token_decoders.Fuse()]
    spaces.decoder = token_decoders.Sequence([*steps, token_decoders.Strip(" ", 1, 0)])
    words = FastTokenizer(models.WordPiece({"[UNK]": 0, "hello": 1, "##o": 2, "h": 3}, unk_token="[UNK]"))
    words.normalizer, words.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    letters = FastTokenizer.from_str(pairs.TOKENIZER.to_str())
    letters.post_processor = processors.TemplateProcessing("<bos> $A", special_tokens=[("<bos>", 251)])
    letters.normalizer = normalizers.NFC()
    files = {}
    for name, made in (("bytes", letters), ("spaces", spaces), ("words", words)):
        files[f"{name}/tokenizer.json"] = Valid(made.to_str().encode(), "json")
    role = {"content": "<bos>", "lstrip": False, "special": True}
    stated = {
        "bos_token": role,
        "eos_token": "<eos>",
        "added_tokens_decoder": {"256": role | {"content": "<new>"}},
    }
    files["bytes/tokenizer_config.json"] = _json(stated | {"chat_template": pairs.TEMPLATE})
    files["spaces/special_tokens_map.json"] = _json({"eos_token": role, "additional_special_tokens": ["<a>"]})
    files["spaces/added_tokens.json"] = _json({"<a>": 264, "<b>": 265})
    return _reader(folder, files, lambda file, data: _use_tokenizer(file.parent))


def sentencepiece(folder: Path) -> Reader:
    """tokenizer.model, which transformers converts."""
    shutil.copy(demo.TARGET / "tokenizer_config.json", folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    files = {"tokenizer.model": Valid((demo.TARGET / "tokenizer.model").read_bytes())}
    return Reader(files, lambda: _use_tokenizer(folder))


PIECES = (
    "{% for m in messages %}",
    "{% endfor %}",
    "{% for a in range(99999) %}",
    "{% for k, v in m.items() %}",
    "{% if m.role == 'user' %}",
    "{% else %}",
    "{% endif %}",
    "{% set x = messages * 999 %}",
    "{% set x = 'a' * 10**9 %}",
    "{% set ns = namespace(x=[]) %}",
    "{% set ns.x = ns.x + ns.x + [ns.x] %}",
    "{% macro f(x) %}{{ f(x ~ x) }}{% endmacro %}{{ f('a') }}",
    "{% macro g(x) %}{{ x }}",
    "{% endmacro %}",
    "{{ g(m.content) }}",
    "{{ m.content | trim }}",
    "{{ m.content[::-1] }}",
    "{{ m['content'].split('\n')[5] }}",
    "{{ 1 // 0 }}",
    "{{ 10 ** 10 ** 10 }}",
    "{{ 'a'.__class__.__mro__ }}",
    "{{ ''.format.__globals__ }}",
    "{{ '%99999999d' | format(1) }}",
    "{{ '{:>999999999}'.format(1) }}",
    "{{ 'a' | center(999999999) }}",
    "{{ messages | tojson(indent=99999999) }}",
    "{{ messages | map('upper') | list }}",
    "{{ range(10**8) | list }}",
    "{{ (messages | tojson) * 99999 }}",
    "{{ raise_exception('two\nlines') }}",
    "{{ strftime_now('%Y' * 9999) }}",
    "{{ '\ud800'.encode() }}" if False else "{{ 'x' | replace('', 'y' * 999999) }}",
    "{% include 'x' %}",
    "{% import '/etc/passwd' as x %}",
    "{% generation %}",
    "{% endgeneration %}",
    "{%- set x %}",
    "{% endset %}",
    "{{ x | join(x | join(x)) }}",
    "{{ loop.index0 / loop.length }}",
    "{{ loop(messages) }}",
    "{{ self.__init__ }}",
    "{{ cycler('a').next() }}",
    "{{ joiner('a' * 99999) }}",
    "{{ lipsum(99999) }}",
    "{{ dict(a=1) | dictsort | first | batch(99999999) | list }}",
    "{{ messages | groupby('role') | list | string | wordwrap(1) | urlize }}",
    "{{ messages | sum(attribute='content', start='') }}",
    "{{ ('\\t' * 900000).expandtabs(99999) }}",
    "{{ ('%999999s' * 9999) % ((1,) * 9999) }}",
    "{{ ('{:{w}}' * 9999).format(*([1] * 9999), w=999999) }}",
    "{{ (3 ** 800000) // (3 ** 400000) }}",
    "{{ 1 | round(-9900000) }}",
    "{{ ([[1]] * 300000) | sum(start=[]) }}",
    "{{ (messages | tojson)[1:] * 9999 }}",
    "{% for a in range(99999) if a in messages %}",
    "{{ ('a' * 900000).encode() * 99999 }}",
    "{% break %}",
    "{% raw %}",
    "<|im_start|>",
)


def template(folder: Path) -> Reader:
    """Chat templates."""
    _checkpoint(folder)
    (folder / "chat_template.jinja").unlink()
    files = {"chat_template.jinja": Valid((demo.TARGET / "chat_template.jinja").read_bytes(), "text", PIECES)}
    # A rendering may take 10 s.
    return Reader(files, lambda: _use_tokenizer(folder), cpu_seconds=15)


def gguf(folder: Path) -> Reader:
    """A GGUF file, as every `--target` reads it: header, tokenizer, config and weights."""
    model = gguf_files.even(tiny.smallest(32))
    made = gguf_files.write(folder / "m.gguf", model, "llama", {"ffn": gguf_files.Quantization.Q8_0})
    os.environ["XDG_DATA_HOME"] = str(folder / "home")

    def read() -> None:
        shutil.rmtree(folder / "home", ignore_errors=True)
        read_model(read_checkpoint(gguf_model.gguf_folder(made)), lazy=True)

    return Reader({"m.gguf": Valid(made.read_bytes())}, read)


def drafter(folder: Path) -> Reader:
    """config.json and weights of the bundled drafter."""
    target = read_checkpoint(demo.TARGET).config
    (folder / "config.json").write_bytes((demo.DRAFTER / "config.json").read_bytes())
    os.symlink(demo.DRAFTER / "model.safetensors", folder / "model.safetensors")

    def read() -> None:
        inspect_stored(Checkpoint(folder, "x"))
        checkpoint = read_checkpoint(folder)
        open_drafter(checkpoint, checkpoint.config, target)

    return Reader(_valid(folder, "config.json"), read)


def pair(folder: Path) -> Reader:
    """pair.json, as `inspect` reads it."""
    _checkpoint(folder / "target")
    _checkpoint(folder / "drafter")
    manifest = {
        "format": 1,
        "target": "target",
        "drafter": "drafter",
        "dtype": "float32",
        "versions": {"mlx": "1"},
    }
    manifest |= {"self_test": {"result": "passed", "speed": 1.5}, "parts": {"target": {"files": {}}}}
    return Reader({"pair.json": _json(manifest)}, lambda: _described(folder))


def _described(folder: Path) -> None:
    from mlx_spec.apps.models import as_json, description

    found = inspect_stored(Checkpoint(folder, "x"))
    description(found), json.dumps(as_json(found))


# --- files of this program


def cache(folder: Path) -> Reader:
    """Files of `--cache-folder`. One that is not as it was written must not be used."""
    from mlx_spec.apps.server.engine import prefix_files

    prefix_files.MIN_TOKENS = 64
    plain, tokens = pairs.make_pair("sliding", "same"), tiny.prompt(200)
    writer = PrefixFiles(CacheFolder(folder / "c", 10**9), {"model": "a"}, plain)
    sequence = plain.open()
    pairs.generate(plain, sequence, tokens, 2)
    writer.offer(sequence)
    writer.close([])
    (made,) = (folder / "c").iterdir()
    content, prompt = made.read_bytes(), text_prompt([*tokens, 1, 2])
    found = PrefixFiles(CacheFolder(folder / "c", 10**9), {"model": "a"}, plain)

    def read() -> None:
        found._folder = opened = CacheFolder(folder / "c", 10**9)
        restored = found.restore(prompt, 0, plain.open)
        for threads in (opened._executor, opened._checker):
            threads.shutdown()
        assert restored is None or made.read_bytes() == content, "a cache file that was changed is read"

    return Reader({f"c/{made.name}": Valid(content, "safetensors")}, read)


def conversation(folder: Path) -> Reader:
    """Saved and kept conversations."""
    talk: Any = {"messages": [], "system": "Be brief.", "settings": {"temperature": 0.5}}
    journal = conversations.Journal(folder, lambda text: None)
    for i in range(3):
        journal.ask(f"问题 {i}", dict(talk))
        journal.add(Piece("hm", "thinking", None))
        journal.add(Piece("回答 é", "answer", None))
        answer = {"role": "assistant", "content": "回答 é", "reasoning_content": "hm"}
        talk = talk | {"messages": [*talk["messages"], {"role": "user", "content": f"问题 {i}"}, answer]}
        journal.keep(talk)
    journal.close()
    (kept,) = folder.glob("*.jsonl")
    kept = kept.rename(folder / "kept.jsonl")
    conversations.write(folder / "saved.json", talk)

    def read(file: Path, data: bytes) -> None:
        from mlx_spec.apps.chat.settings import from_values

        found = conversations.read(file)
        conversations.turns(found["messages"])
        from_values(found["settings"])
        for message in found["messages"]:
            conversations.shown(message["content"])
        conversations.write(folder / "again.json", found)
        conversations.read(folder / "again.json")

    return _reader(folder, _valid(folder, kept.name, form="lines") | _valid(folder, "saved.json"), read)


def answers(folder: Path) -> Reader:
    """Stored responses of the server, and earlier answers for lookup."""
    ids = [f"resp_{i:032x}" for i in (1, 2)]
    store = ResponseStore(folder)
    previous = None
    for id in ids:
        item = {
            "type": "message",
            "role": "assistant",
            "id": "m",
            "content": [{"type": "output_text", "text": "Hi"}],
        }
        asked = [ItemField.model_validate({"role": "user", "content": "Hello"})]
        store.of("key").save({"id": id, "output": [item], "created_at": 1.5}, asked, previous)
        previous = store.find(store.of("key").owner, id)
    store._writer.shutdown()
    earlier = EarlierAnswers(1 << 10)
    earlier.keep_in(folder, "t", 500, 3600)
    earlier.add("k", text_prompt([1, 2, 3]), list(range(400)))
    own = next(folder.glob("*.answers")).name
    files = _valid(folder, *(f"{id}.json" for id in ids)) | _valid(folder, own, form="bytes")
    contents = {name: valid.content for name, valid in files.items()}

    def read() -> None:
        for name in contents:
            if not (folder / name).exists():  # what is damaged is removed
                (folder / name).write_bytes(contents[name])
        found = ResponseStore(folder)
        key = found.of("key")
        for id in ids:
            stored = found.find(key.owner, id)
            if stored is not None:
                [item.json_item() for item in (*stored.answered, *stored.output)]
                json.dumps(stored.response)
        again = EarlierAnswers(1 << 10)
        again.keep_in(folder, "t", 500, 3600)
        again.ring("k").find(list(range(100, 130)))
        found._writer.shutdown()

    return Reader(files, read)


def costs(folder: Path) -> Reader:
    """Measured costs and row classes."""
    key = saved_costs.Key("cpu", "t", ("d",), "none", None, "1")
    table = Table(0.01, {1: 0.01, 4: 0.02}, [{1: 0.001, 4: 0.004}], 0.001, 256, 8)
    saved_costs.write(folder / "costs.json", key, "2026-01-01", table)
    saved_costs.write_rows(folder / "rows.json", key, RowClass(2, ((0, 12),), edges=(1024,)))

    def read() -> None:
        for name, reading in (("costs.json", saved_costs.read), ("rows.json", saved_costs.read_rows)):
            if (folder / name).exists():
                reading(folder / name, key)

    return Reader(_valid(folder, "costs.json", "rows.json"), read)


def recorded(folder: Path) -> Reader:
    """Recorded answers of a training."""
    from mlx_spec.types import KVRows

    rows = KVRows(mx.zeros((1, 1, 12, 4), mx.float16), mx.zeros((1, 1, 12, 4), mx.float16))
    made = training.RecordedAnswer(
        "code", True, mx.arange(8), mx.zeros((8, 4), mx.float16), {"full_attention": rows}, mx.zeros(8)
    )
    training.write_answer(folder / "a.safetensors", made)

    def read() -> None:
        found = training.read_answer(folder / "a.safetensors")
        mx.eval(
            found.tokens, found.hidden, found.logsumexp, [(r.keys, r.values) for r in found.shared.values()]
        )
        _ = found.prompt_tokens

    return Reader(_valid(folder, "a.safetensors", form="safetensors"), read)


# --- requests


def picture(folder: Path) -> Reader:
    """Pictures of all formats."""
    import numpy as np
    from PIL import Image

    shades = (np.indices((24, 40)).sum(0) * 4 % 256).astype(np.uint8)
    image = Image.fromarray(np.stack([shades, shades.T.reshape(24, 40), 255 - shades], -1))
    files = {}
    exif = Image.Exif()
    exif[0x0112] = 6
    options: Mapping[str, Mapping[str, Any]] = {
        "JPEG": {"progressive": True, "exif": exif},
        "PNG": {"dpi": (72, 72), "exif": exif},
        "WEBP": {"exif": exif},
        "GIF": {"save_all": True, "append_images": [image.rotate(90)]},
        "BMP": {},
    }
    for kind, given in options.items():
        stream = io.BytesIO()
        image.save(stream, kind, **given)
        files[f"picture.{kind}"] = Valid(stream.getvalue())
    grey = io.BytesIO()
    Image.fromarray(shades.astype(np.uint16) * 200).save(grey, "PNG")
    files["picture.grey"] = Valid(grey.getvalue())
    return _reader(folder, files, lambda file, data: read_picture(data), megabytes=650)


FUNCTION = {
    "name": "get_weather",
    "description": "Weather",
    "parameters": {
        "type": "object",
        "properties": {
            "city": {"type": "string", "minLength": 1, "pattern": "^[A-Z]"},
            "days": {"type": "integer", "minimum": 1, "maximum": 7},
            "unit": {"enum": ["C", "F", None]},
            "more": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]},
        },
        "required": ["city"],
        "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}, "maxItems": 3}},
        "additionalProperties": False,
    },
}


def body(folder: Path) -> Reader:
    """Bodies of all protocols, up to the request that the engine gets."""
    pixel = "data:image/png;base64,iVBORw0KGgo="
    url = {"type": "image_url", "image_url": {"url": pixel}}
    parts = [{"type": "text", "text": "Hi \\ud83d"}, url]
    call = {
        "id": "c",
        "type": "function",
        "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'},
    }
    shared = {"model": "m", "max_tokens": 5, "temperature": 0.5, "top_p": 0.9, "stop": ["a"], "seed": 3}
    tools = {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "auto"}
    turns = [
        *MESSAGES,
        {"role": "user", "content": parts},
        {"role": "assistant", "content": None, "tool_calls": [call]},
    ]
    turns.append({"role": "tool", "tool_call_id": "c", "content": "20"})
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": FUNCTION["parameters"]}}
    used = {"type": "tool_use", "id": "c", "name": "get_weather", "input": {"city": "Rome"}}
    blocks = [*MESSAGES[1:], {"role": "assistant", "content": [{"type": "text", "text": "a"}, used]}]
    blocks.append({"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c", "content": "20"}]})
    own = [{"name": "get_weather", "input_schema": FUNCTION["parameters"]}]
    items = [{"role": "user", "content": [{"type": "input_text", "text": "Hi"}]}]
    items.append({"type": "function_call", "call_id": "c", "name": "get_weather", "arguments": "{}"})
    items.append({"type": "function_call_output", "call_id": "c", "output": "20"})
    store, engine = ResponseStore().of(""), Mock()
    engine.models.return_value = [Mock(thinks=True)]
    engine.models.return_value[0].name = "m"
    forms: dict[str, tuple[dict[str, Any], type[Any], Callable[..., Any]]] = {
        "chat": (
            {**shared, **tools, "messages": turns, "response_format": form},
            openai_chat.ChatBody,
            openai_chat.parse,
        ),
        "text": (
            {**shared, "prompt": [[1, 2], [3]], "logprobs": 2},
            openai_completions.TextBody,
            openai_completions.parse,
        ),
        "responses": (
            {
                "model": "m",
                "input": items,
                "tools": [{"type": "function", **FUNCTION}],
                "max_output_tokens": 5,
            },
            openai_responses.ResponsesBody,
            lambda body, model: openai_responses.parse(body, model, store),
        ),
        "messages": (
            {"model": "m", "max_tokens": 5, "messages": blocks, "tools": own, "system": "Be brief."},
            anthropic_messages.MessagesBody,
            anthropic_messages.parse,
        ),
        "ollama": (
            {
                "model": "m",
                "messages": MESSAGES,
                "options": {"num_predict": 5, "top_k": 3},
                "keep_alive": "5m",
            },
            ollama.OllamaChat,
            lambda body, model: ollama.parse(body, model, engine=engine),
        ),
    }
    files = {name: _json(value) for name, (value, _, _) in forms.items()}

    def read(file: Path, data: bytes) -> None:
        _, kind, parse = forms[file.name]
        try:
            request = parse(parsing._validated(data, kind), "m")
        except ValidationError as error:
            raise parsing._first_problem(error) from error
        parsing.check_limits(request, Limits())

    return _reader(folder, files, read, (Failure,), megabytes=600)


def schema(folder: Path) -> Reader:
    """JSON schemas of clients."""
    more: Any = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "oneOf": [{"type": "object", "properties": {"a": {"const": 1}}}, {"not": {"type": "object"}}],
        "if": {"properties": {"kind": {"const": "x"}}, "required": ["kind"]},
        "then": {"required": ["y"]},
        "else": {
            "dependentRequired": {"z": ["w"]},
            "patternProperties": {"^a": {"type": "number", "multipleOf": 0.5}},
        },
    }
    lists: Any = {
        "type": "array",
        "prefixItems": [{"type": "string", "format": "date"}],
        "minItems": 1,
        "maxItems": 9,
    }
    lists |= {"items": {"allOf": [{"minimum": 0}, {"type": ["integer", "null"]}]}, "uniqueItems": True}
    files = {"tool": _json(FUNCTION["parameters"]), "logic": _json(more), "list": _json(lists)}

    def read(file: Path, data: bytes) -> None:
        text = data.decode("utf-8", "replace")[: Limits.schema_bytes]
        found = parsing.parse_object(text)
        if found is not None:
            read_schema(found)
        enforced(text)

    return _reader(folder, files, read, (Failure,))


READERS: dict[str, Callable[[Path], Reader]] = {
    made.__name__: made
    for made in (
        *(safetensors, config, generation, tokenizer, sentencepiece, template, gguf, drafter, pair),
        *(cache, conversation, answers, costs, recorded, picture, body, schema),
    )
}
