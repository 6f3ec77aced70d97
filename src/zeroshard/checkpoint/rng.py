"""Saves and restores random number generators, also at another world size.

Every rank's generators are saved and restored, so that a resumed run draws the numbers that an
uninterrupted run would draw. On another mesh, generators follow the samples: a rank gets those of the
first saved rank with its data-parallel rank, so ranks that share samples have equal generators. With more
data-parallel ranks than were saved, some have no saved state. A generator that had the same state on all
ranks is shared (ranks use it for common decisions) and stays shared. For any other generator a new rank
gets its own state, derived by hashing, so that every resume gives the same one.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from zeroshard.checkpoint.json_state import encode
from zeroshard.core.mesh import Mesh
from zeroshard.device.choice import ops_of
from zeroshard.errors import CheckpointError

State = dict[str, Any]
"""Generator -> its state, as data for :func:`zeroshard.checkpoint.json_state.encode`.

``torch``: uint8 ``[n]``. ``python``, ``numpy`` (if imported) and ``device`` (if not the CPU): dicts.
"""


@dataclass(frozen=True, slots=True)
class Predecessor:
    """Whose own state a rank continues: data position, buffers and generators.

    ``rank``: the saved rank that had the state. ``dp_rank``: this rank's data-parallel rank. ``firsts``:
    for each saved data-parallel rank the first saved rank that had it. Generators are those of ``rank``
    if ``is_same``, else :func:`rng_state_for` ``dp_rank`` of the ranks ``firsts``.
    """

    rank: int
    is_same: bool
    dp_rank: int
    firsts: tuple[int, ...]

    @property
    def read_ranks(self) -> set[int]:
        """The saved ranks whose state is read."""
        return {self.rank} if self.is_same else {self.rank, *self.firsts}


def predecessor(
    rank: int, mesh: Mesh, saved_mesh: str, saved_dp_ranks: Sequence[int]
) -> Predecessor:
    """The predecessor of ``rank`` of ``mesh`` in a saved run. Pure.

    ``saved_mesh``: the mesh as text; "" if every rank had samples of its own. On an equal mesh every rank
    continues itself.
    """
    firsts: dict[int, int] = {}
    for at, dp_rank in enumerate(saved_dp_ranks):
        firsts.setdefault(dp_rank, at)
    in_order = tuple(firsts[dp_rank] for dp_rank in sorted(firsts))
    is_same = saved_mesh == mesh_text(mesh) and len(saved_dp_ranks) == mesh.world_size
    dp_rank = mesh.dp_rank(rank)
    return Predecessor(
        rank if is_same else in_order[dp_rank % len(in_order)], is_same, dp_rank, in_order
    )


def mesh_text(mesh: Mesh) -> str:
    """The mesh as checkpoints name it: "" if every rank has samples of its own."""
    return "" if mesh.is_data_only else mesh.text


def rng_state(device: torch.device) -> State:
    """The state of the global generators: torch's, Python's, numpy's if imported, and the device's."""
    version, words, gauss = random.getstate()
    state: State = {
        "torch": torch.get_rng_state(),
        "python": {"version": version, "words": torch.tensor(words), "gauss": gauss},
    }
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        state["numpy"] = numpy.random.get_state(legacy=False)
    own = ops_of(device).rng_state()
    if own is not None:
        state["device"] = {"type": device.type, "state": own}
    return state


def set_rng_state(state: State, device: torch.device) -> None:
    """Set the global generators to ``state``.

    If nothing was saved for the kind of ``device``, its generator is seeded from torch's state, so that
    two resumes agree. numpy's generator is left alone if it was not saved.

    Raises:
        CheckpointError: a state does not fit its generator.
    """
    at = "torch"
    try:
        torch.set_rng_state(state["torch"].cpu())
        if device.type != "cpu":
            at = "device"
            _set_device(state, device)
        at = "python"
        words = tuple(state["python"]["words"].tolist())
        random.setstate((state["python"]["version"], words, state["python"]["gauss"]))
        if "numpy" in state:
            at = "numpy"
            import numpy

            numpy.random.set_state(state["numpy"])
    except (AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"the saved state of the {at} random generator does not fit: {error}. It was saved by "
            "another version, is damaged, or the program now uses another kind of generator. "
            "Resume with the program and the versions that saved it."
        ) from error


def _set_device(state: State, device: torch.device) -> None:
    ops = ops_of(device)
    saved = state.get("device", {})
    if saved.get("type") == device.type and "state" in saved:
        ops.set_rng_state(saved["state"].cpu())
        return
    seed = saved["seed"] if "seed" in saved else _seed(state["torch"], device.type)
    ops.manual_seed(seed)


def rng_state_for(rank: int, saved: Sequence[State]) -> State:
    """The state with which ``rank`` resumes, at any size. ``saved``: the states of the saved ranks.

    Ranks are data-parallel ranks, old and new. A saved rank gets its own state. Any other rank gets a
    state for each generator: the common one if all saved ranks had the same, else one derived from that
    of rank ``rank % len(saved)`` and from ``rank``. Pure.
    """
    if rank < len(saved):
        return saved[rank]
    near = saved[rank % len(saved)]
    return {
        part: near[part]
        if len({_digest(state.get(part)) for state in saved}) == 1
        else _derived(part, near[part], rank)
        for part in near
    }


def _derived(part: str, state: Any, rank: int) -> Any:
    """A state of the same generator, derived from every bit of ``state`` and from the rank."""
    seed = _seed(state, rank)
    if part == "torch":
        return torch.Generator().manual_seed(seed).get_state()
    if part == "python":
        version, words, gauss = random.Random(seed).getstate()
        return {"version": version, "words": torch.tensor(words), "gauss": gauss}
    if part == "numpy":
        import numpy

        words_of_seed = [seed & 0xFFFFFFFF, seed >> 32]
        return numpy.random.RandomState(words_of_seed).get_state(legacy=False)
    return {"type": state["type"], "seed": seed}


def _seed(state: Any, salt: int | str) -> int:
    """A seed of 63 bits, which every generator accepts."""
    digest = hashlib.sha256(_digest(state) + repr(salt).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


def _digest(state: Any) -> bytes:
    form, tensors = encode(state, where="rng")
    parts = [json.dumps(form).encode(), *(t.numpy().tobytes() for t in tensors.values())]
    return hashlib.sha256(b"".join(parts)).digest()
