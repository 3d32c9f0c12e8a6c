"""The page of one's own runs: complete, honest about certificates, and legible on a phone."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from html import escape
from html.parser import HTMLParser
from pathlib import Path

import pytest

from pmlf import cli

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SETTINGS = ("--model", "linear", "--records", "300", "--batch-size", "50", "--seed", "0")
VOID = {"meta", "link", "br"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two small runs: two epochs of dp-pmlf, and one of dpsgd in a folder with a name that must be escaped."""
    base = tmp_path_factory.mktemp("runs")
    folders = [base / "first", base / "<b>second-with-a-rather-long-name-that-a-phone-has-to-break"]
    for folder, more in zip(folders, (("--epochs", "2"), ("--epochs", "1", "--method", "dpsgd")), strict=True):
        assert cli.main(["train", *SETTINGS, *more, "--out", str(folder), "--json"]) == 0
    return folders


class Balanced(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def report(folders: list[Path], out: Path) -> str:
    assert cli.main(["report", *map(str, folders), "--out", str(out)]) == 0
    return out.read_text()


@pytest.mark.slow
def test_the_page_shows_accuracies_with_intervals_epsilon_cost_and_certificates(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    capsys.readouterr()
    page = report(runs, tmp_path / "report.html")
    parser = Balanced()
    parser.feed(page)
    assert parser.open == [] and "<script" not in page and "http" not in page
    for folder in runs:
        result = json.loads((folder / "result.json").read_text())
        low, high = result["evaluations"][-1]["scores"]["test"]["interval"]
        shown = f"{100 * result['test_accuracy']:.1f} % (95 % interval {100 * low:.1f} to {100 * high:.1f} %)"
        assert shown in page and f"{result['certified_epsilon']:.4g} at delta" in page
        assert escape(folder.name) in page and f"{result['seconds']:.1f} s of training" in page
    assert page.count("holds, recomputed for this page") == 2
    bands = re.findall(r'class="band" points="([^"]+)"', page)
    assert [len(band.split()) for band in bands] == [4, 2, 4, 2]  # two charts; upper and lower ends of each evaluation
    assert page.count('class="interval"') == 6  # one evaluation alone has no band, but an interval


@pytest.mark.slow
def test_a_certificate_that_was_changed_is_shown_as_one_that_does_not_hold(runs: list[Path], tmp_path: Path) -> None:
    changed = tmp_path / "changed"
    shutil.copytree(runs[0], changed)
    path = changed / "certificate.json"
    path.write_text(path.read_text().replace('"records": 300', '"records": 3000'))
    page = report([changed], tmp_path / "report.html")
    assert "does NOT hold" in page and "holds, recomputed" not in page


@pytest.mark.slow
def test_the_folder_of_a_comparison_is_reported_run_by_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    few = ["--model", "linear", "--records", "200", "--batch-size", "50", "--steps", "1", "--methods", "dpsgd", "disk"]
    assert cli.main(["compare", *few, "--out", str(tmp_path / "both"), "--json"]) == 0
    capsys.readouterr()
    assert cli.main(["report", str(tmp_path / "both"), "--out", str(tmp_path / "page.html"), "--json"]) == 0
    assert [run["method"] for run in json.loads(capsys.readouterr().out)["runs"]] == ["disk", "dpsgd"]


def test_a_run_without_a_result_and_options_of_records_are_refused(
    runs: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    killed = tmp_path / "killed"
    shutil.copytree(runs[0], killed)
    (killed / "result.json").unlink()
    assert cli.main(["report", str(killed), "--out", str(tmp_path / "a.html")]) == 2
    assert "has no result yet: finish the run with `pmlf train --resume" in capsys.readouterr().err
    assert cli.main(["report", str(runs[0]), "--latex", str(tmp_path / "a.tex")]) == 2
    assert "--latex is only for results of `pmlf reproduce`" in capsys.readouterr().err
    assert list(tmp_path.glob("a.*")) == []


@pytest.mark.slow
@pytest.mark.parametrize("width", [1400, 390])
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")
def test_report_and_certificate_fit_the_screen_without_an_error(runs: list[Path], tmp_path: Path, width: int) -> None:
    report(runs, tmp_path / "report.html")
    for page in (tmp_path / "report.html", runs[1] / "certificate.html"):
        inside, log = measured(page.read_text(), width, tmp_path)
        assert inside <= width and "CONSOLE" not in log, log


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here")
def test_a_page_that_is_too_wide_is_seen(tmp_path: Path) -> None:
    inside, _ = measured('<!doctype html><div style="width: 700px">x</div>', 390, tmp_path)
    assert inside > 390


def measured(page: str, width: int, folder: Path) -> tuple[int, str]:
    """The width of a page's content in a frame of some width, and the browser's log."""
    frame = folder / f"frame-{width}.html"
    frame.write_text(
        f'<!doctype html><body><iframe srcdoc="{escape(page)}" style="width:{width}px;height:3000px;border:0"></iframe>'
        "<script>onload = () => { const inner = document.querySelector('iframe').contentDocument.documentElement;"
        "document.body.dataset.width = inner.scrollWidth; }</script>"
    )
    assert CHROMIUM is not None
    quiet = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr", "--v=0"]
    options = [f"--user-data-dir={folder / 'browser'}", "--virtual-time-budget=4000", "--window-size=1500,3100"]
    done = subprocess.run(
        [CHROMIUM, *quiet, *options, "--dump-dom", frame.as_uri()], capture_output=True, text=True, timeout=180
    )
    found = re.search(r'data-width="(\d+)"', done.stdout)
    assert found, done.stderr
    return int(found[1]), done.stderr
