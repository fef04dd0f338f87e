"""The command `flowkit`. Other processes soon notice that it was killed: its sessions and its share of Kafka end early."""

from __future__ import annotations

import os

from flowkit.admission import queue
from flowkit.bridge.kafka import consumer
from flowkit.cli import main

SESSION_MS = 6_000
"""The shortest session that a broker permits."""

if __name__ == "__main__":
    vars(queue)["SESSION_SEC"] = float(os.environ["ADMISSION_SESSION_SEC"])
    vars(consumer)["_SESSION_MS"] = SESSION_MS
    main()
