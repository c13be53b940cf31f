"""From a plain mapping to the typed configuration: every type error, missing and unknown key as a `Violation`.

pydantic decides; this file only words its findings the way a user can act on, and makes sure that a missing node names
the leaves that are missing in it.
"""

import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

from pydantic import ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from rlhf_megatron.config.base import Node
from rlhf_megatron.config.schema import (
    NEAR,
    closest,
    describe_type,
    find_field,
    leaves,
    mapping_type,
    node_type,
    suggest,
)
from rlhf_megatron.errors import Violation

Schema = TypeVar("Schema", bound=Node)


class _Missing:
    def __repr__(self) -> str:
        return "(missing)"


MISSING = _Missing()
"""Stands for the value of a leaf that was not given."""
_REFERENCE = re.compile(r"\$\{([\w.]+)\}")
_SAID_BY_TYPE = ("literal_error", "greater_than", "less_than", "int_from_float", "too_short")
_STAND_IN: dict[type, object] = {int: 1, float: 1.0, str: "?", list: ["?"]}


@dataclass(frozen=True)
class Parsed(Generic[Schema]):
    """What became of a mapping.

    Attributes:
        config: The typed configuration. Where there are violations, the leaves named in `tainted` hold a default or a
            stand-in and must not be looked at; None when not even that was possible.
        violations: What pydantic found.
        tainted: Paths of the leaves that were missing or wrong.
    """

    config: Schema | None
    violations: tuple[Violation, ...]
    tainted: frozenset[str]


def parse(mapping: Mapping[str, object], schema: type[Schema]) -> Parsed[Schema]:
    """Validate a mapping against a schema.

    Args:
        mapping: Nested plain values, interpolations already resolved.
        schema: Root model.
    """
    filled = _fill(dict(mapping), schema)
    _resolve_defaults(filled, schema)
    booleans = tuple(_booleans(filled, schema, ""))
    try:
        config = schema.model_validate(filled)
    except ValidationError as error:
        details = error.errors(include_url=False)
        found = [*booleans, *(v for d in details for v in _violations(d, schema, filled))]
        violations = tuple(v for i, v in enumerate(found) if v not in found[:i])
        paths = [".".join(str(part) for part in d["loc"]) for d in details]
        tainted = {v.key for v in booleans} | {_leaf_of(schema, path) for path in paths}
        return Parsed(_repaired(filled, schema, tainted), violations, frozenset(tainted))
    return Parsed(config, booleans, frozenset(v.key for v in booleans))


def _fill(mapping: dict[str, Any], schema: type[Node]) -> dict[str, Any]:
    """Give absent or empty nodes an empty mapping where the schema needs one, so that their own leaves are named."""
    result = dict(mapping)
    for name, field in schema.model_fields.items():
        child = node_type(field.annotation)
        if child is None:
            continue
        value = result.get(name)
        if isinstance(value, Mapping):
            result[name] = _fill(dict(value), child)
        elif (name not in result and field.is_required()) or (
            value is None and name in result and not _optional(field)
        ):
            result[name] = _fill({}, child)
    return result


def _optional(field: FieldInfo) -> bool:
    return type(None) in typing.get_args(field.annotation)


def _resolve_defaults(filled: dict[str, Any], schema: type[Node]) -> None:
    """Put in the defaults that refer to other leaves (`${trainer.experiment_name}`), which only the schema holds."""
    defaults = {leaf.path: leaf.default for leaf in leaves(schema)}
    for path, default in defaults.items():
        if not isinstance(default, str) or "${" not in default or _get(filled, path) is not None:
            continue

        def value_of(match: re.Match[str]) -> str:
            given = _get(filled, match.group(1))
            return str(defaults[match.group(1)] if given is None else given)

        parent, _, name = path.rpartition(".")
        node = filled
        for part in parent.split("."):
            node = node.setdefault(part, {})
        if isinstance(node, dict):
            node[name] = _REFERENCE.sub(value_of, default)


def _get(mapping: Mapping[str, Any], path: str) -> Any:
    node: Any = mapping
    for part in path.split("."):
        node = node.get(part) if isinstance(node, Mapping) else None
    return node


def _booleans(mapping: Mapping[str, Any], schema: type[Node], prefix: str) -> list[Violation]:
    """Numbers given as true or false: pydantic would take them for 1 and 0."""
    found = []
    for name, field in schema.model_fields.items():
        value, child = mapping.get(name), node_type(field.annotation)
        if child is not None and isinstance(value, Mapping):
            found += _booleans(value, child, f"{prefix}{name}.")
        elif child is None and isinstance(value, bool):
            wanted = describe_type(field.annotation, field.metadata)
            if wanted.startswith(("int", "float")):
                found.append(Violation(prefix + name, value, f"must be {wanted}.", "Give a number."))
    return found


