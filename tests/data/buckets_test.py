"""Texts and lines from stand-ins for GCS and S3 (moto), and from a disk; a run that
reads them and resumes.
"""

import json
import os

import grain
import numpy as np
import pytest
import tensorstore
from absl import flags

from tests import forks, rows, toy
from tests.checkpoint import harness
from tests.optimizers.harness import assert_equal
from xshard import errors, loop
from xshard.data import pipelines, text
from xshard.files import buckets, inputs
from xshard.pod import request

# Names that a URL could be expected to escape.
STRANGE = ["a b", "a%20b", "a#b", "a+b&c", "\N{SNOWMAN}/\N{SNOWMAN}", "it's", "[x]"]
# Lines with both ends, empty ones, one of spaces, and no end at the end of the file.
CONTENT = "\none\r\n\r\n\n  \ntwo \N{SNOWMAN}\n\n\nthree".encode()
LINES = ["one", "  ", "two \N{SNOWMAN}", "three"]


@pytest.fixture(scope="module")
def s3():
    with harness.s3() as url, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "x")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "x")
        yield "s3://bucket/", f"?endpoint={url}&region=us-east-1"


@pytest.fixture(params=["disk", "gcs", "s3"])
def place(request, tmp_path):
    """Returns a function from a name to its path or URL in a new folder, on each store
    in turn.
    """
    if request.param == "disk":
        return lambda name: f"{tmp_path}/{name}"
    if request.param == "gcs":
        bucket = request.getfixturevalue("gcs")
        options = ""
    else:
        bucket, options = request.getfixturevalue("s3")
    return lambda name: f"{bucket}{tmp_path.name}/{name}{options}"


def write(path, content):
    if not buckets.is_url(path):
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(content)
        return
    spec = buckets.parse(path)
    name = spec.pop("path")
    tensorstore.KvStore.open(spec).result().write(name, content).result()


def test_files_are_found_and_read_by_their_names(place):
    names = ["b.txt", "a.txt", "a", "c/d.txt", "c/.e/f.txt", *STRANGE]
    for name in names:
        write(place(name), name.encode())
    paths = [place(name) for name in names]
    files = text.Files(paths)
    assert [files[i] for i in range(len(files))] == names
    # In the order of the names, also where options follow them.
    assert text.find(place("**")) == [place(name) for name in sorted(names)]
    assert text.find(place("*.txt")) == [place("a.txt"), place("b.txt")]
    assert text.find(place("**/[df].txt")) == [place("c/.e/f.txt"), place("c/d.txt")]
    assert text.find(place("c/**/d.txt")) == [place("c/d.txt")]
    assert text.find(place("b.txt")) == [place("b.txt")]
    assert text.find(place("[[]x]")) == [place("[x]")]
    with pytest.raises(errors.UserError, match=r"No file matches .*\*\.json"):
        text.find(place("*.json"))


def test_a_missing_file_is_named(place):
    # Of a range from the first to the last of these, the driver for S3 lists one.
    many = ["c/1", *(f"c/2{letter}" for letter in "abcdefghijklmnopqrs")]
    for name in ("a", "d/z", *many):
        write(place(name), b"")
    assert len(text.Files([place(name) for name in many])) == 20
    for source in (text.Files, text.Lines):
        for name in ("b", "c/2", "c", "a/b"):
            paths = [place(path) for path in ("a", "d/z", name, *many)]
            with pytest.raises(errors.UserError, match="is not a file") as caught:
                source(paths)
            assert str(caught.value).startswith(f"{place(name)} is not a file")


def test_lines_have_any_ends_and_are_not_empty(place):
    contents = [CONTENT, b"", b"\n\r\n", b"four\r", b"\r", b"five\n"]
    paths = []
    for number, content in enumerate(contents):
        paths.append(place(str(number)))
        write(paths[-1], content)
    lines = text.Lines(paths)
    assert [lines[i] for i in range(len(lines))] == [*LINES, "four", "five"]
    for index in (-1, len(lines)):
        with pytest.raises(IndexError):
            lines[index]
    assert len(text.Lines([])) == len(text.Lines(paths[1:3])) == 0


