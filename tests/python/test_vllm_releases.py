"""An engine of another release of vLLM says so at its start."""

import logging
import runpy
import sys
from types import SimpleNamespace

import pytest

vllm = pytest.importorskip("vllm", reason="vLLM is not installed")

import kvferry.vllm.connector  # noqa: E402
from kvferry.vllm import KVFerryConnector, releases  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole  # noqa: E402

OF_VLLM = "vllm.distributed.kv_transfer.kv_connector.factory"


def test_of_its_own_releases_nothing_is_said(monkeypatch: pytest.MonkeyPatch):
    assert releases.warning() == ""  # Of the one that the tests run with.
    for version in ("0.32.0", "0.33.1", "0.33.0+cpu", "0.33.1rc1.dev12+gabc.d20261101"):
        monkeypatch.setattr(vllm, "__version__", version)
        assert releases.warning() == ""


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "0.330.0", "1.32.0", "dev"])
def test_another_release_is_named(monkeypatch: pytest.MonkeyPatch, version: str):
    monkeypatch.setattr(vllm, "__version__", version)
    assert f"made for vLLM 0.32 and 0.33, not for {version}:" in releases.warning()


@pytest.mark.parametrize("role, times", [("SCHEDULER", 1), ("WORKER", 0)])
def test_it_is_said_once_an_engine(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    role: str,
    times: int,
):
    monkeypatch.setattr(vllm, "__version__", "0.34.0")
    monkeypatch.setattr(kvferry.vllm.connector, "setup_logging", lambda: None)  # For caplog.
    monkeypatch.setattr(logging.getLogger("kvferry"), "propagate", True)
    transfer = SimpleNamespace(kv_connector_extra_config={"mode": "neither"})
    config = SimpleNamespace(kv_transfer_config=transfer)
    with pytest.raises(ValueError, match="mode is 'neither'"):
        KVFerryConnector(config, KVConnectorRole[role], SimpleNamespace())
    assert len([it for it in caplog.messages if "not for 0.34.0" in it]) == times


def import_without(monkeypatch: pytest.MonkeyPatch, name: str) -> str:
    """What comes of importing the connector where a module is not there."""
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ImportError) as failed:
        runpy.run_path(kvferry.vllm.__file__)
    return str(failed.value)


def test_what_another_release_lacks_is_explained(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(vllm, "__version__", "0.31.2")
    error = import_without(monkeypatch, OF_VLLM)
    assert "made for vLLM 0.32 and 0.33, and 0.31.2 lacks what it needs" in error
    assert OF_VLLM in error


@pytest.mark.parametrize(
    "version, name", [("0.33.0", OF_VLLM), ("0.34.0", "kvferry.vllm.connector")]
)
def test_what_is_broken_is_not_blamed_on_the_release(
    monkeypatch: pytest.MonkeyPatch, version: str, name: str
):
    monkeypatch.setattr(vllm, "__version__", version)
    error = import_without(monkeypatch, name)
    assert name in error and "made for" not in error


def test_vllm_is_told_that_engines_cannot_sleep():
    assert not KVFerryConnector.supports_sleep_mode(SimpleNamespace())
