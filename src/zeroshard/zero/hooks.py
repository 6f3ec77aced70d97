"""The module and autograd hooks of ZeroShard: when units are gathered, freed and reduced.

Module hooks are on wrapped modules only. Other hooks are on trained parameters, and on the graph nodes
that made the outputs of wrapped modules. These hooks call :class:`~zeroshard.zero.prefetch.Prefetcher`
and :class:`~zeroshard.zero.reduce.GradReducer`. No hook relies on another one having run: activation
checkpointing leaves a recomputed forward by an exception, users call submodules directly, and any step
may be abandoned. A missed hook costs memory until the end of backward and never gives a wrong value.

[Note: entering and leaving in backward]

*Vocabulary.* A *call* is one forward of a wrapped module. Backward *enters* a call when it reaches a
graph node that made one of its outputs; the module's units must be full from then on. Backward *leaves*
the call when no node of it is still to run; then the units can be freed and their gradients reduced (ADR
0012).

*Entering.* Pre-hooks are on the graph nodes that made outputs, not on the output tensors. An operation
that changes a view in place (a linear layer's output on three dimensions is a view) gives the view a new
path to its base, without the view's old node and its hooks. Hooks on tensors would then be lost, and
backward would read memory that is freed or being filled. The base's node is on every path, so it is
hooked as well.

*Leaving.* Autograd numbers nodes in the order of recording and runs, of those that are ready, the one
with the greatest number. So when node ``n`` runs, every call that began after ``n`` was recorded is over.
Inputs of modules stay the program's own tensors. A view put in front of each input would also show when
backward leaves, but gradients of several uses inside the module would be added at the view first, and
rounded differently from plain PyTorch.

*Several forwards before a backward.* Calls of different forwards of the root may be open at once. A
backward runs the nodes of the latest forward that it reaches before those of earlier ones. So the first
call that it enters tells which forwards are no part of it: the later ones, and in a pipeline all others.
Their calls are set aside until a backward reaches their forward. Without this, modules would stay full
for them, or count as left before backward has reached them.

[Note: order of collectives] Every rank must issue the same collectives in the same order, whatever it ran
(ADR 0004). So a module that backward has left is finished even if gradients are missing: they count as
zeros. Without this, a rank that skipped an expert would start the reduction only after further
all-gathers, and the other ranks before them. The ranks would wait for each other without end.
"""

from __future__ import annotations

import dataclasses
import weakref
from bisect import insort
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import Node
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

from zeroshard.errors import ShardedAccess, UsageError
from zeroshard.zero import functorch, sharded_parameter
from zeroshard.zero.compiled_blocks import CompiledForward
from zeroshard.zero.gradients import GradBuffer
from zeroshard.zero.prefetch import Prefetcher, WrappedModule
from zeroshard.zero.program_hooks import ProgramHooks, has_others, put_first
from zeroshard.zero.reduce import BackwardKind, GradReducer
from zeroshard.zero.saved_views import SavedViews, forget_views

IN_FORWARD = -1
"""The number of the running graph task, if there is none."""

graph_task: Callable[[], int] = torch._C._current_graph_task_id
"""The number of the backward that runs on this thread. A backward inside a backward has its own."""


def in_backward() -> bool:
    """Whether autograd is running on this thread. (Checkpointing recomputes forwards inside backward.)"""
    return graph_task() != IN_FORWARD


@dataclasses.dataclass(eq=False, slots=True)
class _Call:
    """One forward of a wrapped module, until backward has left it."""

    wrapped: WrappedModule
    recorded_in: int  # the graph task that recomputed it, or IN_FORWARD
    begin: int  # nodes recorded by the call have this number or a greater one
    forward: int  # the number of the root's forward that it belongs to
    entered: bool = False  # backward has reached one of its outputs
    open: bool = True  # backward has not left it
    counts: list[int] | None = None  # see ``SavedViews.begin``
    saved: list[int] = dataclasses.field(default_factory=list)  # views of each unit in the graph


