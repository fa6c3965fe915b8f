"""The house: who may import whom, what each package may need, what no file may do."""

import ast
import functools
import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2] / "src"
HOUSE = ROOT / "glassformer"

#: DESIGN.md's table. A package imports lower ranks only, never one of its own rank.
RANKS = {
    "spec": 0,
    "budget": 1,
    "costs": 1,
    "data": 1,
    "store": 1,
    "kernels": 1,
    "nn": 2,
    "byhand": 2,
    "models": 3,
    "training": 4,
    "generation": 4,
    "quant": 4,
    "lens": 4,
    "gpu": 4,
    "adapters": 5,
    "lab": 6,
    "checks": 7,
    "serve": 7,
    "named": 8,
    "web": 8,
    "cli": 9,
}
#: Packages that the table gives less than their rank.
ONLY = {
    "spec": set(),
    "budget": {"spec"},
    "costs": {"spec"},
    "data": {"spec"},
    "store": {"spec"},
    "kernels": {"spec"},
    "byhand": {"spec", "kernels"},
}
#: What may be imported from outside, where the table says it.
OUTSIDE = {
    "spec": set(),
    "budget": set(),
    "costs": set(),
    "data": {"numpy", "tokenizers", "num2words", "babel", "pyarrow"},
    "store": {"numpy", "safetensors"},
    "kernels": {"numpy", "torch", "triton", "threadpoolctl"},
    "nn": {"torch"},
    "byhand": {"numpy"},
}
#: Modules that are only imported where a package is that comes with torch for a GPU.
ONLY_WITH = {
    "glassformer.gpu.triton_choose": "triton",
    "glassformer.gpu.triton_decode": "triton",
    "glassformer.gpu.triton_loss": "triton",
    "glassformer.gpu.triton_step": "triton",
}
WITHOUT_TORCH = ("spec", "budget", "costs", "data", "store", "byhand")
#: What of kernels the by-hand table in C is made with.
KERNELS_OF_ARRAYS = ("", ".build", ".c_library", ".threads", ".training")
DRAWERS = {"utils", "util", "helpers", "helper", "common", "misc", "tools", "stuff"}

FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(HOUSE.rglob("*.py"))
}


@functools.cache
def trees() -> dict[str, ast.Module]:
    """Every module's syntax tree, by its name."""
    return {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in FILES.items()}


def package_of(module: str) -> str:
    """`spec` for `glassformer.spec.model`; empty for the door itself."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 and parts[1] in RANKS else ""


@functools.cache
def imports(module: str) -> frozenset[str]:
    """Full names of imported modules; `from a import b` gives a.b where that is a module."""
    found: set[str] = set()
    for node in ast.walk(trees()[module]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            base = node.module or ""
            below = {f"{base}.{alias.name}" for alias in node.names}
            found |= {name for name in below if name in FILES} or {base}
    return frozenset(found)


def test_every_package_has_a_place_in_the_table():
    packages = {path.parent.name for path in HOUSE.glob("*/*.py")}
    assert packages <= RANKS.keys()


def test_imports_go_down_the_ranks():
    wrong = []
    for module in FILES:
        package = package_of(module)
        if not package:
            continue  # the door opens on every room
        for target in imports(module):
            if not target.startswith("glassformer") or package_of(target) == package:
                continue
            other = package_of(target)  # empty: the door
            allowed = other in ONLY.get(package, RANKS) and other != "named"
            if not allowed or RANKS[other] >= RANKS[package]:
                wrong.append(f"{module} imports {target}")
    assert not wrong, "\n".join(wrong)


def test_packages_need_only_what_the_table_says():
    wrong = []
    for module in FILES:
        package = package_of(module)
        outside = {name.split(".")[0] for name in imports(module)} - {"glassformer"}
        more = outside - sys.stdlib_module_names - OUTSIDE.get(package, outside)
        wrong += [f"{module} imports {name}" for name in sorted(more)]
    assert not wrong, "\n".join(wrong)


def test_there_is_no_cycle():
    waiting = {
        name: {target for target in imports(name) if target in FILES and target != name}
        for name in FILES
        if package_of(name)
    }
    while waiting:
        free = {name for name, needs in waiting.items() if not needs & waiting.keys()}
        assert free, f"a cycle among {sorted(waiting)}"
        waiting = {name: needs for name, needs in waiting.items() if name not in free}


def run(script: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", script],
        capture_output=True,
        text=True,
        check=False,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def modules_of(*packages: str) -> list[str]:
    chosen = [name for name in FILES if package_of(name) in packages]
    return [name for name in chosen if not name.endswith("__main__")]


def needs_first(names: list[str]) -> list[str]:
    """These modules and the packages they are in, each after the modules that it imports."""
    ordered: dict[str, None] = {}

    def visit(name: str) -> None:
        if name in ordered:
            return
        if package := name.rpartition(".")[0]:
            visit(package)
        for target in sorted(imports(name) if package_of(name) else ()):
            if target in wanted and not f"{target}.".startswith(f"{name}."):
                visit(target)  # what a package has inside it imports when first used
        ordered[name] = None

    wanted = set(names)
    for name in names:
        visit(name)
    return list(ordered)


#: Imports each module where nothing of ours is loaded but what it asks for. Every module is
#: executed once, alone, as it comes after its needs; those that ask for it later get that module.
ALONE = """
import importlib, importlib.abc, importlib.machinery, sys

