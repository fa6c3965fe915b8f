"""The page Inspect in Chromium: its numbers are Python's, and every way through it is open."""

import json
import re
from typing import Any

import numpy as np
import pytest
from playwright.sync_api import Page, expect

import glassformer as gf
from glassformer.lens.inspection import Inspection
from tests.browser.conftest import FORMS, Site
from tests.browser.hostile import HOSTILE

DIGITS = "SECOND 7 3 9 SEP"
OWN = f"run=digits&text={DIGITS.replace(' ', '+')}&target=3"


def settled(page: Page, *, after: int = 0) -> int:
    """Wait until the page has drawn again; how often it has by now."""
    page.wait_for_function(
        "n => Number(document.querySelector('.inspect')?.dataset.ready ?? 0) > n"
        " && !document.querySelector('.inspect').classList.contains('busy')",
        arg=after,
    )
    return drawn(page)


def drawn(page: Page) -> int:
    """How often the page has drawn."""
    return int(page.evaluate("document.querySelector('.inspect')?.dataset.ready ?? 0"))


def press(page: Page, key: str) -> None:
    """A key, and what it draws."""
    before = drawn(page)
    page.keyboard.press(key)
    settled(page, after=before)


def text(page: Page, selector: str) -> str:
    """What stands there; a real minus is a hyphen for Python, and quotation marks are plain."""
    found = page.locator(selector).first.inner_text().strip().replace("\N{MINUS SIGN}", "-")
    return re.sub("[\u2018\u2019]", "'", found)


def three(value: float) -> str:
    """A number as the page writes it: three decimals, or two figures where those are 0.000."""
    if value == 0 or abs(value) >= 5e-4:
        return f"{value:.3f}" if value else "0"
    figures, power = f"{value:.1e}".split("e")
    return f"{figures}e{int(power)}"


def nats(page: Page, selector: str) -> float:
    """The number that stands there with its unit."""
    number, unit = text(page, selector).split()
    assert unit == "nats"
    return float(number)


def seen(site: Site, run: str = "digits", **asked: Any) -> Inspection:
    """Python's own look."""
    return gf.load(site.runs / run).inspect(asked.pop("text", DIGITS), **asked)


# --- every theme and width ------------------------------------------------------------------------

STATES = {
    "digits": OWN + "&L=1&H=3",
    "ablated": OWN + "&L=1&H=3&ablate=L1H3,L0H1",
    "side-by-side": OWN + "&L=1&H=0&with=digits@best:int4",
    "difference": OWN + "&L=1&H=0&with=digits@320&view=difference&scale=auto&table=1",
    "snapshot": "run=digits&step=80&L=1&H=0",
    "cross": "run=reverse&kind=cross&L=1&H=2",
    "text": "run=text&L=2&H=mean",
}


@pytest.mark.parametrize(("width", "theme"), FORMS)
def test_every_state_is_accessible_and_fits(open_page, axe, shoot, width, theme):
    page = open_page("inspect?" + STATES["digits"], width=width, theme=theme)
    for name, route in STATES.items():
        before = drawn(page)
        page.evaluate("route => { location.hash = '#/inspect?' + route }", route)
        settled(page, after=before)
        axe(page)
        overflow = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        assert overflow <= 0, f"{name}: the page is {overflow} pixels too wide"
        shoot(page, f"inspect-{name}-{width}-{theme}")


# --- numbers --------------------------------------------------------------------------------------


