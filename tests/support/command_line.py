"""The command line in this process, as a person meets it."""

import json

from click.testing import CliRunner

from batchgen.cli import commands
from batchgen.core.errors import BatchgenError


def invoke(*args, stdin=None):
    """(exit code, stdout, stderr or the message of the error that main() would print)."""
    result = CliRunner().invoke(commands.cli, [str(a) for a in args], input=stdin)
    if isinstance(result.exception, BatchgenError):
        return result.exception.exit_code, result.stdout, str(result.exception)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def planned(*args):
    """What `batchgen plan` prints."""
    code, stdout, message = invoke("plan", *args, "--progress", "none")
    assert code == 0, message
    return stdout


def planned_json(*args):
    return json.loads(planned(*args, "--json"))


def refused(*args):
    """The one line that says why."""
    code, stdout, message = invoke(*args, "--progress", "none")
    assert code == 2 and stdout == "" and len(message.splitlines()) == 1, message
    return message
