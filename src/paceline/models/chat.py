"""Chat templates: messages to the text, and to the token ids, that a model was trained on."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from paceline.errors import InputError, ModelFileError
from paceline.models.gguf import MetadataValue
from paceline.models.tokenizer import Tokenizer

Message = Mapping[str, Any]
"""``{"role": …, "content": …}``, and whatever else the template looks at."""

_FAILURES = (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError)
"""What the expressions of a template can raise on data it was not written for."""

_METADATA_KEY = "tokenizer.chat_template"


class ChatTemplate:
    """A compiled jinja2 template, run in a sandbox: it comes with the model, so it is not trusted."""

    def __init__(self, source: str, tokenizer: Tokenizer) -> None:
        """Raises ModelFileError: the template does not compile."""
        self.source = source
        self._tokenizer = tokenizer
        self._variables = {"tools": None, "documents": None, **_token_variables(tokenizer)}
        self._special_tokens = _any_of(tokenizer.special_tokens)
        self._joints = _Joints.of(tokenizer.special_tokens)
        try:
            self._template = _environment().from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelFileError(f"the chat template does not compile: line {error.lineno}: {error.message}") from error
        except (RecursionError, SyntaxError) as error:  # blocks nested deeper than jinja2 or Python can follow
            raise ModelFileError(f"the chat template does not compile: {error}") from error

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, MetadataValue], tokenizer: Tokenizer) -> "ChatTemplate | None":
        """The template in a model file, or None if it has none.

        Raises:
            ModelFileError: it does not compile.
        """
        source = metadata.get(_METADATA_KEY)
        return cls(source, tokenizer) if isinstance(source, str) else None

    @classmethod
    def from_file(cls, path: Path, tokenizer: Tokenizer) -> "ChatTemplate":
        """Raises InputError: the file cannot be read; ModelFileError: it does not compile."""
        try:
            return cls(path.read_text(encoding="utf-8"), tokenizer)
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"--chat-template {path}: cannot be read: {error}") from error
        except ModelFileError as error:
            raise ModelFileError(f"--chat-template {path}: {error}") from error

    def render(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **extra: Any) -> str:
        """The conversation as text.

        Args:
            messages: the conversation; the template decides which roles it knows.
            add_generation_prompt: end where the model's answer begins.
            extra: further variables of the template, such as ``tools``.

        Raises:
            InputError: the template refuses the messages or fails on them.
        """
        variables = {**self._variables, **extra, "add_generation_prompt": add_generation_prompt}
        try:
            return self._template.render(messages=messages, **variables)
        except jinja2.TemplateError as error:
            raise InputError(f"the chat template refuses these messages: {error}", param="messages") from error
        except (
            ArithmeticError,
            AttributeError,
            LookupError,
            MemoryError,
            RecursionError,
            TypeError,
            ValueError,
        ) as error:
            # what the expressions of a template can raise on data it was not written for
            reason = f"{type(error).__name__}: {error}"
            raise InputError(f"the chat template fails on these messages: {reason}", param="messages") from error

    def encode(self, messages: Sequence[Message], *, add_generation_prompt: bool = True, **extra: Any) -> list[int]:
        """The conversation as token ids, for the arguments and errors of ``render``.

        Control tokens come from the template alone. Where a message spells one, a marker that occurs nowhere else is
        put inside it before rendering, so that it is not found when the text is split at the control tokens, and
        removed before the rest is encoded as plain text.
        """
        marker = _unused_character([self.source, *_strings([messages, extra])])
        text = self.render(
            self._mark(messages, marker),
            add_generation_prompt=add_generation_prompt,
            **self._mark(extra, marker),
        )
        ids: list[int] = []
        for i, piece in enumerate(self._special_tokens.split(text)):
            if i % 2:
                ids.append(self._tokenizer.special_tokens[piece])
            elif piece:
                ids += self._tokenizer.encode(piece.replace(marker, ""), parse_special=False, add_special=False)
        return ids

    def _mark(self, value: Any, marker: str) -> Any:
        """``value`` with every look-alike of a control token broken up, in all strings at any depth."""
        if isinstance(value, str):
            broken = self._special_tokens.sub(lambda found: found[0][:1] + marker + found[0][1:], value)
            return self._joints.guard(broken, marker)
        if isinstance(value, Mapping):
            return {self._mark(key, marker): self._mark(item, marker) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self._mark(item, marker) for item in value]
        return value


def no_template_error() -> InputError:
    """What a chat request gets from a model without a template."""
    return InputError(
        "this model has no chat template: start with --chat-template FILE, or send a plain prompt to /v1/completions",
        param="messages",
    )


def with_default_system(messages: Sequence[Message], system: str | None) -> list[Message]:
    """The conversation with ``--system TEXT`` in front, unless it has a system message of its own."""
    if system is None or any(message.get("role") in ("system", "developer") for message in messages):
        return list(messages)
    return [{"role": "system", "content": system}, *messages]


ROLES = ("system", "developer", "user", "assistant")


def checked_messages(messages: Sequence[Message]) -> list[Message]:
    """A conversation as templates know it: contents as strings, OpenAI's newer ``developer`` as ``system``.

    Raises:
        InputError: there is no message, or one has an unknown role or a content that is no text.
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
    try:
        content = joined_text_parts(message.get("content"))
    except ValueError as error:
        raise InputError(f"{where}: {error}", param="messages") from None
    if not isinstance(content, str):
        raise InputError(f"{where} has the content {content!r}; a string is needed", param="messages")
    return {**message, "role": "system" if role == "developer" else role, "content": content}


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