def test_text_that_is_not_utf8_is_named_where_it_is(place):
    write(place("a"), b"one\ntwo\xff\n")
    with pytest.raises(errors.UserError, match=r"a.* cannot be read as UTF-8 \(.*0xff"):
        text.Files([place("a")])[0]
    lines = text.Lines([place("a")])
    assert lines[0] == "one"
    with pytest.raises(errors.UserError, match=r"a.* in the line at byte 4 \(.*0xff"):
        lines[1]


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"one\nTWO\n", "has changed since"),
        # A disk tells a change from this; a bucket has no such bytes.
        (b"", "has changed since|cannot be read .*(not satisf|Not Satisf|not valid)"),
        (None, "cannot be read .*No such file"),
    ],
)
def test_a_file_that_changes_under_a_run_is_not_read(place, content, match):
    path = place("a")
    write(path, b"one\ntwo\n")
    lines = text.Lines([path])
    if content is not None:
        write(path, content)
        if not buckets.is_url(path):
            # The clock of some disks is coarse.
            os.utime(path, (1, 1))
    elif buckets.is_url(path):
        write(path, None)
    else:
        os.unlink(path)
    with pytest.raises(errors.UserError, match=match) as caught:
        lines[1]
    assert str(caught.value).startswith(path)


@pytest.mark.parametrize(
    "url",
    ["gs://", "gs://bucket", "gs://bucket/", "gs:///a", "GS://bucket/a", "ftp://host/a",
     "gs://bucket/a?b", "s3://bucket/a?endpiont=http://host", "s3://bucket/a?endpoint="],
)  # fmt: skip
def test_a_malformed_url_is_refused(url):
    for read in (lambda url: text.Files([url]), text.find):
        with pytest.raises(errors.UserError, match=r"is not the URL of a file: give"):
            read(url)


def test_a_bucket_that_cannot_exist_is_named(s3):
    _, options = s3
    with pytest.raises(
        errors.UserError, match=r"s3://b/a.* cannot be listed: .*bucket name"
    ):
        text.Lines([f"s3://b/a{options}"])


def read_with_faults():
    """Reads files and lines from a store that fails; prints them, as JSON."""
    # As a run waits, but not as long.
    for retries in (buckets.RETRIES, inputs._LIST_RETRIES):
        retries.update(max_retries=20, initial_delay="1ms", max_delay="2ms")
    spec = {"driver": "gcs", "bucket": "bucket"}
    context = {"gcs_request_retries": buckets.RETRIES}
    store = tensorstore.KvStore.open({**spec, "context": context}).result()
    for number in range(30):
        store.write(f"{number:02}", b"one %d\ntwo\n" % number).result()
    paths = text.find("gs://bucket/*")
    files = text.Files(paths)
    lines = text.Lines(paths)
    print(json.dumps([list(files), list(lines)]))


@pytest.mark.parametrize("fault", ["refuse", "throttle"])
def test_reads_succeed_although_30_percent_of_the_requests_fail(fault):
    with harness.gcs(**{fault: 0.3}) as url:
        env = harness.environment(TENSORSTORE_GCS_HTTP_URL=url)
        output, _ = forks.Process(read_with_faults, env=env).communicate(
            harness.FOREVER
        )
    files, lines = json.loads(output.splitlines()[-1])
    assert files == [f"one {number}\ntwo\n" for number in range(30)]
    assert lines == "".join(files).splitlines()


def list_what_does_not_answer():
    inputs._LIST_RETRIES.update(max_retries=2, initial_delay="1ms", max_delay="2ms")
    for source in (text.find, lambda url: text.Files([url]), lambda x: text.Lines([x])):
        try:
            source("gs://bucket/a")
        except errors.UserError as e:
            print("refused:", e)


def test_a_store_that_does_not_answer_is_named_at_the_start():
    env = harness.environment(TENSORSTORE_GCS_HTTP_URL="http://127.0.0.1:9")
    output, _ = forks.Process(list_what_does_not_answer, env=env).communicate(
        harness.FOREVER
    )
    assert output.count("refused: gs://bucket/a: the bucket cannot be listed: ") == 3


