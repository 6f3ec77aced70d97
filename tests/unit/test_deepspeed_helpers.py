"""Helper functions under DeepSpeed's names do what programs expect of them."""

from __future__ import annotations

import argparse
import weakref
from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from zeroshard import deepspeed
from zeroshard.comm.env import default_backend, default_timeout, local_device
from zeroshard.deepspeed import activations, device, monitors
from zeroshard.device.choice import accelerator_type
from zeroshard.errors import (
    PLAN_COMMAND,
    CheckpointError,
    LaunchError,
    UnsupportedError,
    UsageError,
)
from zeroshard.launch.options import LaunchRequest, passed_on
from zeroshard.launch.rank_env import read_exports, with_directory_first
from zeroshard.optim.kernels import kernel_of
from zeroshard.optim.optimizers import FlexibleAdam, Lion


@pytest.fixture
def matrix() -> nn.Parameter:
    return nn.Parameter(torch.linspace(-1, 1, 12).view(3, 4))


# ---------------------------------------------------------------------- optimizers


@pytest.mark.parametrize(
    ("make", "kind"),
    [
        (lambda p: deepspeed.ops.adam.DeepSpeedCPUAdam([p]), torch.optim.AdamW),
        (lambda p: deepspeed.ops.adam.DeepSpeedCPUAdam([p], adamw_mode=False), torch.optim.Adam),
        (lambda p: deepspeed.ops.adam.FusedAdam([p], 1e-4), torch.optim.AdamW),
        (lambda p: deepspeed.ops.adam.FusedAdam([p], adam_w_mode=False), torch.optim.Adam),
        (lambda p: deepspeed.ops.adam.FusedAdam([p], bias_correction=False), FlexibleAdam),
        (lambda p: deepspeed.ops.adagrad.DeepSpeedCPUAdagrad([p]), torch.optim.Adagrad),
        (lambda p: deepspeed.ops.lion.FusedLion([p]), Lion),
        (lambda p: deepspeed.ops.lion.DeepSpeedCPULion(iter([p])), Lion),
    ],
)
def test_optimizers_are_ordinary_ones_with_deepspeed_s_defaults(make, kind, matrix):
    made = make(matrix)
    assert type(made) is kind and isinstance(made, torch.optim.Optimizer)
    assert made.param_groups[0]["weight_decay"] == 0
    assert made.param_groups[0]["params"][0] is matrix
    matrix.grad = torch.ones_like(matrix)
    before = matrix.detach().clone()
    made.step()
    assert not torch.equal(matrix, before)


def test_isinstance_knows_which_class_was_asked_for(matrix):
    adam, fused = deepspeed.ops.adam.DeepSpeedCPUAdam, deepspeed.ops.adam.FusedAdam
    assert isinstance(adam([matrix]), adam) and not isinstance(adam([matrix]), fused)
    assert not isinstance(torch.optim.AdamW([matrix]), adam)


def test_groups_of_another_optimizer_are_taken_over_as_they_are(matrix):
    """A schedule over the other optimizer continues to write into them."""
    theirs = torch.optim.AdamW(
        [{"params": [matrix], "lr": 0.5}], lr=0.1, betas=(0.8, 0.9), eps=1e-3
    )
    made = deepspeed.ops.adam.DeepSpeedCPUAdam(theirs.param_groups, lr=0.1, weight_decay=0.01)
    assert made.param_groups[0] is theirs.param_groups[0]
    theirs.param_groups[0]["lr"] = 0.25
    (group,) = made.param_groups
    assert (group["lr"], group["betas"], group["eps"]) == (0.25, (0.8, 0.9), 1e-3)
    assert kernel_of(made) is not None


# ---------------------------------------------------------------------- structures


def test_tensors_are_cloned_out_of_what_they_are_views_of():
    clone = deepspeed.checkpoint.utils.clone_tensors_for_torch_save
    flat = torch.arange(100.0)
    Pair = namedtuple("Pair", "x y")
    given = {"a": flat[:2], "b": [flat[2:4], (1, "text")], "c": Pair(flat[4:5], None)}
    made = clone(given)
    assert type(made["c"]) is Pair and type(made["b"]) is list and made["b"][1] == (1, "text")
    assert made["a"].untyped_storage().nbytes() == 8
    assert torch.equal(made["b"][0], flat[2:4])


