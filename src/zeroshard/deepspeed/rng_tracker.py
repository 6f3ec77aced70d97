"""Streams of random numbers beside the default one, by name: DeepSpeed's and Megatron's tracker.

Tensor ranks draw equal numbers for what they all compute, from the default generator, and different ones
for their parts of weights and of hidden states, inside :meth:`RNGStatesTracker.fork`.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from zeroshard.deepspeed.device import get_accelerator
from zeroshard.errors import UsageError

_MODEL_PARALLEL_RNG_TRACKER_NAME = "model-parallel-rng"
_RANK = "tensor rank"
"""The entry of the states that says whose they are: int64 ``[1]``."""


class RNGStatesTracker:
    """The state of one generator of the device for each name.

    ``tensor_rank``: gives this rank's number among its tensor ranks. ``states_``: uint8 tensors in host
    memory. ``seeds_``: those that were given.
    """

    def __init__(self, tensor_rank: Callable[[], int]) -> None:
        self._tensor_rank = tensor_rank
        self.states_: dict[str, Tensor] = {}
        self.seeds_: set[int] = set()

    def reset(self) -> None:
        """Forget all streams."""
        self.states_, self.seeds_ = {}, set()

    def get_states(self) -> dict[str, Tensor]:
        """The state of each stream and the number of the tensor rank, to be saved; {} without streams."""
        return {**self.states_, _RANK: torch.tensor([self._tensor_rank()])} if self.states_ else {}

    def set_states(self, states: Mapping[str, Tensor]) -> None:
        """Continue the streams of :meth:`get_states`.

        The ``client_state`` of a checkpoint is that of rank 0. From the states of another tensor rank
        this one derives its own, the same ones each time: equal ones would give it equal numbers.
        """
        whose, own = states.get(_RANK), self._tensor_rank()
        found = {name: state for name, state in states.items() if name != _RANK}
        if whose is None or int(whose) == own:
            self.states_ = found
            return
        with self._kept():
            for name, state in found.items():
                text = bytes(state.tolist()) + own.to_bytes(8, "little")
                get_accelerator().manual_seed(
                    int.from_bytes(hashlib.sha256(text).digest()[:7], "little")
                )
                found[name] = get_accelerator().get_rng_state()
        self.states_ = found

    def add(self, name: str, seed: int) -> None:
        """Begin a stream.

        Raises:
            UsageError: the stream is there already, or another one has this seed.
        """
        if name in self.states_ or seed in self.seeds_:
            what = (
                f"a stream {name!r}" if name in self.states_ else f"a stream with the seed {seed}"
            )
            raise UsageError(
                f"the tracker of random numbers has {what} already, so add({name!r}, {seed}) would "
                "repeat its numbers. Call reset() first to begin anew."
            )
        with self._kept():
            get_accelerator().manual_seed(seed)
            self.states_[name] = get_accelerator().get_rng_state()
        self.seeds_.add(seed)

    @contextlib.contextmanager
    def fork(self, name: str = _MODEL_PARALLEL_RNG_TRACKER_NAME) -> Iterator[None]:
        """Draw from the stream in the block. The default generator is as before afterwards.

        Raises:
            UsageError: there is no such stream.
        """
        if name not in self.states_:
            raise UsageError(
                f"the tracker of random numbers has no stream {name!r}. Call "
                "deepspeed.checkpointing.model_parallel_cuda_manual_seed(seed) first, or add() with "
                f"this name. It has {', '.join(map(repr, self.states_)) or 'none'}."
            )
        with self._kept():
            get_accelerator().set_rng_state(self.states_[name])
            try:
                yield
            finally:
                self.states_[name] = get_accelerator().get_rng_state()

    def replaying(self, function: Callable[..., object]) -> Callable[..., object]:
        """``function``; calls after the first draw the numbers of the first from all streams.

        They leave the streams as they found them. For activations that are computed again.
        """
        at_first, calls = dict(self.states_), 0

        def run(*args: object, **kwargs: object) -> object:
            nonlocal calls
            calls += 1
            if calls == 1:
                return function(*args, **kwargs)
            now, self.states_ = self.states_, dict(at_first)
            try:
                return function(*args, **kwargs)
            finally:
                self.states_ = now

        return run

    @contextlib.contextmanager
    def _kept(self) -> Iterator[None]:
        before = get_accelerator().get_rng_state()
        try:
            yield
        finally:
            get_accelerator().set_rng_state(before)
