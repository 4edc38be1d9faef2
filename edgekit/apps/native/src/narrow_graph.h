// Graphs with a cache of 16 or 8 bits, derived from exported ones as the onnx target of Python derives them.
#pragma once

#include <string>

namespace edgekit {

// A cache of 32 bits: saved with a narrower one, a graph would have casts of the whole cache in every step.
std::string with_float_cache(const std::string& graph);

// Attention in float16, between casts. Throws std::runtime_error.
std::string with_half_cache(const std::string& graph);

// A cache of 8 bits, with an input `step.LAYER.key` and `step.LAYER.value` for the steps of each layer.
std::string with_int8_cache(const std::string& graph);

}  // namespace edgekit
