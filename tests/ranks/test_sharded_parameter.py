"""Every way to read a sharded parameter gives the right values, or an error that names the parameter."""

from __future__ import annotations

import copy
import io
import pickle

import kit
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
import torch.utils.dlpack
from kit import DTYPES
from torch import nn
from zeroshard_testing import on_ranks

import zeroshard
from zeroshard.errors import NonFiniteError, ShardedAccess
from zeroshard.zero import GatheredParameters
from zeroshard.zero.sharded_parameter import ShardedParameter, StateEntry, list_on_request

STAGES = [0, 1, 2, 3]


class Net(nn.Module):
    """Two layers that read each other's weights nowhere, and a scalar at the root."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 6)
        self.second = nn.Linear(6, 5)
        self.gain = nn.Parameter(torch.tensor(0.5))
        self.register_buffer("shift", torch.ones(5))

    def forward(self, x):
        return self.second(F.relu(self.first(x))) * self.gain + self.shift


def build(precision="fp32"):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return Net().to(DTYPES[precision])


def engine_of(stage, model=None, precision="fp32"):
    model = build() if model is None else model
    keys = {"gradient_clipping": 1.0, "zero_optimization": {"overlap_comm": True}}
    return kit.engine(model, stage, precision, optimizer=kit.ADAMW, **keys)


def train_once(engine, value=1.0):
    dtype = next(engine.module.parameters()).dtype
    x = torch.full((2, 5), value, dtype=dtype) * (1 + dist.get_rank())
    engine.backward(engine(x).float().square().mean())
    engine.step()


def saved_and_loaded(value):
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def in_place_sum(p):
    total = torch.zeros_like(p)
    return total.add_(p).copy_(p)


def inputs(p):
    return torch.linspace(-1, 1, 15, dtype=p.dtype).view(3, 5)


READS = {
    "sum": lambda p: p.sum(),
    "torch.sum": torch.sum,
    "index": lambda p: p[0],
    "index twice": lambda p: p[0][1],
    "mask": lambda p: p[p > 0],
    "slice": lambda p: p[1:, ::2],
    "data": lambda p: p.data,
    "data view": lambda p: p.data.view(-1)[3:7].clone(),
    "detach": lambda p: p.detach(),
    "t": lambda p: p.t(),
    "T": lambda p: p.T.contiguous(),
    "view": lambda p: p.view(-1),
    "clone": lambda p: p.clone(),
    "numpy": lambda p: p.detach().numpy(),
    "cpu numpy": lambda p: p.data.cpu().numpy().copy(),
    "tolist": lambda p: p.tolist(),
    "item": lambda p: p[0, 0].item(),
    "float": lambda p: float(p[0, 0]),
    "iterate": lambda p: [row * 2 for row in p],
    "unbind": lambda p: list(p.unbind(0)),
    "stack": lambda p: torch.stack([p, p]),
    "cat": lambda p: torch.cat([p, torch.ones(1, p.shape[1])]),
    "einsum": lambda p: torch.einsum("ij,ij->i", p, p),
    "linear": lambda p: F.linear(inputs(p), p),
    "matmul": lambda p: inputs(p) @ p.t(),
    "right operand": lambda p: 2.0 - p,
    "compare": lambda p: p == p.detach(),
    "equal": lambda p: torch.equal(p, p.detach()),
    "allclose": lambda p: torch.allclose(p, p + 1e-12),
    "contains": lambda p: float(p.detach()[0, 0]) in p,
    "to other dtype": lambda p: p.to(torch.float64),
    "double": lambda p: p.double(),
    "type": lambda p: p.type(torch.float64),
    "type_as": lambda p: p.type_as(torch.ones(1, dtype=torch.float64)),
    "norm": lambda p: p.norm(),
    "linalg": lambda p: torch.linalg.vector_norm(p),
    "max": lambda p: p.max(0),
    "isnan": lambda p: p.isnan().any(),
    "where": lambda p: torch.where(p > 0, p, -p),
    "svd": lambda p: torch.linalg.svdvals(p),
    "out of another": lambda p: (
        torch.add(p, 1, out=torch.empty_like(p).detach()) if not torch.is_grad_enabled() else p + 1
    ),
    "into a plain tensor": lambda p: in_place_sum(p) if not torch.is_grad_enabled() else p + 1,
    "parameters_to_vector": lambda p: nn.utils.parameters_to_vector([p, p]),
    "foreach": lambda p: torch._foreach_mul([p, p], 2),
    "foreach norm": lambda p: torch._foreach_norm([p]),
    "get_total_norm": lambda p: nn.utils.get_total_norm([p.detach()]),
    "deepcopy": lambda p: copy.deepcopy(p),
    "deepcopy twice": lambda p: copy.deepcopy([p, p])[1],
    "copy": lambda p: copy.copy(p).detach(),
    "pickle": lambda p: pickle.loads(pickle.dumps(p)),
    "pickle data": lambda p: pickle.loads(pickle.dumps(p.data)),
    "save": saved_and_loaded,
    "save data": lambda p: saved_and_loaded({"w": p.data, "row": p.detach()[0]}),
    "new parameter of a clone": lambda p: nn.Parameter(p.data.clone()),
    "tensor of list": lambda p: torch.tensor(p.tolist()),
    "as_tensor": lambda p: torch.as_tensor(p.detach()),
    "asarray": lambda p: torch.asarray(p.detach()),
    "numpy array": lambda p: __import__("numpy").asarray(p.detach()),
    "dlpack": lambda p: torch.from_dlpack(p.detach()),
    "pin": lambda p: p.detach().contiguous(),
    "expand": lambda p: p.expand(2, *p.shape).sum(0),
    "new_tensor": lambda p: p.new_tensor([1.0]),
    "zeros_like": lambda p: torch.zeros_like(p),
    "ones_like": lambda p: torch.ones_like(p, dtype=torch.float64),
    "new_zeros": lambda p: p.new_zeros(3),
    "full_like": lambda p: torch.full_like(p, 3.0),
    "checkpoint": lambda p: torch.utils.checkpoint.checkpoint(torch.square, p, use_reentrant=False),
    "namedtuple": lambda p: torch.sort(p, 0),
    "block_diag": lambda p: torch.block_diag(p, p),
    "custom function": lambda p: Double.apply(p),
    "jit operator": lambda p: torch.ops.aten.add(p, p),
    "bool": lambda p: bool(p[0, 0] == p[0, 0]),
    "len of rows": lambda p: [len(row) for row in p],
    "str of values": lambda p: str(p.tolist()),
    "histogram": lambda p: torch.histc(p.detach(), 4),
}

METADATA = {
    "shape": lambda p: p.shape,
    "size": lambda p: (p.size(), p.size(0)),
    "numel": lambda p: (p.numel(), torch.numel(p), p.nelement()),
    "dim": lambda p: (p.dim(), p.ndim),
    "dtype": lambda p: p.dtype,
    "device": lambda p: p.device,
    "stride": lambda p: (p.stride(), p.stride(0), p.is_contiguous()),
    "len": len,
    "isinstance": lambda p: (isinstance(p, nn.Parameter), isinstance(p, torch.Tensor)),
    "is_tensor": torch.is_tensor,
    "is_leaf": lambda p: (p.is_leaf, p.requires_grad, p.grad_fn),
    "grad": lambda p: p.grad,
    "type": lambda p: p.type(),
    "element_size": lambda p: p.element_size() * p.numel(),
    "floating": lambda p: (p.is_floating_point(), torch.is_floating_point(p), p.is_complex()),
    "same tensor": lambda p: p.to(p.dtype) is p and p.to(p.device) is p and p.float() is p,
    "like": lambda p: (torch.zeros_like(p).tolist(), torch.empty_like(p).stride()),
    "new": lambda p: (p.new_ones(2).tolist(), p.new_zeros(2).dtype),
    "hash": lambda p: hash(p) == hash(p),
    "in a set": lambda p: p in {p},
    "in a list": lambda p: p in [p],
    "layout": lambda p: (p.layout, p.is_sparse, p.is_cuda),
}

WRITES = {
    "add_": lambda p: p.add_(1),
    "iadd": lambda p: p.__iadd__(1),
    "copy_": lambda p: p.copy_(torch.ones(6, 5)),
    "zero_": lambda p: p.zero_(),
    "setitem": lambda p: p.__setitem__(0, 1.0),
    "mask": lambda p: p.masked_fill_(torch.ones(6, 5) > 0, 0.0),
    "index_add_": lambda p: p.index_add_(0, torch.tensor([0]), torch.ones(1, 5)),
    "data assigned": lambda p: setattr(p, "data", torch.ones(6, 5)),
    "data in place": lambda p: p.data.mul_(2),
    "data filled": lambda p: p.data.fill_(2),
    "data item": lambda p: p.data.__setitem__(0, 1.0),
    "data of a row": lambda p: p.data[0].zero_(),
    "data clamp_": lambda p: p.data.clamp_(-1, 1),
    "detached": lambda p: p.detach().mul_(2),
    "view": lambda p: p.view(-1).mul_(2),
    "row": lambda p: p[0].mul_(2),
    "transposed": lambda p: p.t().mul_(2),
    "unbound": lambda p: p.unbind(0)[1].mul_(2),
    "chunk": lambda p: p.chunk(2)[0].zero_(),
    "out": lambda p: torch.add(torch.ones(6, 5), 1, out=p),
    "out data": lambda p: torch.add(torch.ones(6, 5), 1, out=p.data),
    "normal_": lambda p: nn.init.normal_(p),
    "kaiming": lambda p: nn.init.kaiming_uniform_(p),
    "orthogonal_": lambda p: nn.init.orthogonal_(p),
    "eye_": lambda p: nn.init.eye_(p),
    "trunc_normal_": lambda p: nn.init.trunc_normal_(p),
    "zeros_": lambda p: nn.init.zeros_(p),
    "init of data": lambda p: nn.init.ones_(p.data),
    "foreach": lambda p: torch._foreach_add_([p], 1.0),
    "foreach data": lambda p: torch._foreach_add_([p.data], 1.0),
    "vector_to_parameters": lambda p: nn.utils.vector_to_parameters(torch.ones(30), [p]),
    "set_": lambda p: p.set_(torch.ones(6, 5)),
    "resize_": lambda p: p.resize_(2, 2),
    "address": lambda p: p.data_ptr(),
    "storage": lambda p: p.untyped_storage(),
    "share_memory_": lambda p: p.share_memory_(),
    "uniform_": lambda p: p.uniform_(),
    "random": lambda p: torch.nn.init.uniform_(p, a=-1, b=1),
    "renorm": lambda p: p.data.renorm_(2, 0, 1.0),
    "dropout": lambda p: F.dropout(p, 0.5, inplace=True),
    "relu": lambda p: F.relu(p, inplace=True),
    "normalise": lambda p: F.normalize(p, out=p.data),
    "embedding renorm": lambda p: F.embedding(torch.tensor([0]), p, max_norm=0.01),
}


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return grad * 2 + 0 * x


def same(a, b) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.detach(), b.detach())
    if isinstance(a, dict):
        return all(same(a[k], b[k]) for k in b)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool((a == b).all()) if hasattr(a, "all") else a == b


def outcome(read, p):
    """The result of a call, or the class of its exception."""
    try:
        return read(p)
    except Exception as error:
        return type(error)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_every_read_does_what_it_does_to_an_ordinary_parameter(stage, precision, grad):
    with engine_of(stage, precision=precision) as engine:
        train_once(engine)
        truth = {name: full.clone() for name, full in engine.iter_full_params()}
        plain = nn.Parameter(truth["first.weight"])
        wrong = []
        for name, read in READS.items():
            if stage == 1:  # the values of a resident unit are on their way right after a step
                for unit in engine.runtime.units:
                    unit.all_gather_updated()
            p = engine.module.first.weight
            assert type(p) is ShardedParameter
            with torch.set_grad_enabled(grad):
                seen, expected = outcome(read, p), outcome(read, plain)
            assert precision != "fp32" or not isinstance(expected, type), name
            if not same(seen, expected):
                wrong.append(f"{name}: {str(seen)[:80]} != {str(expected)[:80]}")
        assert not wrong, "\n".join(wrong)


def listed(engine):
    """The engine's module, whose parameters now give their values on request."""
    list_on_request(engine.module.parameters())
    return engine.module


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@on_ranks(2)
def test_every_read_of_an_entry_does_what_it_does_to_a_value_of_a_state_dict(precision):
    with engine_of(3, precision=precision) as engine:
        train_once(engine)
        truth = {name: full.clone() for name, full in engine.iter_full_params()}
        state = listed(engine).state_dict()
        assert type(state["first.weight"]) is StateEntry
        wrong = []
        for name, read in READS.items():
            seen = outcome(read, state["first.weight"])
            expected = outcome(read, truth["first.weight"])
            if not same(seen, expected):
                wrong.append(f"{name}: {str(seen)[:80]} != {str(expected)[:80]}")
        assert not wrong, "\n".join(wrong)


