"""Java programs from Maven repositories."""

from pathlib import Path

from flowkit.local.cache import fingerprint, install_once
from flowkit.local.commands import program, run

REMEDY = "install a JDK 17 or newer and Maven"
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


def jars(name: str, version: str, *artifacts: str) -> Path:
    """A folder with the jars of `artifacts` ("group:artifact:version") and of all they need, fetched once."""

    dependencies = "".join(DEPENDENCY.format(*artifact.split(":")) for artifact in artifacts)
    pom = POM.format(name=name, version=version, dependencies=dependencies)

    def fetch(folder: Path) -> None:
        (folder / "pom.xml").write_text(pom, encoding="utf-8")
        mvn = program("mvn", remedy=REMEDY)
        run([mvn, "-q", "-B", COPY_DEPENDENCIES, f"-DoutputDirectory={folder}"], folder=folder)

    return install_once(name, f"{version}-{fingerprint(pom)}", fetch)