def test_structures_are_moved():
    moved = deepspeed.runtime.utils.move_to_device({"x": [torch.ones(2)], "y": 3}, "meta")
    assert moved["x"][0].is_meta and moved["y"] == 3


def test_a_loader_begins_again():
    loader = deepspeed.utils.RepeatingLoader([1, 2])
    assert [next(loader) for _ in range(5)] == [1, 2, 1, 2, 1] and len(loader) == 2


def test_modules_are_made_on_a_device_in_a_dtype():
    with deepspeed.OnDevice(dtype=torch.bfloat16, device="meta"):
        layer = nn.Linear(2, 2)
    assert layer.weight.is_meta and layer.weight.dtype == torch.bfloat16
    with deepspeed.OnDevice(dtype=torch.float16, enabled=False):
        assert nn.Linear(2, 2).weight.dtype == torch.float32
    with pytest.raises(KeyError), deepspeed.OnDevice(dtype=torch.float16):
        raise KeyError
    assert torch.get_default_dtype() == torch.float32


# ---------------------------------------------------------------------- arguments and words


def test_arguments_of_the_command_line():
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", "ds.json"])
    assert args.deepspeed is True and args.deepspeed_config == "ds.json"
    args = parser.parse_args(["--deepscale", "--deepscale_config", "old.json"])
    assert args.deepscale is True and args.deepspeed is False


@pytest.mark.parametrize("text", ["3-1", "2,1", "0-3,2"])
def test_ranges_of_cores_have_to_ascend(text):
    with pytest.raises(ValueError, match="ascending"):
        deepspeed.utils.numa.parse_range_list(text)


@pytest.mark.parametrize(
    ("least", "most", "holds"), [("2.0", None, True), ("99.1", None, False), (None, 1.9, False)]
)
def test_torch_s_version_is_compared_as_numbers(least, most, holds):
    assert deepspeed.utils.torch.required_torch_version(least, most) is holds


def test_log_levels_by_name():
    before = deepspeed.utils.logger.level
    try:
        deepspeed.utils.set_log_level_from_string("error")
        assert deepspeed.utils.logging.get_current_level() == 40
    finally:
        deepspeed.utils.logger.setLevel(before)
    with pytest.raises(ValueError, match="is not a log level"):
        deepspeed.utils.set_log_level_from_string("loud")


def test_messages_go_to_the_ranks_they_are_for(capsys):
    deepspeed.log_dist("for nobody", ranks=[7])
    deepspeed.log_dist("for all", ranks=[-1])
    deepspeed.utils.log_dist_once("once")
    deepspeed.utils.log_dist_once("once")


def test_builders_build_nothing():
    builder = deepspeed.ops.op_builder.CPUAdamBuilder
    assert builder.NAME == "cpu_adam" and deepspeed.ops.__compatible_ops__["cpu_adam"] is True
    assert deepspeed.ops.__compatible_ops__["fused_lamb"] is True
    assert deepspeed.ops.aio.AsyncIOBuilder.NAME == "async_io"
    with pytest.raises(UnsupportedError, match="programs cannot call the kernels"):
        builder().load()


def test_the_base_of_builders_answers_for_torch_but_compiles_nothing(monkeypatch):
    """Megatron-DeepSpeed asks the class when it is imported."""
    base = deepspeed.ops.op_builder.builder.OpBuilder
    assert base.is_rocm_pytorch() is False and base.is_sycl_enabled() is False
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert base.is_rocm_pytorch() is True
    own = type("OwnBuilder", (base,), {"sources": lambda self: ["own.cpp"]})(name="own")
    assert own.name == "own"
    with pytest.raises(
        UnsupportedError, match=r"OwnBuilder.load\(\).*torch.utils.cpp_extension.load"
    ):
        own.load()


# ---------------------------------------------------------------------- tables and files


