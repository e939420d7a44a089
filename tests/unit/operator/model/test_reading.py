"""What an operator makes of a model that is slow to read, or cannot be read any more."""

from __future__ import annotations

import asyncio
import itertools
import shutil
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sluice_operator.children import manifests
from sluice_operator.cluster.client import Cluster, Ref
from sluice_operator.model import reader
from sluice_operator.model.checkpoint import ModelFacts, Refused, Unread
from sluice_operator.model.reader import Found, ModelReader
from sluice_operator.spec.service import InferenceService
from sluice_operator.spec.service import Model as SpecModel
from unit.operator.observations import CHECKPOINT, NOW, SETTINGS, create_service
from unit.worker.ordinary_user import ordinary_user

EXAMPLE = Path(__file__).parents[4] / "examples/model"

REFUSED = Refused("the repository is gated")


class Model:
    """What reading it finds, once it may."""

    def __init__(self, found: Found, monkeypatch: pytest.MonkeyPatch) -> None:
        self.found, self._patch = found, monkeypatch.setattr
        self.may_end = threading.Event()
        self.may_end.set()

    def hold(self) -> None:
        """Reading ends only once it may, and whoever serves does not wait for that."""
        self.may_end.clear()
        self._patch(reader, "_MEANWHILE_S", 0.01)

    def read(self, *_: Any) -> Found:
        assert self.may_end.wait(30)
        return self.found


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Model:
    made = Model(CHECKPOINT, monkeypatch)
    monkeypatch.setattr(reader, "_read", made.read)
    monkeypatch.setattr(reader, "_MEANWHILE_S", 30.0)
    return made


class Secrets(Cluster):
    """With nothing but Secrets, by name."""

    def __init__(self) -> None:
        self.held: dict[str, dict[str, Any]] = {}

    async def get(self, ref: Ref) -> dict[str, Any] | None:
        return self.held.get(ref.name)


class Reader:
    """A new operator's; the Deployment is of `rolled_out`."""

    def __init__(self, rolled_out: InferenceService) -> None:
        self.secrets = Secrets()
        self.reader = ModelReader(self.secrets, SETTINGS)
        self.live = manifests.workload(rolled_out, SETTINGS, ceiling=8, replicas=1, live=None)

    async def found(self, service: InferenceService, *, serving: bool, now: float = NOW) -> Found:
        """What is known of the model while pods serve, or none does."""

        async def is_served() -> bool:
            return manifests.is_of_model(service, self.live)

        return await self.reader.look(service, is_served if serving else None, now)


async def test_what_serves_waits_for_no_model_and_is_not_rolled_out_unread(model: Model) -> None:
    asked = create_service(model__uri="hf://org/new")
    by = Reader(create_service())
    model.hold()
    assert await by.found(asked, serving=True) == Unread("the model is being read", is_pending=True)
    model.may_end.set()
    async with asyncio.timeout(30):
        while (seen := await by.found(asked, serving=True)) != CHECKPOINT:
            assert isinstance(seen, Unread)
            assert seen.is_pending
    assert await by.found(asked, serving=True) == CHECKPOINT


