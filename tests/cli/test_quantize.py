"""`glass quantize`: the folder that every command takes, the comparison, and what is refused."""

import argparse
import json
from types import SimpleNamespace

import bench.quant as bench_quant
import pytest
import torch
from typer.testing import CliRunner

import glassformer as gf
from glassformer.adapters.load import load_model
from glassformer.cli.main import app
from glassformer.lab import quantize as quantize_module
from glassformer.lab.measure import precision
from glassformer.lab.quantize import (
    FEW_CALIBRATING,
    Wish,
    _chosen,
    _warnings,
    _without_text,
    of_text,
    quantize_folder,
    tokens_of,
)
from glassformer.quant.contents import is_model_quantized, quantization_report
from glassformer.quant.convert import gptq_seconds
from glassformer.spec.errors import FileError, InputError
from glassformer.spec.quantization import quant_spec
from glassformer.store.checkpoint import load_quantized

pytestmark = pytest.mark.filterwarnings(
    "ignore::glassformer.quant.backends.choose.SlowQuantization"
)


@pytest.fixture(autouse=True)
def timed_once(monkeypatch):
    """Speeds are of one round instead of several: what is printed is the subject, not how fast."""
    monkeypatch.setattr(precision, "ROUNDS", 1)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A language model and an encoder-decoder, hardly trained."""
    place = tmp_path_factory.mktemp("runs")
    text = place / "corpus.txt"
    text.write_text("the quick brown fox jumps over the lazy dog again and again\n" * 300)
    short = ["train.batch_size=8", "train.evaluate_every=3"]
    task = [f"task.path={text}", "task.vocab_size=256", "task.length=16"]
    gf.train(
        "text",
        steps=3,
        runs=place,
        overrides=[*short, *task, "model.decoder.layers.block.ffn.d_ff=192"],
    )
    gf.train("reverse", steps=3, runs=place, overrides=[*short, "task.examples=300"])
    return place


def glass(runs, *words):
    result = CliRunner().invoke(app, [*words, "--runs", str(runs)])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.stdout


def test_the_folder_is_a_model_for_every_command(runs):
    found = json.loads(glass(runs, "quantize", "text", "--bits", "4", "--json"))
    assert found["folder"] == str(runs / "text-int4")
    before, after = found["disk"]
    assert after < 0.5 * before and found["resident"][1] < found["resident"][0]
    agreement = found["agreement"]
    assert agreement["top1"] > 0.5 and agreement["full_to_small"]["mean"] >= 0
    worse, better = agreement["perplexity"][1], agreement["perplexity"][0]
    assert agreement["change"] == pytest.approx(worse / better - 1, abs=1e-9)
    assert agreement["change_error"] > 0 and agreement["examples"] > 1
    assert {"worst", "example", "position"} <= set(agreement["small_to_full"])
    assert found["prefill"]["ratio"] > 0 and found["decode"]["ratio"] > 0 and found["layers"]
    assert set(found["operands"]) == {"weights", "activations", "head"} and "outliers" in found
    assert found["operands"]["weights"] > found["operands"]["activations"] > 0
    assert found["quantized_layers"] == sum(found["schemes"].values()) >= len(found["layers"])
    evaluated = json.loads(glass(runs, "evaluate", "text-int4", "--json"))
    plain = json.loads(glass(runs, "evaluate", "text", "--json"))
    assert abs(evaluated["loss"] - plain["loss"]) < 0.2
    said = json.loads(glass(runs, "generate", "text-int4", "the quick", "--max-new", "4", "--json"))
    assert len(said["tokens"]) <= 4
    result = CliRunner().invoke(app, ["verify", str(runs / "text-int4"), "--only", "quantization"])
    assert result.exit_code == 0 and "5 passed, 0 failed" in result.stdout
    again = gf.compare_precision(runs / "text", runs / "text-int4")
    assert again.disk == tuple(found["disk"]) and again.resident == tuple(found["resident"])
    assert dict(again.layers) == pytest.approx(dict(map(tuple, found["layers"])), rel=0.02)
    assert again.agreement.perplexity == pytest.approx(agreement["perplexity"], rel=1e-6)
    assert str(again).splitlines()[1].startswith("bytes on disk")
    back = runs / "text-back"
    glass(runs, "quantize", "text-int4", "--dequantize", "--out", str(back))
    model = load_model(back)
    assert not is_model_quantized(model)
    tokens = torch.tensor([[1, 2, 3]])
    small = gf.load(runs / "text-int4").model
    expected = small(tokens)["next"].norm()
    assert (model(tokens)["next"] - small(tokens)["next"]).norm() < 0.05 * expected


def test_a_scheme_by_name_goes_through_every_command(runs):
    found = json.loads(glass(runs, "quantize", "text", "--scheme", "fp8", "--json"))
    assert found["folder"] == str(runs / "text-fp8") and found["backends"] == ["reference"]
    assert found["disk"][1] < 0.4 * found["disk"][0]
    assert found["agreement"]["top1"] > 0.8
    evaluated = json.loads(glass(runs, "evaluate", "text-fp8", "--json"))
    plain = json.loads(glass(runs, "evaluate", "text", "--json"))
    assert abs(evaluated["loss"] - plain["loss"]) < 0.02
    made = json.loads(glass(runs, "generate", "text-fp8", "the quick", "--max-new", "4", "--json"))
    assert len(made["tokens"]) <= 4
    result = CliRunner().invoke(app, ["verify", str(runs / "text-fp8"), "--only", "quantization"])
    # No backend but the reference runs it, so there is nothing to compare that row with.
    assert result.exit_code == 0 and "4 passed, 0 failed" in result.stdout
    gptq = ("--scheme", "fp8", "--method", "gptq", "--out", str(runs / "fp8-gptq"))
    assert "fp8 by gptq" in glass(runs, "quantize", "text", *gptq)
    assert quantization_report(load_model(runs / "fp8-gptq")).bits == 8


def test_bits_may_be_a_mean(runs):
    found = json.loads(glass(runs, "quantize", "text", "--bits", "5", "--json"))
    assert found["folder"] == str(runs / "text-int5")
    report = quantization_report(load_model(runs / "text-int5"))
    assert found["wider"] == [
        path for path, layer in report.layers.items() if layer.bits == 8 and "blocks." in path
    ]
    assert 0 < len(found["wider"]) < len(report.layers) - 1
    words = ("--bits", "5", "--no-smooth", "--out", str(runs / "rough"))
    assert "8 bits, where 4 cost most: blocks." in glass(runs, "quantize", "text", *words)


def test_people_read_a_table_that_says_what_is_slower(runs):
    said = glass(runs, "quantize", "reverse", "--bits", "8", "--out", str(runs / "small-reverse"))
    for words in (
        "bytes on disk",
        "perplexity",
        " ± ",
        "decode tokens/s",
        "divergence",
        "divergence, by cause",
        "worst layers",
    ):
        assert words in said
    assert glass(runs, "evaluate", "small-reverse").startswith("test")


def test_a_text_calibrates_and_training_goes_on(runs):
    words = ("quantize", "text", "--bits", "4", "--json", "--calibrate", str(runs / "corpus.txt"))
    glass(runs, *words, "--out", str(runs / "by-gptq"))
    methods = {
        layer.method for layer in quantization_report(load_model(runs / "by-gptq")).layers.values()
    }
    assert methods == {"gptq"}
    glass(runs, "quantize", "text", "--bits", "4", "--qat", "2", "--out", str(runs / "by-qat"))
    assert quantization_report(load_model(runs / "by-qat")).mode == "qat"


@pytest.mark.parametrize("method", ["absmax", "gptq"])
def test_a_table_can_be_untied(runs, tmp_path, method):
    words = ("text", "--tied", "untie", "--method", method, "--out", str(tmp_path / "untied"))
    found = json.loads(glass(runs, "quantize", *words, "--json"))
    assert found["agreement"]["top1"] > 0.9
    model = load_model(tmp_path / "untied")
    assert not model.spec.heads[0].tied and "heads.next" in quantization_report(model).layers
    assert "embed" not in quantization_report(model).layers


def test_auto_keeps_float_where_that_is_faster(runs):
    words = ("quantize", "text", "--auto", "--json", "--out", str(runs / "by-clock"))
    result = CliRunner().invoke(app, [*words, "--runs", str(runs)])
    if result.exception is not None:  # on this machine float may win everywhere, at such a size
        assert "float is faster for every layer" in str(result.exception)
        return
    found = json.loads(result.stdout)
    assert found["timings"] and set(found["kept_float"]) == {
        t["path"] for t in found["timings"] if t["float_ms"] <= t["quantized_ms"]
    }


def test_grids_are_found_by_gptq_where_there_is_enough_text(runs, tmp_path):
    methods = {}
    four = ["--bits", "4"]
    ways = ([], ["--method", "mse"], ["--no-smooth"], four, [*four, "--no-smooth"])
    for number, words in enumerate(ways):
        out = ("--out", str(tmp_path / str(number)))
        found = json.loads(glass(runs, "quantize", "text", *words, *out, "--json"))
        methods[tuple(words)] = found["method"]
        assert found["narrowed"] == ""
    assert list(methods.values()) == ["mse", "mse", "absmax", "gptq", "mse"]
    few = _chosen(Wish(spec=quant_spec(bits=4)), FEW_CALIBRATING - 1)
    assert few.resolved_method == "mse"  # GPTQ would fit what little it has seen


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--bits", "3"], "not from 4 to 8"),
        (["--head-bits", "5"], "head_bits 5 is neither 8 nor 4"),
        (["--bits", "4.5", "--qat", "2"], "trains at one number of bits"),
        (["--bits", "4.5", "--scheme", "int4"], "both given"),
        (["--scheme", "int5"], "no quantization scheme 'int5'"),
        (["--scheme", "fp8", "--bits", "8"], "both given"),
        (["--scheme", "fp8", "--group", "32"], "fp8 has no group"),
        (["--bits", "4", "--group", "48"], "not one of 32, 64, 128"),
        (["--bits", "4", "--group", "128"], "does not divide"),
        (["--method", "awq"], "not one of"),
        (["--tied", "both"], "not one of"),
        (["--qat", "-1"], "negative"),
        (["--qat", "2", "--method", "mse"], "by training"),
        (["--method", "qat"], "--method qat trains"),
        (["--method", "foo"], "--method 'foo' is not one of absmax, gptq, mse"),
        (["--method", "mse", "--calibrate", "x.txt"], "cannot be read"),
        (["--method", "absmax", "--no-smooth", "--calibrate", "x.txt"], "looks at no text"),
        (["--calibrate", "no-such.txt"], "cannot be read"),
        (["--backend", "gpu"], "no backend"),
        (["--dequantize"], "writes a folder"),
    ],
)
def test_bad_wishes_are_refused_and_nothing_is_written(runs, tmp_path, words, said):
    out = tmp_path / "out"
    place = [] if "--dequantize" in words else ["--out", str(out)]
    with pytest.raises(InputError, match=said):
        glass(runs, "quantize", "text", *words, *place)
    assert not out.exists()


def test_what_is_quantized_already_or_there_already_is_refused(runs, tmp_path):
    small = tmp_path / "small"
    glass(runs, "quantize", "text", "--out", str(small))
    with pytest.raises(InputError, match="quantized already"):
        glass(runs, "quantize", str(small), "--out", str(tmp_path / "again"))
    with pytest.raises(InputError, match="exists"):
        glass(runs, "quantize", "text", "--out", str(small))


def test_a_damaged_folder_is_refused_by_name(runs, tmp_path):
    small = tmp_path / "small"
    glass(runs, "quantize", "text", "--out", str(small))
    file = small / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(FileError, match="was changed after it was written"):
        load_quantized(small)


def test_one_call_in_python(runs):
    model = gf.load(runs / "text")
    small = gf.quantize(model, bits=8)
    assert is_model_quantized(small.model) and not is_model_quantized(model.model)
    again = gf.load(gf.save(small, runs / "saved"))
    tokens = torch.tensor([[1, 2, 3]])
    assert torch.equal(again(tokens), small(tokens))
    calibrated = gf.quantize(model.model, bits=4, calibrate=[torch.tensor([[1, 2, 3, 4]])])
    assert {layer.method for layer in quantization_report(calibrated).layers.values()} == {"gptq"}


def test_a_text_counts_for_every_method_that_looks_at_inputs(runs, tmp_path):
    words = ("quantize", "text", "--json", "--calibrate", str(runs / "corpus.txt"))
    for number, (bits, method) in enumerate((("8", "mse"), ("4", "mse"))):
        more = ("--bits", bits, "--method", method, "--out", str(tmp_path / str(number)))
        assert json.loads(glass(runs, *words, *more))["method"] == method
    quick = json.loads(glass(runs, *words, "--out", str(tmp_path / "quick")))
    assert quick["method"] == "mse"
    with pytest.raises(InputError, match="looks at no text"):
        glass(runs, *words, "--method", "absmax", "--no-smooth", "--out", str(tmp_path / "none"))
    batches = [torch.tensor([[1, 2, 3, 4]])]
    for bits, method in ((8, "mse"), (4, "gptq")):
        small = gf.quantize(gf.load(runs / "text").model, bits=bits, calibrate=batches)
        used = {layer.method for layer in quantization_report(small).layers.values()}
        assert used == {method}


def test_gptq_is_announced_and_left_out_where_it_would_take_too_long(runs, tmp_path, monkeypatch):
    def made(name, **given):
        said = []
        wish = Wish(spec=quant_spec(bits=4, **given))
        outcome = quantize_folder(str(runs / "text"), tmp_path / name, wish, say=said.append)
        return outcome.method, said

    method, (said,) = made("soon")
    assert method == "gptq" and said.startswith("GPTQ: about ")
    monkeypatch.setattr(quantize_module, "LONGEST_GPTQ", 0.0)
    method, (said,) = made("late")
    assert method == "mse" and "--method gptq does it all the same" in said
    method, (said,) = made("asked", method="gptq")
    assert method == "gptq" and said.startswith("GPTQ: about ")


def test_the_time_of_gptq_grows_with_its_text_and_its_matrices():
    class Clock:
        """Each piece that is timed takes a second, the larger matrix two, a first pass three."""

        def __init__(self):
            self.calls = 0

        def __call__(self):
            self.calls += 1
            taken = [3.0, 1.0, 1.0, 1.0, 1.0, 2.0, 2.0, 2.0][: (self.calls + 1) // 2]
            return 0.0 if self.calls % 2 or self.calls > 16 else taken[-1]

    batch = torch.tensor([[1, 2, 3, 4]])
    spec = quant_spec(bits=4, method="gptq")
    model = gf.build("core", seed=0).model
    one, three = (gptq_seconds(model, [batch] * n, spec, clock=Clock()) for n in (1, 3))
    assert three - one == pytest.approx(6.0)  # three passes of a second over each batch
    deep = gf.build(gf.override(gf.preset("core"), ["decoder.layers.count=4"]), seed=0).model
    assert gptq_seconds(deep, [batch], spec, clock=Clock()) > one


def test_progress_names_what_begins_and_reaches_the_end(runs, tmp_path):
    seen = []
    wish = Wish(spec=quant_spec(bits=4))
    quantize_folder(
        str(runs / "text"), tmp_path / "small", wish, progress=lambda *p: seen.append(p)
    )
    stages = list(dict.fromkeys(what.partition(":")[0] for what, _, _ in seen))
    assert stages == ["smoothing", "GPTQ", "measuring"]
    for stage in stages:
        counts = [(done, total) for what, done, total in seen if what.startswith(stage)]
        assert counts == sorted(counts) and len({total for _, total in counts}) == 1
        assert all(0 <= done < total for done, total in counts)
    assert ("GPTQ: blocks.1", 1, 3) in seen, seen


def test_a_loss_is_warned_of_and_text_is_named(runs, tmp_path):
    words = tmp_path / "words.txt"
    words.write_text("the quick brown fox jumps over the lazy dog. " * 400)
    out = ("--out", str(runs / "worse"))
    found = json.loads(
        glass(runs, "quantize", "text", "--bits=4", "--text", str(words), "--json", *out)
    )
    assert found["material"] == "the end of words.txt"
    outcome = Wish(spec=quant_spec(bits=4, group=128), smooth=False)
    agreement = SimpleNamespace(change=0.031, change_error=0.002, positions=900)
    said = list(_warnings(outcome, SimpleNamespace(agreement=agreement), 10**6))
    assert said[0] == "measured on 900 positions only: another text may differ much"
    assert said[1].startswith("the perplexity rises by 3.1%; what helps: smoothing")
    assert "--calibrate FILE" in said[1] and "--group 32" in said[1] and "--bits 8" in said[1]
    gptq = Wish(spec=quant_spec(bits=4, method="gptq"))
    agreement.change, agreement.positions = 0.0, 5000
    (few,) = _warnings(gptq, SimpleNamespace(agreement=agreement), 1000)
    assert few.startswith("GPTQ has seen 1,000 tokens")


def test_a_model_of_its_own_is_measured_on_manuals(runs, tmp_path):
    adapter = gf.load(runs / "text")
    material = _without_text(adapter, adapter.get_tokenizer())
    assert material.origin.startswith("Python's manuals")
    assert tokens_of(material.calibrating) > 3000 < tokens_of(material.measuring)
    assert material.measuring[0].tokens.shape[1] <= adapter.model.spec.max_seq_len
    assert _without_text(adapter, None).origin == "sequences drawn from the model itself"


@pytest.mark.parametrize("bos", [None, 5])
def test_windows_of_a_text_begin_as_the_models_texts_do(tmp_path, bos):
    """After BOS where the tokenizer puts one before a text; then its first token is predicted."""
    model = gf.build(gf.preset("core", vocab_size=300, max_seq_len=24), seed=1).model
    (tmp_path / "text").write_text("a text of some hundred letters, " * 40)
    tokenizer = SimpleNamespace(
        encode=lambda text: [10 + i % 287 for i in range(len(text))], bos=bos
    )
    material = of_text(tmp_path / "text", tokenizer, model, length=11)
    (first, *_) = material.calibrating
    assert first.tokens.shape[1] == 11
    if bos is None:
        assert first.tokens[0, :3].tolist() == [10, 11, 12]
        assert first.targets["next"][0, :2].tolist() == [11, 12]
    else:
        assert (first.tokens[:, 0] == bos).all()
        assert first.tokens[0, 1:4].tolist() == [10, 11, 12]
        assert first.targets["next"][0, :2].tolist() == [10, 11]


def test_the_benchmark_measures_a_model_beside_other_formats(runs):
    parser = argparse.ArgumentParser()
    bench_quant.options(parser)
    options = ["--model", str(runs / "text"), "--windows", "16", "--prompts", "2"]
    rows = []
    for only in ("int4 by mse, of weights", "q4_0"):
        asked = parser.parse_args([*options, "--only", only])
        rows += [str(row["name"]) for row in bench_quant.quality(asked)]
    named = [name.partition(":")[0] for name in rows]
    assert named == ["int4 by mse, of weights alone", "llama.cpp's q4_0"]
    assert all(" ± " in name and "KL " in name and "of 2 texts" in name for name in rows)


@torch.no_grad()
def test_a_shuffled_model_is_the_same_function():
    model = gf.build(gf.preset("qwen", n_heads=4, n_kv_heads=2), seed=1).model
    for p in model.parameters():
        p.add_(0.05 * torch.randn(p.shape, generator=torch.Generator().manual_seed(2)))
    tokens = torch.arange(1, 8)[None]
    before, weight = model(tokens)["next"], model.embed.weight.clone()
    bench_quant.shuffle(model)
    assert not torch.equal(model.embed.weight, weight)
    assert torch.allclose(model(tokens)["next"], before, atol=1e-4)
