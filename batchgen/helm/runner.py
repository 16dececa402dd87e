"""The runner for helm-run: jobs answer the requests of all run entries, before HELM runs each entry.

    helm-run --runner-class-name batchgen.helm.runner.BatchgenRunner ...

HELM's scenarios and adapters make the requests of an entry twice. First the runner collects them for the jobs, one of
each kind. Then the entry is run, and its answers are looked up. In between only the requests are kept.
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

_FOLDER = "batchgen"  # folder of jobs in the output path


class _Collected(Exception):
    """The exception that ends the run of an entry after its requests have been collected."""


class BatchExecutor(Executor):
    """HELM's executor; jobs answer the requests of batchgen's deployments before it runs them."""

    def __init__(self, executor: Executor, folder: Path) -> None:
        self.execution_spec, self.context = executor.execution_spec, executor.context
        self._folder = folder
        self._collected: list[Request] | None = None

    def execute(self, scenario_state: ScenarioState) -> ScenarioState:
        requests = [state.request for state in scenario_state.request_states]
        if self._collected is not None:
            self._collected.extend(requests)
            raise _Collected
        self.prefetch(requests)  # does nothing unless an entry differs the second time
        return super().execute(scenario_state)

    def collect(self, runner: Runner, run_specs: Iterable[RunSpec]) -> list[Request]:
        """The requests of all run entries, for which each entry is run until its requests are known.

        An entry that fails here is left out; it fails again when it is run, and HELM reports it then.

        Args:
            runner: The runner.
            run_specs: The run entries.
        """
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
        """Run jobs for the requests of batchgen's deployments that have no answer yet.

        Args:
            requests: Requests of any deployments.

        Raises:
            JobStopped: Some jobs are not complete. The jobs of all deployments have been written by then.
            BatchgenError: A job failed.
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
    """The runner for helm-run --runner-class-name. Other clients' deployments run as with HELM's own runner."""

    executor: BatchExecutor

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
        except BatchgenError as error:  # one line, as on batchgen's command line
            say(f"batchgen: {error}")
            sys.exit(error.exit_code)
