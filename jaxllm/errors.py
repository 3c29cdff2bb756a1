"""The two exceptions that a command turns into one line and an exit status (cli.exit_status)."""


class InputError(ValueError):
    """Bad input: a key, a value, a file.  One line that names the value, the limit and the fix.

    It is printed as `error: ...`, and the command exits with status 2.
    """


class RunError(RuntimeError):
    """A run that cannot go on (a loss that is not finite, memory that ran out); exit status 1."""
