"""Configuration of datasets and loaders."""

from typing import Literal

from pydantic import Field, NonNegativeInt, PositiveInt

from rlhf_megatron.config.base import Node


class DataConfig(Node):
    """Prompts for online RL."""

    train_files: list[str] = Field(min_length=1)
    """JSONL, Parquet, or folders of HuggingFace datasets saved to disk."""
    val_files: list[str] = []
    """Same, for validation."""
    prompt_key: str = "prompt"
    """Column with the prompt: a string, or a list of chat messages for the tokenizer's template."""
    reward_fn_key: str = "data_source"
    """Column that names the source of a row; rewards and validation metrics are told apart by it."""
    max_prompt_length: PositiveInt = 512
    """Longest prompt in tokens."""
    max_response_length: PositiveInt = 512
    """Longest answer in tokens."""
    truncation: Literal["error", "drop", "truncate"] = "error"
    """What happens to longer prompts; dropped and truncated ones are counted."""
    train_batch_size: PositiveInt = 1024
    """Prompts per step, over all ranks."""
    val_batch_size: PositiveInt | None = None
    """Prompts per validation batch; the whole set when null."""
    shuffle: bool = True
    """Whether each epoch has its own order."""
    seed: NonNegativeInt = 1
    """Seed of that order."""
    apply_chat_template_kwargs: dict[str, object] = {}
    """Further arguments of the tokenizer's chat template."""


class SFTDataConfig(Node):
    """Prompt and answer pairs for supervised fine-tuning."""

    train_files: list[str] = Field(min_length=1)
    """JSONL, Parquet, or folders of HuggingFace datasets saved to disk."""
    val_files: list[str] = []
    """Same, for validation."""
    prompt_key: str = "prompt"
    """Column with the prompt: a string, or a list of chat messages for the tokenizer's template."""
    response_key: str = "response"
    """Column with the answer; an end-of-sequence token is appended."""
    max_length: PositiveInt = 1024
    """Longest prompt plus answer in tokens."""
    truncation: Literal["error", "drop", "truncate"] = "error"
    """What happens to longer rows; dropped and truncated ones are counted."""
    train_batch_size: PositiveInt = 256
    """Rows per optimizer step, over all ranks."""
    micro_batch_size_per_gpu: PositiveInt = 8
    """Rows per forward and backward pass on one rank."""
    use_dynamic_bsz: bool = False
    """Whether passes are filled up to a number of tokens, in place of a number of rows."""
    max_token_len_per_gpu: PositiveInt = 8192
    """Tokens per forward and backward pass on one rank, when `use_dynamic_bsz`."""
    shuffle: bool = True
    """Whether each epoch has its own order."""
    seed: NonNegativeInt = 1
    """Seed of that order."""
    apply_chat_template_kwargs: dict[str, object] = {}
    """Further arguments of the tokenizer's chat template."""