def test_estimates_for_known_numbers(capsys):
    stage2 = deepspeed.runtime.zero.stage_1_and_2
    stage3 = deepspeed.runtime.zero.stage3
    billion = 10**9
    assert stage2.estimate_zero2_model_states_mem_needs(billion, 8, 1, False) == (
        48 * billion,
        int(4.25 * billion),
    )
    assert stage2.estimate_zero2_model_states_mem_needs(billion, 8, 1, True)[1] == 2 * billion
    host, device, layer = stage3.estimate_zero3_model_states_mem_needs(
        billion, 10**8, 8, 1, cpu_offload=False
    )
    assert (host, device, layer) == (int(4.8 * billion), int(2.65 * billion), 4 * 10**8)
    net = nn.Sequential(nn.Linear(1000, 1000), nn.Linear(1000, 10))
    stage3.estimate_zero3_model_states_mem_needs_all_live(net, num_gpus_per_node=4)
    stage2.estimate_zero2_model_states_mem_needs_all_live(net)
    out, told = capsys.readouterr()
    assert told.count(f"run: {PLAN_COMMAND}\n") == 2 and "zeroshard" not in out
    assert "1 node, 4 GPUs per node" in out and "1M total params, 1M largest layer params" in out
    assert out.count("offload_param=cpu ") == 2