made = {{}}  # by name: the module, and all that was loaded with it

def ours():
    return {{name for name in sys.modules if name.partition(".")[0] == "glassformer"}}

class Made(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        return importlib.machinery.ModuleSpec(name, self) if name in made else None

    def create_module(self, spec):
        module, loaded_with_it = made[spec.name]
        for name in loaded_with_it:
            sys.modules[name] = made[name][0]
            package, _, leaf = name.rpartition(".")
            if package:
                setattr(made[package][0], leaf, made[name][0])
        return module

    def exec_module(self, module):
        pass

sys.meta_path.insert(0, Made())
for name in {names}:
    for loaded in ours():
        package, _, leaf = loaded.rpartition(".")
        if package:
            vars(made[package][0]).pop(leaf, None)
        del sys.modules[loaded]
    try:
        importlib.import_module(name)
    except Exception as error:
        raise SystemExit(f"{{name}}: {{error!r}}")
    executed = ours() - made.keys()
    if executed != {{name}}:
        raise SystemExit(f"{{name}} is not imported alone: {{sorted(executed)}}")
    made[name] = sys.modules[name], sorted(ours() - {{name}})
print(*(m for m in {unwanted} if m in sys.modules))
"""


def loaded_with(names: list[str], *, unwanted: Sequence[str]) -> list[str]:
    """Import each of these modules alone; return which unwanted ones were loaded."""
    return run(ALONE.format(names=needs_first(names), unwanted=list(unwanted))).split()


def test_every_module_can_be_imported_alone():
    names = [name for name in FILES if not name.endswith("__main__")]
    names = [n for n in names if n not in ONLY_WITH or importlib.util.find_spec(ONLY_WITH[n])]
    assert loaded_with(names, unwanted=["torch._dynamo", "scipy"]) == []  # slow to load


def test_some_packages_never_load_torch():
    names = modules_of(*WITHOUT_TORCH)
    names += [f"glassformer.kernels{leaf}" for leaf in KERNELS_OF_ARRAYS]
    assert loaded_with(names, unwanted=["torch"]) == []


def test_specs_load_the_standard_library_alone():
    unwanted = ["torch", "numpy", "safetensors"]
    assert loaded_with(modules_of("spec"), unwanted=unwanted) == []


def test_the_door_is_lazy():
    assert loaded_with(["glassformer"], unwanted=["torch", "numpy"]) == []


# --- the distribution beside it -----------------------------------------------------------------

BESIDE = ROOT.parent / "glasscheck" / "src"
CHECKS = {
    ".".join(path.relative_to(BESIDE).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(BESIDE.rglob("*.py"))
}


def imported_by(path: Path) -> set[str]:
    """The modules that a file names in its imports."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    found = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    return found | {n.module or "" for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}


def test_glasscheck_needs_torch_and_numpy_and_knows_no_other_library():
    wrong = []
    for module, path in CHECKS.items():
        allowed = {"torch", "numpy", "glasscheck"}
        allowed |= {"pytest"} if module == "glasscheck.plugin" else set()
        more = {name.split(".")[0] for name in imported_by(path)} - sys.stdlib_module_names
        wrong += [f"{module} imports {name}" for name in sorted(more - allowed)]
    assert not wrong, "\n".join(wrong)


def test_glasscheck_has_no_cycle():
    needs = {m: {t for t in imported_by(path) if t in CHECKS} for m, path in CHECKS.items()}
    needs = {m: t - {m, "glasscheck"} for m, t in needs.items()}
    while needs:
        free = {name for name, left in needs.items() if not left & needs.keys()}
        assert free, f"a cycle among {sorted(needs)}"
        needs = {name: left for name, left in needs.items() if name not in free}


def test_glasscheck_is_used_by_what_knows_models():
    """By checks and above: what a model is does not depend on how it is checked."""
    wrong = [
        f"{module} imports {target}"
        for module in FILES
        for target in imports(module)
        if target.startswith("glasscheck") and RANKS.get(package_of(module), 9) < RANKS["checks"]
    ]
    assert not wrong, "\n".join(wrong)


def test_rooms_are_named_for_what_lives_in_them():
    names = {part for module in FILES for part in module.split(".")}
    assert not names & DRAWERS


# --- what no file may do ------------------------------------------------------------------------


def dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


PICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}
FORBIDDEN = {"eval", "exec", "builtins.eval", "builtins.exec", "torch.load", "torch.save"}


