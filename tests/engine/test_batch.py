import math

import numpy as np
import pytest

from paceline.engine.bans import Bans
from paceline.engine.batch import BatchBuilder, Sample, read_result
from paceline.engine.chunk import Chunk
from paceline.engine.request import Request
from paceline.engine.sampling import SamplingParams
from paceline.errors import ExecutorError
from paceline.executors.base import RowStatus, StepResult
from tests.engine.drive import make_request


def chunk(request: Request, num_tokens: int) -> Chunk:
    return Chunk(request, num_tokens, samples=num_tokens == request.num_pending_tokens)


def held(request: Request, blocks: list[int], computed: int = 0) -> Request:
    request.block_table.extend(blocks)
    request.num_computed_tokens = computed
    return request


def test_tokens_positions_and_tables() -> None:
    decoding = held(make_request([10, 11, 12, 13], arrival=0), [7, 3], computed=4)
    decoding.append_output(14)
    prefilling = held(make_request(range(20, 32), arrival=1), [5, 6, 1], computed=4)
    batch = BatchBuilder(4).build([chunk(decoding, 1), chunk(prefilling, 3)])
    assert batch.token_ids.tolist() == [14, 24, 25, 26]
    assert batch.positions.tolist() == [4, 4, 5, 6]
    assert batch.query_start.tolist() == [0, 1, 4]
    assert batch.context_len.tolist() == [5, 7]
    # The third block of the second request is for a later chunk.
    assert batch.block_tables.tolist() == [[7, 3], [5, 6]]
    assert batch.adapter.tolist() == [0, 0]
    # Only the first reaches the end of its tokens.
    assert batch.logits_rows.tolist() == [0]
    assert batch.seed.tolist() == [0]
    assert batch.draw_position.tolist() == [1]
    assert batch.target_ids.tolist() == [-1]


def test_short_tables_are_padded() -> None:
    short, long = held(make_request([1], arrival=0), [4]), held(make_request(range(9), arrival=1), [0, 1, 2])
    assert BatchBuilder(4).build([chunk(short, 1), chunk(long, 9)]).block_tables.tolist() == [[4, -1, -1], [0, 1, 2]]


def test_every_parameter_reaches_the_executor() -> None:
    params = SamplingParams(
        temperature=0.5, top_p=0.25, top_k=-1, min_p=0.125, repetition_penalty=1.5, presence_penalty=-1,
        frequency_penalty=2, logprobs=0, logit_bias={3: -100, 4: 2.5},
    )  # fmt: skip
    request = held(make_request([8, 9, 8], params=params), [0, 5], computed=3)
    request.seed = 2**64 - 1
    request.append_output(8)
    request.append_output(2)
    request.num_computed_tokens = 4
    plain = held(make_request([1], arrival=1, params=SamplingParams(top_k=40)), [1])
    batch = BatchBuilder(4).build([chunk(plain, 1), chunk(request, 1)])
    assert batch.seed.tolist() == [1, 2**64 - 1]
    assert batch.draw_position.tolist() == [0, 2]
    assert batch.temperature.tolist() == [1, 0.5]
    assert batch.top_p.tolist() == [1, 0.25]
    assert batch.top_k.tolist() == [40, 0]
    assert batch.min_p.tolist() == [0, 0.125]
    assert batch.repetition.tolist() == [1, 1.5]
    assert batch.presence.tolist() == [0, -1]
    assert batch.frequency.tolist() == [0, 2]
    assert batch.num_logprobs.tolist() == [-1, 0]
    assert batch.seen_start.tolist() == [0, 0, 3]
    assert dict(zip(batch.seen_ids.tolist(), batch.seen_output_count.tolist(), strict=True)) == {8: 1, 9: 0, 2: 1}
    assert batch.bias_start.tolist() == [0, 0, 2]
    assert batch.bias_ids.tolist() == [3, 4]
    assert batch.bias.tolist() == [-100, 2.5]


def test_ragged_parts_are_empty_when_unused() -> None:
    batch = BatchBuilder(4).build([chunk(held(make_request([1]), [0]), 1)])
    for name in ["seen_start", "seen_ids", "seen_output_count", "bias_start", "bias_ids", "bias", "mask_row"]:
        assert len(getattr(batch, name)) == 0
    assert batch.block_copies.shape == (0, 2)


def make_result(token_ids: list[int], status: list[int], top: list[list[int]] | None = None) -> StepResult:
    top_ids = np.array(top or np.empty((0, 0)), np.int32)
    return StepResult(
        np.array(token_ids, np.int32),
        np.array(status, np.uint8),
        np.full(len(token_ids) if top else 0, -0.5, np.float32),
        top_ids,
        -1 - np.arange(top_ids.size, dtype=np.float32).reshape(top_ids.shape),
    )


def test_results_find_their_way_back() -> None:
    part, whole = held(make_request(range(8), arrival=0), [0, 1]), held(make_request([1], arrival=1), [2])
    outcomes = read_result([chunk(part, 4), chunk(whole, 1)], make_result([42], [0]))
    assert [list(outcome.samples) for outcome in outcomes] == [[], [Sample(42)]]


