"""`batchgen serve-batches`: the endpoint, and the worker that does what it is asked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from batchgen.core.cache_folder import cache_dir
from batchgen.core.errors import InputError, naming_files
from batchgen.core.screen import say
from batchgen.job.command_options import ServeOptions
from batchgen.job.job import resolve_job
from batchgen.models.files import resolve_model
from batchgen.serve.storage import Storage
from batchgen.serve.worker import Worker


def serve(options: ServeOptions) -> None:
    """Serve until the process is interrupted; then finished rows are kept, and the same command goes on.

    Raises:
        InputError: The model, the directory or the port cannot be used.
    """
    try:
        from batchgen.serve.endpoint import Endpoint
    except ImportError as error:
        raise InputError(f"serve-batches needs {error.name}: pip install '.[serve]' in the checkout") from error
    job = resolve_job(options.job, resolve_model(options.job.model, options.job.lora))
    # Later jobs find less memory free than the first, as the model is in it.
    shared = replace(options.job, cpu_memory=job.budgets["cpu"])
    storage = Storage(Path(options.directory or cache_dir() / "serve").expanduser().absolute())
    try:
        worker = Worker(shared, storage)
        endpoint = Endpoint(storage, worker, job.files.name, options.port)
        say(f"serving {job.files.name} at {endpoint.url}; the key is in {storage.key_path}")
        try:
            with naming_files():
                worker.run()
        finally:
            endpoint.close()
    finally:
        storage.close()
