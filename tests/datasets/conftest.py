import pytest

from repro import paths


@pytest.fixture(autouse=True)
def isolated(tmp_path, monkeypatch):
    """No test sees the user's datasets or cache, or reaches the network."""
    monkeypatch.delenv("REPRO_DATA", raising=False)
    monkeypatch.setenv("REPRO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(paths, "ROOT", tmp_path / "checkout")

    def refuse(*args, **kwargs):
        raise OSError("the network is closed")

    monkeypatch.setattr("urllib.request.urlopen", refuse)
