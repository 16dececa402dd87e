"""Streams that take nothing."""

import os


def gone():
    """A stream over a pipe that nobody reads."""
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


def full():
    """A stream to a device that takes nothing."""
    return open("/dev/full", "w")
