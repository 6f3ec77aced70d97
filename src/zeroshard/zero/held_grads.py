"""What a program finds in ``.grad`` while the engine holds the gradients.

[Note: held gradients] Between backward and step the gradients of parameters are in the engine's buffers,
summed over ranks, scaled, and in shards. ``.grad`` is a :class:`HeldGrad` then: a tensor with the
gradient's shape, dtype and device and without its values (ADR 0021).

*Dropping.* ``.grad`` belongs to the program: ``p.grad = None``, ``module.zero_grad()`` and the like just
take the stand-in away. The engine looks before each backward and each step (:meth:`HeldGrads.settle`)
and drops the gradients whose stand-in is gone. ``zero_``, ``mul_`` and ``div_`` by one number are noted,
and done to what the engine holds at the same time: they commute with the sums over ranks.

*Reading.* The 2-norms of all stand-ins of an engine, stacked, have a norm: the global norm. This is what
``torch.nn.utils.clip_grad_norm_`` and ``get_total_norm`` compute. Every other use of values raises.

*Autograd.* The stand-in is a sparse tensor, which autograd does not change. The sum with a gradient is
the gradient, and the stand-in remembers it (``was_added``): it had not been dropped. The stand-ins are
taken away when backward begins, which saves the copy; a gradient that comes first is right anyway.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import compress
from operator import and_
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import is_fake

from zeroshard.errors import UsageError
from zeroshard.zero.function_kinds import CASTS, DATA_SET, LAYOUT, LIKE, METADATA


class Holder(Protocol):
    """What holds the gradients of one engine."""

    def norm_of(self, grads: Sequence[HeldGrad]) -> Tensor:
        """The 2-norm of all gradients that are held, 0-dim. Collective.

        Raises:
            UsageError: ``grads`` are others.
        """
        ...


class GradEdit(NamedTuple):
    """What the program did to the gradient of one tensor; ``slot`` is its index.

    ``op``: "zero_", "mul_" or "div_", with ``value``; or :data:`DROP`.
    """

    slot: int
    op: str
    value: Any = None


DROP = "drop"
_T = torch.Tensor
_SPARSE: frozenset[Any] = frozenset([_T.is_sparse.__get__])  # type: ignore[attr-defined]
_LAYOUT_GET = _T.layout.__get__  # type: ignore[attr-defined]
_SAME: frozenset[Any] = frozenset(
    [_T.detach, _T.detach_, _T.contiguous, _T.data.__get__]  # type: ignore[attr-defined]
)
_WRITES: dict[Any, str] = {
    _T.zero_: "zero_",
    torch.zero_: "zero_",
    _T.mul_: "mul_",
    _T.__imul__: "mul_",
    _T.div_: "div_",
    _T.__itruediv__: "div_",
    torch._foreach_zero_: "zero_",
    torch._foreach_mul_: "mul_",
    torch._foreach_div_: "div_",
}
_NORMS: frozenset[Any] = frozenset(
    [torch.linalg.vector_norm, torch.norm, _T.norm, torch._foreach_norm]
)


class HeldGrad(Tensor):
    """Stands for a gradient that the engine holds. See [Note: held gradients].

    ``fqn``: of its parameter. ``edits``: gets what the program does to it. ``holder``: None for a
    fragment, whose gradient the program cannot use at all.
    """

    fqn: str
    slot: int
    edits: list[GradEdit]
    holder: weakref.ref[Holder] | None
    refusal: UsageError | None = None  # the error for a use, if it is a special one
    was_added = False  # autograd has added a gradient to it, so it was in ``.grad`` then

    @staticmethod
    def of(
        tensor: Tensor, fqn: str, holder: Holder | None, slot: int, edits: list[GradEdit]
    ) -> HeldGrad:
        """The stand-in for the gradient of ``tensor``."""
        empty = torch.empty(
            tensor.shape, dtype=tensor.dtype, device=tensor.device, layout=torch.sparse_coo
        )
        made: HeldGrad = torch.Tensor._make_subclass(HeldGrad, empty)  # type: ignore[attr-defined]
        made.fqn, made.slot, made.edits = fqn, slot, edits
        made.holder = None if holder is None else weakref.ref(holder)
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        grads = [*_grads_in((args, kwargs))]
        first = args[0] if args else None
        with torch._C.DisableTorchFunctionSubclass():
            answer = _NO_ANSWER
            if func == DATA_SET and args[0] is args[1]:  # ``p.grad.data *= 2``
                return None
            if isinstance(first, HeldGrad) and len(grads) == 1:
                answer = _without_values(func, first, args[1:], kwargs)
            if answer is _NO_ANSWER:
                answer = _of_held(func, first, grads, args[1:], kwargs)
            if answer is not _NO_ANSWER:
                return answer
        raise _refused(grads, getattr(func, "__name__", str(func)))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Autograd adds a gradient: it is the sum. Nothing else comes here."""
        grads = [*_grads_in(args)]
        others = [arg for arg in args if isinstance(arg, Tensor) and not isinstance(arg, HeldGrad)]
        if func is not torch.ops.aten.add.Tensor or len(grads) != 1 or len(others) != 1:
            raise _refused(grads, str(func))
        grads[0].was_added = True
        return others[0].clone()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"HeldGrad({self.fqn!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    __format__ = object.__format__  # type: ignore[assignment]

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        raise _refused([self], "deepcopy")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise _refused([self], "pickle")


