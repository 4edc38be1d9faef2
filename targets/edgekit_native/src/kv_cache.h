// Keys and values of one text: memory that takes no pages before tokens are written to it.
#pragma once

#include <cstddef>
#include <vector>

#include "plan.h"

namespace edgekit {

class KvCache {
 public:
  KvCache(const std::vector<KvLayer>& layers, size_t capacity);  // throws std::runtime_error
  ~KvCache();
  KvCache(const KvCache&) = delete;
  KvCache& operator=(const KvCache&) = delete;

  float* keys(size_t layer) const { return starts_[2 * layer]; }
  float* values(size_t layer) const { return starts_[2 * layer + 1]; }

 private:
  void* mapped_ = nullptr;
  size_t bytes_ = 0;
  std::vector<float*> starts_;
};

}  // namespace edgekit
