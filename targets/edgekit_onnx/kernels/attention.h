// Causal attention of the rows of a call over the keys and values of their sequence.
//
// Keys are taken in blocks at fixed positions. A block's scores, its largest score, its sum and its values are computed
// from nothing, each sum in the order of its keys, and blocks are joined in their order. Keys that a row does not see
// have a weight of zero, which changes no sum. So a row has the same bits alone, among others, in any chunk, on any
// number of threads and on every processor.
#pragma once

#include <cstddef>
#include <cstdint>

namespace edgekit {

constexpr size_t kBlockKeys = 128;  // a power of two
constexpr size_t kTileQueries = 96;  // queries that share the keys that are read: their scores stay in the second cache
constexpr size_t kColumns = 32;      // the width of sums of values is a multiple of it

inline size_t padded_size(size_t size) { return (size + kColumns - 1) / kColumns * kColumns; }

// How a cache holds its numbers.
enum class Stored { kFloats, kHalves, kBytes };
constexpr size_t kStoredBytes[] = {4, 2, 1};

// The keys and values [tokens, size] of one head of a sequence, and how its queries see them.
struct Head {
  Stored stored;
  const void *keys, *values;
  const float *key_steps, *value_steps;  // of bytes, for each channel
  size_t size;                           // a multiple of 4
  size_t window;                         // most keys that a query sees
  float cap;                             // of scores; 0: none
};

// Queries of one head of keys: rotated and scaled, those of a token side by side.
struct Queries {
  const float* values;  // [count, size]
  size_t count, group;  // group: of a token
  size_t first;         // their first one is this many queries after the beginning of the text

  size_t position(size_t row) const { return (first + row) / group; }
  // The keys that a query sees: from `first_key` on, before `end_key`.
  size_t end_key(size_t row) const { return position(row) + 1; }
  size_t first_key(size_t row, size_t window) const { return end_key(row) < window ? 0 : end_key(row) - window; }
};

// For each query the largest score, the sum of weights relative to it, and the weighted sum of values.
struct Sums {
  float *most, *total, *values;  // values: [count, padded_size]

  static size_t floats(size_t count, size_t size) { return count * (padded_size(size) + 2); }
  static Sums at(float* memory, size_t count) { return {memory, memory + count, memory + 2 * count}; }
};

// Floats that `block` works in.
inline size_t work_floats(size_t count, size_t size) {
  return size * kColumns + count * kBlockKeys + kBlockKeys * padded_size(size);
}

// The functions for one kind of processor.
struct AttentionPath {
  // Computes the sums of one block of keys for each of the queries.
  void (*block)(const Head& head, const Queries& queries, size_t block, float* work, const Sums& to);
  // Sums of no keys, sums joined with those of the next block, and the result: [count] rows, `stride` apart. `sinks`: a
  // score for each query of a token, which takes its share and adds no value; may be null.
  void (*begin)(const Sums& sums, size_t count, size_t size);
  void (*join)(const Sums& sums, const Sums& next, size_t count, size_t size);
  void (*finish)(const Sums& sums, const float* sinks, const Queries& queries, size_t size, float* out, size_t stride);
  // Rotates the pairs of a head's channels by a token's angles; channels beyond the tables stay. `factor` scales all.
  void (*rotate)(const float* from, size_t size, const float* cosines, const float* sines, size_t pairs,
                 bool interleaved, float factor, float* to);
  // Stores numbers as the cache holds them.
  void (*store)(Stored stored, const float* from, const float* steps, size_t count, void* to);
};

// The functions that belong to a path of products.
const AttentionPath& attention_path(const char* product_path);

}  // namespace edgekit
