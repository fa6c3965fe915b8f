"""Planted faults in SmallBench: one line of damage each, and the check that turns red."""

from tests.checks.faults import Fault

ROOM = "lab.smallbench."
ASKED, TOKENS, SHARED = (
    f"{ROOM}question:_asked",
    f"{ROOM}question:_tokens",
    f"{ROOM}question:_shared",
)
LOOKED, LOGP = f"{ROOM}question:_looked_up", f"{ROOM}question:log_probabilities"
LENGTH, INTERVAL = f"{ROOM}suite:encode_length", f"{ROOM}suite:interval"

FAULTS = (
    # scores
    Fault("read one place late", ASKED, "(place - 1, ids[place])", "(place, ids[place])", "slow, bytes"),
    Fault("the first token of a choice does not count", ASKED, "for place in range(start, len(ids))]", "for place in range(start + 1, len(ids))]", "slow, bytes"),
    Fault("the last token of a choice does not count", ASKED, "for place in range(start, len(ids))]", "for place in range(start, max(start + 1, len(ids) - 1))]", "whole choices"),
    Fault("mean instead of sum", ASKED, "found[row][0][part].sum()", "found[row][0][part].mean()", "whole choices"),
    Fault("the least likely wins", ASKED, "scores == scores.max()", "scores == scores.min()", "oracle"),
    Fault("a tie is a point", ASKED, "best[question.right] / best.sum()", "float(best[question.right])", "ties"),
    Fault("a tie goes to the first", ASKED, "best = scores == scores.max()", "best = np.arange(len(scores)) == scores.argmax()", "ties"),
    Fault("said if any token is", ASKED, "found[whole[0]][1][whole[1]].all()", "found[whole[0]][1][whole[1]].any()", "said"),
    Fault("said from where choices differ", TOKENS, "min(start, _shared([right, examinee.ids(question.context)]))", "start", "said"),
    Fault("said of the first choice", TOKENS, "right = texts[question.right]", "right = texts[0]", "said"),
    Fault("one token too many is shared", SHARED, "return place\n", "return place + 1\n", "slow, bytes"),
    Fault("no softmax", LOOKED, "own_P - np.log(np.exp(wide_PV).sum(-1))", "own_P", "slow bits"),
    Fault("rows in the order of their lengths", LOGP, "return [found[row] for row in range(len(rows))]", "return list(found.values())", "slow, bytes"),
    Fault("rows of a batch mixed up", LOGP, "for place, row in enumerate(chosen):", "for place, row in enumerate(reversed(chosen)):", "slow, bytes"),
    # bits per byte
    Fault("windows overlap", LENGTH, "range(0, len(ids) - 1, width)", "range(0, len(ids) - 1, width - 1)", "slow bits"),
    Fault("a token lost between windows", LENGTH, "ids[start + 1 : start + width + 1]", "ids[start + 1 : start + width]", "slow bits"),
    Fault("the first token is free", LENGTH, "if examinee.begin is None:", "if False:", "uniform bits"),
    Fault("nats called bits", LENGTH, "-logp.sum() / math.log(2)", "-logp.sum()", "uniform bits"),
    Fault("bits per character", LENGTH, "len(text.encode()), int(tokens.sum())", "len(text), int(tokens.sum())", "accents"),
    # intervals
    Fault("questions drawn instead of groups", INTERVAL, "sizes[drawn].sum(axis=1)", "sizes.sum()", "sizes"),
    Fault("one tail", INTERVAL, "(1 - confidence) / 2", "1 - confidence", "intervals"),
    Fault("not widened", INTERVAL, "middle + wider * (", "middle + (", "intervals of a few"),
    Fault("the normal for Student", f"{ROOM}suite:_student", "enumerate(terms)", "enumerate(terms[:1])", "student"),
    # questions
    Fault("always the same arrangement", f"{ROOM}suite:_recall", "pairs = [f\"{key}: {values[(i + shift) % K]}\"", "pairs = [f\"{key}: {values[i]}\"", "solved"),
    Fault("the first bracket closes", f"{ROOM}suite:_solve_brackets", "waiting[-1]", "waiting[0]", "solved"),
    Fault("the nearest noun agrees", f"{ROOM}suite:_solve_agreement", "context.split()[:2]", "context.split()[-2:]", "solved"),
    Fault("one step of the machine", f"{ROOM}suite:_solve_machine", "for symbol in symbols:", "for symbol in symbols[:1]:", "solved"),
    Fault("results among the operands", f"{ROOM}suite:_arithmetic", "or set(results) & set(others)", "or False", "habits"),
)  # fmt: skip
