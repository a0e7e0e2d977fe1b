"""Which releases of vLLM the connector was made for.

vLLM promises its connectors nothing from one release to the next. So an engine says at its start
when its release is another one, before whatever is different there shows in some other way.
"""

import vllm

# Run with the first, read against the others: docs/vllm.md, Releases of vLLM.
_KNOWN = ("0.32", "0.33")


def warning() -> str:
    """What to say at the start of an engine of another release; "" if it is one of these."""
    if ".".join(vllm.__version__.split(".")[:2]) in _KNOWN:
        return ""
    return (
        f"KVFerryConnector was made for vLLM {' and '.join(_KNOWN)}, not for {vllm.__version__}: "
        f"compare the answers of a pair with those of one engine before you rely on it"
    )


def explain(error: ImportError) -> str:
    """Why something of vLLM is not there to be imported; "" if its release is not to blame."""
    if not (error.name or "").startswith("vllm.") or not warning():
        return ""
    return (
        f"KVFerryConnector was made for vLLM {' and '.join(_KNOWN)}, and {vllm.__version__} lacks "
        f"what it needs ({error}): install one of these, or a release of kvferry for yours"
    )
