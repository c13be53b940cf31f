"""Scoring as a role: rows at home placement in, scores on the last response token out.

Home placement divides the rows over all ranks, so that a slow reward function is spread over all of them.
"""

import torch
from transformers import PreTrainedTokenizerBase

from rlhf_megatron.data.proto import DataProto
from rlhf_megatron.rewards.function import RewardSample
from rlhf_megatron.rewards.manager import RewardManager


class RewardWorkerGroup:
    """Reward functions on all ranks.

    Args:
        manager: This rank's scorer.
        tokenizer: Turns responses into text.
    """

    def __init__(self, manager: RewardManager, tokenizer: PreTrainedTokenizerBase):
        self.manager = manager
        self.tokenizer = tokenizer

    def compute_rm_score(self, data: DataProto) -> DataProto:
        """Adds `token_level_scores` [B, R] fp32 and the column `reward_extra` (a dict per row).

        The score stands on the last response token; a row without response tokens has no place for it and counts 0.

        Local: every rank scores its own rows. Raises RewardError as `reward.on_error` says.
        """
        data.require("responses", "attention_mask", "response_mask", method="compute_rm_score")
        data.require("data_source", "ground_truth", "uid", method="compute_rm_score")
        results = self.manager.score(self._samples(data))
        mask = data.batch["response_mask"].bool()
        scores = torch.zeros(mask.shape, dtype=torch.float32)
        rows = mask.any(1).nonzero().flatten()
        last = mask.shape[1] - 1 - mask.flip(1).int().argmax(1)
        values = torch.tensor([result.score for result in results], dtype=torch.float32)
        scores[rows, last[rows]] = values[rows]
        extra = [{**result.extra, "score": result.score, "error": result.error} for result in results]
        return DataProto.from_dict({"token_level_scores": scores}, {"reward_extra": extra})

    def _samples(self, data: DataProto) -> list[RewardSample]:
        columns = data.non_tensor_batch
        width = data.batch["responses"].shape[1]
        lengths = data.batch["attention_mask"][:, -width:].sum(1).tolist()
        extra = columns.get("extra_info", [None] * len(data))
        return [
            RewardSample(
                data_source=columns["data_source"][row],
                solution_str=str(
                    self.tokenizer.decode(
                        data.batch["responses"][row, : lengths[row]].tolist(), skip_special_tokens=True
                    )
                ),
                ground_truth=columns["ground_truth"][row],
                extra_info=extra[row],
                uid=columns["uid"][row],
            )
            for row in range(len(data))
        ]
