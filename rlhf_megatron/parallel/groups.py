"""Process groups of a layout, built from :class:`Layout` alone.

Megatron-Core's ``initialize_model_parallel`` knows one layout per process that covers the whole world. Here each role
has its own layout, perhaps on some of the ranks; groups with the same ranks are shared between roles and axes, so that
four roles do not need four times the communicators.

Left out: several distributed-optimizer instances, hierarchical context parallelism, separate Gloo groups.
"""

from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING

import torch.distributed as dist

from rlhf_megatron.errors import LayoutError
from rlhf_megatron.parallel.layout import Coordinates, ExpertCoordinates, Layout

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection

# Name of each group as Megatron-Core's ProcessGroupCollection calls it, and the axes along which its ranks differ.
AXES = {
    "tp": "tp",
    "pp": "pp",
    "dp": "dp",
    "cp": "cp",
    "dp_cp": "dp-cp",
    "mp": "tp-pp",
    "tp_cp": "tp-cp",
    "tp_dp": "tp-dp",
    "tp_dp_cp": "tp-dp-cp",
    "ep": "ep",
    "expt_tp": "etp",
    "expt_dp": "edp",
    "tp_ep": "etp-ep",
    "tp_ep_pp": "etp-ep-pp",
    "all": "tp-cp-dp-pp",
}

_NOT_IN_COLLECTION = ("tp_dp", "all")

# Value None: this rank is not in the group.
_cache: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
_timeout = timedelta(minutes=30)


def set_timeout(seconds: float) -> None:
    """Set after how many seconds a stuck collective fails, for groups that are built from now on."""
    global _timeout
    _timeout = timedelta(seconds=seconds)


