"""The engine: requests in, steps, outputs; by hand with ``step`` or on a thread of its own."""

import atexit
import logging
import math
import threading
from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from queue import Empty, SimpleQueue
from time import perf_counter_ns

from paceline.engine.batch import Outcome, Sample
from paceline.engine.blocks import BlockPool
from paceline.engine.chunk import Chunk
from paceline.engine.config import EngineConfig
from paceline.engine.deadlines import Deadlines
from paceline.engine.detokenize import TokenDecoder
from paceline.engine.door import Door
from paceline.engine.generation import Generation
from paceline.engine.outputs import FinishReason, RequestOutput, TokenLogprobs
from paceline.engine.pace import Pace
from paceline.engine.request import Request
from paceline.engine.runner import Runner
from paceline.engine.sampling import SamplingParams
from paceline.engine.scheduler import Scheduler
from paceline.engine.state import EngineState, look_at, wasted_slots
from paceline.engine.stats import Counters, EngineStats
from paceline.engine.step_cost import StepCost, StepWork
from paceline.engine.trace import FlightRecorder, StepClock
from paceline.errors import InputError, OverloadedError, PacelineError
from paceline.executors.base import Executor

__all__ = ["Engine", "EngineConfig", "EngineStats"]

logger = logging.getLogger("paceline.engine")

Sink = Callable[[list[RequestOutput]], None]


