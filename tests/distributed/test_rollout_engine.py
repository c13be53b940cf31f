"""One vLLM engine on one rank: its log-probs, seeds, endings, refusals and states; the trainer's process is left alone.

The weights always come through weight sync into an engine that started with noise, in buckets that split layers and
whose memory is overwritten after each bucket.
"""

from typing import Any

import pytest

from tests.distributed.bodies_rollout import EOS
from tests.distributed.world import World
from tests.tiny_models import make_tiny_model

BODIES = "tests.distributed.bodies_rollout"

# Two fp32 implementations of four layers: each is within about 1e-5 of an fp64 run, and log-probs are sums of the rest.
TOLERANCE = 1e-5

# vLLM's CPU attention needs heads of 32. The spread keeps logits near 4, where fp32 still resolves 1e-6.
SMALL = {"hidden_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.1}
VARIANTS = {
    "llama": {},
    "qwen2_tied": {},
    "qwen2_one_kv_head": {"num_key_value_heads": 1},
    "qwen3": {"head_dim": 64},
    "qwen3_tied_bias": {"head_dim": 64},
    "llama_tied_biases": {},
    "mistral": {"head_dim": 32},
}


@pytest.fixture(scope="module")
def world(make_world: Any) -> World:
    return make_world(1)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    root = tmp_path_factory.mktemp("models")
    return {name: str(make_tiny_model(root / name, name, **SMALL | extra)) for name, extra in VARIANTS.items()}


@pytest.fixture(scope="module")
def llama(folders: dict[str, str]) -> str:
    return folders["llama"]


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> str:
    """As in real models, the embedding is larger than the tensors of any one layer's fused parameter."""
    return str(make_tiny_model(tmp_path_factory.mktemp("models") / "wide", "llama", **SMALL, vocab_size=300))


def test_trainers_process_is_left_as_it_was(world: World, llama: str) -> None:
    result = world.run(f"{BODIES}:trainer_state_is_kept", llama, timeout=300)[0]
    assert result["after"] == result["before"]
    # The default process group outlives the engine.
    assert result["sum"] == 1.0
    assert result["refused"][0] == "WeightError" and "no weights were loaded" in result["refused"][1]


@pytest.mark.parametrize("variant", ["llama", "qwen2_tied", "qwen3", "mistral"])
def test_log_probs_are_those_of_transformers_after_each_sync(
    world: World, folders: dict[str, str], variant: str
) -> None:
    result = world.run(f"{BODIES}:log_probs_against_transformers", folders[variant], 1, timeout=300)[0]
    for case, difference in result["differences"].items():
        assert difference <= TOLERANCE, case
    # Two blocks of the long prompt came from the prefix cache, so stale KV would have shown.
    assert result["cached"] == [64, 64]
    first, second = result["metrics"]
    assert (first["weight_sync/version"], second["weight_sync/version"]) == (1, 2)
    assert first["weight_sync/checksum"] != second["weight_sync/checksum"]


def test_answers_depend_on_their_seed_and_nothing_else(world: World, llama: str) -> None:
    result = world.run(f"{BODIES}:seeds", llama, 1, timeout=300)[0]
    assert result["straight"] == result["backwards"] == result["alone"]
    assert len({tuple(tokens) for tokens in result["samples"]}) == 8
    assert result["next_step"] not in result["samples"]


def test_every_way_of_ending(world: World, llama: str) -> None:
    result = world.run(f"{BODIES}:endings", llama, timeout=300)[0]
    reasons = {item.finish_reason for item in result["plain"]}
    assert reasons == {"stop", "length"}
    for item in result["plain"] + result["ignore_eos"] + [item for item, _ in result["stop"]]:
        assert len(item.log_probs) == len(item.token_ids) <= 24
    for item in result["plain"]:
        assert EOS not in item.token_ids[:-1]
        assert (item.token_ids[-1] == EOS) == (item.finish_reason == "stop")
        assert item.finish_reason == "stop" or len(item.token_ids) == 24
    for item in result["ignore_eos"]:
        assert (len(item.token_ids), item.finish_reason) == (24, "length")
    assert any(EOS in item.token_ids for item in result["ignore_eos"])
    stopped = 0
    for item, text in result["stop"]:
        found = "=" in text or "b7" in text
        stopped += found
        assert found == text.endswith(("=", "b7"))
        assert (item.finish_reason == "stop") == (found or item.token_ids[-1] == EOS)
    assert stopped > 0
    greedy = result["greedy"][0]
    # One candidate is the likeliest token, with the whole probability.
    for item in result["top_k"]:
        assert item.token_ids == greedy.token_ids
        assert item.log_probs == [0.0] * len(item.log_probs)
    assert min(greedy.log_probs) < 0
    assert result["top_p_sums"] <= TOLERANCE


def test_a_bias_that_vllm_would_leave_out_is_refused(world: World, folders: dict[str, str]) -> None:
    """vLLM's Qwen3 has no bias in o_proj and drops it from the stream without a word."""
    kind, text = world.run(f"{BODIES}:sync_error", folders["qwen3_tied_bias"], timeout=300)[0]
    assert kind == "WeightError"
    assert "self_attn.o_proj.bias" in text


def test_refusals_say_why_and_heal(world: World, llama: str) -> None:
    found = world.run(f"{BODIES}:refusals", llama, timeout=300)[0]
    expected = {
        "empty prompt": ("DataError", "Prompt 0 of the batch is empty"),
        "too long": ("DataError", "125 tokens and asks for up to 4 more, but rollout.max_model_len is 128"),
        "vocabulary": ("DataError", "vocabulary [0, 99)"),
        "counts": ("DataError", "2 prompts and 1 requests"),
        "just fits": ("none", ""),
        "nothing asked": ("answers", "[]"),
        "missing v": ("WeightError", "model.layers.2.self_attn.qkv_proj: 24576 of 32768 elements"),
        "missing head": ("WeightError", "lm_head: 0 of 12672 elements"),
        "missing norm": ("WeightError", "model.norm: 0 of 128 elements"),
        "unknown": ("WeightError", "model.layers.0.mlp.extra.weight"),
        "shape": ("WeightError", "model.layers.1.mlp.up_proj.weight"),
        "twice": ("WeightError", "'model.norm.weight' twice"),
        "dies": ("DataError", "the source failed"),
        "version": ("versions", "0"),
    }
    for name, (kind, text) in expected.items():
        assert found[name][0] == kind, name
        assert text in found[name][1], name
    after_failed_sync = [answer for name, answer in found.items() if name.endswith("then generate")]
    assert len(after_failed_sync) == 7
    assert all(kind == "WeightError" and "Run a whole weight sync first" in text for kind, text in after_failed_sync)
    assert float(found["healed"][1]) <= TOLERANCE


def test_sleep_and_wake_up_in_order_only(world: World, llama: str) -> None:
    found = world.run(f"{BODIES}:sleeping", llama, timeout=300)[0]
    assert found.pop("same answer") is True
    for name, (kind, text) in found.items():
        assert kind == ("WeightError" if name.endswith(("generate", "sync")) else "RLHFError"), name
        assert text, name


@pytest.mark.parametrize("bucket_bytes", [1, 60_000, 10**9])
def test_sync_holds_one_bucket_and_the_largest_tensor_at_most(world: World, wide: str, bucket_bytes: int) -> None:
    result = world.run(f"{BODIES}:live_bytes_of_stream", wide, bucket_bytes, timeout=300)[0]
    bound = max(bucket_bytes if bucket_bytes < 10**9 else result["model"], result["bucket"]) + result["largest_tensor"]
    assert result["peak"] <= bound
    assert result["reported"] <= bound
    if bucket_bytes < 10**9:
        # The bound says something: it is well below the whole model.
        assert bound < result["model"] / 4
    # Sums of a few integers per tensor are kept, nothing of a tensor's size.
    assert result["left"] < 1024
