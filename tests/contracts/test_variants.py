"""Spec unions are closed: every consumer knows every member, and refuses a class it does not know.

A probe variant is put into a spec behind its validators' backs and handed to each consumer, which
checks what it is given; and every `match` on a union ends in `typing.assert_never`.
"""

import ast
import copy
import dataclasses
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar, get_args

import numpy as np
import pytest
import torch

import glassformer
from glassformer.adapters.counterpart import counterpart
from glassformer.byhand.model import Model as HandModel
from glassformer.costs.activations import activations
from glassformer.costs.estimates import flops, optimizer_bytes
from glassformer.costs.timing import Rates, step_time
from glassformer.data.build_task import build_task
from glassformer.data.own_code import learning_rate, name_part
from glassformer.gpu.recorded_stepper import RecordedStepper
from glassformer.models.model import Model, build
from glassformer.models.prompts import Prompts
from glassformer.quant.backends.choose import BACKENDS, lacking
from glassformer.quant.contents import quantized_arrays, restored_model
from glassformer.quant.convert import quantize_model
from glassformer.quant.schemes import QuantizedTensor, dequantize, quantize_tensor
from glassformer.spec import checks, presets
from glassformer.spec.block import Embedding, FeedForward, Head, Norm
from glassformer.spec.checks import spec
from glassformer.spec.errors import GlassError, InputError
from glassformer.spec.init import Init
from glassformer.spec.manifest import manifest, stored
from glassformer.spec.model import (
    MLP,
    AnswerHead,
    Attention,
    Block,
    ClassHead,
    FactorizedEmbedding,
    LayerNorm,
    Layers,
    MaskedHead,
    ModelSpec,
    MoE,
    NextHead,
    RelativeBias,
    Rotary,
    Stack,
    StateHead,
    SwiGLU,
    VectorHead,
    tap_shapes,
)
from glassformer.spec.own import (
    OwnOptimizer,
    OwnParameter,
    OwnPart,
    OwnPosition,
    OwnSchedule,
    OwnTask,
)
from glassformer.spec.position import Position
from glassformer.spec.quantization import (
    Quantization,
    QuantizedLayer,
    QuantSpec,
    from_record,
    stored_tensors,
)
from glassformer.spec.schemes import Int8, Scheme, scheme_bytes
from glassformer.spec.tasks import FinetuneTask, Task, TextTask, TranslationTask
from glassformer.spec.train import Optimizer, RunSpec, Schedule, TrainSpec
from glassformer.store.checkpoint import load_quantized, save_quantized
from glassformer.training.numpy_engine import NumpyEngine
from glassformer.training.torch_engine import build_optimizers

D_MODEL, VOCAB, LENGTH = 32, 23, 11


@spec
class ProbeVariant:
    """A class that no consumer knows, with what one of them may ask before it looks closer."""

    def resolve(self, inputs: int) -> "ProbeVariant":
        return self

    def lacks(self, inputs: int) -> str:
        return ""

    default_method: ClassVar[str] = "absmax"


def model_spec(**changes: Any) -> ModelSpec:
    block = Block(
        attention=Attention(n_heads=4, qk_norm=LayerNorm()), ffn=MLP(d_ff=64), norm=LayerNorm()
    )
    stack = Stack(layers=(Layers(count=2, block=block),), final_norm=LayerNorm())
    return ModelSpec(
        **{"vocab_size": VOCAB, "d_model": D_MODEL, "max_seq_len": 16, "decoder": stack, **changes}
    )


# --- unions, and where a member stands in a spec --------------------------------------------------


def with_block(change: Callable[[Block], None]) -> Callable[[ModelSpec], None]:
    return lambda model: change(model.decoder.layers[0].block)


def put(node: Any, field: str, value: Any) -> None:
    """Set a field of a frozen spec, past its checks."""
    object.__setattr__(node, field, value)


