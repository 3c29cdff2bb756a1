import json
from html.parser import HTMLParser

import pytest

from jaxllm import report


def a_run(folder, steps, slope=0.01):
    folder.mkdir()
    rows = [
        {"step": i, "loss": 5 - slope * i, "lr": 1e-3, "grad_norm": 1.0, "tokens_per_second": 100.0}
        for i in range(1, steps + 1)
    ]
    rows += [{"step": steps, "val_loss": 3.25}]
    text = "".join(json.dumps(r) + "\n" for r in rows) + '{"step": 9, "lo'  # killed while writing
    (folder / "metrics.jsonl").write_text(text)
    (folder / "config.yaml").write_text("model:\n  type: <gpt2>\n")
    return folder


class Page(HTMLParser):
    """Collects the tags, the addresses and the text of a page."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.links, self.text = [], [], ""
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [v for k, v in attrs if k in ("src", "href") or k.endswith(":href")]

    def handle_data(self, data):
        self.text += data


def test_a_page_needs_nothing_but_itself(tmp_path, capsys):
    run = a_run(tmp_path / "one", 20)
    sample = "def f(): <b>"
    about = {"device": "2 x H100", "ops": [["attention", "mosaic", "ok"]], "sample": sample}
    (run / "run.json").write_text(json.dumps(about))
    assert report.main([str(run)]) == 0
    text = (run / "report.html").read_text()
    page = Page(text)
    assert all(link.startswith("#") for link in page.links)  # within the page
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert page.tags.count("svg") == 4  # loss, throughput, learning rate, gradient norm; no MFU
    for word in ("4.8000", "3.2500", "2 x H100", "attention", sample, "type: <gpt2>"):
        assert word in page.text, word
    assert report.INK not in text


def test_runs_lie_over_one_another(tmp_path, capsys):
    runs = [a_run(tmp_path / "one", 20), a_run(tmp_path / "two", 30, slope=0.02)]
    assert report.main([*map(str, runs), "--out", str(tmp_path / "x.html")]) == 0
    page = Page((tmp_path / "x.html").read_text())
    assert page.tags.count("svg") == 4
    assert "one" in page.text
    assert "two" in page.text


def test_long_runs_stay_small_and_keep_their_extremes(tmp_path):
    run = a_run(tmp_path / "long", 20_000, slope=1e-5)
    points = report.Loaded(run).points("loss")
    points[777] = (778, 99.0)
    kept = report.thin(points)
    assert len(kept) <= report.POINTS
    assert (778, 99.0) in kept
    assert kept == sorted(kept)
    report.write([run], tmp_path / "x.html")
    assert (tmp_path / "x.html").stat().st_size < 1_000_000


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "is no run's directory"),
        ({"metrics.jsonl": "", "config.yaml": ""}, "holds no metrics yet"),
        ({"metrics.jsonl": '{"step": 1}', "config.yaml": "", "run.json": "{"}, "is damaged"),
        ({"metrics.jsonl": '{"step": 1}', "config.yaml": "", "run.json": "3"}, "is damaged"),
    ],
)
def test_what_is_no_run_is_one_line(tmp_path, files, message, capsys):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    assert report.main([str(tmp_path)]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()
