"""Who has which host block: found by content, counted by reference, least recently used out first.

A host block holds all layers and KV heads of one block of tokens. Its key is vLLM's content hash, which covers the
tokens before it, the cache salt, the adapter and the multimodal inputs; the index belongs to one engine, so model,
layout and block size need not be in it. Blocks computed densely are EXACT. What a sparse step computed is APPROXIMATE,
kept apart, and goes only to requests that will be bounded themselves.

vLLM's own ``BlockPool`` does the counting. A block that no request holds stays findable until its room is needed: the
host tier is a prefix cache.
"""

from __future__ import annotations

from collections.abc import Sequence

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.request import Request

EXACT, APPROXIMATE = 0, 1


class HostIndex:
    """Block 0 of the pool is vLLM's null block, so that pool block ``i`` is row ``i - 1`` of the workers' arenas."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._unacknowledged: dict[int, int] = {}  # published blocks, by the step in which they are copied
        self.pool = BlockPool(num_blocks + 1, enable_caching=True, hash_block_size=block_size)

    @property
    def used(self) -> int:
        """Blocks that requests hold."""
        return self.num_blocks - self.pool.get_num_free_blocks()

    def find(self, request: Request, index: int, kinds: Sequence[int] = (EXACT,)) -> KVCacheBlock | None:
        """The host block with the request's logical block ``index``, of the first of ``kinds`` that has it."""
        if index >= len(request.block_hashes):
            return None
        for kind in kinds:
            found = self.pool.get_cached_block(request.block_hashes[index], [kind])
            if found:
                return found[0]
        return None

    def prefix(self, request: Request, limit: int, approximate_too: bool) -> tuple[list[KVCacheBlock], int]:
        """The longest findable prefix of at most ``limit`` blocks, and how many of its first blocks are exact."""
        kinds = (EXACT, APPROXIMATE) if approximate_too else (EXACT,)
        blocks: list[KVCacheBlock] = []
        exact = 0
        while len(blocks) < limit and (block := self.find(request, len(blocks), kinds)) is not None:
            if block.block_id in self._unacknowledged:
                break
            if exact == len(blocks) and self.find(request, exact) is block:
                exact += 1
            blocks.append(block)
        return blocks, exact

    def has_room(self, need: int, shared: Sequence[KVCacheBlock]) -> bool:
        """Whether ``need`` blocks can be held, ``shared`` being some of them."""
        idle = sum(block.ref_cnt == 0 for block in shared)
        return need - len(shared) + idle <= self.pool.get_num_free_blocks()

    def reserve(self, need: int, shared: Sequence[KVCacheBlock]) -> list[KVCacheBlock]:
        """Hold ``shared``, and as many new blocks as ``need`` is larger; these are returned, the first to use last."""
        self.pool.touch(shared)
        return self.pool.get_new_blocks(need - len(shared))[::-1]

    def share(self, block: KVCacheBlock) -> None:
        """Hold one block more that is in the index."""
        self.pool.touch([block])

    def publish(self, request: Request, blocks: list[KVCacheBlock], index: int, kind: int, step: int) -> None:
        """Make ``blocks[index]``, the copy of the request's logical block ``index`` made in ``step``, findable."""
        if index < len(request.block_hashes):
            self._unacknowledged[blocks[index].block_id] = step
            self.pool.cache_full_blocks(request, blocks, index, index + 1, self.block_size, kind)

    def acknowledge(self, step: int) -> None:
        """Every rank holds the copies of all steps up to ``step``."""
        self._unacknowledged = {block: made for block, made in self._unacknowledged.items() if made > step}

    def release(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Let go of blocks, given in the order of their tokens: the last ones are the first to be re-used."""
        self.pool.free_blocks(reversed(blocks))

    def forget(self) -> None:
        """Nothing is findable any more (the weights changed, or the cache was reset); who holds blocks keeps them."""
        self.pool.evict_blocks({block.block_id for block in self.pool.blocks})
