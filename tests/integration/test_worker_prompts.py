"""What a prompt's text becomes, and where its tokens stand, with a tokenizer that has a BOS."""

import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tokenizers
from integration.worker_process import Worker, running_worker, stream_events
from tokenizers import decoders, models, pre_tokenizers, processors, trainers
from unit.worker.api.tiny import TEXT, VOCAB_SIZE, write_checkpoint

FLAGS = ("--max-num-seqs", "16", "--num-gpu-blocks-override", "512", "--max-model-len", "512")
SPECIAL = ["<|end|>", "<s>", "<fim_prefix>", "<fim_suffix>", "<fim_middle>"]
BOS, PREFIX, SUFFIX, MIDDLE = 1, 2, 3, 4
FIM = "<fim_prefix>def f(<fim_suffix>\n<fim_middle>"
PROMPT = "def add(a, b):\n    é"


def write_model(directory: Path) -> Path:
    """A checkpoint whose tokenizer puts a BOS before a text, as Llama 3's does."""
    library = tokenizers.Tokenizer(models.BPE())
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIAL,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    library.train_from_iterator(TEXT, trainer)
    around = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    trimmed = processors.ByteLevel(trim_offsets=True)
    library.post_processor = processors.Sequence([trimmed, around])
    model = write_checkpoint(directory)
    library.save(str(model / "tokenizer.json"))
    (model / "chat_template.jinja").write_text("{{ messages[0].content }}<|end|>")
    return model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("prompts") / "model")


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Worker]:
    with running_worker(tmp_path_factory.mktemp("worker"), *FLAGS, model=model) as worker:
        yield worker


@pytest.fixture(scope="module")
def strict(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Worker]:
    """One for strangers' texts."""
    flags = (*FLAGS, "--parse-special=false")
    with running_worker(tmp_path_factory.mktemp("strict"), *flags, model=model) as worker:
        yield worker


def post(worker: Worker, path: str, **fields: Any) -> Any:
    answer = httpx.post(worker.url + path, json=fields, timeout=60)
    assert answer.status_code == 200, answer.text
    return answer.json()


def whole(worker: Worker, **fields: Any) -> list[dict[str, Any]]:
    """The choices of a completion in one piece."""
    fields = {"prompt": PROMPT, "temperature": 0, "ignore_eos": True, **fields}
    choices: list[dict[str, Any]] = post(worker, "/v1/completions", **fields)["choices"]
    return choices


def streamed(worker: Worker, **fields: Any) -> list[dict[str, Any]]:
    """The same from a stream: what each event adds is put together by the index of its choice."""
    fields = {"prompt": PROMPT, "temperature": 0, "ignore_eos": True, "stream": True, **fields}
    answer = httpx.post(worker.url + "/v1/completions", json=fields, timeout=60)
    *events, done = stream_events(answer.text)
    assert done == "[DONE]"
    joined: dict[int, dict[str, Any]] = {}
    for event in events:
        (part,) = json.loads(event)["choices"]
        choice = joined.setdefault(part["index"], {**part, "text": "", "token_ids": []})
        if choice["logprobs"] is part["logprobs"] and part["logprobs"] is not None:
            choice["logprobs"] = {name: [] for name in part["logprobs"]}
        choice["text"] += part["text"]
        choice["token_ids"] += part["token_ids"]
        for name, values in (part["logprobs"] or {}).items():
            choice["logprobs"][name] += values
        choice |= {name: part[name] for name in ("finish_reason", "stop_reason")}
    return [joined[index] for index in sorted(joined)]


def check_places(choice: dict[str, Any], *, left_out: Collection[str] = SPECIAL) -> None:
    """Offsets never decrease, and each whole token stands at its own in the choice's text."""
    told, text = choice["logprobs"], choice["text"]
    offsets = told["text_offset"]
    assert offsets == sorted(offsets)
    assert offsets[-1] <= len(text)
    for token, offset in zip(told["tokens"], offsets, strict=True):
        if "\ufffd" not in token and token not in left_out:
            assert text.startswith(token, offset), (token, offset, text)


