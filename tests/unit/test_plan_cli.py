"""`zeroshard plan` of small models: verdicts, exit codes, and what cannot be planned."""

from __future__ import annotations

import json
import os
import re
import sys
from importlib import resources

import pytest
import warm_python
from support.covering import FULL, sampled
from typer.testing import CliRunner

from zeroshard.cli.main import main
from zeroshard.core.texts import gib
from zeroshard.planner import measure

MODELS = """
import torch
from torch import nn

WIDTH = 64

class Net(nn.Module):
    def __init__(self, extra=lambda y: y):
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.extra = extra

    def forward(self, x):
        return self.extra(self.second(torch.tanh(self.first(x)))).mean()

def batch():
    return torch.empty(8, WIDTH)

def plain():
    return Net(), (batch(), None)

class Deep(nn.Module):
    def __init__(self):
        super().__init__()
        self.a_module_whose_name_is_as_long_as_they_are_in_large_models = Net()

    def forward(self, x):
        return self.a_module_whose_name_is_as_long_as_they_are_in_large_models(x)

def deep():
    return Deep(), (batch(), None)

class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(32, WIDTH), nn.Linear(WIDTH, 32)

    def forward(self, input_ids, labels):
        logits = self.head(self.table(input_ids))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

def words():
    return Words()

def experts():
    from zeroshard.parallel import MoE

    class Routed(Net):
        def __init__(self):
            super().__init__()
            self.moe = MoE(WIDTH, lambda: nn.Linear(WIDTH, WIDTH), 4, 2, k=2, drop_tokens=False)

        def forward(self, x):
            return super().forward(self.moe(x)[0])

    return Routed(), (batch(), None)

def item():
    def scaled(y):
        return y * y.sum().item()
    return Net(scaled), (batch(), None)

def nonzero():
    return Net(lambda y: y[y.sum(1).nonzero()]), (batch(), None)

def no_loss():
    return nn.Linear(WIDTH, WIDTH), (batch(), None)

def number():
    return 3

def converted():
    return Net().half().to("cpu").float(), (batch(), None)

def moved():
    return Net().to("cpu"), (batch(), None)

def halved():
    return Net().half(), (batch(), None)

def raises():
    raise ValueError("no such size")

def wrong_batch():
    return Net(), (torch.empty(8, WIDTH + 1), None)

def three():
    return Net(), batch(), None

def triple():
    return Net(), (batch(), None, None)

def columns():  # samples are in the second dimension
    return Net(), (torch.empty(16, 8, WIDTH), None)

class Masked(Net):
    def forward(self, x, mask):
        return super().forward(x) * mask.sum()

def mixed():  # the first dimensions differ
    return Masked(), {"x": batch(), "mask": torch.empty(3)}

def no_kernel():
    library = torch.library.Library("plan_tests", "FRAGMENT")
    if not hasattr(torch.ops.plan_tests, "no_kernel"):
        library.define("no_kernel(Tensor x) -> Tensor")
        library.impl("no_kernel", lambda x: x.clone(), "CPU")
        KEPT.append(library)
    return Net(torch.ops.plan_tests.no_kernel), (batch(), None)

def layers():
    from zeroshard.deepspeed.pipeline_layers import LayerSpec
    from zeroshard.deepspeed.pipeline_module import PipelineModule
    specs = [LayerSpec(nn.Linear, WIDTH, WIDTH, bias=False) for _ in range(4)]
    return PipelineModule(specs, num_stages=2, loss_fn=nn.functional.mse_loss), (batch(), batch())

KEPT = []
"""
PARAMS = 2 * 64 * 64


SCRIPT = """
import sys
from nets_to_plan import plain, words as plan_entry

OPENED = open("imported.txt", "a")
OPENED.write(str(sys.argv[1:]))
OPENED.close()

def broken():
    pass

if __name__ == "__main__":
    raise RuntimeError("trains")
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    (tmp_path / "nets_to_plan.py").write_text(MODELS)
    (tmp_path / "train_net.py").write_text(SCRIPT)
    (tmp_path / "parses.py").write_text("def plan_entry(): pass\nimport sys\nsys.exit(7)\n")
    (tmp_path / "no_entry.py").write_text("open('ran.txt', 'w')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)

    def call(model: str, *options: str, stage: int = 1, ranks: int = 4, **keys: object):
        config = {
            "train_micro_batch_size_per_gpu": 8,
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}},
            "unit_min_numel": 1,
            "zero_optimization": {"stage": stage},
        } | keys
        (tmp_path / "ds.json").write_text(json.dumps(config))
        words = ["plan", model, "--config", "ds.json", "--ranks", str(ranks), *options]
        return CliRunner().invoke(main, words)

    return call


REPORTS = {
    "steps_per_print": 1,
    "wall_clock_breakdown": True,
    "memory_breakdown": True,
    "dump_state": True,
    "comms_logger": {"enabled": True, "verbose": True},
    "flops_profiler": {"enabled": True, "profile_step": 1},
    "tensorboard": {"enabled": True, "output_path": "events", "job_name": "job"},
    "csv_monitor": {"enabled": True, "output_path": "csv", "job_name": "job"},
    "wandb": {"enabled": True, "project": "project"},
    "preemption": {"enabled": True, "save_dir": "saved"},
}


def test_a_plan_reports_nothing_and_opens_no_monitor(run, tmp_path):
    plain = run("nets_to_plan:plain", "--json")
    before = sorted(tmp_path.iterdir())
    result = run("nets_to_plan:plain", "--json", **REPORTS)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout) == json.loads(plain.stdout)
    assert sorted(tmp_path.iterdir()) == before


def test_a_pipeline_module_is_planned_with_the_layers_of_each_rank(run):
    keys = {"parallel": {"pipeline": 2}, "gradient_accumulation_steps": 2}
    result = run("nets_to_plan:layers", "--json", **keys)
    assert result.exit_code == 0, result.output
    plan = json.loads(result.stdout)
    assert [stage["parameters"] for stage in plan["pipeline_stages"]] == [PARAMS] * 2
    assert "the model is built with its own layers only on each rank" in plan["assumed"]


AT_EXIT = """
import atexit, pathlib, sys
import nets_to_plan
atexit.register(pathlib.Path("exited").touch)
def plain():
    print("a model is built")
    return nets_to_plan.plain()
