// Keys and values of one text: memory that takes no pages before tokens are written to it.
#pragma once

#include <cstddef>
#include <optional>
#include <vector>

#include "numbers.h"
#include "plan.h"

namespace edgekit {

class KvCache {
 public:
  KvCache(const std::vector<KvLayer>& layers, size_t capacity, Number kind);  // throws std::runtime_error
  ~KvCache();
  KvCache(const KvCache&) = delete;
  KvCache& operator=(const KvCache&) = delete;

  Number kind() const { return kind_; }
  std::vector<int64_t> shape(size_t layer) const;  // of keys, and of values
  int64_t bytes(size_t tokens) const;              // that so many take
  void* keys(size_t layer) const { return starts_[2 * layer]; }
  void* values(size_t layer) const { return starts_[2 * layer + 1]; }

  // Of `held` tokens, drop those from `start` to `stop`. Later keys are rotated back, where a layer has a rotation.
  void drop(size_t start, size_t stop, size_t held, const std::vector<std::optional<Rotation>>& rotations);

 private:
  void move_down(void* cache, const KvLayer& layer, size_t start, size_t stop, size_t held, const Rotation* rotation);
  void rotate_back(void* key, size_t width, const Rotation& rotation);

  const std::vector<KvLayer> layers_;
  const size_t capacity_;
  const Number kind_;
  void* mapped_ = nullptr;
  size_t bytes_ = 0;
  std::vector<void*> starts_;
  std::vector<float> wide_;  // a key in float32
};

}  // namespace edgekit
