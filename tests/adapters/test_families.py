"""Every decoder family computes what transformers computes, and goes back byte for byte."""

import pytest
from bench.families import CASES, prove

TOLERANCE = 1e-5  # of the largest logit, float32

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own


@pytest.mark.parametrize("name", CASES)
def test_a_family_is_what_transformers_computes(name, tmp_path):
    proof = prove(CASES[name], tmp_path)
    assert proof.worst <= TOLERANCE, proof
    assert proof.tokens
    assert proof.bytes
    assert proof.complete