def test_numbers_are_pythons(open_page, site):
    page = open_page(f"inspect?{OWN}&L=1&H=2&pos=4&table=1")
    settled(page)
    look_ = seen(site, target="3")
    adapter = gf.load(site.runs / "digits")
    assert text(page, "#parameters") == f"{adapter.get_num_parameters():,}"
    assert text(page, "#loss-here") == f"{three(float(look_.losses[4]))} nats"
    assert text(page, "#entropy") == f"{three(float(look_.entropy[4]))} nats"
    assert text(page, ".lens h2 .muted") == f"position 4, token '{look_.words[4]}'"
    assert text(page, "#target") == "3"
    # every cell of the map
    cells = page.locator(".attention table.data tbody td").all_inner_texts()
    expected = [f"{value:.3f}" for value in look_.attention[1, 2].tensor.flatten().tolist()]
    assert cells == expected
    best = int(look_.attention[1, 2].tensor[4].argmax())
    peak = f"{float(look_.attention[1, 2].tensor[4, best]):.3f}"
    words = look_.words
    said = f"'{words[4]}' attends most to '{words[best]}' (position {best}): {peak}"
    assert text(page, "#cell") == said
    # the bars
    rows = page.locator("glass-bars tbody tr").all()
    for row, (_, word, share) in zip(rows, look_.next(4, 8), strict=True):
        assert row.inner_text().split() == [word, three(share)]
    # lens and norms
    lens = page.locator("glass-lens tbody tr").all()
    for row, name, kl in zip(lens, look_.lens.row_names, look_.lens.kl[:, 4].tolist(), strict=True):
        (first, share), *_ = look_.lens.top(4, 1, row=name)
        cells = [cell.strip() for cell in row.inner_text().split("\t")]
        assert cells[:3] == [name, first, f"{share:.2f}"]
        assert cells[5] == three(kl)
    page.locator("glass-norms summary").click()
    norms = page.locator("glass-norms tbody tr").all_inner_texts()
    assert [line.split("\t")[1] for line in norms] == [
        f"{value:.3f}" for value in look_.norms.residual[:, 4].tolist()
    ]


def test_ranking_is_pythons(open_page, site):
    page = open_page(f"inspect?{OWN}")
    settled(page)
    rows = page.locator(".ranking tbody tr").all()
    expected = seen(site, target="3").ranking().rows()
    for row, found in zip(rows, expected, strict=True):
        head, change = row.inner_text().replace("\N{MINUS SIGN}", "-").split()[:2]
        assert (head, change) == (found["head"], f"{found['effect']:+.3f}")


def test_ablation_by_click_and_by_key_is_pythons(open_page, site):
    page = open_page(f"inspect?{OWN}&L=1&H=3")
    settled(page)
    before = drawn(page)
    page.locator("#ablate").click()
    settled(page, after=before)
    one = seen(site, target="3").ablate("L1H3")
    assert text(page, "#loss-before") == three(one.before.loss)
    assert text(page, "#loss-after") == three(one.after.loss)
    assert text(page, "#kl-before") == f"{three(float(one.kl[4]))} nats"
    assert text(page, "glass-bars tbody th") == one.after.next(4, 1)[0][1]
    press(page, "ArrowUp")
    press(page, "x")  # L0H3 as well
    two = seen(site, target="3").ablate("L1H3", "L0H3")
    assert text(page, "#loss-after") == three(two.after.loss)
    expect(page.locator(".head.ablated")).to_have_count(2)
    press(page, "x")
    assert text(page, "#loss-after") == three(one.after.loss)
    expect(page.get_by_role("button", name="Layer 1, head 3, ablated")).to_have_count(1)


def test_an_example_of_the_task_is_the_same_as_its_text(open_page, site):
    for run, route in (("digits", "run=digits&row=7"), ("reverse", "run=reverse&row=7")):
        page = open_page(f"inspect?{route}")
        settled(page)
        given = page.locator("[name=prompt]").input_value()
        target = page.locator("[name=target]").input_value()
        loss = text(page, "#loss" if run == "reverse" else "#loss-here")
        assert loss == f"{three(seen(site, run, text=given, target=target).loss)} nats"


def test_a_pixel_is_the_ramp_of_its_value(open_page, site):
    page = open_page(f"inspect?{OWN}&L=0&H=1")
    settled(page)
    weights = seen(site, target="3").attention[0, 1].tensor
    low, high = np.array([255, 255, 255]), np.array([0x14, 0x25, 0x7A])
    places = [(0, 0), (4, 1), (2, 3)]
    for (i, j), found in zip(places, page.evaluate(PIXELS, [places, 1]), strict=True):
        value = round(float(weights[i, j]) * 255) / 255
        expected = np.rint(low + (high - low) * value**0.5)
        colour = np.array([int(number) for number in found[0].split(",")])
        assert np.abs(colour - expected).max() <= 1, f"cell {i}, {j}"


