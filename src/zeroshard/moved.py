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
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any

MODULES = {
    "checkpoint.all_ranks": "comm.agreement",
    "checkpoint.deepspeed_slots": "checkpoint.deepspeed.slots",
    "checkpoint.load": "checkpoint.restore",
    "checkpoint.local": "checkpoint.local_state",
    "checkpoint.merge": "checkpoint.save_decisions",
    "checkpoint.saved": "checkpoint.reader",
    "checkpoint.shardfile": "checkpoint.safetensors_file",
    "checkpoint.sources": "checkpoint.open_checkpoint",
    "checkpoint.spread": "checkpoint.remote_files",
    "checkpoint.together": "comm.agreement",
    "checkpoint.tree": "checkpoint.json_state",
    "checkpoint.unpickle": "checkpoint.deepspeed.unpickle",
    "comm.agree": "comm.agreement",
    "comm.control_group": "comm.agreement",
    "comm.evidence": "watchdog.rank_status",
    "comm.follow": "watchdog.tracked_calls",
    "comm.forum": "comm.agreement",
    "comm.presence": "watchdog.join",
    "comm.readers": "watchdog.lone_reads",
    "comm.sentinel": "watchdog.watchdog",
    "comm.shared": "comm.shared_memory",
    "comm.side": "watchdog.messages",
    "comm.torch_names": "deepspeed.collectives",
    "comm.trust": "watchdog.settings",
    "comm.watch": "watchdog.session",
    "config.offload": "config.contradictions",
    "config.read": "config.parse",
    "core.flight": "comm.flight_recorder",
    "core.verdict": "watchdog.diagnosis",
    "engine.accumulate": "engine.optimizer_step",
    "engine.away": "engine.offload_states",
    "engine.compose": "engine.build",
    "engine.fit": "offload.host_fit",
    "engine.getters": "deepspeed.getters",
    "engine.host_memory": "memory.host_limits",
    "engine.kernels": "optim.kernels",
    "engine.loader": "engine.data_loader",
    "engine.loading": "engine.checkpoint_loader",
    "engine.names": "checkpoint.local_state",
    "engine.offload": "offload.stores",
    "engine.optimizer_classes": "optim.optimizers",
    "engine.optimizers": "optim.factory",
    "engine.preflight": "offload.capacity_check",
    "engine.resting": "offload.offload_plan",
    "engine.saving": "engine.checkpoint_saver",
    "engine.schedulers": "optim.schedulers",
    "engine.setup": "engine.build",
    "engine.slow_precision": "precision.hardware",
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
    "launch.decide": "launch.launch_plan",
    "launch.decode": "launch.exit_report",
    "launch.env": "launch.rank_env",
    "launch.environ": "launch.rank_env",
    "launch.guardian": "launch.orphan_reaper",
    "launch.plan": "launch.launch_plan",
    "launch.pools": "launch.resource_pool",
    "launch.preflight": "launch.memory_check",
    "launch.supervise": "launch.supervisor",
    "memory.pages": "memory.direct_io",
    "memory.pinned": "device.pinned",
    "native.adam": "optim.native_adam",
    "native.build": "optim.native_build",
    "native.hardware": "precision.hardware",
    "offload.copy_streams": "device.copy_streams",
    "offload.direct_io": "memory.direct_io",
    "offload.plan": "offload.offload_plan",
    "precision.scaler": "precision.loss_scaler",
    "precision.slow_dtype": "precision.hardware",
    "store.bus": "device.copy_streams",
    "store.disk": "offload.swap_file",
    "store.disk_check": "offload.disk_check",
    "store.disk_open": "memory.direct_io",
    "store.grads": "offload.grad_store",
    "store.heap": "memory.malloc",
    "store.luggage": "offload.swapped_storage",
    "store.pager": "offload.pager",
    "store.pinned": "device.pinned",
    "store.shards": "offload.shard_store",
    "store.storage": "memory.storage",
    "testing.police": "testing.leak_check",
    "testing.verdict": "testing.outcome",
    "watchdog.startup": "watchdog.join",
    "watchdog.store_client": "watchdog.messages",
    "zero.behind": "offload.async_update",
    "zero.crossing": "offload.host_chunk",
    "zero.deal": "zero.materialize",
    "zero.gather": "zero.prefetch",
    "zero.grad_flags": "zero.clip",
    "zero.guard": "zero.sharded_parameter",
    "zero.onepass": "optim.fused_update",
    "zero.parcel": "zero.param_bucket",
    "zero.scatter": "zero.materialize",
    "zero.tile": "zero.optimizer_shard",
    "zero.touch": "zero.clip",
    "zero.transforms": "zero.functorch",
    "zero.wrap": "engine.unit_plan",
}

