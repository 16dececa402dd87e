"""The command line in this process, as a person meets it."""

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
