"""``paceline bench load``."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from paceline.bench.run import LoadResult


_REQUESTS_FAILED = 1
_INTERRUPTED = 130


def load(
    url: Annotated[str, typer.Argument(help="The server to measure.", envvar="PACELINE_URL")] = "http://localhost:8000",
    model: Annotated[str | None, typer.Option(help="Default: the only one that the server lists.")] = None,
    input_tokens: Annotated[str, typer.Option(help="Prompt lengths in tokens, such as 128 or 128,1024.")] = "128",
    output_tokens: Annotated[
        str, typer.Option(help="Output lengths, forced where the server takes ignore_eos.")
    ] = "64",
    concurrency: Annotated[
        str | None, typer.Option(help="Requests in flight at once, such as 1,8. Default: 1.")
    ] = None,
    parallel: Annotated[str | None, typer.Option(help="The same as --concurrency.")] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            help="Measured requests per cell, as many as slots or more. Default: 5 per slot, at least 8.", min=1
        ),
    ] = None,
    warmup: Annotated[
        int | None, typer.Option(help="Unmeasured requests before each cell. Default: one per slot.", min=0)
    ] = None,
    api: Annotated[
        Literal["auto", "openai-chat", "openai-completions"],
        typer.Option(help="auto: chat where the server has it, else completions."),
    ] = "auto",
    mode: Annotated[
        Literal["stream", "sync"], typer.Option(help="sync asks for whole answers; it has no TTFT, ITL and TPOT.")
    ] = "stream",
    tokenizer: Annotated[
        str,
        typer.Option(
            help="What prompt lengths are counted with: a GGUF or tokenizer.json file, a name from `paceline models`, "
            "or the server's own counts (its chat template included)."
        ),
    ] = "server",
    temperature: Annotated[float, typer.Option(help="0 is greedy.", min=0)] = 0.0,
    timeout: Annotated[float, typer.Option(help="Seconds until a request counts as failed.")] = 600.0,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Makes the same prompts again. Default: drawn, so that no prefix cache knows them yet.",
            min=0,
        ),
    ] = None,
    output: Annotated[
        Path | None, typer.Option(help="Directory for this run. Default: runs/<UTC time>-bench-load.")
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(help="Sent, never written to a file.", envvar=["PACELINE_API_KEY", "OPENAI_API_KEY"]),
    ] = None,
) -> None:
    """Measure a server: a fixed number of requests in flight, one table of what came back.

    Works against any OpenAI-compatible server: Paceline, vLLM, llama-server, ...
    Every combination of lengths and concurrency is a cell with its own table.
    Prompts are random words and no two begin alike, so that a prefix cache has
    nothing to reuse.

    Example: one request at a time, then eight, 256 tokens in and 64 out:

      paceline bench load --input-tokens 256 --output-tokens 64 --concurrency 1,8

    TTFT counts from the first byte sent to the first event with content.
    "steady" throughput is taken while all slots were busy.

    Exit codes: 0 done, 1 a measured request failed (the table and the files are
    written all the same), 2 bad input, 3 no server there, or it went away during
    the run, 130 interrupted.
    """
    import secrets

    from paceline.bench.plan import LoadPlan
    from paceline.bench.report.progress import open_progress
    from paceline.bench.run import run_load
    from paceline.errors import InputError

    slots = concurrency if parallel is None else parallel
    if concurrency is not None and parallel is not None:
        raise InputError("--concurrency and --parallel are the same option; give one of them")
    plan = LoadPlan(
        url=url,
        model=model,
        api=api,
        mode=mode,
        input_tokens=_numbers("--input-tokens", input_tokens),
        output_tokens=_numbers("--output-tokens", output_tokens),
        concurrency=_numbers("--concurrency", "1" if slots is None else slots),
        requests=requests,
        warmup=warmup,
        timeout_s=timeout,
        temperature=temperature,
        tokenizer=tokenizer,
        seed=secrets.randbelow(10**6) if seed is None else seed,
    )
    try:
        with open_progress() as progress:
            result = run_load(plan, api_key=api_key or None, output=output, progress=progress)
    except KeyboardInterrupt:
        typer.echo("interrupted; finished cells, if any, are kept", err=True)
        raise typer.Exit(_INTERRUPTED) from None
    raise typer.Exit(_report(result))


def _report(result: "LoadResult") -> int:
    """Prints the tables, the command and the paths; returns the exit code."""
    from paceline.bench.report.table import report
    from paceline.errors import TargetUnreachableError

    for line in report(result.directory, result.info, result.summary):
        typer.echo(line)
    counts = [cell.requests for cell in result.summary.cells]
    failed = sum(sum(each.failed.values()) for each in counts)
    if failed:
        first_error = next(each.first_error for each in counts if each.first_error)
        total = sum(each.started for each in counts)
        typer.echo(f"error: {failed} of {total} requests failed; the first: {first_error}", err=True)
    if result.ending == "interrupted":
        typer.echo("interrupted; what was measured until then is kept", err=True)
        return _INTERRUPTED
    if result.ending == "server_gone":
        typer.echo(f"error: nobody answers at {result.info.plan['url']} any more; the run ends here", err=True)
        return TargetUnreachableError.exit_code
    return _REQUESTS_FAILED if failed else 0


def _numbers(option: str, text: str) -> tuple[int, ...]:
    from paceline.errors import InputError

    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"{option} is {text!r}; give whole numbers separated by commas, such as 1,8") from None
