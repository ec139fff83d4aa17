"""How a request's tokens are cut into sinks, middle, window and tail, and what that takes of the device.

    logical block   0 .. S-1 | S ............ first_window-1 | first_window .. full-1 | full
                    sinks    | middle: candidates            | window (W blocks)      | tail

A bounded request holds ``S + H + W`` full blocks on the device (the budget) and its tail. The middle's pages take
turns in the ``H`` hot slots.
"""

from __future__ import annotations

from dataclasses import dataclass

from oasiskv.core.settings import PART_TOKENS, Settings, SettingsError


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that ``tokens`` tokens take, the last one perhaps partly filled."""
    return -(-tokens // block_size)


@dataclass(frozen=True)
class Geometry:
    """The cut of one engine, in blocks of ``block_size`` tokens."""

    block_size: int
    sinks: int
    hot: int
    window: int

    @classmethod
    def of(cls, settings: Settings, block_size: int, budget_tokens: int | None = None) -> Geometry:
        """The cut for ``settings``, or for one request's own ``budget_tokens``.

        Raises:
            SettingsError: the block size has no whole summary parts, or the budget leaves no hot slot.
        """
        if block_size <= 0 or block_size % PART_TOKENS:
            raise SettingsError(
                f"OasisKV: block_size={block_size} is not allowed: it must be a multiple of {PART_TOKENS} "
                "(of 32 on a CPU); use --block-size 32, 64 or 128"
            )
        budget = settings.budget_tokens if budget_tokens is None else budget_tokens
        sinks = blocks_for(settings.sink_tokens, block_size)
        window = blocks_for(settings.window_tokens, block_size)
        hot = budget // block_size - sinks - window
        if hot < 1:
            least = (sinks + window + 1) * block_size
            raise SettingsError(
                f"OasisKV: budget_tokens={budget} leaves no hot slot: with block_size={block_size}, "
                f"sink_tokens={settings.sink_tokens} take {sinks} and window_tokens={settings.window_tokens} take "
                f"{window} blocks; allowed is {least} or more; raise budget_tokens or use a smaller block size"
            )
        return cls(block_size=block_size, sinks=sinks, hot=hot, window=window)

    @property
    def parts(self) -> int:
        """Summaries per block and KV head."""
        return self.block_size // PART_TOKENS

    @property
    def bound(self) -> int:
        """Full blocks that a bounded request holds: sinks, hot slots and window."""
        return self.sinks + self.hot + self.window

    def first_window(self, committed_tokens: int) -> int:
        """Logical block with which the window begins, for a context of ``committed_tokens``."""
        return max(self.sinks, committed_tokens // self.block_size - self.window)

    def middle(self, committed_tokens: int) -> int:
        """Blocks between sinks and window: the candidates for the hot slots."""
        return self.first_window(committed_tokens) - self.sinks

    def footprint(self, lookahead_tokens: int = 0) -> int:
        """Most blocks that a bounded request holds: the budget, its tail, and slots for the lookahead tokens."""
        return self.bound + blocks_for(self.block_size + lookahead_tokens, self.block_size)


def running_at_once(pool: int, full_prompt: int, footprint: int) -> int:
    """Requests that run at once when every prompt is prefilled here: ``floor((P - F) / B) + 1`` (all in blocks)."""
    if full_prompt > pool:
        return 0
    return (pool - full_prompt) // footprint + 1
