"""A data loader whose position can be saved, and resumed on another number of ranks.

In one epoch, local sample ``i`` of rank ``r`` is number ``i * W + r`` of a permutation that all ranks
know. After ``k`` batches of ``B`` samples on each rank, exactly the first ``k * B * W`` numbers are
consumed. So one number is the position, for any number of ranks and any batch size. The rest of the
permutation is distributed again, and no sample is lost or repeated, except those that pad the end so that
all ranks have equally many. A batch counts when the loader yields it, not when a worker reads it ahead.

After a resume inside an epoch, the next pass over the loader yields the rest of the epoch, which may be
empty. The pass after that is whole. ``len(loader)`` is always that of a whole epoch.

Letters: ``W`` ranks, ``B`` samples in a batch of one rank.
"""

from __future__ import annotations

import copy
import hashlib
import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
)

from zeroshard.checkpoint.rng import rng_state, set_rng_state
from zeroshard.errors import CheckpointError, UsageError

_log = logging.getLogger(__name__)


class ResumableSampler(DistributedSampler[Any]):
    """torch's ``DistributedSampler``, whose next pass may begin inside the epoch.

    Order, padding and arguments are torch's. ``consumed``: samples of the epoch that were yielded, over
    all ranks; 0 in a new epoch.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        num_replicas: int,
        rank: int,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        super().__init__(dataset, num_replicas, rank, shuffle, seed, drop_last)
        self.consumed = 0
        self.begin = 0  # where the next pass begins

    @property
    def dataset_len(self) -> int:
        return len(self.dataset)  # type: ignore[arg-type]

    def set_epoch(self, epoch: int) -> None:
        """Choose the permutation. The position inside the epoch is kept if the epoch stays the same."""
        if epoch != self.epoch:
            self.consumed = self.begin = 0
        super().set_epoch(epoch)

    def __iter__(self) -> Iterator[int]:
        """This rank's indices from ``begin`` on. The next pass begins at 0."""
        begin, self.begin = self.begin, 0
        order = self._order()
        mine = dealt(order, begin, self.rank, self.num_replicas, drop_last=self.drop_last)
        return iter(mine.tolist())

    def _order(self) -> torch.Tensor:
        if not self.shuffle:
            return torch.arange(self.dataset_len)
        generator = torch.Generator().manual_seed(self.seed + self.epoch)
        return torch.randperm(self.dataset_len, generator=generator)


def dealt(
    order: torch.Tensor, begin: int, dp_rank: int, dp_size: int, *, drop_last: bool
) -> torch.Tensor:
    """The part of ``order[begin:]`` that ``dp_rank`` gets; equally long on all ranks. Pure.

    The end is padded with the start of ``order``, or cut with ``drop_last``. ``order``: int64 ``[n]``.

    >>> [dealt(torch.arange(7), 3, r, 3, drop_last=False).tolist() for r in range(3)]
    [[3, 6], [4, 0], [5, 1]]
    """
    left = len(order) - begin
    count = left // dp_size if drop_last else -(-left // dp_size)
    places = begin + dp_rank + dp_size * torch.arange(count)
    return order[places % len(order)] if count else order[:0]


# ---------------------------------------------------------------------- positions


@dataclass(frozen=True, slots=True)
class PassBegin:
    """Where a pass over the loader began."""

    epoch: int = 0
    samples: int = 0  # consumed before the pass, over all ranks
    batches: int = 0  # yielded before the pass on this rank; they are read again
    noted: deque[Any] = field(default_factory=deque)  # sampler states at batches drawn ahead


# There is one class for each way of choosing samples. ``begin``: a pass begins. ``reach``: it has yielded
# so many batches on this rank. ``end``: it has no more. ``place``: where the loader is now; it costs
# nothing, since every step asks. ``state``: a place as plain data. ``load``: the next pass begins there;
# if the state does not fit, this raises CheckpointError and changes nothing.


