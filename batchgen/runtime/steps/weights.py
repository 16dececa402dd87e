"""Steps that bring weights to the compute device: reads from disk, copies over the link, dequantization."""

from __future__ import annotations

from batchgen.core.dtypes import INT4
from batchgen.runtime.batch_state import BatchState
from batchgen.runtime.steps.context import StepContext
from batchgen.schedule.step_graph import Step


def read_weight(context: StepContext, step: Step, batch: BatchState) -> None:
    """Read what a layer has on disk."""
    context.weights.read(step.layer, step.weight_buffer)


def read_dense(context: StepContext, step: Step, batch: BatchState) -> None:
    """Read what a layer has on disk, of its experts those alone that will probably be needed."""
    context.weights.read_dense(step.layer, step.weight_buffer)


def read_experts(context: StepContext, step: Step, batch: BatchState) -> None:
    """Read the experts that the micro-batch's tokens are routed to."""
    context.weights.read_experts(step.layer, step.weight_buffer, batch.experts)


def load_weight(context: StepContext, step: Step, batch: BatchState) -> None:
    """Copy what a layer has in host memory to the accelerator."""
    context.weights.load(step.layer, step.weight_buffer)


def expand_weight(context: StepContext, step: Step, batch: BatchState) -> None:
    """Dequantize a layer's 4-bit matrices."""
    context.weights.dequantize(step.layer, step.weight_slot, experts=not dequantizes_after_router(context, step))


def read_head(context: StepContext, step: Step, batch: BatchState) -> None:
    """Read a vocabulary chunk of the output matrix from disk."""
    context.weights.read_head(step.layer, step.weight_buffer)


def load_head(context: StepContext, step: Step, batch: BatchState) -> None:
    """Copy a vocabulary chunk of the output matrix to the accelerator."""
    context.weights.load_head(step.layer, step.weight_buffer)


def dequantizes_after_router(context: StepContext, step: Step) -> bool:
    """Tell whether only those of a layer's 4-bit experts are dequantized that the sweep's tokens are routed to.

    With several micro-batches each would dequantize its own again.
    """
    packed = context.weights.residency.weight_format == INT4 and context.config.has_experts(step.layer)
    return packed and context.compute_tier == "cpu" and context.one_batch
