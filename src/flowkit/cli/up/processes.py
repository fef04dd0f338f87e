"""The processes of one `flowkit up`: servers, an engine, a bridge and workers."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from flowkit.cli.options import DEFAULT_MONGO_URL
from flowkit.cli.up.plan import UpPart, make_exports
from flowkit.config import split_settings
from flowkit.local import process as flowkit_process
from flowkit.local.data_folder import write_private
from flowkit.local.kafka import Kafka
from flowkit.local.mongo import MongoServer
from flowkit.local.ports import free_port
from flowkit.local.process import FlowkitProcess
from flowkit.local.temporal import TemporalServer

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from flowkit.cli.up.plan import UpPlan
    from flowkit.local.process import LocalServer, ServerProcess


_CONFIG_FILES = ("engine.config.json", "worker.config.json")


@dataclass(kw_only=True)
class Processes:
    """The processes that one `flowkit up` starts."""

    temporal: TemporalServer | None
    mongo: MongoServer | None
    kafka: Kafka | None = None
    exports: Mapping[str, str]
    """Environment variables with which other programs reach them."""
    engine: FlowkitProcess | None = None
    bridge: FlowkitProcess | None = None
    """Connects the engine to external workers."""
    products: list[FlowkitProcess] = field(default_factory=list)
    """The processes of products, which start and stop with the bridge."""
    workers: list[FlowkitProcess] = field(default_factory=list)

    @property
    def servers(self) -> list[LocalServer]:
        """The servers, which all other processes need."""
        return [server for server in (self.temporal, self.mongo, self.kafka) if server is not None]

    @property
    def flowkit(self) -> list[FlowkitProcess]:
        """The engine, the bridge, the processes of products, and the workers."""
        single = (self.engine, self.bridge)
        return [*(each for each in single if each is not None), *self.products, *self.workers]

    @property
    def all(self) -> list[ServerProcess]:
        """All processes, in start order."""
        return [*self.servers, *self.flowkit]


def create_processes(plan: UpPlan, folder: Path) -> Processes:
    """Create the processes of a plan, with data and logs in a folder. Starts nothing."""
    processes = _create_servers(plan, folder)
    options, verbose = plan.options, ["--verbose"] if plan.options.verbose else []
    engine_config, worker_config = _config_options(plan, folder)
    if UpPart.ENGINE in plan.parts:
        processes.engine = flowkit_process.engine_process(
            folder,
            functions=options.functions,
            roles=options.roles,
            flows=options.flows,
            options=[*verbose, *engine_config],
            environment=processes.exports,
        )
    if plan.starts_bridge:
        processes.bridge = flowkit_process.bridge_process(
            folder, options.external, options=[*verbose, *engine_config], environment=processes.exports
        )
    web_ui = {"TEMPORAL_UI_URL": processes.temporal.ui_url} if processes.temporal else {}
    processes.products = [
        FlowkitProcess(
            folder,
            name,
            [*process.command, *verbose, *process.options(plan.ports.products[name], plan.uses_kafka)],
            {**processes.exports, **web_ui},
        )
        for name, process in plan.products.items()
    ]
    if UpPart.WORKER in plan.parts:
        slots = ["--concurrency", str(options.concurrency)] if options.concurrency else []
        processes.workers = flowkit_process.worker_processes(
            folder,
            options.handlers,
            count=options.workers or 1,
            options=[*verbose, *slots, *worker_config],
            environment=processes.exports,
        )
    for each in processes.flowkit:
        each.health_port = free_port(plan.ports.health_port(each.name))
    return processes


def write_config(plan: UpPlan, folder: Path) -> None:
    """Write the settings of `--config` for the engine and for the workers. Raises ConfigError if one is invalid."""
    if plan.options.config is not None:
        parts = split_settings(plan.options.config)
        for name, part in zip(_CONFIG_FILES, parts, strict=True):
            write_private(folder / name, json.dumps(part))


def _config_options(plan: UpPlan, folder: Path) -> list[list[str]]:
    """Return the options of the engine, and those of the workers, that name their settings."""
    if plan.options.config is None:
        return [[], []]
    return [["--config", str(folder / name)] for name in _CONFIG_FILES]


def _create_servers(plan: UpPlan, folder: Path) -> Processes:
    ports = plan.ports
    temporal = mongo = kafka = None
    if plan.starts_temporal:
        temporal = TemporalServer(
            folder, port=ports.temporal, ui_port=ports.ui, http_port=ports.temporal_http
        )
    if plan.starts_mongo:
        mongo = MongoServer(folder, port=ports.mongo)
    if plan.starts_kafka:
        kafka = Kafka(folder, port=ports.kafka)
    address = temporal.address if temporal else os.environ.get("TEMPORAL_ADDRESS")
    url = mongo.url if mongo else os.environ.get("MONGO_URL") or DEFAULT_MONGO_URL
    brokers = kafka.bootstrap_servers if kafka else os.environ.get("KAFKA_BOOTSTRAP_SERVERS")
    exports = make_exports(plan, address, url, brokers)
    return Processes(temporal=temporal, mongo=mongo, kafka=kafka, exports=exports)
