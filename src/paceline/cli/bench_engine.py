"""``paceline bench engine``."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.engine_options import Device, KVDType, MaxNumBatchedTokens, ModelName, Quantize, Threads

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from paceline.bench.offline import EngineCell
    from paceline.loading import LoadedModel


def engine(
    model: ModelName = "smollm2-135m",
    device: Device = "cpu",
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens per prompt, random ones.")] = 512,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens generated per prompt.")] = 128,
    batch: Annotated[str, typer.Option(help="Prompts at once, such as 1,8,32; one line each.")] = "1,8,32",
    repeat: Annotated[int, typer.Option(min=1, help="Measured rounds, after one of warm-up.")] = 5,
    threads: Threads = None,
    max_num_batched_tokens: MaxNumBatchedTokens = 512,
    kv_dtype: KVDType = "f16",
    quantize: Quantize = None,
    kv_memory: Annotated[str | None, typer.Option(help="Memory for the KV cache, such as 2GiB.")] = None,
    seed: Annotated[int, typer.Option(help="Makes the same prompts again.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
    csv: Annotated[bool, typer.Option("--csv", help="Print CSV instead of the table.")] = False,
) -> None:
    """Measure the engine without HTTP: prefill and decode speed at several batch sizes.

    Prompts are random and never shared; every request generates all its tokens.
    Prefill tok/s is over the time until the last prompt of the batch has its
    first token, decode tok/s over the time in which all of them decode.

    Example:

      paceline bench engine qwen2.5-coder-1.5b --prompt-tokens 128 --batch 1,8
    """
    from paceline.bench.offline import Shape, check_fits, measure
    from paceline.cli.pull import pull_progress
    from paceline.cli.size import parse_size
    from paceline.errors import InputError
    from paceline.loading import load_model
    from paceline.options import EngineOptions

    if json and csv:
        raise InputError("--json and --csv exclude each other")
    shapes = [Shape(size, prompt_tokens, new_tokens) for size in _batch_sizes(batch)]
    most = max(shape.batch for shape in shapes)
    options = EngineOptions(
        device=device,
        max_num_seqs=most,
        max_num_batched_tokens=max(max_num_batched_tokens, most),
        kv_dtype=kv_dtype,
        quantize=quantize,
        kv_memory=None if kv_memory is None else parse_size(kv_memory),
        threads=threads,
        enable_prefix_caching=False,
    )
    with pull_progress() as progress:
        loaded = load_model(model, options=options, progress=progress)
    try:
        check_fits(loaded, shapes)
        cells = []
        with _round_progress(len(shapes) * (repeat + 1)) as show:
            for shape in shapes:
                cells.append(measure(loaded, shape, repeat, seed, lambda _round, shape=shape: show(shape.batch)))  # type: ignore[misc]
        print(_as_json(loaded, cells) if json else _as_csv(cells) if csv else _as_table(loaded, cells, repeat))
    finally:
        loaded.close()


def _batch_sizes(text: str) -> list[int]:
    from paceline.errors import InputError

    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1:
        raise InputError(f"--batch {text!r} is not a list of positive numbers such as 1,8,32")
    return sizes


@contextmanager
def _round_progress(total: int) -> "Iterator[Callable[[int], None]]":
    """A bar over all rounds where stderr is a terminal, else nothing: the table comes soon enough."""
    import sys

    if not sys.stderr.isatty():
        yield lambda _batch: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    # Drawn between rounds only: a refresh thread would take the interpreter from the engine.
    with Progress(*columns, console=Console(stderr=True), auto_refresh=False, transient=True) as bar:
        task = bar.add_task("warming up", total=total)

        def show(batch: int) -> None:
            bar.update(task, advance=1, description=f"batch {batch}")
            bar.refresh()

        yield show


def _as_table(loaded: "LoadedModel", cells: "Sequence[EngineCell]", repeat: int) -> str:
    """Markdown, to be pasted into an issue; still a table on a terminal."""
    header = ("batch", "prompt", "new", "prefill tok/s", "decode tok/s", "TTFT p50/p95/p99 ms", "total p50/p95/p99 ms")
    rows = [
        (
            str(cell.batch),
            str(cell.prompt_tokens),
            str(cell.new_tokens),
            _mean_std(cell, "prefill_tps"),
            _mean_std(cell, "decode_tps"),
            _percentiles(cell, "ttft"),
            _percentiles(cell, "total"),
        )
        for cell in cells
    ]
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    lines = [
        "| " + " | ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)) + " |" for row in rows
    ]
    head = "| " + " | ".join(text.rjust(width) for text, width in zip(header, widths, strict=True)) + " |"
    rule = "|" + "|".join("-" * (width + 1) + ":" for width in widths) + "|"
    facts = loaded.describe()
    title = f"{facts['model']}; {facts['device']}; {repeat} round{'' if repeat == 1 else 's'} after one of warm-up"
    return "\n".join([title, "", head, rule, *lines])


def _mean_std(cell: "EngineCell", name: str) -> str:
    metric = cell.metrics[name]
    if metric.mean is None:
        return "–"
    return f"{metric.mean:.0f}" if metric.std is None else f"{metric.mean:.0f} ± {metric.std:.0f}"


def _percentiles(cell: "EngineCell", name: str) -> str:
    metric = cell.metrics[name]
    return f"{metric.p50:.0f} / {metric.p95:.0f} / {metric.p99:.0f}"


def _as_json(loaded: "LoadedModel", cells: "Sequence[EngineCell]") -> str:
    import sys

    import msgspec

    from paceline.bench.environment import describe_environment

    result = {
        "schema": 1,
        "kind": "bench-engine",
        "argv": ["paceline", *sys.argv[1:]],
        "environment": describe_environment(),
        "model": loaded.describe(),
        "cells": cells,
    }
    return msgspec.json.format(msgspec.json.encode(result), indent=2).decode()


def _as_csv(cells: "Sequence[EngineCell]") -> str:
    """One row per batch size and metric."""
    import csv
    import io

    import msgspec

    out = io.StringIO()
    rows = [
        {
            "batch": cell.batch,
            "prompt_tokens": cell.prompt_tokens,
            "new_tokens": cell.new_tokens,
            "metric": name,
            **msgspec.to_builtins(metric),
        }
        for cell in cells
        for name, metric in cell.metrics.items()
    ]
    writer = csv.DictWriter(out, rows[0].keys(), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue().rstrip("\n")
