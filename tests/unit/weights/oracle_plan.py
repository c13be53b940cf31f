"""A slow, plain picture of a weight sync: full HuggingFace tensors, vLLM's fused shards, and a plan carried out.

Names, shapes and vLLM's cuts are written out here by hand, not taken from the tables under test. Every element of the
model is a different number, so that a wrong one shows.
"""

import re
from collections.abc import Iterator

import torch
from torch import Tensor

from rlhf_megatron.models.hf_config import ModelShape, Rope
from rlhf_megatron.weights.catalog import catalog
from rlhf_megatron.weights.plan import SyncPlan
from rlhf_megatron.weights.rank_plan import RankPlan, Transfer
from tests.unit.weights.sharding import cut

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "mixtral", "qwen3_moe")
Tensors = dict[str, Tensor]


def model_shape(family: str, **sizes: object) -> ModelShape:
    """A tiny model of a family with its usual biases and norms."""
    values: dict = {
        "family": family,
        "num_layers": 4,
        "hidden_size": 3,
        "ffn_hidden_size": 16,
        "num_heads": 8,
        "num_kv_heads": 8,
        "head_dim": 2,
        "vocab_size": 99,
        "norm_eps": 1e-6,
        "rope": Rope("default", 1e4, ()),
        "tie_embeddings": False,
        "max_position_embeddings": 64,
        "qkv_bias": family == "qwen2",
        "qk_norm": family in ("qwen3", "qwen3_moe"),
    }
    if family in ("mixtral", "qwen3_moe"):
        layers = int(sizes.get("num_layers", 4))  # type: ignore[call-overload]
        flags = tuple(family == "mixtral" or layer % 3 != 1 for layer in range(layers))
        values |= {"num_experts": 4, "experts_per_token": 2, "moe_ffn_hidden_size": 8, "moe_layers": flags}
    return ModelShape(**values | sizes)


def hf_shapes(shape: ModelShape) -> Iterator[tuple[str, tuple[int, ...]]]:
    """The checkpoint's tensors."""
    h, q, kv = shape.hidden_size, shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    yield "model.embed_tokens.weight", (shape.vocab_size, h)
    for layer in range(shape.num_layers):
        p = f"model.layers.{layer}."
        yield p + "input_layernorm.weight", (h,)
        for x, rows in (("q", q), ("k", kv), ("v", kv)):
            yield f"{p}self_attn.{x}_proj.weight", (rows, h)
            if shape.qkv_bias:
                yield f"{p}self_attn.{x}_proj.bias", (rows,)
        yield p + "self_attn.o_proj.weight", (h, q)
        if shape.out_bias:
            yield p + "self_attn.o_proj.bias", (h,)
        if shape.qk_norm:
            yield p + "self_attn.q_norm.weight", (shape.head_dim,)
            yield p + "self_attn.k_norm.weight", (shape.head_dim,)
        yield p + "post_attention_layernorm.weight", (h,)
        if shape.is_moe_layer(layer):
            f, mixtral = shape.moe_ffn_hidden_size, shape.family == "mixtral"
            mlp = p + ("block_sparse_moe." if mixtral else "mlp.")
            yield mlp + "gate.weight", (shape.num_experts, h)
            for expert in range(shape.num_experts):
                names = ("w1", "w3", "w2") if mixtral else ("gate_proj", "up_proj", "down_proj")
                for name, sizes in zip(names, ((f, h), (f, h), (h, f)), strict=True):
                    yield f"{mlp}experts.{expert}.{name}.weight", sizes
            continue
        f = shape.ffn_hidden_size
        for name, sizes in (("gate", (f, h)), ("up", (f, h)), ("down", (h, f))):
            yield f"{p}mlp.{name}_proj.weight", sizes
            if shape.mlp_bias:
                yield f"{p}mlp.{name}_proj.bias", sizes[:1]
    yield "model.norm.weight", (h,)
    if not shape.tie_embeddings:
        yield "lm_head.weight", (shape.vocab_size, h)


def hf_tensors(shape: ModelShape) -> Tensors:
    """Full tensors; no two elements of the model are equal, and none is zero."""
    tensors, used = {}, 1
    for name, sizes in hf_shapes(shape):
        count = torch.Size(sizes).numel()
        tensors[name] = torch.arange(used, used + count, dtype=torch.float64).view(sizes)
        used += count
    return tensors


