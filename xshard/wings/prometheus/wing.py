"""A writer whose newest numbers Prometheus scrapes."""

import pathlib
import re
import types
from collections.abc import Callable, Iterator
from typing import Any

from xshard import errors, hooks
from xshard.metrics import rows, writer, writers

# The port by default, that of OpenTelemetry's exporter.
PORT = 9464
_PREFIX = "xshard_"


class Endpoint(writer.Writer):
    """The newest number of each name, at http://HOST:PORT/metrics.

    The row value 'eval/error' is the gauge `xshard_eval_error`, with the label `run`,
    the work directory's name, and `group`, the number of the group, empty if there is
    one. Values that are not finite are NaN. `xshard_step` is the last step with a row.
    The endpoint ends with the run, and so does not show how it ended.
    """

    def __init__(
        self,
        directory: pathlib.Path,
        port: int,
        history: Callable[[], Iterator[rows.Row]],
    ):
        """Opens the port, and shows the numbers of earlier parts of the run.

        Args:
          directory: the work directory.
          port: the port, on all addresses of this host.
          history: returns the earlier rows.

        Raises:
          UserError: if the port cannot be opened.
        """
        # An extra. `xshard.metrics.writers.check` has checked that it is installed.
        import prometheus_client

        self._client = prometheus_client
        self._run = directory.name
        self._registry = prometheus_client.CollectorRegistry()
        self._gauges: dict[str, Any] = {}
        try:
            self._server, self._thread = prometheus_client.start_http_server(
                port, registry=self._registry
            )
        except OSError as e:
            raise errors.UserError(
                f"writers has 'prometheus', but port {port} cannot be opened ({e}): "
                "another run may serve its numbers there. Set another "
                "--config.prometheus.port."
            ) from e
        for row in history():
            self.write(row)

    def write(self, row: rows.Row, /) -> None:
        """Shows the numbers of a row."""
        for name, value in row.items():
            if name == "step" and rows.kind(row) != rows.TRAIN:
                continue
            if isinstance(value, list):
                for group, of_group in enumerate(value):
                    self._set(name, str(group), of_group)
            elif value is None or isinstance(value, int | float):
                self._set(name, "", value)

    def _set(self, name: str, group: str, value: float | None) -> None:
        if name not in self._gauges:
            self._gauges[name] = self._new_gauge(name)
        gauge = self._gauges[name].labels(run=self._run, group=group)
        gauge.set(float("nan") if value is None else value)

    def _new_gauge(self, name: str) -> Any:
        # Prometheus allows no other characters.
        base = _PREFIX + re.sub("[^a-zA-Z0-9_]", "_", name)
        taken = {gauge._name for gauge in self._gauges.values()}
        unique = base
        number = 2
        while unique in taken:
            unique = f"{base}_{number}"
            number += 1
        return self._client.Gauge(
            unique, name, ["run", "group"], registry=self._registry
        )

    def close(self) -> None:
        """Closes the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def open_writer(part: writers.Part) -> writers.Writer:
    """Opens the writer 'prometheus' for a part of a run."""
    options = part.config.get("prometheus", {})
    return Endpoint(part.directory, options.get("port", PORT), part.history)


class Prometheus(hooks.Wing):
    """Brings the writer 'prometheus'."""

    name = "prometheus"
    services = types.MappingProxyType(
        {"prometheus": writers.Service(open_writer, package="prometheus_client")}
    )
