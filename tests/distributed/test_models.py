"""Models in every layout compute what HuggingFace computes, and weights survive the way there and back bit by bit."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from tests.distributed.bodies_models import rewrite
from tests.tiny_models import VARIANTS, make_tiny_model, read_config

LAYOUTS = [(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 4), (1, 2, {"virtual_pipeline_model_parallel_size": 2})]
# Logits are about 6 in size after four layers of fp32 sums, which differ by 1e-5 when their order does.
LOGIT_TOLERANCE = 1e-4
# Gradients here reach several hundred; fp32 sums over 4 layers, 64 tokens and up to 4 ranks in another order.
GRADIENT_RTOL, GRADIENT_ATOL = 2e-4, 2e-3


class Ranks:
    """Four ranks that call bodies of :mod:`tests.distributed.bodies_models` by name."""

    def __init__(self, world: Any):
        self._world = world

    def run(self, name: str, *args: Any, **options: Any) -> list[Any]:
        """The body's result on each rank."""
        payload = pickle.dumps((name, args, options))
        # Seven layouts are built in a body, on machines where four ranks may share two busy cores.
        answers = self._world.run("tests.distributed.bodies_models:call", payload, timeout=300.0)
        return [pickle.loads(answer) for answer in answers]


@pytest.fixture(scope="module")
def world(make_world: Any) -> Ranks:
    return Ranks(make_world(4))


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Folder of a variant, made once."""
    root = tmp_path_factory.mktemp("models")
    made: dict[str, str] = {}

    def get(variant: str) -> str:
        if variant not in made:
            made[variant] = str(make_tiny_model(root / variant, variant))
        return made[variant]

    return get


def some_tokens(rows: int = 4, length: int = 16) -> torch.Tensor:
    """Tokens without padding (0), whose embedding HuggingFace keeps at zero and does not train."""
    return torch.randint(1, 99, (rows, length), generator=torch.Generator().manual_seed(5))


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_equal_huggingface_in_every_layout(world: Ranks, folder_of: Any, variant: str) -> None:
    tokens = some_tokens()
    model = AutoModelForCausalLM.from_pretrained(folder_of(variant), dtype=torch.float32)
    with torch.no_grad():
        expected = model(tokens).logits
    by_rank = world.run("outputs", folder_of(variant), LAYOUTS, tokens)
    for index, layout in enumerate(LAYOUTS):
        found = [results[index] for results in by_rank if results[index] is not None]
        assert len(found) == 4 // layout[1]
        for logits in found:
            difference = (logits[..., : expected.shape[-1]] - expected).abs().max().item()
            assert difference <= LOGIT_TOLERANCE, f"{variant} {layout}"


PIPELINES = [
    (1, 4, {"num_layers_in_first_pipeline_stage": 1, "num_layers_in_last_pipeline_stage": 1}),
    (2, 2, {"num_layers_in_first_pipeline_stage": 2, "virtual_pipeline_model_parallel_size": 2}),
    (1, 2, {"num_layers_in_last_pipeline_stage": 1}),
    (1, 2, {"pipeline_model_parallel_layout": "Et*2|(t|)*2ttL"}),
    # The first stage embeds only, and the last has only the head.
    (1, 4, {"pipeline_model_parallel_layout": "E|t*5|t|L"}),
    (2, 2, {"pipeline_model_parallel_layout": "E|t*3|t|ttL"}),
]
"""Divisions of six layers."""


@pytest.mark.parametrize("variant", ["llama_tied_biases", "qwen2_window"])
def test_uneven_pipelines(world: Ranks, tmp_path: Path, variant: str) -> None:
    """Logits, and every bit on the way there and back; one model is tied, the other has layers of two kinds."""
    folder, tokens = str(make_tiny_model(tmp_path / "m", variant, num_hidden_layers=6)), some_tokens()
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(tokens).logits
    by_rank = world.run("outputs", folder, PIPELINES, tokens)
    for index, layout in enumerate(PIPELINES):
        found = [results[index] for results in by_rank if results[index] is not None]
        assert len(found) == 4 // layout[1]
        for logits in found:
            assert (logits[..., : expected.shape[-1]] - expected).abs().max().item() <= LOGIT_TOLERANCE, layout
    for differences in world.run("round_trip", folder, PIPELINES):
        assert differences == [[]] * len(PIPELINES)


@pytest.mark.parametrize("variant", ["llama", "mistral"])
def test_packed_sequences_do_not_see_each_other(world: Ranks, folder_of: Any, variant: str) -> None:
    # fp32 logits of size 6; a packed row is summed in the same order, so this is all rounding.
    assert max(world.run("packed_difference", folder_of(variant), 2, [12, 4, 8])) <= LOGIT_TOLERANCE


@pytest.mark.parametrize("variant", VARIANTS)
def test_round_trip_is_bit_exact(world: Ranks, folder_of: Any, variant: str) -> None:
    for differences in world.run("round_trip", folder_of(variant), LAYOUTS):
        assert differences == [[]] * len(LAYOUTS)


def test_round_trip_of_sharded_bfloat16_files(world: Ranks, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "m", "qwen3", dtype=torch.bfloat16, max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    for differences in world.run("round_trip", str(folder), [(2, 2), (4, 1)], dtype="bfloat16"):
        assert differences == [[], []]


def test_types_are_cast_where_asked(world: Ranks, folder_of: Any) -> None:
    """fp32 files into a bf16 model, and that gathered as fp32: each tensor rounded once."""
    source = AutoModelForCausalLM.from_pretrained(folder_of("qwen2"), dtype=torch.float32).state_dict()
    for tensors in world.run("gathered", folder_of("qwen2"), (2, 2), "float32", dtype="bfloat16"):
        for name, tensor in tensors.items():
            assert torch.equal(tensor, source[name].bfloat16().float()), name


@pytest.mark.parametrize("tp", [1, 4])
def test_padded_vocabulary_rows_are_zero(world: Ranks, folder_of: Any, tp: int) -> None:
    assert all(world.run("padding_is_zero", folder_of("llama"), tp))


def value_oracle(folder: str, head: torch.Tensor) -> torch.nn.Module:
    """HuggingFace's network with a plain linear on top."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.config.tie_word_embeddings = False
    model.lm_head = torch.nn.Linear(head.shape[1], 1, bias=False)
    model.lm_head.weight.data.copy_(head)
    return model


