"""Mistakes that the user can fix."""


class UserError(ValueError):
    """A command, a config, data or a checkpoint that cannot be used as given.

    The message has what was received, the rule, and the fix. Programs print only this
    message. Any other exception is a bug, of the framework or of an experiment, and is
    printed with its traceback.
    """
