"""vLLM in the trainer's process: generation, weight loading, sleep and wake-up.

vLLM starts with an external launcher on the ranks that ``torch.distributed`` already spans. Which of them form a
replica is given (:mod:`rlhf_megatron.weights.generation_groups`). vLLM is imported when the first engine is
built, after its environment variables are set; importing this file is cheap.

Left out: pipeline parallelism inside vLLM (external launcher scatters no work over it worth having here), and several
engines in one process (vLLM's configuration is per process).
"""

import json
import logging
import os
import uuid
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from rlhf_megatron.config.rollout import RolloutConfig
from rlhf_megatron.errors import DataError, GateError, LayoutError, RLHFError, WeightError
from rlhf_megatron.parallel.groups import group_for_ranks
from rlhf_megatron.rollout.process_state import random_state_kept, trainer_state_kept
from rlhf_megatron.rollout.sampling import Completion, SamplingRequest, requests_digest
from rlhf_megatron.rollout.weight_sync import Bucket, WeightStream
from rlhf_megatron.weights.checksum import TensorChecksum
from rlhf_megatron.weights.generation_groups import Replicas
from rlhf_megatron.weights.transfer import TransferAccount, WeightTarget

if TYPE_CHECKING:
    from rlhf_megatron.parallel.runtime import Runtime

# vLLM's default on CPU is 128: prompts shorter than a block share nothing, and every sample takes a whole block.
_CPU_BLOCK_SIZE = 32

_WORKERS = "rlhf_megatron.rollout.vllm_worker"

State = Literal["awake", "weights", "asleep"]


