"""``paceline inspect``: what a model is, and whether it fits this machine."""

from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import typer

from paceline.cli.engine_options import KVDType, MaxNumBatchedTokens, Quantize

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from paceline.loading import OpenModel
    from paceline.models.spec import ModelSpec
    from paceline.options import EngineOptions

_PROVEN = 0.05
"""How far measured and predicted memory may be apart."""

Rows = list[tuple[str, str]]


def inspect(
    model: Annotated[str, typer.Argument(help="Catalog name, path of a GGUF file, hf:… or ollama:….")] = "smollm2-135m",
    max_model_len: Annotated[
        int | None,
        typer.Option(min=2, help="Tokens per request to plan for. Default: 4096, or the model's own context."),
    ] = None,
    concurrency: Annotated[int, typer.Option(min=1, help="Requests at once to plan for.")] = 1,
    kv_dtype: KVDType = "f16",
    quantize: Quantize = None,
    max_num_batched_tokens: MaxNumBatchedTokens = 512,
    render: Annotated[bool, typer.Option("--render", help="Show a conversation as the template writes it.")] = False,
    prove: Annotated[bool, typer.Option("--prove", help="Load it, fill every context, compare the memory.")] = False,
) -> None:
    """Show what MODEL is, and how much memory it takes here.

    --prove loads the model, computes --concurrency requests of --max-model-len
    tokens and compares the memory this process took at its peak with the
    prediction; exit code 1 says that they are more than 5 % apart.

    Example:

      paceline inspect gemma3-270m --max-model-len 4096 --concurrency 8 --prove
    """
    from paceline.errors import InputError
    from paceline.options import EngineOptions

    opened = _open(model)
    own = opened.spec.context_length
    tokens = max_model_len or min(own, 4096)
    if tokens > own:
        raise InputError(f"--max-model-len is {tokens}, but {opened.name} was trained for {own} tokens")
    options = EngineOptions(
        max_model_len=tokens,
        max_num_seqs=concurrency,
        kv_dtype=kv_dtype,
        quantize=quantize,
        # No step is larger than all there is to compute.
        max_num_batched_tokens=max(min(max_num_batched_tokens, tokens * concurrency), concurrency),
    )
    _print_table(_description(opened) + _memory(opened, options, tokens, concurrency))
    if render:
        print(f"\n{_rendered(opened)}")
    if prove:
        del opened  # its tensors would keep the file in memory
        _prove(model, options, tokens, concurrency)


def _open(model: str) -> "OpenModel":
    from paceline.cli.pull import pull_progress
    from paceline.loading import open_model

    with pull_progress() as progress:
        return open_model(model, progress=progress)


def _description(opened: "OpenModel") -> Rows:
    from paceline.cli.pull import brought_with

    spec, vocabulary = opened.spec, opened.tokenizer.vocabulary
    tokens = {"bos": vocabulary.bos_id, "unk": vocabulary.unk_id, "pad": vocabulary.pad_id}
    special = [f"{name} {vocabulary.tokens[i]!r} ({i})" for name, i in tokens.items() if i is not None]
    ends = [f"{vocabulary.tokens[i]!r} ({i})" for i in sorted(opened.tokenizer.eos_ids)]
    return [
        ("model", f"{opened.name}, {opened.kind}"),
        ("file", str(opened.path)),
        ("architecture", f"{spec.architecture}, {_parameters(opened) / 1e6:.1f} M parameters"),
        ("layers", f"{spec.num_layers}, hidden size {spec.hidden_size}, feed-forward {spec.intermediate_size}"),
        ("attention", f"{spec.num_heads} heads of {spec.head_dim} dimensions, {spec.num_kv_heads} of keys and values"),
        *_windows(spec),
        *_quantization(opened),
        ("context", f"{spec.context_length} tokens"),
        *_rope(spec),
        ("vocabulary", f"{spec.vocab_size} tokens{', head shared with the embedding' if spec.tied_embeddings else ''}"),
        ("special tokens", ", ".join(special) or "none"),
        ("ends a turn", ", ".join(ends) or "nothing"),
        *(("set by its owner" if i == 0 else "", line) for i, line in enumerate(brought_with(opened.source))),
    ]


def _parameters(opened: "OpenModel") -> int:
    from math import prod

    return sum(prod(tensor.shape) for tensor in opened.weights.tensors.values())


def _windows(spec: "ModelSpec") -> Rows:
    windows = [layer.window for layer in spec.layers if layer.window]
    return [("", f"{len(windows)} of {spec.num_layers} layers see the last {windows[0]} tokens")] if windows else []


