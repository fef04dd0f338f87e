"""Files from the network, each pinned by its hash."""

import hashlib
import http.client
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import IO

from flowkit.local.errors import NoNetwork, WrongHash

TIMEOUT_SECONDS = 30.0
CHUNK_BYTES = 1 << 20


def fetch(url: str, file: Path, *, sha256: str) -> None:
    """Download a file. NoNetwork names the host that does not answer, WrongHash both hashes; no file is left then."""
    try:
        response_context = urllib.request.build_opener().open(url, timeout=TIMEOUT_SECONDS)
        with response_context as response, file.open("wb") as target:
            found = _copy_and_hash(response, target)
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
        file.unlink(missing_ok=True)
        reason = getattr(error, "reason", None) or error
        host = urllib.parse.urlsplit(url).hostname
        raise NoNetwork(
            f"{host} cannot be reached ({reason}); connect to a network, or set HTTPS_PROXY"
        ) from error
    if found != sha256:
        file.unlink()
        remedy = f"whoever answers for {url} serves another file: do not use it"
        raise WrongHash(file=file.name, expected=sha256, found=found, remedy=remedy)


def _copy_and_hash(response: IO[bytes], target: IO[bytes]) -> str:
    """Copy, and answer the hash of what was copied."""
    digest = hashlib.sha256()
    while chunk := response.read(CHUNK_BYTES):
        digest.update(chunk)
        target.write(chunk)
    return digest.hexdigest()


def verify_hashes(folder: Path, expected: dict[str, str], *, remedy: str) -> None:
    """WrongHash for the first file whose hash is not the expected one; a file too many or too few has none."""
    found = {path.name: _sha256_of(path) for path in folder.glob("*.jar")}
    for name in sorted(found.keys() | expected.keys()):
        if found.get(name) != expected.get(name):
            raise WrongHash(
                file=name,
                expected=expected.get(name, "none, for it is not expected"),
                found=found.get(name, "none, for it is not there"),
                remedy=remedy,
            )


def _sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