#: The members of each union of a model, and the ways to put one into a spec.
MODEL_UNIONS: dict[str, tuple[UnionType, dict[str, Callable[[ModelSpec, Any], None]]]] = {
    "position": (Position, {"": lambda model, one: put(model, "position", one)}),
    "norm": (
        Norm,
        {
            "block": lambda model, one: put(model.decoder.layers[0].block, "norm", one),
            "final": lambda model, one: put(model.decoder, "final_norm", one),
            "q/k": lambda model, one: put(model.decoder.layers[0].block.attention, "qk_norm", one),
        },
    ),
    "feed-forward": (
        FeedForward,
        {"": lambda model, one: put(model.decoder.layers[0].block, "ffn", one)},
    ),
    "embedding": (Embedding, {"": lambda model, one: put(model, "embedding", one)}),
    "head": (Head, {"": lambda model, one: put(model, "heads", (one,))}),
    "init": (Init, {"": lambda model, one: put(model, "init", one)}),
}

OWN = Path(__file__).parents[1] / "own" / "parts.py"


def own_part(kind: type[OwnPart], name: str) -> dict[str, Any]:
    """The fields of a part that is defined outside of the package, and allowed in this process."""
    part = name_part(kind, f"{OWN}:{name}")
    return {field.name: getattr(part, field.name) for field in dataclasses.fields(part)}


#: What a member needs besides its defaults.
NEEDS: dict[type, dict[str, Any]] = {
    MLP: {"d_ff": 64},
    SwiGLU: {"d_ff": 64},
    MoE: {"n_experts": 4, "experts_per_token": 2, "expert": SwiGLU(d_ff=64)},
    FactorizedEmbedding: {"rank": 8},
    ClassHead: {"num_classes": 5},
    StateHead: {"num_states": 3},
    FinetuneTask: {"path": "data.jsonl"},
    TextTask: {"tokenizer": "characters"},
    TranslationTask: {"examples": 600},
    OwnTask: own_part(OwnTask, "Palindromes"),
    OwnOptimizer: own_part(OwnOptimizer, "Lion"),
    OwnSchedule: own_part(OwnSchedule, "Trapezoid"),
    OwnPosition: own_part(OwnPosition, "Stripes")
    | {
        "parameters": (
            OwnParameter(name="stripe", shape=(2, D_MODEL)),
            OwnParameter(name="slope", shape=(1, D_MODEL)),
        )
    },
}


def members(union: UnionType) -> list[Any]:
    return [member(**NEEDS.get(member, {})) for member in get_args(union)]


# --- consumers ------------------------------------------------------------------------------------

RATES = Rates(
    device="cpu",
    threads=1,
    **dict.fromkeys(("products", "attention", "heads", "passes", "logits"), ((1, 1e9),)),
    updates=1e9,
    dispatch=1e-6,
)


def torch_build(model: ModelSpec) -> Model:
    built = build(model, generator=torch.Generator().manual_seed(0))
    built(torch.zeros(1, 3, dtype=torch.long))
    return built


def numpy_build(model: ModelSpec) -> None:
    HandModel(model, rng=np.random.default_rng(0)).forward(np.zeros((1, 3), np.int64))


def fast_step(model: ModelSpec) -> None:
    """The step is derived from a built model, whose spec is exchanged."""
    probe = holds_probe(model)
    known = GOOD if probe else build(model, generator=torch.Generator().manual_seed(0))
    known = copy.copy(known)
    known.spec = model
    stepper = RecordedStepper(known)
    logits, past = stepper.start(Prompts.of([[1, 2, 3]]), room=2)
    stepper.step(logits.argmax(-1), past=past)


def quantized(model: ModelSpec) -> None:
    stored(model)
    known = copy.deepcopy(GOOD) if holds_probe(model) else build(model)
    known.spec = model
    quantize_model(known, QuantSpec())


