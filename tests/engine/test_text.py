"""Text from tokens: equal to decoding the whole, characters whole, stop strings exact."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from rimuru.engine.request import FinishReason, SamplingParams
from rimuru.engine.text import TextStream, Vocabulary

TEXT = "Grüße aus 東京 🙂 — the quick brown fox, naïve café. "


def byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator([TEXT] * 3, trainer)
    tokenizer.add_special_tokens(["<|end|>"])
    tokenizer.add_tokens([AddedToken("<tool call>", normalized=False)])
    return tokenizer


def sentencepiece() -> Tokenizer:
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2} | {f"<0x{b:02X}>": 3 + b for b in range(256)}
    for piece in ["\u2581", "\u2581the", "\u2581fox", "qu", "ick", "é", "東", "a", "b", "."]:
        vocab[piece] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def wordpiece() -> Tokenizer:
    vocab = {word: i for i, word in enumerate(["[UNK]", "the", "fox", "##es", "run", "##s", "."])}
    tokenizer = Tokenizer(models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


BYTE_LEVEL, SENTENCEPIECE, WORDPIECE = map(Vocabulary, (byte_level(), sentencepiece(), wordpiece()))


def pieces(vocabulary: Vocabulary, tokens: list[int], cut: int = 1, **params: object) -> TextStream:
    stream = TextStream(vocabulary, SamplingParams(**params))
    stream_pieces = []
    for at in range(0, len(tokens), cut):
        last = at + cut >= len(tokens)
        stream_pieces.append(stream.push(tokens[at : at + cut], FinishReason.LENGTH if last else None))
        if stream.finish is not None:
            break
    return stream, stream_pieces


@settings(max_examples=150, deadline=None)
@given(data=st.data(), skip=st.booleans(), cut=st.integers(1, 5))
def test_any_token_sequence_of_a_byte_level_vocabulary_reads_as_the_tokenizer_decodes_it(data, skip, cut):
    tokens = data.draw(st.lists(st.integers(0, BYTE_LEVEL.size - 1), min_size=1, max_size=60))
    _, parts = pieces(BYTE_LEVEL, tokens, cut, skip_special_tokens=skip)
    assert "".join(parts) == BYTE_LEVEL.backend.decode(tokens, skip_special_tokens=skip)


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=30), skip=st.booleans())
def test_sentencepiece_text_continues_its_prompt_as_the_tokenizer_decodes_both(text, skip):
    prompt = [1, SENTENCEPIECE.backend.token_to_id("\u2581the")]
    pieces_of = [SENTENCEPIECE.backend.token_to_id("\u2581" if c == " " else c) for c in text]
    tokens = []
    for char, token in zip(text, pieces_of, strict=True):
        tokens += [token] if token is not None else [3 + byte for byte in char.encode()]
    tokens.append(2)
    _, parts = pieces(SENTENCEPIECE, tokens, skip_special_tokens=skip)
    whole = SENTENCEPIECE.backend.decode(prompt + tokens, skip_special_tokens=skip)
    assert whole == SENTENCEPIECE.backend.decode(prompt, skip_special_tokens=skip) + "".join(parts)


def test_a_tokenizer_of_another_make_still_streams_its_text():
    assert not WORDPIECE.table
    _, parts = pieces(WORDPIECE, [1, 2, 3, 4, 5, 6])
    assert "".join(parts) == WORDPIECE.backend.decode([1, 2, 3, 4, 5, 6]) == "the foxes runs."
    assert len([part for part in parts if part]) > 1


def test_no_piece_ever_holds_half_a_character():
    tokens = BYTE_LEVEL.backend.encode("🙂東ü" * 5).ids
    stray = next(t for t in range(BYTE_LEVEL.size) if BYTE_LEVEL.bytes_of(t) == b"\xf0")
    _, parts = pieces(BYTE_LEVEL, tokens)
    assert "\ufffd" not in "".join(parts)
    assert "".join(parts) == "🙂東ü" * 5
    _, parts = pieces(BYTE_LEVEL, [*tokens, stray])
    assert parts[-1] == "\ufffd", "an unfinished character is shown at the end, not lost"


def reference_stop(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Where the text ends when a reader looks at it a token at a time: the first occurrence wins."""
    found = [(text.find(s), -len(s), s) for s in stops if s in text]
    if not found:
        return text, None
    start, _, stop = min(found)
    return text[: start + len(stop) if include else start], stop


@pytest.mark.parametrize("include", [False, True])
@pytest.mark.parametrize("cut", [1, 2, 7])
def test_stop_strings_end_the_text_wherever_tokens_and_chunks_are_cut(cut, include):
    rng = random.Random(cut)
    for _ in range(200):
        text = "".join(rng.choice("ab🙂 ") for _ in range(rng.randint(1, 25)))
        # Equal lengths: which of two overlapping matches is seen first then depends on the text alone.
        stops = ["".join(rng.choice("ab🙂 ") for _ in range(3)) for _ in range(rng.randint(1, 3))]
        tokens = BYTE_LEVEL.backend.encode(text).ids
        stream, parts = pieces(BYTE_LEVEL, tokens, cut, stop=stops, include_stop_str_in_output=include)
        expected, stop = reference_stop(text, stops, include)
        assert "".join(parts) == expected, (text, stops)
        assert stream.stop_reason == stop
        assert stream.finish is (FinishReason.STOP if stop else FinishReason.LENGTH)


def test_text_that_cannot_begin_a_stop_string_is_not_held_back():
    stream = TextStream(BYTE_LEVEL, SamplingParams(stop=["\n\nHuman"]))
    token = {c: BYTE_LEVEL.backend.encode(c).ids for c in "a\nH"}
    assert stream.push(token["a"]) == "a"
    assert stream.push(token["\n"]) == ""
    assert stream.push(token["\n"]) == ""
    assert stream.push(token["a"]) == "\n\na"
    assert stream.push(token["\n"], FinishReason.LENGTH) == "\n", "held text is not lost at the end"


def test_a_stop_string_counts_only_after_min_tokens():
    tokens = BYTE_LEVEL.backend.encode("a.b.c.").ids
    assert len(tokens) == 6
    stream, parts = pieces(BYTE_LEVEL, tokens, stop=["."], min_tokens=3)
    assert ("".join(parts), stream.num_tokens) == ("a.b", 4)


def test_tokens_behind_a_stop_string_in_the_same_output_do_not_count():
    tokens = BYTE_LEVEL.backend.encode("a.bcd").ids
    stream = TextStream(BYTE_LEVEL, SamplingParams(stop=["."]))
    assert stream.push(tokens) == "a"
    assert (stream.consumed, stream.num_tokens, stream.stop_reason) == (2, 2, ".")


@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "a.")])
def test_the_token_that_stopped_the_sequence_shows_only_when_asked_for(include, text):
    tokens = BYTE_LEVEL.backend.encode("a.").ids
    stream = TextStream(BYTE_LEVEL, SamplingParams(include_stop_str_in_output=include))
    assert stream.push(tokens, FinishReason.STOP, tokens[-1]) == text
    assert (stream.num_tokens, stream.stop_reason) == (2, tokens[-1])


def test_bytes_of_tokens_join_to_the_bytes_of_the_text():
    tokens = BYTE_LEVEL.backend.encode(TEXT).ids
    assert b"".join(map(BYTE_LEVEL.bytes_of, tokens)).decode() == TEXT
    assert BYTE_LEVEL.text_of(BYTE_LEVEL.backend.token_to_id("<tool call>")) == "<tool call>"
    assert BYTE_LEVEL.bytes_of(10**6) == b""