class Engine:
    """Runs requests on an executor by continuous batching.

    ``submit``, ``abort`` and ``stats`` may be called from any thread. ``step`` is for one thread: the caller's, or the
    engine's own between ``start`` and ``stop``. Every request that was submitted gets one last output with a
    ``finish_reason``, whatever happens.

    Raises:
        InputError: a step's budget is more than the executor takes.
    """

    def __init__(self, executor: Executor, decoder: TokenDecoder, config: EngineConfig) -> None:
        if config.max_num_batched_tokens > executor.max_batched_tokens:
            raise InputError(
                f"max_num_batched_tokens is {config.max_num_batched_tokens}, the executor takes at most "
                f"{executor.max_batched_tokens} tokens in a step",
                param="max_num_batched_tokens",
            )
        self.config = config
        self._executor = executor
        self._decoder = decoder
        self._door = Door(executor.spec.vocab_size, executor.kv_geometry, decoder, config)
        self._runner = Runner(executor)
        self._counters = Counters()
        self._pace = Pace()
        self.cost = StepCost()
        self.recorder = FlightRecorder()
        self._beat_ns = 0
        self._clock = StepClock(0)
        self._deadlines = Deadlines()
        self._arrival_numbers = count()
        # Guards what submit and abort share with the engine's thread: the next six.
        self._mailbox = threading.Condition()
        self._generations: dict[str, Generation] = {}
        self._arrived: list[Request] = []
        self._aborted: list[Generation] = []
        self._errands: list[Callable[[], None]] = []
        self._stopped = False
        self._thread: threading.Thread | None = None
        self._start_afresh()

    def submit(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
        timeout: float | None = None,
    ) -> Request:
        """Queue a request; outputs of each of its ``choices`` come from ``step`` under the choice's ``request_id``.

        ``timeout`` in seconds, instead of the engine's own.

        Raises:
            InputError: the request cannot be run; the message has the numbers.
            OverloadedError: more requests wait than ``max_waiting`` allows.
            PacelineError: the engine is stopped.
        """
        request = self._door.admit(
            prompt_ids, params, request_id=request_id, priority=priority, cache_salt=cache_salt, timeout=timeout
        )
        with self._mailbox:
            if self._stopped:
                raise PacelineError("the engine is stopped and takes no more requests")
            self._check_queue()
            for choice in request.choices:
                if choice.request_id in self._generations:
                    raise InputError(f"request id {choice.request_id!r} is already in use", param="request_id")
            if not self._generations:
                self._beat_ns = perf_counter_ns()  # that of its last work may be hours old
            for choice in request.choices:
                choice.arrival = next(self._arrival_numbers)
                self._generations[choice.request_id] = Generation(choice, self._decoder, self.config.eos_ids)
            self._arrived.append(request)
            self._mailbox.notify()
        return request

    def _check_queue(self) -> None:
        """Refuse a request that would wait behind too many others; one that starts with the next step does not."""
        if self.config.max_waiting is None:
            return
        queued = len(self._scheduler.waiting) + len(self._scheduler.preempted)
        seats = 0 if queued else self.config.max_num_seqs - len(self._scheduler.running)
        arrived = len(self._arrived)
        waiting = queued + max(arrived - seats, 0)
        if arrived >= seats and waiting >= self.config.max_waiting:
            raise OverloadedError(
                f"{waiting} requests wait already, at most {self.config.max_waiting} may; try again later",
                retry_after=self._pace.seconds_until_done(waiting + 1),
            )

    def reset_prefix_cache(self) -> None:
        """Forget every cached prefix, at the latest before the next step."""
        self._between_steps(lambda: self._pool.clear_cache())

    def state(self, timeout: float = 5.0) -> EngineState:
        """Who runs and who waits, as it is between two steps.

        Raises:
            PacelineError: the step under way did not end in ``timeout`` seconds.
        """
        answer: SimpleQueue[EngineState] = SimpleQueue()
        self._between_steps(lambda: answer.put(look_at(self._scheduler, self._pool)))
        try:
            return answer.get(timeout=timeout)
        except Empty:
            seconds = self.stalled_seconds()
            died = "the engine's thread has died"
            message = died if seconds == math.inf else f"the engine has been in the same step for {seconds:.0f} s"
            raise PacelineError(message) from None

    def stalled_seconds(self) -> float:
        """How long ago the engine showed a sign of life although there is work; infinite if its thread has died."""
        thread = self._thread
        if thread is not None and not thread.is_alive() and not self._stopped:
            return math.inf
        return (perf_counter_ns() - self._beat_ns) / 1e9 if self._generations else 0.0

    def _between_steps(self, errand: Callable[[], None]) -> None:
        """Do something with what the engine's thread owns: now if it sleeps, else before its next step."""
        with self._mailbox:
            if self._thread is not None and self._generations:
                self._errands.append(errand)
                self._mailbox.notify()
            else:
                errand()

    def abort(self, request_id: str) -> None:
        """End a request with its next step, in whatever state it is; unknown and finished ones are ignored."""
        with self._mailbox:
            generation = self._generations.get(request_id)
            if generation is not None:
                self._aborted.append(generation)

    @property
    def has_work(self) -> bool:
        return bool(self._generations)

    def stats(self) -> EngineStats:
        with self._mailbox:
            pool, running = self._pool, len(self._scheduler.running)
            return EngineStats(
                running=running,
                waiting=len(self._generations) - running,
                kv_blocks_total=pool.num_blocks,
                kv_blocks_used=pool.num_used,
                kv_blocks_cached=pool.num_evictable,
                kv_slots_wasted=wasted_slots(self._scheduler.running, pool.block_size),
                prompt_tokens=self._counters.prompt_tokens,
                generation_tokens=self._counters.generation_tokens,
                preemptions=self._counters.preemptions,
                prefix_queries=self._counters.prefix_queries,
                prefix_hits=self._counters.prefix_hits,
                draft_tokens=self._counters.draft_tokens,
                accepted_tokens=self._counters.accepted_tokens,
                steps=self._counters.steps,
            )

    def step(self) -> list[RequestOutput]:
        """Schedule, execute, commit, decode text: one output for each request that has news."""
        if self._thread not in (None, threading.current_thread()):
            raise PacelineError("the engine steps on its own thread between start and stop")
        return self._step()

    def start(self, sink: Sink) -> None:
        """Step on a thread of the engine's own, which sleeps while there is no work.

        ``sink`` is called on that thread, once per step that has news, with all its outputs.
        """
        with self._mailbox:
            if self._thread is not None:
                raise PacelineError("the engine is already started")
            self._stopped = False
            self._thread = threading.Thread(target=self._run, args=(sink,), name="paceline-engine", daemon=True)
            self._thread.start()
        # An interpreter that ends under a thread in the executor takes the process down with it.
        atexit.register(self.stop)

    def stop(self) -> None:
        """End every request with finish reason "abort", and the thread; the executor stays open.

        An engine that is stepped by hand has nobody to tell: its requests just end.
        """
        with self._mailbox:
            self._stopped = True
            thread = self._thread
            self._mailbox.notify()
        if thread is None:
            self._abort_all()
            return
        thread.join()
        atexit.unregister(self.stop)
        with self._mailbox:
            self._thread = None

    def _run(self, sink: Sink) -> None:
        while self._wait_for_work():
            _deliver(sink, self._step())
        _deliver(sink, self._abort_all())

    def _wait_for_work(self) -> bool:
        """Sleep until there is a request; False when the engine is to stop."""
        with self._mailbox:
            # Errands that came during a step which ended the last request are still to be done.
            self._mailbox.wait_for(lambda: self._stopped or self._generations or self._errands)
            return not self._stopped

    def _step(self) -> list[RequestOutput]:
        outputs: list[RequestOutput] = []
        self._clock = clock = StepClock(perf_counter_ns())
        self._beat_ns = clock.started
        try:
            self._take_mail(outputs)
            if self._deadlines:
                self._end_overdue(outputs)
            chunks = self._scheduler.schedule()
            if chunks:
                self._counters.steps += 1
                first = array("i", [chunk.request.num_computed_tokens for chunk in chunks])
                work = None if self.config.target_itl_ms is None else StepWork.of(chunks)
                clock.scheduled = perf_counter_ns()
                outcomes = self._runner.run(chunks)
                clock.executed = perf_counter_ns()
                self._commit(outcomes, outputs)
                self._beat_ns = clock.committed = perf_counter_ns()
                if work is not None:
                    self.cost.observe(work, (clock.committed - clock.started) / 1e6)
                self._record(chunks, first)
            elif self._scheduler.num_requests:
                raise RuntimeError(f"none of {self._scheduler.num_requests} requests can be scheduled")
        except Exception as bug:
            logger.exception("internal error in a step: every request ends here, the engine goes on without them")
            self._start_afresh()
            for generation in self._taken_generations():
                outputs.append(generation.fail(f"internal error: {bug!r}"))
                self._forget(generation, "error")
        return outputs

    def _record(self, chunks: Sequence[Chunk], first: "array[int]") -> None:
        scheduler, pool = self._scheduler, self._pool
        running = len(scheduler.running)
        self.recorder.record_step(
            self._counters.steps,
            self._clock,
            chunks,
            first,
            preempted=scheduler.just_preempted,
            running=running,
            waiting=len(self._generations) - running,
            blocks_used=pool.num_used,
            blocks_free=pool.num_free,
        )

    def _take_mail(self, outputs: list[RequestOutput]) -> None:
        with self._mailbox:
            arrived, self._arrived = self._arrived, []
            aborted, self._aborted = self._aborted, []
            errands, self._errands = self._errands, []
        for request in arrived:
            self._scheduler.add(request)
            for choice in request.choices:
                self._deadlines.add(self._generations[choice.request_id])
        for errand in errands:
            errand()
        for generation in aborted:
            # Not there if it finished in the step before or was aborted twice; its id may be in use again.
            if self._is_current(generation):
                self._end(generation, generation.abort(), outputs)

    def _end_overdue(self, outputs: list[RequestOutput]) -> None:
        for generation in self._deadlines.overdue(perf_counter_ns()):
            if self._is_current(generation):
                self._end(generation, generation.time_out(), outputs)

    def _is_current(self, generation: Generation) -> bool:
        return self._generations.get(generation.request.request_id) is generation

    def _commit(self, outcomes: Iterable[Outcome], outputs: list[RequestOutput]) -> None:
        now_ns = perf_counter_ns()
        for outcome in outcomes:
            request = outcome.chunk.request
            if outcome.error is not None:
                # Not committed: its KV may be as bad as its logits, so it must not get into the prefix cache.
                for failed in (*request.forks, request):
                    generation = self._generations[failed.request_id]
                    self._end(generation, generation.fail(outcome.error), outputs)
                continue
            output = self._advance(request, outcome.samples, outcome.prompt_logprobs, now_ns)
            self._scheduler.commit(outcome.chunk, 0 if output is None else len(output.token_ids))
            for fork, sample in outcome.forks:
                self._scheduler.start_fork(request, fork)
                self._report(fork, self._advance(fork, [sample], (), now_ns), outputs)
            if request.max_output_tokens == 0 and request.num_pending_tokens == 0:
                self._counters.prompt_tokens += len(request.prompt_ids)
                output = self._generations[request.request_id].complete(outcome.prompt_logprobs)
            self._report(request, output, outputs)

    def _advance(
        self,
        request: Request,
        samples: Sequence[Sample],
        prompt_logprobs: tuple[TokenLogprobs, ...],
        now_ns: int,
    ) -> RequestOutput | None:
        if samples and request.first_token_ns is None:
            request.first_token_ns = now_ns
            self._counters.prompt_tokens += 0 if request.is_fork else len(request.prompt_ids)
        generation = self._generations[request.request_id]
        began = perf_counter_ns()
        try:
            output = generation.advance(samples, prompt_logprobs)
        except Exception as error:
            logger.exception("request %s: its tokens have no text", request.request_id)
            output = generation.fail(f"a token cannot be decoded: {error!r}")
        self._clock.text_ns += perf_counter_ns() - began
        if output is not None:
            self._counters.generation_tokens += len(output.token_ids)
        return output

    def _report(self, request: Request, output: RequestOutput | None, outputs: list[RequestOutput]) -> None:
        if output is None:
            return
        if output.finish_reason is None:
            outputs.append(output)
        else:
            self._end(self._generations[request.request_id], output, outputs)

    def _end(self, generation: Generation, output: RequestOutput, outputs: list[RequestOutput]) -> None:
        self._pace.count_end()
        assert output.finish_reason is not None
        self._scheduler.remove(generation.request)
        self._forget(generation, output.finish_reason)
        outputs.append(output)

    def _forget(self, generation: Generation, reason: FinishReason) -> None:
        self.recorder.record_end(generation.request, reason)
        with self._mailbox:
            del self._generations[generation.request.request_id]

    def _taken_generations(self) -> list[Generation]:
        """All but those that still wait in the mailbox."""
        with self._mailbox:
            in_mailbox = {choice for request in self._arrived for choice in request.choices}
            return [generation for generation in self._generations.values() if generation.request not in in_mailbox]

    def _abort_all(self) -> list[RequestOutput]:
        with self._mailbox:
            outputs = [generation.abort() for generation in self._generations.values()]
            for generation in self._generations.values():
                self.recorder.record_end(generation.request, "abort")
            self._generations.clear()
            self._arrived.clear()
            self._aborted.clear()
            self._start_afresh()
        return outputs

    def _start_afresh(self) -> None:
        """Begin with an empty pool and no requests: after a bug nothing that was cached can be trusted."""
        kv = self._executor.kv_geometry
        self._pool = BlockPool(kv.num_blocks, kv.block_size, enable_prefix_caching=self.config.enable_prefix_caching)
        self._scheduler = Scheduler(self.config, self._pool, self._counters, self.cost)


def _deliver(sink: Sink, outputs: list[RequestOutput]) -> None:
    if not outputs:
        return
    try:
        sink(outputs)
    except Exception:
        logger.exception("the receiver of outputs failed; %d outputs are lost", len(outputs))
