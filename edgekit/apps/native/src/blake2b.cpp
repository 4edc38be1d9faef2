#include "blake2b.h"

#include <stdexcept>

namespace edgekit {
namespace {

constexpr size_t kBlock = 128;
constexpr int kRounds = 12;

constexpr std::array<uint64_t, 8> kStart = {0x6a09e667f3bcc908, 0xbb67ae8584caa73b, 0x3c6ef372fe94f82b,
                                            0xa54ff53a5f1d36f1, 0x510e527fade682d1, 0x9b05688c2b3e6c1f,
                                            0x1f83d9abfb41bd6b, 0x5be0cd19137e2179};

constexpr uint8_t kOrder[10][16] = {
    {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}, {14, 10, 4, 8, 9, 15, 13, 6, 1, 12, 0, 2, 11, 7, 5, 3},
    {11, 8, 12, 0, 5, 2, 15, 13, 10, 14, 3, 6, 7, 1, 9, 4}, {7, 9, 3, 1, 13, 12, 11, 14, 2, 6, 5, 10, 4, 0, 15, 8},
    {9, 0, 5, 7, 2, 4, 10, 15, 14, 1, 11, 12, 6, 8, 3, 13}, {2, 12, 6, 10, 0, 11, 8, 3, 4, 13, 7, 5, 15, 14, 1, 9},
    {12, 5, 1, 15, 14, 13, 4, 10, 0, 7, 6, 3, 9, 2, 8, 11}, {13, 11, 7, 14, 12, 1, 3, 9, 5, 0, 15, 4, 8, 6, 2, 10},
    {6, 15, 14, 9, 11, 3, 0, 8, 12, 2, 13, 7, 1, 4, 10, 5}, {10, 2, 8, 4, 7, 6, 1, 5, 15, 11, 9, 14, 3, 12, 13, 0}};

uint64_t turned(uint64_t value, int by) { return value >> by | value << (64 - by); }

}  // namespace

std::array<uint64_t, 8> blake2b(const uint8_t* message, size_t bytes, size_t digest_bytes) {
  if (bytes > kBlock || digest_bytes < 1 || digest_bytes > 64) throw std::runtime_error("blake2b takes one block here");
  uint64_t words[16] = {};
  for (size_t place = 0; place < bytes; ++place) words[place / 8] |= uint64_t{message[place]} << (8 * (place % 8));
  std::array<uint64_t, 8> state = kStart;
  state[0] ^= 0x01010000 ^ digest_bytes;
  uint64_t v[16];
  for (size_t i = 0; i < 8; ++i) v[i] = state[i], v[i + 8] = kStart[i];
  v[12] ^= bytes;
  v[14] = ~v[14];  // this block is the last
  for (int round = 0; round < kRounds; ++round) {
    const uint8_t* order = kOrder[round % 10];
    const auto mix = [&](int a, int b, int c, int d, int pair) {
      v[a] += v[b] + words[order[2 * pair]];
      v[d] = turned(v[d] ^ v[a], 32);
      v[c] += v[d];
      v[b] = turned(v[b] ^ v[c], 24);
      v[a] += v[b] + words[order[2 * pair + 1]];
      v[d] = turned(v[d] ^ v[a], 16);
      v[c] += v[d];
      v[b] = turned(v[b] ^ v[c], 63);
    };
    for (int column = 0; column < 4; ++column) mix(column, column + 4, column + 8, column + 12, column);
    for (int diagonal = 0; diagonal < 4; ++diagonal) {
      mix(diagonal, 4 + (diagonal + 1) % 4, 8 + (diagonal + 2) % 4, 12 + (diagonal + 3) % 4, 4 + diagonal);
    }
  }
  for (size_t i = 0; i < 8; ++i) state[i] ^= v[i] ^ v[i + 8];
  return state;
}

}  // namespace edgekit
