"""A writer whose newest numbers Prometheus scrapes."""

import re
import types
from typing import Any

from xshard import errors, hooks
from xshard.metrics import rows, writer

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

    package = "prometheus_client"

    def __init__(self, part: writer.Part):
        """Opens the port on all addresses of this host, and shows the numbers of
        earlier parts of the run.

        Raises:
          UserError: if the port cannot be opened.
        """
        # An extra. `xshard.metrics.writers.check` has checked that it is installed.
        import prometheus_client

        self._client = prometheus_client
        self._run = part.directory.name
        self._registry = prometheus_client.CollectorRegistry()
        self._gauges: dict[str, Any] = {}
        port = part.config.get("prometheus", {}).get("port", PORT)
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
        for row in part.rows():
            self.write(row)

    def write(self, row: rows.Row, /) -> None:
        """Shows the numbers of a row."""
        if not rows.has_numbers(row):
            return
        for name, value in row.items():
            if name == "step" and rows.kind(row) != rows.TRAIN:
                continue
            if isinstance(value, list):
                numbers = {str(group): x for group, x in enumerate(value)}
            else:
                numbers = {"": value}
            for group, number in numbers.items():
                if number is None or isinstance(number, int | float):
                    self._set(name, group, number)

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


class Prometheus(hooks.Wing):
    """Brings the writer 'prometheus'."""

    name = "prometheus"
    writers = types.MappingProxyType({"prometheus": Endpoint})
