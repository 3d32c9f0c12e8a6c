"""mkdocs hook: writes the help of every `pmlf` command into `reference/cli.md`, as the parser prints it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from typing import Any

_PAGE = "reference/cli.md"
_WIDTH = 80


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """The page of the command line, with a section for every command at its end."""
    if page.file.src_uri != _PAGE:
        return markdown
    sections = [f"## pmlf {name}\n\n```text\n{_help(name)}\n```\n" for name in _commands()]
    return "\n".join([markdown.rstrip(), "", *sections])


def _commands() -> list[str]:
    listed = re.search(r"\{([a-z,-]+)\}", _printed("--help"))
    if listed is None:
        raise RuntimeError("`pmlf --help` lists no commands in braces: docs/gen_cli.py must follow its new form")
    return listed[1].split(",")


def _help(command: str) -> str:
    return _plain(_printed(command, "--help"))


def _printed(*arguments: str) -> str:
    """What `pmlf ARGUMENTS` prints, at a fixed width and without colour."""
    environment = {**os.environ, "COLUMNS": str(_WIDTH), "NO_COLOR": "1", "TERM": "dumb", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pmlf", *arguments]
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout


def _plain(text: str) -> str:
    """The same without the frames around groups of options, and with long lines wrapped."""
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith("╭"):
            lines.append(line.strip("╭╮─ ") + ":")
        elif line.startswith("╰"):
            lines.append("")
        elif line.startswith("│"):
            inner = line.strip("│")[1:].rstrip()
            if inner.strip("─ "):
                lines.append(f"  {inner}")
        else:
            lines.extend(textwrap.wrap(line, _WIDTH) or [""])
    return "\n".join(lines).strip()