class EpochPosition:
    """A prefix of the epoch's permutation. It is the same on all ranks and fits any number of ranks."""

    kind = "epoch"

    def __init__(self, sampler: ResumableSampler, batch_size: int) -> None:
        self._sampler = sampler
        self._batch_size = batch_size

    def begin(self) -> PassBegin:
        sampler = self._sampler
        sampler.consumed = sampler.begin
        return PassBegin(sampler.epoch, sampler.begin)

    def reach(self, begun: PassBegin, batches: int) -> None:
        sampler = self._sampler
        if sampler.epoch == begun.epoch:  # else the program has chosen another during the pass
            consumed = begun.samples + batches * self._batch_size * sampler.num_replicas
            sampler.consumed = min(consumed, sampler.dataset_len)

    def end(self, begun: PassBegin) -> None:
        if self._sampler.epoch == begun.epoch:
            self._sampler.consumed = 0

    def place(self) -> tuple[int, int]:
        return self._sampler.epoch, self._sampler.consumed

    def state(self, place: Any) -> dict[str, Any]:
        sampler = self._sampler
        return {
            "epoch": place[0],
            "samples": place[1],
            "dataset_len": sampler.dataset_len,
            "shuffle": sampler.shuffle,
            "seed": sampler.seed,
        }

    def load(self, state: Mapping[str, Any]) -> None:
        sampler = self._sampler
        before, now = _count(state, "dataset_len"), sampler.dataset_len
        epoch, samples = _count(state, "epoch"), _count(state, "samples", before)
        if before != now:
            raise CheckpointError(
                f"the dataset has {now} samples, and had {before} when the checkpoint was "
                f"written. So it is unknown which {samples} of them were used in epoch {epoch}. "
                "Resume with the same dataset, or without the position in it."
            )
        if (state.get("shuffle"), state.get("seed")) != (sampler.shuffle, sampler.seed):
            raise CheckpointError(
                "samples had another order when the checkpoint was written (shuffle "
                f"{state.get('shuffle')}, seed {state.get('seed')}; now {sampler.shuffle}, "
                f"{sampler.seed}), so some samples would be skipped and others used twice. Resume "
                "with the same sampler, or without the position in it."
            )
        sampler.set_epoch(epoch)
        sampler.consumed = sampler.begin = samples


class StreamPosition:
    """The number of batches read from an ``IterableDataset`` on this rank.

    Only the dataset knows which samples a rank, a worker or a batch gets. So the numbers of ranks and
    workers and the batch size must be those of the saved state. A resume reads the earlier batches again
    and drops them.
    """

    kind = "stream"

    def __init__(self, batch_size: int, dp_size: int, num_workers: int) -> None:
        self._cut = {
            "world_size": dp_size,
            "batch_size": batch_size,
            "num_workers": num_workers,
        }
        self._batches = 0
        self._begin = 0  # batches before the next pass

    def begin(self) -> PassBegin:
        self._batches, self._begin = self._begin, 0
        return PassBegin(batches=self._batches)

    def reach(self, begun: PassBegin, batches: int) -> None:
        self._batches = begun.batches + batches

    def end(self, begun: PassBegin) -> None:
        self._batches = 0

    def place(self) -> int:
        return self._batches

    def state(self, place: Any) -> dict[str, Any]:
        return {"batches": place, **self._cut}

    def load(self, state: Mapping[str, Any]) -> None:
        batches = _count(state, "batches")
        differ = [
            f"{name} {_count(state, name)} then and {now} now"
            for name, now in self._cut.items()
            if _count(state, name) != now
        ]
        if differ and batches:
            raise CheckpointError(
                "training_data is an IterableDataset, which chooses by itself what a rank reads. "
                "The checkpoint was written in the middle of an epoch with other numbers: "
                f"{', '.join(differ)}. Resume with the same ones, or use a dataset with a length "
                "and __getitem__."
            )
        self._batches = self._begin = batches


