"""Backward against measured slopes: gradients stopped on purpose are told from wrong ones."""

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import glassformer as gf
from tests.checks import foreign

ROW = "gradients = central differences"


class Rounded(torch.autograd.Function):
    """A straight-through estimate: backward takes the rounded weights for the weights."""

    @staticmethod
    def forward(ctx, weight):
        return (8 * weight).round() / 8

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Reversed(torch.autograd.Function):
    """An identity that turns gradients round."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


class WrongTanh(torch.autograd.Function):
    """The derivative of tanh is 1 - tanh**2."""

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.tanh()

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * (1 - x.tanh())


class Small(nn.Module):
    """Embedding, layer, head; `habit` says what happens to gradients on the way."""

    def __init__(self, habit: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.habit = habit
        self.embed, self.layer, self.head = (
            nn.Embedding(31, 16),
            nn.Linear(16, 16),
            nn.Linear(16, 31),
        )

    def forward(self, input_ids: Tensor) -> Tensor:
        x, weight, act = self.embed(input_ids), self.layer.weight, torch.tanh
        norm = x.norm(dim=-1, keepdim=True)
        match self.habit:
            case "norm detached":
                x = x / norm.detach()
            case "norm as data":
                x = x / norm.data
            case "norm in no_grad":
                with torch.no_grad():
                    norm = x.norm(dim=-1, keepdim=True)
                x = x / norm
            case "weights rounded":
                weight = weight + ((8 * weight).round() / 8 - weight).detach()
            case "weights rounded by a function":
                weight = Rounded.apply(weight)
            case "results rounded by torch":
                x = torch.fake_quantize_per_tensor_affine(x, 0.1, 0, -128, 127)
            case "gradients turned":
                x = Reversed.apply(x)
            case "wrong backward":
                act = WrongTanh.apply
            case "wrong backward beside a norm detached":
                x, act = x / norm.detach(), WrongTanh.apply
            case "norm through NumPy":
                x = x / torch.from_numpy(norm.detach().numpy().copy())
        return self.head(act(F.linear(x, weight, self.layer.bias)))


def row_of(model: nn.Module):
    return {f.name: f for f in gf.verify(model, only="gradients").findings}[ROW]


@pytest.mark.parametrize(
    ("habit", "word"),
    [
        ("norm detached", "detach at tests.checks.test_foreign_slopes:"),
        ("norm as data", ".data at"),
        ("norm in no_grad", "no_grad at"),
        ("weights rounded", "detach at"),
        ("weights rounded by a function", "straight-through Rounded"),
        ("results rounded by torch", "straight-through rounding"),
        ("gradients turned", "backward of Reversed, an identity"),
    ],
)
def test_a_gradient_stopped_on_purpose_is_a_limit_that_names_the_line(habit, word):
    row = row_of(Small(habit))
    assert row.verdict == "limit", row
    assert word in row.note
    assert "layer.weight" in row.note or "embed.weight" in row.note


@pytest.mark.parametrize(
    "habit",
    ["wrong backward", "wrong backward beside a norm detached", "norm through NumPy"],
)
def test_a_wrong_gradient_is_a_bug_with_stops_or_without(habit):
    row = row_of(Small(habit))
    assert row.verdict == "bug", row
    assert "measured" in row.note


def test_a_plain_model_agrees():
    assert row_of(Small("")).verdict == "passed"


@pytest.mark.filterwarnings("ignore")  # the library's own
def test_adapters_with_a_constant_norm_are_no_alarm():
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(target_modules=["q_proj", "v_proj"], r=2, use_dora=True)
    report = gf.verify(get_peft_model(foreign.llama(), config))
    assert report.failed == 0, str(report)
    row = next(f for f in report.findings if f.name == ROW)
    assert (row.verdict, "detach at" in row.note, "lora_" in row.note) == ("limit", True, True), row


@pytest.mark.filterwarnings("ignore")
def test_slopes_too_flat_for_parts_in_float32_are_no_alarm():
    from peft import VeraConfig, get_peft_model

    report = gf.verify(get_peft_model(foreign.llama(), VeraConfig(target_modules=["q_proj"], r=4)))
    assert report.failed == 0, str(report)


def test_a_forward_that_writes_its_own_weights_is_a_limit():
    class Projected(Small):
        def forward(self, input_ids: Tensor) -> Tensor:
            self.layer.weight.data = F.normalize(self.layer.weight.data)
            return super().forward(input_ids)

    row = row_of(Projected(""))
    assert (row.verdict, "writes layer.weight" in row.note) == ("limit", True), row
