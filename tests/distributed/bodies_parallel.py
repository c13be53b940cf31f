"""What the ranks do in test_parallel.py and its neighbours."""

import os
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state

from rlhf_megatron.data.proto import DataProto
from rlhf_megatron.errors import RLHFError
from rlhf_megatron.parallel import collectives
from rlhf_megatron.parallel.groups import AXES, build_groups
from rlhf_megatron.parallel.layout import Layout
from rlhf_megatron.parallel.megatron_globals import MegatronContext, active_context
from rlhf_megatron.parallel.redistribute import redistribute
from rlhf_megatron.parallel.vocab_parallel import vocab_parallel_log_probs, vocab_parallel_log_probs_and_entropy
from tests.distributed.tiny_gpt import LENGTH, ROWS, VOCAB, TinyRole
from tests.distributed.vocab_case import vocab_case_data

CPU = torch.device("cpu")


def world_layout(**sizes: Any) -> Layout:
    return Layout(**sizes, ranks=tuple(range(dist.get_world_size())))


def tokens() -> torch.Tensor:
    return torch.randint(0, VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))


def train_alone(sizes: dict[str, Any], steps: int, experts: int | None = None) -> list[tuple[float, float]]:
    role = TinyRole.build(world_layout(**sizes), experts=experts)
    return [role.step(tokens()) for _ in range(steps)]


def train_in_turn(all_sizes: list[dict[str, Any]], steps: int) -> list[list[tuple[float, float]]]:
    roles = [TinyRole.build(world_layout(**sizes), f"role{i}") for i, sizes in enumerate(all_sizes)]
    results: list[list[tuple[float, float]]] = [[] for _ in roles]
    for _ in range(steps):
        for role, result in zip(roles, results, strict=True):
            result.append(role.step(tokens()))
    return results


def train_on_subsets(steps: int) -> list[tuple[float, float]] | None:
    """Two roles on disjoint halves of the world; returns this rank's role's results."""
    layouts = [Layout(tp=2, ranks=(0, 1)), Layout(pp=2, ranks=(2, 3))]
    groups = [build_groups(layout) for layout in layouts]
    mine = next(i for i, g in enumerate(groups) if g.is_member)
    role = TinyRole.build_on(groups[mine])
    return [role.step(tokens()) for _ in range(steps)]


def megatron_own_groups(sizes: dict[str, Any]) -> dict[str, Any]:
    """Our ranks of every group and Megatron-Core's, from its own initialisation, on this rank."""
    layout = world_layout(**sizes)
    groups = build_groups(layout)
    context = MegatronContext(groups, 1, "role", CPU)
    with context.active():
        ours = _ranks_in_force()
    before = dict(vars(parallel_state))
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        virtual_pipeline_model_parallel_size=layout.vpp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        expert_tensor_parallel_size=layout.expert_tp,
        create_gloo_process_groups=False,
    )
    theirs = _ranks_in_force()
    # destroy_model_parallel leaves some of them behind.
    vars(parallel_state).update(before)
    collection = {
        name: dist.get_process_group_ranks(getattr(groups.collection, name))
        for name in AXES
        if hasattr(groups.collection, name)
    }
    return {"ours": ours, "theirs": theirs, "collection": collection}


def _ranks_in_force() -> dict[str, Any]:
    state: dict[str, Any] = {}
    for name, value in vars(parallel_state).items():
        if name.startswith("_") and name.isupper() and "BUFFER" not in name:
            is_group = isinstance(value, dist.ProcessGroup)
            state[name] = dist.get_process_group_ranks(value) if is_group else value
    return state


