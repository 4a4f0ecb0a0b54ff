"""Reinforcement learning of language models in JAX.

A method is a handful of pure functions; everything else is the engine. Importing the package touches
no device and imports no submodule.
"""

__version__ = "0.1.0"
