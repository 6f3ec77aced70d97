"""Saves and restores random number generators, also at another world size.

Every rank's generators are saved and restored, so that a resumed run draws the numbers that an
uninterrupted run would draw. With more ranks than were saved, some ranks have no saved state. A generator
that had the same state on all ranks is shared (ranks use it for common decisions) and stays shared. For
any other generator a new rank gets its own state, derived by hashing, so that every resume gives the same
one.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from collections.abc import Sequence
from typing import Any

import torch

from zeroshard.checkpoint.json_state import encode
from zeroshard.device.choice import ops_of
from zeroshard.errors import CheckpointError

State = dict[str, Any]
"""Generator -> its state, as data for :func:`zeroshard.checkpoint.json_state.encode`.

``torch``: uint8 ``[n]``. ``python``, ``numpy`` (if imported) and ``device`` (if not the CPU): dicts.
"""


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
    """The state with which ``rank`` resumes, at any world size. ``saved``: the states of the saved ranks.

    A saved rank gets its own state. Any other rank gets a state for each generator: the common one if all
    saved ranks had the same, else one derived from that of rank ``rank % len(saved)`` and from ``rank``.
    Pure.
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
