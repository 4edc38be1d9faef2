#include "kv_cache.h"

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstring>

#include "errors.h"
#include "half.h"

namespace edgekit {
namespace {

constexpr size_t kAlignment = 64;
constexpr float kLargestInt8 = 127.0f;

}  // namespace

KvCache::KvCache(const std::vector<KvLayer>& layers, size_t capacity, Number kind)
    : layers_(layers), capacity_(capacity), kind_(kind) {
  std::vector<size_t> places;
  for (const KvLayer& layer : layers) {
    for (int each = 0; each < 2; ++each) {
      places.push_back(bytes_);
      bytes_ += static_cast<size_t>(layer.heads) * static_cast<size_t>(layer.width) * capacity * bytes_of(kind);
      bytes_ = (bytes_ + kAlignment - 1) / kAlignment * kAlignment;
    }
  }
  mapped_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped_ == MAP_FAILED)
    refuse("a cache of " + std::to_string(bytes_) + " bytes cannot be had; export a smaller context");
#ifdef MADV_NOHUGEPAGE
  madvise(mapped_, bytes_, MADV_NOHUGEPAGE);  // with huge pages, a few tokens would take as much as thousands
#endif
  for (const size_t place : places) starts_.push_back(static_cast<char*>(mapped_) + place);
}

KvCache::~KvCache() { munmap(mapped_, bytes_); }

std::vector<int64_t> KvCache::shape(size_t layer) const {
  return {1, layers_[layer].heads, static_cast<int64_t>(capacity_), layers_[layer].width};
}

int64_t KvCache::bytes(size_t tokens) const {
  int64_t numbers = 0;
  for (const KvLayer& layer : layers_) numbers += 2 * layer.heads * layer.width;
  return numbers * static_cast<int64_t>(bytes_of(kind_) * tokens);
}

void KvCache::drop(size_t start, size_t stop, size_t held, const std::vector<std::optional<Rotation>>& rotations) {
  for (size_t layer = 0; layer < layers_.size(); ++layer) {
    move_down(keys(layer), layers_[layer], start, stop, held, rotations[layer] ? &*rotations[layer] : nullptr);
    move_down(values(layer), layers_[layer], start, stop, held, nullptr);
  }
}

void KvCache::move_down(void* cache, const KvLayer& layer, size_t start, size_t stop, size_t held,
                        const Rotation* rotation) {
  const auto width = static_cast<size_t>(layer.width);
  const size_t token = width * bytes_of(kind_);
  auto* head = static_cast<char*>(cache);
  for (int64_t each = 0; each < layer.heads; ++each, head += capacity_ * token) {
    std::memmove(head + start * token, head + stop * token, (held - stop) * token);
    for (size_t place = start; rotation != nullptr && place < start + held - stop; ++place)
      rotate_back(head + place * token, width, *rotation);
  }
}

void KvCache::rotate_back(void* key, size_t width, const Rotation& rotation) {
  if (kind_ == Number::kFloat) return rotation.back(static_cast<float*>(key));
  wide_.resize(width);
  if (kind_ == Number::kHalf) {
    auto* halves = static_cast<uint16_t*>(key);
    std::transform(halves, halves + width, wide_.begin(), from_half);
    rotation.back(wide_.data());
    std::transform(wide_.begin(), wide_.end(), halves, to_half);
    return;
  }
  // Both channels of a rotated pair have the same step, so integers can be rotated as they are.
  auto* steps = static_cast<int8_t*>(key);
  std::copy(steps, steps + width, wide_.begin());
  rotation.back(wide_.data());
  std::transform(wide_.begin(), wide_.end(), steps, [](float each) {
    return static_cast<int8_t>(std::clamp(std::nearbyint(each), -kLargestInt8, kLargestInt8));
  });
}

}  // namespace edgekit
