"""kvferry as a vLLM KV connector: docs/vllm.md says how to load it.

--kv-transfer-config '{"kv_connector": "KVFerryConnector",
                       "kv_connector_module_path": "kvferry.vllm", "kv_role": "kv_producer"}'
"""

from kvferry.vllm.connector import KVFerryConnector

__all__ = ["KVFerryConnector"]
