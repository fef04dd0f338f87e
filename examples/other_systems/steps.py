"""What every version of the pipeline calls: models and plain functions, without any orchestration."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel

GUIDE = {
    "Lima": "Ceviche by the sea. Old houses. Fog until noon.",
    "Oslo": "A fjord, an opera house to walk on, and forests at the end of the metro.",
    "Turin": "Chocolate.",
}


class Params(BaseModel):
    """What a run is given: the cities, and how many words a page needs."""

    cities: list[str]
    minimum: int = 5


class Page(BaseModel):
    """The page of a city."""

    city: str
    text: str


class Score(BaseModel):
    """The page of a city, rated."""

    city: str
    words: int


class Report(BaseModel):
    """What has become of a run."""

    published: list[str]


def fetch(city: str) -> Page:
    """Return the page of a city, or raise ConnectionError. A real one calls a server."""
    if city not in GUIDE:
        raise ConnectionError(f"cannot connect to the guide of {city}")
    return Page(city=city, text=GUIDE[city])


def rate(page: Page) -> Score:
    """Return the number of words on a page."""
    return Score(city=page.city, words=len(page.text.split()))


def keep(scores: list[Score], minimum: int) -> list[Score]:
    """Return the scores that reach the minimum."""
    return [score for score in scores if score.words >= minimum]


def publish(scores: list[Score]) -> list[str]:
    """Publish the pages, and return their cities."""
    return sorted(score.city for score in scores)


def report(published: list[str]) -> Report:
    """Write the report to `report.json` in the current folder. A real one sends it to the team."""
    written = Report(published=published)
    Path("report.json").write_text(written.model_dump_json(), encoding="utf-8")
    return written
