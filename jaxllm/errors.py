"""The one exception for what a user can put right."""


class InputError(ValueError):
    """Bad input: a key, a value, a file.  One line that names the value, the limit and the fix.

    train.py prints it as `error: ...` and exits with status 2.
    """
