"""Small state as JSON and tensors: plain values are restored, others are refused."""

from __future__ import annotations

import json
import math
import struct
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, namedtuple
from enum import Enum
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load as load_tensors
from safetensors.torch import save as save_tensors
from support.covering import FULL

from zeroshard.checkpoint import json_state
from zeroshard.checkpoint.json_state import decode, encode
from zeroshard.errors import CheckpointError
from zeroshard.zero.sharded_parameter import ReadOnlyCopy


def through_files(value, **options):
    """What comes back after strict JSON in UTF-8 and a safetensors file."""
    form, tensors = encode(value, where="state", **options)
    text = json.dumps(form, allow_nan=False, ensure_ascii=False).encode()
    return decode(json.loads(text), load_tensors(save_tensors(tensors)), where="state", **options)


def assert_same(a, b):
    """Same types all the way down, same bits (but for NaN as a float), same order."""
    assert type(a) is type(b), (a, b)
    if isinstance(a, torch.Tensor):
        assert (a.dtype, a.shape) == (b.dtype, b.shape)
        assert a.reshape(-1).view(torch.uint8).tolist() == b.reshape(-1).view(torch.uint8).tolist()
    elif isinstance(a, (np.ndarray, np.generic)):
        assert (a.dtype, a.shape, a.tobytes()) == (b.dtype, b.shape, b.tobytes())
    elif isinstance(a, float):
        assert struct.pack("d", a) == struct.pack("d", b) or (math.isnan(a) and math.isnan(b))
    elif isinstance(a, dict):
        assert len(a) == len(b)
        for x, y in zip(a.items(), b.items(), strict=True):
            assert_same(x, y)
        assert getattr(a, "default_factory", None) is getattr(b, "default_factory", None)
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            assert_same(x, y)
    elif isinstance(a, Namespace):
        assert_same(vars(a), vars(b))
    else:
        assert a == b


