"""Resolves what several places say about the mesh into one mesh, or an error that names the places.

A *mesh source* is one place that says something: the configuration, a device mesh, a program's ``mpu``.
It makes claims about sizes, and may say which rank is where. Pure arithmetic: all ranks get the same
result or the same error, without a collective.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, product
from math import inf, log, prod
from numbers import Integral

from zeroshard.core.mesh import BATCH, DIMS, Mesh
from zeroshard.errors import ConfigError, UsageError

BATCH_DIMS = tuple(dim for dim in DIMS if dim in BATCH)
"""The dimensions whose sizes multiply to the data-parallel size."""


@dataclass(frozen=True)
class Claim:
    """A statement: the sizes of ``dims`` multiply to ``size``. ``name``: who says so, for messages.

    Raises:
        UsageError: ``size`` is not a whole number above 0.
    """

    dims: tuple[str, ...]
    size: int
    name: str

    def __post_init__(self) -> None:
        if isinstance(self.size, bool) or not isinstance(self.size, Integral) or self.size < 1:
            raise UsageError(
                f"{self.name} is {self.size!r}: the size of {self.about} must be a whole number of at "
                "least 1, because it counts ranks."
            )

    @property
    def about(self) -> str:
        """The dimensions, for messages."""
        return " x ".join(self.dims)


@dataclass(frozen=True)
class RankPlacement:
    """Which ranks a source puts where: ``ranks`` in row-major order of ``shape``.

    ``axes``: for each axis of ``shape``, the dimensions of the mesh that it runs along. All ranks have
    the same position in every other dimension. ``name``: who says so, for messages.
    """

    name: str
    axes: tuple[tuple[str, ...], ...]
    shape: tuple[int, ...]
    ranks: tuple[int, ...]

    def by_mesh(self, mesh: Mesh) -> tuple[int, ...]:
        """The ranks that ``mesh`` has at these positions, if the first rank is right."""
        start = dict(mesh.coordinate(self.ranks[0] % mesh.world_size))
        start.update((dim, 0) for axis in self.axes for dim in axis)
        found = []
        for place in product(*map(range, self.shape)):
            at = dict(start)
            for dims, index in zip(self.axes, place, strict=True):
                rest = index
                for dim in reversed(_in_order(dims)):
                    rest, at[dim] = divmod(rest, getattr(mesh, dim))
            found.append(mesh.rank_at(at))
        return tuple(found)


@dataclass(frozen=True)
class MeshSource:
    """What one place says. ``name``: the place, for messages."""

    name: str
    claims: tuple[Claim, ...]
    placements: tuple[RankPlacement, ...] = ()

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of single dimensions."""
        return {claim.dims[0]: claim.size for claim in self.claims if len(claim.dims) == 1}


@dataclass(frozen=True)
class ResolvedMesh:
    """A mesh without open questions.

    ``origins``: dimension -> who gave its size; "derived": what was left of the ranks; "default": nobody.
    """

    mesh: Mesh
    origins: Mapping[str, str] = field(default_factory=lambda: dict.fromkeys(DIMS, "default"))


def resolve_mesh(
    sources: Sequence[MeshSource],
    world_size: int,
) -> ResolvedMesh:
    """The mesh of ``world_size`` ranks on which all ``sources`` agree.

    A dimension that nobody mentions has size 1, and ``data_shard`` gets the ranks that are left. Without
    sources, all ranks are data-parallel.

    Raises:
        ConfigError: sources disagree, or the sizes do not multiply to ``world_size``. One problem per
            line.
        UsageError: a source numbers the ranks in another order.

    >>> tensor = MeshSource("mesh=", (Claim(("tensor",), 2, "mesh="),))
    >>> resolve_mesh([tensor], 8).mesh.text
    'data_shard 4 x tensor 2'
    """
    claims = [claim for source in sources for claim in source.claims]
    _refuse([*_disagreements(claims)])
    alone = [claim for claim in claims if len(claim.dims) == 1]
    origins = {claim.dims[0]: claim.name for claim in alone}
    sizes = {claim.dims[0]: int(claim.size) for claim in alone}
    given = {dim: sizes.get(dim, 1) for dim in DIMS}
    if "data_shard" not in sizes:
        given["data_shard"] = _what_is_left(given, claims, origins, world_size)
    mesh = Mesh(**given, expert=sizes.get("expert", 1))
    _refuse([*_wrong_products(given, claims)])
    _refuse([*_misfits(mesh, given, origins, world_size)])
    for source in sources:
        for placement in source.placements:
            _check_placement(placement, mesh)
    rest = "derived" if claims else "default"
    shown = dict.fromkeys(DIMS, "default") | {"data_shard": rest}
    known = (*DIMS, "expert")
    return ResolvedMesh(mesh, shown | {dim: origins[dim] for dim in known if dim in origins})


