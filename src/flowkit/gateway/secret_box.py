"""The secrets of runners: references to them, or texts that are stored encrypted (Fernet, from `cryptography`)."""

from __future__ import annotations

import os
import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cryptography.fernet import Fernet, InvalidToken, MultiFernet

from flowkit.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

KEYS_VARIABLE: Final = "FLOWKIT_SECRET_KEY"
REFERENCES_VARIABLE: Final = "FLOWKIT_SECRET_REFERENCES"
MASK: Final = "***"
_FILE: Final = "file:"
_SCHEMES: Final = ("env:", _FILE)
_BY_OPERATOR: Final = "operator:"
"""Begins a stored reference that an operator has stored, to which the patterns of others do not apply."""


class SecretError(ValueError):
    """A secret cannot be stored or read. The text names the reference, and never the secret."""


class SecretBox:
    """Stores and reads the secrets of runners.

    A reference names a variable (`env:NAME`) or a file (`file:PATH`) of the process that calls the supervisor. Since it
    could name any secret of that process, only an operator may store every reference. Others may store those that match
    one of `references`, patterns such as `env:SUPERVISOR_*` and `file:/run/secrets/*`. The file of such a
    reference must be in the folder of the pattern, also after links were followed. This is checked again
    whenever the file is read.
    """

    def __init__(self, keys: Sequence[str] = (), references: Sequence[str] = ()) -> None:
        """Prepare the box. The first key encrypts, and all decrypt. Raise ConfigError if a key is invalid."""
        try:
            self._keys = MultiFernet([Fernet(key) for key in keys]) if keys else None
        except ValueError:
            raise ConfigError(
                f"{KEYS_VARIABLE} is not a key, or a list of keys separated by commas; make one with "
                '`python -c "from cryptography.fernet import Fernet; print(Fernet.generate_key().decode())"`'
            ) from None
        self._references = tuple(references)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> SecretBox:
        """Return a box with the keys of FLOWKIT_SECRET_KEY and the patterns of FLOWKIT_SECRET_REFERENCES."""
        return cls(
            _listed(environment.get(KEYS_VARIABLE, "")), _listed(environment.get(REFERENCES_VARIABLE, ""))
        )

    def seal(self, secret: str, *, as_operator: bool) -> str:
        """Return a secret in the form in which it is stored.

        Raise SecretError if it is a reference that the caller may not store, or if there is no key to encrypt it.
        """
        if secret.startswith(_SCHEMES):
            if as_operator:
                return _BY_OPERATOR + secret
            self._check_allowed(secret)
            return secret
        if self._keys is None:
            raise SecretError(
                f"the gateway has no key to encrypt secrets with; set {KEYS_VARIABLE}, or store a reference such as "
                "env:NAME or file:PATH"
            )
        return f"fernet:{self._keys.encrypt(secret.encode()).decode()}"

    def open(self, stored: str | None) -> str:
        """Return the secret that was stored, or an empty text for None. Raise SecretError if it cannot be read."""
        if not stored:
            return ""
        trusted = stored.startswith(_BY_OPERATOR)
        stored = stored.removeprefix(_BY_OPERATOR)
        if stored.startswith(_SCHEMES) and not trusted:
            self._check_allowed(stored)
        scheme, _, value = stored.partition(":")
        match scheme:
            case "env":
                found = os.environ.get(value)
                if found is None:
                    raise SecretError(f"the variable {value} is not set where the job handler runs")
                return found
            case "file":
                return _read(value)
        return self._decrypt(value)

    def _check_allowed(self, reference: str) -> None:
        """Raise SecretError if only an operator may store this reference."""
        if not any(_matches(reference, pattern) for pattern in self._references):
            raise SecretError(
                f"only an operator may store the reference {reference!r}; an operator can allow it with "
                f"{REFERENCES_VARIABLE}, a list of patterns; a file must be in the folder of its pattern, also after "
                "links were followed, and its path must not contain .."
            )

    def _decrypt(self, value: str) -> str:
        if self._keys is None:
            raise SecretError(
                f"the stored secret is encrypted; set {KEYS_VARIABLE} where the job handler runs"
            )
        try:
            return self._keys.decrypt(value.encode()).decode()
        except InvalidToken:
            raise SecretError(
                f"the stored secret was encrypted with another key than those of {KEYS_VARIABLE}"
            ) from None


def masked(stored: str | None) -> str | None:
    """Return what may be shown of a stored secret: a reference, or a mask."""
    if stored is None:
        return None
    shown = stored.removeprefix(_BY_OPERATOR)
    return shown if shown.startswith(_SCHEMES) else MASK


def _matches(reference: str, pattern: str) -> bool:
    """Return whether a reference matches a pattern. The folder of a pattern of files is what precedes its wildcards."""
    if not fnmatchcase(reference, pattern):
        return False
    if not reference.startswith(_FILE):
        return True
    path = Path(reference.removeprefix(_FILE))
    folder = _WILDCARD.split(pattern.removeprefix(_FILE))[0].rpartition("/")
    try:
        inside = path.resolve().is_relative_to(Path("".join(folder[:2])).resolve())
    except (OSError, ValueError, RuntimeError):  # too long, a NUL character, or links in a circle
        return False
    return inside and ".." not in path.parts


_WILDCARD: Final = re.compile(r"[*?\[]")


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise SecretError(
            f"the file {path!r} cannot be read: {getattr(error, 'strerror', None) or error}"
        ) from None


def _listed(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
