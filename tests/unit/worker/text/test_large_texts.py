"""A large text: refused by its length where it cannot fit, cut before it is tokenised, in turn."""

import asyncio
import json
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sluice_core.errors import ContextLengthExceeded
from sluice_frontend.api.generate import parse_completion
from sluice_frontend.config import ServerConfig
from sluice_frontend.http.offload import LARGE, FairQueue
from sluice_worker.api.service import Service
from sluice_worker.base.config import EngineConfig, WorkerConfig
from sluice_worker.text import pieces
from sluice_worker.text.tokenizer import SLACK, Tokenizer
from sluice_worker.text.vocabulary import longest_token
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Library
from unit.worker.api.test_waiting_memory import READY, create_service, serves
from unit.worker.api.tiny import write_checkpoint

LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
FALLBACK = [f"<0x{byte:02X}>" for byte in range(256)]
MARK = "▁"
TEXTS = st.text(max_size=40) | st.text("aáe\u0301\u0345\u0313 ab", max_size=40)


def byte_level(*normalizing: normalizers.Normalizer) -> Library:
    vocabulary = {token: i for i, token in enumerate([*LETTERS, "aa", "ab", "aaab"])}
    library = Library(models.BPE(vocabulary, [("a", "a"), ("a", "b"), ("aa", "ab")]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.normalizer = normalizers.Sequence([*normalizing])
    return library


def fallback() -> Library:
    vocabulary = {
        token: i for i, token in enumerate([*FALLBACK, MARK, "a", "b", "ab", MARK + "ab"])
    }
    merges = [("a", "b"), (MARK, "ab")]
    library = Library(models.BPE(vocabulary, merges, byte_fallback=True))
    library.normalizer = normalizers.Sequence(
        [normalizers.Prepend(MARK), normalizers.Replace(" ", MARK)]
    )
    return library


@pytest.mark.parametrize(
    ("library", "longest"),
    [(byte_level(), 4), (byte_level(normalizers.NFC()), 16), (fallback(), 6)],
)
def test_a_text_has_a_token_for_each_so_many_characters(library: Library, longest: int) -> None:
    assert longest_token(library) == longest

    @given(TEXTS)
    def check(text: str) -> None:
        num_tokens = len(library.encode(text, add_special_tokens=False).ids)
        assert num_tokens * longest >= len(text)

    check()


def lossy() -> list[Library]:
    """Each may make few tokens of any text."""
    words = Library(models.WordLevel({"a": 0}, unk_token="a"))
    cut, stripped, swallowing, incomplete = (byte_level() for _ in range(4))
    cut.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(" "), "removed"), pre_tokenizers.ByteLevel()]
    )
    stripped.normalizer = normalizers.Strip()
    swallowing.add_tokens([AddedToken("<x>", rstrip=True)])
    incomplete.model = models.BPE({"a": 0}, [])
    return [words, cut, stripped, swallowing, incomplete]


@pytest.mark.parametrize("library", lossy())
def test_nothing_is_said_where_a_text_of_any_length_may_be_few_tokens(library: Library) -> None:
    assert longest_token(library) is None


def test_a_long_text_is_cut_to_the_tokens_that_its_end_has(tmp_path: Path) -> None:
    tokenizer = Tokenizer(write_checkpoint(tmp_path))
    longest = longest_token(Library.from_file(str(tmp_path / "tokenizer.json")))
    text = "".join(f"def f{i}(a, b):\n    return a + {i}\n" for i in range(4000))
    whole = tokenizer.encode(text)
    for keep in (1, 2, 100, 1000):
        assert longest
        assert len(text) > keep * longest + SLACK
        assert tokenizer.encode(text, keep=keep) == whole[-keep:]


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Service:
    """A worker whose engine serves, and which cannot tokenise."""
    directory = write_checkpoint(tmp_path)
    (directory / "chat_template.jinja").write_text("{{ messages[0].content }}")
    service = Service(WorkerConfig(EngineConfig(model=str(directory)), ServerConfig()))
    serves(service)

    def refuse(*args: object, **fields: object) -> None:
        raise AssertionError("a text was tokenised")

    monkeypatch.setattr(service.tokenizer, "encode", refuse)
    monkeypatch.setattr(service.tokenizer, "encode_rendered", refuse)
    return service


async def test_a_text_that_cannot_fit_is_not_tokenised(service: Service) -> None:
    text = "x" * 1_000_000
    asked = parse_completion(json.dumps({"prompt": ["a", text]}).encode())
    with pytest.raises(ContextLengthExceeded, match="and it has at least [0-9]+$") as refused:
        await service.open(asked, 0.0)
    assert refused.value.param == "prompt"


async def test_a_chat_that_cannot_fit_is_not_tokenised(service: Service) -> None:
    body = json.dumps({"messages": [{"role": "user", "content": "x" * 1_000_000}]}).encode()
    with pytest.raises(ContextLengthExceeded, match="and it has at least [0-9]+$") as refused:
        await service.read_chat(body)
    service.close()
    assert refused.value.param == "messages"


async def test_a_text_is_read_no_further_than_the_window(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service, seen, encoded = create_service(tmp_path, ServerConfig()), list[int](), pieces.encoded

    def counted(library: Library, text: str, *, offsets: bool = False) -> Any:
        seen.append(len(text))
        return encoded(library, text, offsets=offsets)

    monkeypatch.setattr(pieces, "PIECE", 1024)
    monkeypatch.setattr(pieces, "OVERLAP", 64)
    monkeypatch.setattr(pieces, "encoded", counted)
    text = "Q" * (READY.max_model_len * 5)
    assert service.tokenizer.fewest(len(text)) < READY.max_model_len
    with pytest.raises(ContextLengthExceeded, match="at least"):
        await service.open(parse_completion(json.dumps({"prompt": text}).encode()), 0.0)
    assert READY.max_model_len < sum(seen) < len(text) / 2


async def test_large_texts_are_tokenised_one_at_a_time_and_small_ones_beside_them() -> None:
    begun, has_begun, may_end = list[str](), threading.Event(), threading.Event()
    turns, threads = FairQueue(), set()

    def work(name: str) -> None:
        begun.append(name)
        has_begun.set()
        threads.add(threading.get_ident())
        may_end.wait(10)

    large = [
        asyncio.create_task(turns.result(LARGE + 1, partial(work, name)))
        for name in ("first", "second")
    ]
    assert await asyncio.to_thread(has_begun.wait, 10)
    assert await turns.result(LARGE, lambda: "small") == "small"
    assert begun == ["first"]
    may_end.set()
    await asyncio.gather(*large)
    assert begun == ["first", "second"]
    assert len(threads) == 1  # each thread that had one would keep its memory


async def test_large_bodies_have_turns_from_their_parsing_to_their_submission(
    tmp_path: Path,
) -> None:
    service = create_service(tmp_path, ServerConfig())
    async with service.turn(LARGE + 1):
        async with service.turn(LARGE):
            pass  # beside it
        other = asyncio.create_task(service.turn(LARGE + 1).__aenter__())
        for _ in range(10):
            await asyncio.sleep(0)
        assert not other.done()
    await other
