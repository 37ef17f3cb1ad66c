from typing import Any

import pytest

from paceline.errors import InputError
from paceline.models.conversation import as_templates_see, checked_messages


def call(**function: Any) -> dict[str, Any]:
    return {"role": "assistant", "tool_calls": [{"id": "1", "type": "function", "function": function}]}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"arguments": '{"a": [1]}'}, {"a": [1]}),
        ({"arguments": {"a": [1]}}, {"a": [1]}),
        ({"arguments": ""}, {}),
        ({"arguments": None}, {}),
        ({}, {}),
    ],
)
def test_arguments_of_tool_calls_become_objects(arguments: dict[str, Any], expected: dict[str, Any]) -> None:
    (message,) = checked_messages([call(name="f", **arguments)])
    assert message["tool_calls"][0]["function"] == {"name": "f", "arguments": expected}
    assert message["tool_calls"][0]["id"] == "1"


def test_a_message_with_tool_calls_needs_no_content() -> None:
    """OpenAI has null there; templates add it to text."""
    assert checked_messages([{**call(name="f"), "content": None}])[0]["content"] == ""
    assert checked_messages([{**call(name="f"), "content": "Let me see."}])[0]["content"] == "Let me see."
    with pytest.raises(InputError, match="content None; a string is needed"):
        checked_messages([{"role": "assistant", "content": None, "tool_calls": []}])


def test_results_of_tools_are_messages() -> None:
    result = {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "ok"}]}
    assert checked_messages([result]) == [{**result, "content": "ok"}]


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        ({"role": "assistant", "tool_calls": {"f": 1}}, r"messages\[0\].tool_calls must be a list, got {'f': 1}"),
        ({"role": "assistant", "tool_calls": ["f"]}, r"tool_calls\[0\] must look like .*, got 'f'"),
        (call(), r"tool_calls\[0\] must look like"),
        (call(name="f", arguments="{"), r"tool_calls\[0\].function.arguments is not JSON: "),
        (call(name="f", arguments="[1]"), r"function.arguments must be a JSON object, got '\[1\]'"),
        (call(name="f", arguments=1), "function.arguments must be a JSON object, got 1"),
    ],
)
def test_what_is_no_tool_call(message: dict[str, Any], problem: str) -> None:
    with pytest.raises(InputError, match=problem) as raised:
        checked_messages([message])
    assert raised.value.param == "messages"


def test_templates_see_no_null_and_reasoning_under_each_name() -> None:
    assert as_templates_see({"role": "user", "content": "a", "name": None}) == {"role": "user", "content": "a"}
    for name in ("reasoning", "thinking", "reasoning_content"):
        seen = as_templates_see({"role": "assistant", name: "Hm."})
        assert (seen["thinking"], seen["reasoning_content"]) == ("Hm.", "Hm.")
