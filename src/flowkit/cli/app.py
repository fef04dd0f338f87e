"""The `flowkit` command line: its commands and its exit."""

import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from flowkit import products
from flowkit.cli import output, processes
from flowkit.cli.backfills.commands import backfill
from flowkit.cli.debug.command import debug
from flowkit.cli.doctor.command import doctor
from flowkit.cli.errors import EPILOG, exit_code_of, exit_process
from flowkit.cli.health_check import health
from flowkit.cli.project.command import init
from flowkit.cli.retention.commands import close_orphaned, purge
from flowkit.cli.schedules.commands import schedule
from flowkit.cli.tasks import (
    attempts,
    commands,
    explain,
    operate,
    picture,
    results,
    roles,
    validate,
    variables,
    workers,
)
from flowkit.cli.up.command import up
from flowkit.cli.up.logs import logs
from flowkit.core import version


class Commands(TyperGroup):
    """The commands of the core, and those of installed products, which are loaded when they are needed."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the names of all commands."""
        return [*dict.fromkeys([*super().list_commands(ctx), *_product_commands()])]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return a command; None if there is none. Raise ConfigError for one of a product that is not installed."""
        if (known := super().get_command(ctx, cmd_name)) is not None:
            return known
        if (load := _product_commands().get(cmd_name)) is not None:
            group = typer.Typer()
            group.add_typer(load(), name=cmd_name, epilog=EPILOG)
            self.commands.update(typer.main.get_group(group).commands)
            return self.commands[cmd_name]
        if cmd_name in products.EXTRAS:
            raise products.missing(f"`flowkit {cmd_name}`", cmd_name)
        return None


def _product_commands() -> dict[str, Callable[[], typer.Typer]]:
    return {name: load for each in products.installed() for name, load in each.commands.items()}


app = typer.Typer(
    name="flowkit",
    cls=Commands,
    help="Run tasks and FlowKit's processes. Set TEMPORAL_ADDRESS, TEMPORAL_NAMESPACE and MONGO_URL "
    "to connect to your servers.",
    epilog=EPILOG,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
_COMMANDS: dict[str, Callable[..., int | None]] = {
    "up": up,
    "logs": logs,
    "engine": processes.engine,
    "bridge": processes.bridge,
    "worker": processes.worker,
    "run": commands.run,
    "status": commands.status,
    "cancel": commands.cancel,
    "pause": operate.pause,
    "resume": operate.resume,
    "retry": operate.retry,
    "skip": operate.skip,
    "complete": operate.complete,
    "fail": operate.fail,
    "retry-batches": operate.retry_batches,
    "skip-batches": operate.skip_batches,
    "decide": operate.decide,
    "satisfy": operate.satisfy,
    "change": operate.change,
    "rerun": operate.rerun,
    "list": commands.list_tasks,
    "result": results.result,
    "batches": results.batches,
    "attempts": attempts.attempts,
    "debug": debug,
    "explain": explain.explain,
    "workers": workers.workers,
    "roles": roles.roles,
    "vars": variables.task_vars,
    "validate": validate.validate,
    "schema": validate.schema,
    "graph": picture.graph,
    "doctor": doctor,
    "health": health,
    "init": init,
    "purge": purge,
    "close-orphaned": close_orphaned,
}
for name, command in _COMMANDS.items():
    app.command(name, epilog=EPILOG)(command)
app.add_typer(schedule, name="schedule", epilog=EPILOG)
app.add_typer(backfill, name="backfill", epilog=EPILOG)


def main() -> None:
    """Run the command line and exit. An error prints one line with a remedy; the exit code shows its kind."""
    exit_process(run(sys.argv[1:]))


def run(arguments: list[str]) -> int:
    """Run one command and return its exit code."""
    verbose = not {"--verbose", "-v"}.isdisjoint(arguments)
    return exit_code_of(
        lambda: app(arguments, standalone_mode=False), as_json="--json" in arguments, verbose=verbose
    )


def _print_version(wanted: bool) -> None:
    if wanted:
        output.echo(f"flowkit {version.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    show: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Options of all commands."""