def test_files_of_deepspeed_s_own_layout_are_found_in_order(tmp_path):
    names = [f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt" for rank in (0, 2, 10)]
    for name in reversed(names):
        (tmp_path / name).touch()
    convert = deepspeed.utils.zero_to_fp32
    assert convert.get_optim_files(str(tmp_path)) == [str(tmp_path / name) for name in names]
    with pytest.raises(FileNotFoundError, match="Checkpoints of ZeroShard have other files"):
        convert.get_model_state_file(str(tmp_path), 3)


def test_a_checkpoint_is_universal_as_it_is(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "x").write_text("1")
    args = argparse.Namespace(
        input_folder=str(tmp_path / "in"), output_folder=str(tmp_path / "out")
    )
    deepspeed.checkpoint.ds_to_universal.main(args)
    assert (tmp_path / "out" / "x").read_text() == "1"
    args.input_folder = str(tmp_path / "none")
    with pytest.raises(CheckpointError, match="not a directory"):
        deepspeed.checkpoint.ds_to_universal.main(args)


# ---------------------------------------------------------------------- activations


@pytest.mark.parametrize("name", ["checkpoint", "non_reentrant_checkpoint"])
def test_activations_are_computed_again_unconfigured_too(name):
    calls = []
    layer = nn.Linear(3, 3)

    def block(x, scale=1.0):
        calls.append(1)
        return layer(x).tanh() * scale

    x = torch.ones(2, 3, requires_grad=True)
    run = getattr(deepspeed.checkpointing, name)
    run(block, x, scale=2.0).sum().backward()
    assert len(calls) == 2
    expected = torch.ones(2, 3, requires_grad=True)
    (layer(expected).tanh() * 2.0).sum().backward()
    assert torch.equal(x.grad, expected.grad)


class Attention(nn.Module):
    """Dropout makes the recomputed forward depend on the generator."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x, bias, *, scale=None, flag=True):
        made = torch.nn.functional.dropout(self.layer(x) + bias, 0.5).tanh()
        return made * scale if flag and scale is not None else made


def outputs_and_gradients(name):
    """Of two checkpointed layers, one of which gets a tensor by keyword."""
    torch.manual_seed(3)
    model = nn.ModuleList([Attention(), Attention()])
    x = torch.randn(5, 4, requires_grad=True)
    bias, scale = torch.randn(4, requires_grad=True), torch.randn(5, 1, requires_grad=True)
    run = getattr(deepspeed.checkpointing, name)
    out = run(
        model[1], run(model[0], x, bias), bias, scale=scale, flag=True, determinism_check="none"
    )
    out.sum().backward()
    found = [out, x.grad, bias.grad, scale.grad, *(p.grad for p in model.parameters())]
    return [t.detach() for t in found]


@pytest.fixture
def on_host(monkeypatch):
    """As on a rank with a GPU: which tensors were moved to the host, and how many came back."""
    moved: list[torch.Tensor] = []
    back: list[torch.Tensor] = []

    class Recorded(torch.autograd.graph.saved_tensors_hooks):
        def __init__(self, pin_memory: bool) -> None:
            assert pin_memory
            super().__init__(
                lambda t: (moved.append(t), t.clone())[1], lambda t: (back.append(t), t.clone())[1]
            )

    monkeypatch.setattr(activations, "accelerator_type", lambda: "cuda")
    monkeypatch.setattr(torch.autograd.graph, "save_on_cpu", Recorded)
    monkeypatch.setattr(activations, "_settings", {})
    return moved, back


@pytest.mark.parametrize("name", ["checkpoint", "non_reentrant_checkpoint"])
def test_inputs_of_checkpointed_functions_rest_on_the_host(name, on_host):
    moved, back = on_host
    expected = outputs_and_gradients(name)
    assert not moved  # unconfigured: they stay
    deepspeed.checkpointing.configure(None, checkpoint_in_cpu=True)
    found = outputs_and_gradients(name)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    shapes = [tuple(t.shape) for t in moved]
    assert shapes == [
        (5, 4),
        (4,),
        (5, 4),
        (4,),
        (5, 1),
    ]  # the inputs of both, and no intermediate values
    assert len(back) == len(moved)


@pytest.mark.parametrize(
    ("argument", "key", "moves"),
    [(None, True, True), (False, True, False), (True, False, True), (None, False, False)],
)
def test_the_argument_wins_over_the_configuration(argument, key, moves, on_host):
    section = {"train_batch_size": 1, "activation_checkpointing": {"cpu_checkpointing": key}}
    deepspeed.checkpointing.configure(None, section, checkpoint_in_cpu=argument)
    x = torch.ones(2, requires_grad=True)
    deepspeed.checkpointing.non_reentrant_checkpoint(torch.sin, x)
    assert [t.data_ptr() for t in on_host[0]] == ([x.data_ptr()] if moves else [])


def test_a_checkpointed_function_keeps_no_input_on_the_device(on_host):
    deepspeed.checkpointing.configure(None, checkpoint_in_cpu=True)
    weight = torch.ones(3, requires_grad=True)
    x, scale = weight * 2, weight * 3
    gone = [weakref.ref(t) for t in (x, scale)]
    out = deepspeed.checkpointing.non_reentrant_checkpoint(
        lambda x, scale: x * scale, x, scale=scale
    )
    on_host[0].clear()  # the record itself
    del x, scale
    assert [ref() for ref in gone] == [None, None]
    out.sum().backward()
    assert torch.equal(weight.grad, torch.full((3,), 12.0))


def test_choices_about_activations_are_remembered():
    checkpointing = deepspeed.checkpointing
    checkpointing.configure(None, deepspeed_config={
        "train_batch_size": 1, "activation_checkpointing": {"cpu_checkpointing": True},
    })  # fmt: skip
    assert checkpointing.is_configured()
    outputs: list[torch.Tensor] = []
    x = torch.ones(2, requires_grad=True)
    made = checkpointing.CheckpointFunction.apply(lambda t: (t * 2, t * 3), outputs, x)
    assert len(outputs) == 2 and outputs[1] is made[1]


# ---------------------------------------------------------------------- device and environment


def test_the_accelerator_of_another_kind_answers_by_torchs_module_for_it(monkeypatch):
    module = SimpleNamespace(
        device_count=lambda: 4, mem_get_info=lambda index: (5, 9), current_device=lambda: 2
    )
    monkeypatch.setattr(device, "accelerator_type", lambda: "xpu")
    monkeypatch.setattr(torch, "get_device_module", lambda kind: {"xpu": module}[kind])
    found = device.get_accelerator.__wrapped__()
    assert found.device_name(1) == "xpu:1" and found.available_memory() == 5
    assert (found.device_count(), found.current_device()) == (4, 2)
    assert not found.is_triton_supported() and not found.is_synchronized_device()
    assert not hasattr(found, "no_such_name")


def test_the_accelerator_without_a_gpu(monkeypatch):
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    assert accelerator_type() is None and default_backend() == "gloo"
    assert local_device() == torch.device("cpu")
    device = deepspeed.accelerator.get_accelerator.__wrapped__()
    assert device.current_device_name() == device.device_name() == "cpu"
    assert (device.current_device(), device.device_count()) == (1, 3)
    assert device.communication_backend_name() == "gloo"
    assert device.is_bf16_supported() and torch.float16 in device.supported_dtypes()
    assert device.total_memory() >= device.available_memory() > 0
    assert device.on_accelerator(torch.ones(1)) and device.is_available()
    device.synchronize()
    device.empty_cache()
    device.range_push("x")
    device.range_pop()
    with device.stream(device.current_stream()):
        assert device.create_op_builder("CPUAdamBuilder").is_compatible()
    assert device.create_op_builder("NothingBuilder") is None
    state = device.get_rng_state()
    device.manual_seed(1)
    device.set_rng_state(state)
    names = {f"{kind}Tensor" for kind in "Byte Int Long Half BFloat16 Float Double".split()}
    made = {getattr(device, name)([1, 2]) for name in names}
    assert {tensor.type() for tensor in made} == {f"torch.{name}" for name in names}


def test_the_timeout_of_collectives_comes_from_the_environment():
    assert default_timeout({}).total_seconds() == 600
    assert default_timeout({"DEEPSPEED_TIMEOUT": "3"}).total_seconds() == 180


def test_a_directory_goes_first_once():
    assert with_directory_first({"PYTHONPATH": "/a"}, "") == {}
    assert with_directory_first({}, "/c") == {"PYTHONPATH": "/c"}
    assert with_directory_first({"PYTHONPATH": "/a:/c::/b"}, "/c") == {"PYTHONPATH": "/c:/a:/b"}


def test_launchers_on_other_hosts_get_the_flag_and_find_their_own_directory():
    assert "--as-deepspeed" in passed_on(LaunchRequest(script="x.py", as_deepspeed="/here"))
    assert "--as-deepspeed" not in passed_on(LaunchRequest(script="x.py"))


def test_a_file_of_exports_has_names_and_values():
    assert read_exports("A=1\n\n# no\nB=x=y\n", "f") == {"A": "1", "B": "x=y"}
    with pytest.raises(LaunchError, match="f, line 2: 'oops' is not"):
        read_exports("A=1\noops\n", "f")


def test_timers():
    timers = deepspeed.utils.timer.SynchronizedWallClockTimer()
    timers("a").start()
    with pytest.raises(RuntimeError, match="already started"):
        timers("a").start()
    timers("a").stop(record=True)
    assert timers("a").mean() == timers.get_mean(["a", "b"], reset=False)["a"] >= 0
    assert timers("a").elapsed() >= 0 and timers("a").elapsed() == 0
    with pytest.raises(RuntimeError, match="not started"):
        timers("a").stop()
    speed = deepspeed.utils.timer.ThroughputTimer(None, 4, start_step=1)
    for _ in range(3):
        speed.start()
        speed.stop(global_step=True)
    assert speed.avg_samples_per_sec() > 0


def test_a_timer_adds_up_its_times_unless_they_are_dropped(monkeypatch):
    times_s = iter([0.0, 1.0, 10.0, 12.0, 20.0, 24.0])
    monkeypatch.setattr(monitors, "_now", lambda: next(times_s))
    timer = deepspeed.utils.timer.SynchronizedWallClockTimer()("a")
    found_ms = []
    for reset in (False, False, True):
        timer.start()
        timer.stop(reset=reset)
        found_ms.append(timer.elapsed(reset=False))
    assert found_ms == [1000.0, 3000.0, 4000.0]


def test_leaf_modules_want_lists():
    with pytest.raises(UsageError, match="give a list"):
        deepspeed.utils.set_z3_leaf_modules(nn.Linear(1, 1), nn.Linear)


def test_tiled_linear_is_a_linear():
    source = nn.Linear(4, 2)
    tiled = deepspeed.zero.TiledLinear(4, 2, in_splits=2, out_splits=2, init_linear=source)
    assert torch.equal(tiled(torch.ones(1, 4)), source(torch.ones(1, 4)))
