"""From names and overrides to a validated configuration. The only file that imports Hydra.

Hydra composes the files (the root, the groups, the experiment); the `key=value` overrides are then applied here one by
one, so that a mistake in one of them hides no other. Unknown keys are let through on purpose: the schema reports them
together with everything else. Left out: `hydra.main`, with its output folders per rank and its change of directory,
and sweeps.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, overload

from rlhf_megatron.config.base import Node
from rlhf_megatron.config.folders import config_dir, group_folders
from rlhf_megatron.config.ppo import PPOConfig, SFTConfig
from rlhf_megatron.config.rules import listed
from rlhf_megatron.config.schema import CLOSE, NEAR, closest
from rlhf_megatron.config.validate import validate_mapping
from rlhf_megatron.errors import ConfigError, Violation

if TYPE_CHECKING:
    from hydra.core.override_parser.types import Override
    from omegaconf import DictConfig

Root = Literal["ppo", "sft"]

SCHEMAS: dict[str, type[Node]] = {"ppo": PPOConfig, "sft": SFTConfig}
"""Schema of each root file. An experiment named `sft_...` belongs to the root `sft`, any other to `ppo`."""

_COMMAND_LINE = "(command line)"


def experiments(root: str | None = None) -> list[str]:
    """Return the names of the whole runs in `configs/experiment/`, of one root or of all."""
    names = _options("experiment")
    return names if root is None else [name for name in names if root_of(name) == root]


def root_of(experiment: str) -> Root:
    """Return the root file that an experiment is for."""
    return "sft" if experiment.startswith("sft_") else "ppo"


def get_config(experiment: str, overrides: Sequence[str] = ()) -> Any:
    """Compose and validate a whole run by its name.

    Files (model, data, reward function) need not exist; where the model's folder does, its sizes are checked.

    Args:
        experiment: A file of `configs/experiment/`, for example ``"ppo_8b"``.
        overrides: As on the command line, for example ``["actor.optim.lr=1e-6", "parallel@actor.megatron=tp2"]``.

    Returns:
        `PPOConfig`, or `SFTConfig` for an experiment named `sft_...`.

    Raises:
        ConfigError: With every broken rule; for an unknown experiment, with those that exist.
    """
    if experiment not in experiments():
        raise ConfigError([_unknown_option("experiment", experiment, experiments())])
    return compose(root_of(experiment), [f"experiment={experiment}", *overrides], check_files=False)


@overload
def compose(config_name: Literal["ppo"], overrides: Sequence[str], *, check_files: bool = ...) -> PPOConfig: ...
@overload
def compose(config_name: Literal["sft"], overrides: Sequence[str], *, check_files: bool = ...) -> SFTConfig: ...
def compose(config_name: str, overrides: Sequence[str], *, check_files: bool = False) -> Any:
    """Compose a root file with overrides and validate the result.

    Args:
        config_name: Root file: ``"ppo"`` or ``"sft"``.
        overrides: Hydra's syntax.
        check_files: Whether model, data and reward files must exist.

    Raises:
        ConfigError: With every broken rule.
    """
    composed = compose_mapping(config_name, overrides)
    return validate_mapping(
        composed.mapping, SCHEMAS[config_name], check_files=check_files, earlier=composed.violations
    )


@dataclass
class Composed:
    """A configuration before it is typed.

    Attributes:
        mapping: Nested plain values, interpolations resolved.
        violations: What was wrong with the overrides.
    """

    mapping: dict[str, Any] = field(default_factory=dict)
    violations: list[Violation] = field(default_factory=list)


def compose_mapping(config_name: str, overrides: Sequence[str]) -> Composed:
    """Compose a root file with overrides, without checking it against the schema."""
    result = Composed()
    parsed = list(_parsed(overrides, result.violations))
    groups = [o for o in parsed if _is_group(o)]
    choices = list(_group_choices(config_name, groups, result.violations))
    tree = _load(config_name, choices, result.violations)
    for override in parsed:
        if not _is_group(override):
            result.violations += _apply(override, tree)
    result.mapping = _resolved(tree, result.violations)
    return result


def _parsed(overrides: Iterable[str], violations: list[Violation]) -> "Iterator[Override]":
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    for text in overrides:
        try:
            override = parser.parse_override(text)
        except HydraException as error:
            reason = str(error).splitlines()[0]
            violations.append(
                Violation(
                    _key_of(text), text, f"cannot be read: {reason}.", "Write key=value; quote odd text: key=\"'...'\"."
                )
            )
            continue
        if override.is_sweep_override():
            violations.append(
                Violation(
                    override.key_or_group,
                    override.get_value_string(),
                    "must be one value; this is a sweep over several.",
                    f"Write a list {override.key_or_group}=[a,b], or quote the comma.",
                )
            )
            continue
        yield override


def _key_of(text: str) -> str:
    return text.partition("=")[0].strip().lstrip("+~") or _COMMAND_LINE


def _groups() -> list[str]:
    return [folder.name for folder in group_folders()]


def _options(group: str) -> list[str]:
    return sorted(p.stem for p in (config_dir() / group).glob("*.yaml"))


def _is_group(override: "Override") -> bool:
    """Whether an override selects a file of a group. `model=...` may be either: a group option, or a whole node."""
    if override.package is not None:
        return True
    return override.key_or_group in _groups() and not isinstance(override.value(), dict | list)


def _group_choices(root: str, overrides: "Sequence[Override]", violations: list[Violation]) -> Iterator[str]:
    """Turn the group overrides into ones that Hydra accepts; report those that name no file."""
    declared = _declared_groups(root)
    for override in overrides:
        group, option = override.key_or_group, override.value()
        mount = f"{group}@{override.package}" if override.package else group
        if group not in _groups():
            close = closest(group, _groups(), NEAR)
            fix = f"Did you mean {close}@{override.package}=...?" if close else f"There are: {', '.join(_groups())}."
            violations.append(Violation(mount, option, f"'{group}' is not a configuration group.", fix))
        elif override.is_delete() or option is None:
            yield f"~{mount}"
        elif override.package is None and mount not in declared:
            mounts = listed(f"{m}={option}" for m in sorted(declared) if m.startswith(f"{group}@"))
            violations.append(Violation(mount, option, "must say which node it is for.", f"Write {mounts}."))
        elif str(option) not in _options(group):
            violations.append(_unknown_option(mount, str(option), _options(group)))
        elif group == "experiment" and root_of(str(option)) != root:
            others = ", ".join(experiments(root)) or "none"
            rule = f"is a run of {root_of(str(option))}, not of {root}."
            violations.append(Violation(mount, option, rule, f"Runs of {root}: {others}."))
        else:
            yield f"{'' if mount in declared else '+'}{mount}={option}"


def _unknown_option(mount: str, option: str, options: Sequence[str]) -> Violation:
    close = closest(option, options, CLOSE)
    hint = f"Did you mean {mount}={close}? " if close else ""
    return Violation(mount, option, "does not exist.", f"{hint}There are: {', '.join(options)}.")


def _declared_groups(root: str) -> set[str]:
    from omegaconf import OmegaConf

    entries = OmegaConf.select(OmegaConf.load(config_dir() / f"{root}.yaml"), "defaults", default=[])
    return {str(key) for entry in entries if OmegaConf.is_dict(entry) for key in entry}


@contextmanager
def _hydra() -> Iterator[None]:
    """Hydra over our folder; a Hydra that the calling program had set up is put back afterwards."""
    from hydra import initialize_config_dir
    from hydra.core.global_hydra import GlobalHydra

    outer, GlobalHydra.instance().hydra = GlobalHydra.instance().hydra, None
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(config_dir())):
            yield
    finally:
        GlobalHydra.instance().hydra = outer


def _load(root: str, choices: Sequence[str], violations: list[Violation]) -> "DictConfig":
    from hydra import compose as hydra_compose
    from hydra.errors import HydraException
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException
    from yaml import YAMLError

    tree = OmegaConf.create()
    try:
        with _hydra():
            tree = hydra_compose(config_name=root, overrides=list(choices))
    except (HydraException, OmegaConfBaseException, YAMLError, ValueError, OSError) as error:
        reason = " ".join(str(error).split())
        violations.append(
            Violation(_COMMAND_LINE, " ".join(choices), f"cannot be composed: {reason}.", f"Look in {config_dir()}.")
        )
    OmegaConf.set_struct(tree, False)
    return tree


def _apply(override: "Override", tree: "DictConfig") -> list[Violation]:
    from omegaconf import DictConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    key, value = override.key_or_group, override.value()
    try:
        if override.is_delete():
            return _delete(key, tree)
        # A plain value in the place of a node is let through: the schema says what belongs there.
        is_node = isinstance(OmegaConf.select(tree, key, throw_on_missing=False), DictConfig)
        OmegaConf.update(tree, key, value, merge=not is_node or isinstance(value, dict), force_add=True)
    except (OmegaConfBaseException, AttributeError, TypeError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        return [Violation(key, value, f"cannot be set: {reason}.", f"Look at what is above {key} with --cfg.")]
    return []


def _delete(key: str, tree: "DictConfig") -> list[Violation]:
    from omegaconf import OmegaConf

    parent, _, name = key.rpartition(".")
    node = OmegaConf.select(tree, parent) if parent else tree
    if not OmegaConf.is_dict(node) or name not in node:
        return [Violation(key, "~", "is not set by any file or override, so it cannot be removed.", f"Drop ~{key}.")]
    del node[name]
    return []


def _resolved(tree: "DictConfig", violations: list[Violation]) -> dict[str, Any]:
    """Resolve interpolations leaf by leaf, so that one that fails hides no other; a leaf that fails is left out."""
    from omegaconf import DictConfig, ListConfig, OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    def plain(node: DictConfig, prefix: str) -> dict[str, Any]:
        result: dict[str, Any] = {}
        for key in node:
            path = f"{prefix}{key}"
            try:
                if OmegaConf.is_missing(node, key):
                    continue
                value = node[key]
                if isinstance(value, ListConfig):
                    value = OmegaConf.to_container(value, resolve=True)
            except (OmegaConfBaseException, ValueError) as error:
                raw = OmegaConf.to_container(node, resolve=False)
                shown = raw.get(key) if isinstance(raw, Mapping) else None
                reason = str(error).strip().splitlines()[0]
                violations.append(
                    Violation(path, shown, f"cannot be resolved: {reason}.", "Refer to a key that is set.")
                )
                continue
            result[str(key)] = plain(value, f"{path}.") if isinstance(value, DictConfig) else value
        return result

    return plain(tree, "")
