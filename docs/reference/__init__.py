"""The generated parts of the pages. The site shows them in place of what a page has between two comments:

    <!-- generated: NAME -->
    what a reader of the repository sees instead: where the same can be read without the site
    <!-- end of generated -->

`GENERATORS` has the function that returns the text for each name.
"""

from __future__ import annotations

import re
from pkgutil import resolve_name
from typing import Final

GENERATORS: Final = {
    "commands": "reference.repository:commands",
    "contributing": "reference.repository:contributing",
    "changelog": "reference.repository:changelog",
    "actions": "reference.actions:table",
    "gateway-methods": "reference.gateway_methods:methods_text",
    "admission-api": "reference.admission_api:api_text",
    "metrics": "reference.metrics:table",
    "rights": "reference.rights:rights_text",
}
"""By name, the function, which is imported when a page needs it."""

_PART = re.compile(r"^<!-- generated: (\S+) -->\n.*?^<!-- end of generated -->\n", re.DOTALL | re.MULTILINE)


def parts_of(page: str) -> list[str]:
    """Return the names of the generated parts of a page."""
    return _PART.findall(page)


def generate(name: str) -> str:
    """Return the Markdown of a part; raises KeyError if no generator has this name."""
    text: str = resolve_name(GENERATORS[name])()
    return text


def filled(page: str) -> str:
    """Return the text of a page with its generated parts."""
    return _PART.sub(lambda part: generate(part[1]), page)
