"""`text_offset`: where each token stands in the text that is sent, of a prompt and of an answer."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sluice_worker.text.output import OutputText, StopStrings
from sluice_worker.text.tokenizer import REPLACEMENT, Tokenizer
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Library
from unit.worker.text.test_tokenizer_text import fallback

BOS, END, FIM = "<s>", "</s>", "<fim>"


def byte_level(directory: Path) -> Tokenizer:
    """As Llama 3's: BOS and EOS around a text, and offsets that leave a token's spaces out."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate([*alphabet, "Ġa", "ab", "ĠĠ"])}
    library = Library(models.BPE(vocabulary, [("Ġ", "a"), ("a", "b"), ("Ġ", "Ġ")]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([BOS, END, FIM])
    ids = [(text, library.token_to_id(text)) for text in (BOS, END)]
    around = processors.TemplateProcessing(single=f"{BOS} $A {END}", special_tokens=ids)
    trimmed = processors.ByteLevel(trim_offsets=True)
    library.post_processor = processors.Sequence([trimmed, around])
    library.save(str(directory / "tokenizer.json"))
    return Tokenizer(directory)


def prepending(directory: Path) -> Tokenizer:
    """As Llama 2's: a space is put before a text, and dropped from what is decoded."""
    words = [*(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "ab"]
    vocabulary = {word: i for i, word in enumerate(words)}
    library = Library(models.BPE(vocabulary, [("▁", "a"), ("a", "b")], byte_fallback=True))
    library.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    library.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    library.add_special_tokens([AddedToken(BOS, normalized=False)])
    around = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, library.token_to_id(BOS))]
    )
    library.post_processor = around
    library.save(str(directory / "tokenizer.json"))
    return Tokenizer(directory)


@pytest.fixture(scope="module", params=[byte_level, prepending, fallback])
def tokenizer(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Tokenizer:
    made: Tokenizer = request.param(tmp_path_factory.mktemp("tokenizer"))
    return made


CHARACTERS = st.text("ab é☃👩\n", max_size=12)
TEXTS = st.lists(CHARACTERS | st.sampled_from([BOS, FIM, "<"]), max_size=4).map("".join)


def check(tokenizer: Tokenizer, ids: list[int], places: list[int], text: str) -> None:
    """The places never decrease, lie in `text`, and each whole token stands at its own."""
    assert len(places) == len(ids)
    assert places == sorted(places)
    assert not places or (places[0] >= 0 and places[-1] <= len(text))
    first = tokenizer.encode("a", add_special_tokens=False)[0]
    puts_space = tokenizer.token_text(first).startswith(" ")  # which is not in the text
    for token_id, place in zip(ids, places, strict=True):
        own = tokenizer.token_text(token_id).split(REPLACEMENT)[0]
        (spelling,) = tokenizer.token_strs([token_id])
        is_byte = spelling.startswith("<0x")  # of a run of bytes one that is amiss spoils all
        if token_id in tokenizer.control_tokens or is_byte:
            continue
        if not text.startswith(own, place):
            assert puts_space, (own, place)
            assert text.startswith(own.removeprefix(" "), place)


@given(text=TEXTS, add=st.booleans(), special=st.booleans())
def test_tokens_of_a_text_stand_where_the_text_has_them(
    tokenizer: Tokenizer, text: str, add: bool, special: bool
) -> None:
    ids = tokenizer.encode(text, add_special_tokens=add, parse_special=special)
    places = tokenizer.places_in_text(text, add_special_tokens=add, parse_special=special)
    check(tokenizer, ids, places, text)
    inside = [place for place in places if text.startswith(FIM, place)]
    if special and FIM in tokenizer.control_tokens.values():
        assert len(inside) >= text.count(FIM)


@given(data=st.data(), skip=st.booleans())
def test_tokens_of_ids_stand_where_the_decoded_text_has_them(
    tokenizer: Tokenizer, data: st.DataObject, skip: bool
) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=24))
    text, places = tokenizer.decode_placed(ids, skip_special_tokens=skip)
    check(tokenizer, ids, places, text)
    if REPLACEMENT not in text:
        assert text == tokenizer.decode(ids, skip_special_tokens=skip)


@given(data=st.data(), stop=st.text("ab é", min_size=1, max_size=3), include=st.booleans())
def test_tokens_of_an_answer_stand_in_its_text_as_far_as_no_stop_string_cuts_it(
    tokenizer: Tokenizer, data: st.DataObject, stop: str, include: bool
) -> None:
    some = tokenizer.encode(data.draw(TEXTS), add_special_tokens=False, parse_special=True)
    any_ids = st.lists(st.integers(0, tokenizer.vocab_size - 1), min_size=1, max_size=24)
    ids = some or data.draw(any_ids)
    output_text, uncut = (
        OutputText(
            tokenizer.detokenizer(),
            stops=StopStrings(stops),
            stop_token_ids=frozenset(),
            min_tokens=0,
            include_stop=include,
        )
        for stops in ([stop], [])
    )
    places, sent, whole = list[int](), "", ""
    for at, token_id in enumerate(ids):
        is_last = at == len(ids) - 1
        whole += uncut.push(token_id, is_last=is_last, by_token=False)
        if output_text.stop_reason is None:
            sent += output_text.push(token_id, is_last=is_last, by_token=False)
            places.append(output_text.place())
    assert whole.startswith(sent)
    check(tokenizer, ids[: len(places)], places, whole)


def test_a_bos_takes_no_place_and_a_token_has_its_space(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path)
    text = f"b{FIM}ab ab  é"
    places = tokenizer.places_in_text(text, add_special_tokens=True, parse_special=True)
    ids = tokenizer.encode(text, parse_special=True)
    texts = [tokenizer.token_text(i) for i in ids]
    assert texts == [BOS, "b", FIM, "ab", " a", "b", "  ", REPLACEMENT, REPLACEMENT, END]
    assert places == [0, 0, 1, 6, 8, 10, 11, 13, 13, 14]


def test_parts_of_a_character_stand_where_it_does(tmp_path: Path) -> None:
    tokenizer = byte_level(tmp_path)
    output = tokenizer.detokenizer()
    broken = [tokenizer.encode("👩", add_special_tokens=False)[0]]
    places = []
    for token_id in tokenizer.encode("é ab👩b", add_special_tokens=False) + broken * 2 + [0]:
        output.push(token_id)
        places.append(output.place())
    assert places == [0, 0, 1, 3, 4, 4, 4, 4, 5, 6, 6, 8]
