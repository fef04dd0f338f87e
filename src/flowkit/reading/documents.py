"""Task documents that other programs, or later versions of FlowKit, may have written."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING

from flowkit.errors import DocumentUnreadable, FlowKitError
from flowkit.text import one_line, printed

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextmanager
def reading(task_id: str) -> Iterator[None]:
    """Raise DocumentUnreadable if the code inside finds the document of a task in a form that it does not know."""
    try:
        yield
    except FlowKitError:
        raise
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        raise DocumentUnreadable(
            f"the document of task {printed(task_id)} cannot be read ({type(error).__name__}: {one_line(error)}); use "
            "the version of FlowKit that has written it, or correct it"
        ) from error
