"""The page in a real Chromium, without network: what is drawn is there, and in its colours."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from rlhf_megatron.planning.command_line import run
from rlhf_megatron.planning.page import COLOURS

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


@pytest.fixture(scope="module", autouse=True)
def browser() -> str:
    if BROWSER is None:
        if os.environ.get("RLHF_REQUIRE_BROWSER"):
            pytest.fail("RLHF_REQUIRE_BROWSER is set, and there is no chromium: apt-get install chromium.")
        pytest.skip("there is no chromium here (Debian package: chromium); RLHF_REQUIRE_BROWSER makes this a failure")
    return BROWSER


def chromium(profile: Path, *arguments: str) -> str:
    """What a headless browser prints. `--no-sandbox` is for machines where everything runs as root."""
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", f"--user-data-dir={profile}"]
    offline = ["--host-resolver-rules=MAP * ~NOTFOUND", "--hide-scrollbars", "--disable-background-networking"]
    done = subprocess.run([str(BROWSER), *flags, *offline, *arguments], capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_screenshot_shows_the_plan(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from PIL import Image

    page, shot = tmp_path / "plan.html", tmp_path / "plan.png"
    run(["experiment=ppo_70b", "--html", str(page)])
    chromium(tmp_path / "profile", f"--screenshot={shot}", "--window-size=1320,1400", page.as_uri())
    image = Image.open(shot).convert("RGB")
    assert image.size == (1320, 1400)
    colours = {colour: count for count, colour in image.getcolors(maxcolors=1 << 24) or []}
    # Bars of memory: each part that is in the plan covers more than its legend's 11 x 11 pixels.
    for part in ("params", "grads", "optimizer", "activations", "rollout_weights", "kv_cache", "reserve"):
        rgb = tuple(int(COLOURS[part][start : start + 2], 16) for start in (1, 3, 5))
        assert colours.get(rgb, 0) > 4 * 121, part
    # The picture of ranks and the text have many colours; white is the ground.
    assert len(colours) > 60
    assert colours[(255, 255, 255)] > image.width * image.height // 3
