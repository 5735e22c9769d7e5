"""The error that is the user's to fix, told from a bug by its type; and where in the user's code a bug is."""

import os
import traceback
import types

_PACKAGE = os.path.dirname(os.path.abspath(__file__))
# The launcher stands beside the package. What the template holds is a user's.
_LAUNCHER = os.path.join(os.path.dirname(_PACKAGE), "launch")
_FRAMEWORK = (_PACKAGE + os.sep, _LAUNCHER + os.sep)
_TEMPLATE = os.path.join(_PACKAGE, "new", "template") + os.sep
_STANDARD = os.path.dirname(os.__file__) + os.sep
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


class UserError(ValueError):
    """A command, a config, data or a checkpoint that cannot be used as given.

    The message says what was received, the rule, and the fix, and is all that a program prints of it. Any
    other exception is a bug, of the framework or of an experiment, and shows where it was raised.
    """


def from_users_code(e: BaseException) -> types.TracebackType | None:
    """The traceback from the first frame of the user's own code on that the framework has called; None: no such."""
    called = False
    step = e.__traceback__
    while step is not None:
        file = step.tb_frame.f_code.co_filename
        if _is_framework(file):
            called = True
        elif called and is_users(file):
            return step
        step = step.tb_next
    return None


def location(e: BaseException) -> str:
    """Returns the place in the user's code where an exception was raised, such as 'experiment.py:36, in Net.forward'.

    Empty if it was not raised by the user's code, nor by what that has called.
    """
    if isinstance(e, SyntaxError) and e.filename:
        return f"{shown(e.filename)}:{e.lineno}"
    frames = []
    for frame, line in traceback.walk_tb(from_users_code(e)):
        if is_users(frame.f_code.co_filename):
            frames.append((frame.f_code, line))
    if not frames:
        return ""
    # The first is the method that the framework has called, the last is where it has failed.
    method, _ = frames[0]
    function, line = frames[-1]
    where = f"{shown(function.co_filename)}:{line}, in {function.co_qualname}"
    if function.co_qualname == method.co_qualname:
        return where
    return f"{where}, called by {method.co_qualname}"


def is_frameworks(e: BaseException) -> bool:
    """Returns whether the framework itself has raised this error, or met it in the standard library."""
    is_own = True
    for frame, _ in traceback.walk_tb(e.__traceback__):
        file = frame.f_code.co_filename
        # The last frame decides that is not the standard library's.
        if not is_standard(file):
            is_own = _is_framework(file)
    return is_own


def place_of(function: object) -> str:
    """Returns the place where a function, a method or a class is defined, such as 'experiment.py:29'; empty if unknown."""
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if code is None:
        return ""
    return f"{shown(code.co_filename)}:{code.co_firstlineno}"


def _is_framework(file: str) -> bool:
    return file.startswith(_FRAMEWORK) and not file.startswith(_TEMPLATE)


def _is_installed(file: str) -> bool:
    return any(part in file for part in _INSTALLED)


def is_standard(file: str) -> bool:
    """Returns whether a source file is of the standard library."""
    if file.startswith("<frozen"):
        return True
    # Where there is no virtual environment, installed packages are below the standard library.
    return file.startswith(_STANDARD) and not _is_installed(file)


def is_users(file: str) -> bool:
    """Returns whether a source file is the user's: not the framework's, nor installed, nor of the standard library."""
    return not (_is_installed(file) or _is_framework(file) or is_standard(file))


def shown(file: str) -> str:
    """A path as seen from here, where it is below."""
    relative = os.path.relpath(file)
    if relative.startswith(os.pardir):
        return file
    return relative
