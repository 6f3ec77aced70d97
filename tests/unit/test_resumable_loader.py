"""A resumed loader keeps torch's order on any number of ranks. No sample is lost or repeated."""

from __future__ import annotations

import itertools
import json
import logging
import random
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, DistributedSampler, IterableDataset

from zeroshard.checkpoint.json_state import decode, encode
from zeroshard.data.batches import agreed_batches, loader_for
from zeroshard.data.data_loader import ResumableLoader, ResumableSampler
from zeroshard.errors import CheckpointError


def loaders(dp_size, batch_size, *, dataset=range(50), state=None, epoch=None, **options):
    """The loaders of all ranks, in one process."""
    made = []
    for rank in range(dp_size):
        loader = ResumableLoader(
            dataset,
            batch_size,
            dp_rank=rank,
            dp_size=dp_size,
            is_main_rank=rank == 0,
            collate_fn=list,
            **options,
        )
        if state is not None:
            loader.load_state_dict(through_json(state))
        if epoch is not None:
            loader.sampler.set_epoch(epoch)
        made.append(loader)
    return made


def through_json(state):
    form, tensors = encode(state, where="data")
    assert tensors == {}
    return decode(json.loads(json.dumps(form)), {}, where="data")


def take(ranks, count=None):
    """``count`` batches of every rank, or the rest of the epoch, and the common state."""
    iterators = [iter(loader) for loader in ranks]
    taken = [list(itertools.islice(iterator, count)) for iterator in iterators]
    states = [loader.state_dict() for loader in ranks]
    assert all(state == states[0] for state in states)
    return taken, states[0]


def samples(taken):
    return [x for batches in taken for batch in batches for x in batch]


# ---------------------------------------------------------------------- the order is torch's


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("dp_size", [1, 2, 3, 4, 7])
def test_a_fresh_epoch_is_that_of_torchs_sampler(dp_size, shuffle, drop_last):
    for n, rank, epoch in itertools.product((1, 2, 3, 12, 29), range(dp_size), (0, 3)):
        options = {"shuffle": shuffle, "seed": 5, "drop_last": drop_last}
        theirs = DistributedSampler(range(n), dp_size, rank, **options)
        ours = ResumableSampler(range(n), dp_size, rank, **options)
        theirs.set_epoch(epoch)
        ours.set_epoch(epoch)
        assert list(ours) == list(theirs)
        assert len(ours) == len(theirs)


@pytest.mark.parametrize("drop_last", [False, True])
def test_batches_are_those_of_torchs_loader(drop_last):
    for rank, loader in enumerate(loaders(3, 4, drop_last=drop_last)):
        sampler = DistributedSampler(range(50), 3, rank)
        theirs = DataLoader(range(50), 4, sampler=sampler, drop_last=drop_last, collate_fn=list)
        for epoch in (0, 0, 1):
            sampler.set_epoch(epoch)
            loader.sampler.set_epoch(epoch)
            assert list(loader) == list(theirs)
            assert len(loader) == len(theirs)


# ---------------------------------------------------------------------- resuming


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_resumed_run_gets_the_batches_that_would_have_come(num_workers, drop_last):
    options = {"num_workers": num_workers, "drop_last": drop_last}
    whole, _ = take(loaders(3, 4, epoch=2))
    expected = [batch for batch in whole[0] if len(batch) == 4 or not drop_last]
    for stop in range(len(expected) + 1) if num_workers == 0 else (2,):
        first, state = take(loaders(3, 4, epoch=2, **options), stop)
        rest, _ = take(loaders(3, 4, state=state, **options))
        together = [a + b for a, b in zip(first, rest, strict=True)]
        assert together[0] == expected
        assert samples(together) == samples([w[: len(expected)] for w in whole])


def test_the_pass_after_a_resumed_one_is_whole():
    _, state = take(loaders(2, 4, epoch=1), 3)
    ranks = loaders(2, 4, state=state)
    assert len(take(ranks)[0][0]) == 4
    assert take(ranks)[0] == take(loaders(2, 4, epoch=1))[0]


def test_a_resume_at_the_last_batch_has_nothing_left_of_that_epoch():
    loader = loaders(1, 10, epoch=1)[0]
    for _ in loader:
        state = loader.state_dict()
    ranks = loaders(1, 10, state=state, epoch=1)
    assert take(ranks)[0] == [[]]
    assert take(ranks)[0] == take(loaders(1, 10, epoch=1))[0]


