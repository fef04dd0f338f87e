"""Topics: their creation; and those of external workers, with their names and the first offsets of the groups."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Self

from flowkit.bridge.kafka import clients
from flowkit.bridge.kafka.offsets import committed_offsets
from flowkit.errors import ConfigError, KafkaUnavailable
from flowkit.validation.arguments import require
from flowkit.validation.invalid import problem_with
from flowkit.validation.values import TOPIC

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

    from flowkit.bridge.kafka.clients import KafkaConnection
    from flowkit.config import CoordinatorConfig

_logger = logging.getLogger("flowkit.bridge")

CREATE_TIMEOUT_SEC = 20.0


def worker_group(role: str) -> str:
    """Return the consumer group that all workers of a role share."""
    return f"workers.{role}.v1"


@dataclass(frozen=True, kw_only=True)
class Topics:
    """The names of the topics."""

    cmd_format: str
    status_format: str
    announce: str
    query: str
    reply: str
    signals: str

    @classmethod
    def of(cls, cfg: CoordinatorConfig) -> Topics:
        """Return the topics of the settings. Raise ConfigError if two of them have the same name."""
        made = cls(
            cmd_format=cfg.topic_cmd_fmt,
            status_format=cfg.topic_status_fmt,
            announce=cfg.topic_worker_announce,
            query=cfg.topic_query,
            reply=cfg.topic_reply,
            signals=cfg.topic_signals,
        )
        for name in ("topic_cmd_fmt", "topic_status_fmt"):
            if "{type}" not in getattr(cfg, name):
                raise ConfigError(
                    f"{name} is {getattr(cfg, name)!r}, so all roles would share one topic; "
                    "put {type} where the role belongs"
                )
        made.all(cfg.worker_types or ["role"])
        return made

    def cmd(self, role: str) -> str:
        """Return the topic on which the workers of a role receive commands."""
        return _topic(self.cmd_format, role, "topic_cmd_fmt")

    def status(self, role: str) -> str:
        """Return the topic on which the workers of a role report."""
        return _topic(self.status_format, role, "topic_status_fmt")

    def all(self, roles: Iterable[str]) -> tuple[str, ...]:
        """Return all topics for these roles. Raise ConfigError if two of them have the same name."""
        named = [
            ("topic_worker_announce", self.announce),
            ("topic_query", self.query),
            ("topic_reply", self.reply),
            ("topic_signals", self.signals),
        ]
        for role in dict.fromkeys(roles):
            named += [(f"topic_cmd_fmt for role {role!r}", self.cmd(role))]
            named += [(f"topic_status_fmt for role {role!r}", self.status(role))]
        check_distinct(named)
        return tuple(topic for _, topic in named)


def check_distinct(named: Iterable[tuple[str, str]]) -> None:
    """Raise ConfigError if two settings, each given with its topic, have the same topic."""
    owner: dict[str, str] = {}
    for setting, topic in named:
        # Kafka maps both characters to one in the names of its metrics and refuses such pairs of topics.
        if other := owner.get(topic.replace(".", "_")):
            raise ConfigError(f"{other} and {setting} give the same topic {topic!r}; change one of them")
        owner[topic.replace(".", "_")] = setting


def check_topic(setting: str, topic: str) -> None:
    """Raise ConfigError if Kafka does not allow the name of a topic."""
    require(problem_with(topic, TOPIC, f"{setting}.topic"))


def _join_names(topics: Collection[str]) -> str:
    return ", ".join(sorted(topics))


@cache
def _topic(template: str, role: str, setting: str) -> str:
    topic = template.replace("{type}", role)
    check_topic(f"{setting} for role {role!r}:", topic)
    return topic


@dataclass(frozen=True, kw_only=True)
class SeedResult:
    """What `Provisioner.seed` did for the group of one role."""

    committed: Mapping[int, int]
    """The offset that it committed for each partition that had none."""
    had_members: bool = False
    """Whether the group had members, so that Kafka accepted no offsets from outside."""


class TopicCreator:
    """Creates topics, as the settings `kafka_create_topics` and `kafka_replication_factor` say."""

    def __init__(self, connection: KafkaConnection, cfg: CoordinatorConfig) -> None:
        self._connection = connection
        self._cfg = cfg
        self.created: set[str] = set()
        """The topics that this object has created."""

    async def ensure(self, wanted: Mapping[str, int]) -> None:
        """Create the topics that do not exist, each with a number of partitions.

        If the setting `kafka_create_topics` is off, only check that all topics exist. Raise KafkaUnavailable if Kafka
        or its ACLs prevent either.
        """
        async with _Admin(self._connection) as admin:
            missing = await self._find_missing(admin, wanted)
            if missing and not self._cfg.kafka_create_topics:
                raise KafkaUnavailable(
                    f"Kafka at {self._connection.bootstrap} has no topics {_join_names(missing)}, or its "
                    "ACLs hide them; create them, allow this user to describe them, or set kafka_create_topics"
                )
            if missing:
                await self._create(admin, {topic: wanted[topic] for topic in missing})
                await self._wait_for(admin, missing)

    async def _find_missing(self, admin: _Admin, wanted: Iterable[str]) -> set[str]:
        return set(wanted) - (await admin.usable_partitions()).keys()

    async def _create(self, admin: _Admin, partitions: Mapping[str, int]) -> None:
        for topic, code, message in await admin.create(partitions, self._cfg.kafka_replication_factor):
            name = await self._read_outcome(topic, code, message)
            if name:
                _logger.info("created the Kafka topic %s with %d partitions", name, partitions[name])
                self.created.add(name)

    async def _read_outcome(self, topic: str, code: int, message: str | None) -> str | None:
        """Return the topic if this call created it, and None if another client did. Raise KafkaUnavailable."""
        from aiokafka import errors

        error = errors.for_code(code)
        if error is errors.NoError:
            return topic
        if error is errors.TopicAlreadyExistsError:
            return None
        where = f"Kafka at {self._connection.bootstrap} did not create the topic {topic}"
        if error in (errors.TopicAuthorizationFailedError, errors.ClusterAuthorizationFailedError):
            raise KafkaUnavailable(
                f"{where}: the ACLs do not allow it; grant CREATE on the topic or on the cluster, or create "
                "the topics yourself and unset kafka_create_topics"
            )
        raise KafkaUnavailable(
            f"{where}: {message or error.__name__}; check kafka_replication_factor "
            f"({self._cfg.kafka_replication_factor}) and kafka_cmd_partitions ({self._cfg.kafka_cmd_partitions})"
        )

    async def _wait_for(self, admin: _Admin, topics: Collection[str]) -> None:
        """Wait until every partition of the new topics has a leader."""
        from aiokafka.errors import LeaderNotAvailableError

        async def check() -> None:
            if missing := await self._find_missing(admin, topics):
                raise LeaderNotAvailableError(
                    f"no leader, or no ACL to describe them: {_join_names(missing)}"
                )

        await clients.call_with_retries(
            check,
            what=f"creating the topics {_join_names(topics)}",
            address=self._connection.bootstrap,
            limit=CREATE_TIMEOUT_SEC,
        )


class Provisioner:
    """Creates the topics and commits the first offsets of the workers' groups."""

    def __init__(self, connection: KafkaConnection, cfg: CoordinatorConfig) -> None:
        self._connection = connection
        self._cfg = cfg
        self._topics = Topics.of(cfg)
        self._creator = TopicCreator(connection, cfg)

    async def ensure(self, roles: Iterable[str]) -> None:
        """Create the topics that do not exist. Raise KafkaUnavailable if Kafka or its ACLs prevent that.

        If the setting `kafka_create_topics` is off, only check that all topics exist.
        """
        await self._creator.ensure(self._partitions_by_topic(list(roles)))

    def _partitions_by_topic(self, roles: list[str]) -> dict[str, int]:
        wanted = dict.fromkeys(self._topics.all(roles), 1)
        for role in roles:
            wanted |= dict.fromkeys(
                (self._topics.cmd(role), self._topics.status(role)), self._cfg.kafka_cmd_partitions
            )
        return wanted

    async def seed(self, role: str) -> SeedResult:
        """Commit an offset for each partition of the command topic for which the workers' group has none.

        Without it, a worker that joins begins at the end of the topic and never reads the earlier commands.
        The offset is 0 if this provisioner created the topic, else the end of the partition. Kafka accepts
        such offsets only while the group has no members; otherwise nothing is committed.
        """
        topic, group = self._topics.cmd(role), worker_group(role)
        what = f"committing the first offsets of the group {group}"
        seeding = _Seeding(self._connection, topic, group, from_start=topic in self._creator.created)
        return await clients.call_with_retries(
            seeding.run, what=what, address=self._connection.bootstrap, limit=CREATE_TIMEOUT_SEC
        )


