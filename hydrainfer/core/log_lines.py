"""The form of log lines, the same in every process of a server."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any, Literal

LogForm = Literal["text", "json"]
_TEXT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class JsonLine(logging.Formatter):
    """Formats a record as one JSON object: `time` (UTC), `level`, `event`, `logger`, `message`, the `fields` of the
    record, and `exception`. The event is the record's `event`, or "log". `instance`: its name is in every line."""

    def __init__(self, instance: str = "") -> None:
        super().__init__()
        self._source = {"instance": instance} if instance else {}

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, Any] = {
            "time": at,
            "level": record.levelname.lower(),
            "event": getattr(record, "event", "log"),
            "logger": record.name,
            "message": record.getMessage(),
            **self._source,
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def log_formatter(form: LogForm, instance: str = "") -> logging.Formatter:
    """What formats the lines of a process that logs in this form. `instance`: as in `JsonLine`."""
    return JsonLine(instance) if form == "json" else logging.Formatter(_TEXT)


def log_event(log: logging.Logger, event: str, message: str, level: int = logging.INFO, **fields: Any) -> None:
    """Log an event under its name. `fields`: its parts, which only JSON lines have beside the message."""
    log.log(level, "%s", message, extra={"event": event, "fields": fields})
