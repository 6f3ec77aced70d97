"""``zeroshard ckpt`` shows the contents, the errors and the differences of checkpoints."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoint_dirs import write_checkpoint
from safetensors.torch import load_file
from typer.testing import CliRunner

from zeroshard.checkpoint import reader
from zeroshard.checkpoint.compare import max_abs_difference
from zeroshard.cli.main import main

VALUES = {"a.weight": torch.arange(600.0).view(20, 30), "b": torch.ones(3, dtype=torch.bfloat16)}
STATE = {"a.weight": {"exp_avg": torch.full((20, 30), 0.5)}}
BUFFERS = {"count": torch.tensor(3)}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(reader, "PIECE_NUMEL", 64)


@pytest.fixture
def run():
    """``zeroshard ckpt ...``; the exit code is checked, the result returned."""

    def invoke(*words: object, code: int = 0, answer: str = ""):
        result = CliRunner().invoke(main, ["ckpt", *map(str, words)], input=answer)
        assert result.exit_code == code, result.output
        return result

    return invoke


@pytest.fixture
def make(tmp_path):
    """Write the checkpoint of one step."""

    def write(step: int = 10, *, folder: str = "run", **keys: object) -> Path:
        keys = {"state": STATE, "buffers": BUFFERS, "scalars": {"a.weight": {"step": 10}}, **keys}
        return write_checkpoint(
            tmp_path / folder,
            keys.pop("values", VALUES),
            tag=f"global_step{step}",
            step=step,
            **keys,
        )

    return write


@pytest.fixture
def place(tmp_path):
    return tmp_path / "run"


def flip(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


# ---------------------------------------------------------------------- ls


def test_ls_lists_checkpoints_by_step_and_marks_the_latest(make, place, run):
    for step in (9, 10, 8):
        make(step)
    lines = run("ls", place).output.splitlines()
    assert lines[0].split()[:2] == ["tag", "step"]
    assert [line.split()[0] for line in lines[1:]] == [f"global_step{n}" for n in (8, 9, 10)]
    assert ["latest" in line for line in lines[1:]] == [True, False, False]
    assert all(line.rstrip().endswith("complete") for line in lines[1:])


def test_ls_gives_programs_the_same_as_json(make, place, run):
    path = make(10)
    (row,) = json.loads(run("ls", place, "--json").output)
    wanted = {"tag": "global_step10", "step": 10, "world_size": 2, "stage": 3, "numel": 603}
    assert row.items() >= {**wanted, "latest": True, "state": "complete"}.items()
    assert row["nbytes"] == sum(file.stat().st_size for file in path.iterdir())


def test_ls_says_why_a_checkpoint_cannot_be_loaded(make, place, run):
    (make(1) / "rank-1.safetensors").unlink()
    (make(2) / "manifest.json").write_text("{")
    (make(3) / "manifest.json").unlink()
    cut = make(4) / "rank-0.safetensors"
    cut.write_bytes(cut.read_bytes()[:-1])
    (place / ".global_step5.saving-0123abcd").mkdir()
    (place / "logs").mkdir()
    (place / "latest").write_text("global_step3")
    states = {row["tag"]: row["state"] for row in json.loads(run("ls", place, "--json").output)}
    assert states.keys() == {
        *(f"global_step{n}" for n in (1, 2, 3, 4)),
        ".global_step5.saving-0123abcd",
    }
    assert "rank-1.safetensors cannot be opened" in states["global_step1"]
    assert "not readable as JSON" in states["global_step2"]
    assert "manifest.json is missing" in states["global_step3"]
    assert "truncated" in states["global_step4"]
    assert "did not finish" in states[".global_step5.saving-0123abcd"]


def test_ls_knows_deepspeeds_checkpoints(tmp_path, run):
    (tmp_path / "global_step7").mkdir()
    (tmp_path / "global_step7" / "mp_rank_00_model_states.pt").write_bytes(b"12345")
    (tmp_path / "latest").write_text("global_step7")
    (row,) = json.loads(run("ls", tmp_path, "--json").output)
    assert (row["tag"], row["nbytes"], row["latest"]) == ("global_step7", 5, True)
    assert row["state"] == "written by DeepSpeed"


def test_ls_of_a_directory_without_any(tmp_path, run):
    assert "There is no checkpoint in" in run("ls", tmp_path).output


def test_ls_of_a_checkpoint_is_its_row(make, run):
    folder = make(10)
    (row,) = json.loads(run("ls", folder, "--json").output)
    assert (row["tag"], row["step"], row["state"]) == ("global_step10", 10, "complete")


# ---------------------------------------------------------------------- show


def test_show_names_parameters_state_buffers_and_files(make, place, run):
    make(
        10,
        aliases={"b": ["c"]},
        shared={"counters": {"global_steps": 10}, "client_state": {"x": 1}},
    )
    output = run("show", place).output
    (weight,) = [line for line in output.splitlines() if line.startswith("a.weight")]
    for word in ("20, 30", "F32", "exp_avg", "step 10"):
        assert word in weight
    assert "world_size: 2" in output
    assert '{"global_steps": 10}' in output
    assert "2 parameters" in output
    assert "rank-1.safetensors" in output
    assert "client_state: x" in output


def test_show_gives_programs_json(make, place, run):
    make(10, frozen=["b"], unsaved=["b"])
    facts = json.loads(run("show", place, "--json").output)
    assert facts["step"] == 10
    assert [p["dtype"] for p in facts["parameters"]] == ["F32", None]
    assert facts["buffers"] == [{"name": "count", "shape": [], "dtype": "int64"}]


@pytest.mark.parametrize("how", ["tag", "path"])
def test_an_older_one_is_named_by_its_tag_or_its_path(make, place, run, how):
    make(10)
    make(20)
    words = (place, "--tag", "global_step10") if how == "tag" else (place / "global_step10",)
    assert "step: 10" in run("show", *words).output


def test_a_tag_beside_the_path_of_another_is_refused(make, run):
    assert "is itself a checkpoint" in run("show", make(10), "--tag", "other", code=2).output


@pytest.mark.parametrize("command", ["ls", "show", "verify", "diff", "export", "prune"])
def test_a_directory_that_is_none_is_an_error_without_a_traceback(tmp_path, run, command):
    rest = {"diff": (tmp_path,), "export": ("--out", tmp_path), "prune": ("--keep", 1)}
    result = run(command, tmp_path / "none", *rest.get(command, ()), code=2)
    assert "none is not a directory" in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.parametrize("command", ["show", "verify", "export"])
def test_an_unknown_tag_is_an_error_that_lists_the_known_ones(make, place, tmp_path, run, command):
    make(10)
    rest = ("--out", tmp_path / "out") if command == "export" else ()
    result = run(command, place, "--tag", "global_step11", *rest, code=2)
    assert "global_step10" in result.stderr


# ---------------------------------------------------------------------- verify


def test_verify_reads_all_bytes(make, place, run):
    path = make(10)
    assert "every byte" in run("verify", place).output
    for name in ("rank-0.safetensors", "rank-1.safetensors"):
        flip(path / name)
    lines = run("verify", place, code=1).output.splitlines()
    assert len(lines) == 2
    assert all("is damaged" in line for line in lines)


def test_verify_names_a_manifest_that_is_not_to_be_believed(make, place, run):
    flip(make(10) / "manifest.json", 300)
    assert len(run("verify", place, code=1).output.splitlines()) == 1


# ---------------------------------------------------------------------- export


def test_export_writes_weights(make, place, tmp_path, run):
    make(10)
    out = tmp_path / "out"
    done = run("export", place, "--out", out, "--dtype", "bfloat16")
    assert done.stdout.split() == [str(out / "model.safetensors")]
    assert "no config.json lies beside the checkpoint" in done.stderr
    found = load_file(out / "model.safetensors")
    assert torch.equal(found["a.weight"], VALUES["a.weight"].bfloat16())


def test_export_takes_a_size_and_leaves_frozen_ones_out(make, place, tmp_path, run):
    make(10, frozen=["b"])
    words = ("--out", tmp_path / "out", "--max-shard-size", "1KB", "--exclude-frozen")
    assert len(run("export", place, *words).stdout.split()) == 2
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == {"a.weight", "count"}


@pytest.mark.parametrize(
    ("words", "said"),
    [(("--dtype", "int4"), "dtype='int4'"), (("--max-shard-size", "big"), "max_shard_size='big'")],
)
def test_export_refuses_what_it_does_not_know(make, place, tmp_path, run, words, said):
    make(10)
    assert said in run("export", place, "--out", tmp_path / "out", *words, code=2).stderr


def test_export_replaces_a_model_only_if_asked(make, place, tmp_path, run):
    make(10)
    (place / "config.json").write_text("new")
    out = tmp_path / "out"
    run("export", place, "--out", out)
    (out / "config.json").write_text("of another model")
    said = run("export", place, "--out", out, code=2).stderr
    assert f"{out} has weights already (model.safetensors). Give --overwrite" in said
    assert (out / "config.json").read_text() == "of another model"
    run("export", place, "--out", out, "--overwrite")
    assert (out / "config.json").read_text() == "new"


# ---------------------------------------------------------------------- the folder of a Trainer


@pytest.fixture
def trainer_folder(make, tmp_path):
    """Checkpoints as a Trainer saves them, each with the files of its model."""
    for step in (9, 20, 100):
        make(step, folder=f"out/checkpoint-{step}")
        folder = tmp_path / "out" / f"checkpoint-{step}"
        (folder / "latest").write_text(f"global_step{step}")
        (folder / "config.json").write_text(f'{{"step": {step}}}')
        (folder / "tokenizer.json").write_text("{}")
        (folder / "optimizer.pt").write_text("")
    return tmp_path / "out"


def test_ls_looks_one_level_down(trainer_folder, run):
    found = json.loads(run("ls", trainer_folder, "--json").output)
    assert [(row["tag"], row["latest"]) for row in found] == [
        ("checkpoint-9/global_step9", False),
        ("checkpoint-20/global_step20", False),
        ("checkpoint-100/global_step100", True),
    ]


def test_the_newest_checkpoint_of_a_trainer_or_the_named_one_is_taken(trainer_folder, run):
    for words, step in (
        ((), 100),
        (("--tag", "checkpoint-20"), 20),
        (("--tag", "checkpoint-9/global_step9"), 9),
    ):
        assert json.loads(run("show", trainer_folder, "--json", *words).output)["step"] == step
    said = run("show", trainer_folder, "--tag", "checkpoint-21", code=2).stderr
    assert "There are checkpoint-9, checkpoint-20, checkpoint-100." in said


def test_export_takes_configuration_and_tokenizer_along(trainer_folder, tmp_path, run):
    out = tmp_path / "exported"
    out.mkdir()
    (out / "tokenizer.json").write_text("mine")
    assert not run("export", trainer_folder, "--out", out).stderr
    assert sorted(path.name for path in out.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert json.loads((out / "config.json").read_text()) == {"step": 100}
    assert (out / "tokenizer.json").read_text() == "mine"


# ---------------------------------------------------------------------- diff


def test_equal_checkpoints_have_no_difference_whatever_their_files(make, tmp_path, run):
    make(10, files=1)
    make(10, folder="other", files=3)
    assert run("diff", tmp_path / "run", tmp_path / "other").output == "No difference.\n"


def differences(run, *words: object) -> dict[tuple[str, str], tuple[str, float | None]]:
    found = json.loads(run("diff", *words, "--json", code=1).output)
    return {(d["name"], d["part"]): (d["what"], d["max_abs"]) for d in found}


def test_diff_names_each_difference_once(make, run):
    changed = VALUES["a.weight"].clone()
    changed[3, 4] += 0.25
    changed[17, 20] -= 1.5
    first = make(
        10,
        values={**VALUES, "gone": torch.ones(2), "d": torch.ones(4)},
        buffers={**BUFFERS, "mean": torch.ones(2)},
    )
    second = make(
        20,
        values={"a.weight": changed, "b": VALUES["b"].float() + 1, "d": torch.ones(5), "new": changed},
        state={},
        scalars={"a.weight": {"step": 20}},
        buffers={"count": torch.tensor(5), "mean": torch.ones(3)},
        frozen=("b",),
    )  # fmt: skip
    assert differences(run, first, second) == {
        ("gone", "parameter"): ("only in the first", None),
        ("new", "parameter"): ("only in the second", None),
        ("d", ""): ("shape [4] and [5]", None),
        ("a.weight", "exp_avg"): ("only in the first", None),
        ("a.weight", "value"): ("values", 1.5),
        ("a.weight", "step"): ("10.0 and 20.0", None),
        ("b", "value"): ("bfloat16 and float32, values", 1.0),
        ("count", "buffer"): ("values", 2.0),
        ("mean", "buffer"): ("shape [2] and [3]", None),
        ("b", ""): ("trained in one, frozen in the other", None),
    }


def test_diff_prints_a_table(make, run):
    first, second = make(10), make(20, values={**VALUES, "b": VALUES["b"] * 3})
    (line,) = run("diff", first, second, code=1).output.splitlines()[1:]
    assert line.split() == ["b", "value", "values", "2"]


@pytest.mark.parametrize(
    ("a", "b", "largest"),
    [
        ([1.0, 2.0], [1.0, 2.0], None),
        ([float("nan"), float("inf")], [float("nan"), float("inf")], None),
        ([float("nan"), 1.0], [float("nan"), 1.5], 0.5),
        ([float("inf"), 1.0], [float("inf"), 3.0], 2.0),
        ([1.0], [float("inf")], float("inf")),
        ([0.0], [-0.0], 0.0),
        ([], [], None),
    ],
)
def test_the_largest_difference_of_two_tensors(a, b, largest):
    assert max_abs_difference(torch.tensor(a), torch.tensor(b)) == largest


def test_a_difference_to_no_number_is_none():
    found = max_abs_difference(torch.tensor([1.0]), torch.tensor([float("nan")]))
    assert found is not None
    assert found != found  # noqa: PLR0124


def test_integers_and_other_dtypes_are_compared_by_value():
    assert max_abs_difference(torch.tensor([1, 9]), torch.tensor([1, 7])) == 2.0
    assert max_abs_difference(torch.tensor([True]), torch.tensor([False])) == 1.0
    assert max_abs_difference(torch.ones(2), torch.ones(2).bfloat16()) is None
    assert max_abs_difference(torch.ones(2).bfloat16()[:0], torch.ones(0)) is None


# ---------------------------------------------------------------------- prune


def tags_in(place: Path) -> set[str]:
    return {path.name for path in place.iterdir() if path.is_dir()}


def test_prune_keeps_the_newest_and_the_latest(make, place, run):
    for step in (1, 2, 3, 4):
        make(step)
    (place / "latest").write_text("global_step2")
    output = run("prune", place, "--keep", 1, "--yes").output
    assert [line.split()[0] for line in output.splitlines()] == ["global_step1", "global_step3"]
    assert tags_in(place) == {"global_step2", "global_step4"}


def test_prune_may_only_say_what_would_go(make, place, run):
    make(1)
    make(2)
    assert "global_step1" in run("prune", place, "--keep", 1, "--dry-run").output
    assert tags_in(place) == {"global_step1", "global_step2"}


@pytest.mark.parametrize(("answer", "left"), [("y\n", {2}), ("n\n", {1, 2}), ("", {1, 2})])
def test_prune_asks_first(make, place, run, answer, left):
    make(1)
    make(2)
    run("prune", place, "--keep", 1, answer=answer, code=0 if left == {2} else 1)
    assert tags_in(place) == {f"global_step{n}" for n in left}


def test_prune_with_nothing_to_remove(make, place, run):
    make(1)
    assert "Nothing to remove" in run("prune", place, "--keep", 1).output


def test_prune_wants_to_keep_one_at_least(make, place, run):
    make(1)
    run("prune", place, "--keep", 0, code=2)
    assert tags_in(place) == {"global_step1"}


# ---------------------------------------------------------------------- the process


def test_help_does_not_wait_for_torch():
    code = (
        "import sys; from zeroshard.cli.main import main\n"
        "assert 'torch' not in sys.modules and 'pydantic' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def test_a_link_to_a_checkpoint_is_followed(make, place, tmp_path, run):
    path = make(10)
    shutil.move(path, tmp_path / "elsewhere")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    assert "step: 10" in run("show", tmp_path / "link").output
