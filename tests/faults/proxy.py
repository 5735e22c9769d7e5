"""A proxy between a run and an object store. It answers one request with an error, or
listings without new objects.

The store is itself a stand-in: tests/checkpoint/gcs_server.py, or moto for S3. Requests
to /faults/... control the proxy; it forwards all others to the store.

    python -m tests.faults.proxy http://127.0.0.1:1234      prints its address
"""

import contextlib
import http.client
import http.server
import json
import os
import re
import subprocess
import sys
import threading
import urllib.parse
import urllib.request

from tests.checkpoint import harness

# A fault: listings lack the objects that the last so many requests created.
LAG = "lag"
# A fault: a write is carried out and answered with 412, as a client sees when it
# retries after a lost answer.
DONE_ALREADY = "412"
KINDS = ("read", "list", "write", "delete", "head")
_OF_METHOD = {"POST": "write", "PUT": "write", "DELETE": "delete", "HEAD": "head"}
CODES = {
    "403": "AccessDenied",
    "404": "NoSuchKey",
    "412": "PreconditionFailed",
    "429": "TooManyRequests",
    "500": "InternalError",
    "503": "SlowDown",
}
# Headers of a connection are not forwarded. Preconditions are dropped when a state is
# restored.
_HOP = {
    "connection",
    "keep-alive",
    "transfer-encoding",
    "content-length",
    "host",
    "expect",
}
_CONDITIONS = {"if-match", "if-none-match"}


class Server(http.server.ThreadingHTTPServer):
    """The server, with the planned fault, the requests since the plan, and the states
    to restore.
    """

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, store):
        super().__init__(("127.0.0.1", 0), Handler)
        self.store = urllib.parse.urlsplit(store).netloc
        self.lock = threading.Lock()
        # The request that created each object.
        self.created = {}
        self.kept = {}
        self.plan()

    def plan(self, kind="", at=0, status=""):
        """Plans a fault for the `at`-th request of a kind, from 1. LAG hides the writes
        of the last `at` requests.
        """
        self.kind, self.at, self.status = kind, int(at), status
        self.calls, self.hit = [], None
        return {}

    def report(self):
        """Returns the requests since the plan, and the one that met the fault."""
        return {"calls": self.calls, "hit": self.hit}

    def keep(self, start):
        """Keeps the current objects as the state `start`."""
        self.kept[start] = dict(self.created)
        return {}

    def begin(self, start):
        """Restores the state `start`; without it, only deletes all objects."""
        for name, (_, path, headers, _) in self.created.items():
            signed = {k: v for k, v in headers.items() if k.lower() == "authorization"}
            status, _, _ = self.forward("DELETE", _object(path, name), signed, b"")
            assert status in (200, 204), (status, path)
        self.created = {}
        for name, (method, path, headers, body) in self.kept.get(start, {}).items():
            path = re.sub(r"&?ifGenerationMatch=[^&]*", "", path)
            headers = {k: v for k, v in headers.items() if k.lower() not in _CONDITIONS}
            status, _, _ = self.forward(method, path, headers, body)
            assert status == 200, (status, method, path)
            self.created[name] = method, path, headers, body
        return {}

    def meet(self, kind, name):
        """Records a request; returns the status with which to answer it; empty if the
        store must answer.
        """
        with self.lock:
            self.calls.append([kind, kind in ("write", "delete"), name])
            count = sum(entry == kind for entry, _, _ in self.calls)
            if kind == self.kind and self.status != LAG and count == self.at:
                self.hit = [kind, name]
                return self.status
            if kind == "list" and self.status == LAG:
                self.hit = [kind, name]
        return ""

    def forward(self, method, path, headers, body):
        """Forwards a request to the store; returns the status, headers and content of
        its answer.
        """
        with contextlib.closing(http.client.HTTPConnection(self.store)) as connection:
            connection.request(method, path, body, {**headers, "Host": self.store})
            answer = connection.getresponse()
            return answer.status, answer.getheaders(), answer.read()

    def note(self, kind, name, request):
        """Records the object that a request created or deleted."""
        with self.lock:
            if kind == "write":
                self.created[name] = request
            elif kind == "delete":
                self.created.pop(name, None)

    def listed(self, content):
        """Removes from a listing the objects that the planned lag hides."""
        if self.status != LAG:
            return content
        with self.lock:
            recent = [
                name for kind, _, name in self.calls[-self.at :] if kind == "write"
            ]
        if content.startswith(b"{"):
            answer = json.loads(content)
            items = answer.get("items", [])
            answer["items"] = [entry for entry in items if entry["name"] not in recent]
            return json.dumps(answer).encode()
        for name in recent:
            entry = rf"<Contents>\s*<Key>{re.escape(name)}</Key>.*?</Contents>".encode()
            content = re.sub(entry, b"", content, flags=re.DOTALL)
        return content


