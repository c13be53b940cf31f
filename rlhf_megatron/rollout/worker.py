"""Generation as a role: prompts at home placement in, complete rows (prompt and answer) at home placement out."""

from collections.abc import Mapping
from typing import Literal

import torch

from rlhf_megatron.config.rollout import RolloutConfig
from rlhf_megatron.data.proto import DataProto
from rlhf_megatron.data.shift import pad_right, padded_position_ids
from rlhf_megatron.parallel.layout import Layout
from rlhf_megatron.parallel.redistribute import redistribute
from rlhf_megatron.rollout.sampling import Completion, SamplingRequest, sample_seed
from rlhf_megatron.rollout.vllm_engine import VLLMEngine

VALIDATION_STREAM = 1 << 32
"""Added to the step in seeds of validation, so that it shares no random numbers with training."""


class RolloutWorkerGroup:
    """vLLM replicas on all ranks.

    Args:
        engine: This rank's part of its replica.
        home: The trainer's placement.
        config: Sampling.
        response_length: Longest answer in tokens, `data.max_response_length`.
        pad_token_id: Fills the end of shorter answers.
    """

    def __init__(
        self, engine: VLLMEngine, home: Layout, config: RolloutConfig, *, response_length: int, pad_token_id: int
    ):
        self.engine = engine
        self.home = home
        self.config = config
        self._response_length = response_length
        self._pad_token_id = pad_token_id

    def generate_sequences(self, prompts: DataProto, sampling: Literal["train", "validation"] = "train") -> DataProto:
        """Answers every row's prompt once.

        A prompt that is to be answered n times comes as n rows with consecutive ids. The answer to a row depends on the
        weights, the prompt and `row_id`, never on the replica that generates it.

        Args:
            prompts: `prompts` [B, P] left-padded, `attention_mask` [B, P], `row_id` [B]; `global_step` in `meta_info`.
            sampling: Whose parameters hold: `rollout` or `rollout.val_kwargs`.

        Returns:
            The same rows with `responses` [B, R] right-padded, `input_ids`, `attention_mask` and `position_ids`
            [B, P + R], `response_mask` [B, R], `rollout_log_probs` [B, R] fp32 (0 past the end); in `meta_info`
            `weight_version`, the sync whose weights answered.

        Collective over the world. Raises DataError for a prompt that does not fit, GateError when the ranks of a
        replica were given different prompts.
        """
        prompts.require("prompts", "attention_mask", "row_id", method="generate_sequences")
        rows = redistribute(prompts.select(["prompts", "attention_mask", "row_id"], []), self.engine.replicas)
        tokens = [
            row[mask.bool()].tolist()
            for row, mask in zip(rows.batch["prompts"], rows.batch["attention_mask"], strict=True)
        ]
        requests = [
            self._request(row, prompts.meta_info["global_step"], sampling) for row in rows.batch["row_id"].tolist()
        ]
        completions = self.engine.generate(tokens, requests)
        answers = DataProto.from_dict({"row_id": rows.batch["row_id"], **self._answers(completions)})
        answers = redistribute(answers, self.home)
        return self._whole_rows(prompts, answers, self.engine.weight_version)

    def state_dict(self) -> dict[str, int]:
        """What a checkpoint must hold: how many times weights were synchronised. Samples depend on the step alone."""
        return {"weight_version": self.engine.weight_version}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Goes on counting from a checkpoint. The weights come with the next sync."""
        self.engine.weight_version = int(state["weight_version"])

    def _request(self, row_id: int, step: int, sampling: Literal["train", "validation"]) -> SamplingRequest:
        if sampling == "train":
            seed = sample_seed(self.config.seed, step, row_id // self.config.n, row_id % self.config.n)
            return SamplingRequest.for_training(self.config, max_tokens=self._response_length, seed=seed)
        n = self.config.val_kwargs.n
        seed = sample_seed(self.config.seed, step + VALIDATION_STREAM, row_id // n, row_id % n)
        return SamplingRequest.for_validation(self.config, max_tokens=self._response_length, seed=seed)

    def _answers(self, completions: list[Completion]) -> dict[str, torch.Tensor]:
        width = self._response_length
        responses, mask = pad_right([item.token_ids for item in completions], width, self._pad_token_id)
        log_probs = torch.zeros(len(completions), width, dtype=torch.float32)
        for row, item in enumerate(completions):
            log_probs[row, : len(item.log_probs)] = torch.tensor(item.log_probs, dtype=torch.float32)
        return {"responses": responses, "response_mask": mask, "rollout_log_probs": log_probs}

    @staticmethod
    def _whole_rows(prompts: DataProto, answers: DataProto, version: int) -> DataProto:
        columns = answers.tensors()
        mask = torch.cat([prompts.batch["attention_mask"], columns["response_mask"]], dim=1)
        whole = (
            prompts.tensors()
            | columns
            | {
                "input_ids": torch.cat([prompts.batch["prompts"], columns["responses"]], dim=1),
                "attention_mask": mask,
                "position_ids": padded_position_ids(mask),
            }
        )
        return DataProto.from_dict(whole, prompts.non_tensor_batch, prompts.meta_info | {"weight_version": version})
