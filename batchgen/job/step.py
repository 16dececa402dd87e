"""A step of a job with several steps: a prompt of its own, or a filter, over the columns of earlier steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Step:
    """One step of a job. A row goes through the steps in their order, each with the columns of the earlier ones.

    Attributes:
        name: The name, which begins the names of the columns that the step adds.
        options: The step's own values of options for prompts and sampling, by their names in Python; other options
            have the job's values.
        filter: A Jinja expression over the columns. A row for which it is false skips all later steps. None: the step
            generates.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    filter: str | None = None

    def identity(self) -> dict[str, Any]:
        """The JSON values that identify the step in a job's fingerprint, besides its prompts."""
        return {"name": self.name, "filter": self.filter}