def export(model: ModelSpec) -> None:
    """Refusing a spec that no family computes is right; not knowing a part of it is not."""
    try:
        counterpart(model)
    except GlassError as error:
        if "no Hugging Face architecture" not in str(error) or ProbeVariant.__name__ in str(error):
            raise


CONSUMERS: dict[str, Callable[[ModelSpec], object]] = {
    "manifest": manifest,
    "taps": tap_shapes,
    "torch build": torch_build,
    "NumPy build": numpy_build,
    "fast step": fast_step,
    "FLOPs": lambda model: flops(model, length=LENGTH),
    "memory": lambda model: activations(model, batch=2, length=LENGTH),
    "step time": lambda model: step_time(model, RATES, batch=2, length=LENGTH),
    "quantization": quantized,
    "export": export,
}

PLACES = [(union, place) for union, (_, places) in MODEL_UNIONS.items() for place in places]
CASES = [(*place, consumer) for place in PLACES for consumer in CONSUMERS]


def holds_probe(model: ModelSpec) -> bool:
    return ProbeVariant.__name__ in repr(model)


GOOD = torch_build(model_spec(heads=(NextHead(),)))


def probed(union: str, place: str) -> ModelSpec:
    """A valid spec with a probe put into it afterwards."""
    model = copy.deepcopy(model_spec())
    MODEL_UNIONS[union][1][place](model, ProbeVariant())
    return model


@pytest.mark.parametrize(("union", "place", "consumer"), CASES)
def test_a_probe_variant_is_refused_by_name(union: str, place: str, consumer: str) -> None:
    with pytest.raises(InputError, match="ProbeVariant"):
        CONSUMERS[consumer](probed(union, place))


@pytest.mark.parametrize("consumer", CONSUMERS)
@pytest.mark.parametrize(("union", "place"), PLACES)
def test_every_member_goes_through_every_consumer(union: str, place: str, consumer: str) -> None:
    for member in members(MODEL_UNIONS[union][0]):
        if consumer == "fast step" and isinstance(
            member, ClassHead | StateHead | AnswerHead | MaskedHead | VectorHead
        ):
            continue  # there is no next token to decode
        model = copy.deepcopy(model_spec())
        MODEL_UNIONS[union][1][place](model, member)
        if consumer == "NumPy build" and isinstance(member, OwnPosition):
            with pytest.raises(InputError, match=r"parts\.py:Stripes"):
                CONSUMERS[consumer](model)
            continue
        if consumer == "fast step" and isinstance(member, RelativeBias):
            with pytest.raises(InputError, match="has no RelativeBias"):
                CONSUMERS[consumer](model)
            continue
        CONSUMERS[consumer](model)


# --- optimizer, schedule, task --------------------------------------------------------------------

TRAIN_CONSUMERS: dict[str, Callable[[Any], object]] = {
    "torch optimizer": lambda train: build_optimizers(GOOD, train, stored(GOOD.spec)),
    "NumPy optimizer": lambda train: NumpyEngine.fresh(GOOD.spec, train),
    "optimizer memory": lambda train: optimizer_bytes(GOOD.spec, train.optimizer),
}


@pytest.mark.parametrize("consumer", TRAIN_CONSUMERS)
def test_a_probe_optimizer_is_refused_by_name(consumer: str) -> None:
    train = TrainSpec()
    put(train, "optimizer", ProbeVariant())
    with pytest.raises(InputError, match="ProbeVariant"):
        TRAIN_CONSUMERS[consumer](train)


#: Members that a consumer knows and cannot compute, with the name that its error gives.
REFUSED_BY_NAME: dict[tuple[str, type], str] = {
    ("NumPy optimizer", OwnOptimizer): "OwnOptimizer",
    ("optimizer memory", OwnOptimizer): "parts.py:Lion",
}


