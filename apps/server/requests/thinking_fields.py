"""The fields by which a request turns thinking on or off, on every route with a chat template."""

from __future__ import annotations

from typing import Any, Literal

from ..errors import invalid_field, unsupported
from .parsing import Fields

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class ThinkingField(Fields):
    """Turns thinking on or off. A budget is not enforced: max_tokens limits thinking and answer together."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: int | None = None
    display: Literal["summarized", "omitted"] | None = None

    @property
    def wanted(self) -> bool:
        return self.type != "disabled"


class ThinkingFields(Fields):
    """The fields that mean the same in every protocol."""

    reasoning_effort: Effort | None = None
    enable_thinking: bool | None = None  # as in `chat_template_kwargs`
    chat_template_kwargs: dict[str, Any] | None = None  # variables of the template

    def thinks(self, enabled: bool | None = None, effort: Effort | None = None) -> bool | None:
        """Return True if the model shall think, None if the request says nothing. Raises Failure (400).

        `enabled` and `effort` come from fields of the protocol.
        """
        wanted = (self.chat_template_kwargs or {}).get("enable_thinking", self.enable_thinking)
        wanted = enabled if wanted is None else wanted
        effort = self.reasoning_effort or effort
        if wanted is None:
            no_thinking = ("none", "minimal")  # efforts without thinking
            return None if effort is None else effort not in no_thinking
        if not isinstance(wanted, bool):
            raise invalid_field("chat_template_kwargs.enable_thinking", "give true or false")
        return wanted

    def variables(self, effort: str | None = None) -> dict[str, Any]:
        """Return the variables of the template. Raises Failure (400).

        `effort` comes from a field of the protocol; `reasoning_effort` wins.
        """
        kwargs = self.chat_template_kwargs or {}
        own_variables = ("messages", "tools", "add_generation_prompt")  # other fields of a request set these
        for name in own_variables:
            if name in kwargs:
                field = "chat_template_kwargs"
                raise unsupported(f"{field}.{name}: is set by other fields", field)
        effort = self.reasoning_effort or effort
        rest = {name: value for name, value in kwargs.items() if name != "enable_thinking"}
        return ({} if effort is None else {"reasoning_effort": effort}) | rest
