"""A folder from elsewhere cannot make anyone run code: consent names the file, the hash decides."""

import sys

import pytest

from glassformer.checks.subject import named
from glassformer.data.build_task import build_task
from glassformer.data.own_code import allow_own_code, forget_own_code, name_part, open_part
from glassformer.data.tokenizers.own import Own, tokenizer_from_json
from glassformer.lab.recipes import plan_run
from glassformer.spec import own
from glassformer.spec.errors import InputError
from glassformer.spec.own import OwnTask, OwnTokenizer, Settings, is_source
from glassformer.spec.serialize import from_json, to_json
from glassformer.spec.train import RunSpec
from tests.own.test_commands import PARTS

TRAP = "import pathlib\npathlib.Path({mark!r}).touch()\nclass Trap: pass\n"


@pytest.fixture(autouse=True)
def without_consent():
    forget_own_code()
    yield
    forget_own_code()


def trap(folder):
    """A file that leaves a mark when it runs, and the spec of a part in it."""
    file = folder / "trap.py"
    file.write_text(TRAP.format(mark=str(folder / "ran")))
    part = name_part(OwnTask, f"{file}:Trap")
    forget_own_code()
    (folder / "ran").unlink()
    return file, part


def test_a_file_that_nobody_named_is_not_run(tmp_path):
    file, part = trap(tmp_path)
    for attempt in (open_part, build_task):
        with pytest.raises(InputError, match="not run unless you allow it"):
            attempt(part)
    allow_own_code(PARTS)  # consent to another file is none to this one
    with pytest.raises(InputError, match="not run unless you allow it"):
        open_part(part)
    assert not (tmp_path / "ran").exists()
    allow_own_code(file)
    assert open_part(part).__name__ == "Trap"
    assert (tmp_path / "ran").exists()


def test_a_file_is_known_by_its_hash_wherever_it_lies(tmp_path):
    file, part = trap(tmp_path)
    moved = tmp_path / "elsewhere.py"
    file.rename(moved)
    allow_own_code(moved)
    assert open_part(part).__name__ == "Trap"


def test_what_runs_is_what_was_hashed(tmp_path):
    file, part = trap(tmp_path)
    allow_own_code(file)
    file.write_text("class Trap: swapped = True\n")
    assert not hasattr(open_part(part), "swapped")


def test_a_module_is_not_imported_without_consent(tmp_path, monkeypatch):
    (tmp_path / "trap_module.py").write_text(TRAP.format(mark=str(tmp_path / "ran")))
    monkeypatch.syspath_prepend(str(tmp_path))
    part = OwnTask(source="trap_module:Trap", sha256="0" * 64)
    with pytest.raises(InputError, match="not run unless you allow it"):
        open_part(part)
    assert "trap_module" not in sys.modules
    named = name_part(OwnTask, "trap_module:Trap")
    assert open_part(named).__name__ == "Trap"
    with pytest.raises(InputError, match="has changed since"):
        open_part(part)


def test_an_installed_part_is_found_by_its_name(tmp_path, monkeypatch):
    """A package declares its parts as entry points; installing it is consent."""
    (tmp_path / "plugin_parts.py").write_text(PARTS.read_text())
    about = tmp_path / "plugin_parts-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: plugin-parts\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(
        "[glassformer.parts]\npalindromes = plugin_parts:Palindromes\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert own.installed_parts() == {"palindromes": "plugin_parts:Palindromes"}
    plan = plan_run("palindromes", ["task.length=3", "task.examples=100"])
    forget_own_code()
    assert build_task(plan.spec.task).facts() == plan.task.facts()


def test_a_tokenizer_from_elsewhere_runs_nothing(tmp_path):
    part = name_part(OwnTokenizer, f"{PARTS}:Words")
    text = Own.trained(part, ["a b a"]).to_json()
    assert tokenizer_from_json(text).encode("b a c") == [2, 1, 0]
    forget_own_code()
    with pytest.raises(InputError, match="not run unless you allow it"):
        tokenizer_from_json(text)


def test_a_run_with_own_parts_is_read_back_equal():
    plan = plan_run(
        f"{PARTS}:Palindromes",
        [
            "task.examples=100",
            f"train.optimizer={PARTS}:Lion",
            "train.optimizer.options.beta1=0.5",
            f"model.position={PARTS}:Stripes",
        ],
    )
    read = from_json(RunSpec, to_json(plan.spec))
    assert read == plan.spec
    assert hash(read) == hash(plan.spec)
    assert read.train.optimizer.options == {"beta1": 0.5}


NEIGHBOUR = """
from helper import Base

class Mine(Base):
    def late(self):
        import later

        return later.N
"""


def test_a_file_imports_the_modules_beside_it(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    found = []
    for number in (1, 2):  # the same file, beside another helper
        folder = tmp_path / f"folder{number}"
        folder.mkdir()
        (folder / "helper.py").write_text(f"class Base: number = {number}\n")
        (folder / "later.py").write_text("N = 7\n")
        (folder / "mine.py").write_text(NEIGHBOUR)
        found.append(open_part(name_part(OwnTask, f"{folder / 'mine.py'}:Mine")))
    assert [kind.number for kind in found] == [1, 2]
    assert found[1]().late() == 7
    forget_own_code()
    assert "helper" not in sys.modules


def test_a_neighbour_does_not_hide_what_is_imported_later(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "colorsys.py").write_text("raise RuntimeError('the neighbour')\n")
    (tmp_path / "mine.py").write_text("class Mine: pass\n")
    open_part(name_part(OwnTask, f"{tmp_path / 'mine.py'}:Mine"))
    monkeypatch.delitem(sys.modules, "colorsys", raising=False)
    import colorsys

    assert colorsys.rgb_to_hsv(0, 0, 0) == (0, 0, 0)


def test_settings_are_values():
    assert Settings({"a": [1, 2], "b": "x"}) == Settings({"b": "x", "a": (1, 2)})
    assert hash(Settings({"a": 1, "b": 2})) == hash(Settings({"b": 2, "a": 1}))
    for wrong in ({"a": {}}, {"not a name": 1}):
        with pytest.raises(InputError):
            Settings(wrong)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("my_task.py:MyTask", True),
        ("some/folder/my_task.py:MyTask", True),
        ("package.module:MyTask", True),
        ("digits", False),
        ("runs/a/config.toml", False),
        ("regex:(ab)*", False),
    ],
)
def test_a_source_is_recognised(text, expected):
    assert is_source(text) is expected


def test_the_doctor_opens_a_file_with_neighbours_in_another_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "helper_of_doctor.py").write_text("class Base: number = 1\n")
    (tmp_path / "mine.py").write_text("from helper_of_doctor import Base as Mine\n")
    assert named(f"{tmp_path / 'mine.py'}:Mine").number == 1
