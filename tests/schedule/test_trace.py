"""The timeline of a run as a file that trace viewers read."""

import itertools
import json
import os

import pytest

from batchgen.core.errors import BatchgenError, InputError
from batchgen.core.kv_placement import KVPlacement
from batchgen.planner.step_simulator import simulate
from batchgen.runtime.lanes import Lanes
from batchgen.schedule.step_graph import LANES, BatchFlow, Step, Streams
from batchgen.schedule.sweeps import Sweeps
from batchgen.schedule.trace import TraceWriter

STREAMS = Streams(True, (True, True), (True, False), vocabulary_chunks=2)
EVERY = BatchFlow(
    frozenset({KVPlacement.DEVICE, KVPlacement.STREAMED, KVPlacement.CPU}),
    history=True,
    stored=True,
    disk_read=True,
    disk_write=True,
    hidden_on_host=True,
)


def spans(path):
    """The Steps in a trace, and the name of each row."""
    events = json.loads(path.read_text())
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    return [e for e in events if e["ph"] == "X"], rows


def test_every_step_is_in_the_row_of_its_lane(tmp_path):
    path = tmp_path / "run.json"
    steps = list(Sweeps(STREAMS).steps([EVERY, BatchFlow()]))
    trace = TraceWriter(path, "model: run")
    lanes = Lanes(lambda step: None, on_step=trace.add)
    lanes.execute(steps)
    lanes.drain()
    lanes.close()
    trace.close()
    trace.close()
    found, rows = spans(path)
    assert [rows[i] for i in sorted(rows)] == list(LANES)
    assert json.loads(path.read_text())[0]["args"] == {"name": "model: run"}

    def key(step):
        return step.lane, step.kind, step.sweep, step.layer, step.batch

    shown = [(rows[e["tid"]], e["name"], e["args"]["sweep"], e["args"]["layer"], e["args"]["batch"]) for e in found]
    assert sorted(shown) == sorted(key(s) for s in steps)
    assert all(e["cat"] == rows[e["tid"]] and e["dur"] >= 0 for e in found)
    for row in rows:
        own = sorted((e["ts"], e["ts"] + e["dur"]) for e in found if e["tid"] == row)
        assert all(a[1] <= b[0] + 0.2 for a, b in itertools.pairwise(own)), "rows hold no overlapping spans"


def test_times_are_in_microseconds_and_never_negative(tmp_path):
    """Also of a Step that began before the first one to end did."""
    path = tmp_path / "plan.json"
    trace = TraceWriter(path, "plan")
    seconds = {"disk_read": 2.5, "compute": 0.25}
    steps = [
        Step(0, "read_weight", "disk_read", 0, 3, 0, None, None, ()),
        Step(1, "embed", "compute", 0, 0, 1, None, None, ()),
    ]
    simulate(steps, lambda s: seconds[s.lane], on_step=trace.add)
    trace.close()
    found, _ = spans(path)
    assert {(e["name"], e["ts"], e["dur"]) for e in found} == {("read_weight", 0.0, 2.5e6), ("embed", 0.0, 0.25e6)}
    assert {tuple(e["args"].values()) for e in found} == {(0, 3, 0), (0, 0, 1)}


def test_a_trace_that_was_never_closed_lacks_only_its_end(tmp_path):
    path = tmp_path / "run.json"
    trace = TraceWriter(path, "run")
    for i in range(1000):
        trace.add(Step(i, "pre", "compute", 0, 0, 0, None, None, ()), i, i + 0.5)
    text = path.read_text()
    assert len(json.loads(text[: text.rindex(",\n")] + "]")) > 900
    trace.close()


def test_a_path_that_cannot_be_written(tmp_path):
    with pytest.raises(InputError, match=r"--trace .*missing/run.json cannot be written: No such file"):
        TraceWriter(tmp_path / "missing" / "run.json", "run")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_one_clear_error():
    trace = TraceWriter("/dev/full", "run")
    lanes = Lanes(lambda step: None, on_step=trace.add)
    with pytest.raises(BatchgenError, match="--trace /dev/full takes no more: No space left"):
        lanes.execute(Step(i, "pre", "compute", 0, 0, 0, None, None, ()) for i in range(10_000))
    lanes.close()
    with pytest.raises(BatchgenError, match="--trace /dev/full takes no more"):
        trace.close()
    trace.close()
