"""Tells SGLang of --disaggregation-transfer-backend kvferry.

SGLang loads entry points of the group sglang.srt.plugins in every process of its server. It has no
list of backends to add to: an enumeration and a function with a branch for each (0.5.23). And it
does not hand them the pools whose memory it tells them of.
"""

from sglang.srt.arg_groups.choices import add_disagg_transfer_backend_choices
from sglang.srt.disaggregation import utils
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

NAME = "kvferry"


def register() -> None:
    """Of SGLang's plugins; more than once does no harm."""
    if NAME in utils.TransferBackend._value2member_map_:
        return
    add_disagg_transfer_backend_choices([NAME])
    backend = _add_member(utils.TransferBackend)

    def classes(known, transfer_backend, class_type):
        if transfer_backend is not backend or class_type is utils.KVClassType.KVARGS:
            return known(transfer_backend, class_type)
        from kvferry.sglang import disaggregation  # Not before it is asked for.

        return {
            utils.KVClassType.MANAGER: disaggregation.KVManager,
            utils.KVClassType.SENDER: disaggregation.KVSender,
            utils.KVClassType.RECEIVER: disaggregation.KVReceiver,
            utils.KVClassType.BOOTSTRAP_SERVER: disaggregation.KVBootstrapServer,
        }[class_type]

    HookRegistry.register(f"{utils.__name__}.get_kv_class", classes, HookType.AROUND)
    HookRegistry.register(f"{utils.__name__}.setup_state_kv_args", _keep_pools, HookType.AFTER)


def _keep_pools(
    _,
    kv_args,
    token_to_kv_pool,
    draft_token_to_kv_pool=None,
    total_kv_layers=None,
    req_to_token_pool=None,
):
    """For pd_pool: what their values are, SGLang tells a transfer backend by its options alone."""
    kv_args.kvferry_pools = token_to_kv_pool, draft_token_to_kv_pool, req_to_token_pool


def _add_member(enumeration):
    """What `class TransferBackend(Enum): ...; KVFERRY = "kvferry"` would have made."""
    member = object.__new__(enumeration)
    member._name_, member._value_ = NAME.upper(), NAME
    member.__objclass__ = enumeration
    member._sort_order_ = len(enumeration)
    enumeration._member_map_[member._name_] = member
    enumeration._member_names_.append(member._name_)
    enumeration._value2member_map_[NAME] = member
    type.__setattr__(enumeration, member._name_, member)
    return member
