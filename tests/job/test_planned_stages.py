"""The progress of a job through the stages of its plan."""

import pytest

from batchgen.core.plan import Stage
from batchgen.job.planned_stages import PlannedStages, StageCounts, progress_of

# Prompts alone, prompts beside decoding, the last rows in sweeps that are nearly empty.
STAGES = (
    Stage(20.0, 40_000.0, "prefill", 20.0, "compute"),
    Stage(60.0, 50_000.0, "steady", 60.0, "compute"),
    Stage(20.0, 2_000.0, "tail", 20.0, "compute"),
)


def test_a_job_as_planned_has_done_the_seconds_of_its_tokens():
    counts = StageCounts(0.0, 500, 65_000, 25_000, 25_000)
    done_s, left_s = progress_of(PlannedStages(1000, STAGES, 50.0, False), counts)
    assert done_s == pytest.approx(50.0, rel=0.03) and done_s + left_s == pytest.approx(100.0, rel=0.03)


def test_outputs_that_end_earlier_than_they_must_count_as_they_are():
    """The second half of rows that end after 20 of 200 tokens is expected to take as long as the first."""
    stages = (Stage(100.0, 300_000.0, "steady", 100.0, "compute"),)  # a thousand rows of a hundred prompt tokens
    counts = StageCounts(seconds=20.0, rows=500, tokens=60_000, generated=10_000, finished=10_000)
    done_s, left_s = progress_of(PlannedStages(1000, stages, 200.0, True), counts)
    assert left_s == pytest.approx(done_s, rel=0.1)
    done_s, left_s = progress_of(PlannedStages(1000, stages, 200.0, False), counts)
    assert left_s > 2 * done_s


def test_rows_under_way_count_with_what_they_have():
    """The first rows to end are the short ones: by them alone the others would seem to be short too."""
    stages = (Stage(100.0, 300_000.0, "steady", 100.0, "compute"),)
    planned = PlannedStages(1000, stages, 200.0, True)
    long, short = (
        StageCounts(seconds=30.0, rows=100, tokens=90_000, generated=generated, finished=500)
        for generated in (20_000, 500)
    )
    assert progress_of(planned, long)[1] > 2 * progress_of(planned, short)[1]
