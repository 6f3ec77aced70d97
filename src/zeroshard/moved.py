"""Old module and class names, which work for one release with one warning each.

Names are relative to ``zeroshard``. This file will be removed in release 0.3.
"""

from __future__ import annotations

import functools
import importlib
import sys
import warnings
from collections.abc import Callable
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MODULES = {
    "checkpoint.deepspeed_slots": "checkpoint.deepspeed.slots",
    "checkpoint.load": "checkpoint.restore",
    "checkpoint.local": "checkpoint.local_state",
    "checkpoint.saved": "checkpoint.reader",
    "checkpoint.shardfile": "checkpoint.safetensors_file",
    "checkpoint.sources": "checkpoint.open_checkpoint",
    "checkpoint.spread": "checkpoint.remote_files",
    "checkpoint.together": "checkpoint.all_ranks",
    "checkpoint.tree": "checkpoint.json_state",
    "checkpoint.unpickle": "checkpoint.deepspeed.unpickle",
    "comm.agree": "comm.agreement",
    "comm.evidence": "watchdog.rank_status",
    "comm.faulty": "testing.faulty_comm",
    "comm.follow": "watchdog.tracked_calls",
    "comm.forum": "comm.control_group",
    "comm.presence": "watchdog.startup",
    "comm.readers": "watchdog.lone_reads",
    "comm.sentinel": "watchdog.watchdog",
    "comm.shared": "comm.shared_memory",
    "comm.side": "watchdog.store_client",
    "comm.torch_names": "deepspeed.collectives",
    "comm.trust": "watchdog.settings",
    "comm.watch": "watchdog.session",
    "core.flight": "comm.flight_recorder",
    "core.verdict": "watchdog.diagnosis",
    "engine.away": "engine.offload_states",
    "engine.fit": "offload.host_fit",
    "engine.getters": "deepspeed.getters",
    "engine.host_memory": "memory.host_limits",
    "engine.kernels": "optim.kernels",
    "engine.loader": "engine.data_loader",
    "engine.loading": "engine.checkpoint_loader",
    "engine.offload": "offload.stores",
    "engine.optimizer_classes": "optim.optimizers",
    "engine.optimizers": "optim.factory",
    "engine.preflight": "offload.capacity_check",
    "engine.resting": "offload.plan",
    "engine.saving": "engine.checkpoint_saver",
    "engine.schedulers": "optim.schedulers",
    "engine.setup": "engine.compose",
    "engine.slow_precision": "precision.slow_dtype",
    "engine.update": "engine.optimizer_step",
    "integrations.accelerate_arguments": "integrations.accelerate.arguments",
    "integrations.accelerate_config": "integrations.accelerate.config",
    "integrations.accelerate_prepared": "integrations.accelerate.prepared",
    "integrations.deepspeed": "deepspeed",
    "integrations.deepspeed.activations": "deepspeed.activations",
    "integrations.deepspeed.checkpoint_engine": "deepspeed.checkpoint_engine",
    "integrations.deepspeed.checkpoint_words": "deepspeed.checkpoint_constants",
    "integrations.deepspeed.command": "deepspeed.command",
    "integrations.deepspeed.conflicts": "deepspeed.conflicts",
    "integrations.deepspeed.consumers": "deepspeed.version_check",
    "integrations.deepspeed.device": "deepspeed.device",
    "integrations.deepspeed.distributed": "deepspeed.distributed",
    "integrations.deepspeed.elastic": "deepspeed.elastic",
    "integrations.deepspeed.engine": "deepspeed.engine",
    "integrations.deepspeed.estimates": "deepspeed.estimates",
    "integrations.deepspeed.facts": "deepspeed.version_info",
    "integrations.deepspeed.flops": "deepspeed.flops",
    "integrations.deepspeed.groups": "deepspeed.groups",
    "integrations.deepspeed.helpers": "deepspeed.helpers",
    "integrations.deepspeed.hooking": "deepspeed.hook_handles",
    "integrations.deepspeed.install": "deepspeed.install",
    "integrations.deepspeed.leaves": "deepspeed.leaf_modules",
    "integrations.deepspeed.logs": "deepspeed.logs",
    "integrations.deepspeed.lonely": "deepspeed.lone_reads",
    "integrations.deepspeed.modules": "deepspeed.import_hook",
    "integrations.deepspeed.monitors": "deepspeed.monitors",
    "integrations.deepspeed.names": "deepspeed.api_table",
    "integrations.deepspeed.optimizer": "deepspeed.optimizer",
    "integrations.deepspeed.optimizer_names": "deepspeed.ops_optimizers",
    "integrations.deepspeed.parameters": "deepspeed.parameters",
    "integrations.deepspeed.parts": "deepspeed.partition",
    "integrations.deepspeed.paths": "deepspeed.module_paths",
    "integrations.deepspeed.reading": "deepspeed.config_model",
    "integrations.deepspeed.sharding": "deepspeed.zero_init",
    "integrations.deepspeed.stubs": "deepspeed.stubs",
    "integrations.deepspeed.tiling": "deepspeed.tiled_mlp",
    "integrations.deepspeed.timers": "deepspeed.timers",
    "integrations.deepspeed.weights": "deepspeed.consolidate",
    "integrations.deepspeed.words": "deepspeed.symbols",
    "launch.decide": "launch.plan",
    "launch.decode": "launch.exit_report",
    "launch.environ": "launch.env",
    "launch.guardian": "launch.orphan_reaper",
    "launch.pools": "launch.resource_pool",
    "launch.preflight": "launch.memory_check",
    "launch.supervise": "launch.supervisor",
    "native.adam": "optim.native_adam",
    "native.build": "optim.native_build",
    "native.hardware": "precision.hardware",
    "precision.scaler": "precision.loss_scaler",
    "store.bus": "offload.copy_streams",
    "store.disk": "offload.swap_file",
    "store.disk_check": "offload.disk_check",
    "store.disk_open": "offload.direct_io",
    "store.grads": "offload.grad_store",
    "store.heap": "memory.malloc",
    "store.luggage": "offload.swapped_storage",
    "store.pager": "offload.pager",
    "store.pinned": "memory.pinned",
    "store.shards": "offload.shard_store",
    "store.storage": "memory.storage",
    "testing.models": "testing.edge_case_models",
    "testing.networks": "testing.edge_case_networks",
    "testing.police": "testing.leak_check",
    "testing.verdict": "testing.outcome",
    "zero.behind": "offload.async_update",
    "zero.crossing": "offload.host_chunk",
    "zero.deal": "zero.scatter",
    "zero.gather": "zero.prefetch",
    "zero.guard": "zero.sharded_parameter",
    "zero.onepass": "optim.fused_update",
    "zero.parcel": "zero.param_bucket",
    "zero.tile": "zero.optimizer_shard",
    "zero.touch": "zero.grad_flags",
    "zero.transforms": "zero.functorch",
}

