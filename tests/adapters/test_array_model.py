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
from glassformer.checks.preset_subjects import NARROW, perturb
from glassformer.cli.main import app
from glassformer.generation import beam
from glassformer.generation.loop import decode
from glassformer.generation.native.stepper import NativeStepper
from glassformer.generation.stepper import TorchStepper
from glassformer.generation.streaming import generate_batch
from glassformer.kernels import c_library
from glassformer.models.prompts import Prompts
from glassformer.quant.contents import quantization_report
from glassformer.quant.convert import quantize_model
from glassformer.spec.decoding import DecodeSpec
from glassformer.spec.errors import FileError
from glassformer.spec.model import NextHead
from glassformer.spec.presets import PRESETS
from glassformer.spec.quantization import QuantSpec, to_record
from glassformer.spec.schemes import Float8, Int4, Int8
from glassformer.spec.serialize import to_json
from glassformer.store.checkpoint import load_quantized, write_folder
from glassformer.store.tensors import tensor_bytes
from tests.adapters.checkpoints import CASES, folder_of
from tests.adapters.gguf.files import ARCHITECTURES, finish, write_foreign
from tests.planting import Call, Fault, Name, mutate, planted

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
    """Other precisions, schemes that C does not run, heads that predict no next token."""
    gf.save(gf.build("core", dtype=torch.float64), tmp_path / "wide")
    gf.save(gf.build("core", dtype=torch.float16), tmp_path / "half")
    gf.save(gf.build("digits"), tmp_path / "answers")
    gf.save(gf.quantize(gf.build("core"), scheme="fp8"), tmp_path / "floats")
    gf.save(gf.quantize(gf.build("core"), bits=8, symmetric=False), tmp_path / "asymmetric")
    gf.save(gf.quantize(gf.build("core", dtype=torch.float16), bits=8), tmp_path / "half bytes")
    gf.save(gf.quantize(gf.build("digits"), bits=8), tmp_path / "answers in bytes")
    mixed = QuantSpec(scheme=Int4(), head=Float8(), indivisible="keep")
    gf.save(quantize_model(gf.build("core").model, mixed), tmp_path / "one layer")
    folders = list(tmp_path.iterdir())
    assert len(folders) == 8
    for folder in folders:
        assert open_stepper(folder) is None


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


def test_lists_of_top_tokens_are_those_of_torch(tmp_path):
    model = gf.build("core", seed=1)
    gf.save(model, tmp_path / "m")
    _, arrays = open_stepper(tmp_path / "m")
    spec = DecodeSpec(max_new_tokens=6)
    ours, theirs = (
        list(decode(stepper, [[1, 2]], spec=spec, top_logprobs=3))
        for stepper in (arrays, TorchStepper(model.model))
    )
    for a, b in zip(ours, theirs, strict=True):
        (of_arrays, of_torch) = (dict(column.top(0)) for column in (a, b))
        assert [*of_arrays] == [*of_torch]
        assert [*of_arrays.values()] == pytest.approx([*of_torch.values()], abs=1e-5)
        assert float(a.logprobs_B[0]) == a.top(0)[0][1]  # greedy


# --- quantized checkpoints ------------------------------------------------------------------------


def quantized(folder, preset, spec, *, dtype=torch.float32):
    """Save a model of a preset or spec, with random values everywhere, quantized."""
    wanted = NARROW.get(preset, preset) if isinstance(preset, str) else preset
    model = perturb(gf.build(wanted, seed=4).model, dtype=dtype, seed=5)
    small = quantize_model(model.eval(), spec)
    gf.save(small, folder)
    return quantization_report(small)


@pytest.mark.parametrize("name", sorted(set(PRESETS) - {"digits"}))
def test_every_preset_quantized(name, tmp_path):
    for scheme, dtype in ((Int8(), torch.float32), (Int4(), torch.bfloat16)):
        folder = tmp_path / scheme.name
        quantized(folder, name, QuantSpec(scheme=scheme, indivisible="keep"), dtype=dtype)
        same_as_torch(folder)


WIDER = ("blocks.0.attn.q_proj", "blocks.1.ffn.down_proj")


@pytest.mark.parametrize("preset", ["qwen-sliding", "core"])  # a table for both uses; and two
@pytest.mark.parametrize(
    "spec",
    [
        *(QuantSpec(scheme=Int8(group=group)) for group in (0, 32, 64)),
        *(
            QuantSpec(scheme=Int4(group=group, symmetric=symmetric, fine=fine))
            for group in (32, 64)
            for symmetric in (True, False)
            for fine in (True, False)
        ),
        QuantSpec(scheme=Int4(), head=Int4()),
        QuantSpec(scheme=Int4(), head=Int8(group=0)),
        QuantSpec(scheme=Int4(), tied="untie"),
        QuantSpec(scheme=Int8(), tied="skip"),
        QuantSpec(scheme=Int4(), mean_bits=5.0, wider=WIDER),
    ],
    ids=lambda spec: f"{spec.scheme.describe()} {spec.head_scheme.describe()} {spec.tied}",
)
def test_every_scheme_that_c_runs(spec, preset, tmp_path):
    report = quantized(tmp_path / "m", preset, spec)
    if spec.wider:
        assert len(report.schemes()) == 2
    same_as_torch(tmp_path / "m")
    _, arrays = open_arrays(tmp_path / "m")
    for layer, one in report.layers.items():
        tiles = arrays[f"{layer}.weight"]
        assert (tiles.shape, tiles.bits, tiles.nbytes >= one.nbytes) == (one.shape, one.bits, True)


