"""The model's tokenizer and chat template.

Room: models; used by the front ends only. Rule: `transformers` loads it, `tokenizers` does the work;
every failure says which file is missing or what the template refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from tokenizers import Tokenizer as Backend

from rimuru.errors import ConfigError, RequestError
from rimuru.models.registry import resolve_model

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


class Tokenizer:
    """Text to token ids and back.

    `fast` is the `transformers` tokenizer, `backend` the `tokenizers` object that incremental decoders
    work on, `template` the chat template or None.
    """

    def __init__(self, fast: Any):
        self.fast = fast
        self.backend: Backend = fast.backend_tokenizer
        self.template: str | dict[str, str] | None = fast.chat_template

    def __len__(self) -> int:
        """Token ids known, special and added ones included."""
        return len(self.fast)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`, with the model's own start tokens unless told otherwise."""
        return self.backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of a whole sequence of ids."""
        return self.backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def render_chat(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt text of a conversation; `variables` are passed to the template.

        Raises `RequestError` where there is no template, or where it refuses the messages.
        """
        if chat_template is None and self.template is None:
            raise RequestError(
                "This model has no chat template: pass the prompt as plain text, or give a template "
                "with --chat-template",
                "messages",
            )
        try:
            return self.fast.apply_chat_template(
                messages,
                tools=tools,
                chat_template=chat_template,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                **variables,
            )
        except (jinja2.TemplateError, ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
            raise RequestError(f"The chat template refused these messages: {error}", "messages") from None

    def apply_chat_template(self, messages: list[dict[str, Any]], **options: Any) -> list[int]:
        """Token ids of a conversation; options as `render_chat`. The template writes all special tokens."""
        return self.encode(self.render_chat(messages, **options), add_special_tokens=False)


def has_tokenizer(folder: str | Path) -> bool:
    """Whether a checkpoint's folder brings a tokenizer."""
    return any((Path(folder) / name).is_file() for name in _FILES)


def load_tokenizer(
    path: str | Path, revision: str | None = None, trust_remote_code: bool = False
) -> Tokenizer:
    """The tokenizer in a checkpoint's folder, or of a Hub id. Raises `ConfigError`."""
    # Imported here: it takes seconds, and whoever sends token ids never needs it.
    from transformers import AutoTokenizer

    folder = resolve_model(str(path), revision, weights=False)
    if not has_tokenizer(folder):
        raise ConfigError(
            f"{folder}: no tokenizer there ({', '.join(_FILES)}); name a folder or Hub id with --tokenizer"
        )
    try:
        fast = AutoTokenizer.from_pretrained(
            folder, local_files_only=True, trust_remote_code=trust_remote_code
        )
    except Exception as error:  # each tokenizer format fails in its own way, down to bare Exception
        raise ConfigError(f"{folder}: the tokenizer cannot be loaded: {error}") from None
    if not hasattr(fast, "backend_tokenizer"):
        raise ConfigError(
            f"{folder}: {type(fast).__name__} has no fast form; save it as tokenizer.json with transformers"
        )
    return Tokenizer(fast)
