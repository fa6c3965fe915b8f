"""The products of a derived step with what is around them: norm, gate, residual, experts.

On a GPU with Triton they are one kernel for one row; elsewhere one call after another. A recorded
step has one shape, whatever experts were chosen: it gathers the weights of the chosen ones, or runs
all experts where the rows together would read most of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Protocol, assert_never, cast, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glassformer.gpu.products import Gained, Product, joined, plain_rows
from glassformer.nn.experts import MixtureOfExperts, route
from glassformer.nn.ffn import MLP, SwiGLU
from glassformer.nn.linear import Linear
from glassformer.nn.norm import LayerNorm, RMSNorm
from glassformer.nn.operations import activate
from glassformer.spec.errors import InputError

# B batch, I inputs, O outputs, F d_ff, N query heads, K key-value heads, X = N + K, H d_head


@dataclass(frozen=True, slots=True)
class Maker:
    """A builder of a derived step's parts, with our GPU kernels where they can run."""

    gpu: ModuleType | None = None

    def projection(
        self,
        weight_OI: Tensor,
        bias_O: Tensor | None,
        *,
        norm: LayerNorm | RMSNorm | None = None,
        activation: str = "",
    ) -> "Projection":
        """Return a product with the norm before it and the activation after it."""
        product = Product(weight_OI, bias_O)
        return Projection(product, norm=norm, activation=activation, gpu=self.gpu)

    def linear(
        self,
        *parts: nn.Module,
        norm: LayerNorm | RMSNorm | None = None,
        activation: str = "",
    ) -> "Projection":
        """Return layers of one input as one product; quantized layers have their own.

        Our GPU kernels want gate and up of an output as neighbours.
        """
        if not any(isinstance(part, OwnProduct) for part in parts):
            weight_OI, bias_O = joined([linear_parts(part) for part in parts])
            if activation == "gate" and self.gpu is not None:
                weight_OI = neighbours(weight_OI)
                bias_O = None if bias_O is None else neighbours(bias_O)
            return self.projection(weight_OI, bias_O, norm=norm, activation=activation)
        products = [
            part.product() if isinstance(part, OwnProduct) else Product(*linear_parts(part))
            for part in parts
        ]
        product = products[0] if len(products) == 1 else SideBySide(products)
        return Projection(product, norm=norm, activation=activation, gpu=None)

    def norm(self, part: LayerNorm | RMSNorm) -> Callable[[Tensor], Tensor]:
        """Return a norm of rows as one call."""
        if self.gpu is None:
            return make_norm(part)
        normalise, operands = self.gpu.normalise, norm_operands(part)
        return lambda x_BI: normalise(x_BI, **operands)


@runtime_checkable
class OwnProduct(Protocol):
    """A layer whose weights have a form of their own, as quantized ones do."""

    def product(self) -> Product:
        """Return the layer's product: x W^T + b, and residual + x W^T + b."""


@runtime_checkable
class OwnTable(Protocol):
    """A token embedding whose weights have a form of their own."""

    def product(self, bias_O: Tensor | None) -> Product:
        """Return the product of a head that is tied to the table."""


def neighbours(both_O: Tensor) -> Tensor:
    """Return rows of two halves with each row of the first before that of the second."""
    first, second = both_O.chunk(2)
    return torch.stack((first, second), dim=1).flatten(0, 1)


class SideBySide:
    """Several products of one input, their outputs concatenated."""

    def __init__(self, products: Sequence[Callable[[Tensor], Tensor]]) -> None:
        self.products = products

    def __call__(self, x_BI: Tensor) -> Tensor:
        return torch.cat([product(x_BI) for product in self.products], dim=-1)


def make_norm(part: LayerNorm | RMSNorm) -> Callable[[Tensor], Tensor]:
    """Return the norm as one call."""
    weight, eps, shape = part.weight.detach(), part.eps, tuple(part.weight.shape)
    match part:
        case LayerNorm():
            assert part.bias is not None, "`why_not` refuses a norm without one"
            bias = part.bias.detach()
            return lambda x: torch.layer_norm(x, shape, weight, bias, eps)
        case RMSNorm():
            return lambda x: torch.rms_norm(x, shape, weight, eps)
        case _ as unreachable:
            assert_never(unreachable)


def norm_operands(part: LayerNorm | RMSNorm) -> dict[str, object]:
    """Return a norm as the arguments of our GPU kernels."""
    operands: dict[str, object] = {"gain_I": part.weight.detach(), "eps": part.eps}
    match part:
        case LayerNorm():
            assert part.bias is not None, "`why_not` refuses a norm without one"
            return operands | {"norm": "layer", "shift_I": part.bias.detach()}
        case RMSNorm():
            return operands | {"norm": "rms", "shift_I": None}
        case _ as unreachable:
            assert_never(unreachable)


