"""Prepare a request: tokenize its prompts, and compile the grammar of its answer.

This runs on other threads than the engine's and does not use MLX.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from mlx_spec.errors import InvalidValue, NoVision, PromptTooLong
from mlx_spec.grammar import Grammar
from mlx_spec.prompt import Prompt, text_prompt
from mlx_spec.sampling import Sampling
from mlx_spec.tokenizer import Tokenizer
from mlx_spec.tokenizer.fill_in import LAYOUTS, FillIn, fill_in_ends, fill_in_prompt
from mlx_spec.vision.conversation import NO_VISION
from mlx_spec.vision.pictures import MAX_PICTURES, read_picture
from mlx_spec.vision.vision import Vision

from ..errors import LOG, invalid, invalid_field, unsupported_field
from ..requests.request import (
    Chat,
    GenerationRequest,
    OutputFormat,
    PictureFile,
    RawPrompt,
    RawPrompts,
    ToolUse,
)
from ..tools.answer_grammar import (
    CompileGrammar,
    answer_grammar,
    compile_failure,
    compile_format,
    is_optional,
)
from ..tools.formats import ToolFormat, format_of
from ..tools.prompts import chat_prompt


@dataclass(frozen=True)
class PreparedRequest:
    """A request in the form that the engine needs."""

    prompts: tuple[Prompt, ...]
    sampling: Sampling
    tool_format: ToolFormat | None  # how to read tool calls; None if the answer may have none
    prediction: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()  # tokens that end an answer beside the end of text


def prepare(
    request: GenerationRequest,
    tokenizer: Tokenizer,
    compile: CompileGrammar,
    vision: Vision | NoVision = NO_VISION,
    context: int | None = None,
) -> PreparedRequest:
    """Render and tokenize the prompts, compile the grammar. This may take seconds.

    Raises Failure (400).
    """
    unsalted = find_prompts(request, tokenizer, vision, context)
    prompts = tuple(replace(prompt, salt=request.key.encode()) for prompt in unsalted)
    prediction = () if request.prediction is None else tuple(tokenizer.encode(request.prediction))
    use = request.prompt.tools if isinstance(request.prompt, Chat) else None
    tool_format = None if use is None else format_of(use, tokenizer)
    raw = request.prompt.prompts if isinstance(request.prompt, RawPrompts) else ()
    fills_in = any(isinstance(prompt, FillIn) for prompt in raw)
    # No text has the names of these tokens.
    controls = tokenizer.controls.intersection(map(tokenizer.token_id, request.stop))
    ends = (*request.stop_tokens, *controls, *(fill_in_ends(tokenizer) if fills_in else ()))
    banned = tokenizer.eos if request.ignore_eos else frozenset[int]()
    if use is not None and tool_format is not None and use.choice == "none":
        banned |= frozenset(() if tool_format.open is None else (tool_format.open,))
    ban = dict.fromkeys(banned, float("-inf"))
    sampling = replace(
        request.sampling,
        logit_bias={**(request.sampling.logit_bias or {}), **ban} or None,
        late_tokens=tokenizer.eos | frozenset(ends),
        grammar=_grammar(request, tokenizer, use, tool_format, compile),
    )
    reads_calls = use is not None and use.choice != "none"
    return PreparedRequest(prompts, sampling, tool_format if reads_calls else None, prediction, ends)


def find_prompts(
    request: GenerationRequest,
    tokenizer: Tokenizer,
    vision: Vision | NoVision = NO_VISION,
    most: int | None = None,
) -> tuple[Prompt, ...]:
    """Return the prompts of a request as tokens. Raises Failure (400), also for more than `most` tokens."""
    try:
        return _read_prompts(request, tokenizer, vision, most)
    except PromptTooLong as error:
        raise invalid(str(error), request.prompt_param, "context_length_exceeded") from error


def _read_prompts(
    request: GenerationRequest, tokenizer: Tokenizer, vision: Vision | NoVision, most: int | None
) -> tuple[Prompt, ...]:
    if not isinstance(request.prompt, Chat):
        raw = request.prompt.prompts
        return tuple(text_prompt(_raw_tokens(prompt, tokenizer, request.model, most)) for prompt in raw)
    chat = request.prompt
    if files := chat.pictures:
        if len(files) > MAX_PICTURES:
            raise invalid(f"{len(files)} pictures: {MAX_PICTURES} are the most", request.prompt_param)
        if isinstance(vision, NoVision):
            param = files[0].param
            raise unsupported_field(param, f"model {request.model!r} reads no pictures: {vision}")
        seen = [_seen(message, vision) for message in chat.messages]
        chat = replace(chat, messages=tuple(seen))
    return (chat_prompt(chat, tokenizer, request.model, request.prompt_param, vision, request.key, most),)


def _seen(message: Mapping[str, Any], vision: Vision) -> Mapping[str, Any]:
    """Return a message with its pictures ready for the tower. Raises Failure (400)."""
    if not isinstance(parts := message.get("content"), list):
        return message
    return {**message, "content": [_prepared(part, vision) for part in parts]}


def _prepared(part: Mapping[str, Any], vision: Vision) -> Mapping[str, Any]:
    if part["type"] != "image":
        return part
    file: PictureFile = part["image"]
    try:
        return {**part, "image": vision.prepare(read_picture(file.data))}
    except InvalidValue as error:
        raise invalid_field(file.param, error) from error


def _raw_tokens(prompt: RawPrompt, tokenizer: Tokenizer, model: str, most: int | None = None) -> list[int]:
    if isinstance(prompt, FillIn):
        tokens = fill_in_prompt(prompt, tokenizer)
        if tokens is None:
            way = "use a code model that has, or send a prompt alone"
            problem = f"{model} has no tokens for filling in, such as {LAYOUTS[0].prefix}: {way}"
            raise unsupported_field(prompt.param, problem)
        return tokens
    return tokenizer.prompt_tokens(prompt, most) if isinstance(prompt, str) else list(prompt)


def _grammar(
    request: GenerationRequest,
    tokenizer: Tokenizer,
    use: ToolUse | None,
    tool_format: ToolFormat | None,
    compile: CompileGrammar,
) -> Grammar | None:
    """Return the grammar of the response format combined with the grammar of tool calls.

    None if the answer is free, or if an optional grammar of calls does not compile.
    """
    format = request.format
    if use is not None and tool_format is not None:
        calls = answer_grammar(tool_format, use, format)
        if calls is not None:
            format = OutputFormat("lark", calls, "tools" if format is None else format.param)
    if format is None:
        return None
    try:
        grammar = compile_format(format, compile)
    except InvalidValue as error:
        if use is not None and tool_format is not None and is_optional(use, request.format):
            LOG.warning("calls of tools are not constrained: their schemas cannot be enforced")
            return None
        if format is not request.format:
            raise compile_failure(error, format.param) from error
        raise invalid(str(error), format.param) from error
    if not isinstance(request.prompt, Chat):
        return grammar.with_thinking()  # all text after a raw prompt is answer, also where it opens thinking
    grammar = grammar.thinking(_may_think(request.prompt, tokenizer))
    if use is None or tool_format is None or format is request.format:
        return grammar
    if tool_format.in_headers:
        return grammar.with_thinking()
    is_free = use.choice == "auto" and request.format is None
    if tool_format.open is None or not is_free:
        return grammar
    return grammar.with_calls(tool_format.open, tool_format.close)


def _may_think(chat: Chat, tokenizer: Tokenizer) -> bool:
    """Return True if the answer may begin with thinking. Some models think in any case."""
    asked = tokenizer.thinks_unasked if chat.thinking is None else chat.thinking
    return asked or not tokenizer.thinks
