"""Layers of the ``torch`` implementation: RMSNorm under sequence parallelism, and attention by PyTorch's SDPA.

They need neither Transformer Engine nor Apex: this is how models run on CPU, and on a GPU without those. Left out:
context parallelism and dropout (no model of this package trains with dropout).
"""

import itertools
import math
from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from rlhf_megatron.errors import LayoutError


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
    sequences (``PackedSeqParams``, THD) attend to themselves only.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        softmax_scale: float | None = None,
        **_: Any,
    ):
        super().__init__(config=config)
        if config.context_parallel_size > 1:
            raise LayoutError(
                f"context_parallel_size = {config.context_parallel_size}: the torch layers cannot divide a sequence. "
                "Set it to 1, or transformer_impl to transformer_engine."
            )
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
            query: ``[s, b, heads, head_dim]``, or ``[t, heads, head_dim]`` when packed.
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
            output = self._attend(*(x.permute(1, 2, 0, 3) for x in (query, key, value)))
            return output.permute(2, 0, 1, 3).flatten(2)
        bounds = packed_seq_params.cu_seqlens_q_padded
        bounds = (packed_seq_params.cu_seqlens_q if bounds is None else bounds).tolist()
        parts = []
        for start, stop in itertools.pairwise(bounds):
            part = self._attend(*(x[start:stop].transpose(0, 1)[None] for x in (query, key, value)))
            parts.append(part[0].transpose(0, 1))
        output = torch.cat(parts).flatten(1)
        return torch.nn.functional.pad(output, (0, 0, 0, query.shape[0] - output.shape[0]))

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """``[b, heads, s, head_dim]`` in and out."""
        length = query.shape[2]
        mask = None
        if self.window is not None and self.window < length:
            position = torch.arange(length, device=query.device)
            distance = position[:, None] - position[None, :]
            mask = (distance >= 0) & (distance < self.window)
        return torch.nn.functional.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.softmax_scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
