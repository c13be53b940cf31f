"""A worker process: loads the reward function once, then scores one sample after the other.

Forked by the dispatcher. What it runs is the user's code, so nothing here relies on it to return, to heed signals or to
leave the process alive; the dispatcher looks after that.
"""

import faulthandler
import gc
import json
import os
import pickle
import random
import socket
import sys
import time
from dataclasses import asdict, dataclass

from rlhf_megatron.config.reward import CustomRewardConfig
from rlhf_megatron.errors import ConfigError, RewardError
from rlhf_megatron.rewards import builtin, framing
from rlhf_megatron.rewards.function import Outcome, ScoreFunction, call, load_reward_function, user_traceback
from rlhf_megatron.rewards.processes import die_with, ignore_termination


@dataclass(frozen=True)
class PoolSetup:
    """What a pool is told when it starts; travels as JSON.

    Attributes:
        function: The fields of a `CustomRewardConfig`.
        num_workers: Worker processes.
        timeout_s: Limit of one call, in seconds.
        load_timeout_s: Limit of loading the function, in seconds.
    """

    function: dict
    num_workers: int
    timeout_s: float
    load_timeout_s: float


def resolve(config: CustomRewardConfig) -> ScoreFunction:
    """The user's function, or the built-in verifiers when there is none."""
    return builtin.compute_score if config.path is None else load_reward_function(config)


def serve(sock: socket.socket, setup: PoolSetup, dispatcher_pid: int) -> None:
    """Runs until the dispatcher closes the socket. Sends one ready (or failed) message, then one outcome per sample."""
    _detach(dispatcher_pid)
    try:
        function = resolve(CustomRewardConfig.model_validate(setup.function))
    except (ConfigError, RewardError) as error:
        framing.send(sock, json.dumps({"load_error": str(error)}).encode())
        return
    gc.collect()
    framing.send(sock, json.dumps({"ready": True}).encode())
    while (message := framing.receive(sock)) is not None:
        framing.send(sock, json.dumps(asdict(_score(function, message))).encode())


def _score(function: ScoreFunction, message: bytes) -> Outcome:
    start = time.perf_counter()
    try:
        sample = pickle.loads(message)
    except Exception as error:
        return Outcome("error", detail=f"the row cannot be unpickled in the worker\n{user_traceback(error)}")
    try:
        outcome = call(function, sample)
    except KeyboardInterrupt as error:
        outcome = Outcome("error", detail=f"the reward function raised KeyboardInterrupt\n{user_traceback(error)}")
    for stream in (sys.stdout, sys.stderr):
        # What the user printed must not be lost if the next call is killed; a stream that the user closed is theirs.
        if not stream.closed:
            stream.flush()
    return Outcome(outcome.status, outcome.score, outcome.extra, outcome.detail, time.perf_counter() - start)


def _detach(dispatcher_pid: int) -> None:
    """Own process group (so that what the user starts can be killed along), and no life without the dispatcher."""
    os.setpgid(0, 0)
    die_with(dispatcher_pid)
    ignore_termination()
    faulthandler.enable()
    random.seed()
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