def test_nothing_dangerous_is_called():
    """No pickle in any dress, no code made of text, no waiting for a GPU outside bench/."""
    wrong = []
    beside = {
        module: ast.parse(path.read_text(encoding="utf-8")) for module, path in CHECKS.items()
    }
    for module, tree in (trees() | beside).items():
        named = imports(module) if module in FILES else imported_by(CHECKS[module])
        found = {name.split(".")[0] for name in named} & PICKLES
        wrong += [f"{module} imports {name}" for name in sorted(found)]
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                name = dotted(node.func)
                if name in FORBIDDEN or name.endswith("cuda.synchronize"):
                    wrong.append(f"{module}:{node.lineno} calls {name}")
            elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                allowed = ast.unparse(node.value)
                wrong += [f"{module}: allow_pickle={allowed}"] * (allowed != "False")
    assert not wrong, "\n".join(wrong)


@functools.cache
def documented_by_contract() -> set[str]:
    """Methods whose docstring stands once, on the protocol or abstract class that they fulfil."""
    return {
        item.name
        for tree in trees().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        and {"Protocol", "ABC"} & {dotted(base).split(".")[-1] for base in node.bases}
        for item in node.body
        if isinstance(item, ast.FunctionDef) and ast.get_docstring(item)
    }


def test_what_is_public_is_documented():
    bare = [f"{module}: {what}" for module in FILES for what in undocumented(module)]
    assert not bare, "\n".join(bare)


def undocumented(module: str) -> list[str]:
    """What a module leaves without a docstring."""
    tree, path = trees()[module], FILES[module]
    bare, contract = [], documented_by_contract()
    if path.stat().st_size and not ast.get_docstring(tree):
        bare.append("the module itself")

    def look(body: list[ast.stmt], owner: str) -> None:
        for node in body:
            if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                continue
            if node.name.startswith("_"):
                continue
            excused = owner and node.name in {"forward", "backward", "extra_repr"} | contract
            if not excused and not ast.get_docstring(node):
                bare.append(f"{owner}{node.name}")
            if isinstance(node, ast.ClassDef):
                look(node.body, f"{owner}{node.name}.")

    look(tree.body, "")
    return bare


