"""Logging: fields become attributes, contexts propagate, and nothing is printed by default."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import subprocess
import sys
import uuid
from typing import TYPE_CHECKING, Any

import pytest

from flowkit.core import log
from flowkit.core.log import StdoutHandler
from flowkit.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

Records = list[logging.LogRecord]
ROOT = logging.getLogger("flowkit")


class _RecordingHandler(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.records: Records = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


@pytest.fixture
def records() -> Iterator[Records]:
    """The log records of FlowKit during a test."""
    recording_handler = _RecordingHandler()
    ROOT.addHandler(recording_handler)
    yield recording_handler.records
    ROOT.removeHandler(recording_handler)


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    level, handlers = ROOT.level, ROOT.handlers[:]
    yield
    ROOT.setLevel(level)
    ROOT.handlers[:] = handlers


def attribute(record: logging.LogRecord, name: str) -> Any:
    """Return a field of a record."""
    return getattr(record, name)


# --- fields -------------------------------------------------------------------------------------------------------


def test_keywords_become_attributes_of_the_record(records: Records) -> None:
    log.get_logger("worker").info("picked %s", "one", event="worker.adapter.selected", keys=["b", "a"], n=2)
    (record,) = records
    assert (record.name, record.levelname, record.getMessage()) == ("flowkit.worker", "INFO", "picked one")
    assert attribute(record, "event") == "worker.adapter.selected"
    assert (attribute(record, "keys"), attribute(record, "n")) == (["b", "a"], 2)


CLASHES = sorted([*vars(logging.makeLogRecord({})), "message", "asctime"])


@pytest.mark.parametrize("name", [name for name in CLASHES if name not in ("exc_info", "stack_info")])
def test_keyword_with_the_name_of_a_record_attribute_is_prefixed(name: str, records: Records) -> None:
    log.get_logger("x").info("text", **{name: "mine"})
    (record,) = records
    assert attribute(record, f"field_{name}") == "mine"
    assert record.getMessage() == "text"


@pytest.mark.parametrize("name", ["level", "text", "self", "logger", "fields", "extra_", "stacklevel_"])
def test_other_keywords_keep_their_names(name: str, records: Records) -> None:
    log.get_logger("x").log(logging.WARNING, "text", **{name: 1})
    assert attribute(records[0], name) == 1


@pytest.mark.parametrize("method", ["debug", "info", "warning", "error", "critical"])
def test_each_method_has_its_level_and_records_its_caller(method: str, records: Records) -> None:
    getattr(log.get_logger("x"), method)("text")
    assert records[0].levelname == method.upper()
    assert records[0].pathname == __file__
    assert records[0].funcName == "test_each_method_has_its_level_and_records_its_caller"


def test_keywords_of_the_standard_library_keep_their_meaning(records: Records) -> None:
    logger = log.get_logger("x")
    try:
        raise KeyError("k")
    except KeyError:
        logger.exception("failed", extra={"event": "from.extra"})
    logger.info("here", stack_info=True)
    assert records[0].exc_info is not None
    assert attribute(records[0], "event") == "from.extra"
    assert records[1].stack_info


@pytest.mark.parametrize(
    ("name", "full"),
    [
        ("coord.adapters", "flowkit.coord.adapters"),
        ("flowkit.worker", "flowkit.worker"),
        ("flowkits", "flowkit.flowkits"),
        ("flowkit", "flowkit"),
        ("", "flowkit"),
    ],
)
def test_every_logger_is_a_child_of_flowkit(name: str, full: str) -> None:
    assert log.get_logger(name).name == full


def test_level_is_that_of_the_standard_logger(records: Records) -> None:
    log.set_level("warning")
    logger = log.get_logger("worker")
    logger.info("not this")
    logger.warning("this")
    assert [record.getMessage() for record in records] == ["this"]
    assert not logger.isEnabledFor(logging.INFO)
    log.set_level(logging.DEBUG)
    assert logger.isEnabledFor(logging.DEBUG)


@pytest.mark.parametrize("level", ["LOUD", "", True, 1.5, None])
def test_unknown_level_is_rejected(level: Any) -> None:
    with pytest.raises(ConfigError, match="must be one of DEBUG, INFO"):
        log.set_level(level)


# --- contexts -----------------------------------------------------------------------------------------------------


def test_context_adds_its_fields_to_records_inside_it(records: Records) -> None:
    logger = log.get_logger("x")
    with log.log_context(task_id="t", node_id="a"):
        with log.log_context(node_id="b"):
            logger.info("inner", task_id="own")
        logger.info("outer")
    logger.info("outside")
    inner, outer, outside = records
    assert (attribute(inner, "task_id"), attribute(inner, "node_id")) == ("own", "b")
    assert (attribute(outer, "task_id"), attribute(outer, "node_id")) == ("t", "a")
    assert not hasattr(outside, "task_id")


def test_context_ends_with_its_block_even_on_errors(records: Records) -> None:
    with pytest.raises(KeyError), log.log_context(a=1):
        raise KeyError
    log.get_logger().info("after")
    assert not hasattr(records[0], "a")


async def test_context_of_one_asyncio_task_is_invisible_to_others(records: Records) -> None:
    async def work(name: str) -> None:
        log.bind_context(run=name)
        await asyncio.to_thread(lambda: log.get_logger("x").info("from a thread"))

    await asyncio.gather(work("one"), work("two"))
    log.get_logger("x").info("outside")
    assert sorted(attribute(record, "run") for record in records[:2]) == ["one", "two"]
    assert not hasattr(records[2], "run")


# --- swallow and once ---------------------------------------------------------------------------------------------


def test_swallowed_error_is_logged_and_not_raised(records: Records) -> None:
    with log.swallow(
        logger=log.get_logger("x"), code="bus.stop", msg="stop failed", level=logging.ERROR, n=1
    ):
        raise OSError("gone")
    (record,) = records
    assert (record.levelname, record.getMessage(), record.pathname) == ("ERROR", "stop failed", __file__)
    assert (attribute(record, "event"), attribute(record, "n")) == ("bus.stop", 1)
    assert (attribute(record, "error"), attribute(record, "error_type")) == ("gone", "OSError")
    assert record.exc_info is not None


def test_expected_error_is_logged_without_its_traceback(records: Records) -> None:
    with log.swallow(expected=True):
        raise OSError("gone")
    assert records[0].exc_info is None
    assert records[0].levelname == "WARNING"


def test_nothing_is_logged_without_an_error(records: Records) -> None:
    with log.swallow(code="x"):
        pass
    assert records == []


@pytest.mark.parametrize("kind", [asyncio.CancelledError, KeyboardInterrupt, SystemExit])
def test_cancel_and_keyboard_interrupt_are_not_swallowed(kind: type[BaseException], records: Records) -> None:
    with pytest.raises(kind), log.swallow():
        raise kind
    assert records == []


def test_warn_once_logs_each_key_once(records: Records) -> None:
    one, other = uuid.uuid4().hex, uuid.uuid4().hex
    logger = log.get_logger("x")
    responses = [log.warn_once(key, "careful", logger=logger, n=1) for key in (one, one, other)]
    assert responses == [True, False, True]
    assert [attribute(record, "event") for record in records] == [one, other]
    assert (records[0].levelname, records[0].pathname) == ("WARNING", __file__)


def test_memory_of_warn_once_is_bounded(records: Records) -> None:
    first = uuid.uuid4().hex
    log.warn_once(first)
    for _ in range(1_100):
        log.warn_once(uuid.uuid4().hex)
    assert len(log._warned) == 1_000
    assert log.warn_once(first)


# --- output -------------------------------------------------------------------------------------------------------


def lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """Return the lines on stdout, each of them one JSON object."""
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_stdout_gets_one_json_object_per_line(capsys: pytest.CaptureFixture[str]) -> None:
    log.enable_stdout_logging()
    log.enable_stdout_logging()
    with log.log_context(task_id="t"):
        log.get_logger("x").info("two\nlines", event="e", when=object, level="gold")
        logging.getLogger("flowkit.worker").warning("plain")
    log.disable_stdout_logging()
    log.get_logger("x").error("unseen")
    first, second = lines(capsys)
    assert first | {"ts": ""} == {
        "ts": "",
        "level": "INFO",
        "logger": "flowkit.x",
        "message": "two\nlines",
        "event": "e",
        "when": "<class 'object'>",
        "field_level": "gold",
        "task_id": "t",
    }
    assert first["ts"].endswith("+00:00")
    assert (second["message"], second["task_id"]) == ("plain", "t")


@pytest.mark.parametrize("value", [float("nan"), {(1, 2): 3}, {1, 2}, "\ud800", "жук", b"\xff", 10**30])
def test_line_is_valid_json_for_any_field_value(value: object, capsys: pytest.CaptureFixture[str]) -> None:
    circular: list[Any] = []
    circular.append(circular)
    log.enable_stdout_logging()
    log.get_logger("x").info("text", value=value)
    log.get_logger("x").info("text", value=value, again=circular)
    assert [line["message"] for line in lines(capsys)] == ["text", "text"]


@pytest.mark.parametrize("wanted", [False, True])
def test_tracebacks_are_printed_on_request(wanted: bool, capsys: pytest.CaptureFixture[str]) -> None:
    log.enable_stdout_logging(stack=wanted)
    with log.swallow(code="c"):
        raise OSError("gone")
    (line,) = lines(capsys)
    assert (line["error"], line["error_type"]) == ("gone", "OSError")
    assert ("Traceback" in line.get("stack", "")) is wanted


def test_pretty_output_is_plain_text(capsys: pytest.CaptureFixture[str]) -> None:
    log.enable_stdout_logging(pretty=True, stack=True)
    log.get_logger("x").info("read", page=3, name="a\x1b[31m")
    with log.swallow(code="c", msg="stopped badly"):
        raise OSError("gone")
    first, second, *rest = capsys.readouterr().out.splitlines()
    assert first.endswith('INFO     flowkit.x: read  page=3 field_name="a\\u001b[31m"')
    assert 'flowkit: stopped badly  error="gone" error_type="OSError" event="c"' in second
    assert rest[0].startswith("Traceback")


def test_stdout_can_have_its_own_level(records: Records, capsys: pytest.CaptureFixture[str]) -> None:
    log.enable_stdout_logging("ERROR")
    log.get_logger("x").info("for others")
    log.get_logger("x").error("for stdout too")
    assert [line["message"] for line in lines(capsys)] == ["for stdout too"]
    assert len(records) == 2


# --- environment --------------------------------------------------------------------------------------------------

VARIABLES = ("FLOWKIT_LOG_STDOUT", "FLOWKIT_LOG_LEVEL", "FLOWKIT_LOG_PRETTY", "FLOWKIT_LOG_STACK")


@pytest.fixture
def clean_env(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Remove FlowKit's variables from the environment."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return monkeypatch


def _printing() -> list[StdoutHandler]:
    return [handler for handler in ROOT.handlers if isinstance(handler, StdoutHandler)]


def test_empty_environment_changes_nothing(clean_env: pytest.MonkeyPatch) -> None:
    before = (ROOT.level, ROOT.handlers[:])
    log.configure_from_env()
    clean_env.setenv("FLOWKIT_LOG_STDOUT", "")
    log.configure_from_env()
    assert (ROOT.level, ROOT.handlers) == before


def test_environment_turns_stdout_on_and_off(clean_env: pytest.MonkeyPatch) -> None:
    clean_env.setenv("FLOWKIT_LOG_STDOUT", "Yes")
    log.configure_from_env()
    assert [handler.level for handler in _printing()] == [logging.INFO]
    assert ROOT.level == logging.DEBUG
    clean_env.setenv("FLOWKIT_LOG_STDOUT", "0")
    log.configure_from_env()
    assert _printing() == []


def test_environment_sets_level_and_format(
    clean_env: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, value in zip(VARIABLES, ("1", "warning", "1", "1"), strict=True):
        clean_env.setenv(name, value)
    log.configure_from_env()
    assert ROOT.level == logging.WARNING
    with log.swallow(msg="stopped badly"):
        raise OSError("gone")
    printed = capsys.readouterr().out
    assert "flowkit: stopped badly" in printed
    assert "Traceback" in printed


@pytest.mark.parametrize(("name", "value"), [(name, "perhaps") for name in VARIABLES])
def test_invalid_value_of_a_variable_is_rejected_with_its_name(
    name: str, value: str, clean_env: pytest.MonkeyPatch
) -> None:
    before = (ROOT.level, ROOT.handlers[:])
    clean_env.setenv("FLOWKIT_LOG_STDOUT", "1")
    clean_env.setenv(name, value)
    with pytest.raises(ConfigError, match=f"{name} is 'perhaps'"):
        log.configure_from_env()
    assert (ROOT.level, ROOT.handlers) == before


def test_library_prints_nothing_by_default() -> None:
    program = (
        "import logging; from flowkit.core.log import get_logger; get_logger('x').error('secret');"
        "logging.getLogger('flowkit.worker').error('secret');"
        "root = logging.getLogger('flowkit'); print(root.level, [type(h).__name__ for h in root.handlers])"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert (ended.stdout.strip(), ended.stderr) == ("10 ['NullHandler']", "")


def test_level_set_by_the_application_is_kept() -> None:
    program = (
        "import logging; logging.getLogger('flowkit').setLevel('ERROR'); import flowkit.core.log;"
        "print(logging.getLogger('flowkit').level)"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "40"


# --- the log of processes -----------------------------------------------------------------------------------------


@pytest.fixture
def attempt_context() -> Iterator[None]:
    """The context of an attempt that processes a batch."""
    with log.log_context(
        task_id="t-1", node_id="a", attempt_epoch=2, role="r", run_id="run-1", batch_uid="b 7"
    ):
        yield


def _record(text: str, **fields: Any) -> logging.LogRecord:
    return logging.makeLogRecord({"name": "shop", "levelname": "INFO", "msg": text, **fields})


def test_text_line_of_an_attempt_names_it(attempt_context: None) -> None:
    formatter = log.process_formatter("%(levelname)s %(name)s: %(message)s")
    assert formatter.format(_record("page\x1b[2J read", page=3, db_password="hunter2")) == (
        'INFO shop: page\\u001b[2J read  page=3 db_password="(hidden)" '
        'task_id="t-1" node_id="a" attempt_epoch=2 batch_uid="b 7"'
    )


def test_text_line_outside_of_attempts_has_no_fields() -> None:
    assert log.process_formatter("%(message)s").format(_record("starts", event="x")) == "starts"


PRINTS = """
import logging, threading, warnings
from flowkit.cli.output import log_processes

