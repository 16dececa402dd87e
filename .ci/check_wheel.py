"""Installs a wheel into an environment that has nothing else of this project, and runs a job there.

    .venv/bin/python .ci/check_wheel.py dist/batchgen-*.whl

Other packages are those of the environment that this runs in. The job's model is a tiny one of random weights.
"""

from __future__ import annotations

import json
import subprocess
import sys
import sysconfig
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
_JOB = """
import sys
from pathlib import Path

sys.path.insert(0, sys.argv[1])
from tiny_models import make_tiny_model

make_tiny_model("llama", Path("model"))
"""


def main() -> None:
    (wheel,) = (Path(name).resolve() for name in sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        environment = home / "environment"
        venv.create(environment, with_pip=False)
        python = environment / "bin" / "python"
        run = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", str(wheel)]
        subprocess.run(run, check=True)
        (site,) = environment.glob("lib/python*/site-packages")
        # Folders that a .pth file adds come last, and their own .pth files are not read: batchgen is the wheel's.
        (site / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
        subprocess.run([python, "-c", _JOB, ROOT / "tests" / "support"], check=True, cwd=home)
        rows = [{"prompt": text} for text in ("The ferry left at six.", "Two plus two is four.")]
        (home / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
        job = ["run", "--model", "model", "--input", "rows.jsonl", "--prompt-column", "prompt", "--max-tokens", "4"]
        command = [environment / "bin" / "batchgen", *job, "--output", "out.jsonl"]
        subprocess.run(command, check=True, cwd=home)
        answers = [json.loads(line) for line in (home / "out.jsonl").read_text().splitlines()]
        where = subprocess.run(
            [python, "-c", "from batchgen.ops import cpp, _kernels; print(_kernels.__file__, *cpp.built())"],
            check=True, cwd=home, capture_output=True, text=True,
        ).stdout.split()  # fmt: skip
        if len(answers) != len(rows) or not where[0].startswith(str(site)):
            sys.exit(f"the wheel's job gave {answers} with {where[0]}")
        print(f"{wheel.name}: a job of {len(rows)} rows ran; its kernels: {', '.join(where[1:])}")


if __name__ == "__main__":
    main()
