"""Global batches in an order that can be resumed exactly, and their form as :class:`DataProto`.

Every rank runs the same loader and gets the same batch; who computes which row is decided later. Left out: workers and
prefetching (rows are token ids in memory already).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic

import numpy as np
import torch

from rlhf_megatron.data.batching import permutation
from rlhf_megatron.data.datasets import Dataset, PairRow, PromptRow, Row
from rlhf_megatron.data.proto import DataProto
from rlhf_megatron.data.shift import pad_left, pad_right
from rlhf_megatron.errors import DataError


@dataclass(frozen=True)
class Sample(Generic[Row]):
    """A row as drawn by the loader.

    Attributes:
        row: The row.
        index: Its index in the dataset.
        epoch: The pass over the dataset in which it was drawn, from 0.
        number: How many rows were drawn before it in the run (an epoch counts as the whole dataset); unique in the run.
    """

    row: Row
    index: int
    epoch: int
    number: int


class StatefulLoader(Generic[Row]):
    """Cuts a dataset into global batches, epoch after epoch.

    ``for batch in loader`` goes to the end of the present epoch. The state always points at the next batch: when the
    last one of an epoch has been handed out, it points at the start of the next epoch.

    Args:
        dataset: Rows.
        batch_size: Rows per batch over all ranks.
        shuffle: Whether each epoch has its own random order, a function of ``seed`` and the epoch alone.
        seed: Seed of these orders.
        drop_last: Whether a last batch with fewer rows is left out.

    Raises:
        DataError: The dataset is empty or, with ``drop_last``, smaller than one batch.
    """

    def __init__(self, dataset: Dataset[Row], batch_size: int, shuffle: bool, seed: int, drop_last: bool = True):
        if batch_size < 1:
            raise DataError(f"batch size is {batch_size}, it must be at least 1")
        if len(dataset) == 0 or (drop_last and len(dataset) < batch_size):
            raise DataError(
                f"the dataset has {len(dataset)} rows, fewer than one batch (data.train_batch_size) of {batch_size}: "
                f"{dataset.report}. Lower data.train_batch_size or add data."
            )
        self.dataset = dataset
        self.batch_size = batch_size
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.epoch = 0
        self.position = 0
        self._order: tuple[int, np.ndarray] | None = None

    def __len__(self) -> int:
        """Batches per whole epoch."""
        whole, rest = divmod(len(self.dataset), self.batch_size)
        return whole + (1 if rest and not self.drop_last else 0)

    def __iter__(self) -> Iterator[list[Sample[Row]]]:
        epoch = self.epoch
        while self.epoch == epoch:
            yield self.next_batch()

    def next_batch(self) -> list[Sample[Row]]:
        """The next batch, going on into the next epoch where one ends."""
        epoch, first = self.epoch, self.position
        drawn = self.order(epoch)[first : first + self.batch_size]
        start = epoch * len(self.dataset) + first
        self._go_to(epoch, first + len(drawn))
        return [Sample(self.dataset[int(i)], int(i), epoch, start + offset) for offset, i in enumerate(drawn)]

    def order(self, epoch: int) -> np.ndarray:
        """Dataset indices in the order in which an epoch draws them."""
        if self._order is None or self._order[0] != epoch:
            rows = len(self.dataset)
            self._order = (epoch, permutation(rows, (self.seed, epoch)) if self.shuffle else np.arange(rows))
        return self._order[1]

    def state_dict(self) -> dict[str, Any]:
        """Where the loader stands, and what it must find again; plain values only."""
        return {"epoch": self.epoch, "position": self.position, **self._identity()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where :meth:`state_dict` was taken. The batch size may have changed; the position counts rows.

        Raises:
            DataError: The state is incomplete or out of range, or the dataset, ``shuffle`` or ``seed`` is another one,
                so that rows would be repeated or left out.
        """
        expected = self._identity()
        missing = [key for key in ("epoch", "position", *expected) if key not in state]
        if missing:
            raise DataError(f"the saved loader state has no {missing}; it has {sorted(state)}")
        changed = [f"{key} was {state[key]!r}, is {now!r}" for key, now in expected.items() if state[key] != now]
        if changed:
            raise DataError(
                f"the data differ from those of the checkpoint ({'; '.join(changed)}): resuming would repeat or skip "
                "rows. Restore data.* (files, tokenizer, limits, seed, shuffle), or start a new run from the weights."
            )
        epoch, position = int(state["epoch"]), int(state["position"])
        if epoch < 0 or not 0 <= position <= len(self.dataset):
            raise DataError(f"saved epoch {epoch}, position {position} is outside {len(self.dataset)} rows")
        self._go_to(epoch, position)

    def _identity(self) -> dict[str, Any]:
        return {
            "fingerprint": self.dataset.fingerprint,
            "rows": len(self.dataset),
            "shuffle": self.shuffle,
            "seed": self.seed,
        }

    def _go_to(self, epoch: int, position: int) -> None:
        left = len(self.dataset) - position
        over = left < self.batch_size if self.drop_last else left == 0
        self.epoch, self.position = (epoch + 1, 0) if over else (epoch, position)