"""


def test_a_program_that_planned_tells_all_and_ends_with_its_code(run, tmp_path):
    assert run("nets_to_plan:plain").exit_code == 0  # writes the configuration
    (tmp_path / "at_exit.py").write_text(AT_EXIT)
    command = [
        sys.executable, "-m", "zeroshard.cli.main", "plan", "at_exit:plain", "--config", "ds.json",
        "--ranks", "4", "--memory", "0.00001", "--check", "--json",
    ]  # fmt: skip
    done = warm_python.run(command, cwd=tmp_path, env=os.environ, timeout=300)
    assert done.returncode == 3, done.stderr
    assert json.loads(done.stdout)["fits"] is False
    assert "a model is built" in done.stderr
    assert (tmp_path / "exited").exists()


@pytest.mark.parametrize(
    ("stage", "shards"), [(0, (1, 1, 1)), (1, (1, 1, 4)), (2, (1, 4, 4)), (3, (4, 4, 4))]
)
def test_json_has_the_bytes_of_the_formula_and_the_traffic(run, stage, shards):
    result = run("nets_to_plan:plain", "--json", stage=stage)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["parameters"] == PARAMS
    nbytes = {row["category"]: row["measured"] for row in found["memory"]}
    assert nbytes["parameters"] == 4 * PARAMS // shards[0]
    assert nbytes["gradients"] == 4 * PARAMS // shards[1]
    assert 0 <= nbytes["optimizer"] - 8 * PARAMS // shards[2] <= 16  # step counts
    assert found["peak_nbytes"] == max(p["device_nbytes"] for p in found["phases"].values())
    reduced = [row["numel"] for row in found["traffic"] if row["op"] == "reduce_scatter"]
    assert sum(reduced) == PARAMS
    assert found["assumed"] and found["not_modelled"]


def test_sequence_ranks_have_a_part_of_the_tokens_and_share_the_shards(run):
    def plan(sequence: int, *options: str):
        done = run("nets_to_plan:words", "--json", *options, parallel={"sequence": sequence})
        return done.output if done.exit_code else json.loads(done.stdout)

    shared, alone = plan(2, "--seq", "32"), plan(1, "--seq", "16")  # its attention is its own
    assert shared["memory"] == alone["memory"]
    assert any("one of 2 sequence ranks" in line for line in shared["assumed"])
    assert "9 tokens, which 2 sequence ranks cannot divide" in plan(2, "--seq", "9")


def test_the_experts_of_a_program_are_noticed(run):
    done = run("nets_to_plan:experts", "--verbose")
    text = " ".join(done.output.split())
    assert "data_shard 4, expert 2" in text
    assert "2 ranks share the 4 experts of 1 layer(s): a rank has 2 of each" in text
    assert "one rank computes those of 2 ranks: its peak is" in text
    assert "that share experts" in text


@pytest.mark.parametrize(
    "keys", [{"parallel": {"expert": 2}}, {"expert_parallel": {"autoep_size": 2}}]
)
def test_expert_ranks_without_experts_are_an_error(run, keys):
    done = run("nets_to_plan:words", "--seq", "8", **keys)
    assert done.exit_code
    assert "no layer of the model has experts" in " ".join(done.output.split())


@pytest.mark.parametrize(("distance", "kept"), [(None, 1), (0, 0), (10**9, 2)])
def test_units_that_stay_gathered_are_named_and_gathered_once(run, distance, kept):
    names = ["first", "second"]
    zero = {"stage": 3, "stage3_max_reuse_distance": distance}
    text, found = (
        run(
            "nets_to_plan:plain", *options, zero_optimization=zero, gradient_accumulation_steps=3
        ).stdout
        for options in ((), ("--json",))
    )
    found = json.loads(found)
    assert found["kept_units"] == names[2 - kept :]
    gathered = {row["name"]: row["calls"] for row in found["traffic"] if row["op"] == "all_gather"}
    assert gathered == {name: 3 if name in found["kept_units"] else 6 for name in names}
    named = ", ".join(found["kept_units"]) or "none"
    assert f"\nunits that stay gathered from forward to backward: {named}\n" in text


def test_no_unit_is_kept_below_stage_3(run):
    assert json.loads(run("nets_to_plan:plain", "--json").stdout)["kept_units"] == []
    assert "stay gathered" not in run("nets_to_plan:plain").stdout


@pytest.mark.parametrize(("model", "stage"), [("converted", 2), ("moved", 3)])
def test_a_model_may_convert_itself_while_it_is_built(run, model, stage):
    found, plain = (
        json.loads(run(f"nets_to_plan:{which}", "--json", stage=stage).stdout)
        for which in (model, "plain")
    )
    assert found["memory"] == plain["memory"]
    assert found["phases"]["backward"] == plain["phases"]["backward"]


def test_a_sharded_parameter_may_be_converted_while_the_model_is_built(run):
    """As PEFT converts its adapters."""
    halved, plain = (
        {row["category"]: row["planned"] for row in json.loads(result.stdout)["memory"]}
        for result in (
            run(f"nets_to_plan:{which}", "--json", stage=3) for which in ("halved", "plain")
        )
    )
    assert 0 < 2 * halved["parameters"] == plain["parameters"]


def test_host_and_device_are_one_memory_on_a_cpu(run, tmp_path):
    offload = {"stage": 2, "offload_optimizer": {"device": "cpu"}}

    def found(*options):
        result = run("nets_to_plan:plain", "--json", *options, ranks=1, zero_optimization=offload)
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    gpu = resources.files("zeroshard.config").joinpath("machines", "h100.toml").read_text()
    serial = tmp_path / "cpu.toml"
    serial.write_text(gpu.replace('execution = "streams"', 'execution = "serial"'))
    alone, cpu = found(), found("--machine", "cpu.toml")
    assert "CPU ranks have one memory" in " ".join(alone["assumed"])
    on_host = sum(row["measured"] for row in alone["memory"] if row["tier"] == "host")
    assert on_host >= 8 * PARAMS  # two moments
    step = alone["phases"]["step"]["device_nbytes"]
    assert cpu["peak_nbytes"] >= step + on_host > alone["peak_nbytes"]


def test_the_state_before_early_updates_is_in_the_plan(run):
    def host_nbytes(**keys):
        zero = {"stage": 2, "offload_optimizer": {"device": "cpu", **keys}}
        result = run(
            "nets_to_plan:plain", "--json", "--machine", "h100", ranks=1, zero_optimization=zero
        )
        assert result.exit_code == 0, result.output
        rows = json.loads(result.stdout)["memory"]
        return sum(row["measured"] for row in rows if row["tier"] == "host")

    late = host_nbytes()
    early = host_nbytes(super_offload=True)
    assert 12 * PARAMS <= early - late <= 1.1 * 12 * PARAMS  # parameter and two moments; padding
    assert host_nbytes(super_offload=True, super_offload_numel=0) == late


def test_check_tells_by_its_exit_code_whether_the_run_fits(run):
    fits = run("nets_to_plan:plain", "--memory", "1", "--check")
    assert fits.exit_code == 0
    assert fits.stdout.startswith("fits, 1.00 GiB to spare")
    assert "on rank 0, a CPU" in fits.stdout.splitlines()[0]
    too_small = run("nets_to_plan:plain", "--memory", "0.00001", "--check")
    assert too_small.exit_code == 3
    assert too_small.stdout.startswith("does not fit: ")
    assert "on rank 0" in too_small.stdout
    told = "no single change of stage, micro-batch, activation checkpointing"
    assert told not in too_small.stdout
    without = run("nets_to_plan:plain", "--memory", "0.00001")
    assert without.exit_code == 0 and told in without.stdout


@pytest.mark.parametrize("columns", [None, "40"])
def test_no_number_is_cut_in_a_file_nor_on_a_narrow_terminal(run, monkeypatch, columns):
    monkeypatch.delenv("COLUMNS", raising=False)
    if columns is not None:
        monkeypatch.setenv("COLUMNS", columns)
    monkeypatch.setattr("nets_to_plan.WIDTH", 4096)
    text = run("nets_to_plan:deep").stdout
    assert "…" not in text
    if columns is not None:
        return
    found = json.loads(run("nets_to_plan:deep", "--json").stdout)
    cells = [cell.strip() for line in text.splitlines() for cell in line.split("│")]
    for op in {row["op"] for row in found["traffic"]}:
        rows = [row for row in found["traffic"] if row["op"] == op]
        assert f"{sum(row['calls'] for row in rows):,}" in cells
        assert gib(sum(row["sent_nbytes"] for row in rows)) in cells
        if op in ("all_gather", "reduce_scatter"):  # of values in fp32
            assert all(row["sent_nbytes"] == 4 * row["sent_numel"] for row in rows)
    assert {f"{row['dtype']} {row['shape']}" for row in found["largest"][:10]} <= set(cells)


def test_sizes_of_small_models_are_not_zero(run):
    found = json.loads(run("nets_to_plan:plain", "--json").stdout)
    head = run("nets_to_plan:plain", "--memory", "0.00001").stdout
    too_much = found["peak_nbytes"] - int(0.00001 * 2**30)
    assert head.startswith(
        f"does not fit: {gib(too_much)} GiB too much of {gib(10737)} GiB; "
        f"peak {gib(found['peak_nbytes'])} GiB in "
    )
    assert f"state at rest {gib(found['states_nbytes'])} GiB" in head
    assert "0.00 GiB" not in head


@pytest.mark.parametrize("more", [(), ("--machine", "h100")])
def test_every_size_on_the_page_of_a_plan_is_in_gib(run, tmp_path, monkeypatch, more):
    monkeypatch.setenv("COLUMNS", "200")  # no cell is broken
    nvme = {"device": "nvme", "nvme_path": str(tmp_path)}
    zero = {"stage": 1, "offload_optimizer": nvme}
    result = run("nets_to_plan:deep", "--memory", "1", *more, zero_optimization=zero)
    assert result.exit_code == 0, result.output
    text = result.stdout.replace("H100 SXM 80 GB", "")  # the name of the machine
    found = set(re.findall(r"\b(?:GiB|MiB|KiB|GB|MB|kB|bytes|elements)\b", text))
    assert found == {"GiB"}
    row = next(line for line in result.stdout.splitlines() if "interpreter, torch" in line)
    found = json.loads(run("nets_to_plan:deep", "--json").stdout)
    assert row.count(f" {gib(found['process_nbytes'])} ") == len(found["phases"])


def test_what_passes_to_the_disk_is_told(run, tmp_path):
    offload = {"stage": 1, "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}}
    text, found = (
        run("nets_to_plan:plain", *options, zero_optimization=offload).stdout
        for options in ((), ("--json",))
    )
    disk = json.loads(found)["disk"]
    assert min(disk.values()) >= 8 * PARAMS // 4  # two moments, of four ranks
    files, read, written = (gib(disk[f"{what}_nbytes"]) for what in ("file", "read", "written"))
    line = f"\ndisk: {files} GiB of files; a step reads {read} GiB and writes {written} GiB"
    assert line in text
    assert "\ndisk: " not in run("nets_to_plan:plain").stdout


PLAN = "plan nets_to_plan:"
RUN = " --config ds.json --ranks 4 "
FIT = PLAN + "words --fit speed --memory 1 --fit-axes "
MISTAKES = [
    # the model
    (PLAN + "item" + RUN, "nets_to_plan.py:60 (return y * y.sum().item()) calls "),
    (PLAN + "nonzero" + RUN, "nonzero.default, which depends on the values of a tensor"),
    (PLAN + "nonzero" + RUN, "nets_to_plan.py:64 (return Net(lambda y: y[y.sum(1).nonzero()])"),
    (PLAN + "no_loss" + RUN, "the model returned FakeTensor without a loss"),
    (PLAN + "number" + RUN, "nets_to_plan:number returned int. It must return a model"),
    (PLAN + "three" + RUN, "nets_to_plan:three returned 3 things. It must return a model, or a model"),
    (PLAN + "triple" + RUN, "nets_to_plan:triple returned a batch of 3 parts. It must be a mapping"),
    (PLAN + "raises" + RUN, "ValueError at "),
    (PLAN + "raises" + RUN, "no such size. Correct the function that returns the model"),
    (PLAN + "other" + RUN, "the module 'nets_to_plan' has no 'other'"),
    ("plan nowhere_at_all:f" + RUN, "there is no module 'nowhere_at_all'"),
    ("plan no_such_model" + RUN, "the model 'no_such_model' is not known"),
    (PLAN + "wrong_batch" + RUN, "RuntimeError at "),
    (PLAN + "no_kernel" + RUN, "calls plan_tests.no_kernel.default, which has no fake kernel"),
    ("plan no_entry.py" + RUN, "the script no_entry.py defines no function 'plan_entry'"),
    ("plan no_entry.py:f" + RUN, "the script no_entry.py defines no function 'f'"),
    ("plan parses.py" + RUN, "parses.py cannot be imported: SystemExit at line 3 (sys.exit(7)): 7"),
    ("plan nowhere.py" + RUN, "the script nowhere.py cannot be read"),
    ("plan train_net.py:broken" + RUN, "train_net.py:broken returned NoneType"),
    ("plan", "MODEL is missing. Example: zeroshard plan"),
    # the configuration
    (PLAN + "plain --config nowhere.json", "nowhere.json"),
    (PLAN + "plain --config cut.json", "cut.json is not JSON: Unterminated string"),
    (PLAN + "words --config cut.json --batch max --memory 1", "cut.json is not JSON: Untermin"),
    (PLAN + "words --config cut.json --fit memory --memory 1", "cut.json is not JSON: Untermin"),
    (PLAN + "plain --config 30.json --ranks 4", "train_batch_size 30 is not divisible by"),
    (PLAN + "words --config 30.json --ranks 4 --fit speed --memory 1", "30 is not divisible by"),
    (PLAN + "plain --config tensor3.json --ranks 4", "needs a multiple of 3 ranks, but 4 were"),
    # the options
    (PLAN + "plain --memory -1" + RUN, "--memory is -1 GiB, which is not a size"),
    (PLAN + "plain --memory nan" + RUN, "--memory is nan GiB, which is not a size"),
    (PLAN + "plain --memory inf" + RUN, "--memory is inf GiB, which is not a size"),
    (PLAN + "plain --config ds.json --ranks 0", "'--ranks'"),
    (PLAN + "words --seq 0" + RUN, "'--seq'"),
    (PLAN + "words --ranks-per-node 0" + RUN, "'--ranks-per-node'"),
    (PLAN + "words --ranks-per-node 3 --config ds.json --ranks 4", "--ranks-per-node 3 does not divide"),
    (PLAN + "words --batch 0" + RUN, "--batch is '0', which is not a number of samples"),
    (PLAN + "plain --batch 8" + RUN, "--batch is 8, and nets_to_plan:plain returns a batch of its own"),
    (PLAN + "plain --seq 8" + RUN, "--seq is 8, and nets_to_plan:plain returns a batch of its own"),
    (PLAN + "plain --config 28.json --ranks 4", "plan:plain returns has 8 rows (the first dimension"),
    (PLAN + "plain --config 28.json --ranks 4", "micro-batch of the configuration has 7 samples"),
    (PLAN + "plain --config none.json --batch 8", "--batch is 8, and nets_to_plan:plain returns"),
    (PLAN + "words --config none.json", "no batch size is given"),
    (PLAN + "plain --batch max" + RUN, "the largest that fits --memory, which is not"),
    (PLAN + "plain --batch max --memory 1" + RUN, "cannot change the batch of"),
    (PLAN + "words --batch max --memory 0.00005 --seq 64" + RUN, "no micro-batch fits 0.0000500 GiB"),
    (PLAN + "plain --check" + RUN, "--check compares with --memory"),
    (PLAN + "words --trace nowhere/x.json" + RUN, "No such file or directory: 'nowhere/x.json'"),
    (PLAN + "words --fit speed" + RUN, "--fit speed needs --memory, or a --machine"),
    (PLAN + "words --fit speed --memory 1 --batch 3" + RUN, "--fit chooses the micro-batch"),
    (PLAN + "words --fit size --memory 1" + RUN, "'size'"),
    (PLAN + "plain --fit speed --memory 1" + RUN, "--fit cannot change the batch of"),
    (PLAN + "words --fit-axes tensor" + RUN, "--fit-axes says what --fit may choose, which is not"),
    (FIT + "tenser" + RUN, "--fit-axes names 'tenser', which is not an axis of a mesh"),
    (PLAN + "words --config stages.json --ranks 4", "has 0 blocks that repeat, in 0 lists, and"),
    (
        PLAN + "words --config stages.json --ranks 4 --fit memory --memory 1",
        "--fit: no mesh is possible. pipeline 2: Words has 0 blocks that repeat, in 0 lists, and 2 ",
    ),
    (FIT + "pipeline=3 --config ds.json --ranks 4", "3 pipeline stages do not divide --ranks 4"),
    (
        FIT + "pipeline=2,tensor=4 --config ds.json --ranks 4",
        "tensor 4 x pipeline 2: 8 ranks for a copy of the model do not divide 4 ranks",
    ),
    (FIT + "sequence" + RUN, "The axes that can be searched are tensor, pipeline and expert"),
    (FIT + "expert=3 --config ds.json --ranks 4", "3 ranks that share experts do not divide --ranks 4"),
    (FIT + "expert=2 --config ds.json --ranks 4", "expert 2: no layer of the model has experts that"),
    (FIT + "data_shard=2" + RUN, "--fit-axes names data_shard: how many ranks share the samples"),
    (FIT + "tensor=two" + RUN, "of which 'two' is not a number of ranks"),
    (FIT + "tensor=3 --config ds.json --ranks 4", "3 tensor ranks do not divide --ranks 4"),
    (
        FIT + "tensor=16 --machine h100 --config ds.json --ranks 16",
        "16 tensor ranks do not divide the 8 devices of a node of",
    ),
    (
        FIT + "tensor=4 --ranks-per-node 2 --config ds.json --ranks 4",
        "4 tensor ranks do not divide the 2 devices of a node of --ranks-per-node",
    ),
    (FIT + "tensor=2 --config ds.json --ranks 4", "tensor 2: Words has no tensor plan of its own"),
    (FIT + "tensor=2 --config tensor3.json --ranks 6", "with parallel.tensor 3 the program cuts it"),
    # the machine
    (PLAN + "words --machine nowhere.toml" + RUN, "--machine nowhere.toml: "),
    (PLAN + "words --machine empty.toml" + RUN, "name is missing"),
    (PLAN + "words --machine cut.toml" + RUN, "cut.toml is not TOML: "),
    (
        PLAN + "words --config ds.json --machine rtx4090 --ranks 16",
        "the machine 'GeForce RTX 4090, one host of 8' has no between_nodes.alpha_s, between_nodes.all_",
    ),
    (
        PLAN + "words --config ds.json --machine rtx4090 --ranks 16 --fit speed",
        "16 ranks on nodes of 8 devices communicate between nodes. Add it to the machine file, with",
    ),
    ("plan --measure m.toml", "this machine is loaded: other programs use"),
    (PLAN + "words --measure m.toml", "--measure plans nothing, and the model nets_to_plan:words"),
    # the record of a run
    ("report no-run", "no-run is not a directory"),
    ("report empty", "its first line does not describe one"),
    ("report cut", "steps-0-1-0.jsonl, line 1 is damaged: it lacks attempt, host"),
    ("report half", "its first line does not describe one. It is empty, or its beginning is missing"),
    ("report holes", "holes/steps-0-1-0.jsonl, line 1 is damaged: "),
]  # fmt: skip


@pytest.mark.parametrize(("words", "text"), MISTAKES)
def test_a_mistake_is_explained_and_no_number_is_given(run, tmp_path, monkeypatch, words, text):
    keys = {"train_micro_batch_size_per_gpu": 8, "optimizer": {"type": "AdamW"}}
    (tmp_path / "none.json").write_text('{"optimizer": {"type": "AdamW"}}')
    for name, own in (
        ("ds", {}), ("30", {"train_batch_size": 30}), ("tensor3", {"parallel": {"tensor": 3}}),
        ("28", {"train_batch_size": 28, "train_micro_batch_size_per_gpu": "auto"}),
        ("stages", {"parallel": {"pipeline": 2}}),
    ):  # fmt: skip
        (tmp_path / f"{name}.json").write_text(json.dumps(keys | own))
    (tmp_path / "cut.json").write_text('{"train_micro_batch_size_per_gpu": 8, "zero_opt')
    (tmp_path / "empty.toml").write_text("")
    (tmp_path / "cut.toml").write_text('name = "x"\n[device')
    first = '{"kind": "run", "format": 1, "time_s": 0}\n'
    for name, record in (
        ("empty", ""), ("cut", first), ("half", first[:20]), ("holes", first[:20] + "\n" + first),
    ):  # fmt: skip
        (tmp_path / name).mkdir()
        (tmp_path / name / "steps-0-1-0.jsonl").write_text(record)
    busy = iter([[0] * 8, [90, 0, 0, 10, 0, 0, 0, 0]])
    monkeypatch.setattr(measure, "_ticks", busy.__next__)
    if " no_such_model" in words:
        pytest.importorskip("transformers")
    result = CliRunner().invoke(main, words.split())
    assert result.exit_code == 2, (result.output, result.exception)
    assert text in " ".join(result.output.split()), result.output
    assert not result.stdout
    assert not (tmp_path / "m.toml").exists()


def test_a_script_is_imported_and_its_entry_gives_the_model(run, tmp_path):
    of_script = run("train_net.py", "--seq", "16", "--json")
    assert of_script.exit_code == 0, of_script.output
    of_module = run("nets_to_plan:words", "--seq", "16", "--json")
    found, wanted = (json.loads(each.stdout) for each in (of_script, of_module))
    assert found["peak_nbytes"] == wanted["peak_nbytes"]
    assert found["step_peak"] == wanted["step_peak"]
    assert (tmp_path / "imported.txt").read_text() == "[]"  # once, without the command's arguments
    named = json.loads(run("./train_net.py:plain", "--json").stdout)
    assert named["parameters"] == PARAMS
    assert run("no_entry.py").exit_code == 2
    assert not (tmp_path / "ran.txt").exists()


@pytest.mark.parametrize(
    ("model", "keys", "samples"),
    [
        ("plain", {}, 8),
        ("plain", {"train_micro_batch_size_per_gpu": "auto"}, 8),
        ("plain", {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 3}, 8),
        ("plain", {"train_micro_batch_size_per_gpu": 8}, 8),
        ("columns", {"train_micro_batch_size_per_gpu": 8}, 8),
        ("mixed", {"train_micro_batch_size_per_gpu": 2}, 2),
    ],
)
def test_samples_per_second_are_those_of_the_batch_of_the_model(
    run, tmp_path, model, keys, samples
):
    (tmp_path / "own.json").write_text(json.dumps({"optimizer": {"type": "AdamW"}} | keys))
    words = f"plan nets_to_plan:{model} --config own.json --ranks 4 --machine h100 --json".split()
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["micro_batch"] == samples
    step = 4 * samples * keys.get("gradient_accumulation_steps", 1)
    assert found["time"]["samples_per_s"] * found["time"]["total_s"] == pytest.approx(step)
    taken = "train_micro_batch_size_per_gpu" not in keys or "auto" in keys.values()
    assert (
        f"the micro-batch has {samples} samples, the rows of" in " ".join(found["assumed"])
    ) == taken


@pytest.mark.parametrize(
    ("size", "as_named"), sampled([(2, "p2p"), (4, "shm"), (None, "shm")], every=2)
)
def test_cpu_ranks_of_several_nodes_have_no_shared_memory(run, size, as_named):
    options = () if size is None else ("--ranks-per-node", str(size))
    found = json.loads(run("nets_to_plan:plain", "--json", *options).stdout)
    assert found["ranks_per_node"] == size
    told = " ".join(found["assumed"])
    assert ("communicate through shared memory" in told) is (as_named == "shm")
    named = json.loads(run("nets_to_plan:plain", "--json", transport=as_named).stdout)
    assert [found[key] for key in ("memory", "phases")] == [
        named[key] for key in ("memory", "phases")
    ]


def test_ranks_of_several_nodes_wait_longer_for_each_other(run):
    seconds = {}
    for size in (None, 2, 4, 8):
        options = () if size is None else ("--ranks-per-node", str(size))
        words = ("nets_to_plan:plain", "--machine", "h100", "--json", *options)
        seconds[size] = json.loads(run(*words, stage=1).stdout)["time"]["communication_s"]
    assert seconds[2] > seconds[4] == seconds[8] == seconds[None]


@pytest.mark.parametrize(("size", "late"), [(0, True), ("auto", False), (1, False)])
def test_all_gathers_that_are_not_prefetched_are_named_with_their_key(run, size, late):
    zero = {"stage": 3, "stage3_prefetch_bucket_size": size}
    options = ("nets_to_plan:plain", "--machine", "h100")
    found = json.loads(run(*options, "--json", zero_optimization=zero).stdout)["time"]
    text = run(*options, zero_optimization=zero).stdout
    line = "all-gathers start late and cost "
    assert (line in text) is late
    assert ("zero_optimization.stage3_prefetch_bucket_size" in text) is late
    assert (found["late_gathers"]["calls"] > 1) is late
    assert 0 < found["late_gathers"]["exposed_s"] <= found["exposed_s"]["all-gather"]


def test_changes_of_a_run_whose_batch_comes_with_the_model(run):
    result = run("nets_to_plan:plain", "--memory", "0.0001", "--json", stage=0)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["changes"]


def test_the_largest_batch_fits_and_one_more_does_not(run):
    options = ("nets_to_plan:words", "--seq", "64", "--memory", "0.002", "--json")
    found = json.loads(run(*options, "--batch", "max").stdout)
    samples = found["micro_batch"]
    assert found["peak_nbytes"] <= found["limit_nbytes"] < found["one_more_nbytes"]
    again, more = (
        json.loads(run(*options, "--batch", str(n)).stdout) for n in (samples, samples + 1)
    )
    assert again["fits"] and again["peak_nbytes"] == found["peak_nbytes"]
    assert not more["fits"] and more["peak_nbytes"] == found["one_more_nbytes"]
    text = run(*options[:-1], "--batch", "max").stdout.splitlines()[1]
    assert text.startswith(f"micro-batch {samples} is the largest that fits: {samples + 1} needs ")


@pytest.mark.full
def test_every_stage_of_a_pipeline_is_planned(run, tmp_path):
    pytest.importorskip("transformers")
    folder = tmp_path / "tiny"
    folder.mkdir()
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 5, "vocab_size": 96}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **sizes, **heads}))
    keys = {
        "bf16": {"enabled": True},
        "parallel": {"pipeline": 2},
        "gradient_accumulation_steps": 4,
    }
    result = run("tiny", "--seq", "16", "--json", stage=3, **keys)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    layer, table = 4 * 32 * 32 + 3 * 32 * 64 + 2 * 32, 96 * 32
    stages = found["pipeline_stages"]
    assert [each["rank"] for each in stages] == [0, 2]
    assert [each["parameters"] for each in stages] == [2 * layer + table, 3 * layer + table + 32]
    assert [each["in_flight"] for each in stages] == [2, 1]
    assert len(stages[0]["kept_units"]) == len(stages[1]["kept_units"]) == 1
    # hidden states of four micro-batches of 8 x 16 tokens, and their ids; only gradients come back
    assert stages[0]["sent_numel"] >= 4 * 8 * 16 * 33 > stages[1]["sent_numel"] == 4 * 8 * 16 * 32
    assert found["peak_nbytes"] == max(each["peak_nbytes"] for each in stages)
    assert found["rank"] == max(stages, key=lambda each: each["peak_nbytes"])["rank"]
    options = ("--machine", "h100", "--memory", "1", "--trace", "steps.json")
    text = run("tiny", "--seq", "16", *options, stage=3, **keys)
    assert "pipeline stages" in text.stdout and text.stdout.startswith("fits")
    time = json.loads((tmp_path / "steps.json").read_text())
    events = [each for each in time["traceEvents"] if each["ph"] == "X"]
    assert {each["pid"] for each in events} == {0, 2}
    sent, got = (
        [e for e in events if e["name"].startswith(f"{begin}messages from rank 0 to rank 2: message f")]
        for begin in ("", "wait for ")
    )  # fmt: skip
    assert {e["pid"] for e in sent} == {0} and len({e["name"] for e in sent}) == 4
    last = {e["name"].removeprefix("wait for "): e["ts"] + e["dur"] for e in got if e["pid"] == 2}
    assert last and all(
        last[e["name"]] >= e["ts"] + e["dur"] - 1e-6 for e in sent if e["name"] in last
    )
    waits = time["otherData"]["time"]["stages_s"]
    assert 0 < waits < time["otherData"]["time"]["total_s"]
    assert "waits for other pipeline stages: " in text.stdout
    searched = run(
        "tiny", "--seq", "16", "--memory", "1", "--fit", "speed", "--fit-axes", "pipeline=2", **keys
    )
    assert (
        "x accumulation 2\n" in searched.stdout
    )  # 32 samples, and no fewer than two micro-batches
    assert '"pipeline": 2' in searched.stdout
    assert "pipeline(model, split=['model.layers.2'])" in searched.stdout


def test_a_configuration_that_fits_is_found_and_does_fit(run, tmp_path):
    pytest.importorskip("transformers")
    keys = {"train_batch_size": 48, "train_micro_batch_size_per_gpu": "auto"}
    options = ("gpt_tiny", "--seq", "32", "--memory", "0.004", "--json")
    folder = tmp_path / "gpt_tiny"
    folder.mkdir()
    (folder / "config.json").write_text(
        json.dumps(
            {"model_type": "gpt2", "n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": 99}
        )
    )
    result = run(*options, "--fit", "speed", **keys)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    chosen = found["config"]
    size, count = (
        chosen[k] for k in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    )
    assert size * count == 12
    assert size > 1
    assert found["next_larger"]["micro_batch"] > size
    assert found["next_larger"]["peak_nbytes"] > 0.004 * 2**30
    (tmp_path / "chosen.json").write_text(json.dumps(chosen))
    words = ["plan", "gpt_tiny", "--config", "chosen.json", "--ranks", "4", *options[1:]]
    assert not found["checkpointing"]
    again = json.loads(CliRunner().invoke(main, words).stdout)  # with the accumulation of the run
    assert again["fits"]
    assert again["peak_nbytes"] == found["plan"]["peak_nbytes"]
    if FULL:
        text = run(*options[:-1], "--fit", "speed", **keys).stdout
        assert f"micro-batch {size} x accumulation {count}" in text
        assert f"micro-batch {found['next_larger']['micro_batch']} does not fit" in text
    nothing = run(*options[:4], "0.0001", "--fit", "memory", **keys)
    assert nothing.exit_code == 3
    assert "nothing fits" in nothing.stdout


def test_the_largest_batch_needs_a_free_batch_size(run):
    result = run("nets_to_plan:words", "--batch", "max", "--memory", "1", train_batch_size=32)
    assert result.exit_code == 2
    assert "train_batch_size is 32" in result.output


def test_a_plan_leaves_the_directory_and_the_marker_of_preempted_runs_alone(run, tmp_path):
    saves = tmp_path / "saves"
    result = run("nets_to_plan:plain", preemption={"save_dir": str(saves)})
    assert result.exit_code == 0, result.output
    assert not saves.exists()
    saves.mkdir()
    (saves / "preempted").touch()
    assert run("nets_to_plan:plain", preemption={"save_dir": str(saves)}).exit_code == 0
    assert (saves / "preempted").exists()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "cannot read a configuration from"),
        ("{nope", "cannot read a configuration from"),
        ('{"model_type": "zzz"}', "cannot read a configuration from"),
    ],
)
def test_a_folder_without_a_readable_configuration_is_a_mistake(run, tmp_path, text, said):
    pytest.importorskip("transformers")
    (tmp_path / "model").mkdir()
    if text is not None:
        (tmp_path / "model" / "config.json").write_text(text)
    result = run("./model")
    assert result.exit_code == 2, result.output
    assert said in result.output


def test_a_batch_that_the_model_does_not_take_is_a_mistake_and_not_a_traceback(run, tmp_path):
    """A classifier needs one label for each sample, and the plan's batch has one for each token."""
    transformers = pytest.importorskip("transformers")
    transformers.BertConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=1, intermediate_size=16, vocab_size=32,
        architectures=["BertForSequenceClassification"],
    ).save_pretrained(tmp_path / "classifier")  # fmt: skip
    result = run("./classifier", "--seq", "4")
    assert result.exit_code == 2, result.output
    assert "ValueError at " in result.output
    assert "give module:function, which returns the model and a batch" in result.output


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_has_the_dtype_of_its_configuration(run, tmp_path, dtype):
    transformers = pytest.importorskip("transformers")
    transformers.LlamaConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=1, num_key_value_heads=1,
        intermediate_size=16, vocab_size=32, architectures=["LlamaForCausalLM"], dtype=dtype,
    ).save_pretrained(tmp_path / "llama")  # fmt: skip
    result = run("./llama", "--seq", "4", "--json", ranks=1, stage=0)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    nbytes = {row["category"]: row["measured"] for row in found["memory"]}
    size = {"float32": 4, "bfloat16": 2}[dtype]
    assert nbytes["parameters"] // found["parameters"] == size  # units are padded by some elements
    assert f"the model is built in torch.{dtype}, as its configuration says" in found["assumed"]


