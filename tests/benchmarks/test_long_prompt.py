"""The load of eight streams and a long prompt, against a server with a schedule."""

from pathlib import Path

import pytest

from benchmarks.command import BenchmarkError
from benchmarks.long_prompt import STREAMS, WITH_TARGET, chat_prompt, long_prompt_turns, measure, pauses
from benchmarks.model import SMOLLM2, Model
from benchmarks.peers_home import Peers
from benchmarks.results import OURS
from benchmarks.tables import unit
from paceline.bench.answer import Answer
from paceline.loading import open_model
from tests.bench.schedule_server import Schedule, ScheduleServer


def _prompt(tokens: int) -> str:
    return "word " * tokens


def test_pauses_are_those_that_reach_into_the_time_in_question() -> None:
    answer = Answer(events=[(ns * 1_000_000, 1) for ns in (0, 10, 30, 90, 100, 110)])
    assert pauses(answer, 20_000_000, 95_000_000) == [20, 60, 10]


def test_the_long_prompt_meets_streams_that_are_under_way_and_are_cut_off_after_it() -> None:
    with ScheduleServer(Schedule(itl_s=0.002)) as server:
        p50, p99, longest, ttft = measure(server.url, _prompt)
    assert 0 <= p50 <= p99 <= longest > 0  # events that come in one read are 0 ms apart
    assert ttft > 0
    warm_up, *streams, late = server.generations
    lengths = [len(each.body["messages"][0]["content"].split()) for each in server.generations]
    assert lengths == [3300, *[128] * STREAMS, 3300]
    assert warm_up.finish_ns
    assert late.finish_ns
    for stream in streams:
        assert sum(ns < late.read_ns for ns in stream.content_ns) >= 30
        assert not stream.finish_ns
    assert all(each.body["ignore_eos"] and each.body["temperature"] == 0 for each in server.generations)


def test_streams_that_end_too_early_measure_nothing() -> None:
    with (
        ScheduleServer(Schedule(fault="close", faulty=(3,))) as server,
        pytest.raises(BenchmarkError, match="a stream ended before the long prompt was answered, after 2 events"),
    ):
        measure(server.url, _prompt)


def test_a_refusal_is_told() -> None:
    with (
        ScheduleServer(Schedule(fault="http_error")) as server,
        pytest.raises(BenchmarkError, match="answered 503: no room"),
    ):
        measure(server.url, _prompt)


def test_prompts_have_the_length_that_was_asked_for_and_begin_differently(smollm2_path: Path) -> None:
    prompt = chat_prompt(Model("m", str(smollm2_path), (1,)))
    opened = open_model(str(smollm2_path))
    assert opened.chat_template is not None
    texts = [prompt(tokens) for tokens in (128, 128, 3300)]
    lengths = [len(opened.chat_template.encode([{"role": "user", "content": text}])) for text in texts]
    assert lengths == [128, 128, 3300]
    assert len({text[:30] for text in texts}) == 3


def test_ours_runs_with_and_without_a_target() -> None:
    turns = long_prompt_turns(SMOLLM2, Peers(2))
    assert [turn.engine for turn in turns][:2] == [OURS, WITH_TARGET]
    assert [unit(metric) for metric in turns[0].metrics] == ["ms", "ms", "ms", "s"]
