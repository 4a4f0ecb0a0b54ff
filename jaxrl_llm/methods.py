"""The table of methods, made from the menus (`__all__` of each stage's module) and the recipes."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from jaxrl_llm.config import Config, Objective, stage_functions
from jaxrl_llm.config.functions import exported
from jaxrl_llm.config.load import import_file
from jaxrl_llm.providers import results_of, stages
from jaxrl_llm.signature import arrays_of, hyperparameters_of, name_of, scope_of, unwrap

# Stage and scope that a function has unless it says otherwise.
MENUS = {
    "jaxrl_llm.prompts": ("prompts", "batch"),
    "jaxrl_llm.rollout": ("rollout", "sequence"),
    "jaxrl_llm.rewards": ("reward", "text"),
    "jaxrl_llm.advantages": ("advantage", "group"),
    "jaxrl_llm.select": ("select", "group"),
    "jaxrl_llm.losses": ("loss", "sequence"),
    "jaxrl_llm.optimizers": ("update", "batch"),
    "jaxrl_llm.reference": ("reference", "batch"),
    "jaxrl_llm.data.replay": ("replay", "batch"),
    "jaxrl_llm.rollout.search": ("decode", "sequence"),
    "jaxrl_llm.evaluate": ("metric", "batch"),
}
_STAGE_OF_MODULE = {  # within jaxrl_llm.losses
    "masked": "aggregate",
    "preference": "preference",
    "regularize": "regularize",
    "value": "value",
}
_ROOT = Path(__file__).resolve().parents[1]
_START, _END = "<!-- methods -->", "<!-- /methods -->"


@dataclass(frozen=True)
class Method:
    """One exported stage function."""

    name: str
    stage: str
    scope: str
    arrays: tuple[str, ...]
    hyperparameters: str
    claim: str  # first line of the docstring
    source: str


@dataclass(frozen=True)
class Recipe:
    """One function of `configs/recipes`."""

    spec: str  # FILE:RECIPE, as --config takes it
    claim: str
    paper: str
    functions: tuple[str, ...]
    arrays: tuple[str, ...]  # what the engine must provide


def all_methods() -> list[Method]:
    """Returns every exported stage function, in the order of the step."""
    out = []
    for module_name, (stage, scope) in MENUS.items():
        if not importlib.util.find_spec(module_name):
            continue
        for name, fn in exported(importlib.import_module(module_name)).items():
            place = unwrap(fn).__module__.rpartition(".")[2]
            out.append(_method(name, fn, _STAGE_OF_MODULE.get(place, stage), scope))
    return out


def _method(name: str, fn: Callable, stage: str, scope: str) -> Method:
    bound = ", ".join(f"{k}={_value(v)}" for k, v in hyperparameters_of(fn).items())
    doc = inspect.getdoc(fn) or ""
    return Method(
        name, stage, scope_of(fn, scope), arrays_of(fn), bound, _first(doc), _section(doc, "Source")
    )


def _value(value: object) -> str:
    if value is inspect.Parameter.empty:
        return "?"
    return getattr(value, "__name__", None) or repr(value)


def _first(doc: str) -> str:
    return doc.strip().split("\n\n")[0].replace("\n", " ")


def _section(doc: str, title: str) -> str:
    """Returns the paragraph after `title:` in one line."""
    found = re.search(rf"^\s*{title}:\s*(.+?)(?:\n\s*\n|\n\s*[A-Z]\w+:|\Z)", doc, re.MULTILINE | re.DOTALL)
    return " ".join(found[1].split()) if found else ""


def all_recipes(root: Path = _ROOT) -> list[Recipe]:
    """Returns the recipes in `root/configs/recipes`: functions of no arguments that return a config."""
    out = []
    for file in sorted((root / "configs" / "recipes").glob("[!_]*.py")):
        for name, fn in exported(import_file(file, root)).items():
            needs_arguments = any(p.default is p.empty for p in inspect.signature(fn).parameters.values())
            config = None if needs_arguments else fn()
            if isinstance(config, Config):
                spec = f"{file.relative_to(root).as_posix()}:{name}"
                out.append(_recipe(spec, inspect.getdoc(fn) or "", config.objective))
    return out


def _recipe(spec: str, doc: str, objective: Objective) -> Recipe:
    functions = [fn for _, fn in stage_functions(objective)]
    asked = dict.fromkeys(name for fn in functions for name in arrays_of(fn))
    made = {name for stage in stages(objective) for name in results_of(stage)} - {"rewards", "mask"}
    names = tuple(dict.fromkeys(map(name_of, functions)))
    return Recipe(spec, _first(doc), _section(doc, "Paper"), names, tuple(n for n in asked if n not in made))


RECIPE_COLUMNS = ("recipe", "what it does", "paper", "stage functions", "arrays asked for")
METHOD_COLUMNS = ("function", "stage", "scope", "arrays", "hyperparameters", "source")


def recipe_rows() -> list[tuple[str, ...]]:
    """Returns a row of `RECIPE_COLUMNS` for each recipe."""
    return [(r.spec, r.claim, r.paper, ", ".join(r.functions), ", ".join(r.arrays)) for r in all_recipes()]


def method_rows() -> list[tuple[str, ...]]:
    """Returns a row of `METHOD_COLUMNS` for each exported stage function."""
    return [
        (m.name, m.stage, m.scope, ", ".join(m.arrays), m.hyperparameters, m.source) for m in all_methods()
    ]


def print_table() -> None:
    """Prints both tables to the terminal."""
    import rich.console
    import rich.table

    console = rich.console.Console()
    tables = [("Recipes", RECIPE_COLUMNS, recipe_rows()), ("Functions", METHOD_COLUMNS, method_rows())]
    for title, columns, rows in tables:
        table = rich.table.Table(*columns, title=title, title_justify="left", row_styles=("", "dim"))
        for row in rows:
            table.add_row(*map(rich.markup.escape, row))
        console.print(table)


def to_markdown() -> str:
    """Returns both tables in Markdown, with links to the papers on arXiv."""
    code = {"recipe", "function", "stage functions", "arrays asked for", "arrays", "hyperparameters"}
    out = []
    for columns, rows in ((RECIPE_COLUMNS, recipe_rows()), (METHOD_COLUMNS, method_rows())):
        if rows:
            cells = [[_cell(text, name in code) for name, text in zip(columns, row)] for row in rows]
            lines = [columns, ["---"] * len(columns), *cells]
            out.append("\n".join(f"| {' | '.join(line)} |" for line in lines))
    return "\n\n".join(out)


def _cell(text: str, is_code: bool) -> str:
    text = text.replace("|", "\\|")
    if is_code:
        return ", ".join(f"`{part}`" for part in text.split(", ")) if text else ""
    return re.sub(r"arXiv:(\d{4}\.\d{4,5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", text)


def with_table(text: str) -> str:
    """Returns `text` (a README) with the tables put between its two `methods` markers.

    Raises:
      ValueError: the markers are missing.
    """
    before, start, rest = text.partition(_START)
    _, end, after = rest.partition(_END)
    if not start or not end:
        raise ValueError(f"no place for the table of methods: put {_START} and {_END} on lines of their own")
    return f"{before}{_START}\n\n{to_markdown()}\n\n{_END}{after}"