#: The colours of a square around the middle of each cell.
PIXELS = """([places, side]) => {
  const heat = document.querySelector("glass-heat"), canvas = heat.querySelector("canvas");
  const {data} = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  return places.map(([i, j]) => {
    const {x, y} = heat.place(i, j), found = new Set();
    for (let k = 0; k < side * side; k += 1) {
      const [dx, dy] = [k % side, Math.floor(k / side)];
      const at = 4 * ((Math.floor(y) + dy) * canvas.width + Math.floor(x) + dx);
      found.add(data.slice(at, at + 3).join());
    }
    return [...found];
  });
}"""


def test_masked_cells_are_hatched_not_white(open_page):
    page = open_page("inspect?run=text&L=0&H=0")
    settled(page)
    future, past = page.evaluate(PIXELS, [[(2, 9), (9, 2)], 5])
    assert len(future) == 2  # lines on a ground
    assert len(past) == 1


def test_diff_of_precisions_and_steps_is_pythons(open_page, site):
    page = open_page(f"inspect?{OWN}&L=1&H=0&with=digits@best:int8&view=difference&table=1")
    settled(page)
    ours = gf.load(site.runs / "digits")
    theirs = gf.quantize(ours, bits=8)
    a, b = (model.inspect(DIGITS, target="3") for model in (ours, theirs))
    cells = page.locator(".attention table.data tbody td").all_inner_texts()
    expected = (a.attention[1, 0].tensor - b.attention[1, 0].tensor).flatten().tolist()
    assert [abs(float(cell.replace("\N{MINUS SIGN}", "-"))) for cell in cells] == pytest.approx(
        [abs(float(f"{value:.3f}")) for value in expected], abs=1.01e-3
    )
    assert text(page, "#loss-against") == f"{three(b.loss)} nats"
    before = drawn(page)
    page.get_by_label("Compare with").select_option(label="its step 320")
    settled(page, after=before)
    assert text(page, "#loss-against") == (
        f"{three(gf.load(f'{site.runs}/digits@320').inspect(DIGITS, target='3').loss)} nats"
    )


def test_the_scrubber_moves_through_checkpoints_and_snapshots(open_page, site):
    page = open_page("inspect?run=digits&L=1&H=1&table=1")
    settled(page)
    slider = page.get_by_role("slider", name="Checkpoint")
    slider.focus()
    page.keyboard.press("Home")
    page.wait_for_function(
        "() => document.querySelector('.time output').textContent.includes('snapshot')"
    )
    page.wait_for_function("() => !document.querySelector('.inspect').classList.contains('busy')")
    from glassformer.lens.measure.probes import read_probes

    probes = read_probes(site.runs / "digits/probes/step-000080.safetensors")
    cells = page.locator(".attention table.data tbody td").all_inner_texts()
    assert cells == [f"{value:.3f}" for value in probes.map(0, "L1H1").tensor.flatten().tolist()]
    page.keyboard.press("End")
    page.wait_for_function(
        "() => !document.querySelector('.time output').textContent.includes('snap')"
    )
    page.wait_for_function("() => location.hash.includes('step=480')")


# --- ways through ---------------------------------------------------------------------------------


def test_the_whole_flow_by_keyboard(open_page):
    page = open_page("inspect?run=digits&L=0&H=0")
    settled(page)
    page.keyboard.press("/")
    expect(page.locator("[name=prompt]")).to_be_focused()
    page.keyboard.type("LAST 4 8 1")
    before = drawn(page)
    page.keyboard.press("Enter")
    settled(page, after=before)
    expect(page.locator("glass-tokens .token")).to_have_text(["LAST", "4", "8", "1", "SEP"])
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    page.keyboard.press("Tab")
    for key, expected in (
        ("ArrowLeft", "pos=3"), ("ArrowRight", "pos=4"), ("ArrowDown", "L=1"), ("]", "H=1"),
        ("[", "H=0"), ("x", "ablate=L1H0"), ("a", "H=mean"), ("a", "H=0"), ("t", "table=1"),
    ):  # fmt: skip
        press(page, key)
        assert expected in page.evaluate("location.hash"), key
    page.keyboard.press("?")
    expect(page.get_by_role("dialog")).to_contain_text("ablate this head")
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)