class Broken:
    def __str__(self):
        raise ZeroDivisionError
    __repr__ = __str__

log_processes(True)
logger = logging.getLogger("shop")
logger.warning("%d pages", "many")
logger.warning(Broken())
logger.warning("page", extra={"page": Broken()})
warnings.warn("old")
logger.error("it broke", exc_info=ValueError("no\\nday"))
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
raise ValueError("no day")
"""


def test_json_log_of_a_process_is_one_object_a_line_whatever_it_logs() -> None:
    """Python prints records that it cannot format, warnings, and what threads and programs do not catch."""
    environment = {**os.environ, "FLOWKIT_LOG_FORMAT": "json"}
    command = [sys.executable, "-W", "default", "-c", PRINTS]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    uncaught = "an exception was not caught"
    assert [(each["message"].splitlines()[0], each.get("error")) for each in lines] == [
        ("%d pages  (its arguments do not fit)", None),
        ("a line whose text cannot be made", None),
        ("page", None),
        ("<string>:15: UserWarning: old", None),
        ("it broke", "no\nday"),
        (uncaught, "division by zero"),
        (uncaught, "no day"),
    ]
    assert all(each.keys() >= {"ts", "level", "logger"} for each in lines)


def test_one_setting_chooses_json(attempt_context: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWKIT_LOG_FORMAT", "json")
    line = json.loads(log.process_formatter("%(message)s").format(_record("page read", page=3)))
    assert line["message"] == "page read"
    assert {name: line[name] for name in ("task_id", "attempt_epoch", "batch_uid", "run_id", "page")} == {
        "task_id": "t-1",
        "attempt_epoch": 2,
        "batch_uid": "b 7",
        "run_id": "run-1",
        "page": 3,
    }


def test_fields_of_the_user_do_not_replace_those_of_the_attempt(
    attempt_context: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FLOWKIT_LOG_FORMAT", "json")
    record = logging.makeLogRecord({"msg": "done", "node_id": "other", "login": {"password": "hunter2"}})
    line = json.loads(log.process_formatter("%(message)s").format(record))
    assert line["node_id"] != "other"
    assert line["field_node_id"] == "other"
    assert line["login"] == {"password": "(hidden)"}


def test_unknown_format_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWKIT_LOG_FORMAT", "xml")
    with pytest.raises(ConfigError, match="FLOWKIT_LOG_FORMAT is 'xml'; it must be text or json"):
        log.process_formatter("%(message)s")
