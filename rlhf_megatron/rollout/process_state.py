"""Keeping what vLLM changes in the whole process from reaching the trainer, which lives in the same process."""

import gc
import os
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

# What vLLM's start writes into the environment that must not reach the trainer or its child processes.
_KEPT_VARIABLES = ("LOCAL_WORLD_SIZE", "LD_PRELOAD", "NUMEXPR_MAX_THREADS")


@contextmanager
def trainer_state_kept(device: torch.device) -> Iterator[None]:
    """Undo what vLLM's start changes in the whole process: random state, threads, environment, precision, gc."""
    variables = {name: os.environ.get(name) for name in _KEPT_VARIABLES}
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    precision = torch.get_float32_matmul_precision()
    try:
        with random_state_kept(device):
            yield
    finally:
        # vLLM's CPU worker replaces this function by one that does nothing.
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
        # vLLM exempts all that lives from garbage collection, the trainer's objects too.
        gc.unfreeze()
        for name, value in variables.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def random_state_kept(device: torch.device) -> Iterator[None]:
    """vLLM draws from the process's generators, as often as it takes steps; the trainer's streams must not move."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    devices = [torch.cuda.current_device()] if device.type == "cuda" else []
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
