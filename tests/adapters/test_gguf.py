"""GGUF both ways: against files and readers that share no code with ours, and there and back."""

import json
import re
import sys
from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
from bench.families import FILES, PROMPT, written
from typer.testing import CliRunner

import glassformer as gf
from glassformer.adapters.counterpart import differences
from glassformer.adapters.folder.export_hf import export_hf
from glassformer.adapters.gguf.export_gguf import export_gguf
from glassformer.adapters.gguf.header import read_head, shortest
from glassformer.adapters.gguf.load import pack_q4_k
from glassformer.adapters.gguf.tensors import USUAL, kind_of, unpacked
from glassformer.adapters.load import load
from glassformer.cli.main import app
from glassformer.spec import presets
from glassformer.spec.errors import FileError, InputError, MachineError
from glassformer.spec.position import single
from tests.adapters.checkpoints import CASES, folder_of, live, tokens
from tests.adapters.gguf.files import ARCHITECTURES, arrays_of, finish, write_foreign

pytestmark = pytest.mark.filterwarnings("ignore")  # transformers' own

CLOSE = 1e-5


@torch.no_grad()
def gap(one, other, ids=None) -> float:
    ids = tokens(2, 64) if ids is None else ids
    logits = [m(ids).logits if hasattr(m, "config_class") else m(ids) for m in (one, other)]
    return float((logits[0] - logits[1]).abs().max())


def same_weights(one, other) -> bool:
    other = dict(other.model.named_parameters())
    return all(
        p.dtype == other[name].dtype and torch.equal(p, other[name])
        for name, p in one.model.named_parameters()
    )


# --- against others -----------------------------------------------------------------------------


@pytest.mark.parametrize("name", FILES[3:])
@torch.no_grad()
def test_families_have_files_of_llama_cpps_architecture(name, tmp_path):
    """Names are the library's, of that architecture, and the file computes what the module does."""
    module, file, kind = written(name, tmp_path)
    arch = next(a for a, known in gguf.MODEL_ARCH_NAMES.items() if known == kind)
    allowed = {gguf.TENSOR_NAMES[t] for t in gguf.MODEL_TENSORS[arch]}
    reader = gguf.GGUFReader(file)
    stems = {re.sub(r"\.\d+\.", ".{bid}.", t.name).rsplit(".", 1)[0] for t in reader.tensors}
    assert stems <= allowed, stems - allowed
    numbers = sum(int(t.n_elements) for t in reader.tensors)
    assert numbers == sum(p.numel() for p in module.parameters())
    assert gap(load(file), module, torch.tensor([PROMPT])) <= CLOSE


@pytest.mark.parametrize("case", ARCHITECTURES)
def test_a_file_made_by_others_computes_the_same(case, tmp_path):
    adapter = load(write_foreign(case, tmp_path / "m.gguf"))
    assert gap(adapter, live(case)) <= CLOSE
    assert not differences(load(folder_of(case, tmp_path)).spec, adapter.spec)


@pytest.mark.parametrize("case", ARCHITECTURES)
def test_our_file_is_the_one_that_others_make(case, tmp_path):
    """The library's own reader finds its tensors, byte for byte, and its settings."""
    theirs = gguf.GGUFReader(write_foreign(case, tmp_path / "theirs.gguf"))
    export_gguf(load(folder_of(case, tmp_path)), tmp_path / "ours.gguf")
    ours = gguf.GGUFReader(tmp_path / "ours.gguf")
    found = {tensor.name: tensor for tensor in ours.tensors}
    assert set(found) == {tensor.name for tensor in theirs.tensors}
    for tensor in theirs.tensors:
        if tensor.name != "rope_freqs.weight":
            assert np.array_equal(found[tensor.name].data, tensor.data), tensor.name
        assert np.abs(found[tensor.name].data - tensor.data).max() <= 1e-6
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            assert ours.fields[key].contents() == field.contents(), key


ORACLE = ("llama", "smollm2", "qwen2 tied", "qwen2 untied", "mistral wide", "qwen3 128")


@pytest.mark.parametrize("case", ORACLE)
def test_transformers_reads_our_file(case, tmp_path, monkeypatch):
    """Its reader of GGUF; it takes every head of Qwen3 for 128 wide, and knows no scaling."""
    import transformers

    monkeypatch.setitem(CASES, "qwen3 128", ("Qwen3Config", {"head_dim": 128}))
    export_gguf(load(folder_of(case, tmp_path)), tmp_path / "m.gguf")
    module = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, gguf_file="m.gguf", dtype=torch.float32
    )
    assert gap(module, live(case)) <= CLOSE


