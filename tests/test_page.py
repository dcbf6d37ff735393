"""The page of a comparison in a browser: what it shows, the address, the keyboard, phones, dark rooms, paper, no scripts."""

from __future__ import annotations

import base64
import gzip
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmeval_prune.artefacts import write_artefact
from lmeval_prune.cli import main
from lmeval_prune.grid.folder import MEASURE, VERSION, GridFolder
from tests.test_grid_comparison import question, write_cell, write_grid

RNG = np.random.default_rng(0)
Open = Callable[..., Any]


@pytest.fixture
def open_page(browser: Any) -> Iterator[Open]:
    """Opens the page of a grid's folder; afterwards there were no errors, and nothing but the file was asked for."""
    opened = []

    def open_page(folder: Path, address: str = "", **options: Any) -> Any:
        page = browser.new_page(**{"viewport": {"width": 1280, "height": 900}, **options})
        page.set_default_timeout(10_000)
        problems: list[str] = []
        opened.append((page, problems))
        file = (folder / "compare" / "page.html").as_uri()
        page.on(
            "request", lambda request: problems.append(request.url) if request.url.partition("#")[0] != file else None
        )
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.on("dialog", lambda dialog: problems.append(dialog.message))
        page.goto(file + address)
        if options.get("java_script_enabled", True):
            ready(page)
        return page

    yield open_page
    for page, problems in opened:
        page.close()
        assert problems == []


def ready(page: Any) -> None:
    """Wait until the questions are there, which each task has in a packed block of its own."""
    page.wait_for_selector("body[data-ready=true] #questions-part[aria-busy=false]")


def unpacked(folder: Path) -> list[str]:
    """Return the JSON of the page's packed blocks: the tables, then each task's questions."""
    packed = re.findall(r"[A-Za-z0-9+/=]{200,}", (folder / "compare" / "page.html").read_text())
    return [gzip.decompress(base64.b64decode(block)).decode() for block in packed]


HOSTILE = (
    "=HYPERLINK('http://x') </script><script>document.title='owned'</script> \"'><img src=x onerror=alert(1)> $\\frac{"
)


