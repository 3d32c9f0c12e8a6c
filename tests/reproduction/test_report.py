"""The report: its statistics, sentences and charts, and the page in a real browser."""

from __future__ import annotations

import copy
import json
import re
import shutil
import statistics
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from scipy import stats

from pmlf.cli.main import main
from pmlf.evidence.certificate import sealed
from pmlf.reproduction import paper
from pmlf.reproduction.report import charts, page, pictures, summary, tables, text, words
from pmlf.reproduction.report.summary import Record

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
ACCURACIES = {"DPSGD": [0.50, 0.52, 0.51], "DP-PMLF": [0.55, 0.56, 0.57], "InnerOuter": [0.50, 0.53, 0.50]}


def run(seed: int, accuracy: float, lr: float = 0.5) -> dict[str, Any]:
    machine = {"cpu": "some cpu", "cores": 2, "torch": "2", "pmlf": "0"}
    return {
        "key": f"{seed}-{accuracy}-{lr}",
        "seed": seed,
        "lr": lr,
        "split": "test",
        "judged_records": 10_000,
        "accuracy": accuracy,
        "curve": [[1.0, accuracy - 0.1], [2.0, accuracy]],
        "epsilon": 0.999,
        "delta": 1e-5,
        "noise_multiplier": 1.5,
        "steps": 2,
        "cost": {"seconds": 60.0, "threads": 1, "machine": machine},
    }


def document(profile: str = "cpu", protocol: str = "shared", **changes: Any) -> dict[str, Any]:
    """A record of Figure 4 at epsilon 1 on CIFAR-10."""
    cells = [
        {
            **{"dataset": "cifar10", "model": "cnn5", "variant": variant, "method": variant.lower(), "value": None},
            **{"target_epsilon": 1.0, "lr": 0.5, "records": 20_000, "batch_size": 1000, "epochs": 20, "steps": None},
            **{
                "certificate": {"delta": 1e-5},
                "planned_seeds": 3,
                "runs": [run(seed, accuracy) for seed, accuracy in enumerate(accuracies)],
            },
        }
        for variant, accuracies in ACCURACIES.items()
    ]
    whole = {
        **{"artifact": "figure-4", "title": "a title", "axis": "epsilon", "profile": profile, "protocol": protocol},
        **{"command": "pmlf reproduce figure-4", "cells": cells},
    }
    return {**whole, **changes}


def test_means_deviations_and_paired_intervals_are_those_of_the_seeds() -> None:
    record = Record(document())
    cell = record.cells[1]
    assert cell.mean == pytest.approx(56.0) and cell.deviation == pytest.approx(1.0)
    assert cell.curve[-1] == (2.0, pytest.approx(56.0), pytest.approx(55.0), pytest.approx(57.0))
    first = next(one for one in record.differences() if one.below == "DPSGD")
    ours, theirs = np.array(ACCURACIES["DP-PMLF"]), np.array(ACCURACIES["DPSGD"])
    interval = stats.ttest_rel(100 * ours, 100 * theirs).confidence_interval(0.95)
    assert first.half_width is not None
    assert (first.mean - first.half_width, first.mean + first.half_width) == pytest.approx(
        (interval.low, interval.high)
    )
    assert first.seeds == 3 and first.verdict == "holds"


def test_differences_pair_common_seeds_only() -> None:
    changed = document()
    changed["cells"][0]["runs"] = [run(1, 0.52), run(7, 0.9)]
    one = next(one for one in Record(changed).differences() if one.below == "DPSGD")
    assert (one.seeds, one.half_width, one.verdict) == (1, None, "one seed") and one.mean == pytest.approx(4.0)


@pytest.mark.parametrize(
    ("accuracies", "verdict"),
    [([0.4, 0.41, 0.42], "holds"), ([0.7, 0.71, 0.72], "contradicted"), ([0.5, 0.6, 0.58], "cannot tell")],
)
def test_a_verdict_is_given_only_where_the_interval_leaves_zero_out(accuracies: list[float], verdict: str) -> None:
    changed = document()
    changed["cells"][0]["runs"] = [run(seed, accuracy) for seed, accuracy in enumerate(accuracies)]
    assert next(one for one in Record(changed).differences() if one.below == "DPSGD").verdict == verdict


