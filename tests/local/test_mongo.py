"""The local MongoDB server, its data, and the servers that can read a data folder."""

from pathlib import Path

import pymongo
import pytest

from flowkit.errors import ConfigError
from flowkit.local.mongo import MongoServer, compatible_sources
from flowkit.local.sources import Source

ALL = tuple(Source)


@pytest.mark.server
def test_documents_survive_a_stop(tmp_path: Path) -> None:
    with MongoServer(tmp_path) as server:
        with pymongo.MongoClient[dict[str, object]](server.url) as client:
            client.flowkit.tasks.insert_one({"_id": "t", "status": "running"})
        server.stop()
        assert not server.running
        server.start()
        with pymongo.MongoClient[dict[str, object]](server.url) as client:
            assert client.flowkit.tasks.find_one() == {"_id": "t", "status": "running"}


@pytest.mark.server
def test_a_stand_in_without_keeps_data_loses_its_documents(tmp_path: Path) -> None:
    with MongoServer(tmp_path, keeps_data=False) as server:
        if not server.stand_in:
            pytest.skip("MongoDB keeps its data")
        with pymongo.MongoClient[dict[str, object]](server.url) as client:
            client.flowkit.tasks.insert_one({"_id": "t"})
        server.restart()
        with pymongo.MongoClient[dict[str, object]](server.url) as client:
            assert client.flowkit.tasks.find_one() is None
    assert not (tmp_path / "mongo.mv").exists()


@pytest.mark.parametrize(
    ("data", "compatible"),
    [
        ([], ALL),
        (["mongo"], (Source.PATH, Source.CONTAINER)),
        (["mongo.mv"], (Source.CACHE, Source.DOWNLOAD)),
        (["mongo", "mongo.mv"], ALL),
    ],
)
def test_only_sources_that_can_read_the_data_of_a_folder_are_used(
    tmp_path: Path, data: list[str], compatible: tuple[Source, ...]
) -> None:
    for name in data:
        (tmp_path / name).touch()
    assert tuple(compatible_sources(tmp_path, ALL)) == compatible


def test_data_that_no_allowed_source_can_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "mongo.mv").touch()
    with pytest.raises(
        ConfigError, match="contains data of the stand-in .*FLOWKIT_SERVERS, or choose another folder"
    ):
        compatible_sources(tmp_path, [Source.PATH])
