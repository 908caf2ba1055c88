"""What /metrics say of versions that are loaded, unloaded, or cannot be loaded."""

from __future__ import annotations

from pathlib import Path

import aiohttp
from prometheus_client.parser import text_string_to_metric_families

from tests.process import IDENTITY, write_model
from triglot import testing

NO_PYTHON = "class Model(:\n"


async def test_the_state_of_versions(tmp_path: Path) -> None:
    write_model(tmp_path / "good" / "1")
    write_model(tmp_path / "half" / "1")
    write_model(tmp_path / "half" / "2", NO_PYTHON)
    async with (
        testing.serve(
            tmp_path,
            model_control_mode="explicit",
            load_model="*",
            exit_on_load_error=False,
            load_retries=0,
        ) as server,
        aiohttp.ClientSession() as session,
    ):
        url = server.url

        async def values() -> dict[str, tuple[float | None, float | None]]:
            """Whether each version is ready, and whether its load failed."""
            async with session.get(f"{url}/metrics") as response:
                families = {
                    family.name: family for family in text_string_to_metric_families(await response.text())
                }
            ready, failed = (
                {
                    f"{sample.labels['model']} {sample.labels['version']}": sample.value
                    for sample in families[name].samples
                }
                for name in ("triglot_model_ready", "triglot_model_load_failed")
            )
            return {name: (ready.get(name), failed.get(name)) for name in failed}

        async def control(action: str) -> int:
            async with session.post(f"{url}/v2/repository/models/good/{action}", json={}) as response:
                return response.status

        half = {"half 1": (1, 0), "half 2": (0, 1)}
        assert await values() == {"good 1": (1, 0)} | half
        # An earlier state of its files goes on.
        write_model(tmp_path / "good" / "1", NO_PYTHON)
        assert await control("load") == 400
        assert await values() == {"good 1": (1, 1)} | half
        write_model(tmp_path / "good" / "1", IDENTITY)
        assert await control("load") == 200
        assert await values() == {"good 1": (1, 0)} | half
        assert await control("unload") == 200
        assert await values() == {"good 1": (None, 0)} | half
