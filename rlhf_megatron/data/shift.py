"""The one file that shifts tokens.

Outside, a row is padded at its border: prompt at the left, answer at the right, and index ``r`` of every ``[rows, R]``
tensor is about answer token ``r``. Inside a causal model a row starts at position 0 and the output at position ``j`` is
about token ``j + 1``. Everything that goes from one to the other is here; nobody else adds or subtracts one.

Two forms of the inside: rows below each other, padded at the right to the longest (:func:`to_model_inputs`), or one
after another in a single row (:func:`to_packed_inputs`, Megatron-Core's and Transformer Engine's ``thd``).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rlhf_megatron.data.proto import DataProto
from rlhf_megatron.errors import DataError


@dataclass(frozen=True)
class ModelInputs:
    """Rows as a causal model reads them: no padding at the left, so that no attention mask is needed.

    `n` rows are ``[n, s]`` when padded and ``[1, t]`` when packed.

    Attributes:
        tokens: ``[n, s]`` or ``[1, t]`` int64. Prompt, answer, then padding.
        labels: The same shape. The label of a position is the row's next token; the padding id at the row's end.
        position_ids: The same shape, counting from 0 in each row.
        lengths: ``[n]`` int64, tokens of prompt plus answer.
        last_index: ``[n]`` int64. Where a row's last token is in ``tokens.flatten()``.
        response_index: ``[n, R]`` int64. Where the output about answer token ``r`` is in the flattened outputs:
            ``prompt length + r - 1`` within the row; past the end of the answer, the last token of the row.
        bounds: Where the rows of a packed batch begin, padding included, and where the last one ends (``n + 1``
            numbers); empty when padded.
    """

    tokens: Tensor
    labels: Tensor
    position_ids: Tensor
    lengths: Tensor
    last_index: Tensor
    response_index: Tensor
    bounds: tuple[int, ...] = ()

    def to(self, device: torch.device) -> "ModelInputs":
        """The same on a device."""
        tensors = {name: value.to(device) for name, value in vars(self).items() if isinstance(value, Tensor)}
        return replace(self, **tensors)


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
    prompt_lengths, lengths = _checked_lengths(rows)
    width = _round_up(int(lengths.max()) if len(rows) else 1, multiple_of)
    positions = torch.arange(width, device=lengths.device).expand(len(rows), width)
    row = torch.arange(len(rows), device=lengths.device)[:, None].expand(len(rows), width)
    tokens, labels = _tokens_and_labels(rows, row, positions, prompt_lengths, lengths, pad_id)
    starts = torch.arange(len(rows), device=lengths.device) * width
    return ModelInputs(
        tokens, labels, positions, lengths, *_indices(starts, prompt_lengths, lengths, rows.batch["responses"].shape[1])
    )


def to_packed_inputs(
    rows: DataProto, *, row_multiple_of: int = 1, multiple_of: int = 1, pad_id: int = 0
) -> ModelInputs:
    """Puts the rows of a batch one after another.

    Args:
        rows: As for :func:`to_model_inputs`; at least one.
        row_multiple_of: Each row's part is rounded up to this, as dividing rows over context-parallel ranks needs.
        multiple_of: The whole is rounded up to this, a multiple of ``row_multiple_of``, by lengthening the last row.
        pad_id: What to write behind the end of a row.

    Raises:
        DataError: As for :func:`to_model_inputs`.
    """
    prompt_lengths, lengths = _checked_lengths(rows)
    widths = -(-lengths // row_multiple_of) * row_multiple_of
    total = int(widths.sum())
    widths[-1] += _round_up(total, multiple_of) - total
    ends = widths.cumsum(0)
    starts = ends - widths
    row = torch.repeat_interleave(torch.arange(len(rows), device=lengths.device), widths)
    positions = torch.arange(len(row), device=lengths.device) - starts[row]
    tokens, labels = _tokens_and_labels(rows, row, positions, prompt_lengths, lengths, pad_id)
    indices = _indices(starts, prompt_lengths, lengths, rows.batch["responses"].shape[1])
    bounds = (0, *ends.tolist())
    return ModelInputs(tokens[None], labels[None], positions[None], lengths, *indices, bounds)


def real_tokens(inputs: ModelInputs, rows: DataProto) -> Tensor:
    """Which positions hold tokens of rows that count: bool, of the shape of ``inputs.tokens``.

    Args:
        inputs: What the model is given.
        rows: The rows it was made of; one whose ``response_mask`` is all zero counts for nothing.
    """
    lengths = inputs.lengths * rows.batch["response_mask"].bool().any(1)
    if inputs.bounds:
        widths = torch.tensor(inputs.bounds, device=lengths.device).diff()
        return inputs.position_ids < torch.repeat_interleave(lengths, widths)[None]
    return inputs.position_ids < lengths[:, None]


def take_response(values: Tensor, inputs: ModelInputs) -> Tensor:
    """Picks the outputs about answer tokens.

    Args:
        values: ``[n, s]`` or ``[1, t]``, one number per position: log-prob of the label, entropy, or a value head's
            output.
        inputs: What the model was given.

    Returns:
        ``[n, R]`` of the dtype of ``values``; index ``r`` is about answer token ``r``, and 0 behind the end of the
        answer (with gradient 0 there). Differentiable.
    """
    if values.shape != inputs.tokens.shape:
        raise DataError(
            f"one value per token is needed: values {list(values.shape)}, tokens {list(inputs.tokens.shape)}"
        )
    inside = inputs.response_index < inputs.last_index[:, None]
    return values.flatten()[inputs.response_index].where(inside, values.new_zeros(()))


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


def _checked_lengths(rows: DataProto) -> tuple[Tensor, Tensor]:
    """Tokens of each row's prompt, and of prompt plus answer, both ``[b]`` int64."""
    rows.require("prompts", "responses", "attention_mask", method="to_model_inputs")
    prompts, responses, mask = rows.batch["prompts"], rows.batch["responses"], rows.batch["attention_mask"].long()
    prompt_width = prompts.shape[1]
    if mask.shape[1] != prompt_width + responses.shape[1]:
        raise DataError(
            f"attention_mask is {list(mask.shape)}, but prompts {list(prompts.shape)} and responses "
            f"{list(responses.shape)} need a width of {prompt_width + responses.shape[1]}"
        )
    prompt_lengths = mask[:, :prompt_width].sum(1)
    _refuse_bad_rows(rows, mask, prompt_width, prompt_lengths)
    return prompt_lengths, mask.sum(1)


