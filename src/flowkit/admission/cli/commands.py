"""`flowkit admission`, which runs an admission queue, submits to it, and shows and changes it."""

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer

from flowkit import reason_codes
from flowkit.admission import check_installed
from flowkit.admission.cli.limits import limits
from flowkit.admission.models import State
from flowkit.cli import output
from flowkit.cli.errors import EPILOG, add_remedy
from flowkit.cli.health import measure
from flowkit.cli.loading import load_config
from flowkit.cli.options import (
    AsJson,
    DeploymentOptions,
    HealthOptions,
    Verbose,
    current_user,
    with_options,
)
from flowkit.cli.output import log_processes
from flowkit.cli.running import run_until_stopped
from flowkit.core.loops import run
from flowkit.errors import ConfigError
from flowkit.models.admission import DEFAULT_TENANT, Admission, Priority
from flowkit.text import printed, shown
from flowkit.validation import arguments

if TYPE_CHECKING:
    from collections.abc import Sequence

    from flowkit.admission.kafka import TopicRights

_MOST = 1_000
"""Most requests that `list` prints."""
_STATES = [state.value for state in State if state is not State.RESERVING]

admission = typer.Typer(
    help="Run an admission queue in front of tasks and outside executors, submit to it, and show and change it.",
    no_args_is_help=True,
)
admission.add_typer(limits, name="limits", epilog=EPILOG)


def _check_request_id(given: str) -> str:
    arguments.require(arguments.task_id_problem(given, "ID"))
    return given


def _check_known_id(given: str | None) -> str | None:
    return None if given is None else _check_request_id(given)


def _check_new_id(given: str | None) -> str | None:
    if given is not None:
        arguments.require(arguments.new_task_id_problem(given, "--id"))
    return given


def _check_state(given: str | None) -> str | None:
    if given is not None and given not in _STATES:
        problem = ConfigError(f"--status {shown(given)} is no status of a request")
        raise add_remedy(problem, f"choose from {', '.join(_STATES)}")
    return given


RequestId = Annotated[
    str, typer.Argument(metavar="ID", callback=_check_request_id, help="Id of the request.")
]


@admission.command("run", epilog=EPILOG)
@with_options
def run_process(
    dispatch: Annotated[
        bool, typer.Option("--dispatch/--no-dispatch", help="Whether this process starts requests.")
    ] = True,
    http: Annotated[bool, typer.Option("--http/--no-http", help="Whether it serves the HTTP API.")] = True,
    host: Annotated[
        str, typer.Option(help="Address to listen on. Another one than loopback needs tokens.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65_535, help="Port of the HTTP API.")] = 9654,
    certificate: Annotated[
        str | None, typer.Option(help="PEM file with a certificate, to serve HTTPS.")
    ] = None,
    key: Annotated[str | None, typer.Option(help="PEM file with the key of the certificate.")] = None,
    kafka: Annotated[
        bool,
        typer.Option(
            "--kafka/--no-kafka", help="Whether it reads requests from Kafka, and sends events to it."
        ),
    ] = False,
    topics: Annotated[
        str, typer.Option(help="per_type: a topic for each type of events. shared: one for all events.")
    ] = "per_type",
    topic_prefix: Annotated[str, typer.Option(help="Prefix of every topic, with its separator.")] = "",
    optional_event: Annotated[
        list[str] | None,
        typer.Option(
            help="Send this optional event: execution_queued, execution_started, execution_running, or none. "
            "Can be repeated. Default: all."
        ),
    ] = None,
    topic_priority: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TOPIC=BAND",
            help="Most urgent band that requests of this topic get. The topic has no prefix. Can be repeated.",
        ),
    ] = None,
    topic_tenant: Annotated[
        list[str] | None,
        typer.Option(
            metavar="TOPIC=TENANT",
            help="Tenant whose requests the records of this topic may submit, end and cancel. Can be "
            "repeated. Default: all.",
        ),
    ] = None,
    config: Annotated[
        str | None, typer.Option(help="With --kafka: JSON or YAML file with the settings kafka_….")
    ] = None,
    *,
    where: DeploymentOptions,
    reports: HealthOptions,
    verbose: Verbose = False,
) -> None:
    """Start the requests of the queue when it is their turn, until Ctrl-C.

    The process also serves the HTTP API and metrics for Prometheus. With --kafka, it reads
    requests from Kafka and sends events to it. Any number of these processes can run in
    parallel. The admission queue has the name of the engine's task queue.
    """
    log_processes(verbose)
    if http:
        check_installed()
    from flowkit.admission.kafka import OPTIONAL, AdmissionTopics
    from flowkit.admission.process import AdmissionProcess, AdmissionSettings

    events = OPTIONAL if optional_event is None else [each for each in optional_event if each != "none"]
    settings = AdmissionSettings(
        queue=where.engine_queue,
        dispatches=dispatch,
        addresses=[(host, port)] if http else [],
        certificate=certificate,
        key=key,
        kafka=load_config(config, {}) if kafka else None,
        topics=AdmissionTopics(
            style=_style(topics),
            prefix=topic_prefix,
            events=events,
            rights=topic_rights(topic_priority or (), topic_tenant or ()),
        ),
    )
    serves = f"{'https' if certificate else 'http'}://{host}:{port}" if http else "no HTTP API"

    async def run_admission() -> None:
        from flowkit.cli import servers

        metrics = measure(reports, "admission", settings.queue)
        async with servers.database(where) as db:
            client = await servers.connect_temporal(metrics)
            process = AdmissionProcess(db=db, client=client, settings=settings)
            does = "starts requests" if dispatch else "starts no requests"
            summary = f"admission {does} of queue {settings.queue}, and serves {serves}"
            await run_until_stopped(
                process, summary + (", and uses Kafka" if kafka else ""), reports, metrics
            )

    run(run_admission())


