"""A process without a launcher is a world of one, and half a launcher is an error."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rlhf_megatron.errors import LayoutError
from rlhf_megatron.parallel.runtime import init_runtime

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import os, torch, torch.distributed as dist
from rlhf_megatron.parallel.runtime import init_runtime, shutdown
for _ in range(2):
    runtime = init_runtime("cpu", timeout_s=60)
    one = torch.ones(1)
    dist.all_reduce(one)
    print(runtime.rank, runtime.world_size, runtime.device, runtime.backend, one.item(), os.environ["LOCAL_RANK"])
    shutdown()
    shutdown()
print(dist.is_initialized())
"""
VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def test_single_process_needs_no_launcher() -> None:
    env = {key: value for key, value in os.environ.items() if key not in VARIABLES}
    env |= {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    result = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, timeout=240)
    assert result.stdout.splitlines() == ["0 1 cpu gloo 1.0 0"] * 2 + ["False"], result.stderr


def test_half_a_launcher_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(LayoutError, match="WORLD_SIZE, MASTER_ADDR, MASTER_PORT not set"):
        init_runtime("cpu")


def test_missing_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(LayoutError, match="torch sees no GPU"):
        init_runtime("cuda")
