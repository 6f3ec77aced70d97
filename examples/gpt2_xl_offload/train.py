"""Train GPT-2 XL, 1.56 billion parameters, with its state on disk.

    zeroshard launch --nproc 2 examples/gpt2_xl_offload/train.py --nvme-path /path/on/a/disk
    zeroshard launch --nproc 2 examples/gpt2_xl_offload/train.py --smoke

Parameters, gradients, fp32 masters and Adam's moments take 16 bytes per parameter, 25 GB for XL. Here
they are stored in one file per rank, which the system frees when the process ends. Memory contains the
units in use and the data of current transfers. The text is Python's standard library, as bytes.
"""

from __future__ import annotations

import argparse
import json
import sysconfig
import time
from pathlib import Path

import torch
from memory import Sampler, resident_nbytes
from model import GPT2, SIZES
from torch import Tensor

import zeroshard


def main() -> None:
    args = parse_arguments()
    config = json.loads(args.config.read_text())
    for part in ("offload_optimizer", "offload_param"):
        config["zero_optimization"][part]["nvme_path"] = str(args.nvme_path)
    shape = SIZES["smoke" if args.smoke else args.size]
    if args.smoke:
        config["unit_min_numel"] = 1  # as many units as blocks, like the large sizes
    with torch.device("meta"):  # parameters get their values, and a place on disk, unit by unit
        model = GPT2(shape)
    torch.manual_seed(0)
    with Sampler() as memory:
        engine, *_ = zeroshard.initialize(model=model, config=config)
        with engine:
            if engine.global_rank == 0:
                numel = sum(p.numel() for p in model.parameters())
                print(f"{numel / 1e6:.1f} million parameters", flush=True)
            train(engine, args.steps, min(args.tokens, shape.context))
            report = engine.memory_report(all_ranks=True)
            seen, bound = memory.peaks()
            if engine.global_rank == 0:
                print(report, flush=True)
                print(
                    f"peak memory of all ranks together: {seen / 2**30:.2f} GiB PSS "
                    f"(at most {bound / 2**30:.2f}, the sum of each rank's own peak)",
                    flush=True,
                )


def train(engine: zeroshard.Engine, steps: int, tokens: int) -> None:
    """Take ``steps`` steps on one stretch of text per rank: the loss has to fall."""
    text_T = read_text(tokens + 1, offset=engine.global_rank * (tokens + 1))
    inputs, targets = text_T[None, :-1], text_T[None, 1:]
    for step in range(1, steps + 1):
        begin = time.perf_counter()
        loss = engine(inputs, targets)
        engine.backward(loss)
        engine.step()
        if engine.global_rank == 0:
            seconds = time.perf_counter() - begin
            print(
                f"step {step}  loss {loss.item():.4f}  norm {engine.get_global_grad_norm():.3f}  "
                f"{seconds:.1f} s  resident {resident_nbytes() / 2**30:.2f} GiB",
                flush=True,
            )


def read_text(length: int, offset: int) -> Tensor:
    """``length`` bytes of the standard library as token numbers, ``[length]``."""
    source = Path(sysconfig.get_paths()["stdlib"]) / "argparse.py"
    data = source.read_bytes()[offset:][:length]
    return torch.frombuffer(bytearray(data), dtype=torch.uint8).long()


def parse_arguments() -> argparse.Namespace:
    here = Path(__file__).parent
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=list(SIZES), default="xl")
    parser.add_argument("--smoke", action="store_true", help="the smallest size")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=128, help="per rank and step")
    parser.add_argument(
        "--nvme-path", type=Path, default=Path("/tmp"), help="a directory on a disk"
    )
    parser.add_argument("--config", type=Path, default=here / "ds_config.json")
    return parser.parse_args()


if __name__ == "__main__":
    main()
