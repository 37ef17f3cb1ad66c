from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.command import BenchmarkError
from benchmarks.results import Results, Values, load_results
from benchmarks.turn import Turn, take_turns


def _script(*outcomes: float | Exception | type[BaseException]) -> Callable[[], Values]:
    """One outcome for each round."""
    left = iter(outcomes)

    def run() -> Values:
        outcome = next(left)
        if isinstance(outcome, float):
            return {"m decode 1": outcome}
        raise outcome

    return run


def test_all_take_turns_within_each_round(tmp_path: Path) -> None:
    order: list[str] = []

    def turn(engine: str) -> Turn:
        def run() -> Values:
            order.append(engine)
            return {"m decode 1": float(len(order))}

        return Turn(engine, ("m decode 1",), run)

    results = Results()
    take_turns([turn("a"), turn("b")], 2, results, tmp_path / "r.json")
    assert order == ["a", "b", "a", "b"]
    assert results.values == {"m decode 1": {"a": [1, 3], "b": [2, 4]}}


def test_a_failure_leaves_the_others_alone_and_is_tried_again_if_it_ever_worked(tmp_path: Path) -> None:
    results = Results()
    flaky = Turn("flaky", ("m decode 1",), _script(1.0, BenchmarkError("out of memory"), 3.0))
    steady = Turn("steady", ("m decode 1",), _script(5.0, 6.0, 7.0))
    take_turns([flaky, steady], 3, results, tmp_path / "r.json")
    assert results.values["m decode 1"] == {"flaky": [1, 3], "steady": [5, 6, 7]}
    assert results.failures["m decode 1"] == {}


def test_what_never_worked_is_not_tried_again_and_says_why(tmp_path: Path) -> None:
    results = Results()
    broken = Turn("broken", ("m decode 1", "m prefill"), _script(BenchmarkError("no such file")))
    take_turns([broken], 3, results, tmp_path / "r.json")
    assert results.failures == {
        "m decode 1": {"broken": "no such file"},
        "m prefill": {"broken": "no such file"},
    }


def test_figures_that_are_not_there_are_a_failure_too(tmp_path: Path) -> None:
    results = Results()
    turns = [Turn("odd", ("m decode 1",), _script(KeyError("speed_tg"))), Turn("b", ("m decode 1",), _script(1.0))]
    take_turns(turns, 1, results, tmp_path / "r.json")
    assert results.failures == {"m decode 1": {"odd": "KeyError('speed_tg')"}}
    assert results.values == {"m decode 1": {"b": [1]}}


def test_who_interrupts_keeps_what_was_measured(tmp_path: Path) -> None:
    turns = [Turn("a", ("m decode 1",), _script(1.0)), Turn("b", ("m decode 1",), _script(KeyboardInterrupt))]
    with pytest.raises(KeyboardInterrupt):
        take_turns(turns, 1, Results(), tmp_path / "r.json")
    assert load_results(tmp_path / "r.json").values == {"m decode 1": {"a": [1]}}