def test_llama_3_is_known_by_its_factors(tmp_path):
    """A released model's file: factors alone, without a word on how they were made."""
    rope = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0, "low_freq_factor": 1.0}
    rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
    folder = folder_of("llama", tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rope_parameters": rope}))
    adapter = load(folder)
    export_gguf(adapter, tmp_path / "m.gguf")
    head = read_head(tmp_path / "m.gguf")
    arrays = {t.name: t.data for t in gguf.GGUFReader(tmp_path / "m.gguf").tensors}
    keys = {k: v for k, v in head.metadata.items() if not k.startswith("glassformer")}
    finish(gguf.GGUFWriter(tmp_path / "bare.gguf", "llama"), arrays, keys)
    assert load(tmp_path / "bare.gguf").spec.position == adapter.spec.position
    arrays["rope_freqs.weight"] = arrays["rope_freqs.weight"] * np.float32(1.01)
    finish(gguf.GGUFWriter(tmp_path / "odd.gguf", "llama"), arrays, keys)
    with pytest.raises(FileError, match="not Llama 3's"):
        load(tmp_path / "odd.gguf")


# --- there and back -----------------------------------------------------------------------------


@pytest.mark.parametrize("case", ARCHITECTURES)
def test_there_and_back_are_the_same_numbers(case, tmp_path):
    native = load(gf.save(load(folder_of(case, tmp_path)), tmp_path / "native"))
    written = export_gguf(native, tmp_path / "m.gguf")
    assert (written.model_type, written.notes) == (ARCHITECTURES[case], ())
    again = load(gf.save(load(tmp_path / "m.gguf"), tmp_path / "again"))
    assert same_weights(native, again)
    assert gap(native, again) == 0.0
    back = load(export_hf(again, tmp_path / "hf").folder)
    assert same_weights(native, back)


@pytest.mark.parametrize("dtype", ["f16", "q8_0"])
def test_smaller_kinds_round_as_they_must(dtype, tmp_path):
    adapter = load(folder_of("llama", tmp_path))
    written = export_gguf(adapter, tmp_path / "m.gguf", dtype=dtype)
    again = load(tmp_path / "m.gguf")
    others = dict(again.model.named_parameters())
    for name, p in adapter.model.named_parameters():
        error = (p - others[name]).abs()
        if p.ndim == 1:
            assert not error.any()
        elif dtype == "f16" or p.shape[1] % 32:  # half a unit in the last of 11 places
            assert (error <= p.abs() * 2**-11 + 2**-25).all()
        else:  # half a step; the step is rounded to half precision too
            step = p.reshape(-1, 32).abs().amax(1) / 127
            assert (error.reshape(-1, 32) <= (0.5 + 127 * 2**-11) * step[:, None]).all()
    assert written.notes == (
        ("3 tensors whose rows are no multiple of 32 numbers are F16",) if dtype == "q8_0" else ()
    )
    unpacked = ("unpacked to float32: 20 Q8_0",) if dtype == "q8_0" else ()
    assert again.report.notes == unpacked
    assert 0 < gap(adapter, again) < (0.02 if dtype == "f16" else 0.5)  # seen: 0.0077, 0.264


@pytest.mark.parametrize("dtype", ["q4_0", "q4_k"])
def test_four_bits_are_the_librarys(dtype, tmp_path):
    """Q4_0 is what the library packs; of Q4_K it unpacks exactly what packing meant."""
    spec = presets.preset("qwen", d_model=256, d_ff=352, n_heads=4, n_layers=1, vocab_size=97)
    model = gf.build(spec)
    written = gf.export(model, tmp_path / "m.gguf", to="gguf", dtype=dtype)
    again = gf.load(tmp_path / "m.gguf")
    kind = gguf.GGMLQuantizationType[dtype.upper()]
    for name, p in model.named_parameters():
        other = again.get_parameter(name).detach()
        if p.ndim == 1:
            assert torch.equal(p, other)
        elif p.shape[1] % 256 == 0:
            x = p.detach().numpy()
            blocks = pack_q4_k(x) if dtype == "q4_k" else gguf.quants.quantize(x, kind)
            assert np.array_equal(gguf.quants.dequantize(blocks, kind), other.numpy())
            parts = p.detach().reshape(-1, 32)
            error = (parts - other.reshape(-1, 32)).abs().amax(1)
            step = (parts.amax(1) - parts.amin(1)) / 15
            assert (error < 1.2 * step).all()  # seen: 0.90 for q4_k, 0.94 for q4_0
    assert written.notes == (
        ("2 tensors whose rows are no multiple of 256 numbers are Q5_0",) if dtype == "q4_k" else ()
    )


def test_q4_k_finds_numbers_that_it_holds():
    """Numbers on a grid of 8 parts with steps and lows of 6 bits come back exactly."""
    generator = np.random.default_rng(5)
    step = generator.integers(1, 64, (3, 8, 1)).astype(np.float32)
    low = generator.integers(0, 64, (3, 8, 1)).astype(np.float32)
    step[:, 0], low[:, 0] = 63, 63  # so that the coarse steps are found
    q = generator.integers(0, 16, (3, 8, 32)).astype(np.float32)
    q[:, :, 0], q[:, :, 1] = 0, 15
    x = (step * q - 4 * low).reshape(3, 256) / 8
    x[2] = 0
    kind = gguf.GGMLQuantizationType.Q4_K
    assert np.array_equal(gguf.quants.dequantize(pack_q4_k(x), kind), x)
    assert np.isfinite(gguf.quants.dequantize(pack_q4_k(np.full((1, 256), 3.0, "f4")), kind)).all()


def test_what_half_precision_cannot_hold_is_refused(tmp_path):
    adapter = load(folder_of("llama", tmp_path))
    with torch.no_grad():
        adapter.model.get_parameter("blocks.1.ffn.up_proj.weight")[3, 4] = 1e5
    with pytest.raises(InputError, match=r"blk\.1\.ffn_up\.weight holds 100000"):
        export_gguf(adapter, tmp_path / "m.gguf", dtype="f16")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
    export_gguf(adapter, tmp_path / "m.gguf", dtype="q8_0")


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions_go_out_and_come_in(precision, tmp_path):
    adapter = load(folder_of("qwen2 tied", tmp_path), dtype=precision)
    export_gguf(adapter, tmp_path / "m.gguf")
    assert same_weights(adapter, load(tmp_path / "m.gguf", dtype=precision)) or (
        precision == torch.float64
    )
    if precision == torch.bfloat16:  # stored as such, with vectors of float32
        raw = {}
        for name, array in arrays_of(live("qwen2 tied"), "qwen2").items():
            kind = gguf.GGMLQuantizationType.BF16
            packed = gguf.quants.quantize(array, kind)
            raw[name] = array if array.ndim == 1 else (packed, kind)
        keys = dict(read_head(tmp_path / "m.gguf").metadata)
        finish(gguf.GGUFWriter(tmp_path / "b.gguf", "qwen2"), raw, keys)
        again = load(tmp_path / "b.gguf", dtype=torch.bfloat16)
        assert torch.equal(again.model.embed.weight, adapter.model.embed.weight)


PACKED = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K")
PACKED += ("IQ4_NL", "IQ4_XS", "MXFP4")


@pytest.mark.parametrize("name", PACKED)
def test_packed_kinds_are_unpacked(name, tmp_path):
    """Random bytes, small enough that no step is NaN; rows of 256 numbers, as some kinds need."""
    kind = gguf.GGMLQuantizationType[name]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    spec = replace(gf.preset("qwen"), vocab_size=16, d_model=256)
    export_gguf(gf.build(spec), tmp_path / "plain.gguf")
    arrays = {t.name: t.data for t in gguf.GGUFReader(tmp_path / "plain.gguf").tensors}
    data = np.random.default_rng(5).integers(0, 60, (16, 256 // block * size), dtype=np.uint8)
    arrays["token_embd.weight"] = (data, kind)
    keys = dict(read_head(tmp_path / "plain.gguf").metadata)
    finish(gguf.GGUFWriter(tmp_path / "m.gguf", keys["general.architecture"]), arrays, keys)
    found = load(tmp_path / "m.gguf")
    assert torch.equal(found.model.embed.weight, torch.from_numpy(gguf.dequantize(data, kind)))
    assert found.report.notes == (f"unpacked to float32: 1 {name}",)
    assert load(tmp_path / "m.gguf", dtype=torch.float16).model.embed.weight.dtype == torch.float16


@pytest.mark.parametrize("name", PACKED)
def test_every_bit_pattern_is_unpacked_as_the_library_does(name):
    """All 256 values of every byte, infinite steps among them."""
    number = gguf.GGMLQuantizationType[name]
    kind = kind_of(number)
    data = np.random.default_rng(3).integers(0, 256, (512, kind.size), dtype=np.uint8)
    found, _ = unpacked(data.reshape(-1), kind, (512, kind.block))
    with np.errstate(all="ignore"):
        wanted = gguf.dequantize(data, number)
    finite = np.isfinite(wanted)
    assert np.array_equal(np.isfinite(found), finite)
    assert np.array_equal(found[finite], wanted[finite])


def half(data: np.ndarray) -> float:
    return float(data.view("<f2")[0])


def six_bits(scales: np.ndarray, j: int) -> tuple[int, int]:
    """Scale and minimum of part j of Q4_K and Q5_K: twelve bytes hold eight of each."""
    q = scales.astype(int)
    if j < 4:
        return q[j] & 63, q[j + 4] & 63
    return (q[j + 4] & 15) | (q[j - 4] >> 6) << 4, (q[j + 4] >> 4) | (q[j] >> 6) << 4


def one_number(name: str, block: np.ndarray, i: int) -> float:
    """Number i of a block, by the layout that ggml-quants.c describes, bit by bit."""
    levels = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
    fp4 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
    b = block.astype(int)
    match name:
        case "IQ4_NL":
            nibble = b[2 + i % 16] >> 4 * (i // 16) & 15
            return half(block[:2]) * levels[nibble]
        case "MXFP4":
            nibble = b[1 + i % 16] >> 4 * (i // 16) & 15
            return (-1) ** (nibble >> 3) * fp4[nibble & 7] * 2.0 ** (b[0] - 127)
        case "Q4_K" | "Q5_K":
            low = 16 if name == "Q4_K" else 48
            part, column = i // 32, i % 32
            q = b[low + 32 * (part // 2) + column] >> 4 * (part % 2) & 15
            if name == "Q5_K":
                q += (b[16 + column] >> part & 1) << 4
            scale, least = six_bits(block[4:16], part)
            d, m = np.float32(half(block[:2])), np.float32(half(block[2:4]))
            return float(d * np.float32(scale) * np.float32(q) - m * np.float32(least))
        case "Q6_K":
            half_of, place = i // 128, i % 128
            part, column = place // 32, place % 32
            q = b[64 * half_of + 32 * (part % 2) + column] >> 4 * (part // 2) & 15
            q |= (b[128 + 32 * half_of + column] >> 2 * part & 3) << 4
            scale = block[192:208].view(np.int8)[8 * half_of + 2 * part + column // 16]
            return float(np.float32(half(block[208:])) * np.float32(scale) * np.float32(q - 32))
        case "Q3_K":
            half_of, place = i // 128, i % 128
            part, column = place // 32, place % 32
            q = b[32 + 32 * half_of + column] >> 2 * part & 3
            q -= 0 if b[column] >> (4 * half_of + part) & 1 else 4
            j = i // 16
            scale = b[96 + j % 8] >> 4 * (j // 8) & 15
            scale |= (b[104 + j % 4] >> 2 * (j // 4) & 3) << 4
            return float(np.float32(half(block[108:])) * np.float32(scale - 32) * np.float32(q))


@pytest.mark.parametrize("name", ["Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "MXFP4"])
def test_packed_kinds_are_what_their_bits_mean(name):
    """Against the layout written out here, bit for bit."""
    kind = kind_of(gguf.GGMLQuantizationType[name])
    data = np.random.default_rng(11).integers(0, 256, (3, kind.size), dtype=np.uint8)
    for place in {"Q6_K": (208,), "Q3_K": (108,), "MXFP4": ()}.get(name, (0, 2)):
        data[:, place : place + 2] = np.frombuffer(np.float16(0.37).tobytes(), np.uint8)
    if name == "MXFP4":
        data[:, 0] = (120, 127, 131)
    found, _ = unpacked(data.reshape(-1), kind, (3, kind.block))
    wanted = [[one_number(name, block, i) for i in range(kind.block)] for block in data]
    assert np.array_equal(found, np.array(wanted, dtype=np.float32))


# --- the command, refusals ----------------------------------------------------------------------


def glass(*words: object):
    return CliRunner().invoke(app, [str(word) for word in words])


def test_the_command_goes_both_ways(tmp_path):
    folder, file = folder_of("qwen2 tied", tmp_path), tmp_path / "m.gguf"
    there = glass("convert", folder, file, "--to", "gguf", "--dtype", "q8_0", "--json")
    assert there.exit_code == 0, there.output
    found = json.loads(there.stdout)
    assert (found["model_type"], found["dtype"]) == ("qwen2", "q8_0")
    back = glass("convert", file, tmp_path / "native", "--to", "native")
    assert "unpacked to float32: 19 Q8_0" in back.stderr, back.output
    assert same_weights(load(file), load(tmp_path / "native"))
    assert glass("convert", file, tmp_path / "hf", "--to", "hf").exit_code == 0
    assert same_weights(load(file), load(tmp_path / "hf"))
    rows = glass("verify", file, "--only", "causality", "--json")
    assert rows.exit_code == 0, rows.output
    assert json.loads(rows.stdout)["passed"] >= 1


#: Presets that llama.cpp has an architecture for.
WRITTEN = ("modern-lm", "neox", "qwen")


@pytest.mark.parametrize("name", sorted(presets.PRESETS))
def test_every_preset_is_written_or_refused_by_name(name, tmp_path):
    model = gf.build(presets.preset(name))
    file = tmp_path / "m.gguf"
    if name in WRITTEN:
        export_gguf(model, file, dtype="f32")
        assert differences(load(file).spec, model.spec) == []
    else:
        with pytest.raises(InputError, match="no GGUF architecture") as error:
            export_gguf(model, file, dtype="f32")
        assert "nearest" in error.value.where


def test_what_cannot_be_said_is_refused(tmp_path):
    for case, said in {
        "qwen2 window": "sliding window",
        "qwen3 bias": "attention.bias: all here, none there",
        "mistral": "sliding window",
    }.items():
        folder = folder_of(case, tmp_path / case.replace(" ", "-"))
        with pytest.raises(InputError, match="no GGUF architecture") as error:
            export_gguf(load(folder), tmp_path / "m.gguf")
        assert said in error.value.where
    adapter = load(folder_of("llama", tmp_path))
    with pytest.raises(InputError, match=r"does not end in \.gguf"):
        export_gguf(adapter, tmp_path / "m")
    with pytest.raises(InputError, match="dtype"):
        export_gguf(adapter, tmp_path / "m.gguf", dtype="q3_k")
    export_gguf(adapter, tmp_path / "m.gguf")
    with pytest.raises(InputError, match="exists"):
        export_gguf(adapter, tmp_path / "m.gguf")
    with pytest.raises(InputError, match="transformers opens folders"):
        load(tmp_path / "m.gguf", reference=True)
    with pytest.raises(InputError, match="there is no file"):
        load(tmp_path / "none.gguf")
    result = glass("convert", tmp_path / "m.gguf", tmp_path / "x", "--to", "hf", "--dtype", "f16")
    assert "--dtype does not go with --to hf" in result.exception.what


def test_the_usual_kinds_are_the_librarys():
    for number, kind in USUAL.items():
        known = gguf.GGMLQuantizationType(number)
        assert (kind.name, (kind.block, kind.size)) == (known.name, gguf.GGML_QUANT_SIZES[known])


def test_without_the_library_its_extra_is_named(tmp_path, monkeypatch):
    adapter = load(folder_of("llama", tmp_path))
    export_gguf(adapter, tmp_path / "m.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    kind_of.cache_clear()
    load(tmp_path / "m.gguf")  # the usual kinds are read without it
    for use in (
        lambda: kind_of(gguf.GGMLQuantizationType.Q2_K),
        lambda: export_gguf(adapter, tmp_path / "n.gguf"),
    ):
        with pytest.raises(MachineError) as error:
            use()
        assert "pip install gguf" in error.value.hint


@pytest.mark.parametrize("number", [1e-6, 1e-5, 5e5, 1e6, 0.1, 1 / 3, 0.0, -2.5, 3.4e38, 1e-45])
def test_the_shortest_decimal_is_the_same_number(number):
    assert single(shortest(single(number))) == single(number)
    assert shortest(single(number)) == number or number in (1 / 3, 1e-45)
