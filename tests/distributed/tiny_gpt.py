"""A tiny Megatron-Core GPT, built, trained and read back by the bodies of the multi-rank tests.

Uses Megatron-Core directly (not the package's model builder), so that tests of groups and globals depend on nothing
else. Weights start from a function of the tensor's name and *whole* shape, so every layout starts from the same model.
"""

import zlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from rlhf_megatron.parallel.groups import Groups, build_groups
from rlhf_megatron.parallel.layout import Layout
from rlhf_megatron.parallel.megatron_globals import MegatronContext

LAYERS, HIDDEN, HEADS, KV_HEADS, FFN, VOCAB, LENGTH, ROWS, MICRO = 4, 64, 8, 4, 128, 128, 16, 8, 2


class Norm(torch.nn.RMSNorm):
    """RMSNorm that knows about sequence parallelism, as Megatron-Core's own local norm refuses it."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any):
        super().__init__(hidden_size, eps=eps)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


def transformer_config(layout: Layout, experts: int | None = None, **changes: Any) -> TransformerConfig:
    """Return the tiny model's configuration in a layout."""
    moe: dict[str, Any] = {}
    if experts is not None:
        moe = {
            "num_moe_experts": experts,
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": FFN,
            "expert_model_parallel_size": layout.ep,
            "expert_tensor_parallel_size": layout.expert_tp,
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "alltoall",
        }
    options: dict[str, Any] = {
        "num_layers": LAYERS,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_query_groups": KV_HEADS,
        "ffn_hidden_size": FFN,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "virtual_pipeline_model_parallel_size": layout.vpp,
        "pipeline_dtype": torch.float32,
        "params_dtype": torch.float32,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
        "use_cpu_initialization": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "sequence_parallel": layout.tp > 1,
        "bias_activation_fusion": False,
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "apply_rope_fusion": False,
    }
    return TransformerConfig(**(options | moe | changes))