def test_two_seeds_that_differ_by_the_same_single_record_tell_nothing() -> None:
    changed = document()
    for cell, accuracies in zip(changed["cells"], ([0.9151, 0.9158], [0.915, 0.9157]), strict=False):
        cell["runs"] = [run(seed, accuracy) for seed, accuracy in enumerate(accuracies)]
    one = next(one for one in Record(changed).differences() if one.below == "DPSGD")
    assert abs(one.mean) == pytest.approx(0.01) and one.verdict == "cannot tell"


def test_the_papers_number_stands_only_beside_the_papers_own_setting() -> None:
    (panel,) = tables.panels(Record(document()))
    claims = {variant: cells[0].claim for variant, cells in panel.rows}
    assert claims == {"DPSGD": None, "DP-PMLF": "about 54", "InnerOuter": None}
    elsewhere = document()
    for cell in elsewhere["cells"]:
        cell["dataset"] = "fashion-mnist-small"
    (panel,) = tables.panels(Record(elsewhere))
    assert all(cells[0].claim is None for _, cells in panel.rows)
    assert not any(series.paper for chart in charts.of_record(Record(elsewhere)) for series in chart.series)


def test_tuning_is_listed_with_every_trial_and_marks_the_end_of_the_grid() -> None:
    tuned = document(protocol="tuned")
    for cell in tuned["cells"]:
        cell["trials"] = [run(1000, 0.3, lr=0.05), run(1000, 0.4, lr=0.5)]
    record = Record(tuned)
    assert [one.at_an_end for one in tables.trials(record)] == [True] * 3
    for made in (page.render([record], []), text.markdown([record], [])):
        assert "ccounted for in epsilon" in made and "end of the grid" in made and "40.00" in made


def test_a_row_without_runs_leaves_the_others_comparable() -> None:
    planned = document()
    planned["cells"].append(planned["cells"][0] | {"variant": paper.SHAPED_LABEL, "runs": []})
    made = text.markdown([Record(planned)], [])
    assert "CIFAR-10, CNN-5, 3 seeds:" in made and "| DP-PMLF | **56.00 ± 1.00**<br>" in made
    assert "figure-4: 9 of 12 runs done" in made


def test_noise_multipliers_of_white_and_of_shaped_noise_are_both_said() -> None:
    both = document()
    for one in both["cells"][2]["runs"]:
        one["noise_multiplier"] = 2.5
    assert "2 steps with noise multiplier 1.5 or 2.5 (ε = 1)" in text.markdown([Record(both)], [])


def test_rates_that_are_shown_alike_share_a_column() -> None:
    tuned = document(protocol="tuned")
    for cell, rate in zip(tuned["cells"], (0.17, 0.1 * 1.7, 0.17 / 0.9999999999999998), strict=True):
        cell["trials"], cell["lr"] = [run(1000, 0.3, lr=rate), run(1000, 0.4, lr=1.5)], rate
    assert "|  | 0.17 | 1.5 | chosen |" in text.markdown([Record(tuned)], [])


def test_what_a_chosen_rate_changes_against_the_shared_one_is_said() -> None:
    tuned = document(protocol="tuned")
    for cell in tuned["cells"]:
        cell["trials"] = [run(1000, 0.4, lr=1.5)]
        cell["runs"] = [run(each["seed"], each["accuracy"] - 0.04, lr=1.5) for each in cell["runs"]]
    records = [Record(document()), Record(tuned)]
    for made in (page.render(records, []), text.markdown(records, [])):
        assert made.count("instead of the shared rate changes DPSGD -4.00 (-4.02 to -3.98)") == 1
    alone = text.markdown(records[1:], [])
    assert "instead of the shared rate" not in alone


@pytest.mark.parametrize("artifact", ["figure-4", "table-4"])
def test_contradicted_orderings_are_visible_and_undecided_ones_are_folded(artifact: str) -> None:
    changed = document(artifact=artifact)
    filters = ["a {-0.9}, b {0.1}", "a {-0.6}, b {0.4}", "a {}, b {1}"]
    best = 0 if artifact == "table-4" else 1
    for index, cell in enumerate(changed["cells"]):
        if artifact == "table-4":
            cell["variant"], cell["dataset"] = filters[index], "mnist"
        accuracies = [0.5, 0.51, 0.52] if index == best else [0.7, 0.71, 0.72] if index < 2 else [0.5, 0.6, 0.45]
        cell["runs"] = [run(seed, accuracy, lr=index) for seed, accuracy in enumerate(accuracies)]
    glance = re.search(r'<section id="glance">.*?</section>', page.render([Record(changed)], []), re.DOTALL)
    assert glance is not None
    in_sight, folded, *_ = glance[0].split("<details>")
    assert in_sight.count(">contradicted<") == 1 and ">cannot tell<" not in in_sight
    assert "1 undecided" in folded and folded.count(">cannot tell<") == 1


