"""The templates of seventy models, as llama.cpp collects them, rendered as transformers renders them."""

import copy
from datetime import date, datetime
from pathlib import Path
from typing import Any

import pytest

from paceline.errors import InputError
from paceline.models.chat import ChatTemplate
from paceline.models.conversation import checked_messages
from paceline.models.tokenizer import Tokenizer

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather <now> & later in a city, 예: 서울",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "Name of the city"},
                "days": {"type": "integer", "enum": [1, 7]},
            },
            "required": ["city"],
        },
    },
}
QUESTION = {"role": "user", "content": "What's the weather in 서울?"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "call00001",
            "type": "function",
            "function": {"name": "get_weather", "arguments": '{"city": "서울", "days": 7, "exact": true}'},
        }
    ],
}
RESULT = {"role": "tool", "tool_call_id": "call00001", "name": "get_weather", "content": '{"sky": "clear"}'}

CONVERSATIONS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "one turn": ([{"role": "user", "content": " Hello <b>&</b> "}], {}),
    "turns": (
        [
            {"role": "system", "content": "Be brief.\n"},
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b\n\nc"},
            {"role": "user", "content": "안녕 👋"},
        ],
        {},
    ),
    "answer last": ([QUESTION, {"role": "assistant", "content": "Fine."}], {"add_generation_prompt": False}),
    "tools": ([{"role": "system", "content": "Use tools."}, QUESTION], {"tools": [WEATHER]}),
    "a call and its result": ([QUESTION, CALL, RESULT], {"tools": [WEATHER]}),
    "thinking": ([QUESTION], {"enable_thinking": True, "thinking": True}),
    "no thinking": ([QUESTION], {"enable_thinking": False, "thinking": False}),
    "reasoning": ([QUESTION, {"role": "assistant", "reasoning": "Hm.", "content": "Clear."}, QUESTION], {}),
    "thoughts": (
        [
            QUESTION,
            {"role": "assistant", "reasoning_content": "Hm.", "content": "<think>\nOr so.\n</think>\n\nClear."},
            {"role": "user", "content": "Sure?"},
        ],
        {},
    ),
}


class FrozenClock(datetime):
    @classmethod
    def now(cls, tz: Any = None) -> "FrozenClock":
        return cls(2024, 7, 26, tzinfo=tz)


TODAY = date(2024, 7, 26)
"""The date that Llama 3.1's templates have where they are given none; transformers gives none."""


@pytest.fixture
def frozen_oracle(oracle: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", FrozenClock)
    return oracle


@pytest.fixture(scope="module")
def sources(llama_cpp: Path) -> dict[str, str]:
    found = {file.stem: file.read_text(encoding="utf-8") for file in (llama_cpp / "models/templates").glob("*.jinja")}
    assert len(found) > 60
    return found


def as_arguments(given: dict[str, Any]) -> dict[str, Any]:
    own = {name: given[name] for name in ("tools", "add_generation_prompt") if name in given}
    return {**own, "chat_template_kwargs": {name: value for name, value in given.items() if name not in own}}


def rendered_by_us(template: ChatTemplate, messages: list[Any], given: dict[str, Any]) -> str | None:
    """None where it refuses."""
    try:
        return template.render(messages, **as_arguments(given))
    except InputError:
        return None


def rendered_by_transformers(oracle: Any, source: str, messages: list[Any], given: dict[str, Any]) -> str | None:
    from jinja2 import TemplateError

    options = {"add_generation_prompt": True, **copy.deepcopy(given)}
    try:
        text = oracle.apply_chat_template(copy.deepcopy(messages), chat_template=source, tokenize=False, **options)
    except (TemplateError, TypeError, ValueError, AttributeError, LookupError):
        return None
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("name", CONVERSATIONS)
def test_renders_every_template_as_transformers_does(
    tokenizer: Tokenizer, frozen_oracle: Any, sources: dict[str, str], name: str
) -> None:
    messages, given = CONVERSATIONS[name]
    checked = list(checked_messages(messages))
    refused = 0
    for file, source in sources.items():
        template = ChatTemplate(source, tokenizer, today=TODAY)
        ours = rendered_by_us(template, checked, given)
        assert ours == rendered_by_transformers(frozen_oracle, source, checked, given), file
        refused += ours is None
    assert refused <= 7


@pytest.mark.parametrize("name", ["turns", "a call and its result"])
def test_encodes_what_it_renders(tokenizer: Tokenizer, sources: dict[str, str], name: str) -> None:
    """Nothing here looks like a control token, so that guarding against those changes nothing."""
    messages, given = CONVERSATIONS[name]
    checked = checked_messages(messages)
    for file, source in sources.items():
        template = ChatTemplate(source, tokenizer, today=TODAY)
        text = rendered_by_us(template, checked, given)
        if text is not None:
            ids = template.encode(checked, **as_arguments(given))
            assert ids == tokenizer.encode(text, add_special=False), file


def test_qwen_3_can_be_told_not_to_think(tokenizer: Tokenizer, sources: dict[str, str]) -> None:
    template = ChatTemplate(sources["Qwen-Qwen3-0.6B"], tokenizer)
    thinking, quick = (
        template.render([QUESTION], chat_template_kwargs={"enable_thinking": wanted}) for wanted in (True, False)
    )
    assert thinking == template.render([QUESTION])
    assert quick == thinking + "<think>\n\n</think>\n\n"


def test_a_frozen_date(tokenizer: Tokenizer, sources: dict[str, str]) -> None:
    for file in ("meta-llama-Llama-3.1-8B-Instruct", "meta-llama-Llama-3.2-3B-Instruct"):
        rendered = ChatTemplate(sources[file], tokenizer, today=date(2025, 1, 9)).render([QUESTION])
        assert "Today Date: 09 Jan 2025" in rendered, file
