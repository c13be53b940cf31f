"""The shift between padded rows and a model's rows, by hand and against a loop over single tokens."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_megatron.data.proto import DataProto
from rlhf_megatron.data.shift import (
    pad_left,
    pad_right,
    padded_position_ids,
    take_response,
    to_model_inputs,
    to_packed_inputs,
)
from rlhf_megatron.errors import DataError

PAD = 0
rows_of_tokens = st.lists(
    st.tuples(
        st.lists(st.integers(0, 9), min_size=1, max_size=5),
        st.lists(st.integers(0, 9), max_size=5),
    ),
    min_size=1,
    max_size=5,
)


def make(prompts: list[list[int]], responses: list[list[int]], prompt_width: int, response_width: int) -> DataProto:
    prompt, prompt_mask = pad_left(prompts, prompt_width, PAD)
    response, response_mask = pad_right(responses, response_width, PAD)
    mask = torch.cat([prompt_mask, response_mask], dim=1)
    return DataProto.from_dict({"prompts": prompt, "responses": response, "attention_mask": mask})


def test_padding_by_hand() -> None:
    tokens, mask = pad_left([[5], [6, 7, 8]], 3, 9)
    assert tokens.tolist() == [[9, 9, 5], [6, 7, 8]]
    assert mask.tolist() == [[0, 0, 1], [1, 1, 1]]
    tokens, mask = pad_right([[5], []], 2, 9)
    assert tokens.tolist() == [[5, 9], [9, 9]]
    assert mask.tolist() == [[1, 0], [0, 0]]
    assert pad_left([], 4, 9)[0].shape == (0, 4)
    with pytest.raises(DataError, match="row 1 has 3 tokens, more than the width 2"):
        pad_left([[1], [1, 2, 3]], 2, 9)


def test_rows_by_hand() -> None:
    inputs = to_model_inputs(make([[1, 2], [3, 4, 5]], [[6, 7, 8], [9]], 4, 3))
    assert inputs.tokens.tolist() == [[1, 2, 6, 7, 8], [3, 4, 5, 9, 0]]
    assert inputs.labels.tolist() == [[2, 6, 7, 8, 0], [4, 5, 9, 0, 0]]
    assert inputs.position_ids.tolist() == [[0, 1, 2, 3, 4]] * 2
    assert inputs.lengths.tolist() == [5, 4]
    # The second row starts at 5 in the flattened outputs.
    assert inputs.response_index.tolist() == [[1, 2, 3], [7, 8, 8]]
    assert inputs.last_index.tolist() == [4, 8]


def test_outputs_by_hand() -> None:
    inputs = to_model_inputs(make([[1, 2], [3, 4, 5]], [[6, 7, 8], [9]], 4, 3))
    values = torch.tensor([[0.0, 0.1, 0.2, 0.3, 0.4], [1.0, 1.1, 1.2, 1.3, 1.4]])
    expected = torch.tensor([[0.1, 0.2, 0.3], [1.2, 0.0, 0.0]])
    torch.testing.assert_close(take_response(values, inputs), expected, rtol=0, atol=0)


def test_the_label_at_a_response_index_is_that_answer_token() -> None:
    inputs = to_model_inputs(make([[1, 2], [3]], [[6, 7, 8], [9, 9, 9]], 2, 3))
    assert take_response(inputs.labels, inputs).tolist() == [[6, 7, 8], [9, 9, 9]]


def test_empty_answer() -> None:
    inputs = to_model_inputs(make([[1], [2, 3]], [[], []], 3, 2))
    assert inputs.tokens.tolist() == [[1, 0], [2, 3]]
    assert inputs.lengths.tolist() == [1, 2]
    assert take_response(torch.full((2, 2), 5.0), inputs).tolist() == [[0.0, 0.0], [0.0, 0.0]]


def test_answers_of_width_zero() -> None:
    inputs = to_model_inputs(make([[1, 2]], [[]], 2, 0))
    assert inputs.tokens.tolist() == [[1, 2]]
    assert take_response(torch.ones(1, 2), inputs).shape == (1, 0)


def test_pad_and_end_ids_inside_a_row_are_tokens() -> None:
    inputs = to_model_inputs(make([[0, 0, 1]], [[0, 2, 0]], 5, 4), pad_id=7)
    assert inputs.tokens.tolist() == [[0, 0, 1, 0, 2, 0]]
    assert inputs.lengths.tolist() == [6]


@pytest.mark.parametrize(("multiple_of", "width"), [(1, 5), (2, 6), (4, 8), (16, 16)])
def test_width_is_rounded_up(multiple_of: int, width: int) -> None:
    inputs = to_model_inputs(make([[1, 2]], [[6, 7, 8]], 8, 8), multiple_of=multiple_of, pad_id=99)
    assert inputs.tokens.tolist() == [[1, 2, 6, 7, 8] + [99] * (width - 5)]
    assert inputs.labels.tolist() == [[2, 6, 7, 8] + [99] * (width - 4)]
    assert inputs.position_ids.tolist() == [list(range(width))]


def test_no_rows() -> None:
    inputs = to_model_inputs(make([[1]], [[2]], 3, 4)[:0], multiple_of=4)
    assert inputs.tokens.shape == inputs.labels.shape == inputs.position_ids.shape == (0, 4)
    assert take_response(torch.zeros(0, 4), inputs).shape == (0, 4)


def test_holes_in_the_response_mask_change_no_position() -> None:
    data = make([[1, 2]], [[6, 7, 8, 9]], 3, 5)
    before = to_model_inputs(data)
    data.batch["response_mask"] = torch.tensor([[1, 0, 0, 1, 0]])
    after = to_model_inputs(data)
    for name in ("tokens", "labels", "position_ids", "lengths", "response_index"):
        assert torch.equal(getattr(before, name), getattr(after, name))
    assert before.response_index.tolist() == [[1, 2, 3, 4, 5]]


@pytest.mark.parametrize(
    ("mask", "reason"),
    [
        ([[0, 1, 1, 0], [0, 0, 1, 0]], r"row 1 \(row_id 41\): its prompt is empty"),
        ([[0, 1, 1, 0], [1, 0, 1, 0]], r"row 1 \(row_id 41\): attention_mask is not zeros, ones, zeros"),
        ([[0, 1, 0, 1], [1, 1, 1, 0]], r"row 0 \(row_id 40\): attention_mask is not zeros, ones, zeros"),
        ([[1, 1, 1, 2], [1, 1, 1, 0]], r"row 0 \(row_id 40\): attention_mask holds something else"),
        ([[1, 1, 1], [1, 1, 1]], r"attention_mask is \[2, 3\].*need a width of 4"),
    ],
)
def test_bad_rows_are_named(mask: list[list[int]], reason: str) -> None:
    data = make([[1, 2], [1, 2]], [[3, 4], [3, 4]], 2, 2)
    data.batch["row_id"] = torch.tensor([40, 41])
    data.batch["attention_mask"] = torch.tensor(mask)
    with pytest.raises(DataError, match=reason):
        to_model_inputs(data)


def test_missing_key_and_wrong_shape() -> None:
    data = make([[1]], [[2]], 1, 1)
    with pytest.raises(DataError, match=r"to_model_inputs needs 'responses' \(made by generate_sequences\)"):
        to_model_inputs(data.select(["prompts", "attention_mask"]))
    with pytest.raises(DataError, match=r"values \[1, 3\], tokens \[1, 2\]"):
        take_response(torch.zeros(1, 3), to_model_inputs(data))


def test_gradient_reaches_answer_positions_only() -> None:
    inputs = to_model_inputs(make([[1, 2], [3]], [[6, 7], [9]], 2, 2), multiple_of=8)
    values = torch.zeros(2, 8, requires_grad=True)
    take_response(values, inputs).sum().backward()
    assert values.grad is not None
    assert values.grad.tolist() == [[0, 1, 1, 0, 0, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0, 0]]


def test_not_a_number_behind_the_end_stays_there() -> None:
    inputs = to_model_inputs(make([[1, 2]], [[6]], 2, 3))
    values = torch.tensor([[0.0, 5.0, float("nan")]], requires_grad=True)
    picked = take_response(values, inputs)
    picked.sum().backward()
    assert picked.tolist() == [[5.0, 0.0, 0.0]]
    assert values.grad is not None and values.grad.tolist() == [[0.0, 1.0, 0.0]]


def test_boolean_mask() -> None:
    data = make([[1, 2]], [[6]], 3, 2)
    data.batch["attention_mask"] = data.batch["attention_mask"].bool()
    assert to_model_inputs(data).lengths.tolist() == [3]


def test_padded_position_ids_by_hand() -> None:
    mask = torch.tensor([[0, 0, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0]])
    assert padded_position_ids(mask).tolist() == [[0, 0, 0, 1, 2, 2], [0, 1, 2, 3, 3, 3]]


@settings(deadline=None)
@given(rows_of_tokens, st.integers(0, 3), st.integers(0, 3), st.integers(1, 6))
def test_against_a_loop(rows: Any, extra_left: int, extra_right: int, multiple_of: int) -> None:
    prompts, responses = [list(row[0]) for row in rows], [list(row[1]) for row in rows]
    prompt_width = max(map(len, prompts)) + extra_left
    response_width = max(map(len, responses)) + extra_right
    data = make(prompts, responses, prompt_width, response_width)
    inputs = to_model_inputs(data, multiple_of=multiple_of, pad_id=77)
    width = inputs.tokens.shape[1]
    longest = max(len(p) + len(r) for p, r in zip(prompts, responses, strict=True))
    assert width % multiple_of == 0 and longest <= width < longest + multiple_of

    # A value that encodes its row and position, so that any wrong pick shows.
    values = torch.arange(len(rows) * width, dtype=torch.float64).view(len(rows), width) + 1
    picked = take_response(values, inputs)
    for b, (prompt, response) in enumerate(zip(prompts, responses, strict=True)):
        row = prompt + response
        assert inputs.tokens[b].tolist() == row + [77] * (width - len(row))
        for j in range(len(row) - 1):
            assert inputs.labels[b, j] == row[j + 1]
        for r in range(response_width):
            expected = values[b, len(prompt) + r - 1] if r < len(response) else 0
            assert picked[b, r] == expected


@settings(deadline=None)
@given(rows_of_tokens, st.integers(0, 4), st.integers(0, 4))
def test_padding_of_the_border_changes_nothing(rows: Any, extra_left: int, extra_right: int) -> None:
    prompts, responses = [list(row[0]) for row in rows], [list(row[1]) for row in rows]
    tight = to_model_inputs(make(prompts, responses, 5, 5))
    loose = to_model_inputs(make(prompts, responses, 5 + extra_left, 5 + extra_right))
    for name in ("tokens", "labels", "position_ids", "lengths"):
        assert torch.equal(getattr(tight, name), getattr(loose, name))
    assert torch.equal(tight.response_index, loose.response_index[:, :5])


def test_packed_rows_by_hand() -> None:
    rows = make([[1, 2], [3, 4, 5]], [[6, 7, 8], [9]], 4, 3)
    inputs = to_packed_inputs(rows)
    assert inputs.tokens.tolist() == [[1, 2, 6, 7, 8, 3, 4, 5, 9]]
    # The last token of a row has no next one: the following row's first token is not its label.
    assert inputs.labels.tolist() == [[2, 6, 7, 8, 0, 4, 5, 9, 0]]
    assert inputs.position_ids.tolist() == [[0, 1, 2, 3, 4, 0, 1, 2, 3]]
    assert inputs.bounds == (0, 5, 9)
    assert inputs.last_index.tolist() == [4, 8]
    assert inputs.response_index.tolist() == [[1, 2, 3], [7, 8, 8]]


def test_packed_rows_are_padded_each_and_together() -> None:
    rows = make([[1, 2], [3, 4, 5]], [[6, 7, 8], [9]], 4, 3)
    inputs = to_packed_inputs(rows, row_multiple_of=2, multiple_of=8)
    # 5 -> 6 and 4 -> 4 make 10; the last row is lengthened to make 16.
    assert inputs.bounds == (0, 6, 16)
    assert inputs.tokens.tolist() == [[1, 2, 6, 7, 8, 0, 3, 4, 5, 9, 0, 0, 0, 0, 0, 0]]
    assert inputs.position_ids.tolist() == [[0, 1, 2, 3, 4, 5, *range(10)]]
    assert inputs.response_index.tolist() == [[1, 2, 3], [8, 9, 9]]


@given(data=st.data(), row_multiple=st.sampled_from([1, 2, 4]), factor=st.sampled_from([1, 2, 3]))
def test_packed_and_padded_rows_say_the_same(data: st.DataObject, row_multiple: int, factor: int) -> None:
    """Numbers that stand for (row, position) come back at the same response places from both forms."""
    count = data.draw(st.integers(1, 5))
    prompts = [[4] * data.draw(st.integers(1, 6)) for _ in range(count)]
    answers = [[5] * data.draw(st.integers(0, 5)) for _ in range(count)]
    rows = make(prompts, answers, 6, 5)
    padded, packed = (
        to_model_inputs(rows),
        to_packed_inputs(rows, row_multiple_of=row_multiple, multiple_of=row_multiple * factor),
    )
    own = torch.arange(count)[:, None] * 100.0 + padded.position_ids
    owner = torch.repeat_interleave(torch.arange(count), torch.tensor(packed.bounds).diff())
    both = owner[None] * 100.0 + packed.position_ids
    assert torch.equal(take_response(own + 1, padded), take_response(both + 1, packed))
    assert packed.tokens.shape[1] % (row_multiple * factor) == 0
    assert all(bound % row_multiple == 0 for bound in packed.bounds)
