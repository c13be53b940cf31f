"""Runs whole jobs in tests and reads what they leave."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass
class Job:
    """What a job left.

    Attributes:
        codes: Exit status of each rank; negative for a signal.
        seconds: Until the last rank ended.
        seconds_after_first_end: From the end of the first rank to that of the last.
        folder: Folder of the run.
        log: What all ranks printed.
        killed: Whether ranks were killed from outside.
    """

    codes: list[int]
    seconds: float
    seconds_after_first_end: float
    folder: Path
    log: str
    killed: bool = False

    def metrics(self) -> list[dict[str, Any]]:
        """Rows of metrics.jsonl of training steps."""
        lines = (self.folder / "metrics.jsonl").read_text().splitlines()
        return [row for row in map(json.loads, lines) if "training/global_step" in row or "train/loss" in row]

    def assert_ok(self) -> "Job":
        """Fails with the log unless every rank ended with 0."""
        if any(self.codes):
            raise AssertionError(f"exit codes {self.codes}\n{self.log[-6000:]}")
        return self


class Zygote:
    """The process that jobs are forked from; see zygote.py."""

    def __init__(self, folder: Path):
        self._folder = folder
        self._jobs = 0
        self._process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-m", "tests.e2e.zygote"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | ENVIRONMENT,
            cwd=Path(__file__).parents[2],
        )
        self._answer()

    def run(
        self,
        module: str,
        arguments: list[str],
        *,
        ranks: int = 2,
        timeout: float = 240.0,
        fault: dict[str, Any] | None = None,
        kill: dict[str, Any] | None = None,
        run: Path | None = None,
    ) -> Job:
        """Runs a job to its end.

        Args:
            module: Entry, for example `rlhf_megatron.train_ppo`.
            arguments: Its command line; the folder of the run is added.
            ranks: Number of ranks.
            timeout: After how many seconds all ranks are killed, which fails the test.
            fault: `rank`, `phase` and `kind` (raise, exit, kill, SIGTERM, ...) of a failure, and at the `nth` time that
                the phase is entered.
            kill: When which ranks are killed from outside; see `zygote.Sniper`.
            run: Folder of the run, of an earlier job perhaps; a new one by default.
        """
        self._jobs += 1
        folder = self._folder / f"job{self._jobs}"
        folder.mkdir()
        run = run or folder / "run"
        command = {
            "module": module,
            "arguments": [*arguments, f"trainer.default_local_dir={run}", f"trainer.n_gpus_per_node={ranks}"],
            "ranks": ranks,
            "folder": str(folder),
            "run": str(run),
            "timeout": timeout,
            "fault": fault,
            "kill": kill,
        }
        stdin = self._process.stdin
        if stdin is None:
            raise RuntimeError("the zygote has no standard input")
        stdin.write(json.dumps(command) + "\n")
        stdin.flush()
        answer = json.loads(self._answer())
        log = "".join(f"--- rank {rank}\n" + (folder / f"rank{rank}.log").read_text() for rank in range(ranks))
        if answer["timed_out"]:
            raise AssertionError(f"the job ran into the time limit of {timeout} s\n{log[-6000:]}")
        seconds = answer["seconds"], answer["seconds_after_first_end"]
        return Job(answer["codes"], *seconds, run, log, answer["killed"])

    def close(self) -> None:
        """Ends the process."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        self._process.wait(timeout=30)

    def _answer(self) -> str:
        if self._process.stdout is None:
            raise RuntimeError("the zygote has no standard output")
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the zygote ended with status {self._process.wait()}")
        return line
