"""`zeroshard plan` of small models: verdicts, exit codes, and what cannot be planned."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from zeroshard.cli.main import main

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

class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(32, WIDTH), nn.Linear(WIDTH, 32)

    def forward(self, input_ids, labels):
        logits = self.head(self.table(input_ids))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())

def words():
    return Words()

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

def wrong_batch():
    return Net(), (torch.empty(8, WIDTH + 1), None)

def no_kernel():
    library = torch.library.Library("plan_tests", "FRAGMENT")
    if not hasattr(torch.ops.plan_tests, "no_kernel"):
        library.define("no_kernel(Tensor x) -> Tensor")
        library.impl("no_kernel", lambda x: x.clone(), "CPU")
        KEPT.append(library)
    return Net(torch.ops.plan_tests.no_kernel), (batch(), None)

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


def test_check_tells_by_its_exit_code_whether_the_run_fits(run):
    fits = run("nets_to_plan:plain", "--memory", "1", "--check")
    assert fits.exit_code == 0
    assert fits.stdout.startswith("fits, 1.00 GiB to spare")
    assert "not modelled:" in fits.stdout
    too_small = run("nets_to_plan:plain", "--memory", "0.00001", "--check")
    assert too_small.exit_code == 3
    assert too_small.stdout.startswith("does not fit: ")
    assert "on rank 0" in too_small.stdout


@pytest.mark.parametrize(
    ("model", "options", "text"),
    [
        ("nets_to_plan:item", (), "nets_to_plan.py:36 (return y * y.sum().item()) calls "),
        ("nets_to_plan:nonzero", (), "nonzero.default, which depends on the values of a tensor"),
        ("nets_to_plan:no_loss", (), "the model returned FakeTensor without a loss"),
        ("nets_to_plan:number", (), "nets_to_plan:number returned int. It must return a model"),
        ("nets_to_plan:other", (), "the module 'nets_to_plan' has no 'other'"),
        ("nowhere_at_all:f", (), "there is no module 'nowhere_at_all'"),
        ("nets_to_plan:wrong_batch", (), "RuntimeError at "),
        (
            "nets_to_plan:no_kernel",
            (),
            "calls plan_tests.no_kernel.default, which has no fake kernel",
        ),
        ("no_entry.py", (), "the script no_entry.py defines no function 'plan_entry'"),
        ("no_entry.py:f", (), "the script no_entry.py defines no function 'f'"),
        ("parses.py", (), "parses.py cannot be imported: SystemExit at line 3 (sys.exit(7)): 7"),
        ("nowhere.py", (), "the script nowhere.py cannot be read"),
        ("train_net.py:broken", (), "train_net.py:broken returned NoneType"),
        ("nets_to_plan:plain", ("--memory", "-1"), "--memory is -1 GiB, which is not a size"),
        ("nets_to_plan:plain", ("--memory", "nan"), "--memory is nan GiB, which is not a size"),
        ("nets_to_plan:plain", ("--memory", "inf"), "--memory is inf GiB, which is not a size"),
        ("no_such_folder", ("--config", "nowhere.json"), "nowhere.json"),
        ("nets_to_plan:plain", ("--batch", "max"), "the largest that fits --memory, which is not"),
        ("nets_to_plan:plain", ("--batch", "max", "--memory", "1"), "cannot change the batch of"),
        (
            "nets_to_plan:words",
            ("--batch", "0"),
            "--batch is '0', which is not a number of samples",
        ),
        (
            "nets_to_plan:words",
            ("--batch", "max", "--memory", "0.00005", "--seq", "64"),
            "no micro-batch fits 0.1 MiB: one sample needs ",
        ),
        ("nets_to_plan:plain", ("--check",), "--check compares with --memory"),
    ],
)
def test_mistakes_are_explained(run, model, options, text):
    result = run(model, *options)
    assert result.exit_code == 2, result.output
    assert text in result.output


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
    text = run(*options[:-1], "--fit", "speed", **keys).stdout
    assert f"micro-batch {size} x accumulation {count}" in text
    assert "the next micro-batch" in text
    nothing = run(*options[:4], "0.0001", "--fit", "memory", **keys)
    assert nothing.exit_code == 3
    assert "nothing fits" in nothing.stdout


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--fit", "speed"), "--fit speed fits a run into --memory, which is not given"),
        (("--fit", "speed", "--memory", "1", "--batch", "3"), "--fit chooses the micro-batch"),
        (("--fit", "size", "--memory", "1"), "'size'"),
    ],
)
def test_a_search_that_cannot_be_made_is_explained(run, options, text):
    result = run("nets_to_plan:words", *options)
    assert result.exit_code == 2, result.output
    assert text in result.output


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


def test_an_indivisible_batch_is_a_mistake_of_the_configuration(run):
    result = run("nets_to_plan:plain", train_batch_size=30)
    assert result.exit_code == 2
    assert "train_batch_size" in result.output


def test_an_unknown_model_is_named(run):
    pytest.importorskip("transformers")
    result = run("no_such_model")
    assert result.exit_code == 2
    assert "the model 'no_such_model' is not known" in result.output


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
