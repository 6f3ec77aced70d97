"""The one-pass update equals the optimizer's own step bit for bit, compiled or not."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from support.covering import sampled
from torch import nn

from zeroshard import Engine
from zeroshard.optim import fused_update, native_adam
from zeroshard.optim.fragment_norms import CompiledNorms, norms_of
from zeroshard.optim.optimizers import Lion
from zeroshard.zero import turns

SIZES = [(64, 64), (7, 3), (129,), (64,), (1,), (300, 70)]  # with and without a tail

OPTIMIZERS = {
    "AdamW": lambda groups: torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), fused=True),
    "Adam, L2": lambda groups: torch.optim.Adam(groups, lr=1e-2, weight_decay=0.3, fused=True),
    "AdamW, beta1 = 0.3": lambda groups: torch.optim.AdamW(groups, betas=(0.3, 0.9), fused=True),
    "AdamW, maximize": lambda groups: torch.optim.AdamW(groups, maximize=True, fused=True),
    "AdamW, tensor lr": lambda groups: torch.optim.AdamW(groups, lr=torch.tensor(1e-2), fused=True),
    "SGD": lambda groups: torch.optim.SGD(groups, lr=1e-2, fused=True),
    "SGD, momentum": lambda groups: torch.optim.SGD(
        groups, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1, fused=True
    ),
    "Lion": lambda groups: Lion(groups, lr=1e-3, weight_decay=0.1),
}


class Bag(nn.Module):
    """Parameters of all sizes; the gradient of each is a fixed random tensor times a number."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.bag = nn.ParameterList(
            nn.Parameter(torch.randn(size, generator=generator)) for size in SIZES
        )
        self.slopes = [torch.randn(size, generator=generator) for size in SIZES]

    def forward(self, scale: torch.Tensor) -> torch.Tensor:
        pairs = zip(self.bag, self.slopes, strict=True)
        return sum((p.float() * s * scale).sum() for p, s in pairs) + 0.01 * sum(
            p.float().square().sum() for p in self.bag
        )


def train(name, precision, *, steps=5, edit=True):
    """Parameters, masters and moments after some steps, one of them with an edit before it."""
    model = Bag()
    params = list(model.bag)
    groups = [{"params": params[::2]}, {"params": params[1::2], "weight_decay": 0.2, "lr": 3e-3}]
    config = {"train_batch_size": 1, "gradient_clipping": 1.0, "zero_optimization": {"stage": 2}}
    if precision != "fp32":
        config[precision] = {"enabled": True}
    with Engine(model, config=config, optimizer=OPTIMIZERS[name](groups)) as engine:
        for step in range(steps):
            engine.backward(engine(torch.tensor(1.5**step)))
            engine.step()
            if edit and step == 2:
                with torch.no_grad():
                    model.bag[0].mul_(1.5)
                    model.bag[1].add_(1.0)
        shards = engine.runtime.optimizer.shards
        state = [
            value.clone()
            for shard in shards
            for fragment in shard.fragments
            for value in engine.runtime.optimizer.state_of(fragment).values()
        ]
        masters = [shard.flat(lambda chunk: chunk.master_C).clone() for shard in shards]
        return [p.detach().clone() for p in model.bag] + masters + state


def assert_same_bits(some, others):
    assert len(some) == len(others) > len(SIZES)
    for a, b in zip(some, others, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a, b)


@pytest.fixture(scope="module")
def library():
    found = native_adam.wait()
    assert found is not None, "a compiler is there: the library must be"
    return found


@pytest.mark.parametrize("piece", [64, 192, 2**18])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_pieces_give_the_bits_of_the_optimizers_own_step(monkeypatch, name, precision, piece):
    monkeypatch.setattr(native_adam, "compiled", lambda: None)
    monkeypatch.setattr(fused_update, "PIECE_NUMEL", piece)
    ran = []
    run = fused_update.FusedUpdate.run_pieces
    monkeypatch.setattr(
        fused_update.FusedUpdate, "run_pieces", lambda *a, **kw: (ran.append(1), run(*a, **kw))
    )
    pieces = train(name, precision)
    assert ran
    monkeypatch.setattr(turns, "kernel_of", lambda *_a, **_kw: None)
    count = len(ran)
    assert_same_bits(pieces, train(name, precision))
    assert len(ran) == count


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize(
    "name", ["AdamW", "AdamW, beta1 = 0.3", "Adam, L2", "AdamW, maximize", "AdamW, tensor lr"]
)
def test_the_compiled_update_gives_the_same_bits(monkeypatch, library, name, precision, threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    monkeypatch.setattr(fused_update, "THREAD_NUMEL", 64)
    try:
        used = []
        update = native_adam.CompiledAdam.update
        monkeypatch.setattr(
            native_adam.CompiledAdam,
            "update",
            lambda *a, **kw: (used.append(kw), update(*a, **kw, piece_numel=640)),
        )
        compiled = train(name, precision)
        assert used
        assert used[0] == {"threads": threads}
        monkeypatch.setattr(native_adam, "compiled", lambda: None)
        assert_same_bits(compiled, train(name, precision))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("cores", "local_ranks", "omp", "expected"),
    [
        (16, 1, 1, 16),  # torchrun sets 1 by default
        (16, 8, 1, 2),
        (16, 3, 1, 5),
        (4, 8, 1, 1),
        (16, 8, 4, 4),  # chosen by the user
        (2, 1, 32, 32),
        (0, 0, 0, 1),
    ],
)
def test_a_rank_takes_its_share_of_the_cores_or_what_was_chosen(cores, local_ranks, omp, expected):
    assert fused_update.threads_for(2**40, cores, local_ranks, omp) == expected


