"""A pool of worker processes for code that may never return, seen from the rank that uses it.

Chosen over ``multiprocessing`` and ``concurrent.futures`` because those import the rank's main program (hence torch)
into each worker, cannot kill one call, and break as a whole when one worker dies.
"""

import contextlib
import json
import os
import pickle
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict

from rlhf_megatron.config.reward import RewardConfig
from rlhf_megatron.errors import RewardError
from rlhf_megatron.rewards import framing
from rlhf_megatron.rewards.function import Outcome, RewardSample, check_custom_file, user_traceback
from rlhf_megatron.rewards.worker_process import PoolSetup

LOAD_TIMEOUT_S = 300.0
"""Limit of loading the reward function in a worker; not configurable, since only a hang takes this long."""
CLOSE_TIMEOUT_S = 10.0

_BOOT = """
import json, sys
boot = json.loads(sys.stdin.readline())
sys.path[:] = boot["path"]
from rlhf_megatron.rewards.dispatcher import main
main(boot["descriptor"], boot["setup"], boot["parent_pid"])
"""

# A reward function that starts a process group (or a library that starts one unasked because these are set) would join
# the trainer's rendezvous as a second process of this rank.
RANK_VARIABLES = frozenset(
    (
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
        *("ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"),
        *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "SLURM_NTASKS", "SLURM_NPROCS"),
    )
)
RANK_PREFIXES = ("TORCHELASTIC_", "TORCH_NCCL_", "TORCH_DIST_", "NCCL_ASYNC_", "OMPI_", "PMI_", "PMIX_", "VLLM_DP_")


def worker_environment() -> dict[str, str]:
    """This process's environment without what makes it a rank; one thread per library, as workers share the node."""
    kept = {k: v for k, v in os.environ.items() if k not in RANK_VARIABLES and not k.startswith(RANK_PREFIXES)}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return threads | kept


class RewardPool:
    """Scores samples in worker processes, with a limit of time for each call.

    Starting returns at once; the workers load the function in the background. Not safe to use from several threads at
    once. Nothing of it survives `close`, nor the death of this process by any signal.

    Args:
        config: Workers, limit and function. `num_workers` must be at least 1.

    Raises:
        ConfigError: The user's file does not exist or is not Python.
    """

    def __init__(self, config: RewardConfig):
        check_custom_file(config.custom_reward_function)
        self._config = config
        function = config.custom_reward_function.model_dump()
        if function["path"] is not None:
            function["path"] = os.path.abspath(os.path.expanduser(function["path"]))
        setup = PoolSetup(function, config.num_workers, config.timeout_s, LOAD_TIMEOUT_S)
        self._sock: socket.socket | None
        self._sock, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _BOOT],
                stdin=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                env=worker_environment(),
                # Ctrl-C reaches the rank, which closes the pool; the workers must not die of it on their own.
                start_new_session=True,
            )
            path = [entry or os.getcwd() for entry in sys.path]
            boot = {"path": path, "descriptor": theirs.fileno(), "setup": asdict(setup), "parent_pid": os.getpid()}
            if self._process.stdin is not None:
                with contextlib.suppress(BrokenPipeError), self._process.stdin as stdin:
                    stdin.write(json.dumps(boot).encode() + b"\n")

    def ready(self) -> None:
        """Waits until all workers have loaded the function.

        Raises:
            RewardError: It cannot be loaded; the message has the traceback.
        """
        self._request(("ready",))
        self._receive()

    def run(
        self,
        samples: Sequence[RewardSample],
        fail_fast: bool = False,
        on_outcome: Callable[[int, Outcome], None] | None = None,
    ) -> list[Outcome]:
        """Scores all samples, in any order; outcomes are returned in the order given.

        Args:
            samples: What to score.
            fail_fast: Whether to stop at the first that is not ``ok``; those not called come back as ``skipped``.
            on_outcome: Called with (index, outcome) as each arrives.

        Raises:
            RewardError: The function cannot be loaded, or the pool is gone.
        """
        outcomes = [Outcome("skipped", detail="not scored, since another call failed")] * len(samples)
        try:
            self._request(("score", fail_fast, [_pickle(sample) for sample in samples]))
            while not (message := self._receive()).get("done"):
                outcome = Outcome(**message["outcome"])
                outcomes[message["index"]] = outcome
                if on_outcome is not None:
                    on_outcome(message["index"], outcome)
        except BaseException:
            self.close()  # Answers that are still under way would be taken for the next request's.
            raise
        return outcomes

    def close(self) -> None:
        """Ends all workers and whatever they started; returns when they are gone. May be called again."""
        if self._sock is None:
            return
        self._sock.close()
        self._sock = None
        try:
            self._process.wait(CLOSE_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _request(self, request: tuple) -> None:
        if self._sock is None:
            raise RewardError("the reward pool is closed; make a new one to score with.")
        try:
            framing.send(self._sock, pickle.dumps(request))
        except (BrokenPipeError, ConnectionResetError) as error:
            raise self._gone() from error

    def _receive(self) -> dict:
        if self._sock is None:
            raise RewardError("the reward pool is closed; make a new one to score with.")
        try:
            message = framing.receive(self._sock)
        except ConnectionResetError:
            message = None
        if message is None:
            raise self._gone()
        answer = json.loads(message)
        if "load_error" in answer:
            raise RewardError(f"the reward function cannot be loaded: {answer['load_error']}")
        return answer

    def _gone(self) -> RewardError:
        self.close()
        return RewardError(
            f"the process that hands out samples to the reward workers ended with code {self._process.returncode}. "
            "Its messages, if any, are above; a negative code is a signal (-9: perhaps for want of memory)."
        )


def _pickle(sample: RewardSample) -> bytes:
    try:
        return pickle.dumps(sample)
    except Exception as error:
        raise RewardError(
            f"ground_truth or extra_info of sample uid={sample.uid!r} (data_source {sample.data_source!r}) cannot be "
            f"sent to a worker process. Use plain data in the dataset's rows.\n{user_traceback(error)}"
        ) from error
