"""Chat templates: messages to the text, and to the token ids, that a model was trained on."""

from collections.abc import Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import Any

import jinja2

from paceline.errors import InputError, ModelFileError
from paceline.models.control_tokens import ControlTokens, unused_character
from paceline.models.conversation import Message, as_templates_see
from paceline.models.gguf import MetadataValue
from paceline.models.template_language import compiled, template_environment
from paceline.models.tokenizer import Tokenizer

_FAILURES = (ArithmeticError, AttributeError, LookupError, MemoryError, RuntimeError, TypeError, ValueError)
"""What the expressions of a template can raise on data it was not written for."""

_METADATA_KEY = "tokenizer.chat_template"

_TOKEN_VARIABLES = ("bos_token", "eos_token", "unk_token", "pad_token")

_RESERVED = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", *_TOKEN_VARIABLES}
)
"""What a template gets from us; a request may not set it as one of its own variables."""


class ChatTemplate:
    """A compiled jinja2 template, run in a sandbox: it comes with the model, so it is not trusted."""

    def __init__(
        self, source: str, tokenizer: Tokenizer, *, tool_use: str | None = None, today: date | None = None
    ) -> None:
        """
        Args:
            tool_use: source of a second template, for conversations with tools.
            today: the date that templates see and may write into the prompt; None: the real one.

        Raises:
            ModelFileError: a template does not compile.
        """
        self.source = source
        self._tokenizer = tokenizer
        self._environment = template_environment(today)
        self._plain = compiled(source, self._environment)
        self._tool_use = self._plain if tool_use is None else compiled(tool_use, self._environment)
        self._sources = (source, tool_use or "")
        self._variables = {"documents": None, **_token_variables(tokenizer)}
        if today is not None:  # Llama 3's templates ask for it before they look at the clock, or never do
            self._variables["date_string"] = today.strftime("%d %b %Y")
        self._control_tokens = ControlTokens(tokenizer.special_tokens)

    @classmethod
    def from_gguf(
        cls, metadata: Mapping[str, MetadataValue], tokenizer: Tokenizer, *, today: date | None = None
    ) -> "ChatTemplate | None":
        """The template in a model file, with the one for tools if there are several, or None if it has none.

        Raises:
            ModelFileError: it does not compile.
        """
        source, tool_use = metadata.get(_METADATA_KEY), metadata.get(f"{_METADATA_KEY}.tool_use")
        if not isinstance(source, str):
            return None
        return cls(source, tokenizer, tool_use=tool_use if isinstance(tool_use, str) else None, today=today)

    @classmethod
    def from_file(cls, path: Path, tokenizer: Tokenizer, *, today: date | None = None) -> "ChatTemplate":
        """Raises InputError: the file cannot be read; ModelFileError: it does not compile."""
        try:
            return cls(path.read_text(encoding="utf-8"), tokenizer, today=today)
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"--chat-template {path}: cannot be read: {error}") from error
        except ModelFileError as error:
            raise ModelFileError(f"--chat-template {path}: {error}") from error

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The conversation as text.

        Args:
            messages: the conversation; the template decides which roles it knows.
            tools: OpenAI's function tools; with any, the model's template for tools is used if it has one.
            add_generation_prompt: end where the model's answer begins.
            chat_template_kwargs: further variables of the template, such as ``enable_thinking`` (vLLM's name).

        Raises:
            InputError: the template refuses the messages or fails on them, or a variable's name is one of ours.
        """
        extra = chat_template_kwargs or {}
        taken = sorted(extra.keys() & (_RESERVED | self._environment.globals.keys()))
        if taken:
            raise InputError(
                f"chat_template_kwargs may not set {', '.join(taken)}: templates have that name for something else",
                param="chat_template_kwargs",
            )
        template = self._tool_use if tools else self._plain
        variables = {
            **self._variables,
            **extra,
            "messages": [as_templates_see(message) for message in messages],
            "tools": tools or None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return template.render(variables)
        except jinja2.TemplateError as error:
            raise InputError(f"the chat template refuses these messages: {error}", param="messages") from error
        except _FAILURES as error:
            reason = f"{type(error).__name__}: {error}"
            raise InputError(f"the chat template fails on these messages: {reason}", param="messages") from error

    def encode(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """The conversation as token ids, for the arguments and errors of ``render``.

        Control tokens, BOS among them, come from the template alone. Where a message spells one, a marker that occurs
        nowhere else is put inside it before rendering, so that it is not found when the text is split at the control
        tokens, and removed before the rest is encoded as plain text.
        """
        given = (messages, tools, chat_template_kwargs)
        marker = unused_character([self._sources, given])
        marked_messages, marked_tools, marked_kwargs = self._control_tokens.break_up(given, marker)
        text = self.render(
            marked_messages,
            tools=marked_tools,
            add_generation_prompt=add_generation_prompt,
            chat_template_kwargs=marked_kwargs,
        )
        ids: list[int] = []
        for i, piece in enumerate(self._control_tokens.split(text)):
            if i % 2:
                ids.append(self._tokenizer.special_tokens[piece])
            elif piece:
                ids += self._tokenizer.encode(piece.replace(marker, ""), parse_special=False, add_special=False)
        return ids


def no_template_error() -> InputError:
    """What a chat request gets from a model without a template."""
    return InputError(
        "this model has no chat template: serve it with --chat-template FILE, or let it continue a plain prompt "
        "(/v1/completions)",
        param="messages",
    )


def _token_variables(tokenizer: Tokenizer) -> dict[str, Any]:
    """``bos_token`` and the others that transformers gives to templates."""
    vocabulary = tokenizer.vocabulary
    ids = (vocabulary.bos_id, vocabulary.eos_id, vocabulary.unk_id, vocabulary.pad_id)
    named = zip(_TOKEN_VARIABLES, ids, strict=True)
    return {name: vocabulary.tokens[token_id] for name, token_id in named if token_id is not None}
