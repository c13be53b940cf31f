"""The one file that shifts tokens.

Outside, a row is padded at its border: prompt at the left, answer at the right, and index ``r`` of every ``[rows, R]``
tensor is about answer token ``r``. Inside a causal model a row starts at position 0 and the output at position ``j`` is
about token ``j + 1``. Everything that goes from one to the other is here; nobody else adds or subtracts one.

Left out: packing of several rows into one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_megatron.data.proto import DataProto
from rlhf_megatron.errors import DataError


@dataclass(frozen=True)
class ModelInputs:
    """Rows as a causal model reads them: no padding at the left, so that no attention mask is needed.

    Attributes:
        tokens: ``[b, s]`` int64. Prompt, answer, then padding.
        labels: ``[b, s]`` int64. ``labels[:, j]`` is ``tokens[:, j + 1]``; the padding id in the last column.
        position_ids: ``[b, s]`` int64, counting from 0 in each row.
        lengths: ``[b]`` int64, tokens of prompt plus answer.
        response_index: ``[b, R]`` int64. Where the output about answer token ``r`` is found: ``prompt length + r - 1``;
            past the end of the answer, the last token of the row.
    """

    tokens: Tensor
    labels: Tensor
    position_ids: Tensor
    lengths: Tensor
    response_index: Tensor


def to_model_inputs(rows: DataProto, *, multiple_of: int = 1, pad_id: int = 0) -> ModelInputs:
    """Moves the rows of a batch to the left and pads them at the right only.

    Lengths are those of ``attention_mask``, never found by looking for padding or end-of-sequence ids.
    ``response_mask`` is not read: holes in it (turns of a tool) change no position.

    Args:
        rows: Needs ``prompts`` ``[b, P]`` left padded, ``responses`` ``[b, R]`` right padded and ``attention_mask``
            ``[b, P+R]``. An answer may be empty, a prompt may not.
        multiple_of: The width is the longest row rounded up to this (at least ``multiple_of``, also without rows).
        pad_id: What to write behind the end of a row; must be a valid row of the embedding.

    Raises:
        DataError: A key is missing, shapes do not fit, a prompt is empty, or the mask has holes; names the row.
    """
    rows.require("prompts", "responses", "attention_mask", method="to_model_inputs")
    prompts, responses, mask = rows.batch["prompts"], rows.batch["responses"], rows.batch["attention_mask"].long()
    prompt_width, response_width = prompts.shape[1], responses.shape[1]
    if mask.shape[1] != prompt_width + response_width:
        raise DataError(
            f"attention_mask is {list(mask.shape)}, but prompts {list(prompts.shape)} and responses "
            f"{list(responses.shape)} need a width of {prompt_width + response_width}"
        )
    prompt_lengths, response_lengths = mask[:, :prompt_width].sum(1), mask[:, prompt_width:].sum(1)
    _refuse_bad_rows(rows, mask, prompt_width, prompt_lengths)

    lengths = prompt_lengths + response_lengths
    longest = int(lengths.max()) if len(rows) else 1
    width = -(-longest // multiple_of) * multiple_of
    positions = torch.arange(width, device=prompts.device).expand(len(rows), width)
    # The prompt ends where the answer starts, so a row is one contiguous piece of [prompts | responses].
    padded = torch.cat([prompts, responses], dim=1).long()
    source = (positions + (prompt_width - prompt_lengths)[:, None]).clamp(max=prompt_width + response_width - 1)
    tokens = padded.gather(1, source).masked_fill(positions >= lengths[:, None], pad_id)
    labels = torch.cat([tokens[:, 1:], tokens.new_full((len(rows), 1), pad_id)], dim=1)
    about = prompt_lengths[:, None] + torch.arange(response_width, device=prompts.device) - 1
    response_index = torch.minimum(about, (lengths - 1)[:, None])
    return ModelInputs(tokens, labels, positions, lengths, response_index)


def take_response(values: Tensor, inputs: ModelInputs) -> Tensor:
    """Picks the outputs about answer tokens.

    Args:
        values: ``[b, s]``, one number per position: log-prob of the label, entropy, or a value head's output.
        inputs: What the model was given.

    Returns:
        ``[b, R]`` of the dtype of ``values``; index ``r`` is about answer token ``r``, and 0 behind the end of the
        answer (with gradient 0 there). Differentiable.
    """
    if values.shape != inputs.tokens.shape:
        raise DataError(
            f"one value per token is needed: values {list(values.shape)}, tokens {list(inputs.tokens.shape)}"
        )
    inside = inputs.response_index < (inputs.lengths - 1)[:, None]
    return values.gather(1, inputs.response_index).where(inside, values.new_zeros(()))


def padded_position_ids(attention_mask: Tensor) -> Tensor:
    """Positions of a padded batch, ``[b, P+R]`` int64: 0 for the first real token, 0 under left padding."""
    return (attention_mask.long().cumsum(1) - 1).clamp(min=0)


def pad_left(rows: Sequence[Sequence[int]], width: int, pad_id: int) -> tuple[Tensor, Tensor]:
    """Token lists as one tensor padded at the left.

    Returns:
        Tokens and mask, both ``[rows, width]`` int64.

    Raises:
        DataError: A row is longer than ``width``.
    """
    tokens, mask = pad_right([list(reversed(row)) for row in rows], width, pad_id)
    return tokens.flip(1), mask.flip(1)


def pad_right(rows: Sequence[Sequence[int]], width: int, pad_id: int) -> tuple[Tensor, Tensor]:
    """Token lists as one tensor padded at the right; see :func:`pad_left`."""
    lengths = [len(row) for row in rows]
    if max(lengths, default=0) > width:
        row = lengths.index(max(lengths))
        raise DataError(f"row {row} has {lengths[row]} tokens, more than the width {width} that it is padded to")
    tokens = [[*row, *[pad_id] * (width - len(row))] for row in rows]
    mask = torch.arange(width) < torch.tensor(lengths, dtype=torch.int64)[:, None]
    return torch.tensor(tokens, dtype=torch.int64).reshape(len(rows), width), mask.long()


def _refuse_bad_rows(rows: DataProto, mask: Tensor, prompt_width: int, prompt_lengths: Tensor) -> None:
    steps = mask.diff(dim=1)
    # Column j of `steps` compares tokens j and j+1: only rising inside the prompt, only falling from its last token on.
    holes = (steps[:, : max(prompt_width - 1, 0)] < 0).any(1) | (steps[:, max(prompt_width - 1, 0) :] > 0).any(1)
    for bad, reason in (
        (prompt_lengths == 0, "its prompt is empty; nothing is there to condition the first answer token on"),
        (((mask != 0) & (mask != 1)).any(1), "attention_mask holds something else than 0 and 1"),
        (holes, "attention_mask is not zeros, ones, zeros: pad prompts at the left and answers at the right only"),
    ):
        if bool(bad.any()):
            row = int(bad.nonzero()[0])
            name = f"row {row}" + (f" (row_id {int(rows.batch['row_id'][row])})" if "row_id" in rows else "")
            raise DataError(f"{name}: {reason}")
