"""`flowkit gateway`, which serves flows by JSON-RPC, and the commands below it."""

import asyncio
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import urlsplit

import typer

from flowkit.cli import output
from flowkit.cli.health import measure
from flowkit.cli.options import (
    AsJson,
    DeploymentOptions,
    HealthOptions,
    Verbose,
    with_options,
)
from flowkit.cli.output import log_processes
from flowkit.cli.running import run_until_stopped
from flowkit.core.loops import run
from flowkit.gateway import DEFAULT_MYCELIUM_URL, check_installed

if TYPE_CHECKING:
    from flowkit.gateway.client import GatewayClient
    from flowkit.gateway.importing import Import

DEFAULT_URL = "http://127.0.0.1:9652"

gateway = typer.Typer(
    help="Serve flows and jobs by JSON-RPC, and dispatch the jobs to supervisors.",
    invoke_without_command=True,
    no_args_is_help=False,
)


def _check_ip(given: str | None) -> str | None:
    try:
        return None if given is None else str(ip_address(given))
    except ValueError:
        raise typer.BadParameter(f"{given!r} is no IP address; --mycelium-url takes host names") from None


MyceliumUrl = Annotated[
    str,
    typer.Option(
        "--mycelium-url", envvar="MYCELIUM_URL", help="API of the Mycelium node, for supervisors behind it."
    ),
]
MyceliumIp = Annotated[
    str | None,
    typer.Option(
        "--mycelium-ip",
        callback=_check_ip,
        help="IP address of that API, instead of --mycelium-url.  [default: 127.0.0.1]",
    ),
]
MyceliumPort = Annotated[
    int | None,
    typer.Option(
        "--mycelium-port",
        min=1,
        max=65_535,
        help="Port of that API, instead of --mycelium-url.  [default: 8990]",
    ),
]


@dataclass(frozen=True, slots=True)
class Mycelium:
    """Where the API of the Mycelium node is. A group of options."""

    mycelium_url: MyceliumUrl = DEFAULT_MYCELIUM_URL
    mycelium_ip: MyceliumIp = None
    mycelium_port: MyceliumPort = None

    @property
    def url(self) -> str:
        """The address of the API. IP address and port, which earlier systems take, count before the URL."""
        if self.mycelium_ip is None and self.mycelium_port is None:
            return self.mycelium_url
        default = urlsplit(DEFAULT_MYCELIUM_URL)
        host = self.mycelium_ip or default.hostname or ""
        return f"http://{f'[{host}]' if ':' in host else host}:{self.mycelium_port or default.port}"


SupervisorNetworks = Annotated[
    str,
    typer.Option(
        envvar="FLOWKIT_SUPERVISOR_NETWORKS",
        help="Where supervisors may be: networks such as 10.0.0.0/8, and loopback, link-local, "
        "private, public; comma-separated.",
    ),
]
Concurrency = Annotated[
    int, typer.Option(min=1, max=2_000, help="Jobs that this process has in flight at once.")
]


