// The steps by which a cache of 8 bits is rounded, as the export measured them.
#pragma once

#include <string>
#include <vector>

#include "plan.h"

namespace edgekit {

constexpr const char* kStepsFile = "kv-steps.safetensors";

// For each layer the steps of keys, then those of values [heads, width]. Throws std::runtime_error.
std::vector<std::vector<float>> read_steps(const std::string& file, const std::vector<KvLayer>& layers);

}  // namespace edgekit
