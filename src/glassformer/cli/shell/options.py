"""Options that several verbs share, each spelled once, and options that a spec declares."""

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Iterable
from typing import Annotated, Any, TypeVar, get_type_hints

import typer

from glassformer.spec.options import Option, option_of, options_of

T = TypeVar("T")

#: Former spellings of options, which scripts may still use; help does not list them.
FORMER = ("--output", "--save", "--png")


def complete_tasks(incomplete: str) -> list[tuple[str, str]]:
    """Return the tasks that begin so, and what each is."""
    from glassformer.spec.tasks import TASK_SUMMARIES

    return [pair for pair in TASK_SUMMARIES.items() if pair[0].startswith(incomplete)]


def complete_runs(incomplete: str) -> list[str]:
    """Return the runs of ./runs that begin so; files are completed by the shell."""
    try:
        names = sorted(os.listdir("runs"))
    except OSError:
        return []
    return [name for name in names if name.startswith(incomplete) and not name.startswith(".")]


def complete_names(incomplete: str) -> list[str]:
    """Return runs, tasks and presets that begin so."""
    from glassformer.spec.presets import PRESETS
    from glassformer.spec.tasks import TASK_SUMMARIES

    known = [*TASK_SUMMARIES, *PRESETS]
    found = [*complete_runs(incomplete), *(n for n in known if n.startswith(incomplete))]
    return list(dict.fromkeys(found))


AnyModel = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="A run, RUN@120, a checkpoint, a Hugging Face folder, a .gguf, org/name.",
        autocompletion=complete_runs,
    ),
]
RunName = Annotated[str, typer.Argument(help="The name of a run.", autocompletion=complete_runs)]
Trainable = Annotated[
    str,
    typer.Argument(
        metavar="TASK|CONFIG",
        help="A task of `glass list`, a config file, or a task of your own: my_task.py:MyTask.",
        autocompletion=complete_tasks,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="SETTING=VALUE", help="train.lr=1e-3, task.max_length=8, ..."),
]


def out_file(help_text: str, *former: str) -> Any:
    """Return the option `-o/--out FILE`, spelled once; former spellings still work."""
    names = ("-o", "--out", *(former or FORMER[:1]))
    return typer.Option(*names, metavar="FILE", help=help_text)


Runs = Annotated[str, typer.Option("--runs", metavar="FOLDER", help="The folder of the runs.")]
Device = Annotated[
    str,
    typer.Option(
        "--device",  # spelled out: some releases of typer take the name from the metavar
        metavar="DEVICE",
        help="cpu, cuda, cuda:1, mps, or auto: the fastest that is here.",
        autocompletion=lambda: ["auto", "cpu", "cuda", "mps"],
    ),
]
Threads = Annotated[
    int | None, typer.Option(help="CPU threads; by default chosen by the size of the work.")
]
Nproc = Annotated[
    int | None,
    typer.Option(metavar="N", help="Train in N processes, as torchrun would start them."),
]
Fsdp = Annotated[
    bool, typer.Option("--fsdp", help="Several processes: shard the model over them (FSDP2).")
]
AsJson = Annotated[
    bool, typer.Option("--json", help="Print JSON to stdout, and nothing else there.")
]


#: What computes a model.
LIBRARIES = ("native", "transformers")
Backend = Annotated[
    str,
    typer.Option(
        "--backend",
        metavar="LIBRARY",
        help="native, or transformers: that library computes, also models not read here; slower.",
        autocompletion=lambda: list(LIBRARIES),
    ),
]
System = Annotated[
    str | None, typer.Option(metavar="TEXT", help="Chat: instructions for the model.")
]
ChatOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="NAME=VALUE", help="Chat: a variable of the template: enable_thinking=false."
    ),
]
Download = Annotated[
    bool, typer.Option("--download", help="Fetch org/name if it is not here; asks first.")
]
OwnCode = Annotated[
    list[str] | None,
    typer.Option(
        "--own-code",
        metavar="FILE",
        envvar="GLASS_OWN_CODE",
        show_envvar=False,
        help="Run this Python file (or module) of your own where a run or model names it.",
    ),
]


def _with_parameters(
    call: Callable[..., T], parameters: Iterable[inspect.Parameter]
) -> Callable[..., T]:
    """Give a function the parameters that typer reads, each by its name."""
    named = [each.replace(kind=inspect.Parameter.KEYWORD_ONLY) for each in parameters]
    # `inspect.signature` reads the attribute, which typeshed does not declare
    call.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
    call.__annotations__ = {each.name: each.annotation for each in named}
    return call


