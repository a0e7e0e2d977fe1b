"""The Python package: its types, and the small things beside pools and endpoints."""

import importlib.resources

import kvferry
import pytest
from endpoints import small_layout


def test_objects_say_what_they_are():
    assert repr(kvferry.Config.make({})) == "Config()"
    config = kvferry.Config.make({"lanes": 2, "net_device": "lo", "checksum": True})
    assert repr(config) == "Config(net_device='lo', lanes=2, checksum=True)"
    assert repr(kvferry.KvPool.create(small_layout(), 3)).startswith("KvPool(3 pages of ")


def test_config():
    config = kvferry.Config.make({"lease_ms": 5, "checksum": True, "net_device": "eth9"})
    assert (config.lease_ms, config.checksum, config.net_device) == (5, True, "eth9")
    assert config.listen_host == "127.0.0.1"
    assert kvferry.Config.make().lease_ms == kvferry.Config.make({}).lease_ms == 60000
    for name in kvferry.Config.field_names():
        assert hasattr(config, name), name
    with pytest.raises(AttributeError):
        config.lease_ms = 6


def test_config_errors_list_the_keys():
    with pytest.raises(ValueError) as caught:
        kvferry.Config.make({"lease_msec": 5})
    for name in ["'lease_msec'", *kvferry.Config.field_names()]:
        assert name in str(caught.value)
    for options, part in [
        ({"lease_ms": "5"}, 'lease_ms is "5" but must be an integer'),
        ({"lease_ms": 0}, "lease_ms is 0"),
        ({"lease_ms": 1 << 63}, "lease_ms"),
        ({"lease_ms": 1 << 80}, "lease_ms"),
        ({"listen_host": "10.0.0.1"}, "allow_insecure_network"),
        ({"heartbeat_timeout_ms": 1000}, "heartbeat_interval_ms"),
    ]:
        with pytest.raises(ValueError, match=part.replace("(", "\\(")):
            kvferry.Config.make(options)


def test_config_from_the_environment(monkeypatch):
    monkeypatch.setenv("KVFERRY_LEASE_MS", "1234")
    monkeypatch.setenv("KVFERRY_MAX_PEERS", "9")
    config = kvferry.Config.make({"max_peers": 10})
    assert (config.lease_ms, config.max_peers) == (1234, 10)
    monkeypatch.setenv("KVFERRY_LEASE_MS", "soon")
    with pytest.raises(ValueError, match="lease_ms"):
        kvferry.Config.make()


def test_layout():
    layout = small_layout()
    assert (layout.num_layers, layout.page_size, layout.dtype) == (3, 4, "float16")
    assert layout.page_format == "NHD"
    assert layout.tensors == [("k", 2, 8), ("v", 2, 4)]
    assert [layout.item_bytes(0), layout.item_bytes(1)] == [128, 64]
    assert (layout.layer_page_bytes, layout.page_bytes) == (192, 576)
    assert layout == small_layout() and layout != small_layout(page_size=8)
    with pytest.raises(IndexError):
        layout.item_bytes(2)
    with pytest.raises(IndexError):
        layout.item_bytes(-1)
    assert kvferry.KvLayout.mha(2, 16, 4, 64, "bfloat16").tensors == [("k", 4, 64), ("v", 4, 64)]
    assert kvferry.KvLayout.fused(2, 16, 4, 64, "torch.float32").tensors == [("kv", 4, 128)]
    assert kvferry.KvLayout.mla(2, 16, 576, "float8_e4m3fn").tensors == [("latent", 1, 576)]
    for change, part in [
        ({"dtype": "bf16"}, "bfloat16"),
        ({"num_layers": 0}, "num_layers"),
        ({"tensors": []}, "tensors"),
        ({"page_format": "x" * 65}, "page_format"),
    ]:
        with pytest.raises(ValueError, match=part):
            small_layout(**change)


def test_allocator():
    allocator = kvferry.PageAllocator(8, reserved=1)
    pages = allocator.allocate(5)
    assert pages == [1, 2, 3, 4, 5] and allocator.num_free == 2
    allocator.free([2, 4])
    assert allocator.num_free == 4
    assert allocator.free_run_histogram() == [2, 1]
    with pytest.raises(kvferry.ResourceExhausted):
        allocator.allocate(5)
    with pytest.raises(ValueError, match="page 2 is already free"):
        allocator.free([1, 2])
    with pytest.raises(ValueError, match="reserved"):
        kvferry.PageAllocator(4, 4)


def test_random_ids():
    ids = {kvferry.random_id() for _ in range(1000)}
    assert len(ids) == 1000 and 0 not in ids and max(ids) > 1 << 60


def test_package_is_typed():
    files = importlib.resources.files("kvferry")
    assert files.joinpath("py.typed").is_file()
    stub = files.joinpath("_core.pyi").read_text()
    for name in kvferry.__all__:
        assert getattr(kvferry, name) is not None
        if getattr(kvferry._core, name, None) is not None:
            assert name in stub, name
