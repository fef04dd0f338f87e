"""The nodes of a flow. Their methods say what the fields of a graph say, and return the node."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, Literal, Self, get_args, overload

from typing_extensions import TypeVar

from flowkit.errors import GraphError
from flowkit.flow.places import Place, calling_line
from flowkit.flow.specs import ADAPTER, ADAPTER_ARGS, QUARANTINE, Link, NodeSpec
from flowkit.flow.values import Cel, present, to_input, to_json, to_seconds, to_text
from flowkit.graph.fields import EDGE
from flowkit.graph.input_adapters import NOOP, PULL, RECHUNK
from flowkit.graph.routes import ON_FAILURE, ON_SUCCESS
from flowkit.models import ALL_DONE, StartWhen
from flowkit.text import kind_of, printed

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from flowkit.activities.handlers import RoleHandler
    from flowkit.flow.values import Duration

In_contra = TypeVar("In_contra", contravariant=True, default=Any)
Out_co = TypeVar("Out_co", covariant=True, default=Any)
Item = TypeVar("Item")

FIRST_BATCH = StartWhen.FIRST_BATCH.value

Streaming = bool | Literal["first_batch"]
"""When a node starts that follows others: once they have finished, or on their first batches.

With True, on the first batch of each of them; with "first_batch", on the first batch of any parent.
"""

Part = Literal["node", "io", "map", "retry_policy", "on_batch_failure", "routing"]


class Ref(Generic[Out_co]):
    """What another node may follow or pull from. `Out` is the type of its results."""

    def __init__(self, flow: object, number: int, spec: NodeSpec) -> None:
        self.flow = flow
        self.number = number
        """The place in the order of creation. Nodes wait only for nodes with a smaller one."""
        self.spec = spec

    @property
    def node_id(self) -> str:
        """The id of the node."""
        return self.spec.node_id

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.node_id!r} of type {self.spec.kind!r}>"


class FlowNode(Ref[Out_co], Generic[In_contra, Out_co]):
    """A node that reads items of the type `In` and gives results of the type `Out`."""

    def __init__(
        self,
        flow: object,
        number: int,
        spec: NodeSpec,
        handler: type[RoleHandler[Any, Any]] | RoleHandler[Any, Any] | None = None,
        item: Any = None,
    ) -> None:
        super().__init__(flow, number, spec)
        self.handler = handler
        """The handler of its role as the program gave it; None if other processes run the role."""
        self.mapped_type: Any = item
        """The type of the items of `maps`, if it is known."""

    # --- where its batches come from -----------------------------------------------------------------------------

    def pulls(
        self,
        *parents: Ref[In_contra],
        streaming: Streaming = False,
        when: str | Cel | None = None,
        waits: bool = True,
        poll_ms: int | Cel | None = None,
        backoff_max_ms: int | Cel | None = None,
        eof_on_task_done: bool | Cel | None = None,
    ) -> Self:
        """Process the results of these nodes, one by one, after they have finished.

        With `streaming`, start earlier (`Streaming`). `when` is the condition of the edges. Without `waits`, the nodes
        are no parents: this node only reads what they have stored when it starts, and waits for the rest. Without
        nodes, there are no batches, and only `finalize` is called. The other arguments are those of the input adapter.
        """
        args = present(poll_ms=poll_ms, backoff_max_ms=backoff_max_ms, eof_on_task_done=eof_on_task_done)
        return self._pull(PULL, parents, args, streaming, when, waits=waits)

    @overload
    def rechunks(
        self: FlowNode[list[Item], Out_co],
        *parents: Ref[Item],
        size: int | Cel,
        list_key: None = None,
        streaming: Streaming = False,
        when: str | Cel | None = None,
        waits: bool = True,
        poll_ms: int | Cel | None = None,
        backoff_max_ms: int | Cel | None = None,
        eof_on_task_done: bool | Cel | None = None,
    ) -> FlowNode[list[Item], Out_co]: ...

    @overload
    def rechunks(
        self,
        *parents: Ref[object],
        size: int | Cel,
        list_key: str | Cel,
        streaming: Streaming = False,
        when: str | Cel | None = None,
        waits: bool = True,
        poll_ms: int | Cel | None = None,
        backoff_max_ms: int | Cel | None = None,
        eof_on_task_done: bool | Cel | None = None,
    ) -> Self: ...

    def rechunks(
        self,
        *parents: Ref[Any],
        size: int | Cel,
        list_key: str | Cel | None = None,
        streaming: Streaming = False,
        when: str | Cel | None = None,
        waits: bool = True,
        poll_ms: int | Cel | None = None,
        backoff_max_ms: int | Cel | None = None,
        eof_on_task_done: bool | Cel | None = None,
    ) -> Any:
        """Process the results of these nodes in chunks of up to `size` items, as lists.

        `list_key` names the list in each result whose items are meant; without it, each result is one item. A chunk
        never spans two results. The other arguments are those of `pulls`.
        """
        args = present(
            size=size,
            meta_list_key=list_key,
            poll_ms=poll_ms,
            backoff_max_ms=backoff_max_ms,
            eof_on_task_done=eof_on_task_done,
        )
        return self._pull(RECHUNK, parents, args, streaming, when, waits=waits)

    @overload
    def maps(
        self: FlowNode[list[Item], Out_co],
        over: str | Cel,
        items: type[Item] | None = None,
        *,
        batch_size: int,
        parallel: int | None = None,
    ) -> FlowNode[list[Item], Out_co]: ...

    @overload
    def maps(
        self,
        over: str | Cel,
        items: type[In_contra] | None = None,
        *,
        batch_size: Literal[1] = 1,
        parallel: int | None = None,
    ) -> Self: ...

    def maps(
        self,
        over: str | Cel,
        items: Any = None,
        *,
        batch_size: int | None = None,
        parallel: int | None = None,
    ) -> Any:
        """Process the items of the list that the expression `over` gives, such as `params.cities`.

        `items` is the type of one item, for type checkers. Without it, only the types of the handler and of the params
        are compared. With a `batch_size` above 1, the handler reads lists of items. `parallel` is
        the largest number of shards that process the items together.
        """
        self.mapped_type = items
        own = {key: value for key, value in self.spec.fields.get("map", {}).items() if key.startswith("x-")}
        size = None if batch_size == 1 else batch_size
        return self._set("map", {"over": to_text(over), **present(batch_size=size, parallel=parallel), **own})

    def own_input(self) -> Self:
        """Process one batch with the node's own input, whatever its parents have stored: the adapter `noop`."""
        self.spec.inline = {ADAPTER: NOOP, **(self.spec.inline or {})}
        return self._note("io.input_inline")

    def input(self, **values: Any) -> Self:
        """Give the node input in `io.input_inline`: values of JSON, models, or expressions (`cel`)."""
        for key in (ADAPTER, ADAPTER_ARGS):
            if key in values:
                raise self._error(f"input has {key!r}; call pulls, rechunks or own_input")
        self.spec.inline = {**(self.spec.inline or {}), **self._convert("input", values, to_input)}
        return self._note(*(f"io.input_inline.{key}" for key in values), "io.input_inline")

    def from_params(self, *names: str) -> Self:
        """Give the node these params of the task in `io.input_inline`, under their names."""
        return self.input(**{name: Cel(f"params.{name}") for name in names})

    def input_ref(self, **values: Any) -> Self:
        """Give the node the location of larger input, in `io.input_ref`; values may be expressions."""
        return self._set_io(
            "input_ref", {**self.spec.io.get("input_ref", {}), **self._convert("input_ref", values, to_input)}
        )

    def batching(self, **values: Any) -> Self:
        """Give external workers `io.batching`. Native workers ignore it."""
        return self._set_io(
            "batching", {**self.spec.io.get("batching", {}), **self._convert("batching", values)}
        )

    def max_ahead(self, batches: int) -> Self:
        """Wait while the node is this many batches ahead of the slowest node that streams from it."""
        return self._set_io("max_ahead", batches)

    # --- when it starts ------------------------------------------------------------------------------------------

    def after(
        self,
        *parents: Ref[object],
        streaming: Streaming = False,
        when: str | Cel | None = None,
        is_edge: bool = False,
    ) -> Self:
        """Start after these nodes, without their results. With `streaming`, start earlier (`Streaming`).

        `when` is the condition of the edges. With `is_edge`, they take precedence over a route from a parent to this
        node; otherwise the parent only repeats the route.
        """
        return self._follow("after", parents, streaming, when, is_edge=is_edge)

    def _follow(
        self,
        method: str,
        parents: Sequence[Ref[Any]],
        streaming: Streaming,
        when: str | Cel | None,
        *,
        is_edge: bool = False,
    ) -> Self:
        self._check_nodes(method, parents)
        for parent in parents:
            if parent.number >= self.number:
                which = "the node itself" if parent.number == self.number else "which is created later"
                raise self._error(
                    f"{method} names {parent.node_id!r}, {which}; create a node after its parents"
                )
            link = self.spec.links.setdefault(parent.node_id, Link())
            link.streams = link.streams or streaming is True
            link.when = link.when if when is None else to_text(when)
            link.is_edge = link.is_edge or is_edge
            self._note(f"edges_ex.{parent.node_id}")
        if streaming == FIRST_BATCH:
            self._set_io("start_when", FIRST_BATCH)
        return self._note("depends_on")

    def when(self, condition: str | Cel) -> Self:
        """Start only if this condition holds when the gate has opened, in CEL; otherwise skip the node."""
        return self._set("when", to_text(condition))

    def gate(self, fan_in: Literal["all", "any", "all_done"] | int) -> Self:
        """Start when so many parents have finished: all, any, or a number. With "all_done", all must have ended."""
        if isinstance(fan_in, bool) or (
            not isinstance(fan_in, int) and fan_in not in ("all", "any", ALL_DONE)
        ):
            raise self._error(
                f"gate is {printed(fan_in)}; it must be 'all', 'any', 'all_done' or a number of parents"
            )
        return self._set("fan_in", f"count:{fan_in}" if isinstance(fan_in, int) else fan_in)

    def needs(self, *prerequisites: str) -> Self:
        """Start only when these external prerequisites are satisfied."""
        known = self.spec.fields.get("prerequisites", [])
        return self._set("prerequisites", [*dict.fromkeys([*known, *prerequisites])])

    def routes(
        self, *, on_success: Sequence[Ref[object]] = (), on_failure: Sequence[Ref[object]] = ()
    ) -> Self:
        """Name the nodes that only the success, or only the permanent failure, of this node starts.

        Create these nodes after this one.
        """
        given = {ON_SUCCESS: on_success, ON_FAILURE: on_failure}
        known: dict[str, Any] = dict(self.spec.fields.get("routing", {}))
        for key, targets in given.items():
            if not isinstance(targets, (list, tuple)):
                raise self._error(f"routes({key}=…) takes a list of nodes, not {kind_of(targets)}")
            self._check_nodes(f"routes({key}=…)", targets)
            for target in targets:
                if target.number <= self.number:
                    raise self._error(
                        f"routes({key}=…) names {target.node_id!r}, which is not created later; create a node before "
                        "those that it starts"
                    )
            if targets:
                known[key] = [*dict.fromkeys([*known.get(key, ()), *(each.node_id for each in targets)])]
        return self._set("routing", known)

    # --- how it runs ---------------------------------------------------------------------------------------------

    def parallel(self, shards: int) -> Self:
        """Let up to so many shards process the batches of a node that pulls. For `maps`, give it `parallel`."""
        return self._set("parallel", shards)

    def retry(
        self,
        max: int | None = None,
        *,
        backoff_sec: Duration | None = None,
        backoff_coefficient: float | None = None,
        max_backoff_sec: Duration | None = None,
        jitter: float | None = None,
        permanent_on: Sequence[str] | None = None,
    ) -> Self:
        """Retry a failed attempt up to `max` times. What is left out keeps its value, or its default.

        The arguments are the fields of `retry_policy`.
        """
        given = present(
            max=max,
            backoff_sec=to_seconds(backoff_sec),
            backoff_coefficient=backoff_coefficient,
            max_backoff_sec=to_seconds(max_backoff_sec),
            jitter=jitter,
            permanent_on=None if permanent_on is None else [*permanent_on],
        )
        return self._set("retry_policy", {**self.spec.fields.get("retry_policy", {}), **given})

    def timeout(self, sec: Duration) -> Self:
        """Limit the time of one attempt."""
        return self._set("timeout_sec", to_seconds(sec))

    def deadline(self, sec: Duration) -> Self:
        """Limit the time of the node from the opening of its gate, over all attempts and waits."""
        return self._set("deadline_sec", to_seconds(sec))

    def quarantine(self, *, attempts: int | None = None, max: int | str | None = None) -> Self:
        """Set a batch aside that has failed `attempts` times: up to `max` batches, or a share such as `5%`."""
        given = {"then": QUARANTINE, **present(attempts=attempts, max=max)}
        return self._set("on_batch_failure", {**self.spec.fields.get("on_batch_failure", {}), **given})

    def allow_failure(self, allowed: bool = True) -> Self:
        """Let the task tolerate a failure of the node."""
        return self._set("allow_failure", allowed)

    def holds(self, sec: Duration | None = None, *, on_failure: bool | None = True) -> Self:
        """Let a failure of the node wait for a decision, for up to `sec` seconds; never with `on_failure=False`.

        With None, `on_node_failure` of the flow decides, and only the time applies.
        """
        if sec is not None:
            self._set("hold_sec", to_seconds(sec))
        return self if on_failure is None else self._set("hold_on_failure", on_failure)

    # --- for the user's own use ----------------------------------------------------------------------------------

    def named(self, name: Any) -> Self:
        """Give the node a name for people, in the field `name`."""
        return self._set("name", self._convert("name", name))

    def meta(self, value: Any = None, /, **fields: Any) -> Self:
        """Keep a value, or fields, in `meta` of the node. FlowKit stores it and ignores it."""
        if value is not None:
            return self._set("meta", self._convert("meta", value))
        known = self.spec.fields.get("meta")
        return self._set(
            "meta", {**(known if isinstance(known, dict) else {}), **self._convert("meta", fields)}
        )

    def extra(self, fields: Mapping[str, Any], *, at: Part | Ref[Any] = "node") -> Self:
        """Keep further keys in a part of the node, or with `at=parent` in the edge from a parent.

        Keys of a node begin with `x-`. FlowKit stores them and ignores them.
        """
        own = self._convert("extra", dict(fields))
        if isinstance(at, Ref):
            return self._extend_edge(at, own)
        if at not in get_args(Part):
            raise self._error(
                f"extra names the part {printed(at)}; it must be one of {', '.join(get_args(Part))}"
            )
        if foreign := [key for key in own if not key.startswith("x-")]:
            raise self._error(f"extra has the key {printed(foreign[0])}; begin your own keys with 'x-'")
        if at == "node":
            self.spec.fields |= own
        elif at == "io":
            self.spec.io |= own
        else:
            self.spec.fields[at] = {**self.spec.fields.get(at, {}), **own}
        return self

    def _extend_edge(self, parent: Ref[Any], own: dict[str, Any]) -> Self:
        self._check_nodes("extra", [parent])
        name = parent.node_id
        if name not in self.spec.links:
            raise self._error(
                f"extra names {name!r}, which is no parent of the node; call after or pulls first"
            )
        if known := EDGE.keys() & own.keys():
            raise self._error(
                f"extra has {min(known)!r}, which is no key of your own; call after or pulls for it"
            )
        self.spec.links[name].extra |= own
        return self

    # --- internal ------------------------------------------------------------------------------------------------

    def _pull(
        self,
        adapter: str,
        parents: Sequence[Ref[Any]],
        args: dict[str, Any],
        streaming: Streaming,
        when: str | Cel | None,
        *,
        waits: bool,
    ) -> Self:
        name = "pulls" if adapter == PULL else "rechunks"
        if self.spec.adapter not in (None, adapter):
            raise self._error("pulls and rechunks exclude each other; call one of them")
        self._check_nodes(name, parents)
        if waits:
            self._follow(name, parents, streaming, when)
        self.spec.adapter = adapter
        self.spec.sources += [parent.node_id for parent in parents if parent.node_id not in self.spec.sources]
        self.spec.adapter_args |= self._convert(name, args)
        return self._note("io.input_inline", "input_args")

    def _check_nodes(self, method: str, given: Sequence[Any]) -> None:
        """Raise GraphError for what is no other node of this flow."""
        for each in given:
            if not isinstance(each, Ref):
                shown = f"the text {printed(each)}" if isinstance(each, str) else kind_of(each)
                how = (
                    "pass them one by one"
                    if isinstance(each, (list, tuple))
                    else "pass what flow.node returns"
                )
                raise self._error(f"{method} takes nodes of the flow, not {shown}; {how}")
            if each.flow is not self.flow:
                raise self._error(
                    f"{method} names {each.node_id!r} of another flow; create the node in this flow"
                )

    def _convert(self, method: str, value: Any, convert: Callable[[Any, str], Any] = to_json) -> Any:
        try:
            return convert(value, method)
        except GraphError as error:
            raise self._error(str(error)) from None

    def _set(self, key: str, value: Any) -> Self:
        self.spec.fields[key] = value
        return self._note(key)

    def _set_io(self, key: str, value: Any) -> Self:
        self.spec.io[key] = value
        return self._note(f"io.{key}")

    def _note(self, *paths: str) -> Self:
        """Remember which line of the program describes these parts of the node."""
        place = calling_line()
        self.spec.places.update(dict.fromkeys(paths, place))
        return self

    def _error(self, problem: str) -> GraphError:
        return make_error(calling_line(), f"node {self.node_id!r}: {problem}")


def make_error(place: Place, problem: str) -> GraphError:
    """Return an error that names the line of the program."""
    return GraphError([f"{place}: {problem}"])