def test_a_resume_after_the_end_of_a_pass_begins_the_next():
    whole, state = take(loaders(2, 10, epoch=1))
    assert state["samples"] == 0
    assert take(loaders(2, 10, state=state))[0] == whole


@settings(max_examples=150, deadline=None)
@given(
    n=st.integers(0, 60),
    legs=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(0, 3)), max_size=5),
    last=st.tuples(st.integers(1, 5), st.integers(1, 4), st.just(60)),
)
def test_nothing_is_lost_or_repeated_on_whatever_ranks(n, legs, last):
    state, seen = None, []
    for dp_size, batch_size, count in [*legs, last]:
        ranks = loaders(dp_size, batch_size, dataset=range(n), state=state, epoch=3)
        taken, state = take(ranks, count)
        assert len({len(samples([batches])) for batches in taken}) == 1, "every rank has as many"
        seen += samples(taken)
        if len(taken[0]) < count:
            break
        assert state["samples"] == min(n, len(seen))
    assert set(seen) == set(range(n))
    assert len(seen) - n < max(leg[0] for leg in [*legs, last]), "only the end is padded"


@pytest.mark.parametrize("change", [(3, 4), (4, 3), (2, 1), (1, 8)], ids=str)
def test_another_world_size_gets_the_rest_of_the_permutation(change):
    order = samples(take(loaders(1, 1, epoch=4))[0])
    first, state = take(loaders(change[0], 2, epoch=4), 3)
    seen = change[0] * 2 * 3
    assert sorted(samples(first)) == sorted(order[:seen])
    rest, _ = take(loaders(change[1], 5, state=state))
    by_rank = [samples([batches]) for batches in rest]
    dealt = [x for row in zip(*by_rank, strict=True) for x in row]
    assert dealt[: 50 - seen] == order[seen:]
    assert dealt[50 - seen :] == order[: len(dealt) - (50 - seen)]


def test_resumed_twice_in_one_epoch():
    whole, _ = take(loaders(2, 3))
    first, state = take(loaders(2, 3), 2)
    second, state = take(loaders(2, 3, state=state), 3)
    third, _ = take(loaders(2, 3, state=state))
    assert [a + b + c for a, b, c in zip(first, second, third, strict=True)] == whole


def test_workers_that_read_ahead_do_not_count():
    (loader,) = loaders(1, 2, num_workers=2)
    iterator = iter(loader)
    for count in range(1, 4):
        next(iterator)
        assert loader.state_dict()["samples"] == 2 * count


def test_a_pass_that_was_left_is_where_it_was_until_the_next_begins():
    (loader,) = loaders(1, 5)
    for batch in loader:
        break
    assert loader.state_dict()["samples"] == 5
    assert next(iter(loader)) == batch
    assert loader.state_dict()["samples"] == 5


def test_a_loaded_state_is_the_state():
    _, state = take(loaders(2, 3, epoch=2), 2)
    (loader,) = loaders(1, 7, state=state)
    assert loader.state_dict() == state


def test_the_length_stays_that_of_a_whole_epoch():
    _, state = take(loaders(2, 3), 2)
    (loader,) = loaders(1, 5, state=state)
    assert len(loader) == 10
    assert len(list(loader)) == 8


# ---------------------------------------------------------------------- set_epoch


def test_set_epoch_after_a_resume_keeps_the_position_of_that_epoch_only():
    whole, _ = take(loaders(2, 3, epoch=6))
    _, state = take(loaders(2, 3, epoch=6), 2)
    same = take(loaders(2, 3, state=state, epoch=6))[0]
    assert same == [batches[2:] for batches in whole]
    other = take(loaders(2, 3, state=state, epoch=7))[0]
    assert other == take(loaders(2, 3, epoch=7))[0]
    assert other != whole


def test_an_epoch_chosen_inside_a_pass_is_the_position():
    (loader,) = loaders(1, 5)
    for i, _ in enumerate(loader):
        if i == 2:
            loader.sampler.set_epoch(1)
        if i >= 2:
            state = loader.state_dict()
            assert (state["epoch"], state["samples"]) == (1, 0)


# ---------------------------------------------------------------------- random numbers


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_pass_draws_nothing_from_the_global_generators(num_workers):
    torch_state, python_state = torch.get_rng_state(), random.getstate()
    assert len(list(loaders(1, 5, num_workers=num_workers)[0])) == 10
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert random.getstate() == python_state


