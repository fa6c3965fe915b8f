"""Planted faults in the explorer's server: one line of damage each, and the check that turns red."""

from tests.checks.faults import Fault

CHECK, OURS, BODY = (
    "serve.http:Guard._check",
    "serve.http:Guard._is_ours",
    "serve.http:complete_body",
)
SECRET = "web.app.server:ExplorerGuard.check_secret"
ORIGIN, FOLDER = "serve.http:Guard._is_our_origin", "web.app.workspace:Workspace.folder"
STATUS = "lab.runs.table:current_status"

FAULTS = (
    # the guard
    Fault("hosts not looked at", CHECK, "host is None or not self._is_ours(host)", "False", "hosts"),
    Fault("any port", OURS, "self._port in (None, port) and ", "", "hosts"),
    Fault("a name that begins like ours", OURS, "name in self._hosts", "any(name.startswith(h) for h in self._hosts)", "hosts"),
    Fault("IPv6 cut at its first colon", "serve.http:split_host", 'if text.startswith("["):', "if False:", "own names"),
    Fault("the beginning of the token", SECRET, "hmac.compare_digest(given, self._token)", "self._token.startswith(given)", "token"),
    Fault("no token for reading", SECRET, 'if not scope["path"].startswith("/api"):', 'if scope["method"] == "GET" or not scope["path"].startswith("/api"):', "token"),
    Fault("an origin that is missing passes", CHECK, "origin is not None or (post and self.names_page)", "origin is not None", "origin"),
    Fault("https is http", ORIGIN, "if scheme not in self.schemes:", "if not scheme:", "origin"),
    Fault("forms are let in", CHECK, 'post and kind != "application/json"', "False", "json only"),
    Fault("the second header counts", "serve.http:single_headers", "if name in found and name in names:", "if False:", "two headers"),
    Fault("any length", BODY, "int(length) > most", "False", "length"),
    Fault("a streamed body has no limit", BODY, "if len(data) > most:", "if False:", "streamed"),
    Fault("headers forgotten", "web.app.server:_with_headers", "if name not in given]", "if False]", "headers"),
    Fault("any depth", "web.app.query:_check_depth", "if depth > limits.JSON_DEPTH:", "if False:", "depth"),
    Fault("NaN goes out", "spec.serialize:json_numbers", 'str(value) if not_finite == "text" else None', "value", "not finite"),
    # ids
    Fault("any name", FOLDER, "if not NAME.fullmatch(name):", "if False:", "traversal"),
    Fault("links lead out", FOLDER, "if not self._inside(path):", "if False:", "links"),
    Fault("links are listed", "web.app.workspace:Workspace.folders", " and self._inside(path)", "", "links"),
    Fault("files may be links", "web.app.workspace:checked_file", "path.is_symlink() and", "False and", "linked files"),
    Fault("a job never ends", "web.app.workspace:Workspace.heavy", "self._slot.release()", "pass", "one job"),
    Fault("jobs do not wait", "web.app.workspace:Workspace.heavy", "if not self._slot.acquire(timeout=limits.PATIENCE_SECONDS):", "if False:", "one job"),
    # runs and errors
    Fault("a dead process runs on", STATUS, "if not directory.held():", "if False:", "stalled"),
    Fault("silence is no sign", STATUS, "if silent > SILENCE_SECONDS:", "if False:", "silent"),
    Fault("a held lock looks free", "store.rundir:RunDirectory.held", "return True", "return False", "running"),
    Fault("a cut file goes unnoticed", "web.app.workspace:CurveReader.read", "cursor_of(path, kept[0].next) != kept[1]", "False", "cut back"),
    Fault("the band's floor is its mean", "web.pages.runs:band", "values.min(axis=0)", "values.mean(axis=0)", "band"),
    Fault("seeds are settings", "lab.runs.table:same_but_seed", 'if k != "train.seed"', "", "band"),
    Fault("two runs never differ", "lab.runs.table:differing", "> 1", "> 2", "differ"),
    Fault("a cell by its row only", "web.pages.errors:cell", "if pair == wanted", "if pair[0] == wanted[0]", "cell"),
    Fault("measured every time", "web.pages.errors:evaluated", "workspace.results.put(result, key=key)", "pass", "once"),
)  # fmt: skip
