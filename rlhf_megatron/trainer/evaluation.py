"""Validation: answers to held-out prompts, scored per data source."""

from collections import defaultdict
from collections.abc import Iterator

from rlhf_megatron.parallel.collectives import all_gather_object
from rlhf_megatron.parallel.groups import Groups
from rlhf_megatron.rewards.worker import RewardWorkerGroup
from rlhf_megatron.rollout.worker import RolloutWorkerGroup
from rlhf_megatron.trainer.placement import to_home


class Evaluator:
    """Validates the policy that the rollout engine holds.

    Args:
        batches: Gives the batches of validation prompts anew at each call, the same on every rank; None without a
            validation set.
        rollout: Generation; samples with `rollout.val_kwargs`.
        reward: Scoring, as in training.
        home: Groups of the home layout.
    """

    def __init__(self, batches, rollout: RolloutWorkerGroup, reward: RewardWorkerGroup, home: Groups):
        self._batches = batches
        self._rollout = rollout
        self._reward = reward
        self._home = home

    @property
    def has_data(self) -> bool:
        """Whether there is a validation set."""
        return self._batches is not None

    def evaluate(self, step: int) -> dict[str, float]:
        """Scores answers to all validation prompts.

        Returns:
            `val-core/<source>/reward/mean@N` and, for N > 1, `val-core/<source>/reward/best@N`, over prompts; N is
            `rollout.val_kwargs.n`.

        Collective over the world.
        """
        n = self._rollout.config.val_kwargs.n
        scores: dict[str, dict[object, list[float]]] = defaultdict(lambda: defaultdict(list))
        for source, uid, score in self._scored_rows(step, n):
            scores[source][uid].append(score)
        metrics = {}
        for source, by_prompt in sorted(scores.items()):
            means = [sum(values) / len(values) for values in by_prompt.values()]
            metrics[f"val-core/{source}/reward/mean@{n}"] = sum(means) / len(means)
            if n > 1:
                bests = [max(values) for values in by_prompt.values()]
                metrics[f"val-core/{source}/reward/best@{n}"] = sum(bests) / len(bests)
        return metrics

    def _scored_rows(self, step: int, n: int) -> Iterator[tuple[str, object, float]]:
        first_row = 0
        for prompts in self._batches():
            batch = to_home(prompts, n, self._home, first_row)
            first_row += len(prompts) * n
            batch.meta_info["global_step"] = step
            batch = self._rollout.generate_sequences(batch, "validation")
            batch = batch.union(self._reward.compute_rm_score(batch))
            totals = batch.batch["token_level_scores"].sum(-1).tolist()
            columns = batch.non_tensor_batch
            mine = [
                (source, uid, score)
                for source, uid, score in zip(columns["data_source"], columns["uid"], totals, strict=True)
            ]
            for part in all_gather_object(mine, self._home.dp):
                yield from part