def gpu_kernels(like: Tensor) -> ModuleType | None:
    """Return our kernels for tensors like this one, or None where they cannot run."""
    if not like.is_cuda or find_spec("triton") is None:
        return None
    gpu = import_module("glassformer.gpu.triton_decode")
    return gpu if like.dtype in gpu.DTYPES else None


def row_kernels(weight_OI: Tensor) -> ModuleType | None:
    """Return our kernels for products of some rows by these weights, or None without any."""
    kernels = import_module("glassformer.gpu.cuda_rows")
    return kernels if kernels.reads(weight_OI) else None


def head_kernels(weight_VI: Tensor) -> ModuleType | None:
    """Return our kernels that find the likeliest tokens by these weights, or None without any."""
    kernels = import_module("glassformer.gpu.cuda_head")
    return kernels if kernels.reads(weight_VI) else None


class Projection:
    """activation(product(norm(x))); "gate" is silu(first half) * second half, by our kernels
    silu(even outputs) * odd outputs.

    With our kernels a product of some rows that adds to a residual may prepare it for the norm of
    the projection that reads it next (`prepare`).
    """

    def __init__(
        self,
        product: Product | SideBySide,
        *,
        norm: LayerNorm | RMSNorm | None,
        activation: str,
        gpu: ModuleType | None,
    ) -> None:
        self.activation = activation
        # Only projections that read one layer are added onto a residual, or run by our kernels.
        self.product = cast(Product, product)
        self.norm = None if norm is None else make_norm(norm)
        self.gpu = gpu if type(product) is Product else None
        assert activation != "gate" or self.gpu is gpu, "the weights' order is our kernels'"
        self.norm_operands = {} if norm is None else norm_operands(norm)
        self.next_gain_O: Tensor | None = None
        self.rows: ModuleType | None = None
        self.finder: ModuleType | None = None
        if self.gpu is not None:
            self.rows = row_kernels(self.product.weight_OI)

    def find_tokens(self) -> None:
        """Let this projection, a head, find the likeliest tokens by itself where kernels can."""
        if self.gpu is not None:
            self.finder = head_kernels(self.product.weight_OI)

    def prepare(self, reader: "Projection") -> None:
        """Prepare what is added to a residual for the norm of a projection, where both can."""
        both = self.rows is not None and (reader.rows or reader.finder) is not None
        if both and reader.norm_operands.get("norm") == "rms":
            self.next_gain_O = cast(Tensor, reader.norm_operands["gain_I"])

    def __call__(self, x_BI: "Tensor | Gained") -> Tensor:
        if self.gpu is not None:
            return self._by_kernels(x_BI, self.gpu)
        assert isinstance(x_BI, Tensor), "only our kernels prepare rows"
        wide_BO = self.product(x_BI if self.norm is None else self.norm(x_BI))
        if self.activation != "gate":
            return activate(wide_BO, self.activation) if self.activation else wide_BO
        gate_BF, up_BF = wide_BO.chunk(2, -1)
        return F.silu(gate_BF) * up_BF

    def _by_kernels(self, x_BI: "Tensor | Gained", gpu: ModuleType) -> Tensor:
        out_BO: Tensor
        weight, bias = self.product.weight_OI, self.product.bias_O
        if isinstance(x_BI, Gained):
            assert self.rows is not None
            eps, act = self.norm_operands["eps"], self.activation
            out_BO = self.rows.product_of_rows(x_BI, weight, bias, eps=eps, activation=act)
            return out_BO
        if len(x_BI) == 1:
            fused = self.norm_operands | {"activation": self.activation}
            out_BO = gpu.product(x_BI, weight, bias, **fused)
            return out_BO
        x_BI = gpu.normalise(x_BI, **self.norm_operands) if self.norm else x_BI
        if self.rows is not None and self.rows.takes(x_BI):
            out_BO = self.rows.product_of_rows(x_BI, weight, bias, activation=self.activation)
            return out_BO
        wide_BO = self.product(x_BI)
        if not self.activation:
            return wide_BO
        out_BO = (
            gpu.gate(wide_BO) if self.activation == "gate" else activate(wide_BO, self.activation)
        )
        return out_BO

    def find(self, x_BI: "Tensor | Gained", flags_V: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return what is likeliest in parts of the vocabulary; see `find_tokens`."""
        assert self.gpu is not None and self.finder is not None
        eps = 0.0
        if isinstance(x_BI, Gained):
            eps = cast(float, self.norm_operands["eps"])
        elif self.norm is not None:
            x_BI = self.gpu.normalise(x_BI, **self.norm_operands)
        weight, bias = self.product.weight_OI, self.product.bias_O
        parts: tuple[Tensor, Tensor, Tensor] = self.finder.find(
            x_BI, weight, bias, flags_V, eps=eps
        )
        return parts

    def onto(self, residual: "Tensor | Gained", x_BI: Tensor) -> "Tensor | Gained":
        """Return residual + product(x), prepared for who reads it; it may be overwritten.

        With our kernels the x of a single row may be the parts of an attention.
        """
        product, residual_BO = self.product, plain_rows(residual)
        if self.gpu is None:
            return product.onto(residual_BO, x_BI)
        weight, bias = product.weight_OI, product.bias_O
        if len(residual_BO) == 1:
            out_1O: Tensor = self.gpu.product(x_BI, weight, bias, residual_1O=residual_BO)
            return out_1O
        if self.rows is not None and self.rows.takes(x_BI):
            out_BO: Tensor | Gained = self.rows.product_of_rows(
                x_BI,
                weight,
                bias,
                residual_BO=residual_BO,
                gain_O=self.next_gain_O,
            )
            return out_BO
        residual_BO = residual_BO.addmm_(x_BI, weight.t())
        return residual_BO if bias is None else residual_BO.add_(bias)


def linear_parts(part: object) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias of a plain linear layer; others have products of their own."""
    if type(part) is not Linear:
        raise InputError(
            f"a recorded step needs plain linear layers, and found {type(part).__name__}",
            hint="use TorchStepper, which runs any model",
        )
    return part.weight.detach(), None if part.bias is None else part.bias.detach()


class HeadNorms:
    """q/k-norm of all heads at once: one normalisation, and the gains of queries and keys."""

    def __init__(self, parts: list[tuple[LayerNorm | RMSNorm, int]]) -> None:
        self.kind, self.eps = type(parts[0][0]), parts[0][0].eps
        self.shape = tuple(parts[0][0].weight.shape)
        self.gain_XH = torch.cat([part.weight.detach().expand(n, -1) for part, n in parts])
        self.bias_XH = None
        match parts[0][0]:
            case LayerNorm():
                shifts = [(part.bias, n) for part, n in parts if isinstance(part, LayerNorm)]
                self.bias_XH = torch.cat(
                    [bias.detach().expand(n, -1) for bias, n in shifts if bias is not None]
                )
            case RMSNorm():
                pass
            case _ as unreachable:
                assert_never(unreachable)

    def __call__(self, x_BXH: Tensor) -> Tensor:
        if self.kind is LayerNorm:
            assert self.bias_XH is not None
            x_BXH = torch.layer_norm(x_BXH, self.shape, None, None, self.eps)
            return torch.addcmul(self.bias_XH, x_BXH, self.gain_XH)
        return torch.rms_norm(x_BXH, self.shape, None, self.eps) * self.gain_XH


# --- feed-forward layers --------------------------------------------------------------------------

# B batch, D d_model, F d_ff, W = 2 F where gate and up are side by side, E experts,
# A experts of a token, J = B * A


class FastFeedForward:
    """A feed-forward that every token passes through; gate and up are one product."""

    def __init__(
        self, part: MLP | SwiGLU, make: Maker, *, norm: LayerNorm | RMSNorm | None
    ) -> None:
        self.down = make.linear(part.down_proj)
        match part:
            case SwiGLU():
                self.activation = ""
                self.up = make.linear(part.gate_proj, part.up_proj, norm=norm, activation="gate")
            case MLP():
                self.activation = part.activation
                fused = ""
                if make.gpu is not None and part.activation in make.gpu.ACTIVATIONS:
                    self.activation, fused = "", part.activation
                self.up = make.linear(part.up_proj, norm=norm, activation=fused)
            case _ as unreachable:
                assert_never(unreachable)

    def __call__(self, x_BD: Tensor) -> Tensor:
        return self.down(self.hidden(x_BD))

    def onto(self, residual_BD: "Tensor | Gained") -> "Tensor | Gained":
        """Return residual + feed-forward(residual); the residual may be overwritten."""
        return self.down.onto(residual_BD, self.hidden(residual_BD))

    def hidden(self, x_BD: "Tensor | Gained") -> Tensor:
        """Return the activations (B, F) between the two products."""
        wide = self.up(x_BD)
        return activate(wide, self.activation) if self.activation else wide


class FastMixtureOfExperts:
    """sum_e w_e expert_e(x) + gate * shared_expert(x) of one new token per row."""

    def __init__(
        self, part: MixtureOfExperts, make: Maker, *, norm: LayerNorm | RMSNorm | None
    ) -> None:
        self.n_experts, self.normalize = part.n_experts, part.normalize
        self.experts_per_token = part.experts_per_token
        self.norm = None if norm is None else make_norm(norm)
        self.router_ED = linear_parts(part.gate)[0]
        self.stacked: StackedExperts | None = None
        self.experts: list[FastFeedForward] = []
        if not any(isinstance(layer, OwnProduct) for layer in part.experts.modules()):
            self.stacked = StackedExperts(part)
        else:
            experts = (cast(MLP | SwiGLU, expert) for expert in part.experts)
            self.experts = [FastFeedForward(expert, make, norm=None) for expert in experts]
        self.shared = self.shared_gate_1D = None
        if part.shared_expert is not None:
            self.shared = FastFeedForward(part.shared_expert, make, norm=None)
        if part.shared_expert_gate is not None:
            self.shared_gate_1D = linear_parts(part.shared_expert_gate)[0]

    def onto(self, residual: "Tensor | Gained") -> Tensor:
        """Return residual + mixture(residual)."""
        residual_BD = plain_rows(residual)
        x_BD = residual_BD if self.norm is None else self.norm(residual_BD)
        weights_BA, chosen_BA, _ = route(
            F.linear(x_BD, self.router_ED),
            chosen=self.experts_per_token,
            normalize=self.normalize,
        )
        weights_BA = weights_BA.to(x_BD.dtype)
        if self.stacked is not None:
            out_BD = self.stacked(x_BD, weights_BA, chosen_BA)
        else:
            out_BD = self._every(x_BD, weights_BA, chosen_BA)
        if self.shared is not None:
            shared_BD = self.shared(x_BD)
            if self.shared_gate_1D is not None:
                shared_BD = torch.sigmoid(F.linear(x_BD, self.shared_gate_1D)) * shared_BD
            out_BD = out_BD + shared_BD
        return residual_BD + out_BD

    def _every(self, x_BD: Tensor, weights_BA: Tensor, chosen_BA: Tensor) -> Tensor:
        """Run every expert for every row: the shapes are the same whatever was chosen."""
        out_EBD = torch.stack([expert(x_BD) for expert in self.experts])
        rows_B1 = torch.arange(len(x_BD), device=x_BD.device)[:, None]
        return (weights_BA[..., None] * out_EBD[chosen_BA, rows_B1]).sum(1)


class StackedExperts:
    """All experts' weights in three dimensions, to be indexed by the choice on the device."""

    def __init__(self, part: MixtureOfExperts) -> None:
        first, downs = [], []
        self.activation = ""
        for expert in part.experts:
            match expert:
                case SwiGLU():
                    into = [linear_parts(expert.gate_proj), linear_parts(expert.up_proj)]
                case MLP():
                    into = [linear_parts(expert.up_proj)]
                    self.activation = expert.activation
                case _:
                    raise AssertionError(f"an expert of class {type(expert).__name__}")
            first.append(joined(into))
            downs.append(linear_parts(expert.down_proj))
        self.up_EWD, self.up_EW = _stacked(first)
        self.down_EDF, self.down_ED = _stacked(downs)

    def __call__(self, x_BD: Tensor, weights_BA: Tensor, chosen_BA: Tensor) -> Tensor:
        (B, A), E = chosen_BA.shape, len(self.up_EWD)
        if B * A < E:
            chosen_J = chosen_BA.flatten()
            x_J1D = x_BD.repeat_interleave(A, 0)[:, None]
            out_J1D = self._experts(x_J1D, chosen_J)
            return (weights_BA[..., None] * out_J1D.view(B, A, -1)).sum(1)
        out_EBD = self._experts(x_BD.expand(E, -1, -1), None)
        rows_B1 = torch.arange(B, device=x_BD.device)[:, None]
        return (weights_BA[..., None] * out_EBD[chosen_BA, rows_B1]).sum(1)

    def _experts(self, x_JRD: Tensor, chosen_J: Tensor | None) -> Tensor:
        """Run R rows through each of some or all experts: two batched products."""

        def of(stacked: Tensor) -> Tensor:
            return stacked if chosen_J is None else stacked.index_select(0, chosen_J)

        wide_JRW = torch.bmm(x_JRD, of(self.up_EWD).mT)
        if self.up_EW is not None:
            wide_JRW = wide_JRW + of(self.up_EW)[:, None]
        if self.activation:
            hidden_JRF = activate(wide_JRW, self.activation)
        else:
            gate_JRF, up_JRF = wide_JRW.chunk(2, -1)
            hidden_JRF = F.silu(gate_JRF) * up_JRF
        out_JRD = torch.bmm(hidden_JRF, of(self.down_EDF).mT)
        return out_JRD if self.down_ED is None else out_JRD + of(self.down_ED)[:, None]


def _stacked(parts: list[tuple[Tensor, Tensor | None]]) -> tuple[Tensor, Tensor | None]:
    biases = [bias for _, bias in parts if bias is not None]
    return torch.stack([weight for weight, _ in parts]), torch.stack(biases) if biases else None
