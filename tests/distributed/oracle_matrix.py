"""What tests/distributed/bodies_matrix.py computes, once more: float64, one process, HuggingFace's model, no Megatron.

Slow and obvious on purpose: one row after the other without any padding, losses written out from the papers, gradients
by autograd over the whole batch, clipping and Adam by hand.
"""

import math
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

LR, EPS, CLIP, WEIGHT_DECAY = 1e-3, 1e-3, 0.5, 0.1
BETAS = (0.9, 0.999)
TEMPERATURE = 0.7


class Policy:
    """A model in float64, perhaps with a scalar head in place of its vocabulary."""

    def __init__(self, folder: str | Path, head: torch.Tensor | None = None):
        # Grouped matrix products, which transformers takes for experts, have no float64.
        self.model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
        )
        self.parameters = {
            name: p for name, p in self.model.named_parameters() if head is None or "lm_head" not in name
        }
        self.head = None if head is None else torch.nn.Parameter(head.double())
        if self.head is not None:
            self.parameters["score.weight"] = self.head

    def rows(self, batch: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        """For each row, a number about each of its response tokens: log-prob or value."""
        found = []
        for prompt, response, mask, answered in zip(
            batch["prompts"], batch["responses"], batch["attention_mask"], batch["response_mask"], strict=True
        ):
            prompt = prompt[mask[: len(prompt)].bool()]
            response = response[answered.bool()]
            tokens = torch.cat([prompt, response])
            about = range(len(prompt) - 1, len(tokens) - 1)
            if self.head is None:
                log_probs = torch.log_softmax(self.model(tokens[None]).logits[0] / TEMPERATURE, -1)
                found.append(torch.stack([log_probs[at, tokens[at + 1]] for at in about]))
            else:
                hidden = self.model.model(tokens[None]).last_hidden_state[0]
                found.append(torch.stack([hidden[at] @ self.head[0] for at in about]))
        return found


def sft_loss(rows: list[torch.Tensor], batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Mean cross-entropy over all response tokens."""
    return -torch.cat(rows).mean()


def actor_loss(rows: list[torch.Tensor], batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Schulman et al. 2017, eq. 7, with clip 0.2 and 0.3 and dual clip 3; mean over a row's tokens, then over rows."""
    means = []
    for index, log_prob in enumerate(rows):
        losses = []
        for at, new in enumerate(log_prob):
            ratio = torch.exp(new - batch["old_log_probs"][index, at].double())
            advantage = batch["advantages"][index, at].double()
            loss = torch.maximum(-ratio * advantage, -ratio.clamp(0.8, 1.3) * advantage)
            if advantage < 0:
                loss = torch.minimum(loss, -3.0 * advantage)
            losses.append(loss)
        means.append(sum(losses) / len(losses))
    return sum(means) / len(means)


def critic_loss(rows: list[torch.Tensor], batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Half the clipped squared error, the larger of the two (verl's and the PPO code's), mean over all tokens."""
    losses = []
    for index, values in enumerate(rows):
        for at, value in enumerate(values):
            old, target = batch["values"][index, at].double(), batch["returns"][index, at].double()
            clipped = torch.clamp(value, old - 0.5, old + 0.5)
            losses.append(0.5 * torch.maximum((value - target) ** 2, (clipped - target) ** 2))
    return sum(losses) / len(losses)


class Adam:
    """AdamW by hand (Loshchilov and Hutter 2019), with the gradient clipped to a global norm first."""

    def __init__(self, parameters: dict[str, torch.Tensor]):
        self.parameters = parameters
        self.first = {name: torch.zeros_like(p) for name, p in parameters.items()}
        self.second = {name: torch.zeros_like(p) for name, p in parameters.items()}
        self.count = 0

    @torch.no_grad()
    def step(self, loss: torch.Tensor) -> float:
        """One step; returns the norm before clipping."""
        names = list(self.parameters)
        with torch.enable_grad():
            gradients = torch.autograd.grad(loss, [self.parameters[name] for name in names])
        norm = math.sqrt(sum(float((gradient**2).sum()) for gradient in gradients))
        # Megatron-Core clips as torch does, with 1e-6 in the denominator.
        scale = min(1.0, CLIP / (norm + 1e-6))
        self.count += 1
        for name, gradient in zip(names, gradients, strict=True):
            gradient = gradient * scale
            parameter = self.parameters[name]
            # One-dimensional parameters (norms and biases) do not decay.
            if parameter.dim() > 1:
                parameter.mul_(1 - LR * WEIGHT_DECAY)
            self.first[name] = BETAS[0] * self.first[name] + (1 - BETAS[0]) * gradient
            self.second[name] = BETAS[1] * self.second[name] + (1 - BETAS[1]) * gradient**2
            first = self.first[name] / (1 - BETAS[0] ** self.count)
            second = self.second[name] / (1 - BETAS[1] ** self.count)
            parameter.sub_(LR * first / (second.sqrt() + EPS))
        return norm


def steps(folder: str, batch: dict[str, torch.Tensor], head: torch.Tensor) -> dict[str, Any]:
    """The scores and the three steps."""
    actor, critic = Policy(folder), Policy(folder, head)
    result: dict[str, Any] = {"log_probs": [row.detach() for row in actor.rows(batch)]}
    optimizer = Adam(actor.parameters)
    for kind, policy, loss_of, adam in (
        ("sft", actor, sft_loss, optimizer),
        ("actor", actor, actor_loss, optimizer),
        ("critic", critic, critic_loss, Adam(critic.parameters)),
    ):
        scores = policy.rows(batch)
        if kind == "critic":
            result["values"] = [row.detach() for row in scores]
        loss = loss_of(scores, batch)
        result[f"{kind}/loss"] = loss.item()
        result[f"{kind}/grad_norm"] = adam.step(loss)
        result[f"{kind}/weights"] = {name: p.detach().clone() for name, p in policy.parameters.items()}
    return result
