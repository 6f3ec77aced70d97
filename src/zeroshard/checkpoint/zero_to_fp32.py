"""Writes full weights from a checkpoint, in one process without a GPU.

:func:`export_checkpoint` does it for Hugging Face libraries. The others have the names, arguments and
command line of DeepSpeed's ``zero_to_fp32``, for every checkpoint that this library reads.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from zeroshard.checkpoint.directory import open_checkpoint
from zeroshard.checkpoint.export import (
    Exporter,
    Progress,
    converted,
    pieces_of,
    write_bins,
)
from zeroshard.checkpoint.export_plan import (
    MAX_SHARD_SIZE,
    SAFETENSORS,
    Weight,
    parse_dtype,
    parse_size,
    plan_shards,
    written_dtype,
)
from zeroshard.checkpoint.manifest import DTYPES, VALUE
from zeroshard.checkpoint.reader import Source, pieces
from zeroshard.errors import CheckpointError, ZeroShardError

logger = logging.getLogger("zeroshard")

BIN = "pytorch_model.bin"

SCRIPT = '''\
#!/usr/bin/env python
"""Writes whole fp32 weights of a checkpoint beside this file: zero_to_fp32.py . OUTPUT_DIR"""

import sys

from zeroshard.checkpoint.zero_to_fp32 import main

sys.exit(main())
'''
"""The script that a save writes next to ``latest``, under the name that programs call."""


def chosen_parameters(source: Source, *, exclude_frozen_parameters: bool = False) -> list[str]:
    """The names of the parameters that an export takes, in the checkpoint's order.

    Raises:
        CheckpointError: the values of some were not saved.
    """
    chosen = [
        name
        for name, parameter in source.parameters.items()
        if parameter.trained or not exclude_frozen_parameters
    ]
    missing = [name for name in chosen if VALUE not in source.parameters[name].tensors]
    if missing:
        raise CheckpointError(
            f"{source.path} was saved without the values of {len(missing)} frozen parameters "
            f"({', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}). Export the others "
            "with exclude_frozen_parameters, or save a checkpoint that contains them."
        )
    return chosen


def export_checkpoint(
    source: Source,
    directory: str | Path,
    *,
    dtype: str | torch.dtype | None = None,
    max_shard_size: int | str | None = MAX_SHARD_SIZE,
    exclude_frozen_parameters: bool = False,
    filename: str = SAFETENSORS,
    progress: Progress = lambda _done, _total: None,
) -> list[Path]:
    """Write the parameters and persistent buffers of a checkpoint for Hugging Face libraries.

    ``dtype``: of the parameters; None: the dtype in which they were saved (masters are fp32). Buffers
    keep their dtype. Tied weights are written once, under the name that the model lists first.
    ``max_shard_size``: bytes of one file, or a text like ``"5GB"``. Returns the paths of the verified
    files.

    Raises:
        CheckpointError: values are missing or cannot be converted, or files cannot be written or
            verified.
        UsageError: ``dtype`` or ``max_shard_size`` is not understood.
    """
    wanted = parse_dtype(dtype)
    names = chosen_parameters(source, exclude_frozen_parameters=exclude_frozen_parameters)
    buffers = source.buffers(0)
    weights = [
        Weight(
            name,
            written_dtype(DTYPES[source.parameters[name].tensors[VALUE].dtype], wanted),
            source.parameters[name].shape,
        )
        for name in names
    ]
    weights += [Weight(name, b.dtype, tuple(b.shape)) for name, b in buffers.items()]
    with Exporter(
        weights, directory, filename=filename, max_shard_size=max_shard_size, progress=progress
    ) as exporter:
        for name in names:
            exporter.put(name, pieces(source, name))
        for name, buffer in buffers.items():
            exporter.put(name, pieces_of(buffer))
        return exporter.finish()


# ---------------------------------------------------------------------- DeepSpeed's functions


@dataclass(frozen=True, slots=True)
class LazyTensor:
    """A weight that is read from the files at each call of :meth:`contiguous`."""

    source: Source
    fqn: str
    dtype: torch.dtype
    shape: torch.Size

    def numel(self) -> int:
        """Number of elements."""
        return self.shape.numel()

    def contiguous(self) -> Tensor:
        """The values, ``[*shape]`` in host memory.

        Raises:
            CheckpointError: the values cannot be read.
        """
        out = torch.empty(self.numel(), dtype=self.dtype)
        at = 0
        for piece in pieces(self.source, self.fqn):
            out[at : at + len(piece)] = converted(piece, self.dtype, name=self.fqn)
            at += len(piece)
        return out.view(self.shape)


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | Path,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Any]:
    """The full state dict: parameters in fp32 under all their names, and persistent buffers as saved.

    ``checkpoint_dir`` is the directory of tags; ``tag=None`` is the latest. Host memory: 4 bytes per
    parameter. ``lazy_mode``: a :class:`LazyTensor` for each parameter; the files stay open.

    Raises:
        CheckpointError: there is no such checkpoint, or values are missing or cannot be read.
    """
    source = open_checkpoint(checkpoint_dir, tag)
    lazy = _lazy_state(source, exclude_frozen_parameters=exclude_frozen_parameters)
    if lazy_mode:
        return {**_with_aliases(source, lazy), **source.buffers(0)}
    with closing(source):
        whole = {name: tensor.contiguous() for name, tensor in lazy.items()}
        return {**_with_aliases(source, whole), **source.buffers(0)}


def _lazy_state(source: Source, *, exclude_frozen_parameters: bool) -> dict[str, LazyTensor]:
    """The parameters by their first name."""
    return {
        name: LazyTensor(
            source,
            name,
            written_dtype(DTYPES[source.parameters[name].tensors[VALUE].dtype], torch.float32),
            torch.Size(source.parameters[name].shape),
        )
        for name in chosen_parameters(source, exclude_frozen_parameters=exclude_frozen_parameters)
    }


def _with_aliases(source: Source, state: dict[str, Any]) -> dict[str, Any]:
    """The state with every name of a tied weight; all names have the same object."""
    return {
        name: value
        for fqn, value in state.items()
        for name in (fqn, *source.parameters[fqn].aliases)
    }


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | Path,
    output_dir: str | Path,
    max_shard_size: int | str | None = MAX_SHARD_SIZE,
    safe_serialization: bool = True,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the fp32 weights of a checkpoint to ``output_dir``, in files of at most ``max_shard_size``.

    safetensors files are streamed and verified. ``safe_serialization=False`` writes
    ``pytorch_model.bin``, with tied weights under all their names; one file at a time is in memory.

    Raises:
        CheckpointError: values cannot be read, or files cannot be written.
    """
    with closing(open_checkpoint(checkpoint_dir, tag)) as source:
        if safe_serialization:
            export_checkpoint(
                source,
                output_dir,
                dtype=torch.float32,
                max_shard_size=max_shard_size,
                exclude_frozen_parameters=exclude_frozen_parameters,
            )
            return
        lazy = _lazy_state(source, exclude_frozen_parameters=exclude_frozen_parameters)
        state: dict[str, LazyTensor | Tensor] = {
            **_with_aliases(source, lazy),
            **source.buffers(0),
        }
        weights = [Weight(name, t.dtype, tuple(t.shape)) for name, t in state.items()]
        shards = plan_shards(weights, filename=BIN, max_nbytes=parse_size(max_shard_size))
        last: list[tuple[Any, Tensor]] = []  # the names of a tied weight are adjacent

        def read(name: str) -> Tensor:
            if not last or last[0][0] is not state[name]:
                last[:] = [(state[name], state[name].contiguous())]
            return last[0][1]

        write_bins(shards, output_dir, filename=BIN, read=read)


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | Path, tag: str | None = None
) -> nn.Module:
    """Load the weights of a checkpoint into an ordinary module, on its devices. Returns the module.

    Names that only the module or only the checkpoint has are logged and left alone. Host memory: the fp32
    weights.

    Raises:
        CheckpointError: there is no such checkpoint, or values cannot be read.
    """
    state = get_fp32_state_dict_from_zero_checkpoint(checkpoint_dir, tag)
    missing, unexpected = model.load_state_dict(state, strict=False)
    for what, names in (("has no", missing), ("alone has", unexpected)):
        if names:
            logger.warning(
                "the checkpoint %s %s %s%s",
                checkpoint_dir,
                what,
                ", ".join(names[:3]),
                f" and {len(names) - 3} more" if len(names) > 3 else "",
            )
    return model


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line of ``zero_to_fp32.py``. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="zero_to_fp32.py", description="Write the full fp32 weights of a checkpoint."
    )
    parser.add_argument("checkpoint_dir", help="directory that contains the checkpoints")
    parser.add_argument("output_dir", help="directory for the weights")
    parser.add_argument(
        "--max_shard_size", default=MAX_SHARD_SIZE, help=("maximum size of one file, such as 5GB")
    )
    parser.add_argument(
        "--safe_serialization",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="write safetensors; otherwise pytorch_model.bin",
    )
    parser.add_argument("-t", "--tag", help="tag (name) of the checkpoint; default: the latest one")
    parser.add_argument(
        "--exclude_frozen_parameters", action="store_true", help="write only trained parameters"
    )
    parser.add_argument("-d", "--debug", action="store_true", help="print log messages")
    args = parser.parse_args(arguments)
    if args.debug:
        logging.basicConfig(level=logging.DEBUG)
    try:
        convert_zero_checkpoint_to_fp32_state_dict(
            args.checkpoint_dir,
            args.output_dir,
            max_shard_size=args.max_shard_size,
            safe_serialization=args.safe_serialization,
            tag=args.tag,
            exclude_frozen_parameters=args.exclude_frozen_parameters,
        )
    except ZeroShardError as error:
        print(f"zero_to_fp32.py: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