def _tokens_and_labels(
    rows: DataProto, row: Tensor, positions: Tensor, prompt_lengths: Tensor, lengths: Tensor, pad_id: int
) -> tuple[Tensor, Tensor]:
    """Tokens at, and right after, given positions of given rows; the padding id from a row's end on."""
    # The prompt ends where the answer starts, so a row is one contiguous piece of [prompts | responses].
    padded = torch.cat([rows.batch["prompts"], rows.batch["responses"]], dim=1).long()
    source = positions + (rows.batch["prompts"].shape[1] - prompt_lengths)[row]

    def at(shift: int) -> Tensor:
        found = padded[row, (source + shift).clamp(max=padded.shape[1] - 1)]
        return found.masked_fill(positions + shift >= lengths[row], pad_id)

    return at(0), at(1)


def _indices(starts: Tensor, prompt_lengths: Tensor, lengths: Tensor, response_width: int) -> tuple[Tensor, Tensor]:
    """``last_index`` and ``response_index`` of rows that start at given places."""
    last = starts + lengths - 1
    about = (starts + prompt_lengths - 1)[:, None] + torch.arange(response_width, device=starts.device)
    return last, torch.minimum(about, last[:, None])


def _round_up(number: int, multiple_of: int) -> int:
    return -(-number // multiple_of) * multiple_of


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
