from pathlib import Path

import pytest

from benchmarks.results import OURS, Results, Run, load_results
from paceline.errors import InputError


def test_a_median_is_over_the_rounds_and_none_without_values() -> None:
    results = Results()
    for value in (3.0, 100.0, 1.0):
        results.add(OURS, {"m decode 1": value})
    assert results.median("m decode 1", OURS) == 3
    assert results.median("m decode 1", "OpenVINO") is None
    assert results.median("m decode 8", OURS) is None


def test_the_best_peer_is_the_one_with_the_highest_median() -> None:
    results = Results(values={"m decode 1": {"a": [1, 9, 1], "b": [2, 2, 2]}})
    assert results.best("m decode 1", ("a", "b", "never measured")) == ("b", 2)
    assert results.best("m decode 1", ("never measured",)) is None


def test_a_value_ends_the_failure_of_its_cell_alone() -> None:
    results = Results()
    results.fail("a", ("m decode 1", "m prefill"), "no such program")
    results.fail("b", ("m decode 1",), "crashed")
    results.add("a", {"m decode 1": 5})
    assert results.failures == {"m decode 1": {"b": "crashed"}, "m prefill": {"a": "no such program"}}


def test_results_come_back_from_their_file(tmp_path: Path) -> None:
    results = Results(runs=[Run("python -m benchmarks", "2026-12-01", 2, {"cpu": "X"}, {"vLLM": "0.1"})])
    results.add(OURS, {"m decode 1": 1.5})
    results.fail("b", ("m decode 1",), "crashed")
    results.save(tmp_path / "r.json")
    assert load_results(tmp_path / "r.json") == results
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]


@pytest.mark.parametrize("content", [None, "", "{", '{"values": 3}'])
def test_a_file_that_holds_no_results_is_an_error(tmp_path: Path, content: str | None) -> None:
    path = tmp_path / "r.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(InputError, match=r"r\.json holds no results"):
        load_results(path)
