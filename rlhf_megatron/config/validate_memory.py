"""Rules about what makes a role's memory smaller: offload."""

from collections.abc import Iterator
from typing import Any

from rlhf_megatron.errors import Violation


def offload_for_someone(config: Any) -> Iterator[Violation]:
    """Memory is given back for the other roles; supervised fine-tuning has no other."""
    for name in ("param_offload", "grad_offload", "optimizer_offload"):
        if getattr(config.megatron, name):
            yield Violation(
                f"megatron.{name}",
                True,
                "would only cost time: in supervised fine-tuning no other role waits for the memory.",
                f"Take it out with ~megatron.{name}.",
            )


SFT_RULES = (offload_for_someone,)
"""Rules about a run of supervised fine-tuning."""