@pytest.mark.parametrize(("numel", "expected"), [(0, 1), (100, 1), (2, 2), (7, 7), (2**20, 16)])
def test_few_elements_take_few_threads(numel, expected):
    numel = numel if numel in (0, 100) else numel * fused_update.THREAD_NUMEL
    assert (
        fused_update.threads_for(numel, 16) == fused_update.threads_for(numel, 1, 1, 16) == expected
    )


def test_a_caller_can_say_how_many_threads_the_update_may_use(monkeypatch, library):
    monkeypatch.setattr(fused_update, "THREAD_NUMEL", 64)
    used = []
    monkeypatch.setattr(
        native_adam.CompiledAdam, "update", lambda *a, threads: used.append(threads)
    )
    master, low = torch.zeros(64 * 9), torch.zeros(64 * 9).bfloat16()
    state = {"exp_avg": torch.zeros(576), "exp_avg_sq": torch.zeros(576), "step": torch.zeros(())}
    kernel = fused_update.UpdateKernel(
        lambda *_: None, ("exp_avg", "exp_avg_sq"), counts=True, compiled=lambda: library
    )
    one = fused_update.FusedUpdate(kernel, [(0, 0, master)], [state], master_R=master, param_R=low)
    for threads in (1, 4, 10):
        one.run(low.clone(), 1.0, [{}], threads=threads)
    assert used == [1, 4, 9]


@pytest.mark.parametrize(
    ("right", "wrong"),
    sampled(
        [
            ("__builtin_fmaf(weight1, g - exp_avg[i], ", "(weight1 * (g - exp_avg[i]) + "),
            ("__builtin_fmaf(param, l2, g)", "(param * l2 + g)"),
            ("param * decay", "param - param * (1 - decay)"),
            ("((bits >> 16) & 1u)", "1u"),
            ("1 - std::pow(options.beta2, step)", "1.0"),
            ("std::max<int64_t>(begin - from, 0)", "0"),
            ("std::min(end - from, span.numel)", "span.numel"),
        ],
        every=3,
    ),
)
def test_a_library_with_other_bits_is_refused(tmp_path, right, wrong):
    source = str(Path(native_adam.__file__).with_name("host_update.cpp"))
    text = open(source).read()
    assert right in text
    other = tmp_path / "host_update.cpp"
    other.write_text(text.replace(right, wrong))
    assert not native_adam.agrees_with_torch(native_adam.CompiledAdam(native_adam.load(other)))


@pytest.mark.parametrize(
    ("right", "wrong"),
    sampled(
        [
            ("kLanes = 8", "kLanes = 16"),
            ("at += part_numel) found", "at += 2 * part_numel) found"),
            ("std::min(part_numel, cuts[3 * i + 2] - at)", "cuts[3 * i + 2] - at"),
            ("grads[cuts[3 * i]]", "grads[0]"),
            ("norms[i] =", "norms[0] ="),
            (": std::sqrt(sums[0])", ": sums[0]"),
            ("kApart = 4", "kApart = 8"),
            ("std::fabs(widen(values[0]))", "0.0f"),
        ],
        every=3,
    ),
)
def test_a_library_with_other_norms_is_refused(tmp_path, right, wrong):
    text = Path(native_adam.__file__).with_name("host_update.cpp").read_text()
    assert right in text
    other = tmp_path / "host_update.cpp"
    other.write_text(text.replace(right, wrong))
    assert not native_adam.norms_agree_with_torch(CompiledNorms(native_adam.load(other)))


@pytest.mark.parametrize("threads", [1, 3])
def test_norms_are_those_of_torch_whoever_measures(monkeypatch, threads):
    """Long fragments, one without elements, a norm whose square overflows."""
    native_adam.prepare()
    native_adam.wait()
    library = native_adam.norms()
    assert library is not None
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    grad = torch.randn(2**18 * 3 + 77).bfloat16()
    cuts = [(0, 2**18), (3, 2**18 * 3 + 76), (5, 5), (9, 1000)]
    grad[20] = 1e19
    grad[1000] = 1e19
    expected = [
        torch.stack([piece.float().norm() for piece in grad[begin:end].split(2**18)]).norm()
        for begin, end in cuts
    ]
    for used in (library, None):
        found = norms_of([(grad, cuts)], used)
        assert torch.equal(torch.stack(list(found)), torch.stack(expected))


