"""What the routes of every dialect share: the model, its names, and the way from a prompt to the engine."""

import asyncio
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from paceline.engine.door import room_for_output
from paceline.errors import InputError
from paceline.models.chat import no_template_error
from paceline.models.control_tokens import strings
from paceline.models.conversation import Message, with_default_system
from paceline.server.dispatch import Dispatcher
from paceline.server.errors import ApiError
from paceline.server.metrics import ServerMetrics

if TYPE_CHECKING:
    from paceline.loading import LoadedModel

_TOKENIZER_THREADS = 2
"""The tokenizer releases the GIL; more threads would only take cores from the engine."""


class Service:
    """One loaded model behind HTTP."""

    def __init__(
        self,
        model: "LoadedModel",
        served_names: Sequence[str],
        system_prompt: str | None,
        default_sampling: Mapping[str, Any],
    ) -> None:
        self.model = model
        self.served_names = tuple(served_names)
        self.system_prompt = system_prompt
        self.default_sampling = default_sampling
        self.metrics = ServerMetrics(model.engine, self.served_names[0])
        self.dispatcher = Dispatcher(model.engine, self.metrics)
        self._longest_token = model.tokenizer.vocabulary.longest_token()
        self._tokenizer_threads = ThreadPoolExecutor(_TOKENIZER_THREADS, thread_name_prefix="paceline-tokenizer")

    async def stop(self) -> None:
        """End all requests and the engine; calling it twice is harmless."""
        await self.dispatcher.stop()
        self._tokenizer_threads.shutdown(wait=False)

    def served_name(self, requested: str | None) -> str:
        """
        Raises:
            ApiError: it is not a name of this server's model (404).
        """
        if requested is None:
            return self.served_names[0]
        if requested not in self.served_names:
            served = ", ".join(self.served_names)
            raise ApiError(
                404, f"The model {requested[:200]!r} does not exist here; served: {served}", code="model_not_found"
            )
        return requested

    async def encode_prompts(self, prompts: Sequence[str | list[int]], *, parse_special: bool) -> list[list[int]]:
        """Token ids of each prompt; long texts keep the event loop free.

        Raises:
            InputError: a text is empty or longer than the context; those after it have cost nothing.
        """
        encode, engine, kv = self.model.tokenizer.encode, self.model.engine, self.model.executor.kv_geometry
        for prompt in prompts:
            if isinstance(prompt, str):
                self._check_size("prompt", len(prompt.encode()))

        def encode_one(prompt: str) -> list[int]:
            ids = encode(prompt, parse_special=parse_special)
            room_for_output(len(ids), None, engine.config, kv)
            return ids

        def encode_all() -> list[list[int]]:
            return [encode_one(prompt) if isinstance(prompt, str) else prompt for prompt in prompts]

        return await asyncio.get_running_loop().run_in_executor(self._tokenizer_threads, encode_all)

    async def encode_chat(self, messages: Sequence[Message], chat_template_kwargs: Mapping[str, Any]) -> list[int]:
        """Token ids of a conversation up to where the answer begins.

        Raises:
            InputError: the model has no chat template, or the template refuses the conversation or its variables, or
                they are far too long.
        """
        template = self.model.chat_template
        if template is None:
            raise no_template_error()
        conversation = with_default_system(messages, self.system_prompt)
        context = self.model.engine.config.max_model_len
        if len(conversation) > context:  # rendering them would take seconds, and each makes a token at least
            raise InputError(
                f"{len(conversation)} messages are more than the context has tokens, {context}; shorten the prompt",
                param="messages",
                code="context_length_exceeded",
            )
        self._check_size("messages", sum(len(message["content"].encode()) for message in conversation))
        self._check_size("chat_template_kwargs", sum(len(text.encode()) for text in strings(chat_template_kwargs)))

        def encode() -> list[int]:
            return template.encode(conversation, chat_template_kwargs=chat_template_kwargs)

        return await asyncio.get_running_loop().run_in_executor(self._tokenizer_threads, encode)

    def _check_size(self, param: str, size: int) -> None:
        """Refuse a text of ``size`` bytes that is not worth tokenizing: that takes a second per megabyte.

        Raises:
            InputError: not even as the longest tokens would it fit into the context.
        """
        # NFC and bytes without a token can make fewer tokens of a text, but not of one that anybody has.
        context = self.model.engine.config.max_model_len
        if size > context * self._longest_token:
            raise InputError(
                f"{param} has {size} bytes, the context holds {context} tokens of at most {self._longest_token} bytes "
                f"each; shorten the prompt",
                param=param,
                code="context_length_exceeded",
            )


def new_id(prefix: str) -> str:
    return prefix + uuid.uuid4().hex
