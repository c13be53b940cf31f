"""Layers of the ``torch`` implementation: RMSNorm under sequence parallelism, and attention by PyTorch's SDPA.

They need neither Transformer Engine nor Apex: this is how models run on CPU, and on a GPU without those. Left out:
dropout (no model of this package trains with it), and hiding the exchange of context-parallel ranks behind computation.
"""

import itertools
import math
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from rlhf_megatron.parallel.context_parallel import SequenceSplit


class RMSNorm(torch.nn.Module):
    """Root-mean-square norm, computed in fp32 and cast back before the weight is applied, exactly as HuggingFace does.

    Args:
        config: Gives the parameter type and whether sequence parallelism is on.
        hidden_size: Features that are normalised together.
        eps: Added to the mean square.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any):
        super().__init__()
        self.eps = eps
        self.weight = torch.nn.Parameter(
            torch.ones(hidden_size, dtype=config.params_dtype, device=torch.cuda.current_device())
        )
        # Each rank sees a part of the sequence: Megatron sums such gradients over the tensor-parallel ranks.
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, x: Tensor) -> Tensor:
        """Normalises the last dimension of `x` (any shape); same shape and type."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


class TorchAttention(MegatronModule):
    """Causal attention with grouped key-value heads and, if the layer has one, a sliding window.

    Rows of a batch start at position 0 and are padded on the right only, so a causal mask is all that is needed. Packed
    sequences (``PackedSeqParams``, THD) attend to themselves only. Under context parallelism each rank gathers all keys
    and values and attends from its own two pieces of each sequence.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        *,
        pg_collection: ProcessGroupCollection,
        **_: Any,
    ):
        super().__init__(config=config)
        self.cp = config.context_parallel_size
        self.cp_group = pg_collection.cp
        self.softmax_scale = softmax_scale or 1.0 / math.sqrt(config.kv_channels)
        windowed = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        # Megatron's window counts the tokens to the left of the current one.
        self.window = config.window_size[0] + 1 if windowed else None

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attention output.

        Args:
            query: ``[s, b, heads, head_dim]``, or ``[t, heads, head_dim]`` when packed; `s` and `t` count this
                context-parallel rank's positions.
            key: The same with key-value heads.
            value: The same as `key`.
            attention_mask: Unused: attention is causal.
            attn_mask_type: Unused.
            attention_bias: Unused.
            packed_seq_params: Boundaries of packed sequences.

        Returns:
            ``[s, b, heads * head_dim]``, or ``[t, heads * head_dim]`` when packed.
        """
        if packed_seq_params is None:
            bounds = [0, query.shape[0] * self.cp]
            return self._sequences(query, key, value, bounds).flatten(2)
        ends = packed_seq_params.cu_seqlens_q_padded
        ends = packed_seq_params.cu_seqlens_q if ends is None else ends
        output = self._sequences(query[:, None], key[:, None], value[:, None], ends.tolist())
        return output[:, 0].flatten(1)

    def _sequences(self, query: Tensor, key: Tensor, value: Tensor, bounds: list[int]) -> Tensor:
        """Attention of each sequence to itself, ``[s, b, heads, head_dim]`` in and out."""
        if self.cp == 1:
            spans = [((start, stop), (start, stop)) for start, stop in itertools.pairwise(bounds)]
        else:
            split = SequenceSplit(bounds, self.cp_group)
            key, value = split.gather_keys(key), split.gather_keys(value)
            spans = split.spans()
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        parts = [
            self._attend(query[:, :, own[0] : own[1]], *(x[:, :, seen[0] : seen[1]] for x in (key, value)))
            for own, seen in spans
        ]
        output = torch.cat(parts, dim=2) if len(parts) > 1 else parts[0]
        # What is behind the last sequence belongs to none.
        output = torch.nn.functional.pad(output, (0, 0, 0, query.shape[2] - output.shape[2]))
        return output.permute(2, 0, 1, 3)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """``[b, heads, s, head_dim]`` in and out; the last query is at the last key's position."""
        length, reach = query.shape[2], key.shape[2]
        mask = None
        if length < reach or (self.window is not None and self.window < reach):
            position = torch.arange(reach, device=query.device)
            distance = position[reach - length :, None] - position[None, :]
            mask = distance >= 0
            if self.window is not None:
                mask &= distance < self.window
        if mask is not None and query.shape[1] != key.shape[1]:
            # On a GPU only the kernel that writes out all scores takes a mask and shared heads at once (torch 2.13).
            key, value = (x.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for x in (key, value))
        return torch.nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.softmax_scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
