"""Tests that a process which was suspended past its lock stops and harms nothing."""

import pytest

from tests.checkpoint import suspended


@pytest.mark.sample(3)
@pytest.mark.parametrize(
    "instant", ["commit", "retention", "what is dead", "before it looks"]
)
@pytest.mark.parametrize("place", ["disk", "lock lost", "gcs", "s3"])
def test_a_suspended_process_stops_and_harms_no_checkpoint(
    request, tmp_path, place, instant
):
    suspended.check_store(request, tmp_path, place, instant)


@pytest.mark.sample(1)
@pytest.mark.parametrize("instant", ["a row", "reached.json", "results.json"])
def test_a_suspended_run_changes_no_file_of_the_next(tmp_path, instant):
    suspended.check_run(tmp_path, instant)
