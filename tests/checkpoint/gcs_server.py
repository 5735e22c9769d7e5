"""A small stand-in for Google Cloud Storage on loopback, with the faults of the real
service.

It implements the part of the JSON API that tensorstore uses: it lists objects, and it
reads, writes and deletes them under preconditions on their generation. Objects live in
memory. Faults are drawn at random from a seed:

    refuse     a 503, and the request is not carried out
    forget     the request is carried out, and the reply is a 503
    throttle   a 429, and the request is not carried out

    python -m tests.checkpoint.gcs_server --refuse=0.1      prints its address
"""

import argparse
import http.server
import itertools
import json
import random
import sys
import threading
import urllib.parse


class Server(http.server.ThreadingHTTPServer):
    """The server, with all objects and the record of injected faults."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self, refuse=0.0, forget=0.0, throttle=0.0, seed=0):
        super().__init__(("127.0.0.1", 0), Handler)
        self.objects = {}
        self.lock = threading.Lock()
        self.generations = itertools.count(1)
        self.faults = {"refuse": refuse, "forget": forget, "throttle": throttle}
        self.counts = dict.fromkeys(self.faults, 0)
        self.random = random.Random(seed)

    def handle_error(self, request, client_address):
        """Prints nothing: tests kill clients, which breaks their connections."""

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}"

    def draw(self):
        """Draws the fault of the next request; None if it has none."""
        with self.lock:
            x = self.random.random()
            for name, share in self.faults.items():
                if x < share:
                    self.counts[name] += 1
                    return name
                x -= share
        return None


class Handler(http.server.BaseHTTPRequestHandler):
    """Handles the requests of one connection."""

    protocol_version = "HTTP/1.1"
    # A reply is sent in two packets. With Nagle's algorithm the second waits until the
    # first is acknowledged.
    disable_nagle_algorithm = True

    def do_GET(self):
        self.answer(self.get)

    def do_POST(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.answer(lambda name, query: self.post(query["name"], query, body))

    def do_DELETE(self):
        self.answer(self.delete)

    def answer(self, action):
        fault = self.server.draw()
        if fault in ("refuse", "throttle"):
            return self.reply(503 if fault == "refuse" else 429)
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        name = urllib.parse.unquote(url.path.partition("/o/")[2])
        result = action(name, query)
        return self.reply(503) if fault == "forget" else self.reply(*result)

    def get(self, name, query):
        if not name:
            return self.list(query)
        with self.server.lock:
            generation, content = self.server.objects.get(name, (0, None))
        if content is None:
            return (404,)
        if query.get("ifGenerationNotMatch") == str(generation):
            return (304,)
        if query.get("ifGenerationMatch", str(generation)) != str(generation):
            return (412,)
        headers = {"x-goog-generation": str(generation)}
        bounds = self.headers.get("Range")
        if bounds is None:
            return (200, content, headers)
        # "bytes=-N" asks for the last N bytes.
        low, _, high = bounds.removeprefix("bytes=").partition("-")
        low = int(low) if low else max(len(content) - int(high), 0)
        end = int(high) + 1 if high and bounds[6] != "-" else len(content)
        if low >= len(content):
            return (416,)
        part = content[low:end]
        headers["Content-Range"] = f"bytes {low}-{low + len(part) - 1}/{len(content)}"
        return (206, part, headers)

    def post(self, name, query, body):
        with self.server.lock:
            generation, _ = self.server.objects.get(name, (0, None))
            if query.get("ifGenerationMatch", str(generation)) != str(generation):
                return (412,)
            generation = next(self.server.generations)
            self.server.objects[name] = (generation, body)
        return (200, json.dumps({"name": name, "generation": str(generation)}).encode())

    def delete(self, name, query):
        with self.server.lock:
            generation, content = self.server.objects.get(name, (0, None))
            if content is None:
                return (404,)
            if query.get("ifGenerationMatch", str(generation)) != str(generation):
                return (412,)
            del self.server.objects[name]
        return (204,)

    def list(self, query):
        begin, end = query.get("startOffset", ""), query.get("endOffset")
        begin = max(begin, query.get("pageToken", ""))
        with self.server.lock:
            names = sorted(
                n for n in self.server.objects if n >= begin and (not end or n < end)
            )
        limit = int(query.get("maxResults", 1000))
        answer = {"items": [{"name": name, "size": "0"} for name in names[:limit]]}
        if len(names) > limit:
            answer["nextPageToken"] = names[limit]
        return (200, json.dumps(answer).encode())

    def reply(self, status, content=b"", headers=None):
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args):
        """Prints nothing."""


def main(argv):
    parser = argparse.ArgumentParser()
    for fault in ("refuse", "forget", "throttle"):
        parser.add_argument(f"--{fault}", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    server = Server(**vars(parser.parse_args(argv)))
    print(server.url, flush=True)
    server.serve_forever()


if __name__ == "__main__":
    main(sys.argv[1:])
