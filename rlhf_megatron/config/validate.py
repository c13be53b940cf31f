"""What spans several leaves: every broken rule of a configuration, found before any process group, model or GPU."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from rlhf_megatron.config import (
    experts,
    validate_batches,
    validate_checkpoint,
    validate_effects,
    validate_files,
    validate_layout,
    validate_memory,
    validate_pools,
)
from rlhf_megatron.config.base import Node
from rlhf_megatron.config.parse import MISSING, parse
from rlhf_megatron.config.ppo import PPOConfig
from rlhf_megatron.config.rules import roles_of
from rlhf_megatron.errors import ConfigError, Violation

Schema = TypeVar("Schema", bound=Node)
Rule = Callable[[Any], Iterator[Violation]]


def validate(config: Node, *, check_files: bool = True) -> None:
    """Check every rule that spans several leaves.

    Args:
        config: Typed configuration.
        check_files: Whether model, data and reward files must exist.

    Raises:
        ConfigError: With every broken rule.
    """
    found = list(_broken_rules(config, type(config), check_files, started_ranks=None))
    if found:
        raise ConfigError(found)


def validate_mapping(
    mapping: Mapping[str, Any],
    schema: type[Schema],
    *,
    check_files: bool = False,
    earlier: Sequence[Violation] = (),
    started_ranks: int | None = None,
) -> Schema:
    """Type a plain mapping and check every rule, reporting all that is wrong at once.

    Args:
        mapping: Nested plain values.
        schema: `PPOConfig` or `SFTConfig`.
        check_files: Whether model, data and reward files must exist.
        earlier: What was found wrong before, to be reported with the rest.
        started_ranks: Ranks of the running job, to be compared with those configured; None when there is no job.

    Raises:
        ConfigError: With every broken rule.
    """
    parsed = parse(mapping, schema)
    lost = frozenset(_where(violation.key) for violation in earlier)
    found = [*earlier, *(v for v in parsed.violations if not (v.value is MISSING and _is_below(v.key, lost)))]
    if parsed.config is not None and "" not in lost:
        tainted = parsed.tainted | lost
        view = _View(parsed.config, "", tainted) if tainted else parsed.config
        found += _broken_rules(view, schema, check_files, started_ranks)
    if found or parsed.config is None:
        raise ConfigError(found)
    return parsed.config


def _where(key: str) -> str:
    """The part of the tree that is not as it should be after a failed override: '' is all of it."""
    return "" if key == "experiment" else key.rpartition("@")[2]


def _is_below(key: str, lost: Iterable[str]) -> bool:
    return any(node == "" or f"{key}.".startswith(f"{node}.") for node in lost)


class _Unknown(Exception):
    """A rule looked at a leaf whose value is not known."""


class _View:
    """A configuration with holes: looking at a leaf that was missing or wrong ends the rule that looks."""

    def __init__(self, node: Node, prefix: str, tainted: frozenset[str]):
        self._node, self._prefix, self._tainted = node, prefix, tainted

    def __getattr__(self, name: str) -> Any:
        path = self._prefix + name
        if path in self._tainted:
            raise _Unknown(path)
        value = getattr(self._node, name)
        return _View(value, f"{path}.", self._tainted) if isinstance(value, Node) else value


def _broken_rules(config: Any, schema: type[Node], check_files: bool, started_ranks: int | None) -> Iterator[Violation]:
    for rule in _rules(schema, check_files, started_ranks):
        try:
            yield from rule(config)
        except _Unknown:
            continue


def _rules(schema: type[Node], check_files: bool, started_ranks: int | None) -> Iterator[Rule]:
    """Every rule about a root, each as a function of the configuration alone, in the order they are reported."""
    rl = issubclass(schema, PPOConfig)
    per_role = [
        *(validate_pools.ROLE_RULES if rl else ()),
        *validate_layout.ROLE_RULES,
        *validate_memory.ROLE_RULES,
        *experts.ROLE_RULES,
        *(validate_batches.PPO_ROLE_RULES if rl else validate_batches.SFT_ROLE_RULES),
        *validate_effects.ROLE_RULES,
    ]
    whole = [
        *(validate_pools.PPO_RULES if rl else ()),
        *(validate_layout.PPO_RULES if rl else ()),
        *(validate_batches.PPO_RULES if rl else validate_batches.SFT_RULES),
        *(() if rl else validate_memory.SFT_RULES),
        *validate_effects.COMMON_RULES,
        *validate_checkpoint.COMMON_RULES,
        *(validate_checkpoint.PPO_RULES if rl else validate_checkpoint.SFT_RULES),
        *(validate_effects.PPO_RULES if rl else validate_effects.SFT_RULES),
    ]
    if check_files:
        per_role += validate_files.ROLE_RULES
        whole += [
            *validate_files.COMMON_RULES,
            *validate_checkpoint.FILE_RULES,
            *(validate_files.PPO_RULES if rl else ()),
        ]
        whole.append(partial(validate_files.started_ranks, started=started_ranks))
    for role in roles_of(schema):
        for rule in per_role:
            yield partial(rule, role=role)
    yield from whole
