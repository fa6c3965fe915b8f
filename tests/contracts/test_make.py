"""The Makefile: `make test` leaves the system as it is, and CI skips no test of a page."""

import os
import subprocess
import sys

from tests.contracts.test_docs import ROOT

#: The environment of a user who has set nothing.
ENV = {
    name: value
    for name, value in os.environ.items()
    if name != "CHROMIUM" and not name.startswith(("PYTEST_", "MAKE"))
}


def planned(**more: str) -> str:
    """What `make test` would run."""
    done = subprocess.run(
        ["make", "-n", "test"], cwd=ROOT, env=ENV | more, capture_output=True, text=True, check=True
    )
    return done.stdout


def test_the_tests_install_nothing_in_the_system_unless_requested():
    assert "apt-get" not in planned().replace("(as root, apt-get install chromium)", "")
    assert "apt-get install -y chromium" in planned(CHROMIUM="install")


def test_ci_requires_the_browser():
    assert "\nCHROMIUM=install make test\n" in (ROOT / ".ci" / "run").read_text()


def test_without_a_browser_its_tests_are_skipped_and_say_what_installs_it():
    command = "-m pytest -n 0 -p no:cacheprovider -rs tests/browser/test_shell.py"
    done = subprocess.run(
        [sys.executable, *command.split()],
        cwd=ROOT,
        env=ENV | {"GLASS_CHROMIUM": "/nowhere"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "`make chromium` installs it" in done.stdout
    assert "passed" not in done.stdout