@pytest.mark.parametrize("consumer", TRAIN_CONSUMERS)
def test_every_optimizer_goes_through(consumer: str) -> None:
    for optimizer in members(Optimizer):
        train = TrainSpec(optimizer=optimizer)
        refused = REFUSED_BY_NAME.get((consumer, type(optimizer)))
        if refused is not None:
            with pytest.raises(InputError, match=refused):
                TRAIN_CONSUMERS[consumer](train)
        else:
            TRAIN_CONSUMERS[consumer](train)


def test_schedules_answer_for_themselves() -> None:
    """No dispatch: each schedule computes its own share. What is not a member is refused.

    The spec never runs a file: of a user's own schedule only the loader of such files knows a rate.
    """
    for schedule in members(Schedule):
        train = TrainSpec(schedule=schedule, steps=10)
        assert 0.0 < learning_rate(train, 0) <= 1e-3
        if isinstance(schedule, OwnSchedule):
            with pytest.raises(InputError, match=r"the rates of .* are not known"):
                train.learning_rate(0)
        else:
            assert train.learning_rate(0) == learning_rate(train, 0)
    with pytest.raises(InputError, match=r"schedule: ProbeVariant is not one of .*CosineSchedule"):
        TrainSpec(schedule=ProbeVariant())


def test_a_probe_task_is_refused_by_name() -> None:
    with pytest.raises(InputError, match="task: ProbeVariant is not one of"):
        RunSpec(model=model_spec(), task=ProbeVariant())
    with pytest.raises(InputError, match="task: ProbeVariant is not one of"):
        build_task(ProbeVariant())


@pytest.mark.parametrize("task", get_args(Task), ids=lambda task: task.__name__)
def test_every_task_is_built(task: type, tmp_path: Path) -> None:
    one = task(**NEEDS.get(task, {}))
    if task is FinetuneTask:
        with pytest.raises(InputError, match="base"):
            build_task(one)
    else:
        assert build_task(one, cache=tmp_path).sizes()["train"] > 0


# --- quantization schemes -------------------------------------------------------------------------


def quantization_of(scheme: Any) -> Quantization:
    """A checkpoint's description with this scheme in its first layer, past the checks."""
    layer = QuantizedLayer(name="blocks.0.attn.q_proj", scheme=Int8())
    put(layer, "scheme", scheme)
    return Quantization(layers=(layer,))


def tensor_of_scheme(scheme: Any) -> QuantizedTensor:
    """Stored tensors of any scheme; a probe gets those of another."""
    known = Int8() if type(scheme) is ProbeVariant else scheme
    return dataclasses.replace(quantize_tensor(WEIGHT_OI, known), scheme=scheme.resolve(D_MODEL))


def quantized_with(scheme: Any) -> Model:
    spec = QuantSpec(head=Int8())
    put(spec, "scheme", scheme)
    return quantize_model(copy.deepcopy(GOOD), spec, backend="reference")