VALUES = {
    "plain": [None, True, False, 0, -1, 1.5, -0.0, 5e-324, "", "naïve \U0001f40d"],
    "not finite": [math.nan, math.inf, -math.inf],
    "large ints": [2**53 + 1, 2**63 - 1, -(2**63), 2**63, -(2**200), 10**5000],
    "bytes": [b"", bytes(range(256))],
    "tuples": ((), (1,), [(1, (2, [3]))]),
    "sets": [set(), {1, "a", (2, 3)}, frozenset({frozenset({1})})],
    "keys": {1: "int", "1": "str", 1.5: 0, None: 1, (1, "a"): 2, b"k": 3, True + 1: 4},
    "marks": {"$int": "0x1", "$": 1, "plain": {"$tensor": "state/0"}, "list": [{"$dict": []}]},
    "lone surrogate": {"\udc80": "a\ud800b", "n": Namespace(**{"\udc80": 1})},
    "order": {"b": 1, "a": 2},
    "ordered": OrderedDict([("b", 1), (2, [1])]),
    "counter": Counter({30: 2, "x": -1}),
    "default": defaultdict(list, {1: [2]}),
    "default without factory": defaultdict(None, a=1),
    "namespace": Namespace(lr=0.1, out=Path("runs") / "a", layers=(1, 2), **{"odd name": {1: 2}}),
    "path": Path("/a/b.txt"),
    "torch": [torch.Size([]), torch.Size([2, 3]), torch.bfloat16, torch.device("cuda", 1)],
    "numpy scalars": [
        np.float64(0.1), np.float32(math.nan), np.int64(7), np.uint8(255), np.bool_(True),
        np.complex64(1j), np.str_("a\u00e9"), np.str_(""), np.bytes_(b"x"), np.datetime64("2026-01-01"),
        np.timedelta64(3, "s"), np.float16(1), np.longdouble(1) / 3,
    ],
    "numpy arrays": [
        np.arange(6).reshape(2, 3).T, np.array(1.5), np.zeros((0, 3), np.float32),
        np.array([1, 2], ">i4"), np.array(["a", "bcd"]), np.zeros(0, "U3"), np.array([True, False]),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", VALUES)
def test_values_come_back_with_their_types(name):
    assert_same(through_files(VALUES[name]), VALUES[name])


@pytest.mark.parametrize(
    "dtype",
    sorted(json_state.STORED | set(json_state.STORED_AS_BYTES.values()), key=str),
    ids=str,
)
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
@pytest.mark.filterwarnings("ignore:ComplexHalf")
def test_tensors_of_every_dtype_come_back_bit_by_bit(dtype, shape):
    generator = torch.Generator().manual_seed(0)
    nbytes = math.prod(shape) * dtype.itemsize
    data = torch.randint(2 if dtype == torch.bool else 256, (nbytes,), generator=generator)
    value = data.to(torch.uint8).view(dtype).view(shape)
    assert_same(through_files({"t": value})["t"], value)


def test_tensors_that_are_no_plain_memory():
    base = torch.arange(12.0).view(3, 4)
    parameter = torch.nn.Parameter(base.clone())
    values = [base.t(), base[:, 1], base.expand(2, 3, 4), parameter, parameter * 2]
    values += [torch.complex(base, base).conj(), torch.complex(base, base).conj().imag]
    back = through_files(values)
    for value, other in zip(values, back, strict=True):
        assert torch.equal(value, other)
        assert type(other) is torch.Tensor
        assert not other.requires_grad
        assert other.is_contiguous()


def test_copies_of_sharded_parameters_are_stored_as_tensors():
    copy = torch.arange(4.0)
    copy.__class__ = ReadOnlyCopy
    _, tensors = encode(copy, where="state")
    assert type(tensors["state/0"]) is torch.Tensor
    assert_same(tensors["state/0"], torch.arange(4.0))


def test_what_was_encoded_does_not_follow_later_changes():
    tensor, array = torch.zeros(3), np.zeros(3)
    form, tensors = encode([tensor, array], where="state")
    tensor.fill_(1)
    array.fill(1)
    back = decode(form, tensors, where="state")
    assert back[0].tolist() == back[1].tolist() == [0, 0, 0]


def test_tensors_are_named_after_the_place():
    form, tensors = encode({"a": torch.zeros(1), "b": [torch.ones(2)]}, where="client_state")
    assert form == {"a": {"$tensor": "client_state/0"}, "b": [{"$tensor": "client_state/1"}]}
    assert [len(t) for t in tensors.values()] == [1, 2]


def test_plain_state_is_plain_json():
    value = {"epoch": 3, "losses": [1.5, 2], "name": "a", "nested": {"x": None}}
    assert encode(value, where="state") == (value, {})


def test_sets_are_written_in_an_order_of_their_own():
    assert encode({"b", "a", 1}, where="s") == encode({1, "a", "b"}, where="s")
    assert encode({8, 0, 16}, where="s")[0] == {"$set": [0, 16, 8]}


@pytest.mark.parametrize("seen", [0, 4, 9])
def test_schedules_of_torch_go_on_exactly(seen):
    def schedule():
        optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
        return torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5, 5, 8], gamma=0.5)

    def rates(schedule, count):
        seen = []
        for _ in range(count):
            schedule.optimizer.step()
            schedule.step()
            seen.append(schedule.get_last_lr())
        return seen

    first, second = schedule(), schedule()
    rates(first, seen)
    second.load_state_dict(through_files(first.state_dict()))
    second.optimizer.load_state_dict(through_files(first.optimizer.state_dict()))
    assert type(second.milestones) is Counter
    assert rates(first, 6) == rates(second, 6)


# ---------------------------------------------------------------------- what is refused


class Colour(Enum):
    RED = 1


class Weird(int):
    pass


Point = namedtuple("Point", "x y")


class Tagged(torch.Tensor):
    pass


REFUSED = {
    "a function. Checkpoints contain plain data": lambda: 0,
    "a Colour. .*Store its name or its value": Colour.RED,
    r"a Weird. .*Store int\(...\) of it": Weird(3),
    r"a Point. .*Store tuple\(...\) of it": Point(1, 2),
    "a SGD. .*Store its state_dict": torch.optim.SGD([torch.zeros(1)]),
    r"a SimpleNamespace. .*Store vars\(...\)": SimpleNamespace(a=1),
    "a ndarray. ": np.array([object()]),
    "a void. ": np.zeros(1, [("a", "i4")])[0],
    "a Tagged. .*Store the plain tensors": torch.zeros(2).as_subclass(Tagged),
    "a sparse, nested or quantized tensor": torch.eye(2).to_sparse(),
    "a tensor on the meta device": torch.zeros(2, device="meta"),
    "a defaultdict whose factory is a function": defaultdict(lambda: 0),
}


@pytest.mark.parametrize("text", REFUSED)
def test_what_cannot_be_kept_is_named_with_its_place(text):
    state = {"args": Namespace(items=[0, {(1, 2): REFUSED[text]}])}
    with pytest.raises(CheckpointError, match=rf"^client_state\['args'\].items\[1\].* is {text}"):
        encode(state, where="client_state")


def test_the_way_out_is_named():
    with pytest.raises(CheckpointError) as caught:
        encode({"args": Namespace(fn=print)}, where="client_state")
    assert str(caught.value) == (
        "client_state['args'].fn is a builtin_function_or_method. Checkpoints contain plain data "
        "and tensors; nothing is pickled, because loading a pickle can run any code. Store plain "
        'data, or set "checkpoint": {"allow_pickle": true}.'
    )


