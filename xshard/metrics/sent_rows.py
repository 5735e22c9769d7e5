"""The rows of a run that a service has received; each part of a run sends the rest."""

import pathlib

from xshard.files import disk, jsonfile
from xshard.metrics import rows

_ROLL_BACK_NUMBER = rows.OF_ROLL_BACK + "number"


class SentRows:
    """The run of a service that all parts of a run belong to, and its last row.

    Rows in a service cannot be deleted. Repeated steps give the same bits, so the rows
    that were sent stay valid, unless a roll-back repeats them with other data. If a
    part of the run was killed before it sent its rows, the next part sends them.

    Attributes:
      id: the service's ID of its run; empty until there is one.
      last: the last row that was counted: its step, and its rank among the rows of the
        step; before them, if the service goes back, the number of the last roll-back.
    """

    def __init__(self, path: pathlib.Path, *, goes_back: bool = False):
        """Reads what earlier parts recorded.

        Args:
          path: the file of the record.
          goes_back: whether the service takes rows of steps before its last. Then the
            steps that are made again after a roll-back, with other data, are new.
        """
        self._path = path
        with disk.writing(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            note = jsonfile.read_if_exists(path) or {}
        self.id: str = note.get("id", "")
        self.last: tuple[int, ...] = tuple(note.get("sent", (0, 0)))
        self._goes_back = goes_back
        if goes_back and len(self.last) == 2:
            # An earlier version wrote the record, or there is none.
            self.last = (0, *self.last)
        # The number of the roll-back that the next row comes after.
        self._roll_back = 0

    def is_new(self, row: rows.Row) -> bool:
        """Returns whether a row has not been sent, and counts it as sent."""
        place = self._place(row)
        if place <= self.last:
            return False
        self.last = place
        return True

    def _place(self, row: rows.Row) -> tuple[int, ...]:
        """Returns the place of a row among all rows, in the order of `last`."""
        place = rows.place(row)
        if not self._goes_back:
            return place
        number = row.get(_ROLL_BACK_NUMBER)
        # The file may have been edited by hand.
        if rows.kind(row) == rows.ROLL_BACK and isinstance(number, int):
            self._roll_back = number
        return (self._roll_back, *place)

    def record(self, last: tuple[int, ...] | None = None) -> None:
        """Writes the ID, and the last row that has been sent.

        Args:
          last: that row, as `last` was when it was counted; None: all rows counted so
            far have been sent.
        """
        if last is None:
            last = self.last
        with disk.writing(self._path):
            content = jsonfile.dumps({"id": self.id, "sent": list(last)}).encode()
            disk.replace(self._path, content, durably=False)
