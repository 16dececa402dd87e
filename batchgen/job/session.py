"""The model that several jobs of one process use one after the other: it is loaded once."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from batchgen.core.plan import Plan
from batchgen.engine.engine import Engine
from batchgen.job.workload import EstimatedWorkload
from batchgen.models.model_versions import ModelVersions
from batchgen.schedule.from_policy import longest_sequence

# Rows that a plan is made for where fewer are at hand: more are expected of other jobs.
_LEAST_ROWS = 1024


class Session:
    """A loaded model, kept until a job comes that it does not fit.

    Not for use from several threads at once, but for `should_stop`.

    Attributes:
        should_stop: Function that is called before each sweep. When it returns true, the job stops, as at a deadline.
        loads: Number of times that a model was loaded.
        kept: End of the sentence that is shown when a signal ends the process, and that says what is kept.
    """

    def __init__(self, kept: str = "") -> None:
        self.kept = kept
        self.should_stop: Callable[[], bool] = lambda: False
        self.loads = 0
        self._engine: Engine | None = None
        self._plan: Plan | None = None
        self._versions: ModelVersions = {}

    def expect(self, versions: ModelVersions) -> None:
        """Close the loaded model if it was loaded from other files than the next job's.

        Args:
            versions: Versions of the model's files when the next job began.
        """
        if versions != self._versions:
            self.close()
        self._versions = versions

    def plan(
        self, estimate: Callable[[], EstimatedWorkload], make: Callable[[Callable[[], EstimatedWorkload]], Plan]
    ) -> Plan:
        """The plan of the loaded model if the job's rows fit it, or a new one for more rows than the job has.

        Args:
            estimate: Function that estimates the job's workload.
            make: Function that makes a plan from a function that estimates the workload.
        """
        estimated = estimate()
        workload = estimated.workload
        if self._plan is not None and self._engine is not None:
            parts = self._engine.parts
            longest = longest_sequence(parts.policy, parts.memory, parts.compute_tier)
            if workload.max_seq_len <= min(longest, self._plan.policy.max_model_len):
                return replace(self._plan, workload=workload)
            self.close()  # the new plan may have its memory
        more = replace(workload, num_seqs=max(workload.num_seqs, _LEAST_ROWS))
        return make(lambda: estimated._replace(workload=more))

    @contextmanager
    def engine(self, plan: Plan, load: Callable[[], Engine]) -> Iterator[Engine]:
        """The loaded engine if it runs this plan; otherwise it is closed, and another one is loaded.

        Args:
            plan: The job's plan.
            load: Function that loads the model.
        """
        kept = self._plan
        if self._engine is None or kept is None or (kept.policy, kept.kernels) != (plan.policy, plan.kernels):
            self.close()
            self._engine = load()
            self.loads += 1
        self._plan = plan
        self._engine.count_anew()
        try:
            yield self._engine
        except BaseException:  # what it is at is not known
            self.close()
            raise

    def close(self) -> None:
        """Close the engine, if there is one."""
        engine, self._engine, self._plan = self._engine, None, None
        if engine is not None:
            engine.close()
