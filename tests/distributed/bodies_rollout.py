"""Bodies that run vLLM in the ranks of a world; see test_rollout_engine.py and test_rollout_replicas.py.

A process keeps one engine per model folder and layout: starting one costs seconds.
"""

import gc
import os
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from rlhf_megatron.config.rollout import RolloutConfig
from rlhf_megatron.errors import DataError, RLHFError
from rlhf_megatron.parallel.runtime import init_runtime
from rlhf_megatron.rollout.sampling import Completion, SamplingRequest, sample_seed
from rlhf_megatron.rollout.vllm_engine import VLLMEngine
from rlhf_megatron.rollout.weight_sync import Bucket, GatherSync

MAX_MODEL_LEN = 128
EOS = 2
# Longer than two blocks of vLLM's prefix cache, so that it is used.
LONG_PROMPT = [4 + (7 * i) % 40 for i in range(80)]
PROMPTS = [[5, 6, 7, 8], [9, 10], LONG_PROMPT, [30], LONG_PROMPT[:70] + [11, 12]]

_engines: dict[tuple[str, int], VLLMEngine] = {}


def engine_for(folder: str, tp: int) -> VLLMEngine:
    """This process's engine for a model and layout, built on first use; its weights are whatever was loaded last."""
    if (folder, tp) not in _engines:
        config = RolloutConfig(
            tensor_model_parallel_size=tp, dtype="float32", max_num_seqs=64, max_num_batched_tokens=512
        )
        _engines[folder, tp] = VLLMEngine(config, folder, folder, MAX_MODEL_LEN, init_runtime("cpu"))
    return _engines[folder, tp]


def tensors_of(folder: str, change: float = 0.0) -> dict[str, torch.Tensor]:
    """The folder's tensors, moved by noise of a size."""
    from safetensors.torch import load_file

    tensors = load_file(os.path.join(folder, "model.safetensors"))
    generator = torch.Generator().manual_seed(1)
    return {name: tensor + change * torch.randn(tensor.shape, generator=generator) for name, tensor in tensors.items()}