def topic_rights(priorities: "Sequence[str]", tenants: "Sequence[str]") -> "dict[str, TopicRights]":
    """Return what the writers of topics may do. Raise ConfigError for a text that is not of the form TOPIC=VALUE."""
    from flowkit.admission.kafka import TopicRights

    bands: dict[str, str] = {}
    for topic, band in (_pair(each, "--topic-priority", "BAND") for each in priorities):
        if bands.setdefault(topic, band) != band:
            problem = ConfigError(f"--topic-priority {topic} is given twice")
            raise add_remedy(problem, "give each topic one band")
    named = [_pair(each, "--topic-tenant", "TENANT") for each in tenants]
    return {
        topic: TopicRights(
            max_priority=bands.get(topic, Priority.CRITICAL),
            tenants=[tenant for each, tenant in named if each == topic],
        )
        for topic in {**bands, **dict(named)}
    }


def _pair(given: str, option: str, value: str) -> tuple[str, str]:
    topic, _, found = given.partition("=")
    if not topic or not found:
        problem = ConfigError(f"{option} {printed(given)} is not of the form TOPIC={value}")
        raise add_remedy(problem, f"write, for example, {option} execution_requested={value}")
    return topic, found


def _style(given: str) -> Literal["per_type", "shared"]:
    if given in ("per_type", "shared"):
        return cast("Literal['per_type', 'shared']", given)
    raise add_remedy(
        ConfigError(f"--topics {shown(given)} is no style of topics"), "choose per_type or shared"
    )


@admission.command("status", epilog=EPILOG)
@with_options
def status(
    request_id: Annotated[
        str | None,
        typer.Argument(metavar="[ID]", callback=_check_known_id, help="Id of a request, to show only that."),
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Show the queue until Ctrl-C, or the request until it ends.")
    ] = False,
    as_json: AsJson = False,
    *,
    where: DeploymentOptions,
) -> None:
    """Show how full the queue is, who uses it, and how fast its requests start; or show one request."""
    if request_id is not None:
        from flowkit.admission.cli import submission

        return asyncio.run(submission.show(request_id, where, watch=watch, as_json=as_json))
    if watch and as_json:
        raise add_remedy(ConfigError("--watch does not end, so it has no JSON document"), "omit --json")
    from flowkit.admission.cli import inspection

    if watch:
        return asyncio.run(inspection.watch_status(where))
    found = asyncio.run(inspection.read_status(where))
    if as_json:
        return output.document(inspection.status_fields(found))
    return inspection.print_status(found)