def with_own_code(verb: Callable[..., T]) -> Callable[..., T]:
    """Give a verb the option `--own-code`, which allows files before anything is opened."""

    @functools.wraps(verb)
    def allowing(*, own_code: list[str] | None, **values: Any) -> T:
        from glassformer.data.own_code import allow_own_code

        for file in own_code or ():
            allow_own_code(file)
        return verb(**values)

    keyword = inspect.Parameter.KEYWORD_ONLY
    own = inspect.Parameter("own_code", keyword, default=None, annotation=OwnCode)
    return _with_parameters(allowing, [*inspect.signature(verb).parameters.values(), own])


# --- options that a class declares ---------------------------------------------------------------


def gathered(verb: Callable[..., T]) -> Callable[..., T]:
    """Let a parameter of a verb whose type is a dataclass stand for the fields of that class.

    A field or a parameter is an option as `option` declares it, or as its `Annotated` type does.
    The verb receives an instance of the class.
    """
    classes: dict[str, Any] = {}
    declared: dict[str, Option] = {}
    parameters: list[inspect.Parameter] = []
    for each in inspect.signature(verb).parameters.values():
        if dataclasses.is_dataclass(each.annotation):
            classes[each.name] = each.annotation
            parameters += _fields(each.annotation)
        elif isinstance(each.default, dataclasses.Field):
            declared[each.name] = option_of(each.name, each.annotation, each.default)
            parameters.append(_parameter(declared[each.name]))
        else:
            parameters.append(each)

    @functools.wraps(verb)
    def with_instances(**values: Any) -> T:
        made = {name: each.default for name, each in declared.items()}
        made |= _typed(declared.values(), {name: values.pop(name) for name in declared})
        for name, cls in classes.items():
            own = {field.name: values.pop(field.name) for field in dataclasses.fields(cls)}
            given = {each.name: own.pop(each.name) for each in options_of(cls)}
            made[name] = cls(**own, **_typed(options_of(cls), given))
        return verb(**values, **made)

    return _with_parameters(with_instances, parameters)


def _fields(cls: Any) -> list[inspect.Parameter]:
    declared = {each.name: _parameter(each) for each in options_of(cls)}
    hints, keyword = get_type_hints(cls, include_extras=True), inspect.Parameter.KEYWORD_ONLY
    return [
        declared.get(field.name)
        or inspect.Parameter(
            field.name, keyword, default=field.default, annotation=hints[field.name]
        )
        for field in dataclasses.fields(cls)
    ]


def takes(
    *specs: type | tuple[Option, ...], into: str
) -> Callable[[Callable[..., T]], Callable[..., T]]:
    """Give a verb one command-line option for every option of some specs, or of a list.

    In `--help` they take the position of the parameter `into` in the signature. The verb receives
    through it a dict of the values that were typed, by the names of the specs' fields: what was
    not typed is not in it, so the specs' own defaults apply. A field that two specs share is one
    option.
    """
    options: dict[str, Option] = {}
    lists = (options_of(each) if isinstance(each, type) else each for each in specs)
    for each in (each for found in lists for each in found):
        assert options.setdefault(each.name, each).flag == each.flag, each.name

    def decorate(verb: Callable[..., T]) -> Callable[..., T]:
        @functools.wraps(verb)
        def with_options(**values: Any) -> T:
            given = {name: values.pop(name) for name in options}
            return verb(**values, **{into: _typed(options.values(), given)})

        parameters: list[inspect.Parameter] = []
        for parameter in inspect.signature(verb).parameters.values():
            if parameter.name == into:
                parameters += map(_parameter, options.values())
            else:
                parameters.append(parameter)
        return _with_parameters(with_options, parameters)

    return decorate


def _typed(options: Iterable[Option], given: dict[str, Any]) -> dict[str, Any]:
    """Return the values that were typed, as their fields hold them."""
    return {
        each.name: _value(each, given[each.name])
        for each in options
        if given[each.name] is not None and given[each.name] != []
    }


def _value(option: Option, value: Any) -> Any:
    """Return the field's value: a flag changes its default, a text is parsed, a list is a tuple."""
    if option.typed is bool and not option.repeated:
        return not option.default
    if option.parse is not None:
        parsed = [option.parse(option.name, text) for text in ([value], value)[option.repeated]]
        return tuple(parsed) if option.repeated else parsed[0]
    return tuple(value) if option.repeated else value


def _parameter(option: Option) -> inspect.Parameter:
    """Make an option of typer whose default is None, so that only typed options have a value."""
    # a type made at run time, which mypy cannot read as an annotation
    kind: Any = list[option.typed] if option.repeated else option.typed  # type: ignore[name-defined]
    shown = typer.Option(
        option.flag, help=option.help_text, metavar=option.metavar, show_default=False
    )
    return inspect.Parameter(
        option.name,
        inspect.Parameter.KEYWORD_ONLY,
        default=None,
        annotation=Annotated[kind | None, shown],
    )
