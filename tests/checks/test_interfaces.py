"""Models of other interfaces: the checks they are asked, and the rows that see their mistakes."""

import pytest
import torch

import glasscheck as gc
from tests.checks.interfaces import MODELS, OF_GENERATE


def made(kind, fault=""):
    torch.manual_seed(3)
    return kind(fault).eval()


@pytest.mark.parametrize("kind", MODELS, ids=lambda kind: kind.__name__)
def test_healthy_models_pass_what_they_offer(kind):
    found = gc.verify(made(kind))
    assert found.failed == 0, found
    assert found.ran >= MODELS[kind][0], found


@pytest.mark.parametrize(
    ("kind", "fault"),
    [(kind, fault) for kind, (_, faults) in MODELS.items() for fault in faults],
    ids=lambda x: x if isinstance(x, str) else x.__name__,
)
def test_a_mistake_fails_its_row(kind, fault):
    found = gc.verify(made(kind, fault))
    failed = [f.name for f in found.findings if f.failed]
    assert MODELS[kind][1][fault] in failed, found


@pytest.mark.filterwarnings("ignore")  # the library's own
@pytest.mark.parametrize(("fault", "row"), [("", ""), *OF_GENERATE.items()])
def test_ends_and_penalties_of_generate(fault, row):
    from transformers import LlamaConfig, LlamaForCausalLM

    class Writer(LlamaForCausalLM):
        def generate(self, *args, generation_config, **kwargs):
            if fault == "penalty forgotten":
                generation_config.repetition_penalty = 1.0
            made = super().generate(*args, generation_config=generation_config, **kwargs)
            if fault and generation_config.eos_token_id is not None:
                ended = (made.sequences == generation_config.pad_token_id)[:, 5:]
                made.sequences[:, 5:][ended] = 7 if fault.startswith("goes") else 0
            return made

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 61}
    model = Writer(LlamaConfig(**sizes, num_attention_heads=4, pad_token_id=0))
    found = gc.verify(model, only="generate")
    failed = [f.name for f in found.findings if f.failed]
    assert (row in failed) if row else not failed, found