def test_smoke_runs_do_not_count() -> None:
    smoke = Record(document(profile="smoke"))
    assert not words.tally([smoke])
    assert "figure-4, shared: no run beyond the smoke profile" in text.markdown([smoke], [])
    assert "## a title" not in text.markdown([smoke], [])


def test_the_page_says_that_there_are_no_results_only_if_there_are_none() -> None:
    nothing = "No results beyond the smoke profile yet"
    assert nothing in page.render([Record(document(profile="smoke"))], [])
    assert nothing not in page.render([Record(document(artifact="table-4"))], [])
    assert nothing not in page.render([Record(document())], [])


def test_markdown_says_what_holds_by_how_much_and_what_is_missing() -> None:
    partly = document()
    partly["cells"][2]["runs"].pop()
    made = text.markdown([Record(partly)], [])
    assert "CIFAR-10, CNN-5, ε = 1: DP-PMLF is above DPSGD +5.00" in made
    assert "figure-4: 8 of 9 runs done" in made and "table-4, shared: no run beyond the smoke profile" in made
    assert "table-1, tuned: no run beyond the smoke profile" in made
    assert "table-2, shared: no run beyond the smoke profile; run `pmlf reproduce table-2 --profile cpu" in made
    assert "| DP-PMLF | 56.00 ± 1.00 (3 seeds)<br>*paper: about 54* |" in made  # not bold: others have other seeds
    assert (
        "the first 20,000 records, 20 epochs with batches of 1000, 3 seeds, 2 steps with noise multiplier 1.5" in made
    )
    assert text.markdown([Record(partly)], []) == made  # it does not depend on the date


def test_the_best_of_a_column_is_bold_where_all_have_the_same_seeds() -> None:
    assert "CIFAR-10, CNN-5, 3 seeds:" in (made := text.markdown([Record(document())], []))
    assert "| DP-PMLF | **56.00 ± 1.00**<br>*paper: about 54* |" in made


def test_a_comparison_of_several_artifacts_counts_once() -> None:
    both = [Record(document()), Record(document(artifact="figure-2"))]
    assert words.tally(both) == words.tally(both[:1])
    (line,) = words.verdicts(both)
    assert (
        line.startswith("With shared learning rates, 2 of the paper's orderings were tested")
        and "0.1 exclude 0" in line
    )


def test_a_single_record_of_a_small_split_tells_nothing_either() -> None:
    small = document()
    for cell, correct in zip(small["cells"], ([800, 790], [801, 791]), strict=False):
        cell["runs"] = [{**run(seed, n / 872), "judged_records": 872} for seed, n in enumerate(correct)]
    assert next(one for one in Record(small).differences() if one.below == "DPSGD").verdict == "cannot tell"


def test_no_claim_goes_against_the_papers_own_numbers() -> None:
    for name in paper.BY_NAME:
        cells = [{**cell, "target_epsilon": cell["epsilon"], "runs": []} for cell in summary.claims(name)["cells"]]
        for cell in cells:
            cell["runs"] = [run(seed, cell["mean"] / 100) for seed in range(2)]
        if cells:
            verdicts = {one.verdict for one in Record(document(artifact=name, cells=cells)).differences()}
            assert "contradicted" not in verdicts


def test_a_trial_that_is_missing_leaves_a_gap_and_shifts_nothing() -> None:
    tuned = document(protocol="tuned")
    for cell in tuned["cells"]:
        cell["trials"] = [run(1000, 0.3, lr=0.05), run(1000, 0.4, lr=0.5), run(1000, 0.2, lr=1.5)]
    del tuned["cells"][0]["trials"][0]
    made = text.markdown([Record(tuned)], [])
    assert "|  | 0.05 | 0.5 | 1.5 | chosen |" in made
    assert "DPSGD | - | 40.00 | 20.00 |" in made and "DP-PMLF | 30.00 | 40.00 | 20.00 |" in made
    assert "<td>-</td><td" in page.render([Record(tuned)], [])


