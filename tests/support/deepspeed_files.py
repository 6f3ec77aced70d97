"""Writes directories with the files, keys and cuts of DeepSpeed's checkpoints, without DeepSpeed."""

from __future__ import annotations

import sys
import types
from collections import OrderedDict
from dataclasses import dataclass, field
from enum import Enum
from math import prod

import pytest
import torch

from zeroshard.checkpoint.reader import full

SHAPES = {
    "embed.weight": (11, 7), "norm.weight": (7,), "gain": (1,), "up.weight": (5, 7), "up.bias": (5,),
    "head.weight": (3, 7),
}  # fmt: skip
GROUPS = [["embed.weight", "up.weight", "head.weight"], ["norm.weight", "gain", "up.bias"]]
OPTIONS = {"lr": 0.1, "betas": (0.9, 0.95), "weight_decay": 0.0}


@pytest.fixture(scope="module")
def deepspeed_classes():
    """Classes under DeepSpeed's names, while files are written."""
    names = {
        "deepspeed.runtime.fp16.loss_scaler": ["LossScaler", "DynamicLossScaler"],
        "deepspeed.utils.tensor_fragment": ["fragment_address"],
        "deepspeed.runtime.zero.config": [],
    }
    with pytest.MonkeyPatch.context() as patch:
        made = {}
        for name, classes in names.items():
            module = types.ModuleType(name)
            for part in range(1, name.count(".") + 1):
                patch.setitem(
                    sys.modules,
                    name.rsplit(".", part)[0],
                    types.ModuleType(name.rsplit(".", part)[0]),
                )
            patch.setitem(sys.modules, name, module)
            for cls in classes:
                made[cls] = type(cls, (), {"__module__": name})
                setattr(module, cls, made[cls])
            if not classes:
                stages = {"optimizer_states": 1, "gradients": 2, "weights": 3}
                made["Stage"] = Enum("ZeroStageEnum", stages, module=name, type=int)
                module.ZeroStageEnum = made["Stage"]
        yield types.SimpleNamespace(**made)


@dataclass
class Run:
    """What to write: see ``write``."""

    stage: int
    ranks: int = 1
    shapes: dict = field(default_factory=lambda: dict(SHAPES))
    groups: list = field(default_factory=lambda: [list(row) for row in GROUPS])
    frozen: dict = field(default_factory=dict)  # name: shape
    tied: dict = field(default_factory=dict)  # other name: name
    align: int = 1
    sub_group: int = 2  # parameters in one, at stage 3
    bf16: bool = True
    state: bool = True
    step: object = field(default_factory=lambda: torch.tensor(3.0))
    client_state: dict = field(default_factory=dict)
    model: dict = field(default_factory=dict)  # what replaces keys of the model file
    optim: dict = field(default_factory=dict)  # and of optimizer_state_dict
    kind: str = "list"  # of the optimizer at stage 0: "list", "flat" or "torch"
    scaler: dict = field(default_factory=lambda: {"cur_scale": 1.0, "dynamic": False})

    def cut(self, group, rank):
        """Into how many parts a group is cut at stages 1 and 2, and which of them a rank has."""
        return self.ranks, rank

    def named(self, name, rank):
        """What the parameter ``name`` in the files of a rank is called in the whole model."""
        return name


def value(name, shape):
    """Different for each parameter and element."""
    start = sum(map(ord, name)) / 7
    return torch.arange(prod(shape), dtype=torch.float32).view(shape) / 3 + start


def first_moment(tensor):
    return -tensor


def second_moment(tensor):
    return tensor * tensor


KEYS = {"value": lambda t: t, "exp_avg": first_moment, "exp_avg_sq": second_moment}