def test_names_and_texts_of_others_are_only_shown(
    open_page: Open, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """A variant, its baseline, a task, a question and its answers, in every file and in the terminal."""
    base, task, link = "<!-- dense", "[t](javascript:alert(1))", "javascript:alert(2)"
    rows = {
        name: [
            question(task, i, value, HOSTILE) | {"doc": {"question": HOSTILE}, "target": HOSTILE, "doc_hash": f"{i}"}
            for i in range(9)
        ]
        for name, value in ((base, 0.0), (HOSTILE, 1.0), (link, 1.0), ("\x1b[31mred", 0.0))
    }
    path, folder = tmp_path / "g", GridFolder(tmp_path / "g")
    cells = []
    for number, (name, own) in enumerate(rows.items()):
        write_cell(folder, f"c{number}", {task: own})
        entry = {"key": f"c{number}", "variant": name, "task": task, "metric": None, "selected_on": [HOSTILE]}
        entry |= {"model_args": {"heads": "L0H0"}, "prepare": {}, "prepared": ""}
        entry |= {"costs": f"m{number}", "command": HOSTILE}
        cells.append(entry)
        cost = {"parameters": 100, "flops_per_token": 9.0 - number, "device": HOSTILE, "threads": 1}
        write_artefact(folder.place("measure", f"m{number}"), MEASURE, VERSION, cost)
    folder.create(HOSTILE, base, cells)
    assert main(["grid", "compare", str(path)]) == 0
    assert "\x1b" not in capsys.readouterr().out
    table = (path / "compare" / "table.csv").read_text()
    assert "'=HYPERLINK" in table and not re.search(r'(^|,)"?[=+@]', table, re.MULTILINE)
    report = (path / "compare" / "report.md").read_text()
    assert "&lt;script&gt;" in report and "<" not in report.replace("<0.001", "") and "[t](" not in report
    page = open_page(path, viewport={"width": 1280, "height": 900})
    page.select_option("#b", HOSTILE)
    for row in range(4):
        page.locator("#table td button.name").nth(row).click()
    assert page.locator("tr.detail").count() == 4
    page.click("[data-kind=all]")
    assert page.title() == page.inner_text("#app h1") == HOSTILE
    assert all(HOSTILE in page.inner_text(part) for part in ("#questions", "#table"))
    assert page.query_selector_all("img, iframe, #report a") == [] and len(page.query_selector_all("script")) == 4
    assert all(link.get_attribute("href").startswith("#") for link in page.query_selector_all("a"))


def test_the_page_in_a_browser(open_page: Open, tmp_path: Path) -> None:
    n = 30
    values: dict[str, dict[str, Any]] = {"dense": {}, "worse": {}, "better": {}}
    for task in ("one", "two"):
        values["dense"][task] = [
            question(task, i, float(i % 2), "same" if i < 3 else f"<b>dense</b> {i}") for i in range(n)
        ]
        values["worse"][task] = [question(task, i, 0.0, "same" if i < 3 else f"worse {i}") for i in range(n)]
        values["better"][task] = [question(task, i, float(i % 2 or i < 20), f"better {i}") for i in range(n)]
    path = write_grid(tmp_path / "g", values, "dense", better={"selected_on": ["one"]})
    assert main(["grid", "compare", str(path)]) == 0
    page = open_page(path, viewport={"width": 1280, "height": 1500})

    def variants() -> list[str]:
        return [row.get_attribute("data-variant") for row in page.query_selector_all("#table tbody tr.row")]

    assert variants() == ["better", "dense", "worse"]  # by mean, highest first
    sorted_by = "#table th[aria-sort]"
    page.focus("#table th[data-column=mean] button")
    page.keyboard.press("Enter")
    assert variants() == ["worse", "dense", "better"] and page.get_attribute(sorted_by, "aria-sort") == "ascending"
    page.click("#table th[data-column=name] button")
    assert variants() == ["better", "dense", "worse"]
    assert "chosen on 30 of these questions" in page.inner_text("tr[data-variant=better]")
    page.fill("#filter", "WOR")
    assert variants() == ["worse"] and page.inner_text("#shown") == "1 of 3"
    page.click("tr[data-variant=worse]")
    assert "lm_eval --x worse-one" in page.inner_text("tr.detail")
    page.fill("#filter", "")
    page.click("#significant")
    assert variants() == ["better", "dense", "worse"]  # all differ: 20 and 30 of 60, all one way
    page.select_option("#task", "two")
    ready(page)
    assert page.input_value("#question_task") == "two" and "chosen" not in page.inner_text("tr[data-variant=better]")

    page.select_option("#a", "dense")
    page.select_option("#b", "worse")
    counts = {b.get_attribute("data-kind"): b.inner_text() for b in page.query_selector_all("#counts button")}
    assert counts["onlyA"] == "only A right: 15" and counts["neither"] == "neither right: 15"
    assert counts["differ"] == "answers differ: 27" and counts["all"] == "all: 30"
    page.click("[data-kind=onlyA]")
    item = page.inner_text("#questions .item:nth-child(2)")
    assert "two question 3?" in item and "<b>dense</b> 3" in item and "worse 3" in item  # text, not markup
    assert len(page.query_selector_all("#plot circle")) == 3
    page.click("#plot circle[data-variant=better]")
    assert page.input_value("#b") == "better"
    page.select_option("#cost", "flops_per_token")
    assert "FLOPs per token" in page.inner_html("#plot")


def test_a_page_without_the_texts_of_a_task(open_page: Open, tmp_path: Path) -> None:
    values: dict[str, dict[str, Any]] = {
        name: {task: [question(task, i, float(right), f"{name} of {task} {i}") for i in range(6)] for task in "tu"}
        for name, right in (("dense", True), ("worse", False))
    }
    path = write_grid(tmp_path / "g", values, "dense")
    assert main(["grid", "compare", str(path), "--without_texts", "t"]) == 0
    page = open_page(path)
    page.select_option("#question_task", "t")
    ready(page)
    everything = "".join(unpacked(path))
    assert "u question 3?" in everything and "dense of u 3" in everything
    assert "t question 3?" not in everything and "dense of t 3" not in everything
    shown = page.inner_text("#questions")
    assert "question 3" in shown and "not shown: the texts of this task are left out" in shown
    assert "only A right: 6" in page.inner_text("#counts")


def test_only_a_choice_that_differs_is_an_answer_that_differs(open_page: Open, tmp_path: Path) -> None:
    """Of choice tasks the chosen text; of the likelihood of one text, and without texts, what came of it."""

    def choice(i: int, best: int, worse_by: float) -> dict[str, Any]:
        scores = [[[-1.0 - worse_by, False]], [[-1.0 - worse_by, False]]]
        scores[best] = [[-0.5 - worse_by, True]]
        own = question("choice", i, float(best == 0), metric="acc") | {"target": "0"}
        return own | {"arguments": [["q", " red"], ["q", " blue"]], "resps": scores}

    def single(i: int, right: bool, score: float) -> dict[str, Any]:
        return question("single", i, float(right), metric="acc") | {
            "arguments": [["q", " red"]],
            "resps": [[[score, right]]],
        }

    values = {
        "dense": {"choice": [choice(i, 0, 0.0) for i in range(6)], "single": [single(i, True, -1.0) for i in range(5)]},
        "other": {
            "choice": [choice(i, int(i == 0), 0.1) for i in range(6)],
            "single": [single(i, i > 1, -1.5) for i in range(5)],
        },
    }
    path = write_grid(tmp_path / "g", values, "dense")
    for withheld, label in (([], "answers differ: 1"), (["--without_texts", "choice"], "outcomes differ: 1")):
        assert main(["grid", "compare", str(path), *withheld]) == 0
        page = open_page(path)
        page.select_option("#question_task", "choice")
        ready(page)
        assert page.inner_text("[data-kind=differ]") == label
        page.click("[data-kind=all]")
        if not withheld:
            assert "red" in page.inner_text(".answer.right") and "log-likelihood -0.50" in page.inner_text("#questions")
            assert "gold: red" in page.inner_text("#questions")
        page.select_option("#question_task", "single")
        ready(page)
        assert page.inner_text("[data-kind=differ]") == "outcomes differ: 2"
    assert "log-likelihood -1.50" in page.inner_text("#questions") and page.query_selector_all(".answer") == []


# ---------------------------------------------------------------------- phones, the address, the keyboard, paper

LONG = "\n".join(f"Step {i}: add the {i} apples to the others in the basket." for i in range(24)) + "\nThe result is "


@pytest.fixture(scope="module")
def grid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A compared grid of four variants on two tasks of 40 questions, some with long answers, with costs and notes."""
    values = {
        name: {
            task: [
                question(task, i, float(i % 3 < right), (LONG if i % 2 else "It is ") + f"{i} by {name}")
                for i in range(40)
            ]
            for task in ("gsm8k", "asdiv, as given")
        }
        for name, right in (("dense", 3), ("random 10% of heads, seed 1", 2), ("token_filter_0.3_tail_0.25_uniform", 1), ("half", 2))
    }  # fmt: skip
    path = write_grid(tmp_path_factory.mktemp("page") / "g", values, "dense")
    for number, name in enumerate(values):
        cost = {"parameters": 1000 - number, "flops_per_token": 1e6 * (9 - number), "device": "cpu", "threads": 1}
        write_artefact(GridFolder(path).place("measure", name), MEASURE, VERSION, cost)
    assert main(["grid", "compare", str(path)]) == 0
    return path


def fragment(page: Any) -> str:
    return str(page.evaluate("() => location.hash"))


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1280])
def test_it_fits_and_can_be_read(grid: Path, open_page: Open, width: int, scheme: str) -> None:
    """No sideways scrolling but of tables, whose names stay where they are."""
    page = open_page(grid, viewport={"width": width, "height": 740}, color_scheme=scheme, has_touch=width < 500)
    page.click("tr[data-variant=half] button")
    page.locator(".item a").nth(1).click()
    page.wait_for_selector(".item.open")
    page.click(".item.open summary")
    assert page.evaluate("() => document.documentElement.scrollWidth") <= width
    ground = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    assert (max(map(int, re.findall(r"\d+", ground)[:3])) < 64) is (scheme == "dark")
    if width < 500:
        names = page.locator("#table td:first-child").first
        page.locator("#variants-part .scroll").evaluate("node => { node.scrollLeft = 300; }")
        assert names.bounding_box()["x"] < 40


def test_a_link_opens_its_question(grid: Path, open_page: Open) -> None:
    page = open_page(grid, viewport={"width": 360, "height": 740})
    page.select_option("#b", "half")
    page.click("[data-kind=all]")
    page.locator(".pager button").last.click()
    page.wait_for_selector("[data-question='8']")
    item = page.locator("[data-question='15']")
    assert "characters …]" in item.inner_text() and item.inner_text().count("Step 20") == 0
    assert item.inner_text().count("The result is 15 by") == 2  # the end of an answer is what it comes to
    page.locator("[data-question='15'] .whole").click()
    page.wait_for_selector(".item.open")
    address = fragment(page)
    assert "question=15" in address and item.inner_text().count("Step 20") == 2

    other = open_page(grid, address, viewport={"width": 360, "height": 740})
    assert other.locator(".item.open").get_attribute("data-question") == "15" and other.input_value("#b") == "half"
    assert other.evaluate("() => document.activeElement.dataset.key") == "question:15"
    hidden = open_page(grid, "#b=half&show=onlyB&question=15")  # a filter hides it, the link shows it
    assert hidden.locator(".item.open").get_attribute("data-question") == "15"
    page.keyboard.press("Escape")
    assert page.locator(".item.open").count() == 0 and "question" not in fragment(page)


def test_without_scripts_the_page_is_the_report(grid: Path, open_page: Open) -> None:
    page = open_page(grid, java_script_enabled=False, viewport={"width": 360, "height": 740})
    assert not page.is_visible("#app") and page.is_visible("#report")
    report = (grid / "compare" / "report.md").read_text()
    headings = [line.lstrip("# ") for line in report.splitlines() if line.startswith("#")]
    assert page.locator("#report h1, #report h2").all_inner_texts() == headings
    rows = [line for line in report.splitlines() if line.startswith("|") and not line.startswith("|:")]
    assert page.locator("#report tr").count() == len(rows)
    assert "need JavaScript" in page.inner_text("#report")
    assert page.evaluate("() => document.documentElement.scrollWidth") <= 360
