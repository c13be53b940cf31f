"""What goes wrong on one rank is raised on all, and none of them waits."""

from typing import Any

import pytest


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        (("none", "none"), "nothing"),
        (("none", "damage"), "DamagedCheckpointError: file A"),
        (("refusal", "none"), "CheckpointError: file B"),
        # A refusal is not to be passed over because of some damage elsewhere.
        (("damage", "refusal"), "CheckpointError: file B"),
        (("none", "system"), "CheckpointError: OSError: [Errno 28] No space left on device: 'file C'"),
        (("config", "none"), "CheckpointError: 1 configuration error:\n  1. a.b = 1: Rule. Fix."),
    ],
)
def test_all_raise_alike(world2: Any, kinds: tuple[str, str], expected: str) -> None:
    assert world2.run("tests.distributed.bodies_agreement:agree", *kinds) == [expected, expected]
