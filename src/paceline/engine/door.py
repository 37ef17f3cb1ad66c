"""What is refused before it costs anything, with the numbers."""

import secrets
from collections.abc import Sequence
from time import perf_counter_ns

from paceline.engine.bans import Bans
from paceline.engine.config import EngineConfig, check_timeout
from paceline.engine.detokenize import TokenDecoder
from paceline.engine.draft import PromptLookup
from paceline.engine.request import Request
from paceline.engine.sampling import SamplingParams, choice_seed
from paceline.errors import InputError
from paceline.executors.base import KVGeometry


class Door:
    """Makes requests of what somebody asks for, or refuses."""

    def __init__(self, vocab_size: int, kv: KVGeometry, decoder: TokenDecoder, config: EngineConfig) -> None:
        self._vocab_size = vocab_size
        self._kv = kv
        self._decoder = decoder
        self._config = config

    def admit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None,
        priority: int,
        cache_salt: str,
        timeout: float | None,
    ) -> Request:
        """A request with its forks, one for each further choice.

        Raises:
            InputError: it cannot be run.
        """
        arrived_ns = perf_counter_ns()
        prompt = list(prompt_ids)
        check_token_ids(prompt, params, self._vocab_size)
        max_output = room_for_output(len(prompt), params.max_tokens, self._config, self._kv)
        if params.min_tokens > max_output:
            raise InputError(
                f"min_tokens is {params.min_tokens}, behind a prompt of {len(prompt)} tokens there is room for "
                f"{max_output}",
                param="min_tokens",
            )
        deadline_ns = _deadline(arrived_ns, self._config.request_timeout if timeout is None else timeout)
        first_id = request_id or f"req-{secrets.token_hex(12)}"
        # 53 bits, so that a drawn seed can be returned in JSON and sent again from any language.
        seed = secrets.randbits(53) if params.seed is None else params.seed % 2**64
        bans = self._bans(params)
        lookup = self._config.prompt_lookup_tokens
        request, *forks = [
            Request(
                f"{first_id}:{index}" if index else first_id,
                prompt,
                params,
                choice_seed(seed, index),
                max_output,
                priority=priority,
                cache_salt=cache_salt,
                deadline_ns=deadline_ns,
                arrived_ns=arrived_ns,
                bans=bans,
                drafter=PromptLookup(lookup) if lookup else None,
            )
            for index in range(params.n)
        ]
        request.fork(forks)
        return request

    def _bans(self, params: SamplingParams) -> Bans | None:
        if not params.min_tokens and not params.bad_words:
            return None
        end_ids = {*params.stop_token_ids, *(() if params.ignore_eos else self._config.eos_ids)}
        return Bans(end_ids, params.min_tokens, [s for word in params.bad_words for s in self._decoder.spellings(word)])


def _deadline(arrived_ns: int, timeout: float | None) -> int | None:
    if timeout is None:
        return None
    check_timeout("timeout", timeout)
    return arrived_ns + int(timeout * 1e9)


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
    least_output = 0 if max_tokens == 0 else 1
    if num_prompt + least_output > config.max_model_len:
        including = " including at least one generated" if least_output else ""
        raise InputError(
            f"prompt has {num_prompt} tokens, the context holds {config.max_model_len}{including}; shorten the prompt",
            param="prompt",
            code="context_length_exceeded",
        )
    # The last generated token needs no KV.
    room_in_pool = kv.num_blocks * kv.block_size - num_prompt + least_output
    wanted = room_in_pool if max_tokens is None else max_tokens
    max_output = max(min(wanted, config.max_model_len - num_prompt), least_output)
    if max_output > room_in_pool:
        needed = -(-(num_prompt + max_output - least_output) // kv.block_size)
        raise InputError(
            f"prompt of {num_prompt} tokens and up to {max_output} generated need {needed} KV blocks of "
            f"{kv.block_size} tokens, the cache has {kv.num_blocks}; shorten the prompt, lower max_tokens or "
            f"give the KV cache more memory",
            param="prompt" if num_prompt > kv.num_blocks * kv.block_size else "max_tokens",
            code="kv_cache_exceeded",
        )
    return max_output
