"""The picture of a model: every parameter in it once, boxes apart, words never markup."""

import json
import xml.etree.ElementTree as ElementTree
from dataclasses import replace

import pytest
from hypothesis import given, settings
from typer.testing import CliRunner

import glassformer as gf
from glassformer.cli.main import app
from glassformer.lens.show.diagram import Diagram, diagram
from glassformer.lens.show.outline import model_lines, outline
from glassformer.spec.errors import InputError
from glassformer.spec.manifest import count_parameters, manifest
from glassformer.spec.model import ClassHead, NextHead
from glassformer.spec.presets import PRESETS, preset
from tests.strategies import model_specs

SVG = "{http://www.w3.org/2000/svg}"
LAYOUTS = ("wide", "narrow")


def parts_of(picture: Diagram) -> list[ElementTree.Element]:
    root = ElementTree.fromstring(picture.svg())
    return [each for each in root.iter(f"{SVG}g") if "data-part" in each.attrib]


def box(part: ElementTree.Element) -> tuple[float, float, float, float]:
    rect = part.find(f"{SVG}rect[@class='box']")
    assert rect is not None
    x, y, width, height = (float(rect.get(name, "")) for name in ("x", "y", "width", "height"))
    return x, y, x + width, y + height


@pytest.mark.parametrize("name", PRESETS)
def test_every_parameter_is_in_one_part(name):
    spec = preset(name)
    columns = outline(spec, every_block=True)
    names = [p.name for column in columns for part in column.parts() for p in part.parameters]
    assert sorted(names) == sorted(p.name for p in manifest(spec))
    counted = sum(part.count for column in columns for part in column.parts())
    assert counted == count_parameters(spec)
    folded = 0
    for column in outline(spec):
        folded += sum(part.count for part in (*column.before, *column.after))
        folded += sum(layer.count * layer.parameters for layer in column.layers)
    assert folded == counted


@given(model_specs())
@settings(max_examples=40)
def test_any_model_has_words_and_every_parameter(spec):
    parts = [part for column in outline(spec, every_block=True) for part in column.parts()]
    assert sorted(p.name for part in parts for p in part.parameters) == sorted(
        p.name for p in manifest(spec)
    )
    first, second = model_lines(spec)
    assert f"{count_parameters(spec):,} parameters" in first and second.startswith("parts: ")


@pytest.mark.parametrize(
    ("placement", "words", "drawn"),
    [
        ("pre", "before each part", "nanf"),
        ("post", "after each part", "anfn"),
        ("sandwich", "before and after each part", "nannfn"),
        ("output", "on each part's output", "anfn"),
        ("parallel", "before each of two parallel parts", "nanf"),
        ("parallel_shared", "before two parallel parts", "naf"),
        ("pre_ffn", "before the feed-forward", "anf"),
    ],
)
def test_where_the_norms_are_is_read_off_the_program(placement, words, drawn):
    spec = preset("core")
    run = spec.decoder.layers[0]
    block = replace(run.block, placement=placement)
    spec = replace(spec, decoder=replace(spec.decoder, layers=(replace(run, block=block),)))
    assert f"Norm {words}, " in model_lines(spec)[1]
    layer = outline(spec)[0].layers[0]
    assert "".join(part.kind[0] for part in layer.parts) == drawn
    assert ("both parts read its input" in diagram(spec).svg()) == placement.startswith("parallel")
    on_stream = [part.on_stream for part in layer.parts if part.kind == "norm"]
    assert all(on_stream) if placement == "post" else not any(on_stream)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", PRESETS)
def test_boxes_are_apart_and_inside(name, layout):
    picture = diagram(preset(name), layout=layout)
    root = ElementTree.fromstring(picture.svg())
    _, _, width, height = map(float, root.get("viewBox", "").split())
    boxes = [box(part) for part in parts_of(picture)]
    keys = [part.get("data-part") for part in parts_of(picture)]
    assert len(set(keys)) == len(keys)
    for number, (left, top, right, bottom) in enumerate(boxes):
        assert 0 <= left < right <= width and 0 <= top < bottom <= height
        for x0, y0, x1, y1 in boxes[:number]:
            assert right <= x0 or x1 <= left or bottom <= y0 or y1 <= top


