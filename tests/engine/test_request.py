import math

import pytest

from paceline.engine.sampling import SamplingParams
from paceline.errors import InputError
from tests.engine.drive import make_request


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("max_tokens", True),
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", 10**400),
        ("temperature", "hot"),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_k", -2),
        ("top_k", 2**31),
        ("min_p", -0.1),
        ("min_p", 1.1),
        ("seed", 1.0),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 101),
        ("presence_penalty", 2.5),
        ("frequency_penalty", -2.5),
        ("logit_bias", {5: 101.0}),
        ("logit_bias", {5: -math.inf}),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {"5": 1.0}),
        ("logprobs", 21),
        ("logprobs", -1),
        ("stop", [str(i) for i in range(17)]),
        ("stop", ["a", ""]),
        ("stop", [5]),
        ("stop_token_ids", [-1]),
    ],
)
def test_a_value_out_of_range_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(InputError, match=field) as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert caught.value.param == field


def test_the_message_has_the_value_and_the_limit() -> None:
    with pytest.raises(InputError, match=r"temperature must be a finite number of at least 0, got -0\.5"):
        SamplingParams(temperature=-0.5)
    with pytest.raises(InputError, match="stop has 17 strings, at most 16"):
        SamplingParams(stop=["x"] * 17)


def test_edges_are_taken() -> None:
    SamplingParams(
        max_tokens=None, temperature=0, top_p=1, top_k=-1, min_p=1, seed=-(2**70), logprobs=20, repetition_penalty=0.01,
        presence_penalty=-2, frequency_penalty=2, logit_bias={0: -100, 1: 100}, stop=["x"] * 16,
    )  # fmt: skip


def test_params_keep_nothing_of_the_callers_containers() -> None:
    stop, bias = ["a"], {1: 2.0}
    params = SamplingParams(stop=stop, logit_bias=bias)
    stop.append("b")
    bias[2] = 1.0
    assert params.stop == ("a",)
    assert params.logit_bias == {1: 2.0}


def test_a_lone_stop_string_is_one_string() -> None:
    assert SamplingParams(stop="ab").stop == ("ab",)


def test_tokens_span_prompt_and_output() -> None:
    request = make_request([1, 2, 3])
    for token_id in (4, 5, 6):
        request.append_output(token_id)
    for start in range(6):
        for end in range(start, 7):
            assert request.tokens(start, end) == [1, 2, 3, 4, 5, 6][start:end]
    assert request.num_tokens == 6


def test_history_counts_what_was_generated() -> None:
    request = make_request([7, 8, 7], params=SamplingParams(presence_penalty=1.0))
    for token_id in (8, 9, 9):
        request.append_output(token_id)
    assert request.history is not None
    assert dict(zip(request.history.ids, request.history.output_count, strict=True)) == {7: 0, 8: 1, 9: 2}


def test_no_history_without_penalties() -> None:
    assert make_request([1]).history is None
