"""The served pages in a real browser: controls simulate, the address is the state, nothing else is asked."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from click.testing import CliRunner
from tests.browsing import Browser, Shown, started
from tests.simulator.predicted import simulate

from foretrace.cli import main
from foretrace.simulator.config import job_from
from foretrace.simulator.what_if.planner import FRAMEWORK, Planner
from foretrace.traces.report.kinds import palette
from foretrace.traces.serving.runs import Runs
from foretrace.traces.serving.server import Server

START = "plan?model=llama3-8b&gpus=8&tp=2&pp=2&global_batch=8&seq_len=2048&theme=light"
SETTINGS: dict[str, Any] = {
    "model": "llama3-8b", "cluster": "dgx-h100", "gpus": 8, "tp": 2, "pp": 2, "global_batch": 8,
    "seq_len": 2048,
}  # fmt: skip


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("runs")
    simulate(job_from({**SETTINGS, "gpus": 32, "pp": 4})).write(folder / "small")
    for name, tp in (("first", 1), ("second", 2)):
        simulate(job_from({**SETTINGS, "tp": tp, "steps": 3})).write(folder / "more" / name)
    with Server({**Runs(folder).routes(), **Planner().routes()}) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        yield server.address
        server.shutdown()
        thread.join()


class Visit(Shown):
    """A page of the server."""

    def __init__(self, browser: Browser, address: str, path: str, width: int = 1300) -> None:
        super().__init__(browser, address + path, width)
        self.address = address

    def ready(self) -> Visit:
        self.page.wait_for_selector("body[data-ready]", timeout=60_000)  # engines are compiled
        return self

    def after(self, change: Any) -> None:
        """Do *change* and wait until its answer is drawn."""
        before = self.page.evaluate("document.body.dataset.round")
        change()
        self.page.wait_for_function("n => document.body.dataset.round !== n", arg=before, timeout=20_000)

    def figures(self) -> dict[str, str]:
        found = self.page.eval_on_selector_all(
            "#headline .figure",
            "all => all.map(f => [f.querySelector('span'), f.querySelector('b')].map(e => e.textContent))",
        )
        return dict(found)

    def close(self) -> None:
        assert self.problems == []
        assert all(url.startswith((self.address, "data:")) for url in self.requests)
        self.leave()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with started() as found:
        yield found


def slide(visit: Visit, name: str, value: str) -> None:
    """Move a slider to *value*, as a person would to one of its stops."""
    visit.after(
        lambda: visit.page.evaluate(
            "([name, value]) => { const f = document.querySelector('#plan-' + name);"
            "const stops = CONTROLS_OF(name); f.value = stops.indexOf(value);"
            "f.dispatchEvent(new Event('input')); }".replace("CONTROLS_OF", "foretrace.offered"),
            [name, value],
        )
    )


def test_the_page_says_what_simulate_says_and_follows_the_controls(browser: Browser, address: str) -> None:
    visit = Visit(browser, address, START).ready()
    for change in ({}, {"recompute": "full"}, {"schedule": "zb-v"}):
        for name, value in change.items():
            visit.after(lambda name=name, value=value: visit.page.select_option(f"#plan-{name}", value))
        query = dict(pair.split("=") for pair in visit.page.url.partition("?")[2].split("&"))
        job = job_from({**SETTINGS, **{k: v for k, v in query.items() if k in {"recompute", "schedule"}}})
        known = simulate(job).summary
        shown = visit.figures()
        assert shown["Step time"] == f"{known['step_time_s'] * 1e3:.2f} ms"
        assert shown["MFU"] == f"{known['mfu'] * 100:.1f} %"
        drawn = visit.page.evaluate(
            "foretrace.view.slots.map(({run, row}) => { const [low, high] = foretrace.laneRange(run, row, 0);"
            "let sum = 0; for (let i = low; i < high; i++) sum += run.end[i] - run.start[i]; return sum; })"
        )
        assert max(drawn) == pytest.approx(known["step_time_s"] * 1e9, rel=1e-6)
    assert "schedule=zb-v" in visit.page.url
    assert "recompute=full" in visit.page.url
    visit.close()


MOE: dict[str, Any] = {"model": "mixtral-8x7b", "gpus": 16}
CHANGES: tuple[tuple[dict[str, Any], str, str], ...] = (
    ({}, "cp", "2"),
    ({}, "gpus", "16"),
    ({}, "pp", "1"),
    ({}, "micro_batch", "2"),
    ({}, "seq_len", "8192"),
    ({"schedule": "interleaved-1f1b"}, "virtual_stages", "4"),
    (MOE, "ep", "4"),
    ({**MOE, "tp": 4, "pp": 1, "ep": 2}, "expert_tp", "2"),
    ({}, "framework", "torchtitan"),
    ({}, "sharding", "fsdp"),
    ({}, "precision", "fp16"),
    ({}, "cluster", "dgx-a100"),
)
"""Where the page begins, and what is changed on it."""


@pytest.mark.parametrize(("begin", "name", "value"), CHANGES, ids=[name for _, name, _ in CHANGES])
def test_every_control_is_simulated(
    browser: Browser, address: str, begin: dict[str, Any], name: str, value: str
) -> None:
    given = {**SETTINGS, **begin}
    visit = Visit(browser, address, "plan?" + urlencode({**given, "theme": "light"})).ready()
    if visit.page.locator(f"select#plan-{name}").count():
        visit.after(lambda: visit.page.select_option(f"#plan-{name}", value))
    else:
        slide(visit, name, value)
    assert f"{name}={value}" in visit.page.url.split("?")[1].split("&")
    assert f"--{name.replace('_', '-')} {value}" in visit.page.inner_text("#command")
    wanted = job_from({**given, name: int(value) if value.isdigit() else value})
    seconds = simulate(wanted).summary["step_time_s"]
    shown, unit = visit.figures()["Step time"].split()
    assert float(shown) == pytest.approx(seconds * {"s": 1, "ms": 1e3}[unit], rel=1e-3)
    visit.close()


def test_any_number_may_be_typed_beside_a_slider(browser: Browser, address: str) -> None:
    visit = Visit(browser, address, START).ready()

    def type_in() -> None:
        visit.page.fill("#plan-global_batch-value", "36")
        visit.page.press("#plan-global_batch-value", "Enter")

    visit.after(type_in)
    assert "--global-batch 36" in visit.page.inner_text("#command")
    seconds = simulate(job_from({**SETTINGS, "global_batch": 36})).summary["step_time_s"]
    assert visit.figures()["Step time"] == f"{seconds:.3f} s"
    visit.close()


def test_a_price_is_what_the_tokens_cost(browser: Browser, address: str) -> None:
    visit = Visit(browser, address, START).ready()
    visit.after(lambda: visit.page.fill("#plan-price", "3"))
    tokens_per_s = simulate(job_from(SETTINGS)).summary["tokens_per_s"]
    assert visit.figures()["Cost"] == f"${8 * 3 / 3600 / tokens_per_s * 1e9:,.0f}"
    assert "at $3\u00a0per GPU-hour" in visit.page.inner_text("#headline")
    assert "price=3" in visit.page.url
    visit.after(lambda: visit.page.fill("#plan-price", "-1"))
    assert "price='-1'" in visit.page.inner_text("#mistake")
    visit.close()


def test_the_address_is_the_state(browser: Browser, address: str) -> None:
    visit = Visit(browser, address, START).ready()
    slide(visit, "global_batch", "16")
    visit.after(lambda: visit.page.click("#pin"))
    slide(visit, "tp", "1")
    seen, where = visit.figures(), visit.page.url
    visit.close()
    again = Visit(browser, address, where.removeprefix(address)).ready()
    assert again.figures() == seen
    assert again.page.input_value("#plan-tp-value") == "1"
    assert again.page.evaluate("foretrace.runs().map(run => run.label)") == ["A", "B"]
    assert again.page.locator(".was").count() > 4
    again.after(lambda: again.page.click("#unpin"))
    assert again.page.evaluate("foretrace.runs().length") == 1
    again.close()


def typed(visit: Visit, name: str, value: str) -> None:
    """Type *value* into the field beside a slider."""

    def change() -> None:
        visit.page.fill(f"#plan-{name}-value", value)
        visit.page.press(f"#plan-{name}-value", "Enter")

    visit.after(change)


def test_while_an_answer_is_awaited_the_page_says_so(browser: Browser, address: str) -> None:
    visit = Visit(browser, address, START).ready()
    held: list[Any] = []
    visit.page.route("**/plan/figures?*", lambda route: held.append(route))  # noqa: PLW0108 - it is marked
    visit.page.select_option("#plan-schedule", "gpipe")
    visit.page.wait_for_function(
        "words => document.querySelector('#took').textContent === words", arg="simulating …"
    )
    visit.after(held.pop().continue_)
    assert "figures in" in visit.page.inner_text("#took")
    visit.page.unroute("**/plan/figures?*")
    visit.close()


@pytest.mark.parametrize(("name", "value"), [("tp", "16"), ("global_batch", "7"), ("seq_len", "0")])
def test_a_mistake_clears_the_page_which_lives_on(
    browser: Browser, address: str, name: str, value: str
) -> None:
    visit = Visit(browser, address, START).ready()
    before, was = visit.figures(), visit.page.input_value(f"#plan-{name}-value")
    typed(visit, name, value)
    assert visit.page.locator("#mistake").is_visible()
    for old in ("#headline", "#schedule", "#shares", "#story", "#legend"):
        assert visit.page.locator(old).is_hidden(), old
    typed(visit, name, was)
    assert visit.page.locator("#mistake").is_hidden()
    assert visit.page.locator("#schedule").is_visible()
    assert visit.figures() == before
    visit.close()


def test_a_mistake_offers_settings_that_work(browser: Browser, address: str) -> None:
    visit = Visit(browser, address, START).ready()
    typed(visit, "tp", "3")
    offers = visit.page.locator("#mistake button")
    assert offers.count() >= 2
    said = [offers.nth(i).inner_text() for i in range(offers.count())]
    assert {"tp 1", "tp 2", "tp 4"} & set(said)
    where = visit.page.url
    for i in range(offers.count()):
        visit.after(visit.page.locator("#mistake button").nth(i).click)
        assert visit.page.locator("#mistake").is_hidden(), said[i]
        assert visit.page.locator("#headline").is_visible()
        visit.page.goto(where)
        visit.ready()
    visit.close()


def test_sliders_offer_the_values_of_the_case(browser: Browser, address: str) -> None:
    """Of 576 GPUs 72 are replicas of 8, a batch is a multiple of them, and tp divides heads and GPUs."""
    visit = Visit(browser, address, START).ready()
    typed(visit, "dp", "72")
    assert "--gpus 288" in visit.page.inner_text("#command")  # 72 replicas of tp 2, pp 2
    assert visit.page.locator("#mistake button").count() > 0  # a batch of 8 is not for 72
    typed(visit, "global_batch", "144")
    assert visit.page.locator("#mistake").is_hidden()
    assert "dp 72" in visit.page.inner_text("#took")
    offered = {
        name: list(map(int, visit.page.evaluate("name => foretrace.offered(name)", name)))
        for name in ("tp", "pp", "dp", "global_batch")
    }
    assert 72 in offered["dp"]
    assert all(batch % 72 == 0 for batch in offered["global_batch"])
    assert all(144 % tp == 0 and 32 % tp == 0 for tp in offered["tp"])
    assert {3, 9} <= set(offered["pp"])
    for tp in offered["tp"]:
        slide(visit, "tp", str(tp))
        assert "GPUs cannot be filled" not in visit.page.inner_text("#mistake")
    visit.close()


CONFIG = {
    "model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 16,
    "num_key_value_heads": 8, "intermediate_size": 5632, "vocab_size": 32000, "_name_or_path": "mine/small",
    "id2label": {str(i): "x" * 20 for i in range(200)}, "max_position_embeddings": 4096,
}  # fmt: skip


def test_a_config_json_is_dropped_onto_the_page(browser: Browser, address: str, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(CONFIG), "utf-8")
    visit = Visit(browser, address, START).ready()
    drop = """text => {
      const carried = new DataTransfer();
      carried.items.add(new File([text], 'config.json', {type: 'application/json'}));
      window.dispatchEvent(new DragEvent('drop', {dataTransfer: carried, cancelable: true}));
    }"""
    visit.after(lambda: visit.page.evaluate(drop, path.read_text("utf-8")))
    assert "--model config.json" in visit.page.inner_text("#command")
    known = simulate(job_from({**SETTINGS, "model": str(path)})).summary["step_time_s"]
    assert visit.figures()["Step time"] == f"{known * 1e3:.2f} ms"
    visit.page.goto(visit.page.url)  # the address holds it
    visit.ready()
    assert visit.figures()["Step time"] == f"{known * 1e3:.2f} ms"
    visit.after(lambda: visit.page.select_option("#plan-model", "llama3-8b"))
    assert "--model llama3-8b" in visit.page.inner_text("#command")
    visit.after(lambda: visit.page.set_input_files("#config", path))
    assert visit.figures()["Step time"] == f"{known * 1e3:.2f} ms"
    visit.page.evaluate(drop, "[1")
    visit.page.wait_for_selector("#mistake:not([hidden])")
    assert "is no config.json" in visit.page.inner_text("#mistake")
    visit.after(lambda: visit.page.evaluate(drop, '{"model_type": "strange"}'))
    assert "model_type='strange' is not read" in visit.page.inner_text("#mistake")
    visit.close()


def test_the_best_from_here_is_what_a_search_finds(browser: Browser, address: str) -> None:
    visit = Visit(browser, address, START).ready()
    visit.page.click("#best")
    visit.page.wait_for_selector("#found-best caption", timeout=60_000)
    assert (
        "so far" in visit.page.inner_text("#found-best caption")
        or visit.page.get_attribute("#found-best", "data-done") == "true"
    )
    visit.page.wait_for_selector('#found-best[data-done="true"]', timeout=120_000)
    flags = ["--model", "llama3-8b", "--cluster", "dgx-h100", "--gpus", "8", "--global-batch", "8"]
    known = json.loads(
        CliRunner()
        .invoke(main, ["search", *flags, "--seq-len", "2048", "--framework", FRAMEWORK, "--json"])
        .stdout
    )["layouts"][0]["step_time_s"]
    first = visit.page.locator("#found-best tbody tr").first
    value, unit = first.locator("th").inner_text().split()
    assert float(value) == pytest.approx(known * {"s": 1, "ms": 1e3}[unit], rel=5e-3)
    visit.after(first.locator("button").click)
    shown, unit = visit.figures()["Step time"].split()
    assert float(shown) == pytest.approx(known * {"s": 1, "ms": 1e3}[unit], rel=1e-3)
    visit.close()


def test_a_search_shows_the_best_so_far_and_is_ended_by_a_click(browser: Browser, address: str) -> None:
    visit = Visit(browser, address, "plan?theme=light&gpus=512&global_batch=512").ready()
    visit.page.click("#best")
    visit.page.wait_for_selector("#found-best caption", timeout=60_000)
    visit.page.wait_for_selector("#found-best tbody tr", timeout=120_000)
    assert "none below" in visit.page.inner_text("#found-best caption")  # the bound on what is left
    if visit.page.get_attribute("#found-best", "data-done") == "false":
        assert visit.page.inner_text("#found-best caption").startswith("The best so far")
        visit.page.click("#best")
    assert visit.page.get_attribute("#best", "aria-pressed") == "false"
    visit.page.wait_for_timeout(1500)
    assert visit.page.get_attribute("#best", "aria-pressed") == "false"
    visit.close()


def test_nothing_is_not_a_number(browser: Browser, address: str) -> None:
    visit = Visit(browser, address, START).ready()
    for name in ("gpus", "dp", "tp", "global_batch", "seq_len", "virtual_stages"):
        for value in ("0", "", "-4", "1e9", "2.5"):
            typed(visit, name, value)
            assert "NaN" not in visit.page.inner_text("body")
            assert "NaN" not in visit.page.url
            sliders = visit.page.eval_on_selector_all("input", "all => all.map(one => one.value + one.max)")
            assert "NaN" not in "".join(sliders)
        visit.page.goto(address + START)
        visit.ready()
    visit.after(lambda: visit.page.fill("#plan-price", "0"))
    assert "NaN" not in visit.page.inner_text("body")
    visit.close()


def test_a_layout_that_does_not_fit_offers_what_would(browser: Browser, address: str) -> None:
    visit = Visit(browser, address, "plan?model=llama3-8b&gpus=8&tp=1&pp=1&seq_len=8192&theme=light").ready()
    assert "does not fit" in visit.page.inner_text("#misfit")
    assert visit.page.locator("#headline .figure.bad").count() > 0
    offers = visit.page.locator("#misfit button")
    assert offers.count() > 1
    for offer in (0, offers.count() - 1):
        where = visit.page.url
        visit.after(offers.nth(offer).click)
        assert visit.page.locator("#misfit").is_hidden()
        assert visit.page.url != where
        visit.page.goto(where)
        visit.ready()
    visit.close()


@pytest.mark.parametrize("path", [START, "run?run=small", ""])
def test_no_page_is_wider_than_a_phone(browser: Browser, address: str, path: str) -> None:
    visit = Visit(browser, address, path, width=390)
    if path:
        visit.ready()
    overflow = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert visit.page.evaluate(overflow) <= 0
    visit.close()


def test_a_run_is_found_opened_and_compared(browser: Browser, address: str) -> None:
    visit = Visit(browser, address, "")
    assert visit.page.locator("#compare").is_disabled()
    visit.page.click("text=small")
    visit.ready()
    assert "llama3-8b on 32" in visit.page.inner_text("h1")
    assert visit.page.locator("#search").is_visible()
    visit.close()


def test_a_page_of_a_run_shows_the_steps_of_many(browser: Browser, address: str) -> None:
    visit = Visit(browser, address, "run?run=more/first&theme=light").ready()
    visit.page.wait_for_selector("#history-runs button")
    said = {
        one.inner_text().split(",")[0].strip(): one
        for one in visit.page.locator("#history-runs button").all()
    }
    assert next(iter(said)) == "more/first"
    assert set(said) == {"more/first", "more/second", "small"}
    pixels = (
        "() => { const c = document.querySelector('#history');"
        "const d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data; const n = {};"
        "for (let i = 0; i < d.length; i += 4) { const k = d[i] << 16 | d[i + 1] << 8 | d[i + 2];"
        "n[k] = (n[k] || 0) + 1; }"
        "return n; }"
    )
    series = [str(int(colour[1:], 16)) for colour in palette()["light"]["series"][:3]]
    drawn = visit.page.evaluate(pixels)
    assert all(drawn.get(colour, 0) > 20 for colour in series)
    said["more/second"].click()
    assert visit.page.evaluate(pixels).get(series[list(said).index("more/second")], 0) == 0
    times = simulate(job_from({**SETTINGS, "tp": 1, "steps": 3})).summary["step_times_s"]
    assert f"3 steps, median {sorted(times)[1] * 1e3:.2f} ms" in said["more/first"].inner_text()
    visit.problems = [words for words in visit.problems if "getImageData" not in words]  # of this test
    visit.close()


def test_rows_of_a_large_run_are_fetched_when_they_are_asked_for(
    browser: Browser, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("foretrace.traces.serving.runs.WHOLE_SPANS", 10)
    monkeypatch.setattr("foretrace.traces.serving.runs.WINDOW_CELLS", 4_000)
    visit = Visit(browser, address, "run?run=small&x=1").ready()
    visit.page.wait_for_function("() => foretrace.meta().overview", timeout=20_000)
    visit.page.wait_for_selector("#findings li", timeout=20_000)
    shown = visit.page.evaluate("foretrace.view.slots.map(slot => slot.rank)")
    visit.page.select_option("#picker select", "2")
    visit.page.wait_for_function("() => foretrace.view.pick === 2", timeout=20_000)
    visit.page.wait_for_timeout(300)
    other = visit.page.evaluate("foretrace.view.slots.map(slot => slot.rank)")
    assert other
    assert other != shown
    assert visit.page.evaluate("Boolean(foretrace.meta().overview)")
    visit.close()