def write(path, run, classes):
    """Make the files of a run in ``path``."""
    path.mkdir(exist_ok=True)
    module = OrderedDict((name, value(name, s).bfloat16()) for name, s in run.shapes.items())
    module |= {name: value(name, s).bfloat16() for name, s in run.frozen.items()}
    module |= {alias: module[name] for alias, name in run.tied.items()}
    module["seen"] = torch.tensor(5)
    sharded = run.stage > 0
    common = {
        "module": module, "buffer_names": ["seen"], "optimizer": None, "param_shapes": None,
        "frozen_param_shapes": None, "shared_params": dict(run.tied) if sharded else None,
        "frozen_param_fragments": None, "lr_scheduler": {"last_batch_iteration": 2},
        "data_sampler": None, "random_ltd": None, "skipped_steps": 1, "global_steps": 3,
        "global_samples": 24, "dp_world_size": run.ranks, "mp_world_size": 1,
        "checkpoint_parallel_dimensions": {"pp_degree": 1, "tp_degree": 1},
        "ds_config": {"bf16": {"enabled": True}}, "ds_version": "0.19.8",
    }  # fmt: skip
    if run.stage == 0:
        common["optimizer"] = whole_optimizer(run)
    elif run.stage == 3:
        rows = [(row, at) for row in run.groups for at in range(0, len(row), run.sub_group)]
        common["param_shapes"] = [shapes_of(run, r[at : at + run.sub_group]) for r, at in rows]
        common["frozen_param_shapes"] = {n: torch.Size(s) for n, s in run.frozen.items()}
    else:
        common["param_shapes"] = [shapes_of(run, row) for row in run.groups]
    for rank in range(run.ranks):
        model = {**common}
        if run.stage == 3:
            empty = {n: torch.empty(0) for n in module}
            model["module"] = OrderedDict(empty | {"seen": torch.tensor(5 + rank)})
            model["frozen_param_fragments"] = {
                name: cut_evenly(value(name, s).bfloat16(), run.ranks)[rank].clone()
                for name, s in run.frozen.items()
            }
            name = f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
        else:
            name = "mp_rank_00_model_states.pt"
        torch.save({**model, **run.model, **run.client_state}, path / name)
        if sharded:
            prefix = "bf16_" if run.bf16 else ""
            wrapper = (stage_3 if run.stage == 3 else stage_12)(run, rank, classes)
            torch.save(
                {"optimizer_state_dict": {**wrapper, **run.optim}, "ds_version": "0.19.8"},
                path / f"{prefix}zero_pp_rank_{rank}_mp_rank_00_optim_states.pt",
            )
    return path


def shapes_of(run, names):
    return OrderedDict((name, torch.Size(run.shapes[name])) for name in names)