class VLLMEngine:
    """One rank of a vLLM replica inside the trainer's process.

    Weights start as noise (``load_format="dummy"``): :meth:`generate` is refused until a whole :meth:`load_weights`.

    Args:
        config: The rollout's configuration.
        model_path: HuggingFace folder; only its configuration files are read.
        tokenizer_path: Folder of the tokenizer (end-of-sequence ids, stop strings).
        max_model_len: Longest prompt plus answer in tokens.
        runtime: Rank and device. ``torch.distributed`` must be initialised over the whole world.
        trust_remote_code: Whether Python code of the folders may run.
        seed: Seed of vLLM's own generators; requests carry their own seeds.
        replicas: Which ranks form a replica, over the whole world; runs of neighbours when None.

    Raises:
        LayoutError: The world is no multiple of the tensor-parallel size, the replicas have another size or leave ranks
            out, or ``torch.distributed`` is not initialised.

    Note:
        Collective over the world: every rank must build its engine at the same point.
    """

    def __init__(
        self,
        config: RolloutConfig,
        model_path: str,
        tokenizer_path: str,
        max_model_len: int,
        runtime: "Runtime",
        trust_remote_code: bool = False,
        seed: int = 0,
        replicas: Replicas | None = None,
    ):
        if not dist.is_initialized():
            raise LayoutError("The rollout engine needs torch.distributed: call init_runtime before building it.")
        world = range(dist.get_world_size())
        self.replicas = replicas or Replicas.of_neighbours(world, config.tensor_model_parallel_size)
        if self.replicas.ranks != tuple(world) or self.replicas.tp != config.tensor_model_parallel_size:
            raise LayoutError(
                f"rollout replicas are {self.replicas.groups}, but must be of rollout.tensor_model_parallel_size = "
                f"{config.tensor_model_parallel_size} ranks and hold each of the {len(world)} ranks once."
            )
        self.replica = self.replicas.shard_of(runtime.rank)
        self.max_model_len = max_model_len
        self.weight_version = 0
        self._config = config
        self._device = torch.device(runtime.device)
        self._state: State = "awake"
        self._unusable: str | None = "no weights were loaded yet"
        self._checksums: dict[str, TensorChecksum] = {}
        self.peers = self._peer_group()
        with trainer_state_kept(self._device), warnings.catch_warnings():
            # vLLM looks at every attribute of torch.distributed, deprecated ones too.
            warnings.simplefilter("ignore", FutureWarning)
            self._llm = _build_llm(
                config, model_path, tokenizer_path, max_model_len, runtime, trust_remote_code, seed, self.replicas
            )
        self._vocab_size = int(self._llm.model_config.get_vocab_size())

    def generate(self, prompts: Sequence[Sequence[int]], requests: Sequence[SamplingRequest]) -> list[Completion]:
        """Generate one answer per prompt.

        All ranks of a replica must call with identical arguments; other replicas may have more, fewer or no prompts.

        Args:
            prompts: Token ids without padding.
            requests: One per prompt.

        Returns:
            The answers, in the order of the prompts.

        Raises:
            DataError: A prompt is empty, has ids outside of the vocabulary, or leaves no room for an answer.
            GateError: Ranks of the replica were given different prompts or requests (raised on all of them).
            WeightError: There are no valid weights, or the engine is not awake.
        """
        self._require_ready()
        self._check_peers(prompts, requests)
        self._check_prompts(prompts, requests)
        if not prompts:
            return []
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        parameters = [
            SamplingParams(
                temperature=request.temperature,
                top_p=request.top_p,
                top_k=request.top_k,
                max_tokens=request.max_tokens,
                # A greedy request needs no generator.
                seed=request.seed if request.temperature > 0 else None,
                stop=list(request.stop),
                ignore_eos=request.ignore_eos,
                logprobs=0,
                flat_logprobs=True,
                detokenize=bool(request.stop),
                output_kind=RequestOutputKind.FINAL_ONLY,
                skip_clone=True,
            )
            for request in requests
        ]
        inputs = [{"prompt_token_ids": list(prompt)} for prompt in prompts]
        with random_state_kept(self._device):
            outputs = self._llm.generate(inputs, parameters, use_tqdm=False)
        return [_completion(output) for output in outputs]

    def load_weights(self, buckets: Iterable[Bucket]) -> WeightStream:
        """Load a whole model from buckets of full tensors named as in the HuggingFace checkpoint.

        Between the first bucket and the end of a failed load the engine refuses to generate; a new, whole load heals
        it. Success raises :attr:`weight_version` and empties the prefix cache.

        Args:
            buckets: Consumed once. A bucket's tensors may be reused by the source when it is asked for the next one.

        Returns:
            Account of the stream: bytes, peak, checksums.

        Raises:
            WeightError: A tensor is missing, comes twice or does not fit, or the engine's weights are asleep.
        """
        self._begin_update()
        stream = WeightStream(buckets)
        iterator = iter(stream)
        while True:
            try:
                bucket = next(iterator, None)
            except BaseException:
                # The receiver's own failures close vLLM's update session, the source's must be made to.
                self._abandon_update()
                raise
            if bucket is None:
                break
            self._update(weights=bucket)
            stream.note_deferred(self._receiver().deferred_bytes)
            del bucket
        self._end_update()
        self._checksums = stream.checksums
        return stream

    def load_slices(
        self,
        move: Callable[[WeightTarget], TransferAccount],
        observe: Callable[[str, torch.Tensor], None] | None = None,
    ) -> TransferAccount:
        """Load a whole model by slices of vLLM's own parameters; refusals as in :meth:`load_weights`.

        Args:
            move: Given the target, writes all of its parameters.
            observe: Called with each parameter's name and content once it is full, before vLLM changes its form.

        Returns:
            What `move` returned.

        Raises:
            WeightError: A parameter was not written, or twice, or vLLM has no such; or the weights are asleep.
        """
        self._begin_update()
        target = _SliceTarget(self._receiver().open_slices(observe), self._update)
        try:
            account = move(target)
        except BaseException:
            self._abandon_update()
            raise
        self._end_update()
        return account

    def _begin_update(self) -> None:
        if self._state == "asleep":
            raise WeightError("Weights cannot be loaded into a sleeping engine; call wake_weights() first.")
        self.invalidate("the last weight sync did not finish")
        self._llm.start_weight_update()

    def _abandon_update(self) -> None:
        # A failure of the receiver's own has closed the session already.
        if self._worker()._weight_update_active:
            self._update(abandon=True)
            self._llm.finish_weight_update()

    def _end_update(self) -> None:
        self._update(complete=True)
        self._llm.finish_weight_update()
        self.reset_prefix_cache()
        self.weight_version += 1
        self._unusable = None

    def invalidate(self, reason: str) -> None:
        """Refuse to generate until the next whole :meth:`load_weights`.

        Args:
            reason: Why, for the message of the refusal.
        """
        self._unusable = reason

    def checksums(self) -> dict[str, TensorChecksum]:
        """Checksum of each tensor received in the last whole load, by HuggingFace name."""
        return dict(self._checksums)

    def reset_prefix_cache(self) -> None:
        """Forget all KV of earlier prompts.

        Raises:
            WeightError: vLLM still holds blocks, so old KV would continue new weights.
        """
        if not self._llm.reset_prefix_cache():
            raise WeightError("vLLM could not empty its prefix cache: requests are still running.")

    @property
    def world_group(self) -> dist.ProcessGroup | None:
        """The group over all replicas, for what must agree between them."""
        return dist.group.WORLD

    @property
    def state(self) -> State:
        """``awake`` (can generate), ``weights`` (weights in memory, no KV cache) or ``asleep``."""
        return self._state

    def sleep(self) -> None:
        """Give up weights and KV cache: ``awake`` -> ``asleep``. The next :meth:`generate` needs a new sync.

        On GPU this is vLLM's level 2; on CPU, or with ``free_cache_engine=false``, only the state changes.
        """
        self._move("sleep", "awake", "asleep")
        self.invalidate("the engine has slept since the last weight sync")
        if self._frees_memory:
            self._llm.sleep(level=2)

    def wake_weights(self) -> None:
        """Take memory for weights: ``asleep`` -> ``weights``. Now weights can be loaded."""
        self._move("wake_weights", "asleep", "weights")
        if self._frees_memory:
            self._llm.wake_up(tags=["weights"])

    def wake_kv_cache(self) -> None:
        """Take memory for the KV cache: ``weights`` -> ``awake``."""
        self._move("wake_kv_cache", "weights", "awake")
        if self._frees_memory:
            self._llm.wake_up(tags=["kv_cache"])

    @property
    def _frees_memory(self) -> bool:
        return self._device.type == "cuda" and self._config.free_cache_engine

    def _move(self, call: str, source: State, destination: State) -> None:
        if self._state != source:
            raise RLHFError(
                f"VLLMEngine.{call}() needs the state {source!r}, but the engine is {self._state!r}; the order is "
                "sleep, wake_weights, load_weights, wake_kv_cache, generate."
            )
        self._state = destination

    def _update(self, **fields: Any) -> None:
        self._llm.update_weights({"update_info": fields})

    def _receiver(self) -> Any:
        return self._worker().weight_transfer_engine

    def _worker(self) -> Any:
        return self._llm.llm_engine.model_executor.driver_worker.worker

    def _peer_group(self) -> dist.ProcessGroup | None:
        """This rank's replica as a group; None when it is alone. Creation is collective over the world."""
        groups = [group_for_ranks(tuple(sorted(ranks))) for ranks in self.replicas.groups if len(ranks) > 1]
        return next((group for group in groups if group is not None), None)

    def _require_ready(self) -> None:
        if self._unusable is not None:
            raise WeightError(f"Generation is refused: {self._unusable}. Run a whole weight sync first.")
        if self._state != "awake":
            raise WeightError(f"Generation is refused: the engine is {self._state!r}. Call wake_kv_cache() first.")

    def _check_peers(self, prompts: Sequence[Sequence[int]], requests: Sequence[SamplingRequest]) -> None:
        if self.peers is None:
            return
        digests: list[Any] = [None] * self.replicas.tp
        dist.all_gather_object(digests, (len(prompts), requests_digest(prompts, requests)), group=self.peers)
        if len(set(digests)) > 1:
            ranks = dist.get_process_group_ranks(self.peers)
            listing = ", ".join(
                f"rank {rank}: {count} prompts, hash {digest[:8]}"
                for rank, (count, digest) in zip(ranks, digests, strict=True)
            )
            raise GateError(
                f"Ranks of one vLLM replica were given different requests ({listing}). Tensor-parallel peers must get "
                "identical prompts and sampling requests in identical order."
            )

    def _check_prompts(self, prompts: Sequence[Sequence[int]], requests: Sequence[SamplingRequest]) -> None:
        if len(prompts) != len(requests):
            raise DataError(f"generate() got {len(prompts)} prompts and {len(requests)} requests; give one per prompt.")
        for index, (prompt, request) in enumerate(zip(prompts, requests, strict=True)):
            if not prompt:
                raise DataError(f"Prompt {index} of the batch is empty; vLLM needs at least one token.")
            if len(prompt) + request.max_tokens > self.max_model_len:
                raise DataError(
                    f"Prompt {index} of the batch has {len(prompt)} tokens and asks for up to {request.max_tokens} "
                    f"more, but rollout.max_model_len is {self.max_model_len}. Shorten the prompt "
                    "(data.max_prompt_length, data.truncation) or raise the limit."
                )
            if min(prompt) < 0 or max(prompt) >= self._vocab_size:
                raise DataError(
                    f"Prompt {index} of the batch has token ids outside of the model's vocabulary [0, "
                    f"{self._vocab_size}); is the tokenizer the model's?"
                )


