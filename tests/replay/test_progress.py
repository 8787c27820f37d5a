"""A bar appears only at a terminal and only on long runs."""

import pytest

from replay import progress
from replay.progress import LazyProgress


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(progress, "PATIENCE_SECONDS", 0.0)


def test_a_short_run_shows_nothing(capsys):
    with LazyProgress(enabled=True) as bar:
        bar.update(0.5)

    assert capsys.readouterr().err == ""


def test_a_long_run_that_nobody_watches_shows_nothing(capsys, impatient):
    with LazyProgress() as bar:
        bar.update(0.5)

    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_long_run_shows_a_bar_on_standard_error_only(capsys, monkeypatch, impatient, share):
    monkeypatch.setenv("FORCE_COLOR", "1")
    with LazyProgress(enabled=True) as bar:
        bar.update(share)
        bar.update(share)
    out, err = capsys.readouterr()

    assert out == ""
    assert "replay" in err
