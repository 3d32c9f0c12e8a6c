"""griffe extension: a doctest in the text of a docstring is shown as code, also outside an `Examples` section."""

from __future__ import annotations

import re
from typing import Any

import griffe

_DOCTEST = re.compile(r"(?m)^(?P<indent> *)>>> .*(?:\n(?! *\n| *$).*)*")
_SECTION = re.compile(r"(?m)^ *Examples?:\s*$")  # what follows it is shown as code already


class Doctests(griffe.Extension):
    """Puts a fence around every doctest of every docstring."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is not None and not _SECTION.search(obj.docstring.value):
            obj.docstring.value = _DOCTEST.sub(_fenced, obj.docstring.value)


def _fenced(found: re.Match[str]) -> str:
    indent = found["indent"]
    return f"{indent}```pycon\n{found[0]}\n{indent}```"