def _chunk(config: TransformerConfig, context: MegatronContext, chunk: int) -> GPTModel:
    layout, groups = context.groups.layout, context.groups
    chunks = layout.vpp or 1
    spec = get_gpt_layer_local_spec(num_experts=config.num_moe_experts, moe_grouped_gemm=False, normalization="RMSNorm")
    spec.submodules.input_layernorm = Norm  # type: ignore[union-attr]
    spec.submodules.pre_mlp_layernorm = Norm  # type: ignore[union-attr]
    block = TransformerBlockSubmodules(layer_specs=[spec] * (LAYERS // layout.pp // chunks), layer_norm=Norm)
    model = GPTModel(
        config,
        block,  # type: ignore[arg-type]
        vocab_size=VOCAB,
        max_sequence_length=LENGTH,
        pre_process=groups.is_first_stage and chunk == 0,
        post_process=groups.is_last_stage and chunk == chunks - 1,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        pg_collection=groups.collection,
        vp_stage=chunk if layout.vpp else None,
    )
    _fill(model, context)
    return model


def _fill(model: GPTModel, context: MegatronContext) -> None:
    """Give each parameter this rank's part of a whole tensor that depends on its global name alone."""
    layout = context.groups.layout
    first_layer = model.decoder.layers[0].layer_number - 1
    for name, parameter in model.named_parameters():
        parts = name.split(".")
        if parts[:2] == ["decoder", "layers"]:
            parts[2] = str(int(parts[2]) + first_layer)
        expert = "local_experts" in parts
        size, rank = layout.tp, context.groups.coordinates.tp
        if expert:
            place = context.groups.expert_coordinates
            per_rank = (model.config.num_moe_experts or 1) // layout.ep
            at = parts.index("local_experts") + 1
            parts[at] = str(int(parts[at]) + per_rank * place.ep)
            size, rank = layout.expert_tp, place.etp
        dim = getattr(parameter, "partition_dim", -1) if getattr(parameter, "tensor_model_parallel", False) else -1
        if expert and dim < 0:
            dim = 0 if "linear_fc1" in parts else 1
        shape = list(parameter.shape)
        if dim >= 0:
            shape[dim] *= size
        generator = torch.Generator().manual_seed(zlib.crc32(".".join(parts).encode()))
        whole = torch.randn(shape, generator=generator) * 0.05
        if "norm" in name:
            whole = whole + 1.0
        if "linear_fc1" in parts and dim == 0:
            # Gate and up are stacked on each rank, so the whole is cut in each half.
            halves = [half.chunk(size)[rank] for half in whole.chunk(2)]
            part = torch.cat(halves)
        else:
            part = whole.chunk(size, dim)[rank] if dim >= 0 else whole
        parameter.data.copy_(part)


@dataclass
class TinyRole:
    """A tiny model in a layout, with its optimizer."""

    context: MegatronContext
    config: TransformerConfig
    chunks: list[DistributedDataParallel]
    optimizer: Any

    @classmethod
    def build(cls, layout: Layout, name: str = "tiny", experts: int | None = None, **changes: Any) -> "TinyRole":
        """Collective over the world. ``changes`` go to the transformer configuration."""
        return cls.build_on(build_groups(layout), name, experts, **changes)

    @classmethod
    def build_on(cls, groups: Groups, name: str = "tiny", experts: int | None = None, **changes: Any) -> "TinyRole":
        """Collective over the ranks of the layout."""
        layout = groups.layout
        context = MegatronContext(groups, seed=7, name=name, device=torch.device("cpu"))
        with context.active():
            config = transformer_config(layout, experts, **changes)
            ddp_config = DistributedDataParallelConfig(
                use_distributed_optimizer=True, overlap_grad_reduce=False, grad_reduce_in_fp32=True
            )
            collection = context.groups.collection
            chunks = [
                DistributedDataParallel(config, ddp_config, _chunk(config, context, i), pg_collection=collection)
                for i in range(layout.vpp or 1)
            ]
            optimizer_config = OptimizerConfig(
                optimizer="adam", lr=1e-3, use_distributed_optimizer=True, bf16=False, clip_grad=1.0
            )
            optimizer = get_megatron_optimizer(
                optimizer_config,
                chunks,  # type: ignore[arg-type]
                use_gloo_process_groups=False,
                pg_collection=collection,
            )
            config.finalize_model_grads_func = finalize_model_grads
            config.grad_scale_func = optimizer.scale_loss
        return cls(context, config, chunks, optimizer)

    def step(self, data: torch.Tensor) -> tuple[float, float]:
        """Train one step on ``data`` [ROWS, LENGTH], the same on all ranks.

        Returns (mean loss, gradient norm), the same on all ranks of the layout.
        """
        groups, layout = self.context.groups, self.context.groups.layout
        rows = data.chunk(layout.dp)[groups.shard].split(MICRO)
        with self.context.active():
            for chunk in self.chunks:
                chunk.zero_grad_buffer()
            self.optimizer.zero_grad()
            schedule = get_forward_backward_func(pp_size=layout.pp, vp_size=layout.vpp)
            results = schedule(
                forward_step_func=_forward_step,
                data_iterator=[iter(rows) for _ in self.chunks] if layout.vpp else iter(rows),
                model=self.chunks,
                num_microbatches=len(rows),
                seq_length=LENGTH,
                micro_batch_size=MICRO,
                forward_only=False,
                p2p_communicator=P2PCommunicator(groups.pp, self.config),
                pg_collection=groups.collection,
            )
            _, norm, _ = self.optimizer.step()
        total = torch.tensor([sum(r["loss"] for r in results) / len(rows) if results else 0.0])
        dist.broadcast(total, groups.last_stage_rank, group=groups.pp)
        dist.all_reduce(total, group=groups.dp)
        return float(total) / layout.dp, float(norm)


def _forward_step(iterator: Any, model: torch.nn.Module) -> tuple[torch.Tensor, Any]:
    tokens = next(iterator)
    positions = torch.arange(LENGTH)[None].expand_as(tokens)
    mask = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), 1)[None, None]
    output = model(tokens, positions, mask, labels=torch.roll(tokens, -1, 1))

    def loss(per_token: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        mean = per_token.mean()
        # A copy: the schedule divides the loss in place.
        return mean, {"loss": mean.detach().clone()}

    return output, loss
