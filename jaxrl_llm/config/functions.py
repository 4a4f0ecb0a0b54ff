"""Functions and their names `package.module:name`, and the menus of stock functions."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxrl_llm.config.schema import ConfigError
from jaxrl_llm.signature import did_you_mean

# Where a bare name is looked up, by the field of the config that it goes into.
MENUS = {
    "advantage": ("jaxrl_llm.advantages",),
    "aggregate": ("jaxrl_llm.losses",),
    "evaluation": ("jaxrl_llm.data.sources",),
    "keep": ("jaxrl_llm.prompts", "jaxrl_llm.select"),
    "load": ("jaxrl_llm.models.convert",),
    "loss": ("jaxrl_llm.losses",),
    "make": ("jaxrl_llm.optimizers",),
    "regularize": ("jaxrl_llm.losses",),
    "rewards": ("jaxrl_llm.rewards",),
    "select": ("jaxrl_llm.select",),
    "shape": ("jaxrl_llm.rewards",),
    "train": ("jaxrl_llm.data.sources",),
}


def put_on_path(folder: Path) -> None:
    """Makes modules in `folder` importable; worker processes inherit the path."""
    here = Path.cwd()
    if folder not in ((here / entry).resolve() for entry in sys.path):
        sys.path.insert(0, str(folder))
        importlib.invalidate_caches()


def exported(module: ModuleType) -> dict[str, Callable]:
    """Returns the functions that a module offers: `__all__`, or else those defined in it."""
    names = getattr(module, "__all__", None)
    if names is None:
        defined = vars(module).items()
        names = [n for n, v in defined if n[0] != "_" and getattr(v, "__module__", "") == module.__name__]
    values = {n: getattr(module, n) for n in names}
    return {n: v for n, v in values.items() if callable(v) and not inspect.isclass(v)}


def menu(path: Iterable[str]) -> dict[str, Callable]:
    """Returns the stock functions that fit the field at `path`; empty if the field has no menu."""
    field = next((name for name in reversed(list(path)) if name in MENUS), None)
    found: dict[str, Callable] = {}
    for module in MENUS.get(field, ()):
        if importlib.util.find_spec(module):
            found |= exported(importlib.import_module(module))
    return found


def resolve(name: str) -> Any:
    """Returns what `package.module:qualname` names; the current folder is importable.

    Raises:
      ConfigError: no such module, or no such name in it.
    """
    module_name, colon, qualname = name.partition(":")
    if not colon or not module_name or not qualname:
        raise ConfigError(f"{name!r} names no function; write package.module:function")
    put_on_path(Path.cwd())
    try:
        found: Any = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise  # the module is there, but something that it imports is not
        raise ConfigError(f"{name!r}: no module {error.name!r}{_similar_module(error.name)}") from error
    for part in qualname.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"{name!r}: {found.__name__} has no {part!r}{_similar_name(part, found)}")
        found = getattr(found, part)
    return found


def reference(fn: Any) -> str:
    """Returns `package.module:qualname`, from which another process finds `fn` again.

    Raises:
      ConfigError: a lambda, a closure, or another object that has no name in a module.
    """
    module, qualname = getattr(fn, "__module__", None), getattr(fn, "__qualname__", None)
    if module and qualname and "<" not in qualname:
        name = f"{module}:{qualname}"
        if resolve(name) is fn:
            return name
    shown = f"{module}.{qualname}" if qualname else repr(fn)
    raise ConfigError(
        f"{shown} cannot be saved: it has no name in a module from which another process could import it; "
        "define the function at module level, and bind its parameters with functools.partial"
    )


def _similar_module(name: str) -> str:
    parent, _, stem = name.rpartition(".")
    if not parent:
        return (
            f"; run from the folder that holds it ({Path.cwd()} does not), or add that folder to PYTHONPATH"
        )
    known = [m.name for m in pkgutil.iter_modules(importlib.import_module(parent).__path__)]
    return did_you_mean(stem, known)


def _similar_name(name: str, owner: Any) -> str:
    return did_you_mean(name, [n for n, v in vars(owner).items() if n[0] != "_" and callable(v)])
