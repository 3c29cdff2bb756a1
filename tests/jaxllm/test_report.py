import html
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from browser import CHROMIUM, Browser
from cases import slow
from matplotlib.figure import Figure

from jaxllm.train import report
from jaxllm.train.metrics import draw_loss

SAMPLE = "def f(): <b>"
ABOUT = {
    "model": "llama3, 5,046,528 parameters",
    "tokens_per_step": 2048,
    "device": "2 x H100",
    "started": "2026-11-21 07:40",
    "versions": {"jax": "0.12"},
    "ops": [["attention", "mosaic", "every requirement of the kernel is met " * 4]],
}


def a_run(folder, steps, slope=0.01, samples=3):
    folder.mkdir()
    rows = [
        {"step": i, "loss": 5 - slope * i, "lr": 1e-3, "grad_norm": 1.0, "tokens_per_second": 100.0}
        | ({"skips": 1} if i == 7 else {})
        | {"peak_memory_gib": 40.5}
        for i in range(1, steps + 1)
    ]
    rows += [{"step": steps, "val_loss": 3.25}]
    rows += [{"step": i, "sample": f"{SAMPLE}{i}{'x' * 200}"} for i in range(samples)]
    text = "".join(json.dumps(r) + "\n" for r in rows) + '{"step": 9, "lo'  # killed while writing
    (folder / "metrics.jsonl").write_text(text)
    (folder / "config.yaml").write_text(f"model:\n  type: <gpt2>\ntrain:\n  steps: {steps}\n")
    (folder / "run.json").write_text(json.dumps(ABOUT))
    return folder