def test_logprobs_have_as_many_entries_as_the_request_asked_for() -> None:
    requests = [
        held(make_request([1], arrival=i, params=SamplingParams(logprobs=n)), [i]) for i, n in enumerate((0, 2, 3))
    ]
    result = make_result([4, 5, 6], [0, 0, 0], [[-1, -1, -1], [8, 9, -1], [7, 8, -1]])
    logprobs = [outcome.samples[0].logprobs for outcome in read_result([chunk(r, 1) for r in requests], result)]
    assert all(entry is not None and entry.logprob == -0.5 for entry in logprobs)
    assert [entry.top for entry in logprobs if entry] == [(), ((8, -4.0), (9, -5.0)), ((7, -7.0), (8, -8.0))]


@pytest.mark.parametrize("status", [RowStatus.NON_FINITE, RowStatus.NOTHING_ALLOWED])
def test_a_bad_row_is_an_error(status: RowStatus) -> None:
    request = held(make_request([1]), [0])
    (outcome,) = read_result([chunk(request, 1)], make_result([-1], [status]))
    assert not outcome.samples
    assert outcome.error


def test_the_rows_of_a_prompt_score_its_next_tokens() -> None:
    params = SamplingParams(prompt_logprobs=2, prompt_logprobs_from=2, logprobs=1)
    request = held(make_request([10, 11, 12, 13], params=params), [0])
    builder = BatchBuilder(4)
    first = builder.build([chunk(request, 2)])
    assert (first.logits_rows.tolist(), first.target_ids.tolist()) == ([1], [12])
    request.num_computed_tokens, request.next_scored = 2, 3
    second = builder.build([chunk(request, 2)])
    assert (second.logits_rows.tolist(), second.target_ids.tolist()) == ([0, 1], [13, -1])
    assert second.num_logprobs.tolist() == [2, 1]
    (outcome,) = read_result([chunk(request, 2)], make_result([13, 42], [0, 0], [[8, 9], [7, 6]]))
    assert [entry.token_id for entry in outcome.prompt_logprobs] == [13]
    assert [sample.token_id for sample in outcome.samples] == [42]


def test_a_draft_has_a_row_behind_each_of_its_tokens_with_the_draws_of_their_places() -> None:
    request = held(make_request([1, 2]), [0, 1])
    request.num_computed_tokens = 1
    plan = [Chunk(request, 3, samples=True, draft=(7, 8))]
    batch = BatchBuilder(4).build(plan)
    assert (batch.token_ids.tolist(), batch.positions.tolist()) == ([2, 7, 8], [1, 2, 3])
    assert (batch.logits_rows.tolist(), batch.draw_position.tolist()) == ([0, 1, 2], [0, 1, 2])
    for drawn, kept in {(7, 8, 9): [7, 8, 9], (7, 5, 9): [7, 5], (4, 8, 9): [4]}.items():
        (outcome,) = read_result(plan, make_result(list(drawn), [0, 0, 0]))
        assert [sample.token_id for sample in outcome.samples] == kept


def test_forks_draw_their_first_tokens_from_the_row_of_the_request() -> None:
    request = held(make_request([1, 2]), [0])
    forks = [make_request([1, 2], arrival=1), make_request([1, 2], arrival=2)]
    request.fork(forks)
    batch = BatchBuilder(4).build([chunk(request, 2)])
    assert (batch.logits_rows.tolist(), batch.seed.tolist()) == ([1, 1, 1], [0, 1, 2])
    (outcome,) = read_result([chunk(request, 2)], make_result([4, 5, 6], [0, 0, 0]))
    assert [(fork, sample.token_id) for fork, sample in outcome.forks] == [(forks[0], 5), (forks[1], 6)]


def test_banned_tokens_change_from_step_to_step() -> None:
    request = make_request([1], params=SamplingParams(logit_bias={3: 1.0}), bans=Bans([0], 1, [[5, 6]]))
    held(request, [0])
    builder = BatchBuilder(4)

    def bias() -> dict[int, float]:
        batch = builder.build([chunk(request, request.num_pending_tokens)])
        return dict(zip(batch.bias_ids.tolist(), batch.bias.tolist(), strict=True))

    assert bias() == {3: 1.0, 0: -math.inf}
    request.num_computed_tokens = 1
    request.append_output(5)
    assert bias() == {3: 1.0, 6: -math.inf}


def test_a_copied_block_is_the_one_that_is_written_next() -> None:
    request = held(make_request(range(6)), [3, 9])
    request.num_computed_tokens, request.copy_from = 5, 7
    assert BatchBuilder(4).build([chunk(request, 1)]).block_copies.tolist() == [[7, 9]]


def test_a_result_of_the_wrong_size_is_refused() -> None:
    request = held(make_request([1]), [0])
    with pytest.raises(ExecutorError, match="2 tokens and 1 states came back for 1 rows"):
        read_result([chunk(request, 1)], make_result([1, 2], [0]))
