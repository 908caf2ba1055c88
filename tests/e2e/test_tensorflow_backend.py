"""What needs TensorFlow in the process, where it is installed: one test per check of its scripts.

They are of the backend, of its instances, and of the TensorFlow inferer and converter of grps projects.
"""

from __future__ import annotations

from functools import cache

import pytest

from tests import saved_models
from tests.e2e.client_scripts import ClientScript, ReportOf, script_tests

# The scripts have libraries of their own: another environment of these tests changes nothing.
pytestmark = pytest.mark.newest

SCRIPTS = [
    ClientScript("tensorflow", "tf_backend.py", shared=("tf_backend_loading.py",)),
    ClientScript("tensorflow", "tf_backend_devices.py"),
    ClientScript("tensorflow", "tf_grps.py"),
]


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> ReportOf:
    """What a script found; it runs when it is first asked for."""
    folder = saved_models.write(tmp_path_factory.mktemp("saved_models"))
    return cache(lambda script: script.run_with(str(folder)))


test_check, test_every_check_is_reported_in_order = script_tests(*SCRIPTS)