def test_norms_are_those_of_torch_where_it_flushes_denormal_numbers():
    native_adam.prepare()
    native_adam.wait()
    assert native_adam.norms() is not None
    torch.set_flush_denormal(True)
    try:
        assert native_adam.norms_agree_with_torch(native_adam.norms())
    finally:
        torch.set_flush_denormal(False)


def test_without_a_compiler_there_is_one_line_and_no_library(monkeypatch, tmp_path):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(native_adam.CannotBuild, match=r"no C\+\+ compiler \(no-such-compiler\)"):
        native_adam.load(tmp_path / "x.cpp")


def test_what_the_compiler_says_is_in_the_message(tmp_path):
    bad = tmp_path / "bad.cpp"
    bad.write_text("int f() { return nonsense; }")
    with pytest.raises(native_adam.CannotBuild, match="failed: "):
        native_adam.load(bad)


def test_a_cache_folder_that_others_can_write_is_not_used(monkeypatch, tmp_path):
    folder = tmp_path / "zeroshard" / "native"
    folder.mkdir(parents=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert native_adam._cache_folder() == folder
    folder.chmod(0o777)
    assert native_adam._cache_folder() is None
    monkeypatch.setattr(native_adam.tempfile, "tempdir", str(tmp_path))
    source = Path(native_adam.__file__).with_name("host_update.cpp")
    assert native_adam.agrees_with_torch(native_adam.CompiledAdam(native_adam.load(source)))
    assert [*folder.iterdir()] == []
    assert [*tmp_path.iterdir()] == [tmp_path / "zeroshard"]  # nothing is left of it


def test_a_compiler_that_cannot_be_started_is_one_line(monkeypatch, tmp_path):
    broken = tmp_path / "compiler"
    broken.write_text("no program")
    broken.chmod(0o755)
    monkeypatch.setenv("CXX", str(broken))
    with pytest.raises(native_adam.CannotBuild, match="OSError"):
        native_adam.load(Path(native_adam.__file__).with_name("host_update.cpp"))


def test_the_compiler_can_be_kept_out(monkeypatch):
    asked = []
    monkeypatch.setattr(native_adam, "prepare", lambda: asked.append(1))
    monkeypatch.setattr(native_adam, "compiled", lambda: asked.append(1))
    for allowed in (False, True):
        config = {"train_batch_size": 1, "compile_update": allowed}
        inner = torch.optim.AdamW((model := nn.Linear(64, 64)).parameters(), fused=True)
        with Engine(model, config=config, optimizer=inner) as engine:
            for _ in range(3):
                engine.backward(engine(torch.ones(2, 64)).square().mean())
                engine.step()
        assert bool(asked) is allowed


def test_options_that_change_between_steps_are_followed():
    """A kernel is chosen anew then: what it cannot do runs through ``step`` again."""
    results = []
    for fused in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(64, 64)
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
        if not fused:
            inner.register_step_post_hook(lambda *_: None)  # forces the optimizer's own step
        with Engine(model, config={"train_batch_size": 1}, optimizer=inner) as engine:
            for step in range(6):
                inner.param_groups[0]["momentum"] = 0.0 if step == 3 else 0.9
                engine.backward(engine(torch.ones(2, 64)).square().mean())
                engine.step()
            results.append(copy.deepcopy(model.weight.detach()))
    assert torch.equal(*results)


def test_a_loaded_state_is_what_the_next_step_uses():
    results = []
    for loads in (True, False):
        torch.manual_seed(0)
        model = nn.Linear(64, 64)
        inner = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        with Engine(model, config={"train_batch_size": 1}, optimizer=inner) as engine:
            for step in range(6):
                if step == 3:
                    for state in inner.state.values():
                        new = {key: value.clone() * 0.5 for key, value in state.items()}
                        state.update(new) if loads else [state[k].mul_(0.5) for k in state]
                engine.backward(engine(torch.ones(2, 64)).square().mean())
                engine.step()
            results.append(model.weight.detach().clone())
    assert torch.equal(*results)


def test_a_library_of_another_source_compiler_or_machine_is_not_taken(monkeypatch, tmp_path):
    source = tmp_path / "host_update.cpp"
    source.write_text("int one;")
    names = [native_adam._name(source, "g++")]
    for what, value in (
        ("FLAGS", (*native_adam.FLAGS, "-Wall")),
        ("_version_of", lambda _: "another version"),
        ("_processor", lambda: "another processor"),
    ):
        monkeypatch.setattr(native_adam, what, value)
        names.append(native_adam._name(source, "g++"))
    monkeypatch.setattr(native_adam.platform, "libc_ver", lambda: ("glibc", "2.0"))
    names.append(native_adam._name(source, "g++"))
    source.write_text("int two;")
    names.append(native_adam._name(source, "g++"))
    assert len(set(names)) == len(names) == 6
    assert native_adam._name(source, "g++") == names[-1]
