"""From `FILE[:RECIPE]` to a config."""

from __future__ import annotations

import builtins
import difflib
import importlib
import inspect
import re
import sys
import traceback
from pathlib import Path
from types import ModuleType

from jaxrl_llm.config.functions import put_on_path
from jaxrl_llm.config.schema import Config, ConfigError
from jaxrl_llm.signature import did_you_mean


def load_config(spec: str) -> Config:
    """Runs a recipe of a Python file and returns its config.

    The file is imported as a module, so that worker processes find its functions again: by its dotted name if
    it lies under the current folder (`configs/recipes/grpo.py` is `configs.recipes.grpo`), else by its stem.

    Args:
      spec: `FILE[:RECIPE]`; RECIPE is a function of the file without arguments, by default `get_config`.

    Raises:
      ConfigError: no such file or function, an error inside the file, or a result that is no `Config`.
    """
    file, colon, recipe = spec.rpartition(":")
    file, recipe = (file, recipe) if colon else (spec, "get_config")
    path = _existing(file)
    try:
        module = import_file(path)
        make = getattr(module, recipe, None)
        if not callable(make):
            raise ConfigError(f"{file} has no function {recipe!r}{did_you_mean(recipe, _recipes(module))}")
        config = make()
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(_located(path, error)) from error
    if not isinstance(config, Config):
        raise ConfigError(f"{recipe} of {file} returned a {type(config).__name__}; a recipe returns a Config")
    return config


def _existing(file: str) -> Path:
    path = Path(file)
    if not path.is_file():
        folder = path.parent
        near = [str(folder / p.name) for p in folder.glob("*.py")] if folder.is_dir() else []
        hint = did_you_mean(file, near) if near else f"; {folder} holds no Python file"
        raise ConfigError(f"no config file {file!r}{hint}")
    if path.suffix != ".py":
        raise ConfigError(f"config file {file!r} is not a Python file (.py)")
    return path.resolve()


def import_file(path: Path, here: Path | None = None) -> ModuleType:
    """Imports a Python file by its dotted name below `here` (None: the current folder), else by its stem.

    Raises:
      ConfigError: the name belongs to another module.
    """
    path, here = path.resolve(), (here or Path.cwd()).resolve()
    root, parts = path.parent, (path.stem,)
    if path.is_relative_to(here):
        inside = path.relative_to(here).with_suffix("").parts
        if not any("." in part for part in inside):
            root, parts = here, inside
    name = ".".join(parts)
    if "." in path.stem:
        raise ConfigError(f"config file {path.name!r} cannot be imported: its name has a dot; rename it")
    put_on_path(root)
    known = sys.modules.get(name)
    module = known or importlib.import_module(name)
    file = getattr(module, "__file__", None)
    if file is None or Path(file).resolve() != path:
        raise ConfigError(
            f"{path} would be imported as {name!r}, but that is {file or 'a built-in module'}; rename the "
            "file or its folder"
        )
    return module


def _recipes(module: ModuleType) -> list[str]:
    def is_recipe(name: str, value: object) -> bool:
        return name[0] != "_" and inspect.isfunction(value) and value.__module__ == module.__name__

    return [name for name, value in vars(module).items() if is_recipe(name, value)]


def _located(path: Path, error: Exception) -> str:
    """Returns `file, line: error`, with a suggestion for a misspelt name."""
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == str(path)]
    line = error.lineno if isinstance(error, SyntaxError) else frames[-1].lineno if frames else None
    place = f"{path}, line {line}" if line else str(path)
    return f"{place}: {type(error).__name__}: {error}{_suggestion(error)}"


def _suggestion(error: Exception) -> str:
    if isinstance(error, NameError) and error.name:
        frame = error.__traceback__
        while frame.tb_next:
            frame = frame.tb_next
        names = {*frame.tb_frame.f_globals, *frame.tb_frame.f_locals, *vars(builtins)}
        close = difflib.get_close_matches(error.name, names, n=1)
        return f"; did you mean {close[0]!r}?" if close else ""
    missing = re.match(r"cannot import name '(\w+)' from", str(error))
    if isinstance(error, ImportError) and missing and error.name in sys.modules:
        return did_you_mean(missing[1], [n for n in vars(sys.modules[error.name]) if n[0] != "_"])
    return ""
