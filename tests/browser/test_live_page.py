"""The page that `watch` serves, in a real Chromium: live, in any trouble of a run or of the server, and to the token.

How soon it opens and shows a new row is measured by benchmarks/live_page.py.
"""

from pathlib import Path

import pytest
from made_runs import Server, add, keep, row, write_run
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from verl_precision.tools.runs.content import recorded_content
from verl_precision.tools.runs.page import page as report_of
from verl_precision.tools.runs.read import read_runs

GROUNDS = "getComputedStyle(document.documentElement).backgroundColor + getComputedStyle(document.body).color"
SCRIPT = "<img src=http://192.0.2.1/x onerror=\"document.title='taken'\"><script>document.title='taken'</script>"


@pytest.fixture
def folder(tmp_path) -> Path:
    return tmp_path / "runs"


@pytest.fixture
def serve():
    servers = []

    def started(*paths: Path) -> Server:
        servers.append(Server(paths))
        return servers[-1]

    yield started
    for server in servers:
        server.stop()


def of(run: int, part: str) -> str:
    """Return the expression of the text of a part of a run's card."""
    return f"document.getElementById('{part}-{run}')?.textContent"


def shown(page, step: int, run: int = 0) -> None:
    """Wait until the page shows a run's step."""
    page.wait(f"{of(run, 'progress')}?.split(' ')[1] === arguments[0]", str(step))


def drawn(page) -> dict[str, list[str]]:
    """Wait until nothing is left to draw, and return the paths of the curves of each figure."""
    page.wait("figures.size > 0 && [...figures.values()].every((figure) => figure.element.hidden || !figure.stale)")
    paths = "[...each.querySelectorAll('.curve')].map((path) => path.getAttribute('d'))"
    return page.js(f"Object.fromEntries([...document.querySelectorAll('figure')].map((each) => [each.id, {paths}]))")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_part_fits_a_wide_and_a_narrow_window(page, serve, folder, scheme):
    metrics = [write_run(folder / f"run_{run}", 40, run) for run in range(2)]
    add(metrics[0], *(row(step, **{"mismatch/k3_kl": 1e-2}) for step in range(41, 70)))
    keep(metrics[0], 41, [0.01, 0.5, float("nan"), -0.2], "What is 1 + 1?", ["Two", " or", " tool", " three"])
    page.open(serve(folder).url, 1280, scheme)
    page.wait("document.querySelectorAll('#alarms .card').length > 0")
    page.click(By.PARTIAL_LINK_TEXT, "where it began")
    page.click(By.CSS_SELECTOR, "#responses a")
    page.wait("document.querySelectorAll('#text .token').length === 4")
    before = page.js(GROUNDS)
    for width in (1280, 400):
        page.look(width, scheme)
        page.wait("innerWidth === arguments[0]", width)
        assert len(drawn(page)) >= 15
        assert page.overflow() <= 0
    page.look(1280, "dark" if scheme == "light" else "light")
    page.wait(f"{GROUNDS} !== arguments[0]", before)
    assert page.errors() == []


def test_a_new_row_a_resume_and_a_run_that_begins(page, serve, folder):
    metrics = write_run(folder / "first", 5)
    page.open(serve(folder).url)
    shown(page, 5)
    before = drawn(page)["figure-reward"]
    add(metrics, row(6))
    shown(page, 6)
    assert drawn(page)["figure-reward"] != before

    # A resume goes on from the checkpoint of step 3: the rows behind it are moved aside.
    metrics.write_text("".join(row(step) for step in (1, 2, 3)))
    shown(page, 3)
    add(metrics, row(4, **{"critic/score/mean": 0.123}))
    page.wait("document.querySelector('#run-0 [data-now=reward]').textContent === '0.123'")

    write_run(folder / "second", 9)
    page.wait("document.querySelectorAll('#runs .card').length === 2")
    assert page.js("[...document.querySelectorAll('#runs b')].map((name) => name.textContent)") == ["first", "second"]
    page.wait("[...document.querySelectorAll('[id^=progress-]')].some((each) => each.textContent.startsWith('step 9'))")
    assert page.errors() == []


