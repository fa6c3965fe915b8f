"""`python -m pages WHAT [NAME ...]`, from the repository's root: what docs/ shows of us."""

import argparse
from pathlib import Path

from pages import animation, notebooks, options, quotes, screens
from pages.figures import FIGURES, PICTURES, draw
from pages.quotes import ROOT


def main() -> None:
    """Write what was asked for, and tell which files changed."""
    known = [*PICTURES, *FIGURES]
    parser = argparse.ArgumentParser(prog="python -m pages", description=__doc__)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("quotes", help="write every quote of docs/ as its source is now")
    verbs.add_parser("options", help="write every table of options as its spec is now")
    books = verbs.add_parser("notebooks", help="write a notebook for each chapter of docs/learn")
    books.add_argument("--execute", action="store_true", help="run every cell; about a minute")
    verbs.add_parser("animation", help="train a model and draw it learning; about two minutes")
    figures = verbs.add_parser("figures", help="draw the figures of docs/learn; about two minutes")
    figures.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}")
    verbs.add_parser("screens", help="pictures of every page of the explorer after every other one")
    shots = verbs.add_parser("shots", help="take the pictures of docs/images; about two minutes")
    shots.add_argument("--runs", type=Path, help="a folder with a trained run `reverse`")
    asked = parser.parse_args()
    if asked.verb == "screens":
        found = screens.draw()
        for view, flaws in found.items():
            print("\n".join([view, *(f"  {flaw}" for flaw in flaws)]))
        print(f"{screens.FOLDER.relative_to(ROOT)}: {len(found)} views with a flaw")
        raise SystemExit(bool(found))
    if asked.verb == "shots":
        for path, caption in screens.shoot(asked.runs):
            _tell(path)
            print(caption, end="\n" if caption else "")
        return
    if asked.verb == "animation":
        _tell(animation.draw())
        return
    if asked.verb == "notebooks" and asked.execute:
        failed = 0
        for done in notebooks.execute_all():
            print(done, flush=True)
            failed += bool(done.failure)
        raise SystemExit(bool(failed))
    if asked.verb != "figures":
        writers = {"quotes": quotes, "options": options, "notebooks": notebooks}
        changed = writers[asked.verb].refresh()
        print("\n".join(str(path.relative_to(ROOT)) for path in changed) or "nothing has changed")
        return
    unknown = [name for name in asked.names if name not in known]
    if unknown:
        parser.error(f"no figure '{unknown[0]}'; there are {', '.join(known)}")
    for name in asked.names or known:
        _tell(draw(name))


def _tell(path: Path) -> None:
    print(f"{path.relative_to(ROOT)}  {path.stat().st_size / 1000:.0f} kB", flush=True)


if __name__ == "__main__":
    main()
