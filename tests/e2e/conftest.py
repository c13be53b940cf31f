"""A tiny model, data, a reward file, and the process that jobs start from."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.e2e.jobs import Zygote
from tests.tiny_models import make_tiny_model

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return solution_str.count("1") - 0.1 * len(solution_str)
"""


@dataclass
class Inputs:
    """What a job reads."""

    model: Path
    train: Path
    val: Path
    pairs: Path
    reward: Path

    def ppo(self, *overrides: str) -> list[str]:
        """The command line of a small PPO run: actor TP2, critic DP2, two rollout replicas, two steps."""
        return [
            "+cluster=cpu_2",
            "+parallel@actor.megatron=tp2",
            "+parallel@critic.megatron=tp1",
            "+parallel@ref.megatron=tp1",
            *(f"{role}.megatron.dtype=float32" for role in ("actor", "critic", "ref")),
            "rollout.tensor_model_parallel_size=1",
            "rollout.dtype=float32",
            "rollout.max_num_seqs=32",
            "rollout.max_num_batched_tokens=512",
            "rollout.weight_sync_checksum_freq=1",
            f"model.path={self.model}",
            f"data.train_files=[{self.train}]",
            f"data.val_files=[{self.val}]",
            "data.max_prompt_length=8",
            "data.max_response_length=6",
            "data.train_batch_size=8",
            *(f"{role}.ppo_mini_batch_size=4" for role in ("actor", "critic")),
            f"reward.custom_reward_function.path={self.reward}",
            "trainer.total_training_steps=2",
            *overrides,
        ]

    def sft(self, *overrides: str) -> list[str]:
        """The command line of a small fine-tuning run, tensor parallel over two ranks."""
        return [
            "+cluster=cpu_2",
            "+parallel@megatron=tp2",
            "megatron.dtype=float32",
            f"model.path={self.model}",
            f"data.train_files=[{self.pairs}]",
            f"data.val_files=[{self.pairs}]",
            "data.max_length=16",
            "data.train_batch_size=8",
            "optim.lr=3e-3",
            "optim.eps=1e-3",
            *overrides,
        ]

    def on_pools(self, *overrides: str) -> list[str]:
        """The same with the critic on the first of two ranks and the actor on the second."""
        return [
            *self.ppo(*overrides),
            "parallel@actor.megatron=tp1",
            *(f"trainer.resource_pools.{role}_pool.process_on_nodes=[1]" for role in ("critic", "actor")),
            *(f"{role}.resource_pool={role}_pool" for role in ("critic", "actor")),
        ]

    def reward_file(self, folder: Path, body: str) -> str:
        """Writes another reward function; returns the override that selects it."""
        path = folder / "reward.py"
        path.write_text(
            f"import time\ndef compute_score(data_source, solution_str, ground_truth, extra_info):\n    {body}\n"
        )
        return f"reward.custom_reward_function.path={path}"


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Inputs:
    folder = tmp_path_factory.mktemp("inputs")
    generator = random.Random(0)
    sums = [(generator.randint(0, 9), generator.randint(0, 9)) for _ in range(40)]
    rows = [{"prompt": f"{a}+{b}=", "data_source": "sums", "ground_truth": str(a + b)} for a, b in sums]
    for name, part in (("train", rows[:29]), ("val", rows[29:])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    pairs = [{"prompt": row["prompt"], "response": row["ground_truth"]} for row in rows]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in pairs))
    (folder / "reward.py").write_text(REWARD)
    # vLLM on a CPU has attention kernels for multiples of 32 per head only.
    model = make_tiny_model(
        folder / "model", "qwen2", hidden_size=128, num_attention_heads=4, num_key_value_heads=2, initializer_range=0.05
    )
    return Inputs(model, folder / "train.jsonl", folder / "val.jsonl", folder / "pairs.jsonl", folder / "reward.py")


@pytest.fixture(scope="session")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    process = Zygote(tmp_path_factory.mktemp("jobs"))
    yield process
    process.close()
