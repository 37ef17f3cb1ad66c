"""A request's output: what each sampled token adds to the text, and whether it was the last."""

from collections.abc import Sequence
from time import perf_counter_ns

from paceline.engine.batch import Sample
from paceline.engine.detokenize import Detokenizer, TokenDecoder
from paceline.engine.outputs import FinishReason, RequestOutput, Timings, TokenLogprobs, Usage
from paceline.engine.request import Request


class Generation:
    """Turns one request's tokens into its outputs, the last of which has a ``finish_reason``."""

    def __init__(self, request: Request, decoder: TokenDecoder, eos_ids: frozenset[int]) -> None:
        params = request.params
        self.request = request
        self._detokenizer = Detokenizer(decoder, params.stop, params.include_stop_str_in_output)
        self._eos_ids = frozenset() if params.ignore_eos else eos_ids
        self._stop_token_ids = frozenset(params.stop_token_ids) - self._eos_ids

    def advance(
        self, samples: Sequence[Sample], prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    ) -> RequestOutput | None:
        """Append the next tokens to ``request.output_ids``, up to the one that ends it; None if there is no news."""
        request = self.request
        text = ""
        token_ids: list[int] = []
        logprobs: list[TokenLogprobs] = []
        for token_id, token_logprobs, error in samples:
            if error is not None:
                return self._last("error", text, token_ids, logprobs, prompt_logprobs, error=error)
            request.append_output(token_id)
            token_ids.append(token_id)
            if token_logprobs is not None:
                logprobs.append(token_logprobs)
            text += self._text(token_id)
            reason, stop_reason = self._finish_reason(token_id)
            if reason is not None:
                return self._last(reason, text, token_ids, logprobs, prompt_logprobs, stop_reason=stop_reason)
        if not token_ids and not prompt_logprobs:
            return None
        return RequestOutput(request.request_id, text, tuple(token_ids), tuple(logprobs), prompt_logprobs)

    def complete(self, prompt_logprobs: tuple[TokenLogprobs, ...] = ()) -> RequestOutput:
        """The end of a request that was for its prompt alone."""
        return self._last("length", "", prompt_logprobs=prompt_logprobs)

    def time_out(self) -> RequestOutput:
        request = self.request
        seconds = (perf_counter_ns() - request.arrived_ns) / 1e9
        return self._last(
            "timeout",
            self._detokenizer.finish(),
            error=f"not finished after {seconds:.1f} s, with {len(request.output_ids)} tokens generated; "
            "the timeout that came with the request, or the server's, is over",
        )

    def abort(self) -> RequestOutput:
        return self._last("abort", self._detokenizer.finish())

    def fail(self, error: str) -> RequestOutput:
        return self._last("error", "", error=error)

    def _text(self, token_id: int) -> str:
        """What may be shown with the token that was just appended."""
        num_output = len(self.request.output_ids)
        ends_text = token_id in self._eos_ids or token_id in self._stop_token_ids
        text = ""
        if not ends_text or self._shows(token_id):
            text = self._detokenizer.add(token_id, may_stop=num_output > self.request.params.min_tokens)
        if ends_text or num_output >= self.request.max_output_tokens:
            text += self._detokenizer.finish()
        return text

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
        token_ids: Sequence[int] = (),
        logprobs: Sequence[TokenLogprobs] = (),
        prompt_logprobs: tuple[TokenLogprobs, ...] = (),
        *,
        stop_reason: str | int | None = None,
        error: str | None = None,
    ) -> RequestOutput:
        request = self.request
        request.finished_ns = perf_counter_ns()
        return RequestOutput(
            request.request_id,
            text,
            tuple(token_ids),
            tuple(logprobs),
            prompt_logprobs,
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
