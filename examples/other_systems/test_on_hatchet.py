import base64
import json
import os

import pytest

claims = {"sub": "tenant", "server_url": "http://127.0.0.1:1", "grpc_broadcast_address": "127.0.0.1:1"}
header, payload = (
    base64.urlsafe_b64encode(json.dumps(part).encode()).decode() for part in ({"alg": ""}, claims)
)
os.environ.setdefault("HATCHET_CLIENT_TOKEN", f"{header}.{payload}.".replace("=", ""))  # read at import

from other_systems.on_hatchet import City, Scores, fetch, publish, rate


def test_tasks() -> None:
    page = fetch.mock_run(City(city="Oslo"))
    score = rate.mock_run(page)
    assert score.words == 16
    assert publish.mock_run(Scores(scores=[score])).published == ["Oslo"]


def test_city_without_a_page() -> None:
    with pytest.raises(ConnectionError):
        fetch.mock_run(City(city="Atlantis"))