class Noise(Dataset):
    """Samples with a random number, as augmentation makes them."""

    def __len__(self):
        return 8

    def __getitem__(self, i):
        return i, torch.randint(10**9, ()).item()


def test_workers_draw_other_numbers_on_other_ranks_and_passes_and_the_same_ones_when_resumed():
    def noise(loader):
        return tuple(x for batch in loader for _, x in batch)

    ranks = loaders(2, 2, dataset=Noise(), num_workers=1)
    passes = [noise(loader) for loader in (*ranks, *ranks)]
    left = [next(iter(ranks[0]))]
    first = [numbers[:2] for numbers in (*passes, noise(left), noise(ranks[0]))]
    assert len(set(first)) == 6
    (other, _) = loaders(2, 2, dataset=Noise(), num_workers=1)
    list(other)
    (resumed, _) = loaders(2, 2, dataset=Noise(), num_workers=1, state=other.state_dict())
    assert noise(resumed) == passes[2]


# ---------------------------------------------------------------------- what does not fit


def test_a_dataset_of_another_length_is_an_error():
    _, state = take(loaders(1, 5, epoch=3), 2)
    with pytest.raises(
        CheckpointError,
        match=r"has 49 samples, and had 50 when .* which 10 of them were used in epoch 3",
    ):
        loaders(1, 5, dataset=range(49), state=state)


def test_another_order_is_an_error():
    _, state = take(loaders(1, 5), 2)
    with pytest.raises(
        CheckpointError, match=r"another order .*shuffle True, seed 0; now False, 0"
    ):
        loaders(1, 5, state=state, shuffle=False)


@pytest.mark.parametrize(
    "damage",
    [
        {"kind": "stream"},
        {"kind": ["epoch"]},
        {"samples": -1},
        {"samples": 51},
        {"samples": 2.0},
        {"samples": "x" * 10_000},
        {"epoch": None},
        {"epoch": 2**64},
        {"passes": True},
        {"dataset_len": "50"},
        {"seed": None},
    ],
    ids=str,
)
def test_a_damaged_state_is_an_error_and_changes_nothing(damage):
    (loader,) = loaders(1, 5)
    next(iter(loader))
    before = loader.state_dict()
    with pytest.raises(CheckpointError) as caught:
        loader.load_state_dict({**before, **damage})
    assert len(str(caught.value)) < 400
    assert loader.state_dict() == before


def test_no_dict_is_an_error():
    with pytest.raises(CheckpointError, match="of the kind None"):
        loaders(1, 5)[0].load_state_dict(None)


# ---------------------------------------------------------------------- streams


class Stream(IterableDataset):
    """Numbers; ``draws``: with a random one from the global generator each."""

    def __init__(self, *, draws=False):
        self.draws = draws

    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        step = info.num_workers if info else 1
        for x in range(info.id if info else 0, 22, step):
            yield (x, torch.rand(()).item()) if self.draws else x


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_is_read_again_up_to_where_it_was(num_workers, caplog):
    options = {"dataset": Stream(), "num_workers": num_workers}
    whole, _ = take(loaders(1, 4, **options))
    _, state = take(loaders(1, 4, **options), 2)
    (resumed,) = loaders(1, 4, state=state, **options)
    with caplog.at_level(logging.INFO, logger="zeroshard.data.data_loader"):
        rest, after = take([resumed], 2)
    assert rest == [whole[0][2:4]]
    assert after["batches"] == 4
    assert "reading 2 batches again" in caplog.text
    assert take([resumed])[0] == whole


def test_reading_again_draws_no_random_numbers():
    (loader,) = loaders(1, 4, dataset=Stream(draws=True))
    iterator = iter(loader)
    next(iterator)
    state, generator = loader.state_dict(), torch.get_rng_state()
    expected = next(iterator)
    (resumed,) = loaders(1, 4, dataset=Stream(draws=True), state=state)
    torch.set_rng_state(generator)
    assert next(iter(resumed)) == expected


def test_a_stream_resumes_only_as_it_was_cut():
    (loader,) = loaders(1, 4, dataset=Stream())
    fresh = loader.state_dict()
    next(iter(loader))
    state = loader.state_dict()
    text = "IterableDataset.* world_size 1 then and 2 now, batch_size 4 then and 3 now"
    with pytest.raises(CheckpointError, match=text):
        loaders(2, 3, dataset=Stream(), state=state)
    with pytest.raises(CheckpointError, match="num_workers 0 then and 2 now"):
        loaders(1, 4, dataset=Stream(), num_workers=2, state=state)
    loaders(2, 3, dataset=Stream(), state=fresh)  # nothing was read