def cut_evenly(tensor, ranks):
    flat = tensor.reshape(-1)
    part = -(-flat.numel() // ranks)
    padded = torch.cat([flat, torch.full((part * ranks - flat.numel(),), 99.0, dtype=flat.dtype)])
    return padded.view(ranks, part)


def scaler_of(run, classes):
    cls = classes.DynamicLossScaler if run.scaler["dynamic"] else classes.LossScaler
    found = cls()
    vars(found).update(run.scaler)
    return found


def options_of(run, keys):
    rows = [{**OPTIONS, "lr": 0.1 * (at + 1)} for at in range(len(run.groups))]
    return [{**row, "params": mine} for row, mine in zip(rows, keys, strict=True)]


def stage_12(run, rank, classes):
    masters, states, paddings, gaps, mappings = [], {}, [], [], []
    for at, names in enumerate(run.groups):
        pieces, filled, begins = [], [], {}
        ranks, part_of_rank = run.cut(at, rank)
        for name in names:
            flat = value(run.named(name, rank), run.shapes[name]).reshape(-1)
            begins[name] = sum(p.numel() for p in pieces)
            done = begins[name] + flat.numel()
            gap = -done % run.align if name != names[-1] else 0
            pieces += [flat, torch.full((gap,), 99.0)]
            filled.append(gap)
        flat = torch.cat(pieces)
        pad = -flat.numel() % (2 * ranks)
        part = (flat.numel() + pad) // ranks
        low = part_of_rank * part
        lean = max(0, min(part, flat.numel() - low))
        mine = torch.cat([flat, torch.full((pad,), 99.0)])[low:][:part]
        mappings.append(OrderedDict())
        for name, begin in begins.items():
            first = max(begin - low, 0)
            last = min(begin + prod(run.shapes[name]) - low, part)
            if first < last:
                mappings[-1][name] = address = classes.fragment_address()
                vars(address).update(start=first, numel=last - first)
        masters.append(mine[:lean].clone().requires_grad_())
        if run.state:
            states[at] = {
                "step": run.step, "exp_avg": first_moment(mine), "exp_avg_sq": second_moment(mine)
            }  # fmt: skip
        paddings.append(part - lean)
        gaps.append(filled)
    return {
        "loss_scaler": scaler_of(run, classes),
        "dynamic_loss_scale": run.scaler["dynamic"],
        "overflow": False,
        "clip_grad": 1.0,
        "base_optimizer_state": {
            "state": states,
            "param_groups": options_of(run, [[at] for at in range(len(run.groups))]),
        },
        "single_partition_of_fp32_groups": masters,
        "zero_stage": classes.Stage(run.stage),
        "group_paddings": paddings,
        "param_alignment_paddings": gaps,
        "partition_count": [run.cut(at, rank)[0] for at in range(len(run.groups))],
        "ds_version": "0.19.8",
        "param_slice_mappings": mappings,
    }


def stage_3(run, rank, classes):
    masters, states, keys = [], {}, []
    for names in run.groups:
        keys.append([])
        for at in range(0, len(names), run.sub_group):
            pieces = [
                cut_evenly(value(name, run.shapes[name]), run.ranks)[rank]
                for name in names[at : at + run.sub_group]
            ]
            flat = torch.cat(pieces)
            keys[-1].append(len(masters))
            if run.state:
                states[len(masters)] = {
                    "step": run.step, "exp_avg": first_moment(flat), "exp_avg_sq": second_moment(flat)
                }  # fmt: skip
            masters.append(flat)
    return {
        "zero_stage": classes.Stage(3),
        "loss_scaler": scaler_of(run, classes),
        "dynamic_loss_scale": run.scaler["dynamic"],
        "overflow": False,
        "partition_count": run.ranks,
        "optimizer_state_dict": {"state": states, "param_groups": options_of(run, keys)},
        "fp32_flat_groups": masters,
    }


def whole_optimizer(run):
    masters = [[value(n, run.shapes[n]) for n in row] for row in run.groups]
    if run.kind == "flat":
        masters = [[torch.cat([m.reshape(-1) for m in row])] for row in masters]
    states, keys = {}, []
    for row in masters:
        keys.append([])
        for master in row:
            keys[-1].append(len(states))
            states[len(states)] = {
                "step": run.step, "exp_avg": first_moment(master), "exp_avg_sq": second_moment(master)
            }  # fmt: skip
    inner = {"state": states, "param_groups": options_of(run, keys)}
    if run.kind == "torch":
        return inner
    if run.kind == "flat":
        masters = {"fp32_groups_flat": [row[0] for row in masters]}
    else:
        masters = {"fp32_groups": masters}
    return {
        "dynamic_loss_scale": True, "cur_scale": 2048.0, "cur_iter": 3, "last_overflow_iter": 1,
        "optimizer_state_dict": inner, **masters,
    }  # fmt: skip


def check_values(saved, run, keys=tuple(KEYS)):
    for name, shape in run.shapes.items():
        for key in keys:
            found = full(saved, name, key)
            assert torch.equal(found, KEYS[key](value(name, shape))), (name, key)
            assert not found.requires_grad


def optim_file(path, rank):
    return path / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"


def model_file(path, rank):
    return path / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"
