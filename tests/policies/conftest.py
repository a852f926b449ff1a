"""Tests that share an expensive fixture stay on one of xdist's workers."""

import pytest

SHARED_FIXTURES = ("installed", "said_of_broken")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for name in set(SHARED_FIXTURES) & set(getattr(item, "fixturenames", ())):
            item.add_marker(pytest.mark.xdist_group(name))