CLASSES = {  # in the new module: old name -> new name
    "checkpoint.all_ranks": {"agree": "run_on_all_ranks"},
    "checkpoint.deepspeed": {"DeepSpeedSaved": "DeepSpeedReader"},
    "checkpoint.deepspeed.slots": {"Place": "FlatSpan", "Slot": "DeepSpeedSlot"},
    "checkpoint.local_state": {"Local": "LocalState", "Piece": "ShardItem"},
    "checkpoint.open_checkpoint": {"open_source": "open_checkpoint"},
    "checkpoint.reader": {"Saved": "CheckpointReader"},
    "comm.agreement": {"meeting": "namespace", "numbered_meeting": "numbered_namespace"},
    "comm.control_group": {"Forum": "ControlGroup"},
    "comm.flight_recorder": {
        "Flight": "FlightRecording",
        "FlightLog": "FlightRecorder",
        "read_flight": "read_recording",
        "read_flight_pid": "read_recording_pid",
    },
    "comm.shared_memory": {"Board": "ControlBlock", "Window": "PeerMapping"},
    "engine.checkpoint_loader": {"Loads": "CheckpointLoader"},
    "engine.checkpoint_saver": {"Saves": "CheckpointSaver"},
    "engine.offload_states": {"Away": "StateOffloader", "goes_home": "is_return"},
    "engine.optimizer_step": {"Skips": "SkippedSteps", "Update": "OptimizerStep"},
    "launch.exit_report": {
        "Death": "RankExit",
        "Kernel": "KernelCounters",
        "Report": "ExitReport",
        "Verdict": "ExitCause",
        "decode": "explain_exit",
    },
    "launch.orphan_reaper": {"Guardian": "OrphanReaper"},
    "launch.plan": {"BecomeRank": "ExecAsRank", "Decision": "LaunchPlan", "decide": "plan_launch"},
    "launch.supervisor": {
        "Herd": "WorkerSupervisor",
        "Patience": "ShutdownTimeouts",
        "Process": "WorkerProcess",
    },
    "offload.async_update": {
        "Behind": "AsyncUpdateWorker",
        "Pending": "PendingUpdates",
        "Sent": "ParamTransfer",
    },
    "offload.capacity_check": {"check_room": "check_capacity"},
    "offload.copy_streams": {
        "Arrival": "CopyHandle",
        "Bus": "CopyStreams",
        "CudaBus": "CudaCopyStreams",
    },
    "offload.grad_store": {"GradOnDisk": "DiskGradStore", "GradUnwritten": "DiscardedGradStore"},
    "offload.host_chunk": {
        "Crossing": "HostChunk",
        "Delivery": "HostGradTransfer",
        "GradOnHost": "HostGradStore",
        "HostSide": "HostStaging",
    },
    "offload.plan": {"Resting": "OffloadPlan", "plan_resting": "plan_offload"},
    "offload.shard_store": {
        "InMemory": "MemoryShardStore",
        "Leaving": "PendingWrite",
        "OnDisk": "DiskShardStore",
        "Rest": "ShardStore",
        "Room": "AllocateShard",
        "Saves": "WritesInFlight",
    },
    "offload.stores": {"has_bus": "has_copy_streams", "make_bus": "make_copy_streams"},
    "offload.swapped_storage": {"Luggage": "SwappedStorages", "Room": "HostBuffer"},
    "optim.fused_update": {
        "Kernel": "UpdateKernel",
        "OnePass": "FusedUpdate",
        "follow": "sync_master_from_param",
    },
    "testing.outcome": {"Death": "RankEnd", "Verdict": "Outcome"},
    "watchdog.diagnosis": {"Verdict": "Diagnosis", "Witness": "RankStatus", "judge": "diagnose"},
    "watchdog.lone_reads": {"Readers": "LoneReadCheck"},
    "watchdog.rank_status": {
        "witness_from_answer": "status_from_answer",
        "witness_from_host": "status_from_host",
    },
    "watchdog.session": {"Watch": "CommSession", "open_watch": "open_session"},
    "watchdog.settings": {"TrustSettings": "WatchdogSettings"},
    "watchdog.startup": {"sentinel_of": "watchdog_of", "sentinel_space": "watchdog_namespace"},
    "watchdog.store_client": {"SideChannel": "StoreClient", "SideChannelLost": "StoreLost"},
    "watchdog.tracked_calls": {"Followed": "TrackedCalls"},
    "watchdog.watchdog": {"Sentinel": "Watchdog", "Track": "SessionWatch"},
    "zero.optimizer_shard": {
        "Chunk": "OptimizerChunk",
        "Tile": "OptimizerShard",
        "make_tile": "make_optimizer_shard",
    },
    "zero.param_bucket": {"Parcel": "ParamBucket", "SpreadParameter": "BucketedParameter"},
    "zero.prefetch": {"Gatherer": "Prefetcher", "Site": "WrappedModule"},
    "zero.scatter": {"Dealer": "ParamScatterer"},
    "zero.sharded_parameter": {
        "blank": "nan_placeholder",
        "hide": "mark_sharded",
        "plain": "without_guard",
        "show": "mark_unsharded",
    },
}

