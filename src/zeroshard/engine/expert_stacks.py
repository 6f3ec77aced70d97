"""Places experts that ranks share, also stacked ones that ``zero.Init`` has sharded over all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator

from torch import nn

from zeroshard.config import LoadedConfig
from zeroshard.core.mesh import Mesh
from zeroshard.experts.placement import place_experts
from zeroshard.experts.stacked import WholeValues, planned_stacks
from zeroshard.session.session import set_up_together
from zeroshard.zero.param_bucket import whole_values
from zeroshard.zero.sharded_parameter import owner_of


def place_all(
    model: nn.Module, mesh: Mesh, loaded: LoadedConfig, rank: int, ties: Collection[str] | None
) -> tuple[int, ...]:
    """See :func:`zeroshard.experts.placement.place_experts`. Collective as :func:`opened_stacks`."""
    with opened_stacks(model, mesh, loaded) as whole:
        return place_experts(model, mesh, rank, loaded.origins["parallel.expert"], ties, whole)


@contextlib.contextmanager
def opened_stacks(model: nn.Module, mesh: Mesh, loaded: LoadedConfig) -> Iterator[WholeValues]:
    """A function that takes stacked experts, which ranks will share, out of ``zero.Init``.

    Collective if there are such experts: then the ranks agree before.

    Raises:
        DistributedError: another rank has another configuration, or failed before.
    """
    stacks = planned_stacks(model) if mesh.expert > 1 else {}
    params = [param for module in stacks.values() for param in module.parameters()]
    if all(owner_of(param) is None for param in params):
        yield lambda param: param.data
        return
    with set_up_together("initialize", trust=loaded.config.trust, plan=loaded.agreed()):
        yield whole_values