def read_by_workers(url):
    """Reads lines in one of grain's worker processes; prints them, as JSON."""
    flags.FLAGS.mark_as_parsed()
    lines = text.Lines([url])
    dataset = grain.MapDataset.source(lines).to_iter_dataset()
    options = grain.MultiprocessingOptions(num_workers=1)
    print(json.dumps(list(dataset.mp_prefetch(options))))


def test_workers_read_lines(gcs, tmp_path):
    """Grain starts its worker processes anew, so that they have connections of their
    own.
    """
    url = f"{gcs}{tmp_path.name}/a"
    write(url, CONTENT)
    program = forks.Process(read_by_workers, url, env=harness.environment())
    output, _ = program.communicate(harness.FOREVER)
    assert json.loads(output.splitlines()[-1]) == LINES


def read_in_a_fork(url):
    """Reads lines, and again in a forked child; returns the exit code of the child."""
    lines = text.Lines([url])
    if not (child := os.fork()):
        try:
            lines[0]
        except errors.UserError as e:
            print("refused:", e, flush=True)
        finally:
            os._exit(0)
    return os.waitpid(child, 0)[1]


def test_a_forked_child_of_a_reader_is_refused(gcs, tmp_path):
    url = f"{gcs}{tmp_path.name}/a"
    write(url, CONTENT)
    program = forks.Process(read_in_a_fork, url, env=harness.environment())
    output, _ = program.communicate(harness.FOREVER)
    assert f"refused: {url} cannot be read (this process was forked from" in output
    assert program.returncode == 0


class FromBucket(toy.Toy):
    """Trains on rows in a bucket, as JSON lines."""

    def train_batches(self, part):
        lines = text.Lines(text.find(self.config.files))

        def stream(stream):
            rows = stream.part(grain.MapDataset.source(lines)).map(from_json)
            return rows.to_iter_dataset()

        return pipelines.Streams(stream, 4, part)


def from_json(line):
    return {name: np.float32(value) for name, value in json.loads(line).items()}


def write_rows(folder, seed=0):
    count = 50
    x = np.random.default_rng(seed).normal(size=(count, 3))
    y = x @ [1.0, -2.0, 0.5]
    for number in range(2):
        chosen = range(number, count, 2)
        content = [json.dumps({"x": list(x[i]), "y": y[i]}) for i in chosen]
        write(f"{folder}/{number}.jsonl", "\n".join(content).encode())


def make_config(folder):
    config = toy.get_config()
    config.experiment = f"{__name__}.FromBucket"
    config.files = f"{folder}/*.jsonl"
    config.log_every_steps = 1
    return config.lock()


def test_a_run_that_reads_a_bucket_resumes_to_the_same_bits(
    gcs, tmp_path, shared_programs
):
    folder = f"{gcs}{tmp_path.name}"
    write_rows(folder)
    config = make_config(folder)
    whole = tmp_path / "whole"
    stopped = tmp_path / "stopped"
    assert loop.run(config, str(whole), "") == 0
    watch = rows.ScriptedWatch(6, request.STOP)
    assert loop.run(config, str(stopped), "", watch=watch) == 42
    # One line more has another order, though perhaps the same first rows.
    write(f"{folder}/2.jsonl", b'{"x": [1, 1, 1], "y": 1}\n')
    with pytest.raises(
        errors.UserError, match=r"first rows, 50 examples; .* first rows, 51 examples"
    ):
        loop.run(config, str(stopped), "")
    write(f"{folder}/2.jsonl", None)
    write_rows(folder, seed=1)
    with pytest.raises(errors.UserError, match="run with other training data: 4 str"):
        loop.run(config, str(stopped), "")
    write_rows(folder)
    assert loop.run(config, str(stopped), "") == 0
    assert rows.same_bits(stopped) == rows.same_bits(whole)
    assert_equal(rows.final_state(stopped, config), rows.final_state(whole, config))
