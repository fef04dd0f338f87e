"""Downloading files, each pinned by its hash."""

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
    """Download a file. Raises NoNetwork or WrongHash, and leaves no file then."""
    try:
        response_context = urllib.request.build_opener().open(url, timeout=TIMEOUT_SECONDS)
        with response_context as response, file.open("wb") as target:
            found = _copy_and_hash(response, target)
    except (urllib.error.URLError, http.client.HTTPException, TimeoutError, ConnectionError) as error:
        file.unlink(missing_ok=True)
        reason = getattr(error, "reason", None) or error
        host = urllib.parse.urlsplit(url).hostname
        raise NoNetwork(
            f"cannot reach {host} ({reason}); check the connection, or set HTTPS_PROXY"
        ) from error
    if found != sha256:
        file.unlink()
        remedy = f"{url} returned a different file, so do not use it"
        raise WrongHash(file=file.name, expected=sha256, found=found, remedy=remedy)


def _copy_and_hash(response: IO[bytes], target: IO[bytes]) -> str:
    """Copy the response and return the SHA-256 of its content."""
    digest = hashlib.sha256()
    while chunk := response.read(CHUNK_BYTES):
        digest.update(chunk)
        target.write(chunk)
    return digest.hexdigest()


def verify_hashes(folder: Path, expected: dict[str, str], *, remedy: str) -> None:
    """Raise WrongHash for the first jar that is missing, unexpected or has another hash."""
    found = {path.name: _sha256_of(path) for path in folder.glob("*.jar")}
    for name in sorted(found.keys() | expected.keys()):
        if found.get(name) != expected.get(name):
            raise WrongHash(
                file=name,
                expected=expected.get(name, "none (the file is not expected)"),
                found=found.get(name, "none (the file is missing)"),
                remedy=remedy,
            )


def _sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
