"""Decoding without torch: the bits of the torch path, from every format; and no torch at all."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import glassformer as gf
from glassformer.adapters import array_model
from glassformer.adapters.array_model import open_arrays, open_stepper
from glassformer.adapters.gguf.export_gguf import export_gguf
from glassformer.adapters.gguf.header import read_head
from glassformer.adapters.load import load
from glassformer.checks.preset_subjects import NARROW
from glassformer.cli.main import app
from glassformer.generation import beam
from glassformer.generation.fast.native_stepper import NativeStepper
from glassformer.generation.prompts import Prompts
from glassformer.generation.streaming import generate_batch
from glassformer.kernels import c_library
from glassformer.spec.decoding import DecodeSpec
from glassformer.spec.errors import FileError, InputError
from glassformer.spec.presets import PRESETS
from tests.adapters.checkpoints import CASES, folder_of
from tests.adapters.gguf.files import ARCHITECTURES, finish, write_foreign
from tests.checks.faults import Fault, planted

pytestmark = pytest.mark.skipif(not c_library.available(), reason="the native step needs C")

SPECS = (
    DecodeSpec(max_new_tokens=9),
    DecodeSpec(max_new_tokens=9, min_new_tokens=4, forbidden=(3, 5), eos=(6, 7)),
    DecodeSpec(max_new_tokens=9, temperature=0.9, top_p=0.95, seed=3),
)


def same_as_torch(path: Path, **how: bool) -> None:
    """Logits, tokens, log-probabilities and ends of both paths, to the last bit."""
    found = open_stepper(path, **how)
    assert found is not None
    spec, ours = found
    theirs = NativeStepper(load(path).model)
    sources = [[3, 1, 4], [1, 5]] if spec.encoder is not None else None
    prompts = Prompts.of([[1, 2, 3, 4, 5], [6]], sources=sources)
    logits_BV, _ = ours.start(prompts, room=2)
    wanted_BV, _ = theirs.start(prompts, room=2)
    assert np.array_equal(logits_BV, wanted_BV.numpy())
    for decoding in SPECS:
        assert generate_batch(ours, prompts, spec=decoding) == generate_batch(
            theirs, prompts, spec=decoding
        )


@pytest.mark.parametrize("name", sorted(set(PRESETS) - {"digits"}))
def test_every_preset_from_a_checkpoint(name, tmp_path):
    for dtype in (torch.float32, torch.bfloat16):
        gf.save(gf.build(NARROW.get(name, name), seed=4, dtype=dtype), tmp_path / str(dtype))
        same_as_torch(tmp_path / str(dtype))


@pytest.mark.parametrize("case", CASES)
def test_hugging_face_folders(case, tmp_path):
    same_as_torch(folder_of(case, tmp_path, sharded=case.startswith("llama")))


@pytest.mark.parametrize("case", ARCHITECTURES)
def test_files_of_others(case, tmp_path):
    same_as_torch(write_foreign(case, tmp_path / "m.gguf"))


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q5_0", "Q8_0", "Q4_K", "Q6_K", "F16", "BF16"])
@pytest.mark.parametrize(("preset", "width"), [("modern-lm", 768), ("qwen", 256)])
def test_packed_and_unpacked_weights_give_the_same_bits(name, preset, width, tmp_path):
    """Matrices of every kind of blocks in all variants; the file of the first reorders rows."""
    spec = gf.preset(preset)
    layers = (replace(spec.decoder.layers[0], count=2),)
    spec = replace(spec, vocab_size=64, d_model=width, decoder=replace(spec.decoder, layers=layers))
    export_gguf(gf.build(spec, seed=3), tmp_path / "plain.gguf")
    kind = gguf.GGMLQuantizationType[name]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    arrays, rng = {}, np.random.default_rng(8)
    for tensor in gguf.GGUFReader(tmp_path / "plain.gguf").tensors:
        arrays[tensor.name] = tensor.data
        if tensor.data.ndim == 2 and tensor.data.shape[1] % block == 0:
            rows, inputs = tensor.data.shape
            if name in ("F16", "BF16"):
                arrays[tensor.name] = (gguf.quants.quantize(tensor.data, kind), kind)
                continue
            data = rng.integers(0, 256, (rows, inputs // block, size), dtype=np.uint8)
            for at in {"Q6_K": (208,), "Q4_1": (0, 2), "Q4_K": (0, 2)}.get(name, (0,)):
                data[..., at : at + 2] = np.frombuffer(np.float16(0.003).tobytes(), np.uint8)
            arrays[tensor.name] = (data.reshape(rows, -1), kind)
    keys = dict(read_head(tmp_path / "plain.gguf").metadata)
    path = tmp_path / "m.gguf"
    finish(gguf.GGUFWriter(path, keys["general.architecture"]), arrays, keys)
    for variant in c_library.variants():
        with c_library.use_variant(variant):
            same_as_torch(path, unpacks=True)
            same_as_torch(path, unpacks=False)


def test_a_scale_that_is_no_number_is_refused_packed_too(tmp_path):
    export_gguf(gf.build("qwen", seed=3), tmp_path / "plain.gguf", dtype="q8_0")
    data = bytearray((tmp_path / "plain.gguf").read_bytes())
    head = read_head(tmp_path / "plain.gguf")
    name = next(n for n, t in head.tensors.items() if t.kind == 8)
    at = head.data + head.tensors[name].offset
    data[at : at + 2] = np.float16(np.nan).tobytes()
    (tmp_path / "m.gguf").write_bytes(data)
    for unpacks in (True, False):
        with pytest.raises(FileError, match="NaN or infinity"):
            open_stepper(tmp_path / "m.gguf", unpacks=unpacks)


def test_what_needs_torch_is_left_to_it(tmp_path):
    """Other precisions, quantized layers, heads that predict no next token."""
    gf.save(gf.build("core", dtype=torch.float64), tmp_path / "wide")
    gf.save(gf.build("core", dtype=torch.float16), tmp_path / "half")
    gf.save(gf.build("digits"), tmp_path / "answers")
    gf.save(gf.quantize(gf.build("core"), bits=8), tmp_path / "bytes")
    for name in ("wide", "half", "answers", "bytes"):
        assert open_stepper(tmp_path / name) is None


def test_two_heads_where_the_config_has_one(tmp_path):
    """A copy of the tied table with other values is refused as `load` refuses it."""
    from safetensors.torch import load_file, save_file

    folder = folder_of("qwen2 tied", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    table = tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": table.clone()}, folder / "model.safetensors")
    same_as_torch(folder)
    save_file(tensors | {"lm_head.weight": 2 * table}, folder / "model.safetensors")
    for opened in (load, open_stepper):
        with pytest.raises(FileError, match=r"lm_head\.weight differs"):
            opened(folder)


def test_lists_of_likeliest_tokens_are_refused_by_name(tmp_path):
    gf.save(gf.build("core", seed=1), tmp_path / "m")
    _, stepper = open_stepper(tmp_path / "m")
    with pytest.raises(InputError, match="list of likeliest"):
        stepper.chooser(DecodeSpec(), Prompts.of([[1]]), logprobs=True, count=3)


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    place = tmp_path_factory.mktemp("runs")
    short = ["train.batch_size=8", "train.evaluate_every=3"]
    gf.train("reverse", steps=3, runs=place, overrides=[*short, "task.examples=300"])
    gf.train("parity", steps=3, runs=place, overrides=[*short, "task.examples=500"])
    return place


@pytest.mark.parametrize(
    "words",
    [
        ("parity", "0 1", "--json"),
        ("parity", "0 1", "--max-new", "7"),
        ("parity", "0 1", "--min-new", "5", "--json"),
        ("parity", "0 1", "--forbid", "1", "--json"),
        ("parity", "0 1", "--machine", "parity", "--json"),
        ("parity", "0 1", "--stop", "1", "--json"),
        ("parity", "0 1", "--force", "1", "--json"),
        ("parity", "0 1", "--repetition-penalty", "1.5", "--json"),
        ("parity", "0 1", "--temperature", "1", "--seed", "3", "--json"),
        ("parity", "0 1", "--temperature", "0.8", "--top-p", "0.9", "--min-p", "0.1", "--json"),
        ("parity", "0 1", "--temperature", "2", "--top-k", "2", "--typical-p", "0.7", "--json"),
        ("reverse", "3 1 4", "--temperature", "1", "--repetition-penalty", "0.5", "--json"),
        ("parity", "0 1", "--threads", "1", "--json"),
        ("reverse", "3 1 4", "--json"),
        ("reverse", "3 1 4", "--beams", "2", "--json"),
        ("parity", "", "--json"),
        ("parity", "elephant"),
        ("nowhere", "0 1"),
        ("parity", "0 1", "--max-new", "0"),
    ],
)
def test_the_command_prints_what_it_prints_with_torch(words, runs, monkeypatch):
    def printed() -> tuple[object, ...]:
        result = CliRunner().invoke(app, ["generate", *words, "--runs", str(runs)])
        return result.exit_code, result.output, str(result.exception)

    # A run of beams that the clock ends elsewhere has another last bit in the step between runs.
    monkeypatch.setattr(beam, "PATIENCE", 60.0)
    ours = printed()
    monkeypatch.setattr(array_model, "open_stepper", lambda *_, **__: None)
    assert ours == printed()


SAMPLED = ("--temperature", "0.8", "--top-p", "0.95", "--stop", "1")


@pytest.mark.parametrize("more", [(), SAMPLED])
def test_the_command_never_imports_torch(runs, more):
    """In a process of its own, on a run: the same tokens."""
    script = (
        "import sys; from glassformer.cli.main import app; code = 0\n"
        "try: app(sys.argv[1:])\n"
        "except SystemExit as end: code = end.code\n"
        "print('torch' in sys.modules, file=sys.stderr); sys.exit(code)"
    )
    path = [str(Path(gf.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    words = ["generate", "parity", "0 1", *more, "--runs", str(runs), "--json"]
    done = subprocess.run(
        [sys.executable, "-c", script, *words],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path)},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.split()[-1] == "False"
    assert json.loads(done.stdout) == json.loads(CliRunner().invoke(app, words).output)


def test_all_parameters_are_there(tmp_path):
    gf.save(gf.build("core", seed=1), tmp_path / "m")
    spec, arrays = open_arrays(tmp_path / "m")
    model = load(tmp_path / "m").model
    assert spec == model.spec
    for name, parameter in model.named_parameters():
        assert np.array_equal(arrays[name], parameter.detach().numpy())


# --- planted faults -------------------------------------------------------------------------------

FAULTS = (
    Fault(
        "a row of blocks further on",
        "generation.fast.program:ArraySource.packed",
        "return found if",
        "return type(found)(found.kind, found.inputs, np.roll(found.data, 1, 0)) if",
        "packed",
    ),
    Fault(
        "another rotation",
        "generation.fast.program:ArraySource.rotation",
        "self.model.max_seq_len, width, dtype=np.float32",
        "self.model.max_seq_len, width, dtype=np.float16",
        "plain",
    ),
    Fault(
        "halves by another rule",
        "generation.fast.program:as_floats",
        "return widened(array)",
        "return np.nextafter(widened(array), np.float32(9))",
        "halves",
    ),
    Fault(
        "reordered rows as they are",
        "adapters.array_model:read_arrays",
        "rows = entry.split(matrix.data)",
        "rows = dict.fromkeys(entry.ours, matrix.data)",
        "packed",
    ),
)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_fault_is_caught(fault, tmp_path):
    """Each makes the logits others than those of the torch path."""
    path, how = tmp_path / "m", {}
    if fault.caught_by == "packed":
        path, how = tmp_path / "m.gguf", {"unpacks": False}
        spec = gf.preset("modern-lm")
        layers = (replace(spec.decoder.layers[0], count=2),)
        small = replace(spec, d_model=384, decoder=replace(spec.decoder, layers=layers))
        export_gguf(gf.build(small, seed=4), path, dtype="q8_0")
    else:
        dtype = torch.bfloat16 if fault.caught_by == "halves" else torch.float32
        gf.save(gf.build("qwen", seed=4, dtype=dtype), path)
    wanted_BV, _ = NativeStepper(load(path).model).start(Prompts.of([[1, 2, 3]]), room=1)
    with planted(fault):
        found_BV, _ = open_stepper(path, **how)[1].start(Prompts.of([[1, 2, 3]]), room=1)
    assert not np.array_equal(found_BV, wanted_BV.numpy())
    same_as_torch(path, **how)