class ListsItself(nn.Linear):
    """Makes its part of a state dict itself, as quantised layers do."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination[prefix + "packed"] = self.weight.detach()


class Mode(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@on_ranks(2)
def test_one_rank_lists_a_state_dict_alone_however_it_is_made():
    model = build()
    model.second = ListsItself(6, 5)
    with engine_of(3, model) as engine:
        truth = {name: full.clone() for name, full in engine.iter_full_params()}
        listed(engine)
        if dist.get_rank() == 1:
            state = engine.module.state_dict()
            with Mode():
                assert engine.module.state_dict().keys() == state.keys()
            with torch.inference_mode():
                assert type(engine.module.state_dict()["gain"]) is StateEntry
            with torch.device("cpu"):
                assert type(engine.module.first.state_dict()["weight"]) is StateEntry
            assert type(state["second.packed"]) is type(model.first.bias.detach()) is StateEntry
            shapes = {name: tuple(value.shape) for name, value in state.items()}
            assert shapes["second.packed"] == (5, 6)
            assert shapes["first.weight"] == (6, 5)
            assert {value.device.type for name, value in state.items() if name != "shift"} == {
                "meta"
            }
        train_once(engine)
        state = engine.module.state_dict()
        now = dict(engine.iter_full_params())
        assert not torch.equal(truth["second.weight"], now["second.weight"])
        assert torch.equal(state["second.packed"], now["second.weight"])


@on_ranks(2)
def test_an_entry_is_never_stale_and_what_was_copied_from_it_stays():
    with engine_of(3) as engine:
        train_once(engine)
        state = listed(engine).state_dict()
        before = copy.deepcopy(state)
        truth = {name: full.clone() for name, full in engine.iter_full_params()}
        train_once(engine, 2.0)
        for name, full in engine.iter_full_params():
            assert torch.equal(before[name], truth[name])
            assert type(before[name]) is torch.Tensor
            assert torch.equal(state[name], full)
            assert not torch.equal(full, truth[name])
        with GatheredParameters(list(engine.module.parameters()), modifier_rank=0):
            for param in engine.module.parameters():
                nn.init.constant_(param, 3.0)
            assert all((state[name] == 3).all() for name in truth)
        assert all((state[name] == 3).all() for name in truth)
    with pytest.raises(ShardedAccess, match="closed"):
        state["first.weight"].sum()


@on_ranks(2)
def test_a_state_dict_of_entries_fills_another_model():
    with engine_of(3) as engine:
        train_once(engine)
        other = build()
        other.load_state_dict(listed(engine).state_dict())
        for name, full in engine.iter_full_params():
            assert torch.equal(other.get_parameter(name), full)


@on_ranks(2)
def test_every_write_to_an_entry_raises():
    with engine_of(3) as engine:
        truth = {name: full.clone() for name, full in engine.iter_full_params()}
        state = listed(engine).state_dict()
        # It has no address, and torch.nn.init says itself that it leaves the device meta alone.
        ignored = {"address", "storage", "orthogonal_", "trunc_normal_"}
        wrong = []
        for name, write in WRITES.items():
            with torch.no_grad():
                try:
                    write(state["first.weight"])
                    wrong += [f"{name}: no error"] if name not in ignored else []
                except ShardedAccess:
                    pass
                except Exception as error:
                    wrong.append(f"{name}: {type(error).__name__}: {str(error)[:150]}")
        for name, full in engine.iter_full_params():
            assert torch.equal(full, truth[name])
        assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_metadata_and_printing_need_no_other_rank(stage):
    with engine_of(stage) as engine:
        train_once(engine)
        plain = nn.Parameter(torch.ones(6, 5))
        if dist.get_rank() == 0:
            p = engine.module.first.weight
            for name, ask in METADATA.items():
                assert ask(p) == ask(plain), name
            assert "Linear(in_features=5" in repr(engine.module)
            assert repr(p) == str(p) == f"{p}"
            if stage == 3:
                assert "shape=(6, 5)" in repr(p)
                assert "unit='first'" in repr(p)
                assert type(p) is ShardedParameter
        train_once(engine)


@pytest.mark.smoke
@on_ranks(2)
def test_every_write_to_a_sharded_parameter_raises():
    with engine_of(3) as engine:
        truth = {name: full.clone() for name, full in engine.iter_full_params()}
        p = engine.module.first.weight
        wrong = []
        for name, write in WRITES.items():
            with torch.no_grad():
                try:
                    write(p)
                    wrong.append(f"{name}: no error")
                except ShardedAccess as error:
                    text = str(error)
                    for part in ("(6, 5)", "GatheredParameters", "safe_set_full_fp32_param"):
                        if part not in text and "view of shape" not in text:
                            wrong.append(f"{name}: {part} not in {text}")
                except Exception as error:
                    wrong.append(f"{name}: {type(error).__name__}: {str(error)[:150]}")
        for name, full in engine.iter_full_params():
            assert torch.equal(full, truth[name])
        assert not wrong, "\n".join(wrong)


def call_script(x: torch.Tensor):
    return x.sum() + 1


def without_guards(p):
    with torch._C.DisableTorchFunctionSubclass():
        return p.sum()


UNGUARDED = {
    "script": lambda p: torch.jit.script(call_script)(p),
    "vmap": lambda p: torch.vmap(lambda row: row.sum())(p),
    "guards switched off": without_guards,
    "another class": lambda p: torch.Tensor._make_subclass(nn.Parameter, p).sum(),
}


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
@pytest.mark.parametrize("stage", [1, 3])
@on_ranks(2)
def test_what_never_asks_the_class_finds_nan_and_never_old_bytes(stage):
    with engine_of(stage) as engine:
        train_once(engine)
        p = engine.module.first.weight
        assert type(p) is ShardedParameter
        for name, use in UNGUARDED.items():
            assert use(p).isnan().all(), name
        train_once(engine)
        assert p.sum().isfinite()


CONVERSIONS = {
    "double": lambda m: m.double(),
    "half": lambda m: m.half(),
    "to": lambda m: m.to(torch.bfloat16),
    "to_empty": lambda m: m.to_empty(device="cpu"),
    "share_memory": lambda m: m.share_memory(),
    "reset": lambda m: m.first.reset_parameters(),
    "apply": lambda m: m.apply(lambda part: [nn.init.zeros_(q) for q in part.parameters()]),
}


@pytest.mark.parametrize("name", CONVERSIONS)
@on_ranks(2)
def test_converting_or_initialising_a_sharded_model_raises(name):
    with engine_of(3) as engine:
        with pytest.raises(ShardedAccess, match="GatheredParameters"):
            CONVERSIONS[name](engine.module)
        train_once(engine)


def assign(value):
    """Assign another tensor to ``p.data``, for every parameter of a model."""

    def assign_all(model):
        for p in model.parameters():
            p.data = value(p)

    return assign_all


UNCHANGED = {
    "to": lambda m: m.to(device="cpu", dtype=torch.float32),
    "to channels last": lambda m: m.to(memory_format=torch.channels_last),
    "float": lambda m: m.float(),
    "cpu": lambda m: m.cpu(),
    "apply nothing": lambda m: m._apply(lambda t: t),
    "apply a copy": lambda m: m._apply(lambda t: t.clone()),
    "itself": assign(lambda p: p),
    "own data": assign(lambda p: p.data),
    "cloned": assign(lambda p: p.data.clone()),
    "padded by nothing": assign(lambda p: F.pad(p.data, [0, 0] * p.dim())),
    "there and back": assign(lambda p: p.detach().double().float()),
    "transposed in memory": assign(lambda p: p.data.transpose(0, -1).contiguous().transpose(0, -1)),
    "with a graph": assign(lambda p: p * 1),
}


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_writing_what_is_there_already_is_no_edit(stage):
    model = build()
    model.first.requires_grad_(False)
    model.register_parameter("conv", nn.Parameter(torch.ones(2, 3, 1, 1), requires_grad=False))
    with torch.no_grad():
        model.first.bias.copy_(torch.tensor([float("nan"), -0.0, 0.0, 1, 2, 3]))
    with engine_of(stage, model) as engine:
        truth = {name: full.clone() for name, full in engine.iter_full_params()}
        for name, change in UNCHANGED.items():
            change(engine.module)
            assert next(engine.module.parameters()) is model.gain, name
        for name, full in engine.iter_full_params():
            torch.testing.assert_close(full, truth[name], rtol=0, atol=0, equal_nan=True)
        with pytest.raises(NonFiniteError, match="The gradient of step 1"):  # of the NaN above
            train_once(engine)


@on_ranks(2)
def test_before_an_engine_is_built_writing_what_is_there_is_no_edit_either():
    with zeroshard.zero.Init(config_dict_or_path={"zero_optimization": {"stage": 3}}):
        model = build()
    assert type(model.first.weight) is ShardedParameter
    model._apply(lambda t: t.clone())
    with pytest.raises(ShardedAccess, match="given other values"):
        model._apply(lambda t: t + dist.get_rank())


EDITS = {
    "one bit": lambda p: torch.where(p.detach() == 0, -0.0, p.detach()),
    "on one rank": lambda p: p.detach() + dist.get_rank(),
    "another shape": lambda p: torch.ones(2),
    "another dtype": lambda p: p.detach().double(),
    "another parameter": lambda p: p.detach().flip(0),
}


@pytest.mark.parametrize("name", EDITS)
@on_ranks(2)
def test_assigning_anything_else_raises_on_every_rank(name):
    model = build()
    with torch.no_grad():
        model.first.weight[0, 0] = 0.0
    with engine_of(3, model) as engine:
        truth = engine.module.first.weight.detach().clone()
        with pytest.raises(ShardedAccess, match=r"given other values.*GatheredParameters"):
            engine.module.first.weight.data = EDITS[name](engine.module.first.weight)
        assert torch.equal(engine.module.first.weight.detach(), truth)
        train_once(engine)


@on_ranks(2)
def test_loading_into_a_sharded_model_says_how_it_is_done():
    with engine_of(3) as engine:
        state = {name: v.clone() for name, v in engine.module.state_dict().items()}
        with pytest.raises(RuntimeError, match=r"(?s)first\.weight.*GatheredParameters"):
            engine.module.load_state_dict(state)


@on_ranks(2)
def test_swapping_a_sharded_parameter_is_refused():
    with engine_of(3) as engine:
        with pytest.raises(RuntimeError, match="weakref"):
            torch.utils.swap_tensors(engine.module.first.weight, torch.ones(6, 5))
        train_once(engine)


OPTIMIZERS = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=0.1),
    "foreach": lambda ps: torch.optim.AdamW(ps, lr=0.1, foreach=True),
    "fused": lambda ps: torch.optim.AdamW(ps, lr=0.1, fused=True),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@on_ranks(2)
def test_an_optimizer_beside_the_engine_cannot_step_sharded_parameters(name):
    with engine_of(3) as engine:
        beside = OPTIMIZERS[name](engine.module.parameters())
        for p in engine.module.parameters():
            p.grad = torch.ones(p.shape)
        with pytest.raises(ShardedAccess, match="written in place"):
            beside.step()


RECEIVING = {
    "all_reduce": lambda p: dist.all_reduce(p),
    "broadcast": lambda p: dist.broadcast(p, 0),
    "broadcast data": lambda p: dist.broadcast(p.data, 0),
    "all_reduce of a view": lambda p: dist.all_reduce(p.view(-1)),
}


@pytest.mark.parametrize("name", RECEIVING)
@on_ranks(2)
def test_a_collective_of_the_program_cannot_write_a_sharded_parameter(name):
    with engine_of(3) as engine, torch.no_grad():
        with pytest.raises(ShardedAccess, match="written by"):
            RECEIVING[name](engine.module.first.weight)
        rows = [torch.empty(6, 5) for _ in range(2)]
        dist.all_gather(rows, engine.module.first.weight)
        assert torch.equal(*rows)


class Special(nn.Parameter):
    """A parameter class of the program, like those of quantized parameters."""


@pytest.mark.parametrize("stage", STAGES)
@on_ranks(2)
def test_a_parameter_keeps_its_class_and_attributes(stage):
    model = build()
    model.first.weight = Special(model.first.weight.data)
    model.first.weight.note = "kept"
    with engine_of(stage, model) as engine:
        train_once(engine)
        p = engine.module.first.weight
        with GatheredParameters(p):
            assert type(p) is Special
        assert p.note == "kept"


@on_ranks(2)
def test_tensor_subclasses_of_the_program_work_beside_sharded_parameters():
    class Mine(torch.Tensor):
        pass

    with engine_of(3) as engine:
        p = engine.module.first.weight
        y = F.linear(torch.ones(2, 5).as_subclass(Mine), p)
        assert type(y) is Mine
        torch.testing.assert_close(y.as_subclass(torch.Tensor), F.linear(torch.ones(2, 5), p))