def state_around_contexts() -> dict[str, Any]:
    """What is in force before, inside and after, and that the wrong role is refused."""
    one = MegatronContext(build_groups(world_layout(tp=2)), 3, "actor", CPU)
    two = MegatronContext(build_groups(world_layout()), 4, "critic", CPU)
    messages = {}
    zeros = torch.zeros
    before = dict(vars(parallel_state))
    with one.active():
        with one.active():
            inner_tp = parallel_state.get_tensor_model_parallel_world_size()
        still = active_context() is one
        for name, wrong in (("enter", lambda: two.active().__enter__()), ("require", two.require_active)):
            try:
                wrong()
            except RLHFError as error:
                messages[name] = f"{type(error).__name__}: {error}"
        one.require_active()
        try:
            one.rng_state_dict()
        except RLHFError as error:
            messages["rng"] = str(error)
    try:
        one.require_active()
    except RLHFError as error:
        messages["outside"] = str(error)
    after = dict(vars(parallel_state))
    with two.active():
        other_tp = parallel_state.get_tensor_model_parallel_world_size()
    return {
        "messages": messages,
        "inner_tp": inner_tp,
        "still": still,
        "other_tp": other_tp,
        "restored": all(before[name] is after[name] for name in before) and torch.zeros is zeros,
        "initialised": parallel_state.model_parallel_is_initialized(),
    }


def random_streams(seed: int) -> dict[str, Any]:
    """Numbers drawn from each stream of a tp2 x dp role, and proof that others are not disturbed."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    torch.manual_seed(123)
    undisturbed = torch.rand(3)
    torch.manual_seed(123)
    one = MegatronContext(build_groups(world_layout(tp=2)), seed, "actor", CPU)
    two = MegatronContext(build_groups(world_layout()), seed, "critic", CPU)
    drawn = {}
    with one.active():
        drawn["default"] = torch.rand(3)
        with get_cuda_rng_tracker().fork():
            drawn["tp"] = torch.rand(3)
        with get_cuda_rng_tracker().fork("expert-parallel-rng"):
            drawn["expert"] = torch.rand(3)
    outside = torch.rand(3)
    saved = one.rng_state_dict()
    with two.active():
        torch.rand(50)
    with one.active():
        drawn["default later"] = torch.rand(3)
        with get_cuda_rng_tracker().fork():
            drawn["tp later"] = torch.rand(3)
    one.load_rng_state_dict(saved)
    with one.active():
        drawn["default again"] = torch.rand(3)
        with get_cuda_rng_tracker().fork():
            drawn["tp again"] = torch.rand(3)
    return {"drawn": drawn, "undisturbed": torch.equal(undisturbed, outside)}


def vocab_parallel_case(
    tp: int, vocab_size: int, padded: int, dtype: str, temperature: float, outputs: str
) -> dict[str, torch.Tensor]:
    """Gradient of a random combination of the outputs on this rank's columns."""
    group = build_groups(world_layout(tp=tp)).tp
    rank = dist.get_rank(group)
    logits, labels, weights = vocab_case_data(vocab_size, padded, getattr(torch, dtype))
    width = padded // tp
    local = logits[..., rank * width : (rank + 1) * width].clone().requires_grad_()
    before = local.detach().clone()
    options: dict[str, Any] = {"group": group, "vocab_size": vocab_size, "temperature": temperature}
    if outputs == "log_probs":
        log_probs = vocab_parallel_log_probs(local, labels, **options)
        entropy = torch.zeros_like(log_probs)
    else:
        log_probs, entropy = vocab_parallel_log_probs_and_entropy(local, labels, **options)
    loss = (log_probs * weights[0]).sum() * (outputs != "entropy") + (entropy * weights[1]).sum()
    loss.backward()
    assert local.grad is not None
    unchanged = torch.tensor(torch.equal(before, local.detach()))
    return {"log_probs": log_probs.detach(), "entropy": entropy.detach(), "grad": local.grad, "unchanged": unchanged}


def batch_of(ids: list[int]) -> DataProto:
    """Rows whose every value is a function of the row id."""
    index = torch.tensor(ids, dtype=torch.int64)
    objects = {"uid": [f"g{i // 2}" for i in ids], "extra_info": [{"n": i, "list": [i] * (i % 3)} for i in ids]}
    tensors = {
        "row_id": index,
        "tokens": index[:, None] * 10 + torch.arange(4),
        "mask": (index[:, None] + torch.arange(3)) % 2 == 0,
        "half": index[:, None].to(torch.bfloat16) * torch.ones(5, dtype=torch.bfloat16),
        "scalar": index.to(torch.float32) / 7,
    }
    return DataProto.from_dict(tensors, objects, {"step": 3})


