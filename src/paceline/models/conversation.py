"""The messages of a conversation, as chat templates know them."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from paceline.errors import InputError

Message = Mapping[str, Any]
"""``{"role": …, "content": …}``, and whatever else the template looks at."""

ROLES = ("system", "developer", "user", "assistant", "tool")


def with_default_system(messages: Sequence[Message], system: str | None) -> list[Message]:
    """The conversation with ``--system TEXT`` in front, unless it has a system message of its own."""
    if system is None or any(message.get("role") in ("system", "developer") for message in messages):
        return list(messages)
    return [{"role": "system", "content": system}, *messages]


def checked_messages(messages: Sequence[Message]) -> list[Message]:
    """A conversation as templates know it: contents as strings, OpenAI's newer ``developer`` as ``system``, the
    arguments of tool calls as objects, which OpenAI writes as JSON in a string.

    Raises:
        InputError: there is no message, or one has an unknown role, a content that is no text, or a tool call that is
            none.
    """
    if not messages:
        raise InputError("messages is empty: a conversation has at least one message", param="messages")
    return [_checked_message(message, f"messages[{number}]") for number, message in enumerate(messages)]


def _checked_message(message: Message, where: str) -> Message:
    if not isinstance(message, Mapping):
        raise InputError(f"{where} must be a dict with role and content, got {message!r}", param="messages")
    role = message.get("role")
    if role not in ROLES:
        raise InputError(f"{where} has the role {role!r}; there are {', '.join(ROLES)}", param="messages")
    checked = {**message, "role": "system" if role == "developer" else role}
    calls = message.get("tool_calls")
    if calls is not None:
        checked["tool_calls"] = _checked_calls(calls, f"{where}.tool_calls")
    content = message.get("content")
    if calls and content is None:
        content = ""  # OpenAI's null beside tool calls; templates add it to text
    try:
        content = joined_text_parts(content)
    except ValueError as error:
        raise InputError(f"{where}: {error}", param="messages") from None
    if not isinstance(content, str):
        raise InputError(f"{where} has the content {content!r}; a string is needed", param="messages")
    return {**checked, "content": content}


def _checked_calls(calls: object, where: str) -> list[Mapping[str, Any]]:
    if not isinstance(calls, list):
        raise InputError(f"{where} must be a list, got {calls!r:.200}", param="messages")
    return [_checked_call(call, f"{where}[{number}]") for number, call in enumerate(calls)]


def _checked_call(call: object, where: str) -> Mapping[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise InputError(
            f'{where} must look like {{"type": "function", "function": {{"name": …, "arguments": …}}}}, '
            f"got {call!r:.200}",
            param="messages",
        )
    return {**call, "function": {**function, "arguments": _arguments(function.get("arguments"), where)}}


def _arguments(given: object, where: str) -> Mapping[str, Any]:
    """Templates take an object and write it in their own way, as in vLLM; nothing at all is an empty one."""
    arguments = given or {}
    if isinstance(given, str) and given:
        try:
            arguments = json.loads(given)
        except ValueError as error:
            raise InputError(f"{where}.function.arguments is not JSON: {error}", param="messages") from None
    if not isinstance(arguments, Mapping):
        raise InputError(f"{where}.function.arguments must be a JSON object, got {given!r:.200}", param="messages")
    return arguments


def joined_text_parts(content: object) -> object:
    """A list of text parts becomes one string, a line each, as in vLLM and llama.cpp; anything else is left as it is.

    Raises:
        ValueError: a part is no text.
    """
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        if not isinstance(part, dict):
            raise ValueError('parts must be objects such as {"type": "text", "text": "Hello"}')
        if part.get("type") != "text":
            kind = json.dumps(part.get("type"), default=str)
            raise ValueError(f'only parts of type "text" are supported, not {kind:.200}')
        if not isinstance(part.get("text"), str):
            raise ValueError('a text part needs a string "text"')
        texts.append(part["text"])
    return "\n".join(texts)


_REASONING = ("reasoning_content", "thinking", "reasoning")


def as_templates_see(message: Message) -> Message:
    """As transformers hands it over (``_normalize_chat_messages``, ``_alias_reasoning_fields``): without what is None,
    and reasoning under each of the names that templates look for."""
    present = {name: value for name, value in message.items() if value is not None}
    reasoning = next((present[name] for name in _REASONING if name in present), None)
    return present if reasoning is None else {"thinking": reasoning, **present, "reasoning_content": reasoning}
