"""Agreement of processes on the checkpoints that they see.

If a single host does not see a checkpoint, a disk is probably not mounted there. This
is an error: the checkpoint is not treated as missing.

All processes call these functions in the same order.
"""

import json
import socket
import time
from collections.abc import Callable
from typing import Any, TypeVar

from xshard import errors
from xshard.checkpoint import format as format_lib
from xshard.checkpoint import store as store_lib
from xshard.pod import host_collectives

_T = TypeVar("_T")
# A host may cache the listing of a folder on a network disk for about this long.
LAG_SECONDS = 65.0
_LOOK_AGAIN_SECONDS = 1.0
# A wait that takes longer than this is logged.
_LOG_AFTER_SECONDS = 3.0
_FIX = (
    "Is the same disk mounted on all hosts, and the same path given? Nothing was "
    "changed."
)


def on_process_0(channel: host_collectives.Channel, action: Callable[[], Any]) -> Any:
    """Runs an action on a store on process 0, and returns its result on all processes.

    Args:
      channel: connects the processes.
      action: returns a JSON-serializable value.

    Raises:
      CheckpointError: on all processes, if the action fails. A bug in it is raised as
        it is on process 0.
    """

    def action_with_reasons() -> Any:
        try:
            return action()
        except store_lib.CheckpointError:
            raise
        except errors.UserError as e:
            raise store_lib.CheckpointError(str(e)) from e
        except (OSError, ValueError, RuntimeError) as e:
            # tensorstore raises ValueError and RuntimeError for what is wrong with a
            # store.
            raise store_lib.CheckpointError(store_lib.reason(e)) from e

    return channel.on_process_0(action_with_reasons, store_lib.CheckpointError)


def choose(
    channel: host_collectives.Channel,
    store: store_lib.Store,
    on_0: Callable[[], list[format_lib.SaveAttempt]],
    log: Callable[[str], None],
) -> list[format_lib.SaveAttempt]:
    """Returns the checkpoints that process 0 chooses, once all processes see them.

    Process 0 decides for all, since two listings of a store may differ from one instant
    to the next.

    Args:
      channel: connects the processes.
      store: the store of the checkpoints.
      on_0: returns the checkpoints; called on process 0. If it returns none, no process
        may see any.
      log: called with a message when the wait takes long.

    Raises:
      CheckpointError: on all processes, if a process does not see what process 0 sees,
        or cannot read the store.
    """
    folders = on_process_0(channel, lambda: [attempt.folder for attempt in on_0()])

    def problem() -> str:
        seen = {attempt.folder for attempt in format_lib.committed(store)}
        if seen and not folders:
            return f"sees {len(seen)} checkpoints in {store}, but process 0 sees none"
        for folder in folders:
            if folder not in seen:
                return f"does not see {store}/{folder}, but process 0 does"
        return ""

    wait_until_none(channel, problem, log)
    return [format_lib.attempt_in(store, folder) for folder in folders]


def check_owner(
    channel: host_collectives.Channel,
    store: store_lib.Store,
    owner: format_lib.Owner,
    log: Callable[[str], None],
) -> None:
    """Checks that every process sees the folder that process 0 sees.

    Args:
      channel: connects the processes.
      store: the folder.
      owner: the run, which process 0 has recorded in the folder.
      log: called with a message when the wait takes long.

    Raises:
      CheckpointError: on all processes, if one of them sees another folder.
    """

    def problem() -> str:
        seen = format_lib.read_owner(store)
        if seen is not None and seen.id == owner.id:
            return ""
        whose = "no run" if seen is None else f"run {seen.id} ({seen.workdir})"
        return (
            f"sees that {store} belongs to {whose}, but process 0 recorded run "
            f"{owner.id} as its owner"
        )

    wait_until_none(channel, problem, log)


def wait_until_none(
    channel: host_collectives.Channel,
    problem: Callable[[], str],
    log: Callable[[str], None],
) -> None:
    """Waits until no process sees a problem, for as long as a listing may lag behind.

    Args:
      channel: connects the processes.
      problem: returns what is wrong with what this process sees; empty: nothing. Not
        called if there is only one process.
      log: called with a message when the wait takes long.

    Raises:
      CheckpointError: on all processes, if a problem persists or a process cannot look.
    """
    if channel.count == 1:
        return
    begin = time.monotonic()
    has_logged = False
    while True:
        seconds = time.monotonic() - begin
        # Process 0's clock decides for all, so that all processes leave the loop in the
        # same round.
        is_over = channel.gather(seconds > LAG_SECONDS)[0]
        problems = []
        for host, text in _texts_by_host(channel, problem):
            if text:
                problems.append(f"{host} {text}")
        if not problems:
            return
        if is_over:
            raise store_lib.CheckpointError(f"{'; '.join(problems)}. {_FIX}")
        if seconds > _LOG_AFTER_SECONDS and not has_logged:
            has_logged = True
            log(
                f"{problems[0]}; waiting at most {LAG_SECONDS:.0f} s for this to change"
            )
        time.sleep(_LOOK_AGAIN_SECONDS)


