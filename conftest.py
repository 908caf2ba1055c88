"""For all tests: no limit on how long one example of a property may take; machines are shared."""

pytest_plugins = ["parallel"]

try:
    from hypothesis import settings
except ImportError:
    pass  # Some environments have no property tests.
else:
    settings.register_profile("untimed", deadline=None)
    settings.load_profile("untimed")