def expected_gradients(model: torch.nn.Module, tokens: torch.Tensor, weight: torch.Tensor) -> dict[str, torch.Tensor]:
    output = model(tokens).logits
    output = output.squeeze(-1) if weight.dim() == 2 else output
    (output * weight[..., : output.shape[-1]] if weight.dim() == 3 else output * weight).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_gradients(results: list[dict[str, Any]], expected: dict[str, torch.Tensor]) -> None:
    norm = torch.stack([gradient.double().norm() for gradient in expected.values()]).norm().item()
    for result in results:
        assert result["gradients"].keys() == expected.keys()
        for name, gradient in result["gradients"].items():
            torch.testing.assert_close(
                gradient, expected[name], rtol=GRADIENT_RTOL, atol=GRADIENT_ATOL, msg=lambda m, n=name: f"{n}: {m}"
            )
        # A parameter counted twice or missed would change the norm by far more.
        assert result["norm"] == pytest.approx(norm, rel=1e-4)


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("layout", [(1, 1), (2, 1), (4, 1), (2, 2), (1, 4), LAYOUTS[-1]])
def test_values_gradients_and_norm(world: Ranks, folder_of: Any, layout: Any, sequence_parallel: bool) -> None:
    if layout[0] == 1 and not sequence_parallel:
        pytest.skip("sequence parallelism has no effect without tensor parallelism")
    folder, tokens = folder_of("qwen3_tied_bias"), some_tokens(rows=8)
    weight = torch.randn(8, 16, generator=torch.Generator().manual_seed(6))
    options = {"head": "value", "sequence_parallel": sequence_parallel}
    head = world.run("value_head", folder, (1, 1), 3)[0]
    model = value_oracle(folder, head)
    with torch.no_grad():
        values = model(tokens).logits.squeeze(-1)
    found = [results[0] for results in world.run("outputs", folder, [layout], tokens, **options)]
    for result in found:
        if result is not None:
            assert result.dtype is torch.float32
            torch.testing.assert_close(result, values, atol=LOGIT_TOLERANCE, rtol=0)
    expected = expected_gradients(model, tokens, weight)
    expected["score.weight"] = expected.pop("lm_head.weight")
    assert_gradients(world.run("gradients", folder, layout, tokens, weight, **options), expected)