CLASSES = {  # module of today: old name -> new name, or "module:name" where that is another module
    "checkpoint.deepspeed": {
        "DeepSpeedSaved": "checkpoint.deepspeed.reader:DeepSpeedReader",
        "is_deepspeed": "checkpoint.deepspeed.reader:is_deepspeed",
        "load_file": "checkpoint.deepspeed.reader:load_file",
    },
    "checkpoint.deepspeed.slots": {"Place": "FlatSpan", "Slot": "DeepSpeedSlot"},
    "checkpoint.local_state": {"Local": "LocalState", "Piece": "ShardItem"},
    "checkpoint.open_checkpoint": {"open_source": "open_checkpoint"},
    "checkpoint.reader": {"Saved": "CheckpointReader"},
    "checkpoint.save": {"Job": "SaveTask", "POINTS": "FAULT_POINTS"},
    "checkpoint.save_decisions": {"Facts": "CheckpointMetadata"},
    "comm": {
        "Place": "comm.env:RankInfo",
        "TrustSettings": "watchdog.settings:WatchdogSettings",
        "current_place": "comm.env:current_rank_info",
        "init_distributed": "watchdog.join:init_distributed",
    },
    "comm.agreement": {
        "Forum": "ControlGroup",
        "agree": "run_on_all_ranks",
        "meeting": "namespace",
        "numbered_meeting": "numbered_namespace",
    },
    "comm.collectives": {
        "Guard": "ErrorExplainer",
        "Member": "RecordedComm",
        "NoGuard": "NoExplainer",
    },
    "comm.env": {
        "Place": "RankInfo",
        "current_place": "current_rank_info",
        "discover": "rank_info_of",
        "init_distributed": "watchdog.join:init_distributed",
        "own_device": "device.choice:own_device",
        "uses_cuda": "device.choice:accelerator_type",
    },
    "comm.flight_recorder": {
        "Flight": "FlightRecording",
        "FlightLog": "FlightRecorder",
        "read_flight": "read_recording",
        "read_flight_pid": "read_recording_pid",
    },
    "comm.recorder": {
        "box_dir": "recording_dir",
        "read_box": "read_recording_file",
        "remove_box": "remove_recording",
        "sweep_boxes": "sweep_recordings",
    },
    "comm.shared_memory": {"Board": "ControlBlock", "Window": "PeerMapping"},
    "comm.shm": {"Meeting": "PeerMemory", "meet": "open_peer_memory"},
    "config.schema": {"section_type": "config.fields:section_type"},
    "config.sections": {
        "AUTOCAST_DTYPE": "config.fields:AUTOCAST_DTYPE",
        "DEVICE": "config.fields:DEVICE",
        "DIRECTORY": "config.fields:DIRECTORY",
        "STAGE": "config.fields:STAGE",
    },
    "deepspeed.engine": {"initialize": "deepspeed.entry:initialize"},
    "deepspeed.lone_reads": {"LonelyReads": "LoneReads"},
    "device.copy_streams": {
        "Arrival": "CopyHandle",
        "Bus": "CopyStreams",
        "CudaBus": "CudaCopyStreams",
        "choose_device": "device.choice:choose_device",
    },
    "engine.arguments": {
        "WRAPPERS": "engine.draft:WRAPPERS",
        "check_model": "engine.draft:check_model",
        "parameter_list": "engine.draft:parameter_list",
        "schedule_over": "engine.draft:schedule_over",
    },
    "engine.monitors": {
        name: f"engine.sinks:{name}"
        for name in ("CometSink", "CsvSink", "TensorboardSink", "WandbSink")
    },
    "engine.build": {
        "GATHERED_AS_ONE": "engine.unit_plan:GATHERED_AS_ONE",
        "ManualGC": "engine.manual_gc:ManualGC",
        "Parts": "EngineParts",
        "Runtime": "engine.runtime:ZeroRuntime",
        "cast_floats": "precision.casting:cast_floats",
        "hidden_size": "engine.draft:hidden_size",
        "is_fake": "engine.optimizer_step:is_fake",
        "layout_digest": "engine.unit_plan:layout_digest",
        "make_optimizer": "engine.draft:make_optimizer",
        "make_scheduler": "engine.draft:make_scheduler",
        "plan_units": "engine.unit_plan:plan_units",
        "probed": "engine.unit_plan:probed",
        "read_flag": "engine.optimizer_step:read_flag",
        "schedule_restore": "optim.schedulers:schedule_restore",
        "schedule_snapshot": "optim.schedulers:schedule_snapshot",
        "widest": "engine.optimizer_step:widest",
    },
    "engine.checkpoint_loader": {"Loads": "CheckpointLoader"},
    "engine.checkpoint_saver": {"Saves": "CheckpointSaver"},
    "engine.offload_states": {"Away": "StateOffloader", "goes_home": "is_return"},
    "engine.optimizer_step": {"Skips": "SkippedSteps", "Update": "OptimizerStep"},
    "engine.unit_plan": {"SitePlan": "WrapPlan", "find_sites": "plan_wrapping"},
    "integrations.accelerate": {
        "EngineOptimizer": "integrations.accelerate.prepared:EngineOptimizer"
    },
    "launch": {"Patience": "launch.supervisor:ShutdownTimeouts"},
    "launch.exit_report": {
        "Death": "RankExit",
        "EXIT_VERDICT": "errors:EXIT_DIAGNOSIS",
        "Kernel": "KernelCounters",
        "Report": "ExitReport",
        "Verdict": "ExitCause",
        "decode": "explain_exit",
    },
    "launch.orphan_reaper": {"Guardian": "OrphanReaper"},
    "launch.launch_plan": {
        "BecomeRank": "ExecAsRank",
        "Decision": "LaunchPlan",
        "decide": "plan_launch",
    },
    "launch.remote": {"hold_leash": "end_with_parent_pipe"},
    "launch.supervisor": {
        "Herd": "WorkerSupervisor",
        "Patience": "ShutdownTimeouts",
        "Process": "WorkerProcess",
    },
    "memory.direct_io": {"free_nbytes": "core.files:free_nbytes"},
    "offload.async_update": {
        "Behind": "AsyncUpdateWorker",
        "ParamTransfer": "Wait",
        "Pending": "PendingUpdates",
        "Sent": "Wait",
    },
    "offload.capacity_check": {"check_room": "check_capacity"},
    "offload.grad_store": {"GradOnDisk": "DiskGradStore"},
    "offload.host_chunk": {
        "Crossing": "HostChunk",
        "Delivery": "HostGradTransfer",
        "GradOnHost": "HostGradStore",
        "HostSide": "HostStaging",
    },
    "offload.offload_plan": {"Resting": "OffloadPlan", "plan_resting": "plan_offload"},
    "offload.shard_store": {
        "InMemory": "MemoryShardStore",
        "Leaving": "PendingWrite",
        "OnDisk": "DiskShardStore",
        "Rest": "ShardStore",
        "Room": "AllocateShard",
        "SAVES_IN_FLIGHT": "WRITES_IN_FLIGHT",
        "Saves": "WritesInFlight",
    },
    "offload.stores": {"has_bus": "has_copy_streams", "make_bus": "make_copy_streams"},
    "offload.swapped_storage": {"Luggage": "SwappedStorages", "Room": "HostBuffer"},
    "optim.fused_update": {
        "Span": "FusedFragment",
        "Kernel": "UpdateKernel",
        "OnePass": "FusedUpdate",
        "follow": "sync_master_from_param",
    },
    "optim.native_adam": {
        "Span": "optim.fused_update:FusedFragment",
        "PIECE_NUMEL": "optim.fused_update:THREAD_PIECE_NUMEL",
        "SPAN_MULTIPLE": "optim.fused_update:SPAN_MULTIPLE",
        "fits": "optim.fused_update:fits",
    },
    "testing": {"Death": "testing.outcome:RankEnd"},
    "testing.outcome": {"Death": "RankEnd", "Verdict": "Outcome"},
    "testing.worker": {"Job": "TestJob", "Report": "TestReport"},
    "watchdog.diagnosis": {
        "StallClock": "watchdog.tracked_calls:StallClock",
        "Verdict": "Diagnosis",
        "Witness": "RankStatus",
        "judge": "diagnose",
    },
    "watchdog.join": {
        "launcher_serves": "comm.env:launcher_serves_store",
        "sentinel_of": "watchdog_of",
        "sentinel_space": "watchdog_namespace",
    },
    "watchdog.lone_reads": {"Readers": "LoneReadCheck"},
    "watchdog.messages": {"SideChannel": "StoreClient", "SideChannelLost": "StoreLost"},
    "watchdog.rank_status": {
        "FrozenStack": "comm.recorder:FrozenStack",
        "witness_from_answer": "status_from_answer",
        "witness_from_host": "status_from_host",
    },
    "watchdog.session": {
        "Track": "watchdog.session_watch:SessionWatch",
        "Watch": "CommSession",
        "open_watch": "open_session",
    },
    "watchdog.settings": {"TrustSettings": "WatchdogSettings"},
    "watchdog.tracked_calls": {"Followed": "TrackedCalls"},
    "watchdog.watchdog": {
        "EXIT_VERDICT": "errors:EXIT_DIAGNOSIS",
        "Sentinel": "Watchdog",
        "SessionWatch": "watchdog.session_watch:SessionWatch",
        "Track": "watchdog.session_watch:SessionWatch",
        "divergence_text": "watchdog.session_watch:divergence_text",
    },
    "zero.access": {"Training": "UnitOptimState"},
    "zero.clip": {
        "CHUNK_NUMEL": "optim.fused_update:PIECE_NUMEL",
        "norm_of": "optim.fragment_norms:norm_of",
    },
    "zero.gradients": {"GradRest": "offload.grad_store:GradStore"},
    "zero.materialize": {"Dealer": "ParamScatterer"},
    "zero.optimizer_shard": {
        "norm_of": "optim.fragment_norms:norm_of",
        "Chunk": "OptimizerChunk",
        "Tile": "OptimizerShard",
        "make_tile": "make_optimizer_shard",
    },
    "zero.param_bucket": {"Parcel": "ParamBucket", "SpreadParameter": "BucketedParameter"},
    "zero.prefetch": {"Gatherer": "Prefetcher", "Site": "WrappedModule"},
    "zero.sharded_parameter": {
        "blank": "nan_placeholder",
        "hide": "mark_sharded",
        "plain": "without_guard",
        "show": "mark_unsharded",
    },
    "zero.unit": {"away_error": "offloaded_error"},
    "checkpoint.compare": {"Difference": "RunDifference"},
    "checkpoint.manifest": {"Fragment": "SavedFragment"},
    "checkpoint.safetensors_file": {"Entry": "TensorEntry"},
    "core.layout": {"Block": "SlotBlock"},
    "deepspeed.optimizer": {"EngineOptimizer": "ForwardingOptimizer"},
    "engine.data_loader": {"Begun": "PassBegin", "Position": "LoaderPosition"},
    "offload.pager": {"Timeline": "TransferTimes"},
}

