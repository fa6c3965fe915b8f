"""The layers of quantization: `QuantizedLinear`, `QuantizedEmbedding`, and those prepared for it.

A quantized layer holds a stored form or a backend's. The stored form (`qweight`, `scale`, `zero`,
`bias`) is the same on every machine, and state dicts always hold it. The first product replaces it
by the form of the backend in use; moving a layer to another device restores it.

A prepared layer, watched or rounded, keeps the parameters of the float layer under the same names,
so the same training loop trains it and the same checkpoint holds it.
"""

from abc import ABC
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from glassformer.kernels.integer import IntegerTiles
from glassformer.models.inputs import Inputs
from glassformer.nn.embedding import TokenEmbedding
from glassformer.nn.linear import Linear, PackedWeight
from glassformer.quant.backends.choose import (
    BACKENDS,
    EVERYWHERE,
    FLOAT,
    Form,
    LookupForm,
    check_backend,
    choose,
)
from glassformer.quant.backends.routines import (
    NativeForm,
    float_product,
    in_pieces,
    reference_product,
    reference_rows,
    transposed_product,
)
from glassformer.quant.schemes import STORED, QuantizedTensor, dequantize, quantize_tensor
from glassformer.spec.errors import InputError
from glassformer.spec.schemes import Method, RecordedMethod, Scheme

# B batch, T length, M rows, N looked-up rows, D d_model, V vocab, O outputs, I inputs


class FrozenProduct(torch.autograd.Function):
    """x W^T + b with rounded weights, made anew in the backward: no float copy is kept for it.

    forward: y = x W^T + b   =>   dx = dy W
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, tensor: QuantizedTensor, bias_O: Tensor | None) -> Tensor:
        ctx.tensor = tensor
        return float_product(x, tensor, bias_O)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return transposed_product(gradient, ctx.tensor), None, None


class QuantizedWeight(PackedWeight, ABC):
    """A quantized (O, I) matrix. `wanted` is the requested backend, `backend` the one in use.

    `lookup`: rows are read too. `head`: its products are logits. `frozen`: a part of a model of
    which something else trains.
    """

    lookup = False
    head = False
    frozen = False
    qweight: Tensor | None
    scale: Tensor | None
    zero: Tensor | None
    exponent: Tensor | None

    def __init__(
        self,
        tensor: QuantizedTensor,
        *,
        method: RecordedMethod,
        backend: str,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__()
        self.scheme: Scheme = tensor.scheme
        self.shape = tensor.shape
        self.method: RecordedMethod = method
        self.dtype = dtype
        self.form: Form | None = None
        self.home = tensor.qweight.device
        for name in STORED:
            self.register_buffer(name, getattr(tensor, name))
        self.use(backend)

    @property
    def backend(self) -> str:
        """The name of the backend that runs it on its current device."""
        if self.wanted == "auto":
            return choose(self.scheme, self.shape, self.device, lookup=self.lookup)
        return self.wanted

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return self.home if self.qweight is None else self.qweight.device

    @property
    def nbytes(self) -> int:
        """The number of resident bytes of the weights, in their current form."""
        return self.stored().nbytes if self.form is None else self.form.nbytes

    @property
    def numbers(self) -> int:
        """The number of the model's parameters that it represents."""
        return self.shape[0] * self.shape[1]

    def use(self, backend: str) -> None:
        """Run on this backend from now on; refuse one that cannot."""
        if self.form is not None:
            self.restore()
        check_backend(backend, self.scheme, self.shape, self.device, lookup=self.lookup)
        self.wanted = backend

    def stored(self) -> QuantizedTensor:
        """Return the stored form, unpacked from the backend's form if necessary."""
        if self.form is not None:
            return self.form.unpack()
        assert self.qweight is not None and self.scale is not None
        return QuantizedTensor(self.qweight, self.scale, self.zero, self.scheme, self.exponent)

    def restore(self) -> None:
        """Replace the backend's form by the stored one."""
        if self.form is not None:
            tensor = self.form.unpack()
            self.form = None
            for name in STORED:
                setattr(self, name, getattr(tensor, name))

    def weights(self) -> Tensor:
        """Return the float32 weights (O, I) that the levels represent."""
        return dequantize(self.stored())

    def ready(self) -> Form | None:
        """Return the backend's form, packed now if it is not yet; None if it runs as stored."""
        if self.form is None and self.backend not in EVERYWHERE:
            form = BACKENDS[self.backend].pack(self.stored(), lookup=self.lookup, head=self.head)
            self.form, self.home = form, self.device
            self.qweight = self.scale = self.zero = self.exponent = None
        return self.form

    def c_weight(self) -> IntegerTiles | None:
        """Return the weights as the native step reads them; None where another backend runs."""
        form = self.ready()
        return form.weight.tiles if isinstance(form, NativeForm) else None

    def times(self, x: Tensor, bias_O: Tensor | None) -> Tensor:
        """Return x W^T + b for x (..., I)."""
        form = self.ready()
        if form is None:
            if self.backend == FLOAT:
                if torch.is_grad_enabled() and x.requires_grad:
                    passed: Tensor = FrozenProduct.apply(  # type: ignore[no-untyped-call]
                        x, self.stored(), bias_O
                    )
                    return passed
                return float_product(x, self.stored(), bias_O)
            return reference_product(x, self.stored(), bias_O, head=self.head)
        if x.ndim == 2 and x.dtype == torch.float32 and bias_O is None and not x.requires_grad:
            return form.product(x, None)
        rows_MI = x.detach().reshape(-1, self.shape[1]).float()
        bias = None if bias_O is None else bias_O.float()
        return form.product(rows_MI, bias).view(*x.shape[:-1], self.shape[0]).to(x.dtype)

    def train(self, mode: bool = True) -> "QuantizedWeight":
        """Set the mode; refuse training mode unless frozen, as integers have no gradients."""
        if mode and not self.frozen:
            raise InputError(
                "a quantized model cannot be trained: its weights are whole numbers",
                hint="prepare_model_for_quantization(model, mode='qat') trains with rounded "
                "weights, LoRA a correction of them; dequantize_model gives a float model",
            )
        return super().train(mode)

    def freeze(self) -> None:
        """Take part in training: weights stay rounded, activations as they are, gradients pass."""
        self.use(FLOAT)
        self.frozen = True

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "QuantizedWeight":
        self.restore()
        stored, before = self.stored(), self.dtype
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch leaves it unannotated
        # The stored form keeps its dtype, whatever precision the model computes in.
        assert self.qweight is not None
        device = self.qweight.device
        self.qweight, self.scale = stored.qweight.to(device), stored.scale.to(device)
        self.dtype = fn(torch.zeros(1, dtype=before)).dtype
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        self.restore()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, *arguments: Any) -> None:
        self.restore()
        self.loads += 1
        super()._load_from_state_dict(*arguments)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state of copies and pickles: the stored form, which any machine reads."""
        self.restore()
        return self.__dict__

    def extra_repr(self) -> str:
        return f"{self.shape[1]} -> {self.shape[0]}, {self.scheme.describe()}, {self.wanted}"


class QuantizedLinear(QuantizedWeight):
    """y = x W^T + b, with W = (level - zero) * scale."""

    bias: Tensor | None

    def __init__(
        self,
        tensor: QuantizedTensor,
        bias_O: Tensor | None,
        *,
        method: RecordedMethod = "absmax",
        backend: str = "auto",
        head: bool = False,
    ) -> None:
        super().__init__(tensor, method=method, backend=backend)
        self.head = head
        self.d_out, self.d_in = tensor.shape
        self.register_buffer("bias", bias_O)

    @property
    def numbers(self) -> int:
        """The number of the model's parameters that it represents, its bias included."""
        return super().numbers + (0 if self.bias is None else self.bias.numel())

    def forward(self, x: Tensor) -> Tensor:
        return self.times(x, self.bias)

    def product(self) -> "QuantizedProduct":
        """Return the product that a fast decoding step calls."""
        return QuantizedProduct(self, self.bias)