def test_layers_that_a_group_does_not_divide_stay_as_they_are(tmp_path):
    """A width of 48 has groups of no size; sources, answers and the head share a table."""
    model = replace(NARROW["seq2seq"], share_embedding=True, heads=(NextHead(tied=True),))
    spec = QuantSpec(scheme=Int4(), head=Int8(), indivisible="keep")
    report = quantized(tmp_path / "m", model, spec)
    assert len(report.schemes()) == 2
    assert "encoder.embed" in report.layers
    same_as_torch(tmp_path / "m")
    _, arrays = open_arrays(tmp_path / "m")
    assert any(
        name.endswith("q_proj.weight") and isinstance(a, np.ndarray) for name, a in arrays.items()
    )


def test_folders_of_earlier_versions(tmp_path):
    before = Path(__file__).parents[1] / "quant" / "written_before"
    for name in ("int4", "int4-symmetric", "int8"):
        same_as_torch(before / name)
    assert open_stepper(before / "int8-asymmetric") is None


def damaged(folder: Path, *, how: str) -> None:
    """Damage a quantized folder in place: a byte, a file, or contents that are hashed again."""
    weights = folder / "model.safetensors"
    match how:
        case "a byte":
            data = bytearray(weights.read_bytes())
            data[-1] ^= 1
            weights.write_bytes(data)
        case "cut off":
            weights.write_bytes(weights.read_bytes()[:-9])
        case "no spec" | "no weights":
            (
                folder / how.replace("no spec", "spec.json").replace("no weights", weights.name)
            ).unlink()
        case "no JSON":
            (folder / "quantization.json").write_text("{")
        case "another spec":
            (folder / "spec.json").write_text("{}")
        case _:
            spec, quantization, arrays = load_quantized(folder)
            arrays, record = dict(arrays), to_record(quantization)
            match how:
                case "a tensor less":
                    del arrays["blocks.0.attn.q_proj.scale"]
                case "another type":
                    arrays["blocks.0.attn.q_proj.qweight"] = arrays[
                        "blocks.0.attn.q_proj.qweight"
                    ].view(np.uint8)
                case "no number":
                    arrays["blocks.0.attn.q_proj.scale"] = np.full_like(
                        arrays["blocks.0.attn.q_proj.scale"], np.nan
                    )
                case "another layer":
                    record["layers"][0]["name"] = "blocks.0.attn.r_proj"
                case "another group":
                    record["layers"][0]["scheme"]["group"] = 48
                case "the same twice":
                    record["layers"].append(record["layers"][0])
            for path in folder.iterdir():
                path.unlink()
            folder.rmdir()
            contents = {
                "spec.json": to_json(spec).encode(),
                "quantization.json": json.dumps(record).encode(),
                "model.safetensors": tensor_bytes(arrays),
            }
            write_folder(folder, contents)


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("a byte", "model.safetensors was changed after it was written"),
        ("cut off", "model.safetensors has another size"),
        ("no spec", "'spec.json' is missing"),
        ("no weights", "'model.safetensors' is missing"),
        ("no JSON", "quantization.json has another size"),
        ("another spec", "spec.json has another size"),
        ("a tensor less", "missing: blocks.0.attn.q_proj.scale"),
        ("another type", "mistyped: blocks.0.attn.q_proj.qweight U8 instead of I8"),
        ("no number", "blocks.0.attn.q_proj.scale holds NaN or infinity"),
        ("another layer", "not a layer that can be quantized"),
        ("another group", "a bad description"),
        ("the same twice", "a bad description"),
    ],
)
def test_a_damaged_folder_is_refused_in_the_words_of_load(how, said, tmp_path):
    folder = tmp_path / "m"
    quantized(folder, "core", QuantSpec())
    damaged(folder, how=how)
    words = []
    for opened in (load, open_stepper):
        with pytest.raises(FileError) as caught:
            opened(folder)
        words.append((type(caught.value), caught.value.what, caught.value.where, caught.value.hint))
    assert words[0] == words[1]
    assert said in words[0][1]


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        *(("checkpoint", how) for how in ("a byte", "cut off", "no weights", "another config")),
        *(("Hugging Face folder", how) for how in ("a byte", "cut off", "no weights", "a pickle")),
        *(("GGUF file", how) for how in ("a byte", "cut off")),
    ],
)
def test_both_refuse_what_is_damaged_in_the_same_words(kind, how, tmp_path):
    """Each format, with and without torch."""
    match kind:
        case "checkpoint":
            folder = Path(gf.save(gf.build("core", seed=1), tmp_path / "m"))
        case "Hugging Face folder":
            folder = folder_of("qwen2 tied", tmp_path)
        case _:
            folder = write_foreign("qwen2 tied", tmp_path / "m.gguf")
    weights = folder if kind == "GGUF file" else folder / "model.safetensors"
    config = folder / ("spec.json" if kind == "checkpoint" else "config.json")
    match how:
        case "a byte":
            data = bytearray(weights.read_bytes())
            data[9] ^= 1
            weights.write_bytes(data)
        case "cut off":
            weights.write_bytes(weights.read_bytes()[:-9])
        case "no weights":
            weights.unlink()
        case "a pickle":
            weights.rename(folder / "pytorch_model.bin")
        case "another config":
            config.write_text("{}")
    words = []
    for opened in (load, open_stepper):
        with pytest.raises(FileError) as caught:
            opened(folder)
        words.append((caught.value.what, caught.value.where, caught.value.hint))
    assert words[0] == words[1]