def _quantization(opened: "OpenModel") -> Rows:
    """One line per type: how many bytes are stored in it, and for what."""
    stored: dict[str, int] = {}
    parts: dict[str, dict[str, None]] = {}
    for name, tensor in opened.weights.tensors.items():
        kind = tensor.type.name
        stored[kind] = stored.get(kind, 0) + tensor.data.size
        parts.setdefault(kind, {})[name.split(".")[-2]] = None
    largest_first = sorted(stored, key=stored.__getitem__, reverse=True)
    return [
        ("quantization" if i == 0 else "", f"{kind}: {stored[kind] / 2**20:.1f} MiB ({', '.join(parts[kind])})")
        for i, kind in enumerate(largest_first)
    ]


def _rope(spec: "ModelSpec") -> Rows:
    ropes = list(dict.fromkeys(layer.rope for layer in spec.layers))
    rows = []
    for rope in ropes:
        count = sum(layer.rope == rope for layer in spec.layers)
        where = f" in {count} of {spec.num_layers} layers" if len(ropes) > 1 else ""
        if rope is None:
            rows.append(("RoPE", f"none{where}" + (", learned positions" if spec.learned_positions else "")))
            continue
        scaling = repr(rope.scaling) if rope.scaling else "Llama 3's scaling" if rope.frequency_divisors else "unscaled"
        rows.append(("RoPE", f"base {rope.theta:g}, {rope.dim} dimensions, {rope.pairing} pairs, {scaling}{where}"))
    return rows


def _memory(opened: "OpenModel", options: "EngineOptions", tokens: int, concurrency: int) -> Rows:
    from paceline.machine import free_memory

    needs, free = opened.footprint(options), free_memory()
    total = needs.without_kv + needs.kv(tokens, concurrency)
    fitting = needs.requests_that_fit(free, tokens)
    verdict = "fits" if fitting >= concurrency else "does not fit"
    return [
        ("memory, weights", f"{_mib(needs.weights)}, kept as {opened.weight_types(options.quantize)}"),
        (
            "memory, buffers",
            f"{_mib(needs.buffers + needs.threads)}, for steps of {options.max_num_batched_tokens} tokens",
        ),
        ("memory, KV", f"{_mib(needs.kv_block * 1000 // 32)} per 1000 tokens ({options.kv_dtype})"),
        ("memory, all", f"{_mib(total)} for {_requests(concurrency, tokens)}"),
        (verdict, f"{_requests(fitting, tokens)} in the {_mib(free)} that are free"),
    ]


def _requests(count: int, tokens: int) -> str:
    return f"{count} request{'' if count == 1 else 's'} of {tokens} tokens"


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB" if size < 2**30 else f"{size / 2**30:.2f} GiB"


def _rendered(opened: "OpenModel") -> str:
    from paceline.models.conversation import with_default_system

    if opened.chat_template is None:
        return f"nothing to render ({opened.kind})"
    messages = [
        {"role": "user", "content": "What is 2 + 2?"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "And times 3?"},
    ]
    return opened.chat_template.render(with_default_system(messages, opened.source.system))


def _prove(model: str, options: "EngineOptions", tokens: int, concurrency: int) -> None:
    from dataclasses import replace

    from paceline.bench.peak_memory import measure_peak, resident_memory
    from paceline.loading import run_model

    opened = _open(model)
    needs, before = opened.footprint(options), resident_memory()
    kv = needs.kv(tokens, concurrency)
    loaded = run_model(opened, replace(options, kv_memory=kv))
    del opened
    try:
        with _progress(tokens * concurrency) as show:
            peak = measure_peak(loaded, concurrency, show)
    finally:
        loaded.close()
    predicted = before + needs.without_kv + kv
    print()
    _print_table(
        [
            ("before loading", f"{_mib(before)}: Python, its libraries and the tokenizer"),
            ("predicted peak", f"{_mib(predicted)} with {_requests(concurrency, tokens)}"),
            ("measured peak", f"{_mib(peak)}, {peak / predicted - 1:+.1%}"),
        ]
    )
    if abs(peak / predicted - 1) > _PROVEN:
        raise typer.Exit(1)


@contextmanager
def _progress(total: int) -> "Iterator[Callable[[int], None]]":
    """A bar of tokens computed, on a terminal."""
    import sys

    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("filling the contexts", total=total)
        yield lambda done: bar.update(task, completed=done)


def _print_table(rows: Rows) -> None:
    width = max(len(label) for label, _ in rows)
    for label, text in rows:
        print(f"{label:<{width}}  {text}")