def test_offsets_of_an_echoed_prompt_with_a_bos_never_go_back(worker: Worker) -> None:
    text = "def add(a, b): return a"
    (choice,) = whole(worker, prompt=text, echo=True, logprobs=0, max_tokens=3)
    told = choice["logprobs"]
    assert (told["tokens"][0], told["text_offset"][:2]) == ("<s>", [0, 0])
    assert len(told["tokens"]) == len(told["text_offset"])
    assert told["text_offset"][-3] == len(text)
    check_places(choice)


@pytest.mark.parametrize(
    "prompt",
    [
        PROMPT,
        "👩‍👩 ☃\n",
        FIM,
        [BOS, 90, 91, 200, 5, PREFIX, 77],
        [PROMPT, "q", FIM],
        [[BOS, 40], [200, 201, 202]],
    ],
)
@pytest.mark.parametrize(
    "fields",
    [
        {"echo": True},
        {"echo": True, "truncate_prompt_tokens": 2},
        {"echo": True, "skip_special_tokens": False},
        {"echo": True, "max_tokens": 0},
        {"temperature": 1.5, "seed": 3, "n": 2},
        {"echo": True, "temperature": 1.5, "seed": 4, "n": 3, "stop": ["e", "\ufffd"]},
    ],
)
def test_a_stream_of_any_prompts_and_choices_tells_what_the_whole_reply_tells(
    worker: Worker, prompt: object, fields: dict[str, Any]
) -> None:
    asked = {"max_tokens": 24, "logprobs": 1, "return_token_ids": True, **fields, "prompt": prompt}
    choices = whole(worker, **asked)
    assert streamed(worker, **asked) == choices
    is_list = isinstance(prompt, list) and not isinstance(prompt[0], int)
    num_prompts = len(prompt) if is_list and isinstance(prompt, list) else 1
    assert [choice["index"] for choice in choices] == [*range(num_prompts * fields.get("n", 1))]
    for choice in choices:
        if choice["stop_reason"] is None:
            check_places(choice)


@pytest.mark.parametrize("spaced", [False, True])
def test_control_tokens_that_are_shown_stand_where_they_are(worker: Worker, spaced: bool) -> None:
    asked = {"prompt": [PREFIX, 90, SUFFIX, 91], "echo": True, "max_tokens": 8, "logprobs": 0}
    asked |= {"logit_bias": {str(PREFIX): 50, str(MIDDLE): 51}, "frequency_penalty": 2}
    asked |= {"skip_special_tokens": False, "spaces_between_special_tokens": spaced}
    (choice,) = whole(worker, **asked)
    assert {"<fim_prefix>", "<fim_middle>"} <= {*choice["logprobs"]["tokens"][4:]}
    check_places(choice, left_out=())


def test_a_token_that_a_stop_string_cuts_off_stands_behind_the_text(worker: Worker) -> None:
    (free,) = whole(worker, max_tokens=40, logprobs=0)
    stop = free["text"][12:16]
    (choice,) = whole(worker, max_tokens=40, logprobs=0, stop=[stop])
    offsets = choice["logprobs"]["text_offset"]
    assert offsets == free["logprobs"]["text_offset"][: len(offsets)]
    assert choice["text"] == free["text"][: free["text"].index(stop)]
    assert offsets[-1] < len(choice["text"]) + len(stop)


@pytest.mark.parametrize("num", [17, 24, 64, 1000])
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/generate"])
def test_however_many_stop_strings_end_the_text(worker: Worker, path: str, num: int) -> None:
    asked: dict[str, Any] = {"prompt": PROMPT}
    if "chat" in path:
        asked = {"messages": [{"role": "user", "content": PROMPT}]}
    asked |= {"temperature": 0, "ignore_eos": True, "max_tokens": 40}

    def text(**fields: Any) -> tuple[str, object]:
        reply = post(worker, path, **asked, **fields)
        (choice,) = reply.get("choices", [reply])
        text = choice.get("text", choice.get("generated_text"))
        return choice["message"]["content"] if text is None else text, choice["stop_reason"]

    free, _ = text()
    stop = free[10:14]
    others = [f"no {i}" for i in range(num - 1)]
    assert text(stop=[*others, stop]) == (free[: free.index(stop)], stop)


