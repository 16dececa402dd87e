"""A few jobs of benchmarks/soak.py: memory limit, KV on disk, and all that disturbs a job."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from thorough import SEED

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "soak.py"


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(1800)
def test_a_few_minutes_of_it(tmp_path):
    output = tmp_path / "soak.json"
    command = [sys.executable, SCRIPT, "--hours", "0.05", "--rows", "40", "--seed", str(SEED), "--output", output]
    done = subprocess.run(command, capture_output=True, text=True)
    if " can be " in done.stderr.splitlines()[-1]:  # set no limit, or mount no file system
        pytest.skip(done.stderr.splitlines()[-1])
    found = json.loads(output.read_text())
    assert found["wrong"] == [] and found["jobs"] > 0 and sum(found["disturbed"].values()) > 0
