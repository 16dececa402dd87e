"""helm-run on batchgen: all run entries' requests first, answered by one job a kind; then HELM's own run, entry by entry.

    helm-run --runner-class-name batchgen.helm.runner.BatchgenRunner ...

An entry is made into requests twice, by HELM's scenarios and adapters both times: to collect them, and to run it, when
they are looked up. Between the two nothing of an entry is held but its requests, however many entries there are.
"""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path

from helm.benchmark.adaptation.scenario_state import ScenarioState
from helm.benchmark.executor import Executor
from helm.benchmark.model_deployment_registry import get_model_deployment
from helm.benchmark.run_spec import RunSpec
from helm.benchmark.runner import Runner
from helm.common.hierarchical_logger import hlog, htrack_block
from helm.common.object_spec import get_class_by_name
from helm.common.request import Request

from batchgen.core.errors import BatchgenError, InputError, JobStopped
from batchgen.core.screen import say
from batchgen.helm.client import BatchgenClient

_FOLDER = "batchgen"  # of jobs, in the output path


class _Collected(Exception):
    """An entry has come as far as its requests."""


class BatchExecutor(Executor):
    """HELM's executor, which has the requests of batchgen's deployments answered all together before it asks for each."""

    def __init__(self, executor: Executor, folder: Path) -> None:
        self.execution_spec, self.context = executor.execution_spec, executor.context
        self._folder = folder
        self._collected: list[Request] | None = None

    def execute(self, scenario_state: ScenarioState) -> ScenarioState:
        requests = [state.request for state in scenario_state.request_states]
        if self._collected is not None:
            self._collected.extend(requests)
            raise _Collected
        self.prefetch(requests)  # nothing is left to do unless an entry is not the same the second time
        return super().execute(scenario_state)

    def collect(self, runner: Runner, run_specs: Iterable[RunSpec]) -> list[Request]:
        """The requests of all entries. What goes wrong with one goes wrong again when it is run, and is reported then."""
        self._collected = []
        try:
            for run_spec in run_specs:
                with htrack_block(f"Collecting the requests of {run_spec.name}"):
                    try:
                        runner.run_one(run_spec)
                    except _Collected:
                        pass
                    except Exception:
                        if runner.exit_on_error:
                            raise
                        hlog(f"No requests of {run_spec.name}:\n{traceback.format_exc()}")
            return self._collected
        finally:
            self._collected = None

    def prefetch(self, requests: Iterable[Request]) -> None:
        """Have jobs answer the requests of batchgen's deployments that no job has answered yet.

        Raises BatchgenError; JobStopped only when the jobs of all deployments are written down.
        """
        by_deployment: dict[str, list[Request]] = {}
        for request in requests:
            by_deployment.setdefault(request.model_deployment, []).append(request)
        waiting = []
        for name, of_deployment in by_deployment.items():
            if not issubclass(get_class_by_name(get_model_deployment(name).client_spec.class_name), BatchgenClient):
                continue
            client = self.context.client._get_client(name)
            try:
                client.prefetch(of_deployment, self._folder / re.sub(r"[^\w.-]", "_", name))
            except JobStopped as stopped:
                waiting.append(str(stopped))
        if waiting:
            raise JobStopped("\n".join(waiting))


class BatchgenRunner(Runner):
    """For helm-run --runner-class-name. Deployments of other clients run as with HELM's own runner."""

    def __init__(self, execution_spec, output_path: str, *args, **kwargs) -> None:
        super().__init__(execution_spec, output_path, *args, **kwargs)
        if execution_spec.url:
            raise InputError("batchgen runs here, not behind a server: leave out --server-url")
        self.executor = BatchExecutor(self.executor, Path(output_path) / _FOLDER)

    def run_all(self, run_specs: list[RunSpec]) -> None:
        try:
            if not (self.dry_run or self.cache_instances_only or self.skip_instances):
                self.executor.prefetch(self.executor.collect(self, run_specs))
            super().run_all(run_specs)
        except BatchgenError as error:  # said in one line, as the command line does
            say(f"batchgen: {error}")
            sys.exit(error.exit_code)
