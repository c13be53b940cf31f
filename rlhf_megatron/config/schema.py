"""Questions about the schema itself: which leaves there are, what they say, which one a wrong key was meant to be."""

import difflib
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass

from pydantic.fields import FieldInfo

from rlhf_megatron.config.base import Node

CLOSE = 0.8
"""Similarity above which a sibling's name is taken for a typing mistake (difflib ratio)."""
NEAR = 0.6
"""Similarity above which a name is still worth suggesting."""


@dataclass(frozen=True)
class Leaf:
    """One setting of the schema.

    Attributes:
        path: Dotted path.
        field: pydantic's description of it.
    """

    path: str
    field: FieldInfo

    @property
    def type_name(self) -> str:
        """Its type as a reader would write it, for example ``int >= 1 | null``."""
        return describe_type(self.field.annotation, self.field.metadata)

    @property
    def default(self) -> object:
        """Its default; `required` when there is none."""
        return "required" if self.field.is_required() else self.field.get_default(call_default_factory=True)


def node_type(annotation: object) -> type[Node] | None:
    """Return the node class that a field is annotated with (or with `| None`), or None when the field is a leaf."""
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        others = [a for a in typing.get_args(annotation) if a is not type(None)]
        annotation = others[0] if len(others) == 1 else annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, Node) else None


def mapping_type(annotation: object) -> type[Node] | None:
    """Return the node class of a leaf that maps names of the user's own to nodes (`dict[str, Node]`), or None."""
    args = typing.get_args(annotation)
    return node_type(args[1]) if typing.get_origin(annotation) is dict else None


def leaves(schema: type[Node], prefix: str = "") -> Iterator[Leaf]:
    """Yield every leaf of a schema, in the order it was written."""
    for name, field in schema.model_fields.items():
        child = node_type(field.annotation)
        if child is None:
            yield Leaf(prefix + name, field)
        else:
            yield from leaves(child, f"{prefix}{name}.")


def find_node(schema: type[Node], path: str) -> type[Node] | None:
    """Return the node class at a dotted path ('' is the root), or None when there is no node there."""
    node: type[Node] | None = schema
    for name in filter(None, path.split(".")):
        field = node.model_fields.get(name) if node else None
        node = node_type(field.annotation) if field else None
    return node


def find_field(schema: type[Node], path: str) -> FieldInfo | None:
    """Return the field at a dotted path, or None."""
    parent, _, name = path.rpartition(".")
    node = find_node(schema, parent)
    return node.model_fields.get(name) if node else None


def describe_type(annotation: object, metadata: typing.Sequence[object] = ()) -> str:
    """Write a type the way a user thinks of it: choices spelled out, bounds shown, None as null."""
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Annotated:
        return describe_type(args[0], args[1:])
    if origin is typing.Literal:
        return "|".join(str(a) for a in args)
    if origin in (types.UnionType, typing.Union):
        return " | ".join(describe_type(a, () if a is type(None) else metadata) for a in args)
    if origin in (list, tuple):
        inner = ", ".join(describe_type(a) for a in args)
        return f"[{inner}{', ...' if origin is list else ''}]{_bounds(metadata)}"
    if origin is dict:
        return "{key: value, ...}"
    name = {type(None): "null", str: "text", bool: "true|false"}.get(typing.cast(type, annotation))
    return (name or getattr(annotation, "__name__", str(annotation))) + _bounds(metadata)


def _bounds(metadata: typing.Sequence[object]) -> str:
    found: list[str] = []
    for item in metadata:
        for constraint in [item, *getattr(item, "metadata", ())]:
            for attribute, sign in (("gt", ">"), ("ge", ">="), ("lt", "<"), ("le", "<="), ("min_length", "length >=")):
                bound = getattr(constraint, attribute, None)
                if bound is not None:
                    found.append(f"{sign} {bound}")
    return f" {', '.join(found)}" if found else ""


def suggest(schema: type[Node], path: str) -> str:
    """Say what to do about an unknown key.

    A sibling's misspelt name comes first, then the same name in another node, then whatever is similar, then the list
    of what is valid there.
    """
    path = _with_known_nodes(schema, path)
    if find_field(schema, path) is not None:
        return f"Did you mean '{path}'?"
    parent, _, name = path.rpartition(".")
    siblings = _names_at(schema, parent)
    dot = f"{parent}." if parent else ""
    close = closest(name, siblings, CLOSE)
    if close:
        return f"Did you mean '{dot}{close}'?"
    elsewhere = _same_name(schema, path)
    if elsewhere:
        return f"Did you mean {_either(elsewhere[:2])}?"
    near = closest(name, siblings, NEAR)
    if near:
        return f"Did you mean '{dot}{near}'?"
    guess = closest(name, {leaf.path.rpartition(".")[2] for leaf in leaves(schema)}, CLOSE)
    if guess:
        return f"Did you mean {_either(_same_name(schema, f'{dot}{guess}')[:2])}?"
    where = f"'{parent}'" if siblings and parent else "the top level"
    return f"Remove it; {where} has: {', '.join(siblings or schema.model_fields)}."


def closest(name: str, names: typing.Iterable[str], cutoff: float) -> str | None:
    """Return the name that a misspelt one resembles most, whatever its case, or None."""
    by_lower = {n.lower(): n for n in sorted(names)}
    found = difflib.get_close_matches(name.lower(), list(by_lower), n=1, cutoff=cutoff)
    return by_lower[found[0]] if found else None


def _with_known_nodes(schema: type[Node], path: str) -> str:
    """Correct misspelt nodes on the way to a key; what resembles no node is left as it is."""
    parts = path.split(".")
    for i, part in enumerate(parts[:-1]):
        node = find_node(schema, ".".join(parts[:i]))
        if node is None:
            break
        nodes = [name for name, field in node.model_fields.items() if node_type(field.annotation) is not None]
        if part not in nodes:
            parts[i] = closest(part, nodes, CLOSE) or part
    return ".".join(parts)


def _names_at(schema: type[Node], path: str) -> list[str]:
    node = find_node(schema, path)
    return list(node.model_fields) if node else []


def _same_name(schema: type[Node], path: str) -> list[str]:
    """Paths of the schema that end in the same name: those that share most of the end, then most of the beginning."""
    wanted = path.split(".")
    found = [leaf.path for leaf in leaves(schema) if leaf.path.rpartition(".")[2] == wanted[-1] and leaf.path != path]

    def likeness(candidate: str) -> tuple[int, int]:
        have = candidate.split(".")
        return _common(reversed(wanted), reversed(have)), _common(wanted, have)

    best = max(map(likeness, found), default=None)
    return [candidate for candidate in found if likeness(candidate) == best]


def _common(left: typing.Iterable[str], right: typing.Iterable[str]) -> int:
    count = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        count += 1
    return count


def _either(paths: list[str]) -> str:
    return " or ".join(f"'{p}'" for p in paths)
