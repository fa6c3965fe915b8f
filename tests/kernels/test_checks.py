"""The C kernels against torch and themselves; without the library these fail and say why."""

import pytest

from tests.kernels.checks import CHECKS


@pytest.mark.parametrize("name", CHECKS)
def test_it_holds(name):
    CHECKS[name]()
