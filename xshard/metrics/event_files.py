"""Event files for TensorBoard: `tensorboard --logdir=WORKDIR`."""

import itertools
import math
import re
import socket
import struct
import textwrap
import time

import google_crc32c
from tensorboardX.proto import (
    event_pb2,
    summary_pb2,
    tensor_pb2,
    tensor_shape_pb2,
    types_pb2,
)

from xshard import samples
from xshard.files import disk, jsonfile
from xshard.metrics import norms, rows, writer

# TensorBoard recognizes the start of a session only after an event with this version.
_VERSION = "brain.Event:2"
# Values for which an event has fields, so that they are no scalars.
_FIELDS = ("step", "perf/time")
_OUTCOME = "perf/outcome"
_PREFIX = "events.out.tfevents"
# The number that orders the files: the time, or one more than the last file's if the
# clock was set back.
_NUMBER = re.compile(re.escape(_PREFIX) + r"\.(\d{10})\.")
_LAST_NUMBER = 10**10 - 1
# The names of the files of other programs, such as TensorFlow, do not end in this way.
_OURS = re.compile(_NUMBER.pattern + r".+\.xshard")


class EventFiles(writer.PlainFile):
    """A folder with the rows of a run as event files.

    Numbers are scalars, and samples are texts, images and histograms. With several
    groups, tags are 'loss/0', 'loss/1'. The tags of norms of parameters are such as
    'norms/update/mlp/w'.

    Each start of the program begins a new file, whose name sorts after those of earlier
    ones. It starts with a session log (TensorFlow's `SessionLog.START`) at the step
    that the run resumes from, which makes TensorBoard drop the events of that step and
    of later ones from earlier files. The rows of that step follow, since the earlier
    process may have been killed before it wrote them here. The first file has all
    earlier rows.

    tensorboardX's `SummaryWriter` is not used: its thread dies on a full disk, and the
    run would wait for it for ever; `flush` does not write what waits for the thread;
    and of two starts in a second, the second overwrites the file of the first.
    """

    def __init__(self, part: writer.Part):
        """Begins the file.

        Raises:
          ValueError: if it cannot be written.
        """
        folder = part.directory / "tensorboard"
        with disk.writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            before = sorted(entry.name for entry in folder.iterdir())
            super().__init__(folder / _next_name(before), part.claim)
        first = 0
        if any(map(_OURS.fullmatch, before)):
            first = part.step
        # The step of the last row.
        self._last = part.step
        now = time.time()
        start = event_pb2.SessionLog(status=event_pb2.SessionLog.START)
        heads = [
            event_pb2.Event(wall_time=now, file_version=_VERSION),
            event_pb2.Event(wall_time=now, step=first, session_log=start),
        ]
        rows_since = (row for row in part.everything() if row["step"] >= first)
        events = itertools.chain(heads, map(_event, rows_since))
        # The folder may be on another disk than the rest. The file gets its name once
        # it is whole, since the next start looks for one.
        temporary = folder / ".events.new"
        with disk.writing(self._path):
            # A start that was killed here may have left one; a link must not be
            # followed.
            temporary.unlink(missing_ok=True)
            with temporary.open("xb") as file:
                file.writelines(map(_record, events))
                file.flush()
                disk.sync_open(file.fileno(), temporary)
            temporary.rename(self._path)
            disk.sync(folder)

    def write(self, row: rows.Row, /) -> None:
        """Writes a row; what is not finite becomes NaN."""
        self._last = row["step"]
        self._append(_record(_event(row)))

    def write_outcome(self, outcome: writer.Outcome, /) -> None:
        """Writes how the run ended as the text 'perf/outcome', at its last row."""
        if outcome.kind == writer.ROLLED_BACK:
            # The next file begins at once.
            return
        text = {"kind": "text", "text": outcome.in_words()}
        summary = summary_pb2.Summary(value=[_sample(_OUTCOME, text)])
        event = event_pb2.Event(wall_time=time.time(), step=self._last, summary=summary)
        self._append(_record(event))