def buckets_of(tensors: dict[str, torch.Tensor], bucket_bytes: int) -> Iterator[Bucket]:
    """Whole tensors in buckets of about a size, all views of one buffer that is used again for every bucket."""
    names = list(tensors)
    buffer = torch.empty(max(bucket_bytes, max(tensor.nbytes for tensor in tensors.values())) // 4)
    bucket: Bucket = []
    used = 0
    for name in names:
        tensor = tensors[name]
        if used + tensor.numel() > buffer.numel():
            yield bucket
            bucket, used = [], 0
            buffer.fill_(float("nan"))
        view = buffer[used : used + tensor.numel()].view(tensor.shape)
        bucket.append((name, view.copy_(tensor)))
        used += tensor.numel()
    yield bucket
    buffer.fill_(float("nan"))


def sync(engine: VLLMEngine, tensors: dict[str, torch.Tensor], bucket_bytes: int = 20_000) -> dict[str, float]:
    """One whole weight sync."""
    source = lambda size: buckets_of(tensors, size)  # noqa: E731
    return GatherSync(source, engine, bucket_bytes=bucket_bytes, group=engine.world_group).sync()


def expected_log_probs(
    folder: str, tensors: dict[str, torch.Tensor], prompt: list[int], answer: list[int], temperature: float
) -> torch.Tensor:
    """What transformers says about an answer, in fp32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32)
    model.load_state_dict(tensors, strict=False)
    model.tie_weights()
    ids = torch.tensor([prompt + answer])
    with torch.no_grad():
        logits = model(ids).logits[0, len(prompt) - 1 : -1].float() / (temperature or 1.0)
    return logits.log_softmax(-1).gather(-1, torch.tensor(answer)[:, None])[:, 0]


def requests_for(count: int, temperature: float, max_tokens: int = 12, **fields: Any) -> list[SamplingRequest]:
    """Requests with a seed each."""
    return [
        SamplingRequest(max_tokens, temperature=temperature, seed=sample_seed(0, 1, index, 0), **fields)
        for index in range(count)
    ]


def error_of(call: Callable[[], Any]) -> tuple[str, str]:
    """Type and text of the error that a call raises."""
    try:
        call()
    except RLHFError as error:
        return type(error).__name__, str(error)
    return "none", ""


def worst_difference(
    folder: str, tensors: dict[str, torch.Tensor], completions: list[Completion], temperature: float
) -> float:
    """Largest difference between log-probs of completions and transformers'."""
    worst = 0.0
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        expected = expected_log_probs(folder, tensors, prompt, completion.token_ids, temperature)
        worst = max(worst, (expected - torch.tensor(completion.log_probs)).abs().max().item())
    return worst


def log_probs_against_transformers(folder: str, tp: int) -> dict[str, Any]:
    """Two syncs of different weights; after each, every temperature's log-probs against transformers."""
    engine = engine_for(folder, tp)
    differences = {}
    metrics = []
    cached = []
    for change in (0.0, 0.05):
        tensors = tensors_of(folder, change)
        if "lm_head.weight" not in tensors:
            assert engine._llm.model_config.hf_config.tie_word_embeddings
        metrics.append(sync(engine, tensors))
        for temperature in (1.0, 0.7, 0.0):
            completions = engine.generate(PROMPTS, requests_for(len(PROMPTS), temperature))
            differences[change, temperature] = worst_difference(folder, tensors, completions, temperature)
        # The test of forgotten KV is empty unless this cache answers: the last generate of each round must hit.
        from vllm import SamplingParams

        output = engine._llm.generate([{"prompt_token_ids": LONG_PROMPT}], SamplingParams(max_tokens=1), use_tqdm=False)
        cached.append(output[0].num_cached_tokens)
    return {"differences": differences, "metrics": metrics, "cached": cached}


def sync_error(folder: str) -> tuple[str, str]:
    """What a sync of the folder's tensors raises."""
    engine = engine_for(folder, 1)
    return error_of(lambda: sync(engine, tensors_of(folder)))


def seeds(folder: str, tp: int) -> dict[str, Any]:
    """The same requests alone, in two orders and twice, and several samples of one prompt."""
    engine = engine_for(folder, tp)
    sync(engine, tensors_of(folder))
    requests = requests_for(len(PROMPTS), 1.0)
    straight = engine.generate(PROMPTS, requests)
    backwards = engine.generate(PROMPTS[::-1], requests[::-1])[::-1]
    alone = [engine.generate([prompt], [request])[0] for prompt, request in zip(PROMPTS, requests, strict=True)]
    samples = engine.generate(
        [LONG_PROMPT] * 8, [SamplingRequest(12, seed=sample_seed(0, 1, 0, sample)) for sample in range(8)]
    )
    next_step = engine.generate([LONG_PROMPT], [SamplingRequest(12, seed=sample_seed(0, 2, 0, 0))])
    return {
        "straight": [item.token_ids for item in straight],
        "backwards": [item.token_ids for item in backwards],
        "alone": [item.token_ids for item in alone],
        "samples": [item.token_ids for item in samples],
        "next_step": next_step[0].token_ids,
    }


def endings(folder: str) -> dict[str, Any]:
    """Many samples with each way of ending."""
    engine = engine_for(folder, 1)
    sync(engine, tensors_of(folder))
    prompts = [[5, 6, 7]] * 64
    text = engine._llm.get_tokenizer().decode
    stop = engine.generate(prompts, requests_for(64, 1.0, 24, stop=("=", "b7")))
    return {
        "plain": engine.generate(prompts, requests_for(64, 1.0, 24)),
        "ignore_eos": engine.generate(prompts, requests_for(64, 1.0, 24, ignore_eos=True)),
        "top_k": engine.generate(prompts, requests_for(64, 1.0, 24, top_k=1)),
        "greedy": engine.generate(prompts[:1], requests_for(1, 0.0, 24)),
        "stop": [(item, text(item.token_ids)) for item in stop],
        "top_p_sums": _top_p_sums(engine, folder),
    }


def _top_p_sums(engine: VLLMEngine, folder: str) -> float:
    """Log-probs under top_k=3 are those of the three likeliest tokens, renormalised: worst difference."""
    prompt = [5, 6, 7]
    completions = engine.generate([prompt] * 16, requests_for(16, 1.0, 1, top_k=3, ignore_eos=True))
    tensors = tensors_of(folder)
    every = torch.cat([expected_log_probs(folder, tensors, prompt, [token], 1.0) for token in range(99)])
    kept = every.topk(3)
    renormalised = dict(zip(kept.indices.tolist(), kept.values.log_softmax(-1).tolist(), strict=True))
    return max(abs(item.log_probs[0] - renormalised[item.token_ids[0]]) for item in completions)


def refusals(folder: str) -> dict[str, tuple[str, str]]:
    """Every error that an engine raises on purpose, and that it is usable afterwards."""
    engine = engine_for(folder, 1)
    tensors = tensors_of(folder)
    sync(engine, tensors)
    one = [SamplingRequest(4)]
    found = {
        "empty prompt": error_of(lambda: engine.generate([[]], one)),
        "too long": error_of(lambda: engine.generate([[5] * (MAX_MODEL_LEN - 3)], one)),
        "vocabulary": error_of(lambda: engine.generate([[5, 99]], one)),
        "counts": error_of(lambda: engine.generate([[5], [6]], one)),
        "just fits": error_of(lambda: engine.generate([[5] * (MAX_MODEL_LEN - 4)], one)),
        "nothing asked": ("answers", str(engine.generate([], []))),
    }
    version = engine.weight_version
    broken: dict[str, dict[str, torch.Tensor]] = {
        "missing v": {k: v for k, v in tensors.items() if k != "model.layers.2.self_attn.v_proj.weight"},
        "missing head": {k: v for k, v in tensors.items() if k != "lm_head.weight"},
        "missing norm": {k: v for k, v in tensors.items() if k != "model.norm.weight"},
        "unknown": tensors | {"model.layers.0.mlp.extra.weight": torch.zeros(2)},
        "shape": tensors | {"model.layers.1.mlp.up_proj.weight": torch.zeros(3, 64)},
    }
    for name, stream in broken.items():
        found[name] = error_of(lambda stream=stream: sync(engine, stream))
        found[f"{name}: then generate"] = error_of(lambda: engine.generate([[5]], one))

    def twice(size: int) -> Iterator[Bucket]:
        yield from buckets_of(tensors, size)
        yield [("model.norm.weight", tensors["model.norm.weight"])]

    def dies(size: int) -> Iterator[Bucket]:
        for index, bucket in enumerate(buckets_of(tensors, size)):
            if index == 3:
                raise DataError("the source failed")
            yield bucket

    for name, source in {"twice": twice, "dies": dies}.items():
        found[name] = error_of(GatherSync(source, engine, bucket_bytes=20_000).sync)
        found[f"{name}: then generate"] = error_of(lambda: engine.generate([[5]], one))
    found["version"] = ("versions", f"{engine.weight_version - version}")
    sync(engine, tensors)
    completions = engine.generate(PROMPTS, requests_for(len(PROMPTS), 1.0))
    found["healed"] = ("difference", str(worst_difference(folder, tensors, completions, 1.0)))
    return found


def sleeping(folder: str) -> dict[str, Any]:
    """The state machine in the right order and in wrong ones."""
    engine = engine_for(folder, 1)
    tensors = tensors_of(folder)
    sync(engine, tensors)
    one = [SamplingRequest(4, temperature=0.0)]
    before = engine.generate([[5]], one)[0].token_ids
    found: dict[str, Any] = {
        "awake: wake_weights": error_of(engine.wake_weights),
        "awake: wake_kv_cache": error_of(engine.wake_kv_cache),
    }
    engine.sleep()
    found["asleep: generate"] = error_of(lambda: engine.generate([[5]], one))
    found["asleep: sync"] = error_of(lambda: sync(engine, tensors))
    found["asleep: sleep"] = error_of(engine.sleep)
    found["asleep: wake_kv_cache"] = error_of(engine.wake_kv_cache)
    engine.wake_weights()
    found["weights: generate"] = error_of(lambda: engine.generate([[5]], one))
    sync(engine, tensors)
    found["synced: generate"] = error_of(lambda: engine.generate([[5]], one))
    engine.wake_kv_cache()
    found["same answer"] = engine.generate([[5]], one)[0].token_ids == before
    engine.sleep()
    engine.wake_weights()
    engine.wake_kv_cache()
    found["no sync since sleep: generate"] = error_of(lambda: engine.generate([[5]], one))
    return found


def _process_state() -> dict[str, Any]:
    return {
        "torch": torch.get_rng_state().tolist(),
        "python": random.getstate()[1][:5],
        "numpy": np.random.get_state()[1][:5].tolist(),
        "threads": torch.get_num_threads(),
        "set_num_threads": torch.set_num_threads.__module__,
        "precision": torch.get_float32_matmul_precision(),
        "dtype": str(torch.get_default_dtype()),
        "grad": torch.is_grad_enabled(),
        "frozen": gc.get_freeze_count(),
        "environment": {
            name: os.environ.get(name) for name in ("LD_PRELOAD", "LOCAL_WORLD_SIZE", "OMP_NUM_THREADS", "WORLD_SIZE")
        },
    }


def trainer_state_is_kept(folder: str) -> dict[str, Any]:
    """What the process was before and after building, syncing, generating and dropping an engine."""
    runtime = init_runtime("cpu")
    torch.set_float32_matmul_precision("high")
    before = _process_state()
    config = RolloutConfig(tensor_model_parallel_size=1, dtype="float32", max_num_seqs=8)
    engine = VLLMEngine(config, folder, folder, MAX_MODEL_LEN, runtime)
    refused = error_of(partial(engine.generate, [[5]], [SamplingRequest(4)]))
    sync(engine, tensors_of(folder))
    # Each step of vLLM draws from the process's generator, whether or not requests have seeds.
    engine.generate([[5]], [SamplingRequest(4)])
    after = _process_state()
    del engine
    gc.collect()
    value = torch.ones(1)
    dist.all_reduce(value)
    torch.set_float32_matmul_precision("highest")
    return {"before": before, "after": after, "refused": refused, "sum": value.item()}


def live_bytes_of_stream(folder: str, bucket_bytes: int) -> dict[str, Any]:
    """Bytes of all tensors in the process, counted from outside while a sync runs."""
    engine = engine_for(folder, 1)
    tensors = tensors_of(folder)
    sync(engine, tensors)
    gc.collect()
    resident = _live_bytes()
    extra: list[int] = []
    largest_bucket = 0

    def source(_: int) -> Iterator[Bucket]:
        nonlocal largest_bucket
        bucket: Bucket = []
        for index, (name, tensor) in enumerate(tensors.items()):
            if bucket and sum(item.nbytes for _, item in bucket) + tensor.nbytes > bucket_bytes:
                largest_bucket = max(largest_bucket, sum(item.nbytes for _, item in bucket))
                # Looking through all objects takes long: not at every bucket. 5 has no factor in common with the
                # period of the layers, so that buckets before and after each kind of tensor are seen.
                if index % 5 == 0:
                    extra.append(_live_bytes() - resident)
                yield bucket
                bucket = []
                if index % 5 == 0:
                    extra.append(_live_bytes() - resident)
            bucket.append((name, tensor.clone()))
        extra.append(_live_bytes() - resident)
        yield bucket

    metrics = GatherSync(source, engine, bucket_bytes=bucket_bytes).sync()
    gc.collect()
    return {
        "peak": max(extra),
        "reported": metrics["weight_sync/peak_extra_bytes"],
        "left": _live_bytes() - resident,
        "largest_tensor": max(tensor.nbytes for tensor in tensors.values()),
        "bucket": largest_bucket,
        "model": sum(tensor.nbytes for tensor in tensors.values()),
    }


def _live_bytes() -> int:
    storages = {}
    for item in gc.get_objects():
        # Exact types: what the stream is made of, and none of the stand-ins without memory.
        if type(item) in (torch.Tensor, torch.nn.Parameter) and not item.is_meta:
            storage = item.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def different_numbers_of_requests(folder: str, counts: list[int]) -> list[list[int]]:
    """Each replica answers the first prompts of a common list, as many as it is told to; twice."""
    engine = engine_for(folder, 1)
    sync(engine, tensors_of(folder))
    count = counts[engine.replica]
    requests = requests_for(len(PROMPTS), 1.0)
    engine.generate(PROMPTS[:count], requests[:count])
    # More answers than the other replica, and longer ones.
    engine.generate(PROMPTS[:count] * 3, [SamplingRequest(30)] * (3 * count))
    return [item.token_ids for item in engine.generate(PROMPTS[:count], requests[:count])]


def flipped_bit(folder: str, tp: int) -> dict[str, Any]:
    """Rank 1's copy of one tensor differs in one bit in the second of three syncs."""
    engine = engine_for(folder, tp)
    tensors = tensors_of(folder)
    first = sync(engine, tensors)
    damaged = {name: tensor.clone() for name, tensor in tensors.items()}
    if dist.get_rank() == 1:
        damaged["model.layers.1.mlp.up_proj.weight"].view(-1).view(torch.int32)[77] ^= 1 << 3
    caught = error_of(lambda: sync(engine, damaged))
    refused = error_of(lambda: engine.generate([[5]], [SamplingRequest(4)]))
    last = sync(engine, tensors)
    answers = engine.generate([[5]], [SamplingRequest(4, seed=3)])
    return {"first": first, "caught": caught, "refused": refused, "last": last, "answers": answers}


def peers_disagree(folder: str) -> dict[str, tuple[str, str]]:
    """Tensor-parallel peers are given other tokens, another number, other sampling, and at last the same."""
    engine = engine_for(folder, 2)
    sync(engine, tensors_of(folder))
    rank = dist.get_rank()
    one = [SamplingRequest(4, seed=1)]
    return {
        "tokens": error_of(lambda: engine.generate([[5, 6 + rank]], one)),
        "number": error_of(lambda: engine.generate([[5]] * rank, one * rank)),
        "sampling": error_of(lambda: engine.generate([[5]], [SamplingRequest(4, seed=rank)])),
        "same": error_of(lambda: engine.generate([[5]], one)),
    }
