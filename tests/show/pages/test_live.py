"""The live page: it shows what a training has written so far, to this machine, and touches nothing."""

import os
import re
import socket
import threading
from contextlib import closing
from http.client import HTTPConnection

import numpy as np
import pytest
from benchmarks.report import browser, errors, until

from joma._runs import RunError, RunWriter
from joma._show.pages.live import LivePage, Server, serve, wait_for
from joma.cli import main


def begin(path, steps):
    writer = RunWriter.create(
        path, kind="watch", config={"model": "Tiny"}, axes={"entropy": ["layer", "head"]}
    )
    for step in range(1, steps + 1):
        measure(writer, step)
    return writer


def measure(writer, step):
    writer.write(step, {"entropy": np.full((2, 1), 2.0 + 0.01 * step), "loss": 1.0 / step})


@pytest.fixture
def training(tmp_path):
    writer = begin(tmp_path / "run", 3)
    yield writer
    writer.finish()


@pytest.fixture
def server(training):
    with Server(LivePage([training.path], every=0)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def ask(server, path="/", method="GET", host=None):
    with closing(HTTPConnection("127.0.0.1", server.server_port)) as connection:
        connection.request(method, path, headers={} if host is None else {"Host": host})
        answer = connection.getresponse()
        return answer.status, answer.read().decode()


def last_step(text):
    return re.search(r'data-label="last step">([^<]*)<', text)[1]


def test_the_page_shows_what_was_written_since_and_that_the_run_is_over(training, server):
    before, version = ask(server)[1], ask(server, "/version")
    assert last_step(before) == "3"
    assert "in training" in before
    assert ask(server, "/version") == version
    measure(training, 4)
    assert ask(server, "/version") != version
    assert last_step(ask(server)[1]) == "4"
    training.finish()
    assert "finished: nothing more is to come" in ask(server)[1]
    assert server.page.done


def test_only_its_own_paths_are_answered_and_only_under_its_own_name(training, server):
    for path in ("/run.json", "/../run/metrics.jsonl", "/version/", "/%2e%2e/", "/?x"):
        assert ask(server, path)[0] == 404, path
    assert ask(server, "/", "POST")[0] == 501
    assert ask(server, "/", host=f"evil.example:{server.server_port}")[0] == 403
    assert ask(server, "/", host=f"localhost:{server.server_port}")[0] == 200
    assert server.server_address[0] == "127.0.0.1"


def test_a_page_is_not_made_more_often_than_asked_for(training, monkeypatch):
    page = LivePage([training.path], every=3600)
    monkeypatch.setattr("joma._show.pages.live.runs_page", lambda *_: pytest.fail("made again"))
    measure(training, 4)
    assert last_step(page.current()[1]) == "3"


def test_nothing_is_written_to_the_folder_of_the_training(training):
    files = {name: os.stat(training.path / name).st_mtime_ns for name in os.listdir(training.path)}
    LivePage([training.path], every=0).current()
    assert {
        name: os.stat(training.path / name).st_mtime_ns for name in os.listdir(training.path)
    } == files


def test_a_run_that_disappears_leaves_the_last_page(training):
    page = LivePage([training.path], every=0)
    os.rename(training.path, training.path.with_name("elsewhere"))
    assert last_step(page.current()[1]) == "3"
    os.rename(training.path.with_name("elsewhere"), training.path)


def test_a_run_without_measurements_has_a_page_that_says_so(tmp_path):
    writer = begin(tmp_path / "run", 0)
    assert "no measurements yet" in LivePage([writer.path]).current()[1]
    writer.finish()


def test_a_folder_that_is_not_there_yet_is_waited_for_with_one_line(tmp_path, monkeypatch):
    said, pauses = [], []

    def pause(seconds):
        pauses.append(seconds)
        if len(pauses) == 3:
            begin(tmp_path / "later", 1).finish()

    monkeypatch.setattr("time.sleep", pause)
    wait_for([tmp_path / "later"], said.append)
    assert len(pauses) == 3
    assert said == [f"waiting for a run in {tmp_path / 'later'} (Ctrl-C to give up)"]
    (tmp_path / "file").write_text("x")
    with pytest.raises(RunError, match="is a file"):
        wait_for([tmp_path / "file"], said.append)


def test_ctrl_c_ends_it_with_one_line(training, monkeypatch):
    def interrupt(self):
        raise KeyboardInterrupt

    monkeypatch.setattr(Server, "serve_forever", interrupt)
    said = []
    serve([training.path], say=said.append)
    assert len(said) == 2
    assert said[0].startswith("live page: http://127.0.0.1:")
    assert said[1].startswith("ended")


def test_ports_and_options_that_cannot_be_are_said(training, monkeypatch, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for options, reason in (
            (["--live", "--port", port], f"cannot serve on port {port} (Address already in use)"),
            (["--live", "--port", 70000], "port 70000 is none"),
            (["--live", "--out", "x.html"], "--live serves a page and writes none"),
            (["--port", 80], "--port 80 is for --live"),
        ):
            monkeypatch.setattr(
                "sys.argv", ["joma", "report", str(training.path), *map(str, options)]
            )
            with pytest.raises(SystemExit) as end:
                main()
            assert end.value.code == 2
            assert reason in capsys.readouterr().err


def test_the_browser_takes_changes_over_where_the_reader_is(training, server, browser_paths):
    server.page.current()
    with browser(*browser_paths) as driver:
        server.page._every = 0.2
        driver.get(server.url)
        until(driver, "window.joma && joma.drawn")
        driver.execute_script(
            "window.same = true; document.querySelector('main').style.minHeight = '4000px'"
        )
        driver.execute_script(
            "document.querySelector('section details').open = true; scrollTo({top: 300, behavior: 'instant'})"
        )
        measure(training, 4)
        shown = "document.querySelector('td[data-label=\"last step\"]').textContent"
        until(driver, f"{shown} === '4' && joma.followed")
        assert driver.execute_script("return window.same")  # not loaded again
        assert driver.execute_script("return Math.round(scrollY)") == 300
        assert driver.execute_script("return document.querySelector('section details').open")
        data = "Object.values(joma.views.get('run-chart').getState({data: () => true}).data).flat()"
        assert driver.execute_script(f"return Math.max(...{data}.map(row => row.step || 0))") == 4
        assert errors(driver) == []