def test_letters_can_be_switched_off(open_page):
    page = open_page("inspect?run=digits")
    settled(page)
    page.keyboard.press("?")
    page.get_by_label("single-letter keys").uncheck()
    page.keyboard.press("Escape")
    page.keyboard.press("x")
    page.wait_for_timeout(200)
    assert "ablate" not in page.evaluate("location.hash")


def test_g_appends_the_likeliest_token(open_page, site):
    page = open_page("inspect?run=text&text=the+gla")
    settled(page)
    likeliest = seen(site, "text", text="the gla").next(None, 1)[0][1]
    press(page, "g")
    assert page.locator("[name=prompt]").input_value() == "the gla" + likeliest


def test_back_returns_and_a_link_restores_the_view(open_page):
    page = open_page(f"inspect?{OWN}&L=1&H=3")
    settled(page)
    first = page.evaluate("location.hash")
    before = drawn(page)
    page.get_by_role("button", name="Layer 0, head 2").click()
    settled(page, after=before)
    press(page, "x")
    link = page.evaluate("location.hash")
    shown = text(page, ".attention"), text(page, "glass-lens"), text(page, ".ranking")
    for _ in range(2):
        before = drawn(page)
        page.go_back()
        settled(page, after=before)
    assert page.evaluate("location.hash") == first
    other = open_page(link.removeprefix("#/"))
    settled(other)
    assert (text(other, ".attention"), text(other, "glass-lens"), text(other, ".ranking")) == shown


def test_the_view_is_copied_as_link_command_and_python(open_page, site, monkeypatch):
    page = open_page(f"inspect?{OWN}&L=1&H=2&pos=4&ablate=L0H1")
    settled(page)
    assert copied(page, "link") == page.url
    command = copied(page, "command")
    assert command == (
        "glass inspect runs/digits 'SECOND 7 3 9 SEP' --target 3 --layer 1 --head 2 --pos 4"
        " --ablate L0H1"
    )
    monkeypatch.chdir(site.runs.parent)
    names = ran(copied(page, "Python"))  # what people will do with it
    assert f"{three(names['seen'].loss)} nats" == text(page, "#loss-here")
    command_runs(command, loss=names["seen"].loss)


def copied(page: Page, kind: str) -> str:
    """What a button of the header puts on the clipboard."""
    page.evaluate("navigator.clipboard.writeText('')")
    page.get_by_role("button", name=kind, exact=True).click()
    page.wait_for_function("async () => await navigator.clipboard.readText() !== ''")
    return page.evaluate("navigator.clipboard.readText()")


def test_fewer_bits_are_copied_as_two_commands(open_page, site, monkeypatch):
    page = open_page(f"inspect?{OWN}&L=1&H=2&precision=int8")
    settled(page)
    quantize, inspect = copied(page, "command").split(" && ")
    monkeypatch.chdir(site.runs.parent)
    loss = nats(page, "#loss-here")
    command_runs(quantize, loss=None)
    command_runs(inspect, loss=loss)


