"""Comparing two models tensor by tensor under their HuggingFace names, row by row, and by their logits."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from rlhf_megatron.checkpoint.megatron_source import TensorSource, row_blocks


@dataclass(frozen=True)
class Difference:
    """How one tensor differs.

    Attributes:
        name: Its name.
        elements: How many elements differ; all of them when shape or type do.
        largest: Largest absolute difference; None when there is no number to give.
        what: Shapes or types when these differ, else empty.
    """

    name: str
    elements: int
    largest: float | None
    what: str = ""

    def __str__(self) -> str:
        if self.what:
            return f"{self.name}: {self.what}"
        return f"{self.name}: {self.elements} elements differ, by {self.largest:.3g} at most"


@dataclass(frozen=True)
class Comparison:
    """What a comparison found.

    Attributes:
        equal: Number of tensors that are equal.
        different: Those that are not.
        only_first: Names that only the first model has.
        only_second: Names that only the second has.
    """

    equal: int
    different: tuple[Difference, ...] = ()
    only_first: tuple[str, ...] = field(default=())
    only_second: tuple[str, ...] = field(default=())

    @property
    def is_equal(self) -> bool:
        """Whether both models are the same."""
        return not (self.different or self.only_first or self.only_second)


def compare(
    first: TensorSource,
    second: TensorSource,
    *,
    cast: bool = False,
    tolerance: float = 0.0,
    progress: Callable[[str, int], None] | None = None,
) -> Comparison:
    """Compares two models.

    Args:
        first: One model.
        second: The other.
        cast: Whether tensors of different types are compared after casting both to the shorter type.
        tolerance: Largest absolute difference that counts as equal. At 0 the bits are compared, so that -0 is not 0
            and a NaN equals itself.
        progress: Called after each tensor with its name and its bytes.
    """
    names, others = set(first.names()), set(second.names())
    different, equal = [], 0
    for name in (name for name in first.names() if name in others):
        difference = _compare_one(first, second, name, cast, tolerance)
        if difference is None:
            equal += 1
        else:
            different.append(difference)
        if progress is not None:
            progress(name, torch.Size(first.shape(name)).numel() * first.dtype(name).itemsize)
    only_first = tuple(name for name in first.names() if name not in others)
    only_second = tuple(name for name in second.names() if name not in names)
    return Comparison(equal, tuple(different), only_first, only_second)


def largest_logit_difference(first: Path, second: Path, prompt: str | Sequence[int]) -> float:
    """Largest absolute difference of two models' outputs on a prompt, in fp32 by transformers.

    Args:
        first: HuggingFace folder of one model.
        second: Of the other.
        prompt: A text, tokenised by the first folder's tokenizer, or token ids.

    Returns:
        The difference over all positions and the vocabulary; infinity when the outputs differ in shape or are not
        finite.
    """
    from transformers import AutoTokenizer

    ids = AutoTokenizer.from_pretrained(first)(prompt)["input_ids"] if isinstance(prompt, str) else list(prompt)
    outputs = [_outputs(folder, torch.tensor([ids])) for folder in (first, second)]
    if outputs[0].shape != outputs[1].shape:
        return float("inf")
    difference = (outputs[0] - outputs[1]).abs().max().item()
    return difference if difference == difference else float("inf")


def _outputs(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForSequenceClassification,
        AutoModelForTokenClassification,
    )

    architecture = (AutoConfig.from_pretrained(folder).architectures or [""])[0]
    classes = {
        "ForSequenceClassification": AutoModelForSequenceClassification,
        "ForTokenClassification": AutoModelForTokenClassification,
    }
    auto = next((c for end, c in classes.items() if architecture.endswith(end)), AutoModelForCausalLM)
    model = auto.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(input_ids=ids).logits.float()


def _compare_one(
    first: TensorSource, second: TensorSource, name: str, cast: bool, tolerance: float
) -> Difference | None:
    shapes = first.shape(name), second.shape(name)
    size = torch.Size(shapes[0]).numel()
    if shapes[0] != shapes[1]:
        return Difference(name, size, None, f"shape {list(shapes[0])} and {list(shapes[1])}")
    dtypes = first.dtype(name), second.dtype(name)
    if dtypes[0] != dtypes[1] and not cast:
        return Difference(name, size, None, f"type {dtypes[0]} and {dtypes[1]} (cast to compare their values)")
    common = min(dtypes, key=lambda dtype: dtype.itemsize)
    # Blocks of both must hold the same rows, so their number of rows may not depend on a type.
    rows = max(2**22 // max(torch.Size(shapes[0][1:]).numel(), 1), 1)
    elements, largest = 0, 0.0
    for start in range(0, (shapes[0] or (1,))[0], rows):
        stop = min(start + rows, (shapes[0] or (1,))[0])
        blocks = (row_blocks(source, name, common, start, stop) for source in (first, second))
        one, other = (torch.cat(list(parts)) for parts in blocks)
        wrong = _unequal(one, other, tolerance)
        count = int(wrong.sum())
        if count:
            elements += count
            difference = (one[wrong].double() - other[wrong].double()).abs()
            largest = max(largest, difference.nan_to_num(nan=float("inf")).max().item())
    return Difference(name, elements, largest) if elements else None


def _unequal(one: torch.Tensor, other: torch.Tensor, tolerance: float) -> torch.Tensor:
    if tolerance:
        # A NaN is within no tolerance.
        return ~((one.double() - other.double()).abs() <= tolerance)
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.dtype.itemsize]
    return one.view(integers) != other.view(integers)
