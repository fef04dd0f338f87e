"""Detectors of sensitive values: the formats of the default detector, and every form of a custom one."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from bson import Binary
from tests.unit import detectors
from tests.unit.vars_changes import SECRET, refusal

from flowkit.adapters.vars.sensitive import DefaultDetector, Detector, SensitiveDetectorProto, entropy
from flowkit.errors import AdapterError

PATH = "coordinator.vars.a"
FLAT = 3.2
"""Entropy per character, in bits, from which a text counts as sensitive."""

# --- the default detector ---------------------------------------------------------------------------------------


def is_hit(value: object) -> bool:
    """Return the verdict of the default detector."""
    return DefaultDetector().is_sensitive(PATH, value)


def test_token_of_a_known_format_is_sensitive_even_with_surrounding_blanks() -> None:
    for text in [
        "aaaaaaa.bbbbbbbb.ccc",
        "aaaaaaaaaaaaaaaa.b.-_",
        "AKIA" + "A" * 16,
        "AKIA" + "0" * 16,
        "AIza" + "-" * 35,
        "AIza" + "a_" * 17 + "a",
        "Bearer " + "a" * 20,
        "bearer " + "~+/.=" + "a" * 20,
        "BEARER " + "-" * 20,
        "A" * 24,
        "a" * 22 + "==",
        "+/" * 12,
        "-----BEGIN AAAAAAAAAA-----",
        "-----BEGIN A A A A A A----- and more ---",
        "-----BEGIN AAAAAAA-----\n" + "a-" * 40,
        "xoxb-" + "-" * 15,
        "xoxa-" + "." * 15,
        "xoxp-" + " " * 14 + ".",
        "xoxr-" + "." * 15,
        "xoxs-" + "." * 15,
    ]:
        assert len(text) >= 20
        assert entropy(text) < FLAT
        assert is_hit(text)
        assert is_hit(f" \t{text}\n ")


def test_similar_text_of_low_entropy_is_not_sensitive() -> None:
    for text in [
        "aaaaaaaaaaaaa.bbbbbbbb",
        "aaaaaaa.bbbbbbbb.cccc.d",
        "aaaaaaaaa..bbbbbbbbbbbb",
        "aaaaaaa.bbbbbbbb.cc c",
        "aaaaaaa.bbbbbbbb.cc+c",
        "AKIA" + "A" * 17,
        "AKIA" + "a" * 16,
        "akia" + "A" * 16,
        "AKIA" + "A" * 15 + "-",
        "AIza" + "-" * 34,
        "AIza" + "-" * 36,
        "aiza" + "-" * 35,
        "Bearer " + "a" * 19,
        "Bearer  " + "a" * 20,
        "Bearer: " + "a" * 20,
        "xBearer " + "a" * 20,
        "Bearer " + "a" * 20 + " a",
        "A" * 23,
        "A" * 24 + "-",
        "A" * 12 + " " + "A" * 12,
        "ä" * 30,
        "-----BEGIN ----- - - -",
        "-----BEGIN aaaaaaaaaa-----",
        "-----BEGIN AAAAAAAAAA----",
        ".-----BEGIN AAAAAAAAAA-----",
        "xoxc-" + "." * 15,
        "xoxB-" + "." * 15,
        "xox-b" + "." * 15,
        ".xoxb-" + "." * 15,
        "xoxb." + "." * 15,
    ]:
        assert len(text) >= 20
        assert entropy(text) < FLAT
        assert not is_hit(text)


@pytest.mark.parametrize(
    "text",
    [
        "xoxb-" + "." * 14,
        "-----BEGIN A-----\n" + "a",
        "a.b." + "c" * 15,
        "AKIA" + "A" * 15,
        "!#%&()*,;:<>?@[]^{}",
    ],
)
def test_text_of_nineteen_characters_is_never_sensitive(text: str) -> None:
    assert len(text) == 19
    assert not is_hit(text)
    assert not is_hit(f"  {text}\n\n\n")


def test_same_text_of_twenty_characters_is_sensitive() -> None:
    for text in ("xoxb-" + "." * 15, "a.b." + "c" * 16, "AKIA" + "A" * 16, "!#%&()*,;:<>?@[]^{}~"):
        assert len(text) == 20
        assert is_hit(text)


@pytest.mark.parametrize(
    ("symbols", "times", "hit"),
    [("!#%&()*,", 3, False), ("!#%&()*,;", 3, False), ("!#%&()*,;:", 2, True), ("äöüßéèêëñç", 2, True)],
)
def test_text_of_high_entropy_is_sensitive(symbols: str, times: int, *, hit: bool) -> None:
    assert is_hit(symbols * times) is hit


def test_entropy_is_measured_in_bits_per_character() -> None:
    assert [entropy(text) for text in ("a" * 9, "ab" * 9, "abcd" * 5, "abcdefgh", "aab")] == pytest.approx(
        [0, 1, 2, 3, 0.918296], abs=1e-6
    )


def test_long_prose_can_be_sensitive_and_short_words_never_are() -> None:
    assert is_hit("the quick brown fox jumps")
    assert not is_hit("gold")
    assert not is_hit("")


@pytest.mark.parametrize("make", [bytes, Binary])
def test_twenty_or_more_bytes_are_sensitive(make: Any) -> None:
    assert not is_hit(make(b"\0" * 19))
    assert is_hit(make(b"\0" * 20))


@pytest.mark.parametrize(
    "value", [None, True, 10**30, 1.5, ["A" * 40], {"k": "A" * 40}, ("A" * 40,), 12345678901234567890123]
)
def test_other_values_are_never_sensitive(value: object) -> None:
    assert not is_hit(value)


def test_default_detector_applies_without_a_custom_one() -> None:
    values = [("a", "A" * 24), ("b", "gold"), ("c", b"x" * 20), ("d", ["A" * 24])]
    assert Detector().hits(values) == 2
    assert isinstance(DefaultDetector(), SensitiveDetectorProto)


# --- custom detectors -------------------------------------------------------------------------------------------

VALUES = [(f"{PATH}.{n}", value) for n, value in enumerate(["secret one", "A" * 40, 5, "secret two"])]
HERE = "tests.unit.detectors"


def without_names(*args: Any) -> bool:
    """Accept any arguments by position."""
    return detectors.marked(*args)


FORMS: dict[str, Any] = {
    "object": detectors.Marked(),
    "function": detectors.marked,
    "method": detectors.Marked().is_sensitive,
    "lambda": lambda path, value: detectors.marked(path, value),
    "arguments without names": without_names,
    "partial": functools.partial(detectors.marked),
    "class": detectors.Marked,
    "factory of an object": detectors.make_object,
    "factory of a function": detectors.make_function,
    "name of an object": f"{HERE}:an_object",
    "name of a function": f"{HERE}:marked",
    "name of a class": f"{HERE}:Marked",
    "name of a factory": f"{HERE}:make_object",
    "name of a factory of a function": f"{HERE}:make_function",
    "dotted name of an object": f"{HERE}.an_object",
    "dotted name of a function": f"{HERE}.marked",
    "dotted name of a factory": f"{HERE}.make_object",
    "name of an attribute of an attribute": f"{HERE}:Holder.inner",
}


@pytest.mark.parametrize("given", FORMS.values(), ids=list(FORMS))
def test_detector_can_be_given_in_any_documented_form(given: Any) -> None:
    assert Detector(given).hits(VALUES) == 2


def test_detector_is_called_with_the_path_and_value_of_every_leaf() -> None:
    own = detectors.Marked()
    assert Detector(own).hits(iter(VALUES)) == 2
    assert own.asked == VALUES


def test_factory_is_called_once_on_first_use() -> None:
    made: list[detectors.Marked] = []

    def factory() -> detectors.Marked:
        made.append(detectors.Marked())
        return made[-1]

    detector = Detector(factory)
    assert made == []
    for _ in range(2):
        assert detector.hits(VALUES) == 2
    assert len(made) == 1


@pytest.mark.parametrize("response", [0, "", None, []])
def test_return_value_of_a_detector_is_read_as_a_boolean(response: object) -> None:
    assert Detector(lambda path, value: response).hits(VALUES) == 0
    assert Detector(lambda path, value: "yes").hits(VALUES) == 4


@pytest.mark.parametrize(
    "name",
    ["", "detector", ":", "module:", ":attribute", "a.b:", "a:b:c", "a:b c", "a:1b", "a.b.", ".mod:attr"],
)
def test_malformed_import_path_is_rejected_at_construction(name: str) -> None:
    assert repr(name) in refusal(Detector, name)


@pytest.mark.parametrize(
    ("name", "error"),
    [
        ("tests.unit.no_such_module:marked", ModuleNotFoundError),
        ("tests.unit.no_such_module.marked", ModuleNotFoundError),
        (f"{HERE}:no_such_name", AttributeError),
        (f"{HERE}.no_such_name", AttributeError),
        (f"{HERE}:Holder.no_such_name", AttributeError),
    ],
)
def test_import_error_propagates(name: str, error: type[Exception]) -> None:
    with pytest.raises(error):
        Detector(name)


class _Bare:
    """An object without the interface of a detector."""


def _of_one(value: object) -> bool:
    return bool(value)


@pytest.mark.parametrize(
    "given",
    [
        object(),
        5,
        ["secret"],
        _Bare,
        _Bare(),
        _of_one,
        lambda path, value, more: True,
        lambda: None,
        lambda: _Bare(),
        lambda: lambda: detectors.marked,
        f"{HERE}:Holder",
    ],
)
def test_invalid_detector_is_rejected_at_its_first_use(given: Any) -> None:
    detector = Detector(given)
    for _ in range(2):
        assert "is_sensitive(key_path, value)" in refusal(detector.hits, VALUES)


class _LeakyDetector:
    """Shows the value when it fails."""

    def is_sensitive(self, key_path: str, value: Any) -> bool:
        """Fail with the value in the message."""
        raise RuntimeError(f"{key_path}: {value}")


def leak(path: str, value: Any) -> bool:
    """The same as a function."""
    raise ValueError(value)


@pytest.mark.parametrize(
    ("given", "kind"),
    [
        (_LeakyDetector(), "RuntimeError"),
        (leak, "ValueError"),
        (_LeakyDetector, "RuntimeError"),
        (lambda: leak, "ValueError"),
    ],
)
def test_failing_detector_rejects_everything_and_shows_no_value(given: Any, kind: str) -> None:
    with pytest.raises(AdapterError, match=f"the detector of sensitive values raised {kind}$") as caught:
        Detector(given).hits([(PATH, SECRET)])
    assert caught.value.__suppress_context__
    assert caught.value.__cause__ is None