def _next_name(names: list[str]) -> str:
    """Returns a name that sorts after those in the folder.

    TensorBoard reads the files in the order of their names.

    Raises:
      OSError: if no name sorts after them.
    """
    number = int(time.time())
    for name in names:
        match = _NUMBER.match(name)
        if match:
            number = max(number, int(match[1]) + 1)
    if number > _LAST_NUMBER:
        raise OSError(
            None, f"no file name sorts after {names[-1]}; move that file away"
        )
    return f"{_PREFIX}.{number:010}.{socket.gethostname()}.xshard"


def _event(row: rows.Row) -> event_pb2.Event:
    """Converts a row of any kind to an event."""
    values = []
    kind = rows.kind(row)
    if kind == rows.SAMPLES:
        for name, item in samples.items(row).items():
            values.append(_sample(name, item))
        row = {"step": row["step"]}
    if kind == rows.NORMS:
        row = norms.by_name(row)
    for name, value in rows.flat(row).items():
        is_shown = value is None or isinstance(value, bool) or jsonfile.is_number(value)
        if is_shown and name not in _FIELDS:
            values.append(
                summary_pb2.Summary.Value(tag=name, simple_value=_number(value))
            )
    when = row.get("perf/time")
    if not jsonfile.is_number(when):
        when = time.time()
    summary = summary_pb2.Summary(value=values)
    return event_pb2.Event(wall_time=when, step=row["step"], summary=summary)


def _sample(name: str, item: samples.Item) -> summary_pb2.Summary.Value:
    """Converts a sample to what TensorBoard shows: an image, a histogram or a text."""
    if item["kind"] == "image":
        image = summary_pb2.Summary.Image(
            height=item["height"],
            width=item["width"],
            colorspace=item["channels"],
            encoded_image_string=samples.png(item),
        )
        return summary_pb2.Summary.Value(tag=name, image=image)
    if item["kind"] == "histogram":
        counts = item["counts"]
        edges = item["edges"]
        histogram = summary_pb2.HistogramProto(
            min=edges[0],
            max=edges[-1],
            num=sum(counts),
            sum=item["sum"],
            sum_squares=item["squares"],
            bucket_limit=edges[1:],
            bucket=counts,
        )
        return summary_pb2.Summary.Value(tag=name, histo=histogram)
    # TensorBoard renders the text as Markdown; indented text is shown verbatim.
    text = textwrap.indent(item["text"], "    ", lambda line: True)
    tensor = tensor_pb2.TensorProto(
        dtype=types_pb2.DataType.Value("DT_STRING"),
        string_val=[text.encode("utf-8", "replace")],
        tensor_shape=tensor_shape_pb2.TensorShapeProto(),
    )
    plugin = summary_pb2.SummaryMetadata.PluginData(plugin_name="text")
    metadata = summary_pb2.SummaryMetadata(plugin_data=plugin)
    return summary_pb2.Summary.Value(tag=name, tensor=tensor, metadata=metadata)


def _number(value: float | None) -> float:
    """Returns a number for an event; NaN if it is not finite.

    In a row that was read back, null stands for such a number.
    """
    if value is None or not math.isfinite(value):
        return math.nan
    return value


def _record(event: event_pb2.Event) -> bytes:
    """Encodes an event in TensorFlow's record format.

    A record is the length of the event and the event, each followed by its masked
    CRC-32C. Source: tensorflow/core/lib/io/record_writer.h.
    """
    content = event.SerializeToString()
    length = struct.pack("<Q", len(content))
    return length + _checksum(length) + content + _checksum(content)


def _checksum(content: bytes) -> bytes:
    # tensorboardX computes the CRC in Python, which takes minutes for the rows of a
    # long run.
    crc = google_crc32c.value(content)
    rotated = (crc >> 15 | crc << 17) & 0xFFFFFFFF
    return struct.pack("<I", (rotated + 0xA282EAD8) & 0xFFFFFFFF)
