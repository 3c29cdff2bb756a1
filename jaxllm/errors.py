"""The two exceptions that train.py turns into one line and an exit status."""


class InputError(ValueError):
    """Bad input: a key, a value, a file.  One line that names the value, the limit and the fix.

    train.py prints it as `error: ...` and exits with status 2.
    """


class RunError(RuntimeError):
    """A run that cannot go on (a loss that is not finite, memory that ran out); exit status 1."""
