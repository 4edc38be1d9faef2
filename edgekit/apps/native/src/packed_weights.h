// Weights as ONNX Runtime packs them for this processor, kept in files, so that openings map them instead of packing
// them into private memory.
#pragma once

#include <string>

#include "artifact.h"
#include "plan.h"

namespace edgekit {

// Packs an artifact's weights into `folder`, or does nothing where it has them already. Throws std::runtime_error.
void pack_weights(const Artifact& artifact, const Plan& plan, const std::string& library, int threads,
                  const std::string& folder);

// Refuses a folder without the packed weights of this artifact, for this version of ONNX Runtime and this processor.
void check_packed(const Artifact& artifact, const Plan& plan, const std::string& version, const std::string& folder);

}  // namespace edgekit