def test_keys_and_members_are_named_too():
    with pytest.raises(CheckpointError, match=r"^s\['a'\] \(key 1\) is a Colour"):
        encode({"a": {1: 2, Colour.RED: 3}}, where="s")
    with pytest.raises(CheckpointError, match=r"^s \(member 0\) is a Colour"):
        encode({Colour.RED}, where="s")
    with pytest.raises(CheckpointError, match=r"\(key 0\) is a tensor in a key or a set"):
        encode({torch.zeros(1): 1}, where="s")
    with pytest.raises(CheckpointError, match="is a tensor in a key or a set"):
        encode({(1, torch.zeros(1))}, where="s")
    encode({(1, 2): torch.zeros(1)}, where="s")


def test_messages_stay_short():
    with pytest.raises(CheckpointError) as caught:
        encode({"k" * 10_000: {10**6000: Namespace(**{"n" * 10_000: print})}}, where="s")
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize("kind", ["list", "dict", "namespace", "through two"])
def test_a_cycle_is_an_error(kind):
    if kind == "list":
        value = []
        value.append(value)
    elif kind == "dict":
        value = {}
        value["self"] = value
    elif kind == "namespace":
        value = Namespace()
        value.me = {"x": value}
    else:
        inner = {}
        value = [inner]
        inner["x"] = (1, value)
    with pytest.raises(CheckpointError, match="A cycle cannot be stored"):
        encode(value, where="state")


def test_one_object_at_two_places_comes_back_as_two():
    shared, tensor = [1], torch.ones(1)
    a, b, c, d = through_files([shared, shared, tensor, tensor])
    assert a == b == [1]
    assert a is not b
    assert c.data_ptr() != d.data_ptr()


def test_what_would_be_written_for_ever_is_an_error(monkeypatch):
    monkeypatch.setattr(json_state, "MAX_VALUES", 1000)
    value = []
    for _ in range(40):
        value = [value, value]
    with pytest.raises(CheckpointError, match="comes after 1000 other values"):
        encode(value, where="state")
    encode(list(range(1000)), where="state")


def nested(depth, wrap):
    value = 0
    for _ in range(depth):
        value = wrap(value)
    return value


@pytest.mark.parametrize("wrap", [lambda v: [v], lambda v: {1: v}, lambda v: (v,)], ids="abc")
def test_nesting_has_a_limit(wrap):
    deepest = nested(64, wrap)
    assert through_files(deepest) == deepest
    with pytest.raises(CheckpointError, match="is nested in more than 64"):
        encode(nested(65, wrap), where="state")
    with pytest.raises(CheckpointError, match="is nested in more than 64"):
        encode(nested(100_000, wrap), where="state")


# ---------------------------------------------------------------------- pickles on request


def test_allowed_pickles_come_back():
    value = {"a": Colour.RED, Colour.RED: [Point(1, 2)], "d": defaultdict(Counter, x=Counter("a"))}
    assert through_files(value, allow_pickle=True) == value
    plain = {"a": [1, torch.ones(2)]}
    assert "pickle" not in json.dumps(encode(plain, where="s", allow_pickle=True)[0])


def test_a_pickle_is_not_loaded_unasked():
    class Bomb:
        def __reduce__(self):
            return (pytest.fail, ("the pickle was run",))

    form, tensors = encode({"x": [Bomb()]}, where="state", allow_pickle=True)
    text = r"^state\['x'\]\[0\] is a pickle, .* set \"checkpoint\": {\"allow_pickle\": true}"
    with pytest.raises(CheckpointError, match=text):
        decode(form, tensors, where="state")


def test_what_cannot_even_be_pickled_is_named():
    with pytest.raises(
        CheckpointError, match=r"^s\['f'\] is a function, which cannot even be pickled"
    ):
        encode({"f": lambda: 0}, where="s", allow_pickle=True)


def test_a_damaged_pickle_is_a_checkpoint_error():
    with pytest.raises(CheckpointError, match="s cannot be unpickled"):
        decode({"$pickle": "YWJj"}, {}, where="s", allow_pickle=True)


# ---------------------------------------------------------------------- hostile JSON

TENSORS = {
    "s/0": torch.arange(16, dtype=torch.uint8),
    "s/1": torch.ones(2, 3),
    "s/2": torch.arange(33, dtype=torch.uint8)[1:],
}


