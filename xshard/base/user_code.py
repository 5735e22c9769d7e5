"""The place of a bug, or of a mistake, in the user's code."""

import os
import traceback
import types

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
# The launcher lies beside the package.
_LAUNCHER = os.path.join(os.path.dirname(_PACKAGE), "launch")
_FRAMEWORK = (_PACKAGE + os.sep, _LAUNCHER + os.sep)
# The template counts as a user's code, which it becomes.
_TEMPLATE = os.path.join(_PACKAGE, "new", "template") + os.sep
_STANDARD = os.path.dirname(os.__file__) + os.sep
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")


def user_traceback(e: BaseException) -> types.TracebackType | None:
    """Returns the traceback from the first frame of user code on.

    Code counts from where the framework calls it. None if there is none.
    """
    is_called = False
    traceback_here = e.__traceback__
    while traceback_here is not None:
        file = traceback_here.tb_frame.f_code.co_filename
        if _is_framework(file):
            is_called = True
        elif is_called and is_user_file(file):
            return traceback_here
        traceback_here = traceback_here.tb_next
    return None


def location(e: BaseException) -> str:
    """Returns the place in the user's code where an exception was raised.

    Returns:
      A text such as 'experiment.py:36, in Net.forward'; empty if it was raised neither
      in the user's code nor in anything that code called.
    """
    if isinstance(e, SyntaxError) and e.filename:
        return f"{display_path(e.filename)}:{e.lineno}"
    frames = []
    for frame, line in traceback.walk_tb(user_traceback(e)):
        if is_user_file(frame.f_code.co_filename):
            frames.append((frame.f_code, line))
    if not frames:
        return ""
    # The first frame is the method that the framework called, the last one is where it
    # failed.
    method, _ = frames[0]
    function, line = frames[-1]
    where = f"{display_path(function.co_filename)}:{line}, in {function.co_qualname}"
    if function.co_qualname == method.co_qualname:
        return where
    return f"{where}, called by {method.co_qualname}"


def is_framework_error(e: BaseException) -> bool:
    """Returns whether the framework raised an error, or the standard library for it."""
    is_framework = True
    for frame, _ in traceback.walk_tb(e.__traceback__):
        file = frame.f_code.co_filename
        # The last frame outside of the standard library decides.
        if not is_stdlib_file(file):
            is_framework = _is_framework(file)
    return is_framework


def definition_location(function: object) -> str:
    """Returns the place where a function or a method is defined.

    Returns:
      A text such as 'experiment.py:29'; empty if the place is unknown.
    """
    function = getattr(function, "__func__", function)
    code = getattr(function, "__code__", None)
    if code is None:
        return ""
    return f"{display_path(code.co_filename)}:{code.co_firstlineno}"


def _is_framework(file: str) -> bool:
    return file.startswith(_FRAMEWORK) and not file.startswith(_TEMPLATE)


def _is_installed(file: str) -> bool:
    return any(part in file for part in _INSTALLED)


def is_stdlib_file(file: str) -> bool:
    """Returns whether a source file belongs to the standard library."""
    # Modules that Python has built in, and the methods that it writes for dataclasses.
    if file.startswith(("<frozen", "<string>")):
        return True
    # Without a virtual environment, installed packages lie below the standard library's
    # directory.
    return file.startswith(_STANDARD) and not _is_installed(file)


def is_user_file(file: str) -> bool:
    """Returns whether a source file is the user's.

    It is if it is neither the framework's nor installed nor in the standard library.
    """
    return not (_is_installed(file) or _is_framework(file) or is_stdlib_file(file))


def display_path(file: str) -> str:
    """Returns a path below the current directory relative to it, others unchanged."""
    try:
        relative = os.path.relpath(file)
    except FileNotFoundError:
        # The current directory was removed.
        return file
    return file if relative.startswith(os.pardir) else relative
