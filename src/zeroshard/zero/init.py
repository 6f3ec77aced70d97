"""Builds a model sharded, so that no rank ever holds all of it.

Inside :class:`Init`, parameters are sharded as soon as another module is under construction: a large one
at once, small ones many at a time in one broadcast. A parameter that is used again
(``apply(init_weights)`` at the end of a constructor) is made whole, and is sharded again later. No
constructor is patched.
"""

from __future__ import annotations

import contextlib
import weakref
import zlib
from collections.abc import Collection, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from zeroshard.comm.collectives import Comm
from zeroshard.comm.env import current_rank_info, local_device
from zeroshard.config import Config, load_config
from zeroshard.core.mesh import Mesh
from zeroshard.device.choice import read
from zeroshard.errors import RankMismatch
from zeroshard.experts.marks import inside, ranks_of_layer
from zeroshard.memory.storage import is_aliased
from zeroshard.precision.policy import policy_from
from zeroshard.session.comm_session import CommSession
from zeroshard.session.groups import groups_of
from zeroshard.session.join import join_ranks
from zeroshard.session.session import open_session
from zeroshard.watchdog.settings import WatchdogSettings
from zeroshard.zero import materialize, sharded_parameter
from zeroshard.zero.attached import Attached
from zeroshard.zero.init_mesh import check_group, mesh_of_parts
from zeroshard.zero.param_bucket import BucketedParameter, ParamBucket


def _room_numel() -> int:
    """Elements of small parameters that may be whole at a time. A bucket of them holds half at most."""
    return materialize.PIECE_NUMEL // 4


class _Built(NamedTuple):
    """A parameter that was never sharded, and the modules and names under which it is registered."""

    param: nn.Parameter
    places: list[tuple[nn.Module, str]]