class _Joints:
    """Guards the ends of a message's string, where it could complete a control token with the text beside it."""

    def __init__(self, beginnings: tuple[str, ...], endings: tuple[str, ...]) -> None:
        self._beginnings = beginnings
        self._endings = endings

    @classmethod
    def of(cls, special_tokens: Iterable[str]) -> "_Joints":
        """Of single characters only brackets and the like count: a role called ``user`` must stay what it is."""
        parts = [(token[:i], token[i:]) for token in special_tokens for i in range(1, len(token))]
        beginnings = {left for left, _ in parts if len(left) > 1 or not left.isalnum()}
        endings = {right for _, right in parts if len(right) > 1 or not right.isalnum()}
        return cls(tuple(beginnings), tuple(endings))

    def guard(self, text: str, marker: str) -> str:
        front = marker if text.startswith(self._endings) else ""
        back = marker if text.endswith(self._beginnings) else ""
        return front + text + back


def _any_of(special_tokens: Iterable[str]) -> re.Pattern[str]:
    """Finds control tokens, the longest where several begin at one place, as the tokenizer does."""
    longest_first = sorted(special_tokens, key=len, reverse=True)
    return re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _strings(key)
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _unused_character(texts: Iterable[str]) -> str:
    """A private-use character that no text contains."""
    used = set().union(*texts)
    for code in (*range(0xE000, 0xF900), *range(0xF0000, 0xFFFFE)):
        if chr(code) not in used:
            return chr(code)
    raise InputError("the messages use all 71 934 private-use characters of Unicode's first planes", param="messages")


def _token_variables(tokenizer: Tokenizer) -> dict[str, str]:
    """``bos_token`` and the others that transformers gives to templates."""
    vocabulary = tokenizer.vocabulary
    ids = {
        "bos_token": vocabulary.bos_id,
        "eos_token": vocabulary.eos_id,
        "unk_token": vocabulary.unk_id,
        "pad_token": vocabulary.pad_id,
    }
    return {name: vocabulary.tokens[token_id] for name, token_id in ids.items() if token_id is not None}


def _environment() -> ImmutableSandboxedEnvironment:
    """What transformers offers templates (utils/chat_template_utils.py, ``_cached_compile_jinja_template``)."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


class _GenerationTag(Extension):
    """``{% generation %}…{% endgeneration %}`` marks what an assistant wrote, for training; here it only shows it."""

    tags = {"generation"}  # noqa: RUF012 (an instance attribute's type in jinja2's stubs)

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_show"), [], [], body).set_lineno(line)

    def _show(self, caller: Callable[[], str]) -> str:
        return caller()


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja2's own escapes HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern)