@pytest.mark.parametrize("stage", [1, 3])
def test_a_model_that_a_run_cuts_over_tensor_ranks_is_cut_in_its_plan(run, tmp_path, stage):
    transformers = pytest.importorskip("transformers")
    transformers.LlamaConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
        intermediate_size=32, vocab_size=32, architectures=["LlamaForCausalLM"],
    ).save_pretrained(tmp_path / "llama")  # fmt: skip
    result = run("./llama", "--seq", "4", "--json", stage=stage, tensor_parallel={"autotp_size": 2})
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["mesh"] == "data_shard 2 x tensor 2"
    cut, norms, table = 4 * 16 * 16 + 3 * 16 * 32, 3 * 16, 32 * 16
    assert cut // 2 + norms + table <= found["parameters"] <= cut // 2 + norms + 2 * table
    assert {row["op"] for row in found["traffic"] if row["group"] == "tensor"} >= {"all_reduce"}


def test_tensor_ranks_are_found_and_named(run, tmp_path):
    transformers = pytest.importorskip("transformers")
    transformers.LlamaConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=32, vocab_size=32, architectures=["LlamaForCausalLM"],
    ).save_pretrained(tmp_path / "llama")  # fmt: skip
    options = "./llama --seq 4 --memory 1 --fit speed --fit-axes tensor=2,4".split()
    result = run(*options, train_batch_size=12, train_micro_batch_size_per_gpu=3)
    assert result.exit_code == 0, result.output
    text = " ".join(result.stdout.split())
    assert text.startswith("stage 0, tensor 2, without activation checkpointing, micro-batch 6 x ")
    assert "tensor 4 is not possible: 'model.layers.0.self_attn.q_proj' has 2 heads" in text
    found = json.loads(run(*options, "--json", train_micro_batch_size_per_gpu=3).stdout)
    assert found["plan"]["mesh"] == "data_shard 2 x tensor 2"
    assert found["config"]["tensor_parallel"] == {"autotp_size": 2}
    assert found["config"]["train_micro_batch_size_per_gpu"] == 6
    assert {str(each["axes"]) for each in found["candidates"]} == {"{'tensor': 2}"}
    assert list(found["refused"]) == ["tensor 4"]


