"""Names, shapes and roles of every parameter, from the spec alone.

The one place where they are defined, with `parameters`, which knows the parts. It serves counting,
initialisation, decay groups, both engines' allocation, checkpoints, conversion and the list of
gradients that are zero by theory; nobody else parses names.
"""

from collections.abc import Iterator
from dataclasses import replace

from glassformer.spec.inits import Constant
from glassformer.spec.model import Learned, ModelSpec, NextHead, Rotary, Stack
from glassformer.spec.parameters import (
    Parameter,
    block_parameters,
    embedding_parameters,
    linear_parameters,
    norm_parameters,
)


def _stack_parameters(model: ModelSpec, prefix: str, stack: Stack) -> Iterator[Parameter]:
    vocab = model.source_vocab if prefix == "encoder." else model.vocab_size
    for parameter in embedding_parameters(model, f"{prefix}embed.", vocab):
        if prefix == "decoder." and model.share_embedding:
            owner = parameter.name.replace("decoder.", "encoder.", 1)
            yield replace(parameter, tied_to=owner)
        else:
            yield parameter
    if isinstance(model.position, Learned):
        shape = (model.max_seq_len, model.d_model)
        yield Parameter(
            name=f"{prefix}position.weight",
            shape=shape,
            role="position",
            kind="table",
            init=model.init.table(shape),
        )
    depth = sum(2 + (block.cross is not None) for block in stack.blocks())
    for layer, block in enumerate(stack.blocks()):
        for parameter in block_parameters(
            block,
            f"{prefix}blocks.{layer}.",
            model.d_model,
            init=model.init,
            rotated=isinstance(model.position, Rotary),
            residual_depth=depth,
        ):
            yield replace(parameter, layer=layer)
    if stack.final_norm is not None:
        yield from norm_parameters(
            stack.final_norm, f"{prefix}final_norm.", model.d_model, role="final_norm"
        )


def _target_embedding(model: ModelSpec) -> str:
    """Prefix of the parameters that own the target side's table."""
    if model.encoder is None:
        return "embed."
    return "encoder.embed." if model.share_embedding else "decoder.embed."


def _head_parameters(model: ModelSpec) -> Iterator[Parameter]:
    for head, name in zip(model.heads, model.head_names(), strict=True):
        prefix, width = f"heads.{name}.", model.head_size(name)
        if isinstance(head, NextHead) and head.tied:
            source = _target_embedding(model)
            for parameter in embedding_parameters(model, source, model.vocab_size):
                leaf = parameter.name.removeprefix(source)
                yield replace(
                    parameter, name=f"{prefix}{leaf}", role="head", tied_to=parameter.name
                )
            if head.bias:
                yield Parameter(
                    name=f"{prefix}bias",
                    shape=(width,),
                    role="head",
                    kind="bias",
                    init=Constant(value=0.0),
                )
        else:
            yield from linear_parameters(
                prefix, (width, model.d_model), role="head", init=model.init, bias=head.bias
            )


def manifest(model: ModelSpec) -> tuple[Parameter, ...]:
    """Every parameter in the order in which the model holds them, tied ones marked."""
    parameters: list[Parameter] = []
    for prefix, stack in model.stacks().items():
        parameters += _stack_parameters(model, prefix, stack)
    parameters += _head_parameters(model)
    return tuple(parameters)


def stored(model: ModelSpec) -> dict[str, Parameter]:
    """The parameters that own their storage, by name: what a checkpoint holds."""
    return {p.name: p for p in manifest(model) if p.tied_to is None}


def count_parameters(model: ModelSpec) -> int:
    """Trainable numbers; what is tied counts once."""
    return sum(p.size for p in stored(model).values())
