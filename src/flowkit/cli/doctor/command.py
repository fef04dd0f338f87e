"""`flowkit doctor`: what is here, what is reachable, and what to do about the rest."""

import asyncio
from dataclasses import asdict

import typer

from flowkit.cli import output
from flowkit.cli.logs import log_warnings
from flowkit.cli.options import (
    DEFAULT_DATABASE,
    DEFAULT_MONGO_URL,
    AsJson,
    MongoDatabase,
    MongoUrl,
    PortBase,
    Queue,
    Verbose,
    Where,
)

_VERDICTS = {
    True: "tasks can be run: the servers are there, or `flowkit up` starts them",
    False: "tasks cannot be run yet; the lines that are not ok say what to do",
}


def doctor(
    port_base: PortBase = None,
    as_json: AsJson = False,
    mongo_url: MongoUrl = DEFAULT_MONGO_URL,
    database: MongoDatabase = DEFAULT_DATABASE,
    queue: Queue = None,
    verbose: Verbose = False,
) -> None:
    """Check what FlowKit needs here. Exit code 0 when the servers answer, or `flowkit up` could start them."""
    log_warnings(verbose)
    from flowkit.cli.doctor.checks import run_checks
    from flowkit.cli.doctor.findings import findings_table

    where = Where(mongo_url=mongo_url, database=database, queue=queue)
    findings, usable = asyncio.run(run_checks(where, port_base))
    if as_json:
        output.document({"ok": usable, "findings": [asdict(finding) for finding in findings]})
    else:
        console = output.console()
        console.print(findings_table(findings, wide=console.is_terminal))
        output.note(_VERDICTS[usable])
    raise typer.Exit(0 if usable else 1)
