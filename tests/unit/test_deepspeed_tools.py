"""Utilities that programs import from DeepSpeed do what their names say."""

from __future__ import annotations

import itertools
import logging
import weakref
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from zeroshard import deepspeed
from zeroshard.comm.env import adopt_mpi
from zeroshard.deepspeed import api_table
from zeroshard.deepspeed.helpers import partition_balanced, partition_uniform
from zeroshard.errors import CheckpointError, ConfigError, LaunchError, UnsupportedError, UsageError
from zeroshard.launch.rank_env import exported

runner = deepspeed.launcher.runner

# ---------------------------------------------------------------------- parts


@given(st.integers(0, 40), st.integers(1, 9))
def test_uniform_parts_differ_by_one_at_most(items, parts):
    cuts = partition_uniform(items, parts)
    widths = [end - begin for begin, end in itertools.pairwise(cuts)]
    assert (cuts[0], cuts[-1], len(widths)) == (0, items, parts)
    assert max(widths) - min(widths) <= 1 and widths == sorted(widths, reverse=True)


@settings(max_examples=60)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=9), st.integers(1, 5))
def test_balanced_parts_are_the_best_of_all_cuts(weights, parts):
    cuts = partition_balanced(weights, parts)

    def quality(cuts):
        sums = [sum(weights[begin:end]) for begin, end in itertools.pairwise(cuts)]
        return max(sums), -min(sums)

    if len(weights) > parts:
        inner = itertools.combinations(range(1, len(weights)), parts - 1)
        assert quality(cuts) == min(quality([0, *some, len(weights)]) for some in inner)
    assert cuts == sorted(cuts) and (cuts[0], cuts[-1], len(cuts)) == (0, len(weights), parts + 1)


ELASTIC = {"enabled": True, "max_train_batch_size": 10000, "min_gpus": 32, "max_gpus": 1500}


def test_an_elastic_batch_suits_most_world_sizes():
    compute = deepspeed.elasticity.compute_elastic_config
    config = {"elasticity": {**ELASTIC, "micro_batch_sizes": [8, 12, 16, 17]}}
    batch, worlds = compute(config, "0.19")
    assert (batch, len(worlds)) == (9792, 23)  # 12 times the least common multiple, 816
    by_hand = [
        world
        for world in range(32, 1501)
        if any(batch % (world * micro) == 0 for micro in (8, 12, 16, 17))
    ]
    assert worlds == by_hand
    assert compute(config, "0.19", world_size=64) == (batch, worlds, 17)
    with pytest.raises(UsageError, match="world size 128 does not fit"):
        compute(config, "0.19", world_size=128)
    with pytest.raises(ConfigError, match="needs"):
        compute({"elasticity": {"enabled": False}}, "0.19")
    with pytest.raises(ConfigError, match="at most max_train_batch_size"):
        compute({"elasticity": {"enabled": True, "micro_batch_sizes": [4000]}}, "0.19")


@pytest.mark.parametrize(("larger", "found"), [(True, (8, [1, 2, 4])), (False, (6, [1, 2, 3]))])
def test_of_elastic_batches_that_suit_as_many_world_sizes_the_preferred_one_is_taken(larger, found):
    sizes = {"micro_batch_sizes": [2, 3], "max_train_batch_size": 8, "min_gpus": 1}
    config = {"elasticity": {"enabled": True, **sizes, "prefer_larger_batch": larger}}
    assert deepspeed.elasticity.compute_elastic_config(config, "0.19") == found


# ---------------------------------------------------------------------- hosts


