"""Rotary embedding with given frequencies, behind the interface that Megatron-Core's GPTModel calls."""

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from torch.distributed import ProcessGroup

from rlhf_megatron.models.hf_config import Rope


class ScaledRotaryEmbedding(RotaryEmbedding):
    """Megatron-Core's rotary embedding with the inverse frequencies of the HuggingFace configuration (fp32).

    Args:
        head_dim: Features per attention head.
        rope: The model's rotary settings. Its attention scaling is not applied here (see ``megatron_config``).
        cp_group: Context-parallel group.
    """

    def __init__(self, head_dim: int, rope: Rope, cp_group: ProcessGroup | None):
        super().__init__(
            kv_channels=head_dim,
            rotary_percent=1.0,
            rotary_base=int(rope.theta),
            use_cpu_initialization=True,
            cp_group=cp_group,
        )
        self.inv_freq = torch.tensor(rope.inv_freq, dtype=torch.float32)