class QuantizedEmbedding(QuantizedWeight):
    """An embedding table whose rows are dequantized when read; `as_linear` multiplies by it.

    `multiplier` is sqrt(d_model) where the spec scales its embedding, else None; `dtype` is the
    precision of the output.
    """

    lookup = True
    head = True

    def __init__(
        self,
        tensor: QuantizedTensor,
        *,
        multiplier: float | None = None,
        dtype: torch.dtype = torch.float32,
        method: RecordedMethod = "absmax",
        backend: str = "auto",
    ) -> None:
        super().__init__(tensor, method=method, backend=backend, dtype=dtype)
        self.multiplier = multiplier

    def forward(self, tokens: Tensor) -> Tensor:
        form = self.ready()
        if form is None:
            x = reference_rows(self.stored(), tokens).to(self.dtype)
        else:
            rows_ND = cast(LookupForm, form).rows(tokens.reshape(-1))
            x = rows_ND.view(*tokens.shape, self.shape[1]).to(self.dtype)
        return x if self.multiplier is None else x * self.multiplier

    def as_linear(self, x_BTD: Tensor) -> Tensor:
        """Return logits x @ table^T; the multiplier applies to the input side only."""
        return self.times(x_BTD, None)

    def product(self, bias_V: Tensor | None = None) -> "QuantizedProduct":
        """Return the product that a fast decoding step calls for its logits."""
        return QuantizedProduct(self, bias_V)


