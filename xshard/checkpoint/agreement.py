"""Agreement of processes on what they see of checkpoints: an absence on one host is a disk that is not mounted there."""

import json
import socket
import time
from collections.abc import Callable
from typing import Any, TypeVar

from xshard.checkpoint import format as format_lib
from xshard.checkpoint import source
from xshard.checkpoint import store as store_lib
from xshard.pod import processes

_T = TypeVar("_T")
# A host may keep for so long what a folder on a network was like.
LAG_SECONDS = 65.0
_LOOK_AGAIN_SECONDS = 1.0
_SAY_SECONDS = 3.0
_FIX = "Is the same disk mounted on all hosts, and the same path given? Nothing was changed."


class Agreement:
    """The processes that share a store. All of them call each method, in the same order."""

    def __init__(self, store: store_lib.Store, seconds: float, say: Callable[[str], None]):
        """Begins.

        Args:
          store: where the checkpoints are.
          seconds: how long the processes wait for one another.
          say: takes a message where something takes long.
        """
        self._store = store
        self._say = say
        self._exchange = processes.Exchange(f"checkpoints in {store}", seconds)
        self.index = self._exchange.index
        self.count = self._exchange.count

    def gather(self, value: Any) -> list[Any]:
        """Returns what each process has given, as JSON can hold it; LostError if one did not come."""
        return [json.loads(text) for text in self._exchange(json.dumps(value))]

    def from_first(self, action: Callable[[], Any]) -> Any:
        """Returns, on every process, what process 0's action returns, as JSON can hold it.

        Raises:
          CheckpointError: on all of them, if the action fails.
        """
        answer: dict[str, Any] = {}
        cause = None
        if self.index == 0:
            try:
                answer = {"value": action()}
            except Exception as e:
                # All others wait at the meeting, and hear there what has gone wrong.
                answer, cause = {"error": store_lib.reason(e)}, e
        answer = self.gather(answer)[0]
        if "error" in answer:
            raise store_lib.CheckpointError(answer["error"]) from cause
        return answer["value"]

    def check_seen(self, folders: list[str]) -> None:
        """Sees that every process has these checkpoints before it; of no checkpoints, that none has any.

        Args:
          folders: their names, equal on all processes.

        Raises:
          CheckpointError: on all processes, if it is not so, or if one of them cannot look.
        """

        def problem() -> str:
            seen = {attempt.folder for attempt in format_lib.committed(self._store)}
            if seen and not folders:
                return f"sees {len(seen)} checkpoints in {self._store}, where process 0 sees none"
            for folder in folders:
                if folder not in seen:
                    return f"does not see {self._store}/{folder}, which process 0 sees"
            return ""

        self._wait_until_none(problem)

    def check_owner(self, owner: format_lib.Owner) -> None:
        """Sees that the folder which process 0 has made this run's is the one that every process sees.

        Raises:
          CheckpointError: on all processes, if it is not.
        """

        def problem() -> str:
            seen = format_lib.read_owner(self._store)
            if seen is not None and seen.id == owner.id:
                return ""
            whose = "nobody's" if seen is None else f"run {seen.id}'s ({seen.workdir})"
            return f"sees {self._store} as {whose}, where process 0 has made it run {owner.id}'s"

        self._wait_until_none(problem)

    def read(
        self, attempt: format_lib.Attempt, read_once: Callable[[], _T]
    ) -> tuple[_T | None, str]:
        """Returns what each process reads of a checkpoint; or None, and what is damaged in it.

        Damaged is what comes out wrong each time that it is read, where all processes see the same files.

        Args:
          attempt: the checkpoint.
          read_once: reads this process's part; raises DamagedError, UnreadableError or another error.

        Raises:
          CheckpointError: on all processes, for an error that is no damage, and does not pass.
        """
        damage = ""
        for wait_seconds in (*source.READ_AGAIN_SECONDS, None):
            content, answer = None, {}
            try:
                content = read_once()
            except source.DamagedError as e:
                answer = {"damaged": str(e)}
            except source.UnreadableError as e:
                answer = {"unreadable": str(e)}
            except Exception as e:
                # Whatever it is, the others wait to hear of it.
                answer = {"error": store_lib.reason(e)}
            answers = self.gather(answer)
            if not any(answers):
                return content, ""
            damage = _verdict(answers, is_last=wait_seconds is None)
            if wait_seconds is not None:
                time.sleep(wait_seconds)
        self._check_same_files(attempt, damage)
        return None, damage

    def _check_same_files(self, attempt: format_lib.Attempt, damage: str) -> None:
        """Raises CheckpointError, on all processes, unless all see the same files of a damaged checkpoint."""
        if self.count == 1:
            return
        first, *others = self._texts(lambda: _digest(attempt))
        for host, digest in others:
            if digest != first[1]:
                raise format_lib.CheckpointError(
                    f"{damage} But {host} sees {digest}, and {first[0]} {first[1]}: {_FIX}"
                )

    def _wait_until_none(self, problem: Callable[[], str]) -> None:
        """Looks again and again until no process has a problem, as long as a listing may lag behind."""
        if self.count == 1:
            return
        begin = time.monotonic()
        has_said = False
        while True:
            seconds = time.monotonic() - begin
            # Process 0's clock counts for all: they stop waiting together.
            is_over = self.gather(seconds > LAG_SECONDS)[0]
            problems = [f"{host} {text}" for host, text in self._texts(problem) if text]
            if not problems:
                return
            if is_over:
                raise format_lib.CheckpointError(f"{'; '.join(problems)}. {_FIX}")
            if seconds > _SAY_SECONDS and not has_said:
                has_said = True
                self._say(f"{problems[0]}; waiting for it, at most {LAG_SECONDS:.0f} s")
            time.sleep(_LOOK_AGAIN_SECONDS)

    def _texts(self, look: Callable[[], str]) -> list[tuple[str, str]]:
        """Returns each process's text, after its name; raises CheckpointError on all if one cannot look."""
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


def _digest(attempt: format_lib.Attempt) -> str:
    """Summarises which files a checkpoint has."""
    names = attempt.store.names(attempt.prefix)
    return f"{len(names)} files ({format_lib.checksum(json.dumps(names).encode())[:8]})"


def _verdict(answers: list[dict[str, str]], *, is_last: bool) -> str:
    """Names what is damaged, as far as the processes that have read could tell.

    Raises:
      CheckpointError: for what is no damage, and does not pass.
    """
    error = _joined(answers, "error")
    if error:
        raise format_lib.CheckpointError(error)
    unreadable = _joined(answers, "unreadable")
    if is_last and unreadable:
        raise format_lib.CheckpointError(
            f"{unreadable} It may be whole: see to the disk, and start again."
        )
    return _joined(answers, "damaged")


def _joined(answers: list[dict[str, str]], kind: str) -> str:
    """The texts of one kind, each once: several processes may have read the same file."""
    texts = [answer[kind] for answer in answers if kind in answer]
    return " ".join(dict.fromkeys(texts))