class Handler(http.server.BaseHTTPRequestHandler):
    """Handles the requests of one connection."""

    protocol_version = "HTTP/1.1"
    # A reply is sent in two packets. With Nagle's algorithm the second waits until the
    # first is acknowledged.
    disable_nagle_algorithm = True

    def answer(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        if url.path.startswith("/faults/"):
            result = getattr(self.server, url.path.removeprefix("/faults/"))(**query)
            return self.reply(200, [], json.dumps(result).encode())
        kind, name = _classify(self.command, url.path, query)
        headers = {k: v for k, v in self.headers.items() if k.lower() not in _HOP}
        request = self.command, self.path, headers, body
        fault = self.server.meet(kind, name)
        if fault and fault != DONE_ALREADY:
            return self.reply_fault(kind, fault)
        status, answer_headers, content = self.server.forward(*request)
        if status < 300:
            self.server.note(kind, name, request)
        if fault:
            return self.reply_fault(kind, fault)
        if kind == "list":
            content = self.server.listed(content)
        return self.reply(status, answer_headers, content)

    def reply_fault(self, kind, status):
        content = (
            f"<Error><Code>{CODES[status]}</Code><Message>a fault</Message></Error>"
        )
        self.reply(int(status), [], b"" if kind == "head" else content.encode())

    def do_GET(self):
        self.answer()

    def do_POST(self):
        self.answer()

    def do_PUT(self):
        self.answer()

    def do_DELETE(self):
        self.answer()

    def do_HEAD(self):
        self.answer()

    def reply(self, status, headers, content):
        self.send_response(status)
        for name, value in headers:
            if name.lower() not in (*_HOP, "date", "server"):
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args):
        """Prints nothing."""


class Proxy:
    """Runs a proxy in its own process, and plans its faults. It has the interface of
    `shim.Shim`.
    """

    def __init__(self, store):
        command = [sys.executable, "-m", "tests.faults.proxy", store]
        environment = {**harness.environment(), "LD_PRELOAD": ""}
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, text=True, env=environment
        )
        self.url = self._process.stdout.readline().strip()

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._process.kill()
        self._process.wait()
        self._process.stdout.close()

    def directory(self, kind):
        """Returns the folder of a run's checkpoints in a store of a kind, and sets the
        environment variables for it.
        """
        if kind == "gcs":
            os.environ["TENSORSTORE_GCS_HTTP_URL"] = self.url
            return "gs://bucket/run"
        os.environ.update(AWS_ACCESS_KEY_ID="x", AWS_SECRET_ACCESS_KEY="x")
        return f"s3://bucket/run?endpoint={self.url}&region=us-east-1"

    def watch(self):
        """Does nothing: the proxy sees every request."""

    def plan(self, kind="", at=0, fault=""):
        self._ask("plan", kind=kind, at=at, status=fault)

    def hit(self):
        hit = self._ask("report")["hit"]
        return hit and tuple(hit)

    def calls(self):
        return [tuple(call) for call in self._ask("report")["calls"]]

    def keep(self, start):
        self._ask("keep", start=start)

    def begin(self, start):
        self._ask("begin", start=start)

    def _ask(self, action, **query):
        url = f"{self.url}/faults/{action}?{urllib.parse.urlencode(query)}"
        with urllib.request.urlopen(url) as answer:
            return json.loads(answer.read())


def _classify(method, path, query):
    """Returns the kind of a request, and the name of its object."""
    path = urllib.parse.unquote(path)
    if path.startswith(("/storage/", "/upload/")):
        name = query.get("name") or path.partition("/o/")[2]
    else:
        name = path.lstrip("/").partition("/")[2]
    if method == "GET":
        listed = query.get("prefix") or query.get("startOffset", "")
        return ("read", name) if name else ("list", listed)
    return _OF_METHOD[method], name


def _object(path, name):
    """Returns the path at which to delete an object, given the path of the request that
    created it.
    """
    if not path.startswith("/upload/"):
        return path
    bucket = re.search(r"/b/([^/]+)/", path)[1]
    return f"/storage/v1/b/{bucket}/o/{urllib.parse.quote(name, safe='')}"


if __name__ == "__main__":
    server = Server(sys.argv[1])
    print(f"http://127.0.0.1:{server.server_address[1]}", flush=True)
    server.serve_forever()
