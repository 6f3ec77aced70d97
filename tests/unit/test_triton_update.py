"""The update in device memory in one pass. Triton's interpreter runs it on tensors of the host."""

from __future__ import annotations

import dataclasses
import logging
import struct
import subprocess
import sys

import numpy as np
import pytest
import torch
from support.covering import sampled

from zeroshard.optim import triton_check, triton_update
from zeroshard.optim.fused_update import FusedUpdate
from zeroshard.optim.kernels import kernel_of
from zeroshard.optim.optimizers import Lion
from zeroshard.optim.triton_update import DeviceFragment, TritonUpdate

pytest.importorskip("triton", reason="Triton has wheels for Linux on x86-64 only")

from zeroshard_testing.triton_interpreter import SOURCE, RecordingLauncher, interpreted_kernels

CPU = torch.device("cpu")
FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
DTYPES = [(FP32, None), (BF16, BF16), (FP32, BF16), (FP16, FP16)]  # of gradient and parameter

OPTIMIZERS = {
    "AdamW": lambda g: torch.optim.AdamW(g, lr=1e-2, betas=(0.9, 0.95), fused=True),
    "AdamW, no decay": lambda g: torch.optim.AdamW(g, weight_decay=0.0, fused=True),
    "AdamW, beta1 = 0": lambda g: torch.optim.AdamW(g, betas=(0.0, 0.9), fused=True),
    "Adam, L2": lambda g: torch.optim.Adam(g, lr=1e-2, weight_decay=0.3, fused=True),
    "Adam, maximize": lambda g: torch.optim.Adam(g, maximize=True, fused=True),
    "AdamW, tensor lr": lambda g: torch.optim.AdamW(g, lr=torch.tensor(1e-2), fused=True),
    "SGD": lambda g: torch.optim.SGD(g, lr=1e-2, weight_decay=0.1, fused=True),
    "SGD, maximize": lambda g: torch.optim.SGD(g, lr=1e-2, maximize=True, fused=True),
    "SGD, momentum": lambda g: torch.optim.SGD(
        g, lr=1e-2, momentum=0.9, dampening=0.3, weight_decay=0.1, fused=True
    ),
    "SGD, Nesterov": lambda g: torch.optim.SGD(g, momentum=0.9, nesterov=True, fused=True),
    "Lion": lambda g: Lion(g, lr=1e-3, weight_decay=0.1),
    "Lion, wide betas": lambda g: Lion(g, lr=1e-3, betas=(0.2, 0.3)),
}


