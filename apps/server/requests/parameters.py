"""Parameters that the routes share: sampling, and parameters of other runtimes.

Each is honoured, accepted because no text depends on it, or refused by name. None is ignored in silence.
"""

from __future__ import annotations

import difflib
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, model_validator

from mlx_spec.errors import InvalidValue
from mlx_spec.sampling import Sampling

from ..errors import LOG, invalid, invalid_field, missing, unsupported_field
from .parsing import MAX_SHOWN_CHARS, Count, Fields, Schema, parse_object
from .request import Chat, GenerationRequest, OutputFormat, RawPrompts
from .thinking_fields import Effort

Verbosity = Literal["low", "medium", "high"]
NO_VERBOSITY = "verbosity has no effect: the chat template has no place for it"

# How a client can say what form an answer must have -> the words for it in errors.
OUTPUT_FORMATS = {
    "json": "a JSON schema",
    "regex": "a regular expression",
    "choice": "a list of texts",
    "grammar": "a Lark grammar",
}
GROUP = "structured_outputs"
# Names of vLLM, SGLang, llama.cpp and Ollama for the form of an answer -> a key of OUTPUT_FORMATS.
CONSTRAINTS: Mapping[str, str] = {
    **{f"guided_{form}": form for form in OUTPUT_FORMATS},
    **{f"{GROUP}.{form}": form for form in OUTPUT_FORMATS},
    f"{GROUP}.json_object": "json",
    "regex": "regex",
    "ebnf": "grammar",
    "grammar": "grammar",
    "json_schema": "json",
    "format": "json",
}

# No text depends on these.
HARMLESS = frozenset(
    (
        # OpenAI's and Anthropic's clients
        """user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention
        prompt_cache_options client_metadata stream_options parallel_tool_calls cache_control
        context_management betas anthropic_beta anthropic_version inference_geo diagnostics workspace_id
        user_profile_id billing_policy fallbacks fallback_credit_token access_programs background_options """
        # vLLM, SGLang, llama.cpp, Ollama, LM Studio
        """request_id rid priority cache_salt session_params kv_transfer_params mm_processor_kwargs
        stream_reasoning guided_decoding_backend cache_prompt id_slot
        slot_id timings_per_token n_keep n_discard ttl num_ctx num_batch num_gpu
        num_thread num_keep numa main_gpu low_vram use_mmap use_mlock logits_all draft_num_predict """
        # Parts of samplers, which are off unless another parameter turns them on.
        """mirostat_tau mirostat_eta dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers
        xtc_threshold dynatemp_exponent smoothing_curve negative_prompt """
        # Gateways, chat applications, coding agents.
        """usage provider models route transforms trace session_id chat_id conversation_id message_id tags
        litellm_session_id litellm_trace_id litellm_call_id vl_high_resolution_images incremental_output
        result_format"""
    ).split()
)

# Values without effect, and the unsupported parameters that may have them. Null has no effect either.
_NEUTRAL: Sequence[tuple[tuple[Any, ...], str]] = (
    ((0,), "mirostat mirostat_mode dry_multiplier xtc_probability dynatemp_range smoothing_factor"),
    ((0,), "top_a epsilon_cutoff eta_cutoff penalty_alpha no_repeat_ngram_size min_length n_probs"),
    ((1,), "typical_p typical typ_p tfs tfs_z guidance_scale encoder_repetition_penalty"),
    ((1,), "n best_of num_beams length_penalty"),
    ((-1, 0), "top_n_sigma t_max_predict_ms"),
    ((-1,), "reasoning_budget"),
    ((False,), "use_beam_search early_stopping penalize_nl penalize_newline enable_search background echo"),
    ((False,), "include_stop_str_in_output no_stop_trim continue_final_message return_hidden_states"),
    ((False,), "return_token_ids return_tokens_as_token_ids"),
    ((True,), "f16_kv do_sample skip_special_tokens spaces_between_special_tokens add_generation_prompt"),
    ((True,), "separate_reasoning"),
    (([],), "bad_words allowed_token_ids logits_processors lora documents plugins"),
    (([], "edkypmxt", "edskypmxt"), "samplers"),  # llama.cpp's default order
    (([], ["text"]), "modalities"),
    (([],), "mcp_servers"),
    (("disabled",), "truncation"),
    (("standard",), "speed"),
    (("auto", "deepseek"), "reasoning_format"),
    ((), "prompt_logprobs truncate_prompt_tokens chat_template structural_tag guided_whitespace_pattern"),
    ((), "thinking_budget custom_logit_processor"),
)
NEUTRAL = {name: values for values, names in _NEUTRAL for name in names.split()}
REASONS = {  # parameters that are not supported -> why
    "audio": "answers are text",
    "compaction": "nothing is summarized here: send the conversation itself, shortened",
    "container": "nothing but the model runs here",
    "functions": "give `tools` instead",
    "function_call": "give `tool_choice` instead",
    "web_search_options": "nothing is ever fetched here",
    "moderation": "answers are not moderated here",
}
Bias = Annotated[float, Field(ge=-100, le=100)]
_logged: set[str] = set()


