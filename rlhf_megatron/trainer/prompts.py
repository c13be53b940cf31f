"""Batches of prompts, the same on every rank: endless ones for training, one pass at a time for validation."""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from rlhf_megatron.config.ppo import PPOConfig
from rlhf_megatron.data.datasets import Dataset, PromptRow
from rlhf_megatron.data.loader import StatefulLoader, collate_prompts
from rlhf_megatron.data.proto import DataProto


class PromptSource:
    """Endless batches of prompts, the same on every rank.

    Args:
        dataset: Training prompts.
        config: Batch size, order and limits.
        pad_token_id: Fills shorter prompts.
    """

    def __init__(self, dataset: Dataset[PromptRow], config: PPOConfig, pad_token_id: int):
        data = config.data
        self.loader = StatefulLoader(dataset, data.train_batch_size, data.shuffle, data.seed)
        self._collate = partial(collate_prompts, pad_id=pad_token_id, max_prompt_length=data.max_prompt_length)

    def __len__(self) -> int:
        """Batches per pass over the prompts."""
        return len(self.loader)

    @property
    def epoch(self) -> int:
        """Pass over the prompts that the next batch belongs to, from 0."""
        return self.loader.epoch

    def next_batch(self) -> DataProto:
        """The next batch."""
        return self._collate(self.loader.next_batch())

    def state_dict(self) -> dict[str, Any]:
        """Where the prompts stand; see :class:`StatefulLoader`."""
        return self.loader.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from there; see :class:`StatefulLoader`."""
        self.loader.load_state_dict(state)


def validation_batches(
    dataset: Dataset[PromptRow] | None, config: PPOConfig, pad_token_id: int
) -> Callable[[], Iterator[DataProto]] | None:
    """Gives one pass over the validation prompts at each call; None without any."""
    if dataset is None:
        return None
    data = config.data

    def one_pass() -> Iterator[DataProto]:
        loader = StatefulLoader(dataset, data.val_batch_size or len(dataset), False, data.seed, drop_last=False)
        for samples in loader:
            yield collate_prompts(samples, pad_token_id, data.max_prompt_length)

    return one_pass
