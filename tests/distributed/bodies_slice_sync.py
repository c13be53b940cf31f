"""Bodies that bring a trained model's slices into vLLM; see test_slice_sync.py."""

import hashlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from rlhf_megatron.config.rollout import RolloutConfig
from rlhf_megatron.errors import GateError, WeightError
from rlhf_megatron.models.hf_config import ModelShape
from rlhf_megatron.parallel.layout import Layout
from rlhf_megatron.parallel.runtime import init_runtime
from rlhf_megatron.rollout.sampling import SamplingRequest
from rlhf_megatron.rollout.slice_sync import SliceSync
from rlhf_megatron.rollout.vllm_engine import VLLMEngine
from rlhf_megatron.rollout.weight_sync import GatherSync
from rlhf_megatron.weights.generation_groups import Replicas, generation_ranks
from rlhf_megatron.weights.plan import plan_sync
from rlhf_megatron.weights.spread import Spreader
from tests.distributed.bodies_actor_rollout import PROMPTS, TEMPERATURE, _largest_difference
from tests.distributed.bodies_memory import OFFLOAD, Trained

MAX_MODEL_LEN = 64

_engines: dict[tuple[str, Replicas, str], VLLMEngine] = {}


def engine_of(folder: str, replicas: Replicas, dtype: str) -> VLLMEngine:
    """This process's engine, built on first use. vLLM has one set of groups in a process, so one for `replicas`."""
    key = folder, replicas, dtype
    if key not in _engines:
        config = RolloutConfig(
            tensor_model_parallel_size=replicas.tp, dtype=dtype, max_num_seqs=8, max_num_batched_tokens=64
        )
        _engines[key] = VLLMEngine(config, folder, folder, MAX_MODEL_LEN, init_runtime("cpu"), replicas=replicas)
    return _engines[key]


