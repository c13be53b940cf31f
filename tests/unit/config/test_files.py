"""What must be there before a run: model, data and reward files, and the started ranks."""

import ast
import importlib.util
import os
from pathlib import Path

import pytest
from model_folders import write_model

from rlhf_megatron.config.compose import compose, compose_mapping
from rlhf_megatron.config.hf_facts import CPU_HEAD_DIMS, read_facts
from rlhf_megatron.config.ppo import PPOConfig
from rlhf_megatron.config.validate import validate_mapping
from rlhf_megatron.errors import ConfigError


@pytest.fixture
def good(tmp_path, monkeypatch) -> list[str]:
    """A configuration whose files all exist; the working folder is `tmp_path`."""
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "llama")
    for name in ("train.jsonl", "val.parquet"):
        (tmp_path / name).touch()
    (tmp_path / "reward.py").write_text("def compute_score(*args):\n    return 0.0\n", encoding="utf-8")
    return [
        "cluster=cpu_2",
        "parallel@actor.megatron=tp2",
        "parallel@critic.megatron=tp1",
        "model.path=llama",
        "rollout.tensor_model_parallel_size=1",
        "data.train_files=[train.jsonl]",
        "data.val_files=[val.parquet]",
    ]


def messages(overrides: list[str]) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        compose("ppo", overrides, check_files=True)
    return {v.key: str(v) for v in caught.value.violations}


def test_good_one_passes(good):
    compose("ppo", [*good, "reward.custom_reward_function.path=reward.py"], check_files=True)


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_an_allocator_that_vllm_cannot_sleep_with_is_found_before_the_start(good, monkeypatch, name):
    monkeypatch.setenv(name, "max_split_size_mb:64, expandable_segments:True")
    gpu = [*good, "trainer.device=cuda"]
    found = messages(gpu)
    assert list(found) == ["rollout.free_cache_engine"]
    assert f"{name}=max_split_size_mb" in found["rollout.free_cache_engine"]
    compose("ppo", [*gpu, "rollout.free_cache_engine=false"], check_files=True)
    compose("ppo", good, check_files=True)


def test_nothing_is_looked_for_unless_asked(good):
    compose("ppo", [*good, "model.path=nowhere", "data.train_files=[nowhere.jsonl]"], check_files=False)


@pytest.mark.parametrize(
    ("override", "key", "words"),
    [
        ("model.path=nowhere", "model.path", "does not exist"),
        ("model.path=train.jsonl", "model.path", "is a file"),
        ("model.path=.", "model.path", "has no config.json"),
        ("critic.model.path=nowhere", "critic.model.path", "does not exist"),
        ("model.tokenizer_path=nowhere", "model.tokenizer_path", "must be a folder"),
        ("data.train_files=[train.jsonl,gone.jsonl]", "data.train_files[1]", "does not exist"),
        ("data.val_files=[reward.py]", "data.val_files[0]", ".jsonl or .parquet"),
        ("reward.custom_reward_function.path=gone.py", "reward.custom_reward_function.path", "does not exist"),
        ("reward.custom_reward_function.path=llama", "reward.custom_reward_function.path", "is a folder"),
        ("reward.custom_reward_function.path=llama/config.json", "reward.custom_reward_function.name", "not defined"),
        ("trainer.default_local_dir=train.jsonl/run", "trainer.default_local_dir", "is not one"),
        ("trainer.default_local_dir=dangling/run", "trainer.default_local_dir", "is not one"),
    ],
)
def test_missing_files(good, tmp_path, override, key, words):
    (tmp_path / "dangling").symlink_to("nowhere")
    found = messages([*good, override])
    assert words in found[key], found
    assert set(found) == {key}


