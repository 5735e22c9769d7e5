"""Agreement of processes on the checkpoints that they see.

If a single host does not see a checkpoint, a disk is probably not mounted there. This
is an error: the checkpoint is not treated as missing.
"""

import json
import socket
import time
from collections.abc import Callable
from typing import Any, TypeVar

from xshard import errors
from xshard.checkpoint import format as format_lib
from xshard.checkpoint import metadata_files
from xshard.checkpoint import store as store_lib
from xshard.pod import processes

_T = TypeVar("_T")
# A host may cache the listing of a folder on a network disk for about this long.
LAG_SECONDS = 65.0
_LOOK_AGAIN_SECONDS = 1.0
_SAY_SECONDS = 3.0
_FIX = "Is the same disk mounted on all hosts, and the same path given? Nothing was changed."


class Agreement:
    """The processes that share a store. All processes must call the same methods in the
    same order.
    """

    def __init__(
        self, store: store_lib.Store, seconds: float, say: Callable[[str], None]
    ):
        """Creates the agreement; no process waits yet.

        Args:
          store: the store of the checkpoints.
          seconds: how long the processes wait for one another.
          say: called with a message when a wait takes long.
        """
        self._store = store
        self._say = say
        self._exchange = processes.Exchange(f"checkpoints in {store}", seconds)
        self.index = self._exchange.index
        self.count = self._exchange.count

    def gather(self, value: Any) -> list[Any]:
        """Exchanges a JSON-serializable value; returns those of all processes in order.

        Raises:
          LostError: if a process did not take part in time.
        """
        return self._exchange.gather(value)

    def from_first(self, action: Callable[[], Any]) -> Any:
        """Runs an action on process 0 and returns its JSON-serializable result on every
        process.

        Raises:
          CheckpointError: on all processes, if the action fails. A bug in it is raised
            as it is on process 0.
        """
        answer: dict[str, Any] = {}
        cause = None
        if self.index == 0:
            try:
                answer = {"value": action()}
            except Exception as e:
                # The other processes wait in the exchange. They receive the error
                # there, instead of a timeout.
                text = (
                    str(e) if isinstance(e, errors.UserError) else store_lib.reason(e)
                )
                answer, cause = {"error": text}, e
        answer = self.gather(answer)[0]
        if "error" in answer:
            # tensorstore raises ValueError and RuntimeError for what is wrong with a
            # store.
            if cause is not None and not isinstance(
                cause, OSError | ValueError | RuntimeError
            ):
                raise cause
            raise store_lib.CheckpointError(answer["error"]) from cause
        return answer["value"]

    def check_seen(self, folders: list[str]) -> None:
        """Checks that every process sees the given checkpoints; if none are given, that
        no process sees any.

        Args:
          folders: the names of the checkpoints' folders, equal on all processes.

        Raises:
          CheckpointError: on all processes, if the check fails or a process cannot read
            the store.
        """

        def problem() -> str:
            seen = {attempt.folder for attempt in format_lib.committed(self._store)}
            if seen and not folders:
                return f"sees {len(seen)} checkpoints in {self._store}, but process 0 sees none"
            for folder in folders:
                if folder not in seen:
                    return f"does not see {self._store}/{folder}, but process 0 does"
            return ""

        self._wait_until_none(problem)

    def check_owner(self, owner: format_lib.Owner) -> None:
        """Checks that every process sees the folder in which process 0 recorded the run
        as the owner.

        Raises:
          CheckpointError: on all processes, if one of them sees another folder.
        """

        def problem() -> str:
            seen = format_lib.read_owner(self._store)
            if seen is not None and seen.id == owner.id:
                return ""
            whose = "no run" if seen is None else f"run {seen.id} ({seen.workdir})"
            return f"sees that {self._store} belongs to {whose}, but process 0 recorded run {owner.id} as its owner"

        self._wait_until_none(problem)

    def read(
        self, attempt: format_lib.SaveAttempt, read_once: Callable[[], _T]
    ) -> tuple[_T | None, str]:
        """Reads this process's part of a checkpoint, again if it fails; returns it, or
        None and the damage.

        A checkpoint is damaged only if it is wrong each time that it is read, and all
        processes see the same files.

        Args:
          attempt: the checkpoint.
          read_once: reads this process's part; raises DamagedError, UnreadableError or
            another error.

        Returns:
          The part and an empty text; or, on all processes, None and a description of
          the damage.

        Raises:
          CheckpointError: on all processes, for an error that is not damage and
            persists.
        """
        damage = ""
        for wait_seconds in (*metadata_files.READ_AGAIN_SECONDS, None):
            content, answer = None, {}
            try:
                content = read_once()
            except metadata_files.DamagedError as e:
                answer = {"damaged": str(e)}
            except metadata_files.UnreadableError as e:
                answer = {"unreadable": str(e)}
            except Exception as e:
                # Any error must reach the exchange, since the other processes wait
                # there.
                answer = {"error": store_lib.reason(e)}
            answers = self.gather(answer)
            # Every process repeats its read if one of them failed, so that all keep
            # making the same exchanges.
            if not any(answers):
                return content, ""
            damage = _verdict(answers, is_last=wait_seconds is None)
            if wait_seconds is not None:
                time.sleep(wait_seconds)
        self._check_same_files(attempt, damage)
        return None, damage

    def _check_same_files(self, attempt: format_lib.SaveAttempt, damage: str) -> None:
        """Raises CheckpointError on all processes if they see different files of a
        damaged checkpoint.

        In that case a host may have mounted another disk, and the checkpoint must not
        be marked as damaged.
        """
        if self.count == 1:
            return
        first, *others = self._texts(lambda: _digest(attempt))
        for host, digest in others:
            if digest != first[1]:
                raise format_lib.CheckpointError(
                    f"{damage} But {host} sees {digest}, and {first[0]} sees {first[1]}. {_FIX}"
                )

    def _wait_until_none(self, problem: Callable[[], str]) -> None:
        """Polls until no process reports a problem, for as long as a listing may lag
        behind.

        Raises:
          CheckpointError: on all processes, if a problem persists.
        """
        if self.count == 1:
            return
        begin = time.monotonic()
        has_said = False
        while True:
            seconds = time.monotonic() - begin
            # Process 0's clock decides for all, so that all processes leave the loop in
            # the same round.
            is_over = self.gather(seconds > LAG_SECONDS)[0]
            problems = [f"{host} {text}" for host, text in self._texts(problem) if text]
            if not problems:
                return
            if is_over:
                raise format_lib.CheckpointError(f"{'; '.join(problems)}. {_FIX}")
            if seconds > _SAY_SECONDS and not has_said:
                has_said = True
                self._say(
                    f"{problems[0]}; waiting at most {LAG_SECONDS:.0f} s for this to change"
                )
            time.sleep(_LOOK_AGAIN_SECONDS)

    def _texts(self, look: Callable[[], str]) -> list[tuple[str, str]]:
        """Returns each process's name and text; raises CheckpointError on all processes
        if one cannot look.
        """
        answer = {"name": f"process {self.index} on {socket.gethostname()}"}
        try:
            answer["text"] = look()
        except format_lib.CheckpointError as e:
            answer["error"] = str(e)
        answers = self.gather(answer)
        for answer in answers:
            if "error" in answer:
                raise format_lib.CheckpointError(f"{answer['name']}: {answer['error']}")
        return [(answer["name"], answer["text"]) for answer in answers]


def _digest(attempt: format_lib.SaveAttempt) -> str:
    """Summarizes the names of a checkpoint's files."""
    names = attempt.store.names(attempt.prefix)
    return f"{len(names)} files ({format_lib.checksum(json.dumps(names).encode())[:8]})"


def _verdict(answers: list[dict[str, str]], *, is_last: bool) -> str:
    """Describes the damage that the processes reported.

    Raises:
      CheckpointError: for an error that is not damage, or if the checkpoint is still
        unreadable at the last try.
    """
    error = _joined(answers, "error")
    if error:
        raise format_lib.CheckpointError(error)
    unreadable = _joined(answers, "unreadable")
    if is_last and unreadable:
        raise format_lib.CheckpointError(
            f"{unreadable} The checkpoint may be whole: check the disk, then start again."
        )
    return _joined(answers, "damaged")


def _joined(answers: list[dict[str, str]], kind: str) -> str:
    """Joins the texts of one kind without duplicates, since several processes may have
    read the same file.
    """
    texts = [answer[kind] for answer in answers if kind in answer]
    return " ".join(dict.fromkeys(texts))
