"""The error that is the user's to fix, told from a bug by its type."""


class UserError(ValueError):
    """A command, a config, data or a checkpoint that cannot be used as given.

    The message says what was received, the rule, and the fix, and is all that a program prints of it. Any
    other exception is a bug, of the framework or of an experiment, and shows where it was raised.
    """
