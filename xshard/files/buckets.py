"""Buckets of object stores: their URLs, and requests to them.

    gs://bucket/books/a.txt                     Google Cloud Storage
    s3://bucket/books/a.txt                     Amazon S3
    s3://bucket/a.txt?endpoint=http://host:9000 a service that speaks S3's protocol
    ...&conditional_writes=false                one that refuses If-Match

The name of an object stands in its URL as it is, with spaces, `%` and `#`. Only `?`
begins the options. Credentials come from the machine: Google's application default, or
AWS's environment or profile.
"""

import os
import re
import time
import urllib.parse
from typing import Any

# Retries of requests to object stores. The delay between tries grows up to 32 s.
RETRIES = {"max_retries": 32, "initial_delay": "200ms", "max_delay": "32s"}
# An option of which the only value is "false", which tensorstore has as a boolean.
_CONDITIONS = "conditional_writes"
# For each URL scheme: tensorstore's driver, and tensorstore's names for the options in
# the query string.
_SCHEMES: dict[str, tuple[str, dict[str, str]]] = {
    "gs": ("gcs", {}),
    "s3": (
        "s3",
        {
            "endpoint": "endpoint",
            "region": "aws_region",
            _CONDITIONS: "use_conditional_write",
        },
    ),
}
# The time between two looks at whether a request has ended grows from the first to the
# second.
_FIRST_PAUSE_SECONDS = 0.0005
_LONGEST_PAUSE_SECONDS = 0.01


def is_url(path: str) -> bool:
    """Returns whether a path is a URL, also one that is malformed.

    >>> is_url("gs://bucket/a.txt"), is_url("books/a.txt")
    (True, False)
    """
    return "://" in path


def parse(url: str) -> dict[str, Any] | None:
    """Returns tensorstore's spec of a bucket's URL, or None if it is malformed.

    >>> parse("gs://bucket/books/a.txt")
    {'driver': 'gcs', 'bucket': 'bucket', 'path': 'books/a.txt'}
    """
    scheme, _, rest = url.partition("://")
    rest, _, query = rest.partition("?")
    bucket, _, path = rest.partition("/")
    driver, known = _SCHEMES.get(scheme, ("", {}))
    options = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
    if not driver or not bucket or options.keys() - known.keys():
        return None
    if not all(options.values()) or options.get(_CONDITIONS, "false") != "false":
        return None
    spec: dict[str, Any] = {"driver": driver, "bucket": bucket, "path": path}
    if scheme == "s3" and "endpoint" not in options:
        # Amazon's own programs read these two in this order. Tensorstore reads neither.
        for variable in ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL"):
            endpoint = os.environ.get(variable)
            if endpoint:
                options["endpoint"] = endpoint
                break
    for name, value in options.items():
        spec[known[name]] = False if name == _CONDITIONS else value
    return spec


def wait(future: Any) -> Any:
    """Returns the result of tensorstore's future, waiting outside of tensorstore.

    A process may end while a thread waits. Python ends a thread that returns to it from
    tensorstore then, which aborts the process.
    """
    seconds = _FIRST_PAUSE_SECONDS
    while not future.done():
        time.sleep(seconds)
        seconds = min(2 * seconds, _LONGEST_PAUSE_SECONDS)
    return future.result()


def reason(e: BaseException) -> str:
    """Returns an error's text for users, without tensorstore's list of source
    locations.
    """
    if isinstance(e, OSError) and e.errno:
        text = e.strerror or str(e)
        return f"{text} ({e.filename})" if e.filename else text
    text = re.split(r" \[(source locations|tensorstore_spec|os_error_code)", str(e))[0]
    return text.strip().rstrip(".") or type(e).__name__