@pytest.mark.parametrize(
    "form",
    [
        {"$nothing": 1},
        {"$int": "12"[:0]},
        {"$int": "x"},
        {"$int": 5},
        {"$int": "0x1", "b": 2},
        {"a": 1, "$b": 2},
        {"$float": None},
        {"$bytes": "é"},
        {"$bytes": "abc"},
        {"$tuple": {}},
        {"$set": [[1]]},
        {"$dict": [[[1], 2]]},
        {"$dict": [[1, 2], [1, 3]]},
        {"$dict": [[1, 2], [True, 3]]},
        {"$dict": [[1]]},
        {"$dict": [1]},
        {"$defaultdict": ["exec", []]},
        {"$defaultdict": [[], []]},
        {"$defaultdict": []},
        {"$namespace": [[1, 2]]},
        {"$size": [-1]},
        {"$size": [2**70]},
        {"$size": ["a"]},
        {"$size": [True]},
        {"$dtype": "nn"},
        {"$dtype": []},
        {"$device": "nowhere:3"},
        {"$device": "cuda:99999999999999999"},
        {"$path": 3},
        {"$tensor": "missing"},
        {"$tensor": ["s/0"]},
        [{"$tensor": "s/0"}, {"$tensor": "s/0"}],
        {"$tensor_bytes": ["s/1", "complex64", [2]]},
        {"$tensor_bytes": ["s/0", "complex64", [3]]},
        {"$tensor_bytes": ["s/0", "complex64", [-2]]},
        {"$tensor_bytes": ["s/0", "float32", [4]]},
        {"$numpy": ["|O8", "AAAAAAAAAAA="]},
        {"$numpy": ["<f8", "AAAA"]},
        {"$numpy": ["<U1", "////fw=="]},
        {"$numpy": ["<M8[nonsense]", "AAAAAAAAAAA="]},
        {"$numpy": ["<i3", "AAAA"]},
        {"$ndarray": ["s/0", "<f4", [2**62, 2**62]]},
        {"$ndarray": ["s/0", "<f4", [5]]},
        {"$ndarray": ["s/1", "<f4", [2, 3]]},
        {"$ndarray": ["s/0", "|O8", [2]]},
        {"$pickle": "gASVAAAA"},
        {"$path": {"$int": "0x1"}},
        {1: 2},
        (1, 2),
        ...,
    ],
    ids=repr,
)
def test_damaged_json_is_a_checkpoint_error(form):
    with pytest.raises(CheckpointError, match=r"^s"):
        decode(form, TENSORS, where="s")


@pytest.mark.parametrize("mark", ["$tuple", "$dict", "$path", None])
def test_deep_json_is_no_recursion_error(mark):
    def wrap(value):
        if mark is None:
            return [value]
        return {mark: {"$dict": [[[value], value]], "$tuple": [value]}.get(mark, value)}

    with pytest.raises(CheckpointError, match="nested in more than"):
        decode(nested(100_000, wrap), {}, where="s")


def test_bytes_at_any_address_become_wider_dtypes():
    form = {"$tensor_bytes": ["s/2", "complex128", [2]]}
    assert decode(form, TENSORS, where="s").dtype == torch.complex128


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
MARKS = st.sampled_from([*json_state._READ, "$", "$x"]) | st.text(max_size=3)
NAMES = st.sampled_from(
    [*TENSORS, "<f4", "|b1", "<U2", "complex64", "0x1f", "AAAA", "cuda:0", "list"]
)
HOSTILE = st.recursive(
    SCALARS | NAMES,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(MARKS, inner, max_size=2)
        | st.tuples(MARKS, inner).map(lambda pair: {pair[0]: pair[1]})
        | st.tuples(NAMES, NAMES, st.lists(st.integers(-1, 9), max_size=3)).map(list)
    ),
    max_leaves=20,
)


@settings(max_examples=400 if FULL else 150, deadline=None)
@given(HOSTILE)
def test_hostile_json_gives_a_value_or_a_checkpoint_error(form):
    try:
        decode(form, TENSORS, where="s")
    except CheckpointError as error:
        assert len(str(error)) < 1000


KEYS = st.recursive(
    st.none() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=2).map(tuple) | st.frozensets(inner, max_size=2),
    max_leaves=3,
)
# Of an instance: `__dict__`, `__class__` and others cannot be set to any value.
ATTRIBUTES = st.text().filter(lambda name: not hasattr(Namespace(), name))
PLAIN = st.recursive(
    SCALARS | st.text(st.characters()) | st.binary() | st.floats(width=32).map(np.float32),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=3)
        | st.dictionaries(MARKS, inner, max_size=3)
        | st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict)
        | st.dictionaries(ATTRIBUTES, inner, max_size=3).map(lambda d: Namespace(**d))
        | st.sets(KEYS, max_size=3)
    ),
    max_leaves=15,
)


@settings(max_examples=200, deadline=None)
@given(PLAIN)
def test_whatever_is_plain_comes_back(value):
    assert_same(through_files(value), value)
