"""Help in groups: every option has a place, every example can be typed, and a narrow terminal shows all of it."""

from __future__ import annotations

import shlex

import pytest

from pmlf.bench.cases import CASES
from pmlf.bench.contenders import CONTENDERS
from pmlf.cli.bench import Bench
from pmlf.cli.help import EXAMPLES
from pmlf.cli.main import COMMANDS, main, parsed

GROUPS = ("data", "model", "privacy", "optimisation", "output")


def shown(name: str, columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("COLUMNS", str(columns))
    assert main([name, "--help"]) == 0
    return capsys.readouterr().out


def test_every_command_has_three_examples() -> None:
    assert set(EXAMPLES) == set(COMMANDS)
    assert all(len(set(examples)) == 3 for examples in EXAMPLES.values())


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_every_example_can_be_typed(name: str) -> None:
    for example in EXAMPLES[name]:
        program, *arguments = shlex.split(example)
        assert program == "pmlf" and type(parsed(arguments)) is COMMANDS[name]


@pytest.mark.slow
def test_the_examples_of_bench_name_cases_and_contenders_that_there_are() -> None:
    for example in EXAMPLES["bench"]:
        given = parsed(shlex.split(example)[1:])
        assert isinstance(given, Bench)
        assert set(given.cases or ()) <= set(CASES) and set(given.contenders or ()) <= set(CONTENDERS)


@pytest.mark.parametrize("name", COMMANDS)
def test_a_narrow_terminal_shows_every_word(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow = shown(name, 45, capsys, monkeypatch)
    assert narrow.split() == shown(name, 120, capsys, monkeypatch).split()
    text, examples = narrow.split("\nexamples\n")
    explained = [line for line in text.splitlines() if line.startswith("    ")]
    assert explained and all(len(line) <= 45 or len(line.split()) == 1 for line in explained)  # a word stays whole
    assert [line.strip() for line in examples.splitlines()] == list(EXAMPLES[name])
    assert "%%" not in text and "(default: )" not in text and "(default: None)" not in text


@pytest.mark.parametrize("name", ["train", "compare", "tune"])
def test_options_are_in_groups_in_one_order(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = shown(name, 100, capsys, monkeypatch).splitlines()
    titles = [line for line in lines if line in GROUPS]
    assert titles == list(GROUPS)
    for option, group in (
        ("--dataset", "data"),
        ("--model", "model"),
        ("--epsilon", "privacy"),
        ("--lr", "optimisation"),
    ):
        place = next(number for number, line in enumerate(lines) if line.startswith(f"  {option} "))
        assert [line for line in lines[:place] if line in GROUPS][-1] == group


def test_the_list_of_commands_fits_a_narrow_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "45")
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(f"\n  {name}\n" in out for name in COMMANDS)
