"""The options that vLLM is given for the connector."""

import pytest

pytest.importorskip("vllm", reason="vLLM is not installed")

from kvferry.vllm import KVFerryConnector  # noqa: E402
from kvferry.vllm.telemetry import Options  # noqa: E402


def test_options_name_the_right_keys():
    options = Options.parse(
        {"trace_path": "/tmp/trace", "lease_ms": 1234, "listen_port": 6000, "data_port": 7000}
    )
    assert options.trace_path == "/tmp/trace"
    assert options.config(0).lease_ms == 1234
    assert [options.config(rank).listen_port for rank in range(3)] == [6000, 6001, 6002]
    assert [options.config(rank).data_port for rank in range(3)] == [7000, 7001, 7002]
    assert Options.parse({}).config(2).listen_port == 0
    assert Options.parse({}).share_kv_cache
    assert not Options.parse({"share_kv_cache": False}).share_kv_cache
    for wrong in (
        {"lease": 1},
        {"lease_ms": "soon"},
        {"lease_ms": -1},
        {"trace_path": 1},
        {"share_kv_cache": "no"},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            Options.parse(wrong)
    with pytest.raises(ValueError, match="mode, namespace, share_kv_cache, store and"):
        Options.parse({"lease": 1})


def test_wrong_options_are_told_where_vllm_is_configured():
    """With CUDA graphs, before the model is loaded."""
    assert not KVFerryConnector.requires_piecewise_for_cudagraph({"lease_ms": 1234})
    with pytest.raises(ValueError, match="unknown key 'lease'"):
        KVFerryConnector.requires_piecewise_for_cudagraph({"lease": 1})
    for wrong, words in (
        ({"backend": "host", "capacity": 1}, "it knows capacity_bytes"),
        ({"backend": "redis", "prot": 1}, "redis knows no 'prot'"),
        ({"backend": "remote", "addresses": []}, "remote takes an address"),
        ({"backend": "tiered", "upper": {"backend": "host"}}, "tiered needs 'lower'"),
        ({"backend": "tiered", "upper": {"backend": "redis"}}, "needs an upper tier"),
        ({"backend": "rocksdb"}, "rocksdb needs 'path'"),
    ):
        options = {"mode": "store", "store": wrong}
        with pytest.raises(ValueError, match=words):
            KVFerryConnector.requires_piecewise_for_cudagraph(options)
    for right in ({"backend": "rocksdb", "path": "p"}, {"backend": "remote", "address": ["a"]}):
        options = {"mode": "store", "store": right}
        assert not KVFerryConnector.requires_piecewise_for_cudagraph(options)


def test_files_that_cannot_be_opened_are_told_where_vllm_is_configured(tmp_path):
    key = tmp_path / "key"
    key.write_text("00" * 32)
    trace = tmp_path / "trace"
    right = {"key_file": str(key), "trace_path": str(trace)}
    for options in (right, right | {"mode": "store"}):
        assert not KVFerryConnector.requires_piecewise_for_cudagraph(options)
    key.with_name("short").write_text("00")
    nowhere = str(tmp_path / "nowhere" / "file")
    for wrong, words in (
        ({"key_file": nowhere}, "key_file '.*nowhere/file' cannot be read: No such file"),
        ({"key_file": str(tmp_path)}, "cannot be read: it is no regular file"),
        ({"key_file": str(tmp_path / "short")}, "does not hold 64 hexadecimal digits"),
        ({"trace_path": nowhere}, "trace_path: .*No such file or directory: '.*nowhere/file'"),
        ({"trace_path": str(tmp_path)}, "trace_path: .*Is a directory"),
    ):
        with pytest.raises(ValueError, match=words):
            KVFerryConnector.requires_piecewise_for_cudagraph(right | wrong)


def test_a_wrong_store_is_told_without_its_password():
    with pytest.raises(ValueError, match="'reddis'") as refused:
        Options.parse({"mode": "store", "store": {"backend": "reddis", "password": "secret"}})
    assert "secret" not in str(refused.value)


def test_options_of_store_mode():
    assert Options.parse({}).store is None
    assert Options.parse({"mode": "store"}).store.config["backend"] == "host"
    below = {"backend": "rocksdb", "path": "p"}
    completed = Options.parse({"mode": "store", "store": below}).store
    above = {"backend": "host", "capacity_bytes": 1 << 30}
    assert completed.config == {"backend": "tiered", "upper": above, "lower": below}
    redis = Options.parse({"mode": "store", "store": {"backend": "redis", "port": 1}}).store
    assert redis.config["port"] == 1 and not redis.embedded
    for wrong, words in (
        ({"mode": "push"}, "mode is 'push'; it has to be one of pull, store"),
        ({"store": {"backend": "host"}}, "store is of no use"),
        ({"namespace": "a"}, "namespace is of no use"),
        ({"mode": "store", "namespace": 1}, "namespace is 1"),
        ({"mode": "store", "store": "host"}, "one of host, rocksdb, tiered, remote, redis"),
        ({"mode": "store", "store": {"backend": "moon"}}, "one of host"),
    ):
        with pytest.raises(ValueError, match=words):
            Options.parse(wrong)
