"""Paged KV blocks: who holds which, and which still hold a prefix worth keeping."""

from array import array
from collections import Counter, OrderedDict
from collections.abc import Sequence
from hashlib import sha256
from itertools import chain

from paceline.engine.request import BlockKey, Request
from paceline.errors import PacelineError


class BlockPoolError(PacelineError):
    """The pool's books contradict each other, or it was used against its contract: a bug in the engine."""


class BlockPool:
    """Hands out blocks of ``block_size`` token positions; every operation is O(1) per block.

    A block is *blank*, *held* by one or more requests, or *evictable*: free, but cached under the key of what it holds.
    A block gets into the cache by ``publish`` alone, after its KV is computed, and is full by then. A request writes
    behind the blocks it shares, so no block with more than one reference is ever written.
    """

    def __init__(self, num_blocks: int, block_size: int, *, enable_prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._enable_prefix_caching = enable_prefix_caching
        self._ref_count = [0] * num_blocks
        self._key: list[BlockKey | None] = [None] * num_blocks
        self._blank = list(reversed(range(num_blocks)))
        self._evictable: OrderedDict[int, None] = OrderedDict()
        """Least recently used first."""
        self._cached: dict[BlockKey, int] = {}
        self._holders: set[Request] = set()

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._evictable)

    @property
    def num_used(self) -> int:
        return self.num_blocks - self.num_free

    @property
    def num_evictable(self) -> int:
        """Free blocks that hold a cached prefix."""
        return len(self._evictable)

    def ref_count(self, block: int) -> int:
        return self._ref_count[block]

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold so many tokens."""
        return -(-num_tokens // self.block_size)

    def match_prefix(self, request: Request) -> list[int]:
        """Cached blocks that the request's tokens begin with.

        The last token is never among them: it is computed again, in a private block, for its logits.
        """
        matched: list[int] = []
        for key in self.shareable_keys(request):
            # The key holds the tokens themselves, so the lookup compares them.
            block = self._cached.get(key)
            if block is None:
                break
            matched.append(block)
        return matched

    def shareable_keys(self, request: Request) -> list[BlockKey]:
        """Names of the blocks that the request would take from the cache, were they there."""
        if not self._enable_prefix_caching:
            return []
        limit = request.num_shareable_tokens // self.block_size
        self._extend_keys(request, limit)
        return request.block_keys[:limit]

    def keys_filled(self, request: Request, num_computed: int) -> list[BlockKey]:
        """Names of the blocks that become full as ``request.num_computed_tokens`` goes up to ``num_computed``."""
        first, end = request.num_computed_tokens // self.block_size, num_computed // self.block_size
        if not self._enable_prefix_caching or first == end:
            return []
        self._extend_keys(request, end)
        return request.block_keys[first:end]

    def can_allocate(self, request: Request, matched: Sequence[int]) -> bool:
        """Whether ``allocate`` with this match would find the blocks."""
        revived = sum(1 for block in matched if self._ref_count[block] == 0)
        return self.blocks_for(request.num_tokens) - len(matched) <= self.num_free - revived

    def allocate(self, request: Request, matched: Sequence[int]) -> None:
        """Fill the request's empty block table for all its tokens: the matched blocks, then private ones."""
        self._holders.add(request)
        for block in matched:
            if self._ref_count[block] == 0:
                del self._evictable[block]
            self._ref_count[block] += 1
            request.block_table.append(block)
        for _ in range(self.blocks_for(request.num_tokens) - len(matched)):
            request.block_table.append(self._take())

    def append(self, request: Request) -> bool:
        """Make sure of a slot for the request's newest token; False if that takes a block and none is free."""
        if len(request.block_table) * self.block_size >= request.num_tokens:
            return True
        if not self.num_free:
            return False
        request.block_table.append(self._take())
        return True

    def extend(self, request: Request, num_draft: int) -> int:
        """Take slots for tokens that are only proposed, while there are free blocks; returns for how many there are."""
        wanted = self.blocks_for(request.num_tokens + num_draft)
        while len(request.block_table) < wanted and self.num_free:
            request.block_table.append(self._take())
        return min(num_draft, len(request.block_table) * self.block_size - request.num_tokens)

    def truncate(self, request: Request) -> None:
        """Take back the blocks behind the request's known tokens, after a proposal was rejected."""
        for _ in range(len(request.block_table) - self.blocks_for(request.num_tokens)):
            block = request.block_table.pop()
            self._ref_count[block] = 0
            self._blank.append(block)

    def fork(self, request: Request, fork: Request) -> bool:
        """Let ``fork``, another choice of the same prompt, go on from the computed tokens of ``request``.

        Full blocks are shared. One that is not full would be written by both, so the fork gets one of its own, and
        ``fork.copy_from`` says what belongs into it. False if none is free.
        """
        num_full, rest = divmod(request.num_computed_tokens, self.block_size)
        if rest and not self.num_free:
            return False
        self._holders.add(fork)
        for block in request.block_table[:num_full]:
            self._ref_count[block] += 1
            fork.block_table.append(block)
        if rest:
            fork.block_table.append(self._take())
            fork.copy_from = request.block_table[num_full]
        return True

    def publish(self, request: Request, num_computed: int) -> None:
        """Cache the blocks that became full as ``request.num_computed_tokens`` goes up to ``num_computed``."""
        first = request.num_computed_tokens // self.block_size
        for index, key in enumerate(self.keys_filled(request, num_computed), first):
            block = request.block_table[index]
            # Two requests may compute the same prefix side by side; the first one's block serves.
            if self._cached.setdefault(key, block) == block:
                self._key[block] = key

    def free(self, request: Request) -> None:
        """Take the request's blocks back; those it published stay cached until their space is needed."""
        # From the tail, so that a chain is evicted from its end: without its beginning the rest cannot be found.
        for block in reversed(request.block_table):
            self._ref_count[block] -= 1
            if self._ref_count[block] == 0:
                if self._key[block] is None:
                    self._blank.append(block)
                else:
                    self._evictable[block] = None
        del request.block_table[:]
        request.copy_from = None
        self._holders.discard(request)

    def clear_cache(self) -> None:
        """Forget every cached prefix, those in use too: whoever asks for one from now on computes it again."""
        self._blank += self._evictable
        self._evictable.clear()
        self._cached.clear()
        self._key = [None] * self.num_blocks

    def check_integrity(self) -> None:
        """Prove that no block leaked.

        Raises:
            BlockPoolError: a block is in two places or in none, a reference count is off, or the cache is inconsistent.
        """
        references = Counter(chain.from_iterable(request.block_table for request in self._holders))
        for block in range(self.num_blocks):
            if references[block] != self._ref_count[block]:
                raise BlockPoolError(
                    f"block {block} has {self._ref_count[block]} references, block tables hold {references[block]}"
                )
        places = Counter(chain(self._blank, self._evictable, references.keys()))
        if places != Counter(range(self.num_blocks)):
            wrong = sorted(block for block in range(self.num_blocks) if places[block] != 1)
            raise BlockPoolError(f"blocks {wrong} are lost or in two places at once")
        keyed = {key: block for block, key in enumerate(self._key) if key is not None}
        if keyed != self._cached or not self._evictable.keys() <= set(keyed.values()):
            raise BlockPoolError("the prefix cache and the keys of its blocks disagree")
        if any(self._key[block] is not None for block in self._blank):
            raise BlockPoolError("a blank block is still cached")

    def _take(self) -> int:
        block = self._blank.pop() if self._blank else self._evict()
        self._ref_count[block] = 1
        return block

    def _evict(self) -> int:
        block, _ = self._evictable.popitem(last=False)
        key = self._key[block]
        assert key is not None
        del self._cached[key]
        self._key[block] = None
        return block

    def _extend_keys(self, request: Request, count: int) -> None:
        """Name the request's first ``count`` blocks: SHA-256 over the parent's digest and the tokens, from a root that
        covers salt and adapter."""
        keys = request.block_keys
        if len(keys) >= count:
            return
        parent = keys[-1][0] if keys else _root_digest(request)
        for index in range(len(keys), count):
            start = index * self.block_size
            tokens = array("i", request.tokens(start, start + self.block_size)).tobytes()
            parent = sha256(parent + tokens).digest()
            keys.append((parent, tokens))


def _root_digest(request: Request) -> bytes:
    # surrogatepass: a JSON string may hold half a surrogate pair.
    return sha256(f"{request.adapter}:{request.cache_salt}".encode("utf-8", "surrogatepass")).digest()
