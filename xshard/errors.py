"""The error that is the user's to fix, told from a bug by its type; and where in the user's code a bug is."""

import os
import traceback
import types
from collections.abc import Iterator

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
        elif called and _is_users(file):
            return step
        step = step.tb_next
    return None


def location(e: BaseException) -> str:
    """Returns the place in the user's code where an exception was raised, such as 'experiment.py:36, in Net.forward'.

    Empty if it was not raised by the user's code, nor by what that has called.
    """
    if isinstance(e, SyntaxError) and e.filename:
        return f"{_shown(e.filename)}:{e.lineno}"
    frames = list(_users_frames(e))
    if not frames:
        return ""
    method, (function, file, line) = frames[0][0], frames[-1]
    where = f"{_shown(file)}:{line}, in {function}"
    return where if function == method else f"{where}, called by {method}"


def is_frameworks(e: BaseException) -> bool:
    """Returns whether the framework itself has raised this error, or met it in the standard library."""
    files = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(e.__traceback__)]
    own = [file for file in files if not _is_standard(file)]
    return not own or _is_framework(own[-1])


def place_of(function: object) -> str:
    """Returns the place where a function, a method or a class is defined, such as 'experiment.py:29'; empty if unknown."""
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if code is None:
        return ""
    return f"{_shown(code.co_filename)}:{code.co_firstlineno}"


def _users_frames(e: BaseException) -> Iterator[tuple[str, str, int]]:
    for frame, line in traceback.walk_tb(from_users_code(e)):
        code = frame.f_code
        if _is_users(code.co_filename):
            yield code.co_qualname, code.co_filename, line


def _is_framework(file: str) -> bool:
    return file.startswith(_FRAMEWORK) and not file.startswith(_TEMPLATE)


def _is_standard(file: str) -> bool:
    inside = file.startswith(_STANDARD) and not any(part in file for part in _INSTALLED)
    return inside or file.startswith("<frozen")


def _is_users(file: str) -> bool:
    installed = any(part in file for part in _INSTALLED)
    return not (installed or _is_framework(file) or _is_standard(file))


def _shown(file: str) -> str:
    """A path as seen from here, where it is below."""
    relative = os.path.relpath(file)
    return file if relative.startswith(os.pardir) else relative
