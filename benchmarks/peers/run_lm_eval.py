"""One evaluation by lm_eval with one of its models, in a process of its own; times and results go back as JSON.

    python run_lm_eval.py settings.json result.json

The settings are `model`, `model_args`, `threads` and arguments of `lm_eval.simple_evaluate`.
"""

from __future__ import annotations

import importlib.metadata
import json
import sys
import time
from pathlib import Path

REQUEST_TYPES = ("loglikelihood", "generate_until", "loglikelihood_rolling")


def main() -> None:
    started = time.perf_counter()
    settings = json.loads(Path(sys.argv[1]).read_text())
    import torch

    torch.set_num_threads(settings.pop("threads"))
    from lm_eval import simple_evaluate
    from lm_eval.api.registry import get_model
    from lm_eval.tasks import TaskManager

    if settings["model"] == "batchgen":
        import batchgen.lmeval.model  # noqa: F401 - registers itself
    model_args = settings.pop("model_args")
    model = get_model(settings.pop("model"))(**model_args)
    ready = time.perf_counter()
    request_s = {}

    def timed(name, call):
        def run(requests):
            began = time.perf_counter()
            answers = call(requests)
            request_s[name] = request_s.get(name, 0.0) + time.perf_counter() - began
            return answers

        return run

    for name in REQUEST_TYPES:
        setattr(model, name, timed(name, getattr(model, name)))
    manager = TaskManager(include_path=settings.pop("include_path"), include_defaults=False)
    found = simple_evaluate(model, task_manager=manager, bootstrap_iters=0, **settings)
    result = {
        "wall_s": time.perf_counter() - started,
        "cpu_s": time.process_time(),
        "load_s": ready - started,
        "request_s": request_s,
        "results": found["results"],
        "responses": {
            task: [sample["filtered_resps"] for sample in sorted(samples, key=lambda s: s["doc_id"])]
            for task, samples in found["samples"].items()
        },
        "versions": {name: importlib.metadata.version(name) for name in ("lm_eval", "torch", "transformers")},
    }
    Path(sys.argv[2]).write_text(json.dumps(result, default=float))


if __name__ == "__main__":
    main()
