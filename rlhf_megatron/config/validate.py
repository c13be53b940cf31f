"""What spans several leaves: every broken rule of a configuration, found before any process group, model or GPU."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar, cast

from rlhf_megatron.config.base import Node
from rlhf_megatron.config.parse import parse
from rlhf_megatron.errors import ConfigError, Violation

Schema = TypeVar("Schema", bound=Node)


def validate(config: Node, *, check_files: bool = True) -> None:
    """Check every rule that spans several leaves.

    Args:
        config: Typed configuration.
        check_files: Whether model, data and reward files must exist.

    Raises:
        ConfigError: With every broken rule.
    """
    found = list(_broken_rules(config, check_files))
    if found:
        raise ConfigError(found)


def validate_mapping(
    mapping: Mapping[str, Any], schema: type[Schema], *, check_files: bool = False, earlier: Sequence[Violation] = ()
) -> Schema:
    """Type a plain mapping and check every rule, reporting all that is wrong at once.

    Args:
        mapping: Nested plain values.
        schema: `PPOConfig` or `SFTConfig`.
        check_files: Whether model, data and reward files must exist.
        earlier: What was found wrong before, to be reported with the rest.

    Raises:
        ConfigError: With every broken rule.
    """
    parsed = parse(mapping, schema)
    found = [*earlier, *parsed.violations]
    if parsed.config is not None:
        view = _View(parsed.config, "", parsed.tainted) if parsed.tainted else parsed.config
        found += _broken_rules(cast(Node, view), check_files)
    if found:
        raise ConfigError(_unique(found))
    assert parsed.config is not None
    return parsed.config


def _unique(found: Sequence[Violation]) -> list[Violation]:
    """Drop what follows from an earlier finding about the same key ("missing" after "cannot be read")."""
    first: dict[str, Violation] = {}
    kept = []
    for violation in found:
        if violation.key in first and "is needed" in violation.rule:
            continue
        first.setdefault(violation.key, violation)
        kept.append(violation)
    return kept


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


def _broken_rules(config: Node, check_files: bool) -> Iterator[Violation]:
    yield from ()
