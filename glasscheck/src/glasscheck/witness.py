"""Where a failed row goes wrong: the calls that disagree, as a script, and the first module.

A row is repeated while its calls are recorded. The two tensors that are furthest apart are found
again, position by position, in what those calls returned: that gives lines of plain torch which
show the failure, and the same positions of every module's result, of which the first that differs
is named.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from glasscheck.foreign import Call, Foreign
from glasscheck.measure import LARGEST, Measure, relative_gap
from glasscheck.subject import Subject

# B batch, T length, N positions of both, V vocab

#: Calls of one row beyond which nobody would read a script.
READABLE = 24
#: A module's results differ where they are this far beyond the rounding of its dtype.
DIFFERS = 1e3


@dataclass(frozen=True, slots=True)
class Witness:
    """What shows a failure: lines of plain torch, and the first module that differs."""

    script: str
    module: str = ""


@dataclass(frozen=True, slots=True)
class _Origin:
    """Where a tensor comes from: positions of the results of some calls, one after the other."""

    calls: tuple[int, ...]
    index_N: Tensor


def witness(run: Callable[[Subject], Measure], subject: Subject) -> Witness | None:
    """Repeat a row that failed, and return what shows it; None where its calls do not."""
    foreign = subject.foreign
    if foreign is None:
        return None
    log = foreign.log
    log.calls.clear()
    log.recording = True
    try:
        measure = run(subject)
    except Exception:  # a row that raises has said so already
        return None
    finally:
        log.recording = False
        calls = list(log.calls)
        log.calls.clear()
    if measure.pair is None or measure.pair[0].shape != measure.pair[1].shape:
        return None
    one, other = (_origin(tensor, calls, foreign) for tensor in measure.pair)
    if one is None or other is None:
        return None
    script = _script(calls, one, other, foreign)
    return Witness(script, _first_module(calls, one, other, foreign))


def _origin(tensor: Tensor, calls: Sequence[Call], foreign: Foreign) -> _Origin | None:
    """Find the positions of a tensor in one call's result, or in those of calls in a row."""
    if tensor.ndim == 0 or not tensor.numel():
        return None
    wanted_NV = tensor.reshape(-1, tensor.shape[-1])
    rows = [_rows(call, foreign) for call in calls]
    for i in reversed(range(len(calls))):
        index_N = _matched(wanted_NV, rows[i])
        if index_N is not None:
            return _Origin((i,), index_N)
    for end in range(len(calls), 1, -1):  # read in pieces through a cache
        begin = end - 1
        while begin > 0 and _goes_on(calls[begin], calls[begin - 1]):
            begin -= 1
        parts = [part for part in rows[begin:end] if part is not None]
        if end - begin > 1 and len(parts) == end - begin:
            index_N = _matched(wanted_NV, torch.cat(parts))
            if index_N is not None:
                return _Origin(tuple(range(begin, end)), index_N)
    return None


def _rows(call: Call, foreign: Foreign) -> Tensor | None:
    """Return the logits of a call, one row for each position."""
    try:
        logits = foreign.read(call.result)
    except Exception:
        return None
    tokens = call.given.get(foreign.token_name)
    logits = foreign.cut(logits, tokens) if isinstance(tokens, Tensor) else logits.cpu()
    return logits.detach().reshape(-1, logits.shape[-1])


def _matched(wanted_NV: Tensor, rows_MV: Tensor | None) -> Tensor | None:
    """Return the row of each wanted vector, bit for bit; None where one is not there."""
    if rows_MV is None or rows_MV.shape[-1] != wanted_NV.shape[-1]:
        return None
    if rows_MV.dtype != wanted_NV.dtype:
        rows_MV = rows_MV.to(wanted_NV.dtype)
    found, start = [], 0
    for vector in wanted_NV:
        same = (rows_MV == vector).all(-1).nonzero().flatten()
        if not len(same):
            return None
        later = same[same >= start]
        found.append(int(later[0] if len(later) else same[0]))
        start = found[-1] + 1
    return torch.tensor(found)


def _goes_on(call: Call, before: Call) -> bool:
    """True if a call is given what the one before it returned, or the object it filled."""
    held = _objects(before.result) | {id(v) for v in before.given.values() if _is_state(v)}
    return any(id(value) in held for value in call.given.values() if _is_state(value))


def _is_state(value: object) -> bool:
    return value is not None and not isinstance(value, (Tensor, bool, int, float, str))


def _objects(result: Any) -> set[int]:
    parts = result.values() if isinstance(result, Mapping) else result
    listed = isinstance(result, (Mapping, tuple, list))
    return {id(result)} | ({id(part) for part in parts} if listed else set())


# --- the script ---------------------------------------------------------------------------------


def _script(calls: Sequence[Call], one: _Origin, other: _Origin, foreign: Foreign) -> str:
    """Return lines that call `model` as the row did, and compare the two results."""
    first = min(one.calls[0], other.calls[0])
    used = sorted({*one.calls, *other.calls})
    if len(used) > READABLE or any(calls[i].module is not foreign.module for i in used):
        return ""
    lines: list[str] = []
    results: dict[int, tuple[str, Call]] = {}
    for i in used:
        arguments = []
        for name, value in calls[i].given.items():
            arguments.append(f"{name}={_literal(value, results)}")
        lines.append(f"out{i - first} = model({', '.join(arguments)})")
        results[i] = (f"out{i - first}", calls[i])
    for name, origin in (("one", one), ("other", other)):
        parts = [_logits_of(results[i][0], calls[i], foreign) for i in origin.calls]
        joined = parts[0] if len(parts) == 1 else f"torch.cat([{', '.join(parts)}])"
        lines.append(f"{name} = {joined}[{origin.index_N.tolist()}]")
    return "\n".join(lines)


