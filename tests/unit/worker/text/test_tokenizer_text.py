"""Text to tokens and back: whole characters only, and no control token from a user's text."""

import json
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sluice_core.errors import CheckpointError
from sluice_worker.text.pieces import SHORT
from sluice_worker.text.tokenizer import Tokenizer
from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from tokenizers import Tokenizer as Library
from transformers import PreTrainedTokenizerFast


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Byte-level BPE with a BOS; too small for most characters, which are split into bytes."""
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library.train_from_iterator(["def f(x):\n    return x\n" * 20], trainer)
    library.post_processor = processors.TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", 0)]
    )
    path = tmp_path_factory.mktemp("tokenizer")
    library.save(str(path / "tokenizer.json"))
    return Tokenizer(path)


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return fallback(tmp_path_factory.mktemp("sentencepiece"))


def pieces(tokenizer: Tokenizer, token_ids: list[int]) -> list[str]:
    detokenizer = tokenizer.detokenizer()
    return [*(detokenizer.push(token_id) for token_id in token_ids), detokenizer.flush()]


@pytest.mark.parametrize("text", ["def f(x):", "naïve ☃ 日本語", "👩‍👩‍👧‍👦 family", "x" * 50, "é"])
def test_pieces_join_to_the_text_and_are_whole_characters(tokenizer: Tokenizer, text: str) -> None:
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    parts = pieces(tokenizer, token_ids)
    assert "".join(parts) == text
    assert not any("\ufffd" in part for part in parts)


def test_an_unfinished_character_shows_at_the_end_only(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("a☃", add_special_tokens=False)
    parts = pieces(tokenizer, token_ids[:-1])
    assert parts[0] == "a"
    assert "".join(parts[:-1]) == "a"
    assert "\ufffd" in parts[-1]


def test_special_token_strings_in_a_text_stay_text(tokenizer: Tokenizer) -> None:
    token_ids = tokenizer.encode("<eos>hi<bos>")
    assert token_ids[0] == 0
    assert 1 not in token_ids
    assert 0 not in token_ids[1:]
    assert tokenizer.decode(token_ids) == "<eos>hi<bos>"


def test_special_tokens_are_left_out_of_the_output(tokenizer: Tokenizer) -> None:
    body = tokenizer.encode("return", add_special_tokens=False)
    assert "".join(pieces(tokenizer, [0, *body, 1])) == "return"


def test_a_cut_prompt_keeps_its_end_and_what_stands_before_it(tokenizer: Tokenizer) -> None:
    whole = tokenizer.encode("def f(x): return x")
    for keep in range(2, len(whole) + 3):
        cut = tokenizer.encode("def f(x): return x", keep=keep)
        assert cut == (whole if keep >= len(whole) else [0, *whole[len(whole) - keep + 1 :]])
    assert tokenizer.encode("def f", keep=1) == tokenizer.encode("def f")[-1:]


def test_a_tokens_text_is_what_it_adds_inside_a_text(tmp_path: Path) -> None:
    library = Library(models.BPE(byte_fallback=True))
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    library.decoder = decoders.Metaspace(prepend_scheme="always")  # drops a text's first space
    trainer = trainers.BpeTrainer(special_tokens=["<eos>"], show_progress=False)
    library.train_from_iterator(["a cat and a cat"] * 9, trainer)
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    token_ids = tokenizer.encode("a cat and a cat", add_special_tokens=False)
    assert "".join(tokenizer.token_text(i) for i in token_ids) == " a cat and a cat"
    assert tokenizer.decode(token_ids) == "a cat and a cat"
    assert tokenizer.token_text(0) == "<eos>"


def test_the_texts_of_special_tokens_are_control_tokens_where_asked(tokenizer: Tokenizer) -> None:
    bare = partial(tokenizer.encode, add_special_tokens=False)
    assert 1 not in bare("a<eos>cat")
    assert bare("a<eos>cat", parse_special=True) == [*bare("a"), 1, *bare("cat")]


def fallback(directory: Path) -> Tokenizer:
    """Words and a space's mark, and bytes for all else, as sentencepiece has it."""
    words = [*(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", "a", "\u2581a", "\ufffd"]
    vocabulary = {word: i for i, word in enumerate(words)}
    library = Library(models.BPE(vocabulary, [("\u2581", "a")], byte_fallback=True))
    library.normalizer = normalizers.Replace(" ", "\u2581")
    library.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    library.save(str(directory / "tokenizer.json"))
    return Tokenizer(directory)


@pytest.mark.parametrize("text", ["😀😀", "日本語", "a😀é"])
def test_an_answer_that_ends_inside_a_character_keeps_those_before_it(
    tmp_path: Path, text: str
) -> None:
    """To such a decoder one byte that is amiss spoils all of its run."""
    tokenizer = fallback(tmp_path)
    token_ids = tokenizer.encode(text, add_special_tokens=False)
    for num in range(1, len(token_ids) + 1):
        detokenizer = tokenizer.detokenizer()
        shown = "".join([*map(detokenizer.push, token_ids[:num]), detokenizer.flush()])
        whole = b"".join(map(tokenizer.token_bytes, token_ids[:num])).decode(errors="ignore")
        assert shown.rstrip("\ufffd") == whole
        assert shown.count("\ufffd") <= 3, "those of the last character's bytes"


NO_MARK = st.characters(exclude_categories=["Cs"], exclude_characters="\u2581")


@given(text=st.text(NO_MARK, max_size=20) | st.text("a é☃👩\ufffd", max_size=20))
def test_the_bytes_of_tokens_join_to_those_of_the_text(
    tokenizer: Tokenizer, sentencepiece: Tokenizer, text: str
) -> None:
    for each in (tokenizer, sentencepiece):
        token_ids = each.encode(text, add_special_tokens=False)
        assert b"".join(map(each.token_bytes, token_ids)) == text.encode()
        for token_id in token_ids:
            assert each.token_bytes(token_id).decode(errors="replace") == each.token_text(token_id)


def test_special_tokens_are_shown_and_joined_as_asked(tmp_path: Path) -> None:
    library = Library(models.WordLevel({"<a>": 0, "<b>": 1, "word": 2}, unk_token="word"))
    library.add_special_tokens(["<a>", "<b>"])
    library.save(str(tmp_path / "tokenizer.json"))  # without a decoder, spaces join tokens
    tokenizer = Tokenizer(tmp_path)
    for fields, text in (
        ({}, "word"),
        ({"skip_special_tokens": False}, "<a> <b> word <a>"),
        (
            {"skip_special_tokens": False, "spaces_between_special_tokens": False},
            "<a><b> word <a>",
        ),
    ):
        detokenizer = tokenizer.detokenizer(**fields)
        pieces = [detokenizer.push(token_id) for token_id in (0, 1, 2, 0)]
        assert "".join([*pieces, detokenizer.flush()]) == text


@given(token_ids=st.lists(st.integers(0, 299), max_size=40))
def test_any_tokens_join_to_what_decoding_them_whole_gives(
    tokenizer: Tokenizer, token_ids: list[int]
) -> None:
    joined = "".join(pieces(tokenizer, token_ids))
    joined.encode()  # valid UTF-8: no lone surrogates
    whole = tokenizer.decode(token_ids)
    assert joined.replace("\ufffd", "") == whole.replace("\ufffd", "")


@pytest.mark.parametrize("way", ["encode", "encode_rendered", "decode"])
def test_a_long_text_is_worked_on_beside_other_threads(tokenizer: Tokenizer, way: str) -> None:
    text = "def add(a, b):\n    return x " * 20_000
    ids = tokenizer.encode(text)
    work: dict[str, Callable[[], object]] = {
        "encode": lambda: tokenizer.encode(text),
        "encode_rendered": lambda: tokenizer.encode_rendered([(text, False)]),
        "decode": lambda: tokenizer.decode(4 * ids),
    }
    begun, ended = threading.Event(), threading.Event()

    def run() -> None:
        begun.set()
        work[way]()
        ended.set()

    # A thread that never lets go is seen once: before, or when it is over.
    thread = threading.Thread(target=run)
    thread.start()
    begun.wait()
    num_turns = 0
    while not ended.is_set():
        time.sleep(0.001)
        num_turns += 1
    thread.join()
    assert num_turns >= 5


def test_a_long_text_is_what_its_pieces_are(tokenizer: Tokenizer) -> None:
    text = "def add(a, b):\n" * 200
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.encode("def add(a, b):\n", add_special_tokens=False) * 200 == ids
    assert len(ids) > SHORT
    assert tokenizer.decode(ids) == text


def test_bytes_that_are_no_characters_do_not_pile_up(
    tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    lengths: list[int] = []
    whole = tokenizer.decode

    def decode(token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        lengths.append(len(token_ids))
        return whole(token_ids, skip_special_tokens=skip_special_tokens)

    parts = tokenizer.encode("日本語", add_special_tokens=False)  # three bytes each, as tokens
    stray = [parts[0]] * 150 + [parts[1]] * 150  # beginnings, then what only continues
    stream = [*stray, *parts, *stray]
    monkeypatch.setattr(tokenizer, "decode", decode)
    assert "".join(pieces(tokenizer, stream)) == whole(stream)
    assert max(lengths) < 40
    assert "日本語" in whole(stream)


def test_broken_tokenizer_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: not a tokenizer"):
        Tokenizer(tmp_path)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: missing"):
        Tokenizer(tmp_path / "absent")


def test_an_output_keeps_the_space_that_it_begins_with(tmp_path: Path) -> None:
    library = Library(models.BPE(byte_fallback=True))
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    library.decoder = decoders.Metaspace(prepend_scheme="always")  # drops a text's first space
    library.train_from_iterator(["a cat and a cat"] * 9, trainers.BpeTrainer(show_progress=False))
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    token_ids = tokenizer.encode("cat and", add_special_tokens=False)
    assert "".join(pieces(tokenizer, token_ids)) == " cat and"


@pytest.mark.parametrize("decoder", [None, decoders.Metaspace(), decoders.WordPiece(prefix="▁")])
def test_any_number_of_left_out_tokens_does_not_change_what_follows(
    tmp_path: Path, decoder: decoders.Decoder | None
) -> None:
    """As a checkpoint without chat training writes under ignore_eos."""
    library = Library(models.BPE({"<eos>": 0, "a": 1, "▁": 2, "c": 3, "▁c": 4}, [("▁", "c")]))
    library.add_special_tokens(["<eos>"])
    if decoder is not None:
        library.decoder = decoder
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    assert "".join(pieces(tokenizer, [1, *[0] * 40, 4, 3, *[0] * 40, 4])) == "".join(
        pieces(tokenizer, [1, 4, 3, 4])
    )


BOS_AND_EOS = {"bos_token": "<bos>", "eos_token": {"content": "<eos>", "__type": "AddedToken"}}
ADDING = [
    {},
    {"add_bos_token": False},
    {"add_bos_token": True},
    {"add_eos_token": True},
    {"add_bos_token": True, "add_eos_token": True},
]


@pytest.mark.parametrize("fields", ADDING)
@pytest.mark.parametrize("single", ["<bos> $A", "$A", "$A <eos>"])
def test_what_tokenizer_json_puts_around_a_text_counts_as_in_transformers(
    tokenizer: Tokenizer, tmp_path: Path, fields: dict[str, object], single: str
) -> None:
    whole = json.loads(tokenizer._tokenizer.to_str())
    template = processors.TemplateProcessing(
        single=single, special_tokens=[("<bos>", 0), ("<eos>", 1)]
    )
    steps = [processors.ByteLevel(trim_offsets=False), template]
    for processor in (template, processors.Sequence(steps)):
        whole["post_processor"] = json.loads(processor.__getstate__())
        write(tmp_path, whole, BOS_AND_EOS | fields)
        expected = PreTrainedTokenizerFast.from_pretrained(tmp_path).encode("return x")
        assert Tokenizer(tmp_path).encode("return x") == expected


@pytest.mark.parametrize(
    ("fields", "around"),
    [
        *zip(ADDING, [([], []), ([], []), ([0], []), ([], [1]), ([0], [1])], strict=True),
        ({"add_bos_token": True, "bos_token": None}, ([], [])),
        ({"add_bos_token": True, "bos_token": "not one of its tokens"}, ([], [])),
    ],
)
@pytest.mark.parametrize("steps", [None, [], [processors.ByteLevel(trim_offsets=False)]])
def test_what_it_leaves_open_tokenizer_config_tells(
    tokenizer: Tokenizer,
    tmp_path: Path,
    fields: dict[str, object],
    around: tuple[list[int], ...],
    steps: list[processors.PostProcessor] | None,
) -> None:
    """transformers 5 puts nothing around such a text; 4 did, with which these were trained."""
    whole = json.loads(tokenizer._tokenizer.to_str())
    bare = None if steps is None else json.loads(processors.Sequence(steps).__getstate__())
    write(tmp_path, whole | {"post_processor": bare}, BOS_AND_EOS | fields)
    body = tokenizer.encode("return x", add_special_tokens=False)
    assert Tokenizer(tmp_path).encode("return x") == [*around[0], *body, *around[1]]


def write(directory: Path, tokenizer: object, config: object = None, **others: object) -> None:
    """The files of a tokenizer: tokenizer.json, tokenizer_config.json, and `others`."""
    files = {"tokenizer": tokenizer, "tokenizer_config": config or {}, **others}
    for name, fields in files.items():
        (directory / f"{name}.json").write_text(json.dumps(fields))


def with_end_of_text(*added: AddedToken) -> object:
    """Byte-level BPE of 257 tokens: <e> (256) is in the vocabulary; `added` are behind it."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = Library(models.BPE({text: i for i, text in enumerate([*letters, "<e>"])}, []))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_tokens([*added])
    return json.loads(library.to_str())


PLAIN = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False}
START, END = "<|im_start|>", "<|im_end|>"
LISTED = {
    "257": {"content": START, **PLAIN, "special": True},
    "258": {"content": END, **PLAIN, "rstrip": True, "special": False},
    "259": {"content": "<think>", **PLAIN, "special": False},
}


def known(**flags: bool) -> tuple[AddedToken, ...]:
    return tuple(AddedToken(text, **flags) for text in (START, END, "<think>"))


@pytest.mark.parametrize(
    ("added", "config", "others"),
    [
        ((), {"added_tokens_decoder": LISTED}, {}),
        ((), {"added_tokens_decoder": LISTED, "eos_token": END}, {}),
        ((), {"added_tokens_decoder": LISTED, "extra_special_tokens": [END]}, {}),
        ((), {"added_tokens_decoder": LISTED, "extra_special_tokens": {"end_token": END}}, {}),
        (known(), {"added_tokens_decoder": LISTED}, {}),
        (known(special=True), {"added_tokens_decoder": LISTED}, {}),
        (known(rstrip=True), {"eos_token": END, "pad_token": "<e>"}, {}),
        (known(rstrip=True), {"additional_special_tokens": [END, "<think>"]}, {}),
        (known(), {"eos_token": "<e>"}, {}),
        (known(), {}, {"special_tokens_map": {"eos_token": {"content": "<e>", **PLAIN}}}),
        (known(), {"eos_token": END}, {"special_tokens_map": {"eos_token": "<e>"}}),
        (known(), {}, {"special_tokens_map": {"additional_special_tokens": [START]}}),
        # Not read: tokenizer_config.json has a list.
        (known(), {"added_tokens_decoder": {}}, {"special_tokens_map": {"eos_token": "<e>"}}),
        (known(), {"added_tokens_decoder": {}, "eos_token": END}, {}),
        ((), {"added_tokens_decoder": {}}, {"added_tokens": {START: 257}}),
        ((), {"eos_token": END}, {"added_tokens": {END: 258, START: 257, "<e>": 256}}),
        (known(rstrip=True), {"eos_token": END}, {"added_tokens": {"<think>": 259, START: 257}}),
    ],
)
def test_tokens_that_only_the_files_beside_it_name_are_as_in_transformers(
    tmp_path: Path,
    added: tuple[AddedToken, ...],
    config: dict[str, object],
    others: dict[str, object],
) -> None:
    write(tmp_path, with_end_of_text(*added), config, **others)
    ours, theirs = Tokenizer(tmp_path), PreTrainedTokenizerFast.from_pretrained(tmp_path)
    text = f"{START}a{END}  <think>b<e>"
    expected = theirs.encode(text, add_special_tokens=False)
    assert ours.encode(text, parse_special=True) == expected
    assert not {*ours.control_tokens} & {*ours.encode(text)}
    ids = range(len(theirs))
    assert ours.vocab_size == len(ids)
    for token_id in ids[200:]:
        for skip in (False, True):
            assert ours.decode([token_id], skip_special_tokens=skip) == theirs.decode(
                [token_id], skip_special_tokens=skip
            )
    assert ours.config.eos_token_id == theirs.eos_token_id


def test_a_special_token_without_an_id_stays_text(tmp_path: Path) -> None:
    """transformers gives it the next id, for which the model may have no row."""
    write(tmp_path, with_end_of_text(), {"pad_token": "[PAD]", "eos_token": "</s>"})
    tokenizer = Tokenizer(tmp_path)
    assert (tokenizer.vocab_size, tokenizer.control_tokens) == (257, {})
    assert tokenizer.config.eos_token_id is None


@pytest.mark.parametrize(
    ("added", "config", "others", "sentence"),
    [
        (
            (),
            {"added_tokens_decoder": {"300": {"content": "x>"}}},
            {},
            "token 300, which .* is 257",
        ),
        ((), {}, {"added_tokens": {"<x>": 300}}, "added_tokens.json: '<x>' is listed as token 300"),
        ((), {}, {"added_tokens": {"<x>": "300"}}, "must hold an id for each token"),
        ((), {"added_tokens_decoder": []}, {}, "must hold tokens by their ids"),
        ((), {"added_tokens_decoder": {"x": {"content": "<x>"}}}, {}, "tokens by their ids"),
        ((), {"added_tokens_decoder": {"257": {"special": True}}}, {}, "tokens by their ids"),
        ((), {"eos_token": "\ud800"}, {}, "has a lone surrogate"),
    ],
)
def test_lists_of_tokens_that_cannot_be_true_are_refused(
    tmp_path: Path,
    added: tuple[AddedToken, ...],
    config: dict[str, object],
    others: dict[str, object],
    sentence: str,
) -> None:
    write(tmp_path, with_end_of_text(*added), config, **others)
    with pytest.raises(CheckpointError, match=sentence):
        Tokenizer(tmp_path)


def test_a_stale_list_leaves_a_token_the_id_that_tokenizer_json_has(tmp_path: Path) -> None:
    listed = {"257": {"content": END, "special": True}}
    write(tmp_path, with_end_of_text(*known()), {"added_tokens_decoder": listed})
    assert Tokenizer(tmp_path).encode(END, parse_special=True) == [258]


SIGNS, OTHERS = "<s/>", "áéíó"


def spaced(*, prepends: bool, scheme: str = "") -> Library:
    """As sentencepiece has it: a space is put before a text, by the normalizer or by the mark."""
    words = [*"▁ab \n", *SIGNS, *OTHERS, "▁a", "ab", "▁ab"]
    merges = [("▁", "a"), ("a", "b"), ("▁", "ab")]
    library = Library(models.BPE({word: i for i, word in enumerate(words)}, merges))
    if prepends:
        library.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    if scheme:
        library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
    stripped = AddedToken("</s>", rstrip=True, normalized=False)
    library.add_special_tokens([AddedToken("<s>", normalized=False), stripped])
    return library


WRITTEN = st.text("ab <s/>\n", max_size=4)
USERS = st.sampled_from(["<s>", "</s>", "<", "</", "a<s>b"])
PIECES = st.lists(st.tuples(WRITTEN, st.just(False)) | st.tuples(USERS, st.just(True)), max_size=6)


@pytest.mark.parametrize(
    "library",
    [
        spaced(prepends=True),
        spaced(prepends=False, scheme="first"),
        spaced(prepends=False, scheme="always"),
        spaced(prepends=False),
    ],
)
def test_a_text_of_pieces_is_encoded_as_the_whole_is(library: Library, tmp_path: Path) -> None:
    """A control token of a user, or the beginning of one, puts no space into his text."""
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    tokenizer.serve_templates(["a template"])
    plain = partial(tokenizer.encode, add_special_tokens=False)
    for parts in (["a", "<s>", "b", "</s>", "ab"], ["a b ", "<", "\nb"]):
        pieces = [(part, i % 2 == 1) for i, part in enumerate(parts)]
        assert tokenizer.encode_rendered(pieces) == plain("".join(parts))

    @given(PIECES)
    def check(pieces: list[tuple[str, bool]]) -> None:
        """The library reads it all where the user's signs are others, of which nothing is made."""
        other = str.maketrans(SIGNS, OTHERS)
        text = "".join(piece.translate(other) if plain else piece for piece, plain in pieces)
        others, signs = (map(library.token_to_id, each) for each in (OTHERS, SIGNS))
        back = dict(zip(others, signs, strict=True))
        expected = library.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode_rendered(pieces) == [back.get(i, i) for i in expected]

    check()


def test_delimiters_that_are_not_called_special_are_control_tokens_of_templates(
    tmp_path: Path,
) -> None:
    """As in DeepSeek's distilled models, whose turns begin with such."""
    library = Library(models.BPE(unk_token=None))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    library.train_from_iterator(
        [], trainers.BpeTrainer(initial_alphabet=alphabet, show_progress=False)
    )
    library.add_tokens(["<｜User｜>", "<think>"])
    library.add_special_tokens(["<|end|>"])
    library.save(str(tmp_path / "tokenizer.json"))
    vocabulary = library.get_vocab()
    user, think, end = (vocabulary[text] for text in ("<｜User｜>", "<think>", "<|end|>"))
    tokenizer = Tokenizer(tmp_path)
    text = "hi<｜User｜><think><|end|>"
    control = tokenizer.serve_templates(["<｜User｜>{{ text }}<think>"])
    assert sorted(control) == ["<|end|>", "<｜User｜>"]
    for ids in (tokenizer.encode(text), tokenizer.encode_rendered([(text, True)])):
        assert think in ids
        assert not {user, end} & {*ids}
        assert tokenizer.decode(ids) == text
    assert {user, think, end} <= {*tokenizer.encode_rendered([(text, False)])}
    mixed = tokenizer.encode_rendered(
        [("<｜User｜>", False), ("<｜User｜>", True), ("<|end|>", False)]
    )
    assert (mixed[0], mixed[-1], mixed.count(user)) == (user, end, 1)
    assert tokenizer.decode([user, think, end]) == "<｜User｜><think>"  # special ones are left out
