"""What mixtures of experts add to the oracle of test_matrix.py: names of experts, and the load-balancing loss."""

from collections.abc import Sequence
from typing import Any

import torch

from tests.distributed.oracle_matrix import Adam, Policy, sft_loss


def by_expert(tensors: dict[str, torch.Tensor], variant: str) -> dict[str, torch.Tensor]:
    """Tensors that transformers fuses in memory over a layer's experts, under the names of its files."""
    block = "block_sparse_moe" if variant == "mixtral" else "mlp"
    gate, up, down = ("w1", "w3", "w2") if variant == "mixtral" else ("gate_proj", "up_proj", "down_proj")
    found = {}
    for name, tensor in tensors.items():
        layer, _, kind = name.partition(".mlp.")
        if kind == "experts.gate_up_proj":
            for expert, both in enumerate(tensor):
                for part, half in zip((gate, up), both.chunk(2), strict=True):
                    found[f"{layer}.{block}.experts.{expert}.{part}.weight"] = half
        elif kind == "experts.down_proj":
            for expert, part in enumerate(tensor):
                found[f"{layer}.{block}.experts.{expert}.{down}.weight"] = part
        else:
            found[f"{layer}.{block}.{kind}" if kind else name] = tensor
    return found


def balanced_sft_step(
    folder: str, batch: dict[str, torch.Tensor], coefficient: float, micro_batches: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """One SFT step with the load-balancing loss (Fedus et al. 2021, eq. 4-6, with k experts per token).

    Args:
        folder: The model.
        batch: Rows as :func:`tests.distributed.bodies_matrix.fixed_rows` makes them.
        coefficient: Weight of the load-balancing loss.
        micro_batches: Rows among whose tokens loads are balanced; the loss is the mean of theirs over tokens.
    """
    policy = Policy(folder)
    logits: list[list[torch.Tensor]] = []
    for layer in policy.model.model.layers:
        if hasattr(layer.mlp, "gate") and hasattr(layer.mlp, "experts"):
            seen: list[torch.Tensor] = []
            logits.append(seen)
            layer.mlp.gate.register_forward_hook(lambda _m, _i, output, seen=seen: seen.append(output[0]))
    scores = policy.rows(batch)
    k = policy.model.config.num_experts_per_tok
    total = sum(len(row) for row in logits[0])
    balance = torch.zeros((), dtype=torch.float64)
    for rows in micro_batches:
        for seen in logits:
            own = torch.cat([seen[row] for row in rows])
            probabilities = torch.softmax(own, -1)
            chosen = probabilities.topk(k, dim=-1).indices
            share = torch.bincount(chosen.flatten(), minlength=own.shape[1]) / (len(own) * k)
            loss = own.shape[1] * (share * probabilities.mean(0)).sum()
            balance = balance + loss * len(own) / total
    norm = Adam(policy.parameters).step(sft_loss(scores, batch) + coefficient * balance)
    return {"norm": norm, "weights": {name: p.detach() for name, p in policy.parameters.items()}}