class Trained:
    """Fragments of two param groups in one chunk, with masters and state."""

    def __init__(self, optimizer, low, sizes, seed=0):
        self.kernel = kernel_of(optimizer)
        self.reference = dataclasses.replace(self.kernel, compiled=None)
        generator = torch.Generator().manual_seed(seed)
        total = sum(-(-size // 64) * 64 for size in sizes)
        scale = 10.0 ** torch.randint(-20, 4, (total,), generator=generator)
        self.scale, self.generator = scale, generator
        self.master = torch.randn(total, generator=generator) * scale
        self.param = self.master if low is None else self.master.to(low)
        self.pieces, self.states, at = [], [], 0
        for index, size in enumerate(sizes):
            self.pieces.append((index % 2, at, self.master[at : at + size]))
            state = {name: torch.zeros(size) for name in self.kernel.shaped}
            if self.kernel.counts:
                state["step"] = torch.zeros(())
            self.states.append(state)
            at += -(-size // 64) * 64

    def grad(self, dtype):
        grad = torch.randn(len(self.scale), generator=self.generator) * self.scale
        grad[::7] = 0
        return grad.to(dtype)

    def fragments(self):
        low = None if self.param is self.master else self.param
        return [
            DeviceFragment(
                0, group, at, value,
                tuple(state[name] for name in self.kernel.shaped), state.get("step"),
                None if low is None else low[at : at + value.numel()],
            )
            for (group, at, value), state in zip(self.pieces, self.states, strict=True)
        ]  # fmt: skip

    def in_one_pass(self, grad, launches, *, order=0, block=128, blocks=2):
        launcher = RecordingLauncher(CPU, launches)
        return TritonUpdate(self.kernel, launcher, order, self.fragments(), [grad], block, blocks)

    def on_the_cpu(self):
        return FusedUpdate(
            self.reference, self.pieces, self.states, master_R=self.master, param_R=self.param
        )

    def tensors(self):
        return [self.master, self.param, *(t for state in self.states for t in state.values())]


def make(name, low, sizes=(64, 192, 640, 64)):
    groups = [{"params": [torch.nn.Parameter(torch.zeros(1))]} for _ in range(2)]
    groups[1] |= {"lr": 3e-3, "weight_decay": 0.2}
    optimizer = OPTIMIZERS[name](groups)
    return optimizer.param_groups, Trained(optimizer, low, sizes), Trained(optimizer, low, sizes)


def assert_same_bits(some, others):
    for a, b in zip(some, others, strict=True):
        assert a.dtype == b.dtype
        assert bool(((a == b) | (a.isnan() & b.isnan())).all()), int((a != b).sum())
        assert torch.equal(a.signbit() & ~a.isnan(), b.signbit() & ~b.isnan())


EVERY_DTYPE = ("AdamW", "SGD, momentum", "Lion")
"""One optimizer of each kernel. The others of a kernel have one of the dtypes, by turns."""


@pytest.mark.parametrize(
    ("name", "grad_dtype", "low"),
    sampled(
        [
            (name, *dtypes)
            for at, name in enumerate(OPTIMIZERS)
            for turn, dtypes in enumerate(DTYPES)
            if name in EVERY_DTYPE or turn == at % 4
        ],
        every=3,
    ),
)
def test_it_has_the_bits_of_the_cpus_update(name, grad_dtype, low):
    """Fragments of two groups, none of them a whole number of tiles; an edit; NaN and infinity."""
    groups, ours, theirs = make(name, low)
    reference, launches, update = theirs.on_the_cpu(), [], None
    for step in range(4):
        grad = ours.grad(grad_dtype)
        theirs.grad(grad_dtype)
        grad[3] = float("nan") if step == 2 else 1.0
        grad[130] = float("inf") if step == 3 else -1.0
        for trained in (ours, theirs):
            if step == 1:
                trained.param[70:90] += 1.5
                trained.param[91] = float("nan")
        groups[0]["lr"] = 1e-3 * (step + 1)
        update = update or ours.in_one_pass(grad, launches)
        update.run([grad], torch.tensor(0.37), None, groups)
        reference.run(grad.clone(), 0.37, groups)
        assert_same_bits(ours.tensors(), theirs.tensors())
    kinds = {tuple(sorted(launch.constants.items())) for launch in launches}
    assert len(kinds) == 1 + ours.kernel.counts, "another learning rate must not compile anew"


@pytest.mark.parametrize("name", ["AdamW", "Adam, L2", "SGD, Nesterov", "Lion"])
def test_only_elements_after_the_last_multiple_of_64_may_differ(name):
    """There torch's CPU kernels run scalar code, in which the compiler fuses as it likes."""
    sizes = (129, 21, 1, 700)
    groups, ours, theirs = make(name, BF16, sizes)
    reference, update = theirs.on_the_cpu(), None
    for _ in range(3):
        grad = ours.grad(BF16)
        theirs.grad(BF16)
        update = update or ours.in_one_pass(grad, [])
        update.run([grad], torch.tensor(0.37), None, groups)
        reference.run(grad.clone(), 0.37, groups)
    for (_, at, mine), (_, _, wanted) in zip(ours.pieces, theirs.pieces, strict=True):
        whole = mine.numel() // 64 * 64
        assert torch.equal(mine[:whole], wanted[:whole])
        assert torch.allclose(mine, wanted, rtol=1e-5, atol=0)
        end = at + mine.numel()
        assert torch.equal(ours.param[at:end], mine.bfloat16())
        assert torch.equal(
            ours.param[end : -(-end // 64) * 64], theirs.param[end : -(-end // 64) * 64]
        )


@pytest.mark.parametrize("name", ["AdamW", "SGD, Nesterov", "Lion"])
def test_the_flag_on_the_device_stops_everything(name):
    groups, ours, _ = make(name, BF16)
    grad = ours.grad(BF16)
    update = ours.in_one_pass(grad, [])
    update.run([grad], torch.tensor(1.0), torch.tensor(0.0), groups)
    ours.param[:9] += 1  # an edit is followed in the next step that is applied
    before = [tensor.clone() for tensor in ours.tensors()]
    update.run([grad], torch.tensor(1.0), torch.tensor(1.0), groups)
    assert_same_bits(ours.tensors(), before)
    update.run([grad], torch.tensor(1.0), torch.tensor(0.0), groups)
    assert not torch.equal(ours.master, before[0])
    if ours.kernel.counts:
        assert [float(state["step"]) for state in ours.states] == [2.0] * 4


@pytest.mark.parametrize("grad_dtype", [FP32, BF16])
def test_any_alignment_gives_the_same_bits(grad_dtype):
    """A gradient that does not start at a multiple of 16 bytes is read element by element."""
    results = []
    for shift in (0, 1):
        groups, ours, _ = make("AdamW", BF16)
        grad = ours.grad(grad_dtype)
        room = torch.zeros(len(grad) + 64, dtype=grad_dtype)
        shift += -(room.data_ptr() % 16) // room.element_size() % 8
        grad = room[shift : shift + len(grad)].copy_(grad)
        launches = []
        update = ours.in_one_pass(grad, launches)
        update.run([grad], torch.tensor(0.5), None, groups)
        aligned = {launch.constants.get("ALIGNED") for launch in launches} - {None}
        assert aligned == {shift % 8 == 0 or (grad.data_ptr() % 16 == 0)}
        other = grad.clone() if shift % 8 else room[1 : 1 + len(grad)]
        assert not update.matches([other])
        assert update.matches([grad])
        results.append(ours.tensors())
    assert_same_bits(*results)


def test_fragments_without_elements_count_their_steps():
    groups, ours, _ = make("AdamW", BF16, (0, 64, 0))
    grad = ours.grad(BF16)
    ours.in_one_pass(grad, []).run([grad], torch.tensor(1.0), None, groups)
    assert [float(state["step"]) for state in ours.states] == [1.0] * 3


@pytest.mark.parametrize(
    ("block", "blocks"), sampled([(32, 3), (128, 8), (128, 1), (32, 1), (32, 8), (128, 3)], every=3)
)
def test_bits_do_not_depend_on_the_size_of_tiles(block, blocks):
    groups, ours, theirs = make("AdamW", BF16, (1000, 64))
    grad = ours.grad(BF16)
    for trained, size in ((ours, (block, blocks)), (theirs, (64, 2))):
        update = trained.in_one_pass(grad, [], block=size[0], blocks=size[1])
        update.run([grad], torch.tensor(1.0), None, groups)
    assert_same_bits(ours.tensors(), theirs.tensors())


def test_many_fragments_are_one_launch_and_one_for_their_steps(monkeypatch):
    monkeypatch.setattr(triton_update, "COUNT_BLOCK", 16)
    groups, ours, _ = make("AdamW", BF16, (64,) * 19)
    grad, launches = ours.grad(BF16), []
    update = ours.in_one_pass(grad, launches)
    update.run([grad], torch.tensor(1.0), None, groups)
    assert [(launch.kernel, launch.grid) for launch in launches] == [("count", 2), ("update", 19)]
    assert all(float(state["step"]) == 1.0 for state in ours.states)


def traffic(launches):
    """Bytes that the launches read and write."""
    return sum(t.nbytes for launch in launches for t in (*launch.reads, *launch.writes))


@pytest.mark.parametrize(
    ("name", "grad_dtype", "low", "nbytes"),
    [
        ("AdamW", BF16, BF16, 30),
        ("AdamW", FP32, BF16, 32),
        ("AdamW", FP32, None, 28),
        ("SGD, momentum", BF16, BF16, 22),
        ("SGD", BF16, BF16, 14),
        ("Lion", BF16, BF16, 22),
    ],
)
def test_bytes_per_element(name, grad_dtype, low, nbytes):
    """What a pass must read and write, and at most a hundredth more for tables."""
    numel = 64 * 1024
    groups, ours, _ = make(name, low, (numel,))
    grad, launches = ours.grad(grad_dtype), []
    ours.in_one_pass(grad, launches, block=2048, blocks=8).run(
        [grad], torch.tensor(1.0), None, groups
    )
    assert nbytes <= traffic(launches) / numel <= 1.01 * nbytes <= 34


def test_the_gradients_are_not_kept():
    _, ours, _ = make("AdamW", BF16)
    grad = ours.grad(BF16)
    before = sys.getrefcount(grad)
    update = ours.in_one_pass(grad, [])
    assert sys.getrefcount(grad) == before
    assert update.nbytes < 64 * len(grad)


# ---------------------------------------------------------------- orders of operations of CUDA


def on_cuda_in_fp64(group, param, grad, state):
    """Adam as torch's CUDA kernel computes it where its options are fp64. Tensors are fp32."""
    fp32, fp64 = np.float32, np.float64
    (beta1, beta2), decay, step = group["betas"], group["weight_decay"], float(state["step"])
    lr, p, g = float(group["lr"]), param.numpy(), grad.numpy()
    first, second = state["exp_avg"].numpy(), state["exp_avg_sq"].numpy()
    if group["decoupled_weight_decay"]:
        p[:] = p - lr * decay * p.astype(fp64)
    else:
        g = (g + p * fp64(decay)).astype(fp32)
    g = g.astype(fp64)
    first[:] = beta1 * first.astype(fp64) + (1 - beta1) * g
    second[:] = beta2 * second.astype(fp64) + (1 - beta2) * g * g
    correction1, correction2 = fp32(1 - beta1**step), fp32(1 - beta2**step)
    denominator = (fp64(np.sqrt(second) / np.sqrt(correction2)) + group["eps"]).astype(fp32)
    p -= fp32(lr / fp64(correction1)) * first / denominator


@pytest.mark.parametrize("name", ["AdamW", "Adam, L2"])
def test_the_order_of_torchs_cuda_kernel_in_fp64(name):
    groups, ours, theirs = make(name, None)
    update = None
    for _ in range(3):
        grad = ours.grad(FP32)
        update = update or ours.in_one_pass(grad, [], order=2)
        update.run([grad], torch.tensor(0.5), None, groups)
        for (group, at, value), state in zip(theirs.pieces, theirs.states, strict=True):
            state["step"] += 1
            on_cuda_in_fp64(groups[group], value, grad[at : at + value.numel()] * 0.5, state)
        assert_same_bits(ours.tensors(), theirs.tensors())


def test_another_order_of_operations_is_not_taken_for_torchs(monkeypatch, caplog):
    monkeypatch.setattr(triton_check, "Launcher", lambda device: RecordingLauncher(device, []))
    kernel = make("AdamW", None)[1].kernel
    exact = triton_check.compare(kernel, CPU, FP32, None)
    assert (exact.order, exact.differing) == (0, 0)
    monkeypatch.setattr(triton_check, "ORDERS", {"torch on CUDA, fp64": 2})
    with caplog.at_level(logging.INFO, "zeroshard"):
        close = triton_check.compare(kernel, CPU, FP32, None)
    assert close.order == 2
    assert 0 < close.differing < 20_000
    assert f"in the last bits of {close.differing} elements" in caplog.text


# ---------------------------------------------------------------- where Triton is missing or broken


class Wrong(RecordingLauncher):
    """Changes a constant of each launch."""

    def __init__(self, change):
        super().__init__(CPU, [])
        self.change = change

    def __call__(self, launch):
        super().__call__(self.change(launch))


@pytest.mark.parametrize(
    "change",
    [
        lambda launch: launch._replace(grid=launch.grid - 1 if launch.kernel == "update" else 1),
        lambda launch: launch._replace(grid=0 if launch.kernel == "count" else launch.grid),
        lambda launch: launch._replace(
            constants={
                k: v.replace("bf16", "fp16") if isinstance(v, str) else v
                for k, v in launch.constants.items()
            }
        ),
    ],
    ids=["a tile is missing", "steps are not counted", "bf16 is read as fp16"],
)
def test_a_kernel_with_wrong_results_is_not_used(monkeypatch, caplog, change):
    monkeypatch.setattr(triton_check, "Launcher", lambda device: Wrong(change))
    triton_check.ready.cache_clear()
    kernel = make("AdamW", BF16)[1].kernel
    assert triton_check.ready(kernel, CPU, BF16, BF16) is None
    assert "differs from torch's by more than rounding" in caplog.text
    triton_check.ready.cache_clear()


@pytest.mark.parametrize(
    ("name", "right", "wrong"),
    sampled([
        ("AdamW", "GRAD, ALIGNED) * factor", "GRAD, ALIGNED)"),
        ("AdamW", "param = tl.where(_rounded(param, LOW) == seen, param, seen)", "param = param"),
        ("AdamW", "== seen, param, seen)", "!= seen, param, seen)"),
        ("AdamW", "+ ((bits >> 16) & 1)", "+ 1"),
        ("AdamW", "first = _lerp(first, grad, b1)  #", "first = first + b1 * (grad - first)  #"),
        ("AdamW", "tl.fma(rest2 * grad, grad, sec", "tl.fma(rest2, grad * grad, sec"),
        ("AdamW", "param + tl.div_rn(step_size * first, ", "param + step_size * tl.div_rn(first, "),
        ("AdamW", "root) + eps\n        param = param +", "root + eps)\n        param = param +"),
        ("AdamW", "decoupled, param * shrink, param)", "decoupled, param, param)"),
        ("AdamW", "grad), grad)\n        first = _lerp", "grad), 2 * grad)\n        first = _lerp"),
        ("AdamW", "factor = factor * _option(options, 0)", "factor = factor * 1.0 #"),
        ("AdamW", "offsets < numel,", "offsets < numel - 1,"),
        ("AdamW", "begin = tl.multiple_of(_word(tiles, 2 * tile + 1), [BLOCK])", "begin = 0 * tile"),
        ("AdamW", "_store(low, offsets, param, mask, LOW, ALIGNED)", "pass"),
        ("SGD, momentum", "fma(grad, rest, buffer * momentum)", "fma(buffer, momentum, grad * rest)"),
        ("SGD, momentum", "buffer)\n        param = tl.fma", "grad)\n        param = tl.fma"),
        ("SGD", "param = tl.fma(grad, step_size, param)", "param = grad * step_size + param"),
        ("Lion", "sign = (toward > 0)", "sign = (toward >= 0)"),
        ("Lion", "param * shrink + sign * step_size", "tl.fma(param, shrink, sign * step_size)"),
        ("Lion", "_lerp(first, grad, weights[1])", "_lerp(first, grad, weights[0])"),
    ], every=3),
)  # fmt: skip
def test_a_mistake_in_the_kernel_is_found(monkeypatch, tmp_path, name, right, wrong):
    text = SOURCE.read_text()
    assert text.count(right) == 1
    (tmp_path / "kernels.py").write_text(text.replace(right, wrong))
    kernels = interpreted_kernels(tmp_path / "kernels.py")
    monkeypatch.setattr(
        triton_check, "Launcher", lambda device: RecordingLauncher(device, [], kernels)
    )
    monkeypatch.setattr(triton_check, "ORDERS", {"torch on CPU": 0})
    monkeypatch.setattr(triton_check, "_NUMEL", 9 * 2048 + 64)  # two tiles
    monkeypatch.setattr(triton_check, "_STEPS", 2)
    kernel = make(name, BF16)[1].kernel
    try:
        assert triton_check.compare(kernel, CPU, BF16, BF16).differing > 0
    except ArithmeticError:
        pass  # wrong by more than rounding


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (
            ImportError("No module named 'triton'"),
            "Triton is not installed (ImportError: No module",
        ),
        (RuntimeError("no compiler\nmore"), "Triton failed (RuntimeError: no compiler): the opt"),
    ],
)
def test_without_triton_one_line_says_what_it_costs(monkeypatch, caplog, error, text):
    def broken(device):
        raise error

    monkeypatch.setattr(triton_check, "Launcher", broken)
    triton_check.ready.cache_clear()
    kernel = make("AdamW", BF16)[1].kernel
    for _ in range(3):
        assert triton_check.ready(kernel, CPU, BF16, BF16) is None
    triton_check.ready.cache_clear()
    assert len(caplog.records) == 1
    assert text in caplog.text
    assert "about 80 bytes per element instead of 30" in caplog.text


def test_all_kernels_have_torchs_bits_on_this_device(monkeypatch):
    monkeypatch.setattr(triton_check, "Launcher", lambda device: RecordingLauncher(device, []))
    monkeypatch.setattr(triton_check, "_STEPS", 2)
    found = triton_check.differences(CPU)
    assert len(found) == 16
    assert set(found.values()) == {""}
    assert "AdamW bf16/bf16" in found


# ---------------------------------------------------------------- the compiled kernel, without a GPU

COMPILE = """
import json, re, subprocess, sys, triton
from pathlib import Path
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from zeroshard.optim import triton_kernels
from zeroshard.optim.triton_update import BLOCK, BLOCKS

def compiled(kind, order, arch):
    kernel = triton_kernels.update
    constants = dict(KIND=kind, ORDER=order, GRAD="bf16", LOW="bf16", ALIGNED=True)
    constants |= dict(BLOCK=BLOCK, BLOCKS=BLOCKS)
    names = kernel.arg_names
    source = ASTSource(
        kernel,
        {name: "constexpr" if name in constants else "i64" for name in names},
        {(names.index(name),): value for name, value in constants.items()},
    )
    options = {"num_warps": 8, "enable_fp_fusion": False}
    built = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    cubin = Path(sys.argv[1], "kernel.cubin")
    cubin.write_bytes(built.asm["cubin"])
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    usage = subprocess.run([tool, "-res-usage", cubin], capture_output=True, text=True).stdout
    registers, stack = (int(re.search(rf"{name}:(\\d+)", usage)[1]) for name in ("REG", "STACK"))
    return built.asm["ptx"], registers, stack

print(json.dumps([compiled(*case) for case in json.loads(sys.argv[2])]))
"""


def test_the_compiled_kernel_moves_16_bytes_at_once_and_fuses_nothing(tmp_path, monkeypatch):
    """It is compiled for GPUs that this machine does not have, and not run."""
    import json
    import re

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    cases = [("adam", 0, 90), ("adam", 1, 90), ("adam", 2, 80), ("lion", 0, 80)]
    program = [sys.executable, "-c", COMPILE, str(tmp_path), json.dumps(cases)]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    for (kind, order, _), (ptx, registers, stack) in zip(
        cases, json.loads(ended.stdout), strict=True
    ):
        loads, stores = (len(re.findall(rf"{op}\.global\S*\.v4\.b32", ptx)) for op in ("ld", "st"))
        # Elements of 8 per thread: 2 accesses for each fp32 tensor, 1 for each bf16 tensor.
        wide = {"adam": 3, "lion": 2}[kind]
        assert (loads, stores) == (2 * wide + 2, 2 * wide + 1)
        assert not re.search(r"(div|sqrt)\.(approx|full)", ptx)
        scalar_code = ptx.split("ld.global")[0]
        assert "fma" not in scalar_code
        assert registers <= 168, (kind, order)
        assert stack <= 16


LAUNCH = """
import json, torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction
from zeroshard.optim import triton_kernels
from zeroshard.optim.triton_update import Launch, Launcher

class NoDriver:
    get_current_device = get_current_stream = lambda *_: 0
    get_current_target = lambda _: GPUTarget("cuda", 90, 32)

driver.set_active(NoDriver())
run = JITFunction.run
JITFunction.run = lambda self, *args, warmup, **kwargs: run(self, *args, warmup=True, **kwargs)
launcher = Launcher(torch.device("cpu"))
constants = dict(KIND="adam", ORDER=0, GRAD="bf16", LOW="bf16", ALIGNED=True, BLOCK=2048, BLOCKS=8)
for shift in (0, 1, 8, 16):
    numbers = tuple(2**46 + shift * at for at in range(6))
    launcher(Launch("update", 1 + shift, numbers, constants, [], []))
    launcher(Launch("count", 1, (2**46 + shift, 1 + shift, 2**46), {"BLOCK": 256}, [], []))
print([len(getattr(triton_kernels, name).device_caches[0][0]) for name in ("update", "count")])
"""


def test_no_address_and_no_number_compiles_a_kernel_anew(tmp_path, monkeypatch):
    """Without a GPU: everything up to the launch itself."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    program = [sys.executable, "-c", LAUNCH]
    ended = subprocess.run(program, capture_output=True, text=True, timeout=120, check=False)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == "[1, 1]"


def test_a_vector_of_options_is_what_the_kernel_reads():
    groups, ours, _ = make("AdamW", BF16)
    grad = ours.grad(BF16)
    update = ours.in_one_pass(grad, [])
    words = update._vary([grad], groups).tolist()
    assert words[0] == grad.data_ptr()
    first = struct.unpack("8d", struct.pack("8q", *words[1:9]))
    assert first == (1.0, 1e-2, 0.9, 0.95, 1e-8, 1e-2, 1.0, 0.0)