# --- the command ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    place = tmp_path_factory.mktemp("runs")
    short = ["train.batch_size=8", "train.evaluate_every=3"]
    gf.train("reverse", steps=3, runs=place, overrides=[*short, "task.examples=300"])
    gf.train("parity", steps=3, runs=place, overrides=[*short, "task.examples=500"])
    for name in ("parity", "reverse"):
        for bits in ("8", "4"):
            words = [
                "quantize",
                name,
                "--bits",
                bits,
                "--indivisible",
                "int8",
                "--runs",
                str(place),
            ]
            result = CliRunner().invoke(app, [*words, "--out", str(place / f"{name}-int{bits}")])
            assert result.exit_code == 0, result.output
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
        ("parity-int8", "0 1", "--json"),
        ("parity-int4", "0 1", "--json"),
        ("parity-int4", "0 1", "--machine", "parity", "--json"),
        ("parity-int4", "0 1", "--temperature", "1", "--seed", "3", "--json"),
        ("parity-int4", "0 1", "--kv-cache", "int8", "--json"),
        ("parity-int4", "0 1", "--beams", "2", "--json"),
        ("reverse-int8", "3 1 4", "--temperature", "0.8", "--top-p", "0.9", "--json"),
        ("reverse-int4", "3 1 4", "--threads", "1", "--json"),
        ("parity-int4", "elephant"),
    ],
)
def test_the_command_prints_what_it_prints_with_torch(words, runs, monkeypatch):
    def printed() -> tuple[object, ...]:
        result = CliRunner().invoke(app, ["generate", *placed(words, runs), "--runs", str(runs)])
        return result.exit_code, result.output, str(result.exception)

    # A run of beams that the clock ends elsewhere has another last bit in the step between runs.
    monkeypatch.setattr(beam, "PATIENCE", 60.0)
    ours = printed()
    monkeypatch.setattr(array_model, "open_stepper", lambda *_, **__: None)
    assert ours == printed()


def placed(words, runs):
    """A quantized run is a folder, and not a run's name."""
    name, *rest = words
    return [str(runs / name) if "-int" in name else name, *rest]


SAMPLED = ("--temperature", "0.8", "--top-p", "0.95", "--stop", "1")


@pytest.mark.parametrize("name", ["parity", "parity-int8", "reverse-int4"])
@pytest.mark.parametrize("more", [(), SAMPLED])
def test_the_command_never_imports_torch(runs, name, more):
    """In a process of its own, on a run, plain and quantized: the same tokens."""
    script = (
        "import sys; from glassformer.cli.main import app; code = 0\n"
        "try: app(sys.argv[1:])\n"
        "except SystemExit as end: code = end.code\n"
        "print('torch' in sys.modules, file=sys.stderr); sys.exit(code)"
    )
    path = [str(Path(gf.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    words = ["generate", *placed((name, "0 1"), runs), *more, "--runs", str(runs), "--json"]
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
        "reordered rows as they are",
        mutate(
            "adapters.array_model:read_arrays",
            Call("split"),
            to="dict.fromkeys(entry.ours, {args[0]})",
        ),
        "packed",
    ),
    Fault(
        "biases of quantized layers lost",
        mutate("adapters.array_model:open_quantized", Name("bias"), drop=True),
        "integers",
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
        quantized(path, "qwen-sliding", QuantSpec(scheme=Int4()))
    wanted_BV, _ = NativeStepper(load(path).model).start(Prompts.of([[1, 2, 3]]), room=1)
    with planted(fault):
        found_BV, _ = open_stepper(path, **how)[1].start(Prompts.of([[1, 2, 3]]), room=1)
    assert not np.array_equal(found_BV, wanted_BV.numpy())
    same_as_torch(path, **how)
