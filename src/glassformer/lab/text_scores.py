"""chrF and BLEU of a corpus, by sacrebleu, which papers report; nothing is counted here."""

from collections.abc import Sequence

from glassformer.spec.errors import InputError, MachineError


def corpus_scores(ours: Sequence[str], truths: Sequence[str]) -> dict[str, float]:
    """From 0 to 100: chrF by characters (F2 of 1- to 6-grams), BLEU by words."""
    if len(ours) != len(truths) or not ours:
        raise InputError(
            f"{len(ours)} texts beside {len(truths)} right ones", hint="one for each, at least one"
        )
    try:
        from sacrebleu.metrics import BLEU, CHRF
    except ImportError as error:
        raise MachineError(
            "chrF and BLEU need sacrebleu, which is not installed",
            hint="pip install 'glassformer[translate]'",
        ) from error
    references = [list(truths)]
    return {
        "chrf": float(CHRF().corpus_score(list(ours), references).score),
        "bleu": float(BLEU().corpus_score(list(ours), references).score),
    }
