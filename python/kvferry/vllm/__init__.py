"""kvferry as a vLLM KV connector: docs/vllm.md says how to load it.

--kv-transfer-config '{"kv_connector": "KVFerryConnector",
                       "kv_connector_module_path": "kvferry.vllm", "kv_role": "kv_producer"}'
"""

from kvferry.vllm import releases

try:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from kvferry.vllm.connector import KVFerryConnector
except ImportError as error:
    if explanation := releases.explain(error):
        raise ImportError(explanation) from error
    raise

# MultiConnector finds the class of a connector's statistics by name alone.
try:
    KVConnectorFactory.register_connector("KVFerryConnector", "kvferry.vllm", "KVFerryConnector")
except ValueError:
    pass  # The application has done it.

__all__ = ["KVFerryConnector"]
