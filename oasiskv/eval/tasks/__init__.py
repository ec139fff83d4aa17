"""Long documents with questions about them, generated at any length: what ``oasiskv eval tasks`` asks.

Pure text and token ids: no model, no engine. Import ``TASKS`` and the types from here. To add a task, write a class
with the three members of ``Task`` and add a line to ``TASKS``.
"""

from oasiskv.eval.tasks.arithmetic import ManyShotArithmetic
from oasiskv.eval.tasks.key_values import KeyValues
from oasiskv.eval.tasks.needles import Needles
from oasiskv.eval.tasks.tracking import VariableTracking
from oasiskv.eval.tasks.types import Document, Encode, Question, Task
from oasiskv.eval.tasks.words import CommonWords

_ALL: tuple[Task, ...] = (
    Needles("needle-single"),
    Needles("needle-multikey", lookalikes=0.25),
    Needles("needle-multivalue", values=4),
    KeyValues("kv-retrieval"),
    VariableTracking("variable-tracking"),
    CommonWords("common-words"),
    ManyShotArithmetic("many-shot-arithmetic"),
)
TASKS: dict[str, Task] = {task.name: task for task in _ALL}
"""All tasks by name. Each is a frozen dataclass: ``dataclasses.replace`` makes it longer or harder."""

__all__ = ["TASKS", "Task", "Document", "Question", "Encode"]
