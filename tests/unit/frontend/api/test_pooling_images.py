"""Images in bodies: which forms are read, and what is said of others."""

import json
from collections.abc import Callable
from typing import Any

import pytest
from sluice_core.errors import RequestError
from sluice_frontend.api.pooling.classify import parse_classify
from sluice_frontend.api.pooling.embed import parse_cohere, parse_embeddings, parse_pooling
from sluice_frontend.api.pooling.texts import Image, TextsRequest

URL = "data:image/png;base64,aGk="
PART = {"type": "image_url", "image_url": {"url": URL}}
TEXT = {"type": "text", "text": "a dog"}


def parsed(parse: Callable[[bytes], TextsRequest], **body: Any) -> TextsRequest:
    return parse(json.dumps(body).encode())


def chat(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


@pytest.mark.parametrize("parse", [parse_embeddings, parse_pooling, parse_classify])
def test_a_conversation_is_one_image_or_one_text(parse: Callable[[bytes], TextsRequest]) -> None:
    alone = parsed(parse, messages=chat(PART))
    assert (alone.inputs, alone.is_chat) == ((Image("aGk="),), True)
    both = parsed(parse, messages=[chat(PART), chat(TEXT), [{"role": "user", "content": "b"}]])
    assert both.inputs == (Image("aGk="), "a dog", "b")
    bare = parsed(parse, messages=chat({"type": "image_url", "image_url": URL}))
    assert bare.inputs == (Image("aGk="),)


def test_coheres_three_fields_are_one_choice() -> None:
    assert parsed(parse_cohere, images=[URL, URL]).inputs == (Image("aGk="),) * 2
    inputs = [{"content": [PART]}, {"content": [TEXT]}]
    assert parsed(parse_cohere, inputs=inputs).inputs == (Image("aGk="), "a dog")
    assert parsed(parse_cohere, texts=["a"]).inputs == ("a",)


@pytest.mark.parametrize(
    ("parse", "body", "sentence"),
    [
        (parse_embeddings, {"messages": chat(PART, TEXT)}, "2 texts and images where one is read"),
        (parse_embeddings, {"messages": chat()}, "0 texts and images"),
        (parse_embeddings, {"messages": []}, "messages"),
        (parse_embeddings, {"messages": chat({"type": "input_audio"})}, "no text and no image_url"),
        (parse_embeddings, {"input": "a", "modality": "audio"}, "text"),
        (parse_cohere, {"images": ["https://a.b/c.png"]}, "no URL is fetched"),
        (parse_cohere, {"images": ["file:///etc/passwd"]}, "no URL is fetched"),
        (parse_cohere, {"images": [""]}, "an empty image"),
        (parse_cohere, {"images": ["data:image/png,aGk="]}, "in base64 is read"),
        (parse_cohere, {"images": [URL] * 2049}, "1 to 2048"),
        (parse_cohere, {"images": [URL], "texts": ["a"]}, "there is texts, images"),
        (parse_cohere, {}, "there is none"),
        (parse_classify, {"input": "a", "labels": ["b"], "hypothesis_template": "x"}, "has no {}"),
    ],
)
def test_others_are_refused_with_a_sentence(
    parse: Callable[[bytes], TextsRequest], body: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(RequestError, match=sentence.replace("{", r"\{")):
        parsed(parse, **body)


def test_each_label_stands_in_the_template() -> None:
    asked = parse_classify(json.dumps({"input": URL, "labels": ["cat", "{}"]}).encode())
    assert asked.captions == ("This is a photo of cat.", "This is a photo of {}.")