class SamplerPosition:
    """The state of the program's own sampler, as it was when the last yielded batch was drawn.

    Workers draw ahead, so the state is recorded at each draw, and becomes the position when that batch is
    yielded. A sampler without ``state_dict`` and ``load_state_dict`` starts again after a resume.
    """

    kind = "sampler"

    def __init__(self, sampler: Any, batch_size: int, dp_size: int, is_main_rank: bool) -> None:
        self._sampler = sampler
        self._batch_size = batch_size
        self._dp_size = dp_size
        self._is_main_rank = is_main_rank
        self._can = hasattr(sampler, "state_dict") and hasattr(sampler, "load_state_dict")
        self._begun = PassBegin()
        self._current: Any = None  # None: ask the sampler
        self._has_warned = False

    def __len__(self) -> int:
        return len(self._sampler)

    def __iter__(self) -> Iterator[Any]:
        """The sampler's indices. The loader draws through this method."""
        noted = self._begun.noted
        for count, index in enumerate(self._sampler, 1):
            if self._can and count % self._batch_size == 0:
                noted.append(copy.deepcopy(self._sampler.state_dict()))
            yield index
        if self._can:  # for a last, shorter batch
            noted.append(copy.deepcopy(self._sampler.state_dict()))

    def begin(self) -> PassBegin:
        self._begun = PassBegin()
        self._current = copy.deepcopy(self._sampler.state_dict()) if self._can else None
        return self._begun

    def reach(self, begun: PassBegin, batches: int) -> None:
        if self._can:
            self._current = begun.noted.popleft()

    def end(self, begun: PassBegin) -> None:
        self._current = None

    def place(self) -> Any:
        return self._current

    def state(self, place: Any) -> dict[str, Any]:
        state = place
        if not self._can:
            self._warn("is not saved: after a resume the sampler starts from the beginning")
        elif state is None:
            state = copy.deepcopy(self._sampler.state_dict())
        return {"sampler": state, "world_size": self._dp_size}

    def load(self, state: Mapping[str, Any]) -> None:
        dp_size = _count(state, "world_size")
        if "sampler" not in state:
            raise CheckpointError("the saved position of the data is damaged: it has no sampler.")
        if not self._can or state["sampler"] is None:
            self._warn("is not in the checkpoint: the sampler starts from the beginning")
            return
        if dp_size != self._dp_size and self._is_main_rank:
            _log.warning(
                "the state of %s was saved on %d ranks and is loaded on %d: its load_state_dict "
                "decides whether samples are distributed again.",
                type(self._sampler).__name__,
                dp_size,
                self._dp_size,
            )
        self._sampler.load_state_dict(copy.deepcopy(state["sampler"]))
        self._current = None

    def _warn(self, what: str) -> None:
        """Log a warning once, on the main rank."""
        if not self._has_warned and self._is_main_rank:
            _log.warning(
                "the position in the data %s, since %s has no state_dict and load_state_dict. "
                "Give it both, or leave data_sampler out: the engine's own sampler shuffles like "
                "torch's DistributedSampler and continues at the saved position.",
                what,
                type(self._sampler).__name__,
            )
        self._has_warned = True


def _count(state: Mapping[str, Any], name: str, most: int = 2**63 - 1) -> int:
    value = state.get(name)
    if type(value) is not int or not 0 <= value <= most:
        raise CheckpointError(
            f"the saved position of the data is damaged: its {name!r} is {value!r:.40}, not a number "
            f"from 0 to {most}. Resume from another checkpoint, or without the position."
        )
    return value


# ---------------------------------------------------------------------- the loader


