#include "kv_cache.h"

#include <sys/mman.h>

#include "errors.h"

namespace edgekit {
namespace {

constexpr size_t kAlignment = 64;

}  // namespace

KvCache::KvCache(const std::vector<KvLayer>& layers, size_t capacity) {
  std::vector<size_t> places;
  for (const KvLayer& layer : layers) {
    for (int kind = 0; kind < 2; ++kind) {
      places.push_back(bytes_);
      bytes_ += static_cast<size_t>(layer.heads) * static_cast<size_t>(layer.width) * capacity * sizeof(float);
      bytes_ = (bytes_ + kAlignment - 1) / kAlignment * kAlignment;
    }
  }
  mapped_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (mapped_ == MAP_FAILED)
    refuse("a cache of " + std::to_string(bytes_) + " bytes cannot be had; export a smaller context");
#ifdef MADV_NOHUGEPAGE
  madvise(mapped_, bytes_, MADV_NOHUGEPAGE);  // with huge pages, a few tokens would take as much as thousands
#endif
  for (const size_t place : places) starts_.push_back(reinterpret_cast<float*>(static_cast<char*>(mapped_) + place));
}

KvCache::~KvCache() { munmap(mapped_, bytes_); }

}  // namespace edgekit