_PACKAGES = ("store", "native", "integrations.deepspeed")
"""Old packages with other old names below them. The first two have no content apart from those."""


def _warn(old: str, new: str, *, stacklevel: int = 3) -> None:
    warnings.warn(
        f"zeroshard.{old} is called zeroshard.{new} now. The old name goes with release 0.3.",
        FutureWarning,
        stacklevel=stacklevel,
    )


def old_names(module: str) -> Callable[[str], Any]:
    """A ``__getattr__`` for ``zeroshard.<module>`` that finds its classes by their old names."""

    def find(name: str) -> Any:
        new = CLASSES.get(module, {}).get(name)
        if new is None:
            raise AttributeError(f"module 'zeroshard.{module}' has no attribute {name!r}")
        home = "checkpoint.deepspeed.reader" if module == "checkpoint.deepspeed" else module
        _warn(f"{module}.{name}", f"{home}.{new}")
        return getattr(importlib.import_module(f"zeroshard.{home}"), new)

    return find


class _OldModule(ModuleType):
    """Stands for an old module: its attributes are those of the new module, by new and by old names."""

    def __init__(self, old: str, new: str | None) -> None:
        super().__init__(f"zeroshard.{old}")
        self.__dict__["_new"] = new
        if old in _PACKAGES:
            self.__path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        new = self.__dict__["_new"]
        if new is None or name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        module = importlib.import_module(f"zeroshard.{new}")
        return getattr(module, CLASSES.get(new, {}).get(name, name))


class _OldNames(MetaPathFinder, Loader):
    """Finds and loads old modules.

    It is first in ``sys.meta_path``, because a folder with an old name and only caches may still exist.
    """

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """A spec if ``fullname`` is an old name of ZeroShard, else None."""
        package, _, old = fullname.partition(".")
        if package != "zeroshard" or not (old in MODULES or old in _PACKAGES):
            return None
        return ModuleSpec(fullname, self, is_package=old in _PACKAGES)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """The stand-in for an old module. Warns with the new name, once for each old name."""
        old = spec.name.partition(".")[2]
        new = MODULES.get(old)
        if new is not None:
            _warn(old, new)
        return _OldModule(old, new)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing: attributes are looked up when they are used."""


def attribute_of_engine(engine: Any, name: str, error: AttributeError) -> Any:
    """What ``zeroshard.Engine`` had before: DeepSpeed's getters, and whatever its model has.

    Engines of ``deepspeed.initialize`` have both without a warning. Raises ``error`` for other names.
    """
    if name == "module" or name.startswith("__"):
        raise error
    getters = importlib.import_module("zeroshard.deepspeed.getters")
    if name in getters.GETTERS:
        _warn(f"Engine.{name}", f"deepspeed.engine.DeepSpeedEngine.{name}", stacklevel=4)
        return functools.partial(getters.GETTERS[name], engine)
    found = getattr(engine.module, name)
    _warn(f"Engine.{name}", f"Engine.module.{name}", stacklevel=4)
    return found


def serve() -> None:
    """Make old names importable from now on."""
    if not any(isinstance(finder, _OldNames) for finder in sys.meta_path):
        sys.meta_path.insert(0, _OldNames())
