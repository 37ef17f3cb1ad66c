import pytest

from benchmarks.results import OURS, Results
from benchmarks.tables import unit
from benchmarks.targets import TARGETS, Judged, Target, outcome


def _target(judged: Judged = Judged.RATIO, goal: float = 2.0, stretch: float | None = 3.0) -> Target:
    return Target("decode", "m decode 1", ("a", "b"), goal, stretch, judged)


@pytest.mark.parametrize(
    ("ours", "verdict"), [(29, "stretch met"), (20, "met"), (19.9, "missed"), (30.1, "stretch met")]
)
def test_a_ratio_is_to_the_best_peer(ours: float, verdict: str) -> None:
    results = Results(values={"m decode 1": {OURS: [ours], "a": [5.0], "b": [10.0]}})
    each = outcome(_target(stretch=2.9), results)
    assert each.figure == pytest.approx(ours / 10)
    assert each.peer == ("b", 10)
    assert each.verdict == verdict


@pytest.mark.parametrize(("ours", "verdict"), [(0.6, "stretch met"), (1.2, "met"), (1.21, "missed")])
def test_seconds_are_our_own_and_at_most(ours: float, verdict: str) -> None:
    results = Results(values={"m decode 1": {OURS: [ours], "a": [0.4]}})
    assert outcome(_target(Judged.SECONDS, 1.2, 0.6), results).verdict == verdict


def test_a_share_of_our_own_is_not_divided_by_the_peers() -> None:
    results = Results(values={"m decode 1": {OURS: [0.45], "a": [0.1]}})
    each = outcome(_target(Judged.OWN_SHARE, 0.4, None), results)
    assert (each.figure, each.verdict) == (0.45, "met")


@pytest.mark.parametrize(("ours", "verdict"), [(5.0, "met"), (5.1, "missed")])
def test_a_part_of_the_best_peers_is_at_most(ours: float, verdict: str) -> None:
    target = Target("ttft", "m ttft", ("a", "b"), 0.5, judged=Judged.PART, engine="ours, tuned")
    results = Results(values={"m ttft": {OURS: [100.0], "ours, tuned": [ours], "a": [10.0], "b": [20.0]}})
    each = outcome(target, results)
    assert each.peer == ("a", 10)
    assert (each.figure, each.verdict) == (pytest.approx(ours / 10), verdict)


def test_without_our_value_or_any_peers_there_is_no_verdict_but_the_reasons() -> None:
    results = Results(values={"m decode 1": {OURS: [1]}})
    results.fail("a", ("m decode 1",), "no compiler")
    results.fail("not of this target", ("m decode 1",), "crashed")
    assert outcome(_target(), results).verdict == "not measured: a: no compiler"
    assert outcome(_target(), Results()).verdict == "not measured"


def test_one_peer_is_enough() -> None:
    results = Results(values={"m decode 1": {OURS: [4], "b": [2]}})
    results.fail("a", ("m decode 1",), "no compiler")
    assert outcome(_target(), results).verdict == "met"


def test_every_target_is_of_a_metric_with_a_unit() -> None:
    for target in (target for targets in TARGETS.values() for target in targets):
        assert unit(target.metric)