def same_batch(one: DataProto, two: DataProto) -> bool:
    tensors = one.tensors().keys() == two.tensors().keys() and all(
        a.dtype == two.tensors()[key].dtype and torch.equal(a, two.tensors()[key]) for key, a in one.tensors().items()
    )
    objects = one.non_tensor_batch.keys() == two.non_tensor_batch.keys() and all(
        list(a) == list(two.non_tensor_batch[key]) for key, a in one.non_tensor_batch.items()
    )
    return tensors and objects and one.meta_info == two.meta_info


def redistribute_case(
    home: dict[str, Any],
    away: dict[str, Any],
    home_rows: list[list[int]],
    away_rows: list[list[int]] | None,
) -> dict[str, Any]:
    """Move rows home -> away -> home and compare with what each rank should hold."""
    rank = dist.get_rank()
    source, destination = Layout(**home), Layout(**away)
    mine = home_rows[source.shard_of(rank)] if rank in source else []
    start = batch_of(mine)
    there = redistribute(start, destination, away_rows)
    if away_rows is None:
        every = sorted({i for shard in home_rows for i in shard})
        away_rows = [part.tolist() for part in np.array_split(np.array(every, dtype=np.int64), destination.num_shards)]
    expected = batch_of(away_rows[destination.shard_of(rank)] if rank in destination else [])
    back = redistribute(there, source, home_rows)
    return {"there": same_batch(there, expected), "back": same_batch(back, start), "rows": len(there)}


def redistribute_without_columns() -> int:
    """Ranks without rows pass a batch that has no columns at all."""
    data = batch_of([4, 5]) if dist.get_rank() == 0 else DataProto()
    moved = redistribute(data, world_layout())
    return len(moved) if set(moved.keys()) == set(batch_of([]).keys()) else -1


def redistribute_errors() -> dict[str, str]:
    rank = dist.get_rank()
    shards = world_layout().num_shards
    cases: dict[str, Any] = {
        "absent": lambda: redistribute(batch_of([1]), world_layout(), [[1], [99], *[[]] * (shards - 2)]),
        "shards": lambda: redistribute(batch_of([1]), world_layout(), [[1]]),
        "columns": lambda: redistribute(
            batch_of([1]) if rank else batch_of([2]).select(["row_id", "tokens"]), world_layout()
        ),
        "width": lambda: redistribute(
            DataProto.from_dict({"row_id": torch.tensor([rank]), "x": torch.zeros(1, 2 + rank)}), world_layout()
        ),
        "twice": lambda: redistribute(batch_of([1, 1] if rank == 1 else [0]), world_layout()),
        "no id": lambda: redistribute(DataProto.from_dict({"x": torch.zeros(1, 2)}), world_layout()),
    }
    messages = {}
    for name, case in cases.items():
        try:
            case()
        except RLHFError as error:
            messages[name] = f"{type(error).__name__}: {error}"
    return messages


def collective_results() -> dict[str, Any]:
    rank = dist.get_rank()
    tensor = torch.tensor([float(rank), 1.0])
    metrics = {"all": (torch.tensor(float(rank)), 1 + rank), "none": (0.0, 0)}
    if rank == 1:
        metrics["only one"] = (6.0, 3)
    return {
        "sum": collectives.all_reduce_sum(tensor).tolist(),
        "max": collectives.all_reduce_max(tensor).tolist(),
        "input": tensor.tolist(),
        "gathered": collectives.all_gather_object({"rank": rank}),
        "broadcast": collectives.broadcast_object(f"from {rank}", 1),
        "metrics": collectives.reduce_metrics(metrics),
    }


def report_identity() -> tuple[int, int]:
    return dist.get_rank(), os.getpid()


def fail_on(rank: int) -> str:
    if dist.get_rank() == rank:
        raise ValueError(f"broken on purpose on {rank}")
    return "fine"


def die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        print("last words", flush=True)
        os._exit(3)
    dist.barrier()


def sleep_on(rank: int, seconds: float) -> None:
    if dist.get_rank() == rank:
        time.sleep(seconds)
