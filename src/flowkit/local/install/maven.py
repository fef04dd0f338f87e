"""Java programs from Maven repositories."""

from collections.abc import Mapping
from pathlib import Path

from flowkit.local.install.cache import find_installed, fingerprint, install_once
from flowkit.local.install.commands import require_program, run_command
from flowkit.local.install.download import verify_hashes

REMEDY = "install a JDK 17 or newer and Maven"
WRONG_HASH_REMEDY = (
    "delete it from Maven's local repository (~/.m2/repository) and try again; if that does not help, "
    "your Maven uses a remote repository whose file differs from the one on Maven Central"
)
# Maven itself and this plugin are not pinned: they come from the machine and the user's Maven settings.
COPY_DEPENDENCIES = "org.apache.maven.plugins:maven-dependency-plugin:2.8:copy-dependencies"
POM = """\
<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>flowkit.dev</groupId>
  <artifactId>{name}</artifactId>
  <version>{version}</version>
  <dependencies>{dependencies}
  </dependencies>
</project>
"""
DEPENDENCY = """
    <dependency><groupId>{}</groupId><artifactId>{}</artifactId><version>{}</version></dependency>"""


class Jars:
    """Maven artifacts ("group:artifact:version") and their dependencies, each jar pinned by its SHA-256."""

    def __init__(self, name: str, version: str, *artifacts: str, sha256: Mapping[str, str]) -> None:
        dependencies = "".join(DEPENDENCY.format(*artifact.split(":")) for artifact in artifacts)
        self._name = name
        self._sha256 = dict(sha256)
        self._pom = POM.format(name=name, version=version, dependencies=dependencies)
        self._version = f"{version}-{fingerprint(self._pom + repr(sorted(self._sha256.items())))}"

    def is_cached(self) -> bool:
        """Whether the jars are in the cache."""
        return find_installed(self._name, self._version) is not None

    def folder(self) -> Path:
        """Return the folder of the jars; download and verify them first if they are not in the cache."""
        return install_once(self._name, self._version, self._fetch)

    def _fetch(self, folder: Path) -> None:
        (folder / "pom.xml").write_text(self._pom, encoding="utf-8")
        mvn = require_program("mvn", remedy=REMEDY)
        run_command([mvn, "-q", "-B", COPY_DEPENDENCIES, f"-DoutputDirectory={folder}"], folder=folder)
        verify_hashes(folder, self._sha256, remedy=WRONG_HASH_REMEDY)
