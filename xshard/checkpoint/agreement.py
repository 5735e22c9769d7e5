"""Agreement of processes on what they see of checkpoints: an absence on one host is a disk that is not mounted there."""

import json
import socket
import time
from collections.abc import Callable
from typing import TypeVar

from xshard.checkpoint import format as format_lib
from xshard.checkpoint import source
from xshard.checkpoint import store as store_lib
from xshard.pod import processes

_T = TypeVar("_T")
# A host may keep for so long what a folder on a network was like.
LAG_SECONDS = 65.0
_LOOK_AGAIN_SECONDS = 1.0
_SAY_SECONDS = 3.0
# After a read that fails, or gives other bytes than were written: a disk on a network may do better the next time.
_READ_AGAIN_SECONDS = (0.2, 1.0)
_FIX = "Is the same disk mounted on all hosts, and the same path given? Nothing was changed."


def check_seen(
    store: store_lib.Store,
    exchange: processes.Exchange,
    folders: list[str],
    say: Callable[[str], None],
) -> None:
    """Sees that every process has these checkpoints before it; of no checkpoints, that none has any.

    Args:
      store: where they are; all processes call alike.
      exchange: how they agree.
      folders: their names, equal on all processes.
      say: takes a message where that takes long.

    Raises:
      CheckpointError: on all processes, if it is not so, or if one of them cannot look.
    """

    def problem() -> str:
        there = {attempt.folder for attempt in format_lib.committed(store)}
        if not folders and there:
            return f"sees {len(there)} checkpoints in {store}, where process 0 sees none"
        lacking = [folder for folder in folders if folder not in there]
        return f"does not see {store}/{lacking[0]}, which process 0 sees" if lacking else ""

    if exchange.count > 1:
        _wait_until_none(problem, exchange, say)


def check_owner(
    store: store_lib.Store,
    exchange: processes.Exchange,
    owner: format_lib.Owner,
    say: Callable[[str], None],
) -> None:
    """Sees that the folder which process 0 has made this run's is the one that every process sees.

    Raises:
      CheckpointError: on all processes, if it is not.
    """

    def problem() -> str:
        there = format_lib.read_owner(store)
        if there is not None and there.id == owner.id:
            return ""
        whose = "nobody's" if there is None else f"run {there.id}'s ({there.workdir})"
        return f"sees {store} as {whose}, where process 0 has made it run {owner.id}'s"

    if exchange.count > 1:
        _wait_until_none(problem, exchange, say)


def read(
    attempt: format_lib.Attempt, exchange: processes.Exchange, read_once: Callable[[], _T]
) -> tuple[_T | None, str]:
    """Returns what each process reads of a checkpoint; or None, and what is damaged in it.

    Damaged is what comes out wrong each time that it is read, where all processes see the same files.

    Args:
      attempt: the checkpoint.
      exchange: how the processes agree.
      read_once: reads this process's part; raises DamagedError, UnreadableError or another error.

    Raises:
      CheckpointError: on all processes, for an error that is no damage, and does not pass.
    """
    damage = ""
    for wait_seconds in (*_READ_AGAIN_SECONDS, None):
        found, said = None, {}
        try:
            found = read_once()
        except source.DamagedError as e:
            said = {"damaged": str(e)}
        except source.UnreadableError as e:
            said = {"unreadable": str(e)}
        except Exception as e:
            # Whatever it is, the others wait to hear of it.
            said = {"error": store_lib.reason(e)}
        answers = [json.loads(answer) for answer in exchange(json.dumps(said))]
        if not any(answers):
            return found, ""
        damage = _verdict(answers, is_last=wait_seconds is None)
        if wait_seconds is not None:
            time.sleep(wait_seconds)
    check_same_files(attempt, exchange, damage)
    return None, damage


def check_same_files(
    attempt: format_lib.Attempt, exchange: processes.Exchange, damage: str
) -> None:
    """Sees that all processes look at the same files of a checkpoint in which some of them find damage.

    Raises:
      CheckpointError: on all processes, if they do not.
    """
    if exchange.count == 1:
        return
    said = _said(exchange, lambda: _digest(attempt))
    for host, digest in said:
        if digest != said[0][1]:
            raise format_lib.CheckpointError(
                f"{damage} But {host} sees {digest}, and {said[0][0]} {said[0][1]}: {_FIX}"
            )


def _wait_until_none(
    problem: Callable[[], str], exchange: processes.Exchange, say: Callable[[str], None]
) -> None:
    """Looks again and again until no process has a problem, as long as a listing may lag behind."""
    begin, has_said = time.monotonic(), False
    while True:
        seconds = time.monotonic() - begin
        # Process 0's clock counts for all: they stop waiting together.
        is_over = json.loads(exchange(json.dumps(seconds > LAG_SECONDS))[0])
        found = [f"{host} {text}" for host, text in _said(exchange, problem) if text]
        if not found:
            return
        if is_over:
            raise format_lib.CheckpointError(f"{'; '.join(found)}. {_FIX}")
        if seconds > _SAY_SECONDS and not has_said:
            has_said = True
            say(f"{found[0]}; waiting for it, at most {LAG_SECONDS:.0f} s")
        time.sleep(_LOOK_AGAIN_SECONDS)


def _said(exchange: processes.Exchange, look: Callable[[], str]) -> list[tuple[str, str]]:
    """Returns each process's text, after its name; raises CheckpointError on all of them if one cannot look."""
    name = f"process {exchange.index} on {socket.gethostname()}"
    try:
        said = {"name": name, "text": look()}
    except format_lib.CheckpointError as e:
        said = {"name": name, "error": str(e)}
    answers = [json.loads(answer) for answer in exchange(json.dumps(said))]
    for answer in answers:
        if "error" in answer:
            raise format_lib.CheckpointError(f"{answer['name']}: {answer['error']}")
    return [(answer["name"], answer["text"]) for answer in answers]


def _digest(attempt: format_lib.Attempt) -> str:
    """Summarises which files a checkpoint has."""
    names = attempt.store.names(attempt.prefix)
    return f"{len(names)} files ({format_lib.checksum(json.dumps(names).encode())[:8]})"


def _verdict(answers: list[dict[str, str]], *, is_last: bool) -> str:
    """Names what is damaged, as far as the processes that have read could tell.

    Raises:
      CheckpointError: for what is no damage, and does not pass.
    """
    listed = {
        kind: " ".join(dict.fromkeys(answer[kind] for answer in answers if kind in answer))
        for kind in ("error", "unreadable", "damaged")
    }
    if listed["error"]:
        raise format_lib.CheckpointError(listed["error"])
    if is_last and listed["unreadable"]:
        raise format_lib.CheckpointError(
            f"{listed['unreadable']} It may be whole: see to the disk, and start again."
        )
    return listed["damaged"]