def test_a_hostfile_gives_slots_by_host(tmp_path, caplog):
    path = tmp_path / "hosts"
    path.write_text("b slots=4\n# a comment\na slots=2\n")
    pool = runner.fetch_hostfile(str(path))
    assert list(pool.items()) == [("b", 4), ("a", 2)]
    chosen = runner.parse_inclusion_exclusion(pool, "a@b:3,1", "")
    assert list(chosen.items()) == [("b", [1, 3]), ("a", [0, 1])]
    assert runner.parse_inclusion_exclusion(pool, "", "b") == {"a": [0, 1]}
    with pytest.raises(LaunchError, match="cannot be given together"):
        runner.parse_inclusion_exclusion(pool, "a", "b")
    with pytest.raises(LaunchError, match="slot 7"):
        runner.parse_inclusion_exclusion(pool, "a:7", "")
    with caplog.at_level(logging.WARNING):
        assert runner.fetch_hostfile(str(tmp_path / "none")) is None
    assert "only this host is used" in caplog.text


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--include", "a", "--exclude", "b", "x.py"], "cannot be given together"),
        (["--num_gpus", "2", "--include", "a", "x.py"], "already says which slots"),
        (["--nonsense", "x.py"], "No such option: --nonsense"),
        ([], "[Mm]issing argument"),
    ],
)
def test_flags_that_cannot_work_raise_in_the_caller(words, says):
    with pytest.raises(LaunchError, match=says):
        runner.main(words)


def test_a_run_that_a_program_starts_gives_the_caller_its_process_back(tmp_path, capfd):
    runner.EXPORT_ENVS.append("OWN_")
    try:
        script = tmp_path / "script.py"
        script.write_text(
            "import os, sys\n"
            "print(sys.argv[1:], os.environ['WORLD_SIZE'], os.environ['ZEROSHARD_EXPORT'])\n"
            "sys.exit(int(sys.argv[-1]))\n"
        )
        words = ["--num_gpus", "2", str(script), "0"]
        runner.main(words)
        said = capfd.readouterr().out
        assert all(f"['--local_rank={rank}', '0'] 2 OWN_" in said for rank in (0, 1))
        assert words == ["--num_gpus", "2", str(script), "0"]
        with pytest.raises(SystemExit) as ended:
            runner.main(["--num_gpus", "1", str(script), "3"])
        assert ended.value.code == 3
    finally:
        runner.EXPORT_ENVS.remove("OWN_")
    assert exported({"OWN_X": "1", "X": "2", "ZEROSHARD_EXPORT": "OWN_"}).keys() >= {"OWN_X"}