def _refuse(problems: Sequence[str]) -> None:
    if problems:
        raise ConfigError("\n".join(problems))


def _misfits(
    mesh: Mesh, given: Mapping[str, int], origins: Mapping[str, str], world_size: int
) -> Iterator[str]:
    """What is wrong with a mesh on which all sources agree: one problem at most."""
    if mesh.world_size != world_size:
        yield _no_fit(given, origins, world_size)
    elif mesh.data_shard * mesh.sequence % mesh.expert:
        yield (
            f"expert {mesh.expert} ({origins.get('expert', '')}): the ranks that share experts are in "
            f"one shard group, and that has {mesh.data_shard * mesh.sequence} ranks (data_shard x "
            "sequence); use a size that divides it"
        )
    elif mesh.data_replicate > 1 and mesh.data_shard * mesh.sequence == 1:
        yield (
            f"data_replicate {mesh.data_replicate} x data_shard 1: shard groups of one rank shard "
            f"nothing; use data_shard {mesh.data_replicate} without data_replicate, and stage 0 if "
            "every rank shall keep the whole state"
        )


def _in_order(dims: Collection[str]) -> list[str]:
    return [dim for dim in DIMS if dim in dims]


def _disagreements(claims: Sequence[Claim]) -> Iterator[str]:
    first: dict[frozenset[str], Claim] = {}
    for claim in claims:
        other = first.setdefault(frozenset(claim.dims), claim)
        if other.size != claim.size:
            yield (
                f"{claim.about}: {other.name} is {other.size}, but {claim.name} is {claim.size}; both "
                "give the same size, so make them equal, or leave one of them out"
            )


def _what_is_left(
    given: Mapping[str, int],
    claims: Sequence[Claim],
    origins: dict[str, str],
    world_size: int,
) -> int:
    """``data_shard`` from a product that it is part of, else from the number of ranks.

    In the first case ``origins`` gets who gave the product.
    """
    for claim in claims:
        others = prod(given[dim] for dim in claim.dims if dim in DIMS and dim != "data_shard")
        if "data_shard" not in claim.dims:
            continue
        if claim.size % others:
            factors = _factors(
                {dim: given[dim] for dim in claim.dims if dim != "data_shard"}, origins
            )
            raise ConfigError(
                f"{claim.about}: {claim.name} is {claim.size}, which is not divisible by {factors}; "
                "correct one of them"
            )
        origins["data_shard"] = claim.name
        return int(claim.size) // others
    others = prod(size for dim, size in given.items() if dim != "data_shard")
    if world_size % others:
        raise ConfigError(_no_fit({**given, "data_shard": 0}, origins, world_size))
    return world_size // others


def _wrong_products(given: Mapping[str, int], claims: Sequence[Claim]) -> Iterator[str]:
    for claim in claims:
        if len(claim.dims) == 1:
            continue
        size = prod(given[dim] for dim in claim.dims)
        if size != claim.size:
            parts = " x ".join(f"{dim} {given[dim]}" for dim in _in_order(claim.dims))
            yield (
                f"{claim.about}: {claim.name} is {claim.size}, but {parts} = {size}; correct one of them"
            )


def _factors(sizes: Mapping[str, int], origins: Mapping[str, str]) -> str:
    """Sizes above 1, and that of ``data_shard``, with who gave them: ``tensor 2 (parallel.tensor)``."""
    shown = [
        dim
        for dim in _in_order(sizes)
        if sizes[dim] > 1 or (dim == "data_shard" and dim in origins)
    ]
    parts = []
    for origin, dims in groupby(shown, lambda dim: origins.get(dim, "")):
        factors = " x ".join(f"{dim} {sizes[dim]}" for dim in dims)
        parts.append(f"{factors} ({origin})" if origin else factors)
    return " x ".join(parts) or "data_shard 1"