def vllm_tensors(shape: ModelShape, tensors: Tensors, slot: int, tp: int) -> Tensors:
    """What vLLM's weight loaders make of the checkpoint on one tensor-parallel rank, step by step."""

    def heads(x: Tensor, count: int) -> Tensor:
        per_head = x.view(count, shape.head_dim, *x.shape[1:])
        own = per_head.chunk(tp)[slot] if count >= tp else per_head[slot // (tp // count)]
        return own.reshape(-1, *x.shape[1:])

    def rows(x: Tensor) -> Tensor:
        return x[slot * (len(x) // tp) : (slot + 1) * (len(x) // tp)]

    def columns(x: Tensor) -> Tensor:
        return rows(x.T).T

    found: Tensors = {}
    for name, x in tensors.items():
        if ".experts." in name:
            continue
        if "q_proj" in name:
            parts = [heads(x, shape.num_heads)]
            parts += [heads(tensors[name.replace("q_proj", k)], shape.num_kv_heads) for k in ("k_proj", "v_proj")]
            found[name.replace("q_proj", "qkv_proj")] = torch.cat(parts)
        elif "gate_proj" in name:
            fused = torch.cat([rows(x), rows(tensors[name.replace("gate", "up")])])
            found[name.replace("gate_proj", "gate_up_proj")] = fused
        elif name.endswith(("o_proj.weight", "down_proj.weight")):
            found[name] = columns(x)
        elif name in ("model.embed_tokens.weight", "lm_head.weight"):
            found[name] = rows(torch.cat([x, torch.zeros(-len(x) % 64, x.shape[1], dtype=x.dtype)]))
        elif not re.search("k_proj|v_proj|up_proj", name):
            found[name] = x
    first = re.compile(r"(.*\.experts)\.0\.(gate_proj|w1)\.weight")
    for match in filter(None, map(first.fullmatch, tensors)):
        gate, up, down = ("w1", "w3", "w2") if match[2] == "w1" else ("gate_proj", "up_proj", "down_proj")
        each = [[tensors[f"{match[1]}.{e}.{n}.weight"] for n in (gate, up, down)] for e in range(shape.num_experts)]
        w13 = torch.stack([torch.cat([rows(w1), rows(w3)]) for w1, w3, _ in each])
        found[f"{match[1]}.routed_experts.w13_weight"] = w13
        found[f"{match[1]}.routed_experts.w2_weight"] = torch.stack([columns(w2) for *_, w2 in each])
    return found


def megatron_shards(plan: SyncPlan, tensors: Tensors) -> dict[int, dict[tuple[int, str], Tensor]]:
    """The parameters of every rank of the actor, by chunk and name."""
    actor = plan.actor
    held: dict[int, dict[tuple[int, str], Tensor]] = {rank: {} for rank in actor.ranks}
    for item in catalog(plan.shape, "lm", actor):
        size = item.shard_size(actor)
        shards = [cut([tensors[name] for name in item.hf], item.slicing, shard, size) for shard in range(size)]
        for rank in actor.ranks:
            shard = item.shard_rank(actor, rank)
            if shard is not None:
                held[rank][item.chunk, item.megatron] = shards[shard]
    return held


def carry_out(plan: SyncPlan, tensors: Tensors) -> int:
    """Carries a plan out on real tensors and checks all of it.

    Every element of every vLLM parameter is written once and right; no rank sends to itself over the wire; what one
    rank sends is what the other receives, in the same order.

    Returns:
        Bytes on the wire.
    """
    held = megatron_shards(plan, tensors)
    ranks = sorted({rank for ranks in plan.replicas for rank in ranks} | set(plan.actor.ranks))
    parts = {rank: plan.of(rank) for rank in ranks}
    sent: dict[tuple[int, int], list[Transfer]] = {}
    received: dict[tuple[int, int], list[Transfer]] = {}
    for rank, part in parts.items():
        for transfer in part.sends:
            assert transfer.source == rank != transfer.destination
            sent.setdefault((rank, transfer.destination), []).append(transfer)
        for transfer in part.receives:
            assert transfer.destination == rank != transfer.source
            received.setdefault((transfer.source, rank), []).append(transfer)
        assert all(transfer.source == transfer.destination == rank for transfer in part.copies)
    assert sent == received
    for replica in plan.replicas:
        for slot, rank in enumerate(replica):
            _check_rank(plan, parts[rank], rank, vllm_tensors(plan.shape, tensors, slot, len(replica)), held)
    return sum(transfer.bytes for transfers in sent.values() for transfer in transfers)


def _check_rank(
    plan: SyncPlan, part: RankPlan, rank: int, wanted: Tensors, held: dict[int, dict[tuple[int, str], Tensor]]
) -> None:
    got = {name: torch.full_like(x, torch.nan) for name, x in wanted.items()}
    writes = {name: torch.zeros(x.shape, dtype=torch.int64) for name, x in wanted.items()}
    for transfer in (*part.copies, *part.receives):
        source = held[transfer.source][transfer.chunk, transfer.parameter][transfer.source_slice]
        assert transfer.bytes == source.numel() * plan.itemsize
        target = got[transfer.target][transfer.target_slice]
        assert target.shape == source.shape
        target.copy_(source)
        writes[transfer.target][transfer.target_slice] += 1
    for padding in part.paddings:
        got[padding.target][padding.start : padding.stop] = 0.0
        writes[padding.target][padding.start : padding.stop] += 1
    for name, x in wanted.items():
        assert bool((writes[name] == 1).all()), f"rank {rank}: {name} was not written once everywhere"
        assert torch.equal(got[name], x), f"rank {rank}: {name} holds other elements"
    own = held.get(rank, {}).values()
    mine = set(torch.cat([x.flatten() for x in own]).tolist()) if own else set()
    for transfer in part.receives:
        # What a rank has is not sent to it: the wire carries what it lacks, and nothing else.
        x = held[transfer.source][transfer.chunk, transfer.parameter][transfer.source_slice]
        assert mine.isdisjoint(x.flatten().tolist())
