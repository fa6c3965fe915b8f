"""Tests of tokenizers, chats and hubs are tested: one planted mistake, and a check turns red."""

from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from glassformer.adapters.chat.template import Conversation, read_chat
from glassformer.adapters.load import load
from glassformer.adapters.tokenizers.folder_tokenizer import read_tokenizer
from glassformer.generation.stepper import TorchStepper
from glassformer.generation.turns import Turns
from glassformer.spec.errors import GlassError
from tests.adapters import folders, test_chat, test_conversation, test_folder_tokenizer, test_hub
from tests.lab import test_lm_eval
from tests.planting import Assign, Binary, Call, Choice, Constant, Fault, Return, mutate, planted

RED = (AssertionError, LookupError, RuntimeError, GlassError, pytest.fail.Exception)


def in_a_folder(check: Callable[[Path], None]) -> Callable[[], None]:
    def run() -> None:
        with TemporaryDirectory() as name:
            check(Path(name))

    return run


def forms(place: Path) -> None:
    made = {
        "lists": read_tokenizer(folders.write_json_form(place / "lists")),
        "strings": read_tokenizer(folders.write_json_form(place / "strings", merges="strings")),
        "merges": read_tokenizer(folders.write_merges_form(place / "merges")),
        "ranks": read_tokenizer(folders.write_ranks_form(place / "ranks")),
    }
    test_folder_tokenizer.test_special_tokens_by_name(made)
    test_folder_tokenizer.test_every_form_gives_the_ids_of_an_independent_tokenizer(made)


def llama(place: Path) -> None:
    folders.write(place / "llama", "tokenizer.json", folders.llama_engine().to_str())
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    folders.write(place / "llama", "tokenizer_config.json", names)
    tokenizer = read_tokenizer(place / "llama")
    test_folder_tokenizer.test_the_token_that_really_begins_a_text(tokenizer, place / "other")
    test_folder_tokenizer.test_ids_and_text_are_those_of_transformers(tokenizer)
    text = "你你 the 你"
    pieces = test_folder_tokenizer.pieces_of(tokenizer, tokenizer.encode(text))
    assert "".join(pieces) == text


def chats(place: Path) -> None:
    for talk in test_chat.TALKS:
        test_chat.test_the_text_is_that_of_transformers(talk)


def conversations(check: Callable) -> Callable[[Path], None]:
    def run(place: Path) -> None:
        model = load(folders.write_model(place / "model"))
        template = read_chat(model.origin)
        stepper = Turns(TorchStepper(model.model, cache="growing"))
        talk = Conversation(stepper, model.tokenizer, template, spec=test_conversation.SPEC)
        check(model, talk)

    return run


def likelihoods(place: Path) -> None:
    adapter = load(folders.write_model(place / "model"))
    test_lm_eval.test_likelihoods_are_those_of_a_plain_forward(adapter)
    test_lm_eval.test_a_long_context_loses_its_beginning_and_a_long_text_is_cut_in_windows(adapter)


def snapshots(place: Path) -> None:
    cache = test_hub.make_cache(place)
    test_hub.test_a_name_is_its_main_snapshot(cache)
    test_hub.test_what_a_name_can_be()
    for text in ("Org/Other", "Org/../../x", "Org--x/y"):
        test_hub.test_what_is_not_there_is_said(text, cache)
    for revision in ("../../x", "a/../b"):
        test_hub.test_revisions_lead_nowhere_else(revision, cache)
    test_hub.test_a_reference_must_be_a_commit("../../../etc", cache)


CHECKS: dict[str, Callable[[], None]] = {
    "forms": in_a_folder(forms),
    "llama": in_a_folder(llama),
    "ends": in_a_folder(test_folder_tokenizer.test_several_ends_and_a_padded_vocabulary),
    "chats": in_a_folder(chats),
    "sight": in_a_folder(conversations(test_conversation.test_the_oldest_turns_go_out_of_sight)),
    "end": in_a_folder(conversations(test_conversation.test_the_end_is_not_said)),
    "likelihoods": in_a_folder(likelihoods),
    "snapshots": in_a_folder(snapshots),
}

FAULTS = (
    Fault("the version line is a merge", mutate("adapters.tokenizers.files:_from_merges", Assign("lines", nth=1), to="{value}[:]"), "forms"),
    Fault("encode puts BOS before a text", mutate("adapters.tokenizers.folder_tokenizer:FolderTokenizer.encode", Constant(False), to="True"), "llama"),
    Fault("one end of several", mutate("adapters.folder.files:read_eos", Call("fromkeys"), to="ids[:1]"), "ends"),
    Fault("tools are left out", mutate("adapters.chat.template:ChatTemplate.render", Choice(), to="{body}"), "chats"),
    Fault("the end is part of the answer", mutate("generation.streaming:RowText.push", Choice(), to="{orelse}"), "end"),
    Fault("half a turn goes out of sight", mutate("adapters.chat.template:Conversation._fitting", Constant(2, nth=1), to="1"), "sight"),
    Fault("read one place too late", mutate("lab.measure.scores:Answerer.likelihoods", Binary("-"), to="{it} - 1"), "likelihoods"),
    Fault("a name leads upwards", mutate("adapters.folder.hub:is_name", Return(), to="{values[0]} and {values[1]}"), "snapshots"),
)  # fmt: skip


@pytest.fixture(scope="module")
def sound():
    """Checks that were seen green without a fault."""
    return set()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_fault_is_caught(fault, sound):
    check = CHECKS[fault.caught_by]
    if fault.caught_by not in sound:
        check()
        sound.add(fault.caught_by)
    with planted(fault), pytest.raises(RED):
        check()