@pytest.mark.parametrize("variant", ["qwen2_tied", "qwen3", "qwen2_one_kv_head", "llama_tied_biases"])
@pytest.mark.parametrize("layout", [(4, 1), (2, 2), LAYOUTS[-1]])
def test_logit_gradients_and_norm(world: Ranks, folder_of: Any, layout: Any, variant: str) -> None:
    tokens = some_tokens(rows=8)
    # 128 columns: the widest padded vocabulary of 99 tokens here. Padded columns must not matter, so they weigh zero.
    weight = torch.randn(8, 16, 128, generator=torch.Generator().manual_seed(6))
    weight[..., 99:] = 0
    model = AutoModelForCausalLM.from_pretrained(folder_of(variant), dtype=torch.float32)
    expected = expected_gradients(model, tokens, weight)
    assert_gradients(world.run("gradients", folder_of(variant), layout, tokens, weight), expected)


def test_a_bfloat16_critic_keeps_its_head_in_float32(world: Ranks, folder_of: Any) -> None:
    """Two parameter types in one model, one DDP and one optimizer."""
    tokens = some_tokens(rows=8)
    weight = torch.randn(8, 16, generator=torch.Generator().manual_seed(6))
    options = {"head": "value", "allow_unexpected": ("lm_head.weight",)}
    exact = world.run("gradients", folder_of("llama"), (2, 2), tokens, weight, **options)[0]
    for result in world.run("gradients", folder_of("llama"), (2, 2), tokens, weight, dtype="bfloat16", **options):
        types = {name: gradient.dtype for name, gradient in result["gradients"].items()}
        assert types.pop("score.weight") is torch.float32
        assert set(types.values()) == {torch.bfloat16}
        # bfloat16 keeps 8 bits: 0.4 % per operation, over four layers.
        assert result["norm"] == pytest.approx(exact["norm"], rel=0.1)


def test_a_new_value_head_depends_on_its_seed_alone(world: Ranks, folder_of: Any) -> None:
    heads = [world.run("value_head", folder_of("llama"), layout, 3) for layout in ((1, 1), (2, 2), (4, 1))]
    first = heads[0][0]
    assert first.std() > 0
    assert all(torch.equal(head, first) for by_rank in heads for head in by_rank)
    assert not torch.equal(world.run("value_head", folder_of("llama"), (2, 2), 4)[0], first)


