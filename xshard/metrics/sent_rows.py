"""The rows of a run that a service has received; each part of a run sends the rest."""

import pathlib

from xshard import samples
from xshard.files import disk, jsonfile
from xshard.metrics import norms, rows


class SentRows:
    """The run of a service that all parts of a run belong to, and its last row.

    Rows in a service cannot be deleted. Repeated steps give the same bits, so the rows
    that were sent stay valid. If a part of the run was killed before it sent its rows,
    the next part sends them.

    Attributes:
      id: the service's ID of its run; empty until there is one.
      last: the last row that was counted: its step, and its rank among the rows of the
        step.
    """

    def __init__(self, path: pathlib.Path):
        """Reads what earlier parts recorded.

        Args:
          path: the file of the record.
        """
        self._path = path
        with disk.writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            note = jsonfile.read_if_exists(path) or {}
        self.id: str = note.get("id", "")
        self.last: tuple[int, ...] = tuple(note.get("sent", (0, 0)))
        # Rows of norms come in an order of their own. The step of the last one.
        self._last_norms = note.get("sent_norms", 0)

    def is_new(self, row: rows.Row) -> bool:
        """Returns whether a row has not been sent, and counts it as sent."""
        if norms.is_row(row):
            is_new = row["step"] > self._last_norms
            self._last_norms = max(self._last_norms, row["step"])
            return is_new
        place = (row["step"], _rank(row))
        if place <= self.last:
            return False
        self.last = place
        return True

    def record(self, last: tuple[int, ...] | None = None) -> None:
        """Writes the ID, and the last row that has been sent.

        Args:
          last: that row, as `last` was when it was counted; None: all rows counted so
            far have been sent.
        """
        if last is None:
            last = self.last
        with disk.writing(self._path):
            note = {
                "id": self.id,
                "sent": list(last),
                "sent_norms": self._last_norms,
            }
            content = jsonfile.dumps(note).encode()
            disk.replace(self._path, content, durably=False)


def _rank(row: rows.Row) -> int:
    """Returns the place of a row among the rows of its step."""
    if rows.is_of_roll_back(row):
        return -1
    if rows.is_of_evaluation(row):
        return 1
    if samples.is_row(row):
        return 2
    return 0
