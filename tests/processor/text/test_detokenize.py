"""Streaming text equals decoding at once, for any ids, any chunks and any stop strings."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hydrainfer.core import SamplingParams
from hydrainfer.processor.text.detokenize import Detokenizer, StopStrings, TextStream
from hydrainfer.processor.text.vocabulary import read_vocabulary
from tests.processor.text.tokenizers_small import byte_fallback, byte_level

pytestmark = pytest.mark.unit

TOKENIZERS = {"byte_fallback": byte_fallback(), "byte_level": byte_level()}
VOCABULARIES = {k: read_vocabulary(t, t.get_vocab_size() + 8) for k, t in TOKENIZERS.items()}
kinds = st.sampled_from(sorted(TOKENIZERS))
texts = st.text(st.sampled_from("abc the 你好世界こ😀👩‍👩‍👧é€ \n"), max_size=30)


def stream(kind, ids, chunks=(1,), **options):
    detokenizer, deltas, at, turn = Detokenizer(VOCABULARIES[kind], **options), [], 0, 0
    while at < len(ids):
        n = chunks[turn % len(chunks)]
        deltas.append(detokenizer.push(ids[at : at + n]))
        at, turn = at + n, turn + 1
    return [*deltas, detokenizer.flush()]


@settings(max_examples=400, deadline=None)
@given(kinds, st.lists(st.integers(0, 430), max_size=40), st.lists(st.integers(1, 5), min_size=1), st.booleans())
def test_random_ids_stream_to_the_whole_decode(kind, ids, chunks, skip):
    whole = TOKENIZERS[kind].decode(ids, skip_special_tokens=skip)
    assert "".join(stream(kind, ids, chunks, skip_special=skip)) == whole


@settings(max_examples=200, deadline=None)
@given(kinds, texts)
def test_no_delta_holds_part_of_a_character(kind, text):
    ids = TOKENIZERS[kind].encode(text, add_special_tokens=False).ids
    deltas = stream(kind, ids)
    assert not any("\ufffd" in d for d in deltas)
    assert "".join(deltas) == TOKENIZERS[kind].decode(ids)


@settings(max_examples=100, deadline=None)
@given(texts, texts)
def test_a_continuation_joins_its_prompt(prompt, answer):
    tokenizer = TOKENIZERS["byte_fallback"]
    before, after = (tokenizer.encode(t, add_special_tokens=False).ids for t in ("x" + prompt + "x", "x" + answer))
    told = "".join(stream("byte_fallback", after, continues=True))
    assert tokenizer.decode(before) + told == tokenizer.decode(before + after)


def test_a_special_token_that_is_skipped_does_not_end_a_run_of_bytes():
    vocabulary = VOCABULARIES["byte_fallback"]
    tokenizer = TOKENIZERS["byte_fallback"]
    e4, bd, a0 = (tokenizer.token_to_id(f"<0x{b:02X}>") for b in "你".encode())
    ids = [e4, tokenizer.token_to_id("</s>"), bd, a0]
    assert "".join(stream("byte_fallback", ids)) == "你"
    assert vocabulary.token_text(e4) == "\ufffd" and vocabulary.spell(e4) == b"\xe4"


def by_character(stop, text, include):
    """What a reader who sees one character after the other would keep."""
    seen = ""
    for c in text:
        seen += c
        ended = [s for s in stop if seen.endswith(s)]
        if ended:
            longest = max(ended, key=len)
            return (seen if include else seen[: -len(longest)]), longest
    return seen, None


small = st.text("ab", max_size=12)


@settings(max_examples=400, deadline=None)
@given(st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3), st.lists(small), st.booleans())
def test_stop_strings_do_not_depend_on_chunks(stop, chunks, include):
    scanner = StopStrings(stop, include=include)
    told = ""
    for chunk in chunks:
        told += scanner.push(chunk)
        if scanner.found is not None:
            break
    if scanner.found is None:
        told += scanner.flush()
    expected, found = by_character(stop, "".join(chunks), include)
    if found is None or include:
        assert told == expected
    assert scanner.found == found
    if found is not None and not include:
        assert told == expected


def test_text_that_may_begin_a_stop_string_is_held_and_then_sent():
    scanner = StopStrings(["STOP"])
    assert [scanner.push(t) for t in ("a ST", "O", "x")] == ["a ", "", "STOx"]


def run(text, sampling, *, chunk=1, end=False):
    tokenizer, vocabulary = TOKENIZERS["byte_level"], VOCABULARIES["byte_level"]
    ids = tokenizer.encode(text).ids + ([tokenizer.token_to_id("<|end|>")] if end else [])
    text_stream, told, n = TextStream(vocabulary, sampling), "", 0
    for at in range(0, len(ids), chunk):
        last = at + chunk >= len(ids)
        piece = text_stream.push(ids[at : at + chunk], ended_by_token=last and end, last=last)
        told, n = told + piece.text, n + piece.n_tokens
        if piece.stop:
            return told, n, piece.stop
    return told, n, None


@pytest.mark.parametrize("chunk", [1, 3, 100])
def test_a_stop_string_ends_text_and_count_at_the_same_place(chunk):
    told, n, stop = run("the cat on the mat", SamplingParams(stop=("on t",)), chunk=chunk)
    assert (told, stop) == ("the cat ", "on t")
    assert n == run("the cat on the mat", SamplingParams(stop=("on t",)))[1]
    assert run("the cat on", SamplingParams(stop=("cat",), include_stop_str_in_output=True))[0] == "the cat"


def test_stop_strings_wait_for_min_tokens():
    n_the = len(byte_level().encode("the cat").ids)
    assert run("the cat the end", SamplingParams(stop=("the",), min_tokens=n_the, max_tokens=99))[0] == "the cat "


def test_the_end_token_is_not_text_even_if_special_tokens_are():
    shown = SamplingParams(skip_special_tokens=False)
    assert run("cat", shown, end=True)[:2] == ("cat", run("cat", shown)[1] + 1)
    included = SamplingParams(skip_special_tokens=False, include_stop_str_in_output=True)
    assert run("cat", included, end=True)[0] == "cat<|end|>"


def test_unknown_decoders_are_refused_by_name():
    from tokenizers import Tokenizer, decoders, models

    odd = Tokenizer(models.BPE())
    odd.decoder = decoders.WordPiece()
    with pytest.raises(ValueError, match="WordPiece"):
        read_vocabulary(odd, 10)