def saved(scheme: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model"
        if type(scheme) is ProbeVariant:
            save_quantized(path, GOOD.spec, quantization_of(scheme), {})
        else:
            model = quantized_with(scheme)
            save_quantized(path, model.spec, *quantized_arrays(model))
            assert restored_model(*load_quantized(path), backend="reference")


WEIGHT_OI = torch.randn(8, 64, generator=torch.Generator().manual_seed(0))
CPU = torch.device("cpu")
SCHEME_CONSUMERS: dict[str, Callable[[Any], object]] = {
    "stored tensors": lambda scheme: stored_tensors(GOOD.spec, quantization_of(scheme)),
    "bytes": lambda scheme: scheme_bytes(scheme, (8, 64)),
    "quantize": lambda scheme: quantize_tensor(WEIGHT_OI, scheme),
    "dequantize": lambda scheme: dequantize(tensor_of_scheme(scheme)),
    "a quantized model": quantized_with,
    "backends": lambda scheme: [lacking(name, scheme, (8, 64), CPU) for name in BACKENDS],
    "save and load": saved,
    "quantization.json": lambda scheme: from_record(
        {"layers": [{"name": "a", "scheme": {"kind": type(scheme).__name__}, "method": "absmax"}]}
    ),
}


@pytest.mark.parametrize("consumer", SCHEME_CONSUMERS)
def test_a_probe_scheme_is_refused_by_name(consumer: str) -> None:
    with pytest.raises((InputError, AssertionError), match="ProbeVariant"):
        SCHEME_CONSUMERS[consumer](ProbeVariant())


@pytest.mark.parametrize("consumer", SCHEME_CONSUMERS)
@pytest.mark.parametrize("scheme", get_args(Scheme), ids=lambda scheme: scheme.name)
def test_every_scheme_goes_through(scheme: Any, consumer: str) -> None:
    SCHEME_CONSUMERS[consumer](scheme().resolve(D_MODEL))


# --- specs themselves -----------------------------------------------------------------------------


@pytest.mark.parametrize(("union", "place"), PLACES)
def test_a_spec_refuses_a_variant_it_does_not_know(union: str, place: str) -> None:
    model = model_spec()
    block, decoder = model.decoder.layers[0].block, model.decoder
    attempts: dict[tuple[str, str], Callable[[], object]] = {
        ("position", ""): lambda: model_spec(position=ProbeVariant()),
        ("norm", "block"): lambda: dataclasses.replace(block, norm=ProbeVariant()),
        ("norm", "final"): lambda: dataclasses.replace(decoder, final_norm=ProbeVariant()),
        ("norm", "q/k"): lambda: Attention(n_heads=4, qk_norm=ProbeVariant()),
        ("feed-forward", ""): lambda: dataclasses.replace(block, ffn=ProbeVariant()),
        ("embedding", ""): lambda: model_spec(embedding=ProbeVariant()),
        ("head", ""): lambda: model_spec(heads=(NextHead(), ProbeVariant())),
        ("init", ""): lambda: model_spec(init=ProbeVariant()),
    }
    with pytest.raises(InputError, match="ProbeVariant is not one of"):
        attempts[union, place]()


def test_a_subclass_is_another_variant() -> None:
    """It may compute something else; every dispatch would take it for its parent."""

    class OwnRotary(Rotary):
        pass

    with pytest.raises(InputError, match="position: OwnRotary is not one of"):
        model_spec(position=OwnRotary())


def test_presets_pass_the_check() -> None:
    for make in presets.PRESETS.values():
        checks.check_tree(make())


# --- no dispatch is left open ---------------------------------------------------------------------

UNION_MEMBERS = {
    member.__name__
    for union in (
        Position,
        Norm,
        FeedForward,
        Embedding,
        Head,
        Init,
        Optimizer,
        Schedule,
        Task,
        Scheme,
    )
    for member in get_args(union)
}


def classes_of(pattern: ast.pattern) -> set[str]:
    """Names of the classes that a case matches."""
    match pattern:
        case ast.MatchClass(cls=ast.Name(id=name) | ast.Attribute(attr=name)):
            return {name}
        case ast.MatchOr(patterns=patterns):
            return set().union(*map(classes_of, patterns))
        case ast.MatchAs(pattern=ast.pattern() as inner):
            return classes_of(inner)
    return set()


def ends_closed(node: ast.Match) -> bool:
    last = node.cases[-1]
    return "assert_never(" in ast.unparse(last) or ast.unparse(last.body[0]).startswith("raise")


def test_every_match_on_a_spec_union_ends_in_assert_never() -> None:
    root = Path(glassformer.__file__).parent
    found, open_ended = 0, []
    for path in sorted(root.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Match):
                continue
            if not set().union(*(classes_of(case.pattern) for case in node.cases)) & UNION_MEMBERS:
                continue
            found += 1
            if not ends_closed(node):
                open_ended.append(f"{path.relative_to(root)}:{node.lineno}")
    assert found > 20
    assert open_ended == []
