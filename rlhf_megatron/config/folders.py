"""Where the configuration files are."""

from pathlib import Path

NOT_GROUPS = ("model",)
"""Folders of the configuration that hold no options: `model/` has the sizes of public models (`known_models.py`)."""


def config_dir() -> Path:
    """Return the folder of the configuration files: inside an installed package, or next to it in a checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "configs"
    return installed if installed.is_dir() else package.parent / "configs"


def group_folders() -> list[Path]:
    """Return the folders of the configuration groups, sorted."""
    return sorted(
        path
        for path in config_dir().iterdir()
        if path.is_dir() and path.name not in NOT_GROUPS and any(path.glob("*.yaml"))
    )
