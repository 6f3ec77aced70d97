"""``PipelineModule``: DeepSpeed's list of layers, as a model that is cut into pipeline stages.

A layer is a module, a function, a :class:`LayerSpec` or a :class:`TiedLayerSpec`. Layer ``i`` is the
piece ``i``. Its parameters are named ``i.<name>``, those of tied layers ``tied_modules.<key>.<name>``;
the names do not depend on the cut. Every rank knows the shapes of all layers: it builds the specs of
other stages on the meta device.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from zeroshard.comm.env import current_rank_info
from zeroshard.core.mesh_sources import BATCH_DIMS, Claim, MeshSource
from zeroshard.deepspeed import collectives as comm
from zeroshard.deepspeed.activations import checkpoint, non_reentrant_checkpoint
from zeroshard.deepspeed.helpers import set_random_seed
from zeroshard.deepspeed.logs import log_dist
from zeroshard.deepspeed.pipeline_layers import (
    TiedLayerSpec,
    built_layers,
    check_layers,
    checked_parts,
    class_of,
    held,
    matching,
    outlines_of,
    partition,
    pieces_of_layers,
    seeding,
    tied_weights,
    trained_numel,
    unseeded,
)
from zeroshard.deepspeed.topology import (
    PipeDataParallelTopology,
    PipelineParallelGrid,
    ProcessTopology,
)
from zeroshard.errors import UsageError
from zeroshard.parallel.split import PipelineModel, StageModule, check_traffic
from zeroshard.session.join import join_ranks

TIED = "tied_modules"

_CLAIMS = (("pipe", ("pipeline",)), ("data", BATCH_DIMS), ("model", ("tensor",)))
"""Axis of a topology -> dimensions of the mesh."""


class LayersOfStage(StageModule):
    """Runs the layers of one stage of a :class:`PipelineModule`, which registers them."""

    def __init__(self, model: PipelineModule, pieces: Mapping[str, nn.Module]) -> None:
        super().__init__(pieces)
        self._model = weakref.ref(model)  # the model has this module, and no cycle should keep both

    def forward(self, *inputs: Any) -> Any:
        """The output of the last layer. Several inputs go to the first layer as a tuple."""
        model = self._model()
        assert model is not None
        values = tuple(map(_no_leaf, inputs))
        return model.run_layers(self.pieces, values[0] if len(values) == 1 else values)


def _no_leaf(value: Any) -> Any:
    """A tensor that the first layer may write into: autograd allows no such write into a leaf."""
    is_leaf = isinstance(value, Tensor) and value.requires_grad and value.is_leaf
    return value.clone() if is_leaf else value


class PipelineModule(PipelineModel):
    """A sequence of layers, cut into ``num_stages`` pipeline stages. This rank has one of them.

    ``layers``: each gets the output of the one before: a tensor or a tuple of tensors. ``topology``: the
    axes ``pipe``, ``data`` and ``model``; default: ``num_stages`` times data parallelism.
    ``loss_fn(outputs, labels)``: the mean loss of a micro-batch; None: the last layer returns the loss.

    ``partition_method``: ``parameters`` (trained ones; stages as equal as possible), ``uniform`` (equally
    many layers), or ``type:REGEX`` (equally many layers whose class or function has a name that matches,
    without regard to case).

    ``seed_layers``: seed the generators with ``base_seed + i`` before layer ``i`` is built, and again
    before each forward of it, with a number that depends on the micro-batch. ``seed_fn(seed)``: how;
    default: Python, numpy and torch. Without it, the first values of layers that a spec builds depend on
    the cut, because each rank draws for its own layers only.

    ``activation_checkpoint_interval``: layers in one activation checkpoint; 0: none.
    ``activation_checkpoint_func(function, *inputs)`` runs it. ``checkpointable_layers``: names of
    classes; other layers are not checkpointed. ``dynamic_shape`` has no effect: shapes may always differ
    from step to step. ``gather``, ``reduce``, ``auto_limit_nbytes``: see
    :func:`zeroshard.parallel.pipeline`.

    Collective: process groups are opened.

    Raises:
        UsageError: the arguments do not fit together or to the number of ranks; before any collective,
            the same on every rank.
        UnsupportedError: there is no such ``partition_method``.
    """

    _layer_specs: list[Any]
    _topo: ProcessTopology
    global_rank: int

    def __init__(
        self,
        layers: Iterable[Any],
        num_stages: int | None = None,
        topology: ProcessTopology | None = None,
        loss_fn: Callable[[Any, Any], Tensor] | None = None,
        seed_layers: bool = False,
        seed_fn: Callable[[int], Any] | None = None,
        base_seed: int = 1234,
        partition_method: str = "parameters",
        activation_checkpoint_interval: int = 0,
        activation_checkpoint_func: Callable[..., Any] = checkpoint,
        checkpointable_layers: list[str] | None = None,
        dynamic_shape: bool = False,
        *,
        gather: str = "micro_batch",
        reduce: str = "micro_batch",
        auto_limit_nbytes: int | None = None,
    ) -> None:
        specs = list(layers)
        check_traffic("PipelineModule", gather, reduce, auto_limit_nbytes)
        check_layers(specs, checkpointable_layers)
        join_ranks()
        info = current_rank_info()
        topology = _topology(num_stages, topology, info.world_size)
        coordinate = topology.get_coord(info.rank)
        stages, stage = topology.get_dim("pipe") or 1, getattr(coordinate, "pipe", 0)
        outlines = outlines_of(specs)
        known = {"_layer_specs": specs, "_topo": topology, "global_rank": info.rank}
        parts = self._parts_of(partition_method, stages, known, outlines, loss_fn)
        own = range(parts[stage], parts[stage + 1])
        seeded = seeding(seed_fn, base_seed) if seed_layers else unseeded
        tied, pieces = pieces_of_layers(specs, built_layers(specs, outlines, own, seeded))
        super().__init__(
            pieces, [str(at) for at in parts[1:-1]],
            tree={TIED: tied, **pieces},
            loss_fn=loss_fn, schedule="1F1B",
            gather=gather, reduce=reduce, auto_limit_nbytes=auto_limit_nbytes,
        )  # fmt: skip
        self.parts, self._num_layers = parts, len(specs)
        self._local_start, self._local_stop = own.start, own.stop
        self.num_stages, self.stage_id = stages, stage
        self.local_rank, self.world_size = info.local_rank, info.world_size
        self.seed_layers, self.seed_fn, self.base_seed = seed_layers, seed_fn, base_seed
        self.micro_offset, self.curr_layer = 0, own.start
        self.additional_losses: dict[str, Tensor] = {}  # sums over the micro-batches of a step
        self.activation_checkpoint_interval = activation_checkpoint_interval
        self.activation_checkpoint_func = activation_checkpoint_func
        self.checkpointable_layers, self.dynamic_shape = checkpointable_layers, dynamic_shape
        self.tied_weight_attrs = tied_weights(specs)
        self.mesh_source = _mesh_source(topology)
        self.returns_loss = loss_fn is None
        self._partition_method = partition_method
        self.keep(stage, stages)
        self._grid = PipelineParallelGrid(topology)
        self.world_group = comm.get_world_group()
        self._copy_tied_values()
        log_dist(f"PipelineModule: {stages} stages, from layers {parts[:-1]} on", ranks=[0])

    # ------------------------------------------------------------------ the cut

    def _parts_of(
        self,
        method: str,
        stages: int,
        known: Mapping[str, Any],
        outlines: Sequence[nn.Module | None],
        loss_fn: Any,
    ) -> list[int]:
        """What :meth:`_partition_layers` sets, which may read ``known`` attributes and ``loss_fn``.

        The constructor of ``nn.Module`` has not run yet, so a loss function that is a module cannot be
        assigned.
        """
        self.__dict__.update(known, _outlines=outlines, loss_fn=loss_fn)
        self._partition_layers(method=method)
        del self.__dict__["_outlines"], self.__dict__["loss_fn"]
        return checked_parts(self.__dict__.pop("parts", None), stages, len(self._layer_specs))

    def _partition_layers(self, method: str = "uniform") -> None:
        """Set ``parts``: the first layer of each stage, and the number of layers.

        The same on all ranks.
        """
        stages = self._topo.get_dim("pipe") or 1
        self.parts = partition(self._layer_specs, self._count_layer_params, stages, method)

    def _count_layer_params(self) -> list[int]:
        """The trained parameters of each layer, as elements."""
        outlines = self.__dict__.get("_outlines") or outlines_of(self._layer_specs)
        return [trained_numel(layer) for layer in outlines]

    def _find_layer_type(self, layername: str) -> list[int]:
        """The layers whose class or function has a name that matches the expression."""
        return [at for at, hit in enumerate(matching(self._layer_specs, layername)) if hit]

    def _set_bounds(self, start: int | None = None, stop: int | None = None) -> None:
        """Nothing: the bounds of this rank's stage are in ``parts``."""

    # ------------------------------------------------------------------ what a stage runs

    def run_layers(self, pieces: Mapping[str, nn.Module], value: Any) -> Any:
        """The output of the last of some layers in a row; names are numbers of layers."""
        self.micro_offset += 1
        micro, layers = self.micro_offset + 1, list(pieces.items())
        interval = self.activation_checkpoint_interval or len(layers)
        for begin in range(0, len(layers), interval):
            some = layers[begin : begin + interval]
            run = self._run_of(some, micro)
            if self.activation_checkpoint_interval and self._is_checkpointable(some):
                inputs = value if isinstance(value, tuple) else (value,)
                value = self._checkpoint_for(inputs)(run, *inputs)
            else:
                value = run(value)
        return value

    def _checkpoint_for(self, inputs: tuple[Any, ...]) -> Callable[..., Any]:
        """The function that checkpoints. The reentrant kind gives parameters a gradient only if an input
        needs one, and the inputs of the model need none: they get the other kind."""
        chosen = self.activation_checkpoint_func
        needs = any(isinstance(value, Tensor) and value.requires_grad for value in inputs)
        return non_reentrant_checkpoint if chosen is checkpoint and not needs else chosen

    def _run_of(self, layers: Sequence[tuple[str, nn.Module]], micro: int) -> Callable[..., Any]:
        """A function of the inputs, which can be repeated. ``micro``: number of this forward."""
        seed = set_random_seed if self.seed_fn is None else self.seed_fn

        def run(*inputs: Any) -> Any:
            value = inputs[0] if len(inputs) == 1 else inputs
            for name, layer in layers:
                self.curr_layer = int(name)
                if self.seed_layers:
                    seed(self.base_seed * micro + self.curr_layer)
                value = layer(value)
            return value

        return run

    def _is_checkpointable(self, layers: Sequence[tuple[str, nn.Module]]) -> bool:
        if self.checkpointable_layers is not None:
            return all(class_of(layer) in self.checkpointable_layers for _, layer in layers)
        named = (self._parameters_of(name, layer) for name, layer in layers)
        return any(next(iter(params), None) is not None for params in named)

    def forward(self, *inputs: Any, stage: int | None = None) -> Any:
        """Run this rank's stage."""
        return super().forward(*inputs, stage=self.stage_id if stage is None else stage)

    @property
    def forward_funcs(self) -> list[Callable[..., Any]]:
        """The layers of this rank."""
        assert self.kept is not None
        return [layer for stage in self.kept.values() for layer in stage.pieces.values()]

    # ------------------------------------------------------------------ how the model is cut

    def whole(self) -> PipelineModel:
        """See :meth:`PipelineModel.whole`. All layers are built again."""
        specs = self._layer_specs
        built = built_layers(specs, outlines_of(specs), range(len(specs)), lambda _at: None)
        tied, pieces = pieces_of_layers(specs, built)
        return PipelineModel(
            pieces,
            [names[0] for names in self.stages[1:]],
            tree={TIED: tied, **pieces},
            loss_fn=self.loss_fn,
            schedule=self.schedule,
            gather=self.gather,
            reduce=self.reduce,
        )

    def keep(self, rank: int, ranks: int) -> None:
        """See :meth:`PipelineModel.keep`. Tied modules that no own layer uses are deleted, too."""
        super().keep(rank, ranks)
        assert self.kept is not None
        used = {
            id(m) for stage in self.kept.values() for p in stage.pieces.values() for m in held(p)
        }
        tied = self.get_submodule(TIED)
        for key in [key for key, module in tied.named_children() if id(module) not in used]:
            del tied._modules[key]

    def _copy_tied_values(self) -> None:
        """Give modules that are tied over stages the values that the first of these stages has."""
        users: dict[str, list[int]] = {}
        for at, spec in enumerate(self._layer_specs):
            if isinstance(spec, TiedLayerSpec):
                users.setdefault(spec.key, []).append(bisect_right(self.parts, at) - 1)
        for key, stages in users.items():
            first, *others = (self._grid.stage_to_global(s) for s in sorted(set(stages)))
            if not others or self.global_rank not in (first, *others):
                continue
            module = self.get_submodule(f"{TIED}.{key}")
            for tensor in (*module.parameters(), *module.buffers()):
                if tensor.is_meta:
                    continue  # the engine fills it, by its name
                if self.global_rank != first:
                    comm.recv(tensor.detach(), src=first)
                for other in others if self.global_rank == first else ():
                    comm.send(tensor.detach(), dst=other)

    def schedule_for(self, ranks: int, micro_batches: int) -> str:
        """1F1B; GPipe if there are fewer micro-batches than stages, where both wait equally long."""
        return "GPipe" if micro_batches < ranks else self.schedule

    def _stage_module(self, pieces: Mapping[str, nn.Module]) -> StageModule:
        return LayersOfStage(self, pieces)

    def _parameters_of(self, name: str, piece: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
        yield from super()._parameters_of(name, piece)
        names = {id(module): key for key, module in self.get_submodule(TIED).named_children()}
        for module in held(piece):
            yield from super()._parameters_of(f"{TIED}.{names[id(module)]}", module)

    # ------------------------------------------------------------------ DeepSpeed's names

    def topology(self) -> ProcessTopology:
        """The grid of all ranks."""
        return self._topo

    def mpu(self) -> PipelineParallelGrid:
        """This rank's place in the topology, and its process groups."""
        return self._grid

    def num_pipeline_stages(self) -> int:
        """The number of stages."""
        return self.num_stages

    def set_checkpoint_interval(self, interval: int) -> None:
        """Set the number of layers in one activation checkpoint. 0: no checkpoints."""
        if isinstance(interval, bool) or not isinstance(interval, int) or interval < 0:
            raise UsageError(
                f"set_checkpoint_interval({interval!r}): give a number of layers, or 0."
            )
        self.activation_checkpoint_interval = interval

    def set_checkpointing(self, interval: int, *, reentrant: bool) -> None:
        """What the keys of the section ``pipeline`` mean: see :meth:`set_checkpoint_interval`."""
        self.set_checkpoint_interval(interval)
        if not reentrant:
            self.activation_checkpoint_func = non_reentrant_checkpoint

    def allreduce_tied_weight_gradients(self) -> None:
        """Nothing: the engine adds the gradients of tied weights."""

    def get_additional_losses(self) -> Mapping[str, Tensor] | None:
        """None: the loss function gives one loss.

        A derived class may return others by name, for the log. Every stage gives the same names. Values
        are those of the last forward, and count on the last stage.
        """
        return None

    def loss_of(self, output: Any, labels: Any) -> Tensor:
        """See :meth:`PipelineModel.loss_of`. Notes additional losses."""
        loss = super().loss_of(output, labels)
        self.note_additional_losses()
        return loss

    def note_additional_losses(self) -> None:
        """Add those of the last forward to the sums of the step."""
        for name, value in (self.get_additional_losses() or {}).items():
            held = self.additional_losses.get(name)
            detached = value.detach().double().view(())
            self.additional_losses[name] = detached if held is None else held + detached


# ---------------------------------------------------------------------- arguments


def _topology(
    num_stages: int | None, topology: ProcessTopology | None, world_size: int
) -> ProcessTopology:
    """The given topology, or that of ``num_stages``."""
    if topology is None:
        if isinstance(num_stages, bool) or not isinstance(num_stages, int) or num_stages < 1:
            raise UsageError(
                f"PipelineModule(num_stages={num_stages!r}): give the number of pipeline stages, at "
                "least 1, or topology=."
            )
        if world_size % num_stages:
            raise UsageError(
                f"PipelineModule(num_stages={num_stages}): {world_size} ranks were started, which cannot "
                f"be divided into pipelines of {num_stages}. Start a multiple of {num_stages} ranks."
            )
        return PipeDataParallelTopology(num_pp=num_stages, num_dp=world_size // num_stages)
    stages = topology.get_dim("pipe") or 1
    if num_stages is not None and num_stages != stages:
        raise UsageError(
            f"PipelineModule(num_stages={num_stages}), but its topology has {stages} on the axis pipe. "
            "Leave num_stages out, or make them equal."
        )
    if topology.world_size() != world_size:
        raise UsageError(
            f"the topology of PipelineModule has {topology.world_size()} ranks ({topology.axes} = "
            f"{topology.dims}), but {world_size} were started. Give sizes whose product is that number."
        )
    return topology


# ---------------------------------------------------------------------- layers


def _mesh_source(topology: ProcessTopology) -> MeshSource:
    """What the axes of the topology say about the mesh."""
    claims = (
        Claim(dims, topology.get_dim(axis) or 1, f"the axis {axis} of PipelineModule")
        for axis, dims in _CLAIMS
    )
    return MeshSource("PipelineModule", tuple(claims))