class HeldNorm(Tensor):
    """The 2-norms of gradients that the engine holds: their norm, if they are all, has a value."""

    grads: list[HeldGrad]

    @staticmethod
    def of(grads: Sequence[HeldGrad], *, stacked: bool = False) -> HeldNorm:
        """The norms of ``grads``: a vector if ``stacked``, else 0-dim."""
        shape = (len(grads),) if stacked else ()
        made = torch.full(shape, float("nan"), dtype=grads[0].dtype, device=grads[0].device)
        made.__class__ = HeldNorm
        assert isinstance(made, HeldNorm)
        made.grads = list(grads)
        return made

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        norms: list[Any] = [first] if isinstance(first, Tensor) else [*(first or ())]
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        held = [norm for norm in norms if isinstance(norm, HeldNorm)]
        grads = [grad for norm in held for grad in norm.grads]
        if len(held) == len(norms):
            answer = _of_norms(func, first, grads, args[1:], kwargs)
            if answer is not _NO_ANSWER:
                return answer
        raise _refused(grads, f"norm, then {getattr(func, '__name__', func)}")

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"HeldNorm({[grad.fqn for grad in self.grads]})"

    __format__ = object.__format__  # type: ignore[assignment]


_NO_ANSWER = object()


def _without_values(func: Any, grad: HeldGrad, args: tuple[Any, ...], kwargs: Any) -> Any:
    """The answer to a call that needs only shape, dtype and device, else :data:`_NO_ANSWER`."""
    if func in _SPARSE:
        return False
    if func is _LAYOUT_GET or func == _LAYOUT_GET:
        return torch.strided
    if func in METADATA:
        return func(grad, *args, **kwargs)
    if func in _SAME:
        return grad
    if func in LAYOUT or func in LIKE:
        twin = torch.empty(grad.shape, dtype=grad.dtype, device="meta")
        if func in LIKE:
            kwargs = {"device": grad.device, **kwargs}
        return func(twin, *args, **kwargs)
    if func in CASTS:
        nothing = torch.empty(0, dtype=grad.dtype, device=grad.device)
        return grad if func(nothing, *args, **kwargs) is nothing else _NO_ANSWER
    return _NO_ANSWER


def _of_held(
    func: Any, first: Any, grads: Sequence[HeldGrad], args: tuple[Any, ...], kwargs: Any
) -> Any:
    """The norms of gradients that an engine holds, or what a change of them returns.

    ``first``: one stand-in or a list. :data:`_NO_ANSWER` to any other call.
    """
    several = isinstance(first, list)
    is_alone = first == grads if several else first is grads[0]
    if not is_alone or any(grad.holder is None for grad in grads):
        return _NO_ANSWER
    if func in _NORMS and _is_2_norm(args, kwargs):
        norms = [HeldNorm.of([grad]) for grad in grads]
        return norms if several else norms[0]
    if func in _WRITES and _is_number(_WRITES[func], args, kwargs):
        for grad in grads:
            grad.edits.append(GradEdit(grad.slot, _WRITES[func], *args))
        return None if several else first
    return _NO_ANSWER


