"""Every decoder family computes what transformers computes, and goes back byte for byte."""

import pytest
from bench.families import CASES, prove

from glassformer.spec.errors import FileError, InputError
from tests.checks.faults import Fault, planted

TOLERANCE = 1e-5  # of the largest logit, float32

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own


#: Decoders; those of other kinds and the first five families have files of tests to themselves.
ELSEWHERE = ("llama", "mistral", "qwen2", "qwen3", "gpt2")
DECODERS = [
    name
    for name, case in CASES.items()
    if case.auto == "AutoModelForCausalLM" and case.model_type not in ELSEWHERE
]


@pytest.mark.parametrize("name", DECODERS)
def test_a_family_is_what_transformers_computes(name, tmp_path):
    proof = prove(CASES[name], tmp_path)
    assert proof.worst <= TOLERANCE, proof
    assert proof.tokens
    assert proof.bytes
    assert proof.complete


GPT2, EXPERTS = "adapters.families.gpt2:", "adapters.families.experts:"
FAULTS = [
    Fault("no window", f"{GPT2}read_neo", 'window if kind == "local"', "None if kind", "gpt_neo"),
    Fault("scores are scaled", f"{GPT2}read_neo", "scale=1.0", "scale=None", "gpt_neo"),
    Fault("rows as they are", f"{GPT2}gptj_table", "Interleaved(width, turned)", "Rows()", "gptj"),
    Fault("two norms", f"{GPT2}read_gptj", '"parallel_shared"', '"parallel"', "gptj"),
    Fault("positions from 0", f"{GPT2}read_opt", "offset=2", "offset=0", "opt"),
    Fault("no limit", f"{EXPERTS}read_gpt_oss", "clamp=clamp", "clamp=None", "gpt_oss"),
    Fault("no sinks", f"{EXPERTS}read_gpt_oss", "sinks=True", "sinks=False", "gpt_oss"),
    Fault("gate, then up", f"{EXPERTS}gpt_oss_table", ", alternating=True", "", "gpt_oss"),
    Fault(
        "no factors",
        f"{EXPERTS}read_granite_moe",
        "return with_multipliers(",
        "return (lambda spec, _: spec)(",
        "granitemoe",
    ),
]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault_of_a_family_is_seen(fault, tmp_path):
    case = next(case for case in CASES.values() if case.model_type == fault.caught_by)
    with planted(fault):
        try:
            proof = prove(case, tmp_path)
        except (FileError, InputError, RuntimeError):
            return  # a key that nobody read, a tensor without a parameter, a file that does not fit
    assert proof.worst > 100 * TOLERANCE
