"""The plan of a run: numbers that the accountant confirms, formulas by hand, and a page that recomputes."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from pmlf import models
from pmlf.cli.main import main
from pmlf.cli.plan import page
from pmlf.experiments import planning
from pmlf.shapes import best as best_shape

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SMALL = {"records": 10_000, "parameters": 400, "batch_sizes": [100, 400, 1600], "epochs": [4, 16], "delta": 1e-5}


@pytest.fixture(scope="module")
def sweep() -> planning.Sweep:
    seconds = {"dpsgd": 0.001, "dp-pmlf": 0.002}
    return planning.plan(**SMALL, epsilons=[8, 1], clip_norm=0.5, seconds_per_sample=seconds)  # type: ignore[arg-type]


@pytest.mark.slow
def test_every_epsilon_is_the_one_that_account_prints(
    sweep: planning.Sweep, capsys: pytest.CaptureFixture[str]
) -> None:
    assert len(sweep.points) == 12
    for point in sweep.points[::5]:
        mechanism = ["--records", "10000", "--batch-size", str(point.batch_size), "--epochs", str(point.epochs)]
        budget = ["--epsilon", str(point.target_epsilon), "--delta", "1e-5", "--json"]
        assert main(["account", *mechanism, *budget]) == 0
        account = json.loads(capsys.readouterr().out)
        assert account["epsilon"] == point.epsilon <= point.target_epsilon
        assert account["noise_multiplier"] == point.noise_multiplier and account["steps"] == point.steps


@pytest.mark.slow
def test_noise_path_and_hours_follow_their_formulas(sweep: planning.Sweep) -> None:
    for point in sweep.points:
        per_step = point.noise_multiplier * 0.5 / point.batch_size  # z C / B, of each coordinate
        assert point.noise_in_gradient == pytest.approx(math.sqrt(400) * per_step / 0.5)
        longest, accumulated = point.steps * 0.5, math.sqrt(point.steps * 400) * per_step
        assert point.path_over_noise == pytest.approx(longest / accumulated)
        assert point.noise_in_parameters == pytest.approx(point.learning_rate * per_step * math.sqrt(point.steps))
        assert point.noise_in_parameters <= 1.05 * planning.SAFE_NOISE
        assert point.learning_rate * 0.5 <= planning.LONGEST_STEP
        assert point.hours["dp-pmlf"] == pytest.approx(point.steps * point.batch_size * 0.002 / 3600)


@pytest.mark.parametrize(("norm", "clip_norm"), [(1.0, 1.0), (30.0, 1.0), (30.0, 50.0), (0.1, 1.0)])
def test_a_linear_model_takes_noise_in_its_scores_up_to_a_step_that_is_stable(norm: float, clip_norm: float) -> None:
    one = {**SMALL, "batch_sizes": [400], "epochs": [4]}
    (point,) = planning.plan(**one, epsilons=[3], clip_norm=clip_norm, input_norm=norm).points  # type: ignore[arg-type]
    in_scores = norm * point.noise_in_parameters
    curvature = norm**2 / 2 * min(1.0, clip_norm / norm)  # of a clipped softmax loss, at most
    highest = 2 * (1 + 0.9) / (1 - 0.9) / curvature  # of a step with the momentum 0.9
    assert in_scores <= 1.05 * planning.SCORE_NOISE and point.learning_rate <= 1.05 * highest
    assert max(in_scores / planning.SCORE_NOISE, point.learning_rate / highest) >= 0.95


def order(point: planning.PlannedPoint) -> tuple[bool, float, int]:
    return point.steps < planning.LEAST_STEPS, point.epochs, point.batch_size


def test_the_recommendation_is_the_cheapest_that_is_nearly_the_best(sweep: planning.Sweep) -> None:
    for each in sweep.recommendations:
        same = [point for point in sweep.points if point.target_epsilon == each.point.target_epsilon]
        best = max(point.path_over_noise for point in same)
        assert each.point.path_over_noise >= planning.ENOUGH * best
        cheaper = [point for point in same if order(point) < order(each.point)]
        assert all(point.path_over_noise < planning.ENOUGH * best for point in cheaper)
        assert each.method == "lp-dpsgd"
        assert each.noise_shape == "white" and "Noise: white" in each.reason
        setting = {"batch_size": each.point.batch_size, "steps": each.point.steps, "delta": sweep.delta}
        chosen = best_shape(records=sweep.records, epsilon=each.point.target_epsilon, **setting).shape.bands
        assert chosen == 1 or f"--bands {chosen} leaves" in each.reason


def test_the_time_of_a_sample_is_measured_on_synthetic_inputs() -> None:
    network = models.build_for_table("linear", features=5, outputs=2, seed=0)
    found = planning.seconds_per_sample(network, planning.synthetic_rows(5), 2)
    assert set(found) == set(planning.TIMED) and all(0 < seconds < 1 for seconds in found.values())


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"batch_sizes": []}, "`batch_sizes` is empty"),
        ({"batch_sizes": [20_000]}, "batch_sizes=20000 is more than 10000"),
        ({"records": 0}, "records=0"),
        ({"clip_norm": -1.0}, "clip_norm=-1.0"),
        ({"epochs": [0]}, "epochs=0"),
    ],
)
def test_what_cannot_be_planned_is_refused(changes: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        planning.plan(**{**SMALL, "epsilons": [1], **changes})  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_command_prints_a_table_a_reason_and_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = [
        "--records",
        "4000",
        "--parameters",
        "1000",
        "--batch-sizes",
        "40",
        "400",
        "--epochs",
        "5",
        "--epsilons",
        "2",
    ]
    picture = tmp_path / "plan.png"
    assert main(["plan", *small, "--plot", str(picture)]) == 0
    out = capsys.readouterr().out
    assert "--batch-size" in out and "because the noise multiplier" in out and picture.stat().st_size > 5000
    assert main(["plan", *small, "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert [point["batch_size"] for point in document["points"]] == [40, 400]
    assert document["recommendations"][0]["point"] in document["points"]
    assert main(["plan", *small, "--clip-norm", "0"]) == 2
    assert "--clip-norm=0" in capsys.readouterr().err


def browse(file: Path, *options: str, address: str = "") -> tuple[str, str]:
    """What a headless browser prints of a page, and its log, in which CONSOLE marks errors."""
    assert CHROMIUM is not None
    quiet = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--enable-logging=stderr", "--v=0"]
    command = [CHROMIUM, *quiet, f"--user-data-dir={file.parent / 'browser'}", "--virtual-time-budget=4000", *options]
    done = subprocess.run([*command, f"{file.as_uri()}{address}"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout, done.stderr


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium here: the page was not drawn by a browser")
def test_the_page_recomputes_from_its_table_and_fits_a_phone(sweep: planning.Sweep, tmp_path: Path) -> None:
    file = tmp_path / "plan.html"
    width = "<script>document.body.dataset.overflow = document.documentElement.scrollWidth - innerWidth</script>"
    file.write_text(page(sweep).replace("</body>", f"{width}</body>"))
    assert "http" not in file.read_text().replace("http://www.w3.org/2000/svg", "")  # nothing is loaded
    for pixels in (1400, 390):
        for epsilon, epochs, batch in ((8, 16, 1600), (1, 4, 100)):
            place = f"#epsilon={epsilon}&epochs={epochs}&batch={batch}"
            dumped, log = browse(file, "--dump-dom", f"--window-size={pixels},1200", address=place)
            assert "CONSOLE" not in log, log
            point = next(
                p for p in sweep.points if (p.target_epsilon, p.epochs, p.batch_size) == (epsilon, epochs, batch)
            )
            shown = re.findall(r"<div><b>([^<]*)</b><span>([^<]*)</span>", dumped)
            values = {name: float(value.replace(",", "")) for value, name in shown}
            assert values["noise multiplier z"] == pytest.approx(point.noise_multiplier, rel=1e-3)
            assert values["norm of the noise in a mean gradient"] == pytest.approx(
                0.5 * point.noise_in_gradient,
                rel=6e-2,  # the slider of the clip norm has ten stops a decade
            )
            assert values["path over noise"] == pytest.approx(point.path_over_noise, rel=1e-2)
            assert int(re.search(r'data-drawn="(\d+)"', dumped)[1]) > 10  # type: ignore[index]
            assert int(re.search(r'data-overflow="(-?\d+)"', dumped)[1]) <= 0  # type: ignore[index]
        shot = tmp_path / f"{pixels}.png"
        browse(file, f"--screenshot={shot}", f"--window-size={pixels},1200")
        with Image.open(shot) as image:
            assert np.asarray(image.convert("L"), dtype=float).std() > 5
