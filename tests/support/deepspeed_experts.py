"""Writes directories with the files of DeepSpeed's checkpoints of models with layers of experts."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

import torch

from support.deepspeed_files import OPTIONS, Run, first_moment, second_moment, value, write

AT = "moe.deepspeed_moe.experts.deepspeed_experts."
DENSE = {
    "embed.weight": (11, 7),
    "0.moe.deepspeed_moe.gate.wg.weight": (4, 7),
    "head.weight": (3, 7),
}
EXPERT = {"up.weight": (5, 7), "up.bias": (5,), "gain": (1,)}
BUFFER = (3,)


@dataclass
class ExpertRun(Run):
    """``layers``: experts of each layer. ``ep_size``: ranks that share them, of ``ranks``."""

    layers: tuple = (4, 2)
    ep_size: int = 2
    far: bool = False  # use_data_before_expert_parallelism
    chunks: int = 1  # groups of experts
    options: list = field(default_factory=list)

    def __post_init__(self):
        own = self.names([count // self.ep_size for count in self.layers])
        cut = -(-len(own) // self.chunks)
        self.shapes = DENSE | {name: EXPERT[part] for name, part in own.items()}
        listed = list(own)
        self.groups = [list(DENSE), *(listed[at : at + cut] for at in range(0, len(own), cut))]
        self.model["num_experts"] = list(self.layers)
        self.model["ds_autoep_layers"] = None
        self.model["buffer_names"] = [
            "seen",
            *(f"{at}.{AT}0.scale" for at in range(len(self.layers))),
        ]
        self.model["ds_config"] = {"use_data_before_expert_parallelism": self.far}

    def names(self, counts):
        return {
            f"{at}.{AT}{number}.{part}": part
            for at, count in enumerate(counts)
            for number in range(count)
            for part in EXPERT
        }

    @property
    def all_shapes(self):
        return DENSE | {name: EXPERT[part] for name, part in self.names(self.layers).items()}

    def place(self, rank):
        edp = self.ranks // self.ep_size
        return rank // edp if self.far else rank % self.ep_size

    def cut(self, group, rank):
        edp = self.ranks // self.ep_size
        return (
            (edp, rank % edp if self.far else rank // self.ep_size) if group else (self.ranks, rank)
        )

    def named(self, name, rank):
        layer, found, rest = name.partition(f".{AT}")
        if not found:
            return name
        number, _, part = rest.partition(".")
        first = self.place(rank) * (self.layers[int(layer)] // self.ep_size)
        return f"{layer}{found}{first + int(number)}.{part}"


def write_experts(path, run, classes):
    """Make the files of a run in ``path``: those of experts, and all others with numbers of ranks."""
    write(path, run, classes)
    file = path / "mp_rank_00_model_states.pt"
    model = torch.load(file, weights_only=False)
    model["module"] = OrderedDict((n, t) for n, t in model["module"].items() if AT not in n)
    if run.stage == 0:
        model["optimizer"] = optimizer_of_place(run, 0)
        for place in range(run.ep_size):
            content = {"optimizer": optimizer_of_place(run, place)}
            torch.save(content, path / f"expp_rank_{place}_mp_rank_00_optim_states.pt")
    torch.save(model, file)
    for layer, count in enumerate(run.layers):
        for number in range(count):
            start = f"{layer}.{AT}{number}."
            content = {
                start + part: value(start + part, s).bfloat16() for part, s in EXPERT.items()
            }
            content[start + "scale"] = torch.full(BUFFER, 10.0 * layer + number)
            torch.save(content, path / f"layer_{layer}_expert_{number}_mp_rank_00_model_states.pt")
    for optim in path.glob("*zero_pp_rank_*_optim_states.pt"):
        content = torch.load(optim, weights_only=False)
        groups = content["optimizer_state_dict"]["base_optimizer_state"]["param_groups"]
        for row in groups:
            row["lr"] = 0.1
        for row in groups[1:]:
            row.update(moe=True, name=f"ep_size_{run.ep_size}")
        torch.save(content, optim)
    return path


def optimizer_of_place(run, place):
    """The state of torch's optimizer on the first rank at a place, at stage 0."""
    rank = next(rank for rank in range(run.ranks) if run.place(rank) == place)
    states, groups, count = {}, [], 0
    for at, names in enumerate(run.groups):
        row = {**OPTIONS, "params": list(range(count, count + len(names)))}
        groups.append(row | ({"moe": True, "name": f"ep_size_{run.ep_size}"} if at else {}))
        for name in names:
            flat = value(run.named(name, rank), run.shapes[name])
            states[count] = {
                "step": run.step, "exp_avg": first_moment(flat), "exp_avg_sq": second_moment(flat)
            }  # fmt: skip
            count += 1
    return {"state": states, "param_groups": groups}
