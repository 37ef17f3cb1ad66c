from collections.abc import Iterable
from typing import Any

import pytest

from paceline.engine import blocks
from paceline.engine.blocks import BlockPool, BlockPoolError
from paceline.engine.request import Request
from tests.engine.drive import make_request


def admit(pool: BlockPool, prompt: Iterable[int], *, computed: int = 0, **fields: Any) -> Request:
    """A request with its blocks; ``computed`` tokens are computed and published."""
    request = make_request(prompt, **fields)
    matched = pool.match_prefix(request)
    assert pool.can_allocate(request, matched)
    pool.allocate(request, matched)
    request.num_computed_tokens = len(matched) * pool.block_size
    if computed:
        pool.publish(request, computed)
        request.num_computed_tokens = computed
    pool.check_integrity()
    return request


def matches(pool: BlockPool, prompt: Iterable[int], **fields: Any) -> int:
    return len(pool.match_prefix(make_request(prompt, **fields)))


def test_allocates_blocks_for_all_known_tokens() -> None:
    pool = BlockPool(8, 4)
    request = admit(pool, range(9))
    assert len(set(request.block_table)) == 3
    assert pool.num_used == 3
    pool.free(request)
    assert pool.num_used == 0
    assert not request.block_table
    pool.check_integrity()


def test_cannot_allocate_more_than_is_free() -> None:
    pool = BlockPool(4, 4)
    admit(pool, range(8))
    fits, too_long = make_request(range(8)), make_request(range(9))
    assert pool.can_allocate(fits, pool.match_prefix(fits))
    assert not pool.can_allocate(too_long, pool.match_prefix(too_long))


def test_a_match_that_is_free_itself_is_not_counted_as_free_twice() -> None:
    pool = BlockPool(3, 4)
    pool.free(admit(pool, range(8), computed=8))
    request = make_request(range(16))
    matched = pool.match_prefix(request)
    assert len(matched) == 2
    # Two matched blocks are revived, one other is free, two more are needed.
    assert not pool.can_allocate(request, matched)


def test_append_takes_a_block_only_at_a_boundary() -> None:
    pool = BlockPool(2, 4)
    request = admit(pool, range(3))
    for expected in (1, 2, 2, 2, 2):
        request.append_output(9)
        assert pool.append(request)
        assert len(request.block_table) == expected
    request.append_output(9)
    assert not pool.append(request)


def test_nothing_is_cached_before_it_is_published() -> None:
    pool = BlockPool(8, 4)
    request = admit(pool, range(9))
    assert matches(pool, range(9)) == 0
    pool.publish(request, 7)
    request.num_computed_tokens = 7
    assert matches(pool, range(9)) == 1
    pool.publish(request, 9)
    assert matches(pool, range(9)) == 2


def test_a_hit_shares_the_block() -> None:
    pool = BlockPool(8, 4)
    first = admit(pool, range(9), computed=9)
    second = admit(pool, range(9))
    assert second.block_table[:2] == first.block_table[:2]
    assert second.block_table[2] != first.block_table[2]
    assert [pool.ref_count(block) for block in second.block_table] == [2, 2, 1]
    pool.free(first)
    assert [pool.ref_count(block) for block in second.block_table] == [1, 1, 1]
    pool.check_integrity()


@pytest.mark.parametrize(("num_tokens", "expected"), [(8, 1), (9, 2), (12, 2), (13, 3)])
def test_the_last_token_is_never_matched(num_tokens: int, expected: int) -> None:
    pool = BlockPool(8, 4)
    admit(pool, range(16), computed=16)
    assert matches(pool, range(num_tokens)) == expected


def test_a_freed_prefix_stays_until_its_space_is_needed_oldest_and_tail_first() -> None:
    pool = BlockPool(4, 4)
    pool.free(admit(pool, range(8), computed=8))
    pool.free(admit(pool, range(50, 58), computed=8))
    assert pool.num_evictable == 4
    assert matches(pool, range(9)) == 2
    # One block: the tail of the prefix that was used longest ago goes.
    other = admit(pool, [99])
    assert matches(pool, range(9)) == 1
    assert matches(pool, range(50, 59)) == 2
    pool.free(other)
    # The blank block goes before anything cached does.
    admit(pool, [98])
    assert matches(pool, range(9)) == 1


def test_a_hit_renews_a_prefix() -> None:
    pool = BlockPool(4, 4)
    pool.free(admit(pool, range(4), computed=4))
    pool.free(admit(pool, range(50, 54), computed=4))
    pool.free(admit(pool, range(5)))
    admit(pool, range(70, 82))
    assert matches(pool, range(5)) == 1
    assert matches(pool, range(50, 55)) == 0


