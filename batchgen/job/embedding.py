"""The head of a job that computes vectors (of embeddings, of labels, of pairs), by its options and its model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from batchgen.core.errors import InputError
from batchgen.job.options import CLASSIFY, OF_VECTORS, RERANK, JobOptions
from batchgen.models.classifiers import read_classifier, read_reranker
from batchgen.models.config import ModelConfig
from batchgen.models.files import ModelFiles
from batchgen.models.pooling import VectorSpec, read_head
from batchgen.output.embed_columns import LARGEST

if TYPE_CHECKING:
    from batchgen.models.tokenizers.tokenizer import Tokenizer


def for_task(files: ModelFiles, options: JobOptions) -> ModelFiles:
    """The model's files, without an output matrix for tasks that need none."""
    return replace(files, hidden_output=options.task in OF_VECTORS)


def head_of(
    files: ModelFiles, config: ModelConfig, options: JobOptions, tokenizer: Callable[[], Tokenizer]
) -> VectorSpec | None:
    """The pooling of a job's model, and what follows it; None: the job computes no vectors.

    Args:
        files: The model's files.
        config: The model's configuration.
        options: The job's options.
        tokenizer: Function that returns the model's tokenizer.

    Raises:
        InputError: The model is not one for the task, or an option does not fit it.
    """
    if options.task not in OF_VECTORS:
        if config.hidden_output:
            raise InputError(
                f"{files.name} gives no text, as it has no output matrix: give --task {', '.join(OF_VECTORS)}"
            )
        return None
    if options.task == CLASSIFY:
        return read_classifier(files, config)
    if options.task == RERANK:
        return read_reranker(files, config, tokenizer, options.instruction)
    head = read_head(
        files,
        config,
        pooling=options.pooling,
        normalize=options.normalize,
        dimensions=options.dimensions,
        prompt_name=options.prompt_name,
        instruction=options.instruction,
    )
    return replace(head, largest=LARGEST.get(options.vector_dtype, head.largest))


def with_head_context(options: JobOptions, config: ModelConfig, head: VectorSpec | None) -> JobOptions:
    """The options with the longest text of the model's files, where they give no context; positions bound it too."""
    if head is None or head.max_tokens is None or options.max_model_len is not None:
        return options
    return replace(options, max_model_len=min(head.max_tokens, config.max_position))
