"""What Python takes of a decode step, next to the kernels: one line of JSON, in microseconds, medians over steps.

    .venv/bin/python benchmarks/step_overhead.py MODEL [--threads N]

By the number of requests at once: ``native_us``, a step inside ``Executor.execute``, and ``python_us``, from the end of
one execution to the beginning of the next. The same under ``http``, where each request is a stream, so that what the
event loop holds up counts; there also ``loop_us``, processor time of the event loop's thread for each token it sends.

    .venv/bin/python benchmarks/step_overhead.py MODEL --recorder

What the flight recorder takes of ``python_us`` instead: the difference between steps with it and without it, in turn.
"""

import argparse
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from statistics import median
from time import clock_gettime_ns, perf_counter_ns, pthread_getcpuclockid
from typing import Any

from paceline.engine.engine import Engine
from paceline.engine.sampling import SamplingParams
from paceline.executors.base import Batch, StepResult
from paceline.executors.native import NativeExecutor
from paceline.loading import LoadedModel, load_model
from paceline.machine import usable_cores
from paceline.options import EngineOptions
from paceline.server.address import bind
from paceline.server.app import create_app
from paceline.server.listen import HttpServer

BATCHES = (1, 8, 32)
_PROMPT = list(range(1000, 1032))
_NEW_TOKENS = 128
_RECORDER_ROUNDS = 5

_CLIENTS = """
import asyncio, sys
port, count, body = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
head = f"POST /v1/completions HTTP/1.1\\r\\nHost: localhost\\r\\nContent-Length: {len(body)}\\r\\n\\r\\n"
async def stream():
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write((head + body).encode())
    await reader.readuntil(b"[DONE]")
    writer.close()
async def main():
    await asyncio.gather(*(stream() for _ in range(count)))
asyncio.run(main())
"""
"""A process of its own: its interpreter must not hold up the server's."""


class _Timed:
    """An executor that notes when each execution begins and ends."""

    def __init__(self, executor: NativeExecutor) -> None:
        self._executor = executor
        self.decodes: list[tuple[int, int, int]] = []
        """(requests, begin, end), ns, of steps without prompts."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._executor, name)

    def execute(self, batch: Batch) -> StepResult:
        begin = perf_counter_ns()
        result = self._executor.execute(batch)
        if batch.num_tokens == batch.num_rows:
            self.decodes.append((batch.num_rows, begin, perf_counter_ns()))
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="path of a GGUF file, or a name of the catalog")
    parser.add_argument("--threads", type=int, default=usable_cores())
    parser.add_argument("--recorder", action="store_true", help="measure the flight recorder")
    options = parser.parse_args()
    loaded = load_model(options.model, options=EngineOptions(threads=options.threads, kv_memory=1 << 30))
    assert isinstance(loaded.executor, NativeExecutor)
    timed = _Timed(loaded.executor)
    model = replace(loaded, executor=timed, engine=Engine(timed, loaded.tokenizer, loaded.engine.config))
    measure = _recorder if options.recorder else _offline
    figures: dict[str, Any] = {str(batch): measure(model.engine, timed, batch) for batch in BATCHES}
    if not options.recorder:
        with _server(model) as (port, loop_thread):
            figures["http"] = {str(batch): _http(timed, port, loop_thread, batch) for batch in BATCHES}
    loaded.executor.close()
    print(json.dumps(figures))


def _offline(engine: Engine, timed: _Timed, batch: int) -> dict[str, float]:
    timed.decodes.clear()
    params = SamplingParams(max_tokens=_NEW_TOKENS, temperature=0.0, ignore_eos=True)
    for _ in range(batch):
        engine.submit(_PROMPT, params)
    while engine.has_work:
        engine.step()
    return _medians(timed, batch)


class _NoRecorder:
    def record_step(self, *_: object, **__: object) -> None: ...

    def record_end(self, *_: object) -> None: ...


def _recorder(engine: Engine, timed: _Timed, batch: int) -> dict[str, float]:
    """With the recorder and without it in turn, step by step, so that both see the same machine."""
    recorder = engine.recorder
    gaps: tuple[list[int], list[int]] = ([], [])
    steps: list[int] = []
    for round_ in range(_RECORDER_ROUNDS):
        timed.decodes.clear()
        owners: list[int] = []
        params = SamplingParams(max_tokens=_NEW_TOKENS, temperature=0.0, ignore_eos=True)
        for _ in range(batch):
            engine.submit(_PROMPT, params)
        while engine.has_work:
            owner = (round_ + len(owners)) % 2
            engine.recorder = _NoRecorder() if owner else recorder  # type: ignore[assignment]
            engine.step()
            owners += [owner] * (len(timed.decodes) - len(owners))
        for owner, ((rows, begin, end), (next_rows, next_begin, _)) in zip(
            owners, pairwise(timed.decodes), strict=False
        ):
            if rows == next_rows == batch:
                gaps[owner].append(next_begin - end)
                steps.append(next_begin - begin)
    engine.recorder = recorder
    recorder_us, step_us = (median(gaps[0]) - median(gaps[1])) / 1000, median(steps) / 1000
    return {
        "recorder_us": round(recorder_us, 1),
        "step_us": round(step_us, 1),
        "percent": round(100 * recorder_us / step_us, 2),
    }


def _http(timed: _Timed, port: int, loop_thread: int, batch: int) -> dict[str, float]:
    body = {"prompt": _PROMPT, "max_tokens": _NEW_TOKENS, "temperature": 0, "ignore_eos": True, "stream": True}
    timed.decodes.clear()
    began = _thread_ns(loop_thread)
    subprocess.run([sys.executable, "-c", _CLIENTS, str(port), str(batch), json.dumps(body)], check=True)
    loop_us = (_thread_ns(loop_thread) - began) / 1000 / (batch * _NEW_TOKENS)
    return _medians(timed, batch) | {"loop_us": round(loop_us, 1)}


def _medians(timed: _Timed, batch: int) -> dict[str, float]:
    full = [(begin, end) for rows, begin, end in timed.decodes if rows == batch]
    gaps = [begin - end for (_, end), (begin, _) in pairwise(full)]
    return {
        "python_us": round(median(gaps) / 1000, 1),
        "native_us": round(median(end - begin for begin, end in full) / 1000, 1),
    }


@contextmanager
def _server(model: LoadedModel) -> Iterator[tuple[int, int]]:
    """Its port, and the id of its event loop's thread."""
    ready = threading.Event()
    server = HttpServer(create_app(model, served_names=[model.name]), on_ready=ready.set)
    with bind("127.0.0.1", 0) as listener:
        thread = threading.Thread(target=server.run_on, args=(listener,))
        thread.start()
        ready.wait()
        assert thread.ident is not None
        yield listener.getsockname()[1], thread.ident
        server.should_exit = True
        thread.join()


def _thread_ns(ident: int) -> int:
    return clock_gettime_ns(pthread_getcpuclockid(ident))


if __name__ == "__main__":
    main()
