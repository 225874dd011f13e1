"""Imports without the garbage collections that they would cause."""

from __future__ import annotations

import gc

import pytest

from dataloader.cli.imports import NEW_OBJECTS, few_collections


@pytest.fixture(autouse=True)
def threshold():
    """Restore the threshold after the test."""
    before = gc.get_threshold()
    yield before
    gc.set_threshold(*before)


def test_within_the_block_garbage_is_collected_seldom_and_after_it_as_before(threshold):
    with few_collections():
        assert gc.get_threshold() == (NEW_OBJECTS, *threshold[1:])
    assert gc.get_threshold() == threshold


def test_a_failed_import_leaves_the_threshold_as_it_was(threshold):
    with pytest.raises(ImportError), few_collections():
        raise ImportError
    assert gc.get_threshold() == threshold


def test_a_threshold_that_a_module_sets_is_kept():
    with few_collections():
        gc.set_threshold(1_000, 5, 5)
    assert gc.get_threshold() == (1_000, 5, 5)