def test_a_killed_server_is_said_and_the_page_goes_on_when_it_is_back(page, serve, folder):
    metrics, server = write_run(folder, 5), serve(folder)
    page.open(server.url)
    shown(page, 5)
    before = drawn(page)
    server.stop()
    page.wait("document.getElementById('connection').textContent.includes('no connection')")
    assert drawn(page) == before, "what is there stays"
    add(metrics, row(6))
    server.start()
    shown(page, 6)
    page.wait("document.getElementById('connection').textContent.startsWith('live')")
    assert len(drawn(page)) == len(before)


def test_texts_of_a_run_are_texts(page, serve, folder):
    metrics = write_run(folder / "run <b onclick=x>", 4)
    texts = ["<script>document.title='taken'</script>", "&lt;", "\n", ""]
    keep(metrics, 2, [0.0, 0.1, 0.2, 0.5], SCRIPT, texts, identity=SCRIPT)
    page.open(serve(folder).url + "#tokens-0-2")
    page.click(By.CSS_SELECTOR, "#responses a")
    page.wait("document.querySelectorAll('#text .token').length === 4")
    page.js("document.querySelectorAll('details').forEach((each) => { each.open = true; })")
    assert page.js("document.getElementById('prompt').textContent") == SCRIPT
    assert SCRIPT in page.js("document.querySelector('#response h3').textContent")
    shown_texts = page.js("[...document.querySelectorAll('#text .token')].map((token) => token.textContent)")
    assert shown_texts == [texts[0], texts[1], "⏎\n", "∅"]
    assert "run <b onclick=x>" in page.js("document.getElementById('runs').textContent")
    found = page.js("[document.images.length, document.scripts.length, document.querySelectorAll('[onclick]').length]")
    assert found == [0, 2, 0] and "taken" not in page.driver.title
    assert [url for url in page.requests() if "192.0.2.1" in url] == [] and page.errors() == []


def test_the_keyboard_reaches_a_curve_a_step_and_its_tokens_and_news_do_not_take_the_focus(page, serve, folder):
    metrics = write_run(folder, 8)
    keep(metrics, 8, [0.1, 0.3], "p", ["a", "b"])
    page.open(serve(folder).url)
    drawn(page)
    for _ in range(60):
        page.press(Keys.TAB)
        if page.js("document.activeElement.matches('#figure-k3 .plot')"):
            break
    focus = "document.activeElement.closest('figure')?.id"
    assert page.js(focus) == "figure-k3" and page.js("document.activeElement.matches(':focus-visible')")
    page.press(Keys.END, Keys.ARROW_LEFT)
    assert page.js("document.activeElement.getAttribute('aria-valuenow')") == "7"
    assert "step 7" in page.js("document.activeElement.querySelector('.tip').innerText")
    add(metrics, row(9))
    shown(page, 9)
    drawn(page)
    assert page.js(focus) == "figure-k3" and page.js("document.activeElement.getAttribute('aria-valuenow')") == "7"
    page.press(Keys.ARROW_RIGHT, Keys.ENTER)
    page.wait("document.querySelectorAll('#responses tbody tr').length === 1")
    assert page.js("location.hash") == "#tokens-0-8"


def test_tokens_by_damage_with_what_was_decided(page, serve, folder):
    metrics = write_run(folder, 3)
    keep(metrics, 1, [0.01, 0.02], "p", ["a", "b"])
    nan = float("nan")
    keep(metrics, 2, [0.0, 0.6, nan, 0.4, 0.01], "p", ["a", "b", "tool", "c", "d"])
    keep(metrics, 3, [0.1, 0.2], "p", ["a", "b"])
    page.open(serve(folder).url)
    steps = "[...document.querySelectorAll('#responses tbody tr')].map((each) => each.cells[0].textContent).join()"
    page.wait(f"{steps} === '2,3,1'")
    page.click(By.CSS_SELECTOR, "#responses tbody tr a")
    page.wait("document.querySelectorAll('#text .token').length === 5")
    marks = "[...document.querySelectorAll('#text .token')].map((token) => token.className.trim()).join()"
    assert page.js(marks) == "token d1,token d2,token d0,token d2,token d1"
    backs = "[...document.querySelectorAll('#text .token')].map((token) => token.style.backgroundColor)"
    none, most, tool, less, little = page.js(backs)
    assert none == tool == "" and len({most, less, little}) == 3, "coloured by the gap, tool output not at all"
    page.click(By.CSS_SELECTOR, "#text .token[data-n='1']")
    said = page.js("document.getElementById('token').textContent")
    assert said.startswith('token 2 of 5 "b"') and said.endswith("clipped")
    assert page.errors() == []