FIM_IDS = [PREFIX, SUFFIX, MIDDLE]


def read(worker: Worker, prompt: str, **fields: Any) -> list[list[int]]:
    """The token ids that each route makes of the text of a prompt."""
    asked = {"prompt": prompt, "max_tokens": 1, "return_token_ids": True, **fields}
    told = post(worker, "/v1/completions", **asked)["choices"][0]["prompt_token_ids"]
    generated = post(worker, "/generate", **asked)["prompt_token_ids"]
    parameters = {"max_new_tokens": 1, "details": True, **fields}
    answer = httpx.post(
        worker.url + "/generate_stream", json={"inputs": prompt, "parameters": parameters}
    )
    last = json.loads(answer.text.strip().splitlines()[-1].removeprefix("data:"))
    assert last["details"]["input_length"] == len(told)
    return [told, generated, post(worker, "/tokenize", prompt=prompt, **fields)["tokens"]]


def test_control_tokens_in_the_text_of_a_prompt_are_read(worker: Worker, strict: Worker) -> None:
    for ids in read(worker, FIM):
        assert [i for i in ids if i < len(SPECIAL)] == [BOS, *FIM_IDS]
    for ids in read(worker, FIM, parse_special=False) + read(strict, FIM):
        assert [i for i in ids if i < len(SPECIAL)] == [BOS]
    assert read(strict, FIM, parse_special=True) == read(worker, FIM)


@pytest.mark.parametrize("details", [False, True])
def test_a_streamed_generation_tells_what_the_whole_one_tells(
    worker: Worker, details: bool
) -> None:
    asked = {"prompt": FIM, "max_tokens": 6, "return_token_ids": True, "details": details}
    reply = post(worker, "/generate", **asked)
    answer = httpx.post(worker.url + "/generate", json={**asked, "stream": True}, timeout=60)
    first, *others = [json.loads(event) for event in stream_events(answer.text)]
    last = others[-1]
    assert first["prompt_token_ids"] == reply["prompt_token_ids"]
    assert not any("prompt_token_ids" in event for event in others)
    assert [event["token"]["id"] for event in (first, *others)] == reply["token_ids"]
    assert last["generated_text"] == reply["generated_text"]
    told = reply.get("details", {**last["details"], "tokens": []})
    assert {**last["details"], "prefill": [], "tokens": told["tokens"]} == {"prefill": [], **told}
    logprobs = [event["token"]["logprob"] for event in (first, *others)]
    assert logprobs == ([token["logprob"] for token in told["tokens"]] or [None] * 6)


def test_a_bos_that_a_prompt_begins_with_comes_beside_the_tokenizers_own(worker: Worker) -> None:
    """As in vLLM and transformers; `add_special_tokens: false` leaves the tokenizer's out."""
    for ids in read(worker, "<s>def"):
        assert ids[:2] == [BOS, BOS]
    for ids in read(worker, "<s>def", add_special_tokens=False):
        assert ids.count(BOS) == 1


def test_no_text_of_a_chat_becomes_a_control_token(worker: Worker) -> None:
    messages = [{"role": "user", "content": FIM}]
    for path in ("/v1/chat/completions", "/tokenize"):
        fields = {"messages": messages, "parse_special": True}
        more = {"max_tokens": 1, "return_token_ids": True} if "chat" in path else {}
        reply = post(worker, path, **fields, **more)
        ids = reply.get("tokens", reply.get("prompt_token_ids"))
        assert not {*ids} & {*FIM_IDS}
        assert ids[-1] == 0


def test_a_control_token_can_be_a_bad_word(worker: Worker) -> None:
    wish = {"logit_bias": {str(MIDDLE): 100}, "return_token_ids": True, "max_tokens": 4}
    assert whole(worker, **wish)[0]["token_ids"] == [MIDDLE] * 4
    assert MIDDLE not in whole(worker, **wish, bad_words=["<fim_middle>"])[0]["token_ids"]


def test_no_request_of_this_module_left_a_traceback(worker: Worker, strict: Worker) -> None:
    for each in (worker, strict):
        assert "Traceback" not in each.log.read_text()
