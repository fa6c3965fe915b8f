"""`import glassformer as gf`: lazy, typed, and the same table for people and for type checkers."""

import ast
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest

import glassformer as gf

ROOT = Path(__file__).parents[2]
DOOR = ROOT / "src" / "glassformer" / "__init__.py"

PUBLIC = [
    "ModelSpec",
    "RunSpec",
    "TrainSpec",
    "DecodeSpec",
    "BeamSpec",
    "QuantSpec",
    "LoRA",
    "prepare",
    "build",
    "load",
    "load_config",
    "load_machine",
    "history",
    "save",
    "export",
    "train",
    "finetune",
    "evaluate",
    "diff",
    "doctor",
    "embed",
    "extract",
    "lr_find",
    "sweep",
    "Sweep",
    "report",
    "runs",
    "compare",
    "show",
    "generate",
    "stream_tokens",
    "beam_search",
    "trace",
    "inspect",
    "patch_activations",
    "quantize",
    "compare_precision",
    "verify",
    "design",
    "diagram",
    "preset",
    "count_parameters",
    "manifest",
    "override",
    "Batch",
    "Inputs",
    "Taps",
    "Setup",
    "Subject",
    "GlassError",
]


def typed() -> dict[str, str]:
    """The imports that a type checker reads, by name."""
    (block,) = (node for node in ast.parse(DOOR.read_text()).body if isinstance(node, ast.If))
    found = {}
    for node in block.body:
        assert isinstance(node, ast.ImportFrom)
        for alias in node.names:
            assert alias.asname == alias.name, "exported explicitly"
            if node.module == "glassformer":
                assert alias.name == "named", "the only package that is a name of the door"
                continue
            found[alias.name] = str(node.module)
    return found


def test_both_tables_are_the_same():
    assert typed() == gf._HOME
    assert sorted(gf.__all__) == sorted([*PUBLIC, "named"])
    assert {*PUBLIC, "named", "__version__"} == set(dir(gf))


def test_the_source_documents_names_are_behind_the_door():
    for module in gf.named.__all__:
        assert getattr(gf.named, module) is import_module(f"glassformer.named.{module}")
    assert dir(gf.named) == gf.named.__all__
    with pytest.raises(AttributeError, match=r"glassformer.named has no 'nothing'; it has budget"):
        gf.named.nothing  # noqa: B018


@pytest.mark.parametrize("name", PUBLIC)
def test_every_name_is_there(name):
    thing = getattr(gf, name)
    assert callable(thing)
    assert getattr(import_module(gf._HOME[name]), name) is thing
    assert thing.__doc__


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(AttributeError, match="glassformer has no 'nothing'; it has Batch"):
        gf.nothing  # noqa: B018


LAZY = """
import sys
import glassformer as gf
dir(gf), gf.__version__
print(sorted(name for name in sys.modules if name.split(".")[0] in ("torch", "numpy", "scipy")))
print(len([name for name in sys.modules if name.startswith("glassformer.")]))
spec = gf.override(gf.preset("qwen", d_model=64), "max_seq_len=32")
gf.count_parameters(spec), gf.manifest(spec)
print(sorted(name for name in sys.modules if name in ("torch", "numpy")))
"""


def test_importing_it_imports_nothing_and_a_spec_needs_no_torch():
    shown = subprocess.run(
        [sys.executable, "-c", LAZY],
        capture_output=True,
        text=True,
        check=True,
        env={"PYTHONPATH": str(ROOT / "src"), "PATH": ""},
    )
    assert shown.stdout.splitlines() == ["[]", "0", "[]"]


def test_the_version_is_written_once():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in project["project"]
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"]["attr"] == "glassformer.__version__"
    assert (ROOT / "src" / "glassformer" / "py.typed").is_file()


USER = """
import torch

import glassformer as gf

spec: gf.ModelSpec = gf.preset("qwen", d_model=64)
model = gf.build(gf.override(spec, max_seq_len=32), seed=0)
logits: torch.Tensor = model(torch.zeros(1, 2, dtype=torch.long))
text: str = gf.load("runs/lm").generate("Once", temperature=0.8)
count: int = gf.count_parameters(model)
loss: float = gf.evaluate("runs/lm").loss
options: gf.DecodeSpec = gf.DecodeSpec(top_k=5)
small: gf.named.core.Transformer = gf.quantize(gf.named.core.Transformer(9, 8, 2, 8, 1), bits=8)
"""
WRONG = """
import glassformer as gf

model = gf.build(gf.preset("qwen"), sead=0)
loss: str = gf.evaluate("runs/lm").loss
gf.no_such_name  # a module with __getattr__ hides this from mypy
"""


#: What none of the scripts' types depend on, but torch and rich import: half of mypy's time.
UNREAD = (
    *("_inductor", "_dynamo", "_functorch", "_higher_order_ops", "_export", "fx", "ao", "onnx"),
    *("distributed", "distributions"),
)
CONFIG = f"""
[mypy]
strict = true
follow_imports = silent

[mypy-{",".join(f"torch.{name}.*" for name in UNREAD)},IPython.*,prompt_toolkit.*,markdown_it.*]
follow_imports = skip
"""


@pytest.fixture(scope="module")
def found_by_mypy(tmp_path_factory) -> str:
    """What a type checker says of both scripts, in one run: most of its time is torch."""
    folder = tmp_path_factory.mktemp("scripts")
    (folder / "mypy.ini").write_text(CONFIG)
    (folder / "user.py").write_text(USER)
    (folder / "wrong.py").write_text(WRONG)
    shown = subprocess.run(
        [sys.executable, "-m", "mypy", "--cache-dir=/dev/null", "user.py", "wrong.py"],
        capture_output=True,
        text=True,
        check=False,
        cwd=folder,
        env={"PYTHONPATH": str(ROOT / "src"), "MYPYPATH": str(ROOT / "src"), "PATH": ""},
    )
    return shown.stdout


@pytest.mark.parametrize(("script", "errors"), [("user", []), ("wrong", ["sead", '"float"'])])
def test_a_type_checker_sees_the_types(script, errors, found_by_mypy):
    found = [line for line in found_by_mypy.splitlines() if line.startswith(f"{script}.py")]
    found = [line for line in found if "error" in line]
    assert len(found) == len(errors), found_by_mypy
    for line, word in zip(found, errors, strict=True):
        assert word in line
    assert "checked 2 source files" in found_by_mypy
