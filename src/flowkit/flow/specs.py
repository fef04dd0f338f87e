"""A node as its program has described it, and as JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flowkit.graph.fields import NODE
from flowkit.graph.input_adapters import NOOP, RECHUNK_ARGS
from flowkit.graph.routes import ON_SUCCESS
from flowkit.graph.streams import ASYNC

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator

    from flowkit.flow.places import Place

ADAPTER, ADAPTER_ARGS, SOURCES = "input_adapter", "input_args", "from_nodes"
QUARANTINE = "quarantine"


@dataclass(kw_only=True, slots=True)
class Link:
    """The edge from a parent to a node."""

    streams: bool = False
    """Whether the first batch of the parent satisfies the edge."""
    when: str | None = None
    is_edge: bool = False
    """Whether the edge takes precedence over a route from the parent to the node. Then `edges_ex` lists it."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Further keys of the edge, which FlowKit ignores."""

    @property
    def is_special(self) -> bool:
        """Whether the edge has a field of its own."""
        return bool(self.streams or self.when is not None or self.extra)


@dataclass(kw_only=True, slots=True)
class NodeSpec:
    """What a program says about a node. Other nodes appear by id."""

    node_id: str
    kind: str
    """The role, or the type of a node without a role."""
    links: dict[str, Link] = field(default_factory=dict)
    """The edges to the node, by parent."""
    adapter: str | None = None
    """The input adapter, if the node pulls."""
    sources: list[str] = field(default_factory=list)
    """The nodes from which it pulls."""
    adapter_args: dict[str, Any] = field(default_factory=dict)
    inline: dict[str, Any] | None = None
    """`input_inline` without what an input adapter adds."""
    io: dict[str, Any] = field(default_factory=dict)
    """The other keys of `io`."""
    fields: dict[str, Any] = field(default_factory=dict)
    """The other keys of the node."""
    places: dict[str, Place] = field(default_factory=dict)
    """The lines of the program, by what they describe; that of the node itself by the empty text."""

    def to_dict(self, *, ignores_parents: bool = False) -> dict[str, Any]:
        """Return the node as JSON, with its keys in a fixed order.

        With `ignores_parents`, a node without an input adapter names `noop`: it does not read what its parents store.
        """
        inline = self._write_inline()
        if ignores_parents and self.adapter is None and ADAPTER not in (inline or {}):
            inline = {ADAPTER: NOOP, **(inline or {})}
        io = {**self.io, **({} if inline is None else {"input_inline": inline})}
        given = {**({"depends_on": [*self.links]} if self.links else {}), **self.fields, "io": io}
        rows = NODE.fields
        own = {
            key: _sort(value, rows[key].kind.fields) if key in rows else value for key, value in given.items()
        }
        return {"node_id": self.node_id, "type": self.kind, **_sort(drop_empty(own), rows)}

    def _write_inline(self) -> dict[str, Any] | None:
        if self.adapter is None:
            return self.inline
        default = bool(self.links) and self.sources == [*self.links]
        args = _sort({**({} if default else {SOURCES: self.sources}), **self.adapter_args}, RECHUNK_ARGS)
        return {ADAPTER: self.adapter, **({ADAPTER_ARGS: args} if args else {}), **(self.inline or {})}


_EMPTY_MEANS_ABSENT = frozenset(["depends_on", "io", "map", "retry_policy", "prerequisites", "routing"])


def drop_empty(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a node without those that mean nothing if they are empty."""
    return {key: value for key, value in fields.items() if value or key not in _EMPTY_MEANS_ABSENT}


def _sort(given: Any, order: Iterable[str] | None) -> Any:
    """Return an object with the keys of `order` first, and then the others as they are; other values unchanged."""
    if not order:
        return given
    known = {key: given[key] for key in order if key in given}
    return {**known, **given}


def write_edges(specs: Iterable[NodeSpec]) -> list[dict[str, Any]]:
    """Return the entries of `edges_ex`: of a node that needs one, those of all its parents, so that the lists agree.

    Only the repetition of a route stays out, because an edge would take precedence over the route.
    """
    nodes = [*specs]
    routed = {
        (spec.node_id, target)
        for spec in nodes
        for target in spec.fields.get("routing", {}).get(ON_SUCCESS, ())
    }
    return [
        _write_edge(parent, spec.node_id, link)
        for spec in nodes
        if any(_needs_edge(spec, parent, routed) for parent in spec.links)
        for parent, link in spec.links.items()
        if _needs_edge(spec, parent, routed) or (parent, spec.node_id) not in routed
    ]


def _needs_edge(spec: NodeSpec, parent: str, routed: Collection[tuple[str, str]]) -> bool:
    """Return whether `depends_on` alone cannot express an edge."""
    link = spec.links[parent]
    return link.is_special or (link.is_edge and (parent, spec.node_id) in routed)


def _write_edge(parent: str, child: str, link: Link) -> dict[str, Any]:
    mode = {"mode": ASYNC} if link.streams else {}
    when = {} if link.when is None else {"when": link.when}
    return {"from": parent, "to": child, **mode, **when, **link.extra}


def walk_places(spec: NodeSpec, path: str) -> Iterator[Place]:
    """Yield the lines that describe a part of a node, the closest one first: `io.input_inline.day`, `io`, the node."""
    parts = path.split(".")
    for length in range(len(parts), 0, -1):
        if (place := spec.places.get(".".join(parts[:length]))) is not None:
            yield place
    if "" in spec.places:
        yield spec.places[""]
