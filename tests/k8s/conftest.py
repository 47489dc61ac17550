"""Everything here renders the chart, which takes the packages of requirements/dev.txt and no cluster."""

from __future__ import annotations

import pytest

from tests.integration.conftest import tiny_model as tiny_model
from tests.k8s.manifests import COMBINATIONS


@pytest.fixture(params=sorted(COMBINATIONS))
def name(request: pytest.FixtureRequest) -> str:
    """Each combination of values in its turn."""
    return str(request.param)
