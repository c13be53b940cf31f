"""Sizes of public models by the name of their folder, for rules and plans on machines that have no model files.

A file of `configs/model/` holds what a model's ``config.json`` says about its sizes, and the names that its folder
usually has. A folder that is there always speaks for itself.
"""

from collections.abc import Mapping
from functools import cache
from pathlib import PurePath
from typing import Any

from rlhf_megatron.config.folders import config_dir


def known_config(folder: str) -> Mapping[str, Any] | None:
    """Return the ``config.json`` of a public model, as far as it is about sizes; None for an unknown name.

    Args:
        folder: A model's folder, which need not exist; its last part is the name. Upper and lower case are the same.
    """
    return _by_name().get(PurePath(folder).name.lower())


def known_models() -> list[str]:
    """Return the first name of each known model, sorted."""
    return sorted(names[0] for names, _ in _files())


@cache
def _by_name() -> dict[str, Mapping[str, Any]]:
    return {name.lower(): config for names, config in _files() for name in names}


@cache
def _files() -> tuple[tuple[list[str], Mapping[str, Any]], ...]:
    import yaml

    found = []
    for file in sorted((config_dir() / "model").glob("*.yaml")):
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
        found.append((content.pop("names"), content))
    return tuple(found)