class _Admin:
    """An admin client, as a context manager."""

    def __init__(self, connection: KafkaConnection) -> None:
        self._connection = connection
        self._client: Any = None

    async def __aenter__(self) -> Self:
        await self._call(self._start, "connecting")
        return self

    async def __aexit__(self, *_: object) -> None:
        await clients.close(self._client)

    async def _start(self) -> None:
        from aiokafka.admin import AIOKafkaAdminClient

        timeout_ms = int(CREATE_TIMEOUT_SEC * 1000)
        self._client = await clients.start(
            AIOKafkaAdminClient(**self._connection.options(), request_timeout_ms=timeout_ms)
        )

    async def _call(self, call: Any, what: str) -> Any:
        return await clients.call_with_retries(
            call, what=what, address=self._connection.bootstrap, limit=CREATE_TIMEOUT_SEC
        )

    async def usable_partitions(self) -> dict[str, int]:
        """Return the number of partitions of each topic whose partitions all have a leader.

        The request names no topics, because a broker may create those that a request names.
        """
        topics = await self._call(self._client.describe_topics, "listing the topics")
        return {
            topic["topic"]: len(topic["partitions"])
            for topic in topics
            if topic["partitions"] and all(each["leader"] >= 0 for each in topic["partitions"])
        }

    async def committed(self, group: str, topic: str, partitions: Collection[int]) -> dict[int, int | None]:
        """Return the committed offset of each partition; None where the group has none."""
        return await committed_offsets(self._client, group, topic, partitions)

    async def create(self, partitions: Mapping[str, int], replicas: int) -> list[tuple[str, int, str | None]]:
        """Create topics and return, for each, its name, the error code and the error text."""
        from aiokafka.admin import NewTopic

        # aiokafka accepts -1 replicas only together with an explicit, here empty, list of assignments.
        assignments: dict[str, Any] = {"replica_assignments": {}} if replicas == -1 else {}
        topics = [NewTopic(name, count, replicas, **assignments) for name, count in partitions.items()]
        response = await self._call(lambda: self._client.create_topics(topics), "creating topics")
        return [(name, code, next(iter(rest), None)) for name, code, *rest in response.topic_errors]