def _no_fit(given: Mapping[str, int], origins: Mapping[str, str], world_size: int) -> str:
    """``given``: the sizes; ``data_shard`` 0 if it should be what is left."""
    fixed = {dim: size for dim, size in given.items() if size}
    total = prod(fixed.values())
    started = f"{world_size} were" if world_size != 1 else "1 was"
    ranks = "rank" if total == 1 else "ranks"
    text = f"mesh: {_factors(fixed, origins)} = {total} {ranks}, but {started} started"
    if not given["data_shard"]:
        text = (
            f"mesh: {_factors(fixed, origins)} needs {total} ranks, but {started} started: none is "
            "left for data"
            if total > world_size
            else f"mesh: {_factors(fixed, origins)} needs a multiple of {total} ranks, but {started} "
            "started"
        )
    fits = nearest_mesh(given, world_size).text
    more = -(-world_size // total) * total
    start = f", or start {more} ranks" if more != world_size else ""
    return f"{text}; the nearest sizes that fit are {fits}{start}"


def nearest_mesh(sizes: Mapping[str, int], world_size: int) -> Mesh:
    """The mesh of ``world_size`` ranks that is most similar to ``sizes``.

    It keeps as much as possible of the dimensions other than ``data_shard``. ``data_shard`` gets what is
    left.

    >>> nearest_mesh({"pipeline": 2, "data_shard": 3, "tensor": 2}, 8).text
    'pipeline 2 x data_shard 2 x tensor 2'
    >>> nearest_mesh({"tensor": 8}, 4).text, nearest_mesh({"tensor": 3}, 8).text
    ('tensor 4', 'data_shard 2 x tensor 4')
    """
    wide = [dim for dim in DIMS if dim != "data_shard" and sizes.get(dim, 1) > 1]
    divisors = [size for size in range(1, world_size + 1) if world_size % size == 0]
    best, best_cost = Mesh(data_shard=world_size), inf
    for chosen in product(*(_near(divisors, sizes[dim]) for dim in wide)):
        if world_size % prod(chosen):
            continue
        cost = sum(
            abs(log(new / sizes[dim])) for dim, new in zip(wide, chosen, strict=True)
        )  # equal ratios cost the same, so the first wins: the smaller size
        if cost < best_cost - 1e-9:
            kept = dict(zip(wide, chosen, strict=True))
            best, best_cost = Mesh(**kept, data_shard=world_size // prod(chosen)), cost
    return best


def _near(divisors: Sequence[int], size: int) -> list[int]:
    """The divisors within a factor of 8, and 1: they bound the search for large worlds."""
    return [one for one in divisors if one == 1 or size / 8 <= one <= size * 8]


def _check_placement(placement: RankPlacement, mesh: Mesh) -> None:
    """Raise :class:`UsageError` if ``mesh`` has other ranks at the positions of ``placement``."""
    ours = placement.by_mesh(mesh)
    if ours == placement.ranks:
        return
    order = ", ".join(DIMS)
    raise UsageError(
        f"{placement.name} has the ranks {_nested(placement.ranks, placement.shape)} along "
        f"{' and '.join(' x '.join(axis) for axis in placement.axes)}, but the mesh {mesh.text} has "
        f"{_nested(ours, placement.shape)} there. Parameters would be sharded over ranks that hold "
        f"different values. Make the groups with the dimensions in the order {order}."
    )


def _nested(ranks: Sequence[int], shape: Sequence[int]) -> str:
    """``ranks`` as nested lists, at most eight items of each."""
    if len(shape) <= 1:
        items = [str(rank) for rank in ranks]
    else:
        step = len(ranks) // shape[0]
        items = [_nested(ranks[at : at + step], shape[1:]) for at in range(0, len(ranks), step)]
    return f"[{', '.join(items if len(items) <= 8 else [*items[:8], '...'])}]"
