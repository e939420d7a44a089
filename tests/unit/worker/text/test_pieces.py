"""A long text is tokenised in pieces, whose tokens are those of the whole text."""

import random
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sluice_core.errors import RequestError
from sluice_worker.text import pieces as module
from sluice_worker.text.pieces import pieces, token_ids
from sluice_worker.text.tokenizer import Tokenizer
from tokenizers import Tokenizer as Library
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers
from unit.worker.api.tiny import TEXT, write_checkpoint

WORDS = [
    "def",
    "add",
    "(a, b):",
    "\n    ",
    " return",
    "   ",
    "é",
    "日本",
    "👩‍👧",
    "e\u0301",
    "1234",
    "\t",
]
SMALL = {"PIECE": 256, "OVERLAP": 128}


def trained(library: Library, *more: str) -> Library:
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=[*pre_tokenizers.ByteLevel.alphabet(), *more],
        show_progress=False,
    )
    library.train_from_iterator([*TEXT, "".join(WORDS) * 4], trainer)
    return library


def byte_level(*normalizing: normalizers.Normalizer) -> Library:
    library = Library(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.normalizer = normalizers.Sequence([*normalizing])
    library.decoder = decoders.ByteLevel()
    return trained(library)


def metaspace() -> Library:
    """As sentencepiece: no words, and a space in front of the text."""
    library = Library(models.BPE(byte_fallback=True, unk_token=None))
    library.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    return trained(library, "▁")


PAIRS = Library(models.BPE({"a": 0, "aa": 1, " ": 2, "b": 3}, [("a", "a")]))
LIBRARIES = [byte_level(), byte_level(normalizers.NFC()), metaspace()]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SMALL.items():
        monkeypatch.setattr(module, name, value)


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("library", LIBRARIES, ids=["bytes", "NFC", "metaspace"])
def test_pieces_have_the_tokens_and_places_of_the_whole(library: Library) -> None:
    several = 0

    @settings(max_examples=60, deadline=None)
    @given(st.integers(0, 2**32), st.integers(0, 2500))
    def check(seed: int, num_words: int) -> None:
        nonlocal several
        chosen = random.Random(seed)
        text = "".join(chosen.choice(WORDS) for _ in range(num_words))
        whole = library.encode(text, add_special_tokens=False)
        found = [*pieces(library, text, offsets=True)]
        several = max(several, len(found))
        assert [token_id for piece in found for token_id in piece.ids] == whole.ids
        assert [span for piece in found for span in piece.spans] == whole.offsets

    check()
    assert several > 4


@pytest.mark.usefixtures("small")
def test_a_word_longer_than_the_overlap_makes_a_longer_piece(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Begun at an odd place, a word of one letter has its tokens of two at other places."""
    monkeypatch.setattr(module, "OVERLAP", 127)
    text = "aab " + "a" * 1000 + " b a"
    assert token_ids(PAIRS, text) == PAIRS.encode(text).ids
    assert len([*pieces(PAIRS, text)]) < 1000 // SMALL["PIECE"]


@pytest.mark.usefixtures("small")
def test_a_word_of_many_pieces_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "OVERLAP", 127)
    monkeypatch.setattr(module, "MOST_BYTES", 2048)
    assert len(token_ids(PAIRS, "a" * 1500)) == 750
    with pytest.raises(RequestError, match="a word of over"):
        token_ids(PAIRS, "a" * 9000)


@pytest.mark.usefixtures("small")
def test_counting_ends_where_its_check_raises(tmp_path: Path) -> None:
    tokenizer, seen = Tokenizer(write_checkpoint(tmp_path)), list[int]()

    def check(num_tokens: int) -> None:
        seen.append(num_tokens)
        if num_tokens > 1000:
            raise RequestError("enough")

    with pytest.raises(RequestError, match="enough"):
        tokenizer.encode("Q" * 100_000, check=check)
    assert 1000 < seen[-1] < 2000
    with pytest.raises(RequestError, match="enough"):
        tokenizer.encode_rendered([("Q" * 100_000, False)], check)
    with pytest.raises(RequestError, match="enough"):
        tokenizer.encode_rendered(
            [("Q" * 900, False), ("<|end|>", True), ("Q" * 900, False)], check
        )


@pytest.mark.usefixtures("small")
def test_control_tokens_of_a_long_chat_stand_where_the_template_wrote_them(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_checkpoint(tmp_path))
    (end,) = tokenizer.control_tokens
    chosen = random.Random(0)
    turns = ["".join(chosen.choices(WORDS, k=chosen.randrange(60))) for _ in range(200)]
    written = [piece for turn in turns for piece in ((turn, False), ("<|end|>", False))]
    ids = tokenizer.encode_rendered([*written, ("<|end|>", True)])
    expected = [i for turn in turns for i in [*tokenizer.encode(turn), end]]
    assert ids == expected + tokenizer.encode("<|end|>")


@pytest.fixture
def peak_mib() -> Iterator[list[float]]:
    """The growth of this process's resident memory, in MiB, at its peak."""
    peak, done, before = [0.0], threading.Event(), resident_mib()

    def watch() -> None:
        while not done.is_set():
            peak[0] = max(peak[0], resident_mib() - before)
            time.sleep(0.002)

    thread = threading.Thread(target=watch)
    thread.start()
    yield peak
    done.set()
    thread.join()


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) / 256


@pytest.mark.parametrize("char", ["Q", "👩", " a"])
def test_memory_does_not_grow_with_the_text(
    tmp_path: Path, peak_mib: list[float], char: str
) -> None:
    """As one piece these took 300 to 700 MiB."""
    tokenizer = Tokenizer(write_checkpoint(tmp_path))
    num = sum(len(piece.ids) for piece in pieces(tokenizer._tokenizer, char * (1 << 20)))
    assert num >= 1 << 20
    assert peak_mib[0] < 130