class _SliceTarget:
    """Slices go into vLLM's parameters directly; that they have arrived goes through its extension point."""

    def __init__(self, loader: Any, update: Callable[..., None]):
        self._loader = loader
        self._update = update

    @property
    def held_bytes(self) -> int:
        return self._loader.held_bytes

    def open(self, name: str) -> torch.Tensor:
        return self._loader.open(name)

    def wrote(self, elements: Mapping[str, int]) -> None:
        self._update(written=dict(elements))


def _completion(output: Any) -> Completion:
    answer = output.outputs[0]
    if answer.finish_reason not in ("stop", "length"):
        raise RLHFError(f"vLLM ended request {output.request_id} with {answer.finish_reason!r}.")
    token_ids = list(answer.token_ids)
    log_probs = list(answer.logprobs.logprobs)
    if len(log_probs) != len(token_ids):
        raise RLHFError(f"vLLM returned {len(log_probs)} log-probs for {len(token_ids)} tokens.")
    return Completion(token_ids, log_probs, answer.finish_reason)


def _build_llm(
    config: RolloutConfig,
    model_path: str,
    tokenizer_path: str,
    max_model_len: int,
    runtime: "Runtime",
    trust_remote_code: bool,
    seed: int,
    replicas: Replicas,
) -> Any:
    on_cpu = torch.device(runtime.device).type == "cpu"
    _set_environment(config, runtime, on_cpu)
    from vllm.platforms import current_platform

    if on_cpu:
        # Inductor would need a C++ compiler on the user's machine, and seconds of it, for one comparison per token.
        current_platform.simple_compile_backend = "eager"
    from vllm import LLM
    from vllm.config import WeightTransferConfig
    from vllm.distributed.parallel_state import get_tp_group

    from rlhf_megatron.rollout import vllm_receiver, vllm_worker

    _import_model_class(model_path)
    arguments = _cpu_arguments(config) if on_cpu else _gpu_arguments(config)
    llm = LLM(
        model=model_path,
        tokenizer=tokenizer_path,
        trust_remote_code=trust_remote_code,
        tensor_parallel_size=config.tensor_model_parallel_size,
        distributed_executor_backend="external_launcher",
        load_format="dummy",
        weight_transfer_config=WeightTransferConfig(backend=vllm_receiver.BACKEND),
        dtype=config.dtype,
        seed=seed,
        max_model_len=max_model_len,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=max(config.max_num_batched_tokens, config.max_num_seqs),
        enforce_eager=config.enforce_eager,
        enable_prefix_caching=config.enable_prefix_caching,
        # Of the distribution that was sampled from: the trainer's ratio must start at 1 at any temperature.
        logprobs_mode="processed_logprobs",
        # The scheduler of each tensor-parallel rank must take the same decisions at the same step.
        async_scheduling=False,
        disable_log_stats=True,
        additional_config={
            vllm_worker.REPLICAS: [list(ranks) for ranks in replicas.groups],
            vllm_worker.JOB_IDENTITY: _job_identity(),
        },
        **arguments,
    )
    # vLLM's finalizer destroys every process group of this process, the trainer's too, when the engine is collected.
    llm.llm_engine.engine_core._finalizer.detach()  # type: ignore[attr-defined]
    # Each rank has its own scheduler and needs no broadcast; this queue's shared memory would outlive the process.
    get_tp_group().mq_broadcaster = None
    return llm


