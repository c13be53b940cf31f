"""The router of mixture-of-experts layers, with a load-balancing loss that fits this package's plain sums.

Megatron-Core (0.16.1) weighs the loss of a micro-batch by the tokens of one rank's part of it and counts on a division
by all tokens at the end, which plain sums do not have; and it decides so when the router is built. Here each
micro-batch's loss is multiplied by its number of tokens over all ranks that share it, and the coefficient is divided by
the tokens of the mini-batch beforehand (:func:`set_aux_loss_scale`): the sum over micro-batches and ranks is their mean
over tokens, under any layout.
"""

from collections.abc import Sequence
from typing import Any

import torch
from megatron.core.transformer.moe.moe_utils import (
    MoEAuxLossAutoScaler,
    get_tokens_per_expert_and_token_count,
    switch_load_balancing_loss_func,
)
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor


class BalancedRouter(TopKRouter):
    """Megatron-Core's top-k router but for the scale of the load-balancing loss."""

    def _apply_aux_loss(
        self, probs: Tensor, scores_for_aux_loss: Tensor, routing_map: Tensor, with_padding_mask: bool = False
    ) -> Tensor:
        coefficient = self.get_aux_loss_coeff("aux_loss")
        if coefficient == 0:
            return probs
        counts, _, tokens = get_tokens_per_expert_and_token_count(
            routing_map=routing_map,
            reduce_group=self.tp_cp_group,
            topk=self.topk,
            with_padding_mask=with_padding_mask,
        )
        # A micro-batch without a single real token fills up the schedule of a rank that has fewer than others.
        tokens = tokens.clamp(min=1) if isinstance(tokens, Tensor) else tokens
        loss = switch_load_balancing_loss_func(
            probs=scores_for_aux_loss,
            tokens_per_expert=counts,
            total_num_tokens=tokens,  # pyright: ignore[reportArgumentType]
            topk=self.topk,
            num_experts=self.config.num_moe_experts or 1,
            moe_aux_loss_coeff=coefficient,
        )
        scaled: Any = MoEAuxLossAutoScaler.apply(probs, loss * tokens)
        return scaled


def set_aux_loss_scale(chunks: Sequence[torch.nn.Module], coefficient: float, num_tokens: float) -> None:
    """Sets the weight of the load-balancing loss for one mini-batch.

    Args:
        chunks: This rank's chunks, bare or wrapped; they share a configuration.
        coefficient: Weight of the loss, for example 0.001; 0 for a dense model.
        num_tokens: Real tokens of the mini-batch over all micro-batches and data-parallel shards.
    """
    for chunk in chunks:
        config: Any = chunk.config
        config.moe_aux_loss_coeff = coefficient / max(num_tokens, 1.0)
