"""What is refused before it costs anything, with the numbers."""

from collections.abc import Sequence

from paceline.engine.config import EngineConfig
from paceline.engine.request import SamplingParams
from paceline.errors import InputError
from paceline.executors.base import KVGeometry


def check_token_ids(prompt_ids: Sequence[int], params: SamplingParams, vocab_size: int) -> None:
    """Raises:
    InputError: a token id, of the prompt or a parameter, is outside the vocabulary.
    """
    named = {
        "prompt": prompt_ids,
        "logit_bias": tuple(params.logit_bias),
        "stop_token_ids": params.stop_token_ids,
    }
    for param, token_ids in named.items():
        if token_ids and (min(token_ids) < 0 or max(token_ids) >= vocab_size):
            wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
            raise InputError(f"{param} has token id {wrong}, the vocabulary has ids 0 to {vocab_size - 1}", param=param)


def room_for_output(num_prompt: int, max_tokens: int | None, config: EngineConfig, kv: KVGeometry) -> int:
    """How many tokens a request may generate: ``max_tokens`` clamped to the context; None takes all the room there is.

    Raises:
        InputError: the prompt is empty or leaves no room in the context, or the whole does not fit into the KV cache.
    """
    if num_prompt == 0:
        raise InputError("prompt is empty, at least one token is needed", param="prompt")
    if num_prompt >= config.max_model_len:
        raise InputError(
            f"prompt has {num_prompt} tokens, the context holds {config.max_model_len} "
            f"including at least one generated; shorten the prompt",
            param="prompt",
            code="context_length_exceeded",
        )
    # The last generated token needs no KV.
    room_in_pool = kv.num_blocks * kv.block_size - num_prompt + 1
    wanted = room_in_pool if max_tokens is None else max_tokens
    max_output = max(min(wanted, config.max_model_len - num_prompt), 1)
    if max_output > room_in_pool:
        needed = -(-(num_prompt + max_output - 1) // kv.block_size)
        raise InputError(
            f"prompt of {num_prompt} tokens and up to {max_output} generated need {needed} KV blocks of "
            f"{kv.block_size} tokens, the cache has {kv.num_blocks}; shorten the prompt, lower max_tokens or "
            f"give the KV cache more memory",
            param="prompt" if num_prompt > kv.num_blocks * kv.block_size else "max_tokens",
            code="kv_cache_exceeded",
        )
    return max_output
