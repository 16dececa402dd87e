"""Traces in folders that other users may write to."""

import os

import pytest

from batchgen.core.errors import InputError
from batchgen.schedule.trace import TraceWriter


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make another user's link")
def test_another_users_link_is_not_written_through(tmp_path):
    (tmp_path / "precious").write_text("kept")
    os.symlink(tmp_path / "precious", tmp_path / "trace.json")
    os.lchown(tmp_path / "trace.json", 65534, 65534)
    with pytest.raises(InputError, match="link of another user"):
        TraceWriter(tmp_path / "trace.json", "job")
    assert (tmp_path / "precious").read_text() == "kept"


def test_a_link_of_ones_own_is_followed(tmp_path):
    os.symlink(tmp_path / "today.json", tmp_path / "trace.json")
    TraceWriter(tmp_path / "trace.json", "job").close()
    assert (tmp_path / "today.json").read_text().startswith("[")