@gateway.callback()
@with_options
def serve(
    context: typer.Context,
    host: Annotated[
        str, typer.Option(help="Address to listen on. Another one than loopback needs tokens.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65_535, help="Port for HTTP.")] = 9652,
    websocket_port: Annotated[
        int, typer.Option(min=1, max=65_535, help="Port for WebSocket. Both ports serve both.")
    ] = 9653,
    certificate: Annotated[
        str | None, typer.Option(help="PEM file with a certificate, to serve HTTPS and WSS.")
    ] = None,
    key: Annotated[str | None, typer.Option(help="PEM file with the key of the certificate.")] = None,
    jobs: Annotated[
        bool, typer.Option("--jobs/--no-jobs", help="Whether this process dispatches jobs, too.")
    ] = True,
    concurrency: Concurrency = 200,
    supervisor_networks: SupervisorNetworks = "private,public",
    *,
    mycelium: Mycelium,
    where: DeploymentOptions,
    reports: HealthOptions,
    verbose: Verbose = False,
) -> None:
    """Serve flows and jobs by JSON-RPC, and dispatch the jobs to supervisors, until Ctrl-C.

    Any number of gateways can run in parallel. A flow is a task, so an engine must run, too.
    """
    if context.invoked_subcommand is not None:
        return
    addresses = [(host, port), (host, websocket_port)]
    given = {"certificate": certificate, "key": key, "runs_jobs": jobs}
    summary = (
        f"gateway serves JSON-RPC at {'https' if certificate else 'http'}://{host}:{port} and port "
        f"{websocket_port}"
    )
    _run(
        where,
        {**given, "addresses": addresses, "concurrency": concurrency, "mycelium_url": mycelium.url},
        supervisor_networks,
        summary + (", and dispatches jobs" if jobs else ""),
        reports,
        verbose=verbose,
    )


@gateway.command("jobs")
@with_options
def run_jobs(
    concurrency: Concurrency = 200,
    supervisor_networks: SupervisorNetworks = "private,public",
    *,
    mycelium: Mycelium,
    where: DeploymentOptions,
    reports: HealthOptions,
    verbose: Verbose = False,
) -> None:
    """Only dispatch jobs, beside gateways that run with --no-jobs."""
    _run(
        where,
        {"concurrency": concurrency, "mycelium_url": mycelium.url},
        supervisor_networks,
        "gateway dispatches jobs",
        reports,
        verbose=verbose,
    )


def _run(
    where: DeploymentOptions,
    given: dict[str, Any],
    networks: str,
    summary: str,
    reports: HealthOptions,
    *,
    verbose: bool,
) -> None:
    log_processes(verbose)
    check_installed()
    from flowkit.gateway.http_client import AllowedNetworks
    from flowkit.gateway.process import GatewayProcess, GatewaySettings
    from flowkit.gateway.secret_box import SecretBox

    allowed = AllowedNetworks.parse(networks)
    settings = GatewaySettings(queue=where.engine_queue, supervisor_networks=allowed, **given)
    secrets = SecretBox.from_environment()

    async def run_gateway() -> None:
        from flowkit.cli import servers

        metrics = measure(reports, "gateway", settings.queue)
        async with servers.database(where) as db:
            client = await servers.connect_temporal(metrics)
            process = GatewayProcess(db=db, client=client, settings=settings, secrets=secrets)
            await run_until_stopped(process, f"{summary} on queue {settings.queue}", reports, metrics)

    run(run_gateway())


@gateway.command("import")
@with_options
def import_flow(
    file: Annotated[Path, typer.Argument(help="YAML or JSON file with a flow; docs/flows.md has the forms.")],
    url: Annotated[str, typer.Option(envvar="COORDINATOR_URL", help="Address of the gateway.")] = DEFAULT_URL,
    token: Annotated[
        str | None, typer.Option(envvar="FLOWKIT_TOKEN", help="Token for the gateway.", show_default=False)
    ] = None,
    context: Annotated[int | None, typer.Option(help="Context, in place of that of the file.")] = None,
    caller: Annotated[int | None, typer.Option(help="Actor, in place of that of the file.")] = None,
    flow: Annotated[int | None, typer.Option(help="Id of the flow, in place of that of the file.")] = None,
    start: Annotated[
        bool, typer.Option("--start", help="Start the flow, and show what happens until it ends.")
    ] = False,
    satisfy: Annotated[
        list[str] | None,
        typer.Option(help="With --start: satisfy this prerequisite. Can be repeated."),
    ] = None,
    as_json: AsJson = False,
) -> int:
    """Create the flow of a YAML or JSON file, with its jobs, and optionally start it."""
    check_installed()
    from flowkit.gateway.importing import read_flow_file

    planned = read_flow_file(file, {"context": context, "caller": caller, "flow": flow})
    return asyncio.run(_import(planned, url, token, satisfy or [], start=start, as_json=as_json))


async def _import(
    planned: "Import", url: str, token: str | None, satisfy: list[str], *, start: bool, as_json: bool
) -> int:
    from flowkit.gateway.client import GatewayClient

    own = {"context_id": planned.context_id, "id": planned.flow_id}
    async with GatewayClient(url, token=token) as client:
        for method, params in planned.calls:
            await client.call(method, params)
        if not as_json:
            output.echo(f"flow {planned.flow_id} of context {planned.context_id} is created")
        if start:
            await _follow(client, planned, satisfy, quiet=as_json)
        state = await client.call("flow.status", own)
    if as_json:
        output.document(state)
    return 1 if state["status"] == "Error" else 0


async def _follow(client: "GatewayClient", planned: "Import", satisfy: list[str], *, quiet: bool) -> None:
    """Start a flow, and print its events until its run ends."""
    own = {"context_id": planned.context_id, "id": planned.flow_id}
    run_id = (await client.call("flow.start", own))["run_id"]
    for prerequisite in satisfy:
        await client.call("node.satisfy", {**own, "prerequisite": prerequisite})
    async for event in client.events(planned.context_id, planned.flow_id):
        if event["run_id"] != run_id:
            continue
        if not quiet and not event["filled"]:
            output.echo(_describe(event, planned))
        if event["node"] is None and event["to"] in {"Finished", "Error"}:
            return


def _describe(event: dict[str, Any], planned: "Import") -> str:
    if event["node"] is None:
        return f"flow {event['flow_id']} is {event['to']} ({event['run_id']})"
    name = planned.names.get(event["node"], str(event["node"]))
    attempt = f" (attempt {event['attempt']})" if event["attempt"] > 1 else ""
    return f"  job {name} is {event['to']}{attempt}"