def test_output_folder_that_cannot_be_written(good, tmp_path, monkeypatch):
    """Found before the run, not when its first file is written."""
    closed = tmp_path / "closed"
    closed.mkdir(mode=0o500)
    if os.access(closed, os.W_OK):
        # Root may write anywhere, so that the operating system's answer has to be made up.
        may = os.access
        monkeypatch.setattr(os, "access", lambda path, mode: os.fspath(path) != str(closed) and may(path, mode))
    found = messages([*good, "trainer.default_local_dir=closed/runs/one"])
    assert f"{closed} cannot" in found["trainer.default_local_dir"]
    assert set(found) == {"trainer.default_local_dir"}


def test_output_folder_need_not_exist(good, tmp_path):
    compose("ppo", [*good, "trainer.default_local_dir=new/runs/one"], check_files=True)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("def score(a):\n    return 0\n", "Functions there: score"),
        ("compute_score = 3 +\n", "not a Python file"),
        ("", "Functions there: none"),
    ],
)
def test_reward_file_is_read_and_not_run(good, tmp_path, text, words):
    (tmp_path / "reward.py").write_text("import nothing_of_that_name\n" * bool(text and "+" not in text) + text)
    found = messages([*good, "reward.custom_reward_function.path=reward.py"])
    assert any(words in message for message in found.values()), found


def test_reward_function_may_be_imported_or_conditional(good, tmp_path):
    (tmp_path / "reward.py").write_text("try:\n    from other import compute_score\nexcept ImportError:\n    raise\n")
    compose("ppo", [*good, "reward.custom_reward_function.path=reward.py"], check_files=True)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_type": "gpt2"}, "model_type gpt2; known are llama"),
        ({"num_attention_heads": None}, "num_attention_heads"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"head_dim": "wide"}, "head_dim"),
        ({"num_key_value_heads": -1}, "num_key_value_heads"),
        ({"weights": False}, "safetensors"),
    ],
)
def test_unusable_model(good, tmp_path, changes, words):
    write_model(tmp_path / "other", **changes)
    found = messages([*good, "model.path=other"])
    assert words in found["model.path"], found


def test_config_json_that_is_not_json(good, tmp_path):
    folder = write_model(tmp_path / "other")
    (folder / "config.json").write_text("{", encoding="utf-8")
    assert "cannot be used" in messages([*good, "model.path=other"])["model.path"]


def test_started_ranks_must_be_those_configured(good):
    composed = compose_mapping("ppo", good)
    validate_mapping(composed.mapping, PPOConfig, check_files=True, started_ranks=2)
    with pytest.raises(ConfigError, match=r"asks for 2 ranks, but 3 were started.*--nproc-per-node 2"):
        validate_mapping(composed.mapping, PPOConfig, check_files=True, started_ranks=3)


@pytest.mark.parametrize(
    ("changes", "longest"),
    [
        ({}, 2048),
        # Scaled lengths are already in max_position_embeddings, except for linear scaling.
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, 8192),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}, 4096),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, 2048),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, 2048),
        ({"rope_scaling": None}, 2048),
    ],
)
def test_longest_sequence(tmp_path, changes, longest):
    assert read_facts(write_model(tmp_path / "m", **changes)).max_length == longest


@pytest.mark.parametrize(("changes", "width"), [({}, 32), ({"head_dim": None}, 8), ({"head_dim": 80}, 80)])
def test_width_of_a_head(tmp_path, changes, width):
    """Its own key, or 96 columns over 12 heads."""
    assert read_facts(write_model(tmp_path / "m", **changes)).head_dim == width


@pytest.mark.parametrize(
    ("width", "nearest"), [(8, "of 32,"), (48, "of 32 or 64"), (100, "of 96 or 112"), (513, "of 512,")]
)
def test_head_size_without_a_cpu_kernel(good, tmp_path, width, nearest):
    write_model(tmp_path / "other", head_dim=width)
    found = messages([*good, "model.path=other"])
    assert f"{width} wide" in found["model.path"] and nearest in found["model.path"]
    assert set(found) == {"model.path"}
    compose("ppo", [*good, "model.path=other", "trainer.device=cuda"], check_files=True)
    # Only what generates needs vLLM's kernels.
    compose("ppo", [*good, "critic.model.path=other"], check_files=True)