class QuantizedProduct:
    """x W^T + b, and residual + x W^T + b, of rows (M, I)."""

    def __init__(self, layer: QuantizedWeight, bias_O: Tensor | None) -> None:
        self.layer = layer
        self.bias_O = None if bias_O is None else bias_O.detach().float()

    def __call__(self, x_MI: Tensor) -> Tensor:
        form = self.layer.form
        if form is None or x_MI.dtype != torch.float32:
            return self.layer.times(x_MI, self.bias_O)
        return form.product(x_MI, self.bias_O)

    def onto(self, residual_MO: Tensor, x_MI: Tensor) -> Tensor:
        """Return residual + x W^T + b; the residual is overwritten."""
        return residual_MO.add_(self(x_MI))


# --- layers prepared for quantization: watched for calibration, rounded for training --------------


class StraightThrough(torch.autograd.Function):
    """Forward: the rounded weights, bit for bit. Backward: as if nothing had been rounded."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, rounded: Tensor) -> Tensor:
        return rounded.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


def fake_quantize(weight_OI: Tensor, scheme: Scheme) -> Tensor:
    """Return the weights as they will be once quantized; gradients pass straight through."""
    rounded_OI = dequantize(quantize_tensor(weight_OI.detach(), scheme)).to(weight_OI.dtype)
    passed_OI: Tensor = StraightThrough.apply(  # type: ignore[no-untyped-call]  # not annotated
        weight_OI, rounded_OI
    )
    return passed_OI


class Watch:
    """Statistics of a layer's inputs for calibration: sum of x x^T, largest entry, rows.

    `reading` is what the model is being given: rows of padding are not counted.
    """

    def __init__(self, inputs: int, device: torch.device) -> None:
        self.reading: Inputs | None = None
        self.moment_II = torch.zeros(inputs, inputs, device=device)
        self.largest = 0.0
        self.rows = 0

    @torch.no_grad()
    def see(self, x: Tensor) -> None:
        """Add some rows to the statistics."""
        x_MI = real_rows(x.detach(), self.reading).float()
        if not len(x_MI):
            return
        self.moment_II.addmm_(x_MI.T, x_MI)
        self.largest = max(self.largest, float(x_MI.abs().max()))
        self.rows += len(x_MI)


def real_rows(x: Tensor, inputs: Inputs | None) -> Tensor:
    """Return the rows (M, I) of a layer's input that belong to real tokens, not to padding."""
    masks = () if inputs is None else (inputs.valid_BT, inputs.source_valid_BS)
    for valid in masks:
        if valid is not None and x.shape[:-1] == valid.shape:
            return x[valid]
    return x.reshape(-1, x.shape[-1])


def become(module: nn.Module, cls: type[nn.Module]) -> None:
    """Give a layer the class of its prepared form, or its plain class again.

    The object stays the same, and with it its parameters, their names, and all that refers to them:
    optimizers, tied heads, hooks. Only classes with the same attributes may be exchanged this way,
    so the two must share a plain layer as their base.
    """
    shared = (Linear, TokenEmbedding)
    assert any(isinstance(module, base) and issubclass(cls, base) for base in shared), cls
    module.__class__ = cls


class WatchedLinear(Linear):
    """A linear layer that records statistics of its inputs."""

    watch: Watch
    scheme: Scheme
    method: Method

    def forward(self, x: Tensor) -> Tensor:
        self.watch.see(x)
        return super().forward(x)


class WatchedEmbedding(TokenEmbedding):
    """A tied table that records statistics of the vectors multiplied with it."""

    watch: Watch
    scheme: Scheme
    method: Method

    def as_linear(self, x_BTD: Tensor) -> Tensor:
        """Return logits, and record their inputs."""
        self.watch.see(x_BTD)
        return super().as_linear(x_BTD)


class RoundedLinear(Linear):
    """A linear layer that computes with rounded weights and trains the unrounded ones."""

    scheme: Scheme

    def forward(self, x: Tensor) -> Tensor:
        weight_OI = fake_quantize(self.weight, self.scheme)
        return in_pieces(x, (self.d_out, self.d_in), lambda piece: weight_OI[piece], self.bias)


class RoundedEmbedding(TokenEmbedding):
    """A tied table that is rounded in both its uses."""

    scheme: Scheme

    def forward(self, tokens_BT: Tensor) -> Tensor:
        x_BTD = F.embedding(tokens_BT, fake_quantize(self.weight, self.scheme))
        return x_BTD if self.scale is None else x_BTD * self.scale

    def as_linear(self, x_BTD: Tensor) -> Tensor:
        """Return the logits of the rounded table."""
        weight_VD = fake_quantize(self.weight, self.scheme)
        vocab, width = weight_VD.shape
        return in_pieces(x_BTD, (vocab, width), lambda piece: weight_VD[piece], None)