class _Seeding:
    """Commits first offsets for a group without joining it, with clients that it opens and closes."""

    def __init__(self, connection: KafkaConnection, topic: str, group: str, *, from_start: bool) -> None:
        self._connection = connection
        self._topic = topic
        self._group = group
        self._from_start = from_start

    async def run(self) -> SeedResult:
        """Commit the missing offsets and return them."""
        async with _Admin(self._connection) as admin:
            count = (await admin.usable_partitions()).get(self._topic)
            if count is None:
                raise KafkaUnavailable(
                    f"Kafka at {self._connection.bootstrap} has no topic {self._topic}, or its ACLs hide it; "
                    "create the topics first, or grant DESCRIBE on it"
                )
            consumer = await self._open_consumer()
            try:
                return await self._commit(admin, consumer, range(count))
            finally:
                await clients.close(consumer)

    async def _open_consumer(self) -> Any:
        """Return a consumer that names the group but does not join it, because it assigns itself partitions."""
        from aiokafka import AIOKafkaConsumer

        timeout_ms = int(clients.REQUEST_TIMEOUT_SEC * 1000)
        return await clients.start(
            AIOKafkaConsumer(
                **self._connection.options(),
                group_id=self._group,
                enable_auto_commit=False,
                request_timeout_ms=timeout_ms,
            )
        )

    async def _commit(self, admin: _Admin, consumer: Any, partitions: Collection[int]) -> SeedResult:
        from aiokafka import TopicPartition
        from aiokafka.errors import CommitFailedError

        places = {number: TopicPartition(self._topic, number) for number in partitions}
        consumer.assign(list(places.values()))
        # The ends are read first: what another bridge sends after it has committed offsets lies behind them.
        ends = await consumer.end_offsets(list(places.values()))
        committed = await admin.committed(self._group, self._topic, partitions)
        first = {
            number: 0 if self._from_start else ends[place]
            for number, place in places.items()
            if committed[number] is None
        }
        if not first:
            return SeedResult(committed={})
        try:
            await consumer.commit({places[number]: offset for number, offset in first.items()})
        except CommitFailedError:
            _logger.info("the group %s has members, so its first offsets are theirs to commit", self._group)
            return SeedResult(committed={}, had_members=True)
        return SeedResult(committed=first)
