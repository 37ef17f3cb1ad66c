"""The sections of the READMEs that are made from results."""

from collections.abc import Mapping
from pathlib import Path

from benchmarks.results import Results
from benchmarks.tables import summary_table, target_tables, value_tables
from paceline.errors import InputError

_OURS = "Paceline"
"""Our name among the versions."""
_BEGIN, _END = "<!-- made by python -m benchmarks: begin -->", "<!-- made by python -m benchmarks: end -->"


def full_report(results: Results) -> str:
    """Everything: what was aimed at, what was measured, where and how."""
    return "\n\n".join(
        [
            _origin(results),
            target_tables(results),
            "### All medians, with the lowest and highest value",
            value_tables(results),
        ]
    )


def summary(results: Results) -> str:
    """The default model in one table."""
    return f"{summary_table(results)}\n\n{_origin(results)}"


def replace_section(path: Path, text: str) -> None:
    """Put ``text`` between the two marks of a Markdown file.

    Raises:
        InputError: the marks are not there.
    """
    before, begin, rest = path.read_text().partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not (begin and end):
        raise InputError(f"{path} has no section to write into: it needs the lines {_BEGIN} and {_END}")
    path.write_text(f"{before}{begin}\n\n{text}\n\n{end}{after}")


def _commit(versions: Mapping[str, str]) -> str:
    """Of our own source, behind a command."""
    return f"  # at {versions[_OURS]}" if _OURS in versions else ""


def _origin(results: Results) -> str:
    last = results.runs[-1]
    machine = last.environment
    rounds = max((len(values) for each in results.values.values() for values in each.values()), default=0)
    sets = ", ".join(machine.get("instruction_sets", []))
    lines = [
        f"{machine['cpu']} ({sets}), {last.threads} threads each; {last.started[:10]}; "
        f"medians of {rounds} interleaved round{'' if rounds == 1 else 's'}. Made by",
        "",
        "```console",
        *dict.fromkeys(f"$ {run.command}{_commit(run.versions)}" for run in results.runs),
        "```",
    ]
    if last.versions:
        versions = "; ".join(f"{engine} ({version})" for engine, version in last.versions.items() if engine != _OURS)
        lines += ["", f"{versions}."]
    return "\n".join(lines)