@pytest.mark.parametrize(
    ("changes", "mixed"),
    [
        ({"max_window_layers": 2}, True),
        ({"max_window_layers": 6}, False),
        ({"max_window_layers": 0}, False),
        # By default the first 28 have none.
        ({"num_hidden_layers": 30}, True),
        ({"max_window_layers": 2, "use_sliding_window": False}, False),
        ({"max_window_layers": 2, "sliding_window": None}, True),
        # What is written last by transformers 5 decides.
        ({"max_window_layers": 6, "layer_types": ["full_attention"] * 5 + ["sliding_attention"]}, True),
        ({"max_window_layers": 2, "layer_types": ["sliding_attention"] * 6}, False),
        ({"max_window_layers": 2, "model_type": "llama"}, False),
    ],
)
def test_some_windowed_layers_are_not_for_vllm(good, tmp_path, changes, mixed):
    windows = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 5} | changes
    assert read_facts(write_model(tmp_path / "other", **windows)).mixes_windows == mixed
    if mixed:
        assert "which vLLM cannot run" in messages([*good, "model.path=other"])["model.path"]
    else:
        compose("ppo", [*good, "model.path=other"], check_files=True)
    # The critic generates nothing.
    compose("ppo", [*good, "critic.model.path=other"], check_files=True)


def test_list_of_head_sizes_is_that_of_the_installed_vllm():
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        pytest.skip("vLLM is not installed")
    source = Path(spec.origin).parent / "v1" / "attention" / "backends" / "cpu_attn.py"
    functions = [n for n in ast.walk(ast.parse(source.read_text())) if isinstance(n, ast.FunctionDef)]
    (body,) = (f.body for f in functions if f.name == "get_supported_head_sizes")
    assert isinstance(body[-1], ast.Return) and body[-1].value is not None
    assert list(CPU_HEAD_DIMS) == ast.literal_eval(body[-1].value)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_key_value_heads_may_be_fewer_than_ranks(good, tmp_path, tp):
    """2 key/value heads: tp 4 and 8 give each to 2 and 4 ranks, in Megatron-Core as in vLLM."""
    write_model(tmp_path / "other", num_attention_heads=8, num_key_value_heads=2)
    compose(
        "ppo",
        [
            *good,
            "model.path=other",
            "trainer.n_gpus_per_node=8",
            *(f"{node}.tensor_model_parallel_size={tp}" for node in ("actor.megatron", "critic.megatron", "rollout")),
        ],
        check_files=True,
    )


def test_fused_rows_bind_megatron_only(good, tmp_path):
    """(12 + 2 x 4) x 32 = 640 rows are not cut by 12 ranks, while vLLM gives each of 4 key/value heads to 3 ranks."""
    write_model(tmp_path / "other", intermediate_size=96)
    twelve = [*good, "model.path=other", "trainer.n_gpus_per_node=12"]
    batches = [f"{leaf}=12" for leaf in ("data.train_batch_size", "actor.ppo_mini_batch_size")]
    twelve += [*batches, "critic.ppo_mini_batch_size=12"]
    compose("ppo", [*twelve, "rollout.tensor_model_parallel_size=12"], check_files=True)
    found = messages([*twelve, "actor.megatron.tensor_model_parallel_size=12"])
    assert set(found) == {"actor.megatron.tensor_model_parallel_size"}
    assert "640 query-key-value rows" in found["actor.megatron.tensor_model_parallel_size"]
    assert "Choose 1, 2 or 4." in found["actor.megatron.tensor_model_parallel_size"]


def test_key_value_heads_default_to_heads(tmp_path):
    assert read_facts(write_model(tmp_path / "m", num_key_value_heads=None)).num_kv_heads == 12