# ---------------------------------------------------------------------- own samplers


class Own:
    """A sampler that can be resumed, as programs write them."""

    def __init__(self):
        self.drawn = 0

    def __len__(self):
        return 11

    def __iter__(self):
        while self.drawn < len(self):
            self.drawn += 1
            yield 2 * self.drawn
        self.drawn = 0

    def state_dict(self):
        return {"drawn": self.drawn}

    def load_state_dict(self, state):
        self.drawn = state["drawn"]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("stop", [0, 1, 2])
def test_an_own_sampler_is_carried(num_workers, stop):
    options = {"num_workers": num_workers}
    (loader,) = loaders(1, 4, sampler=Own(), **options)
    assert isinstance(loader.sampler, Own)
    assert len(loader) == 3
    (whole,), _ = take(loaders(1, 4, sampler=Own()))
    (first,), state = take([loader], stop)
    (rest,), _ = take(loaders(1, 4, sampler=Own(), state=state, **options))
    assert first + rest == whole == [[2, 4, 6, 8], [10, 12, 14, 16], [18, 20, 22]]


def test_an_own_sampler_starts_again_after_its_end():
    (loader,) = loaders(1, 4, sampler=Own())
    (whole,), state = take([loader])
    assert state["sampler"] == {"drawn": 0}
    assert take([loader])[0] == take(loaders(1, 4, sampler=Own(), state=state))[0] == [whole]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_was_drawn_ahead_for_a_pass_that_was_left_is_forgotten(num_workers):
    (loader,) = loaders(1, 4, sampler=Own(), num_workers=num_workers)
    for _ in range(2):
        loader.sampler.drawn = 0
        next(iter(loader))
        assert loader.state_dict()["sampler"] == {"drawn": 4}


def test_two_passes_at_once_over_an_own_sampler():
    (loader,) = loaders(1, 4, sampler=Own())
    assert len(list(zip(loader, loader, strict=False))) > 0


def test_a_sampler_without_state_is_noted_once(caplog):
    ranks = loaders(2, 4, sampler=list(range(9)))
    for _ in range(2):
        _, state = take(ranks, 1)
    assert (
        caplog.text.count(
            "is not saved: after a resume the sampler starts from the beginning, since list"
        )
        == 1
    )
    assert "leave data_sampler out" in caplog.text
    caplog.clear()
    (resumed, _) = loaders(2, 4, sampler=list(range(9)), state=state)
    assert caplog.text.count("is not in the checkpoint: the sampler starts from the beginning") == 1
    assert list(resumed)[0] == [0, 1, 2, 3]


def test_an_own_sampler_is_told_of_another_world_size(caplog):
    _, state = take(loaders(1, 4, sampler=Own()), 1)
    loaders(2, 4, sampler=Own(), state=state)
    assert caplog.text.count("the state of Own was saved on 1 ranks and is loaded on 2") == 1


# ---------------------------------------------------------------------- through the engine


def fake_engine(rank=0, dp_size=1):
    return SimpleNamespace(
        dp_rank=rank,
        dp_size=dp_size,
        is_main_rank=rank == 0,
        settings=SimpleNamespace(dataloader_drop_last=False),
        train_micro_batch_size_per_gpu=lambda: 3,
    )


def test_loaders_of_the_engine_can_be_resumed():
    def loader(rank, dp_size):
        return loader_for(fake_engine(rank, dp_size), list(range(20)), collate_fn=list)

    ranks = [loader(rank, 2) for rank in range(2)]
    first, state = take(ranks, 2)
    four = [loader(rank, 4) for rank in range(4)]
    for resumed in four:
        resumed.load_state_dict(state)
    rest, _ = take(four)
    assert sorted(samples(first) + samples(rest)) == list(range(20))


def test_evaluation_data_is_not_shuffled():
    loader = loader_for(fake_engine(), list(range(7)), 2, "eval", collate_fn=list)
    assert samples([list(loader)]) == list(range(7))


def test_ranks_that_agree_on_batches_are_where_they_say():
    """``engine.batches`` hands a batch out when all ranks have one."""
    loader = loader_for(fake_engine(), list(range(10)))
    seen = []
    for _ in agreed_batches(
        loader,
        exchange=lambda vote: vote[None],
        shares=[0],
        join=False,
        set_weight=lambda own, active: None,
    ):
        seen.append(loader.state_dict()["samples"])
    assert seen == [3, 6, 9, 10]
