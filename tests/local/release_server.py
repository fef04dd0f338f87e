"""An HTTP server that serves one release archive."""

import http.server
import io
import tarfile

CONTENT = b"#!/bin/sh\necho temporal version 1.9.1\n"


def pack(content: bytes) -> bytes:
    """Return a release archive that contains a program."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as archive:
        for name, data in (("LICENSE", b"free"), ("temporal", content)):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            archive.addfile(info, io.BytesIO(data))
    return buffer.getvalue()


class Releases(http.server.BaseHTTPRequestHandler):
    """Returns the same archive for each request."""

    archive = pack(CONTENT)

    def do_GET(self) -> None:
        """Return the archive."""
        self.send_response(200)
        self.send_header("Content-Length", str(len(self.archive)))
        self.end_headers()
        self.wfile.write(self.archive)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""