@admission.command("submit", epilog=EPILOG)
@with_options
def submit(
    user: Annotated[str, typer.Option(help="User for whom the request is submitted.")],
    graph: Annotated[
        str | None,
        typer.Argument(
            metavar="[GRAPH]",
            help="JSON or YAML file with a graph, or with params and graph (- reads stdin), or a flow as module:flow.",
        ),
    ] = None,
    tenant: Annotated[str, typer.Option(help="Tenant of the user.")] = DEFAULT_TENANT,
    priority: Annotated[Priority, typer.Option(help="Band in which the request waits.")] = Priority.NORMAL,
    params: Annotated[
        str | None,
        typer.Option(help="Params as JSON or YAML, or @FILE; they override those of GRAPH key by key."),
    ] = None,
    request_id: Annotated[
        str | None, typer.Option("--id", callback=_check_new_id, help="Id. Default: a new UUID.")
    ] = None,
    script: Annotated[
        Path | None, typer.Option(help="In place of GRAPH: script that an outside executor runs.")
    ] = None,
    lang: Annotated[str | None, typer.Option(help="With --script: its language. Default: python.")] = None,
    lang_version: Annotated[
        str | None, typer.Option(help="With --script: version of the language. Default: 3.11.")
    ] = None,
    fields: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="With --script: another field of the execution, such as timeout_seconds=60. Can be repeated.",
        ),
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Show what happens until the request ends.")] = False,
    as_json: AsJson = False,
    *,
    where: DeploymentOptions,
) -> None:
    """Submit a task, or with --script an execution for an outside executor. Exit with 1 if the queue rejects it."""
    from flowkit.admission.cli import submission

    given = submission.SubmitOptions(
        graph=graph, params=params, script=script, lang=lang, lang_version=lang_version, fields=fields or ()
    )
    who = Admission(user_id=user, tenant=tenant, priority=priority)
    request = submission.read_request(given, request_id, who)
    raise typer.Exit(asyncio.run(submission.submit(request, where, wait=wait, as_json=as_json)))


@admission.command("priority", epilog=EPILOG)
@with_options
def set_priority(
    request_id: RequestId,
    band: Annotated[Priority, typer.Argument(help="Band in which the request waits from now on.")],
    as_json: AsJson = False,
    *,
    where: DeploymentOptions,
) -> None:
    """Move a waiting request to another band. It keeps its time of arrival."""
    from flowkit.admission.cli import submission
    from flowkit.admission.client import describe

    ticket = asyncio.run(submission.set_priority(request_id, band, where))
    if as_json:
        return output.document(asdict(ticket))
    return output.echo(describe(ticket))


@admission.command("cancel", epilog=EPILOG)
@with_options
def cancel(
    request_id: RequestId,
    reason: Annotated[str, typer.Option(help="The reason, which the request keeps.")] = (
        reason_codes.USER_REQUEST
    ),
    as_json: AsJson = False,
    *,
    where: DeploymentOptions,
) -> None:
    """Cancel a request. One that waits ends at once; the end of one that runs is only requested."""
    from flowkit.admission.cli import submission
    from flowkit.admission.client import describe

    ticket = asyncio.run(submission.cancel(request_id, reason, current_user(), where))
    if as_json:
        return output.document(asdict(ticket))
    return output.echo(describe(ticket))


@admission.command("list", epilog=EPILOG)
@with_options
def list_requests(
    state: Annotated[
        str | None, typer.Option("--status", callback=_check_state, help="Only requests with this status.")
    ] = None,
    user: Annotated[str | None, typer.Option(help="Only requests of this user.")] = None,
    tenant: Annotated[str | None, typer.Option(help="Only requests of this tenant.")] = None,
    priority: Annotated[Priority | None, typer.Option(help="Only requests of this band.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=_MOST, help="Maximum number of requests.")] = 50,
    as_json: AsJson = False,
    *,
    where: DeploymentOptions,
) -> None:
    """List requests, newest first."""
    from flowkit.admission.cli import inspection

    wanted = {"state": state and State(state), "user_id": user, "tenant": tenant, "priority": priority}
    page = asyncio.run(inspection.read_page(where, wanted, limit))
    if as_json:
        return output.document({"requests": [asdict(each) for each in page.tickets], "total": page.total})
    return inspection.print_page(page)