def test_a_model_whose_cut_needs_values_is_refused(run, tmp_path):
    transformers = pytest.importorskip("transformers")
    transformers.GPT2Config(
        n_embd=16, n_layer=2, n_head=2, vocab_size=32, n_positions=8, bos_token_id=1, eos_token_id=1
    ).save_pretrained(tmp_path / "gpt2")
    result = run("./gpt2", "--seq", "4", stage=1, tensor_parallel={"autotp_size": 2})
    assert result.exit_code == 2, result.output
    assert "GPT2LMHeadModel has no tensor plan of its own" in result.output
    assert not result.stdout


# ---------------------------------------------------------------- what is told beside the plan


def test_each_simulation_is_named_where_someone_asks(run):
    quiet = run("nets_to_plan:words", "--fit", "speed", "--memory", "1", "--seq", "8")
    assert "simulation" not in quiet.stderr
    told = run("nets_to_plan:words", "--fit", "speed", "--memory", "1", "--seq", "8", "--verbose")
    lines = [line for line in told.stderr.splitlines() if line.startswith("zeroshard: simulation")]
    assert len(lines) == int(re.findall(r"by (\d+) simulations", told.stdout)[0])
    assert re.match(r"zeroshard: simulation 1: stage 0, .* peak .*, fits \(\d+ s\)$", lines[0])


