"""The schema: every leaf is documented, and the texts made from it read well."""

from typing import Annotated, Literal

import pytest
from pydantic import Field, PositiveInt

from rlhf_megatron.config.ppo import PPOConfig, SFTConfig
from rlhf_megatron.config.schema import describe_type, find_node, leaves, suggest

ROOTS = (PPOConfig, SFTConfig)


@pytest.mark.parametrize("root", ROOTS)
def test_every_leaf_is_documented(root):
    for leaf in leaves(root):
        assert leaf.field.description, f"{leaf.path} has no docstring"
        assert leaf.field.description.endswith("."), leaf.path


@pytest.mark.parametrize("root", ROOTS)
def test_every_node_is_documented(root):
    for leaf in leaves(root):
        parts = leaf.path.split(".")[:-1]
        for end in range(len(parts) + 1):
            node = find_node(root, ".".join(parts[:end]))
            assert node is not None and node.__doc__, leaf.path


def test_optional_node_is_walked():
    assert "ref.megatron.tensor_model_parallel_size" in {leaf.path for leaf in leaves(PPOConfig)}


@pytest.mark.parametrize(
    ("annotation", "text"),
    [
        (int, "int"),
        (str, "text"),
        (bool, "true|false"),
        (PositiveInt, "int > 0"),
        (PositiveInt | None, "int > 0 | null"),
        (Literal["a", "b"], "a|b"),
        (list[str], "[text, ...]"),
        (tuple[float, float], "[float, float]"),
        (Annotated[float, Field(ge=0, lt=1)], "float >= 0, < 1"),
        (Annotated[list[str], Field(min_length=1)], "[text, ...] length >= 1"),
        (dict[str, object], "{key: value, ...}"),
    ],
)
def test_types_are_written_for_users(annotation, text):
    assert describe_type(annotation) == text


@pytest.mark.parametrize(
    ("wrong", "meant"),
    [
        ("actor.optim.Lr", "actor.optim.lr"),
        ("actor.tensor_model_parallel_size", "actor.megatron.tensor_model_parallel_size"),
        ("algorithm.kl_coef", "algorithm.kl_ctrl.kl_coef"),
        ("critics.optim.lr", "critic.optim.lr"),
        ("trainer.max_prompt_length", "data.max_prompt_length"),
        ("trainer.max_prompt_len", "data.max_prompt_length"),
        ("a.b.c.rollout.val_kwargs.n", "rollout.val_kwargs.n"),
    ],
)
def test_suggestion(wrong, meant):
    assert suggest(PPOConfig, wrong) == f"Did you mean '{meant}'?"
