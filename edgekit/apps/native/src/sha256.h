// SHA-256, for files and as the fixed piece of work that shows whether a machine is disturbed.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>

namespace edgekit {

class Sha256 {
 public:
  explicit Sha256(bool may_be_fast = true);  // by the processor's own instructions, where it has them
  void update(const void* data, size_t size);
  std::string hex();  // ends it

 private:
  void (*add_)(uint32_t* state, const uint8_t* block);
  std::array<uint32_t, 8> state_{0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a,
                                 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19};
  std::array<uint8_t, 64> waiting_{};
  size_t held_ = 0;
  uint64_t size_ = 0;
};

std::string sha256_of(const std::string& bytes);
std::string sha256_of_file(const std::string& path);  // throws std::runtime_error

}  // namespace edgekit
