"""A reward file with every way to misbehave, chosen by the answer."""

from pathlib import Path

import pytest

REWARD_FILE = """
import ctypes, os, re, signal, subprocess, sys, time

def compute_score(data_source, solution_str, ground_truth, extra_info, scale=1.0):
    verb, _, argument = solution_str.partition(" ")
    if verb == "sleep":
        time.sleep(1e6)
    if verb == "spin":  # One call into C that neither returns nor lets signal handlers or threads run.
        re.match(r"(a+)+$", "a" * 64 + "b")
    if verb == "deaf":
        for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
            signal.signal(number, signal.SIG_IGN)
        while True:
            time.sleep(1)
    if verb == "wait":
        time.sleep(float(argument))
    if verb == "raise":
        raise KeyError("boom")
    if verb == "string":
        return "correct"
    if verb == "none":
        return None
    if verb == "nan":
        return float("nan")
    if verb == "inf":
        return {"score": float("inf")}
    if verb == "dict":
        return {"score": True, "length": len(solution_str), "nested": {"a": (1, 2)}}
    if verb == "no_score":
        return {"reward": 1.0}
    if verb == "exit":
        os._exit(3)
    if verb == "sys_exit":
        sys.exit("enough")
    if verb == "segfault":
        ctypes.string_at(0)
    if verb == "print":
        for _ in range(20000):
            print("x" * 100)
        print("y" * 1000, file=sys.stderr)
    if verb == "close_files":
        os.closerange(3, 256)
        time.sleep(1e6)
    if verb == "start":  # Two children, one of which leaves the process group.
        first = subprocess.Popen(["sleep", "12345"])
        second = subprocess.Popen(["sleep", "12345"], start_new_session=True)
        with open(argument, "w") as file:
            file.write(f"{os.getpid()} {os.getppid()} {first.pid} {second.pid}")
        time.sleep(1e6)
    if verb == "environment":
        return {"score": 0, "names": sorted(os.environ), "torch": "torch" in sys.modules}
    if verb == "kill_with_term":
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(0.05)
    return scale * len(solution_str)
"""


@pytest.fixture
def reward_file(tmp_path: Path) -> Path:
    path = tmp_path / "my_reward.py"
    path.write_text(REWARD_FILE)
    return path