def collate_prompts(rows: Sequence[Sample[PromptRow]], pad_id: int, max_prompt_length: int) -> DataProto:
    """Prompts as a batch.

    Args:
        rows: What the loader drew.
        pad_id: Padding token.
        max_prompt_length: Width ``P`` that prompts are padded to.

    Returns:
        ``prompts`` and ``attention_mask`` ``[rows, P]`` int64, padded at the left; ``row_id`` ``[rows]`` int64, unique
        in the run; ``uid`` (``epoch-index``, the same for all answers to a prompt, unique in the run), ``data_source``,
        ``ground_truth``, ``extra_info``, ``raw_prompt``.

    Raises:
        DataError: A prompt is longer than ``max_prompt_length``.
    """
    prompts, mask = pad_left([sample.row.prompt_ids for sample in rows], max_prompt_length, pad_id)
    tensors = {"prompts": prompts, "attention_mask": mask, "row_id": _row_ids(rows)}
    columns = {
        "uid": [f"{sample.epoch}-{sample.index}" for sample in rows],
        "data_source": [sample.row.data_source for sample in rows],
        "ground_truth": [sample.row.ground_truth for sample in rows],
        "extra_info": [sample.row.extra_info for sample in rows],
        "raw_prompt": [sample.row.raw_prompt for sample in rows],
    }
    return DataProto.from_dict(tensors, columns)


def collate_pairs(rows: Sequence[Sample[PairRow]], pad_id: int) -> DataProto:
    """Prompt and answer pairs in the form that sampled answers have.

    Returns:
        ``prompts`` ``[rows, P]`` padded at the left, ``responses`` and ``response_mask`` ``[rows, R]`` padded at the
        right, ``attention_mask`` ``[rows, P+R]``, ``row_id`` ``[rows]``; all int64. ``P`` and ``R`` are the longest of
        the batch.
    """
    prompt_rows = [sample.row.prompt_ids for sample in rows]
    response_rows = [sample.row.response_ids for sample in rows]
    prompts, prompt_mask = pad_left(prompt_rows, max(map(len, prompt_rows), default=0), pad_id)
    responses, response_mask = pad_right(response_rows, max(map(len, response_rows), default=0), pad_id)
    return DataProto.from_dict(
        {
            "prompts": prompts,
            "responses": responses,
            "attention_mask": torch.cat([prompt_mask, response_mask], dim=1),
            "response_mask": response_mask,
            "row_id": _row_ids(rows),
        }
    )


def _row_ids(rows: Sequence[Sample[Any]]) -> torch.Tensor:
    return torch.tensor([sample.number for sample in rows], dtype=torch.int64)