def test_open_mpi_s_numbers_are_said_under_torchrun_s_names():
    own = {"RANK": "3", "SIZE": "4", "LOCAL_RANK": "1", "LOCAL_SIZE": "4"}
    env = {f"OMPI_COMM_WORLD_{name}": value for name, value in own.items()}
    adopt_mpi(123, env)
    said = {name: env[name] for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT")}
    assert said == {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "MASTER_PORT": "123"}
    with pytest.raises(LaunchError, match="mpirun"):
        adopt_mpi(123, {"RANK": "0", "WORLD_SIZE": "1"})


# ---------------------------------------------------------------------- modules and models


def test_a_module_is_reached_and_replaced_by_its_dotted_name():
    for home in (deepspeed.compression.helper, deepspeed.utils.module_utils):
        net = nn.Sequential(nn.Sequential(nn.Linear(2, 2)), nn.Tanh())
        assert home.recursive_getattr(net, "0.0.weight") is net[0][0].weight
        home.recursive_setattr(net, "0.0", swapped := nn.Identity())
        home.recursive_setattr(net, "1", other := nn.ReLU())
        assert net[0][0] is swapped and net[1] is other
        with pytest.raises(AttributeError):
            home.recursive_getattr(net, "0.7")


def test_operations_are_those_of_the_matrices():
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4, bias=False)).train()
    profile = deepspeed.profiling.flops_profiler.get_model_profile
    by_hand = 2 * 3 * (8 * 16 + 16 * 4)
    found = profile(net, (3, 8), as_string=False, print_profile=False)
    assert found == (by_hand, by_hand // 2, 8 * 16 + 16 + 16 * 4)
    assert net.training
    assert profile(net, (3, 8), print_profile=False) == ("1.15 KFLOPS", "576 MACs", "208")
    with pytest.raises(UsageError, match="needs an input"):
        profile(net)
    with pytest.raises(UnsupportedError, match="ignore_modules"):
        profile(net, (3, 8), ignore_modules=[nn.ReLU])


def test_the_table_of_operations_goes_where_it_is_sent(tmp_path, capsys):
    net = nn.Sequential(nn.Sequential(nn.Linear(2, 2)))
    profile = deepspeed.profiling.flops_profiler.get_model_profile
    profile(net, (1, 2), output_file=str(tmp_path / "profile"))
    assert "Sequential.0.0: 8 FLOPS" in (tmp_path / "profile").read_text()
    profile(net, (1, 2), module_depth=1)
    assert "Sequential.0.0" not in (shown := capsys.readouterr().out) and "Sequential.0:" in shown


def test_a_profiler_counts_what_runs_between_start_and_stop(capsys):
    net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4, bias=False))
    forward = 2 * 3 * (8 * 16 + 16 * 4)
    profiler = deepspeed.profiling.flops_profiler.FlopsProfiler(net)
    net(torch.ones(5, 8))  # not counted
    profiler.start_profile()
    loss = net(torch.ones(3, 8)).sum()
    assert profiler.get_total_flops() == forward
    assert 0 < profiler.get_total_duration() < 60
    profiler.reset_profile()
    loss.backward()  # the gradient of the input is computed for the second layer only
    profiler.stop_profile()
    net(torch.ones(5, 8))
    backward = 2 * 3 * (8 * 16 + 2 * 16 * 4)
    assert (profiler.get_total_flops(), profiler.get_total_macs()) == (backward, backward // 2)
    assert profiler.get_total_params() == 8 * 16 + 16 + 16 * 4
    assert profiler.get_total_flops(as_string=True) == "1.54 KFLOPS"
    assert profiler.get_total_params(as_string=True) == "208"
    assert profiler.get_total_duration(as_string=True).endswith(" ms")
    duration = profiler.get_total_duration()
    assert profiler.get_total_duration() == duration
    profiler.print_model_profile(profile_step=7, detailed=False)
    assert "step 7: 1.54 KFLOPS, 768 MACs, 208 parameters, " in capsys.readouterr().out
    profiler.end_profile()
    with pytest.raises(UsageError, match="has counted nothing"):
        profiler.get_total_macs()
    with pytest.raises(UnsupportedError, match="ignore_list"):
        profiler.start_profile(ignore_list=[nn.ReLU])


def test_a_profile_names_the_modules_that_take_most(capsys, tmp_path):
    net = nn.Sequential(nn.Linear(8, 16), nn.Sequential(nn.Linear(16, 4)))
    profiler = deepspeed.profiling.flops_profiler.FlopsProfiler(net)
    profiler.start_profile()
    net(torch.ones(1, 8))
    profiler.stop_profile()
    profiler.print_model_aggregated_profile(module_depth=1)
    assert capsys.readouterr().out == "most at depth 1: Sequential.0 256 FLOPS\n"
    profiler.print_model_profile(top_modules=2, output_file=str(tmp_path / "profile"))
    text = (tmp_path / "profile").read_text()
    assert "most at depth 1: Sequential.0 256 FLOPS, Sequential.1 128 FLOPS\n" in text
    assert "    Sequential.1.0: 128 FLOPS\n" in text and not capsys.readouterr().out


@pytest.mark.parametrize("shape", [(2, 7, 4), (7, 4)])
def test_a_tiled_mlp_gives_the_plain_one_s_bits_and_keeps_no_inside(shape):
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 4)).double()
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    inside: list[weakref.ref[torch.Tensor]] = []

    def run(self, piece):
        hidden = self[1](self[0](piece))
        inside.append(weakref.ref(hidden))
        return self[2](hidden)

    expected = run(mlp, x)
    grads = torch.autograd.grad(expected.square().sum(), [x, *mlp.parameters()])
    inside.clear()
    tiled = deepspeed.runtime.sequence_parallel.ulysses_sp.TiledMLP
    y = tiled.apply(run, mlp, x, 3, list(mlp.parameters()))
    assert len(inside) == 3 and all(ref() is None for ref in inside)
    torch.testing.assert_close(y, expected)
    y.square().sum().backward()
    for param, grad in zip([x, *mlp.parameters()], grads, strict=True):
        torch.testing.assert_close(param.grad, grad)


def test_detached_tensors_keep_requires_grad_and_lose_the_graph():
    detach = deepspeed.checkpointing.detach_variable
    x = torch.ones(2, requires_grad=True)
    first, second, word = detach((x * 2, torch.ones(1), "word"))
    assert first.is_leaf and first.requires_grad and not second.requires_grad and word == "word"
    with pytest.raises(UsageError, match="tuple"):
        detach([x])


