"""Settings of all tests."""

from hypothesis import HealthCheck, settings

# No test is timed: machines are shared, and a slow example says nothing about the code.
settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")