_PACKAGES = ("store", "native", "integrations.deepspeed")
"""Old packages with other old names below them. The first two have no content apart from those."""


def _warn(old: str, new: str, *, stacklevel: int = 3) -> None:
    warnings.warn(
        f"zeroshard.{old} is called zeroshard.{new} now. Release 0.3 removes the old name.",
        FutureWarning,
        stacklevel=stacklevel,
    )


def current_name(module: str, name: str) -> tuple[str, str]:
    """The module and the name of today, for a name that ``module`` has or had."""
    home, _, new = CLASSES.get(module, {}).get(name, name).rpartition(":")
    return home or module, new


def old_names(module: str) -> Callable[[str], Any]:
    """A ``__getattr__`` for ``zeroshard.<module>`` that finds what it had by the old names."""

    def find(name: str) -> Any:
        if name not in CLASSES.get(module, {}):
            raise AttributeError(f"module 'zeroshard.{module}' has no attribute {name!r}")
        home, new = current_name(module, name)
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
        home, new_name = current_name(new, name)
        return getattr(importlib.import_module(f"zeroshard.{home}"), new_name)


class _KeptModule(SourceFileLoader):
    """Loads a module that kept its path, so that it finds what it had by the old names."""

    def exec_module(self, module: ModuleType) -> None:
        """Run the module. A ``__getattr__`` of its own stays."""
        super().exec_module(module)
        vars(module).setdefault("__getattr__", old_names(self.name.partition(".")[2]))


class _OldNames(MetaPathFinder, Loader):
    """Finds and loads old modules, and finds the modules of ``CLASSES``.

    It is first in ``sys.meta_path``, because a folder with an old name and only caches may still exist.
    """

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        """A spec if ``fullname`` is or has an old name of ZeroShard, else None."""
        package, _, old = fullname.partition(".")
        if package == "zeroshard" and old in CLASSES:
            return _spec_of_kept(fullname, path)
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


def _spec_of_kept(fullname: str, path: Any) -> ModuleSpec | None:
    spec = PathFinder.find_spec(fullname, path)
    if spec is None or spec.origin is None or not isinstance(spec.loader, SourceFileLoader):
        return None  # the other finders' part; its old names are not found
    spec.loader = _KeptModule(fullname, spec.origin)
    return spec


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
