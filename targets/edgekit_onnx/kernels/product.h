// Products of activations, rounded to 8 bits, with weights of 4 or 8 bits in blocks that share a scale.
//
// Within a block everything is whole numbers, which any order adds exactly. A row's floats are then added one block
// after the other, with one rounding each. Every path keeps this order for any number of rows, so a row has the same
// bits alone, among many, on any number of threads and on every processor.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace edgekit {

constexpr int kWide = 32;  // outputs that are computed together
constexpr size_t kTurned = 16;      // rows whose scales are side by side
constexpr size_t kPieceRows = 256;  // rows of a piece of work: their activations stay in the second cache

// Weights in the order in which products read them: for each `kWide` outputs, for each 4 inputs, these 4 inputs of
// every output. Of 4-bit weights, two such steps share a byte: the first in its low half.
struct Weights {
  size_t outputs = 0, inputs = 0;  // as in the graph; whole blocks are stored
  int bits = 0, block = 0;
  size_t blocks = 0;  // of a row
  const uint8_t* values = nullptr;
  const void* scales = nullptr;    // `kWide` for each block
  bool halves = false;             // scales have 16 bits
  const uint8_t* zeros = nullptr;  // as many; null where all are in the middle
  const uint16_t* offsets = nullptr;  // as many, of 16 bits: added to each weight of a block; may be null
  std::vector<float> bias;
  std::vector<uint8_t> own_values, own_zeros;  // where the graph does not hold this order itself
  std::vector<float> own_scales;
  std::vector<uint16_t> own_offsets;

  size_t padded() const { return blocks * block; }
  size_t bands() const { return (outputs + kWide - 1) / kWide; }
  size_t band_bytes() const { return padded() * kWide * bits / 8; }
};

// Gives `to` the arrays of a graph in the layout of MatMulNBits, whose sizes are checked already; `zeros` and `offsets`
// may be null.
void pack(const uint8_t* values, const float* scales, const uint8_t* zeros, const uint16_t* offsets, Weights& to);

// Activations: 8-bit integers, and for each block a scale and what mends that weights are multiplied with their zero
// point: minus the sum of its integers, times the zero point where all weights have the same.
struct Rows {
  int8_t* values;
  float* scales;
  int32_t* mends;
  float* turned;          // the scales again: of 16 rows side by side, then those of their next block
  size_t inputs, blocks;  // of a row

  // From a row and a block on. After the first call `row` must be a multiple of 16 for those who read `turned`.
  Rows from(size_t row, size_t block, size_t block_inputs) const {
    const size_t place = row * blocks + block, tiled = (row / kTurned * blocks + block) * kTurned + row % kTurned;
    const size_t value = row * inputs + block * block_inputs;
    return {values + value, scales + place, mends + place, turned + tiled, inputs, blocks};
  }
};

// Some blocks of `kWide` outputs.
struct Part {
  const uint8_t* values;
  const void* scales;  // of 16 or 32 bits
  bool halves;
  const uint8_t* zeros;  // null: mends have them
  int blocks, block;
};

// One row; `factor` is of its mends.
using Quantise = void (*)(const float* from, size_t inputs, int block, const Rows& to, int32_t factor);
// Adds to `out`, or begins there, the products of `count` rows.
using Multiply = void (*)(const Part& part, const Rows& rows, size_t count, float* out, size_t stride, bool begins);
// `count` rows of `kWide` values times silu(gates): x / (1 + e^-x), by the approximation that onnxruntime has for it.
using Gate = void (*)(const float* gates, const float* values, size_t count, float* out, size_t stride);

// Adds to `kWide` outputs what is added to the weights of each block, times the sum of the block's activations;
// `factor` is of the mends.
using AddOffsets = void (*)(const uint16_t* offsets, const Rows& rows, size_t count, int32_t factor, float* out,
                            size_t stride);

// The functions for one kind of processor.
struct Path {
  const char* name;
  Quantise quantise;
  Multiply nibbles, bytes;
  AddOffsets add_offsets;
  Gate gate;
};

// The fastest path of this processor, or the named one; null if it lacks that.
const Path* path_named(const char* name);

// One piece of a call: some rows times some outputs. Pieces may run at once, in any order.
struct Product {
  const Path* path;
  const Weights *weights, *gates;  // gates: of a second product with the same rows; may be null
  const float* input;
  Rows rows;
  size_t count;
  float* output;

  int32_t factor() const;  // of the mends
  void quantise(size_t first, size_t last) const;
  void multiply(size_t band, size_t first, size_t last) const;  // at most kPieceRows

 private:
  // Of a band that is not full, what stands beyond its outputs is written too.
  void multiply(const Weights& with, size_t band, size_t first, size_t last, float* out, size_t stride) const;
};

}  // namespace edgekit
