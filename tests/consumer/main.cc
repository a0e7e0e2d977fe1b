#include "connector/decode_endpoint.h"
#include "connector/prefill_endpoint.h"

int main() {
  const kvferry::Config config;
  const auto layout = kvferry::KvLayout::Mha(32, 16, 8, 128, kvferry::DType::kBFloat16);
  const auto pool = kvferry::KvPool::Create(layout, 64);
  if (!pool.ok()) return 1;
  const auto prefill = kvferry::PrefillEndpoint::Create(*pool, {config, "llama-8b"});
  const auto decode = kvferry::DecodeEndpoint::Create(*pool, {config, "llama-8b"});
  if (!prefill.ok() || !decode.ok()) return 1;
  const auto ticket = (*prefill)->Publish({.pages = {7, 8, 3}, .num_tokens = 48});
  if (!ticket.ok() || !(*prefill)->LayerReady(ticket->lease_id, 0).ok()) return 1;
  const auto fetch = (*decode)->Fetch(*ticket, 0, {{21, 22, 23}}, 0);
  if (!fetch.ok()) return 1;
  return (*fetch)->WaitLayer(0, kvferry::DeadlineInMs(5000)).ok() ? 0 : 1;
}