def read(
    channel: host_collectives.Channel,
    attempt: format_lib.SaveAttempt,
    read_once: Callable[[], _T],
) -> tuple[_T | None, str]:
    """Reads this process's part of a checkpoint, again if that fails.

    A checkpoint is damaged only if it is wrong each time that it is read, and all
    processes see the same files.

    Args:
      channel: connects the processes.
      attempt: the checkpoint.
      read_once: reads this process's part; raises DamagedError, UnreadableError or
        another error.

    Returns:
      The part and an empty text; or, on all processes, None and a description of the
      damage.

    Raises:
      CheckpointError: on all processes, for an error that is not damage and persists.
    """
    damage = ""
    for wait_seconds in (*format_lib.READ_AGAIN_SECONDS, None):
        content = None
        answer = {}
        try:
            content = read_once()
        except format_lib.DamagedError as e:
            answer = {"damaged": str(e)}
        except format_lib.UnreadableError as e:
            answer = {"unreadable": str(e)}
        except Exception as e:
            # Any error must reach the channel, since the other processes wait there.
            answer = {"error": store_lib.reason(e)}
        answers = channel.gather(answer)
        # Every process repeats its read if one of them failed, so that all keep making
        # the same gathers.
        if not any(answers):
            return content, ""
        damage = _verdict(answers, is_last=wait_seconds is None)
        if wait_seconds is not None:
            time.sleep(wait_seconds)
    _check_same_files(channel, attempt, damage)
    return None, damage


def _verdict(answers: list[dict[str, str]], *, is_last: bool) -> str:
    """Describes the damage that the processes reported.

    Raises:
      CheckpointError: for an error that is not damage, or if the checkpoint is still
        unreadable at the last try.
    """
    error = _joined(answers, "error")
    if error:
        raise store_lib.CheckpointError(error)
    unreadable = _joined(answers, "unreadable")
    if is_last and unreadable:
        raise store_lib.CheckpointError(
            f"{unreadable} The checkpoint may be whole: check the disk, then start "
            "again."
        )
    return _joined(answers, "damaged")


def _joined(answers: list[dict[str, str]], kind: str) -> str:
    """Joins the texts of one kind.

    Duplicates are dropped, since several processes may have read the same file.
    """
    texts = [answer[kind] for answer in answers if kind in answer]
    return " ".join(dict.fromkeys(texts))


def _check_same_files(
    channel: host_collectives.Channel, attempt: format_lib.SaveAttempt, damage: str
) -> None:
    """Raises CheckpointError if processes see different files of a damaged checkpoint.

    In that case a host may have mounted another disk, and the checkpoint must not be
    marked as damaged.
    """
    if channel.count == 1:
        return

    def digest() -> str:
        names = attempt.store.names(attempt.prefix)
        checksum = format_lib.checksum(json.dumps(names).encode())
        return f"{len(names)} files ({checksum[:8]})"

    (first_host, first_digest), *others = _texts_by_host(channel, digest)
    for host, other_digest in others:
        if other_digest != first_digest:
            raise store_lib.CheckpointError(
                f"{damage} But {host} sees {other_digest}, and {first_host} sees "
                f"{first_digest}. {_FIX}"
            )


def _texts_by_host(
    channel: host_collectives.Channel, look: Callable[[], str]
) -> list[tuple[str, str]]:
    """Returns the name of each process, and what `look` returns there.

    Raises:
      CheckpointError: on all processes, if one of them cannot look.
    """
    answer = {"name": f"process {channel.index} on {socket.gethostname()}"}
    bug = None
    try:
        answer["text"] = look()
    except store_lib.CheckpointError as e:
        answer["error"] = str(e)
    except Exception as e:
        # Any error must reach the channel, since the other processes wait there.
        bug = e
        answer["error"] = store_lib.reason(e)
    answers = channel.gather(answer)
    if bug is not None:
        raise bug
    for answer in answers:
        if "error" in answer:
            raise store_lib.CheckpointError(f"{answer['name']}: {answer['error']}")
    return [(answer["name"], answer["text"]) for answer in answers]
