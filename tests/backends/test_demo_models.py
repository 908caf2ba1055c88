"""The demo models, as clients of each protocol call them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from tests import environments
from tests.process import outcome, start_python
from triglot import testing
from triglot.run import DEMO

FLOWER = {"sepal_length": 6.3, "sepal_width": 2.5, "petal_length": 4.9, "petal_width": 1.5}
PROBABILITIES = [0, 0.8194, 0.1806]
THREE = np.fromfile(DEMO / "digits" / "warmup" / "three", "<f4").reshape(1, 1, 8, 8)


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    pytest.importorskip("onnxruntime")
    async with testing.serve(DEMO) as server, aiohttp.ClientSession(server.url) as session:
        yield session


async def post(session: aiohttp.ClientSession, path: str, body: Any) -> Any:
    async with session.post(path, json=body) as answer:
        assert answer.status == 200, await answer.text()
        return await answer.json(content_type=None)


async def test_iris_has_a_species_for_every_protocol(session: aiohttp.ClientSession) -> None:
    prediction = {"species": "versicolor", "probabilities": PROBABILITIES}
    assert await post(session, "/v2/models/iris/predict", FLOWER) == {
        "species": ["versicolor"],
        "probabilities": [PROBABILITIES],
    }
    for path in ("/v1/models/iris:predict", "/v1/projects/p/models/iris:predict"):
        assert await post(session, path, {"instances": [FLOWER, FLOWER]}) == {"predictions": [prediction] * 2}
    message = {"model": "iris-1", "gmap": {"s_f": FLOWER}}
    answer = await post(session, "/grps/v1/infer/predict", message)
    species, probabilities = answer["gtensors"]["tensors"]
    assert (species["flat_string"], probabilities["flat_float32"]) == (["versicolor"], PROBABILITIES)


async def test_iris_asks_for_columns_of_one_length(session: aiohttp.ClientSession) -> None:
    async with session.post("/v2/models/iris/predict", json={**FLOWER, "petal_width": [1.5, 2]}) as answer:
        assert answer.status == 400
        assert "expected columns of one length, got [1, 2]" in await answer.text()


async def test_digits_names_its_classes(session: aiohttp.ClientSession) -> None:
    image = {"name": "image", "datatype": "FP32", "shape": [1, 1, 8, 8], "data": THREE.tolist()}
    top = [{"name": "probabilities", "parameters": {"classification": 2}}]
    answer = await post(session, "/v2/models/digits/infer", {"inputs": [image], "outputs": top})
    assert [text.split(":")[2] for text in answer["outputs"][0]["data"]] == ["three", "nine"]
    answer = await post(session, "/v1/models/digits:predict", {"instances": THREE.tolist()})
    assert np.argmax(answer["predictions"]) == 3


async def test_storyteller_continues_as_the_book_does(session: aiohttp.ClientSession) -> None:
    known = set(pairwise((DEMO / "storyteller" / "model.py").read_text().split()))
    stories = []
    for seed in (0, 0, 1):
        body = {"prompt": "Alice was", "words": 20, "seed": seed}
        async with session.post(
            "/v2/models/storyteller/predict", json=body, headers={"Accept": "application/x-ndjson"}
        ) as answer:
            words = [line.decode().split('"')[3] async for line in answer.content]
        assert len(words) == 20
        assert set(pairwise(["was", *words])) <= known
        stories.append(words)
    assert stories[0] == stories[1] != stories[2]


async def test_identity_gives_back_what_it_gets(session: aiohttp.ClientSession) -> None:
    sent = {"fp64": [0.1, 2], "bytes": [["a"], ["b"]], "bool": [True], "int64": [2**53 + 1]}
    assert await post(session, "/v2/models/identity/predict", sent) == sent
    assert await post(session, "/v1/models/identity:predict", {"inputs": {"uint8": [1, 2]}}) == {"outputs": [1, 2]}
    answer = await post(session, "/grps/v1/infer/predict", {"model": "identity", "str_data": "text"})
    assert answer["str_data"] == "text"


async def test_calls_of_the_start_and_of_the_page_are_the_models_examples(session: aiohttp.ClientSession) -> None:
    async with session.get("/grps/v1/monitor/model?name=iris") as answer:
        served = (await answer.json())["serves"]["signatures"]["serving_default"]
    assert {spec["name"]: spec["sample"]["data"] for spec in served["inputs"]} == {
        name: [value] for name, value in FLOWER.items()
    }
    assert served["outputs"][1]["labels"] == ["setosa", "versicolor", "virginica"]
    async with session.get("/grps/v1/monitor/model?name=digits") as answer:
        (image,) = (await answer.json())["serves"]["signatures"]["serving_default"]["inputs"]
    assert image["sample"]["data"] == THREE.tolist()


def test_numbers_are_those_that_codegen_makes() -> None:
    script = Path("codegen") / "demo_models.py"
    done = outcome(start_python([str(script), "--check"], environments.python("ml"), folder=environments.ROOT))
    assert (done.returncode, done.stderr) == (0, "")