def test_the_changes_of_a_run_that_does_not_fit_are_named_too(run):
    told = run("nets_to_plan:plain", "--memory", "0.0001", "--verbose", stage=0)
    assert "simulation 1: the run as it is configured: peak" in told.stderr
    assert "does not fit" in told.stderr
    assert 'simulation 2: {"zero_optimization": {"stage": ' in told.stderr


def test_what_is_not_modelled_is_listed_for_who_asks(run):
    short, long = run("nets_to_plan:plain"), run("nets_to_plan:plain", "--verbose")
    assert "things are not modelled: --verbose lists them" in short.stdout
    count = int(re.findall(r"^(\d+) things", short.stdout, re.MULTILINE)[0])
    assert len(long.stdout.split("not modelled:\n")[1].splitlines()) == count


def test_more_ranks_than_processors_ask_for_the_device(run, monkeypatch):
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    many, few = run("nets_to_plan:plain", ranks=4), run("nets_to_plan:plain", ranks=2)
    assert "planned for 4 CPU ranks, more than this machine has processors" in many.stderr
    assert "--target cuda" in many.stderr
    assert few.stderr == ""
    assert run("nets_to_plan:plain", "--target", "cuda", ranks=4).stderr == ""


def test_a_plan_without_a_configuration_says_what_it_takes(run):
    run("nets_to_plan:words")  # makes the folder
    words = ["plan", "nets_to_plan:words", "--seq", "8", "--ranks", "2", "--json"]
    done = CliRunner().invoke(main, words)
    assert done.exit_code == 0, done.output
    assert "no --config is given: bf16, AdamW, stage 3, micro-batch 1" in done.stderr
    assert json.loads(done.stdout)["stage"] == 3
    found = CliRunner().invoke(main, [*words, "--fit", "speed", "--memory", "1"])
    assert found.exit_code == 0, found.output
    assert "8 samples of each rank in a step" in found.stderr
    config = json.loads(found.stdout)["config"]
    assert config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"] == 8


def test_a_model_of_the_hub_is_planned_if_it_was_downloaded(run, tmp_path, monkeypatch):
    transformers = pytest.importorskip("transformers")
    constants = pytest.importorskip("huggingface_hub").constants
    cached = tmp_path / "cache" / "models--org--tiny"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    without = run("org/tiny")
    assert without.exit_code == 2
    assert "'org/tiny' is not in the cache of the hub" in without.stderr
    assert "C.from_pretrained('org/tiny').save_pretrained('tiny')" in without.stderr
    shape = {"n_layer": 1, "n_head": 2, "n_embd": 16, "vocab_size": 32, "n_positions": 16}
    transformers.GPT2Config(**shape).save_pretrained(cached / "snapshots" / "abc")
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text("abc")
    done = run("org/tiny", "--json")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["parameters"] == 4_080
