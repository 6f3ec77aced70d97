"""Exported weights are complete, in files that other libraries load."""

from __future__ import annotations

import errno
import json
import logging
import os
import runpy
import sys
import threading
from pathlib import Path

import pytest
import torch
import warm_python
from checkpoint_dirs import write_checkpoint
from hugging_face import hugging_face, logits
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

from zeroshard.checkpoint import export, reader
from zeroshard.checkpoint.export_plan import (
    Weight,
    file_layout,
    loaded_name,
    parse_size,
    plan_shards,
)
from zeroshard.checkpoint.reader import CheckpointReader
from zeroshard.checkpoint.zero_to_fp32 import (
    SCRIPT,
    convert_zero_checkpoint_to_fp32_state_dict,
    export_checkpoint,
    get_fp32_state_dict_from_zero_checkpoint,
    load_state_dict_from_zero_checkpoint,
)
from zeroshard.errors import CheckpointError, UsageError

INDEX = "model.safetensors.index.json"

VALUES = {
    "wte": torch.randn(37, 23, generator=torch.Generator().manual_seed(1)),
    "norm": torch.arange(7).bfloat16(),
    "scale": torch.tensor(3.5),
    "empty": torch.empty(0, 4),
    "wide": torch.arange(5, dtype=torch.float64),
}
BUFFERS = {"steps": torch.tensor(7), "mask": torch.tensor([True, False, True])}


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Tensors of a few hundred bytes go in several pieces, and are read back through several mappings."""
    monkeypatch.setattr(export, "PIECE_NBYTES", 256)
    monkeypatch.setattr(reader, "PIECE_NUMEL", 64)
    monkeypatch.setattr(export, "_MAPPED_NBYTES", 512)


@pytest.fixture
def checkpoint(tmp_path):
    """An open checkpoint of ``VALUES``, in three files."""
    path = write_checkpoint(
        tmp_path / "run",
        VALUES,
        files=3,
        aliases={"wte": ["head"]},
        frozen=["norm"],
        buffers=BUFFERS,
    )
    with CheckpointReader(path) as saved:
        yield saved


@pytest.fixture
def out(tmp_path):
    return tmp_path / "out"


def loaded(directory: Path) -> dict[str, torch.Tensor]:
    """All that loaders find, and that they find each tensor once."""
    index = directory / INDEX
    if not index.exists():
        return load_file(directory / "model.safetensors")
    where = json.loads(index.read_text())["weight_map"]
    found: dict[str, torch.Tensor] = {}
    for name in sorted(set(where.values())):
        content = load_file(directory / name)
        assert content.keys() == {tensor for tensor, file in where.items() if file == name}
        found |= content
    return found


def assert_equal(found, wanted):
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype, name
        assert torch.equal(found[name], tensor), name


def names_in(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


# ---------------------------------------------------------------------- what is written


@pytest.mark.parametrize("size", ["5GB", 2000, 1])
def test_every_value_arrives_bit_by_bit(checkpoint, out, size):
    paths = export_checkpoint(checkpoint, out, max_shard_size=size)
    assert_equal(loaded(out), {**VALUES, **BUFFERS})
    assert names_in(out) == {p.name for p in paths} | ({INDEX} if len(paths) > 1 else set())


def test_loaders_are_told_that_these_are_torchs_tensors(checkpoint, out):
    export_checkpoint(checkpoint, out)
    with safe_open(out / "model.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}


def test_the_index_gives_the_total_size(checkpoint, out):
    export_checkpoint(checkpoint, out, max_shard_size=2000)
    everything = [*VALUES.values(), *BUFFERS.values()]
    total = json.loads((out / INDEX).read_text())["metadata"]["total_size"]
    assert total == sum(tensor.nbytes for tensor in everything)


def test_files_stay_under_the_limit_but_for_a_tensor_that_alone_exceeds_it():
    numels = [3, 9, 1, 1, 1, 20, 2]
    weights = [Weight(f"w{i}", torch.int8, (n,)) for i, n in enumerate(numels)]
    shards = plan_shards(weights, max_nbytes=10)
    sizes = [[w.nbytes for w in shard.weights] for shard in shards]
    assert sizes == [[3], [9, 1], [1, 1], [20], [2]]
    assert shards[0].file == "model-00001-of-00005.safetensors"


def test_tensors_are_aligned_to_their_elements_without_gaps():
    dtypes = [torch.int8, torch.float64, torch.bfloat16, torch.float32, torch.bool]
    weights = [Weight(str(d), d, (3,)) for d in dtypes]
    head, begins = file_layout(plan_shards(weights, max_nbytes=None)[0])
    assert all(begins[str(d)] % d.itemsize == 0 for d in dtypes)
    ends = {begins[str(d)] + 3 * d.itemsize for d in dtypes}
    assert ends - set(begins.values()) == {len(head) + sum(3 * d.itemsize for d in dtypes)}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", torch.bfloat16])
def test_parameters_are_rounded_as_torch_does_and_buffers_stay(checkpoint, out, dtype):
    export_checkpoint(checkpoint, out, dtype=dtype)
    wanted = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    assert_equal(loaded(out), {**{n: t.to(wanted) for n, t in VALUES.items()}, **BUFFERS})


def test_a_tie_between_two_values_goes_to_the_even_one(tmp_path, out):
    value = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8, -(1 + 2**-8)])
    with CheckpointReader(write_checkpoint(tmp_path, {"w": value})) as saved:
        export_checkpoint(saved, out, dtype="bfloat16")
    assert loaded(out)["w"].tolist() == [1.0, 1 + 2**-6, -1.0]


def test_integers_and_8_bit_floats_stay_as_they_are(tmp_path, out):
    values = {"q": torch.tensor([1.5, -2.0]).to(torch.float8_e4m3fn), "i": torch.arange(3)}
    with CheckpointReader(write_checkpoint(tmp_path, values)) as saved:
        export_checkpoint(saved, out, dtype="bfloat16")
    found = loaded(out)
    assert found["q"].dtype == torch.float8_e4m3fn
    assert torch.equal(found["i"], values["i"])


def test_a_value_that_the_dtype_cannot_hold_is_refused_by_name(tmp_path, out):
    with CheckpointReader(write_checkpoint(tmp_path, {"w": torch.tensor([1.0, 70000.0])})) as saved:
        with pytest.raises(CheckpointError, match=r"'w' has the value 70000, which float16 cannot"):
            export_checkpoint(saved, out, dtype="float16")
    assert names_in(out) == set()


def test_what_is_infinite_already_stays_so(tmp_path, out):
    value = torch.tensor([float("inf"), float("nan"), 1.0])
    with CheckpointReader(write_checkpoint(tmp_path, {"w": value})) as saved:
        export_checkpoint(saved, out, dtype="float16")
    assert torch.equal(loaded(out)["w"].nan_to_num(5.0), value.half().nan_to_num(5.0))


def test_frozen_parameters_are_left_out_on_request(checkpoint, out):
    export_checkpoint(checkpoint, out, exclude_frozen_parameters=True)
    assert loaded(out).keys() == {*VALUES, *BUFFERS} - {"norm"}


def test_values_that_were_not_saved_are_named(tmp_path, out):
    path = write_checkpoint(tmp_path, VALUES, frozen=["norm"], unsaved=["norm"])
    with CheckpointReader(path) as saved:
        with pytest.raises(CheckpointError, match=r"without the values of 1 frozen .*norm"):
            export_checkpoint(saved, out)
        export_checkpoint(saved, out, exclude_frozen_parameters=True)
    assert "norm" not in loaded(out)


def test_a_model_without_any_tensor_is_a_file_without_any(tmp_path, out):
    with CheckpointReader(write_checkpoint(tmp_path, {})) as saved:
        export_checkpoint(saved, out)
    assert loaded(out) == {}


def test_progress_sees_every_byte_written_and_read_back(checkpoint, out):
    seen: list[tuple[int, int]] = []
    export_checkpoint(checkpoint, out, max_shard_size=2000, progress=lambda *n: seen.append(n))
    total = 2 * sum(t.nbytes for t in [*VALUES.values(), *BUFFERS.values()])
    assert seen[-1] == (total, total)
    assert len(seen) > 20
    assert seen == sorted(seen)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("5GB", 5 * 10**9), ("2MiB", 2**21), ("1.5kb", 1500), ("10", 10), (10, 10), (None, None)],
)
def test_sizes_are_decimal_or_binary(text, nbytes):
    assert parse_size(text) == nbytes


@pytest.mark.parametrize("size", ["5 parsecs", "", "-1GB", 0, "0.1", True])
def test_what_is_no_size_is_refused(checkpoint, out, size):
    with pytest.raises(UsageError, match="max_shard_size="):
        export_checkpoint(checkpoint, out, max_shard_size=size)
    assert not out.exists()


@pytest.mark.parametrize("dtype", ["int8", "half", torch.int64])
def test_what_is_no_dtype_of_weights_is_refused(checkpoint, out, dtype):
    with pytest.raises(UsageError, match="dtype="):
        export_checkpoint(checkpoint, out, dtype=dtype)


@pytest.mark.parametrize(
    ("names", "tied", "chosen"),
    [
        (("wte", "head"), ["head"], "wte"),
        (("head", "wte"), {"head": "wte"}, "wte"),
        (("head", "wte"), [], "head"),
        (("a.head", "wte"), [r"head$"], "wte"),
        (("head", "other"), ["head", "other"], "head"),
        (("alone",), ["alone"], "alone"),
    ],
)
def test_a_tied_weight_has_the_name_that_is_looked_for(names, tied, chosen):
    assert loaded_name(names, tied) == chosen


# ---------------------------------------------------------------------- what was there before


@pytest.mark.parametrize(("before", "after"), [(None, 100), (20, None), (20, 100), (100, 100)])
def test_an_export_replaces_an_earlier_one_of_other_files(checkpoint, out, before, after):
    out.mkdir()
    for other in ("config.json", "model-00001.safetensors", "tokenizer.safetensors"):
        (out / other).write_text("kept")
    earlier = export_checkpoint(checkpoint, out, max_shard_size=before, dtype="bfloat16")
    paths = export_checkpoint(checkpoint, out, max_shard_size=after)
    assert (earlier == paths) == (before == after)
    assert_equal(loaded(out), {**VALUES, **BUFFERS})
    kept = {"config.json", "model-00001.safetensors", "tokenizer.safetensors"}
    index = {INDEX} if after else set()
    assert names_in(out) == kept | index | {path.name for path in paths}


def test_two_exports_into_one_directory_come_one_after_the_other(checkpoint, out, caplog):
    waits = threading.Event()
    caplog.set_level(logging.INFO, logger="zeroshard")
    caplog.handler.addFilter(lambda line: waits.set() or True if "waits" in line.msg else True)
    logging.getLogger("zeroshard").addHandler(caplog.handler)
    out.mkdir()
    first = export.Hold(out)
    done = []
    second = threading.Thread(
        target=lambda: done.append(export_checkpoint(checkpoint, out, max_shard_size=512))
    )
    try:
        second.start()
        assert waits.wait(60)
        second.join(0.2)
        (out / "model-00001-of-00002.safetensors.part").write_bytes(b"of the first")
        assert not done
    finally:
        first.close()
        second.join(60)
        logging.getLogger("zeroshard").removeHandler(caplog.handler)
    assert done and not list(out.glob("*.part"))
    assert_equal(loaded(out), {**VALUES, **BUFFERS})
    export_checkpoint(checkpoint, out)  # the first export has released the folder


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("size", [None, 2000])
def test_a_damaged_checkpoint_leaves_the_earlier_export_as_it_was(tmp_path, checkpoint, out, size):
    export_checkpoint(checkpoint, out, max_shard_size=size)
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    damaged = write_checkpoint(tmp_path / "damaged", VALUES)
    flip(damaged / "rank-1.safetensors", -100)
    with CheckpointReader(damaged) as saved, pytest.raises(CheckpointError, match="is damaged"):
        export_checkpoint(saved, out, max_shard_size=size, dtype="bfloat16")
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before


def test_files_of_two_exports_are_never_taken_for_one(checkpoint, out, monkeypatch):
    """If an export is killed between two renames, the folder holds no valid model instead of parts
    of two."""
    export_checkpoint(checkpoint, out, max_shard_size=40, dtype="bfloat16")
    replace, calls = os.replace, []

    def only_once(source, target):
        calls.append(target)
        if len(calls) > 1:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        replace(source, target)

    monkeypatch.setattr(export.os, "replace", only_once)
    with pytest.raises(CheckpointError, match="export again"):
        export_checkpoint(checkpoint, out, max_shard_size=40)
    assert not {INDEX, "model.safetensors"} & names_in(out)


@pytest.mark.parametrize("before", [b'"F32"', b"[37,23]", b'"wte"'])
def test_a_header_that_reads_otherwise_is_noticed(checkpoint, out, monkeypatch, before):
    after = {b'"F32"': b'"I32"', b"[37,23]": b"[23,37]", b'"wte"': b'"wto"'}[before]
    sync = export._ShardFile.sync

    def sync_and_replace(file):
        sync(file)
        file.path.write_bytes(file.path.read_bytes().replace(before, after, 1))

    monkeypatch.setattr(export._ShardFile, "sync", sync_and_replace)
    with pytest.raises(CheckpointError, match=r"does not contain '(wte|scale)' as it was written"):
        export_checkpoint(checkpoint, out)
    assert names_in(out) == set()


@pytest.mark.parametrize("at", [-1, 200, 20])
def test_a_disk_that_returns_other_bytes_is_noticed(checkpoint, out, monkeypatch, at):
    sync = export._ShardFile.sync

    def sync_and_spoil(file):
        sync(file)
        flip(file.path, at)

    monkeypatch.setattr(export._ShardFile, "sync", sync_and_spoil)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.part"):
        export_checkpoint(checkpoint, out)
    assert names_in(out) == set()


def test_space_is_looked_for_before_the_first_byte(checkpoint, out, monkeypatch):
    monkeypatch.setattr(export, "free_nbytes", lambda _directory: 3000)
    with pytest.raises(CheckpointError, match=r"needs 3,[0-9]+ bytes, and .* has 3,000 free"):
        export_checkpoint(checkpoint, out)
    assert names_in(out) == set()
    export_checkpoint(checkpoint, out, dtype="bfloat16")


def test_a_disk_that_fills_meanwhile_is_an_error_and_leaves_nothing(checkpoint, out, monkeypatch):
    pwrite = os.pwrite

    def full_after_two_files(fd, data, at):
        if "00003" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(fd, data, at)

    monkeypatch.setattr(export.os, "pwrite", full_after_two_files)
    with pytest.raises(CheckpointError, match=r"00003.*No space left"):
        export_checkpoint(checkpoint, out, max_shard_size=40)
    assert names_in(out) == set()


def test_what_a_killed_export_left_is_removed_first(checkpoint, out):
    out.mkdir()
    (out / "model-00007-of-00009.safetensors.part").write_text("left")
    export_checkpoint(checkpoint, out)
    assert names_in(out) == {"model.safetensors"}


def test_a_checkpoint_is_not_exported_into_a_checkpoint(checkpoint):
    with pytest.raises(CheckpointError, match="is a checkpoint"):
        export_checkpoint(checkpoint, checkpoint.path)


def test_a_directory_that_cannot_be_made_is_named(checkpoint, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"file/out cannot be written: Not a directory"):
        export_checkpoint(checkpoint, tmp_path / "file" / "out")


# ---------------------------------------------------------------------- Hugging Face


@pytest.mark.parametrize("size", ["5GB", "20KB"])
@pytest.mark.parametrize("family", ["gpt2", "t5"])
def test_from_pretrained_loads_an_export(tmp_path, out, family, size):
    auto, model = hugging_face(family)
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    path = write_checkpoint(
        tmp_path,
        {name: param.detach() for name, param in model.named_parameters()},
        aliases={first: rest for first, *rest in names.values()},
    )
    assert any(rest for _, *rest in names.values()), "the model has tied weights"
    with CheckpointReader(path) as saved:
        export_checkpoint(saved, out, max_shard_size=size)
    model.config.save_pretrained(out)
    again, info = auto.from_pretrained(out, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert torch.equal(logits(again.eval(), family), logits(model, family))


# ---------------------------------------------------------------------- zero_to_fp32


class Tied(nn.Module):
    """Names as in ``VALUES``."""

    def __init__(self) -> None:
        super().__init__()
        for name, value in VALUES.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(value.shape)))
        self.head = self.wte
        for name, buffer in BUFFERS.items():
            self.register_buffer(name, torch.zeros_like(buffer))


IN_FP32 = {**{n: t.float() for n, t in VALUES.items()}, "head": VALUES["wte"], **BUFFERS}


@pytest.mark.parametrize("tag", [None, "global_step10"])
def test_the_fp32_state_dict_has_all_names(checkpoint, tag):
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint.path.parent, tag)
    assert_equal(state, IN_FP32)
    assert state["wte"] is state["head"]


def test_lazy_weights_are_read_when_they_are_asked_for(checkpoint):
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint.path.parent, lazy_mode=True)
    lazy = state["wte"]
    assert (lazy.shape, lazy.dtype, lazy.numel()) == ((37, 23), torch.float32, 37 * 23)
    assert torch.equal(lazy.contiguous(), VALUES["wte"])
    lazy.source.close()


def test_frozen_parameters_may_be_left_out_of_the_state_dict(checkpoint):
    where = checkpoint.path.parent
    state = get_fp32_state_dict_from_zero_checkpoint(where, exclude_frozen_parameters=True)
    assert state.keys() == IN_FP32.keys() - {"norm"}


def test_a_module_gets_the_weights(checkpoint, caplog):
    model = Tied()
    assert load_state_dict_from_zero_checkpoint(model, checkpoint.path.parent) is model
    assert_equal(model.state_dict(), IN_FP32)
    assert not caplog.records


def test_names_that_do_not_meet_are_told(checkpoint, caplog):
    model = Tied()
    del model.scale
    model.register_parameter("other", nn.Parameter(torch.zeros(1)))
    load_state_dict_from_zero_checkpoint(model, checkpoint.path.parent)
    assert "has no other" in caplog.text
    assert "alone has scale" in caplog.text


def test_conversion_writes_verified_safetensors(checkpoint, out):
    convert_zero_checkpoint_to_fp32_state_dict(checkpoint.path.parent, out, max_shard_size=2000)
    assert (out / INDEX).exists()
    assert_equal(loaded(out), {n: t for n, t in IN_FP32.items() if n != "head"})


def test_conversion_may_write_torchs_own_file(checkpoint, out):
    convert_zero_checkpoint_to_fp32_state_dict(
        checkpoint.path.parent, out, safe_serialization=False
    )
    assert names_in(out) == {"pytorch_model.bin"}
    state = torch.load(out / "pytorch_model.bin", weights_only=True)
    assert_equal(state, IN_FP32)
    assert state["wte"].data_ptr() == state["head"].data_ptr()


def test_torchs_own_files_have_an_index_too(checkpoint, out):
    convert_zero_checkpoint_to_fp32_state_dict(
        checkpoint.path.parent, out, max_shard_size="2KB", safe_serialization=False
    )
    where = json.loads((out / "pytorch_model.bin.index.json").read_text())["weight_map"]
    found = {n: torch.load(out / file, weights_only=True)[n] for n, file in where.items()}
    assert_equal(found, IN_FP32)
    assert len(set(where.values())) > 1


def run_script(folder: Path, monkeypatch, *words: str) -> int:
    script = folder / "zero_to_fp32.py"
    script.write_text(SCRIPT)
    monkeypatch.setattr(sys, "argv", [str(script), *words])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(script), run_name="__main__")
    return ended.value.code


def test_the_script_beside_the_checkpoints_converts(checkpoint, out, monkeypatch):
    where = checkpoint.path.parent
    assert run_script(where, monkeypatch, str(where), str(out), "--max_shard_size", "2KB") == 0
    assert_equal(loaded(out), {n: t for n, t in IN_FP32.items() if n != "head"})


def test_the_script_takes_deepspeeds_options(checkpoint, out, monkeypatch):
    words = "-t global_step10 --exclude_frozen_parameters --no-safe_serialization".split()
    where = checkpoint.path.parent
    assert run_script(where, monkeypatch, str(where), str(out), *words) == 0
    state = torch.load(out / "pytorch_model.bin", weights_only=True)
    assert state.keys() == IN_FP32.keys() - {"norm"}


def test_the_script_says_what_is_wrong_without_a_traceback(tmp_path, monkeypatch, capsys):
    assert run_script(tmp_path, monkeypatch, str(tmp_path), str(tmp_path / "out")) == 2
    assert "latest" in capsys.readouterr().err


def test_nothing_of_this_needs_ranks(checkpoint):
    """The module can be used where torch.distributed was never set up; a fresh process shows it."""
    code = (
        "import sys, torch; from zeroshard.checkpoint.zero_to_fp32 import *\n"
        "from zeroshard.checkpoint.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint as get\n"
        "assert get(sys.argv[1])['wte'].shape == (37, 23)\n"
        "assert not torch.distributed.is_initialized()"
    )
    words = [sys.executable, "-c", code, str(checkpoint.path.parent)]
    done = warm_python.run(words, cwd=checkpoint.path, env=os.environ, timeout=60)
    assert done.returncode == 0, done.stderr