def _literal(value: Any, results: Mapping[int, tuple[str, Call]]) -> str:
    """Return Python for an argument: a tensor's numbers, or the part of an earlier result."""
    if isinstance(value, Tensor) and value.numel() <= 4096:
        return f"torch.tensor({value.tolist()})" + (
            f".to({value.dtype})" if value.dtype not in (torch.int64, torch.bool) else ""
        )
    if _is_state(value):
        for name, call in results.values():
            if (path := _path(call.result, value)) is not None:
                return name + path
            if any(value is given for given in call.given.values()):
                return "state"
        return "state"
    return repr(value)


def _path(result: Any, wanted: object) -> str | None:
    if result is wanted:
        return ""
    if isinstance(result, Mapping):
        return next((f"[{k!r}]" for k, v in result.items() if v is wanted), None)
    if isinstance(result, (tuple, list)):
        return next((f"[{i}]" for i, v in enumerate(result) if v is wanted), None)
    return next((f".{k}" for k, v in getattr(result, "__dict__", {}).items() if v is wanted), None)


def _logits_of(name: str, call: Call, foreign: Foreign) -> str:
    logits = foreign.read(call.result)
    path = _path(call.result, logits)
    return f"{name}{'' if path is None else path}.flatten(0, -2)"


def whole_script(
    lines: str, *, claim: str, allowed: float, reference: str = "", redrawn: bool = False
) -> str:
    """Return a script that makes the model, runs the lines, and fails where the row failed."""
    place, _, factory = reference.rpartition(":")
    if place.endswith(".py"):
        made = f'import runpy\n\nmodel = runpy.run_path("{place}")["{factory}"]().eval()'
    elif place:
        made = f"from {place} import {factory}\n\nmodel = {factory}().eval()"
    else:
        made = "model = ...  # the module that was verified"
    noise = _REDRAW if redrawn else ""
    body = "\n".join(f"    {line}" for line in lines.splitlines())
    return (
        f'"""{claim}: the failure in plain torch."""\n\nimport torch\n\ntorch.manual_seed(0)\n'
        f"{made}\n{noise}\nstate = None\nwith torch.no_grad():\n{body}\n"
        "gap = (one - other).abs().max() / other.abs().max()\n"
        f'print(f"largest gap {{gap:.2e}}, allowed {allowed:.2e}")\n'
        f"assert gap <= {allowed!r}\n"
    )


_REDRAW = """
noise = torch.Generator().manual_seed(86)  # fresh weights hide mistakes
with torch.no_grad():
    for p in model.parameters():
        if p.requires_grad and p.is_floating_point() and p.numel():
            scale = 1 / p.shape[-1] ** 0.5 if p.ndim > 1 else 0.1
            p.add_((torch.randn(p.shape, generator=noise) * scale).to(p))
"""


# --- the module ---------------------------------------------------------------------------------


@torch.no_grad()
def _first_module(calls: Sequence[Call], one: _Origin, other: _Origin, foreign: Foreign) -> str:
    """Return the first module whose result differs at the positions that the row compared."""
    if any(calls[i].module is not calls[one.calls[0]].module for i in (*one.calls, *other.calls)):
        return ""
    try:
        ours, theirs = (_inside(calls, origin, foreign) for origin in (one, other))
    except Exception:  # a state that was used up cannot be read again
        return ""
    for name, wanted in theirs.items():
        if name in ours and ours[name].shape == wanted.shape:
            eps = torch.finfo(wanted.dtype).eps
            if relative_gap(ours[name], wanted) > min(DIFFERS * eps, LARGEST[wanted.dtype]):
                return name.removesuffix("#0")
    return ""


def _inside(calls: Sequence[Call], origin: _Origin, foreign: Foreign) -> dict[str, Tensor]:
    """Return each module's result at the positions of an origin, in the order of completion."""
    kept: dict[str, list[Tensor]] = {}
    module = calls[origin.calls[0]].module
    sizes: list[tuple[int, int]] = []
    counts: dict[str, int] = {}

    def note(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, __: object, result: Any) -> None:
            result = result[0] if isinstance(result, (tuple, list)) and result else result
            if not isinstance(result, Tensor) or not result.is_floating_point():
                return
            key = f"{name}#{counts.setdefault(name, 0)}"
            counts[name] += 1
            B, T = sizes[-1]
            if result.ndim >= 3 and result.shape[:2] == (B, T):
                kept.setdefault(key, []).append(result.detach().flatten(0, 1).cpu())

        return hook

    handles = [
        part.register_forward_hook(note(name)) for name, part in module.named_modules() if name
    ]
    past: dict[int, Any] = {}
    try:
        for i in origin.calls:
            counts.clear()
            given = dict(calls[i].given)
            tokens = given.get(foreign.token_name)
            if not isinstance(tokens, Tensor):
                return {}
            sizes.append((tokens.shape[0], tokens.shape[1]))
            for name, value in given.items():
                if _is_state(value):
                    given[name] = past.get(id(value), value)
            result = module(**given)
            past |= _pairs(calls[i].result, result)
    finally:
        for handle in handles:
            handle.remove()
    total = sum(B * T for B, T in sizes)
    joined = {name: torch.cat(parts) for name, parts in kept.items()}
    return {name: rows[origin.index_N] for name, rows in joined.items() if len(rows) == total}


def _pairs(before: Any, now: Any) -> dict[int, Any]:
    """Return the parts of a new result by the identities of an older one's."""
    if isinstance(before, Mapping):
        return {id(v): now[k] for k, v in before.items() if _is_state(v)}
    if isinstance(before, (tuple, list)):
        return {id(v): w for v, w in zip(before, now, strict=True) if _is_state(v)}
    return {}
