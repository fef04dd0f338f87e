"""A local Kafka broker in KRaft mode, one node without ZooKeeper: its programs, settings and security."""

from __future__ import annotations

import base64
import re
import shlex
import shutil
import tempfile
import uuid
from contextlib import suppress
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from flowkit.errors import ConfigError
from flowkit.local import sources
from flowkit.local.container import DATA_FOLDER, ContainerImage
from flowkit.local.data_folder import make_folder, write_private
from flowkit.local.errors import DevServerError, translate_write_errors
from flowkit.local.install import (
    Jars,
    find_installed,
    fingerprint,
    install_once,
    require_program,
    run_command,
)
from flowkit.local.ports import HOST, free_port, is_listening
from flowkit.local.process import LocalServer, container_program
from flowkit.local.sources import Finder, Program, Source

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

NODE_ID = 1
CLIENT, CONTROLLER, INTERNAL = "CLIENT", "CONTROLLER", "INTERNAL"
"""Names of the listeners."""
# Kafka's defaults suit a cluster: three replicas, 50 partitions for offsets, 128 MB for log cleaning.
SETTINGS: Mapping[str, object] = {
    "auto.create.topics.enable": "false",
    "group.initial.rebalance.delay.ms": 0,
    "offsets.topic.num.partitions": 1,
    "offsets.topic.replication.factor": 1,
    "transaction.state.log.num.partitions": 1,
    "transaction.state.log.replication.factor": 1,
    "transaction.state.log.min.isr": 1,
    "log.cleaner.dedupe.buffer.size": 4 << 20,
    # The only controller need not tell others twice a second that it is there: a third of an idle broker's time.
    "metadata.max.idle.interval.ms": 0,
    # A killed broker can register again only after its session has expired.
    "broker.heartbeat.interval.ms": 500,
    "broker.session.timeout.ms": 3000,
    "num.network.threads": 2,
    "num.io.threads": 4,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class BrokerPlace:
    """Where a broker listens and keeps its files, as the broker itself sees it."""

    port: int
    controller_port: int
    folder: Path
    listen_on: str = HOST
    """The address that the client listener binds; clients always connect to 127.0.0.1."""


def properties_file(place: BrokerPlace, security: BrokerSecurity) -> str:
    """Return the content of `server.properties`."""
    settings = {**SETTINGS, **_node(place), **_listeners(place, security)}
    client = f"listener.name.{CLIENT.lower()}"
    settings |= {f"{client}.{key}": value for key, value in security.properties(place.folder).items()}
    return "".join(f"{key}={_escaped(str(value))}\n" for key, value in settings.items())


def _node(place: BrokerPlace) -> dict[str, object]:
    return {
        "process.roles": "broker,controller",
        "node.id": NODE_ID,
        "controller.quorum.voters": f"{NODE_ID}@{HOST}:{place.controller_port}",
        "log.dirs": place.folder / "data",
    }


def _listeners(place: BrokerPlace, security: BrokerSecurity) -> dict[str, object]:
    """Return the listeners. The broker connects to itself without security, on a port that it chooses."""
    addresses = {
        CLIENT: f"{place.listen_on}:{place.port}",
        INTERNAL: f"{HOST}:0",
        CONTROLLER: f"{HOST}:{place.controller_port}",
    }
    advertised = {CLIENT: f"{HOST}:{place.port}", INTERNAL: f"{HOST}:0"}
    protocols = {CLIENT: security.protocol, INTERNAL: "PLAINTEXT", CONTROLLER: "PLAINTEXT"}
    return {
        "listeners": _joined(addresses, "://"),
        "advertised.listeners": _joined(advertised, "://"),
        "listener.security.protocol.map": _joined(protocols, ":"),
        "controller.listener.names": CONTROLLER,
        "inter.broker.listener.name": INTERNAL,
    }


def _joined(values: Mapping[str, str], separator: str) -> str:
    return ",".join(f"{key}{separator}{value}" for key, value in values.items())


def _escaped(value: str) -> str:
    """Escape backslashes, which a Java properties file would otherwise remove."""
    return value.replace("\\", "\\\\")


KEY_STORE, TRUST_STORE = "broker.pem", "clients.pem"
_SCRAM_TEXT = re.compile(r"[\w.~@+-]+")
"""What `kafka-storage format --add-scram` reads as one value."""
_PLAIN_MODULE = "org.apache.kafka.common.security.plain.PlainLoginModule"
_SCRAM_MODULE = "org.apache.kafka.common.security.scram.ScramLoginModule"


class SaslMechanism(StrEnum):
    """How a client proves that it knows its password."""

    PLAIN = "PLAIN"
    SCRAM_SHA_256 = "SCRAM-SHA-256"
    SCRAM_SHA_512 = "SCRAM-SHA-512"


@dataclass(frozen=True, kw_only=True, slots=True)
class BrokerTls:
    """The certificates of a broker, as PEM text."""

    certificate: str
    """The certificate of the broker, followed by its chain. It must be valid for 127.0.0.1."""
    private_key: str = field(repr=False)
    """The key of the certificate, unencrypted and as PKCS#8 (`BEGIN PRIVATE KEY`)."""
    client_ca: str | None = None
    """The authority that signs client certificates. Clients need a certificate only if this is set."""

    def properties(self, folder: Path) -> dict[str, str]:
        """Return the settings of the client listener for a broker that sees its files in `folder`."""
        stores = {"ssl.keystore.type": "PEM", "ssl.keystore.location": str(folder / KEY_STORE)}
        if self.client_ca is not None:
            stores |= {"ssl.truststore.type": "PEM", "ssl.truststore.location": str(folder / TRUST_STORE)}
        return {**stores, "ssl.client.auth": "none" if self.client_ca is None else "required"}

    def write_files(self, folder: Path) -> None:
        """Write the files that the settings name. Only this user can read the key."""
        write_private(folder / KEY_STORE, f"{self.private_key.strip()}\n{self.certificate.strip()}\n")
        if self.client_ca is not None:
            (folder / TRUST_STORE).write_text(self.client_ca, encoding="ascii")


@dataclass(frozen=True, kw_only=True, slots=True)
class BrokerSecurity:
    """What a broker requires of its clients. By default nothing, which is Kafka's protocol PLAINTEXT."""

    mechanism: SaslMechanism | None = None
    """How clients authenticate; None if they do not."""
    users: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Passwords by user name. A broker with SCRAM stores them when it starts for the first time."""
    tls: BrokerTls | None = None
    """The certificates of the broker; None for unencrypted connections."""

    def __post_init__(self) -> None:
        scram = self.mechanism not in (None, SaslMechanism.PLAIN)
        for name, password in self.users.items() if scram else ():
            if not (_SCRAM_TEXT.fullmatch(name) and _SCRAM_TEXT.fullmatch(password)):
                raise ConfigError(
                    f"Kafka cannot store name or password of the user {name!r} for {self.mechanism}; "
                    "use letters, digits and . _ ~ @ + -"
                )

    @property
    def protocol(self) -> str:
        """Kafka's name for this combination, which clients use as `security_protocol`."""
        encrypted = self.tls is not None
        if self.mechanism is None:
            return "SSL" if encrypted else "PLAINTEXT"
        return "SASL_SSL" if encrypted else "SASL_PLAINTEXT"

    def properties(self, folder: Path) -> dict[str, str]:
        """Return the settings of the client listener for a broker that sees its files in `folder`."""
        found = self.tls.properties(folder) if self.tls is not None else {}
        if self.mechanism is not None:
            found["sasl.enabled.mechanisms"] = self.mechanism
            found[f"{self.mechanism.lower()}.sasl.jaas.config"] = self._login_module(self.mechanism)
        return found

    def format_arguments(self) -> list[str]:
        """Return the options of `kafka-storage format` that store the users of SCRAM."""
        if self.mechanism in (None, SaslMechanism.PLAIN):
            return []
        users = [
            f"{self.mechanism}=[name={name},password={password}]" for name, password in self.users.items()
        ]
        return [part for user in users for part in ("--add-scram", user)]

    def write_files(self, folder: Path) -> None:
        """Write the certificates, if there are any."""
        if self.tls is not None:
            self.tls.write_files(folder)

    def _login_module(self, mechanism: SaslMechanism) -> str:
        if mechanism is not SaslMechanism.PLAIN:
            return f"{_SCRAM_MODULE} required;"
        return f"{_PLAIN_MODULE} required{''.join(self._plain_users())};"

    def _plain_users(self) -> Iterator[str]:
        for name, password in self.users.items():
            yield f" user_{name}={_quoted(password)}"


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


NAME, VERSION = "kafka", "3.9.1"
SCALA = "2.13"
SLF4J = "1.7.36"
SHA256 = {
    "argparse4j-0.7.0.jar": "65ceb669d88f63306c680f8088bbf765bbca72d288a61a03703000076c3d3f56",
    "audience-annotations-0.12.0.jar": "ffb101fc066360ff3c77457c927fd7967fb096a6ee9e046ab7071447d8208efc",
    "caffeine-2.9.3.jar": "1e0a7bbef1dd791653143f3f05d0e489934bf5481e58a87c9e619cd46b68729b",
    "commons-beanutils-1.9.4.jar": "7d938c81789028045c08c065e94be75fc280527620d5bd62b519d5838532368a",
    "commons-cli-1.4.jar": "fd3c7c9545a9cdb2051d1f9155c4f76b1e4ac5a57304404a6eedb578ffba7328",
    "commons-collections-3.2.2.jar": "eeeae917917144a68a741d4c0dff66aa5c5c5fd85593ff217bced3fc8ca783b8",
    "commons-digester-2.1.jar": "e0b2b980a84fc6533c5ce291f1917b32c507f62bcad64198fff44368c2196a3d",
    "commons-io-2.14.0.jar": "e35d1df7232568ed4b81d9a9ed94a0159b3ff6cf1915cc21eef5cb55d7b157a2",
    "commons-logging-1.2.jar": "daddea1ea0be0f56978ab3006b8ac92834afeefbd9b7e4e6316fca57df0fa636",
    "commons-validator-1.7.jar": "4d74f4ce4fb68b2617edad086df6defdf9338467d2377d2c62e69038e1c4f02f",
    "error_prone_annotations-2.10.0.jar": "a249d4d25dfb86d41e6c82fc335df580189f0c9feeabdc53233fc1e5060724a1",
    "jackson-annotations-2.16.2.jar": "d1cdd269ebaa753d1842933194e17d61958f058952d63e03dbfb3d1d78a6926e",
    "jackson-core-2.16.2.jar": "4f43e2f1430b2d2413e8e5a3d79138e57e891d6a961b18c28ac90859639d8664",
    "jackson-databind-2.16.2.jar": "53b6025d98c357068296e4b134242443a248c2c582800879f1c4ea93b54bafa6",
    "jackson-dataformat-csv-2.16.2.jar": "01a04610def154c50369e8bcd7c5ae1401579f591aa55e88f05093447e24d490",
    "jackson-datatype-jdk8-2.16.2.jar": "3e9b1b59f638b487b5ae0e2f4190fc98f72b0bf661324e7dfc71a69f6b9d4e29",
    "jackson-module-scala_2.13-2.16.2.jar": "1154f6dc8643739c0c3ef4c2a7901ca752b5cca7ebe1908d405ced701a8f3764",
    "jopt-simple-5.0.4.jar": "df26cc58f235f477db07f753ba5a3ab243ebe5789d9f89ecf68dd62ea9a66c28",
    "jose4j-0.9.4.jar": "9012aa4c20319d35159030c3bdecade66863030a98338bfdf73a5238849fb9d9",
    "kafka-clients-3.9.1.jar": "7568b998572d256f0b7bc0afdc1b7a2588b8b08415c62ce314c864a6851ae9d9",
    "kafka-group-coordinator-3.9.1.jar": "fd30310533df51b17d14beb8eb8c9006a9ebb90b536c319776429e413f622a69",
    "kafka-group-coordinator-api-3.9.1.jar": "cb267d841def1172d8db24a830936f1c6aaf29c3de5bdbc5bbc42b67d8cb82c0",
    "kafka-metadata-3.9.1.jar": "35c35118d4abb0b747ad68d1e0be00d5bd02206b462ad76ebbcd85b33436f13a",
    "kafka-raft-3.9.1.jar": "0d4236cf868f8668c74c49bec4bed41e400bb13d6d381a0f8e9843585b2f159f",
    "kafka-server-3.9.1.jar": "02b5a92645865e3152e9d1d829f6d4c4b4272f637b7fe4a2b00cabcbcd8df6f4",
    "kafka-server-common-3.9.1.jar": "99f1f5f81e9d39cfbe5c96ab8e3854be8deca465937192c9a6e2f231678d31f6",
    "kafka-storage-3.9.1.jar": "a3041e6192a37e5508519d776f8af93b74d3fd23174b03e270c0394f1c77b59f",
    "kafka-storage-api-3.9.1.jar": "f466777625641d4bca1314d80206eafa9e2494326496ad626489ba0a0ef479fc",
    "kafka-tools-api-3.9.1.jar": "c365c872ffc9a04886f248c5fd90067829ed4064fcd8fe5e12611b163cd053b4",
    "kafka-transaction-coordinator-3.9.1.jar": "45b852f2e6e501d4dbdd43b97c4057e6cb6827b76e5aabcffcae8b8e2918554f",
    "kafka_2.13-3.9.1.jar": "5631c61356d55611c158291a69ad028f3c4fed5d0a610c62a0853c65c89d10f6",
    "lz4-java-1.8.0.jar": "d74a3334fb35195009b338a951f918203d6bbca3d1d359033dc33edd1cadc9ef",
    "metrics-core-2.2.0.jar": "6b7a14a6f34c10f8683f7b5e2f39df0f07b58c7dff0e468ebbc713905c46979c",
    "metrics-core-4.1.12.1.jar": "cec34936faa625039f4e46123eccaa10a9eb9d9a40c6075830cd81330e259cf9",
    "netty-buffer-4.1.105.Final.jar": "cc1b0108a60b1eb69bd01a10922851a166c58972cc0683f2116a9e8e7ecdaf0b",
    "netty-codec-4.1.105.Final.jar": "c4f62480b408fb835b454c74cf6394a4c7088ffdaec78742fcece816c46bb58e",
    "netty-common-4.1.105.Final.jar": "399a8045fb43861afb7fc1ef3371f95a0b176692fb268f4867cff4957e63fd25",
    "netty-handler-4.1.105.Final.jar": "5a6945cf1de374628b37ab1c35a4c47c2f5616db3a94b150720641477112be8e",
    "netty-resolver-4.1.105.Final.jar": "7202edd076a1edab50fdb0f3e54f56a02129b326296d9f35f4194f8cfb9b96ef",
    "netty-transport-4.1.105.Final.jar": "be9b8a2f86685a876e469c904cb9fce53a1e826e178d44d2b1d92f6a99054737",
    "netty-transport-classes-epoll-4.1.105.Final.jar": "a43bf94f784eb759c14f0b0c7e1c5985a64879e8c7ab21ba7c0c80f7a9382b30",
    "netty-transport-native-epoll-4.1.105.Final.jar": "61f09ce16f0fd25e57a0a732f8fb79344f6b95051d88ac50a28874ad92e6d149",
    "netty-transport-native-unix-common-4.1.105.Final.jar": "7db91b72aae19e1cdca13c7fa76d57db20cbaf5b1e770563909a4437c63eb5cb",
    "paranamer-2.8.jar": "688cb118a6021d819138e855208c956031688be4b47a24bb615becc63acedf07",
    "pcollections-4.0.1.jar": "1f82766d7c3221930854033bebff5073ea46b43f27326074bbe15d148c18bfb3",
    "scala-collection-compat_2.13-2.10.0.jar": "bb10091bd55131a5327bdeddede74e5d8a695acab24a97567111784f2f427299",
    "scala-java8-compat_2.13-1.0.2.jar": "90d5b13656be93fb779b8d7c723efa2498a34af06273bb5204afb65f85a20c1b",
    "scala-library-2.13.15.jar": "8e4dbc3becf70d59c787118f6ad06fab6790136a0699cd6412bc9da3d336944e",
    "scala-logging_2.13-3.9.5.jar": "87a3017d3f43e6ace7566fe4c3d615134c6914ff871c8d64bb32ca1d996d0545",
    "scala-reflect-2.13.15.jar": "78d0cc350e1ee42d87c6e11cf5b0dc7bf0b70829c00aa38f27bfb019d439dc11",
    "slf4j-api-1.7.36.jar": "d3ef575e3e4979678dc01bf1dcce51021493b4d11fb7f1be8ad982877c16a1c0",
    "slf4j-simple-1.7.36.jar": "2f39bed943d624dfa8f4102d0571283a10870b6aa36f197a8a506f147010c10f",
    "snappy-java-1.1.10.5.jar": "0f3f1857ed33116583f480b4df5c0218836c47bfbc9c6221c0d73f356decf37b",
    "zookeeper-3.8.4.jar": "2d77b152039e7f85dc5438a9304febff86a2f3e55c88976a8be309af39028e97",
    "zookeeper-jute-3.8.4.jar": "93e854b55d731e745bafec187e2e7bf3389fd2a88e2fc8d1a3c1b9110284b284",
    "zstd-jni-1.5.6-4.jar": "793ca8734aa15687e7e64564eab8b6ae9ee2720eae27aa663074682144b1c386",
}
JARS = Jars(
    NAME,
    VERSION,
    f"org.apache.kafka:kafka_{SCALA}:{VERSION}",
    f"org.slf4j:slf4j-simple:{SLF4J}",
    sha256=SHA256,
)


NAME = "kafka-classes"
ARCHIVE_FILE = "kafka.jsa"
# Otherwise, a JVM that ignores the archive says so in the broker's log at every start.
QUIET = ("-Xlog:cds=off", "-Xlog:cds+dynamic=off")


def archive_options(java: str, classpath: str) -> list[str]:
    """Return the options with which the JVM uses the archive, or none if it has not been created."""
    folder = find_installed(NAME, _version(java, classpath))
    return (
        [f"-XX:SharedArchiveFile={folder / ARCHIVE_FILE}", *QUIET]
        if folder and (folder / ARCHIVE_FILE).exists()
        else []
    )


def recording_option(archive: Path) -> str:
    """Return the option with which a JVM creates the archive when it exits."""
    return f"-XX:ArchiveClassesAtExit={archive}"


def create_archive(java: str, classpath: str, record: Callable[[Path], None]) -> None:
    """Create the archive once. `record(file)` runs a broker that creates it; a JVM that cannot leaves none."""
    with suppress(DevServerError):
        install_once(NAME, _version(java, classpath), lambda folder: record(folder / ARCHIVE_FILE))


def _version(java: str, classpath: str) -> str:
    program = Path(java).resolve()
    return fingerprint(f"{program} of {program.stat().st_mtime_ns}, {classpath}")


IMAGE = f"docker.io/apache/kafka:{VERSION}"
IMAGE_PROGRAMS = Path("/opt/kafka/bin")
START_PROGRAMS = ("kafka-server-start", "kafka-server-start.sh")
REMEDY = "install a JDK 17 or newer and Maven, or set KAFKA_BOOTSTRAP_SERVERS to a running broker"
HEAP = "-Xmx256m"
# The fast compiler suits a broker that lives for minutes. Only the line that reports readiness is logged
# below the level of warnings.
JVM_FLAGS = (
    *(HEAP, "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"),
    *("-Dorg.slf4j.simpleLogger.defaultLogLevel=warn", "-Dorg.slf4j.simpleLogger.showDateTime=true"),
    "-Dorg.slf4j.simpleLogger.dateTimeFormat=yyyy-MM-dd HH:mm:ss,SSS",
    "-Dorg.slf4j.simpleLogger.log.kafka.server.KafkaRaftServer=info",
)


def kafka_program(allowed: Sequence[Source]) -> Program:
    """Return Kafka from the first allowed source that has it. Raises InstallFailed."""
    finders: dict[Source, Finder] = {
        Source.PATH: _on_path,
        Source.CONTAINER: partial(container_program, IMAGE),
        Source.CACHE: partial(_from_maven, Source.CACHE),
        Source.DOWNLOAD: partial(_from_maven, Source.DOWNLOAD),
    }
    return sources.select_program("Kafka", finders, allowed)


def format_command(program: Program, arguments: Sequence[str]) -> list[str]:
    """Return the command that formats the storage of a broker, outside a container."""
    if program.source is Source.PATH:
        return [str(storage_program(Path(program.install()))), "format", *arguments]
    return [*_java(program), "kafka.tools.StorageTool", "format", *arguments]


def start_command(program: Program, settings: Path, record_to: Path | None = None) -> list[str]:
    """Return the command that runs a broker with a settings file, outside a container.

    With `record_to`, a broker that runs from jars writes the classes that it has loaded to this file when it stops.
    """
    if program.source is Source.PATH:
        return [program.install(), str(settings)]
    java, *options = _java(program)
    recording = [recording_option(record_to)] if record_to else []
    return [java, *recording, *options, "kafka.Kafka", str(settings)]


def archive_classes(program: Program, record: Callable[[Path], None]) -> None:
    """Let `record(file)` run a broker once, so that brokers that run from jars start faster from then on."""
    if program.source in (Source.CACHE, Source.DOWNLOAD):
        create_archive(require_program("java", remedy=REMEDY), program.install(), record)


def storage_program(start: Path) -> Path:
    """Return the program that formats storage; it is beside the one that starts a broker."""
    return start.with_name(start.name.replace("server-start", "storage"))


def _java(program: Program) -> list[str]:
    java, classpath = require_program("java", remedy=REMEDY), program.install()
    return [java, *JVM_FLAGS, *archive_options(java, classpath), "-cp", classpath]


def _on_path() -> Program | None:
    """Return Kafka on PATH if it can format its storage, which versions with ZooKeeper cannot."""
    for name in START_PROGRAMS:
        start = shutil.which(name)
        if start is not None and storage_program(Path(start)).exists():
            return Program(source=Source.PATH, description=start, install=partial(str, start))
    return None


def _from_maven(source: Source) -> Program | None:
    if source is Source.CACHE and not JARS.is_cached():
        return None
    requires = ("java",) if source is Source.CACHE else ("java", "mvn")
    return Program(
        source=source, description=f"Apache {NAME.title()} {VERSION}", install=_classpath, requires=requires
    )


def _classpath() -> str:
    require_program("java", remedy=REMEDY)
    return f"{JARS.folder()}/*"


STARTED = "Kafka Server started"
"""The broker logs this text when it serves requests."""
SETTINGS_FILE = "server.properties"


class Kafka(LocalServer):
    """A Kafka broker. Topics, records and offsets survive `stop`, `kill` and `restart`.

    The program comes from PATH, a container, the cache or Maven; `FLOWKIT_SERVERS` limits and orders
    these sources. The broker uses free ports unless they are given. It creates no topics by itself.
    `security` says how clients connect; by default without TLS and without passwords.
    """

    name = "kafka"

    def __init__(
        self,
        folder: Path,
        *,
        port: int | None = None,
        controller_port: int | None = None,
        security: BrokerSecurity | None = None,
    ) -> None:
        self.port = port or free_port()
        self.security = security or BrokerSecurity()
        self._controller_port = controller_port or free_port()
        self._record_to: Path | None = None
        super().__init__(folder, self.port, self._controller_port)

    @property
    def bootstrap_servers(self) -> str:
        """The address for clients, as `host:port`."""
        return f"{HOST}:{self.port}"

    def find_program(self) -> Program:
        """Return the program from the first source that has one. Raises InstallFailed or ConfigError."""
        return kafka_program(sources.allowed_sources())

    @classmethod
    def install(cls) -> None:
        """Pull the image or download Kafka, unless it is installed. Archive its classes, for faster starts."""
        program = kafka_program(sources.allowed_sources())
        program.install()
        archive_classes(program, cls._record_classes)

    @classmethod
    def _record_classes(cls, file: Path) -> None:
        with tempfile.TemporaryDirectory() as folder:
            broker = cls(Path(folder))
            broker._record_to = file
            with broker:
                pass

    def environment(self) -> Mapping[str, str]:
        """Return the settings of a distribution on PATH: its heap and the folder of its own logs."""
        return {"KAFKA_HEAP_OPTS": HEAP, "LOG_DIR": str(self._home / "logs")}

    def command(self) -> list[str]:
        """Return the command for the broker; format its storage first if it has none."""
        self.program.install()
        if self.program.container is not None:
            return self._in_container(self.program.container)
        settings = self._write_files(self._home, HOST)
        if not self._formatted:
            run_command(format_command(self.program, self._format_arguments(settings)), folder=self._home)
        return start_command(self.program, settings, self._record_to)

    def is_ready(self) -> bool:
        """Whether the broker serves requests."""
        return is_listening(self.port) and STARTED in self.read_log()

    @property
    def _home(self) -> Path:
        return self.folder / "kafka"

    @property
    def _formatted(self) -> bool:
        return (self._home / "data" / "meta.properties").exists()

    def _write_files(self, folder: Path, listen_on: str) -> Path:
        """Write settings and certificates for a broker that sees them in `folder`; return the settings' path there."""
        place = BrokerPlace(
            port=self.port, controller_port=self._controller_port, folder=folder, listen_on=listen_on
        )
        with translate_write_errors(self.folder, what=f"{self.name} cannot start"):
            make_folder(self._home)
            self.security.write_files(self._home)
            file = self._home / SETTINGS_FILE
            write_private(file, properties_file(place, self.security))
        return folder / SETTINGS_FILE

    def _format_arguments(self, settings: Path) -> list[str]:
        cluster_id = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        named = [f"--cluster-id={cluster_id}", "--config", str(settings), "--ignore-formatted"]
        return [*named, *self.security.format_arguments()]

    def _in_container(self, container: ContainerImage) -> list[str]:
        """Return the command for a container, in which a shell formats the storage and starts the broker."""
        settings = self._write_files(Path(DATA_FOLDER), "0.0.0.0")
        start = IMAGE_PROGRAMS / "kafka-server-start.sh"
        steps = [f"export KAFKA_HEAP_OPTS={HEAP} LOG_DIR=/tmp/kafka-logs"]
        if not self._formatted:
            steps.append(
                shlex.join([str(storage_program(start)), "format", *self._format_arguments(settings)])
            )
        steps.append(shlex.join(["exec", str(start), str(settings)]))
        return self.container_command(
            container, "/bin/sh", {self.port: self.port}, self._home, ["-c", " && ".join(steps)]
        )
