"""The event files that TensorBoard shows: `tensorboard --logdir=WORKDIR`."""

import contextlib
import pathlib
import socket
import time
from collections.abc import Callable, Iterator

from tensorboardX import record_writer
from tensorboardX.proto import event_pb2, summary_pb2

from xshard import disk, metrics

# What TensorBoard needs to see before it drops the steps that a restart makes again.
_VERSION = "brain.Event:2"
# What an event has places for.
_ITS_OWN = ("step", "perf/time")


class EventFiles:
    """A folder of event files, one for each part of a run; each number of a row is a scalar.

    Several groups are tags 'loss/0', 'loss/1'. A part that goes on from a step begins with a session log
    (TensorFlow's `SessionLog.START`) of the step after it, at which TensorBoard drops what an earlier part
    has written of that step and later ones.
    """

    def __init__(
        self,
        directory: pathlib.Path,
        step: int,
        history: Callable[[], Iterator[metrics.Row]],
    ):
        """Begins the next file.

        Args:
          directory: the folder, which need not exist.
          step: the step that the run goes on from.
          history: the rows until then: written first if there is no file yet. What a part of the run without
            this writer has made between two with it is not in the files.

        Raises:
          ValueError: if the file cannot be written.
        """
        self._path = directory
        with disk.writing(directory):
            directory.mkdir(parents=True, exist_ok=True)
            count = len(list(directory.glob("events.out.tfevents.*")))
            # They are read in the order of their names: parts of one second, too, are in theirs.
            name = f"events.out.tfevents.{int(time.time()):010}.{socket.gethostname()}.{count:06}"
            self._records = _Records(str(directory / name))
            self._event(event_pb2.Event(wall_time=time.time(), file_version=_VERSION))
            if count:
                start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
                self._event(
                    event_pb2.Event(wall_time=time.time(), step=step + 1, session_log=start)
                )
            else:
                for row in history():
                    self._write(row)
            self._records.flush()

    def write(self, row: metrics.Row) -> None:
        """Writes a row's numbers; what is not finite is shown as such."""
        with disk.writing(self._path):
            self._write(row)
            # So that it is seen at once: rows are rare.
            self._records.flush()

    def flush(self) -> None:
        """Does nothing: no row is held back."""

    def close(self) -> None:
        """Ends the file; what could not be written stays unwritten."""
        with contextlib.suppress(OSError):
            self._records.close()

    def _write(self, row: metrics.Row) -> None:
        values = [
            summary_pb2.Summary.Value(tag=name, simple_value=value)
            for name, value in metrics.flat(row).items()
            if name not in _ITS_OWN and isinstance(value, int | float)
        ]
        when = row.get("perf/time", time.time())
        summary = summary_pb2.Summary(value=values)
        self._event(event_pb2.Event(wall_time=when, step=row["step"], summary=summary))

    def _event(self, event: event_pb2.Event) -> None:
        self._records.write(event.SerializeToString())


class _Records(record_writer.RecordWriter):
    """Does not wait for the disk at each flush, as its base does: a step would wait for it."""

    def flush(self) -> None:
        self._writer.flush()
