"""Rules about mixtures of experts: what fits no world, no model, or does nothing."""

from pathlib import Path

import pytest
from broken_ppo import GOOD
from model_folders import write_model

from rlhf_megatron.config.compose import compose
from rlhf_megatron.config.hf_facts import read_facts
from rlhf_megatron.errors import ConfigError, Violation


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Six experts of 64 columns each."""
    folder = tmp_path_factory.mktemp("models") / "mixtral"
    return str(write_model(folder, model_type="mixtral", num_local_experts=6, num_experts_per_tok=2))


def compose_with(folder: str, *overrides: str) -> None:
    compose("ppo", [override.replace("{model}", folder) for override in (*GOOD, *overrides)])


def violations(folder: str, *overrides: str) -> tuple[Violation, ...]:
    with pytest.raises(ConfigError) as caught:
        compose_with(folder, *overrides)
    return caught.value.violations


@pytest.mark.parametrize(
    ("leaf", "overrides", "words"),
    [
        (
            "actor.megatron.expert_model_parallel_size",
            (
                "trainer.n_gpus_per_node=4",
                "actor.megatron.expert_model_parallel_size=4",
                "actor.megatron.expert_tensor_parallel_size=1",
            ),
            ("must divide the 6 experts", "1, 2, 3 or 6"),
        ),
        (
            "actor.megatron.expert_model_parallel_size",
            ("actor.megatron.expert_model_parallel_size=2",),
            ("2 x 2 x 1 = 4", "world of 2 ranks", "1 or 2"),
        ),
        (
            "critic.megatron.expert_tensor_parallel_size",
            ("critic.megatron.expert_tensor_parallel_size=3",),
            ("3 x 1 x 1 = 3", "world of 2 ranks"),
        ),
        (
            "critic.megatron.expert_tensor_parallel_size",
            ("trainer.n_gpus_per_node=3", "critic.megatron.expert_tensor_parallel_size=3"),
            ("must divide the 64 MLP columns of each expert", "1 or 2"),
        ),
        ("actor.megatron.sequence_parallel", ("actor.megatron.sequence_parallel=false",), ("must be true", "experts")),
        ("ref.megatron.moe_aux_loss_coeff", ("ref.megatron.moe_aux_loss_coeff=0.01",), ("ref is not trained",)),
    ],
)
def test_message(mixtral: str, leaf: str, overrides: tuple[str, ...], words: tuple[str, ...]) -> None:
    about = [str(item) for item in violations(mixtral, *overrides) if item.key == leaf]
    assert any(all(word in text for word in words) for text in about), about


def test_good_ones(mixtral: str) -> None:
    compose_with(
        mixtral,
        "actor.megatron.expert_model_parallel_size=2",
        "actor.megatron.expert_tensor_parallel_size=1",
        "actor.megatron.moe_aux_loss_coeff=0.001",
        "critic.megatron.expert_model_parallel_size=2",
        "critic.megatron.moe_token_dispatcher_type=allgather",
    )


@pytest.mark.parametrize(
    ("keys", "experts", "columns"),
    [
        ({"model_type": "mixtral", "num_local_experts": 8}, 8, 64),
        ({"model_type": "qwen3_moe", "num_experts": 16, "moe_intermediate_size": 24}, 16, 24),
        # How transformers 5 spells it.
        ({"model_type": "qwen3_moe", "num_local_experts": 16, "moe_intermediate_size": 24}, 16, 24),
        ({"model_type": "llama", "num_local_experts": 8}, 0, 0),
    ],
)
def test_facts(tmp_path: Path, keys: dict[str, object], experts: int, columns: int) -> None:
    facts = read_facts(write_model(tmp_path / "m", **keys))
    assert (facts.num_experts, facts.moe_ffn_hidden_size) == (experts, columns)


def test_a_mixture_without_a_number_of_experts(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="num_local_experts or num_experts"):
        read_facts(write_model(tmp_path / "m", model_type="mixtral"))
