"""The tokenizer against `transformers`, and what is said when a piece of it is missing."""

from __future__ import annotations

import shutil

import pytest
import transformers
from support.rewrite import rewrite
from support.tiny import tiny_checkpoint

from rimuru.errors import ConfigError, RequestError
from rimuru.models.tokenizer import load_tokenizer

TALK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Héllo 世界 🙂"}]


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(tiny_checkpoint("mixtral"))


def test_text_round_trips(tokenizer):
    text = "Héllo 世界 🙂 <|im_end|> done"
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=False) == text
    assert tokenizer.decode(tokenizer.encode(text)) == text.replace("<|im_end|>", "")


def test_chats_are_the_token_ids_of_transformers(tokenizer):
    theirs = transformers.AutoTokenizer.from_pretrained(tiny_checkpoint("mixtral"))
    want = theirs.apply_chat_template(TALK, add_generation_prompt=True, return_dict=False)
    assert tokenizer.apply_chat_template(TALK) == want
    assert len(tokenizer) == len(theirs)


def test_a_template_can_be_given(tokenizer):
    got = tokenizer.render_chat(TALK, chat_template="{{ messages|length }} {{ mood }}", mood="calm")
    assert got == "2 calm"


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('no system role') }}", "{{ messages[9].role }}{{ 1 + 'a' }}", "{% if %}"]
)
def test_a_template_that_refuses_is_the_clients_error(tokenizer, template):
    with pytest.raises(RequestError, match="chat template refused these messages") as caught:
        tokenizer.render_chat(TALK, chat_template=template)
    assert caught.value.param == "messages"


def test_no_template_is_the_clients_error(tmp_path):
    path = rewrite(tiny_checkpoint("olmoe"), tmp_path / "m")
    (path / "chat_template.jinja").unlink()
    with pytest.raises(RequestError, match="has no chat template"):
        load_tokenizer(path).apply_chat_template(TALK)


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    path = rewrite(tiny_checkpoint("olmoe"), tmp_path / "m")
    (path / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match="no tokenizer there"):
        load_tokenizer(path)


def test_a_corrupt_tokenizer_is_named(tmp_path):
    path = tmp_path / "m"
    shutil.copytree(tiny_checkpoint("olmoe"), path)
    (path / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="the tokenizer cannot be loaded"):
        load_tokenizer(path)
