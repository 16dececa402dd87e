"""What adaptation may change of a plan: nothing that the memory of its buffers does not allow."""

import pytest

from batchgen.core.kv_placement import KVPlacement
from batchgen.core.request import SamplingParams
from batchgen.schedule.adaptation import Adaptation, Measured
from batchgen.schedule.block_manager import BlockManager
from batchgen.schedule.scheduler import Scheduler
from batchgen.schedule.scheduler_limits import SchedulerLimits
from batchgen.schedule.sequence import Sequence
from batchgen.schedule.step_graph import LANES


@pytest.mark.parametrize("planned", [{"streamed": 8}, {"streamed": 7, "cpu": 1}])
def test_the_cpu_attends_only_where_it_was_to(planned):
    """However long compute waits for copies: queries and results need buffers, and 4-bit weights another layer's."""
    limits = SchedulerLimits(
        8, 64, kv_seqs={KVPlacement(name): count for name, count in planned.items()}, compute_tier="gpu"
    )
    scheduler = Scheduler({"cpu": BlockManager(100, 16)}, limits)
    for i in range(8):
        scheduler.add(Sequence(i, i, 0, [5] * 4, SamplingParams(max_tokens=8)))
    scheduler.schedule()
    adaptation = Adaptation(scheduler, planned_output_len=8, expected_output_len=None)
    nothing = dict.fromkeys(LANES, 0.0)
    for _ in range(8):
        adaptation.after_sweep(Measured(1.0, 8, nothing, nothing | {"h2d": 0.9}))
    moved = scheduler.limits.quota("cpu") > planned.get("cpu", 0)
    assert moved == ("cpu" in planned) == bool(adaptation.changes)
