"""`python -m tests.nightly.on_cluster`: integration tests, replays and chaos on a Temporal cluster on PostgreSQL."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.servers import SHORT_RUNS_NAMESPACE, SUGGESTED_EVENTS, copy_logs
from tests.temporal_cluster.services import TemporalCluster

SHORT_RUNS = "short-runs"
"""Namespace of the cluster whose tasks soon continue as a new run."""
TESTS_SECONDS = 5400.0
CHAOS_SECONDS = 1800.0
"""Longest time of the chaos test beyond its minutes of faults."""
TOO_LONG = 124
"""Exit code of a command that took too long, as that of the program `timeout`."""


def main(minutes: str = "5", jobs: str = "4", tests: str = "tests/integration tests/replay") -> int:
    """Run the tests on one cluster, then the chaos test on its own. Return the first exit code that is not 0."""
    chaos = ["make", "--no-print-directory", "chaos", "CLUSTER=1", f"MINUTES={minutes}"]
    codes = [_tests(jobs, tests.split()), _code_of(chaos, {}, CHAOS_SECONDS + 60 * float(minutes))]
    return next((code for code in codes if code), 0)


def _tests(jobs: str, tests: list[str]) -> int:
    pytest = [str(Path(sys.executable).parent / "pytest"), "-q", "-n", jobs, "--dist", "worksteal"]
    suggestion = {"limit.historyCount.suggestContinueAsNew": SUGGESTED_EVENTS}
    with tempfile.TemporaryDirectory(prefix="flowkit-cluster-") as folder:
        logs = Path(folder)
        with TemporalCluster(logs, namespaces={SHORT_RUNS: suggestion}) as cluster:
            environment = {"TEMPORAL_ADDRESS": cluster.address, SHORT_RUNS_NAMESPACE: SHORT_RUNS}
            code = _code_of([*pytest, "-m", "not nightly", *tests], environment, TESTS_SECONDS)
            if ended := [service.name for service in cluster.services.values() if not service.running]:
                sys.stdout.write(f"these services ended by themselves: {', '.join(ended)}\n")
                code = code or 1
        if code:
            copy_logs(logs)
    return code


def _code_of(command: list[str], environment: dict[str, str], seconds: float) -> int:
    """Run a command. Return its exit code; end it if it takes too long."""
    try:
        return subprocess.run(
            command, env={**os.environ, **environment}, check=False, timeout=seconds
        ).returncode
    except subprocess.TimeoutExpired:
        sys.stdout.write(f"`{' '.join(command)}` took longer than {seconds:.0f} s\n")
        return TOO_LONG


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