class OpenFields(Fields):
    """An object whose unknown fields `check_unknown` judges."""

    model_config = ConfigDict(extra="allow")
    takes_unknown: ClassVar[bool] = False  # an unknown field is a note on the answer, not an error


class JsonSchema(Fields):
    """A schema and its name."""

    name: str | None = None
    description: str | None = None
    schema_: Schema | None = Field(default=None, alias="schema")
    strict: bool | None = None  # refuse a schema that no grammar enforces fully; else leave keywords out


class FormatField(JsonSchema):
    """The form of the answer; `regex` and `lark` are ours, `schema` beside `json_object` is llama.cpp's."""

    type: str
    json_schema: JsonSchema | None = None
    pattern: str | None = None
    grammar: str | None = None


class SharedFields(OpenFields):
    """The parameters that every route takes."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    top_k: int | None = None  # -1 and 0: all tokens
    min_p: float | None = None
    seed: int | None = None  # -1: none
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    repeat_penalty: float | None = None  # another name of repetition_penalty
    repeat_last_n: int | None = None  # penalties count all tokens: -1
    # Vocabularies are larger, but users list few tokens by hand.
    logit_bias: Annotated[dict[str, Bias], Field(max_length=16_384)] | None = None
    min_tokens: Count | None = None
    ignore_eos: bool | None = None
    stop_token_ids: Annotated[list[Count], Field(max_length=1024)] | None = None  # models have a few
    response_format: FormatField | None = None
    include_reasoning: bool | None = None  # False: the answer does not contain the thinking
    verbosity: Verbosity | None = None
    keep_alive: Any = None  # a duration

    @model_validator(mode="before")
    @classmethod
    def _open_groups(cls, body: Any) -> Any:
        """Move the fields of `extra_body` and `options` beside them.

        OpenAI's SDK for Python does so with `extra_body` before it sends a request. Clients that take the
        server for Ollama send Ollama's `options` on every route.
        """
        if not isinstance(body, dict):
            return body
        groups = {name: body[name] for name in ("options", "extra_body") if isinstance(body.get(name), dict)}
        beside = {name: value for name, value in body.items() if name not in groups}
        return {**groups.get("options", {}), **groups.get("extra_body", {}), **beside}


class LimitFields(Fields):
    """The limit of the tokens of a choice, by all names that runtimes give it."""

    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    max_new_tokens: int | None = None
    max_output_tokens: int | None = None
    n_predict: int | None = None
    num_predict: int | None = None


class StreamOptions(Fields):
    """Additions to a stream. Responses always have the usage."""

    model_config = ConfigDict(extra="forbid")

    include_usage: bool | None = None
    include_obfuscation: Literal[False] | None = None


class AnswerConfig(Fields):
    """The form and length of the answer, and the effort of thinking, as protocols group them."""

    format: FormatField | None = None
    verbosity: Verbosity | None = None
    effort: Effort | None = None
    summary: Literal["auto", "concise", "detailed"] | None = None  # without effect: all thinking is returned


def parse_format(
    form: FormatField | None, field: str, schema_path: str = "schema", *, binds: bool = False
) -> OutputFormat | None:
    """Return the form of the answer; None for free text. Raises Failure (400).

    `field` is the field of `form`, `schema_path` is where the protocol has the schema within it. A schema
    without `strict` is strict if `binds`.
    """
    strict = binds if form is None or form.strict is None else form.strict
    match form:
        case None | FormatField(type="text"):
            return None
        case FormatField(type="json_object", schema_=None):
            return OutputFormat("json_object", param=field)
        case FormatField(type="json_object" | "json_schema", schema_=dict(schema)):
            return OutputFormat("json_schema", json.dumps(schema), f"{field}.schema", strict)
        case FormatField(type="json_schema", json_schema=JsonSchema(schema_=dict(schema), strict=inner)):
            strict = strict if inner is None else inner
            return OutputFormat("json_schema", json.dumps(schema), f"{field}.json_schema.schema", strict)
        case FormatField(type="regex", pattern=str(pattern)):
            return OutputFormat("regex", pattern, f"{field}.pattern")
        case FormatField(type="lark", grammar=str(grammar)):
            return OutputFormat("lark", grammar, f"{field}.grammar")
    paths = {"json_schema": schema_path, "regex": "pattern", "lark": "grammar"}
    if form.type in paths:
        raise missing(f"{field}.{paths[form.type]}")
    known, shown = "text, json_object, json_schema, regex or lark", form.type[:MAX_SHOWN_CHARS]
    raise unsupported_field(f"{field}.type", f"{shown!r} is not one of {known}")


def start_request(
    body: SharedFields,
    model: str,
    prompt: Chat | RawPrompts,
    form: OutputFormat | None,
    *,
    shows_thinking: bool = True,
    notes: Sequence[str] = (),
    **more: Any,
) -> GenerationRequest:
    """Return a request with the parameters that all protocols share, and `more`. Raises Failure (400).

    `form` is the form of the answer as a field of the protocol gives it.
    """
    return GenerationRequest(
        model,
        prompt,
        _parse_sampling(body),
        stop_tokens=tuple(dict.fromkeys(body.stop_token_ids or ())),
        ignore_eos=bool(body.ignore_eos),
        format=_parse_constraint(body, form),
        keep_alive=parse_duration(body.keep_alive),
        shows_thinking=shows_thinking and body.include_reasoning is not False,
        notes=tuple(dict.fromkeys([*notes, *verbosity_notes(body.verbosity)])),
        **more,
    )


def parse_duration(value: Any) -> float | None:
    """Return the seconds of a duration such as "5m" or 300; less than 0 is forever. Raises Failure (400)."""
    if value is None:
        return None
    text = str(value)
    digits = text.removeprefix("-")
    parts = re.findall(r"(\d+\.?\d*)(ns|us|µs|ms|s|m|h|$)", digits)
    if not parts or "".join(map("".join, parts)) != digits:
        raise invalid_field("keep_alive", "give a duration such as '5m', or seconds, or -1 for no end")
    units = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}
    seconds = sum(float(number) * units[unit] for number, unit in parts)
    return math.inf if text != digits else seconds


def _parse_sampling(body: SharedFields) -> Sampling:
    penalties = {body.repetition_penalty, body.repeat_penalty} - {None}
    if len(penalties) > 1:
        raise invalid_field("repeat_penalty", "is repetition_penalty by another name: give one")
    repetition = next(iter(penalties), None)
    penalised = body.presence_penalty or body.frequency_penalty or repetition not in (None, 1)
    if penalised and body.repeat_last_n not in (None, -1):
        raise unsupported_field("repeat_last_n", "penalties count all tokens here: give -1")
    same = {field.name for field in fields(Sampling)} & SharedFields.model_fields.keys() - {"logit_bias"}
    values = {"temperature": 1.0, **body.model_dump(include=same, exclude_none=True)}
    greedy_below = 1e-4  # clients that cannot send the temperature 0 send a tiny one
    values |= {"temperature": 0.0} if 0 < values["temperature"] < greedy_below else {}
    values |= {"top_k": 0} if body.top_k == -1 else {}
    values |= {"top_k": 1, "top_p": 1.0} if body.top_p == 0 else {}  # the likeliest token, as in OpenAI's API
    values |= {"seed": None} if body.seed == -1 else {}
    values |= {} if repetition is None else {"repetition_penalty": repetition}
    bias = _parse_bias(body.logit_bias or {})
    try:
        return Sampling(**values, logit_bias=bias)
    except InvalidValue as error:
        named = re.match(r"[a-z_]+", str(error))
        raise invalid(str(error), named[0] if named else None) from error


def _parse_bias(bias: dict[str, float]) -> dict[int, float] | None:
    for token in bias:
        max_token_digits = 9  # digits of a token id; more overflow MLX's indices
        if not (token.isascii() and token.isdigit() and len(token) <= max_token_digits):
            shown = token[:MAX_SHOWN_CHARS]
            raise invalid_field("logit_bias", f"{shown!r} is not a token id: give integers as keys")
    return {int(token): value for token, value in bias.items()} or None


def _parse_constraint(body: SharedFields, form: OutputFormat | None) -> OutputFormat | None:
    """Return the form of the answer: `form`, which a field of the protocol gives, or another field.

    Raises Failure (400), also if several fields give a form.
    """
    shared = parse_format(body.response_format, "response_format", "json_schema.schema")
    forms = [each for each in (form, shared) if each is not None]
    extra = body.model_extra or {}
    group = extra.get(GROUP) or {}
    if not isinstance(group, Mapping):
        raise invalid_field(GROUP, "give an object")
    grouped = {f"{GROUP}.{key[:MAX_SHOWN_CHARS]}": value for key, value in group.items()}
    for name, value in {**extra, **grouped}.items():
        if name in CONSTRAINTS and value not in (None, "", False):
            forms.append(as_format(CONSTRAINTS[name], value, name))
        is_option = name.startswith(f"{GROUP}.disable_")  # an option of vLLM's grammar backends
        if name in grouped and name not in CONSTRAINTS and value not in (None, False) and not is_option:
            raise unsupported_field(name, "is not supported here")
    if len(forms) > 1:
        first, second = (each.param for each in forms[:2])
        raise invalid_field(second, f"{first} gives the form of the answer, too: leave one of them out")
    return forms[0] if forms else None


def as_format(form: str, value: Any, field: str, *, strict: bool = True) -> OutputFormat:
    """Return the form of an answer; `form`, of OUTPUT_FORMATS, says what `value` is. Raises Failure (400)."""
    match form, value:
        case "json", True | "json":
            return OutputFormat("json_object", param=field)
        case "json", dict() | str():
            schema = parse_object(value) if isinstance(value, str) else value
            if schema is not None:
                return OutputFormat("json_schema", json.dumps(schema), field, strict)
        case "regex", str():
            return OutputFormat("regex", value, field)
        case "choice", [_, *_] if all(isinstance(each, str) for each in value):
            texts = [re.escape(each).replace("\\\n", "\\n") for each in value]
            return OutputFormat("regex", "|".join(texts), field)
        case "grammar", str():
            if "::=" in value:
                raise unsupported_field(field, "GBNF and EBNF are not read here: give a Lark grammar")
            return OutputFormat("lark", value, field)
    raise invalid_field(field, f"give {OUTPUT_FORMATS[form]}")


def check_unknown(body: OpenFields, allowed: bool) -> list[str]:
    """Return a note for each unknown parameter; log it once.

    Raises Failure (400) for an unsupported one, and for an unknown one unless `allowed` or `takes_unknown`.
    """
    notes = []
    for name, value in (body.model_extra or {}).items():
        if value is None or name in HARMLESS or name in CONSTRAINTS or name == GROUP:
            continue
        if name in REASONS:
            raise unsupported_field(name, f"is not supported, {REASONS[name]}")
        if name in NEUTRAL:
            if value not in NEUTRAL[name]:
                neutral = "".join(f", or give {json.dumps(each)}" for each in NEUTRAL[name][:1])
                raise unsupported_field(name, f"is not supported here: leave it out{neutral}")
            continue
        shown, near = name[:MAX_SHOWN_CHARS], _near(body, name)
        hint = f"did you mean {near[0]}?" if near else ""
        if not (allowed or body.takes_unknown):
            way = hint or "`serve --allow-extra-parameters` accepts such"
            raise invalid(f"{shown}: unknown; {way}", name, "unknown_parameter")
        notes.append("; ".join(filter(None, [f"{shown}: is not known here and has no effect", hint])))
        warn_once(f"a parameter of a request: {notes[-1]}")
    return notes


def verbosity_notes(verbosity: Verbosity | None) -> list[str]:
    """Return a note if a request asks for another verbosity than the default, "medium"."""
    return [NO_VERBOSITY] if verbosity in ("low", "high") else []


def leave_out_tools(types: Iterable[str]) -> list[str]:
    """Return a note for each type of hosted tools, which are left out; log it once."""
    why = "needs a service that does not run here and is left out"
    notes = [f"tools: {name!r} {why}" for name in sorted(types)]
    for note in notes:
        warn_once(note)
    return notes


def warn_once(message: str) -> None:
    """Log a warning, unless it was logged before."""
    max_logged = 64  # warnings about parameters and tools, each logged once
    if message not in _logged and len(_logged) < max_logged:
        _logged.add(message)
        LOG.warning("%s", message)


def _near(body: OpenFields, name: str) -> list[str]:
    """Return the parameters of this route that an unknown name may mean, the nearest first."""
    known = [field.alias or key for key, field in type(body).model_fields.items()]
    synonyms = [*LimitFields.model_fields], ["stop", "stop_sequences"]  # by protocol
    same = [other for names in synonyms if name in names for other in names if other in known]
    return same or difflib.get_close_matches(name[:MAX_SHOWN_CHARS], [*known, *CONSTRAINTS, GROUP], 1, 0.7)
