"""Whatever happens to one rank, all ranks end in time, non-zero, and say which rank failed, where and why."""

import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass

import pytest

from tests.distributed.world import ROOT, free_port

PROGRAM = str(ROOT / "tests" / "distributed" / "failing_program.py")
LIMIT_S = 30.0


@dataclass
class Ended:
    status: int
    output: str
    seconds: float
    """From the moment before things go wrong to the end."""


def _environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def _ended(process: subprocess.Popen[str]) -> Ended:
    output, _ = process.communicate(timeout=280)
    end = time.time()
    begins = [float(text) for text in re.findall(r"begins at ([0-9.]+)", output)]
    assert begins, output
    return Ended(process.returncode, output, end - max(begins))


def _run_without_launcher(mode: str, failing_rank: int) -> list[Ended]:
    """Start two ranks as Slurm would: variables set, and nobody watches over them."""
    port = str(free_port())
    processes = []
    for rank in range(2):
        place = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        processes.append(
            subprocess.Popen(
                [sys.executable, PROGRAM, mode, str(failing_rank)],
                env=_environment() | place | {"MASTER_PORT": port},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    try:
        return [_ended(process) for process in processes]
    finally:
        for process in processes:
            process.kill()


@pytest.mark.parametrize("failing_rank", [0, 1])
@pytest.mark.parametrize("mode", ["raise", "sleeping peer"])
def test_exception_ends_all_ranks_and_is_named_on_all(mode: str, failing_rank: int) -> None:
    ranks = _run_without_launcher(mode, failing_rank)
    for rank in ranks:
        assert rank.status == 1
        assert rank.seconds < LIMIT_S
        expected = f"[rank {failing_rank}] failed in phase 'step > update_actor': ValueError: broken on purpose"
        assert expected in rank.output
    assert "Traceback" in ranks[failing_rank].output
    assert "go_wrong" in ranks[failing_rank].output
    assert f"because rank {failing_rank} failed first" in ranks[1 - failing_rank].output


def test_error_on_purpose_has_no_traceback() -> None:
    ranks = _run_without_launcher("raise on purpose", 1)
    assert [rank.status for rank in ranks] == [1, 1]
    assert "RewardError: reward.path: no score. Return a number." in ranks[1].output
    assert "Traceback" not in ranks[1].output


def test_killed_rank_is_named() -> None:
    ranks = _run_without_launcher("killed", 1)
    assert [rank.status for rank in ranks] == [1, -9]
    assert ranks[0].seconds < LIMIT_S
    assert "[rank 1] failed in phase" in ranks[0].output
    assert "died without a message" in ranks[0].output


def test_rank_that_ends_early_is_named() -> None:
    ranks = _run_without_launcher("exit 0 early", 1)
    for rank in ranks:
        assert rank.status == 1
        assert rank.seconds < LIMIT_S
        assert "[rank 1] failed in phase 'end'" in rank.output
        assert "ranks [0] did not" in rank.output


def test_status_of_the_program_is_kept() -> None:
    ranks = _run_without_launcher("exit 7", 0)
    assert [rank.status for rank in ranks] == [7, 1]


def test_good_end_is_0_on_all_ranks() -> None:
    ranks = _run_without_launcher("good", 1)
    assert [rank.status for rank in ranks] == [0, 0]
    assert ranks[0].seconds < LIMIT_S


@pytest.mark.parametrize("failing_rank", [0, 1])
def test_exception_ends_torchrun(failing_rank: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", f"--master-port={free_port()}"]
        + [PROGRAM, "raise", str(failing_rank)],
        env=_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        ended = _ended(process)
    finally:
        process.kill()
    assert ended.status == 1
    assert ended.seconds < LIMIT_S
    expected = f"[rank {failing_rank}] failed in phase 'step > update_actor': ValueError: broken on purpose"
    assert expected in ended.output
    # torchrun read the file that it asked for, and names the same root cause.
    assert re.search(rf"Root Cause[\s\S]*rank\s*: {failing_rank}[\s\S]*broken on purpose", ended.output)
