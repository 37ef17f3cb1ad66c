"""The results as Markdown tables."""

from collections.abc import Iterable, Sequence

from benchmarks.results import OURS, Results
from benchmarks.targets import COMPARED, TARGETS, Judged, Outcome, Target, outcome

_KINDS = {
    "decode": "tok/s",
    "prefill": "tok/s",
    "http": "tok/s",
    "bandwidth": "GB/s",
    "step-bytes": "MB",
    "multiply-add-speed": "G/s",
    "linear-multiply-adds": "M per token",
    "attention-multiply-adds": "M per token",
    "itl-p50": "ms",
    "itl-p99": "ms",
    "itl-max": "ms",
    "ttft": "s",
    "startup": "s",
    "memory": "MB",
    "busy-share": "of idle",
    "busy-idle-speed": "tok/s",
    "busy-speed": "tok/s",
    "python": "ms",
    "python-http": "ms",
}
"""Units of the metrics, by the word of their name."""

_UNITS = {
    Judged.RATIO: "×",
    Judged.PART: "×",
    Judged.SECONDS: " s",
    Judged.MEGABYTES: " MB",
    Judged.MILLISECONDS: " ms",
}


def target_tables(results: Results) -> str:
    """One table for each model of which anything was measured or failed."""
    sections = []
    for title, targets in TARGETS.items():
        outcomes = [outcome(target, results) for target in targets]
        tried = [each for each in outcomes if each.ours is not None or each.missing]
        if tried:
            head = ("", "Paceline", "peer", "", "target", "stretch", "")
            sections.append(f"### {title}\n\n{_table(head, map(_target_row, tried), left=(0, 2, 6))}")
    return "\n\n".join(sections)


def value_tables(results: Results) -> str:
    """Every metric's median (lowest–highest) of each engine, one table for the metrics that have the same engines."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for metric, engines in results.values.items():
        groups.setdefault(tuple(sorted(engines, key=lambda name: (not name.startswith(OURS), name))), []).append(metric)
    sections = []
    for names, metrics in groups.items():
        rows = ([f"{metric}, {unit(metric)}", *(_spread(results, metric, e) for e in names)] for metric in metrics)
        sections.append(_table(("", *names), rows, left=(0,)))
    return "\n\n".join(sections)


def summary_table(results: Results) -> str:
    """Medians in tok/s of the default model, of the better of the peer's two files."""
    peers = {
        "llama.cpp": ("llama.cpp", "llama.cpp Q4_0", "llama-server Q4_0"),
        "OpenVINO GenAI": ("OpenVINO",),
        "vLLM": ("vLLM",),
    }
    rows = []
    for metric, label in _SUMMARY.items():
        ours = results.median(metric, OURS)
        if ours is not None:
            best = (results.best(metric, engines) for engines in peers.values())
            rows.append([label, _number(ours), *(_number(each[1]) if each else "" for each in best)])
    return _table(("tokens/s", "Paceline", *peers), rows, left=(0,))


_SUMMARY = {
    "smollm2 decode 1": "decode, 1 request",
    "smollm2 decode 8": "decode, 8 requests",
    "smollm2 decode 32": "decode, 32 requests",
    "smollm2 prefill": "prefill, 512 tokens",
    "smollm2 http 1": "through HTTP, 1 at a time",
    "smollm2 http 8": "through HTTP, 8 at a time",
    "smollm2 http 32": "through HTTP, 32 at a time",
}


def unit(metric: str) -> str:
    return next(_KINDS[word] for word in metric.split() if word in _KINDS)


def _target_row(each: Outcome) -> list[str]:
    target = each.target
    peer = f"{each.peer[0]}: {_measured(target, each.peer[1])}" if each.peer else " / ".join(target.peers)
    figure = "" if each.figure is None or target.judged not in COMPARED else _judged(target, each.figure)
    ours = "" if each.ours is None else _measured(target, each.ours)
    stretch = "" if target.stretch is None else _judged(target, target.stretch)
    goal = f"{'≤' if target.at_most else '≥'} {_judged(target, target.goal)}"
    return [target.what, ours, peer, figure, goal, stretch, each.verdict.replace("|", "/").replace("\n", " ")]


def _measured(target: Target, value: float) -> str:
    """A median with its unit."""
    return f"{_number(value)} {unit(target.metric)}" if target.judged in COMPARED else _judged(target, value)


def _judged(target: Target, value: float) -> str:
    if target.judged in (Judged.SHARE, Judged.OWN_SHARE):
        return f"{value:.0%}"
    return f"{_number(value)}{_UNITS[target.judged]}"


def _number(value: float) -> str:
    """Three significant digits, and no exponent."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _spread(results: Results, metric: str, engine: str) -> str:
    values = results.values[metric][engine]
    middle = results.median(metric, engine)
    assert middle is not None
    if min(values) == max(values):
        return _number(middle)
    return f"{_number(middle)} ({_number(min(values))}–{_number(max(values))})"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]], left: Sequence[int]) -> str:
    rule = "|".join("---" if column in left else "--:" for column in range(len(head)))
    lines = [" | ".join(cells) for cells in (head, *rows)]
    return "\n".join([f"| {lines[0]} |", f"|{rule}|", *(f"| {line} |" for line in lines[1:])])
