"""A bare Starlette route that reads what `flow.status` reads, and returns it as JSON.

It runs on the server of the gateway, without JSON-RPC, permissions and the rules that derive statuses.
Run: `python -m benchmarks.bare_status PORT`.
"""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any

import uvloop
from motor.motor_asyncio import AsyncIOMotorClient
from starlette.applications import Starlette
from starlette.responses import Response
from starlette.routing import Route

from flowkit.gateway.status import RUN_FIELDS
from flowkit.server.addresses import Address
from flowkit.server.serving import HttpServer

if TYPE_CHECKING:
    from starlette.requests import Request

DATABASE = "flowkit"
_FIELDS = {"_id": 0, **dict.fromkeys((*RUN_FIELDS, "run_seq"), 1)}


def create_app(db: Any) -> Starlette:
    """Return the app with the one route."""

    async def show(request: Request) -> Response:
        ids = (await request.json())["params"]
        flow = await db.flows.find_one({"_id": f"{ids['context_id']}:{ids['id']}"})
        task = await db.tasks.find_one({"id": flow["task_id"]}, _FIELDS)
        text = json.dumps({"flow": flow, "task": task}, default=str)
        return Response(text, media_type="application/json")

    return Starlette(routes=[Route("/", show, methods=["POST"])])


async def main(port: int) -> None:
    """Serve until a signal ends the process."""
    mongo: Any = AsyncIOMotorClient(os.environ["MONGO_URL"], tz_aware=True)
    server = HttpServer(create_app(mongo[DATABASE]), [Address(host="127.0.0.1", port=port)])
    await server.start()
    await server.wait_stopped()


if __name__ == "__main__":
    uvloop.run(main(int(sys.argv[1])))
