"""Eight devices on one CPU, and compilations that are quick rather than good."""

import os

os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