def test_a_device_and_the_states_of_the_source_are_said() -> None:
    elsewhere = document()
    for number, cell in enumerate(elsewhere["cells"]):
        for one in cell["runs"]:
            one["cost"]["machine"] |= {"device": "cuda", "code": f"code{number // 2}"}
    said = dict(words.facts(Record(elsewhere)))
    assert "device cuda" in said["machine"] and said["source"] == "code0: 6 runs, code1: 3 runs"


def test_undecided_orderings_have_a_bound() -> None:
    undecided = document()
    undecided["cells"][1]["runs"] = [run(seed, accuracy) for seed, accuracy in enumerate([0.51, 0.51, 0.52])]
    (line,) = words.findings(Record(undecided))
    interval = stats.ttest_rel([51, 51, 52], [50, 53, 50]).confidence_interval(0.95)  # against InnerOuter, the widest
    assert interval.high > 3
    assert line.endswith("3 seeds are too few to bound its lead where undecided.")
    undecided["cells"][1]["runs"] = [run(seed, accuracy) for seed, accuracy in enumerate([0.499, 0.521, 0.51])]
    undecided["cells"].pop()
    (line,) = words.findings(Record(undecided))
    interval = stats.ttest_rel([49.9, 52.1, 51], [50, 52, 51]).confidence_interval(0.95)
    assert line.endswith(f"where undecided, its lead is below {interval.high:.2f} points.")


def test_what_shaped_noise_gains_is_said_beside_the_papers_claims_and_not_counted_among_them() -> None:
    with_ours = document()
    ours = copy.deepcopy(with_ours["cells"][0]) | {"variant": paper.SHAPED_LABEL}
    ours["runs"] = [run(seed, accuracy) for seed, accuracy in enumerate([0.60, 0.61, 0.62])]
    with_ours["cells"].append(ours)
    before, after = Record(document()), Record(with_ours)
    first, said = words.findings(after)
    assert [first] == words.findings(before)
    interval = stats.ttest_rel([60, 61, 62], [50, 52, 51]).confidence_interval(0.95)
    assert said.startswith(f"CIFAR-10, CNN-5, ε = 1: {paper.SHAPED_LABEL} is above DPSGD +10.00 (+{interval.low:.2f}")
    assert "DP-PMLF +5.00" in said and "InnerOuter +10.00" in said
    assert words.tally([after]) == words.tally([before])


def test_latex_is_balanced_and_escapes_what_it_must() -> None:
    changed = document()
    changed["cells"][0]["variant"] = "a {-0.9}, b {0.1} & 5%"
    made = text.latex([Record(changed)])
    assert r"a \{-0.9\}, b \{0.1\} \& 5\%" in made and r"\textbf{56.00 $\pm$ 1.00}" in made
    assert made.count(r"\begin{") == made.count(r"\end{") == 2
    body = made.replace(r"\{", "").replace(r"\}", "")
    assert body.count("{") == body.count("}")


@pytest.mark.slow
def test_pictures_are_drawn_of_every_chart(tmp_path: Path) -> None:
    table = document(artifact="table-3", axis="epsilon")
    written = pictures.draw([Record(document()), Record(table)], tmp_path)
    assert sorted(path.name for path in written) == sorted(path.name for path in tmp_path.iterdir())
    assert {path.suffix for path in written} == {".png", ".svg"} and len(written) == 4
    for path in written:
        if path.suffix == ".png":
            with Image.open(path) as image:
                colours = image.convert("RGB").getcolors(1 << 24)
            assert colours is not None and len(colours) > 50


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_folder_without_records_is_refused(content: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "record.json").write_text(content)
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "page.html")]) == 2
    assert re.search("is not valid JSON|there is no record", capsys.readouterr().err)
    assert main(["report", str(tmp_path / "none")]) == 2
    assert "is not a folder" in capsys.readouterr().err
    assert not (tmp_path / "page.html").exists()


def test_the_later_of_two_records_counts(tmp_path: Path) -> None:
    for name, accuracy in (("a", 0.1), ("b", 0.9)):
        (tmp_path / name).mkdir()
        changed = copy.deepcopy(document())
        changed["cells"][0]["runs"] = [run(0, accuracy)]
        (tmp_path / name / "record.json").write_text(json.dumps(changed))
    records, _ = summary.read([tmp_path / "a", tmp_path / "b"])
    assert len(records) == 1 and records[0].cells[0].mean == pytest.approx(90.0)