def _of_norms(
    func: Any, first: Any, grads: Sequence[HeldGrad], args: tuple[Any, ...], kwargs: Any
) -> Any:
    """What becomes of the norms of ``grads``, else :data:`_NO_ANSWER`."""
    if func is _T.to or func in _SAME:
        return first
    if func is torch.stack and not args and not kwargs:
        return HeldNorm.of(grads, stacked=True)
    if func in _NORMS and _is_2_norm(args, kwargs) and isinstance(first, Tensor):
        reference = grads[0].holder
        holder = None if reference is None else reference()
        if holder is not None:
            return holder.norm_of(grads)
    return _NO_ANSWER


def _is_2_norm(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    given = {**dict(zip(("p", "dim"), args, strict=False)), **kwargs}
    order = given.pop("p", given.pop("ord", 2))
    return order in (2, "fro", None) and all(value in (None, False) for value in given.values())


def _is_number(op: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the call changes all elements by the same number."""
    if op == "zero_" or kwargs:
        return not args and not kwargs
    return len(args) == 1 and (
        isinstance(args[0], (int, float)) or (isinstance(args[0], Tensor) and args[0].dim() == 0)
    )


def _grads_in(tree: Any) -> Iterator[HeldGrad]:
    if isinstance(tree, HeldGrad):
        yield tree
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            yield from _grads_in(item)
    elif isinstance(tree, dict):
        yield from _grads_in(list(tree.values()))


def _refused(grads: Sequence[HeldGrad], what: str) -> UsageError:
    for grad in grads:
        if grad.refusal is not None:
            return grad.refusal
    names = [grad.fqn for grad in grads[:3]]
    if any(grad.holder is None for grad in grads):
        return UsageError(
            f".grad of the part of {names[0]!r} in the optimizer's param groups was used ({what}). "
            "Its gradient is stored elsewhere until step(). Use the parameters of the model: "
            "zeroshard.zero.safe_get_full_grad(param), or the key gradient_clipping."
        )
    return UsageError(
        f".grad of {', '.join(map(repr, names))}{'...' if len(grads) > 3 else ''} was used ({what}). "
        "The engine holds the gradient until step(), sharded and not unscaled, so it has no values "
        "here. Read it with zeroshard.zero.safe_get_full_grad(param), replace it with "
        "zeroshard.zero.safe_set_full_grad(param, value). To clip, use the key gradient_clipping, or "
        "torch.nn.utils.clip_grad_norm_ with all trained parameters of the engine. An optimizer that "
        "steps has to be the engine's: pass it to initialize(), or to prepare() of Accelerate."
    )


class HeldGrads:
    """The stand-ins of some tensors' gradients: of the parameters of a unit, or of fragments.

    ``shown``: by index, those that are in ``.grad``.
    """

    def __init__(self, tensors: Sequence[Tensor], names: Sequence[str]) -> None:
        self._tensors = tensors
        self._names = names
        self._edits: list[GradEdit] = []  # the stand-ins append to it
        self._pairs: list[tuple[Tensor, HeldGrad]] = []
        self._shown: list[tuple[Tensor, HeldGrad]] = []
        self.shown: Sequence[int] = ()

    def show(self, flags: Sequence[bool] | None, holder: Holder | None) -> None:
        """Put stand-ins into ``.grad`` of the tensors with a flag; None: of all that are trained.

        Another ``.grad`` stays: the step refuses it.
        """
        if not self._pairs and not self._make(holder):
            return
        with torch._C.DisableTorchFunctionSubclass():
            if flags is None and holder is not None:
                flags = [tensor.requires_grad for tensor in self._tensors]
            free = [tensor.grad is None for tensor in self._tensors]
            self._shown, self.shown = self._pairs, range(len(self._pairs))
            if flags is not None and not all(flags):
                free = [*map(and_, free, flags)]
            if not all(free):
                self.shown = [*compress(self.shown, free)]
                self._shown = [self._pairs[i] for i in self.shown]
            for tensor, held in self._shown:
                tensor.grad = held

    def _make(self, holder: Holder | None) -> bool:
        """Make the stand-ins. Returns whether there are any: fake tensors have none."""
        if not self._tensors or is_fake(self._tensors[0]):
            return False
        named = zip(self._tensors, self._names, strict=True)
        with torch._C.DisableTorchFunctionSubclass():
            self._pairs = [
                (tensor, HeldGrad.of(tensor, name, holder, slot, self._edits))
                for slot, (tensor, name) in enumerate(named)
            ]
        return True

    def close(self) -> None:
        """Take the stand-ins away, and hold the tensors no longer."""
        self.hide()
        self._tensors, self._pairs, self._shown = (), [], []

    def grads(self) -> list[HeldGrad]:
        """The stand-ins that are shown."""
        return [held for _, held in self._shown]

    def hide(self) -> None:
        """Take the stand-ins away."""
        if not self._shown:
            return
        self._edits.clear()
        with torch._C.DisableTorchFunctionSubclass():
            for tensor, held in self._shown:
                held.was_added = False
                if tensor.grad is held:
                    tensor.grad = None
        self._shown, self.shown = [], ()

    def drop(self, set_to_none: bool) -> None:
        """What ``zero_grad(set_to_none)`` does to the tensors."""
        with torch._C.DisableTorchFunctionSubclass():
            for tensor in self._tensors:
                if set_to_none:
                    tensor.grad = None
                elif isinstance(held := tensor.grad, HeldGrad):
                    held.edits.append(GradEdit(held.slot, "zero_"))
                elif held is not None:
                    held.zero_()

    def settle(self, landed: Tensor | None = None) -> list[GradEdit]:
        """What the program did since the last call.

        ``landed``: autograd has put a gradient into its ``.grad`` since.

        Raises:
            UsageError: the program assigned a gradient.
        """
        with torch._C.DisableTorchFunctionSubclass():
            gone = [held for tensor, held in self._shown if tensor.grad is not held]
            if not gone and not self._edits:
                return []
            gone = [held for held in gone if not held.was_added]
            for held in gone:
                tensor = self._tensors[held.slot]
                if tensor.grad is not None and tensor is not landed:
                    raise assigned(held.fqn)
        edits = [*self._edits, *(GradEdit(held.slot, DROP) for held in gone)]
        self._edits.clear()
        left = {*self.shown} - {held.slot for held in gone}
        self.shown = sorted(left)
        self._shown = [self._pairs[slot] for slot in self.shown]
        return edits


def assigned(name: str) -> UsageError:
    """The error for a gradient that the program assigned: the step would ignore it."""
    return UsageError(
        f"{name!r}.grad was assigned after backward; but step() uses a sharded gradient that is "
        "stored elsewhere. Use zeroshard.zero.safe_set_full_grad(param, value)."
    )


def apply(changes: Iterable[GradEdit], parts_of: Callable[[int], list[Tensor]]) -> None:
    """Do the changes to the parts of the gradients that this rank holds, in few calls."""
    rounds: list[dict[tuple[str, int], tuple[Any, list[Tensor]]]] = []
    seen: dict[int, int] = {}  # by index, how many changes came before
    for index, op, value in changes:
        at = seen[index] = seen.get(index, -1) + 1
        if at == len(rounds):
            rounds.append({})
        rounds[at].setdefault((op, id(value)), (value, []))[1].extend(parts_of(index))
    with torch.no_grad():
        for (op, _), (value, parts) in [pair for done in rounds for pair in done.items()]:
            if not parts:
                continue
            if op == "mul_":
                torch._foreach_mul_(parts, value)
            elif op == "div_":
                torch._foreach_div_(parts, value)
            else:
                torch._foreach_zero_(parts)
