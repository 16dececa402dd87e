"""A mixture of experts by torch's grouped matrix product, for prompts, where each expert has many rows.

The tiles of `grouped.py` have 64 rows, for few. Torch has CUTLASS's grouped product for bf16 on compute capabilities 9
and 10, with larger tiles (`torch.nn.functional.grouped_mm`). It takes the ends of experts' rows from the card, so the
host waits for nothing. On other cards it would multiply expert by expert, and wait for the router.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from batchgen.ops.cpp import BlockWeight
from batchgen.ops.triton.grouped import add_launch, sort_launch
from batchgen.ops.triton.launch import card
from batchgen.ops.triton.norm import gate

_MANY_ROWS = 64  # of an expert, the mean: more than one tile of `grouped.py`
_CAPABILITIES = (9, 10)  # major
_ALIGNED_COLUMNS = 8  # rows of operands begin at multiples of 16 bytes


def takes_many(
    x: Tensor,
    chosen: Tensor,
    gate_up: Tensor | BlockWeight,
    gate_up_bias: Tensor | None,
    down: Tensor | BlockWeight,
    down_bias: Tensor | None,
) -> bool:
    """Tell whether the grouped product of torch is for these operands, which `dispatch.grouped_experts` describes."""
    num_experts = down.shape[0] // x.shape[1]
    return (
        hasattr(F, "grouped_mm")
        and x.dtype == gate_up.dtype == down.dtype == torch.bfloat16
        and gate_up_bias is None
        and down_bias is None
        and chosen.numel() > _MANY_ROWS * num_experts
        and x.shape[1] % _ALIGNED_COLUMNS == down.shape[1] % _ALIGNED_COLUMNS == 0
        and x.device.type == "cuda"
        and card(x.device).capability // 10 in _CAPABILITIES
    )


def many_through_experts(
    x: Tensor, shares: Tensor, chosen: Tensor, gate_up: Tensor, down: Tensor, activation: str
) -> Tensor:
    """Compute for each token the weighted sum of its experts' results, fp32 [tokens, hidden].

    `dispatch.grouped_experts` describes the arguments. At most three times `intermediate`, and `hidden`, values of each
    pair of a token and a choice are in memory at once, as the plan counts.
    """
    (tokens, hidden), (pairs, k) = x.shape, (chosen.numel(), chosen.shape[1])
    num_experts, where = len(down) // hidden, {"dtype": torch.int32, "device": x.device}
    order, places = torch.empty(pairs, **where), torch.empty(pairs, **where)
    starts = torch.empty(num_experts + 1, **where)
    sort_launch(chosen, order, starts, places)()
    ends = starts[1:]
    rows = x.index_select(0, order // k)
    inner = F.grouped_mm(rows, gate_up.view(num_experts, -1, hidden).transpose(1, 2), offs=ends)
    del rows
    inner = gate(inner, activation)
    made = F.grouped_mm(inner, down.view(num_experts, hidden, -1).transpose(1, 2), offs=ends)
    del inner
    total = torch.empty(tokens, hidden, dtype=torch.float32, device=x.device)
    add_launch(made, shares, total, places)()
    return total
