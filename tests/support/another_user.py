"""Files and directories that this process may not open."""

import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

_NOBODY = 65534


@contextmanager
def another_user():
    """Whatever is done meanwhile is done by a user without privileges: a process of root's would open anything."""
    if os.geteuid() != 0:
        yield
        return
    os.setegid(_NOBODY)
    os.seteuid(_NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)


@contextmanager
def open_folder():
    """A new folder that any user may look into: those of pytest are their owner's alone."""
    folder = Path(tempfile.mkdtemp())
    folder.chmod(0o777)
    try:
        yield folder
    finally:
        for path in [folder, *folder.rglob("*")]:
            if path.is_dir():
                path.chmod(0o700)
        shutil.rmtree(folder)
