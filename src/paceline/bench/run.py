"""A load run from plan to summary: ask the server, make the work, measure each cell, write it down, read it back."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from itertools import count, islice
from pathlib import Path
from time import perf_counter_ns
from typing import Any, Literal
from urllib.parse import urlsplit

import msgspec

from paceline.bench.api import Dialect
from paceline.bench.client import Endpoint, encode_post
from paceline.bench.environment import describe_environment
from paceline.bench.load import PreparedRequest, run_closed_loop
from paceline.bench.metrics import server_is_gone
from paceline.bench.plan import LoadPlan
from paceline.bench.probe import Probe, Server, choose_model
from paceline.bench.record import CellPlan, RequestRecord, RunDirectory, RunInfo, record_exchange
from paceline.bench.reference_tokenizer import load_token_counter
from paceline.bench.report.progress import RunProgress
from paceline.bench.report.summary import Summary, summarize, write_summary
from paceline.bench.sampler import sampling
from paceline.bench.workload import CalibratedPrompts, ExactPrompts, Prompts, PromptSource

KIND = "bench-load"
Ending = Literal["complete", "interrupted", "server_gone"]
_PROBE_WORDS = 8


@dataclass(frozen=True, slots=True)
class LoadResult:
    """A run that ended, whole or before its last cell."""

    directory: RunDirectory
    info: RunInfo
    summary: Summary
    ending: Ending


def run_load(plan: LoadPlan, *, api_key: str | None, output: Path | None, progress: RunProgress) -> LoadResult:
    """Measures a server as planned. `output` None: ``runs/<UTC time>-bench-load``.

    The key is sent and never written. Raises TargetUnreachableError, InputError or ModelFileError before anything is
    measured; what the server does afterwards is in the records.
    """
    directory = RunDirectory.for_new_run(output, KIND)
    endpoint = Endpoint.from_url(plan.url)
    if urlsplit(plan.url).path.rstrip("/") != endpoint.base_path:
        progress.say(f"{plan.url}: measuring the server at {endpoint.url}; what follows /v1 is chosen with --api")
    count_tokens = None if plan.tokenizer == "server" else load_token_counter(plan.tokenizer)
    source = PromptSource(plan.seed)
    with Probe(endpoint, api_key, plan.timeout_s) as probe:
        server = probe.identify()
        model = choose_model(server, plan.model, endpoint.url)
        context = server.contexts.get(model)
        if context is not None:
            plan.check_context(context)
        first_prompt = " ".join(islice(source.new_text(), _PROBE_WORDS))
        dialect = probe.find_dialect(plan.api, model, plan.mode, plan.temperature, first_prompt)
        plan = replace(plan, model=dialect.model, api=dialect.api)
        progress.say(_describe(endpoint, server, dialect))
        prompts = _make_prompts(plan, probe, dialect, source, count_tokens, context, progress)
    work = _Work(endpoint, dialect, prompts, api_key)
    info = _describe_run(plan, server, dialect, prompts)
    directory.create(info)
    ending: Ending = "complete"
    with sampling(endpoint.host, endpoint.port, directory.samples_csv):
        for cell in info.cells:
            ending = _measure_cell(cell, plan, work, directory, count_tokens, progress)
            if ending != "complete":
                break
    summary = summarize(directory.path)
    write_summary(directory, summary)
    return LoadResult(directory, info, summary, ending)


def _make_prompts(
    plan: LoadPlan,
    probe: Probe,
    dialect: Dialect,
    source: PromptSource,
    count_tokens: Callable[[str], int] | None,
    context: int | None,
    progress: RunProgress,
) -> Prompts:
    """Asks the server all that has to be asked about prompts, before the first cell is measured."""

    def count_on_server(text: str, about: int) -> int | None:
        progress.say(f"finding prompts: the server counts one of about {about} tokens")
        return probe.count_prompt_tokens(dialect, text, about)

    if count_tokens is None:
        calibrated = CalibratedPrompts(source, count_on_server)
        for tokens in plan.input_tokens:
            calibrated.make(tokens)
        return calibrated
    exact = ExactPrompts(source, count_tokens, plan.tokenizer)
    exact.compare_with_server(count_on_server, chat=dialect.api == "openai-chat")
    if context is not None:
        plan.check_context(context, exact.added_tokens)
    return exact


@dataclass(slots=True)
class _Work:
    """Turns lengths into requests whose bytes are ready."""

    endpoint: Endpoint
    dialect: Dialect
    prompts: Prompts
    api_key: str | None
    _ids: Iterator[int] = field(default_factory=count)

    def prepare(self, number: int, params: dict[str, Any]) -> list[PreparedRequest]:
        return [self._request(params["input_tokens"], params["output_tokens"]) for _ in range(number)]

    def _request(self, input_tokens: int, output_tokens: int) -> PreparedRequest:
        body = self.dialect.body(self.prompts.make(input_tokens), output_tokens)
        return PreparedRequest(next(self._ids), encode_post(self.endpoint, self.dialect.path, body, self.api_key))


def _measure_cell(
    cell: CellPlan,
    plan: LoadPlan,
    work: _Work,
    directory: RunDirectory,
    count_tokens: Callable[[str], int] | None,
    progress: RunProgress,
) -> Ending:
    """Measures one cell and appends its records; anything but "complete" means that there is no point in the next."""
    params = cell.params
    progress.start_cell(
        f"concurrency {params['concurrency']}, {params['input_tokens']} in, {params['output_tokens']} out"
    )
    outcome = run_closed_loop(
        work.endpoint,
        warmup=work.prepare(params["warmup"], params),
        measured=work.prepare(params["requests"], params),
        concurrency=params["concurrency"],
        timeout_s=plan.timeout_s,
        on_progress=progress.update,
    )
    records: list[RequestRecord] = [
        record_exchange(exchange, cell=cell.id, mode=plan.mode, count_tokens=count_tokens, secret=work.api_key)
        for exchange in outcome.exchanges
    ]
    directory.append(records)
    if outcome.interrupted:
        return "interrupted"
    return "server_gone" if server_is_gone(records) else "complete"


def _describe(endpoint: Endpoint, server: Server, dialect: Dialect) -> str:
    version = f" {server.version}" if server.version else ""
    forced = "output lengths forced with ignore_eos" if dialect.ignore_eos else "output lengths not forced"
    return f"{endpoint.url}: {server.kind}{version}, model {dialect.model}, {dialect.api}, {dialect.mode}, {forced}"


def _describe_run(plan: LoadPlan, server: Server, dialect: Dialect, prompts: Prompts) -> RunInfo:
    environment = describe_environment()
    environment["server"] = {"url": plan.url, "kind": server.kind, "version": server.version, "models": server.models}
    return RunInfo(
        kind=KIND,
        started=datetime.now(UTC).isoformat(timespec="milliseconds"),
        started_ns=perf_counter_ns(),
        argv=plan.command(),
        environment=environment,
        plan=msgspec.to_builtins(plan)
        | {
            "ignore_eos": dialect.ignore_eos,
            "stream_usage": dialect.stream_usage,
            "input_lengths": prompts.description,
        },
        cells=plan.cells(),
    )