def test_the_chain_covers_parent_tokens_salt_and_adapter() -> None:
    pool = BlockPool(8, 4)
    admit(pool, range(8), computed=8, cache_salt="a", adapter=1)
    assert matches(pool, range(9), cache_salt="a", adapter=1) == 2
    assert matches(pool, range(9), cache_salt="b", adapter=1) == 0
    assert matches(pool, range(9), cache_salt="a", adapter=2) == 0
    assert matches(pool, [0, 1, 2, 99, 4, 5, 6, 7, 8], cache_salt="a", adapter=1) == 0
    assert matches(pool, range(4, 9), cache_salt="a", adapter=1) == 0


def test_a_digest_that_collides_is_no_hit(monkeypatch: pytest.MonkeyPatch) -> None:
    class Constant:
        def __init__(self, data: bytes) -> None: ...

        def digest(self) -> bytes:
            return b"same"

    monkeypatch.setattr(blocks, "sha256", Constant)
    pool = BlockPool(8, 4)
    admit(pool, range(8), computed=8)
    assert matches(pool, range(20, 29)) == 0
    assert matches(pool, range(9)) == 2


def test_a_salt_may_hold_half_a_surrogate_pair() -> None:
    pool = BlockPool(2, 4)
    admit(pool, range(5), computed=5, cache_salt="\ud800")
    assert matches(pool, range(5), cache_salt="\ud800") == 1


def test_two_requests_may_compute_the_same_prefix_side_by_side() -> None:
    pool = BlockPool(8, 4)
    first, second = admit(pool, range(5)), admit(pool, range(5))
    for request in (first, second):
        pool.publish(request, 5)
    pool.check_integrity()
    pool.free(first)
    pool.free(second)
    pool.check_integrity()
    assert pool.num_evictable == 1


def test_caching_can_be_off() -> None:
    pool = BlockPool(8, 4, enable_prefix_caching=False)
    pool.free(admit(pool, range(9), computed=9))
    assert matches(pool, range(9)) == 0
    assert pool.num_evictable == 0


def test_clear_cache_forgets_all_and_harms_nobody() -> None:
    pool = BlockPool(12, 4)
    running = admit(pool, range(9), computed=9)
    pool.free(admit(pool, range(50, 59), computed=9))
    pool.clear_cache()
    pool.check_integrity()
    assert matches(pool, range(9)) == matches(pool, range(50, 59)) == 0
    assert pool.num_evictable == 0
    # The running one publishes what it computes from now on, which nobody finds without its beginning.
    running.output_ids += range(9, 12)
    assert pool.append(running)
    pool.publish(running, 12)
    assert matches(pool, range(13)) == 0
    pool.free(running)
    pool.check_integrity()


@pytest.mark.parametrize(("length", "shared", "copied"), [(8, 2, 0), (9, 2, 1), (3, 0, 1)])
def test_a_fork_shares_full_blocks_and_gets_its_own_last_one(length: int, shared: int, copied: int) -> None:
    pool = BlockPool(8, 4)
    request, fork = admit(pool, range(length), computed=length), make_request(range(length), arrival=1)
    assert pool.fork(request, fork)
    pool.check_integrity()
    assert fork.block_table[:shared] == request.block_table[:shared]
    assert len(fork.block_table) == shared + copied
    assert not set(fork.block_table[shared:]) & set(request.block_table)
    assert fork.copy_from == (request.block_table[-1] if copied else None)
    pool.free(request)
    pool.check_integrity()
    pool.free(fork)
    assert (pool.num_used, fork.copy_from) == (0, None)


def test_a_fork_needs_a_free_block_for_a_part() -> None:
    pool = BlockPool(3, 4)
    request = admit(pool, range(9), computed=9)
    fork = make_request(range(9), arrival=1)
    assert not pool.fork(request, fork)
    assert not fork.block_table
    pool.check_integrity()


def test_proposed_tokens_take_free_blocks_and_give_them_back() -> None:
    pool = BlockPool(3, 4)
    request = admit(pool, range(6), computed=6)
    assert pool.extend(request, 2) == 2
    assert pool.num_free == 1
    assert pool.extend(request, 9) == 6
    assert pool.num_free == 0
    pool.truncate(request)
    assert pool.num_free == 1
    pool.check_integrity()


def test_integrity_sees_leaks_and_double_use() -> None:
    def broken(break_it: object) -> BlockPool:
        pool = BlockPool(4, 4)
        request = admit(pool, range(9), computed=9)
        pool.free(admit(pool, range(90, 94), computed=4))
        break_it(pool, request)  # type: ignore[operator]
        return pool

    def leak(pool: BlockPool, request: Request) -> None:
        pool._evictable.clear()

    def lose_reference(pool: BlockPool, request: Request) -> None:
        request.block_table.pop()

    def free_while_held(pool: BlockPool, request: Request) -> None:
        pool._blank.append(request.block_table[2])

    def drop_from_cache(pool: BlockPool, request: Request) -> None:
        pool._cached.popitem()

    for damage in (leak, lose_reference, free_while_held, drop_from_cache):
        with pytest.raises(BlockPoolError):
            broken(damage).check_integrity()
