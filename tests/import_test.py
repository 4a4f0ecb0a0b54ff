import subprocess
import sys

IMPORT_ALL = """
import importlib, pkgutil, sys
import jaxrl_llm
for module in pkgutil.walk_packages(jaxrl_llm.__path__, "jaxrl_llm."):
    importlib.import_module(module.name)
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized(), "a device was touched"
heavy = "torch tensorflow tensorflow_datasets transformers reasoning_gym matplotlib".split()
heavy = [name for name in heavy if name in sys.modules]
assert not heavy, f"imported at once: {heavy}"
"""


def test_importing_every_module_touches_no_device_and_no_heavy_library():
    done = subprocess.run([sys.executable, "-c", IMPORT_ALL], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