@pytest.mark.parametrize("other", ["digits@best:int4", "digits@320", "digits-seed1"])
def test_a_comparison_is_copied_with_its_numbers(open_page, site, monkeypatch, other):
    page = open_page(f"inspect?{OWN}&L=1&H=0&ablate=L0H1&with={other}&view=difference&table=1")
    settled(page)
    cells = page.locator(".attention table.data tbody td").all_inner_texts()
    told = [float(cell.replace("\N{MINUS SIGN}", "-")) for cell in cells]
    loss, kl = nats(page, "#loss-against"), nats(page, "#kl-against")
    shares = [float(row.inner_text().split()[2]) for row in page.locator("glass-bars tr").all()[1:]]
    monkeypatch.chdir(site.runs.parent)
    *before, inspect = copied(page, "command").split(" && ")
    for command in before:
        command_runs(command, loss=None)
    found = command_runs(f"{inspect} --top {len(shares)}", loss=nats(page, "#loss-here"))
    against = found["against"]
    flat = [value for row in against["difference"] for value in row]
    assert told == [float(f"{value:.3f}") for value in flat]
    assert (loss, kl) == (float(three(against["loss"])), float(three(against["kl"])))
    assert shares == [float(three(value)) for value in against["shares"]]
    names = ran(copied(page, "Python"))
    difference, _, beside = names["shown"]
    assert told == [float(f"{value:.3f}") for value in difference.tensor.flatten().tolist()]
    assert (loss, kl) == (float(three(beside.loss)), float(three(beside.kl)))


def ran(source: str) -> dict[str, Any]:
    """Python as people paste it; `shown` are the values of its lines, as a notebook would show."""
    import ast

    names: dict[str, Any] = {"shown": []}
    for line in ast.parse(source).body:
        if isinstance(line, ast.Expr):
            code = compile(ast.Expression(line.value), "copied", "eval")
            names["shown"].append(eval(code, names))
        else:
            exec(compile(ast.Module([line], []), "copied", "exec"), names)
    return names


def test_a_snapshot_is_copied_as_python_alone(open_page, site, monkeypatch):
    for head in ("1", "mean"):
        page = open_page(f"inspect?run=digits&step=80&L=1&H={head}&table=1")
        settled(page)
        cells = page.locator(".attention table.data tbody td").all_inner_texts()
        monkeypatch.chdir(site.runs.parent)
        heat, top = ran(copied(page, "Python"))["shown"]
        assert cells == [f"{value:.3f}" for value in heat.tensor.flatten().tolist()]
        assert text(page, "glass-bars tbody th") == top[0][0]
        page.get_by_role("button", name="command", exact=True).click()
        expect(page.locator("#toast")).to_contain_text("No command gives what is shown here")


def test_texts_are_copied_as_a_shell_reads_them(open_page):
    import shlex

    page = open_page("inspect?run=digits")
    made = """text => import("/static/js/inspect-commands.js")
      .then(({command}) => command("glass inspect it", text, "--pos 1"))"""
    for prompt in (
        "plain",
        "two words",
        "it's",
        "-dash first",
        "--help",
        "$HOME `x` \\n",
        "",
        "a\nb",
    ):
        words = shlex.split(page.evaluate(made, prompt))
        dashes = ["--"] if prompt.startswith("-") else []
        where = words.index(prompt)
        assert words[:3] == ["glass", "inspect", "it"]
        assert words[where - len(dashes) : where] == dashes
        assert words[words.index("--pos") + 1] == "1"
        assert where == (3 if not dashes else len(words) - 1)


def command_runs(command: str, *, loss: float | None) -> Any:
    """The copied command is one that `glass` takes; of a look, its loss is the page's."""
    import shlex

    from typer.testing import CliRunner

    from glassformer.cli.main import app

    first, *words = shlex.split(command)
    assert first == "glass"
    result = CliRunner().invoke(app, [words[0], "--json", *words[1:]])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert loss is None or found["loss"] == pytest.approx(loss, abs=5.1e-4)
    return found


def test_hovering_links_tokens_rows_and_lens(open_page):
    page = open_page(f"inspect?{OWN}&L=1&H=2")
    settled(page)
    at = page.evaluate("document.querySelector('glass-heat').place(2, 1)")
    page.locator("glass-heat canvas").hover(position=at)
    expect(page.locator(".token.over")).to_have_text(["7", "3"])
    expect(page.locator("#cell")).to_have_text(
        re.compile(r".3. \(position 2\) to .7. \(position 1\): 0\.")
    )
    page.locator("glass-lens tr[data-layer='1']").first.hover()
    expect(page.locator(".layer.over")).to_have_attribute("data-layer", "1")