class Pair:
    """A trained model and an engine, with both transports between them."""

    def __init__(
        self, folder: str, options: dict[str, Any], rollout_tp: int, dtype: str = "float32", bucket_bytes: int = 20_000
    ):
        runtime = init_runtime("cpu")
        self.trained = Trained(folder, options)
        actor = self.trained.engine.groups.layout
        self.engine = engine_of(folder, generation_ranks(actor, rollout_tp, runtime.ranks), dtype)
        shape = ModelShape.from_folder(folder)
        plan = plan_sync(shape, actor, self.engine.replicas, getattr(torch, dtype), ranks_per_node=2)
        self.slices = SliceSync(
            plan,
            getattr(torch, dtype),
            self.engine,
            self.trained.engine.readable,
            bucket_bytes=bucket_bytes,
            checksum_freq=1,
            device=runtime.device,
            replica_group=self.engine.peers,
        )
        spreader = Spreader(actor, Layout(ranks=runtime.ranks), runtime.device)
        self.gather = GatherSync(
            lambda size: spreader.spread(self.trained.engine.hf_weights(size, getattr(torch, dtype))),
            self.engine,
            bucket_bytes=bucket_bytes,
            group=self.engine.world_group,
        )

    def held(self) -> str:
        """Hash of everything that vLLM computes with, weights that it has packed among it."""
        digest = hashlib.blake2b()
        model = self.engine._receiver().model
        for name, module in model.named_modules():
            tensors = dict(module.named_parameters(recurse=False)) | dict(module.named_buffers(recurse=False))
            for key, tensor in tensors.items():
                digest.update(f"{name}.{key}{list(tensor.shape)}".encode())
                digest.update(tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
            if (packed := getattr(module, "cpu_linear", None)) is not None:
                digest.update(_unpacked(module, packed).view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()

    def difference(self, max_tokens: int = 12) -> float:
        """|Megatron - vLLM| log-prob of tokens that vLLM samples, the largest over all ranks."""
        requests = [
            SamplingRequest(max_tokens=max_tokens, temperature=TEMPERATURE, seed=seed) for seed in range(len(PROMPTS))
        ]
        samples = [(item.token_ids, item.log_probs) for item in self.engine.generate(PROMPTS, requests)]
        return _largest_difference(self.trained.engine, samples)


def _unpacked(module: torch.nn.Module, packed: Callable) -> torch.Tensor:
    """The weight in a packed linear layer: what it makes of unit vectors; exact, since all other products are zero."""
    width = int(getattr(module, "input_size_per_partition", 0) or getattr(module, "embedding_dim", 0))
    dtype = next(p.dtype for p in module.parameters()) if list(module.parameters()) else torch.float32
    return packed(torch.eye(width, dtype=dtype), getattr(module, "weight", None), None).contiguous().view(-1)


def both_transports(
    folder: str, layouts: list[dict[str, Any]], rollout_tp: int, dtype: str = "float32"
) -> list[dict[str, Any]]:
    """For each layout of the trainer: slices and full tensors bring the same into vLLM, before and after a step.

    Each transport goes first once, so that it cannot live on what the other left.
    """
    results = []
    for options in layouts:
        pair = Pair(folder, options, rollout_tp, dtype)
        held = []
        for sync in (pair.slices.sync, pair.gather.sync):
            metrics = sync()
            held.append(pair.held())
        pair.trained.step()
        for sync in (pair.gather.sync, pair.slices.sync):
            metrics = sync()
            held.append(pair.held())
        # Four ranks of one vLLM wait for each other actively, which takes long on two cores.
        difference = pair.difference(12 if rollout_tp < 4 else 1) if dtype == "float32" else None
        results.append({"held": held, "difference": difference, "metrics": metrics})
    return results


def rounds(folder: str, options: dict[str, Any], rollout_tp: int) -> list[float]:
    """Three times: train (everything offloaded between calls), sleep, wake, sync by slices, compare log-probs."""
    pair = Pair(folder, options | OFFLOAD, rollout_tp)
    differences = []
    for _ in range(3):
        pair.engine.sleep()
        pair.trained.step()
        pair.engine.wake_weights()
        pair.slices.sync()
        pair.engine.wake_kv_cache()
        differences.append(pair.difference())
    return differences


def flipped_bit(folder: str, options: dict[str, Any], rollout_tp: int, rank: int, where: str) -> dict[str, str]:
    """One bit of one weight on one rank: in its parameter, or on its way after the checksums were taken."""
    pair = Pair(folder, options, rollout_tp)
    pair.slices.sync()
    chunk = pair.trained.engine.chunks[0]
    _, parameter = next(item for item in chunk.named_parameters() if item[0].endswith("linear_fc1.weight"))

    def flip() -> None:
        if dist.get_rank() == rank:
            parameter.data.view(-1).view(torch.int32)[5] ^= 1 << 3

    if where == "parameter":
        flip()
    else:
        run = pair.slices._transfer.run
        pair.slices._transfer.run = lambda read, target: (flip(), run(read, target))[1]  # type: ignore[method-assign]
    found = {}
    try:
        pair.slices.sync()
    except GateError as error:
        found["sync"] = str(error)
    try:
        pair.engine.generate([[5, 6]], [SamplingRequest(max_tokens=1, temperature=0.0)])
    except WeightError as error:
        found["generate"] = str(error)
    # Once more the same bit: as it was.
    flip()
    if where != "parameter":
        del pair.slices._transfer.run
        flip()
    pair.slices.sync()
    found["after"] = str(len(pair.engine.generate([[5, 6]], [SamplingRequest(max_tokens=1, temperature=0.0)])))
    return found


def failing_target(folder: str, options: dict[str, Any], rollout_tp: int) -> dict[str, Any]:
    """The receiver of every rank fails in the middle; then a whole sync heals."""
    pair = Pair(folder, options, rollout_tp)
    pair.slices.sync()
    good = pair.held()
    receiver = pair.engine._receiver()
    receive, calls = receiver.receive_weights, []

    def fail(update_info: Any) -> None:
        calls.append(update_info)
        if len(calls) == 3:
            raise WeightError("the third bucket fails on purpose")
        receive(update_info)

    receiver.receive_weights = fail
    found: dict[str, Any] = {}
    try:
        pair.slices.sync()
    except WeightError as error:
        found["sync"] = str(error)
    del receiver.receive_weights
    try:
        pair.engine.generate([[5, 6]], [SamplingRequest(max_tokens=1, temperature=0.0)])
    except WeightError as error:
        found["generate"] = str(error)
    # What was on its way when it failed has arrived long since, before the next sync begins.
    dist.barrier()
    pair.slices.sync()
    return found | {"healed": pair.held() == good}