#: Why a module with a single importer is a file of its own. A table is the importer of its members.
ONE_IMPORTER = {
    "adapters.families.encoders": "a kind of families; known is their table",
    "adapters.families.translators": "a kind of families; known is their table",
    "costs.activations": "what a backward keeps, kind by kind; estimates adds the rest of a step",
    "checks.executors": "the table of executors; the command that shows it reads it",
    "checks.rows.processes": "a row that starts processes of its own; the catalogue is the table",
    "checks.rows.training_step": "rows of the training step; the catalogue is their table",
    "kernels.grids": "the door to grids.c: kernels holds what is compiled, quant what it computes",
    "gpu.cuda_attend": "another language than its importer's; it has a source file of its own",
    "gpu.triton_decode": "imported by name where there is a GPU: it needs Triton",
    "gpu.triton_loss": "imported where there is a GPU: it needs Triton",
    "gpu.triton_step": "imported where there is a GPU: it needs Triton",
    "adapters.array_model": "opens a model without torch; load, beside it, is the door with torch",
    "adapters.folder.hub": "the only module that may download",
    "byhand.cached_forward": "the by-hand decoding step; generation's only door to byhand",
    "byhand.experts": "the pairs of a mixture, with their derivations; operations is their table",
    "byhand.heads": "the pairs around a head, with their derivations; operations is their table",
    "byhand.interpreter": "the plan and the loop; model.py holds the arrays",
    "checks.adapter": "public: validates an adapter of anyone; named re-exports it",
    "checks.rows.attention": "rows about attention; the catalogue is their table",
    "checks.rows.decoding": "rows about decoding; the catalogue is their table",
    "checks.rows.numpy_parity": "rows that compare the engines; the catalogue is their table",
    "checks.rows.quantization": "rows about rounding; the catalogue is their table",
    "cli.main": "the command's entry point; __main__ is another door to it",
    "data.tasks.labelled": "three tasks; build_task is the table",
    "data.tasks.seq2seq": "two tasks; build_task is the table",
    "generation.native.prompt_cache": "prompts on disk; the step of a torch model keeps them",
    "gpu.decoding_graph": "steps as CUDA graphs; the stepper is about memory and batches",
    "gpu.recorded_slots": "many sequences on a GPU; executors, one rank up, is where it is chosen",
    "lab.smallbench.suite": "the suite; one option of evaluate runs it",
    "lab.runs.stack": "many runs as one, public through sweeps; it reads beside the run alone",
    "lens.measure.contributions": "a measurement; inspection offers it",
    "lens.measure.patching": "a measurement on inspections; public through adapters",
    "lens.measure.roles": "a measurement; the report shows it",
    "named.budget_lm": "one source document's names; the package is their table",
    "named.by_hand": "one source document's names; the package is their table",
    "named.core": "one source document's names; the package is their table",
    "named.fsm_probe": "one source document's names; the package is their table",
    "named.seq2seq": "one source document's names; the package is their table",
    "serve.app": "the endpoints; the verb starts them",
    "serve.answers": "the shapes of answers and their streams; the endpoints make them",
    "training.stacked_step": "the step of many models; the engine is what surrounds it",
    "web.app.server": "the explorer's app; cli starts it",
    "web.pages.design": "a page with its routes; the server is the table",
    "web.pages.errors": "a page with its routes; the server is the table",
    "web.pages.generate": "a page with its routes; the server is the table",
    "web.pages.inspect_results": "what that page shows, as JSON",
    "web.pages.model": "a page with its routes; the server is the table",
    "web.pages.quantize": "a page with its routes; the server is the table",
    "web.pages.runs": "a page with its routes; the server is the table",
    "web.report.errors": "a section of the report; the document is the table",
}


def test_a_module_with_one_importer_has_a_reason():
    """A file that is read with its only importer belongs in it."""
    importers: dict[str, set[str]] = {name: set() for name in FILES}
    for name in FILES:
        for target in imports(name):
            if target in importers and target != name:
                importers[target].add(name)
    alone = {
        name.removeprefix("glassformer.")
        for name, users in importers.items()
        if len(users) == 1 and FILES[name].name != "__init__.py"
    }
    assert alone == ONE_IMPORTER.keys()


def test_a_file_name_means_one_thing():
    """No basename is used by more than three modules; a verb, a page and a part have one each.

    `attention` and `block` are the same part in each engine, in the lens and in the checks.
    """
    named = [
        path.stem
        for name, path in FILES.items()
        if path.stem != "__init__" and ".cli." not in name and ".web.pages." not in name
    ]
    parts = {"attention", "block"}
    often = {stem: named.count(stem) for stem in set(named) - parts if named.count(stem) > 3}
    assert not often
