// BLAKE2b (RFC 7693) of one block, without a key.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace edgekit {

// The hash of at most 128 bytes as eight words, whose little-endian bytes begin with the digest of `digest_bytes`.
std::array<uint64_t, 8> blake2b(const uint8_t* message, size_t bytes, size_t digest_bytes);

}  // namespace edgekit
