"""When do gathering and reducing happen? The only module and autograd hooks of ZeroShard.

Hooks sit at sites, never on every module, and only call :class:`Gatherer` and :class:`GradReducer`. No
hook counts on another one having run: activation checkpointing leaves a recomputed forward by an
exception, users call submodules directly, and any step may be abandoned. What a missed hook costs is
memory until the end of backward, never a wrong value.

[Note: entering and leaving in backward] Hooks stand on the *nodes* that made a site's outputs, not on the
output tensors. An operation that changes a view in place (a linear layer's output on three dimensions is
a view) gives it a new path to its base, without the view's old node and the hooks on it. The base's node
is part of every path.

Autograd numbers nodes as they are recorded and runs, of those that are ready, the one with the greatest
number. So when node ``n`` runs, every call that began after ``n`` is over. Inputs stay the program's own
tensors: a view in front of a site would add up the gradients of the uses inside first, and round
differently from plain PyTorch. (ADR 0012)
"""

from __future__ import annotations

import dataclasses
import weakref
from bisect import insort
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import Node
from torch.utils._pytree import tree_map
from torch.utils.hooks import RemovableHandle

from zeroshard.errors import ShardedAccess, UsageError
from zeroshard.memory import storage
from zeroshard.zero import functorch, sharded_parameter
from zeroshard.zero.gradients import GradBuffer
from zeroshard.zero.prefetch import Prefetcher, WrappedModule
from zeroshard.zero.reduce import GradReducer
from zeroshard.zero.unit import Unit

IN_FORWARD = -1
"""The number of the graph task that runs when none does."""


def graph_task() -> int:
    """The number of the backward that runs on this thread; backwards inside backwards have their own."""
    return int(torch._C._current_graph_task_id())


def in_backward() -> bool:
    """Is autograd running on this thread? (Checkpointing recomputes forwards inside backward.)"""
    return graph_task() != IN_FORWARD


@dataclasses.dataclass(eq=False, slots=True)
class _Call:
    """One forward of a site whose backward is to come."""

    wrapped: WrappedModule
    recorded_in: int  # the graph task that recomputed it, or IN_FORWARD
    begin: int  # every node recorded by it has this number or a greater one
    entered: bool = False  # backward has reached one of its outputs
    open: bool = True  # backward has not left it