def group_for_ranks(ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
    """Return the process group of these global ranks, or None on a rank that is not among them.

    Collective over the world the first time: every rank must ask for the same ranks in the same order.

    Args:
        ranks: Global ranks, ascending.
    """
    if ranks not in _cache:
        group = dist.new_group(list(ranks), timeout=_timeout)
        _cache[ranks] = group if isinstance(group, dist.ProcessGroup) else None
    return _cache[ranks]


def forget_groups() -> None:
    """Drop the cache: the groups are about to be destroyed."""
    _cache.clear()


@dataclass(frozen=True)
class Groups:
    """This rank's process groups in a layout.

    Attributes:
        layout: The layout.
        rank: This process's global rank.
        by_name: Process group by the names of :data:`AXES`, plus ``embd`` and ``pos_embd`` where this rank is in them.
            Empty when the rank is not part of the layout.
    """

    layout: Layout
    rank: int
    by_name: dict[str, dist.ProcessGroup] = field(repr=False)

    @property
    def is_member(self) -> bool:
        """Whether this rank is part of the layout."""
        return self.rank in self.layout

    def __getitem__(self, name: str) -> dist.ProcessGroup:
        if name not in self.by_name:
            raise LayoutError(f"rank {self.rank} is in no group {name!r} of the layout {self.layout}.")
        return self.by_name[name]

    @property
    def tp(self) -> dist.ProcessGroup:
        """Ranks that share each layer's matrices."""
        return self["tp"]

    @property
    def pp(self) -> dist.ProcessGroup:
        """Stages of this rank's pipeline."""
        return self["pp"]

    @property
    def dp(self) -> dist.ProcessGroup:
        """Ranks at the same place of other data-parallel shards."""
        return self["dp"]

    @property
    def cp(self) -> dist.ProcessGroup:
        """Ranks that share each sequence."""
        return self["cp"]

    @property
    def dp_cp(self) -> dist.ProcessGroup:
        """Ranks that hold a copy of the same dense parameters: gradients are reduced over it."""
        return self["dp_cp"]

    @property
    def mp(self) -> dist.ProcessGroup:
        """Tensor- and pipeline-parallel ranks of one copy of the model."""
        return self["mp"]

    @property
    def tp_cp(self) -> dist.ProcessGroup:
        """Tensor- and context-parallel ranks."""
        return self["tp_cp"]

    @property
    def tp_dp(self) -> dist.ProcessGroup:
        """Tensor- and data-parallel ranks."""
        return self["tp_dp"]

    @property
    def tp_dp_cp(self) -> dist.ProcessGroup:
        """All ranks of this rank's pipeline stage."""
        return self["tp_dp_cp"]

    @property
    def ep(self) -> dist.ProcessGroup:
        """Ranks that share the experts."""
        return self["ep"]

    @property
    def expt_tp(self) -> dist.ProcessGroup:
        """Ranks that share each expert's matrices."""
        return self["expt_tp"]

    @property
    def expt_dp(self) -> dist.ProcessGroup:
        """Ranks that hold a copy of the same expert parameters."""
        return self["expt_dp"]

    @property
    def tp_ep(self) -> dist.ProcessGroup:
        """Expert-tensor- and expert-parallel ranks."""
        return self["tp_ep"]

    @property
    def tp_ep_pp(self) -> dist.ProcessGroup:
        """Expert-tensor-, expert- and pipeline-parallel ranks."""
        return self["tp_ep_pp"]

    @property
    def all(self) -> dist.ProcessGroup:
        """All ranks of the layout."""
        return self["all"]

    @property
    def embd(self) -> dist.ProcessGroup | None:
        """First and last stage of this rank's pipeline; None on a stage in between."""
        return self.by_name.get("embd")

    @property
    def pos_embd(self) -> dist.ProcessGroup | None:
        """First stage of this rank's pipeline; None on the others."""
        return self.by_name.get("pos_embd")

    @property
    def coordinates(self) -> Coordinates:
        """This rank's place among the dense layers' axes."""
        return self.layout.coordinates(self.rank)

    @property
    def expert_coordinates(self) -> ExpertCoordinates:
        """This rank's place among the expert layers' axes."""
        return self.layout.expert_coordinates(self.rank)

    @property
    def shard(self) -> int:
        """Data-parallel shard whose rows this rank holds."""
        return self.coordinates.dp

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank is on the first pipeline stage."""
        return self.coordinates.pp == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank is on the last pipeline stage."""
        return self.coordinates.pp == self.layout.pp - 1

    @property
    def pp_ranks(self) -> tuple[int, ...]:
        """Global ranks of this rank's pipeline, first stage first."""
        return self.layout.group_of("pp", self.rank)

    @property
    def last_stage_rank(self) -> int:
        """Global rank of the last stage of this rank's pipeline."""
        return self.pp_ranks[-1]

    @cached_property
    def collection(self) -> "ProcessGroupCollection":
        """Every field of Megatron-Core's collection (read from 0.16.1) for model, DDP, optimizer and schedules.

        Pass it together with ``use_gloo_process_groups=False`` to the optimizer. Fields for features that are left out
        are None.
        """
        from megatron.core.process_groups_config import ProcessGroupCollection

        return ProcessGroupCollection(
            **{name: self[name] for name in AXES if name not in _NOT_IN_COLLECTION},
            embd=self.embd,
            pos_embd=self.pos_embd,
            intra_dp_cp=self.dp_cp,
            intra_expt_dp=self.expt_dp,
            intra_dist_opt=self.all,
            inter_dist_opt=None,
            hcp=None,
        )


def build_groups(layout: Layout) -> Groups:
    """Build all process groups of a layout.

    Collective over the world, also for ranks outside of the layout: every rank must build the same layouts in the same
    order. Groups with the same ranks are built once.

    Raises:
        LayoutError: The layout names ranks that do not exist.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if layout.ranks[-1] >= world_size:
        raise LayoutError(f"layout {layout} names rank {layout.ranks[-1]}, but the job has {world_size} ranks.")
    mine: dict[str, dist.ProcessGroup] = {}

    def add(name: str, ranks: tuple[int, ...]) -> None:
        group = group_for_ranks(ranks)
        if group is not None:
            mine[name] = group

    for name, axes in AXES.items():
        for ranks in layout.groups(axes):
            add(name, ranks)
    for pipeline in layout.groups("pp"):
        add("embd", layout.embedding_ranks(pipeline))
        add("pos_embd", layout.position_embedding_ranks(pipeline))
    return Groups(layout, rank, mine)
