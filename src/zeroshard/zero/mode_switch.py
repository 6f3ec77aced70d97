"""``train()`` and ``eval()`` of schedule-free optimizers, which replace the weights by another average.

On the engine's optimizer they run on masters in any tier, as one call, and the new values are rounded
into the parameters and given to the other ranks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from zeroshard.zero.optimizer import ShardedOptimizer
from zeroshard.zero.optimizer_shard import OptimizerShard, opened

MODES = ("train", "eval")


def publish_modes(sharded: ShardedOptimizer, all_gather_late: Callable[[], None]) -> None:
    """Let ``train`` and ``eval`` of the optimizer object, if it has them, publish what they write.

    They become collective. ``all_gather_late``: ends updates that run during the next step.
    """
    inner: Any = sharded.inner
    for name in MODES:
        method = getattr(inner, name, None)
        if callable(method):
            sharded.object.replace(name, _published(method, sharded, all_gather_late))


def _published(
    method: Callable[..., Any], sharded: ShardedOptimizer, all_gather_late: Callable[[], None]
) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        sharded.life.check(f"optimizer.{method.__name__}()")
        sharded.wait_for_worker()
        all_gather_late()
        for shard in sharded.shards:
            shard.check_not_offloaded()
            shard.sync_edits()
        results: list[Any] = []
        with sharded.object.several(hooks=False):
            _call_in_memory(sharded, lambda: results.append(method(*args, **kwargs)))
            for shard in sharded.shards:
                _call_on_pages(sharded, shard, lambda: method(*args, **kwargs))
        sharded.report()
        return results[0]

    return call


def _call_in_memory(sharded: ShardedOptimizer, method: Callable[[], object]) -> None:
    fragments = [
        fragment
        for shard in sharded.shards
        for chunk in shard.chunks
        if shard.is_in_memory(chunk)
        for fragment in chunk.fragments
    ]
    with opened(fragments):
        sharded.object.call(method, sharded.members(fragments))


def _call_on_pages(
    sharded: ShardedOptimizer, shard: OptimizerShard, method: Callable[[], object]
) -> None:
    for chunk in shard.visit(changed=True):
        if not shard.is_in_memory(chunk) and chunk.fragments:
            with opened(chunk.fragments):
                sharded.object.call(method, sharded.members(chunk.fragments))
        with torch.no_grad():
            chunk.write_param()
        if chunk is shard.chunks[-1]:
            if shard.is_whole:
                shard.unit.increment_versions()
            else:
                shard.unit.all_gather_updated()
