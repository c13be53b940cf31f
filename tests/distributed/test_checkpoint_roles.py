"""A role's engine is saved and comes back bit for bit, under the layout that it was saved under and under others."""

import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.tiny_models import make_tiny_model

BODIES = "tests.distributed.bodies_checkpoint_roles:"
TP1 = {"ranks": (0,)}
TP2 = {"ranks": (1, 2), "tensor_model_parallel_size": 2}
PP2 = {"pipeline_model_parallel_size": 2, "ranks": (0, 3)}
TP2_PP2 = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
DP4: dict[str, Any] = {}
VPP = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
DENSE = {"tp1": TP1, "tp2": TP2, "pp2": PP2, "tp2pp2": TP2_PP2, "dp4": DP4, "vpp": VPP}
# With whole experts on tensor-parallel ranks, their data-parallel groups are not the dense parameters'.
ETP1 = {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
EXPERTS = {"tp1": TP1, "tp2": TP2, "pp2": PP2, "tp2pp2": TP2_PP2, "dp4": DP4, "ep2": EP2, "etp1": ETP1}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    made: dict[str, str] = {}

    def model(variant: str) -> str:
        if variant not in made:
            made[variant] = str(make_tiny_model(tmp_path_factory.mktemp("models") / variant, variant))
        return made[variant]

    return model


def one(answers: list[Any]) -> Any:
    """The answer of the ranks that have one, all of which must agree."""
    found = [answer for answer in answers if answer is not None]
    assert all(answer == found[0] for answer in found)
    return found[0]


def same_continuation(before: dict[str, Any], after: dict[str, Any], what: str = "") -> None:
    """Bit for bit."""
    assert after["state"] == before["state"], what
    assert after["later"] == before["later"], what
    assert after["end"] == before["end"], what


@pytest.mark.parametrize(("variant", "layouts", "others"), [("qwen2", DENSE, 2), ("qwen3_moe", EXPERTS, 6)])
def test_layouts_under_each_other(
    world4: Any, models: Any, tmp_path: Path, variant: str, layouts: dict[str, Any], others: int
) -> None:
    """Weights, moments and masters are bit-equal, also on other numbers of ranks; the next steps are equal.

    And bit-equal under the same layout. With experts every layout is loaded under every other; without, under the next
    two in the list.
    """
    folder = models(variant)
    saved = {
        name: one(world4.run(BODIES + "save_and_go_on", folder, options, str(tmp_path / name), timeout=300))
        for name, options in layouts.items()
    }
    for name, options in layouts.items():
        index = list(layouts).index(name)
        sources = [[*layouts, *layouts][index + 1 + other] for other in range(others)] + [name]
        found = one(
            world4.run(
                BODIES + "load_and_go_on", folder, options, [str(tmp_path / other) for other in sources], timeout=300
            )
        )
        for source, after in zip(sources, found, strict=True):
            assert after["state"] == saved[source]["state"], f"{source} -> {name}"
            # Sums over ranks and rows are in another order: rounding of fp32.
            assert after["later"][0] == pytest.approx(saved[source]["later"][0], rel=2e-5), f"{source} -> {name}"
        same_continuation(saved[name], found[-1], name)


# What is saved, what it is loaded under; the model and its head. All relate to how an optimizer holds its state.
BF16 = {"dtype": "bfloat16"}
WHOLE = {"use_distributed_optimizer": False}
OFFLOAD = {"param_offload": True, "grad_offload": True, "optimizer_offload": True}
PAIRS = {
    "bf16": ("qwen2", "lm", {**TP2, **BF16}, {**DP4, **BF16}),
    "bf16 whole": ("qwen2", "lm", {**PP2, **BF16, **WHOLE}, {**TP2, **BF16, **WHOLE}),
    "bf16 whole to divided": ("qwen2", "lm", {**TP2, **BF16, **WHOLE}, {**DP4, **BF16}),
    "divided to whole": ("qwen2", "lm", {**DP4}, {**TP2, **WHOLE}),
    "whole to divided": ("qwen2", "lm", {**TP2, **WHOLE}, {**DP4}),
    "critic in bf16": ("qwen2", "value", {**TP2_PP2, **BF16}, {**DP4, **BF16, **WHOLE}),
    "critic": ("qwen2_tied", "value", {**VPP, "ranks": (0, 1)}, TP2),
    "tied, offloaded": ("qwen2_tied", "lm", {**TP2_PP2, **OFFLOAD}, {**TP1, **OFFLOAD}),
    "tied, on more stages": ("qwen2_tied", "lm", {**TP2, **OFFLOAD}, TP2_PP2),
    "experts in bf16": ("mixtral", "lm", {**EP2, **BF16}, {**PP2, **BF16, **WHOLE}),
    "one key-value head": ("qwen2_one_kv_head", "lm", TP2, TP2_PP2),
    "context parallel": ("qwen3", "lm", {"context_parallel_size": 2, "ranks": (0, 1)}, PP2),
}


@pytest.mark.parametrize("name", PAIRS)
def test_optimizers_and_models(world4: Any, models: Any, tmp_path: Path, name: str) -> None:
    variant, head, source, destination = PAIRS[name]
    folder, where = models(variant), str(tmp_path / "c")
    saved = one(world4.run(BODIES + "save_and_go_on", folder, source, where, 2, head))
    (found,) = one(world4.run(BODIES + "load_and_go_on", folder, destination, [where], head))
    assert found["state"] == saved["state"]
    # In bf16 the order of sums and the cut of matrices show in the third digit.
    tolerance = 2e-2 if "bf16" in name else 2e-5
    assert found["later"][0] == pytest.approx(saved["later"][0], rel=tolerance)
    (again,) = one(world4.run(BODIES + "load_and_go_on", folder, source, [where], head))
    same_continuation(saved, again)


def test_roles_on_disjoint_ranks(world4: Any, models: Any, tmp_path: Path) -> None:
    """They save at the same time, and one saves and loads while the other's ranks do something else."""
    found = world4.run(BODIES + "two_roles", models("qwen2"), str(tmp_path))
    for rank, role in enumerate(found):
        assert role["after"] == role["before"]
        # The first rank of a role writes the index, too.
        own = [f"__{rank % 2}_0.distcp"]
        assert role["files"] == (sorted([".metadata", "common.pt", "metadata.json", *own]) if rank % 2 == 0 else own)


@pytest.mark.parametrize("name", ["tp1", "tp2pp2"])
def test_an_asynchronous_save_is_of_its_moment(world4: Any, models: Any, tmp_path: Path, name: str) -> None:
    """Two steps are done while the files are being written; the state is that before them."""
    folder, where = models("qwen2"), str(tmp_path / "c")
    saved = one(world4.run(BODIES + "save_and_go_on", folder, DENSE[name], where, 1, "lm", True))
    (found,) = one(world4.run(BODIES + "load_and_go_on", folder, DENSE[name], [where]))
    assert saved["is_done"]
    same_continuation(saved, found)


@pytest.mark.parametrize("options", [TP2, {**DP4, **BF16}, {**TP2, **WHOLE}], ids=["tp2", "bf16", "whole"])
def test_before_the_first_step(world4: Any, models: Any, tmp_path: Path, options: dict[str, Any]) -> None:
    folder, where = models("qwen2"), str(tmp_path / "c")
    saved = one(world4.run(BODIES + "save_and_go_on", folder, options, where, 0))
    (found,) = one(world4.run(BODIES + "load_and_go_on", folder, options, [where]))
    assert found["later"] == saved["later"]
    assert found["end"] == saved["end"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_model_alone(world2: Any, models: Any, tmp_path: Path, dtype: str) -> None:
    """Masters follow the loaded weights, moments stay; what is not there, or has no place, is an error."""
    options = {"tensor_model_parallel_size": 2, "dtype": dtype}
    for found in world2.run(BODIES + "model_alone", models("qwen2"), options, str(tmp_path / "c")):
        assert found["loaded"]["weights"] == found["frozen"] == found["saved"]["weights"]
        assert found["loaded"]["exp_avg"] == found["moments"]["exp_avg"] != found["saved"]["exp_avg"]
        # In bf16 the masters lose what the weights cannot hold.
        assert (found["loaded"]["master"] == found["saved"]["master"]) == (dtype == "float32")
        assert found["loaded"]["master"] != found["moments"]["master"]
        no_state, frozen_load, frozen_save = found["errors"]
        assert "holds no optimizer state" in no_state and "checkpoint.load_contents" in no_state
        assert "frozen" in frozen_load and "frozen" in frozen_save
        assert found["nothing"] and not (tmp_path / "c" / "none").exists()


@pytest.mark.parametrize("asynchronous", [False, True], ids=["at once", "later"])
@pytest.mark.parametrize("rank", [0, 1])
def test_all_ranks_hear_of_a_failed_save(
    world2: Any, models: Any, tmp_path: Path, rank: int, asynchronous: bool
) -> None:
    """And the next save works."""
    for taken, free in world2.run(
        BODIES + "save_where_rank_cannot", models("qwen2"), str(tmp_path), rank, asynchronous
    ):
        assert f"rank {rank}: " in taken and f"__{rank}_0.distcp exists already" in taken and "Remove it" in taken
        assert free == "no error"
    assert not (tmp_path / "taken" / "metadata.json").exists()
    assert (tmp_path / "free" / "metadata.json").exists()


def test_megatron_reads_what_is_saved(world2: Any, models: Any, tmp_path: Path) -> None:
    """Its own loader finds every tensor of model and optimizer, joined from the ranks' stretches."""
    for found in world2.run(BODIES + "megatron_reads", models("qwen2"), {}, str(tmp_path / "c")):
        assert found["different"] == []
        # Four layers of seven parameters, two embeddings and a norm; a master and two moments of each.
        assert found["tensors"] == 3 * (4 * 7 + 3)
        assert found["steps"] == [1]


@pytest.mark.parametrize("distributed", [True, False], ids=["divided", "whole"])
def test_what_megatron_saves_is_read(world2: Any, models: Any, tmp_path: Path, distributed: bool) -> None:
    options = {"use_distributed_optimizer": distributed}
    others = {"tensor_model_parallel_size": 2}
    for found in world2.run(BODIES + "ours_reads_megatron", models("qwen2_tied"), options, str(tmp_path / "c"), others):
        assert found["after"] == found["before"]
        ours, theirs = found["later"]
        assert theirs == pytest.approx(ours, rel=2e-5)


def _forget(name: str) -> Any:
    return lambda folder, _: (folder / name).unlink()


def _cut(name: str) -> Any:
    return lambda folder, _: (folder / name).write_bytes((folder / name).read_bytes()[:-100])


def _replace(name: str, content: bytes) -> Any:
    return lambda folder, _: (folder / name).write_bytes(content)


def _from_other(name: str) -> Any:
    """A file of a checkpoint of another layout takes the place of one."""
    return lambda folder, other: shutil.copy(other / name, folder / name)


def _flip_shape(folder: Path, _: Path) -> None:
    """In the description of the last rectangle: 99 rows of vocabulary fewer or more."""
    path = folder / "__1_0.distcp"
    content = path.read_bytes()
    # A pickle's small integer: `K` and one byte; the hidden size is 64.
    index = content.rindex(b"K\x40")
    path.write_bytes(content[: index + 1] + b"\x41" + content[index + 2 :])


# What is done to a checkpoint of two ranks; what the error names.
DAMAGE: dict[str, tuple[Any, str]] = {
    "no folder": (lambda folder, _: shutil.rmtree(folder), "no such folder"),
    "empty folder": (lambda folder, _: [path.unlink() for path in folder.iterdir()], "metadata.json"),
    "not finished": (_forget("metadata.json"), "metadata.json"),
    "another format": (_replace("metadata.json", b'{"sharded_backend": "zarr"}'), "zarr"),
    "no index": (_forget(".metadata"), ".metadata"),
    "index cut": (_cut(".metadata"), ".metadata"),
    "index runs code": (_replace(".metadata", b"cposix\nsystem\n(S'touch /tmp/ran'\ntR."), "posix.system"),
    "no common part": (_forget("common.pt"), "common.pt"),
    "common part cut": (_cut("common.pt"), "common.pt"),
    "common part runs code": (_replace("common.pt", pickle.dumps(os.getcwd)), "common.pt"),
    "no rank's file": (_forget("__1_0.distcp"), "__1_0.distcp"),
    "a rank's file cut": (_cut("__0_0.distcp"), "__0_0.distcp"),
    "a rank's file of another layout": (_from_other("__0_0.distcp"), "__0_0.distcp"),
    "an index of another layout": (_from_other(".metadata"), "distcp"),
    "a flipped shape": (_flip_shape, "__1_0.distcp"),
}


def test_damage_is_named_on_all_ranks(world4: Any, models: Any, tmp_path: Path) -> None:
    """Whatever only one rank may see; and the engine is as it was, and nobody waits for anybody."""
    folder, good, other = models("qwen2"), tmp_path / "good", tmp_path / "other"
    world4.run(BODIES + "save_and_go_on", folder, TP2, str(good))
    world4.run(BODIES + "save_and_go_on", folder, PP2, str(other))
    world4.run(BODIES + "save_and_go_on", models("qwen2_tied"), TP2, str(tmp_path / "of another model"))
    for name, (damage, _) in DAMAGE.items():
        shutil.copytree(good, tmp_path / name)
        damage(tmp_path / name, other)
    expected = {name: word for name, (_, word) in DAMAGE.items()} | {"of another model": "tie_embeddings is True there"}
    found = one(world4.run(BODIES + "load_damaged", folder, TP2, [str(tmp_path / name) for name in expected]))
    for (name, word), message in zip(expected.items(), found["messages"], strict=True):
        assert word in message and str(tmp_path / name) in message, f"{name}: {message}"
        assert "could not be loaded" in message and "had begun" not in message, f"{name}: {message}"
    assert found["same"]


def test_a_critic_is_no_actor(world2: Any, models: Any, tmp_path: Path) -> None:
    folder, options = models("qwen2"), {"tensor_model_parallel_size": 2}
    world2.run(BODIES + "save_and_go_on", folder, options, str(tmp_path / "c"), 1, "value")
    found = one(world2.run(BODIES + "load_damaged", folder, options, [str(tmp_path / "c")]))
    assert "its head is 'value' and not 'lm'" in found["messages"][0]
    assert found["same"]