class Page(HTMLParser):
    """Collects the tags, the links and the text of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.links, self.text = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [v for k, v in attrs if k in ("src", "href") or k.endswith(":href")]

    def handle_data(self, data):
        self.text += data


def test_a_page_is_self_contained(tmp_path):
    run = a_run(tmp_path / "one\udcff", 20)  # a name that is not UTF-8
    report.write([run], run / "report.html")
    text = (run / "report.html").read_text()
    page = Page(text)
    assert all(link.startswith("#") for link in page.links)  # within the page
    assert not {"link", "img", "iframe"} & set(page.tags)
    assert page.tags.count("svg") == 6  # all but MFU, which no row has
    for word in ("4.8000", "3.2500", "40.5 GiB", "40,960", SAMPLE, "type: <gpt2>", "updates skip"):
        assert word in page.text, word
    for word in (
        ABOUT["model"],
        ABOUT["device"],
        ABOUT["started"],
        "attention",
        "0.12",
        "20 of 20",
    ):
        assert word in page.text, word
    assert "MFU" not in page.text
    assert report.INK not in text


def test_a_last_step_without_a_finite_loss_does_not_get_an_earlier_one(tmp_path):
    run = a_run(tmp_path / "one", 20)
    with (run / "metrics.jsonl").open("a") as file:
        file.write("\n" + json.dumps({"step": 21, "loss": None, "skips": 1}))
    text = Page(report.page([report.LoadedRun(run)])).text
    assert "steps21 of 20" in text
    assert "last loss4.8000" in text  # it said "loss of the last step"


def test_several_runs_share_the_charts(tmp_path, capsys):
    runs = [a_run(tmp_path / "one", 20), a_run(tmp_path / "two", 30, slope=0.02)]
    assert report.main([*map(str, runs), "--out", str(tmp_path / "x.html")]) == 0
    page = Page((tmp_path / "x.html").read_text())
    assert page.tags.count("svg") == 6
    assert "one" in page.text
    assert "What differssettingonetwotrain.steps2030two"[:-3] in page.text  # and nothing else


def test_the_duration_is_shown_if_known(tmp_path):
    run = a_run(tmp_path / "one", 20)
    assert "duration" not in Page(report.page([report.LoadedRun(run)])).text
    with (run / "metrics.jsonl").open("a") as file:
        for seconds in (3599.6, 7322.4, 1e25, None, "x"):
            file.write("\n" + json.dumps({"step": 20, "seconds": seconds}))
    assert "duration2:02:02" in Page(report.page([report.LoadedRun(run)])).text


@pytest.mark.parametrize("value", [slow(10**400), "\ud800", [1], slow(0)])
def test_a_damaged_file_may_hold_anything(value, tmp_path):
    run = a_run(tmp_path / "one", 3)
    rows = [json.dumps({"step": 2, key: value}) for key in ("loss", "val_loss", "lr", "sample")]
    with (run / "metrics.jsonl").open("a") as file:
        file.write("\n" + "\n".join([*rows, json.dumps({"step": value, "loss": 1.0})]))
    (run / "run.json").write_text(json.dumps(ABOUT | {"tokens_per_step": value, "tokenizer": [1]}))
    loaded = report.LoadedRun(run)
    assert loaded.points("loss")[:3] == [(1, 4.99), (2, 4.98), (3, 4.97)]
    assert "loss     4.9900 at step 1" in report.summarize_run(run, "")
    assert "0 tokens" in report.summarize_run(run, "")
    draw_loss(run / "metrics.jsonl", tmp_path / "loss.png")
    report.page([loaded])


@pytest.mark.parametrize("text", ["a: 2001-13-45", "a: !!int x", "1: {2: 3}", f"a: {'[' * 3000}"])
def test_an_edited_configuration_costs_its_values_only(text, tmp_path):
    run = a_run(tmp_path / "one", 3)
    (run / "config.yaml").write_text(text)
    assert report.LoadedRun(run).settings() in ({}, {"1.2": "3"})


@pytest.mark.parametrize(
    ("values", "low", "high"),
    [
        ([1 + i / 100 for i in range(100)], 0.5, 4),
        ([1 + i / 100 for i in range(100)] + [1e9] + [2.0] * 50, 0.5, 40),  # a spike is cut off
        ([30 / (1 + i) for i in range(100)], 0.15, 60),  # a start 100 times as high is shown
        ([1.0] * 5, 0.5, 2),
    ],
)
def test_one_spike_does_not_flatten_a_log_scale(values, low, high):
    axes = Figure().subplots()
    axes.plot(values)
    report.set_scale(axes, [list(enumerate(values))], "log")
    bottom, top = axes.get_ylim()
    assert axes.get_yscale() == "log"
    assert low < bottom < min(values)
    assert sorted(values)[-2] < top < high
    assert any(bottom < tick < top for tick in axes.get_yticks())


def test_only_reports_are_overwritten(tmp_path, capsys):
    run, out = a_run(tmp_path / "one", 20), tmp_path / "weights"
    out.write_bytes(b"\x93precious")
    assert report.main([str(run), "--out", str(out)]) == 2
    assert "would be overwritten" in capsys.readouterr().err
    assert out.read_bytes() == b"\x93precious"
    for folder in (tmp_path, ".", "/"):
        assert report.main([str(run), "--out", str(folder)]) == 2
        assert f"error: cannot write {folder}: " in capsys.readouterr().err
    assert not [*Path().glob(".*tmp-*"), *tmp_path.parent.glob("*.tmp-*")]
    report.write([run], tmp_path / "x.html")
    report.write([run], tmp_path / "x.html")


def test_long_runs_stay_small_and_keep_their_extremes(tmp_path):
    run = a_run(tmp_path / "long", 20_000, slope=1e-5, samples=100)
    loaded = report.LoadedRun(run)
    points = loaded.points("loss")
    points[777] = (778, 99.0)
    kept = report.thin(points)
    assert len(kept) <= report.POINTS
    assert (778, 99.0) in kept
    assert kept == sorted(kept)
    steps = [step for step, _ in loaded.samples()]
    assert (steps[0], steps[-1], len(steps)) == (0, 99, report.SAMPLES)
    report.write([run], tmp_path / "x.html")
    assert (tmp_path / "x.html").stat().st_size < 1_000_000


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "is not a run's folder"),
        ({"metrics.jsonl": "", "config.yaml": ""}, "holds no metrics yet"),
        ({"config.yaml": ""}, "holds no metrics yet; jaxllm train writes them"),  # as convert's
        ({".lock": ""}, "holds no metrics yet; jaxllm train writes them"),  # it compiles
        ({"metrics.jsonl": '{"step": 1}', "config.yaml": "", "run.json": "{"}, "is damaged"),
        ({"metrics.jsonl": '{"step": 1}', "config.yaml": "", "run.json": "3"}, "is damaged"),
    ],
)
def test_a_folder_without_a_run_gives_one_line(tmp_path, files, message, capsys):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    assert report.main([str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("no chromium here (Debian: apt-get install chromium)")
    with Browser() as opened:
        yield opened


@pytest.mark.parametrize("runs", [slow(1), 2])
def test_a_browser_shows_the_report_light_and_dark_wide_and_narrow(browser, tmp_path, runs):
    folders = [a_run(tmp_path / f"run_{i}", 200, slope=0.01 * (i + 1)) for i in range(runs)]
    report.write(folders, tmp_path / "x.html")
    for dark, width in ((False, 1200), (True, 1200), (False, 390), (True, 390)):
        browser.open(tmp_path / "x.html", width=width, dark=dark)
        shown, _ = browser.picture()
        assert browser.complaints() == []
        assert browser.ask("document.documentElement.scrollWidth") == width  # only tables scroll
        assert browser.ask("document.querySelectorAll('svg').length") == 6
        paper = shown[2, 2]
        assert (paper.max() < 0.2) if dark else (paper.min() > 0.9)
        box = browser.ask(
            "(r => [r.top, r.bottom, r.left, r.right].join())"
            "(document.querySelector('svg').getBoundingClientRect())"
        )
        top, bottom, left, right = (int(float(x)) for x in box.split(","))
        assert right - left > 0.3 * width
        for part in (shown, shown[top:bottom, left:right]):  # the page; its first chart
            ink = (np.abs(part - (1 - paper)).max(-1) < 0.2).mean()
            assert 0.001 < ink < 0.3, (dark, width)
        for color in report.COLORS[:runs]:
            rgb = np.array([int(color[i : i + 2], 16) / 255 for i in (1, 3, 5)])
            assert (np.abs(shown[top:bottom] - rgb).max(-1) < 0.1).sum() > 100, color


POINTER = """(() => {
    const svg = document.querySelectorAll("svg")[INDEX], box = svg.getBoundingClientRect();
    svg.dispatchEvent(new PointerEvent("pointermove",
        {clientX: box.left + AT * box.width, clientY: box.top + 20}));
    return svg.parentElement.querySelector("output").textContent; })()"""


def test_a_browser_shows_values_under_the_pointer_and_clips_nothing_on_a_phone(browser, tmp_path):
    folders = [a_run(tmp_path / f"run_{i}", 200, slope=0.01 * (i + 1)) for i in range(2)]
    report.write(folders[:1], tmp_path / "one.html")
    report.write(folders, tmp_path / "two.html")
    browser.open(tmp_path / "one.html", width=390, dark=False)
    clipped = "[...document.querySelectorAll('table, td, th, figure, pre, svg text')].filter(x => "
    clipped += "x.getBoundingClientRect().right > 390).map(x => x.outerHTML.slice(0, 80)).join()"
    assert browser.ask(clipped) == ""
    at = lambda index, x: browser.ask(POINTER.replace("INDEX", str(index)).replace("AT", str(x)))
    assert at(0, 0.99).startswith("step 200: 3")  # 5 - 0.01 x 200
    middle = at(0, 0.55)
    step, value = middle.removeprefix("step ").split(": ")
    assert 80 < int(step) < 130
    assert float(value) == pytest.approx(5 - 0.01 * int(step), abs=0.03)
    assert browser.complaints() == []
    browser.open(tmp_path / "two.html", width=1200, dark=False)
    assert re.fullmatch(r"step 200: run_0 3[.\d]*, run_1 1[.\d]*", at(0, 0.99))


def test_runs_of_different_tokenizers_and_batches_are_compared_by_bytes_and_tokens(tmp_path):
    folders = [a_run(tmp_path / f"run_{i}", 20) for i in range(2)]
    for i, folder in enumerate(folders):
        about = ABOUT | {"tokenizer": str(i), "bytes_per_token": 2.0 + i}
        (folder / "run.json").write_text(json.dumps(about | {"tokens_per_step": 1000 * (i + 1)}))
    runs = [report.LoadedRun(folder) for folder in folders]
    data = re.search('data-axis=tokens data-curves="(.*?)"', report.page(runs))[1]
    one, two = json.loads(html.unescape(data))
    bits = 5 - 0.01 * 20
    assert one["points"][-1][1:] == [20_000, pytest.approx(bits / np.log(2) / 2)]
    assert two["points"][-1][1:] == [40_000, pytest.approx(bits / np.log(2) / 3)]
    assert "best validation, bits per byte2.34441.5629" in Page(report.page(runs)).text
    (folders[0] / "run.json").write_text(json.dumps(ABOUT))  # of an earlier version
    runs = [report.LoadedRun(folder) for folder in folders]
    assert "data-axis=tokens" in report.page(runs)
    assert report.page(runs[:1]).count("data-axis=step") == 6


def test_the_browser_reports_errors_of_a_page(browser, tmp_path):
    page = tmp_path / "x.html"
    page.write_text('<img src="http://localhost/x.png"><script>console.log("oh"); no()</script>')
    browser.open(page, width=400, dark=False)
    complaints = "\n".join(browser.complaints())
    for word in ("request: http://localhost/x.png", '"oh"', "ReferenceError"):
        assert word in complaints