class StepHooks:
    """Attaches to the sites of one engine; ``remove`` gives everything back.

    ``at_boundary`` is asked once per backward: do its gradients complete a step?
    ``on_forward_begin``: told of each outermost forward. ``on_backward_begin(landed)``: asked whether a
    backward counts, when it begins and again when a gradient landed (``torch.autograd.grad`` lands none);
    ``on_abandon``: that the gradients of the running step were dropped.
    """

    def __init__(
        self,
        prefetcher: Prefetcher,
        reducer: GradReducer,
        *,
        at_boundary: Callable[[], bool],
        on_backward_begin: Callable[[bool], bool],
        on_forward_begin: Callable[[], None],
        on_abandon: Callable[[], None],
    ) -> None:
        self.prefetcher = prefetcher
        self.reducer = reducer
        self.at_boundary = at_boundary
        self.on_backward_begin = on_backward_begin
        self.on_forward_begin = on_forward_begin
        self.on_abandon = on_abandon
        self.running_backward = False
        self.counted = False  # is the running backward known to be one, or may it only ask?
        self.creates_graph = False
        self.forward_depth = 0
        self._task = IN_FORWARD  # the backward that runs, not one inside it
        self._open_calls: dict[int, list[_Call]] = defaultdict(list)  # by ``recorded_in``, in order
        self._buffers = {id(buffer.unit): buffer for buffer in reducer.buffers}
        self.on_modules: list[RemovableHandle] = []
        self.on_params: list[RemovableHandle] = []
        self._on_state: list[RemovableHandle] = []
        self._landings: list[
            tuple[WrappedModule, GradBuffer, int]
        ] = []  # what each gradient hook is for
        self._note_places()
        self.attach()

    # ------------------------------------------------------------------ attaching

    def attach(self) -> None:
        """Put every hook where it belongs; those that are there are replaced."""
        self.remove()
        self._landings.clear()
        me, buffers = weakref.ref(self), self._buffers  # a model must not keep an engine alive
        for wrapped in self.prefetcher.wrapped_modules:
            before, after = self._module_hooks(wrapped)
            pre = _bound(me, before, wrapped)
            self.on_modules.append(
                wrapped.module.register_forward_pre_hook(pre, with_kwargs=True, prepend=True)
            )
            if after is not None:
                root = wrapped is self.prefetcher.root
                post = _bound(me, after, wrapped)
                self.on_modules.append(wrapped.module.register_forward_hook(post, always_call=root))
        root_module = self.prefetcher.root.module
        self._on_state.append(root_module.register_state_dict_post_hook(_release_values))
        for wrapped in self.prefetcher.wrapped_modules:
            for unit in wrapped.units:
                if (buffer := buffers.get(id(unit))) is not None:
                    for index, param in enumerate(unit.params):
                        land = _grad_ready_hook(weakref.proxy(self), len(self._landings))
                        self._landings.append((wrapped, buffer, index))
                        self.on_params.append(param.register_post_accumulate_grad_hook(land))

    def _module_hooks(
        self, wrapped: WrappedModule
    ) -> tuple[Callable[..., Any], Callable[..., Any] | None]:
        if wrapped is self.prefetcher.root:
            return StepHooks._before_root, StepHooks._after_root
        if all(unit.resident for unit in wrapped.units):
            return StepHooks._before_resident, None
        return StepHooks._before_forward, StepHooks._after_forward

    def remove(self) -> None:
        """Detach every hook."""
        for handle in (*self.on_modules, *self.on_params, *self._on_state):
            handle.remove()
        self.on_modules, self.on_params, self._on_state = [], [], []

    # ------------------------------------------------------------------ forward

    def _before_root(
        self,
        wrapped: WrappedModule,
        _module: nn.Module,
        _args: tuple[Any, ...],
        _kwargs: dict[str, Any],
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
            self._check_places()
            self.on_forward_begin()
            self.prefetcher.begin_forward()
        self.forward_depth += 1

    def _before_transformed(self, wrapped: WrappedModule) -> None:
        """Under ``torch.func`` a forward only needs the values. They stay until the next plain forward or
        the end of backward: nothing here learns when the transform has used them up.
        """
        for name, param in wrapped.module.named_parameters():
            given = functorch.unwrapped(param)
            if given is not param and isinstance(given, sharded_parameter.ShardedParameter):
                raise ShardedAccess(
                    f"parameter {name!r} was handed to torch.func while it is sharded, so the transform "
                    "would compute without its values. Hand over full ones, {name: p.detach() for name, "
                    "p in model.named_parameters()}, or run the transform inside GatheredParameters."
                )
        with functorch.suspended():
            self.prefetcher.unshard(wrapped, forward=False)

    def _note_places(self) -> None:
        """Where each parameter hangs in the module tree, and what the tree is made of."""
        modules = list(self.prefetcher.root.module.modules())
        self._params = _Entries([module._parameters for module in modules])
        self._modules = _Entries([module._modules for module in modules])

    def _check_places(self) -> None:
        """What came into the model after the engine was built would never be reduced or updated.

        Where nothing is trained anything may be in it: ``torch.func.functional_call`` puts tensors there.
        """
        if not torch.is_grad_enabled():
            return
        stayed = self._params.are_there()
        if (
            stayed
            and self._params.are_all()
            and self._modules.are_there()
            and self._modules.are_all()
        ):
            return
        named = self.prefetcher.root.module.named_parameters()
        strangers = [
            name
            for name, param in named
            if sharded_parameter.owner_of(param) is None and (param.requires_grad or not stayed)
        ]
        if strangers:
            raise UsageError(
                f"parameter {strangers[0]!r} (and {len(strangers) - 1} more) came into the model after "
                "the engine was built, for instance by load_state_dict(assign=True), pruning, resizing, "
                "a new adapter or head, or module.to('meta'). It would never be trained. Change the "
                "model first, then build the engine; load values with load_state_dict() inside "
                "GatheredParameters."
            )
        self._note_places()

    def _after_root(
        self, wrapped: WrappedModule, _module: nn.Module, _args: Any, output: Any
    ) -> Any:
        if functorch.innermost() is not None or in_backward():
            return output
        output = _copy_own_views(wrapped, output)
        self.forward_depth = max(0, self.forward_depth - 1)
        if self.forward_depth:
            return output
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
        backward = in_backward()
        if backward:
            self._begin_backward()
            self._leave_recomputed()
            node = torch._C._current_autograd_node()
            if node is not None and graph_task() == self._task:
                # Before the gather: a rank that has all gradients reduced them before it, too.
                self._leave_after(node._sequence_nr(), IN_FORWARD)
        self.prefetcher.unshard(wrapped, forward=not backward)
        if not torch.is_grad_enabled() or (backward and wrapped.open_calls):
            wrapped.running.append(None)  # a recomputed forward whose first run is watched already
            return
        call = _Call(wrapped, graph_task(), torch._C._autograd._get_sequence_nr())
        self._open_calls[call.recorded_in].append(call)
        wrapped.open_calls += 1
        wrapped.running.append(call)

    def _after_forward(
        self, wrapped: WrappedModule, _module: nn.Module, _args: Any, output: Any
    ) -> Any:
        if functorch.innermost() is not None:
            return output
        output = _copy_own_views(wrapped, output)
        call = wrapped.running.pop() if wrapped.running else None
        visible = self._watch_outputs(wrapped, output, call)
        if in_backward():
            return output  # recomputed for the backward that follows at once
        kept = self.prefetcher.keeps_for_backward(wrapped) if visible else _may_have_graph(output)
        if not kept:
            wrapped.reshard()
        return output

    def _watch_outputs(
        self, wrapped: WrappedModule, output: Any, call: _Call | None = None
    ) -> bool:
        """Gather again when backward reaches what made an output. False: no output needs a gradient."""
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
                    nodes[node] = number  # an older one made an input, which is passed on
        me = weakref.proxy(self)
        for node, number in nodes.items():

            def enter(_grads: Any, number: int = number) -> None:
                me._before_backward(wrapped, call, number)

            node.register_prehook(enter)
        return visible

    # ------------------------------------------------------------------ backward

    def recover(self) -> bool:
        """Drop the gradients of a backward that an exception ended. Was there one?"""
        if not self.running_backward or in_backward():
            return False
        self.running_backward = False
        self.reducer.abandon()
        self.on_abandon()
        return True

    def _begin_backward(self) -> None:
        if self.running_backward:
            return
        self.running_backward = True
        self._task = graph_task()
        self.creates_graph = torch.is_grad_enabled()  # then a second backward needs the values
        self.counted = self.on_backward_begin(False)
        self.reducer.begin_backward(boundary=self.at_boundary())
        for wrapped in self.prefetcher.wrapped_modules:
            wrapped.missing_grads = sum(len(u.params) for u in wrapped.units if u.trainable)
        Variable._execution_engine.queue_callback(self._end_backward)  # type: ignore[attr-defined]

    def _before_backward(self, wrapped: WrappedModule, call: _Call | None, number: int) -> None:
        """Backward is about to run node ``number``, which made an output of the site in ``call``."""
        self._begin_backward()
        self._leave_recomputed()
        if call is not None:
            self._leave_after(number, call.recorded_in)
            if not call.open:  # a second backward through a graph that was kept
                wrapped.open_calls += 1
                insort(self._open_calls[call.recorded_in], call, key=lambda other: other.begin)
            call.entered = call.open = True
        self.prefetcher.unshard(wrapped, forward=False, reads=wrapped.is_read_in_backward)

    def _leave_after(self, number: int, recorded_in: int) -> None:
        """Leave the calls that began after node ``number``, which runs, was recorded.

        Only within one recording: threads number their nodes apart.
        """
        calls = self._open_calls[recorded_in]
        while calls and calls[-1].begin > number:
            self._module_backward_done(calls.pop())

    def _leave_recomputed(self) -> None:
        """What this backward recomputed before is over: its own backward ran inside one node of ours."""
        calls = self._open_calls.get(graph_task())
        while calls and any(call.entered for call in calls):
            self._module_backward_done(calls.pop())

    def _grad_ready(self, landing: int, param: nn.Parameter) -> None:
        wrapped, buffer, index = self._landings[landing]
        self._begin_backward()
        if not self.counted:
            self.counted = self.on_backward_begin(True)
        self.reducer.accumulate_grad(buffer, index, param)
        wrapped.missing_grads -= 1
        if wrapped.missing_grads <= 0:
            self._release(wrapped)

    def _module_backward_done(self, call: _Call) -> None:
        """Backward has left the call. After the site's last one, gradients that did not arrive will not:
        so a rank that skipped an expert reduces at the same point as the others.
        """
        wrapped = call.wrapped
        wrapped.open_calls -= 1
        call.open = call.entered = False
        if not self.running_backward or wrapped.open_calls:
            return
        wrapped.missing_grads = 0
        for unit in wrapped.units:
            if (buffer := self._buffers.get(id(unit))) is not None:
                self.reducer.finish_buffer(buffer)
        self._release(wrapped)

    def _release(self, wrapped: WrappedModule) -> None:
        """Free the site once nothing of this backward can need it: its gradients are all there."""
        through = wrapped.missing_grads <= 0 and not wrapped.open_calls
        if through and wrapped is not self.prefetcher.root and not self.creates_graph:
            wrapped.reshard()

    def _end_backward(self) -> None:
        if not self.running_backward:
            return
        self.reducer.end_backward()
        # The first calls of forward: no node before them ran.
        for calls in self._open_calls.values():
            for call in [call for call in calls if call.entered]:
                calls.remove(call)
                self._module_backward_done(call)
        if not self.creates_graph:
            self.prefetcher.reshard_all()
        self.running_backward = False

    def forget_calls(self) -> None:
        """At the end of a step: calls whose backward never came are over."""
        self._open_calls.clear()
        for wrapped in self.prefetcher.wrapped_modules:
            wrapped.open_calls = 0
            wrapped.running.clear()


class _Entries:
    """What was in some tables of modules at one time."""

    def __init__(self, tables: Sequence[dict[str, Any]]) -> None:
        self._tables = tables
        self._found = [(t, leaf, x) for t in tables for leaf, x in t.items() if x is not None]
        self._count = sum(map(len, tables))

    def are_there(self) -> bool:
        """Is everything where it was?"""
        return all(table.get(leaf) is found for table, leaf, found in self._found)

    def are_all(self) -> bool:
        """Was nothing added?"""
        return sum(map(len, self._tables)) == self._count


class _Hook:
    """A site's hook, opaque to the compiler: graphs are cut at sites, not inside.

    A copied or pickled module leaves its hooks behind: the copy belongs to no engine.
    """

    def __init__(self, hook: Callable[..., Any]) -> None:
        self._hook = torch._dynamo.disable(hook)

    def __call__(self, *args: Any) -> Any:
        return self._hook(*args)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Hook, (_nothing,)


def _nothing(*_: Any) -> None:
    """What a hook does in a copy of its module."""


def _bound(me: weakref.ref[StepHooks], method: Callable[..., Any], wrapped: WrappedModule) -> _Hook:
    def hook(*args: Any) -> Any:
        hooks = me()
        if hooks is None:
            raise UsageError(
                "the model runs, but its engine is gone: it was dropped without close(), and had the "
                "values. Keep the engine as long as the model is used, or close() it first."
            )
        return method(hooks, wrapped, *args)

    return _Hook(hook)


def _release_values(
    _module: nn.Module, state: dict[str, Any], _prefix: str, _metadata: dict[str, Any]
) -> None:
    """The values in a ``state_dict`` are the program's own: it may write them."""
    for name, value in state.items():
        state[name] = sharded_parameter.without_guard(value)


def _grad_ready_hook(me: Any, landing: int) -> Callable[[Tensor], None]:
    """The hook holds no buffer: what hangs on a parameter is out of the garbage collector's sight."""

    def landed(param: Tensor) -> None:
        me._grad_ready(landing, param)

    return landed


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """Tensors of a module's output: nested lists, mappings and dataclasses included."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, (list, tuple, set)):
        for item in tree:
            yield from tensors_in(item)
    elif isinstance(tree, Mapping):
        for item in tree.values():
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        for field in dataclasses.fields(tree):
            yield from tensors_in(getattr(tree, field.name))


def _copy_own_views(wrapped: WrappedModule, output: Any) -> Any:
    """The output, with copies in place of views of the site's parameters (``self.latents.expand(...)``).

    A view is valid only while the site is full, and an output is used when it is not.
    """
    sharded = [unit for unit in wrapped.units if not unit.resident]
    if not any(_is_view_of(sharded, tensor) for tensor in tensors_in(output)):
        return output

    def copied(value: Any) -> Any:
        if isinstance(value, Tensor):
            return value.clone() if _is_view_of(sharded, value) else value
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            changed = {f.name: apart(getattr(value, f.name)) for f in dataclasses.fields(value)}
            return dataclasses.replace(value, **changed)
        return value

    def apart(tree: Any) -> Any:
        return tree_map(copied, tree)

    return apart(output)


def _is_view_of(units: Sequence[Unit], tensor: Tensor) -> bool:
    if isinstance(tensor, nn.Parameter) or not torch._C._has_storage(tensor):
        return False  # a parameter itself is guarded when it is not full
    return any(storage.is_shared(tensor, unit.full_N) for unit in units)


def _may_have_graph(output: Any) -> bool:
    """Could a graph hide in an output in which no tensor needs a gradient? Only in unknown objects."""
    if not torch.is_grad_enabled() or output is None:
        return False
    if isinstance(output, (Tensor, int, float, bool, str)):
        return False
    return not any(True for _ in tensors_in(output))