@pytest.mark.parametrize(
    ("hung", "other"), [("file:///models/", "hf://org/"), ("hf://org/", "file:///models/")]
)
async def test_what_hangs_holds_up_readings_of_its_own_kind_only(
    hung: str, other: str, model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file system, or a hub: neither passes, nor the API server's calls, nor the other kind."""

    def read(asked: SpecModel, *_: Any) -> Found:
        return model.read() if asked.uri.startswith(hung) else CHECKPOINT

    monkeypatch.setattr(reader, "_read", read)
    monkeypatch.setattr(reader, "_DEADLINE_S", 0.05)
    model.hold()
    num_hung = 100
    services = [create_service(model__uri=f"{hung}{i}") for i in range(num_hung)]
    by = [Reader(create_service()) for _ in services]
    try:
        async with asyncio.timeout(20):
            looks = (one.found(s, serving=False) for one, s in zip(by, services, strict=True))
            found = await asyncio.gather(*looks)
            assert await asyncio.to_thread(lambda: "answered") == "answered"
            again = await by[0].found(services[0], serving=True, now=NOW + 3600)
            monkeypatch.setattr(reader, "_DEADLINE_S", 10.0)
            monkeypatch.setattr(reader, "_MEANWHILE_S", 10.0)
            free = create_service(model__uri=f"{other}0")
            assert await Reader(free).found(free, serving=True) == CHECKPOINT
        said = f"{hung}0 is not read after 0.05 s"
        assert found[0] == again == Unread(said)
        assert all(isinstance(one, Unread) and not one.is_pending for one in found)
    finally:
        model.may_end.set()
    hours = itertools.count(1)  # what is unread is tried again after a minute

    async def look_again() -> Found:
        return await by[0].found(services[0], serving=False, now=NOW + 3600 * next(hours))

    async with asyncio.timeout(20):
        while (seen := await look_again()) != CHECKPOINT:
            assert isinstance(seen, Unread)


async def test_what_a_hub_did_not_tell_is_asked_again_while_pods_serve(model: Model) -> None:
    """Else an edit that cannot fit is rolled out, for as long as they serve."""
    asked = create_service(model__uri="hf://org/new")
    by = Reader(asked)
    away = Unread("the hub answers 503")
    model.found = away
    assert await by.found(asked, serving=True) == away
    model.found = CHECKPOINT
    assert await by.found(asked, serving=True, now=NOW + 500) == away
    model.hold()
    assert await by.found(asked, serving=True, now=NOW + 700) == away  # and is not waited for
    model.may_end.set()
    async with asyncio.timeout(30):
        while (seen := await by.found(asked, serving=True, now=NOW + 701)) != CHECKPOINT:
            assert seen == away


async def test_a_model_without_pods_is_waited_for(model: Model) -> None:
    by = Reader(create_service())
    model.hold()
    reading = asyncio.create_task(by.found(create_service(), serving=False))
    done, _ = await asyncio.wait({reading}, timeout=0.1)
    assert not done
    model.may_end.set()
    assert isinstance(await reading, ModelFacts)


async def test_a_first_look_that_takes_long_goes_on_beside_the_passes(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All readers may be busy with others' slow hubs; the status says so meanwhile."""
    monkeypatch.setattr(reader, "_FIRST_S", 0.01)
    by = Reader(create_service())
    model.hold()
    asked = create_service(model__uri="hf://org/new")
    being_read = Unread("the model is being read", is_pending=True)
    async with asyncio.timeout(30):
        assert await by.found(asked, serving=False) == being_read
        edited = create_service(model__uri="hf://org/newer")
        assert await by.found(edited, serving=False) == being_read
        model.may_end.set()
        while (seen := await by.found(edited, serving=False)) != CHECKPOINT:
            assert seen == being_read


async def test_a_model_without_pods_that_could_not_be_read_is_asked_for_beside_the_passes(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A hub that swallows packets takes a minute to be given up, and that once a minute."""
    asked, by = create_service(model__uri="hf://org/away"), Reader(create_service())
    away = model.found = Unread("the hub is away")
    assert await by.found(asked, serving=False) == away
    model.hold()
    clock = itertools.count(0.0, 20.0)
    monkeypatch.setattr(reader, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    async with asyncio.timeout(30):
        assert await by.found(asked, serving=False, now=NOW + 61) == away
    model.may_end.set()


async def test_a_reading_that_is_given_up_ends_no_pass(model: Model) -> None:
    """Its object was made anew while the pass of the old one waits."""
    by = Reader(create_service())
    model.hold()
    asked = create_service(model__uri="hf://org/new")
    looking = asyncio.create_task(by.found(asked, serving=False))
    async with asyncio.timeout(30):
        done, _ = await asyncio.wait({looking}, timeout=0.1)
        assert not done
        by.reader.stop()
        assert await looking == Unread("the model is being read", is_pending=True)
        model.may_end.set()
        while (seen := await by.found(asked, serving=False)) != CHECKPOINT:
            assert isinstance(seen, Unread)


async def test_what_took_long_to_read_in_vain_is_not_read_again_at_once(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, by = create_service(model__uri="hf://org/away"), Reader(create_service())
    away = model.found = Unread("the hub is away")
    clock = itertools.count(0.0, 25.0)  # three looks at it in a reading: 75 s
    monkeypatch.setattr(reader, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    assert await by.found(asked, serving=False) == away
    model.found = CHECKPOINT
    assert await by.found(asked, serving=False, now=NOW + 71) == away
    assert await by.found(asked, serving=False, now=NOW + 1000) == CHECKPOINT


async def test_what_was_refused_stays_so_while_it_is_read_again(model: Model) -> None:
    asked, by = create_service(model__uri="hf://org/gated"), Reader(create_service())
    model.found = REFUSED
    assert await by.found(asked, serving=False) == REFUSED
    model.hold()
    assert await by.found(asked, serving=True, now=NOW + 1000) == REFUSED
    model.may_end.set()


async def test_a_new_operator_rolls_nothing_out_that_was_refused(model: Model) -> None:
    model.found = REFUSED
    by = Reader(create_service())
    asked = create_service(model__uri="hf://org/gated")
    assert await by.found(asked, serving=True) == REFUSED


async def test_what_serves_is_looked_after_though_its_model_is_refused_now(model: Model) -> None:
    service = create_service()
    by = Reader(service)
    model.found = REFUSED
    for serving, hours in ((True, 0), (True, 1), (False, 1), (True, 2)):
        seen = await by.found(service, serving=serving, now=NOW + 3600 * hours)
        if serving:
            assert seen == Unread(REFUSED.message, is_pending=True)
    upgraded = create_service(engine__image="registry/worker:2")
    assert isinstance(await by.found(upgraded, serving=True, now=NOW + 4 * 3600), Unread)
    model.found = CHECKPOINT
    assert await by.found(upgraded, serving=True, now=NOW + 5 * 3600) == CHECKPOINT


async def test_a_secret_that_is_named_before_it_is_there_is_looked_at_when_it_is(
    model: Model,
) -> None:
    """Else a public model is read without it, and pods get whatever it becomes."""
    asked = create_service(model={"uri": "hf://org/open", "secretRef": {"name": "other-admin"}})
    by = Reader(create_service())
    absent = "spec.model.secretRef: there is no Secret other-admin."
    assert await by.found(asked, serving=False) == Refused(absent, is_final=True)
    labels = {manifests.MANAGED_BY_LABEL: manifests.MANAGED_BY}
    by.secrets.held["other-admin"] = {"metadata": {"labels": labels}, "data": {"token": "YWRtaW4="}}
    refused = await by.found(asked, serving=False, now=NOW + 100)
    assert isinstance(refused, Refused)
    assert "that the operator did not create" in refused.message
    by.secrets.held["other-admin"] = {"metadata": {}, "data": {"token": "aGY="}}
    assert await by.found(asked, serving=False, now=NOW + 200) == CHECKPOINT


async def test_a_token_is_read_under_the_key_that_the_object_says(model: Model) -> None:
    ref = {"name": "hf", "key": "HF"}
    asked = create_service(model={"uri": "hf://org/gated", "secretRef": ref})
    by = Reader(asked)
    by.secrets.held["hf"] = {"metadata": {}, "data": {"token": "aGY="}}
    absent = "spec.model.secretRef: hf has no token under the key `HF`."
    assert await by.found(asked, serving=False) == Refused(absent, is_final=True)
    by.secrets.held["hf"] = {"metadata": {}, "data": {"HF": "aGY="}}
    assert await by.found(asked, serving=False, now=NOW + 100) == CHECKPOINT


async def test_what_serves_is_left_as_it_is_while_its_secret_is_away(model: Model) -> None:
    asked = create_service(model={"uri": "hf://org/gated", "secretRef": {"name": "hf"}})
    by = Reader(asked)
    seen = await by.found(asked, serving=True)
    assert isinstance(seen, Unread)
    assert seen.is_pending
    by.secrets.held["hf"] = {"metadata": {}, "data": {"token": "aGY="}}
    assert await by.found(asked, serving=True, now=NOW + 100) == CHECKPOINT


async def test_a_model_of_a_hub_that_is_refused_is_read_again_less_and_less_often(
    model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, by = create_service(model__uri="hf://org/gated"), Reader(create_service())
    times: list[int] = []
    second = 0

    def read(*_: Any) -> Found:
        times.append(second)
        return REFUSED

    monkeypatch.setattr(reader, "_read", read)
    for second in range(0, 4000, 10):
        assert await by.found(asked, serving=False, now=NOW + second) == REFUSED
    between = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert between[:4] == pytest.approx([60, 120, 240, 480], abs=20)
    assert between[4:] == pytest.approx([600] * 5, abs=20)
    other = create_service(model__uri="hf://org/other")
    assert await by.found(other, serving=False, now=NOW + 4001) == REFUSED
    assert await by.found(other, serving=False, now=NOW + 4070) == REFUSED
    assert len(times) == 12


@pytest.mark.parametrize(
    ("closed", "named"),
    [
        ("demo/config.json", "config.json"),
        ("demo/model.safetensors", "model.safetensors"),
        ("demo", "config.json"),
        (".", "file:///models/demo cannot be read"),
    ],
)
def test_a_model_that_the_operator_may_not_read_is_told_with_file_cause_and_user(
    closed: str, named: str, tmp_path: Path
) -> None:
    root = tmp_path / "models"
    shutil.copytree(EXAMPLE, root / "demo")
    settings = replace(SETTINGS, models_dir=root)
    asked = create_service(model__uri="file:///models/demo").spec.model
    assert isinstance(reader._read(asked, settings, None, True, False), ModelFacts)
    (root / closed).chmod(0)
    with ordinary_user() as user:
        found = reader._read(asked, settings, None, True, False)
    assert found == Refused(f"{named}: permission denied for user {user}.")