def test_equal_blocks_are_drawn_once_unless_asked():
    spec = preset("qwen", n_layers=12)
    once, every = diagram(spec), diagram(spec, every_block=True)
    attentions = [
        sum("attn" in (part.get("class") or "") for part in parts_of(each))
        for each in (once, every)
    ]
    assert attentions == [1, 12]
    assert "Block × 12" in once.svg().replace("  ", " ") and "layers 0 to 11" in once.svg()


def test_a_tied_head_counts_nothing_and_is_joined_to_the_table():
    tied, free = (replace(preset("qwen"), heads=(NextHead(tied=tie),)) for tie in (True, False))
    assert 'class="tie"' in diagram(tied).svg() and 'class="tie"' not in diagram(free).svg()
    heads = [outline(spec)[0].after[-1].count for spec in (tied, free)]
    assert heads == [0, free.vocab_size * free.d_model]


def test_cross_attention_reads_the_encoder():
    for layout in LAYOUTS:
        assert 'class="wire cross"' in diagram(preset("seq2seq"), layout=layout).svg()
    assert 'class="wire cross"' not in diagram(preset("qwen")).svg()


def test_several_heads_read_one_stream():
    spec = replace(preset("qwen"), heads=(NextHead(), ClassHead(num_classes=5)))
    keys = [part.get("data-part") for part in parts_of(diagram(spec))]
    assert keys[-2:] == ["heads.next", "heads.class"]


def test_a_model_is_drawn_as_its_spec():
    spec = preset("digits")
    model = gf.build(spec, seed=0)
    assert gf.diagram(model).svg() == gf.diagram(spec).svg() == gf.diagram(spec)._repr_svg_()
    with pytest.raises(InputError, match="int has no spec"):
        gf.diagram(3)
    with pytest.raises(InputError, match="layout"):
        gf.diagram(spec, layout="tall")


def test_words_are_never_markup():
    picture = diagram(preset("digits"), title='<script>"x"</script>')
    assert "<script" not in picture.svg()
    assert ElementTree.fromstring(picture.svg()).tag == f"{SVG}svg"


def test_the_tree_is_the_picture():
    picture = diagram(preset("digits"))
    tag, props, *inside = json.loads(json.dumps(picture.element().tree()))
    assert tag == "svg" and props["class"] == "glass-diagram"
    groups = [each for each in inside if isinstance(each, list) and "data-part" in each[1]]
    assert len(groups) == len(parts_of(picture))


def test_it_prints_and_saves(tmp_path):
    picture = diagram(preset("moe"), title="mine")
    assert str(picture).startswith("mine: 1,168,320 parameters")
    assert "Mixture of experts" in repr(picture)
    path = picture.save(tmp_path / "mine.svg")
    assert path.read_text("utf-8").startswith("<svg ")
    with pytest.raises(InputError, match="cannot save a diagram"):
        picture.save(tmp_path / "mine.png")
    with pytest.raises(InputError, match="cannot write"):
        picture.save(tmp_path / "none" / "mine.svg")


def test_the_command_draws_and_lists(tmp_path):
    def glass(*words):
        return CliRunner().invoke(app, ["show", *words])

    listed = glass("qwen", "--diagram")
    assert listed.stdout.strip() == str(diagram(preset("qwen"), title="qwen"))
    out = tmp_path / "x.svg"
    done = glass("qwen", "decoder.layers.count=5", "--every-block", "--narrow", "-o", str(out))
    assert done.exit_code == 0 and done.stdout == ""
    wanted = diagram(preset("qwen", n_layers=5), layout="narrow", every_block=True, title="qwen")
    assert out.read_text("utf-8") == wanted.svg() + "\n"
    assert "does not end in .svg" in str(glass("qwen", "--diagram", "-o", "x.png").exception)
