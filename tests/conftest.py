"""Every test runs on the CPU, with eight virtual devices and one cache of compiled programs a session."""

import os
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

# Many tests train the same small model: a program that one of them compiled is read by the others.
_cache = tempfile.TemporaryDirectory(prefix="jaxrl_llm_compiled_")
os.environ["JAX_COMPILATION_CACHE_DIR"] = _cache.name
os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