class Outline(HTMLParser):
    """The references, ids and charts of a page."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.references: list[str] = []
        self.charts: list[dict[str, Any]] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)
        if given.get("id"):
            self.ids.append(str(given["id"]))
        if "data-chart" in given:
            self.charts.append(json.loads(given["data-chart"] or ""))
        self.references += [str(given[name]) for name in ("href", "src") if given.get(name)]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.mark.slow
def test_all_eleven_artifacts_run_in_smoke_and_are_drawn_by_a_browser(tmp_path: Path) -> None:
    """Run, report and look at the page, in one test because the runs take long."""
    out, made = tmp_path / "runs", tmp_path / "report.html"
    assert main(["reproduce", "all", "--profile", "smoke", "--out", str(out)]) == 0
    for artifact in paper.ARTIFACTS:
        text_of_record = (out / f"{artifact.name}-smoke-shared.json").read_text()
        assert str(tmp_path) not in text_of_record  # a path of one machine
        record = json.loads(text_of_record)
        assert all(sealed(cell["certificate"]) == cell["certificate"] for cell in record["cells"])
        assert all(len(cell["runs"]) == cell["planned_seeds"] > 0 for cell in record["cells"])
        assert all(run["epsilon"] <= cell["target_epsilon"] for cell in record["cells"] for run in cell["runs"])
    assert main(["report", str(out), "--out", str(made), "--markdown", str(tmp_path / "results.md")]) == 0

    outline = Outline()
    outline.feed(made.read_text())
    assert not outline.open and len(set(outline.ids)) == len(outline.ids)
    assert {artifact.name for artifact in paper.ARTIFACTS} <= set(outline.ids)
    assert all(r.startswith(("#", "data:")) and r[1:] in ("ata:,", *outline.ids) for r in outline.references)
    assert "http" not in re.sub(r"http://www.w3.org/2000/svg", "", made.read_text())  # nothing is downloaded
    if CHROMIUM is None:
        pytest.skip("no chromium here: the page was not drawn by a browser")

    dumped, log = browse(made, "--dump-dom")
    drawn = re.findall(r'data-drawn="(\d+)"', dumped)
    assert len(drawn) == len(outline.charts) >= 14 and all(int(marks) > 0 for marks in drawn)
    assert "CONSOLE" not in log, log
    for theme, darker in (("light", False), ("dark", True)):
        shot = tmp_path / f"{theme}.png"
        browse(made, f"--screenshot={shot}", "--window-size=1280,1600", address=f"#theme={theme}")
        with Image.open(shot) as image:
            pixels = np.asarray(image.convert("L"), dtype=float)
        assert (np.median(pixels) < 80) == darker and pixels.std() > 5


def browse(file: Path, *options: str, address: str = "") -> tuple[str, str]:
    """The output of a headless browser for a page, and its log, in which CONSOLE marks errors of the page."""
    quiet = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr", "--v=0"]
    assert CHROMIUM is not None
    command = [CHROMIUM, *quiet, f"--user-data-dir={file.parent / 'browser'}", "--virtual-time-budget=4000", *options]
    done = subprocess.run([*command, f"{file.as_uri()}{address}"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.slow
def test_a_script_error_is_in_the_log(tmp_path: Path) -> None:
    """The browser test can fail: an error of the page's script is in its log."""
    if CHROMIUM is None:
        pytest.skip("no chromium here")
    broken = tmp_path / "broken.html"
    broken.write_text(page.render([Record(document())], []).replace("JSON.parse(", "JSON.parsed("))
    dumped, log = browse(broken, "--dump-dom")
    assert "CONSOLE" in log and "data-drawn" not in dumped


def test_statistics_agree_with_the_standard_library() -> None:
    cell = Record(document()).cells[0]
    assert cell.deviation == pytest.approx(100 * statistics.stdev(ACCURACIES["DPSGD"]))


def test_the_results_in_the_docs_are_made_from_the_stored_records() -> None:
    docs = Path(__file__).resolve().parents[2] / "docs"
    records, diagnostics = summary.read([docs / "results" / "reproduction"])
    assert (docs / "results.md").read_text() == text.markdown(records, diagnostics)
    assert all(record.profile != "smoke" for record in records)
