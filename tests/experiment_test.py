"""Tests that an experiment's class is loaded by its dotted path."""

import pytest

from tests import toy
from xshard import experiment


def test_load():
    assert experiment.load("tests.toy.Toy") is toy.Toy


@pytest.mark.parametrize(
    "path", ["", "Toy", "tests.toy.", "tests.toy.Nothing", "nowhere.at.All", "a..b"]
)
def test_paths_without_a_class_are_refused(path):
    with pytest.raises(ValueError, match="must be the dotted path of a class"):
        experiment.load(path)


def test_a_path_of_something_else_is_refused():
    with pytest.raises(
        ValueError, match="not a class that derives from xshard.Experiment"
    ):
        experiment.load("tests.toy.get_config")