def _import_model_class(model_path: str) -> None:
    """Spare vLLM the Python process that it starts on each rank, until its cache is filled, to look at a model class.

    That process imports all of vLLM again (20 CPU seconds) to keep CUDA out of this one, where it is in use anyway.
    """
    from vllm import ModelRegistry

    with open(os.path.join(model_path, "config.json"), encoding="utf-8") as file:
        architectures = json.load(file).get("architectures") or []
    for architecture in architectures:
        if architecture in ModelRegistry.models:
            ModelRegistry.register_model(architecture, ModelRegistry.models[architecture].load_model_cls())


def _cpu_arguments(config: RolloutConfig) -> dict[str, Any]:
    return {
        "kv_cache_memory_bytes": config.cpu_kvcache_space_gib << 30,
        "block_size": _CPU_BLOCK_SIZE,
        "worker_cls": f"{_WORKERS}.CPUReplicaWorker",
    }


def _gpu_arguments(config: RolloutConfig) -> dict[str, Any]:
    return {
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "enable_sleep_mode": config.free_cache_engine,
        "worker_cls": f"{_WORKERS}.GPUReplicaWorker",
    }


def _job_identity() -> str:
    """A name that the ranks of this job share and no other job has."""
    identity: list[str | None] = [uuid.uuid4().hex]
    dist.broadcast_object_list(identity, src=0)
    return str(identity[0])


def _set_environment(config: RolloutConfig, runtime: "Runtime", on_cpu: bool) -> None:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    os.environ["VLLM_DO_NOT_TRACK"] = "1"
    # Its logger is set up only after its first messages.
    logging.getLogger("vllm").setLevel(os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR"))
    # vLLM reads them with its external launcher; a launcher other than torchrun may not have set them.
    os.environ.setdefault("RANK", str(runtime.rank))
    os.environ.setdefault("LOCAL_RANK", str(runtime.local_rank))
    if on_cpu:
        os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(config.cpu_kvcache_space_gib)
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