def _violations(detail: ErrorDetails, schema: type[Node], given: Mapping[str, Any]) -> list[Violation]:
    kind, value, path = detail["type"], detail["input"], ".".join(str(part) for part in detail["loc"])
    key = _leaf_of(schema, path)
    field = find_field(schema, key)
    inner = mapping_type(field.annotation) if field is not None else None
    name, _, below = path.removeprefix(key).removeprefix(".").partition(".")
    if inner is not None and below:
        below_name: ErrorDetails = {**detail, "loc": tuple(below.split("."))}
        found = _violations(below_name, inner, _get(given, f"{key}.{name}") or {})
        return [_moved(violation, f"{key}.{name}") for violation in found]
    if kind == "extra_forbidden":
        return [
            Violation(key, leaf, "is not a known key.", suggest(schema, key)) for key, leaf in _flatten(path, value)
        ]
    if field is not None and (child := node_type(field.annotation)) is not None:
        keys = ", ".join(child.model_fields)
        return [Violation(key, value, "must be a node with keys of its own.", f"It has: {keys}.")]
    wanted = describe_type(field.annotation, field.metadata) if field else "something else"
    if kind == "missing" and key == path:
        return [Violation(key, MISSING, f"is needed ({wanted}).", f"Set it: {key}=...{_doc(field)}")]
    if key != path:
        value = _get(given, key)
    said = kind.startswith(_SAID_BY_TYPE) or kind.endswith(("_type", "_parsing")) or kind == "missing"
    reason = "" if said else f": {detail['msg']}"
    return [Violation(key, value, f"must be {wanted}{reason}.", _fix(key, value, wanted))]


def _moved(violation: Violation, node: str) -> Violation:
    """A finding about a node on its own, as one about that node in its tree."""
    key = f"{node}.{violation.key}"
    fix = violation.fix.replace(violation.key, key).replace("the top level", f"'{node}'")
    return replace(violation, key=key, fix=fix)


def _fix(path: str, value: object, wanted: str) -> str:
    if wanted.startswith("[") and not isinstance(value, list):
        return f"Write a list: {path}=[{value}]."
    if wanted.startswith("text") and isinstance(value, int | float):
        return f"Quote it: {path}=\"'{value}'\"."
    if isinstance(value, str) and "|" in wanted and "null" not in wanted:
        close = closest(value, wanted.split("|"), NEAR)
        return f"Did you mean {path}={close}?" if close else f"Choose one of: {', '.join(wanted.split('|'))}."
    return f"Change it: {path}=..."


def _doc(field: Any) -> str:
    return f" ({field.description})" if field is not None and field.description else ""


def _flatten(path: str, value: object) -> list[tuple[str, object]]:
    """Name the leaves of an unknown node one by one: a whole tree of another program's keys then gets its answers."""
    if isinstance(value, Mapping) and value:
        return [pair for key, child in value.items() for pair in _flatten(f"{path}.{key}", child)]
    return [(path, value)]


def _leaf_of(schema: type[Node], path: str) -> str:
    """The setting that an error location belongs to: the location may go on into a list or a union member."""
    parts = path.split(".")
    for end in range(1, len(parts) + 1):
        field = find_field(schema, ".".join(parts[:end]))
        if field is None or node_type(field.annotation) is None:
            return ".".join(parts[:end])
    return path


def _repaired(filled: dict[str, Any], schema: type[Schema], tainted: set[str]) -> Schema | None:
    """A configuration with defaults or stand-ins for what was wrong, so that the other rules can still be checked."""
    for path in tainted:
        parent, _, name = path.rpartition(".")
        node = _get(filled, parent) if parent else filled
        if isinstance(node, dict):
            node.pop(name, None)
    filled = _fill(filled, schema)
    for leaf in leaves(schema):
        if leaf.field.is_required() and any(f"{leaf.path}.".startswith(f"{path}.") for path in tainted):
            parent, _, name = leaf.path.rpartition(".")
            node = _get(filled, parent) if parent else filled
            if isinstance(node, dict):
                base = getattr(leaf.field.annotation, "__origin__", leaf.field.annotation)
                node[name] = _STAND_IN.get(base)  # pyright: ignore[reportArgumentType]
    try:
        return schema.model_validate(filled)
    except ValidationError:
        return None
