"""A graph as a program writes it: nodes with types, linked by methods. `to_dict` gives its JSON."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from graphlib import TopologicalSorter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, Literal, Never, Protocol, cast, overload

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from typing_extensions import TypeVar

from flowkit.activities.core_schemas import list_names
from flowkit.activities.handlers import RoleHandler
from flowkit.activities.json_schemas import ParamsSchema
from flowkit.activities.json_types import lost_problem
from flowkit.core.user_code import contained, error_text
from flowkit.errors import ConfigError, GraphError
from flowkit.flow.checks import HERE, check_graph, find_secret, params_problem
from flowkit.flow.nodes import FlowNode, make_error
from flowkit.flow.places import calling_line
from flowkit.flow.reading import SETTINGS, read_extra, read_settings, read_specs
from flowkit.flow.specs import NodeSpec, write_edges
from flowkit.flow.values import present, to_input, to_json, to_seconds
from flowkit.graph.field_checks import wrong_graph
from flowkit.graph.fields import GRAPH
from flowkit.graph.params import PARAMS_SCHEMA
from flowkit.graph.routes import find_routers
from flowkit.graph.submission import validate_input
from flowkit.models import APPROVAL, COORDINATOR_FN, DELAY, ENGINE_TYPES
from flowkit.text import kind_of, one_line, printed
from flowkit.validation.invalid import problems_of
from flowkit.validation.values import is_role

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine
    from datetime import datetime

    from flowkit.flow.places import Place
    from flowkit.flow.values import Duration
    from flowkit.models import TaskResult
    from flowkit.testing import GraphRun

    Given = type[RoleHandler[Any, Any]] | RoleHandler[Any, Any]

P = TypeVar("P", default=dict[str, Any])
In = TypeVar("In")
Out = TypeVar("Out")


class TaskStarter(Protocol):
    """What starts tasks and waits for them: a Coordinator or a TaskClient."""

    async def create_task(
        self, *, params: dict[str, Any], graph: dict[str, Any], task_id: str | None = None
    ) -> str:
        """Start a task and return its id."""

    def result(self, task_id: str, timeout: float | None = None) -> Awaitable[TaskResult]:
        """Wait for a task to end, and return its result."""


class Flow(Generic[P]):
    """A graph whose tasks take params of the type `P`. Create nodes after their parents, so that no cycle can arise.

    `params` is the type of the params: a pydantic model, or any type that pydantic validates and whose JSON is an
    object. It gives the `params_schema` of the graph, and the names that expressions may read. `variables` is the type
    of the task's variables, only for the check of expressions. The other arguments are the fields of the graph, and
    `extra` has further keys of it, which FlowKit stores and ignores.
    """

    def __init__(
        self,
        name: str,
        params: type[P] | None = None,
        *,
        variables: type[Any] | None = None,
        on_node_failure: Literal["fail", "continue", "hold", "finish_running"] | None = None,
        deadline_sec: Duration | None = None,
        hold_sec: Duration | None = None,
        version_policy: Literal["any", "pin"] | None = None,
        params_schema: Mapping[str, Any] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        """Raise GraphError if `params` is no type whose JSON is an object."""
        self.name = name
        self.params = params
        self.variables = variables
        self._place = calling_line()
        self._nodes: dict[str, FlowNode[Any, Any]] = {}
        self._handlers = _Handlers()
        self._functions: dict[str, Callable[..., Any]] = {}
        self._extra: dict[str, Any] = to_json(dict(extra or {}), "extra")
        if known := GRAPH.keys() & self._extra.keys():
            raise make_error(self._place, f"extra has {min(known)!r}, which is no key of your own; remove it")
        self._settings = present(
            params_schema=None if params_schema is None else to_json(dict(params_schema), PARAMS_SCHEMA),
            on_node_failure=on_node_failure,
            deadline_sec=to_seconds(deadline_sec),
            hold_sec=to_seconds(hold_sec),
            version_policy=version_policy,
        )
        self._adapter: TypeAdapter[Any] | None = None
        if params is not None:
            self._take_params(params)

    def _take_params(self, params: type[P]) -> None:
        if PARAMS_SCHEMA in self._settings:
            raise make_error(
                self._place, "params and params_schema exclude each other; leave one of them out"
            )
        try:
            self._adapter = TypeAdapter(params)
            schema = self._adapter.json_schema(schema_generator=ParamsSchema)
        except PydanticUserError as error:
            problem = f"params is {params!r}, which pydantic cannot use: {error.message}"
            raise make_error(self._place, problem) from None
        if schema.get("type", "object") != "object":
            problem = f"params is {params!r}, whose JSON is of type {schema['type']!r}; use a model"
            raise make_error(self._place, problem)
        if (lost := lost_problem("params", self._adapter)) is not None:
            raise make_error(self._place, lost)
        if (secret := find_secret(schema)) is not None:
            remedy = "Temporal stores params in plain text; pass a reference instead"
            raise make_error(self._place, f"params has the secret {secret!r}: {remedy}")
        self._settings[PARAMS_SCHEMA] = schema

    @classmethod
    def from_dict(cls, graph: Mapping[str, Any]) -> Flow[dict[str, Any]]:
        """Return the flow of a graph as JSON. Raise GraphError if the graph is not valid.

        Its roles are run by other processes, or by the handlers that `test` gets. `to_dict` of the flow gives the
        normal form of the graph.
        """
        if not isinstance(graph, Mapping):
            raise GraphError([wrong_graph(graph)])
        given = to_json(dict(graph), "graph")
        validate_input(HERE, {"params": {}, "graph": given})
        name = given.get("name")
        flow = cast("type[Flow[dict[str, Any]]]", cls)(name if isinstance(name, str) else "")
        flow._extra = read_extra(given)
        flow._settings = read_settings(given)
        specs = {spec.node_id: spec for spec in read_specs(given)}
        routers = find_routers(given)
        waits = {node_id: [*spec.links, *routers.get(node_id, ())] for node_id, spec in specs.items()}
        numbers = {node_id: number for number, node_id in enumerate(TopologicalSorter(waits).static_order())}
        flow._nodes = {node_id: FlowNode(flow, numbers[node_id], spec) for node_id, spec in specs.items()}
        return flow

    # --- nodes ---------------------------------------------------------------------------------------------------

    def node(
        self, node_id: str, handler: Callable[[], RoleHandler[In, Out]] | RoleHandler[In, Out]
    ) -> FlowNode[In, Out]:
        """Add a node that this handler runs: its class, which is created without arguments, or an instance.

        Raise GraphError if the handler has no role, or another one of this flow has the same role.

        For type checkers, a class is what returns a handler without arguments, so that they find one that needs some.
        """
        place = calling_line()
        role = self._handlers.add(cast("Given", handler), node_id, place)
        return self._add(NodeSpec(node_id=node_id, kind=role), handler)

    @overload
    def external(self, node_id: str, role: str) -> FlowNode[Any, Any]: ...

    @overload
    def external(self, node_id: str, role: str, reads: type[In], writes: type[Out]) -> FlowNode[In, Out]: ...

    def external(self, node_id: str, role: str, reads: Any = None, writes: Any = None) -> FlowNode[Any, Any]:
        """Add a node whose role other processes run, with the types that it reads and writes."""
        return self._add(NodeSpec(node_id=node_id, kind=role))

    def function(
        self, node_id: str, function: str | Callable[..., Any], /, **fn_args: Any
    ) -> FlowNode[Never, object]:
        """Add a node that calls a function of the engine: a function of the program, or the name of one.

        `fn_args` are its keyword arguments after the task id; they may be expressions.
        """
        io = {"fn": function if isinstance(function, str) else self._name_function(node_id, function)}
        if fn_args:
            io["fn_args"] = self._convert(node_id, "function", fn_args)
        node: FlowNode[Never, object] = self._add(NodeSpec(node_id=node_id, kind=COORDINATOR_FN, io=io))
        if not isinstance(function, str):
            self._functions[io["fn"]] = function
        return node._note("io.fn", "io.fn_args")

    def approval(
        self, node_id: str, text: str | None = None, *, default: Literal["approve", "reject"] | None = None
    ) -> FlowNode[Never, object]:
        """Add a node that waits until a person decides. `default` applies when its deadline passes."""
        return self._add_engine_node(node_id, APPROVAL, present(text=text, default=default))

    @overload
    def delay(self, node_id: str, sec: Duration) -> FlowNode[Never, object]: ...

    @overload
    def delay(self, node_id: str, *, until: datetime | str) -> FlowNode[Never, object]: ...

    def delay(
        self, node_id: str, sec: Duration | None = None, *, until: datetime | str | None = None
    ) -> FlowNode[Never, object]:
        """Add a node that waits for a time, or until a moment with its time zone."""
        return self._add_engine_node(node_id, DELAY, present(sec=to_seconds(sec), until=until))

    def _add_engine_node(self, node_id: str, kind: str, settings: dict[str, Any]) -> FlowNode[Never, object]:
        inline = self._convert(node_id, kind, settings) if settings else None
        node: FlowNode[Never, object] = self._add(NodeSpec(node_id=node_id, kind=kind, inline=inline))
        return node._note("io.input_inline")

    def _convert(self, node_id: str, method: str, value: Any) -> Any:
        try:
            return to_input(value, method)
        except GraphError as error:
            raise make_error(calling_line(), f"node {node_id!r}: {error}") from None

    def _add(self, spec: NodeSpec, handler: Any = None) -> FlowNode[Any, Any]:
        place = calling_line()
        known = self._nodes.get(spec.node_id)
        if known is not None:
            where = f", at {known.spec.places['']}" if "" in known.spec.places else ""
            raise make_error(
                place, f"node id {spec.node_id!r} is already used{where}; give the node its own id"
            )
        spec.places[""] = place
        node: FlowNode[Any, Any] = FlowNode(self, len(self._nodes), spec, handler)
        self._nodes[spec.node_id] = node
        return node

    def _name_function(self, node_id: str, function: Callable[..., Any]) -> str:
        """Return the name by which graphs call a function of the program."""
        name = getattr(function, "__name__", "")
        problem = None
        if not callable(function) or not name.isidentifier():
            problem = (
                f"the function is {kind_of(function)} without a name; "
                "pass a function that `def` defines, or its name"
            )
        elif self._functions.get(name, function) != function:
            problem = f"another function of the flow has the name {name!r}; rename one of them"
        if problem is not None:
            raise make_error(calling_line(), f"node {node_id!r}: {problem}")
        return name

    @property
    def nodes(self) -> Mapping[str, FlowNode[Any, Any]]:
        """The nodes by id, in the order of the graph."""
        return MappingProxyType(self._nodes)

    @property
    def handlers(self) -> dict[str, RoleHandler[Any, Any]]:
        """The handlers by role. Classes are instantiated once, without arguments."""
        return self._handlers.instances()

    @property
    def functions(self) -> dict[str, Callable[..., Any]]:
        """The functions that the program gave to nodes, by name."""
        return dict(self._functions)

    # --- JSON ----------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Return the graph as JSON, with its keys in a fixed order.

        Raise GraphError if it is not valid. Its problems name the lines of the program.
        """
        graph = self._write()
        check_graph(
            graph,
            self._place,
            [*self._nodes.values()],
            self.handlers,
            self._functions,
            self.params,
            self.variables,
        )
        return graph

    def _write(self) -> dict[str, Any]:
        specs, typed = [node.spec for node in self._nodes.values()], self._list_typed()
        edges = write_edges(specs)
        graph = {
            **({"name": self.name} if self.name else {}),
            **{key: self._settings[key] for key in SETTINGS if key in self._settings},
            **self._extra,
            "nodes": [spec.to_dict(ignores_parents=self._ignores_parents(spec, typed)) for spec in specs],
            **({"edges_ex": edges} if edges else {}),
        }
        return deepcopy(graph)

    def _list_typed(self) -> frozenset[str]:
        """Return the roles whose handlers name types."""
        return frozenset(
            role for role, each in self.handlers.items() if each.is_source or each.input_type is not None
        )

    def _ignores_parents(self, spec: NodeSpec, typed: frozenset[str]) -> bool:
        """Return whether a node has parents that store batches, and has said that it does not read them.

        The methods of a node say where the items of a typed handler come from. Others may read batches themselves.
        """
        stores = any(self._nodes[parent].spec.kind not in ENGINE_TYPES for parent in spec.links)
        return spec.kind in typed and stores and "map" not in spec.fields

    def dump_params(self, params: P | Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return params as JSON, with the default values of the type `P`. Unknown keys are kept.

        Raise GraphError if they do not fit the type.
        """
        given: dict[str, Any] = {} if params is None else cast("dict[str, Any]", params)
        if self._adapter is None:
            return cast("dict[str, Any]", to_json(dict(given), "params"))
        validated = self._validate(given, "")
        try:
            dumped = self._adapter.dump_python(
                validated, mode="json", by_alias=True, round_trip=True, warnings=False
            )
        except ValueError as error:  # also pydantic's PydanticSerializationError
            raise GraphError([f"params cannot be written as JSON: {one_line(str(error))}"]) from None
        self._validate(dumped, "their JSON cannot be read back: ")
        names = {*dumped, *getattr(self.params, "model_fields", ()), *list_names(self._adapter.core_schema)}
        kept = (
            {key: value for key, value in given.items() if key not in names}
            if isinstance(given, dict)
            else {}
        )
        return {**to_json(kept, "params"), **dumped}

    def _validate(self, given: Any, context: str) -> Any:
        assert self._adapter is not None
        try:
            return self._adapter.validate_python(given)
        except ValidationError as error:
            raise GraphError([context + params_problem(each) for each in problems_of(error)]) from None

    # --- tasks ---------------------------------------------------------------------------------------------------

    async def submit(
        self, coordinator: TaskStarter, params: P | None = None, *, task_id: str | None = None
    ) -> str:
        """Start a task and return its id. `coordinator` is a Coordinator or a TaskClient.

        Raise GraphError if the flow or the params are not valid, and what its `create_task` raises.
        """
        return await coordinator.create_task(
            params=self.dump_params(params), graph=self.to_dict(), task_id=task_id
        )

    def run(
        self,
        coordinator: TaskStarter,
        params: P | None = None,
        *,
        task_id: str | None = None,
        timeout: float | None = None,
    ) -> Coroutine[Any, Any, TaskResult]:
        """Start a task, wait up to `timeout` seconds for its end, and return its result.

        Raise TaskFailed or TaskCancelled if it ended that way, TaskStillOpen (a TimeoutError) if it still runs, and
        the errors of `submit`.
        """
        return self._run(coordinator, params, task_id, timeout)

    async def _run(
        self, coordinator: TaskStarter, params: P | None, task_id: str | None, seconds: float | None
    ) -> TaskResult:
        return await coordinator.result(await self.submit(coordinator, params, task_id=task_id), seconds)

    async def test(
        self,
        params: P | None = None,
        *stubs: RoleHandler[Any, Any],
        functions: Mapping[str, Any] | None = None,
        db: Any = None,
    ) -> GraphRun:
        """Run a task in this process, without any server, and return its outcome (`flowkit.testing.run_graph`).

        The flow's own handlers and functions run; a handler in `stubs` replaces that of its role, and a function in
        `functions` that of its name. Raise ConfigError for a role without a handler.
        """
        from flowkit.testing import run_graph

        return await run_graph(self, *stubs, params=params, functions=functions, db=db)


class _Handlers:
    """Keeps one handler for each role. Creates a handler of a class when it is needed."""

    def __init__(self) -> None:
        self._given: dict[str, tuple[Given, Place]] = {}
        self._created: dict[str, RoleHandler[Any, Any]] = {}

    def add(self, handler: Given, node_id: str, place: Place) -> str:
        """Add the handler of a node and return its role. Raise GraphError, with the line, if that is impossible."""
        if problem := _handler_problem(handler):
            raise GraphError([f"{place}: node {node_id!r}: {problem}"])
        known, where = self._given.setdefault(handler.role, (handler, place))
        if known is not handler:
            remedy = "use that one, or give this one its own role"
            problem = f"role {handler.role!r} already has the handler {_name(known)}, at {where}; {remedy}"
            raise GraphError([f"{place}: node {node_id!r}: {problem}"])
        return handler.role

    def instances(self) -> dict[str, RoleHandler[Any, Any]]:
        """Return the handlers by role. Raise ConfigError, with the line, if a class needs arguments."""
        for role, (handler, place) in self._given.items():
            if role not in self._created:
                self._created[role] = _create(handler, place) if isinstance(handler, type) else handler
        return dict(self._created)


def _handler_problem(handler: Any) -> str | None:
    """Return why an object cannot run a node, or None."""
    kind = handler if isinstance(handler, type) else type(handler)
    if not issubclass(kind, RoleHandler):
        shown = f"the class {kind.__name__}" if isinstance(handler, type) else kind_of(handler)
        shown = f"the function {handler.__name__}" if hasattr(handler, "__code__") else shown
        return f"{shown} is no handler; pass a subclass of RoleHandler, an instance of one, or a function with @role"
    role = handler.role
    if not is_role(role):
        shown = f"role {printed(role)} cannot be a role's name" if role else "has no role"
        return f'handler {_name(handler)}: {shown}; set the class attribute role = "..."'
    return None


def _name(handler: Any) -> str:
    return handler.__name__ if isinstance(handler, type) else type(handler).__name__


def _create(kind: type[RoleHandler[Any, Any]], place: Place) -> RoleHandler[Any, Any]:
    try:
        with contained:
            return kind()
    except Exception as error:
        problem = f"{place}: handler {kind.__name__} cannot be created without arguments: {one_line(error_text(error))}"
        raise ConfigError(f"{problem}; pass an instance to flow.node") from error