class ResumableLoader(DataLoader[Any]):
    """A ``DataLoader`` with a position: ``state_dict()`` and ``load_state_dict()``.

    Without a ``sampler`` every rank gets its part of the dataset, in the order of torch's
    ``DistributedSampler``. ``sampler.set_epoch`` keeps a loaded position if the epoch is the loaded one.
    An iterator draws nothing from torch's global generator. Workers are seeded from
    ``torch.initial_seed()``, the rank and the pass; a resumed pass has other seeds.
    """

    def __init__(
        self,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        dp_rank: int = 0,
        dp_size: int = 1,
        is_main_rank: bool = True,
        shuffle: bool = True,
        sampler: Any = None,
        drop_last: bool = False,
        pin_memory: bool = False,
        collate_fn: Callable[..., Any] | None = None,
        num_workers: int = 0,
    ) -> None:
        is_stream = isinstance(dataset, IterableDataset)
        if sampler is None and not is_stream:
            sampler = ResumableSampler(dataset, dp_size, dp_rank, shuffle)
        super().__init__(
            dataset,
            batch_size=batch_size,
            sampler=sampler,
            drop_last=drop_last,
            pin_memory=pin_memory,
            collate_fn=collate_fn,
            num_workers=num_workers,
            generator=torch.Generator(),
        )
        self.data_sampler = sampler  # DeepSpeed's name; None for a stream
        self.dp_rank = dp_rank
        self._passes = 0  # index of the current pass, or of the next one
        self.is_inside = False  # whether a pass has begun and not ended
        self._step_began: Any = None  # the place in this pass where the running step began
        self._position: EpochPosition | StreamPosition | SamplerPosition
        if is_stream:
            self._position = StreamPosition(batch_size, dp_size, num_workers)
        elif isinstance(sampler, ResumableSampler):
            self._position = EpochPosition(sampler, batch_size)
        else:
            self._position = drawn = SamplerPosition(sampler, batch_size, dp_size, is_main_rank)
            cast("BatchSampler", self.batch_sampler).sampler = drawn

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """One pass: the rest of the epoch after a resume, otherwise all of it."""
        self._passes += self.is_inside
        self.is_inside = True
        begun = self._position.begin()
        self._step_began = self._position.place()
        self.generator.manual_seed(
            _seed(
                torch.initial_seed(),
                self.dp_rank,
                self._passes,
                begun.samples,
                begun.batches,
            )
        )
        batches = super().__iter__()
        if begun.batches:
            _read_again(batches, begun.batches)
        for count, batch in enumerate(batches, 1):
            self._position.reach(begun, count)
            yield batch
        self._position.end(begun)
        self._passes += 1
        self.is_inside = False

    def end_step(self) -> None:
        """An optimizer step has ended: the next one begins after the batch that was yielded last."""
        self._step_began = self._position.place()

    def state_dict(self, *, before_step: bool = False) -> dict[str, Any]:
        """The position after the batch that was yielded last, as plain data.

        The same on all ranks, except for an ``IterableDataset`` or a sampler of the program.
        ``before_step``: that where the running step began, or else this pass.
        """
        goes_back = before_step and self.is_inside
        place = self._step_began if goes_back else self._position.place()
        return {
            "kind": self._position.kind,
            "passes": self._passes,
            **self._position.state(place),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next pass begin where ``state`` was taken, also on another number of ranks.

        Raises:
            CheckpointError: on every rank, before anything changes: the data differ (length, seed,
                shuffling), ``state`` is damaged, or an ``IterableDataset`` was read by another number of
                ranks.
        """
        kind = state.get("kind") if isinstance(state, Mapping) else None
        if kind != self._position.kind:
            raise CheckpointError(
                f"the checkpoint's position in the data is of the kind {kind!r:.40}, and this "
                f"loader's of the kind {self._position.kind!r} (epoch: a dataset with a length; "
                "stream: an IterableDataset; sampler: a data_sampler that the program passed). "
                "Resume with data of the same kind, or without the position."
            )
        passes = _count(state, "passes")
        self._position.load(state)
        self._passes, self.is_inside = passes, False


def _read_again(batches: Iterator[Any], count: int) -> None:
    """Read the batches that were yielded before. The CPU generators keep the states that they had."""
    _log.info("reading %d batches again to reach the saved position of the stream.", count)
    cpu = torch.device("cpu")
    random_state = rng_state(cpu)
    for _ in itertools.islice(batches, count):
        pass
    set_rng_state(random_state, cpu)


def _seed(*parts: int) -> int:
    """A seed of 63 bits that depends on all parts."""
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "little") >> 1


def check_dataset(dataset: Any) -> None:
    """Check that a loader can be made of a dataset.

    Raises:
        UsageError: it is a loader, or not a dataset.
    """
    is_data = hasattr(dataset, "__getitem__") or hasattr(dataset, "__iter__")
    if isinstance(dataset, DataLoader) or not is_data:
        raise UsageError(
            f"training_data is a {type(dataset).__name__}, not a dataset. Pass the dataset itself; "
            "the engine makes the loader that splits it over the ranks."
        )