@pytest.mark.parametrize(
    ("layout", "bucket_bytes"),
    [((1, 1), 1), ((4, 1), 300_000), ((2, 2), 60_000), ((2, 1), 500_000), ((1, 4), 1), (LAYOUTS[-1], 1)],
)
def test_gathering_holds_one_bucket_and_less_than_the_largest_tensor(
    world: Ranks, tmp_path: Path, layout: Any, bucket_bytes: int
) -> None:
    # Gate and up, one parameter, are by far the largest, and down, which is cut by columns, the next.
    folder = str(make_tiny_model(tmp_path / "m", "llama", intermediate_size=384))
    tensor = 384 * 64 * 4
    # A bucket has whole parameters. Of what is cut by columns one rank's columns travel in a buffer of their own.
    bound = max(bucket_bytes, 2 * tensor) + (tensor // layout[0] if layout[0] > 1 else 0)
    for result in world.run("peak_bytes", folder, layout, bucket_bytes):
        # Otherwise nothing was counted: gathering cannot do with less than the parameter itself.
        assert 2 * tensor <= result["peak"] <= bound
        assert result["peak"] < result["total"] / 2


def test_report_of_a_critic_from_a_language_model(world: Ranks, folder_of: Any) -> None:
    for result in world.run("report", folder_of("llama"), (2, 2), head="value", allow_unexpected=("lm_head.*",)):
        assert result == {"matched": 38, "unexpected": ("lm_head.weight",), "new": ("score.weight",), "missing": ()}


def test_report_of_a_folder_that_has_a_value_head(world: Ranks, folder_of: Any, tmp_path: Path) -> None:
    score = torch.randn(1, 64)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["score.weight"] = score.clone()
        del tensors["lm_head.weight"]

    folder = rewrite(folder_of("llama"), str(tmp_path / "m"), change)
    for result in world.run("report", folder, (2, 2), head="value"):
        assert result == {"matched": 39, "unexpected": (), "new": (), "missing": ()}
    for tensors in world.run("gathered", folder, (2, 2), head="value"):
        assert torch.equal(tensors["score.weight"], score)


def _remove(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["model.layers.3.mlp.up_proj.weight"]


def _add(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(4)


def _reshape(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.layers.2.self_attn.k_proj.weight"] = torch.zeros(24, 64)


@pytest.mark.parametrize(
    ("change", "wanted"),
    [
        (_remove, ["WeightError", "Missing: model.layers.3.mlp.up_proj.weight"]),
        (_add, ["WeightError", "Unexpected: model.layers.0.self_attn.rotary_emb.inv_freq", "allow_unexpected"]),
        (_reshape, ["model.safetensors", "model.layers.2.self_attn.k_proj.weight", "[24, 64]", "[32, 64]"]),
    ],
)
def test_files_that_do_not_fit_are_refused(
    world: Ranks, folder_of: Any, tmp_path: Path, change: Any, wanted: list[str]
) -> None:
    folder = rewrite(folder_of("llama"), str(tmp_path / "m"), change)
    for result in world.run("report", folder, (2, 2)):
        assert all(part in result["error"] for part in wanted), result


def test_a_pattern_allows_unexpected_tensors(world: Ranks, folder_of: Any, tmp_path: Path) -> None:
    folder = rewrite(folder_of("llama"), str(tmp_path / "m"), _add)
    for result in world.run("report", folder, (2, 2), allow_unexpected=("*.rotary_emb.inv_freq",)):
        assert result["unexpected"] == ("model.layers.0.self_attn.rotary_emb.inv_freq",)


@pytest.mark.parametrize("differs", [False, True])
def test_tied_model_whose_files_repeat_the_output_layer(
    world: Ranks, folder_of: Any, tmp_path: Path, differs: bool
) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + float(differs)

    folder = rewrite(folder_of("qwen2_tied"), str(tmp_path / "m"), change)
    for result in world.run("report", folder, (2, 2)):
        if differs:
            assert "lm_head.weight differs from model.embed_tokens.weight" in result["error"]
        else:
            assert result["unexpected"] == ("lm_head.weight",)


@pytest.mark.parametrize(("layout", "problem"), [((8, 1), "4 ranks"), ((1, 3), "layers")])
def test_layouts_that_do_not_fit_are_refused(world: Ranks, folder_of: Any, layout: Any, problem: str) -> None:
    for result in world.run("report", folder_of("llama"), layout):
        assert result["error"].startswith("LayoutError")


def test_export_is_a_folder_that_transformers_loads(world: Ranks, folder_of: Any, tmp_path: Path) -> None:
    source, out = folder_of("qwen2_tied"), tmp_path / "deep" / "out"
    assert set(world.run("export", source, (2, 2), str(out), max_shard_size=60_000)) == {""}
    assert len(list(out.glob("model-0*-of-0*.safetensors"))) > 2
    tokens = some_tokens()
    with torch.no_grad():
        logits = [AutoModelForCausalLM.from_pretrained(folder)(tokens).logits for folder in (source, out)]
    assert torch.equal(*logits)
    assert read_config(out) == read_config(source)
    original, copied = (AutoTokenizer.from_pretrained(folder) for folder in (source, out))
    assert copied.get_vocab() == original.get_vocab()
    assert copied.chat_template == original.chat_template
    assert (out / "generation_config.json").read_text() == (Path(source) / "generation_config.json").read_text()
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_export_in_another_type_says_so(world: Ranks, folder_of: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert set(world.run("export", folder_of("llama"), (4, 1), str(out), "bfloat16")) == {""}
    assert read_config(out)["dtype"] == "bfloat16"
    model = AutoModelForCausalLM.from_pretrained(out)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_export_of_a_critic_is_a_sequence_classifier(world: Ranks, folder_of: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    source = folder_of("qwen2_tied")
    assert set(world.run("export", source, (2, 2), str(out), head="value")) == {""}
    model = AutoModelForSequenceClassification.from_pretrained(out)
    tokens = some_tokens()
    with torch.no_grad():
        found = model(tokens).logits.squeeze(-1)
    results = world.run("outputs", source, [(1, 1)], tokens, head="value")[0][0]
    # HuggingFace scores the last token.
    torch.testing.assert_close(found, results[:, -1], atol=LOGIT_TOLERANCE, rtol=0)


def test_export_does_not_replace_a_folder_unless_told(world: Ranks, folder_of: Any, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "precious").touch()
    errors = world.run("export", folder_of("llama"), (2, 2), str(out))
    assert all("exists" in error for error in errors)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert (out / "precious").exists()
    assert set(world.run("export", folder_of("llama"), (2, 2), str(out), overwrite=True)) == {""}
    assert not (out / "precious").exists()
    assert json.loads((out / "config.json").read_text())["model_type"] == "llama"


def test_export_that_cannot_be_written_fails_on_every_rank(world: Ranks, folder_of: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    errors = world.run("export", folder_of("llama"), (2, 2), str(tmp_path / "file" / "out"))
    assert len(set(errors)) == 1
    assert "NotADirectoryError" in errors[0] or "FileExistsError" in errors[0]
