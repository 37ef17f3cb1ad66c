"""A request's output: what each sampled token adds to the text, and whether it was the last."""

from time import perf_counter_ns

from paceline.engine.detokenize import Detokenizer, TokenDecoder
from paceline.engine.request import FinishReason, Request, RequestOutput, Timings, TokenLogprobs, Usage


class Generation:
    """Turns one request's tokens into its outputs, the last of which has a ``finish_reason``."""

    def __init__(self, request: Request, decoder: TokenDecoder, eos_ids: frozenset[int]) -> None:
        params = request.params
        self.request = request
        self._detokenizer = Detokenizer(decoder, params.stop, params.include_stop_str_in_output)
        self._eos_ids = frozenset() if params.ignore_eos else eos_ids
        self._stop_token_ids = frozenset(params.stop_token_ids) - self._eos_ids

    def advance(self, token_id: int, logprobs: TokenLogprobs | None) -> RequestOutput:
        """The output for the token that was just appended to ``request.output_ids``."""
        request = self.request
        ends_text = token_id in self._eos_ids or token_id in self._stop_token_ids
        text = "" if ends_text and not self._shows(token_id) else self._detokenizer.add(token_id)
        if ends_text or len(request.output_ids) >= request.max_output_tokens:
            text += self._detokenizer.finish()
        reason, stop_reason = self._finish_reason(token_id)
        if reason is not None:
            return self._last(reason, text, token_ids=(token_id,), logprobs=logprobs, stop_reason=stop_reason)
        return RequestOutput(request.request_id, text, (token_id,), () if logprobs is None else (logprobs,))

    def abort(self) -> RequestOutput:
        return self._last("abort", self._detokenizer.finish())

    def fail(self, error: str) -> RequestOutput:
        return self._last("error", "", error=error)

    def _shows(self, token_id: int) -> bool:
        return token_id in self._stop_token_ids and self.request.params.include_stop_str_in_output

    def _finish_reason(self, token_id: int) -> tuple[FinishReason | None, str | int | None]:
        if token_id in self._eos_ids:
            return "stop", None
        if token_id in self._stop_token_ids:
            return "stop", token_id
        if self._detokenizer.stop_string is not None:
            return "stop", self._detokenizer.stop_string
        if len(self.request.output_ids) >= self.request.max_output_tokens:
            return "length", None
        return None, None

    def _last(
        self,
        reason: FinishReason,
        text: str,
        *,
        token_ids: tuple[int, ...] = (),
        logprobs: TokenLogprobs | None = None,
        stop_reason: str | int | None = None,
        error: str | None = None,
    ) -> RequestOutput:
        request = self.request
        request.finished_ns = perf_counter_ns()
        return RequestOutput(
            request.request_id,
            text,
            token_ids,
            () if logprobs is None else (logprobs,),
            reason,
            stop_reason,
            error,
            Usage(len(request.prompt_ids), len(request.output_ids), request.num_cached_tokens),
            _timings(request, request.finished_ns),
        )


def _timings(request: Request, finished_ns: int) -> Timings:
    scheduled_ns = request.first_scheduled_ns or finished_ns
    first_token_ns = request.first_token_ns or finished_ns
    return Timings(
        queue_ms=(scheduled_ns - request.arrived_ns) / 1e6,
        prefill_ms=(first_token_ns - scheduled_ns) / 1e6,
        decode_ms=(finished_ns - first_token_ns) / 1e6,
    )
