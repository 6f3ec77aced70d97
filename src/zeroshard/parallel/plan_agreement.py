"""Lets the tensor ranks compare plans, models and values before one of them cuts anything.

They exchange short texts through the store of ``torch.distributed``, not through a collective. So a rank
that differs becomes an error on all of them, not a hang or a wrong number.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from zeroshard.comm.agreement import alike_plans, mismatch_text, plans_of, post_plan
from zeroshard.comm.connect import default_store
from zeroshard.comm.env import run_name
from zeroshard.comm.flight_recorder import rank_ranges
from zeroshard.comm.store_keys import FAILED, Store, exchange, namespace, ranks_key
from zeroshard.errors import RankMismatch, in_short
from zeroshard.parallel.dropout_streams import draws
from zeroshard.session.join import waiting_for_partners
from zeroshard.zero.param_bucket import fingerprint_of

TIMEOUT_S = 600.0
"""How long a tensor rank waits for the others, in seconds."""


def agree(
    mesh: DeviceMesh,
    model: nn.Module,
    styles: Mapping[str, str],
    check: Callable[[Sequence[int]], None],
) -> None:
    """Return if all tensor ranks have the same model, values and ``styles``. Reads all values once.

    ``check``: called a few times a second while this rank waits; it may end the wait by raising.

    Raises:
        RankMismatch: they differ; it names the first difference and the ranks.
    """
    if not _has_others(mesh):
        return
    store, me = _place(mesh), mesh.get_local_rank()
    fields = _shapes(model) | {f"style of {name}": style for name, style in styles.items()}
    groups = alike_plans(store, me, mesh.size(), fields, timeout_s=_last_s(), check=check)
    if len(groups) > 1:
        raise RankMismatch(_plans_text(store, groups, _ranks(mesh)))
    mine = _values(model)
    text = ",".join(mine.values())
    everyone = exchange(
        store, me, mesh.size(), text, key="values", timeout_s=_last_s(), check=check
    )
    if len(set(everyone)) > 1:
        raise RankMismatch(_values_text(list(mine), everyone, _ranks(mesh)))


def announce_failure(mesh: DeviceMesh, error: Exception) -> None:
    """Tell the other tensor ranks that this one cannot go on, so that they do not wait."""
    if _has_others(mesh):
        post_plan(_place(mesh), mesh.get_local_rank(), mesh.size(), {FAILED: in_short(error)})


@contextlib.contextmanager
def waiting_for_tensor_ranks(mesh: DeviceMesh) -> Iterator[Callable[[Sequence[int]], None]]:
    """A context of waits in this mesh. Yields a check for them, which ends a wait that has no end.

    See :func:`~zeroshard.session.join.waiting_for_partners`.
    """
    if not _has_others(mesh):
        yield lambda _missing: None
        return
    with waiting_for_partners(_ranks(mesh), "tensor_parallel", timeout_s=TIMEOUT_S) as check:
        yield check


def agreed_seed(mesh: DeviceMesh, seed: int | None, check: Callable[[Sequence[int]], None]) -> int:
    """``seed``, or the first tensor rank's ``torch.initial_seed()`` if it is None.

    ``check``: as in :func:`agree`.

    Raises:
        RankMismatch: the tensor ranks were given different seeds.
    """
    own = torch.initial_seed() if seed is None else seed
    if not _has_others(mesh):
        return own
    text = f"{seed is None} {own}"
    everyone = exchange(
        _place(mesh), mesh.get_local_rank(), mesh.size(), text,
        key="seed", timeout_s=_last_s(), check=check,
    )  # fmt: skip
    if seed is not None and len(set(everyone)) > 1:
        raise RankMismatch(
            f"RankMismatch: tensor ranks {_ranks(mesh)} were given the seeds "
            f"{[int(one.split()[1]) for one in everyone]}. Pass the same seed on all of them."
        )
    return int(everyone[0].split()[1])


def _last_s() -> float:
    """Seconds until a wait ends without a diagnosis: a minute after the watchdog should have ended it."""
    return TIMEOUT_S + 60.0


def _has_others(mesh: DeviceMesh) -> bool:
    """Whether there are other processes to compare with; a simulated group has none."""
    return mesh.size() > 1 and dist.get_backend(mesh.get_group()) != "fake"


def _ranks(mesh: DeviceMesh) -> list[int]:
    return dist.get_process_group_ranks(mesh.get_group())


def _place(mesh: DeviceMesh) -> Store:
    name = run_name()
    label = f"zs/{name.run}/{name.attempt}/tensor/{ranks_key(_ranks(mesh))}"
    return namespace(cast("Store", default_store()), label, mesh.get_local_rank())


def _shapes(model: nn.Module) -> dict[str, str]:
    """Shape, dtype and trainability of each parameter, and what dropout draws from."""
    found = {
        f"parameter {name}": f"{tuple(param.shape)} {param.dtype} trained={param.requires_grad}"
        for name, param in model.named_parameters(remove_duplicate=False)
    }
    if any(map(draws, model.modules())):  # the same elements on all tensor ranks
        state = torch.get_rng_state().numpy().tobytes()
        found["state of torch's generator (the model has dropout)"] = hashlib.sha256(
            state
        ).hexdigest()[:16]
    return found


def _values(model: nn.Module) -> dict[str, str]:
    """A fingerprint of each parameter and buffer that has values, by name."""
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    with torch.no_grad():
        prints = {
            name: fingerprint_of(tensor.detach().contiguous())
            for name, tensor in tensors.items()
            if not tensor.is_meta
        }
    return dict(zip(prints, _hex(prints.values()), strict=True))


def _hex(prints: Iterable[Tensor]) -> list[str]:
    """One transfer from the device for each tensor would be slow, so all are moved at once."""
    values = list(prints)
    if not values:
        return []
    host = torch.stack([value.to(values[0].device) for value in values]).tolist()
    return [f"{number & (2**64 - 1):x}" for number in host]


def _plans_text(store: Store, groups: Sequence[Sequence[int]], ranks: Sequence[int]) -> str:
    named = [[ranks[at] for at in places] for places in groups]
    return mismatch_text(named, plans_of(store, groups))


def _values_text(names: list[str], everyone: list[str], ranks: list[int]) -> str:
    rows = [one.split(",") for one in everyone]
    at = next(i for i in range(len(names)) if len({row[i] for row in rows}) > 1)
    odd = [rank for rank, row in zip(ranks, rows, strict=True) if row[at] != rows[0][at]]
    return (
        f"RankMismatch: {names[at]!r} has other values on {rank_ranges(odd)} than on rank {ranks[0]}. "
        "Tensor ranks cut one model, so all of them must have the same values.\n"
        "  Call torch.manual_seed() with one number on all ranks before you build the model, load "
        "the same weights on all of them, or build the model on the meta device."
    )
