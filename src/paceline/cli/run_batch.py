"""``paceline run-batch``: a file of requests, answered without a server."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.batch_progress import Tally, batch_progress, say
from paceline.cli.engine_options import (
    ChatTemplateFile,
    Device,
    KVDType,
    KVMemory,
    MaxModelLen,
    MaxNumBatchedTokens,
    MaxNumSeqs,
    ModelName,
    PrefixCaching,
    PromptLookup,
    Quantize,
    ServedModelName,
    SystemPrompt,
    TemplateDate,
    Threads,
)

if TYPE_CHECKING:
    from fastapi import FastAPI
    from httpx import Response

    from paceline.cli.batch_file import BatchRequest, ResultFile

_REQUESTS_FAILED = 1
_INTERRUPTED = 130


def run_batch(
    file: Annotated[Path, typer.Argument(help="Requests, one JSON object per line.", exists=True, dir_okay=False)],
    output: Annotated[Path, typer.Option(help="Results, one line each; results that it has are not run again.")],
    model: ModelName = "smollm2-135m",
    served_model_name: ServedModelName = None,
    system: SystemPrompt = None,
    chat_template: ChatTemplateFile = None,
    template_date: TemplateDate = None,
    device: Device = "cpu",
    max_model_len: MaxModelLen = None,
    max_num_seqs: MaxNumSeqs = 256,
    max_num_batched_tokens: MaxNumBatchedTokens = 512,
    kv_memory: KVMemory = None,
    kv_dtype: KVDType = "f16",
    quantize: Quantize = None,
    threads: Threads = None,
    prefix_caching: PrefixCaching = True,
    prompt_lookup: PromptLookup = 0,
) -> None:
    """Answer the requests of FILE, which is in the shape of OpenAI's batch files.

    A line of FILE is {"custom_id": "1", "method": "POST", "url":
    "/v1/chat/completions" or "/v1/completions", "body": {...}}, the body being
    what `paceline serve` would take, but for "stream". Results are written as
    they finish, so not in the order of FILE: custom_id says what belongs to what.

    Run the same command again after Ctrl-C or a crash: what --output has is kept,
    and only the rest is run. What failed in the server (status 5xx) and lines
    that were wrong are tried again; other failures (4xx) are kept.

    Example:

      paceline run-batch requests.jsonl --output results.jsonl smollm2-135m

    Exit codes: 0 all succeeded, 1 some failed (their results say why), 2 bad
    input, 130 interrupted.
    """
    from contextlib import closing

    from paceline.cli.batch_file import ResultFile, settled_results
    from paceline.cli.pull import pull_progress
    from paceline.cli.size import parse_context, parse_size
    from paceline.errors import InputError
    from paceline.loading import load_model
    from paceline.options import EngineOptions

    options = EngineOptions(
        device=device,
        max_model_len=parse_context(max_model_len),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        kv_memory=None if kv_memory is None else parse_size(kv_memory),
        kv_dtype=kv_dtype,
        quantize=quantize,
        threads=threads,
        chat_template=chat_template,
        template_date=None if template_date is None else template_date.date(),
        enable_prefix_caching=prefix_caching,
        prompt_lookup_tokens=prompt_lookup,
    )
    if not file.is_file():
        raise InputError(f"{file} is a pipe or a device; a batch is read twice, so it has to be a file")
    if output.exists() and output.samefile(file):
        raise InputError(f"--output is the file of requests itself, {file}; name another one")
    settled = settled_results(output)
    with ResultFile(output) as results:
        tally = _first_pass(file, settled, results)
        if tally.done < tally.total:
            with pull_progress() as progress:
                loaded = load_model(model, options=options, progress=progress)
            with closing(loaded):
                from paceline.server.app import create_app

                app = create_app(
                    loaded,
                    served_names=served_model_name or [loaded.name],
                    system_prompt=loaded.source.system if system is None else system,
                    default_sampling=loaded.source.sampling,
                )
                facts = loaded.describe()
                say(f"{facts['model']}; {facts['device']}")
                try:
                    # As many again as can run: one is always waiting for a place that becomes free.
                    _run(app, _unsettled(file, settled), 2 * max_num_seqs, results, tally)
                except KeyboardInterrupt:
                    say(f"interrupted: {tally.done} of {tally.total} are in {output}; the same command runs the rest")
                    raise typer.Exit(_INTERRUPTED) from None
    raise typer.Exit(_report(tally, output))


def _first_pass(file: Path, settled: dict[str, bool], results: "ResultFile") -> Tally:
    """Count the lines and answer the bad ones, before a model is loaded for nothing."""
    from paceline.cli.batch_file import BadLine, read_batch

    tally = Tally()
    bad = 0
    for line in read_batch(file):
        tally.total += 1
        if isinstance(line, BadLine):
            results.write_bad_line(line)
            tally.fail(line.message)
            bad += 1
        elif line.custom_id in settled:
            tally.skipped += 1
            tally.failed += not settled[line.custom_id]
    tally.done = tally.skipped + bad
    if tally.skipped:
        say(f"skipping {tally.skipped} of {tally.total} requests, which have their results already")
    if bad:
        say(f"{bad} of {tally.total} lines cannot be sent; the first: {tally.first_failure}")
    return tally


def _unsettled(file: Path, settled: dict[str, bool]) -> "Iterator[BatchRequest]":
    from paceline.cli.batch_file import BatchRequest, read_batch

    for line in read_batch(file):
        if isinstance(line, BatchRequest) and line.custom_id not in settled:
            yield line


def _run(
    app: "FastAPI", requests: "Iterator[BatchRequest]", in_flight: int, results: "ResultFile", tally: Tally
) -> None:
    """Post the requests to the app, ``in_flight`` at a time, and write each answer when it comes.

    Raises:
        InputError: a result cannot be written.
    """
    import asyncio

    import httpx

    async def run_all(show: Callable[[Tally], None]) -> None:
        client = httpx.AsyncClient(
            transport=httpx.ASGITransport(app),
            base_url="http://paceline",
            headers={"content-type": "application/json"},
            timeout=None,
        )

        async def take_turns() -> None:
            for request in requests:  # shared by all: each takes the next one
                _finish(request, await client.post(request.url, content=request.body), results, tally)
                show(tally)

        async with app.router.lifespan_context(app), client, asyncio.TaskGroup() as tasks:
            for _ in range(min(in_flight, tally.total - tally.done)):
                tasks.create_task(take_turns())

    with batch_progress() as show:
        tally.began = monotonic()
        show(tally)
        try:
            asyncio.run(run_all(show))
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        tally.ended = monotonic()
        show(tally)


def _finish(request: "BatchRequest", response: "Response", results: "ResultFile", tally: Tally) -> None:
    answer = response.json()
    results.write_response(
        request.custom_id,
        status=response.status_code,
        request_id=response.headers["x-request-id"],
        body=response.content,
    )
    tally.done += 1
    if response.is_success:
        tally.prompt_tokens += answer["usage"]["prompt_tokens"]
        tally.output_tokens += answer["usage"]["completion_tokens"]
    else:
        tally.fail(f"line {request.line}: {response.status_code}, {answer['error']['message']}")


def _report(tally: Tally, output: Path) -> int:
    """Prints how it went; returns the exit code."""
    skipped = f" ({tally.skipped} skipped)" if tally.skipped else ""
    print(
        f"{tally.total} requests{skipped}, {tally.failed} failed, {tally.prompt_tokens} prompt + "
        f"{tally.output_tokens} output tokens in {tally.seconds:.1f} s, {tally.tokens_per_second:.1f} output tok/s"
    )
    if not tally.failed:
        return 0
    first = "" if tally.first_failure is None else f"; the first of this run: {tally.first_failure}"
    print(f"error: {tally.failed} of {tally.total} requests failed; {output} says why{first}", file=sys.stderr)
    return _REQUESTS_FAILED
