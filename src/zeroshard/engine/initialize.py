"""``initialize``, the entry for programs written for DeepSpeed."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from os import PathLike
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from zeroshard.comm.env import local_device
from zeroshard.comm.mesh_objects import mesh_sources
from zeroshard.core.texts import number_of
from zeroshard.data.data_loader import check_dataset
from zeroshard.engine.engine import Engine
from zeroshard.engine.restarts import resume as load_newest
from zeroshard.errors import ConfigError, UsageError
from zeroshard.session.join import join_ranks
from zeroshard.watchdog.uncaught import shorten_uncaught

logger = logging.getLogger("zeroshard")


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[..., Any] | None = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
    *,
    mesh: Any = None,
    plan: Mapping[str, str] | str | None = None,
    resume: str | PathLike[str] | None = None,
    engine_type: type[Engine] = Engine,
) -> tuple[Engine, Any, DataLoader[Any] | None, Any]:
    """Build an engine. Returns ``(engine, optimizer, training_dataloader, lr_scheduler)``.

    The arguments are those of ``deepspeed.initialize``. The configuration is a dict, path or string, in
    exactly one of ``config``, ``config_params`` and ``args.deepspeed_config``. ``args.device_rank``:
    index of the GPU to train on. ``engine_type``: the class to build.

    ``mesh``, ``mpu``, ``mesh_param`` and the configuration give the ranks along each dimension. They must
    agree. ``plan``: cut the model over tensor ranks, by globs and styles or by "auto"
    (:func:`zeroshard.parallel.tensor_parallel`). DeepSpeed's ``autotp_size`` means "auto".

    ``resume``: a directory of checkpoints, or "auto": the ``--checkpoint-dir`` of ``zeroshard launch``,
    else ``preemption.save_dir``. The newest one that is complete, undamaged and finite is loaded, with
    the place in ``training_data``. ``engine.resumed`` has its path and ``client_state``, or is None.

    Raises:
        ConfigError: the configuration has mistakes; the same text on every rank.
        UsageError: the arguments do not fit together; the same text on every rank.
        CheckpointError: on every rank: the checkpoint of ``resume`` is of another model, or all damaged.
    """
    model = _begin(model)
    sources = mesh_sources(mesh=mesh, mpu=mpu, mesh_param=mesh_param)
    if training_data is not None:
        check_dataset(training_data)
    source = _one_config(args, config, config_params)
    join_ranks(distributed_port=distributed_port, dist_init_required=dist_init_required)
    try:
        engine = engine_type(
            model, config=source, optimizer=optimizer, model_parameters=model_parameters,
            lr_scheduler=lr_scheduler, device=_asked_device(args), mesh=sources, plan=plan,
        )  # fmt: skip
    except (ConfigError, UsageError) as mistake:  # of the program: our own frames say nothing
        raise mistake.with_traceback(None)  # noqa: B904
    announce(engine)
    if hasattr(args, "local_rank"):
        args.local_rank = engine.local_rank
    if training_data is not None:
        engine.training_dataloader = engine.loader_of(training_data, collate_fn)
    engine.resumed = None if resume is None else load_newest(engine, resume)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _one_config(args: Any, config: Any, config_params: Any) -> Any:
    from_args = getattr(args, "deepspeed_config", None)
    sources = {
        "config": config,
        "config_params": config_params,
        "args.deepspeed_config": from_args,
    }
    given = {name: source for name, source in sources.items() if source is not None}
    if len(given) > 1:
        raise UsageError(
            f"the configuration was given {len(given)} times: as {' and as '.join(given)}. "
            "Give it once."
        )
    if not given:
        raise UsageError(
            "no configuration: pass config= (a dict or the path of a JSON file), or start the "
            "program with --deepspeed_config FILE."
        )
    return next(iter(given.values()))


def _asked_device(args: Any) -> torch.device | None:
    index = getattr(args, "device_rank", None)
    if index is None or (home := local_device()).type == "cpu":
        return None
    return torch.device(home.type, int(index))


_told: set[str] = set()  # lines that this process has logged: engines have most lines in common


class _Format(logging.Formatter):
    """``[zeroshard]`` before every message, and "warning:" where it is one."""

    def format(self, record: logging.LogRecord) -> str:
        """The message as text."""
        mark = "warning: " if record.levelno >= logging.WARNING else ""
        return f"[zeroshard] {mark}{super().format(record)}"


def _begin(model: nn.Module | None) -> nn.Module:
    """Shorten errors, and let the logger write to standard output unless the program has set it up.

    Returns the model. Raises UsageError if there is none.
    """
    shorten_uncaught()
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
    if not logger.handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(_Format())
        logger.addHandler(handler)
        logger.propagate = False
    if model is None:
        raise UsageError("initialize() needs model=: the torch.nn.Module to train.")
    return model


def announce(engine: Engine) -> None:
    """Log on rank 0 what this run will do. What changes the training comes last, as warnings.

    Every engine has one line. At the level "debug" the first engine of the process also has a table of
    values with origins, and one of dtypes. Notices are logged if they are new.
    """
    if (level := engine.settings.log_level) is not None:
        logger.setLevel(level.upper())
    if not engine.is_main_rank:
        return
    runtime, loaded = engine.runtime, engine.loaded
    numel = sum(unit.layout.params_numel for unit in runtime.units)
    logger.info(
        "ZeRO stage %d on %s: %s in %s, transport %s, device %s",
        runtime.stage.number, number_of(engine.world_size, "rank"), number_of(numel, "parameter"),
        number_of(len(runtime.units), "unit"), engine.transport, engine.device,
    )  # fmt: skip
    if engine._watch.memory_line:
        logger.info("%s", engine._watch.memory_line)
    if not _told:
        _told.add("")
        logger.info(
            'set "log_level" to "debug" to see every value, where it came from, and the dtypes'
        )
        logger.debug("%s", loaded.table())
        logger.debug("%s", engine.dtypes)
    if engine.settings.dump_state:
        logger.info("%s", loaded.table(every_key=True))
    neutral = (text for text in loaded.notices if text not in loaded.warnings)
    _tell_new(logging.INFO, (*neutral, *runtime.forecast, *runtime.traffic.lines))
    _tell_new(logging.WARNING, loaded.warnings)


def _tell_new(level: int, texts: Iterable[str]) -> None:
    for text in texts:
        if text not in _told:
            logger.log(level, "%s", text)
            _told.add(text)


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--deepspeed`` and ``--deepspeed_config FILE`` to a program's parser.

    Their oldest names, which old start scripts may use, are accepted and ignored.
    """
    group = parser.add_argument_group("ZeroShard", "DeepSpeed-style configuration")
    group.add_argument("--deepspeed", action="store_true", help="accepted for compatibility")
    group.add_argument("--deepspeed_config", type=str, default=None, help="path of a JSON file")
    group.add_argument("--deepscale", action="store_true", help=argparse.SUPPRESS)
    group.add_argument("--deepscale_config", type=str, default=None, help=argparse.SUPPRESS)
    return parser
