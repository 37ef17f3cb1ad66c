"""Our engine against llama.cpp, OpenVINO GenAI and vLLM, in turn on one machine.

    .venv/bin/python -m benchmarks [--rounds 5] [--parts smollm2,http] [--engines paceline,vLLM]

Prints the table of targets as Markdown, and keeps every value in a JSON file. benchmarks/README.md explains the parts.
"""

import argparse
import signal
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.command import BenchmarkError, output
from benchmarks.parts import PARTS
from benchmarks.peers_home import Peers
from benchmarks.report import full_report, replace_section, summary
from benchmarks.results import Results, Run, load_results
from benchmarks.turn import Turn, take_turns
from paceline.bench.environment import describe_environment
from paceline.errors import InputError, PacelineError
from paceline.machine import usable_cores

HERE = Path(__file__).parent


def main(arguments: Sequence[str]) -> int:
    options = _options(arguments)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # what was started is ended, as after Ctrl-C
    try:
        results = _results(options)
        finished = _measure(options, results)
        if results.runs:
            print(full_report(results))
            print(f"\nvalues: {options.output}", file=sys.stderr)
        if not finished:
            print("interrupted: what was measured so far is kept, and nothing published", file=sys.stderr)
            return 130
        if not results.runs:
            raise InputError(f"{options.output} holds nothing that was measured: give --rounds")
        if options.publish:
            _publish(results)
    except PacelineError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _options(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rounds", type=int, default=5, help="turns of everything (default 5; 0 prints what --add has)"
    )
    parser.add_argument("--parts", default=",".join(PARTS), help="what to measure (default: %(default)s)")
    parser.add_argument("--engines", default="", help="only turns of these, such as paceline,vLLM (default: all)")
    parser.add_argument("--threads", type=int, default=usable_cores(), help="of each engine (default: one per core)")
    parser.add_argument("--output", type=Path, help="the JSON file (default: runs/<UTC time>-benchmarks.json)")
    parser.add_argument("--add", action="store_true", help="keep what the output has already, and add to it")
    parser.add_argument("--publish", action="store_true", help="write results.json and the sections of the READMEs")
    options = parser.parse_args(arguments)
    if options.add and options.output is None:
        parser.error("--add needs --output, the file to add to")
    return options


def _results(options: argparse.Namespace) -> Results:
    """What there is already, or nothing."""
    if options.output is None:
        options.output = Path("runs", f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}-benchmarks.json")
    options.output.parent.mkdir(parents=True, exist_ok=True)
    if not options.output.exists():
        return Results()
    if not options.add:
        raise InputError(f"{options.output} is there already: give --add to add to it, or another name")
    return load_results(options.output)


def _measure(options: argparse.Namespace, results: Results) -> bool:
    """False if it was interrupted."""
    peers = Peers(options.threads)
    turns = _selected(options, peers)
    if not options.rounds:
        return True
    try:
        turns = _installed(turns, peers, results)
        results.runs.append(
            Run(
                command=f"python -m benchmarks --rounds {options.rounds} --parts {options.parts}"
                + (f" --engines {options.engines}" if options.engines else ""),
                started=datetime.now(UTC).isoformat(sep=" ", timespec="seconds"),
                threads=options.threads,
                environment=describe_environment(),
                versions={"Paceline": _commit(), **peers.versions()},
            )
        )
        take_turns(turns, options.rounds, results, options.output)
    except KeyboardInterrupt:
        return False
    return True


def _commit() -> str:
    """Of this source; "-dirty" if files differ from it."""
    try:
        return output(["git", "-C", str(HERE), "describe", "--always", "--dirty"]).strip()
    except BenchmarkError:
        return "not in a git checkout"


def _selected(options: argparse.Namespace, peers: Peers) -> list[Turn]:
    """The turns that were asked for, in the order of the parts."""
    parts, engines = options.parts.split(","), [name for name in options.engines.split(",") if name]
    unknown = set(parts) - PARTS.keys()
    if unknown:
        raise InputError(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    turns = [turn for part in PARTS if part in parts for turn in PARTS[part](peers)]
    chosen = [turn for turn in turns if not engines or turn.engine in engines]
    if not chosen:
        there = ", ".join(dict.fromkeys(turn.engine for turn in turns))
        raise InputError(f"no turn of {options.engines} in these parts; there are {there}")
    return chosen


def _installed(turns: Sequence[Turn], peers: Peers, results: Results) -> list[Turn]:
    """The turns whose peers could be installed; the cells of the others say why not."""
    broken: dict[str, str] = {}
    for peer in dict.fromkeys(peer for turn in turns for peer in turn.peers):
        try:
            peers.install(peer)
        except BenchmarkError as error:
            broken[peer] = str(error)
    ready = []
    for turn in turns:
        reasons = [broken[peer] for peer in turn.peers if peer in broken]
        if reasons:
            results.fail(turn.engine, turn.metrics, reasons[0])
        else:
            ready.append(turn)
    return ready


def _publish(results: Results) -> None:
    results.save(HERE / "results.json")
    replace_section(HERE / "README.md", full_report(results))
    replace_section(HERE.parent / "README.md", summary(results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
