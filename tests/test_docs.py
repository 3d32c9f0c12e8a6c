"""The documents are true: their code runs, their commands parse, their links lead somewhere, the README is short."""

from __future__ import annotations

import contextlib
import io
import pkgutil
import re
import shlex
import textwrap
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from pmlf import cli
from pmlf.cli.common import Command
from pmlf.cli.main import parsed

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
PAGES = [README, *sorted((ROOT / "docs").rglob("*.md"))]
SLOW = {"docs/tutorials/text-model.md", "docs/tutorials/from-opacus.md", "docs/how-to/audit.md"}  # seconds each
QUICK_COMMANDS = ("account", "filter")  # of which every line is executed; the others train or measure
MOST_WORDS = 700
MOST_NUMBER_DIFFERENCE = 0.05  # between what a page shows and what a run with fresh noise prints


class Block(NamedTuple):
    """One fenced block of a page."""

    language: str
    text: str
    line: int  # of its first line in the page


def blocks(page: Path) -> list[Block]:
    found: list[Block] = []
    fence, language, start, inside = "", "", 0, list[str]()
    for number, line in enumerate(page.read_text().splitlines(), start=1):
        opened = re.match(r" *(```+)(\S*)", line)
        if not fence and opened:
            fence, language, start, inside = opened[1], opened[2], number + 1, []
        elif fence and line.strip() == fence:
            found.append(Block(language, textwrap.dedent("\n".join(inside)), start))
            fence = ""
        elif fence:
            inside.append(line)
    assert not fence, f"{page}: the block before line {start} is not closed"
    return found


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


def with_code() -> Iterator[Any]:
    for page in PAGES[1:]:
        if any(block.language == "python" for block in blocks(page)):
            yield pytest.param(page, id=name(page), marks=[pytest.mark.slow] if name(page) in SLOW else [])


@contextlib.contextmanager
def as_a_script() -> Iterator[None]:
    """One thread, no warning that is an error, and torch's settings and generator as they were afterwards."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.set_num_threads(threads)


def printed_by(page: Path) -> list[tuple[Block, str]]:
    """Every Python block of a page, run in order in one namespace, with what it printed."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    found = []
    with as_a_script():
        for block in blocks(page):
            if block.language == "python":
                source = "\n" * (block.line - 1) + block.text  # so that a traceback has the page's line
                with contextlib.redirect_stdout(io.StringIO()) as printed:
                    exec(compile(source, name(page), "exec"), namespace)
                found.append((block, printed.getvalue()))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("page", list(with_code()))
def test_every_code_block_of_a_page_runs_in_order(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert printed_by(page)


@pytest.mark.slow
def test_the_code_of_the_readme_prints_what_is_shown_below_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shown = [block.text for block in blocks(README) if block.language == "text"]
    number = re.compile(r"\d+\.\d+")
    for (_, printed), expected in zip(printed_by(README), shown, strict=True):
        assert number.sub("#", printed.strip()) == number.sub("#", expected.strip())
        values = zip(number.findall(printed), number.findall(expected), strict=True)
        assert all(abs(float(now) - float(then)) <= MOST_NUMBER_DIFFERENCE for now, then in values)


def command_lines() -> Iterator[Any]:
    for page in PAGES:
        for block in blocks(page):
            if block.language != "console":
                continue
            for line in block.text.replace("\\\n", " ").splitlines():
                if line.startswith("pmlf "):
                    yield pytest.param(line, id=f"{name(page)}: {line}")


@pytest.mark.parametrize("line", list(command_lines()))
def test_every_command_line_is_one_that_the_parser_takes(
    line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = shlex.split(line, comments=True)[1:]
    quick = arguments[0] in QUICK_COMMANDS or arguments[0].startswith("--")  # such as --version
    executes = quick and not {"--certificate", "--ledger"} & set(arguments)
    monkeypatch.chdir(tmp_path)
    if executes:
        assert cli.main(arguments) == 0, capsys.readouterr().err
    else:
        assert isinstance(parsed(arguments), Command)


def links(page: Path) -> Iterator[str]:
    prose = re.sub(r"^ *(```+).*?^ *\1", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", prose)):
        if not re.match(r"[a-z]+:", target):
            yield target


def headings(page: Path) -> set[str]:
    """The anchors of a page, as Markdown makes them."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[\s-]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for title in titles}


@pytest.mark.parametrize("page", [pytest.param(page, id=name(page)) for page in PAGES])
def test_every_relative_link_leads_to_a_file_and_heading_that_exist(page: Path) -> None:
    for target in links(page):
        path, _, anchor = target.partition("#")
        place = (page.parent / path).resolve() if path else page
        assert place.exists(), f"{name(page)} links to {target}"
        assert not anchor or anchor in headings(place), f"{name(page)} links to {target}"


def test_the_readme_is_a_page() -> None:
    assert len(README.read_text().split()) <= MOST_WORDS


def test_every_page_is_in_the_navigation() -> None:
    listed = set(re.findall(r"[\w./-]+\.md", (ROOT / "mkdocs.yml").read_text()))
    assert listed == {str(page.relative_to(ROOT / "docs")) for page in PAGES[1:]}


@pytest.mark.parametrize("page", sorted((ROOT / "docs" / "reference").glob("api*.md")), ids=lambda page: page.name)
def test_every_name_in_the_reference_is_one_that_the_library_has(page: Path) -> None:
    shown = re.findall(r"^::: (\S+)(?:\n +options:\n +members: \[(.*)\])?", page.read_text(), flags=re.MULTILINE)
    assert shown
    for place, members in shown:
        found = pkgutil.resolve_name(place)
        assert [member for member in members.split(", ") if member and not hasattr(found, member)] == []


def test_every_stored_result_is_cited_by_a_page() -> None:
    cited = "".join(page.read_text() for page in PAGES)
    stored = [path for path in (ROOT / "docs" / "results").iterdir() if path.is_file()]
    assert [path.name for path in stored if path.name not in cited] == []
