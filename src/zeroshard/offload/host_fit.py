"""Checks that this host's memory can hold what its ranks plan to allocate.

A pure function of numbers. :mod:`zeroshard.memory.host_limits` reads the limits; the plan gives the
numbers of every rank of the host. Each rank alone might fit where all of them together would be killed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from zeroshard.core.texts import size_text
from zeroshard.errors import HostMemoryError
from zeroshard.memory.host_limits import HostLimits


def check_host(planned_nbytes_of_local_ranks: Sequence[int], limits: HostLimits) -> None:
    """Refuse a plan that would make the kernel kill a rank.

    ``planned_nbytes_of_local_ranks``: bytes of host memory that each rank of this host will need in
    addition to what it holds already, by local rank. Unknown limits are not checked.

    Raises:
        HostMemoryError: the sum is more than is free; with a table of the numbers.
    """
    free_nbytes = limits.free_nbytes
    total_nbytes = sum(planned_nbytes_of_local_ranks)
    if free_nbytes is None or total_nbytes <= free_nbytes:
        return
    raise HostMemoryError(
        "\n".join(
            [
                f"The host memory that this run plans does not fit: {size_text(total_nbytes)} are "
                f"planned, {size_text(free_nbytes)} are free. The kernel would kill a rank during "
                "the run.",
                *_table(planned_nbytes_of_local_ranks, limits),
                *_remedies(total_nbytes, free_nbytes),
            ]
        )
    )


def _table(planned: Sequence[int], limits: HostLimits) -> Iterator[str]:
    free_nbytes = limits.free_nbytes
    assert free_nbytes is not None  # check_host() compared with it
    if limits.is_cgroup_tighter and limits.cgroup is not None:
        binding = f"the limit is that of the cgroup {limits.cgroup.folder}"
    else:
        binding = "the limit is the host's memory"
    yield f"{'local rank':>12}  {'planned':>12}"
    yield from (f"{rank:>12}  {size_text(nbytes):>12}" for rank, nbytes in enumerate(planned))
    yield f"{'sum':>12}  {size_text(sum(planned)):>12}"
    yield f"{'free':>12}  {size_text(free_nbytes):>12}  {binding} ({limits.in_words()})"


def _remedies(total_nbytes: int, free_nbytes: int) -> Iterator[str]:
    section = "zero_optimization.offload_optimizer"
    times = f"at least {-(-total_nbytes // free_nbytes)} times as many" if free_nbytes else "more"
    yield "Each of these helps:"
    yield f"  - {times} hosts of this kind: each host then stores a smaller part"
    yield (
        f'  - {section}.device "nvme": the state is stored on disk (with max_in_cpu, a part of it)'
    )
    yield f"  - a smaller {section}.ratio: on a GPU, more of the state stays on the device"
    yield (
        "  - bf16.bf16_master_weights_and_grads with bf16.bf16_optimizer_states: masters and "
        "moments have a 16-bit dtype, at most half the bytes"
    )
