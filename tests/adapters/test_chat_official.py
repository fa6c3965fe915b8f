"""Qwen's own chat templates: the text of transformers' `apply_chat_template`, and its ids."""

import pytest
from transformers import AutoTokenizer

from glassformer.adapters.chat.template import read_chat
from glassformer.adapters.tokenizers.folder_tokenizer import read_tokenizer
from tests.adapters.official import official
from tests.adapters.test_chat import TALKS, TOOLS


@pytest.mark.parametrize("name", ["qwen3", "qwen2.5"])
def test_text_and_ids_are_those_of_transformers(name):
    folder = official(name)
    ours, tokenizer = read_chat(folder), read_tokenizer(folder)
    theirs = AutoTokenizer.from_pretrained(folder)
    compared = 0
    for messages in TALKS.values():
        for tools in (None, TOOLS):
            for prompt in (True, False):
                for options in ({}, {"enable_thinking": False}, {"enable_thinking": True}):
                    settings = {"tools": tools, "add_generation_prompt": prompt}
                    text = theirs.apply_chat_template(
                        messages, tokenize=False, **settings, **options
                    )
                    ids = theirs.apply_chat_template(
                        messages, return_dict=False, **settings, **options
                    )
                    assert ours.render(messages, **settings, options=options) == text
                    assert tokenizer.encode(text) == list(ids)
                    compared += 1
    assert compared == 36