class Init:
    """Build a model sharded (DeepSpeed's ``deepspeed.zero.Init``, with the same arguments).

    ``config_dict_or_path`` (or ``config``): only stage 3 shards parameters, other stages do nothing; the
    precision gives the dtype ("auto": the parameter's own, until there is an engine). ``dtype`` overrides
    it. ``module``: shard this model now. Parameters are initialised in their own dtype and show it until
    the block ends. They are then cast, and all ranks get the values of rank 0. Buffers are not changed.
    Blocks may nest. An exception inside leaves parameters as they are.

    Besides its shards, a rank holds the module under construction and one piece of
    :data:`zeroshard.zero.materialize.PIECE_NUMEL` elements. With ``keep_fp32`` patterns everything stays
    fp32 until the engine is built, because names are not known earlier. A value that is scaled in place
    after its module was completed (``weight.mul_(0.3)``) may be rounded to the training dtype before and
    after.

    ``mpu``, ``mesh`` and the configuration may name a mesh, as for :func:`zeroshard.initialize`. If it
    has data-parallel dimensions only, parameters are sharded over all of its ranks. The engine then
    shards them as the mesh says. Experts that ranks share (``zeroshard.parallel.MoE``) are sharded over
    the ranks that have the same ones; parameters that were marked as such before the block stay whole.

    Raises:
        RankMismatch: ranks build different models.
        UnsupportedError: the engine shall cut the model over tensor ranks.
        ConfigError: what names a mesh disagrees.
    """

    mesh: Mesh | None  # None: all ranks build the same parameters

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: Any = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
        mesh: Any = None,
    ) -> None:
        source = config_dict_or_path if config_dict_or_path is not None else config
        parsed = _config_of(source)
        self.enabled = enabled and (parsed is None or parsed.zero_optimization.stage == 3)
        self._begin()
        if not self.enabled:
            return
        join_ranks()
        self.mesh = mesh_of_parts(parsed, mpu, mesh)
        if self.mesh is None:
            self._check_group(data_parallel_group)
        else:
            check_group(data_parallel_group, self.mesh)
        self.device = local_device()
        self._settings: dict[str, Any] = {
            "transport": parsed.transport if parsed else "auto",
            "device": self.device,
            "trust": parsed.trust if parsed else WatchdogSettings(),
        }
        watch = self._open(data_parallel_group)
        self.comm: Comm = watch.gathers
        weakref.finalize(self, watch.close)  # freed with the last parameter that no engine took
        self.dtype = dtype if dtype is not None else _param_dtype(parsed)
        if module is not None:
            self._see(module)
            self._shard(list(self._whole))
            self._finish()

    def _open(self, group: Any) -> CommSession:
        """Connect the ranks that build the same parameters. Collective."""
        if self.mesh is None:
            return open_session(group=group, plan={}, call="zero.Init", **self._settings)
        return open_session(
            plan={"mesh": self.mesh.text}, call="zero.Init", mesh=self.mesh, **self._settings
        )

    def _check_group(self, group: Any) -> None:
        """For derived classes: raise an error if parameters cannot be sharded over ``group``."""

    def _begin(self) -> None:
        self.mesh = None
        self.depth = 0
        self._paused = 0  # blocks in which experts are made, of which this one takes nothing
        self._experts: dict[
            tuple[Mesh, int], Init
        ] = {}  # by the number of ranks that share a layer
        # Modules whose present parameters were taken; the hooks take those registered later.
        self._seen: Attached[nn.Module, bool] = Attached()
        self._whole: dict[BucketedParameter | ParamBucket, _Built | None] = {}  # oldest first
        self._large: dict[
            BucketedParameter | ParamBucket, None
        ] = {}  # those of them to be sharded at the next occasion
        self._aliased: set[BucketedParameter | ParamBucket] = set()  # aliased at the last attempt
        self._small_numel, self._small_limit = 0, _room_numel()
        self._with_built_dtype: list[
            weakref.ref[ParamBucket]
        ] = []  # show the dtype of construction
        self._read: weakref.ref[ParamBucket] | None = None  # the bucket that keeps a gathered copy
        self._hooks = contextlib.ExitStack()

    @property
    def active(self) -> bool:
        """Whether the program is inside the block."""
        return self.depth > 0

    def __enter__(self) -> Init:
        self.depth += 1
        if self.enabled and self.depth == 1:
            self._watch_modules()
            self._hooks.enter_context(inside(self))
        return self

    def _watch_modules(self) -> None:
        for hook in (
            register_module_parameter_registration_hook(self._param_registered),
            register_module_module_registration_hook(self._module_registered),
        ):
            self._hooks.callback(hook.remove)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.depth -= 1
        if self.depth:
            return
        self._hooks.close()
        while self._experts:
            self._experts.popitem()[1].__exit__(kind, error, trace)
        try:
            if kind is None:
                self._shard(list(self._whole))
        finally:
            self._finish()

    def _finish(self) -> None:
        """Drop the records of the construction. Parameters show the training dtype from now on."""
        for reference in self._with_built_dtype:
            if (bucket := reference()) is not None:
                bucket.show_training_dtype()
        self._seen = Attached()
        for store in (self._with_built_dtype, self._whole, self._large, self._aliased):
            store.clear()
        self._small_numel, self._small_limit = 0, _room_numel()

    # ------------------------------------------------------------------ experts that ranks share

    @contextlib.contextmanager
    def own_experts(self, mesh: Mesh, size: int) -> Iterator[None]:
        """Shard this rank's experts of one layer over the ranks that have the same. Collective.

        See :class:`zeroshard.experts.marks.ExpertBuilds`.
        """
        if (mesh, size) not in self._experts:
            self._experts[mesh, size] = self._among_holders(mesh, size)
        inner = self._experts[mesh, size]
        paused, inner._paused = inner._paused, 0
        inner._watch_modules()
        try:
            yield
            inner._shard(list(inner._whole))
        finally:
            inner._hooks.close()
            inner._paused = paused

    @contextlib.contextmanager
    def other_experts(self) -> Iterator[None]:
        """Take nothing of what is built in the block."""
        paused = [self, *self._experts.values()]
        for each in paused:
            each._paused += 1
        try:
            yield
        finally:
            for each in paused:
                each._paused -= 1

    def _among_holders(self, mesh: Mesh, size: int) -> Init:
        """The same block over the ranks that have the same experts as this one. Collective."""
        inner = object.__new__(Init)
        inner.enabled, inner.device, inner.dtype = True, self.device, self.dtype
        inner._begin()
        inner.mesh = self.mesh
        inner.depth = 1  # until this block ends
        watch = open_session(
            plan={"mesh": repr(mesh), "ranks that share experts": str(size)},
            call="zero.Init for experts",
            mesh=mesh,
            kinds=list(groups_of(mesh, (), (), [size])),
            **self._settings,
        )
        inner.comm = watch.experts[size]
        weakref.finalize(inner, watch.close)
        return inner

    # ------------------------------------------------------------------ what is under construction

    def _param_registered(self, holder: nn.Module, leaf: str, param: nn.Parameter | None) -> None:
        if self._paused:
            return
        self._see(holder)
        if param is not None:
            self._take(holder, leaf, param)

    def _module_registered(self, parent: nn.Module, _leaf: str, child: nn.Module | None) -> None:
        if self._paused:
            return
        self._see(parent)
        if child is not None:
            self._see(child)
        self._make_room(but=parent)

    def _see(self, module: nn.Module) -> None:
        """Take the parameters that a module has when it is first seen, as one made by a copy has."""
        if module in self._seen:
            return
        self._seen[module] = True
        for leaf, param in module._parameters.items():
            if param is not None:
                self._take(module, leaf, param)
        for child in module._modules.values():
            if child is not None:
                self._see(child)

    def _take(self, holder: nn.Module, leaf: str, param: nn.Parameter) -> None:
        """Record a whole parameter, to shard it later."""
        if type(param) not in (nn.Parameter, FakeTensor) or param.is_meta:
            return
        owner = sharded_parameter.owner_of(param)
        if owner is None:
            if ranks_of_layer(param) > 1:  # made before this block: others on other ranks
                return
            self._make_room(but=holder)
            self._add(BucketedParameter(param, holder, leaf, self), _Built(param, [(holder, leaf)]))
        elif isinstance(owner, BucketedParameter) and (built := self._whole.get(owner)):
            built.places.append((holder, leaf))

    # ------------------------------------------------------------------ what is whole

    def reopen(self, bucket: ParamBucket, beside: Collection[Tensor]) -> None:
        """Make a bucket whole that is used again. The tensors ``beside`` it are not sharded for it."""
        self._make_room(beside=beside, numel=bucket.numel)
        self.open(bucket)

    def open(self, bucket: ParamBucket, *, to_read: bool = False) -> None:
        """Make a bucket whole. Inside the block it is sharded again later.

        ``to_read``: outside the block, the program promises not to edit the parameters.
        """
        bucket.open(to_read=to_read and not self.active)
        if self.active:
            self._add(bucket)

    def close(self, bucket: ParamBucket, source: int) -> None:
        """Shard a bucket again, with the values of rank ``source``."""
        self._drop(bucket)
        bucket.close(source)

    def was_hidden(self, bucket: ParamBucket) -> None:
        """Record a bucket whose parameters show the dtype of construction until the block ends."""
        self._with_built_dtype.append(weakref.ref(bucket))

    def keep_read(self, bucket: ParamBucket) -> None:
        """Let this bucket keep its gathered copy for readers, and free that of the last bucket."""
        last = self._read() if self._read else None
        if last is not bucket:
            if last is not None:
                last.forget_read()
            self._read = weakref.ref(bucket)

    def _add(self, item: BucketedParameter | ParamBucket, built: _Built | None = None) -> None:
        self._whole[item] = built
        if item.numel > _room_numel() // 2:
            self._large[item] = None
            self._aliased.clear()  # try again to shard these
        else:
            self._small_numel += item.numel

    def _drop(self, item: BucketedParameter | ParamBucket) -> None:
        if item not in self._whole:
            return
        del self._whole[item]
        self._aliased.discard(item)
        if item in self._large:
            del self._large[item]
        else:
            self._small_numel -= item.numel

    def _make_room(
        self, but: nn.Module | None = None, beside: Collection[Tensor] = (), numel: int = 0
    ) -> None:
        """Shard large whole parameters, and small ones if they are too many.

        Not those of the module under construction (``but``), nor tensors of the running operation
        (``beside``). ``numel``: elements that will be made whole next.
        """
        few = self._small_numel + min(numel, _room_numel() // 2) <= self._small_limit
        if few and not self._large:
            return
        if not few:
            self._aliased.clear()  # try again to shard these
        used = {id(tensor) for tensor in beside}
        items = self._large if few else self._whole
        self._shard([item for item in items if not self._is_in_use(item, but, used)])
        if not few:
            self._small_limit = self._small_numel + _room_numel()

    def _is_in_use(
        self, item: BucketedParameter | ParamBucket, but: nn.Module | None, used: set[int]
    ) -> bool:
        if item in self._aliased:
            return True
        if isinstance(item, ParamBucket):
            return any(owner.pin_count or id(param) in used for _, param, owner in item.members())
        param, places = self._built(item)
        return bool(item.pin_count or id(param) in used) or any(
            holder is but for holder, _ in places
        )

    def _shard(self, items: Sequence[BucketedParameter | ParamBucket]) -> None:
        """Shard items. Collective.

        Inside the block, items to whose memory the program has another reference stay whole.
        """
        items = [item for item in items if isinstance(item, ParamBucket) or self._is_built(item)]
        aliased = self._compare(items) if items else set()
        self._aliased |= aliased
        ready = [item for item in items if item not in aliased]
        new = [(i, self._built(i).param) for i in ready if isinstance(i, BucketedParameter)]
        again = [item for item in ready if isinstance(item, ParamBucket)]
        for item in ready:
            self._drop(item)
        for bucket in (*self._packed(new), *again):
            bucket.close()

    def _is_built(self, item: BucketedParameter) -> bool:
        """Whether the parameter is still part of a module and has no other owner. If not, drop it."""
        param, places = self._built(item)
        if sharded_parameter.owner_of(param) is item:
            for holder, leaf in places:
                if holder._parameters.get(leaf) is param:
                    return True
            sharded_parameter.owners.discard(param)
        self._drop(item)
        return False

    def _built(self, item: BucketedParameter) -> _Built:
        built = self._whole[item]
        assert built is not None
        return built

    def _packed(
        self, params: Iterable[tuple[BucketedParameter, nn.Parameter]]
    ) -> Iterator[ParamBucket]:
        """Buckets of the parameters. Small parameters of one dtype and device share a bucket."""
        groups: dict[Any, tuple[list[tuple[BucketedParameter, nn.Parameter]], int]] = {}
        for owner, param in params:
            kind = param.dtype, param.device
            group, numel = groups.get(kind, ([], 0))
            if group and numel + param.numel() > _room_numel() // 2:
                yield ParamBucket(self, *zip(*group, strict=True))
                group, numel = [], 0
            group.append((owner, param))
            groups[kind] = group, numel + param.numel()
        for group, _ in groups.values():
            yield ParamBucket(self, *zip(*group, strict=True))

    def _compare(
        self, items: Sequence[BucketedParameter | ParamBucket]
    ) -> set[BucketedParameter | ParamBucket]:
        """The items to whose memory the program of any rank has another reference.

        A write through that reference would be lost. Outside the block this is not checked. Collective.

        Raises:
            RankMismatch: ranks build different models.
        """
        numels = [item.numel for item in items]
        what = zlib.crc32(repr(([item.name for item in items], numels)).encode())
        aliased = [self.active and self._is_aliased(item) for item in items]
        mine = [what, len(items), sum(numels), any(aliased)]
        name = "parameters under construction"
        votes = self._exchange(mine, name)
        if any(row[:3] != votes[0][:3] for row in votes):
            counts = "; ".join(
                f"rank {rank} {int(count)} parameters or buckets of {int(numel)} elements in all"
                for rank, (_, count, numel, _) in enumerate(votes)
            )
            raise RankMismatch(
                "zero.Init: ranks build different models. Numbers of what was built last: "
                f"{counts}; here from {items[0].name!r} to {items[-1].name!r}. Rank 0's values "
                "would be sent to other parameters. Build the same modules in the same order on "
                "every rank."
            )
        if any(row[3] for row in votes):
            flags = self._exchange(aliased, name)
            aliased = [any(column) for column in zip(*flags, strict=True)]
        return {item for item, flag in zip(items, aliased, strict=True) if flag}

    def _exchange(self, numbers: Sequence[int], name: str) -> list[list[float]]:
        if isinstance(torch.empty(0), FakeTensor):  # a simulated rank: all others do what it does
            return [[float(number) for number in numbers]]
        vector = torch.tensor(numbers, dtype=torch.float64, device=self.device)
        values: list[list[float]] = read(self.comm.all_gather_small(vector, name=name))
        return values

    def _is_aliased(self, item: BucketedParameter | ParamBucket) -> bool:
        if isinstance(item, ParamBucket):
            return any(is_aliased(param) for _, param, _ in item.members())
        return is_aliased(self._built(item).param)


def _config_of(source: Any) -> Config | None:
    if source is None:
        return None
    if isinstance(source, Config):
        return source
    world_size = current_rank_info().world_size
    return load_config(source, world_size=world_size, for_training=False).config


def _param_dtype(config: Config | None) -> torch.dtype | None:
    """The dtype of all parameters; None while ``keep_fp32`` patterns may keep some of them in fp32."""
    if config is None or config.keep_fp32:
        return None
    dtype = policy_from(config).row_for("", torch.float32).param
    return None if dtype == torch.float32 else dtype
