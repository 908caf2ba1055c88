"""For all tests: no limit on how long the examples of a property may take; machines are shared."""

pytest_plugins = ["grpc_transport", "parallel", "forked", "event_loops", "ray_nodes"]

try:
    from hypothesis import HealthCheck, settings
except ImportError:
    pass  # Some environments have no property tests.
else:
    settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("untimed")