def test_ten_verdicts_are_read_without_scrolling_the_sick_first_each_with_its_bar(page, serve, folder, root):
    recorded = root / "tests" / "mismatch" / "recorded"
    sick = [recorded / "seeded_collapse.jsonl", recorded / "long_text" / "bf16.jsonl"]
    sick += [recorded / "rescued" / run / "before.jsonl" for run in ("collapse_200_seed_0", "phantom_clipping_seed_1")]
    calm = sorted((recorded / "rescued").glob("*_seed_0/after.jsonl"))
    quickstart = root / "tests" / "data" / "quickstart"
    calm += [recorded / "sanity_arithmetic_fp16.jsonl", quickstart / "bf16" / "metrics.jsonl"]
    for number, path in enumerate([*calm, *sick]):
        (folder / f"run_{number}").mkdir(parents=True)
        (folder / f"run_{number}" / "metrics.jsonl").write_bytes(path.read_bytes())
    grown = write_run(folder / "run_9", 40)
    add(grown, *(row(step, **{"mismatch/k3_kl": 1e-2, "is_weight_ess_fraction": 0.009}) for step in range(41, 70)))
    for scheme in ("light", "dark"):
        page.open(serve(folder).url, 1280, scheme)
        figures = drawn(page)
        words = page.js("[...document.querySelectorAll('#verdicts .badge')].map((badge) => badge.textContent)")
        order = ["act now", "watch", "too short to judge", "healthy"]
        assert len(words) == 10 and words == sorted(words, key=order.index) and {"act now", "healthy"} <= {*words}
        assert page.js("document.getElementById('verdicts').getBoundingClientRect().bottom") < 720
        cards = "[...document.querySelectorAll('#runs .badge')].map((badge) => badge.textContent)"
        assert page.js(cards) == words
        # Alarms of one cause are one card, the gravest on top, its first remedy unfolded; the number has its bar.
        card = "[...document.querySelectorAll('#alarms .card')].filter((each) => each.innerText.startsWith('run_9'))"
        assert page.js(f"{card}.length") == 1
        assert page.js(f"{card}[0].querySelector('.bad').textContent") == "k3_growth"
        assert "precision=fp16" in page.js(f"{card}[0].querySelector('.first code').innerText")
        samples = "[...document.querySelectorAll('[data-now=\"effective sample\"].bad + .bad')].map((e) => e.innerText)"
        assert page.js(f"new Set({samples}).has('too small: below 0.2')")
        assert page.js("document.querySelectorAll('#figure-sample .limit').length") == 1
        # A chip has its curve's colour in both schemes; a curve without change is a line of text.
        chip = "getComputedStyle(document.querySelector('#verdicts .chip')).backgroundColor"
        inks = "[...document.querySelectorAll('#figure-reward .curve')].map((curve) => getComputedStyle(curve).stroke)"
        assert page.js(chip) in page.js(inks)
        assert figures["figure-skipped"] and page.js("document.getElementById('figure-skipped').matches('.flat')")
        asked = page.js("performance.getEntriesByType('resource').map((each) => new URL(each.name).hostname)")
        assert {*asked} == {"127.0.0.1"} and page.errors() == []


def test_a_report_from_the_disk_draws_the_same_curves(page, serve, folder, tmp_path):
    for run in range(2):
        write_run(folder / f"run_{run}", 700, run)
    page.open(serve(folder).url)
    live = drawn(page)
    report = tmp_path / "report.html"
    report.write_text(report_of(recorded_content(read_runs([folder]))))
    page.open(report.as_uri())
    assert drawn(page) == live and sum(map(len, live.values())) > 30
    assert page.requests() == [report.as_uri()] and page.errors() == []
    page.look(400, "dark")
    page.wait("innerWidth === 400")
    drawn(page)
    assert page.overflow() <= 0