def test_errors_are_told_in_three_parts(open_page, watch):
    watch.expected.add(400)
    page = open_page("inspect?run=digits&text=MEDIAN+7+3")
    expect(page.get_by_role("alert")).to_contain_text("'MEDIAN' is not in the vocabulary")
    expect(page.get_by_role("alert")).to_contain_text("token 1 of 3")


def test_fifty_hostile_prompts_are_inert(open_page, site, watch):
    watch.expected.update((400, 413))
    page = open_page("inspect?run=text&text=the")
    settled(page)
    page.on("dialog", lambda dialog: watch.faults.append(f"a dialog opened: {dialog.message}"))
    nodes = page.evaluate("document.querySelectorAll('script, iframe, object, base, meta').length")
    for prompt in HOSTILE:
        page.evaluate(
            "text => { location.hash = '#/inspect?' + new URLSearchParams({run: 'text', text}) }",
            prompt,
        )
        page.wait_for_timeout(30)
    page.wait_for_function("() => !document.querySelector('.inspect').classList.contains('busy')")
    counted = "document.querySelectorAll('script, iframe, object, base, meta').length"
    assert page.evaluate(counted) == nodes
    assert page.evaluate("document.querySelectorAll('[onerror], [onload], img').length") == 0
    assert len(HOSTILE) == 50


# --- size -----------------------------------------------------------------------------------------


def test_512_tokens_open_and_one_head_is_fetched_at_a_time(open_page, site, watch, shoot):
    page = open_page("inspect?run=long&L=2&H=3")
    settled(page)
    expect(page.locator("glass-tokens .token")).to_have_count(512)
    maps = [path for path in watch.paths() if "/attention?" in path]
    assert len(maps) == 1
    assert "layer=2&head=3" in maps[0]
    assert sum("/thumbnails" in path for path in watch.paths()) == 1
    press(page, "]")
    maps = [path for path in watch.paths() if "/attention?" in path]
    assert len(maps) == 2
    assert "layer=2&head=4" in maps[1]
    shoot(page, "inspect-long-1320-light")
    cut = """strip => {
        const {top, bottom} = strip.getBoundingClientRect();
        return [...strip.children].map(each => each.getBoundingClientRect())
            .filter(each => each.top < top && each.bottom > top).length;
    }"""
    for position in (511, 250):
        before = drawn(page)
        page.evaluate("route => { location.hash = route }", f"#/inspect?run=long&pos={position}")
        settled(page, after=before)
        assert page.locator("glass-tokens .token[aria-pressed=true]").inner_text()
        assert page.locator("glass-tokens").last.evaluate(cut) == 0, "no row of tokens is cut"


def test_a_small_map_travels_in_float32_and_a_large_one_in_float16(site):
    from glassformer.web.app.query import Query
    from glassformer.web.app.workspace import Workspace
    from glassformer.web.pages import inspect

    lab = Workspace(site.runs)
    for run, dtype in (("text", np.float32), ("long", np.float16)):
        key = inspect.inspect(Query(body={"run": run, "split": "val", "row": 0}), lab)["key"]
        options = {"kind": "self", "layer": "1", "head": "0"}
        sent = inspect.attention(Query(path={"key": key}, options=options), lab)
        values = np.frombuffer(sent.data, dtype).reshape(sent.shape)
        assert sent.dtype == np.dtype(dtype).name
        adapter = gf.load(site.runs / run)
        from glassformer.web.pages.inspect import example_of, task_of

        own = gf.inspect(adapter.model, example_of(task_of(run, lab), "val", 0).batch).attention[
            1, 0
        ]
        assert np.isnan(values).tolist() == (~own.allowed).tolist()
        worst = np.nanmax(np.abs(values.astype(np.float64) - own.tensor.numpy()))
        assert worst <= (0.0 if dtype is np.float32 else 2.0**-11)
