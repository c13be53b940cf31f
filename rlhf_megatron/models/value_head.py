"""The scalar head of critics and reward models: hidden state to one number per token, in fp32.

No bias, so that it is exported as HuggingFace's ``score.weight``. It takes the place of GPTModel's output layer.
"""

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.distributed import ProcessGroup


class ValueHead(torch.nn.Module):
    """``hidden -> 1`` in fp32, replicated over the tensor-parallel ranks.

    Every rank computes every token's value from the whole sequence, so its weight gradient is complete on each rank: it
    must be neither summed over the ranks (hence no ``sequence_parallel`` attribute) nor counted more than once in the
    gradient norm (hence no ``tensor_model_parallel`` attribute). For the same reason the gathered hidden state's
    gradient is split over the ranks, not reduced.

    Args:
        config: Hidden size, sequence parallelism, device.
        initializer_range: Standard deviation of the initial weight.
        seed: The initial weight depends on it alone, not on the layout.
        tp_group: Tensor-parallel group.
    """

    def __init__(self, config: TransformerConfig, initializer_range: float, seed: int, tp_group: ProcessGroup):
        super().__init__()
        self.sequence_parallel = config.sequence_parallel
        self.tp_group = tp_group
        weight = torch.empty(1, config.hidden_size)
        weight.normal_(0.0, initializer_range, generator=torch.Generator().manual_seed(seed))
        self.weight = torch.nn.Parameter(weight.to(device=torch.cuda.current_device()))

    def forward(
        self, hidden: Tensor, weight: Tensor | None = None, runtime_gather_output: bool | None = None
    ) -> tuple[Tensor, None]:
        """Values of all tokens.

        Args:
            hidden: ``[s, b, h]``, or ``[s / tp, b, h]`` under sequence parallelism.
            weight: Unused: part of the interface of an output layer.
            runtime_gather_output: Unused.

        Returns:
            ``[s, b, 1]`` fp32, equal on all tensor-parallel ranks, and None for the bias.
        """
        if self.sequence_parallel:
            hidden = gather_from_sequence_parallel_region(
                hidden, tensor_parallel_output_grad=False, group=self.tp_group
            )
        return torch.nn.functional.linear(hidden.float(), self.weight), None
