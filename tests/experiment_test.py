"""Finding an experiment by its path."""

import pytest

from tests import toy
from xshard import experiment


def test_load():
    assert experiment.load("tests.toy.Toy") is toy.Toy


@pytest.mark.parametrize(
    "path", ["", "Toy", "tests.toy.", "tests.toy.Nothing", "nowhere.at.All", "a..b"]
)
def test_paths_that_lead_nowhere(path):
    with pytest.raises(ValueError, match="must be the dotted path of a class"):
        experiment.load(path)


def test_what_is_no_experiment():
    with pytest.raises(ValueError, match="not a class that derives from xshard.Experiment"):
        experiment.load("tests.toy.get_config")
