"""Lines of a job's log: text with the time and the name of the output, or a JSON object each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any


@dataclass(frozen=True)
class LogFormat:
    """The form of the lines of a log.

    Attributes:
        kind: "text" or "json".
        name: Name of the job's output, which each line has; empty: the lines have none.
    """

    kind: str = "text"
    name: str = ""

    def line(self, text: str, level: str = "info", event: str = "message", **fields: Any) -> str:
        """A line that says something now.

        Args:
            text: The text for people.
            level: "debug", "info", "warning" or "error".
            event: The kind of the event, for programs.
            **fields: JSON values of the event.
        """
        now = datetime.now().astimezone()
        if self.kind == "json":
            record: Mapping[str, Any] = {
                "time": now.isoformat(timespec="milliseconds"),
                "level": level,
                "event": event,
                **({"output": self.name} if self.name else {}),
                "message": text,
                **fields,
            }
            return json.dumps(record, ensure_ascii=False)
        name = f" {self.name}" if self.name else ""
        return f"{now:%Y-%m-%d %H:%M:%S}{name}: {text}"
