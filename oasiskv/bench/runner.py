"""What a command needs to run the rows of a cell: the model, a text, and engines."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from rich.console import Console

from oasiskv.bench.cells import TITLES, BenchError, Cell, Model
from oasiskv.bench.engine_pool import EnginePool
from oasiskv.bench.figures import Figures, figures
from oasiskv.bench.job import LIMIT
from oasiskv.bench.rounds import States
from oasiskv.bench.workloads import Source, random_tokens, slices
from oasiskv.models import load_tokenizer, resolve_model

Cut = Callable[[Sequence[int], int], Source]
"""``(text, requests)`` to a text for each of them."""


def load_model(name: str, dtype: str = "auto") -> Model:
    """The model's folder and size.

    Raises:
        BenchError: it is neither known nor a folder with a ``config.json``.
        FetchError: it could not be fetched.
    """
    folder = Path(resolve_model(name))
    config = folder / "config.json"
    if not config.is_file():
        raise BenchError(f"--model {name}: no config.json in {folder}; give a folder that holds the model, or smollm2")
    return Model.of(name, str(folder), json.loads(config.read_text()), dtype)


def text_source(model: Model, cell: Cell, cut: Cut = slices, random_text: bool = False) -> Source:
    """Essays, ``cut`` for the requests; random tokens where nothing reads them, or where they are asked for.

    Raises:
        FetchError: the essays could not be fetched.
    """
    if cell.workload.fill or random_text or cell.workload.name == "serve":
        return random_tokens(model.vocabulary)
    from oasiskv.models.data import essays

    tokenizer = load_tokenizer(model.folder)
    return cut(tokenizer(essays(), add_special_tokens=False)["input_ids"], cell.requests)


class Runner:
    """Runs a row of a cell in an engine of ``engines``. ``name``: for people, in the place of the row's."""

    def __init__(self, model: Model, source: Source, engines: EnginePool, console: Console, name: str = "") -> None:
        self.model = model
        self.engines = engines
        self.console = console
        self.name = name
        self._source = source
        self._round: Counter[str] = Counter()

    def __call__(self, cell: Cell, row: str, batch: int) -> tuple[Figures, States]:
        """See :data:`oasiskv.bench.rounds.RunRow`."""
        self._round[row] += 1
        title = f"{self.name or TITLES[row]} {self._round[row]}"
        if cell.workload.name == "serve" and row != LIMIT:
            from oasiskv.bench.serve_row import serve_row

            return serve_row(cell, row, self.model, self._round[row], title, self.console), {}
        found = self.engines.run(cell.job(row, self.model, self._source, batch), title)
        return figures(found, cell.budget), found.states