# ---------------------------------------------------------------------- sections, monitors, files


def test_a_section_of_a_program_s_own_is_checked():
    class Own(deepspeed.runtime.config_utils.DeepSpeedConfigModel):
        size: int = 3

    own = Own(size="auto")
    assert own.size == 3
    own.size = 5
    assert own.size == 5
    for wrong in ({"size": "many"}, {"sise": 1}):
        with pytest.raises(ValueError):
            Own(**wrong)
    with pytest.raises(ValueError):
        own.size = "many"
    with pytest.raises(ValueError):
        Own(strict=True, size="auto")


def test_monitors_write_what_they_are_given(tmp_path):
    monitor = deepspeed.monitor
    section = {"csv_monitor": {"enabled": True, "output_path": str(tmp_path), "job_name": "job"}}
    config = monitor.config.get_monitor_config({"train_batch_size": 1, **section})
    assert config.enabled and not config.wandb.enabled
    monitor.monitor.MonitorMaster(config).write_events([("Train/loss", 0.5, 8)])
    monitor.csv_monitor.csvMonitor(config.csv_monitor).write_events([("Train/loss", 0.25, 16)])
    (file,) = (tmp_path / "job").iterdir()
    assert file.read_text().split() == ["step,loss", "8,0.5", "16,0.25"]
    off = monitor.monitor.MonitorMaster(monitor.config.get_monitor_config({}))
    off.write_events([("Train/loss", 0.5, 8)])
    assert not off.enabled
    tensorboard = monitor.tensorboard.TensorBoardMonitor(config.tensorboard)
    assert not tensorboard.enabled and isinstance(tensorboard, monitor.monitor.Monitor)


def test_files_of_a_program_come_back_and_code_in_them_does_not_run(tmp_path):
    engines = deepspeed.runtime.checkpoint_engine
    engine = engines.TorchCheckpointEngine()
    engine.makedirs(str(tmp_path / "a" / "b"))
    path = str(tmp_path / "a" / "b" / "file")
    engine.save({"x": torch.ones(2), "y": [1, "z"]}, path)
    assert engine.load(path)["y"] == [1, "z"] and engine.commit(None)
    engine.save({"x": runner.main}, path)
    with pytest.raises(Exception, match="weights"):
        engine.load(path)
    with pytest.raises(TypeError):
        engines.CheckpointEngine()


def test_optimizer_files_of_deepspeed_give_their_flat_groups(tmp_path):
    parse = deepspeed.utils.zero_to_fp32.parse_optim_states
    files = []
    for rank in range(2):
        flat = [torch.full((3,), float(rank))]
        state = {"zero_stage": 2, "partition_count": [2], "single_partition_of_fp32_groups": flat}
        files.append(str(tmp_path / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"))
        torch.save({"optimizer_state_dict": state}, files[-1])
    stage, ranks, groups, padding = parse(files, str(tmp_path))
    assert (stage, ranks, padding) == (2, 2, None)
    assert [rank[0].tolist() for rank in groups] == [[0.0] * 3, [1.0] * 3]
    with pytest.raises(CheckpointError, match="saved by 2 ranks, and there are 1"):
        parse(files[:1], str(tmp_path))


def test_words_of_files_and_optimizers():
    words = deepspeed.checkpoint.constants
    assert words.OPTIMIZER_STATE_DICT == "optimizer_state_dict"
    assert words.ZERO_FILE_PREFIX + "0" == "zero_pp_rank_0"
    config = deepspeed.runtime.config
    assert config.ADAM_OPTIMIZER in config.DEEPSPEED_OPTIMIZERS
    assert deepspeed.utils.timer.STEP_GLOBAL_TIMER == "step"
    tracker = deepspeed.checkpointing._CUDA_RNG_STATE_TRACKER
    assert deepspeed.checkpointing.get_cuda_rng_tracker() is tracker


def test_no_module_of_ours_hides_one_of_deepspeeds():
    """``import zeroshard.deepspeed as deepspeed`` finds a submodule before the table of names."""
    ours = {path.stem for path in Path(api_table.__file__).parent.glob("*.py")} - {"__init__"}
    theirs = {path.split(".")[0] for path in api_table.MODULES}
    assert ours & theirs == set()
