"""A mixture of experts in a decoding step: only the experts that the rows chose are read.

An eager step reads the choice and runs those experts. A compiled or recorded step has one shape,
whatever was chosen: it gathers the weights of the chosen experts, or runs all experts where the
rows together would read most of them.
"""

from typing import assert_never, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from glassformer.generation.fast.projection import Maker, OwnProduct, linear_parts, make_norm
from glassformer.kernels.matmul import joined
from glassformer.nn.ffn import MLP, MixtureOfExperts, SwiGLU, activate, route
from glassformer.nn.norm import LayerNorm, RMSNorm

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
                self.up = make.linear(part.gate_proj, part.up_proj, norm=norm, gated=True)
            case MLP():
                self.activation = part.activation
                self.up = make.linear(part.up_proj, norm=norm)
            case _ as unreachable:
                assert_never(unreachable)

    def __call__(self, x_BD: Tensor) -> Tensor:
        return self.down(self.hidden(x_BD))

    def onto(self, residual_BD: Tensor) -> Tensor:
        """Return residual + feed-forward(residual); the residual may be overwritten."""
        return self.down.onto(residual_BD, self.hidden(residual_BD))

    def hidden(self, x_BD: Tensor) -> Tensor:
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
        plain = not any(isinstance(layer, OwnProduct) for layer in part.experts.modules())
        if make.static and plain:
            self.stacked = StackedExperts(part)
        else:
            experts = (cast(MLP | SwiGLU, expert) for expert in part.experts)
            self.experts = [FastFeedForward(expert, make, norm=None) for expert in experts]
        self.static = make.static
        self.shared = self.shared_gate_1D = None
        if part.shared_expert is not None:
            self.shared = FastFeedForward(part.shared_expert, make, norm=None)
        if part.shared_expert_gate is not None:
            self.shared_gate_1D = linear_parts(part.shared_expert_gate)[0]

    def onto(self, residual_BD: Tensor) -> Tensor:
        """Return residual + mixture(residual)."""
        x_BD = residual_BD if self.norm is None else self.norm(residual_BD)
        weights_BA, chosen_BA, _ = route(
            F.linear(x_BD, self.router_ED),
            chosen=self.experts_per_token,
            normalize=self.normalize,
        )
        weights_BA = weights_BA.to(x_BD.dtype)
        if self.stacked is not None:
            out_BD = self.stacked(x_BD, weights_BA, chosen_BA)
        elif self.static:
            out_BD = self._every(x_BD, weights_BA, chosen_BA)
        else:
            out_BD = self._chosen(x_BD, weights_BA, chosen_BA)
        if self.shared is not None:
            shared_BD = self.shared(x_BD)
            if self.shared_gate_1D is not None:
                shared_BD = torch.sigmoid(F.linear(x_BD, self.shared_gate_1D)) * shared_BD
            out_BD = out_BD + shared_BD
        return residual_BD + out_BD

    def _chosen(self, x_BD: Tensor, weights_BA: Tensor, chosen_BA: Tensor) -> Tensor:
        """Run each expert that some row chose, for those rows."""
        choices = chosen_BA.tolist()
        if len(choices) == 1:
            outs = [self.experts[expert](x_BD) for expert in choices[0]]
            return weights_BA @ torch.cat(outs)
        out_BAD = x_BD.new_empty(*chosen_BA.shape, x_BD.shape[1])
        for expert in sorted({expert for row in choices for expert in row}):
            rows, slots = (chosen_BA == expert).nonzero(as_tuple=True)
            out_BAD[rows, slots] = self.experts[expert](x_BD[rows])
        return (weights_BA[..., None] * out_BAD).sum(1)

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
