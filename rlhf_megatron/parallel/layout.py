"""Parallel layouts as pure integers: who sits where, and which ranks form a group.

Nothing here needs torch or a process group, so a plan for 512 GPUs can be computed on a login node. The rank order is
Megatron-Core's default, ``tp-cp-ep-dp-pp`` (tensor-parallel neighbours are adjacent, pipeline stages are farthest
apart); ``tests/unit/parallel/test_layout.py`` compares every group with Megatron-Core's own generator.

Left out: other rank orders, hierarchical and hybrid context parallelism, several distributed-optimizer instances.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from rlhf_megatron.config.pipeline import PipelineShape
from rlhf_megatron.config.roles import MegatronConfig
from rlhf_megatron.errors import LayoutError


class Coordinates(NamedTuple):
    """Place of a rank among the dense layers' axes."""

    tp: int
    cp: int
    dp: int
    pp: int


class ExpertCoordinates(NamedTuple):
    """Place of a rank among the axes of mixture-of-experts layers."""

    etp: int
    ep: int
    edp: int
    pp: int


@dataclass(frozen=True)
class Layout:
    """How one role's model is divided over some ranks.

    Attributes:
        tp: Tensor-parallel size.
        pp: Pipeline-parallel size.
        vpp: Model chunks per pipeline stage, or None for one.
        cp: Context-parallel size.
        ep: Expert-parallel size.
        etp: Expert-tensor-parallel size; ``tp`` when None.
        first_stage_layers: Layers of the first pipeline stage, None for as many as the others.
        last_stage_layers: Layers of the last pipeline stage, None for as many as the others.
        pipeline_layout: Megatron's layout string, which says which stage has which layers; None for none.
        ranks: Global ranks of the layout, strictly ascending. May be a subset of the world.

    Raises:
        LayoutError: A size is below one, the ranks are not strictly ascending, or their number is not divisible by
            ``tp * pp * cp`` or by ``etp * ep * pp``.
    """

    tp: int = 1
    pp: int = 1
    vpp: int | None = None
    cp: int = 1
    ep: int = 1
    etp: int | None = None
    first_stage_layers: int | None = None
    last_stage_layers: int | None = None
    pipeline_layout: str | None = None
    ranks: tuple[int, ...] = (0,)

    def __post_init__(self) -> None:
        sizes = {"tp": self.tp, "pp": self.pp, "vpp": self.vpp, "cp": self.cp, "ep": self.ep, "etp": self.etp}
        for name, size in sizes.items():
            if size is not None and size < 1:
                raise LayoutError(f"layout: {name} is {size}, but a parallel size must be at least 1.")
        if not self.ranks or self.ranks[0] < 0 or any(a >= b for a, b in zip(self.ranks, self.ranks[1:], strict=False)):
            raise LayoutError(f"layout: ranks are {self.ranks}, but must be non-negative and strictly ascending.")
        if self.vpp is not None and self.pp == 1:
            raise LayoutError(f"layout: vpp is {self.vpp}, but model chunks interleave only when pp is above 1.")
        self._must_divide("tp * pp * cp", self.tp * self.pp * self.cp)
        self._must_divide("etp * ep * pp", self.expert_tp * self.ep * self.pp)

    def _must_divide(self, product: str, value: int) -> None:
        if len(self.ranks) % value:
            raise LayoutError(
                f"layout: {len(self.ranks)} ranks cannot be divided by {product} = {value} "
                f"(tp={self.tp}, pp={self.pp}, cp={self.cp}, ep={self.ep}, etp={self.expert_tp}). "
                "Change the number of ranks or a parallel size so that it divides."
            )

    @classmethod
    def from_config(cls, config: MegatronConfig, ranks: tuple[int, ...] | range) -> "Layout":
        """Return the layout that a role's configuration asks for on these global ranks.

        Raises:
            LayoutError: The configuration does not fit the ranks.
        """
        pipeline = PipelineShape.from_config(config)
        return cls(
            tp=config.tensor_model_parallel_size,
            pp=pipeline.stages,
            vpp=pipeline.chunks,
            cp=config.context_parallel_size,
            ep=config.expert_model_parallel_size,
            etp=config.expert_tensor_parallel_size,
            first_stage_layers=pipeline.first,
            last_stage_layers=pipeline.last,
            pipeline_layout=pipeline.layout,
            ranks=tuple(ranks),
        )

    @property
    def pipeline(self) -> PipelineShape:
        """How the layers are divided over stages and chunks."""
        return PipelineShape(self.pp, self.vpp, self.first_stage_layers, self.last_stage_layers, self.pipeline_layout)

    @property
    def num_chunks(self) -> int:
        """Model chunks per pipeline stage."""
        return self.vpp or 1

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @property
    def dp(self) -> int:
        """Data-parallel size (without context parallelism), derived."""
        return self.size // (self.tp * self.pp * self.cp)

    @property
    def expert_tp(self) -> int:
        """Expert-tensor-parallel size with its default resolved."""
        return self.tp if self.etp is None else self.etp

    @property
    def expert_dp(self) -> int:
        """Ranks that hold a copy of the same expert shard."""
        return self.size // (self.expert_tp * self.ep * self.pp)

    def __str__(self) -> str:
        sizes = f"tp{self.tp} pp{self.pp} dp{self.dp}"
        sizes += f" vpp{self.vpp}" if self.vpp is not None else ""
        sizes += f" cp{self.cp}" if self.cp > 1 else ""
        sizes += f" ep{self.ep} etp{self.expert_tp}" if self.ep > 1 or self.expert_tp != self.tp else ""
        whole = self.ranks == tuple(range(self.ranks[0], self.ranks[-1] + 1))
        ranks = f"{self.ranks[0]}-{self.ranks[-1]}" if whole else ",".join(map(str, self.ranks))
        return f"[{sizes} on ranks {ranks}]"

    @cached_property
    def _index(self) -> dict[int, int]:
        return {rank: index for index, rank in enumerate(self.ranks)}

    def __contains__(self, rank: object) -> bool:
        return rank in self._index

    def index_of(self, rank: int) -> int:
        """Return the position of a global rank in ``ranks``.

        Raises:
            LayoutError: The rank is not part of the layout.
        """
        if rank not in self._index:
            raise LayoutError(f"rank {rank} is not part of the layout {self}.")
        return self._index[rank]

    def coordinates(self, rank: int) -> Coordinates:
        """Return the dense-layer coordinates of a global rank.

        Raises:
            LayoutError: The rank is not part of the layout.
        """
        tp, cp, dp, pp = _unravel(self.index_of(rank), (self.tp, self.cp, self.dp, self.pp))
        return Coordinates(tp, cp, dp, pp)

    def expert_coordinates(self, rank: int) -> ExpertCoordinates:
        """Return the expert-layer coordinates of a global rank.

        Raises:
            LayoutError: The rank is not part of the layout.
        """
        etp, ep, edp, pp = _unravel(self.index_of(rank), (self.expert_tp, self.ep, self.expert_dp, self.pp))
        return ExpertCoordinates(etp, ep, edp, pp)

    def rank_at(self, *, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        """Return the global rank at dense-layer coordinates.

        Raises:
            LayoutError: A coordinate is outside of its axis.
        """
        wanted = {"tp": (tp, self.tp), "cp": (cp, self.cp), "dp": (dp, self.dp), "pp": (pp, self.pp)}
        for axis, (coordinate, size) in wanted.items():
            if not 0 <= coordinate < size:
                raise LayoutError(f"{axis} coordinate {coordinate} is outside of 0..{size - 1} of the layout {self}.")
        return self.ranks[tp + self.tp * (cp + self.cp * (dp + self.dp * pp))]

    def groups(self, axes: str) -> tuple[tuple[int, ...], ...]:
        """Return all groups of ranks that differ only along some axes.

        Args:
            axes: Axis names joined by hyphens, in any order: ``tp cp dp pp`` of the dense layers, or
                ``etp ep edp pp`` of the expert layers. For example ``"dp-cp"`` or ``"etp-ep-pp"``.

        Returns:
            Groups in Megatron-Core's order, each ascending. Together they hold every rank once.

        Raises:
            LayoutError: An axis does not exist, or dense and expert axes are mixed.
        """
        if axes not in self._group_cache:
            self._group_cache[axes] = self._make_groups(axes)
        return self._group_cache[axes]

    @cached_property
    def _group_cache(self) -> dict[str, tuple[tuple[int, ...], ...]]:
        return {}

    def _make_groups(self, axes: str) -> tuple[tuple[int, ...], ...]:
        names = set(axes.split("-"))
        dense = {"tp": self.tp, "cp": self.cp, "dp": self.dp, "pp": self.pp}
        expert = {"etp": self.expert_tp, "ep": self.ep, "edp": self.expert_dp, "pp": self.pp}
        grid = dense if names <= dense.keys() else expert
        if not names <= grid.keys():
            raise LayoutError(f"axes {axes!r} are not among {'-'.join(dense)} or {'-'.join(expert)}.")
        sizes = tuple(grid.values())
        groups: dict[tuple[int, ...], list[int]] = {}
        for index, rank in enumerate(self.ranks):
            place = _unravel(index, sizes)
            # Reversed, so that ascending keys list the fastest of the fixed axes first, as Megatron-Core does.
            fixed = tuple(c for name, c in zip(reversed(grid), reversed(place), strict=True) if name not in names)
            groups.setdefault(fixed, []).append(rank)
        return tuple(tuple(groups[key]) for key in sorted(groups))

    def group_of(self, axes: str, rank: int) -> tuple[int, ...]:
        """Return the group of ``groups(axes)`` that holds a rank.

        Raises:
            LayoutError: The rank is not part of the layout, or an axis does not exist.
        """
        self.index_of(rank)
        return next(group for group in self.groups(axes) if rank in group)

    @property
    def num_shards(self) -> int:
        """Number of data-parallel shards: parts that a batch is divided into."""
        return self.dp

    def shard_of(self, rank: int) -> int:
        """Return the data-parallel shard whose rows a rank holds."""
        return self.coordinates(rank).dp

    def ranks_of_shard(self, shard: int) -> tuple[int, ...]:
        """Return the ranks (all tp, cp and pp places) that hold the rows of a shard, ascending.

        Raises:
            LayoutError: There is no such shard.
        """
        if not 0 <= shard < self.num_shards:
            raise LayoutError(f"shard {shard} is outside of 0..{self.num_shards - 1} of the layout {self}.")
        return self.groups("tp-cp-pp")[shard]

    def embedding_ranks(self, pp_ranks: tuple[int, ...]) -> tuple[int, ...]:
        """Return the ranks of a pipeline that hold word embeddings: first and last stage, once if they are one."""
        return (pp_ranks[0],) if len(pp_ranks) == 1 else (pp_ranks[0], pp_ranks[-1])

    def position_embedding_ranks(self, pp_ranks: tuple[int, ...]) -> tuple[int, ...]:
        """Return the ranks of a pipeline that hold position embeddings: the first stage."""
        return (pp_ranks[0],)


def _unravel(index: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the coordinates of a position in a grid whose first axis varies fastest."""
    coordinates = []
    for size in sizes:
        coordinates.append(index % size)
        index //= size
    return tuple(coordinates)
