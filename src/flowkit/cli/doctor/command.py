"""The command `flowkit doctor`."""

import asyncio
from dataclasses import asdict
from typing import Annotated

import typer

from flowkit.cli import output
from flowkit.cli.options import (
    AsJson,
    DeploymentOptions,
    PortBase,
    with_options,
)

_VERDICTS = {
    True: "ready to run tasks: the servers respond, or `flowkit up` can start them",
    False: "not ready to run tasks; each line that is not ok shows how to fix it",
}


@with_options
def doctor(
    port_base: PortBase = None,
    as_json: AsJson = False,
    *,
    where: DeploymentOptions,
    fix: Annotated[
        bool, typer.Option("--fix", help="Register the search attributes that Temporal lacks.")
    ] = False,
) -> None:
    """Check servers, programs and this machine. Exit with code 0 if tasks can run here."""
    from flowkit.cli.doctor.checks import run_checks
    from flowkit.cli.doctor.findings import findings_table

    findings, usable = asyncio.run(run_checks(where, port_base, fix=fix))
    if as_json:
        output.document({"ok": usable, "findings": [asdict(finding) for finding in findings]})
    else:
        console = output.console()
        console.print(findings_table(findings, wide=console.is_terminal))
        output.note(_VERDICTS[usable])
    raise typer.Exit(0 if usable else 1)
