#pragma once

// Producers and consumers of lookup buffers with test settings.

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "connector/lookup_consumer.h"
#include "connector/lookup_producer.h"
#include "tests/support/endpoints.h"

namespace kvferry {

inline LookupProducer::Options ProducerOptions(std::shared_ptr<const KvPool> pool) {
  LookupProducer::Options options;
  options.config = SmallChunks();
  options.model = kTestModel;
  options.name = "producer";
  options.max_bytes = pool->num_pages() * pool->layout().page_bytes();
  options.pool = std::move(pool);
  options.reply_lease_ms = 1000;  // To fetch in. Tests that wait for its end may choose another.
  return options;
}

inline LookupConsumer::Options ConsumerOptions(std::shared_ptr<const KvPool> pool,
                                               std::vector<std::string> producers) {
  LookupConsumer::Options options;
  options.config = SmallChunks();
  options.model = kTestModel;
  options.name = "consumer";
  options.pool = std::move(pool);
  options.producers = std::move(producers);
  return options;
}

// A lookup of these tokens (none: any entry) into these pages.
inline LookupConsumer::Request Lookup(std::optional<std::vector<int32_t>> tokens,
                                      std::vector<int64_t> pages, int64_t timeout_ms = 20000) {
  LookupConsumer::Request request;
  request.tokens = std::move(tokens);
  request.pages = std::move(pages);
  request.deadline = DeadlineInMs(timeout_ms);
  return request;
}

}  // namespace kvferry