class StepHooks:
    """The hooks of one engine's wrapped modules. ``remove`` detaches all of them.

    ``kind_of_backward()`` is called once per backward.
    ``on_forward_begin()`` is called at each outermost forward. ``on_backward_begin(landed)`` returns
    whether the backward counts as one of a micro-batch. It is called with False when backward begins. If
    it returns False, it is called with True when a gradient is ready: ``torch.autograd.grad`` accumulates
    no gradient, so its backward does not count. ``on_abandon()`` is called when the gradients of the
    running step were lost with a backward that an exception ended, ``on_dropped()`` when the program
    dropped all of them.

    ``is_pipeline``: every backward is that of one forward of the root, and ``check_tree`` is called once
    per step instead of at each forward. ``compiles``: compile the forward of wrapped modules.
    """

    def __init__(
        self,
        prefetcher: Prefetcher,
        reducer: GradReducer,
        *,
        kind_of_backward: Callable[[], BackwardKind],
        on_backward_begin: Callable[[bool], bool],
        on_forward_begin: Callable[[], None],
        on_abandon: Callable[[], None],
        on_dropped: Callable[[], None],
        compiles: bool = False,
    ) -> None:
        self._compiles = compiles
        self._compiled: list[CompiledForward] = []
        self.prefetcher = prefetcher
        self.reducer = reducer
        self.kind_of_backward = kind_of_backward
        self.on_backward_begin = on_backward_begin
        self.on_forward_begin = on_forward_begin
        self.on_abandon = on_abandon
        self.on_dropped = on_dropped
        self.running_backward = False
        self.counted = False  # the running backward is known to be that of a micro-batch
        self.creates_graph = False
        self.keeps_graph = False  # what the running backward reads stays in the graph
        self._root_call: _Call | None = None  # of the last forward with gradients
        self.forward_depth = 0
        self.is_pipeline = False
        self.input_sizes: torch.Size | None = None  # of the root's last forward with gradients
        self._forward = 0  # the number of the last forward of the root
        self._is_reached = False  # the running backward has entered a call
        self._aside: list[
            _Call
        ] = []  # open calls of forwards that are no part of the last backward
        self._task = IN_FORWARD  # the outermost backward that runs
        self._open_calls: dict[int, list[_Call]] = defaultdict(list)  # by ``recorded_in``, in order
        self._buffers = {id(buffer.unit): buffer for buffer in reducer.buffers}
        # For graph nodes and parameters, which must not keep an engine alive.
        self._proxy = me = weakref.proxy(self)
        reducer.on_dropped = lambda: me.on_dropped()  # noqa: PLW0108 - looks it up weakly
        self.saved_views = SavedViews(
            prefetcher.wrapped_modules, lambda *read: StepHooks._before_backward(me, *read)
        )
        self.on_modules: list[RemovableHandle] = []
        self.on_params: list[RemovableHandle] = []
        self._on_state: list[RemovableHandle] = []
        # By number of the gradient hook: module, buffer and slot of its parameter.
        self._grad_hooks: list[tuple[WrappedModule, GradBuffer, int]] = []
        # By id of a buffer: the handles of its gradient hooks, and the hooks.
        self._hooks_of: dict[int, list[tuple[RemovableHandle, Callable[..., None]]]] = {}
        self.program_hooks = ProgramHooks()
        self._record_tree()
        self.attach()

    # ------------------------------------------------------------------ attaching

    def attach(self) -> None:
        """Attach all hooks, and replace those that are attached."""
        self.remove()
        self._grad_hooks.clear()
        self.program_hooks = ProgramHooks()
        me, buffers = weakref.ref(self), self._buffers  # a model must not keep an engine alive
        for wrapped in self.prefetcher.wrapped_modules:
            before, after = self._module_hooks(wrapped)
            pre = _bound(me, before, wrapped)
            self.on_modules.append(
                wrapped.module.register_forward_pre_hook(pre, with_kwargs=True, prepend=True)
            )
            root = wrapped is self.prefetcher.root
            if after is not None:
                post = _bound(me, after, wrapped)
                self.on_modules.append(wrapped.module.register_forward_hook(post, always_call=root))
            if self._compiles and not root:
                self._compiled.append(CompiledForward(wrapped.module))
        root_module = self.prefetcher.root.module
        self._on_state.append(root_module.register_state_dict_post_hook(_release_values))
        for wrapped in self.prefetcher.wrapped_modules:
            for unit in wrapped.units:
                if (buffer := buffers.get(id(unit))) is not None:
                    buffer.is_unwatched = False
                    mine = self._hooks_of[id(buffer)] = []
                    for index, param in enumerate(unit.params):
                        ready = partial(_grad_ready, me, len(self._grad_hooks))
                        self._grad_hooks.append((wrapped, buffer, index))
                        handle = param.register_post_accumulate_grad_hook(ready)
                        mine.append((handle, ready))
                        table = handle.hooks_dict_ref()
                        assert table is not None
                        self.program_hooks.add(table, handle.id, buffer, index)
                    self.on_params += [handle for handle, _ in mine]

    def _module_hooks(
        self, wrapped: WrappedModule
    ) -> tuple[Callable[..., Any], Callable[..., Any] | None]:
        if wrapped is self.prefetcher.root:
            return StepHooks._before_root, StepHooks._after_root
        if all(unit.resident for unit in wrapped.units):
            return StepHooks._before_resident, None
        return StepHooks._before_forward, StepHooks._after_forward

    def watch_gradients(
        self, buffers: Iterable[GradBuffer], wanted: bool, *, at_end: bool = False
    ) -> None:
        """Run the gradient hooks of these buffers in the next backward, or none if autograd can add all
        gradients in place. To be called before the backward. ``at_end``: nor if there are none to add to,
        and the end of backward can take them.

        A hook takes two to four microseconds. Hooks of the program keep their order.
        """
        for buffer in buffers:
            unwatched = not wanted and not self._is_hooked(buffer)
            unwatched = unwatched and (buffer.lend_all() or (at_end and buffer.can_take_at_end()))
            if unwatched == buffer.is_unwatched:
                continue
            buffer.is_unwatched = unwatched
            for handle, hook in self._hooks_of[id(buffer)]:
                table = handle.hooks_dict_ref()
                if table is None:
                    continue
                if unwatched and len(table) == 1:
                    del table[handle.id]
                elif unwatched or handle.id in table:
                    table[handle.id] = _nothing if unwatched else hook
                else:
                    put_first(table, handle.id, hook)  # others were added after it

    def _is_hooked(self, buffer: GradBuffer) -> bool:
        """Whether the program has hooks that want its gradients."""
        tables = [(handle.hooks_dict_ref(), handle.id) for handle, _ in self._hooks_of[id(buffer)]]
        return any(table is not None and has_others(table, own) for table, own in tables)

    def note_forwards(self, note: Callable[[int], None]) -> None:
        """Call ``note(place)`` before every forward of a wrapped module; places count from 1."""
        for place, wrapped in enumerate(self.prefetcher.wrapped_modules, start=1):

            def noting(_module: nn.Module, _args: Any, at: int = place) -> None:
                note(at)

            self.on_modules.append(wrapped.module.register_forward_pre_hook(noting))

    def remove(self) -> None:
        """Detach every hook."""
        for handle in (*self.on_modules, *self.on_params, *self._on_state):
            handle.remove()
        for compiled in self._compiled:
            compiled.remove()
        self.on_modules, self.on_params, self._on_state, self._compiled = [], [], [], []

    # ------------------------------------------------------------------ forward

    def _before_root(
        self,
        wrapped: WrappedModule,
        _module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        if functorch.innermost() is not None:
            self._before_transformed(wrapped)
            return
        if in_backward():
            self._begin_backward()
            self.prefetcher.unshard(wrapped, forward=False)
            return
        self.recover()
        if self.forward_depth == 0:
            if not self.is_pipeline:
                self.check_tree()
                if torch.is_grad_enabled():
                    first = kwargs.get("input_ids", args[0] if args else None)
                    self.input_sizes = first.shape if isinstance(first, Tensor) else None
            self.on_forward_begin()
            self._forward += 1
            self.prefetcher.begin_forward()
            self._root_call = None
            self.saved_views.stop()
            if torch.is_grad_enabled() and wrapped.sharded:
                self._root_call = call = _Call(wrapped, IN_FORWARD, 0, self._forward)
                call.counts = self.saved_views.begin(wrapped, call)
        self.forward_depth += 1

    def _before_transformed(self, wrapped: WrappedModule) -> None:
        """Unshard for a forward under ``torch.func``, which only needs the values.

        The module stays full until the next plain forward or the end of backward, because no hook runs
        when the transform has used the values.
        """
        for name, param in wrapped.module.named_parameters():
            given = functorch.unwrapped(param)
            if given is not param and isinstance(given, sharded_parameter.ShardedParameter):
                raise ShardedAccess(
                    f"parameter {name!r} was passed to torch.func while it is sharded, so the "
                    "transform would compute without its values. Pass full values, {name: "
                    "p.detach() for name, p in model.named_parameters()}, or run the transform "
                    "inside GatheredParameters."
                )
        with functorch.suspended():
            self.prefetcher.unshard(wrapped, forward=False)

    def _record_tree(self) -> None:
        """Record which parameters and modules the module tree contains."""
        modules = list(self.prefetcher.root.module.modules())
        self._params = _Entries([module._parameters for module in modules])
        self._modules = _Entries([module._modules for module in modules])

    def check_tree(self) -> None:
        """Refuse parameters that came into the model after the engine was built.

        They would never be reduced or updated. Inside ``torch.func.functional_call``, and while gradients
        are disabled, anything may be in the model. A tensor that is no parameter may always be there:
        nobody expects it to be trained, and it hands its gradient to what made it.

        Raises:
            UsageError: such a parameter is there.
        """
        if not torch.is_grad_enabled():
            return
        if self._params.are_same() and self._modules.are_same():
            return
        stayed = self._params.are_there()
        if (
            stayed
            and self._params.are_all()
            and self._modules.are_there()
            and self._modules.are_all()
        ):
            return
        if not functorch.in_functional_call():
            self._refuse_strangers(stayed=stayed)

    def _refuse_strangers(self, *, stayed: bool) -> None:
        """Refuse parameters without a unit; frozen ones only if some of the engine's have gone."""
        named = self.prefetcher.root.module.named_parameters()
        strangers = [
            name
            for name, param in named
            if sharded_parameter.owner_of(param) is None
            and isinstance(param, nn.Parameter)
            and (param.requires_grad or not stayed)
        ]
        if strangers:
            raise UsageError(
                f"parameter {strangers[0]!r} (and {len(strangers) - 1} more) was added to the "
                "model after the engine was built, for instance by load_state_dict(assign=True), "
                "pruning, resizing, a new adapter or head, or module.to('meta'). It would never "
                "be trained. Change the model first, then build the engine; load values with "
                "load_state_dict() inside GatheredParameters. For a forward with other tensors, call "
                "torch.func.functional_call."
            )
        if not stayed:
            return  # tensors that are no parameters, for one forward
        self._record_tree()

    def _after_root(
        self, wrapped: WrappedModule, _module: nn.Module, _args: Any, output: Any
    ) -> Any:
        if functorch.innermost() is not None or in_backward():
            return output
        output = _copy_own_views(wrapped, output)
        self.forward_depth = max(0, self.forward_depth - 1)
        if self.forward_depth:
            return output
        if (call := self._root_call) is not None:
            call.saved = self.saved_views.end(wrapped, call, call.counts)
        self.saved_views.stop()
        self.prefetcher.end_forward()
        if self._watch_outputs(wrapped, output):
            if not self.prefetcher.keeps_root:
                wrapped.reshard()
        elif not _may_have_graph(output):
            self.prefetcher.reshard_all()
        return output

    def _before_resident(
        self,
        wrapped: WrappedModule,
        _module: nn.Module,
        _args: tuple[Any, ...],
        _kwargs: dict[str, Any],
    ) -> None:
        if functorch.innermost() is None:
            wrapped.wait_for_unshard()
            return
        with functorch.suspended():
            wrapped.wait_for_unshard()

    def _before_forward(
        self,
        wrapped: WrappedModule,
        _module: nn.Module,
        _args: tuple[Any, ...],
        _kwargs: dict[str, Any],
    ) -> None:
        if functorch.innermost() is not None:
            self._before_transformed(wrapped)
            return
        task = graph_task()
        backward = task != IN_FORWARD
        if backward:
            self._begin_backward()
            self._leave_recomputed()
            node = torch._C._current_autograd_node()
            if node is not None and task == self._task:
                # Before the all-gather: a rank that has all gradients reduced them before it, too.
                self._leave_after(node._sequence_nr(), IN_FORWARD)
        self.prefetcher.unshard(wrapped, forward=not backward)
        if not torch.is_grad_enabled() or (backward and wrapped.open_calls):
            wrapped.running.append(None)  # no graph; or recomputed, and the first run is recorded
            return
        call = _Call(wrapped, task, torch._C._autograd._get_sequence_nr(), self._forward)
        self._open_calls[call.recorded_in].append(call)
        call.counts = self.saved_views.begin(wrapped, call)
        wrapped.open_calls += 1
        wrapped.running.append(call)

    def _after_forward(
        self, wrapped: WrappedModule, _module: nn.Module, _args: Any, output: Any
    ) -> Any:
        if functorch.innermost() is not None:
            return output
        output = _copy_own_views(wrapped, output)
        call = wrapped.running.pop() if wrapped.running else None
        if call is not None:
            call.saved = self.saved_views.end(wrapped, call, call.counts)
        visible = self._watch_outputs(wrapped, output, call)
        if in_backward():
            return output  # recomputed: backward reads the parameters next
        kept = self.prefetcher.keeps_for_backward(wrapped) if visible else _may_have_graph(output)
        if not kept:
            wrapped.reshard()
        return output

    def _watch_outputs(
        self, wrapped: WrappedModule, output: Any, call: _Call | None = None
    ) -> bool:
        """Hook the graph nodes that made the outputs, to unshard when backward reaches one.

        False: no output needs a gradient.
        """
        if not torch.is_grad_enabled():
            return False
        begin = call.begin if call else 0
        visible = False
        nodes: dict[Node, int] = {}
        for tensor in tensors_in(output):
            if not tensor.requires_grad:
                continue
            visible = True
            for part in (tensor, tensor._base):
                node = None if part is None else part.grad_fn
                if node is not None and (number := node._sequence_nr()) >= begin:
                    nodes[node] = number  # a lower number: the node made an input that is passed on
        me = self._proxy
        for node, number in nodes.items():

            def enter(_grads: Any, number: int = number) -> None:
                me._before_backward(wrapped, call, number)

            node.register_prehook(enter)
        return visible

    # ------------------------------------------------------------------ backward

    def recover(self) -> bool:
        """Drop the gradients of a backward that an exception ended. False: there was none."""
        if not self.running_backward or in_backward():
            return False
        self.running_backward = False
        self.prefetcher.keep_for_new_graph(False)
        self.program_hooks.end()
        self.reducer.abandon()
        self.watch_gradients(self.reducer.buffers, True)
        self.on_abandon()
        return True

    def settle(self) -> bool:
        """:meth:`recover`, and take over what the program did to ``.grad``."""
        recovered = self.recover()
        self.reducer.settle()
        return recovered

    def _begin_backward(self, landed: Tensor | None = None) -> None:
        if self.running_backward:
            return
        self.reducer.settle(hides=True, landed=landed)
        self.running_backward = True
        self.program_hooks.begin()
        self._is_reached = False
        self._task = graph_task()
        self.keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph()
        self.creates_graph = torch.is_grad_enabled()  # a second backward will read the parameters
        self.counted = self.on_backward_begin(False)
        self.reducer.begin_backward(self.kind_of_backward())
        for wrapped in self.prefetcher.wrapped_modules:
            wrapped.missing_units = wrapped.trainable_units
        Variable._execution_engine.queue_callback(self._end_backward)  # type: ignore[attr-defined]

    def _before_backward(self, wrapped: WrappedModule, call: _Call | None, number: int) -> None:
        """Enter ``call``: backward is about to run node ``number``, which made one of its outputs."""
        if not self.running_backward:
            self._begin_backward()
        self._leave_recomputed()
        if call is not None:
            if not self._is_reached and call.recorded_in == IN_FORWARD:
                self._is_reached = True
                if self._aside or self.is_pipeline or call.forward != self._forward:
                    self._set_aside(call.forward)
            self._leave_after(number, call.recorded_in)
            if not call.open:  # another backward through a graph that was kept
                wrapped.open_calls += 1
                insort(self._open_calls[call.recorded_in], call, key=lambda other: other.begin)
            call.entered = call.open = True
        self.prefetcher.unshard(wrapped, forward=False, reads=wrapped.is_read_in_backward)

    def _take(self, number: int) -> None:
        """Take the gradient of a parameter out of its ``.grad``."""
        wrapped, buffer, index = self._grad_hooks[number]
        param = buffer.unit.params[index]
        if number in self.program_hooks.guarded:
            self.program_hooks.check(number, param)
        if buffer.take_grad(index, param):
            wrapped.missing_units -= 1
            if wrapped.missing_units <= 0:
                self._release(wrapped)  # before the reduction, which needs memory
            self.reducer.finish_buffer(buffer)

    def _set_aside(self, latest: int) -> None:
        """Keep open only calls that the running backward can reach; ``latest`` is its latest forward.

        See [Note: entering and leaving in backward].
        """
        counted = self._open_calls[IN_FORWARD]
        reachable: list[_Call] = []
        aside: list[_Call] = []
        for call in sorted([*counted, *self._aside], key=lambda call: call.begin):
            is_earlier = call.forward < latest and not self.is_pipeline
            (reachable if is_earlier or call.forward == latest else aside).append(call)
        for call in counted:
            call.wrapped.open_calls -= 1
        for call in reachable:
            call.wrapped.open_calls += 1
        self._open_calls[IN_FORWARD], self._aside = reachable, aside

    def _leave_after(self, number: int, recorded_in: int) -> None:
        """Leave the calls that began after node ``number`` was recorded. That node runs now.

        Only calls recorded in graph task ``recorded_in``: each thread numbers its nodes separately.
        """
        calls = self._open_calls[recorded_in]
        while calls and calls[-1].begin > number:
            self._module_backward_done(calls.pop())

    def _leave_recomputed(self) -> None:
        """Leave the calls that this backward recomputed: their backward ran inside one of its nodes."""
        calls = self._open_calls.get(graph_task())
        while calls and any(call.entered for call in calls):
            self._module_backward_done(calls.pop())

    def _module_backward_done(self, call: _Call) -> None:
        """Note that backward has left ``call``. See [Note: order of collectives].

        After the module's last open call, gradients that have not arrived will not arrive.
        """
        wrapped = call.wrapped
        wrapped.open_calls -= 1
        call.open = call.entered = False
        if not self.keeps_graph:
            forget_views(wrapped.sharded, call.saved)
        if not self.running_backward or wrapped.open_calls:
            return
        wrapped.missing_units = 0
        for unit in wrapped.units:
            if (buffer := self._buffers.get(id(unit))) is not None:
                self.reducer.finish_buffer(buffer)
        self._release(wrapped)

    def _release(self, wrapped: WrappedModule) -> None:
        """Reshard the module if all its gradients have arrived and backward has left all its calls.

        Some modules are not read any more when their gradients have arrived. They need not be left.
        """
        if not wrapped.sharded:
            return
        through = wrapped.missing_units <= 0 and (
            not wrapped.open_calls or wrapped.is_read_once_in_backward
        )
        if through and wrapped is not self.prefetcher.root and not self.creates_graph:
            wrapped.reshard()

    def _end_backward(self) -> None:
        if not self.running_backward:
            return
        for number in [*self.program_hooks.late]:
            self._take(number)
        self.program_hooks.end()
        self.reducer.end_backward()
        if not self.is_pipeline:  # which makes its step before the program goes on
            self.reducer.show(counted=self.counted)
        # Calls at the start of forward are still open: no node was recorded before them.
        for calls in self._open_calls.values():
            for call in [call for call in calls if call.entered]:
                calls.remove(call)
                self._module_backward_done(call)
        if (root := self._root_call) is not None and not self.keeps_graph:
            forget_views(root.wrapped.sharded, root.saved)
            self._root_call = None
        self.prefetcher.keep_for_new_graph(self.creates_graph)
        if not self.creates_graph:
            self.prefetcher.reshard_all()
        self.running_backward = False

    def forget_calls(self) -> None:
        """Drop calls whose backward did not run. To be called at the end of a step."""
        self._open_calls.clear()
        self._aside.clear()
        self.prefetcher.keep_for_new_graph(False)
        for wrapped in self.prefetcher.wrapped_modules:
            wrapped.open_calls = 0
            wrapped.running.clear()


class _Entries:
    """The entries of some modules' tables at one time, to be compared with those of later."""

    def __init__(self, tables: Sequence[dict[str, Any]]) -> None:
        # Those of a scripted module are not dicts, and cannot change.
        self._tables = tables = [table for table in tables if isinstance(table, dict)]
        self._found = [(t, leaf, x) for t in tables for leaf, x in t.items() if x is not None]
        self._count = sum(map(len, tables))
        self._ids = self._ids_now()

    def _ids_now(self) -> list[int]:
        return list(map(id, chain.from_iterable(map(dict.values, self._tables))))

    def are_same(self) -> bool:
        """Whether no entry was added, removed or replaced. Fast, since it runs in every forward."""
        return (
            self._ids_now() == self._ids
        )  # the entries are alive in ``_found``, so ids are unique

    def are_there(self) -> bool:
        """Whether every recorded entry is where it was."""
        return all(table.get(leaf) is found for table, leaf, found in self._found)

    def are_all(self) -> bool:
        """Whether the tables have no further entries."""
        return sum(map(len, self._tables)) == self._count


_frame_callback: Callable[[], object] = getattr(
    torch._C._dynamo.eval_frame, "get_eval_frame_callback", lambda: _frame_callback
)
"""What Dynamo does to frames of this thread; None: nothing. Not None if torch does not tell."""


class _Hook:
    """A module hook that ``torch.compile`` does not trace: graphs break at wrapped modules only.

    In a copied or unpickled module it does nothing, since the copy belongs to no engine.
    """

    def __init__(self, hook: Callable[..., Any]) -> None:
        self._hook = hook
        self._disabled = torch._dynamo.disable(hook)

    def __call__(self, *args: Any) -> Any:
        # The first is True where Dynamo traces this line. The wrapper costs three microseconds.
        if torch.compiler.is_dynamo_compiling() or _frame_callback() is not None:
            return self._disabled(*args)
        return self._hook(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, (_nothing,)


_ENGINE_DELETED = (
    "the model runs, but its engine was deleted without close(), and with it the values of the "
    "parameters. Keep the engine as long as the model is used, or close() it first."
)


def _nothing(*_: Any) -> None:
    """What a hook does in a copy of its module: nothing."""


def _bound(me: weakref.ref[StepHooks], method: Callable[..., Any], wrapped: WrappedModule) -> _Hook:
    def hook(*args: Any) -> Any:
        hooks = me()
        if hooks is None:
            raise UsageError(_ENGINE_DELETED)
        return method(hooks, wrapped, *args)

    return _Hook(hook)


def _release_values(
    _module: nn.Module, state: dict[str, Any], _prefix: str, _metadata: dict[str, Any]
) -> None:
    """Make the values of a ``state_dict`` ordinary tensors, which the program may write."""
    for name, value in state.items():
        state[name] = sharded_parameter.without_guard(value)


def _grad_ready(me: weakref.ref[StepHooks], number: int, param: nn.Parameter) -> None:
    """The gradient hook of every parameter; ``number`` tells which one it is.

    It refers to its buffer by number only. The garbage collector does not see what a parameter's hooks
    refer to, so a direct reference would leak.
    """
    hooks = me()
    if hooks is None:
        raise UsageError(_ENGINE_DELETED)
    is_first = not hooks.running_backward
    if is_first:
        hooks._begin_backward(param)
    if not hooks.counted:
        hooks.counted = hooks.on_backward_begin(True)
    if is_first and number in hooks.program_hooks.guarded:
        hooks.program_hooks.delay(number, param)
    else:
        hooks._take(number)


def tensors_in(tree: Any) -> Iterable[Tensor]:
    """The tensors in a module's output, also in nested lists, mappings and dataclasses."""
    return (tree,) if isinstance(tree, Tensor) else _tensors_inside(tree)


def _tensors_inside(tree: Any) -> Iterator[Tensor]:
    if isinstance(tree, (list, tuple, set)):
        for item in tree:
            yield from tensors_in(item)
    elif isinstance(tree, Mapping):
        for item in tree.values():
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for field in dataclasses.fields(tree):
            yield from tensors_in(getattr(tree, field.name))


def _copy_own_views(wrapped: WrappedModule, output: Any) -> Any:
    """The output with copies of views of the module's own parameters (``self.latents.expand(...)``).

    Such a view is valid only while the module is full, and the output is used after that.
    """
    storage_ids = wrapped.storage_ids
    if not storage_ids or type(output) is Tensor:
        return output.clone() if storage_ids and _is_view_in(storage_ids, output) else output
    if not any(_is_view_in(storage_ids, tensor) for tensor in tensors_in(output)):
        return output

    def copied(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.clone() if _is_view_in(storage_ids, value) else value
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            changed = {f.name: apart(getattr(value, f.name)) for f in dataclasses.fields(value)}
            return dataclasses.replace(value, **changed)
        return value

    def apart(tree: Any) -> Any:
        return tree_map(copied, tree)

    return apart(output)


def _is_view_in(storage_ids: Collection[int], tensor: Tensor) -> bool:
    if type(tensor) is not Tensor and isinstance(tensor, nn.Parameter):
        return False  # a parameter itself raises or gathers when it is read while sharded
    return torch._C._has_storage(tensor) and tensor.untyped_storage()._cdata in storage_ids


def _may_have_graph(output: Any) -> bool:
    """Whether an output without tensors may hide a graph, in an object of a class that is not known."""
    if not torch.is_grad_enabled() or output is None:
        return False
    if isinstance(output, (Tensor, int, float, bool, str)):
        return False
    return not any(True for _ in tensors_in(output))
